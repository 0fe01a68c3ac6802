"""What the energy pass knows of a graph before it walks: which values depend on the data, and how
long each is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..capture.aliasing import Aliases, list_written
from ..capture.nodes import Graph, Node
from ..rules.table import family_of
from ..trees import tree_leaves


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is known of a graph before the walk.

    Attributes:
        per_sample: Nodes whose value depends on the inputs, or whose memory is written with
            something that does.
        tracked: Nodes whose real values are computed.
        written: Nodes that share memory with the target of an in-place op.
        last_read_at: Position -> nodes that nothing after it reads, nor what shares memory with
            them.
        last_read: Node -> position of the last call that reads it under its own name.
        input_positions: Input nodes -> their position among the inputs.
    """

    per_sample: set[Node]
    tracked: set[Node]
    written: set[Node]
    last_read_at: dict[int, list[Node]]
    last_read: dict[Node, int]
    input_positions: dict[Node, int]

    @classmethod
    def of(cls, graph: Graph, *, measures: Callable[[Node], bool]) -> Plan:
        aliases = Aliases()
        data: set[Node] = set()
        weights: set[Node] = set()
        overwritten: set[Node] = set()
        constants: set[Node] = set()
        arithmetic: set[Node] = set()  # computed from parameters alone, not by views
        measured = False
        for node in graph.nodes:
            operands = node.operands
            aliases.record(node)
            overwritten.update(
                member for target in list_written(node) for member in aliases.of(target)
            )
            if node.op == "input" or any(operand in data for operand in operands):
                data.add(node)
                data.update(
                    member for target in list_written(node) for member in aliases.of(target)
                )
                measured |= node.op != "input" and measures(node)
            elif node.op == "parameter" or any(operand in weights for operand in operands):
                weights.add(node)
                if node.op != "parameter" and (
                    not _is_view(node) or any(operand in arithmetic for operand in operands)
                ):
                    arithmetic.add(node)
            else:
                constants.add(node)
        per_sample = {node for node in graph.nodes if aliases.of(node) & data}
        tracked = set(graph.nodes) if measured else constants | _ancestors(arithmetic, aliases)
        last_read = _last_reads(graph)
        return cls(
            per_sample=per_sample,
            tracked=tracked,
            written=overwritten,
            last_read=last_read,
            last_read_at=_released_at(graph, last_read, aliases),
            input_positions={
                node: i for i, node in enumerate(n for n in graph.nodes if n.op == "input")
            },
        )


def _is_view(node: Node) -> bool:
    return node.op == "getitem" or family_of(node.op).reads_parameters


def _ancestors(nodes: Iterable[Node], aliases: Aliases) -> set[Node]:
    """The nodes, all they are computed from, and all that shares memory with it."""
    found: set[Node] = set()
    waiting = list(nodes)
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [*node.operands, *aliases.of(node)]
    return found


def _last_reads(graph: Graph) -> dict[Node, int]:
    last: dict[Node, int] = {}
    for position, node in enumerate(graph.nodes):
        last[node] = position
        for operand in node.operands:
            last[operand] = position
    for output in tree_leaves(graph.outputs):
        if isinstance(output, Node):
            last[output] = len(graph.nodes)
    return last


def _released_at(graph: Graph, last: dict[Node, int], aliases: Aliases) -> dict[int, list[Node]]:
    out: dict[int, list[Node]] = {}
    for node in graph.nodes:
        out.setdefault(max(last[member] for member in aliases.of(node)), []).append(node)
    return out
