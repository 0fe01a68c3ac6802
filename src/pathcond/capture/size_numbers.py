"""Numbers that remember that they are sizes, and report what becomes of them to a watch.

They pass for plain numbers wherever Python takes one. Arithmetic with them gives further ones;
comparisons and truth values are told to the watch of the thread, which says how they come out.
"""

from __future__ import annotations

import builtins
import itertools
import math
import operator
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor

from .decisions import is_own

plain_len, plain_range = builtins.len, builtins.range
Ends = tuple[float, float]
ANYWHERE: Ends = (-math.inf, math.inf)


class Watcher(Protocol):
    """Who is told what becomes of sizes."""

    follows_value: bool

    def sizes_of(self, tensor: Tensor, found: Any, axis: int | None = None) -> Any: ...

    def note_test(
        self, operands: tuple[Any, Any], outcome: bool, compare: Callable[[Any, Any], bool]
    ) -> bool: ...

    def note_loop(self, bounds: tuple[Any, ...], turns: range, frame: FrameType) -> range: ...

    def note_lookup(self, number: Any, frame: FrameType) -> None: ...


class _Running(threading.local):
    """The watch of this thread, if there is one."""

    watch: Watcher | None = None


running = _Running()


class WatchedInt(int):
    """A whole number that was computed from sizes; without a running watch it is a number as any
    other.

    Attributes:
        sources: The sizes of tensors that it was computed from.
        form: How it was computed: equal for numbers that come of the same axes by the same steps.
        ends: Between what it lies whatever the sizes: ``3 - n % 2`` is 2 or 3.
    """

    sources: frozenset[int]
    form: int
    ends: Ends

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    def __hash__(self) -> int:
        """Whoever looks a number up in a set compares it with all that are in there."""
        if running.watch is not None:
            running.watch.note_lookup(self, sys._getframe(1))
        return int.__hash__(self)


class WatchedFloat(float):
    """A number that was computed from sizes by a division or a root; see ``WatchedInt``."""

    sources: frozenset[int]
    form: int
    ends: Ends

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __deepcopy__(self, memo: Any) -> float:
        return float(self)

    __hash__ = float.__hash__


def is_watched(value: Any) -> bool:
    return type(value) in (WatchedInt, WatchedFloat)


def bare(value: Any) -> Any:
    """The number without its sources."""
    return (
        int(value)
        if type(value) is WatchedInt
        else float(value)
        if type(value) is WatchedFloat
        else value
    )


def form_of(value: Any) -> Any:
    return value.form if is_watched(value) else repr(value)  # -1 and -2 have one hash


def ends_of(value: Any) -> Ends:
    return value.ends if is_watched(value) else (value, value)


def _watched(value: Any, sources: frozenset[int], form: Any, ends: Ends = ANYWHERE) -> Any:
    if isinstance(value, tuple):
        return tuple(_watched(part, sources, (i, form)) for i, part in enumerate(value))
    if type(value) not in (int, float):
        return value
    watched: Any = WatchedInt(value) if type(value) is int else WatchedFloat(value)
    watched.sources = sources
    watched.form = hash(form)
    watched.ends = ends
    return watched


def as_size(
    size: int, form: Any, sources: frozenset[int] = frozenset(), *, positive: bool = False
) -> Any:
    """A size as a number that remembers it, and further sources; positive if the tensor is never
    empty.
    """
    if type(size) is not int:
        return size
    return _watched(size, sources | {size}, ("size", form), (int(positive), math.inf))


def watched_len(values: Any, /) -> int:
    """``len`` of a tensor or of a list of tensors is a size as well."""
    length = plain_len(values)
    if (
        running.watch is None
        or not (
            isinstance(values, Tensor) or (type(values) in (list, tuple) and _holds_tensors(values))
        )
        or is_own(sys._getframe(1))  # the capture around it counts tensors too
    ):
        return length
    if isinstance(values, Tensor):
        return running.watch.sizes_of(values, length, 0)  # type: ignore[no-any-return]
    return as_size(length, "tensors")  # type: ignore[no-any-return]


class _Range(type):
    def __call__(cls, *bounds: Any) -> Any:
        turns = plain_range(*map(bare, bounds))
        if running.watch is None or not any(map(is_watched, bounds)):
            return turns
        return running.watch.note_loop(bounds, turns, sys._getframe(1))

    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, plain_range)


class WatchedRange(metaclass=_Range):
    """Stands in for ``range``: a loop that has no turn at the example's size may have some at
    others.
    """


def _holds_tensors(values: Any) -> bool:
    return plain_len(values) > 0 and isinstance(values[0], Tensor)


def _arithmetic(compute: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """A method that computes with the plain number, and lets the result remember where it came
    from.
    """

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = [bare(other) for other in ((*others, self) if reflected else (self, *others))]
        result = compute(*operands)
        if running.watch is None:
            return result
        return _watched(
            result,
            frozenset().union(*(n.sources for n in (self, *others) if is_watched(n))),
            (compute, reflected, *map(form_of, (self, *others))),
            _ends_after(compute, [*others, self] if reflected else [self, *others]),
        )

    return method


def _ends_after(compute: Callable[..., Any], operands: Sequence[Any]) -> Ends:
    """Between what a result lies for all sizes, as far as that is known."""
    ends = [ends_of(operand) for operand in operands]
    if compute is operator.mod:
        divisor, same = ends[1]
        whole = isinstance(operands[0], int) and isinstance(divisor, int)
        return (0, divisor - 1) if whole and divisor == same and divisor > 0 else ANYWHERE
    divides = compute in (operator.truediv, operator.floordiv)
    if compute not in EXTREME_AT_ENDS or (divides and not ends[1][0] > 0):
        return ANYWHERE
    corners = [EXTREME_AT_ENDS[compute](*corner) for corner in itertools.product(*ends)]
    # Where ∞ - ∞ and ∞ / ∞ lead lies between the other corners.
    found = [corner for corner in corners if not math.isnan(corner)]
    return min(found), max(found)


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """A method that reports its outcome."""

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = compare(bare(self), bare(other))
        if running.watch is None or _is_always_so(compare, self, other):
            return outcome
        return running.watch.note_test((self, other), outcome, compare)

    return method


def _is_always_so(compare: Callable[[Any, Any], bool], number: Any, other: Any) -> bool:
    """Whether a test comes out one way for all sizes."""
    (least, greatest), (low, high) = ends_of(number), ends_of(other)
    if compare in EQUALITY:
        return greatest < low or high < least or least == greatest == low == high
    return len({compare(a, b) for a in (least, greatest) for b in (low, high)}) == 1


def _truth(self: Any) -> bool:
    outcome = bool(bare(self))
    if running.watch is None or _is_always_so(operator.ne, self, 0):
        return outcome
    return running.watch.note_test((self, 0), outcome, operator.ne)


def _at_end(rounded: Callable[[float], float]) -> Callable[[float], float]:
    return lambda end: rounded(end) if math.isfinite(end) else end


EQUALITY = (operator.eq, operator.ne)
BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
    "ceil": lambda x: x.__ceil__(),
    "floor": lambda x: x.__floor__(),
    "trunc": lambda x: x.__trunc__(),
}
# What is greatest and least where its operands are; divisors must be positive.
EXTREME_AT_ENDS: dict[Callable[..., Any], Callable[..., float]] = {
    **{op: op for op in (operator.add, operator.sub, operator.truediv)},
    operator.mul: lambda a, b: a * b if a and b else 0,  # no size is ∞
    operator.floordiv: lambda a, b: _at_end(math.floor)(a / b),
    operator.neg: operator.neg,
    operator.pos: operator.pos,
    **{UNARY[name]: _at_end(getattr(math, name)) for name in ("ceil", "floor", "trunc")},
}
METHODS: dict[type, dict[str, Callable[..., Any]]] = {
    WatchedInt: {"bit_length": int.bit_length, "bit_count": int.bit_count},
    # one or zero, so that a test of it is one of a number
    WatchedFloat: {"is_integer": lambda x: int(x.is_integer())},
}
for _type in (WatchedInt, WatchedFloat):
    for _name in (*BINARY, *(BITWISE if _type is WatchedInt else ())):
        _compute = getattr(operator, _name)
        setattr(_type, f"__{_name.rstrip('_')}__", _arithmetic(_compute))
        setattr(_type, f"__r{_name.rstrip('_')}__", _arithmetic(_compute, reflected=True))
    for _name, _compute in (UNARY | {"divmod": divmod}).items():
        setattr(_type, f"__{_name}__", _arithmetic(_compute))
    setattr(_type, "__rdivmod__", _arithmetic(divmod, reflected=True))  # noqa: B010
    for _name, _compute in METHODS[_type].items():
        setattr(_type, _name, _arithmetic(_compute))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_type, f"__{_name}__", _comparison(getattr(operator, _name)))
    setattr(_type, "__bool__", _truth)  # noqa: B010


# -- arguments of calls ----------------------------------------------------------------------------


def has_watched(tree: Any) -> bool:
    if isinstance(tree, (tuple, list)):
        return any(map(has_watched, tree))
    if isinstance(tree, dict):
        return any(map(has_watched, tree.values()))
    if isinstance(tree, slice):
        return any(map(has_watched, (tree.start, tree.stop, tree.step)))
    return is_watched(tree)


def replace_watched(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """A tree of arguments with the numbers that are sizes replaced; parts without such are the same
    objects.
    """
    if not has_watched(tree):
        return tree
    if isinstance(tree, (tuple, list)):
        parts = [replace_watched(part, replace) for part in tree]
        if isinstance(tree, torch.Size) and all(isinstance(part, int) for part in parts):
            return torch.Size(parts)
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: replace_watched(value, replace) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(
            *(replace_watched(bound, replace) for bound in (tree.start, tree.stop, tree.step))
        )
    return replace(tree)


def plain(tree: Any) -> Any:
    return replace_watched(tree, bare)
