"""The words in which rules speak of scales: labels of operands, equations between them, factors of
parameters.

A parameter's factor is exp(t[plus] − t[minus]). Its first use decides ``plus`` and ``minus``; every
further use must ask for the same factor, which becomes an equation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..capture.nodes import Node
from ..trees import tree_map
from . import labels as lb
from . import picking
from .equations import Cause, Equations
from .labels import ANY, FIXED, Labels
from .values import Known, Picked, Scaling, Weight

UNSET = -2
ZEROS_ALONE = (
    "is added to the product of a weight with zeros alone, which hides what else it may read"
)
MAX_ELEMENTWISE = 1 << 20  # parameters larger than this get no label per element


@dataclass(frozen=True)
class ZeroRead:
    """A use of a weight in which part of what it reads, or all of it, is exactly zero.

    Attributes:
        weight: The weight.
        given: Labels of the outputs, which broadcast to the weight's shape.
        read: Labels of what it reads, likewise; ANY at the zeros.
        by: The node at which it reads them.
    """

    weight: Weight
    given: Tensor
    read: Tensor
    by: Node


@dataclass
class Scales:
    """What is known of the scales of one model so far.

    Attributes:
        normalization, approximate: The user's choices.
        equations: All equations so far; shared by the walks over the eval and the train graph.
        scalings: Per parameter and buffer, how it is rescaled; shared likewise.
        frozen: Parameters that may not be rescaled, and why.
        read_buffers: Buffers that are read as plain tensors somewhere.
        uncounted: Parameters that the criterion leaves out.
        zero_reads: Uses in which a weight reads exact zeros; they ask for no factor.
        read_frozen: Frozen weights that read something else than zeros.
        precision: Machine epsilon of the least precise parameter; what is rounded more coarsely
            than that is fixed.
        training: Mode of the graph at work.
        node: The node at work.
        values: What every node so far has come to.
        parameter_shapes: Shapes of all parameters by name.
        reads: Which entries of a parameter the graph at work has read, by name: boolean, of its
            shape. A parameter that was read as a whole is left out.
        writers: For nodes whose memory in-place ops have written so far, the last of these ops.
    """

    normalization: str
    approximate: bool
    equations: Equations = field(default_factory=Equations)
    scalings: dict[str, Scaling] = field(default_factory=dict)
    frozen: dict[str, Cause] = field(default_factory=dict)
    read_buffers: set[str] = field(default_factory=set)
    uncounted: set[str] = field(default_factory=set)
    zero_reads: list[ZeroRead] = field(default_factory=list)
    read_frozen: set[str] = field(default_factory=set)
    precision: float = 0.0
    training: bool = False
    node: Node = None  # type: ignore[assignment]
    values: dict[Node, Any] = field(default_factory=dict)
    parameter_shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reads: dict[str, Tensor] = field(default_factory=dict)
    writers: dict[Node, Node] = field(default_factory=dict)

    # -- values -----------------------------------------------------------------------------------

    def is_weight(self, value: Any) -> bool:
        return isinstance(value, Weight)

    def is_buffer(self, value: Any) -> bool:
        return isinstance(value, Known) and value.buffer is not None

    def value(self, value: Any) -> Tensor | None:
        """The value of a known tensor, None for anything else."""
        return value.value if isinstance(value, Known) and not value.value.is_meta else None

    def simplify(self, value: Any) -> Any:
        """A frozen parameter is a constant."""
        if isinstance(value, Weight) and value.name in self.frozen:
            return lb.constant(value.shape)
        if isinstance(value, Picked) and isinstance(self.simplify(value.choices), Labels):
            return picking.collapse(self, value) if isinstance(value.choices, Weight) else value
        return value

    def labels(self, value: Any) -> Labels:
        """The labels of any operand; a number is a constant, a parameter gets one label per
        element.
        """
        if isinstance(value, Labels):
            return value
        if isinstance(value, Known):
            return lb.of_value(value.value) if value.lasting else lb.constant(value.shape)
        if isinstance(value, Weight):
            return self._weight_labels(value)
        if isinstance(value, Picked):
            return picking.collapse(self, value)
        return lb.of_value(
            torch.as_tensor(float(value) if isinstance(value, (bool, int, float)) else 1.0)
        )

    def _weight_labels(self, weight: Weight) -> Labels:
        if weight.name in self.frozen:
            return lb.constant(weight.shape)
        if self._current(weight) is None:
            if torch.Size(weight.shape).numel() > MAX_ELEMENTWISE:
                self.pin(weight, "is used elementwise and is too large to trace")
                return lb.constant(weight.shape)
            # Only the entries that are read: the others are not free to choose (see unread.py).
            entries = torch.unique(self._index(weight))
            fresh = self.equations.fresh(entries.numel(), origin=self.node)
            used = Weight(weight.name, tuple(entries.shape), index=entries)
            self._assign_unset(used, fresh, torch.zeros_like(fresh))
        current = self._current(weight)
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

    def note_read(self, weight: Weight) -> None:
        """Remember which entries of a parameter an op has consumed."""
        if weight.index is None:
            return
        full = self.parameter_shapes[weight.name]
        mask = self.reads.setdefault(weight.name, torch.zeros(full, dtype=torch.bool))
        mask.view(-1)[weight.index.reshape(-1).long()] = True

    # -- views ------------------------------------------------------------------------------------

    def through_view(self, x: Any) -> Any:
        """Apply the node's own op, which returns views, to labels or to a parameter's index."""
        arguments = self.node.bound
        first = next(iter(arguments))

        def apply(tensor: Tensor) -> Any:
            rest = tree_map(lambda a: self._stand_in(a) if isinstance(a, Node) else a, arguments)
            return self.node.target(**(rest | {first: tensor}))

        if isinstance(x, Weight):
            return tree_map(
                lambda i: replace(x, index=i, shape=tuple(i.shape)), apply(self._index(x))
            )
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
        index = pick(self._index(weight))
        return replace(weight, index=index, shape=tuple(index.shape))

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        """A reshape of labels, of a parameter or of a known tensor."""
        # resolves -1
        shape = tuple(torch.empty(x.shape, device="meta").reshape(tuple(shape)).shape)
        if isinstance(x, Known):
            return Known(x.value.reshape(shape), lasting=x.lasting)
        if isinstance(x, Weight):
            return replace(
                x, shape=shape, index=None if x.index is None else x.index.reshape(shape)
            )
        return lb.reshape(x, shape)

    def _index(self, weight: Weight) -> Tensor:
        if weight.index is not None:
            return weight.index
        return torch.arange(torch.Size(weight.shape).numel(), dtype=torch.int32).view(weight.shape)

    # -- equations --------------------------------------------------------------------------------

    def pin(self, value: Any, reason: str) -> Any:
        """Fix every element of an operand; returns its labels."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Weight):
            self.freeze(value.name, reason)
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
        unused = [value for value in operands if self._unused(value)]
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
            labels = self._adopt(weight, result) if self._unused(weight) else self.labels(weight)
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
        self._assign(weight, ids, torch.zeros([1] * ids.dim(), dtype=torch.int32))
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

    # -- parameters and buffers -------------------------------------------------------------------

    def scale_weight(self, weight: Weight, read: Tensor, fresh_shape: Sequence[int]) -> Tensor:
        """Let a weight read log-scales and give fresh ones: factor exp(t[given] − t[read]).

        Args:
            weight: The parameter, not frozen.
            read: Labels that broadcast to the weight's shape; elements that read ANY ask for no
                factor.
            fresh_shape: Shape of the labels it gives, size 1 along the axes that it sums over.

        Returns:
            The labels given, of shape ``fresh_shape``.
        """
        current = self._current(weight)
        if current is not None:
            plus = _narrow(current[0], fresh_shape)
            if plus is not None and self.equations.same(current[1], read):
                return plus  # a further use with the same input scales gives the same output scales
        given = self.equations.fresh(torch.Size(fresh_shape).numel(), origin=self.node).view(
            tuple(fresh_shape)
        )
        zeros = read == ANY
        if bool(zeros.any()):
            self.zero_reads.append(ZeroRead(weight, given, read, self.node))
            if not bool(zeros.all()):
                self._assign(*self._where(~zeros, weight, given, read))
        else:
            self._assign(weight, given, read)
        return given

    def read_zeros(self, weight: Weight, shape: Sequence[int]) -> Labels:
        """The product of a frozen weight with nothing but zeros: it fits any one label on the
        example.
        """
        label = self.equations.fresh(1, origin=self.node).view([1] * len(shape))
        nothing = torch.full([1] * len(weight.shape), ANY, dtype=torch.int32)
        self.zero_reads.append(ZeroRead(weight, label, nothing, self.node))
        return Labels(label, tuple(shape))

    def settle_zero_reads(self) -> None:
        """Settle the elements of weights that read exact zeros in every use, after the last walk.

        Whatever their factor, the outputs on the example stay. Inputs of other sizes may have
        something else in that place: a longer sequence feeds a state that began at zero back into
        its weight, and a wider input is padded by fewer zeros. So an element that reads only zeros
        reads like the rest of its row where that has one scale. A row that reads nothing but zeros
        does not show what it may read: it is left alone, and what it is added to is fixed.
        """
        for use in self.zero_reads:
            self.node = use.by
            if use.weight.name in self.frozen:
                known = use.weight.name in self.read_frozen or use.weight.name in self.scalings
                if not known and bool((use.read == ANY).all()):
                    self.equations.pin(use.given, by=use.by, reason=ZEROS_ALONE)
                continue
            if self._current(use.weight) is not None:
                continue
            read = Labels(use.read, use.weight.shape).full
            summed = [axis for axis, size in enumerate(use.given.shape) if size == 1]
            live = read != ANY
            unset = self._unset(use.weight)
            empty = ~live.any(summed, keepdim=True) if summed else ~live
            unsettled = unset.any(summed, keepdim=True) if summed else unset
            lost = use.given.expand(empty.shape)[empty & unsettled]
            self.equations.pin(lost, by=use.by, reason=ZEROS_ALONE)
            known = torch.unique(self.equations.simplify(read[live]))
            common = int(known) if known.numel() == 1 else FIXED
            rest = unset & ~empty
            if bool(rest.any()):
                minus = torch.full([1] * rest.dim(), common, dtype=torch.int32)
                self._assign_unset(*self._where(rest, use.weight, use.given, minus))

    def _where(
        self, mask: Tensor, weight: Weight, plus: Tensor, minus: Tensor
    ) -> tuple[Weight, Tensor, Tensor]:
        """The elements of a weight at a mask, and the labels there, each as one line."""
        mask = mask.expand(weight.shape)
        index = self._index(weight)[mask]
        chosen = replace(weight, index=index, shape=tuple(index.shape))
        return chosen, plus.expand(weight.shape)[mask], minus.expand(weight.shape)[mask]

    def _unset(self, weight: Weight) -> Tensor:
        """Which elements of a weight no use has asked a factor for, as a mask of its shape."""
        scaling = self.scalings.get(weight.name)
        if scaling is None:
            return torch.ones(weight.shape, dtype=torch.bool)
        plus = Labels(scaling.plus, scaling.shape).full.reshape(-1)
        return plus[self._index(weight).long()] == UNSET

    def follow(self, buffer: Known, ids: Tensor, *, epsilon: float | None = None) -> None:
        """Let a running statistic follow the labels ids, (channels,)."""
        name = buffer.buffer
        assert name is not None
        if name in self.frozen:
            self.equations.pin(
                ids,
                by=self.node,
                reason=f"feeds a normalization whose {name} {self.frozen[name].reason}",
            )
            return
        current = self.scalings.setdefault(
            name, Scaling(buffer.shape, ids, torch.zeros(1, dtype=torch.int32), epsilon)
        )
        self.equations.equate(current.plus, ids, by=self.node)
        if current.epsilon != epsilon:
            self.equations.pin(
                ids,
                by=self.node,
                reason=f"feeds two normalizations that share {name} but not its use",
            )

    def freeze(self, name: str, reason: str) -> None:
        """The parameter keeps its values; what its uses so far asked for must come to a factor of
        1.
        """
        self.frozen.setdefault(name, Cause(self.node, reason))
        scaling = self.scalings.get(name)
        if scaling is not None:
            minus = torch.where(scaling.plus == UNSET, UNSET, scaling.minus)
            self.equations.equate(scaling.plus, minus, by=self.node, reason=reason)

    def _unused(self, value: Any) -> bool:
        return (
            isinstance(value, Weight)
            and value.name not in self.frozen
            and self._current(value) is None
        )

    def _current(self, weight: Weight) -> tuple[Tensor, Tensor] | None:
        """(plus, minus) of a view of a parameter; None if (part of) it has not been used."""
        scaling = self.scalings.get(weight.name)
        if scaling is None:
            return None
        plus, minus = Labels(scaling.plus, scaling.shape), Labels(scaling.minus, scaling.shape)
        if weight.index is None:
            views = lb.reshape(plus, weight.shape).ids, lb.reshape(minus, weight.shape).ids
        else:
            at = weight.index.long()
            views = plus.full.reshape(-1)[at], minus.full.reshape(-1)[at]
        return None if (views[0] == UNSET).any() else views

    def _assign(self, weight: Weight, plus: Tensor, minus: Tensor) -> None:
        """One use of a parameter asks for the factor exp(t[plus] − t[minus]); the first use gets
        it, others must agree.
        """
        full = self.parameter_shapes[weight.name]
        if weight.index is None and weight.name not in self.scalings:
            plus, minus = (lb.reshape(Labels(ids, weight.shape), full).ids for ids in (plus, minus))
            self.scalings[weight.name] = Scaling(full, plus, minus)
            return
        current = self._current(weight)
        if current is None:
            self._assign_unset(weight, plus, minus)
            current = self._current(weight)
        assert current is not None
        self._require_equal(*current, plus, minus)

    def _assign_unset(self, weight: Weight, plus: Tensor, minus: Tensor) -> None:
        """Fill in, element by element, what no use of the parameter has asked for yet."""
        full = self.parameter_shapes[weight.name]
        unset = torch.full([1] * len(full), UNSET, dtype=torch.int32)
        old = self.scalings.get(weight.name, Scaling(full, unset, unset))
        dense_plus, dense_minus = (
            ids.expand(full).reshape(-1).clone() for ids in (old.plus, old.minus)
        )
        at = self._index(weight).reshape(-1).long()
        free = dense_plus[at] == UNSET
        dense_plus[at[free]] = plus.expand(weight.shape).reshape(-1)[free]
        dense_minus[at[free]] = minus.expand(weight.shape).reshape(-1)[free]
        self.scalings[weight.name] = Scaling(full, dense_plus.view(full), dense_minus.view(full))

    def _require_equal(self, plus: Tensor, minus: Tensor, plus2: Tensor, minus2: Tensor) -> None:
        """t[plus] − t[minus] = t[plus2] − t[minus2] elementwise."""
        if self.equations.same(minus, minus2):
            self.equations.equate(plus, plus2, by=self.node)
            return
        terms = [(1, plus), (-1, minus), (-1, plus2), (1, minus2)]
        rank = max(ids.dim() for _, ids in terms)
        if all(sum(size > 1 for size in ids.shape) <= 1 for _, ids in terms) and rank > 1:
            # A sum of functions of one axis each vanishes everywhere if it does along each axis.
            for axis in range(rank):
                lines = [(c, _line(ids, axis)) for c, ids in terms]
                self.equations.require(lines, by=self.node)
        else:
            self.equations.require(terms, by=self.node)


def _line(ids: Tensor, axis: int) -> Tensor:
    """The labels along one axis at the origin of the others."""
    for other in range(ids.dim()):
        if other != axis:
            ids = ids.narrow(other, 0, 1)
    return ids.flatten()


def _narrow(ids: Tensor, shape: Sequence[int]) -> Tensor | None:
    """ids in the given shape if they do not vary along the axes of size 1, else None."""
    for axis, size in enumerate(shape):
        if size == 1 and ids.shape[axis] > 1:
            return None
    return ids.expand(tuple(shape))
