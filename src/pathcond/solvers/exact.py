"""The true optimum: Newton's method with conjugate gradients, preconditioned on two levels.

The Hessian of F is a weighted graph Laplacian less a rank-one term. Its slow modes are one common scale per layer, so a step
of Newton on those alone (one unknown per layer or residual stream, a dense system) comes first, and their system is one half of
the preconditioner; the other half is the diagonal. With the slow modes gone the layers of a network look random to each other,
and a handful of conjugate-gradient steps solves for the Newton direction.

Bounds on u are kept by projection: units at a bound that the gradient pushes outwards are held there (Bertsekas 1982), and the
gradient norm that is reported leaves them out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import Point, Problem
from .solution import Solution

LARGEST_STEP = 20.0  # of any u in one Newton step: e^20 is as far as a quadratic model can be trusted


@dataclass(frozen=True, kw_only=True)
class Exact:
    """Settings of the exact solver.

    Attributes:
        tolerance: On the norm of the gradient divided by p, the number of parameters.
        max_log_scale: Bound on |log λ|.
        max_steps: Most Newton steps.
    """

    tolerance: float = 1e-10
    max_log_scale: float | None = None
    max_steps: int = 200

    def __post_init__(self) -> None:
        if not self.tolerance > 0 or self.max_steps < 1:
            raise ValueError(f"Exact needs a positive tolerance and a step, not {self.tolerance} and {self.max_steps}")
        if self.max_log_scale is not None and not self.max_log_scale > 0:
            raise ValueError(f"max_log_scale bounds |log λ| and must be positive, not {self.max_log_scale}")

    def solve(self, problem: Problem) -> Solution:
        """Newton steps from u = 0 until the gradient is as small as asked for, or as rounding allows."""
        bound = math.inf if self.max_log_scale is None else 2 * self.max_log_scale
        p = problem.num_parameters
        point = start = problem.at(torch.zeros(problem.num_units, dtype=torch.float64, device=problem.slope.device))
        free = torch.ones_like(point.u)
        layers = _LayerScales(problem, free)
        steps = 0
        while True:
            if bool((free != _free(point, bound)).any()):
                free = _free(point, bound)
                layers = _LayerScales(problem, free)
            residual = float((point.gradient * free).norm()) / p
            if residual <= self.tolerance:
                message = f"the gradient is {residual:.1e} per parameter, within the tolerance"
                break
            if steps == self.max_steps:
                message = f"{steps} Newton steps left a gradient of {residual:.1e} per parameter: allow more, or set a bound"
                break
            direction = _newton_direction(point, layers, free, accuracy=min(0.1, math.sqrt(residual)))
            moved = _line_search(problem, point, direction, bound)
            if moved is None:
                message = f"no step decreases F any further: the gradient of {residual:.1e} per parameter is rounding"
                break
            point, steps = moved, steps + 1
        return Solution(
            log_scales=point.u / 2, objective_before=start.value, objective_after=point.value, gradient_norm=residual,
            iterations=steps, converged=steps < self.max_steps, message=message,
        )  # fmt: skip


def _free(point: Point, bound: float) -> Tensor:
    """1 for the units that may move, 0 for those that a bound holds."""
    held = ((point.u >= bound) & (point.gradient < 0)) | ((point.u <= -bound) & (point.gradient > 0))
    return (~held).double()


class _LayerScales:
    """The directions in which all (free) units of a layer move alike, and F restricted to them.

    A block sees only the layers at its two ends, so their part of every direction is cut out once: for rows and columns the
    layers (k,) and the change of v there, (R, k) and (C, k).
    """

    def __init__(self, problem: Problem, free: Tensor) -> None:
        self.layer_of = torch.zeros(problem.num_units, dtype=torch.long, device=free.device)
        for layer, units in enumerate(problem.groups):
            self.layer_of[units] = layer
        self.count, self.free, C = len(problem.groups), free, problem.combination
        at = C.classes * self.count + self.layer_of[C.units]
        size = C.num_classes * self.count
        moves = torch.zeros(size, dtype=torch.float64, device=free.device).index_add_(0, at, C.coefficients * free[C.units])
        moves = moves.view(C.num_classes, self.count)
        self.ends = [(*_cut(moves[block.rows]), *_cut(moves[block.columns])) for block in problem.blocks]

    def down(self, r: Tensor) -> Tensor:
        """Sum over the units of every layer, (layers,)."""
        return torch.zeros(self.count, dtype=torch.float64, device=r.device).index_add_(0, self.layer_of, r * self.free)

    def up(self, w: Tensor) -> Tensor:
        """One value per layer given to all its units, (num_units,)."""
        return w[self.layer_of] * self.free

    def hessian(self, point: Point) -> Tensor:
        """∇²F in these directions, (layers, layers)."""
        problem = point.problem
        total = torch.zeros(self.count, self.count, dtype=torch.float64, device=self.free.device)
        for i, (block, (above, rows, below, columns)) in enumerate(zip(problem.blocks, self.ends, strict=True)):
            total[above[:, None], above] += rows.T @ (point.by_row[i][:, None] * rows)
            total[below[:, None], below] += columns.T @ (point.by_column[i][:, None] * columns)
            grown = point.grow[block.columns, None] * columns
            reached = block.energy @ grown if block.energy.dim() == 2 else block.energy[:, None] * grown
            cross = (point.shrink[block.rows, None] * rows).T @ reached
            total[above[:, None], below] -= cross
            total[below[:, None], above] -= cross.T
        mean = self.down(point.energy_gradient) / point.energy
        return problem.num_parameters * (total / point.energy - torch.outer(mean, mean))


def _cut(moves: Tensor) -> tuple[Tensor, Tensor]:
    """The layers that move any of these classes, and how."""
    layers = moves.any(0).nonzero().flatten()
    return layers, moves[:, layers]


def _newton_direction(point: Point, layers: _LayerScales, free: Tensor, accuracy: float) -> Tensor:
    """d with ∇²F d ≈ −∇F on the free units, by preconditioned conjugate gradients."""
    diagonal = point.laplacian_diagonal()
    inverse = torch.where(diagonal > 0, 1 / diagonal, torch.zeros_like(diagonal)) * free
    small = _pseudo_inverse(layers.hessian(point))

    def preconditioned(r: Tensor) -> Tensor:
        return inverse * r + layers.up(small @ layers.down(r))

    r = -point.gradient * free
    d = torch.zeros_like(r)
    z = preconditioned(r)
    q, rz, enough = z, float(r @ z), accuracy * float(r.norm())
    for _ in range(200):
        if float(r.norm()) <= enough or rz <= 0:
            break
        image = point.hessian_product(q) * free
        curvature = float(q @ image)
        if curvature <= 1e-14 * float(q @ (diagonal * q)):  # flat to rounding
            break
        step = rz / curvature
        d, r = d + step * q, r - step * image
        z = preconditioned(r)
        rz, previous = float(r @ z), rz
        q = z + (rz / previous) * q
    return d if bool(d.any()) else preconditioned(-point.gradient * free)


def _pseudo_inverse(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
    kept = values > 1e-12 * values[-1:].clamp(min=1e-300)
    return (vectors[:, kept] / values[kept]) @ vectors[:, kept].T


def _line_search(problem: Problem, point: Point, direction: Tensor, bound: float) -> Point | None:
    """The first of the halved steps that decreases F as much as its slope promises; None if rounding hides any decrease."""
    length = min(1.0, LARGEST_STEP / float(direction.abs().max().clamp(min=1e-300)))
    for _ in range(40):
        u = (point.u + length * direction).clamp(-bound, bound)
        promised = float(point.gradient @ (u - point.u))
        moved = problem.at(u)
        if promised < 0 and moved.value <= point.value + 1e-4 * promised:
            return moved
        if abs(promised) < 1e-13 * max(1.0, abs(point.value)):
            # Too close to the minimum to be told by values; the gradient still can.
            return moved if promised < 0 and float(moved.gradient.norm()) < 0.5 * float(point.gradient.norm()) else None
        length /= 2
    return None
