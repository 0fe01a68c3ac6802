"""By which factor every parameter is multiplied, as its uses ask for it.

A factor is exp(t[plus] − t[minus]). The first use of a parameter decides ``plus`` and ``minus``;
every further use must ask for the same factor, which becomes an equation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..capture.nodes import Node
from . import labels as lb
from .equations import Cause, Equations
from .labels import ANY, FIXED, Labels
from .values import Known, Scaling, Weight

UNSET = -2
ZEROS_ALONE = (
    "is added to the product of a weight with zeros alone, which hides what else it may read"
)


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
class Factors:
    """What was asked of the parameters and buffers of one model so far.

    Attributes:
        equations: All equations so far.
        scalings: Per parameter and buffer, how it is rescaled.
        frozen: Parameters that may not be rescaled, and why.
        shapes: Shapes of all parameters by name.
        reads: Which entries of a parameter the graph at work has read, by name: boolean, of its
            shape. A parameter that was read as a whole is left out.
        zero_reads: Uses in which a weight reads exact zeros; they ask for no factor.
        read_frozen: Frozen weights that read something else than zeros.
    """

    equations: Equations
    frozen: dict[str, Cause] = field(default_factory=dict)
    scalings: dict[str, Scaling] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    reads: dict[str, Tensor] = field(default_factory=dict)
    zero_reads: list[ZeroRead] = field(default_factory=list)
    read_frozen: set[str] = field(default_factory=set)

    def scale(
        self, weight: Weight, read: Tensor, fresh_shape: Sequence[int], *, by: Node
    ) -> Tensor:
        """Let a weight read log-scales and give fresh ones: factor exp(t[given] − t[read]).

        Args:
            weight: The parameter, not frozen.
            read: Labels that broadcast to the weight's shape; elements that read ANY ask for no
                factor.
            fresh_shape: Shape of the labels it gives, size 1 along the axes that it sums over.
            by: The node that uses it.

        Returns:
            The labels given, of shape ``fresh_shape``.
        """
        current = self.asked(weight)
        if current is not None:
            plus = _narrow(current[0], fresh_shape)
            if plus is not None and self.equations.same(current[1], read):
                return plus  # a further use with the same input scales gives the same output scales
        given = self.equations.fresh(torch.Size(fresh_shape).numel(), origin=by).view(
            tuple(fresh_shape)
        )
        zeros = read == ANY
        if bool(zeros.any()):
            self.zero_reads.append(ZeroRead(weight, given, read, by))
            if not bool(zeros.all()):
                self.assign(*_where(~zeros, weight, given, read), by=by)
        else:
            self.assign(weight, given, read, by=by)
        return given

    def read_zeros(self, weight: Weight, shape: Sequence[int], *, by: Node) -> Labels:
        """The product of a frozen weight with nothing but zeros: it fits any one label on the
        example.
        """
        label = self.equations.fresh(1, origin=by).view([1] * len(shape))
        nothing = torch.full([1] * len(weight.shape), ANY, dtype=torch.int32)
        self.zero_reads.append(ZeroRead(weight, label, nothing, by))
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
            if use.weight.name in self.frozen:
                known = use.weight.name in self.read_frozen or use.weight.name in self.scalings
                if not known and bool((use.read == ANY).all()):
                    self.equations.pin(use.given, by=use.by, reason=ZEROS_ALONE)
                continue
            if self.asked(use.weight) is not None:
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
                self.assign_unset(*_where(rest, use.weight, use.given, minus))

    def _unset(self, weight: Weight) -> Tensor:
        """Which elements of a weight no use has asked a factor for, as a mask of its shape."""
        scaling = self.scalings.get(weight.name)
        if scaling is None:
            return torch.ones(weight.shape, dtype=torch.bool)
        plus = Labels(scaling.plus, scaling.shape).full.reshape(-1)
        return plus[weight.entries.long()] == UNSET

    def follow(self, buffer: Known, ids: Tensor, *, by: Node, epsilon: float | None = None) -> None:
        """Let a running statistic follow the labels ids, (channels,)."""
        name = buffer.buffer
        assert name is not None
        if name in self.frozen:
            self.equations.pin(
                ids,
                by=by,
                reason=f"feeds a normalization whose {name} {self.frozen[name].reason}",
            )
            return
        current = self.scalings.setdefault(
            name, Scaling(buffer.shape, ids, torch.zeros(1, dtype=torch.int32), epsilon)
        )
        self.equations.equate(current.plus, ids, by=by)
        if current.epsilon != epsilon:
            self.equations.pin(
                ids,
                by=by,
                reason=f"feeds two normalizations that share {name} but not its use",
            )

    def freeze(self, name: str, reason: str, *, by: Node) -> None:
        """The parameter keeps its values; what its uses so far asked for must come to a factor of
        1.
        """
        self.frozen.setdefault(name, Cause(by, reason))
        scaling = self.scalings.get(name)
        if scaling is not None:
            minus = torch.where(scaling.plus == UNSET, UNSET, scaling.minus)
            self.equations.equate(scaling.plus, minus, by=by, reason=reason)

    def labels_asked(self, weight: Weight) -> list[Labels]:
        """The labels of the factor that was asked of a parameter."""
        current = self.asked(weight) if weight.name not in self.frozen else None
        return [Labels(ids, weight.shape) for ids in current] if current is not None else []

    def is_unused(self, value: Any) -> bool:
        """Whether a value is a parameter, or a view of one, that nothing has asked a factor of."""
        return (
            isinstance(value, Weight)
            and value.name not in self.frozen
            and self.asked(value) is None
        )

    def asked(self, weight: Weight) -> tuple[Tensor, Tensor] | None:
        """(plus, minus) of a view of a parameter; None if (part of) it has not been used."""
        scaling = self.scalings.get(weight.name)
        if scaling is None:
            return None
        plus = Labels(scaling.plus, scaling.shape)
        minus = Labels(scaling.minus, scaling.shape)
        if weight.index is None and scaling.shape == weight.shape:
            views = scaling.plus, scaling.minus
        elif weight.index is None:
            views = (lb.reshape(plus, weight.shape).ids, lb.reshape(minus, weight.shape).ids)
        else:
            at = weight.index.long()
            views = plus.full.reshape(-1)[at], minus.full.reshape(-1)[at]
        return None if (views[0] == UNSET).any() else views

    def assign(self, weight: Weight, plus: Tensor, minus: Tensor, *, by: Node) -> None:
        """One use of a parameter asks for the factor exp(t[plus] − t[minus]); the first use gets
        it, others must agree.
        """
        full = self.shapes[weight.name]
        if weight.index is None and weight.name not in self.scalings:
            plus, minus = (lb.reshape(Labels(ids, weight.shape), full).ids for ids in (plus, minus))
            self.scalings[weight.name] = Scaling(full, plus, minus)
            return
        current = self.asked(weight)
        if current is None:
            self.assign_unset(weight, plus, minus)
            current = self.asked(weight)
        assert current is not None
        self._require_equal(*current, plus, minus, by)

    def assign_unset(self, weight: Weight, plus: Tensor, minus: Tensor) -> None:
        """Fill in, element by element, what no use of the parameter has asked for yet."""
        full = self.shapes[weight.name]
        unset = torch.full([1] * len(full), UNSET, dtype=torch.int32)
        old = self.scalings.get(weight.name, Scaling(full, unset, unset))
        dense_plus, dense_minus = (
            ids.expand(full).reshape(-1).clone() for ids in (old.plus, old.minus)
        )
        at = weight.entries.reshape(-1).long()
        free = dense_plus[at] == UNSET
        dense_plus[at[free]] = plus.expand(weight.shape).reshape(-1)[free]
        dense_minus[at[free]] = minus.expand(weight.shape).reshape(-1)[free]
        self.scalings[weight.name] = Scaling(full, dense_plus.view(full), dense_minus.view(full))

    def _require_equal(
        self, plus: Tensor, minus: Tensor, plus2: Tensor, minus2: Tensor, by: Node
    ) -> None:
        """t[plus] − t[minus] = t[plus2] − t[minus2] elementwise."""
        if self.equations.same(minus, minus2):
            self.equations.equate(plus, plus2, by=by)
            return
        terms = [(1, plus), (-1, minus), (-1, plus2), (1, minus2)]
        rank = max(ids.dim() for _, ids in terms)
        if all(sum(size > 1 for size in ids.shape) <= 1 for _, ids in terms) and rank > 1:
            # A sum of functions of one axis each vanishes everywhere if it does along each axis.
            for axis in range(rank):
                lines = [(c, _line(ids, axis)) for c, ids in terms]
                self.equations.require(lines, by=by)
        else:
            self.equations.require(terms, by=by)

    def note_read(self, weight: Weight) -> None:
        """Remember which entries of a parameter an op has consumed."""
        if weight.index is None:
            return
        full = self.shapes[weight.name]
        mask = self.reads.setdefault(weight.name, torch.zeros(full, dtype=torch.bool))
        mask.view(-1)[weight.index.reshape(-1).long()] = True


def _where(
    mask: Tensor, weight: Weight, plus: Tensor, minus: Tensor
) -> tuple[Weight, Tensor, Tensor]:
    """The elements of a weight at a mask, and the labels there, each as one line."""
    mask = mask.expand(weight.shape)
    index = weight.entries[mask]
    chosen = replace(weight, index=index, shape=tuple(index.shape))
    return chosen, plus.expand(weight.shape)[mask], minus.expand(weight.shape)[mask]


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
