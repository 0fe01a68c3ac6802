"""The true optimum, on two levels.

The Hessian of F is a weighted graph Laplacian less a rank-one term. Its slow modes are one common
scale per layer, so the problem of those alone (one unknown per layer or residual stream) is solved
first, then every layer is brought to its own exact minimum in turn. After that the layers of a
network look random to each other: Newton's method converges in a few steps, each a handful of
conjugate-gradient steps with the layers' system and the diagonal as the preconditioner.

Bounds on u are kept by projection: units close to a bound that the gradient pushes outwards go
there and are held (Bertsekas 1982), and the gradient norm that is reported leaves them out. A unit
at a bound that the gradient pulls inwards may still be sent out by Newton's step, for the sake of
others: where two units do almost the same, the step moves them far apart, and half of it would be
cut off. Such a unit is left at its bound for this step, and the others' step is computed without
it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..criteria.problem import Point, Problem
from .layer_scales import LARGEST_STEP, LayerScales
from .layers import layers_of
from .solution import Solution
from .solver import Solver

CLOSE = 1e-3  # a gradient per parameter below which Newton's method needs no other start
NEAR = 1e-3  # of a bound: closer than this a unit that would reach it goes there
# a gradient per parameter below which values of F may no longer tell better from worse
ROUNDING = 1e-8


@dataclass(frozen=True, kw_only=True)
class Exact(Solver):
    """Settings of the exact solver.

    Attributes:
        tolerance: On the norm of the gradient divided by W, for the path kernel the number of
            parameters.
        max_steps: Most Newton steps.
    """

    tolerance: float = 1e-9
    max_steps: int = 200

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.tolerance > 0 or self.max_steps < 1:
            raise ValueError(
                f"Exact needs tolerance > 0 and max_steps >= 1, not {self.tolerance} and "
                f"{self.max_steps}"
            )

    def solve(self, problem: Problem) -> Solution:
        """Newton steps until the gradient is as small as asked for, or as rounding allows."""
        problem = problem.bounded(self.max_log_scale)
        origin = problem.at(problem.zero())
        has_parameters = origin.laplacian_diagonal() > 0  # units without any stay where they are
        layers = LayerScales(problem, ~origin.outward() & has_parameters)
        point = origin if origin.residual <= CLOSE else _start(origin, layers)
        steps, accuracy = 0, 0.01
        while True:
            residual = point.residual
            if residual <= self.tolerance:
                message = f"the gradient is {residual:.1e} per parameter, within the tolerance"
                break
            if steps == self.max_steps:
                message = (
                    f"{steps} Newton steps left a gradient of {residual:.1e} per parameter: allow "
                    "more, or set a bound"
                )
                break
            # of a step along one coordinate
            reach = point.gradient.abs() / point.laplacian_diagonal().clamp(min=1e-300)
            arriving = point.outward(reach.clamp(1e-9, NEAR))
            free = ~arriving & has_parameters
            if not torch.equal(free, layers.free):
                layers = LayerScales(problem, free)
            ends = torch.where(point.gradient < 0, problem.upper, problem.lower)
            snap = torch.where(arriving, ends - point.u, 0.0)
            accurate = max(accuracy, 0.3 * self.tolerance / residual)
            direction = snap + _newton_direction(point, layers, snap, accurate)
            blocked = point.leaving(direction) & free
            if bool(blocked.any()):
                layers = LayerScales(problem, free & ~blocked)
                direction = snap + _newton_direction(point, layers, snap, accurate)
            moved = _line_search(point, direction)
            if moved is None:
                message = (
                    f"no step decreases F any further: the gradient of {residual:.1e} per "
                    "parameter is rounding"
                )
                break
            point, steps = moved, steps + 1
            accuracy = min(0.1, (point.residual / residual) ** 2)  # Eisenstat and Walker 1996
        return Solution(
            log_scales=problem.log_scales(point.u),
            objective_before=origin.value,
            objective_after=point.value,
            gradient_norm=residual,
            iterations=steps,
            converged=residual <= max(self.tolerance, ROUNDING),
            message=message,
        )


def _start(origin: Point, layers: LayerScales) -> Point:
    """The optimum over common scales of the layers, then over the units of one layer after the
    other; origin if that is no gain.
    """
    problem = origin.problem
    if not problem.num_units:
        return origin
    w, energy = layers.minimum(origin)
    u = layers.up(w).clamp(problem.lower, problem.upper)
    if not torch.equal(u, layers.up(w)):
        energy = problem.at(u).energy
    v = problem.class_matrix @ u
    for layer in layers_of(problem):
        if layer is not None:
            energy = layer.minimise(problem, u, v, energy)
    point = problem.at(u)
    return point if point.value < origin.value else origin


def _newton_direction(point: Point, layers: LayerScales, snap: Tensor, accuracy: float) -> Tensor:
    """d with ∇²F d ≈ −∇F on the free units once the others have moved by ``snap``, by
    preconditioned conjugate gradients.
    """
    diagonal = point.laplacian_diagonal()
    free = layers.free
    inverse = torch.where((diagonal > 0) & free, 1 / diagonal, 0.0)
    solve = layers.solver(point)

    def precondition(r: Tensor) -> Tensor:
        return inverse * r + layers.up(solve(layers.down(r)))

    right = (
        -(point.gradient + point.hessian_product(snap) if bool(snap.any()) else point.gradient)
        * free
    )
    r = right
    d = torch.zeros_like(right)
    z = precondition(r)
    q = z
    rz = float(r @ z)
    enough = accuracy * float(r.norm())
    for _ in range(200):
        if float(r.norm()) <= enough or rz <= 0 or float(d.abs().max()) > LARGEST_STEP:
            break
        image = point.hessian_product(q) * free
        curvature = float(q @ image)
        if curvature <= 1e-14 * float(q @ (diagonal * q)):  # flat to rounding
            break
        step = rz / curvature
        d, r = d + step * q, r - step * image
        z = precondition(r)
        rz, previous = float(r @ z), rz
        q = z + (rz / previous) * q
    return d if bool(d.any()) else precondition(right)


def _line_search(point: Point, direction: Tensor) -> Point | None:
    """The first of the halved steps that decreases F as much as its slope promises; None if
    rounding hides any decrease.
    """
    problem = point.problem
    length = min(1.0, LARGEST_STEP / float(direction.abs().max().clamp(min=1e-300)))
    for _ in range(40):
        u = (point.u + length * direction).clamp(problem.lower, problem.upper)
        promised = float(point.gradient @ (u - point.u))
        moved = problem.at(u)
        if promised < 0 and moved.value <= point.value + 1e-4 * promised:
            return moved
        if abs(promised) < 1e-13 * max(1.0, abs(point.value)):
            # Too close to the minimum to be told by values; the gradient still can.
            return moved if promised < 0 and moved.residual < 0.5 * point.residual else None
        length /= 2
    return None
