"""The convex criterion F over the log-scales of a Symmetry: value, gradient and Hessian-vector products in block form.

    F(u) = p · log Σ_i g_i exp(−(Ku)_i) + Σ_i (Ku)_i                                       (eq. optim_with_bz)

over the p trainable parameters with g_i > 0; u = 2t, and θ' = θ ⊙ exp(Ku/2) has the diagonal g ⊙ exp(−Ku). A parameter that
the class of equal log-scales r multiplies and the class c divides has (Ku)_i = v_r − v_c, where v = C u is the u of every
class. So a parameter tensor enters only through sums over its (r, c) pairs:

    u   (num_units,)      unknowns             M   (R, C) of a block, Σ g of every pair
    v   (num_classes,)    C u                  n   (num_classes,) parameters that a class multiplies, less those it divides
    E   Σ_i g_i exp(−(Ku)_i), relative to its value at u = 0                   s = ∂E/∂v

>>> import torch, pathcond
>>> model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)).double()
>>> x = torch.randn(4, 2).double()
>>> problem = Problem.of(pathcond.find_symmetry(model, x), pathcond.diag_g(model, x))
>>> problem.num_parameters, problem.num_units
(13, 3)
>>> u = torch.zeros(3, dtype=torch.float64)
>>> bool(problem.at(u).gradient @ problem.at(u).gradient >= 0)
True
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from .symmetry import Combination, Symmetry
from .values import Scaling


@dataclass(frozen=True)
class Block:
    """One parameter, summed over pairs of classes of equal log-scales.

    Attributes:
        rows, columns: (R,) and (C,) classes that multiply and that divide it; both (n,) where only some pairs occur.
        energy: (R, C) or (n,), Σ g of every pair.
        count: The same for the number of parameters with g > 0.
    """

    rows: Tensor
    columns: Tensor
    energy: Tensor
    count: Tensor

    @classmethod
    def of(cls, scaling: Scaling, g: Tensor) -> Block:
        """Collapse g, which has the parameter's shape, to the pairs of classes of its scaling."""
        device = g.device
        rows, r = torch.unique(scaling.plus.long().to(device), return_inverse=True)
        columns, c = torch.unique(scaling.minus.long().to(device), return_inverse=True)
        pairs = r * len(columns) + c
        energy = g.sum_to_size(pairs.shape).flatten()
        count = (g > 0).double().sum_to_size(pairs.shape).flatten()
        if pairs.numel() < len(rows) * len(columns):  # a depthwise kernel: each channel meets only itself
            return cls(rows[r.expand_as(pairs).flatten()], columns[c.expand_as(pairs).flatten()], energy, count)
        size = len(rows) * len(columns)
        dense = [torch.zeros(size, dtype=torch.float64, device=device).index_add_(0, pairs.flatten(), x) for x in (energy, count)]
        return cls(rows, columns, *(x.view(len(rows), len(columns)) for x in dense))

    def row_sums(self, weights: Tensor, y: Tensor) -> Tensor:
        """Σ over columns of weights · y[column], one per row; y is (num_classes,)."""
        return weights @ y[self.columns] if weights.dim() == 2 else weights * y[self.columns]

    def column_sums(self, weights: Tensor, x: Tensor) -> Tensor:
        """Σ over rows of weights · x[row], one per column; x is (num_classes,)."""
        return x[self.rows] @ weights if weights.dim() == 2 else weights * x[self.rows]


@dataclass(frozen=True)
class Problem:
    """F over one Symmetry and one diagonal.

    Attributes:
        blocks: The parameters that some unit rescales; energies relative to the sum of all g.
        fixed: Energy of the others, likewise relative.
        num_parameters: p, the number of trainable parameters with g > 0.
        log_total: log of the sum of all g.
        combination: C.
        num_units: Length of u.
        groups: Positions of the units, layer by layer in forward order.
        slope: (num_units,) gradient of the linear term Σ_i (Ku)_i.
    """

    blocks: tuple[Block, ...]
    fixed: float
    num_parameters: int
    log_total: float
    combination: Combination
    num_units: int
    groups: tuple[Tensor, ...]
    slope: Tensor

    @classmethod
    def of(cls, symmetry: Symmetry, g: Mapping[str, Tensor]) -> Problem:
        """Collapse a diagonal over the classes of a Symmetry.

        Args:
            symmetry: From ``find_symmetry``.
            g: From ``diag_g``, by parameter name; what is missing counts in neither p nor E.

        Raises:
            ValueError: g has a negative or non-finite entry, or no positive one.
        """
        total = sum(float(values.sum()) for values in g.values())
        smallest = min((float(values.min()) for values in g.values() if values.numel()), default=0.0)
        if not (math.isfinite(total) and total > 0 and smallest >= 0):
            raise ValueError(
                f"diag(G) must be finite, not negative, and positive somewhere: its sum is {total}, its least {smallest}"
            )
        scaled = {name: values.double() / total for name, values in g.items() if name in symmetry.scalings}
        blocks = tuple(Block.of(symmetry.scalings[name], values) for name, values in scaled.items())
        fixed = sum(float(values.sum()) / total for name, values in g.items() if name not in symmetry.scalings)
        device = next(iter(g.values())).device
        combination = symmetry.combination.to(device)
        n = torch.zeros(combination.num_classes, dtype=torch.float64, device=device)
        one = torch.ones_like(n)
        for block in blocks:
            n.index_add_(0, block.rows, block.row_sums(block.count, one))
            n.index_add_(0, block.columns, -block.column_sums(block.count, one))
        return cls(
            blocks=blocks, fixed=fixed, num_parameters=sum(int((values > 0).sum()) for values in g.values()),
            log_total=math.log(total), combination=combination, num_units=symmetry.num_units,
            groups=tuple(torch.tensor(group.units, device=device) for group in symmetry.groups),
            slope=combination.transposed(n, symmetry.num_units),
        )  # fmt: skip

    def at(self, u: Tensor) -> Point:
        """F around u, (num_units,): its value, gradient and Hessian."""
        return Point(self, u)


class Point:
    """F at one u; what is asked for is computed once."""

    def __init__(self, problem: Problem, u: Tensor) -> None:
        self.problem, self.u = problem, u.clone()
        v = problem.combination @ u
        self.shrink, self.grow = (-v).exp(), v.exp()  # of a parameter that the class multiplies, or divides
        # (R,) and (C,) per block: energies that leave through each row and column
        self.by_row = [self.shrink[b.rows] * b.row_sums(b.energy, self.grow) for b in problem.blocks]

    @cached_property
    def by_column(self) -> list[Tensor]:
        return [self.grow[b.columns] * b.column_sums(b.energy, self.shrink) for b in self.problem.blocks]

    @cached_property
    def energy(self) -> float:
        """E(u) / E(0)."""
        return self.problem.fixed + float(sum(row.sum() for row in self.by_row))

    @property
    def value(self) -> float:
        """F(u)."""
        p = self.problem
        return p.num_parameters * (p.log_total + math.log(self.energy)) + float(p.slope @ self.u)

    @cached_property
    def energy_gradient(self) -> Tensor:
        """∂E/∂u, (num_units,)."""
        s = torch.zeros_like(self.grow)
        for block, row, column in zip(self.problem.blocks, self.by_row, self.by_column, strict=True):
            s.index_add_(0, block.rows, -row)
            s.index_add_(0, block.columns, column)
        return self.problem.combination.transposed(s, self.problem.num_units)

    @cached_property
    def gradient(self) -> Tensor:
        """∇F(u), (num_units,)."""
        return self.problem.num_parameters / self.energy * self.energy_gradient + self.problem.slope

    def laplacian_diagonal(self) -> Tensor:
        """The diagonal of p/E · ∂²E/∂u², (num_units,), each unit's classes taken as independent: an upper estimate."""
        degree = torch.zeros_like(self.grow)
        for block, row, column in zip(self.problem.blocks, self.by_row, self.by_column, strict=True):
            degree.index_add_(0, block.rows, row)
            degree.index_add_(0, block.columns, column)
        C = self.problem.combination
        squares = Combination(C.classes, C.units, C.coefficients.square(), C.num_classes)
        return self.problem.num_parameters / self.energy * squares.transposed(degree, self.problem.num_units)

    def hessian_product(self, d: Tensor) -> Tensor:
        """∇²F(u) · d, (num_units,): a weighted graph Laplacian less a rank-one term."""
        problem = self.problem
        dv = problem.combination @ d
        out = torch.zeros_like(dv)
        shrunk, grown = self.shrink * dv, self.grow * dv
        for block, row, column in zip(problem.blocks, self.by_row, self.by_column, strict=True):
            across = self.shrink[block.rows] * block.row_sums(block.energy, grown)
            back = self.grow[block.columns] * block.column_sums(block.energy, shrunk)
            out.index_add_(0, block.rows, dv[block.rows] * row - across)
            out.index_add_(0, block.columns, dv[block.columns] * column - back)
        laplacian = problem.combination.transposed(out, problem.num_units)
        mean = self.energy_gradient / self.energy
        return problem.num_parameters * (laplacian / self.energy - mean * (mean @ d))
