"""Graph -> path energy: one forward walk, and one backward pass for the diagonal of G.

The graph is that of one sample. Where factors depend on the data, the same walk also computes the
real values of every sample of the example batch, in float64, node by node: a node that needs them
finds them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..capture.aliasing import list_written, through_views
from ..capture.nodes import Node
from ..errors import UnsupportedModelError
from ..rules import RULES
from ..rules.energies import FREEZE, Alternatives, Apart, Edges, Energies, Frozen, PathSum
from ..rules.picking import FOLLOWED, MOVES, PASSES, PASSES_APPROXIMATELY, same_order
from ..rules.table import Rule
from ..rules.values import Known, is_zero
from ..rules.walk import Reading, Walk, follow_rule, reads_constant
from ..trees import tree_leaves, tree_map
from .batch_values import BatchValues

# Ops in front of which the energies of experts need not be averaged; all that the labels of experts
# are followed through.
KEEPS_APART = MOVES | PASSES | PASSES_APPROXIMATELY | FOLLOWED
LARGE = 2.0**500  # counts beyond this move into the exponent


@dataclass(frozen=True, kw_only=True)
class Lifted:
    """Result of a walk.

    Attributes:
        total: Σ over all paths of Π |θ|^p, divided by 2^exponent.
        exponent: See ``total``; 0 unless paths are counted.
        cuts: Where paths end without reaching an output: (node, operand through which they came),
            and why.
    """

    total: Tensor
    exponent: int
    cuts: dict[tuple[Node, Node], str]


class EnergyPass(Reading):
    """What the nodes of the graph of one sample come to as energies of paths."""

    def __init__(
        self,
        batch: BatchValues,
        energies: Energies,
        edges: Callable[[str], Tensor],
        *,
        release: Callable[[str], None] = lambda name: None,
        normalise: Callable[[PathSum], PathSum] = lambda paths: paths,
        watch: Callable[[Node, PathSum], None] = lambda node, paths: None,
    ) -> None:
        """
        Args:
            batch: Values on the example batch, which know the graph.
            energies: What the rules see.
            edges: |θ|^p of a parameter by name, asked for when the first node reads it; what it
                returns may carry a gradient.
            release: Told the name of a parameter after the last node that reads it.
            normalise: What becomes of each energy after its node: counts and the search for
                underflow rescale it.
            watch: Sees each energy after its node.
        """
        self.batch = batch
        self.energies = energies
        self.edges = edges
        self.release = release
        self.normalise = normalise
        self.watch = watch
        self.sinks: list[PathSum] = []
        # Not in a circle: squared weights go with the last reference to the pass.
        self._walk = Walk(batch.graph, weakref.proxy(self))

    def run(self) -> Lifted:
        """Walk the graph once."""
        self._walk.run()
        return self.collect()

    # -- leaves and calls --------------------------------------------------------------------------

    def leaf(self, node: Node) -> Any:
        first = self.batch.start(node)
        if node.op == "parameter":
            return Edges(self.edges(node.name))
        if node.op != "input":
            return Known(first)
        if not isinstance(node.shape, tuple):
            return None
        if node.dtype.is_floating_point:
            device = self.energies.device
            return PathSum(torch.ones(node.shape, dtype=torch.float64, device=device))
        return Frozen(node)

    def member(self, node: Node, member: Any) -> Any:
        self._compute(node)
        return replace(member, node=node) if isinstance(member, Frozen) else member

    def call(self, node: Node, arguments: dict[str, Any]) -> Any:
        self.energies.node = node
        apart = any(isinstance(a, Alternatives) for a in tree_leaves(arguments))
        result = (self._apart if apart else self._energy)(node, arguments)
        # after the rule, which reads what an in-place op overwrites
        self._compute(node)
        return result

    def _compute(self, node: Node) -> None:
        if node in self.batch.plan.tracked and node not in self.batch.values:
            self.batch.compute(node)

    def leave(self, node: Node) -> None:
        for done in self.batch.plan.last_read_at.get(self._walk.position, ()):
            if done.op == "parameter":
                self.release(done.name)
            self._walk.values.pop(done, None)
            self.batch.forget(done)

    def _energy(self, node: Node, arguments: dict[str, Any]) -> Any:
        operands = [
            a for a in tree_leaves(arguments) if isinstance(a, (PathSum, Edges, Frozen, Known))
        ]
        paths = [a for a in operands if isinstance(a, PathSum)]
        frozen = [a for a in operands if isinstance(a, Frozen)]
        edges = [a for a in operands if isinstance(a, Edges)]
        if not (paths or frozen or edges):
            return self._compute_known(node)
        rule = RULES.get(node.op)
        if not paths and not (frozen and edges):
            if not edges:  # gates, statistics, indices
                return self._freeze(node, frozen)
            constants = [a for a in operands if isinstance(a, Known)]
            alone = rule is None or not rule.family.reads_parameters
            if alone and not reads_constant(node, constants):
                return self._of_parameters(node, arguments, operands)
        if rule is None or rule.energy is None:
            return self._end(node, f"reaches {node.op}", operands)
        self.energies.operands = arguments
        self.energies.exponent = max((a.exponent for a in paths), default=0)
        constants = [a for a in operands if isinstance(a, Known)]
        kind = PathSum if paths or frozen or reads_constant(node, constants) else Edges
        result = follow_rule(
            node,
            lambda: self.apply(node, rule, arguments),
            lambda reason: self._end(node, reason, operands),
        )
        return self._wrap(node, result, kind, operands)

    def apply(self, node: Node, rule: Rule, arguments: dict[str, Any]) -> Any:
        """The energy of a node by its rule, which has one."""
        assert rule.energy is not None
        return rule.energy(self.energies, arguments)

    def _wrap(self, node: Node, result: Any, kind: type, operands: list[Any]) -> Any:
        if result is FREEZE:
            return self._end(node, f"reaches {node.op}", operands)
        if isinstance(result, Apart):
            kind = Edges if result.edges else PathSum
            return Alternatives(
                tuple(self._wrap(node, part, kind, operands) for part in result.powers),
                result.index,
            )
        if isinstance(result, (list, tuple)):
            return [
                Frozen(node) if part is FREEZE else self._wrap(node, part, kind, operands)
                for part in result
            ]
        if not isinstance(result, Tensor):
            return result
        if kind is Edges:
            return Edges(result)
        passed = next(
            (
                a
                for a in tree_leaves(self.energies.operands)
                if isinstance(a, PathSum) and a.power is result
            ),
            None,
        )
        # unchanged: normalised already, and what shares its memory need not be told
        if passed is not None:
            return passed
        made = self.normalise(PathSum(result, self.energies.exponent))
        self.watch(node, made)
        return made

    # -- experts -----------------------------------------------------------------------------------

    def _apart(self, node: Node, arguments: dict[str, Any]) -> Any:
        """The op on each alternative by itself, or on their average where labels depend on the
        expert no more.
        """
        leaves = tree_leaves(arguments)
        given = [a for a in leaves if isinstance(a, Alternatives)]
        own = node.bound.get("offs")
        indices = {a.index for a in given} | (
            {same_order(own)[-1]} if own is not None and not self.energies.calibrate else set()
        )
        per_sample = self.energies.calibrate and node.op == "index"
        if len(indices) > 1 or not (node.op in KEEPS_APART or per_sample):
            return self._energy(node, tree_map(_join, arguments))
        if node.op not in MOVES and not any(
            isinstance(part, PathSum) for a in leaves for part in getattr(a, "parts", (a,))
        ):
            # what is looked up starts paths, as an embedding does
            arguments = tree_map(_as_paths, arguments)
        results = []
        try:
            for i in range(len(given[0].parts)):
                self.energies.alternative = i
                results.append(self._energy(node, tree_map(partial(_alternative, at=i), arguments)))
        finally:
            self.energies.alternative = None
        if any(not isinstance(part, (PathSum, Edges)) for part in tree_leaves(results)):
            return self._energy(node, tree_map(_join, arguments))
        return _regroup(results, given[0].index)

    def _freeze(self, node: Node, operands: list[Frozen]) -> Any:
        ends = tuple(end for operand in operands for end in operand.ends)
        if isinstance(node.shape, list):
            return [Frozen(node, ends) for _ in node.shape]
        return Frozen(node, ends) if isinstance(node.shape, tuple) else None

    def _end(self, node: Node, reason: str, operands: list[Any]) -> Any:
        """All paths that reach this node end here."""
        if self.energies.calibrate and node not in self.batch.plan.tracked:
            raise MissingValueError(node.op)
        self._cut(node, reason)
        ends = tuple({id(a): a for a in operands if isinstance(a, PathSum)}.values())
        if node.op == "opaque":  # its inputs are pinned as outputs are, and count as such
            self.sinks += ends
            ends = ()
        frozen = [a for a in operands if isinstance(a, Frozen)]
        return self._freeze(node, [Frozen(node, ends), *frozen])

    def _of_parameters(self, node: Node, arguments: dict[str, Any], operands: list[Any]) -> Any:
        """A parameter times a constant, or plus zero, is an edge; other arithmetic on parameters is
        a constant.
        """
        pair = [arguments.get("self"), arguments.get("other")]
        weight = next((a for a in pair if isinstance(a, Edges)), None)
        if (
            node.op == "mul"
            and weight is not None
            and sum(isinstance(a, Edges) for a in operands) == 1
        ):
            return Edges(self.energies.factor(pair[0]) * self.energies.factor(pair[1]))
        if (
            node.op == "div"
            and pair[0] is weight
            and not isinstance(pair[1], Edges)
            and arguments.get("rounding_mode") is None
        ):
            return Edges(self.energies.factor(pair[0]) / self.energies.factor(pair[1]))
        if node.op in ("add", "sub") and pair[0] is weight and is_zero(pair[1]):
            return weight
        self._cut(node, f"enters {node.op}, which is computed from parameters alone,")
        return self._compute_known(node)

    def _cut(self, node: Node, reason: str) -> None:
        self.energies.cuts |= {(node, operand): reason for operand in node.operands}

    def _compute_known(self, node: Node) -> Any:
        self.batch.compute(node)
        first = self.batch.first(node)
        return tree_map(lambda v: Known(v) if isinstance(v, Tensor) else v, first)

    # -- in-place calls ----------------------------------------------------------------------------

    def write(self, node: Node, result: Any) -> None:
        members = {
            member for target in list_written(node) for member in self._walk.aliases.of(target)
        }
        before = {member: self._walk.value(member) for member in members}
        given = [
            a for a in [result, *tree_leaves(list(before.values()))] if isinstance(a, Alternatives)
        ]
        if not given:
            self._write(node, result)
            return
        changed: dict[Node, list[Any]] = {member: [] for member in members}
        for i in range(len(given[0].parts)):
            self._walk.values |= {
                member: tree_map(partial(_alternative, at=i), value)
                for member, value in before.items()
            }
            self._write(node, tree_map(partial(_alternative, at=i), result))
            for member in members:
                changed[member].append(self._walk.values[member])
        self._walk.values |= {
            member: _regroup(parts, given[0].index) for member, parts in changed.items()
        }

    def _write(self, node: Node, result: Any) -> None:
        for target in list_written(node):
            old = self._walk.value(target)
            if isinstance(result, Known):
                continue  # the memory itself has changed
            sharing = self._walk.aliases.of(target) - {target, node}
            # What nobody reads any more need not be told.
            others = {
                member
                for member in sharing
                if self.batch.plan.last_read[member] > self._walk.position
            }
            if isinstance(result, Frozen):
                if not others or all(
                    isinstance(v, (Frozen, Known))
                    for m in others
                    for v in tree_leaves(self._walk.value(m))
                ):
                    for member in self._walk.aliases.of(target):
                        self._walk.values[member] = self._freeze(member, [result])
                    continue
                self.energies.exponent = 0
                # part of a tensor that paths lead to
                result = PathSum(self.energies.frozen_power(target, added=True))
            if not isinstance(result, (PathSum, Edges)) or (
                isinstance(old, type(result)) and old.power is result.power
            ):
                continue
            if not others and target.target is not None:
                self._walk.values[target] = result
                continue
            chains = self._walk.aliases.views(target)
            if not chains:
                raise UnsupportedModelError(
                    f"{node.op} at {node.where} writes in place into memory that is shared in a "
                    "way that path energy cannot "
                    "follow: write to a new tensor instead."
                )
            base = chains[target][0]
            self.energies.exponent = result.exponent if isinstance(result, PathSum) else 0
            before = self.energies.summand(self._walk.value(base))
            places = torch.arange(before.numel(), device=self.energies.device).view(before.shape)
            at = through_views(chains[target][1:], places).reshape(-1)
            after = before.reshape(-1).scatter(0, at, result.power.reshape(-1)).view(before.shape)
            for member, chain in chains.items():
                self._walk.values[member] = tree_map(
                    partial(_with_power, result), through_views(chain[1:], after)
                )

    def collect(self) -> Lifted:
        """Sum over all outputs. An output nonlinearity (softmax, sigmoid) is no part of the
        lifting: paths end before it.
        """
        found = list(self.sinks)
        outputs = [
            o
            for o in tree_leaves(self.batch.graph.returned)
            if isinstance(o, Node) and isinstance(o.dtype, torch.dtype)
        ]
        for value in [
            self._walk.value(output) for output in outputs if output.dtype.is_floating_point
        ]:
            if isinstance(value, Frozen):
                found += value.ends
            elif isinstance(value, Alternatives):
                found.append(value.join())
            elif isinstance(value, (PathSum, Edges)):
                found.append(value if isinstance(value, PathSum) else PathSum(value.power))
        exponent = max((paths.exponent for paths in found), default=0)
        total = torch.zeros((), dtype=torch.float64, device=self.energies.device)
        for paths in found:
            total = total + paths.power.sum() * 2.0 ** (paths.exponent - exponent)
        return Lifted(total=total, exponent=exponent, cuts=self.energies.cuts)


class MissingValueError(Exception):
    """A node turned out to need values of the example batch although no rule said so beforehand."""


def _with_power(value: PathSum | Edges, power: Tensor) -> PathSum | Edges:
    return replace(value, power=power)


def _join(value: Any) -> Any:
    return value.join() if isinstance(value, Alternatives) else value


def _alternative(value: Any, at: int) -> Any:
    return value.parts[at] if isinstance(value, Alternatives) else value


def _as_paths(value: Any) -> Any:
    if not isinstance(value, Alternatives):
        return value
    return replace(value, parts=tuple(PathSum(part.power) for part in value.parts))


def _regroup(results: Sequence[Any], index: Node | None) -> Any:
    """Results of one op, one per alternative, as ``Alternatives``; lists member by member."""
    if isinstance(results[0], (list, tuple)):
        return [_regroup(parts, index) for parts in zip(*results, strict=True)]
    if not isinstance(results[0], (PathSum, Edges)) or all(part is results[0] for part in results):
        return results[0]
    return Alternatives(tuple(results), index)
