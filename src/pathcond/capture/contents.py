"""What Python objects hold: parts of containers, attributes, and what functions carry along."""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    CellType,
    FunctionType,
    GeneratorType,
    MethodType,
    ModuleType,
)
from typing import Any
from weakref import ProxyTypes

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

PLAIN = (type(None), bool, int, float, str, bytes)
# Objects of these belong to the whole process, and so does what they hold.
OF_THE_PROCESS = frozenset(("queue", "threading", "logging", "multiprocessing", "concurrent"))
MANY = 20_000  # objects that are looked into


def walk(
    values: Iterable[Any],
    *,
    but: Collection[int] = (),
    closed: Callable[[Any], bool] = lambda value: False,
    levels: float = math.inf,
) -> Iterator[Any]:
    """Some values and all that they hold, each once, those nearest to them first.

    Args:
        values: Where to begin.
        but: ids of objects that are left out, with what they alone hold.
        closed: Says of an object whether it is not looked into.
        levels: Of containers and objects in each other; 1 for the values alone.

    >>> list(walk([{"a": [1, (2, {3})]}]))[-1]
    {3}
    """
    here = list(behind_proxies(values))
    seen = dict.fromkeys(but)
    level = 1
    while here and len(seen) < len(but) + MANY:
        # By their ids, for parts need not be hashable; keeping them keeps their ids their own.
        new = {id(value): value for value in here if id(value) not in seen}
        seen |= new
        yield from new.values()
        inside = new.values() if level < levels else ()
        here = [part for value in inside if not closed(value) for part in parts_of(value)]
        level += 1


def tensors_in(values: Iterable[Any], *, but: Collection[int] = ()) -> Iterator[Tensor]:
    """Tensors among some values and all that these hold, but for objects of some ids."""
    return (part for part in walk(values, but=but) if isinstance(part, Tensor))


def behind_proxies(values: Iterable[Any]) -> Iterator[Any]:
    """The same values, with what weak proxies stand for in their place, if it is still there:
    asking a proxy of something that is gone for anything, its class too, raises.
    """
    for value in values:
        if type(value) not in ProxyTypes:
            yield value
            continue
        with contextlib.suppress(ReferenceError):
            yield value.__dir__.__self__


def parts_of(value: Any) -> list[Any]:
    """What an object holds, but for plain values.

    >>> parts_of(functools.partial(print, [1], end=(2,)))
    [<built-in function print>, [1], (2,)]
    """
    if isinstance(value, (*PLAIN, type, ModuleType, FakeTensor)):
        return []
    if type(value).__module__.partition(".")[0] in OF_THE_PROCESS:
        return []
    found = [*_carried_by(value), *_contained_in(value), *attributes_of(value).values()]
    return [part for part in behind_proxies(found) if type(part) not in PLAIN]


def _carried_by(value: Any) -> list[Any]:
    """What something that can be called, or that goes on, has with it."""
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_filled(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, BuiltinFunctionType):  # ``features.append``
        return [value.__self__]
    if isinstance(value, GeneratorType):
        return list(value.gi_frame.f_locals.values()) if value.gi_frame is not None else []
    return [value()] if isinstance(value, weakref.ref) else []


def _contained_in(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, (list, tuple, set, frozenset, deque)) else []


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of an object itself, those in slots among them."""
    if isinstance(value, Tensor):
        return vars(value)
    return {**(getattr(value, "__dict__", None) or {}), **slots_of(value)}


def slots_of(value: Any) -> dict[str, Any]:
    """The attributes for which the class of an object has ``__slots__``, where they are set."""
    slots = (vars(kind).get("__slots__", ()) for kind in type(value).__mro__)
    names = (name for given in slots for name in ((given,) if isinstance(given, str) else given))
    own = (name for name in names if name not in ("__dict__", "__weakref__"))
    return {name: getattr(value, name) for name in own if hasattr(value, name)}


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True
