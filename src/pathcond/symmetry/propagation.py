"""Graph -> equations: follow the labels of all activations through one graph, rule by rule."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..capture.aliasing import list_written, through_views
from ..capture.nodes import Graph, Node
from ..rules import RULES
from ..rules import labels as lb
from ..rules.families.experts import opaque
from ..rules.families.normalization import (
    WITH_STATISTICS,
    find_handwritten,
    handwritten_epsilon,
    handwritten_gain,
)
from ..rules.labels import Labels
from ..rules.picking import collapse_all, follow, simplify
from ..rules.scales import Scales
from ..rules.table import NO_FAMILY, Column, Rule
from ..rules.values import Known, Picked, UnknownNumber, Weight, is_zero
from ..rules.walk import FORM_ERRORS, UNFORESEEN, Reading, Walk, follow_rule, reads_constant
from ..trees import tree_leaves, tree_map
from .dropped import Call, Step, find_cut_off, find_used
from .unread import list_in_sight

logger = logging.getLogger("pathcond")

STATISTICS = ("running_mean", "running_var")
COMPACT_FROM = 1 << 12  # label tensors of this size are worth simplifying
MAX_WRITTEN = 1 << 20  # in-place writes into part of a larger tensor are not followed
# What is made of numbers alone, which may come from the sizes of the example, or of as many entries
# as they say.
BY_SIZES = frozenset(
    "arange linspace range tril triu tril_indices triu_indices sum cumsum count_nonzero".split()
)
DRAWS = torch.Tag.nondeterministic_seeded
IN_A_CACHE = "is returned in a cache (use_cache=False among the inputs leaves it out)"

HANDWRITTEN_EPSILON = Rule(Column.of(handwritten_epsilon), NO_FAMILY)
HANDWRITTEN_GAIN = Rule(Column.of(handwritten_gain), NO_FAMILY)
OPAQUE = Rule(Column.of(opaque), NO_FAMILY)


class Propagation(Reading):
    """What the nodes of one graph come to as scales: labels of activations, and equations between
    them.
    """

    def __init__(self, graph: Graph, scales: Scales, levels: Mapping[str, str]) -> None:
        """
        Args:
            graph: To walk over.
            scales: What is known so far; this walk adds its equations.
            levels: Modules in which something may come into play that no example shows (a
                parameter, a branch), and what.
        """
        self.graph = graph
        self.scales = scales
        self.levels = levels
        self._walk = Walk(graph, weakref.proxy(self))  # not in a circle
        self._handwritten = find_handwritten(graph)
        self._steps: list[Step] = []

    def run(self) -> Tensor:
        """Walk the graph in order, and fix its outputs at the end.

        Returns:
            Which labels an output depends on, (labels so far,) boolean.
        """
        scales, walk = self.scales, self._walk
        scales.begin(self.graph, walk.values)
        walk.run()
        self._pin_in_sight()
        scales.node = Node(name="output", op="output")
        returned = [leaf for leaf in tree_leaves(self.graph.outputs) if isinstance(leaf, Node)]
        for output in returned:
            reason = IN_A_CACHE if output in self.graph.cached else self.graph.outlet
            scales.pin(walk.value(output), reason)
            scales.read_buffers.update({output.name} if output.op == "buffer" else ())
        for name in scales.read_buffers & scales.factors.scalings.keys():
            scales.factors.freeze(name, "is read as a plain tensor too", by=scales.node)
        labels = [labels for output in returned for labels in _labels_in(walk.value(output))]
        return find_used(scales, self._steps, labels)

    def find_cut_off(self) -> dict[Call, Tensor | None]:
        """After the walk, what calls that cut a tensor leave nothing but zeros of."""
        return find_cut_off(self._steps)

    def _pin_in_sight(self) -> None:
        """Fix what might meet a parameter, or a branch, that no example shows."""
        for level, what in self.levels.items():
            for node in dict.fromkeys(list_in_sight(self.graph, level)):
                self.scales.node = node
                for value in tree_leaves(self._walk.value(node)):
                    if isinstance(value, (Labels, Picked)):
                        self.scales.pin(value, f"may meet {what}")

    # -- leaves and calls -------------------------------------------------------------------------

    def leaf(self, node: Node) -> Any:
        if node.op == "parameter":
            return Weight(node.name, node.shape)
        if node.op == "input":
            return lb.constant(node.shape) if isinstance(node.shape, tuple) else None
        if node.op == "buffer" and node.name in self.scales.rewritten:
            return lb.constant(node.shape)
        assert node.value is not None
        value = node.value.detach()
        value = value if value.is_meta else value.cpu().clone()
        if node.op == "buffer":
            return Known(value, buffer=node.name, lasting=False)
        # a literal, or an attribute of a module
        return Known(value, lasting=node.name.startswith("lifted_tensor"))

    def member(self, node: Node, member: Any) -> Any:
        self.scales.node = node
        return self._take_step(node, lambda: member)

    def call(self, node: Node, arguments: dict[str, Any]) -> Any:
        self.scales.node = node
        return self._take_step(node, lambda: self._execute(node, self._find_rule(node), arguments))

    def _take_step(self, node: Node, result_of: Callable[[], Any]) -> Any:
        """The result of a call, and a record of the labels that it reads and makes."""
        given = [self._walk.value(operand) for operand in node.operands]
        operands = [labels for value in given for labels in _labels_in(value)]
        first = self.scales.equations.count
        result = self._compact(self._check(node, result_of()))
        asked = [
            labels
            for value in given
            if isinstance(value, Weight)
            for labels in self.scales.factors.labels_asked(value)
        ]
        made = range(first, self.scales.equations.count)
        self._steps.append(Step(node, (*operands, *asked), tuple(_labels_in(result)), made))
        return result

    def _find_rule(self, node: Node) -> Rule | None:
        if node in self._handwritten.epsilon_sums:
            return HANDWRITTEN_EPSILON
        if node in self._handwritten.gains:
            return HANDWRITTEN_GAIN
        return OPAQUE if node.op == "opaque" else RULES.get(node.op)

    def _execute(self, node: Node, rule: Rule | None, arguments: dict[str, Any]) -> Any:
        self._note_buffers(node, arguments)
        self._pin_narrowed(node)
        if any(isinstance(a, Picked) for a in tree_leaves(arguments)):
            followed = self._follow(node, rule, arguments)
            if followed is not None:
                return followed
            arguments = collapse_all(self.scales, arguments)
        operands = [a for a in tree_leaves(arguments) if isinstance(a, (Labels, Weight, Known))]
        result = self._apply(node, rule, arguments, operands)
        # A view of a parameter has not been read yet; what is made of it will be.
        if not any(isinstance(leaf, Weight) for leaf in tree_leaves(result)):
            for operand in operands:
                if isinstance(operand, Weight):
                    self.scales.factors.note_read(operand)
        return result

    def _apply(
        self, node: Node, rule: Rule | None, arguments: dict[str, Any], operands: list[Any]
    ) -> Any:
        known = [a for a in operands if isinstance(a, Known)]
        if len(known) == len(operands):
            return self._compute(node, arguments, known)
        if node.op in ("add", "sub", "mul", "div") and len(known) + 1 == len(operands):
            weight = self._with_constant(node, arguments)
            if weight is not None:
                return weight
        reads_input = any(isinstance(a, Labels) for a in operands) or reads_constant(node, known)
        if rule is None or not (reads_input or rule.family.reads_parameters):
            missing = f"reaches {node.op}, which has no rule"
            reason = f"is computed from parameters by {node.op}" if rule else missing
            return self._end(node, operands, reason)
        scales_of = rule.scales
        return follow_rule(
            node,
            lambda: scales_of(self.scales, arguments),
            lambda reason: self._end(node, operands, reason),
        )

    def _end(self, node: Node, operands: Sequence[Any], reason: str) -> Any:
        """Fix the operands of a call that no rule covers; it returns constants."""
        for operand in operands:
            self.scales.pin(operand, reason)
        return self._make_constant(node)

    def _pin_narrowed(self, node: Node) -> None:
        """Pin operands that are silently converted to a type of smaller range, as autocast to
        float16 does: they may overflow.
        """
        if not isinstance(node.dtype, torch.dtype) or not node.dtype.is_floating_point:
            return
        result = torch.finfo(node.dtype)
        if result.eps <= self.scales.precision:
            return
        for operand in node.operands:
            dtype = operand.dtype
            floating = isinstance(dtype, torch.dtype) and dtype.is_floating_point
            # A hundredth: bfloat16 has almost the range of float32.
            if (
                floating
                and result.max < torch.finfo(dtype).max / 100
                and isinstance(self._walk.values[operand], (Labels, Weight))
            ):
                self.scales.pin(self._walk.values[operand], f"is rounded to {node.dtype}")

    def _follow(self, node: Node, rule: Rule | None, arguments: dict[str, Any]) -> Any:
        """The op on what an index picked, member by member; None where members must share their
        scales.
        """
        try:
            return tree_map(simplify, follow(self.scales, node, rule, arguments))
        except FORM_ERRORS as error:
            logger.info(
                "The members of what is picked are equated at %s, %s: %s",
                node.op,
                node.where,
                error,
            )
            return None

    def _with_constant(self, node: Node, arguments: dict[str, Any]) -> Weight | None:
        """The parameter, if the node is a parameter times a constant, or plus zero: it scales as
        the parameter does.

        The constant may be a mask (pruning, MADE) on either side, or an equalised learning rate;
        the zero an offset of gains that is turned off.
        """
        if node.op in ("add", "sub") and not is_zero(arguments["other"]):
            return None
        factors = [arguments["self"], arguments["other"] if node.op == "mul" else None]
        weight = next((a for a in factors if isinstance(a, Weight)), None)
        if weight is None or arguments.get("rounding_mode") is not None:
            return None
        return weight if node.shape == weight.shape else None

    def _note_buffers(self, node: Node, arguments: dict[str, Any]) -> None:
        """Remember buffers that are read as plain tensors: those cannot follow a scale."""
        statistics = STATISTICS if node.op in WITH_STATISTICS else ()
        plain = {name: value for name, value in arguments.items() if name not in statistics}
        self.scales.read_buffers.update(
            a.buffer for a in tree_leaves(plain) if isinstance(a, Known) and a.buffer is not None
        )

    def _check(self, node: Node, result: Any) -> Any:
        """Labels must fit the result's shape, and its type must be able to carry a scale."""
        if isinstance(result, (list, tuple)):
            shapes, dtypes = node.shape, node.dtype
            return [self._fit(r, s, d) for r, s, d in zip(result, shapes, dtypes, strict=True)]
        return self._fit(result, node.shape, node.dtype)

    def _fit(self, result: Any, shape: Any, dtype: Any) -> Any:
        if not isinstance(result, (Labels, Weight, Picked)):
            return result
        if tuple(result.shape) != shape:
            self.scales.pin(result, f"passes through {self.scales.node.op} {UNFORESEEN}")
            return lb.constant(shape)
        rounded = not dtype.is_floating_point or torch.finfo(dtype).eps > self.scales.precision
        return self.scales.pin(result, f"is rounded to {dtype}") if rounded else result

    def _compact(self, result: Any) -> Any:
        """Spelled-out labels shrink again where equations have made them equal since."""
        if not isinstance(result, Labels) or result.ids.numel() < COMPACT_FROM:
            return result
        ids = self.scales.equations.simplify(result.ids)
        for axis in range(ids.dim()):
            if ids.shape[axis] > 1 and bool((ids == ids.narrow(axis, 0, 1)).all()):
                ids = ids.narrow(axis, 0, 1)
        return Labels(ids, result.shape)

    def _compute(self, node: Node, arguments: dict[str, Any], operands: Sequence[Known]) -> Any:
        """Execute an op on known values; where that is impossible its result is an unknown without
        scale.
        """
        tags = getattr(node.target, "tags", ())
        has_no_value = (
            node.op.startswith(("empty", "new_empty", "_assert", "opaque")) or node.shape is None
        )
        if DRAWS in tags or node in self.graph.varying or has_no_value:
            return self._make_constant(node)
        if any(a.value.is_meta for a in operands):
            # Without a value it is a constant all the same: a mask on the meta device masks a
            # weight.
            if list_written(node) or not isinstance(node.shape, tuple):
                return self._make_constant(node)
            return Known(torch.empty(node.shape, dtype=node.dtype, device="meta"), lasting=False)
        values = tree_map(lambda a: a.value if isinstance(a, Known) else a, arguments)
        if node.op in ("mul", "multiply") and is_zero(values["other"]):
            values["other"] = 1.0  # tomorrow it may be another number
        if values.get("device") is not None:
            values["device"] = torch.device("cpu")
        try:
            result = (
                node.target(**values)
                if isinstance(node.target, torch._ops.OpOverload)
                else node.target(*values.values())
            )
        except Exception:  # an op that this build cannot run on CPU: no value, no scale
            return self._make_constant(node)
        lasting = all(a.lasting for a in operands)
        sized = node.op in BY_SIZES or any(a.sized for a in operands)
        return tree_map(
            lambda r: Known(r, lasting=lasting, sized=sized) if isinstance(r, Tensor) else r, result
        )

    def _make_constant(self, node: Node) -> Any:
        if isinstance(node.shape, list):
            return [
                lb.constant(shape) if isinstance(shape, tuple) else None for shape in node.shape
            ]
        return lb.constant(node.shape) if isinstance(node.shape, tuple) else UnknownNumber()

    # -- aliasing and in-place ops ----------------------------------------------------------------

    def write(self, node: Node, result: Any) -> None:
        for target in list_written(node):
            self.scales.writers |= dict.fromkeys(self._walk.aliases.of(target), node)
            old = self._walk.values[target]
            if isinstance(old, Known) and isinstance(result, Known):
                self._join(target, result)  # computed for real, on shared memory
                continue
            if _same_labels(old, result):
                continue
            others = self._walk.aliases.of(target) - {target, node}
            leaf = target.target is None
            if not others and not leaf and isinstance(result, (Labels, Picked)):
                self._walk.values[target] = result
                continue
            if isinstance(result, Labels) and self._write_through(target, result):
                continue
            for member in self._walk.aliases.of(target):
                self._walk.values[member] = tree_map(self._overwritten, self._walk.values[member])

    def _write_through(self, target: Node, result: Labels) -> bool:
        """``z[:, :2] = h``: write labels into a view, and read them again through every other view
        of the same memory.

        Returns False, and changes nothing, where it is not certain which elements share memory.
        """
        chains = self._walk.aliases.views(target)
        base = chains[target][0] if chains else None
        if base is None or base.target is None or torch.Size(base.shape).numel() > MAX_WRITTEN:
            return False
        positions = torch.arange(torch.Size(base.shape).numel()).view(base.shape)
        places = {member: through_views(chain[1:], positions) for member, chain in chains.items()}
        memory = self.scales.labels(self._walk.values[base]).full.reshape(-1).clone()
        # a copy of a parameter: what is overwritten here is read nowhere
        if isinstance(self._walk.values[base], Weight):
            self.scales.equations.pin(
                memory[places[target]], by=self.scales.node, reason="is overwritten"
            )
        memory[places[target].reshape(-1)] = result.full.reshape(-1)
        for member, place in places.items():
            self._walk.values[member] = tree_map(
                lambda at: Labels(memory[at], tuple(at.shape)), place
            )
        return True

    def _overwritten(self, value: Any) -> Any:
        if isinstance(value, Known):
            return lb.constant(value.shape)
        return self.scales.pin(
            value,
            f"is written in place by {self.scales.node.op} into memory that is read elsewhere",
        )

    def _join(self, target: Node, written: Known) -> None:
        """What is written into known memory may not last: then its zeros do not either."""
        if written.lasting and not written.sized:
            return

        def joined(value: Any) -> Any:
            if not isinstance(value, Known):
                return value
            lasting, sized = value.lasting and written.lasting, value.sized or written.sized
            return replace(value, lasting=lasting, sized=sized)

        for member in self._walk.aliases.of(target):
            self._walk.values[member] = tree_map(joined, self._walk.values[member])


def _labels_in(value: Any) -> list[Labels]:
    """The labels of a value in flight; those of what is picked, once per member."""
    leaves = [leaf.choices if isinstance(leaf, Picked) else leaf for leaf in tree_leaves(value)]
    return [leaf for leaf in leaves if isinstance(leaf, Labels)]


def _same_labels(a: Any, b: Any) -> bool:
    """Whether two values in flight are known to carry the same labels."""
    if isinstance(a, Picked) and isinstance(b, Picked):
        alike = (
            a.pick == b.pick
            and a.shape == b.shape
            and torch.equal(*torch.broadcast_tensors(a.place, b.place))
        )
        return alike and _same_labels(a.choices, b.choices)
    both = isinstance(a, Labels) and isinstance(b, Labels) and a.shape == b.shape
    return both and bool((a.ids == b.ids).all())
