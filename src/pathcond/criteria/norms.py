"""Norms of the weights as a problem of log-scales: ``BalancedNorms``, and the point that the box of
``condition_`` lies around.

    Σ_i c_i |θ_i|^p exp(p (Kt)_i)

is the energy of a ``Problem`` for u = −p t, E_i = c_i |θ_i|^p and no linear term. Its minimum has
Σ_in = Σ_out around every unit. A unit with weights on one side only (in front of a BatchNorm they
enter it, behind one they leave it) would shrink them for ever. A linear term −a·t holds it: it asks
the sum over its one side to be a.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..rules.energies import power_of
from ..rules.labels import FIXED
from ..symmetry.symmetry import Symmetry
from ..wrappers import unwrap
from .criterion import Criterion, Measurement, require_model
from .problem import Problem, fill_like, sides_of

# The solvers minimise W log(c + Σ) + slope·u. With c this many times what one-sided units are held
# at it is Σ + a·u nearly: the sum over such a unit is a to a percent or so, and there is a minimum
# in every model.
LINEAR = 100.0


def hold(problem: Problem, *, sides: tuple[Tensor, Tensor], held: Tensor) -> Problem:
    """The problem whose minimiser balances the norms on both sides of every unit.

    Args:
        problem: With c |θ|^p as energies and −p as power.
        sides: What would enter and leave every unit if no weight were zero, (num_units,) each. A
            unit with two sides, one of them zeros, has no balance and stays at scale 1.
        held: a of every unit, (num_units,), negative for weights that leave it; of units with two
            sides it is not used.
    """
    into, out = problem.at(problem.zero()).sides
    if_any_into, if_any_out = (side.to(into.device) > 0 for side in sides)
    one_sided = (if_any_into ^ if_any_out) & ((into > 0) ^ (out > 0))
    movable = one_sided | ((into > 0) & (out > 0))
    # In the units of ``problem``, which are relative to the sum of all energies.
    held = torch.where(one_sided, held.to(into.device), 0.0) * math.exp(-problem.log_total)
    constant = LINEAR * float(held.abs().sum())
    return replace(
        problem,
        fixed=constant,
        slope=problem.weight * held / constant if constant > 0 else torch.zeros_like(held),
        lower=problem.lower.masked_fill(~movable, 0.0),
        upper=problem.upper.masked_fill(~movable, 0.0),
    )


@dataclass(frozen=True, kw_only=True)
class BalancedNorms(Criterion):
    """The least Σ_b ‖W_b‖_p^p over all weights, the energy of ENorm (Stock et al. 2019): no data,
    and all layers at once.

    Weights that feed a unit then have the same norm as the weights that read it. Biases do not
    count but are scaled along. What holds the scales that a norm makes free: behind it ("gain",
    "full", "batch") its gain and shift count, as what feeds the unit. In front of it (not "gain")
    weights have no other side to be in balance with, and would shrink for ever; they are held at
    norm one, unit by unit (Σ |θ|^p = 1, to a percent or so).

    Attributes:
        p: Of the norm.
    """

    p: float = 2
    measures: ClassVar[Measurement] = None
    shares_energy: ClassVar[bool] = False
    is_balance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 < self.p < math.inf:
            raise ValueError(f"BalancedNorms needs a positive, finite p, not {self.p}")

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None
    ) -> Mapping[str, Tensor]:
        """|θ|^p of the weights that count."""
        weights = weights_that_count(symmetry, require_model(model, self))
        return {name: power_of(weight, self.p, weight.device) for name, weight in weights.items()}

    def problem(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None = None
    ) -> Problem:
        weights = weights_that_count(symmetry, require_model(model, self))
        into, out = sides_of(symmetry, {name: fill_like(w, 1.0) for name, w in weights.items()})
        return hold(
            Problem.of(
                symmetry,
                weights,
                power=-self.p,
                transform=lambda name, weight: power_of(weight, self.p, weight.device),
            ),
            sides=(into, out),
            held=(into > 0).double() - (out > 0).double(),
        )


def rescaled_weights(symmetry: Symmetry, model: nn.Module) -> dict[str, Tensor]:
    """All parameters that some unit rescales, by name."""
    return {
        name: parameter.detach()
        for name, parameter in unwrap(model).named_parameters()
        if name in symmetry.scalings
    }


def weights_that_count(symmetry: Symmetry, model: nn.Module) -> dict[str, Tensor]:
    """All weights that some unit rescales; vectors only where no weight is on that side of the
    unit.
    """
    moved = rescaled_weights(symmetry, model)
    ends = {name: _ends(symmetry, name) for name in moved}
    # of every class, whether a weight is on its side: multiplied by it, divided by it
    taken = torch.zeros(2, symmetry.class_matrix.num_classes, dtype=torch.bool)
    taken[:, FIXED] = True
    for name, weight in moved.items():
        if weight.dim() > 1:
            for side, classes in zip(taken, ends[name], strict=True):
                side[classes] = True
    return {
        name: weight
        for name, weight in moved.items()
        if weight.dim() > 1
        or any(
            not bool(side[classes].all()) for side, classes in zip(taken, ends[name], strict=True)
        )
    }


def _ends(symmetry: Symmetry, name: str) -> tuple[Tensor, Tensor]:
    """Classes that multiply a parameter, and those that divide it. To entries that a class both
    multiplies and divides, as in a depthwise convolution beside an identity, it does nothing.
    """
    pairs = symmetry.scalings[name].class_pairs
    rows, columns = pairs.rows, pairs.columns
    if not pairs.dense:
        rows, columns = rows[pairs.r], columns[pairs.c]
    elif min(len(rows), len(columns)) > 1:
        return rows, columns
    rows, columns = torch.broadcast_tensors(rows, columns)
    return rows[rows != columns], columns[rows != columns]
