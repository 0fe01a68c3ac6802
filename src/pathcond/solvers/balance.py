"""How far a rescaling may take weights out of balance: the default bound of ``condition_``.

The criterion asks every unit h for Σ_in g' − Σ_out g' = (n_in − n_out) E/p, where n counts
parameters. E also holds the energy of parameters that no unit moves. Where these dominate
(embeddings in front of a LayerNorm have g ∝ 1/σ², and σ is small where embeddings are), E/p is a
number that no scale can change, and units with n_in ≠ n_out run after it however far it is: their
optimum says nothing about their own paths. So scales are kept near *balance*, the point t* at which

    Σ_b mean(W_b²) exp(2 K t),     b runs over the parameter tensors that the Symmetry moves,

is least: weights that feed a unit are then as large as the weights that read it, entry by entry. A
unit in front of a BatchNorm has weights on one side only, and smaller is always less. A linear term
−a·t holds it: its weights count as if their norm were 1, whatever it is in the model.

So the weights of all rescalings of a model have the same point of balance, and a box around it does
not move with the model. It is widened to hold the model as it is. After a rescaling the box of the
new model lies inside the old one and still holds the minimiser of the convex criterion, so
conditioning twice does nothing.

>>> import torch, pathcond
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(2, 1, bias=False),
...     torch.nn.ReLU(),
...     torch.nn.Linear(1, 2, bias=False),
... )
>>> with torch.no_grad():
...     _ = model[0].weight.fill_(100.0), model[2].weight.fill_(1.0)
>>> symmetry = pathcond.find_symmetry(model, torch.ones(1, 2))
>>> # in balance at λ = 1/10, that is log λ = −2.3
>>> lower, upper = balance_bounds(symmetry, model, width=1.0)
>>> [round(float(bound), 2) for bound in (lower[0], upper[0])]
[-3.3, 0.0]
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..criteria.norms import hold, rescaled_weights
from ..criteria.problem import Point, Problem, any_positive, fill_like, sides_of
from ..symmetry.symmetry import Symmetry
from .coordinate_descent import CoordinateDescent
from .exact import Exact

# Half the width of the box: weights may be 12 times as large, or as small, as in balance. It is the
# paper's |u| ≤ 5.
WIDTH = 2.5
EXACT = 1e-6  # of log λ: how well a point of balance must be known
FINE = 1e-9  # and how well it is computed where rounding allows: the box moves with it
# over units whose weights are too small for the exact solver to see them beside the others
SWEEPS = 20


def balance_bounds(
    symmetry: Symmetry, model: nn.Module, width: float = WIDTH
) -> tuple[Tensor, Tensor]:
    """Least and greatest log λ of every unit, (num_units,) each, within ``width`` of balance; scale
    1 is always inside.

    Units that have parameters on one side only (in front of a BatchNorm) have no bound here. Units
    with a side that holds nothing but zeros, or whose balance cannot be computed, stay at scale 1.
    """
    lower = torch.full((symmetry.num_units,), -math.inf, dtype=torch.float64)
    upper = -lower
    two_sided = _two_sided(symmetry, model)
    if not bool(two_sided.any()):
        return lower, upper
    centre, known = balance_point(symmetry, model)
    lower = torch.where(two_sided, torch.where(known, (centre - width).clamp(max=0.0), 0.0), lower)
    upper = torch.where(two_sided, torch.where(known, (centre + width).clamp(min=0.0), 0.0), upper)
    return lower, upper


def balance_point(symmetry: Symmetry, model: nn.Module) -> tuple[Tensor, Tensor]:
    """log λ that brings every unit into balance, 0 where it is not known, and whether it is,
    (num_units,) each.
    """
    nowhere = torch.zeros(symmetry.num_units, dtype=torch.float64)
    weights = rescaled_weights(symmetry, model)
    if not symmetry.num_units or not any_positive(weights):
        return nowhere, nowhere.bool()
    shares = {name: fill_like(w, 1 / max(w.numel(), 1)) for name, w in weights.items()}
    sides = sides_of(symmetry, shares)
    into, out = _count_sides(symmetry, weights)
    # One entry in n of such a unit has the mean square 1/n: the norm of its weights is 1.
    held = (sides[0] - sides[1]) / (into - out).abs().clamp(min=1.0)
    problem = Problem.of(
        symmetry,
        weights,
        power=-2,
        transform=lambda name, w: w.double().square() / max(weights[name].numel(), 1),
    )
    centre, known = find_balance(hold(problem, sides=sides, held=held))
    return torch.where(known, centre, 0.0), known


def _two_sided(symmetry: Symmetry, model: nn.Module) -> Tensor:
    """Units that parameters both feed and read, (num_units,) bool."""
    weights = rescaled_weights(symmetry, model)
    into, out = _count_sides(symmetry, weights)
    return ((into > 0) & (out > 0)).cpu()


def _count_sides(symmetry: Symmetry, weights: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """How many weights feed and read every unit, (num_units,) each."""
    return sides_of(symmetry, {name: fill_like(w, 1.0) for name, w in weights.items()})


def find_balance(problem: Problem) -> tuple[Tensor, Tensor]:
    """log λ that brings every unit into balance, and whether it is known, (num_units,) each.

    Args:
        problem: Of norms, by ``hold``.
    """
    u = problem.zero()
    movable = problem.upper > 0
    imbalance = _imbalance(problem.at(u))
    for solver in (Exact(tolerance=1e-15), CoordinateDescent(sweeps=SWEEPS, tolerance=FINE)):
        if bool((imbalance[movable] < FINE).all()):
            break
        u = u + problem.power * solver.solve(problem.shifted(u)).log_scales
        imbalance = _imbalance(problem.at(u))
    return problem.log_scales(u).cpu(), (movable & (imbalance < EXACT)).cpu()


def _imbalance(point: Point) -> Tensor:
    """|log λ| that would bring each unit into balance if the others stayed, (num_units,); NaN where
    a side is empty.
    """
    into, out = point.sides
    held = point.problem.slope * (point.energy / point.problem.weight)
    return ((into + (-held).clamp(min=0.0)) / (out + held.clamp(min=0.0))).log().abs() / 4
