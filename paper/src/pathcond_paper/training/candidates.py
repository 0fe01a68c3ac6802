"""Criteria that were tried for the default, beside those of the library.

    bound    log Σ_i E_i exp(−2 s_i) + log Σ_i θ_i² exp(2 s_i)

is, up to constants, the logarithm of L·‖θ‖², by which gradient descent on a convex function of
smoothness L is after k steps at most L‖θ − θ*‖²/2k above its minimum. A rescaling trades L for the
distance, and this is the best trade: no weights have to be chosen. E is the curvature of
``Curvature`` or diag(G).

    activations    all weights read activations of one size

The scales that a search finds for autoencoders are nearly these (the last layer small, what it
reads large). They give autoencoders more than any other criterion, and cost networks that classify
some accuracy: their inner layers learn too slowly beside the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pathcond.criteria.criterion import Criterion
from pathcond.criteria.norms import BalancedNorms
from pathcond.criteria.problem import Problem
from pathcond.lifting.lifting import diag_g
from pathcond.lifting.reads import measure_reads
from pathcond.lifting.sample import Prepared
from pathcond.measured.curvature import Curvature
from pathcond.rules.labels import FIXED
from pathcond.solvers import Exact
from pathcond.symmetry.symmetry import Symmetry

Rescaling = Callable[[nn.Module, Prepared], Tensor]
STEPS = 200  # of L-BFGS
FARTHEST = 3.0  # of |log λ|
SAMPLES = 64
DIRECTIONS = 4


def minimise(criterion: Criterion) -> Rescaling:
    """Log-scales at the minimum of a criterion of the library."""

    def rescaling(model: nn.Module, prepared: Prepared) -> Tensor:
        symmetry = prepared.symmetry
        measure = measure_reads if criterion.measures == "reads" else diag_g
        problem = criterion.problem(symmetry, measure(model, prepared.sample), model)
        return Exact(max_log_scale=FARTHEST).solve(problem).log_scales.cpu()

    return rescaling


def between(first: Rescaling, second: Rescaling, share: float = 0.5) -> Rescaling:
    """A share of the way from one rescaling to another. Where neither depends on how the model is
    scaled, this does not either.
    """
    return lambda model, prepared: torch.lerp(
        first(model, prepared), second(model, prepared), share
    )


def blend() -> Rescaling:
    """Half way between curvature and balanced norms."""
    return between(minimise(Curvature(weight="size")), minimise(BalancedNorms()))


def bound(criterion: Criterion) -> Rescaling:
    """The minimum of the bound at the head of this module, E from a criterion."""

    def rescaling(model: nn.Module, prepared: Prepared) -> Tensor:
        symmetry = prepared.symmetry
        E = criterion.energies(symmetry, diag_g(model, prepared.sample), model)
        squares = {name: p.detach().double().square() for name, p in model.named_parameters()}
        t = torch.zeros(symmetry.num_units, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.LBFGS([t], max_iter=STEPS, line_search_fn="strong_wolfe")

        def value() -> Tensor:
            optimizer.zero_grad()
            s = log_factors(symmetry, t)
            sharp = sum((e * torch.exp(-2 * s(name, e))).sum() for name, e in E.items())
            far = sum((q * torch.exp(2 * s(name, q))).sum() for name, q in squares.items())
            loss: Tensor = torch.log(torch.as_tensor(sharp)) + torch.log(torch.as_tensor(far))
            loss.backward()
            return loss

        optimizer.step(value)
        return t.detach().clamp(-FARTHEST, FARTHEST)

    return rescaling


def by_rank() -> Rescaling:
    """Curvature with stable ranks that are measured where the model stands, not in balance: another
    minimum for every rescaling of a model.
    """

    def rescaling(model: nn.Module, prepared: Prepared) -> Tensor:
        symmetry = prepared.symmetry
        energies = Curvature(weight="size").energies(
            symmetry, diag_g(model, prepared.sample), model
        )
        ranks = {
            name: trace / float(energies[name].sum())
            for name, trace in traces(model, symmetry.example_inputs[:SAMPLES]).items()
            if name in energies and float(energies[name].sum()) > 0
        }
        energies = {name: energies[name] for name in ranks}
        weights = {
            name: max(ranks[name], 1.0) / max(int((values > 0).sum()), 1)
            for name, values in energies.items()
        }
        problem = Problem.of(symmetry, energies, weights=weights)
        return Exact(max_log_scale=FARTHEST).solve(problem).log_scales.cpu()

    return rescaling


def traces(model: nn.Module, example: Tensor) -> dict[str, float]:
    """tr JᵀJ of every parameter, from |Jᵀu|² of random directions u in the space of outputs."""
    parameters = dict(model.named_parameters())
    generator = torch.Generator().manual_seed(0)
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    outputs = model(example)
    found = dict.fromkeys(parameters, 0.0)
    for _ in range(DIRECTIONS):
        u = torch.randn(outputs.shape, generator=generator).to(outputs)
        pulled = torch.autograd.grad(outputs, list(parameters.values()), u, retain_graph=True)
        for name, gradient in zip(parameters, pulled, strict=True):
            found[name] += float(gradient.square().sum()) / DIRECTIONS
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(statistics[name])
    return found


@dataclass(frozen=True, kw_only=True)
class Moments(Curvature):
    """Curvature by the first two moments of every block's eigenvalues instead of its largest one:
    backward passes only.

    With random directions u in the space of outputs, p_i = Jᵀu_i and q_j = JᵀAu_j of a block, the
    means of p_i·q_i and of (p_i·q_j)(p_j·q_i), i ≠ j, are tr H_bb and ‖H_bb‖².

    Attributes:
        directions: How many are drawn.
        root: Whether the mean of eigenvalues, each weighted by itself, ‖H‖²/tr H, stands for λ, or
            ‖H‖, which is nearer to it where many are of one size.
    """

    directions: int = 16
    root: bool = False

    def sharpest(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> dict[str, float]:
        found = self._moments(symmetry, model, names, factors)
        return {
            name: square**0.5 if self.root else square / trace if trace else 0.0
            for name, (trace, square) in found.items()
        }

    def traces(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> dict[str, float]:
        found = self._moments(symmetry, model, names, factors)
        return {name: trace for name, (trace, _) in found.items()}

    def _moments(
        self, symmetry: Symmetry, model: nn.Module, names: list[str], factors: Mapping[str, Tensor]
    ) -> dict[str, tuple[float, float]]:
        if not names:
            return {}
        with self._measuring(symmetry, model, names, factors) as (outputs, blocks, _):
            tensors = list(blocks.values())
            drawn = [outputs.random(seed) for seed in range(self.directions)]
            p = [outputs.pull(tensors, u) for u in drawn]
            q = (
                p
                if self.loss is None
                else [outputs.pull(tensors, outputs.apply_curvature(u)) for u in drawn]
            )
        found = {}
        for i, name in enumerate(names):
            left, right = (torch.stack([one[i].flatten() for one in of]) for of in (p, q))
            products = (left @ right.T).double()
            off = products * products.T
            pairs = self.directions * (self.directions - 1)
            square = float(off.sum() - off.diagonal().sum()) / pairs
            found[name] = float(products.diagonal().mean()), max(square, 0.0)
        return found


def log_factors(symmetry: Symmetry, t: Tensor) -> Callable[[str, Tensor], Tensor]:
    """s = Kt of a parameter, by its name, on the device of a tensor; differentiable by t."""
    moved = symmetry.class_matrix @ t

    def s(name: str, like: Tensor) -> Tensor:
        scaling = symmetry.scalings.get(name)
        if scaling is None:
            return torch.zeros((), dtype=t.dtype, device=like.device)
        here = moved.to(like.device)
        plus, minus = (ids.long().to(like.device) for ids in (scaling.plus, scaling.minus))
        return here[plus] - here[minus]

    return s


def activations(power: float, *, by_unit: bool = True, farthest: float = 6.0) -> Rescaling:
    """Inputs of all weights of one size: their mean square times (fan-in)^power, as that of the
    model's inputs.

    Args:
        power: 0 for equal root mean squares, 1 for equal norms.
        by_unit: Whether every unit gets its own scale, or all units of a tensor one.
        farthest: Of |log λ|.
    """

    def rescaling(model: nn.Module, prepared: Prepared) -> Tensor:
        symmetry = prepared.symmetry
        squares = {
            name: reads.squares
            for name, reads in measure_reads(model, prepared.sample).items()
            if name in symmetry.scalings
        }
        energies = {}
        for name, values in squares.items():
            each = values if by_unit else values.mean().expand_as(values)
            energies[name] = each * (values[0].numel() ** power / values.numel())
        scalings = {
            name: replace(scaling, plus=torch.full_like(scaling.plus, FIXED))
            for name, scaling in symmetry.scalings.items()
        }
        reading = replace(symmetry, scalings=scalings)
        weights = {name: 1 / values.numel() for name, values in energies.items()}
        problem = Problem.of(reading, energies, weights=weights)
        return Exact(max_log_scale=farthest).solve(problem).log_scales.cpu()

    return rescaling
