"""Graph -> path energy: one forward walk, and one backward pass for the diagonal of G.

The graph is that of one sample. Where factors depend on the data, the same walk also computes the
real values of every sample of the example batch, in float64, node by node: a node that needs them
finds them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..capture.aliasing import Aliases, list_written, through_views
from ..capture.calibration import without_epsilon
from ..capture.nodes import Graph, Node
from ..distributed.sharding import gather
from ..errors import UnsupportedModelError
from ..rules import RULES
from ..rules.energies import (
    FREEZE,
    Alternatives,
    Apart,
    Edges,
    Energies,
    Frozen,
    PathSum,
    call,
)
from ..rules.picking import FOLLOWED, MOVES, PASSES, PASSES_APPROXIMATELY, same_order
from ..rules.samples import Samples, at_once
from ..rules.table import Rule
from ..rules.values import Known
from ..symmetry.propagation import FORM_ERRORS, reads_constant
from ..trees import tree_leaves, tree_map
from .plan import Plan

logger = logging.getLogger("pathcond")

BATCH_NORMS = ("batch_norm", "cudnn_batch_norm", "instance_norm")
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


@dataclass
class EnergyPass(Energies):
    """The walk over the graph of one sample; rules see it as ``energies``.

    Attributes:
        edges: |θ|^p of a parameter by name, asked for when the first node reads it; what it returns
            may carry a gradient.
        release: Told the name of a parameter after the last node that reads it.
        parameters: The parameters by name.
        inputs: Per sample, the values of the graph's inputs in order.
        fresh: Names of running means whose statistics are still the initial ones.
        measure_all: Compute the values of the example batch even if no rule says that it measures
            something.
        normalise: What becomes of each energy after its node: counts and the search for underflow
            rescale it.
        watch: Sees each energy after its node.
    """

    graph: Graph = None  # type: ignore[assignment]
    edges: Callable[[str], Tensor] = None  # type: ignore[assignment]
    release: Callable[[str], None] = lambda name: None
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    inputs: Sequence[Sequence[Any]] = ()
    fresh: frozenset[str] = frozenset()
    measure_all: bool = False
    normalise: Callable[[PathSum], PathSum] = lambda paths: paths
    watch: Callable[[Node, PathSum], None] = lambda node, paths: None
    values: dict[Node, Any] = field(default_factory=dict)
    reals: dict[Node, Any] = field(default_factory=dict)
    cuts: dict[tuple[Node, Node], str] = field(default_factory=dict)
    sinks: list[PathSum] = field(default_factory=list)

    def run(self) -> Lifted:
        """Walk the graph once."""
        plan = Plan.of(self.graph, measures=self._measures)
        self._plan, self._aliases = plan, Aliases()
        try:
            return self._walk(plan)
        finally:  # nothing outlives the walk, not even in a reference cycle
            self.values, self.reals, self.sinks, self.edges = {}, {}, [], None  # type: ignore[assignment]

    def _walk(self, plan: Plan) -> Lifted:
        for position, node in enumerate(self.graph.nodes):
            self.node, self._position = node, position
            if node.target is None:
                if node.op != "parameter":
                    self.values[node] = self._leaf(node)
                continue
            result = self._result(node)
            # after the rule, which reads what an in-place op overwrites
            if node in plan.tracked and node not in self.reals:
                self.reals[node] = self._real_result(node)
            self._aliases.record(node)
            self.values[node] = result
            self._record_mutation(node, result)
            for done in plan.last_read_at.get(position, ()):
                if done.op == "parameter":
                    self.release(done.name)
                self.values.pop(done, None)
                self.reals.pop(done, None)
        return self._collect()

    def end(self, name: str, reason: str) -> None:
        given = self.node.bound.get(name)
        if isinstance(given, Node):
            self.cuts[self.node, given] = reason

    # -- energies ----------------------------------------------------------------------------------

    def _value(self, node: Node) -> Any:
        """What is in flight; parameters take off when they are needed."""
        if node not in self.values and node.op == "parameter":
            self.values[node] = self._leaf(node)
        return self.values[node]

    def _leaf(self, node: Node) -> Any:
        plan = self._plan
        if node.op == "parameter":
            if node in plan.written and node in plan.tracked:
                self.reals[node] = self._per_sample(node, self._parameter(node))
            return Edges(self.edges(node.name))
        if node.op == "input":
            at = plan.input_positions[node]
            if node in plan.tracked:
                self.reals[node] = Samples(
                    [
                        _as_double(sample[at], self.device, node in plan.written)
                        for sample in self.inputs
                    ]
                )
            if not isinstance(node.shape, tuple):
                return None
            if node.dtype.is_floating_point:
                return PathSum(torch.ones(node.shape, dtype=torch.float64, device=self.device))
            return Frozen(node)
        value = self.buffers.get(node.name, node.value) if node.op == "buffer" else node.value
        assert value is not None
        real = self.reals[node] = self._per_sample(node, _as_double(value.detach(), self.device))
        return Known(real.values[0] if isinstance(real, Samples) else real)

    def _parameter(self, node: Node) -> Tensor:
        return gather(self.parameters[node.name]).to(self.device, torch.float64)

    def _per_sample(self, node: Node, value: Tensor) -> Any:
        """A leaf that some sample's data is written into has one copy per sample."""
        if node in self._plan.per_sample and self.inputs:
            return Samples([value.clone() for _ in self.inputs])
        return value.clone() if node in self._plan.written else value

    def _result(self, node: Node) -> Any:
        arguments = tree_map(lambda a: self._value(a) if isinstance(a, Node) else a, node.bound)
        if node.op == "getitem":
            picked = arguments["0"][arguments["1"]]
            return replace(picked, node=node) if isinstance(picked, Frozen) else picked
        if any(isinstance(a, Alternatives) for a in tree_leaves(arguments)):
            return self._apart(node, arguments)
        return self._energy(node, arguments)

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
        try:
            self.operands, self.exponent = arguments, max((a.exponent for a in paths), default=0)
            result = self._apply(rule, arguments)
        except FORM_ERRORS as error:
            if isinstance(error, MissingValueError):
                raise
            logger.info("The energy rule for %s failed at %s: %s", node.op, node.where, error)
            return self._end(
                node, f"reaches {node.op} in a form that its rule does not cover", operands
            )
        constants = [a for a in operands if isinstance(a, Known)]
        kind = PathSum if paths or frozen or reads_constant(node, constants) else Edges
        return self._wrap(node, result, kind, operands)

    def _apply(self, rule: Rule, arguments: dict[str, Any]) -> Any:
        """The energy of the node at work, by its rule, which has one."""
        assert rule.energy is not None
        return rule.energy(self, arguments)

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
            (a for a in tree_leaves(self.operands) if isinstance(a, PathSum) and a.power is result),
            None,
        )
        # unchanged: normalised already, and what shares its memory need not be told
        if passed is not None:
            return passed
        made = self.normalise(PathSum(result, self.exponent))
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
            {same_order(own)[-1]} if own is not None and not self.calibrate else set()
        )
        per_sample = self.calibrate and node.op == "index"
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
                self.alternative = i
                results.append(self._energy(node, tree_map(partial(_alternative, at=i), arguments)))
        finally:
            self.alternative = None
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
        if self.calibrate and node not in self._plan.tracked:
            raise MissingValueError(node.op)
        self._cut(node, reason)
        ends = tuple({id(a): a for a in operands if isinstance(a, PathSum)}.values())
        if node.op == "opaque":  # its inputs are pinned as outputs are, and count as such
            self.sinks += ends
            ends = ()
        frozen = [a for a in operands if isinstance(a, Frozen)]
        return self._freeze(node, [Frozen(node, ends), *frozen])

    def _of_parameters(self, node: Node, arguments: dict[str, Any], operands: list[Any]) -> Any:
        """A parameter times a constant is an edge; other arithmetic on parameters is a constant."""
        pair = [arguments.get("self"), arguments.get("other")]
        weight = next((a for a in pair if isinstance(a, Edges)), None)
        if (
            node.op == "mul"
            and weight is not None
            and sum(isinstance(a, Edges) for a in operands) == 1
        ):
            return Edges(self.factor(pair[0]) * self.factor(pair[1]))
        if (
            node.op == "div"
            and pair[0] is weight
            and not isinstance(pair[1], Edges)
            and arguments.get("rounding_mode") is None
        ):
            return Edges(self.factor(pair[0]) / self.factor(pair[1]))
        self._cut(node, f"enters {node.op}, which is computed from parameters alone,")
        return self._compute_known(node)

    def _cut(self, node: Node, reason: str) -> None:
        self.cuts |= {(node, operand): reason for operand in node.operands}

    def _compute_known(self, node: Node) -> Any:
        real = self.reals[node] = self._real_result(node)
        value = real.values[0] if isinstance(real, Samples) else real
        return tree_map(lambda v: Known(v) if isinstance(v, Tensor) else v, value)

    def _record_mutation(self, node: Node, result: Any) -> None:
        """After an in-place op its target, and everything that shares memory with it, has
        changed.
        """
        members = {member for target in list_written(node) for member in self._aliases.of(target)}
        if not members:
            return
        before = {member: self._value(member) for member in members}
        given = [
            a for a in [result, *tree_leaves(list(before.values()))] if isinstance(a, Alternatives)
        ]
        if not given:
            self._write(node, result)
            return
        changed: dict[Node, list[Any]] = {member: [] for member in members}
        for i in range(len(given[0].parts)):
            self.values |= {
                member: tree_map(partial(_alternative, at=i), value)
                for member, value in before.items()
            }
            self._write(node, tree_map(partial(_alternative, at=i), result))
            for member in members:
                changed[member].append(self.values[member])
        self.values |= {
            member: _regroup(parts, given[0].index) for member, parts in changed.items()
        }

    def _write(self, node: Node, result: Any) -> None:
        for target in list_written(node):
            old = self._value(target)
            if isinstance(result, Known):
                continue  # the memory itself has changed
            sharing = self._aliases.of(target) - {target, node}
            # What nobody reads any more need not be told.
            others = {member for member in sharing if self._plan.last_read[member] > self._position}
            if isinstance(result, Frozen):
                if not others or all(
                    isinstance(v, (Frozen, Known))
                    for m in others
                    for v in tree_leaves(self._value(m))
                ):
                    for member in self._aliases.of(target):
                        self.values[member] = self._freeze(member, [result])
                    continue
                self.exponent = 0
                # part of a tensor that paths lead to
                result = PathSum(self._frozen_power(target, added=True))
            if not isinstance(result, (PathSum, Edges)) or (
                isinstance(old, type(result)) and old.power is result.power
            ):
                continue
            if not others and target.target is not None:
                self.values[target] = result
                continue
            chains = self._aliases.views(target)
            if not chains:
                raise UnsupportedModelError(
                    f"{node.op} at {node.where} writes in place into memory that is shared in a "
                    "way that path energy cannot "
                    "follow: write to a new tensor instead."
                )
            base = chains[target][0]
            self.exponent = result.exponent if isinstance(result, PathSum) else 0
            before = self.summand(self._value(base))
            places = torch.arange(before.numel(), device=self.device).view(before.shape)
            at = through_views(chains[target][1:], places).reshape(-1)
            after = before.reshape(-1).scatter(0, at, result.power.reshape(-1)).view(before.shape)
            for member, chain in chains.items():
                self.values[member] = tree_map(
                    partial(_with_power, result), through_views(chain[1:], after)
                )

    def _collect(self) -> Lifted:
        """Sum over all outputs. An output nonlinearity (softmax, sigmoid) is no part of the
        lifting: paths end before it.
        """
        found = list(self.sinks)
        outputs = [
            o
            for o in tree_leaves(self.graph.returned)
            if isinstance(o, Node) and isinstance(o.dtype, torch.dtype)
        ]
        for value in [self._value(output) for output in outputs if output.dtype.is_floating_point]:
            if isinstance(value, Frozen):
                found += value.ends
            elif isinstance(value, Alternatives):
                found.append(value.join())
            elif isinstance(value, (PathSum, Edges)):
                found.append(value if isinstance(value, PathSum) else PathSum(value.power))
        exponent = max((paths.exponent for paths in found), default=0)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for paths in found:
            total = total + paths.power.sum() * 2.0 ** (paths.exponent - exponent)
        return Lifted(total=total, exponent=exponent, cuts=self.cuts)

    # -- values on the example batch ---------------------------------------------------------------

    def _measures(self, node: Node) -> bool:
        """Whether a node's energy needs values of the example batch."""
        if not self.calibrate or node.op == "getitem":
            return False
        rule = RULES.get(node.op)
        if node.op in BATCH_NORMS:
            return not self.uses_running_statistics(node)
        return self.measure_all or rule is None or rule.measures

    def uses_running_statistics(self, node: Node) -> bool:
        """Whether a norm normalises by running statistics that are worth it."""
        mean = node.bound.get("running_mean")
        own = node.bound.get("training") or node.bound.get("use_input_stats")
        return (
            isinstance(mean, Node) and not own and not (self.calibrate and mean.name in self.fresh)
        )

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(mean, variance) per channel by which the BatchNorm at work normalises, ε to be added.

        A variance of the example batch is made such that their sum follows scales in front of the
        norm.
        """
        if self.uses_running_statistics(self.node):
            return self._constant("running_mean"), self._constant("running_var")
        if not self.calibrate:
            one = torch.ones((), dtype=torch.float64, device=self.device)
            return one * 0, one - self.node.bound["eps"]
        real = self._real("input")
        x = (
            (real.joined if real.joined is not None else torch.cat(real.values))
            if isinstance(real, Samples)
            else real
        )
        if x.numel() == x.shape[1]:
            raise UnsupportedModelError(
                f"The statistics of {self.node.where} cannot be measured on a single value per "
                "channel: give an example batch "
                "of at least two samples, or calibrate=False."
            )
        variance, mean = torch.var_mean(
            x, [axis for axis in range(x.dim()) if axis != 1], correction=0
        )
        epsilon = self.node.bound["eps"]
        return mean, without_epsilon(variance, epsilon) - epsilon

    def _constant(self, name: str) -> Tensor:
        real = self._real(name)
        return real.values[0] if isinstance(real, Samples) else real

    def real_of(self, node: Node) -> Any:
        # Parameters are converted where they are read: all of them at once would double the memory.
        real = (
            self._parameter(node)
            if node.op == "parameter" and node not in self.reals
            else self.reals[node]
        )
        if self.alternative is not None and self.calibrate and isinstance(real, Samples):
            return real.values[self.alternative]
        return real

    def _real_result(self, node: Node) -> Any:
        bound = dict(node.bound)
        if (
            node.op in BATCH_NORMS
            and node.bound.get("running_mean") is not None
            and not self.uses_running_statistics(node)
        ):
            mean, variance = self.statistics()
            changed = {
                "running_mean": mean,
                "running_var": variance,
                "training": False,
                "use_input_stats": False,
            }
            bound |= {name: value for name, value in changed.items() if name in bound}
        arguments = tree_map(lambda a: self.real_of(a) if isinstance(a, Node) else a, bound)
        if node not in self._plan.per_sample or not self.inputs:
            return _as_double(self._call(node, arguments), self.device)

        together = at_once(
            node, arguments, lambda joined: _as_double(self._call(node, joined), self.device)
        )
        if together is not None:
            return together

        def sample(i: int) -> Any:
            own = tree_map(lambda a: a.values[i] if isinstance(a, Samples) else a, arguments)
            return _as_double(self._call(node, own), self.device)

        return Samples([sample(i) for i in range(len(self.inputs))])

    def _call(self, node: Node, arguments: dict[str, Any]) -> Any:
        if node.op == "getitem":
            return arguments["0"][arguments["1"]]
        if node.shape is None:  # assertions
            return None
        try:
            return call(node, arguments, self.device)
        except Exception as error:
            raise UnsupportedModelError(
                f"{node.op} at {node.where} cannot be computed in float64 on the example batch: "
                f"{error}"
            ) from error


class MissingValueError(RuntimeError):
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


def _as_double(value: Any, device: torch.device, copy: bool = False) -> Any:
    def one(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        return v.detach().to(
            device, torch.float64 if v.dtype.is_floating_point else v.dtype, copy=copy
        )

    return tree_map(one, value)
