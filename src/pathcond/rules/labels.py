"""Labels: which log-scale every element of a tensor carries.

A label is a non-negative integer that names an unknown log-scale t. Two values are special:

    FIXED = 0    t = 0: model inputs, constants, outputs; the element may not be rescaled
    ANY = -1     an exact 0 or an infinity: it is what it is under every scale

Shape operations run on the label tensor itself, so no axis is ever matched by its size. A tensor of
labels is stored with size 1 along every axis on which it is constant: a (N, C, H, W) activation
costs C integers.

    >>> import torch
    >>> channels = Labels(
    ...     torch.tensor([5, 6], dtype=torch.int32).view(1, 2, 1, 1), (8, 2, 3, 3)
    ... )
    >>> reshape(channels, (8, 18)).ids
    tensor([[5, 5, 5, 5, 5, 5, 5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 6, 6]],
           dtype=torch.int32)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

FIXED = 0
ANY = -1


@dataclass(frozen=True)
class Labels:
    """The labels of one tensor.

    Attributes:
        ids: int32, same number of axes as ``shape``; size 1 where the labels do not vary.
        shape: Shape of the labelled tensor.
    """

    ids: Tensor
    shape: tuple[int, ...]

    @property
    def full(self) -> Tensor:
        """One label per element, without a copy (stride 0 along constant axes)."""
        return self.ids.expand(self.shape)

    def along(self, axes: Iterable[int]) -> Tensor:
        """``ids`` with the given axes spelled out in full, the others left as they are."""
        axes = {axis % len(self.shape) for axis in axes}
        return self.ids.expand([size if i in axes else -1 for i, size in enumerate(self.shape)])

    @property
    def fixed(self) -> bool:
        """True if every element is FIXED: nothing to trace any more."""
        return self.ids.numel() == 1 and self.ids.item() == FIXED


def constant(shape: Sequence[int], label: int = FIXED) -> Labels:
    """The same label everywhere."""
    return Labels(torch.full((1,) * len(shape), label, dtype=torch.int32), tuple(shape))


def of_value(value: Tensor) -> Labels:
    """Labels of a known constant: zeros and infinities are ANY, everything else is FIXED."""
    if value.is_meta:
        return constant(value.shape)
    if value.dtype.is_floating_point or value.dtype.is_complex:
        neutral = (value == 0) | torch.isinf(value)
    else:
        neutral = value == 0
    if not neutral.any():
        return constant(value.shape)
    if neutral.all():
        return constant(value.shape, ANY)
    return Labels(torch.where(neutral, ANY, FIXED).to(torch.int32).cpu(), tuple(value.shape))


def compress(ids: Tensor) -> Labels:
    """Labels from a full tensor of ids; axes along which it is a stride-0 view are stored once."""
    shape = tuple(ids.shape)
    for axis, (size, stride) in enumerate(zip(shape, ids.stride(), strict=True)):
        if size > 1 and stride == 0:
            ids = ids.narrow(axis, 0, 1)
    return Labels(ids, shape)


def through_view(view: Callable[[Tensor], Tensor], labels: Labels) -> Labels:
    """Run an op that returns a view (permute, slice, expand, …) on the labels."""
    return compress(view(labels.full))


def reshape(labels: Labels, shape: Sequence[int]) -> Labels:
    """Element order is kept; axes on which labels are constant stay compressed where the new shape
    allows it.

    Both shapes are cut into the shortest runs of axes with equal products: (N | C H W) -> (N |
    CHW). A run that is constant stays constant; any other run is spelled out.
    """
    shape = tuple(shape)
    if prod(labels.shape) == 0:
        return constant(shape)
    varying: list[int] = []
    compact: list[int] = []
    for old_axes, new_axes in _common_runs(labels.shape, shape):
        if all(labels.ids.shape[axis] == 1 for axis in old_axes):
            compact += [1] * len(new_axes)
        else:
            varying += old_axes
            compact += [shape[axis] for axis in new_axes]
    return Labels(labels.along(varying).reshape(compact), shape)


def _common_runs(old: tuple[int, ...], new: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    runs = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = ([i], []) if i < len(old) else ([], [j])
        size_left, size_right = (old[i], 1) if left else (1, new[j])
        i, j = i + len(left), j + len(right)
        while size_left != size_right or not (left and right):
            if size_right < size_left or (not right and j < len(new)):
                right.append(j)
                size_right *= new[j]
                j += 1
            elif size_left < size_right and i < len(old):
                left.append(i)
                size_left *= old[i]
                i += 1
            else:
                break
        runs.append((left, right))
    return runs


def concatenate(parts: Sequence[Labels], axis: int) -> Labels:
    """Labels of torch.cat."""
    axis %= len(parts[0].shape)
    wide = [
        max(part.ids.shape[i] for part in parts) if i != axis else -1
        for i in range(len(parts[0].shape))
    ]
    rows = [part.along([axis]).expand(wide) for part in parts]
    shape = list(parts[0].shape)
    shape[axis] = sum(part.shape[axis] for part in parts)
    same = all(
        row.shape[axis] == 0 or (part.ids.shape[axis] == 1 and torch.equal(part.ids, parts[0].ids))
        for row, part in zip(rows, parts, strict=True)
    )
    return Labels(parts[0].ids if same else torch.cat(rows, axis), tuple(shape))
