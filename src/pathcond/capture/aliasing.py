"""Which values of a graph share memory, and which of them an in-place op writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..trees import tree_leaves
from .nodes import Graph, Node
from .schemas import schema_of

# Ops that always return a view of their first argument (reshape and contiguous may copy).
VIEWS = frozenset(
    "alias slice select view permute transpose t squeeze unsqueeze narrow movedim chunk split "
    "split_with_sizes unbind "
    "getitem".split()
)


class Aliases:
    """Groups of nodes that (may) share memory, grown node by node in execution order."""

    def __init__(self) -> None:
        self._groups: dict[Node, set[Node]] = {}

    def of(self, node: Node) -> set[Node]:
        """All nodes so far that may share memory with the node, itself included."""
        return self._groups.get(node, {node})

    def record(self, node: Node) -> None:
        """Views, and ops that may return their input, share its memory."""
        if not isinstance(node.target, torch._ops.OpOverload):
            sources = [a for a in node.args if isinstance(a, Node)] if node.op == "getitem" else []
        else:
            arguments = schema_of(node.target).arguments
            names = {a.name for a in arguments if a.shared and not _converts(node)}
            bound = node.bound
            may_return_input = "dropout" in node.op
            sources = [
                leaf
                for name in names
                for leaf in tree_leaves(bound.get(name))
                if isinstance(leaf, Node)
            ]
            sources += [node.args[0]] if may_return_input and isinstance(node.args[0], Node) else []
        group = {node}
        for source in sources:
            group |= self.of(source)
        for member in group:
            self._groups[member] = group

    def views(self, node: Node) -> dict[Node, list[Node]]:
        """For every node that shares memory with this one, the views from their common base to it,
        the base first.

        Empty where it is not certain which elements are shared: an op that may copy, or more than
            one base.
        """
        chains = {member: _views_from_base(member) for member in self.of(node)}
        bases = {chain[0] if chain else None for chain in chains.values()}
        return (
            {}
            if None in bases or len(bases) > 1
            else {member: chain for member, chain in chains.items() if chain}
        )


def _converts(node: Node) -> bool:
    """Whether the node is a conversion to another type, which always copies."""
    return node.op in ("to", "_to_copy", "type_as") and node.dtype != node.operands[0].dtype


def list_written(node: Node) -> list[Node]:
    """The nodes whose memory the op overwrites."""
    if not node.writes:
        return []
    names = [a.name for a in schema_of(node.target).arguments if a.written]
    return [
        leaf
        for name in names
        for leaf in tree_leaves(node.bound.get(name))
        if isinstance(leaf, Node)
    ]


def list_written_leaves(graph: Graph) -> list[tuple[Node, Node]]:
    """Parameters, buffers and constants whose memory a graph writes into, each with the op that
    does.
    """
    aliases = Aliases()
    found = []
    for node in graph.nodes:
        aliases.record(node)
        members = [m for target in list_written(node) for m in aliases.of(target)]
        found += [(member, node) for member in members if member.target is None]
    return found


def _views_from_base(node: Node) -> list[Node] | None:
    """The base of a view and the views from it to the node; None if one of them might be a copy."""
    chain = [node]
    while True:
        node = chain[0]
        source = next((arg for arg in node.args if isinstance(arg, Node)), None)
        passes = node.op == "dropout" and not node.bound["train"]  # then it returns its input
        if node.target is None or (node.op not in VIEWS and not node.writes and not passes):
            aliasing = isinstance(node.target, torch._ops.OpOverload) and any(
                argument.shared and not _converts(node)
                for argument in schema_of(node.target).arguments
            )
            return None if aliasing or "dropout" in node.op else chain
        if source is None or (node.writes and node.shape != source.shape):  # resized in place
            return None
        chain.insert(0, source)


def through_views(chain: Sequence[Node], tensor: Any) -> Any:
    """Apply the views of a chain, in order, to another tensor of the base's shape."""
    for node in chain:
        if node.op == "getitem":
            tensor = tensor[node.args[1]]
        elif not node.writes:  # an in-place op returns its target
            first, *rest = node.bound
            tensor = node.target(**{first: tensor, **{name: node.bound[name] for name in rest}})
    return tensor
