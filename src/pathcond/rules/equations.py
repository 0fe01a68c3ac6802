"""Linear equations between log-scales, and their exact solution.

Labels are created by ``fresh``; rules add equations between them; ``solve`` returns every label as
an integer combination of free log-scales, the units. Equalities go through connected components;
what is left (products, shared weights, query against key) goes through exact elimination.

    >>> equations = Equations()
    >>> a, b, c = equations.fresh(3, origin=None)
    >>> equations.equate(a, b, by=None)
    >>> total = equations.combine([(1, a), (1, c)], by=None)  # t_total = t_a + t_c
    >>> equations.pin(total, by=None, reason="")  # = 0
    >>> solution = equations.solve()
    >>> [solution.form(int(label)) for label in (a, b, c)]
    [{1: 1}, {1: 1}, {1: -1}]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from math import lcm
from typing import Any

import torch
from torch import Tensor

from .labels import ANY, FIXED

Form = dict[int, int]
# Whole numbers stay ints, which are many times quicker to compute with than fractions.
Coefficient = int | Fraction
Combination = dict[int, Coefficient]
BALANCES_FIXED = "must balance a scale that is fixed: "
BALANCES_ITSELF = "must balance itself"


@dataclass(frozen=True)
class Cause:
    """Why a log-scale is fixed: the node that asked for it, and its reason in words."""

    by: Any
    reason: str

    def passed_on(self) -> Cause:
        """Why what must balance that log-scale is fixed too, be it over one equation or many."""
        return Cause(self.by, BALANCES_FIXED + self.reason.removeprefix(BALANCES_FIXED))


@dataclass(frozen=True)
class SolvedScales:
    """Every label in terms of free labels.

    Attributes:
        root: (num_labels,) representative of each label's class of equal log-scales.
        forms: For the classes that elimination reached, {free label: integer coefficient}.
        causes: For classes fixed at 0, the first cause.
    """

    root: Tensor
    forms: dict[int, Form]
    causes: dict[int, Cause]

    def form(self, label: int) -> Form:
        """The log-scale of a label as {free label: coefficient}; empty means fixed."""
        return self.form_of_class(int(self.root[label]))

    def form_of_class(self, root: int) -> Form:
        """The same for a label that represents its class."""
        if root == FIXED or root in self.causes:
            return {}
        return self.forms.get(root, {root: 1})


@dataclass
class Equations:
    """A growing system of linear equations over labels. Id 0 is the fixed label."""

    count: int = 1
    origins: list[tuple[int, int, Any]] = field(default_factory=list)
    _pairs: list[Tensor] = field(default_factory=list)
    _pins: list[tuple[Tensor, Cause]] = field(default_factory=list)
    _rows: list[tuple[Tensor, tuple[Coefficient, ...], Any]] = field(default_factory=list)
    _root: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int32))
    _fixed: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.bool))
    _settled: tuple[int, int] = (0, 0)  # how many of _pairs and _pins are in _root

    def fresh(self, size: int, *, origin: Any) -> Tensor:
        """New labels, ``(size,)`` int32; ``origin`` is remembered for the report."""
        ids = torch.arange(self.count, self.count + size, dtype=torch.int32)
        self.origins.append((self.count, self.count + size, origin))
        self.count += size
        return ids

    def pin(self, ids: Tensor, *, by: Any, reason: str) -> None:
        """t = 0 for all labels in ``ids``."""
        ids = ids.flatten()
        ids = ids[ids > FIXED]
        if ids.numel():
            self._pins.append((torch.unique(ids), Cause(by, reason)))

    def equate(
        self,
        a: Tensor,
        b: Tensor,
        *,
        by: Any,
        reason: str = "is added to something that has no scale",
    ) -> None:
        """t[a] = t[b] elementwise (broadcast); pairs with ANY say nothing."""
        if a is b:
            return
        a, b = torch.broadcast_tensors(a, b)
        differ = a != b
        a, b = a[differ], b[differ]
        telling = (a != ANY) & (b != ANY)
        a, b = a[telling], b[telling]
        if not a.numel():
            return
        self.pin(torch.where(a == FIXED, b, a)[(a == FIXED) | (b == FIXED)], by=by, reason=reason)
        both = (a != FIXED) & (b != FIXED)
        if both.any():
            self._pairs.append(_unique_columns(torch.stack([a[both], b[both]]))[0])

    def combine(self, terms: Sequence[tuple[Any, Tensor]], *, by: Any) -> Tensor:
        """Labels of Σ coefficient · t[ids] (broadcast); ANY in a term gives ANY."""
        terms = [(_exact(c), ids) for c, ids in terms]
        stacked = torch.stack(torch.broadcast_tensors(*[ids for _, ids in terms]))
        flat = stacked.reshape(len(terms), -1)
        neutral = (flat == ANY).any(0)
        active = (flat != FIXED).sum(0)
        out = torch.full((flat.shape[1],), FIXED, dtype=torch.int32)
        plain = torch.zeros_like(neutral)
        for (coefficient, _), ids in zip(terms, flat, strict=True):
            if coefficient == 1:
                alone = (active == 1) & (ids != FIXED)
                out = torch.where(alone, ids, out)
                plain |= alone
        mixed = (active > 0) & ~plain & ~neutral
        if mixed.any():
            columns, inverse = _unique_columns(flat[:, mixed])
            new = self.fresh(columns.shape[1], origin=None)
            self._rows.append((torch.cat([new[None], columns]), (-1, *(c for c, _ in terms)), by))
            out[mixed] = new[inverse]
        out[neutral] = ANY
        return out.view(stacked.shape[1:])

    def require(self, terms: Sequence[tuple[int, Tensor]], *, by: Any) -> None:
        """Σ coefficient · t[ids] = 0 elementwise (broadcast)."""
        stacked = torch.stack(torch.broadcast_tensors(*[ids for _, ids in terms])).reshape(
            len(terms), -1
        )
        stacked = stacked[:, (stacked != ANY).all(0)]
        stacked = stacked[:, (stacked != FIXED).any(0)]
        if stacked.numel():
            self._rows.append((_unique_columns(stacked)[0], tuple(_exact(c) for c, _ in terms), by))

    def settle(self) -> None:
        """Bring the classes of equal labels up to date with all equalities and pins so far."""
        root = torch.cat([self._root, torch.arange(len(self._root), self.count, dtype=torch.int32)])
        pairs, pins = self._settled
        _join(root, self._pairs[pairs:])
        self._root = root
        self._settled = (len(self._pairs), len(self._pins))
        if len(self._pins) > pins or len(self._pairs) > pairs:
            self._fixed = torch.zeros(self.count, dtype=torch.bool)
            if self._pins:
                self._fixed[root[torch.cat([ids for ids, _ in self._pins]).long()].long()] = True

    def simplify(self, ids: Tensor) -> Tensor:
        """ids with equal labels made equal and fixed ones FIXED, as far as equalities and pins
        tell.
        """
        if self._settled != (len(self._pairs), len(self._pins)) or len(self._root) < self.count:
            self.settle()
        root = self._root[ids.clamp(min=FIXED).long()]
        fixed = self._fixed[root.clamp(max=len(self._fixed) - 1).long()] & (root < len(self._fixed))
        return torch.where(ids == ANY, ANY, torch.where(fixed, FIXED, root))

    def same(self, a: Tensor, b: Tensor) -> bool:
        """True if a and b are known to be equal elementwise (broadcast); False says nothing."""
        return bool((a == b).all()) or bool((self.simplify(a) == self.simplify(b)).all())

    def solve(self) -> SolvedScales:
        """Every label as an integer combination of free labels, the smallest ids being the free
        ones.
        """
        self.settle()
        root = self._root
        causes: dict[int, Cause] = {}
        for ids, cause in self._pins:
            for label in torch.unique(root[ids.long()]).tolist():
                causes.setdefault(label, cause)
        solved: dict[int, Combination] = {}
        for ids, coefficients, by in self._rows:
            for column in root[ids.long()].T.tolist():
                self._eliminate(column, coefficients, by, causes, solved)
        return SolvedScales(root, _integral(solved, causes), causes)

    def _eliminate(
        self,
        column: list[int],
        coefficients: tuple[Coefficient, ...],
        by: Any,
        causes: dict[int, Cause],
        solved: dict[int, Combination],
    ) -> None:
        row: Combination = {}
        fixed: Cause | None = None
        stack = [
            (label, c) for label, c in zip(column, coefficients, strict=True) if label != FIXED
        ]
        while stack:
            label, c = stack.pop()
            if label in causes:
                fixed = fixed or causes[label]
            elif label in solved:
                stack.extend((other, c * factor) for other, factor in solved[label].items())
            else:
                row[label] = row.get(label, 0) + c
                if not row[label]:
                    del row[label]
        if not row:
            return
        if len(row) == 1:
            causes[next(iter(row))] = fixed.passed_on() if fixed else Cause(by, BALANCES_ITSELF)
            return
        # The latest label gives way, so that units are named after the first layer that makes them;
        # coefficients of ±1 first, so that the solution stays integral.
        pivot = max(row, key=lambda label: (abs(row[label]) == 1, label))
        solved[pivot] = {
            label: -_ratio(c, row[pivot]) for label, c in row.items() if label != pivot
        }


def _integral(solved: dict[int, Combination], causes: dict[int, Cause]) -> dict[int, Form]:
    """Substitute until only free labels remain, then clear denominators unit by unit."""
    memo: dict[int, Combination] = {}

    def expand(label: int) -> Combination:
        if label in causes:
            return {}
        if label not in solved:
            return {label: 1}
        if label not in memo:
            total: Combination = {}
            for other, c in solved[label].items():
                for free, factor in expand(other).items():
                    total[free] = total.get(free, 0) + c * factor
            memo[label] = {free: c for free, c in total.items() if c}
        return memo[label]

    forms = {label: expand(label) for label in reversed(solved)}
    clear: dict[int, int] = {}
    for form in forms.values():
        for free, c in form.items():
            clear[free] = lcm(clear.get(free, 1), c.denominator)
    integral = {
        label: {free: int(c * clear[free]) for free, c in form.items()}
        for label, form in forms.items()
    }
    integral.update({free: {free: scale} for free, scale in clear.items() if scale > 1})
    return integral


def _exact(coefficient: Any) -> Coefficient:
    fraction = Fraction(coefficient)
    return fraction.numerator if fraction.denominator == 1 else fraction


def _ratio(a: Coefficient, b: Coefficient) -> Coefficient:
    return a * b if b in (-1, 1) else _exact(Fraction(a) / b)


def _unique_columns(ids: Tensor) -> tuple[Tensor, Tensor]:
    """Distinct columns and, for every column, its place among them. Rows are packed two at a time
    into one integer.
    """
    key = ids[0].long()
    for row in ids[1:]:
        base = int(row.max()) + 2
        _, key = torch.unique(key, return_inverse=True)
        key = key * base + row + 1
    distinct, inverse = torch.unique(key, return_inverse=True)
    example = torch.empty(len(distinct), dtype=torch.long)
    example[inverse] = torch.arange(len(inverse))
    return ids[:, example], inverse


def _join(root: Tensor, pairs: Sequence[Tensor]) -> None:
    """Connected components, in place: root[label] becomes the smallest label of its class."""
    if not pairs:
        return
    a, b = torch.cat(list(pairs), dim=1).long()
    while True:
        low = torch.minimum(root[a], root[b])
        high = torch.maximum(root[a], root[b])
        apart = low != high
        if not apart.any():
            return
        a, b = a[apart], b[apart]
        root.scatter_reduce_(0, high[apart].long(), low[apart], "amin")
        while not torch.equal(shorter := root[root.long()], root):
            root.copy_(shorter)
