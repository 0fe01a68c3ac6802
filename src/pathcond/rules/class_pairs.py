"""Which classes of equal log-scales meet in a parameter, and sums over the elements in which two of
them do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class ClassPairs:
    """Which classes meet in a parameter.

    Attributes:
        rows, columns: (R,) and (C,) distinct classes.
        r, c: Position in them of every element; int64 that broadcast to the parameter's shape. All
            on the CPU.
    """

    rows: Tensor
    columns: Tensor
    r: Tensor
    c: Tensor

    @classmethod
    def of(cls, plus: Tensor, minus: Tensor, dim: int) -> ClassPairs:
        rows, r = torch.unique(plus, return_inverse=True)
        columns, c = torch.unique(minus, return_inverse=True)
        r, c = (ids.view((1,) * (dim - ids.dim()) + ids.shape) for ids in (r, c))
        return cls(rows.long(), columns.long(), r, c)

    @property
    def size(self) -> torch.Size:
        return torch.Size(max(m, n) for m, n in zip(self.r.shape, self.c.shape, strict=True))

    @property
    def dense(self) -> bool:
        """Whether a matrix over all pairs of classes is no larger than the pairs that occur."""
        return self.size.numel() >= len(self.rows) * len(self.columns)

    def counts(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """The weights at every element of r and of c, flattened, on their own device; True counts
        as 1.
        """
        by_row, by_column = (
            _sum_to_shape(weights, ids.shape).double().flatten() for ids in (self.r, self.c)
        )
        return by_row, by_column

    def pairs(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Every pair that occurs, element by element: its row, its column and Σ of the values
        there, (n,) each.
        """
        rows, columns = (
            classes.expand(self.size).flatten()
            for classes in (self.rows[self.r], self.columns[self.c])
        )
        return rows, columns, _sum_to_shape(values, self.size).flatten()

    def matrix(self, values: Tensor) -> Tensor:
        """Σ over the elements of every pair, (R, C)."""
        size, (R, C) = self.size, (len(self.rows), len(self.columns))
        values = _sum_to_shape(values, size)
        of_row = [d for d, n in enumerate(self.r.shape) if n > 1]
        # a grouped kernel: classes vary together along an axis
        if any(self.c.shape[d] > 1 for d in of_row):
            pairs = (self.r * C + self.c).flatten().to(values.device)
            return (
                torch.zeros(R * C, dtype=values.dtype, device=values.device)
                .index_add_(0, pairs, values.flatten())
                .view(R, C)
            )
        others = [d for d in range(len(size)) if d not in of_row]
        values = values.permute(of_row + others).reshape(self.r.numel(), -1)
        return _merge(_merge(values, self.r.flatten(), R).T, self.c.flatten(), C).T.contiguous()


def _merge(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Rows of (n, m) with the same id summed, (count, m)."""
    if len(ids) == count and bool((ids[1:] > ids[:-1]).all()):
        return values
    run = len(ids) // count
    if run * count == len(ids) and torch.equal(ids, torch.arange(count).repeat_interleave(run)):
        return values.unflatten(0, (count, run)).sum(1)  # the pixels of a flattened image
    zeros = torch.zeros(count, values.shape[1], dtype=values.dtype, device=values.device)
    return zeros.index_add_(0, ids.to(values.device), values)


def _sum_to_shape(values: Tensor, shape: torch.Size) -> Tensor:
    """``sum_to_size``, for booleans too; along axes on which values are expanded, a product."""
    axes = [d for d, (n, kept) in enumerate(zip(values.shape, shape, strict=True)) if kept == 1 < n]
    expanded = [d for d in axes if values.stride(d) == 0]
    times = math.prod(values.shape[d] for d in expanded)
    for d in expanded:
        values = values.narrow(d, 0, 1)
    axes = [d for d in axes if d not in expanded]
    values = values.sum(axes, keepdim=True) if axes else values
    return values * times if expanded else values
