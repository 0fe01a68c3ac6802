"""What the paper proves about diag(G): its expectation at initialisation, and when rescaling will
do much at small learning rates.

A layered network of depth L has widths n_0, ..., n_L; layer k = 0, ..., L-1 maps n_k numbers to
n_{k+1} by a matrix and a bias, all of whose entries have E[θ²] = σ_k². The last layer has no bias.
Symbols of the paper (``sec:regimes_proofs``):

    n_k    widths                              σ_k²   variances, E[θ²] of the parameters of layer k
    L      depth, len(widths) - 1              a_k    gains, n_k σ_k²; a where they are all equal

>>> expected_diag_g((3, 4, 2), (0.5, 0.25))
ExpectedDiagonal(edges=(0.5, 2.0), biases=(0.5,))
>>> import torch
>>> narrow = torch.nn.Sequential(
...     torch.nn.Linear(64, 4), torch.nn.ReLU(), torch.nn.Linear(4, 64)
... )
>>> print(regime(narrow, torch.randn(8, 64)))
Rescaling by paths will do much for Sequential at small fixed learning rates, because widths vary...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from .capture.models import Inputs
from .condition import prepare
from .criteria.problem import Problem
from .lifting.lifting import diag_g
from .lifting.sample import Prepared
from .solvers import Exact
from .symmetry.symmetry import Normalization, Symmetry
from .widths import weight_layers
from .wrappers import unwrap

Verdict = Literal["much", "some", "little", "nothing"]

# Bounds on `Regime.movement`, from networks whose training with and without rescaling was measured.
# MNIST autoencoders of compression 1 (no gain): 0.01; 2 (8 % lower loss): 0.24; 4 (21 %): 0.48; 7
# (26 %): 0.67. MLPs with BatchNorm on CIFAR-10, 3 layers: "absorb" (2.4 times fewer epochs) 1.7,
# "full" (1.2 times) 0.45, "gain" (none) 0.1. The regimes of the paper agree: constant widths 32 to
# 500 have 0.02 to 0.12 at a = 1 and 0.8 at a = 0.05.
#
# These gains are at small fixed rates. At tuned rates no bound on the movement tells what is gained
# (`pathcond reproduce tuned`, the default): CIFAR-NV, 0.2, gains 10 %; deep autoencoders, 0.8, 17
# to 30 %; a funnel, 0.9, nothing; a vision transformer, 0.02, less than 1 %.
MUCH = 0.35
SOME = 0.15
LITTLE = 0.005
AT_TUNED_RATES = (
    "At tuned rates this tells nothing about this model. Two kinds of networks were measured "
    "there: condition_ gains 17 to 29 % on MNIST autoencoders, whose widths narrow and widen "
    "again, and less than 1 % on MLPs that only narrow or have equal widths (docs/choosing.md)."
)
SMALL_GAIN = 0.2  # torch's own initialisation of Linear has a = 1/3 and behaves like a = 1
UNEVEN_WIDTHS = 2.0
MOSTLY = 0.5  # share of parameters with g = 0 from which the sentence begins with it


@dataclass(frozen=True)
class ExpectedDiagonal:
    """E[g] of the two kinds of parameters, layer by layer.

    Attributes:
        edges: (L,) of any weight in layer k = 0, ..., L-1.
        biases: (L-1,) of any bias in layer k = 0, ..., L-2; empty for a network without biases.
    """

    edges: tuple[float, ...]
    biases: tuple[float, ...]


def expected_diag_g(
    widths: Sequence[int], variances: Sequence[float], bias: bool = True
) -> ExpectedDiagonal:
    """E[diag G] of a layered network with independent parameters (eq. expected-general).

    Of an edge in layer k it is the expected energy of the unit it reads times that of the paths
    from the unit it feeds,

        E[g] = (Π_{m<k} n_m σ_m² + Σ_{j<k} σ_j² Π_{j<m<k} n_m σ_m²) · Π_{m>k} σ_m² n_{m+1},

    and of a bias the second factor alone: eq. expected-general, in one pass over the layers in each
    direction. Biases that start at zero leave the edges as with ``bias=False`` and have g as with
    ``bias=True``.

    Args:
        widths: n_0, ..., n_L.
        variances: σ_0², ..., σ_{L-1}²; those of layer k's biases too.
        bias: Whether the layers before the last have biases; without them only the first product
            stays.

    >>> expected_diag_g(
    ...     (4, 4, 4, 4), (0.25, 0.25, 0.25)
    ... ).edges  # a = 1: 1 + k/n (eq. expected-a1)
    (1.0, 1.25, 1.5)
    """
    _check(widths, "variances", variances)
    into = [1.0]  # energy of one unit of layer k, over all paths that end there
    for n, variance in zip(widths[:-1], variances[:-1], strict=False):
        into.append((n * into[-1] + bias) * variance)
    onward = [1.0]  # energy of the paths from one unit of layer k+1 to the outputs
    for n, variance in zip(widths[:1:-1], variances[:0:-1], strict=True):
        onward.append(n * variance * onward[-1])
    onward.reverse()
    return ExpectedDiagonal(
        edges=tuple(before * after for before, after in zip(into, onward, strict=True)),
        biases=tuple(onward[:-1]) if bias else (),
    )


def expected_from_gains(
    widths: Sequence[int], gains: float | Sequence[float], bias: bool = True
) -> ExpectedDiagonal:
    """The same from the gains a_k = n_k σ_k² (eq. expected-ak); one number for all layers is a
    standard initialisation.

    With r_k = n_L / n_{k+1} and all products over layers before L,

        bias in layer k:   r_k Π_{m>k} a_m
        edge in layer k:   r_k (Π_{m≠k} a_m + Σ_{j<k} 1/n_j Π_{m≥j, m≠k} a_m).

    For equal gains a this is prop. expected-standard-init, r_k (a^(L-1) + Σ_{j<k} a^(L-1-j) / n_j),
    k = 0, ..., L-1; for equal widths n = n_0 = ... = n_L too, eq. expected-constant-width, a^(L-1)
    + (a^(L-1) + ... + a^(L-k)) / n, which is 1 + k/n at a = 1 (eq. expected-a1) and a geometric
    series otherwise (eq. expected-aneq1), all for k = 0, ..., L-1.

    Args:
        widths: n_0, ..., n_L.
        gains: a for every layer, or a_0, ..., a_{L-1}.
        bias: Whether the layers before the last have biases.

    >>> expected_from_gains((4, 4, 4, 4), 0.5)
    ExpectedDiagonal(edges=(0.25, 0.3125, 0.4375), biases=(0.25, 0.5))
    >>> expected_diag_g((4, 4, 4, 4), (0.125, 0.125, 0.125))
    ExpectedDiagonal(edges=(0.25, 0.3125, 0.4375), biases=(0.25, 0.5))
    """
    depth = len(widths) - 1
    a = [float(gains)] * depth if isinstance(gains, int | float) else list(gains)
    _check(widths, "gains", a)
    ratio = [widths[-1] / n for n in widths[1:]]

    # Differs from the paper: eq. expected-ak, second case. (1) Its second product skips only m = k,
    # but the factor σ_{k+1}² in front already stands for a_{k+1}: it must skip m = k+1 too, as the
    # first product does. (2) At k = L-1 its factor n_L σ_L² names a layer that does not exist; it
    # is 1. Writing n_L σ_{k+1}² as r_k a_{k+1} settles both.
    def edge(k: int) -> float:
        from_biases = (
            sum(math.prod(a[j:k] + a[k + 1 :]) / widths[j] for j in range(k)) if bias else 0.0
        )
        return ratio[k] * (math.prod(a[:k] + a[k + 1 :]) + from_biases)

    return ExpectedDiagonal(
        edges=tuple(edge(k) for k in range(depth)),
        biases=tuple(ratio[k] * math.prod(a[k + 1 :]) for k in range(depth - 1)) if bias else (),
    )


def expected_asymptote(
    widths: Sequence[int], a: float, limit: Literal["large", "small"], bias: bool = True
) -> ExpectedDiagonal:
    """Leading term of ``expected_from_gains(widths, a)`` as a → ∞ or a → 0
    (``sec:nonconstantwidth``).

    With r_k = n_L / n_{k+1}, of an edge in layer k:

        k              a → ∞                            a → 0
        0              r_0 a^(L-1)                      r_0 a^(L-1)
        1              r_1 a^(L-1) (1 + 1/n_0)          r_1 a^(L-1) (1 + 1/n_0)
        2, ..., L-1    r_k a^(L-1) (1 + 1/n_0)          r_k a^(L-k) / n_{k-1}

    For equal widths these are eq. expected-large-a and eq. expected-small-a. A bias (one monomial)
    and a network without biases (r_k a^(L-1)) are their own leading terms. Small a spreads the
    layers over powers of a: the favourable regime.

    Args:
        widths: n_0, ..., n_L.
        a: The gain n_k σ_k² of every layer, positive.
        limit: Which end: "large" or "small".
        bias: Whether the layers before the last have biases.

    >>> expected_asymptote((4, 4, 4, 4), 0.5, "small").edges
    (0.25, 0.3125, 0.125)
    """
    depth = len(widths) - 1
    _check(widths, "gains", [a] * depth)
    if limit not in ("large", "small"):
        raise ValueError(f'limit={limit!r}; choose "large" or "small".')
    ratio = [widths[-1] / n for n in widths[1:]]

    # Differs from the paper: for unequal widths it gives r_k a^(L-1) as a → ∞ and r_k a^(L-k) /
    # n_{k-1} as a → 0 for every k. The first leaves out the paths from the biases of layer 0, which
    # grow as fast: the factor 1 + 1/n_0 of its own eq. expected-large-a. The second holds from k =
    # 2 on; so does the main text's a^(L-k) / n.
    def edge(k: int) -> float:
        if bias and limit == "small" and k >= 2:
            return ratio[k] * a ** (depth - k) / widths[k - 1]
        return ratio[k] * a ** (depth - 1) * (1 + 1 / widths[0] if bias and k >= 1 else 1)

    return ExpectedDiagonal(
        edges=tuple(edge(k) for k in range(depth)),
        biases=tuple(ratio[k] * a ** (depth - 1 - k) for k in range(depth - 1)) if bias else (),
    )


def _check(widths: Sequence[int], name: str, values: Sequence[float]) -> None:
    problems = []
    if len(widths) < 2:
        problems.append(
            f"widths has {len(widths)} entries; a network has at least an input and an output width"
        )
    if bad := [n for n in widths if not (isinstance(n, int) and n >= 1)]:
        problems.append(f"widths holds {bad}; widths are positive whole numbers")
    if len(widths) >= 2 and len(values) != len(widths) - 1:
        problems.append(
            f"{name} has {len(values)} entries; {len(widths)} widths make {len(widths) - 1} layers"
        )
    if wrong := [x for x in values if not (math.isfinite(x) and x >= 0)]:
        problems.append(
            f"{name} holds {wrong}; they are means of squares, so finite and not negative"
        )
    if problems:
        raise ValueError("; ".join(problems) + ".")


@dataclass(frozen=True, kw_only=True)
class Regime:
    """Whether rescaling by the path kernel will do much for a model at a small fixed learning rate,
    and the numbers behind it; ``str()`` is the sentence, and what others gained at tuned rates.

    Attributes:
        verdict: "much", "some", "little" or "nothing", by ``movement`` alone.
        movement: Root mean square, over the trainable parameters with g > 0, of log |θ'/θ| at the
            minimum of the criterion F.
        decrease: (F(0) - min F) / p, in nats per parameter.
        num_units: Number of free log-scales.
        spread: Decades between the 5th and the 95th percentile of g > 0.
        zero_share: Share of the trainable parameters that have g = 0 and so no part in the
            criterion.
        narrowest, widest: Least and largest width of inputs, hidden layers and outputs, from
            matrices and kernels.
        smallest_gain, largest_gain: Over matrices and kernels, of the initialisation scale a =
            fan-in · mean(θ²).
        model_name: Class of the model.
    """

    verdict: Verdict
    movement: float
    decrease: float
    num_units: int
    spread: float
    zero_share: float
    narrowest: int
    widest: int
    smallest_gain: float
    largest_gain: float
    model_name: str

    def __str__(self) -> str:
        much = "something" if self.verdict == "some" else self.verdict
        head = f"Rescaling by paths will do {much} for {self.model_name}"
        if not self.num_units:
            return f"{head}: none of its units can be rescaled."
        if self.zero_share == 1:
            return f"{head}: g is zero for all of its parameters."
        zeros = (
            f"; g is zero for {self.zero_share:.0%} of its parameters"
            if self.zero_share >= 0.005
            else ""
        )
        if self.verdict == "nothing":
            return f"{head}: its {self.num_units:,} units are at their best scale already{zeros}."
        uneven = self.widest >= UNEVEN_WIDTHS * self.narrowest
        small = self.smallest_gain < SMALL_GAIN
        widths = (
            f"widths {'vary' if uneven else 'hardly vary'} "
            f"({_range(f'{self.narrowest:,}', f'{self.widest:,}')})"
        )
        gains = _range(f"{self.smallest_gain:.2g}", f"{self.largest_gain:.2g}")
        scale = f"the weights' scale a is {'small' if small else 'not small'} ({gains})"
        expected = (uneven or small) == (self.verdict != "little")
        why = f"{'because' if expected else 'although'} {_reasons(widths, scale, uneven, small)}"
        if self.zero_share >= MOSTLY:
            head = (
                f"Rescaling by paths will do {much} for {1 - self.zero_share:.1%} of the "
                f"parameters of {self.model_name} (the others have g = 0)"
            )
            zeros = ""
        return (
            f"{head} at small fixed learning rates, {why}: diag G spreads over {self.spread:.1f} "
            "decades and the optimum moves a weight by a factor of "
            f"about {math.exp(self.movement):.3g}{zeros}. {AT_TUNED_RATES}"
        )


def regime(
    model: nn.Module,
    example_inputs: Inputs | Prepared,
    *,
    normalization: Normalization = "batch",
    approximate: bool = False,
) -> Regime:
    """Tell whether rescaling by the path kernel will do much for a model, and why
    (``sec:regimes``); nothing of the model changes.

    This holds at small fixed learning rates. What the default gains at a tuned one does not follow
    from how far weights move; ``compare_rates`` measures it, and docs/choosing.md has what was
    found.

    The verdict looks at no architecture but at the minimum of F itself (eq. optim_with_bz): how far
    the weights will move. It is zero where rescaling does nothing, as for constant g (prop.
    constant-diagonal). The spread of g alone would mislead: a few output biases, which nothing can
    rescale, spread it by decades.

    Args:
        model: Any module.
        example_inputs: One batch: a Tensor, a tuple of positional inputs or a dict of keyword
            inputs; or what ``prepare`` made, whose settings then hold.
        normalization: As in ``find_symmetry``.
        approximate: As in ``find_symmetry``.
    """
    model = unwrap(model)
    prepared = (
        example_inputs
        if isinstance(example_inputs, Prepared)
        else prepare(model, example_inputs, normalization=normalization, approximate=approximate)
    )
    symmetry = prepared.symmetry
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    g = diag_g(model, prepared.sample, approximate=approximate)
    g = {
        name: values.detach().to("cpu", torch.float64)
        for name, values in g.items()
        if name in trainable
    }
    total, positive, spread = _spread(g)
    movement, decrease = _minimise(symmetry, g) if symmetry.num_units and positive else (0.0, 0.0)
    layers = list(weight_layers(model))
    widths = [n for inputs, outputs, _ in layers for n in (inputs, outputs)]
    gains = [
        weight.detach().double().square().sum().item() / outputs for _, outputs, weight in layers
    ]
    return Regime(
        verdict="much"
        if movement >= MUCH
        else "some"
        if movement >= SOME
        else "little"
        if movement >= LITTLE
        else "nothing",
        movement=movement,
        decrease=decrease,
        num_units=symmetry.num_units,
        spread=spread,
        zero_share=1 - positive / total if total else 0.0,
        narrowest=min(widths, default=0),
        widest=max(widths, default=0),
        smallest_gain=min(gains, default=0.0),
        largest_gain=max(gains, default=0.0),
        model_name=symmetry.model_name,
    )


def _minimise(symmetry: Symmetry, g: dict[str, Tensor]) -> tuple[float, float]:
    """Root mean square of log |θ'/θ| at the minimum of F, and (F(0) - min F) / p."""
    problem = Problem.of(symmetry, g)
    solution = Exact(tolerance=1e-6).solve(problem)
    t = problem.class_matrix @ solution.log_scales
    squares = 0.0
    for name, scaling in symmetry.scalings.items():
        if name in g:
            moves = t[scaling.plus.long()] - t[scaling.minus.long()]
            squares += float(((g[name] > 0) * moves.square()).sum())
    p = problem.weight
    return math.sqrt(squares / p), (solution.objective_before - solution.objective_after) / p


def _spread(g: dict[str, Tensor]) -> tuple[int, int, float]:
    """Number of parameters, number of those with g > 0, and decades between their 5th and 95th
    percentile.
    """
    positive = torch.cat(
        [torch.empty(0, dtype=torch.float64), *(values[values > 0] for values in g.values())]
    )
    total = sum(values.numel() for values in g.values())
    count = positive.numel()
    if not count:
        return total, 0, 0.0
    # percentiles of a million say as much; an odd step follows no column
    sample = positive[:: count // 1_000_000 | 1]
    low, high = (sample.kthvalue(1 + round(q * (len(sample) - 1))).values for q in (0.05, 0.95))
    return total, count, (high / low).log10().item()


def _range(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _reasons(widths: str, scale: str, uneven: bool, small: bool) -> str:
    """The favourable regimes that hold, or that neither does."""
    return " and ".join([widths] * (uneven or not small) + [scale] * (small or not uneven))
