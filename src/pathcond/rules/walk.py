"""One walk over a graph, call by call in order. What the calls come to is told by a ``Reading``.

Two readings exist: the search for symmetries follows the scales of activations
(``symmetry.propagation``), and the path lifting follows the energies of paths
(``lifting.energy_pass``). What they have in common is here: leaves, members of tuples, arguments,
rules that fail, and which values share memory.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..capture.aliasing import Aliases, list_written
from ..capture.nodes import Graph, Node
from ..trees import tree_map
from .table import family_of
from .values import Known

logger = logging.getLogger("pathcond")

# What a rule raises on an argument that it does not foresee.
FORM_ERRORS = (RuntimeError, IndexError, KeyError, ValueError, TypeError)
UNFORESEEN = "in a form that its rule does not cover"


class Reading(ABC):
    """What a walk makes of the nodes that it passes."""

    @abstractmethod
    def leaf(self, node: Node) -> Any:
        """What a parameter, a buffer, a constant or an input is; asked when a call first reads
        it.
        """

    @abstractmethod
    def call(self, node: Node, arguments: dict[str, Any]) -> Any:
        """What a call returns, given what its arguments are."""

    @abstractmethod
    def member(self, node: Node, member: Any) -> Any:
        """What a call returns that takes one member of a tuple or list."""

    @abstractmethod
    def write(self, node: Node, result: Any) -> None:
        """Follow an in-place call: its targets, and all that shares memory with them, have
        changed.
        """

    def leave(self, node: Node) -> None:  # noqa: B027
        """Told of every call when all is said about it."""


@dataclass
class Walk:
    """A walk, and where it stands.

    Attributes:
        graph: What is walked over.
        reading: What the nodes come to.
        values: What every node so far has come to; leaves when something has read them.
        aliases: Which of them share memory.
        position: Of the call at work, in the graph.
    """

    graph: Graph
    reading: Reading
    values: dict[Node, Any] = field(default_factory=dict)
    aliases: Aliases = field(default_factory=Aliases)
    position: int = 0

    def run(self) -> None:
        """Walk from the first call to the last."""
        for position, node in enumerate(self.graph.nodes):
            self.position = position
            if node.target is None:
                continue
            arguments = tree_map(lambda a: self.value(a) if isinstance(a, Node) else a, node.bound)
            if node.op == "getitem":
                result = self.reading.member(node, arguments["0"][arguments["1"]])
            else:
                result = self.reading.call(node, arguments)
            self.values[node] = result
            self.aliases.record(node)
            if list_written(node):
                self.reading.write(node, result)
            self.reading.leave(node)

    def value(self, node: Node) -> Any:
        """What a node has come to."""
        if node not in self.values and node.target is None:
            self.values[node] = self.reading.leaf(node)
        return self.values[node]


def follow_rule(node: Node, rule: Callable[[], Any], otherwise: Callable[[str], Any]) -> Any:
    """What a rule says of a node; what ``otherwise`` says, given a reason, where an argument has a
    form that the rule does not foresee.
    """
    try:
        return rule()
    except FORM_ERRORS as error:
        logger.info("The rule for %s failed at %s: %s", node.op, node.where, error)
        return otherwise(f"reaches {node.op} {UNFORESEEN}")


def reads_constant(node: Node, known: Sequence[Known]) -> bool:
    """Whether weights of a contraction read a constant: an initial state of zeros, a table of
    positions.
    """
    return family_of(node.op).contracts and any(a.value.dtype.is_floating_point for a in known)
