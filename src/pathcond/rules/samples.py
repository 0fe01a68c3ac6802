"""What a node computes on each sample of the example batch, all at once where the op allows it.

A graph is captured on one sample, with its sizes baked in, so samples go through it one by one. Ops
that treat every row of the first axis by itself need not wait: the samples' rows are joined, and
one call serves them all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Samples:
    """The values of one node.

    Attributes:
        values: One per sample.
        joined: The memory of all of them, joined along the first axis; None where they were
            computed apart.
    """

    values: list[Any]
    joined: Tensor | None = None

    @classmethod
    def of_joined(cls, joined: Tensor, sizes: list[int]) -> Samples:
        return cls(list(joined.split(sizes)), joined)


def at_once(
    node: Node, arguments: dict[str, Any], call: Callable[[dict[str, Any]], Any]
) -> Samples | None:
    """Run a node on all samples in one call; None if its op, or what it is given, does not allow
    that.
    """
    op = node.op.removesuffix("_")
    given = [a for a in tree_leaves(arguments) if isinstance(a, Samples)]
    first = next(iter(arguments.values()))
    if op not in ROWWISE or not isinstance(first, Samples) or not _alike(given):
        return None
    if len(given) > 1 and op not in ROW_BY_ROW:  # a weight that differs from sample to sample
        return None
    x = first.values[0]
    if ROWWISE[op] not in (None, x.dim()) or x.dim() < 2 or _broadcasts(arguments, x):
        return None
    writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
    # the memory of a joined copy would not be theirs
    if (writes or op in MAY_RETURN_THEIR_INPUT) and first.joined is None:
        return None
    result = call(tree_map(_join, arguments))
    return Samples.of_joined(result, [len(value) for value in first.values])


def _join(a: Any) -> Any:
    if not isinstance(a, Samples):
        return a
    return a.joined if a.joined is not None else torch.cat(a.values)


def _alike(given: list[Samples]) -> bool:
    """All samples of all operands are tensors of one shape."""
    values = [value for samples in given for value in samples.values]
    return (
        all(isinstance(v, Tensor) and v.dim() > 0 and v.shape == values[0].shape for v in values)
        and len(values) > 0
    )


def _broadcasts(arguments: dict[str, Any], x: Tensor) -> bool:
    """Whether a second operand that is the same for all samples has rows of its own along the first
    axis.
    """
    other = arguments.get("other")
    return isinstance(other, Tensor) and (
        other.dim() > x.dim() or (other.dim() == x.dim() and len(other) != 1)
    )
