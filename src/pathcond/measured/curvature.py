"""``Curvature``: the sharpest direction of every parameter tensor, measured on the batch.

    H = Jᵀ A J           Gauss-Newton matrix of the batch; J = ∂outputs/∂θ, A the Hessian of the
                         loss, or 1 without a loss
    λ_b = λ_max(H_bb)    of the block of one parameter tensor b, by a few steps of Lanczos
    w_b = tr H_bb / λ_b  its stable rank: how many directions are about as sharp as the sharpest

λ_max(H) ≤ Σ_b λ_b ≤ tr H. The largest stable learning rate is set by λ_max(H), and the sum over
blocks is a closer bound of it than the trace, which the path kernel stands for. Over scales that
are common to whole tensors the criterion is

    W · log Σ_b λ_b exp(−2 s_b) + 2 Σ_b w_b s_b,     W = Σ_b w_b

In units, λ_b is shared among the p_b entries of b as diag(G) is, and w_b evenly: layers follow the
curvature, and units within a layer the paths.

    E_i = g_i · λ_b / Σ_{j ∈ b} g_j,     w_i = w_b / p_b

Under a rescaling g_i becomes g_i exp(−2 s_i), but λ_b / Σ_b g and w_b are the same only if s is the
same for all of b. So these two numbers per tensor are measured at one rescaling of the model, the
point of balance (``balance_point``), wherever the model stands:

    E_i = g_i · r_b,     r_b = λ_b / Σ_{j ∈ b} g_j at balance

All rescalings of a model have the same r and w, so E becomes E exp(−2s) exactly and conditioning
twice does nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from ..capture.isolation import attributes_kept, isolated, replaced
from ..capture.models import fresh_call, returned_leaves
from ..capture.outputs import count_samples, first_samples
from ..criteria.criterion import Criterion, require_model
from ..distributed.sharding import is_sharded
from ..errors import EnergyRangeError, UnsupportedModelError
from ..interrupts import let_interrupts_through, uninterrupted
from ..solvers.balance import balance_point
from ..symmetry.symmetry import Symmetry
from ..text import count_of
from ..wrappers import unwrap
from .differentiable import differentiable

SAMPLES = 64  # of the batch, where no loss has labels for all of them
DIRECTIONS = 8  # for the trace; their mean is off by some percent
ROUNDING = 1e-7  # of the largest eigenvalue: a remainder that is smaller ends the Lanczos steps
# Times the precision of the computation, squared: a share of the largest λ_b below which it is zero
# but for rounding, as for the biases in front of a BatchNorm.
NOTHING = 1e3


@dataclass(frozen=True, kw_only=True)
class Curvature(Criterion):
    """Share out the sharpness of the loss, or of the outputs, among the layers; see the head of
    this module for the formula.

    BatchNorms use the statistics of the batch, dropout is off, and running statistics stay as they
    are.

    Attributes:
        loss: What is trained, as a function of the model's output: ``lambda out: cross_entropy(out,
            labels)``. Without one the outputs themselves are looked at, which needs no labels.
        samples: Most samples of the batch to measure on, the first ones. Default: 64, or with a
            loss, whose labels belong to the whole batch, all of them.
        steps: Of Lanczos per parameter tensor; each costs about three backward passes.
        weight: What share of the sharpness a tensor is to have: its stable "rank", which did best
            where it was measured (docs/choosing.md), or √p_b, by its "size".
    """

    loss: Callable[[Any], Tensor] | None = None
    samples: int | None = None
    steps: int = 6
    weight: Literal["rank", "size"] = "rank"

    def __post_init__(self) -> None:
        if self.loss is not None and not callable(self.loss):
            raise TypeError(f"loss must be a function of the model's output, not {self.loss!r}")
        if (self.samples is not None and self.samples < 1) or self.steps < 1:
            raise ValueError(
                f"Curvature needs samples >= 1 and steps >= 1, not samples={self.samples} "
                f"and steps={self.steps}"
            )
        if self.weight not in ("rank", "size"):
            raise ValueError(f'weight must be "rank" or "size", not {self.weight!r}')

    @property
    def needs_whole_batch(self) -> bool:
        return self.loss is not None

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Tensor], model: nn.Module | None
    ) -> Mapping[str, Tensor]:
        model = unwrap(require_model(model, self))
        if any(is_sharded(parameter) for parameter in model.parameters()):
            raise UnsupportedModelError(
                "Curvature cannot be measured on sharded parameters: condition the model before "
                "fully_shard, or choose PathKernel()"
                " or BalancedNorms()"
            )
        factors = symmetry.factors(balance_point(symmetry, model)[0])
        sums = {
            name: float((values / factors[name].to(values.device) ** 2).sum())
            for name, values in g.items()
        }
        counting = [name for name, total in sums.items() if total > 0]
        sharpest = self.sharpest(symmetry, model, counting, factors)
        return {
            name: values * (sharpest[name] / sums[name]) if name in sharpest else 0 * values
            for name, values in g.items()
        }

    def weights(
        self, symmetry: Symmetry, energies: Mapping[str, Tensor], model: nn.Module | None
    ) -> dict[str, float]:
        """rank_b / p_b, or 1 / √p_b."""
        sizes = {name: max(int((values > 0).sum()), 1) for name, values in energies.items()}
        if self.weight == "size":
            return {name: size**-0.5 for name, size in sizes.items()}
        model = unwrap(require_model(model, self))
        factors = symmetry.factors(balance_point(symmetry, model)[0])
        sharpest = {
            name: float((values * factors[name].to(values.device) ** -2).sum())
            for name, values in energies.items()
        }
        counting = [name for name, value in sharpest.items() if value > 0]
        traces = self.traces(symmetry, model, counting, factors)
        # no block is flatter than its sharpest direction, whatever the directions that were drawn
        return {
            name: max(traces[name] / sharpest[name], 1.0) / size if name in traces else 1.0
            for name, size in sizes.items()
        }

    def sharpest(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """λ_b of some parameters, by name, of the model with every tensor multiplied by its
        factor.
        """
        if not names:
            return {}
        found = {}
        with self._measuring(symmetry, model, names, factors) as (outputs, blocks, again):
            starts = outputs.pull(list(blocks.values()), outputs.random())
            for name, start in zip(names, starts, strict=True):
                let_interrupts_through()
                found[name] = self._largest(
                    outputs, name, blocks[name], start, partial(again, name)
                )
        least = max(
            (NOTHING * torch.finfo(block.dtype).eps) ** 2 for block in blocks.values()
        ) * max(found.values())
        return {name: value if value > least else 0.0 for name, value in found.items()}

    def traces(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> dict[str, float]:
        """tr H_bb of some parameters, likewise, from random directions u in the space of outputs:
        the mean of (Jᵀu)·(JᵀAu) is the trace.
        """
        if not names:
            return {}
        found = dict.fromkeys(names, 0.0)
        with self._measuring(symmetry, model, names, factors) as (outputs, blocks, _):
            for seed in range(DIRECTIONS):
                let_interrupts_through()
                u = outputs.random(seed)
                pulled = outputs.pull(list(blocks.values()), u)
                curved = pulled
                if self.loss is not None:
                    curved = outputs.pull(list(blocks.values()), outputs.apply_curvature(u))
                for name, a, b in zip(names, pulled, curved, strict=True):
                    found[name] += _dot(a, b) / DIRECTIONS
        return found

    @contextmanager
    def _measuring(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> Iterator[tuple[_Outputs, dict[str, Tensor], Callable[[str, Tensor], Any]]]:
        """Call the model with every tensor multiplied by its factor: the outputs, the tensors of
        these names, and what calls it again with another value of one of them. Ctrl-C waits
        until the body lets it through: torch puts a mode like ours aside and back while it calls
        it, and would lose it in between.
        """
        count = self.samples or (SAMPLES if self.loss is None else None)
        inputs = (
            symmetry.example_inputs
            if count is None
            else first_samples(model, symmetry.example_inputs, count)
        )
        args, kwargs = tree_map(_compute_in_float, fresh_call(model, inputs))
        values = _scale(symmetry, model, factors)
        blocks = {name: values[name].requires_grad_() for name in names}

        def again(name: str, value: Tensor) -> Any:
            with replaced(model, {name: value}):
                return model(*args, **kwargs)

        with (
            uninterrupted(),
            isolated(model, training=False),
            attributes_kept(model),
            replaced(model, values),
            differentiable(),
        ):
            outputs = model(*args, **kwargs)
            yield _Outputs(outputs, self.loss, count_samples((args, kwargs))), blocks, again

    def _largest(
        self,
        outputs: _Outputs,
        name: str,
        block: Tensor,
        start: Tensor,
        again: Callable[[Tensor], Any],
    ) -> float:
        try:
            try:
                value = _lanczos(
                    outputs.product(block, outputs.make_push(block)), start, self.steps
                )
            except RuntimeError:  # some operation has no second derivative
                value = _lanczos(
                    outputs.product(block, lambda v: _push(again, block, v)), start, self.steps
                )
        except RuntimeError as error:
            raise UnsupportedModelError(
                f"The curvature of {name} cannot be measured: "
                f"{str(error).splitlines()[0].rstrip('.')}. Leave criterion out for the default, "
                "or choose BalancedNorms() or PathKernel()."
            ) from error
        if not math.isfinite(value):
            raise EnergyRangeError(
                f"The curvature of {name} is {value} on the example batch: outputs, or derivatives "
                "of the loss, are not finite, or so large that their squares overflow "
                f"{block.dtype} (the largest output is {outputs.largest():.2g})."
            )
        return max(value, 0.0)


class _Outputs:
    """The outputs of one call on some samples, and products with J and A."""

    def __init__(self, outputs: Any, loss: Callable[[Any], Tensor] | None, samples: int) -> None:
        self.tensors = [
            leaf
            for leaf in returned_leaves(outputs, caches=False)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        self.copies: list[Tensor] = []
        self.slopes: list[Tensor] = []
        if loss is not None:
            self._take(outputs, loss, samples)

    def _take(self, outputs: Any, loss: Callable[[Any], Tensor], samples: int) -> None:
        """Follow the loss from copies of the outputs: its own derivatives, and none of the
        model's.
        """
        leaves, spec = tree_flatten(outputs)
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.tensors = [leaves[i] for i in at]
        self.copies = [tensor.detach().clone().requires_grad_() for tensor in self.tensors]
        for i, copy in zip(at, self.copies, strict=True):
            leaves[i] = copy
        shapes = ", ".join(str(tuple(tensor.shape)) for tensor in self.tensors)
        try:
            value = loss(tree_unflatten(leaves, spec))
        except Exception as error:
            raise ValueError(
                "The loss of Curvature fails on the model's output for "
                f"{count_of(samples, 'sample')} (shapes {shapes}): {str(error).rstrip('.')}. "
                "samples= of Curvature bounds their number, and so does pathcond.prepare unless it "
                "is given the criterion."
            ) from error
        if not isinstance(value, Tensor) or value.numel() != 1:
            what = (
                f"a tensor of shape {tuple(value.shape)}"
                if isinstance(value, Tensor)
                else f"a {type(value).__name__}"
            )
            raise ValueError(
                f"The loss of Curvature must return a tensor of a single number, not {what}"
            )
        number = value.item()
        if not math.isfinite(number):
            raise EnergyRangeError(f"The loss of Curvature is {number} on the example batch.")
        if self.copies and not value.requires_grad:
            raise ValueError(
                "The loss of Curvature does not depend on the model's output: it may be detached, "
                "or computed from something else"
            )
        if self.copies:
            slopes = torch.autograd.grad(
                value.sum(),
                self.copies,
                create_graph=True,
                allow_unused=True,
                materialize_grads=True,
            )
            self.slopes = list(slopes)

    def largest(self) -> float:
        """The largest absolute value of an output; NaN where one is."""
        found = [float(out.detach().abs().max()) for out in self.tensors if out.numel()]
        return float(torch.tensor([0.0, *found]).max())

    def random(self, seed: int = 0) -> list[Tensor]:
        """Random directions in the space of outputs, the same ones for the same seed."""
        generator = torch.Generator().manual_seed(seed)
        return [
            torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out)
            for out in self.tensors
        ]

    def pull(self, blocks: list[Tensor], directions: list[Tensor]) -> list[Tensor]:
        """Jᵀ u of every block."""
        if not self.tensors or not blocks:
            return [torch.zeros_like(block) for block in blocks]
        pulled = torch.autograd.grad(
            self.tensors,
            blocks,
            directions,
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(pulled)

    def apply_curvature(self, directions: list[Tensor]) -> list[Tensor]:
        """A u."""
        if not self.copies:
            return directions
        if not any(slope.requires_grad for slope in self.slopes):
            return [torch.zeros_like(u) for u in directions]
        slopes = [
            (slope, u)
            for slope, u in zip(self.slopes, directions, strict=True)
            if slope.requires_grad
        ]
        curved = torch.autograd.grad(
            [slope for slope, _ in slopes],
            self.copies,
            [u for _, u in slopes],
            retain_graph=True,
            allow_unused=True,
            materialize_grads=True,
        )
        return list(curved)

    def make_push(self, block: Tensor) -> Callable[[Tensor], list[Tensor]]:
        """v ↦ J v: the derivative of Jᵀ u by u, whatever u is."""
        anywhere = [torch.zeros_like(out).requires_grad_() for out in self.tensors]
        (pulled,) = torch.autograd.grad(self.tensors, block, anywhere, create_graph=True)

        def push(v: Tensor) -> list[Tensor]:
            if not pulled.requires_grad:
                return [torch.zeros_like(out) for out in self.tensors]
            return list(
                torch.autograd.grad(
                    pulled,
                    anywhere,
                    v,
                    retain_graph=True,
                    allow_unused=True,
                    materialize_grads=True,
                )
            )

        return push

    def product(
        self, block: Tensor, push: Callable[[Tensor], list[Tensor]]
    ) -> Callable[[Tensor], Tensor]:
        """v ↦ H_bb v."""
        return lambda v: self.pull([block], self.apply_curvature(push(v)))[0]


def _push(again: Callable[[Tensor], Any], block: Tensor, v: Tensor) -> list[Tensor]:
    """J v by forward differentiation of another call of the model."""
    with forward_ad.dual_level():
        leaves = returned_leaves(again(forward_ad.make_dual(block, v)), caches=False)
        pairs = [
            forward_ad.unpack_dual(leaf)
            for leaf in leaves
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        return [
            torch.zeros_like(p) if tangent is None else tangent.detach() for p, tangent in pairs
        ]


def _lanczos(product: Callable[[Tensor], Tensor], start: Tensor, steps: int) -> float:
    """The largest eigenvalue of a symmetric matrix, from below: that of its restriction to a Krylov
    space.

    >>> matrix = torch.diag(torch.tensor([1.0, 2.0, 7.0]))
    >>> round(_lanczos(lambda v: matrix @ v, torch.ones(3), steps=3), 4)
    7.0
    """
    length = float(start.double().norm())
    if not length:
        return 0.0
    if not math.isfinite(length):
        return length
    q = start / length
    basis: list[Tensor] = []
    diagonal: list[float] = []
    beside: list[float] = []
    for _ in range(min(steps, start.numel())):
        basis.append(q)
        image = product(q)
        diagonal.append(_dot(q, image))
        if not math.isfinite(diagonal[-1]):
            return diagonal[-1]
        # Against all of the basis, not only its last two: rounding brings the others back.
        for old in basis:
            image = image - _dot(old, image) * old
        rest = float(image.double().norm())
        if rest <= ROUNDING * max(map(abs, diagonal)):
            break
        beside.append(rest)
        q = image / rest
    size = len(diagonal)
    between = torch.tensor(beside[: size - 1], dtype=torch.float64)
    matrix = (
        torch.diag(torch.tensor(diagonal, dtype=torch.float64))
        + torch.diag(between, 1)
        + torch.diag(between, -1)
    )
    return float(torch.linalg.eigvalsh(matrix)[-1])


def _dot(a: Tensor, b: Tensor) -> float:
    return float((a.double() * b.double()).sum())


def _compute_in_float(x: Any) -> Any:
    """Half precision as float32, for derivatives of derivatives."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def _scale(
    symmetry: Symmetry, model: nn.Module, factors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """All tensors of a model, copied, times their factors. Running variances stay: nobody looks at
    them.
    """
    scaled = {}
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        scaling = symmetry.scalings.get(name)
        value = _compute_in_float(tensor.detach())
        moves = scaling is not None and scaling.epsilon is None
        scaled[name] = (
            (value.double() * factors[name].to(value.device)).to(value.dtype)
            if moves
            else value.clone()
        )
    return scaled
