"""The types that a rescaling is rounded in, besides those of the weights.

A model with float32 weights that opens ``torch.autocast`` to bfloat16 in its forward rounds as
coarsely as one with bfloat16 weights. Its outputs can only be compared to that precision, and
factors that are powers of two pass through it unrounded.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from ..trees import tree_leaves
from .aliasing import Aliases, list_written
from .nodes import Graph, Node


def types_behind(graphs: Iterable[Graph], names: Iterable[str]) -> frozenset[torch.dtype]:
    """The floating-point types of all values between some parameters or buffers and the outputs.

    Args:
        graphs: Of one model.
        names: Of the parameters and buffers that are rescaled.
    """
    names = set(names)
    return frozenset(dtype for graph in graphs for dtype in _types_in(graph, names))


def _types_in(graph: Graph, names: set[str]) -> set[torch.dtype]:
    found: set[torch.dtype] = set()
    reached: set[Node] = set()
    aliases = Aliases()
    for node in graph.nodes:
        if node.op in ("parameter", "buffer") and node.name in names:
            reached.add(node)
        if node.target is None:
            continue
        aliases.record(node)
        if not reached.isdisjoint(node.operands):
            reached.add(node)
            found.update(dtype for dtype in tree_leaves(node.dtype) if _is_floating(dtype))
            for target in list_written(node):  # whatever shares this memory carries the values on
                reached |= aliases.of(target)
    return found


def _is_floating(dtype: Any) -> bool:
    return isinstance(dtype, torch.dtype) and dtype.is_floating_point
