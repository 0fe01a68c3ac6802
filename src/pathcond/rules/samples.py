"""What a node computes on each sample of the example batch, all at once where the op allows it.

A graph is captured on one sample, with its sizes baked in, so samples go through it one by one. Ops
that treat every row of the first axis by itself need not wait: the samples' rows are joined, and
one call serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..capture.nodes import Node
from ..trees import tree_leaves, tree_map

# {op that treats every row by itself: axes that its input must have for that, None for any from two
# on}
ROWWISE: dict[str, int | None] = {
    **dict.fromkeys(
        "relu leaky_relu sigmoid tanh gelu silu mish elu softplus hardswish "
        "hardsigmoid relu6 abs neg exp".split()
    ),
    **dict.fromkeys("add sub mul linear batch_norm dropout contiguous clone".split()),
    "conv1d": 3,
    "conv2d": 4,
    "conv3d": 5,
    "max_pool2d": 4,
    "avg_pool2d": 4,
    "adaptive_avg_pool2d": 4,
}
ROW_BY_ROW = ("add", "sub", "mul")  # of two operands
MAY_RETURN_THEIR_INPUT = ("dropout", "contiguous")
RESHAPES = ("view", "reshape", "flatten", "unflatten")


class Samples:
    """The values of one node.

    Attributes:
        count: How many samples there are.
        joined: The memory of all of them, joined along the first axis, where they are tensors of
            one shape; None where they were computed apart.
        values: One per sample.
    """

    def __init__(self, values: list[Any]) -> None:
        self.count = len(values)
        self.joined: Tensor | None = None
        self.values = values

    @classmethod
    def of_joined(cls, joined: Tensor, count: int) -> Samples:
        samples = cls.__new__(cls)
        samples.count = count
        samples.joined = joined
        return samples

    @cached_property
    def values(self) -> list[Any]:
        """Of joined samples, made when one asks: a view of each takes its time."""
        return list(self.stack().unbind())

    @property
    def shape(self) -> torch.Size | None:
        """Of each of them; None where they are no tensors with a first axis, or differ."""
        if self.joined is not None:
            return torch.Size([len(self.joined) // self.count, *self.joined.shape[1:]])
        shapes = {v.shape if isinstance(v, Tensor) and v.dim() else None for v in self.values}
        return shapes.pop() if len(shapes) == 1 else None

    def stack(self) -> Tensor:
        """The memory of all of them, which is joined, with an axis for the samples in front."""
        assert self.joined is not None
        return self.joined.unflatten(0, (self.count, len(self.joined) // self.count))

    def join(self) -> Tensor:
        """All of them, joined along the first axis; the other axes lie in memory as they did."""
        if self.joined is not None:
            return self.joined
        strides = self.values[0].stride()
        order = sorted(range(len(strides)), key=lambda axis: (axis > 0, -strides[axis]))
        place = [order.index(axis) for axis in range(len(order))]
        return torch.cat([value.permute(order) for value in self.values]).permute(place)


def at_once(
    node: Node, arguments: dict[str, Any], call: Callable[[dict[str, Any]], Any]
) -> Samples | None:
    """Run a node on all samples in one call; None if its op, or what it is given, does not allow
    that.
    """
    op = node.op.removesuffix("_")
    given = [a for a in tree_leaves(arguments) if isinstance(a, Samples)]
    first = next(iter(arguments.values()))
    if isinstance(first, Samples) and op in RESHAPES:
        return _reshaped(node, first)
    if op not in ROWWISE or not isinstance(first, Samples) or not _alike(given):
        return None
    if len(given) > 1 and op not in ROW_BY_ROW:  # a weight that differs from sample to sample
        return None
    shape = first.shape
    if shape is None or ROWWISE[op] not in (None, len(shape)) or len(shape) < 2:
        return None
    if _broadcasts(arguments, shape):
        return None
    # the memory of a joined copy would not be theirs
    if (node.writes or op in MAY_RETURN_THEIR_INPUT) and first.joined is None:
        return None
    result = call(tree_map(lambda a: a.join() if isinstance(a, Samples) else a, arguments))
    return Samples.of_joined(result, first.count)


def _reshaped(node: Node, first: Samples) -> Samples | None:
    """Other axes behind the first: row by row, and in the same memory as one by one."""
    joined, shape = first.joined, first.shape
    if joined is None or not joined.is_contiguous() or not isinstance(node.shape, tuple):
        return None
    if not shape or not node.shape or shape[0] != node.shape[0]:
        return None
    return Samples.of_joined(joined.view(len(joined), *node.shape[1:]), first.count)


def _alike(given: list[Samples]) -> bool:
    """All samples of all operands are tensors of one shape."""
    shapes = {samples.shape for samples in given}
    return len(shapes) == 1 and None not in shapes


def _broadcasts(arguments: dict[str, Any], shape: torch.Size) -> bool:
    """Whether a second operand that is the same for all samples has rows of its own along the first
    axis.
    """
    other = arguments.get("other")
    return isinstance(other, Tensor) and (
        other.dim() > len(shape) or (other.dim() == len(shape) and len(other) != 1)
    )
