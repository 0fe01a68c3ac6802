"""The words in which rules speak of scales: labels of operands, and equations between them. What
they ask of parameters is told to ``Factors``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeGuard

import torch
from torch import Tensor

from ..capture.nodes import START, Graph, Node
from ..trees import tree_map
from . import labels as lb
from . import picking
from .equations import Equations
from .factors import Factors
from .labels import ANY, Labels
from .values import Known, Operand, Picked, Weight

MAX_ELEMENTWISE = 1 << 20  # parameters larger than this get no label per element


@dataclass
class Scales:
    """What is known of the scales of one model so far.

    Attributes:
        normalization, approximate: The user's choices.
        factors: What was asked of parameters and buffers so far; shared by the walks over the eval
            and the train graph, as are all equations.
        read_buffers: Buffers that are read as plain tensors somewhere.
        rewritten: Buffers of integers into which the model writes: their values are those of one
            moment.
        uncounted: Parameters that the criterion leaves out.
        precision: Machine epsilon of the least precise parameter; what is rounded more coarsely
            than that is fixed.
        training: Mode of the graph at work.
        node: The node at work.
        values: What every node of the graph at work has come to so far.
        writers: For nodes whose memory in-place ops have written so far, the last of these ops.
    """

    normalization: str
    approximate: bool
    factors: Factors = field(default_factory=lambda: Factors(Equations()))
    read_buffers: set[str] = field(default_factory=set)
    rewritten: frozenset[str] = frozenset()
    uncounted: set[str] = field(default_factory=set)
    precision: float = 0.0
    training: bool = False
    node: Node = START
    values: Mapping[Node, Any] = field(default_factory=dict)
    writers: dict[Node, Node] = field(default_factory=dict)

    @property
    def equations(self) -> Equations:
        """All equations so far."""
        return self.factors.equations

    def begin(self, graph: Graph, values: Mapping[Node, Any]) -> None:
        """Turn to a graph whose nodes will come to the given values; equations and factors stay."""
        self.values = values
        self.writers = {}
        self.factors.reads = {}
        self.training = graph.training
        self.factors.shapes |= {
            node.name: node.shape for node in graph.nodes if node.op == "parameter"
        }

    # -- values -----------------------------------------------------------------------------------

    def is_weight(self, value: Operand) -> TypeGuard[Weight]:
        return isinstance(value, Weight)

    def is_buffer(self, value: Operand) -> TypeGuard[Known]:
        return isinstance(value, Known) and value.buffer is not None

    def value(self, value: Operand) -> Tensor | None:
        """The value of a known tensor, None for anything else."""
        return value.value if isinstance(value, Known) and not value.value.is_meta else None

    def lasting_value(self, value: Operand) -> Tensor | None:
        """The same of what is written in the program; what is in a buffer may change."""
        return self.value(value) if isinstance(value, Known) and value.lasting else None

    def simplify(self, value: Any) -> Any:
        """A frozen parameter is a constant."""
        if isinstance(value, Weight) and value.name in self.factors.frozen:
            return lb.constant(value.shape)
        if isinstance(value, Picked) and isinstance(self.simplify(value.choices), Labels):
            return picking.collapse(self, value) if isinstance(value.choices, Weight) else value
        return value

    def labels(self, value: Operand) -> Labels:
        """The labels of any operand; a number is a constant, a parameter gets one label per
        element.
        """
        if isinstance(value, Labels):
            return value
        if isinstance(value, Known):
            zeros_last = value.lasting and not value.sized
            return lb.of_value(value.value) if zeros_last else lb.constant(value.shape)
        if isinstance(value, Weight):
            return self._weight_labels(value)
        if isinstance(value, Picked):
            return picking.collapse(self, value)
        return lb.of_value(
            torch.as_tensor(float(value) if isinstance(value, (bool, int, float)) else 1.0)
        )

    def _weight_labels(self, weight: Weight) -> Labels:
        if weight.name in self.factors.frozen:
            return lb.constant(weight.shape)
        if self.factors.asked(weight) is None:
            if torch.Size(weight.shape).numel() > MAX_ELEMENTWISE:
                self.pin(weight, "is used elementwise and is too large to trace")
                return lb.constant(weight.shape)
            # Only the entries that are read: the others are not free to choose (see unread.py).
            entries = torch.unique(weight.entries)
            fresh = self.equations.fresh(entries.numel(), origin=self.node)
            used = Weight(weight.name, tuple(entries.shape), index=entries)
            self.factors.assign_unset(used, fresh, torch.zeros_like(fresh))
        current = self.factors.asked(weight)
        assert current is not None
        plus, minus = current
        if not minus.any():
            return Labels(plus, weight.shape)
        return Labels(self.equations.combine([(1, plus), (-1, minus)], by=self.node), weight.shape)

    def broadcast(self, labels: Any, shape: Sequence[int]) -> Any:
        """The same labels seen as a tensor of the given shape (leading axes added)."""
        if isinstance(labels, Picked):
            return picking.stretch(labels, shape)
        missing = len(shape) - labels.ids.dim()
        return Labels(
            labels.ids.reshape([1] * missing + list(labels.ids.shape)) if missing else labels.ids,
            tuple(shape),
        )

    # -- views ------------------------------------------------------------------------------------

    def through_view(self, x: Any) -> Any:
        """Apply the node's own op, which returns views, to labels or to a parameter's index."""
        arguments = self.node.bound
        first = next(iter(arguments))

        def apply(tensor: Tensor) -> Any:
            rest = tree_map(lambda a: self._stand_in(a) if isinstance(a, Node) else a, arguments)
            return self.node.target(**(rest | {first: tensor}))

        if isinstance(x, Weight):
            return tree_map(lambda i: replace(x, index=i, shape=tuple(i.shape)), apply(x.entries))
        return tree_map(lb.compress, apply(self.labels(x).full))

    def _stand_in(self, node: Node) -> Any:
        """For ``expand_as`` and the like: only the shape of the other tensor matters."""
        value = self.values[node]
        return (
            torch.empty(value.shape, device="meta")
            if isinstance(value, (Labels, Weight, Known, Picked))
            else value
        )

    def picked(self, weight: Weight, pick: Callable[[Tensor], Tensor]) -> Weight:
        """Entries of a parameter that known indices pick, as a view of it."""
        index = pick(weight.entries)
        return replace(weight, index=index, shape=tuple(index.shape))

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        """A reshape of labels, of a parameter or of a known tensor."""
        # resolves -1
        shape = tuple(torch.empty(x.shape, device="meta").reshape(tuple(shape)).shape)
        if isinstance(x, Known):
            return Known(x.value.reshape(shape), lasting=x.lasting, sized=x.sized)
        if isinstance(x, Weight):
            return replace(
                x, shape=shape, index=None if x.index is None else x.index.reshape(shape)
            )
        return lb.reshape(x, shape)

    # -- equations --------------------------------------------------------------------------------

    def pin(self, value: Any, reason: str) -> Any:
        """Fix every element of an operand; returns its labels."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Weight):
            self.factors.freeze(value.name, reason, by=self.node)
            return lb.constant(value.shape)
        if isinstance(value, Labels):
            self.equations.pin(value.ids, by=self.node, reason=reason)
            return lb.constant(value.shape)
        if isinstance(value, Picked):
            self.pin(value.choices, reason)
            return lb.constant(value.shape)
        if isinstance(value, (list, tuple)):
            return [self.pin(item, reason) for item in value]
        # The result of an op is not the constant that entered it: zeros that were written into are
        # none.
        return lb.constant(value.shape) if isinstance(value, Known) else value

    def merge(self, *values: Any, reason: str) -> Any:
        """Equate operands elementwise (broadcast); returns the common labels, ``Picked`` if all
        operands are.

        A parameter that nothing has used before takes the labels of what it is added to.
        """
        if any(isinstance(value, Picked) for value in values):
            if not picking.may_stay_apart(self, values):
                return self.merge(*picking.collapse_all(self, values), reason=reason)
            operands, model = picking.together(self, values)
            merged = self.merge(*operands, reason=reason)
            return merged if model is None else picking.result_like(model, merged)
        operands = [self.simplify(value) for value in values]
        unused = [value for value in operands if self.factors.is_unused(value)]
        if len(unused) == len(operands):
            unused = unused[1:]
        traced = [
            self.labels(value)
            for value in operands
            if not any(value is weight for weight in unused)
        ]
        result = traced[0]
        for other in traced[1:]:
            result = self._merge_two(result, other, reason)
        for weight in unused:
            labels = (
                self._adopt(weight, result)
                if self.factors.is_unused(weight)
                else self.labels(weight)
            )
            result = self._merge_two(result, labels, reason)
        return result

    def _merge_two(self, a: Labels, b: Labels, reason: str) -> Labels:
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
        self.equations.equate(a.ids, b.ids, by=self.node, reason=reason)
        left, right = torch.broadcast_tensors(a.ids, b.ids)
        joint = torch.where(left == ANY, right, left)
        # Keep the compact form where the second operand brings nothing new.
        ids = a.ids if a.ids.dim() == joint.dim() and bool((joint == a.ids).all()) else joint
        return self.broadcast(Labels(ids, shape), shape)

    def _adopt(self, weight: Weight, labels: Labels) -> Labels:
        """Label an unused parameter by what it is added to, once per element of its own shape."""
        wide = self.broadcast(labels, labels.shape)
        missing = len(wide.shape) - len(weight.shape)
        if missing < 0 or (wide.ids == ANY).any():
            return self._weight_labels(weight)
        repeated = [
            i for i in range(len(wide.shape)) if i < missing or weight.shape[i - missing] == 1
        ]
        ids = self.agree(wide, repeated).ids
        ids = ids.reshape(ids.shape[missing:])
        nothing = torch.zeros([1] * ids.dim(), dtype=torch.int32)
        self.factors.assign(weight, ids, nothing, by=self.node)
        return Labels(ids, weight.shape)

    def combine(self, *terms: tuple[Any, Any]) -> Any:
        """Labels of a product Π operand^power, elementwise (broadcast); ``Picked`` if an operand
        is.
        """
        if any(isinstance(operand, Picked) for _, operand in terms):
            operands, model = picking.together(self, [operand for _, operand in terms])
            product = self.combine(
                *[(power, operand) for (power, _), operand in zip(terms, operands, strict=True)]
            )
            return product if model is None else picking.result_like(model, product)
        labels = [(power, self.labels(operand)) for power, operand in terms]
        shape = tuple(torch.broadcast_shapes(*[operand.shape for _, operand in labels]))
        ids = self.combine_ids(*[(power, operand.ids) for power, operand in labels])
        return self.broadcast(Labels(ids, shape), shape)

    def combine_ids(self, *terms: tuple[Any, Tensor]) -> Tensor:
        return self.equations.combine(terms, by=self.node)

    def agree(self, labels: Labels, axes: Iterable[int]) -> Labels:
        """Equate labels along the given axes; the result has size 1 there and the same nominal
        shape.
        """
        rank = len(labels.shape)
        varying = sorted({axis % rank for axis in axes if labels.ids.shape[axis] > 1})
        if not varying:
            return labels
        common = labels.ids.amax(varying, keepdim=True)  # ANY is the smallest label
        self.equations.equate(
            common, labels.ids, by=self.node, reason="is summed with something that has no scale"
        )
        return Labels(common, labels.shape)
