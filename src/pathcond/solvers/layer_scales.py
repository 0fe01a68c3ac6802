"""F restricted to moves in which all units of a layer move alike: a handful of unknowns, solved
densely.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..criteria.problem import Block, Point, Problem

LARGEST_STEP = 20.0  # of any u at once: e^20 is as far as a quadratic model can be trusted
LARGEST_EXPONENT = 4.0  # by which the energy between two layers may change at once
SETTLED = 1e-8  # a decrease of F per parameter after which one step more changes nothing


class LayerScales:
    """Directions w, one common move per layer; units that are not free stay.

    The classes of a block that move alike are one *end* of it, so that the block has one energy per
    pair of ends:

        E(w) = E_rest + Σ_k e_k exp(−(D w)_k)
        e   (pairs of ends,) at some u        D   (pairs of ends, layers)
    """

    def __init__(self, problem: Problem, free: Tensor) -> None:
        self.free = free
        self.num_layers = len(problem.groups)
        self.layer_of = torch.zeros(problem.num_units, dtype=torch.long, device=free.device)
        for layer, units in enumerate(problem.groups):
            self.layer_of[units] = layer
        moves, self.kind = self._moves(problem)  # (kinds, layers); kind of every class
        rows = self.kind[problem.rows]
        columns = self.kind[problem.columns]
        # The energy of a pair of ends can be read off the point: by row where the columns are of
        # one kind, else by column.
        pair = torch.full_like(rows, -1), torch.full_like(columns, -1)
        self.mixed: list[tuple[int, Block]] = []
        found: list[Tensor] = []
        row = column = count = 0
        for block, spans in zip(problem.blocks, problem.spans(rows, columns), strict=True):
            height, width = block.energy.shape
            at_row = slice(row, row + height)
            at_column = slice(column, column + width)
            row, column = row + height, column + width
            above, r = _distinct(rows[at_row], spans[0])
            below, c = _distinct(columns[at_column], spans[1])
            if len(below) == 1:
                pair[0][at_row] = count + r
            elif len(above) == 1:
                pair[1][at_column] = count + c
            else:
                self.mixed.append((count, block))
            found.append(torch.cartesian_prod(above, below))
            count += len(found[-1])
        single, at = torch.unique(rows[row:] * len(moves) + columns[column:], return_inverse=True)
        pair[0][row:] = count + at
        ends = torch.cat([*found, torch.stack([single // len(moves), single % len(moves)], 1)])
        self.pair_of_row, self.pair_of_column = pair
        self.ranks = problem.ranks
        self.own = len(ends)
        self.directions = self.ranks.concatenate(moves[ends[:, 0]] - moves[ends[:, 1]])

    def _moves(self, problem: Problem) -> tuple[Tensor, Tensor]:
        """The distinct ways in which classes move with the layers, (kinds, layers), and which of
        them each class has.
        """
        C = problem.class_matrix
        layers = self.layer_of[problem.class_matrix.units]
        coefficients = C.coefficients * self.free[C.units]
        code = torch.randint(
            2**52, (self.num_layers,), generator=torch.Generator().manual_seed(0)
        ).to(layers.device)
        key = torch.zeros(C.num_classes, dtype=torch.long, device=layers.device)
        # A hash. Two classes that move differently share a key with a probability of 2^-52; then
        # the start and the preconditioner are worse, and the minimum is the same.
        key.index_add_(0, C.classes, coefficients.long() * code[layers])
        distinct, kind = torch.unique(key, return_inverse=True)
        example = torch.zeros(len(distinct), dtype=torch.long, device=kind.device)
        example[kind] = torch.arange(len(kind), device=kind.device)
        chosen = example[kind[C.classes]] == C.classes
        at = kind[C.classes[chosen]] * self.num_layers + layers[chosen]
        moves = torch.zeros(len(distinct), self.num_layers, dtype=torch.float64, device=kind.device)
        moves.view(-1).index_add_(0, at, coefficients[chosen])
        return moves, kind

    def down(self, r: Tensor) -> Tensor:
        """Sum over the units of every layer, (layers,)."""
        return torch.zeros(self.num_layers, dtype=torch.float64, device=r.device).index_add_(
            0, self.layer_of, r * self.free
        )

    def up(self, w: Tensor) -> Tensor:
        """One value per layer given to all its units, (num_units,)."""
        return w[self.layer_of] * self.free

    def energies(self, point: Point) -> Tensor:
        """e, (pairs of ends,)."""
        e = torch.zeros(self.own, dtype=torch.float64, device=self.free.device)
        for values, pair in (
            (point.by_row, self.pair_of_row),
            (point.by_column, self.pair_of_column),
        ):
            e.index_add_(0, pair[pair >= 0], values[pair >= 0])
        for first, block in self.mixed:
            above, r = torch.unique(self.kind[block.rows], return_inverse=True)
            below, c = torch.unique(self.kind[block.columns], return_inverse=True)
            ends = torch.nn.functional.one_hot(c, len(below)) * point.grow[block.columns, None]
            sums = torch.zeros(len(above), len(below), dtype=torch.float64, device=e.device)
            sums.index_add_(0, r, point.shrink[block.rows, None] * (block.energy @ ends))
            e[first : first + sums.numel()] = sums.flatten()
        return self.ranks.concatenate(e)

    def minimum(self, point: Point, steps: int = 100) -> tuple[Tensor, float]:
        """The w that minimises F along these directions from the point, (layers,), and E there:
        Newton, damped until it pays.
        """
        p = point.problem.weight
        slope = self.down(point.problem.slope)
        e = self.energies(point)
        rest = point.problem.fixed  # every other parameter is between some pair of ends
        w = torch.zeros_like(slope)
        now, energy = e, rest + float(e.sum())
        least = p * math.log(energy)
        damping = 1e-12
        for _ in range(steps):
            mean = -(self.directions.T @ now) / energy
            gradient = p * mean + slope
            direction = -_solver(self._hessian(now / energy, mean, p), damping)(gradient)
            direction *= self._length(direction)
            promised = -float(gradient @ direction)
            there = w + direction
            now_there = e * (-self.directions @ there).exp()
            energy_there = rest + float(now_there.sum())
            reached = (
                p * math.log(energy_there) + float(slope @ there)
                if 0 < energy_there < math.inf
                else math.inf
            )
            if reached <= least - 0.1 * promised:
                w, now, energy, least = there, now_there, energy_there, reached
                damping = damping / 100
            else:
                damping = max(100 * damping, 1e-6)
            if promised <= SETTLED * p or damping > 1e6:
                break
        return w, energy

    def _length(self, direction: Tensor) -> float:
        """The share of a step along a direction up to which a quadratic model of F can be
        trusted.
        """
        exponents = (self.directions @ direction).abs().max()
        lengths = torch.stack([exponents / LARGEST_EXPONENT, direction.abs().max() / LARGEST_STEP])
        return 1 / max(1.0, float(lengths.max()))

    def solver(self, point: Point) -> Callable[[Tensor], Tensor]:
        """The inverse of ∇²F at the point along these directions."""
        mean = self.down(point.energy_gradient) / point.energy
        return _solver(
            self._hessian(self.energies(point) / point.energy, mean, point.problem.weight)
        )

    def _hessian(self, shares: Tensor, mean: Tensor, p: float) -> Tensor:
        return p * (
            self.directions.T @ (shares[:, None] * self.directions) - torch.outer(mean, mean)
        )


def _distinct(kinds: Tensor, span: range) -> tuple[Tensor, Tensor | int]:
    """The distinct kinds, and which of them each is; mostly all are of one."""
    if len(span) == 1:
        return kinds[:1], 0
    return torch.unique(kinds, return_inverse=True)


def _solver(matrix: Tensor, damping: float = 1e-12) -> Callable[[Tensor], Tensor]:
    """x ↦ matrix⁻¹ x of a positive semidefinite matrix; along flat directions, where x is 0 but for
    rounding, next to nothing.
    """
    diagonal = matrix.diagonal().clamp(min=0.0)
    diagonal = diagonal + 1e-3 * diagonal.mean() + 1e-300
    for ridge in (damping * 10**k for k in range(0, 20, 2)):
        factor, failed = torch.linalg.cholesky_ex(matrix + torch.diag(ridge * diagonal))
        if not bool(failed):
            return lambda x: torch.cholesky_solve(x[:, None], factor)[:, 0]
    return lambda x: x / diagonal
