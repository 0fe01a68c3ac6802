"""Whether code that cannot be followed may reach into a module that it calls.

A dispatch that calls ``expert(x)`` on the example might, on other inputs, call ``expert.up(x)`` or
read ``expert.up.weight``: then nothing inside the expert may be rescaled. What a branch does that
the example does not take is found by reading the code: any mention of a name from inside the
module, any other use of it than a call, counts.
"""

from __future__ import annotations

import dis
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from enum import Enum
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.contents import walk
from ..capture.isolation import OF_EVERY_MODULE, TABLES
from .uses import methods_of, only_calls, own_kinds, sets_elsewhere, writes_into_objects

# What has rules of its own, or cannot be written into.
UNWRITTEN = (
    *(nn.Module, Tensor, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(tuple, frozenset, torch.dtype, torch.device, Enum),
)
# Names that give access to everything.
MASTER_KEYS = frozenset(
    "children named_children modules named_modules parameters named_parameters buffers "
    "named_buffers state_dict _modules _parameters _buffers get_submodule get_parameter __dict__ "
    "vars setattr delattr apply functional_call eval exec globals locals".split()
)


def code_of(module: nn.Module, executed: Iterable[CodeType]) -> list[CodeType]:
    """What a module executed on the example, and its other methods, which it may call on other
    inputs.
    """
    return list(dict.fromkeys([*executed, *methods_of(module)]))


def may_reach_into(child: nn.Module, caller: nn.Module, codes: Iterable[CodeType]) -> bool:
    """Whether some code may read or call what is inside a module, or change it.

    Args:
        child: The module.
        caller: The module that calls it, or is around it.
        codes: All code of the caller.
    """
    codes = list(codes)
    mentioned = {name for code in codes for name in _names(code)}
    inside = {
        name.rpartition(".")[2] for name, _ in [*child.named_parameters(), *child.named_buffers()]
    }
    inside |= {
        name.rpartition(".")[2]
        for name, part in child.named_modules()
        if name and any(True for _ in part.parameters())
    }
    named = {name for name in inside if not name.isdigit()}
    return (
        bool(mentioned & (MASTER_KEYS | named))
        or not only_calls(caller, child, codes)
        or (_shares_objects_around(child, caller) and writes_into_objects(codes))
    )


def _shares_objects_around(child: nn.Module, caller: nn.Module) -> bool:
    own = set(child.modules())
    return share_objects(own, [module for module in caller.modules() if module not in own])


def share_objects(some: Iterable[nn.Module], others: Iterable[nn.Module]) -> bool:
    """Whether some modules and others hold one object, a dict in which one says how the other is to
    compute, say.
    """
    return not _objects(some).isdisjoint(_objects(others))


def _objects(modules: Iterable[nn.Module]) -> set[int]:
    """ids of the objects that some modules hold in attributes and that can be written into."""
    attributes = (value for m in modules for name, value in vars(m).items() if name not in TABLES)
    found = walk(attributes, closed=lambda part: isinstance(part, (nn.Module, Tensor)))
    return {id(part) for part in found if not isinstance(part, UNWRITTEN)}


def attributes_set(codes: Iterable[CodeType]) -> set[str]:
    """The names of all attributes that some code sets."""
    return {
        step.argval
        for code in codes
        for step in dis.get_instructions(code)
        if step.opname in ("STORE_ATTR", "DELETE_ATTR")
    }


def mentions(module: nn.Module) -> set[str]:
    """All names, and strings, in the code of a module."""
    return {name for code in methods_of(module) for name in _names(code)}


def attributes_set_by(model: nn.Module, child: nn.Module) -> nn.Module | None:
    """The first module outside of another one whose code sets attributes of others by a name that
    this one's code reads, or writes into a container that both have.
    """
    own = set(child.modules())
    plain = {name for part in own for name in vars(part) if name not in OF_EVERY_MODULE}
    # Attributes of classes are set for an object too.
    plain |= {name for part in own for kind in own_kinds(part) for name in vars(kind)}
    read = plain & set().union(*map(mentions, own))
    others = {type(module): module for module in model.modules() if module not in own}
    containers = containers_of(own)
    return next(
        (
            other
            for other in others.values()
            if not read.isdisjoint(sets_elsewhere(other))
            or (
                not containers.isdisjoint(containers_of([other]))
                and writes_into_objects(methods_of(other))
            )
        ),
        None,
    )


def containers_of(
    modules: Iterable[nn.Module], *, names: Collection[str] | None = None
) -> set[int]:
    """ids of the containers that are attributes of some modules; of those of some names."""
    return {
        id(value)
        for module in modules
        for name, value in vars(module).items()
        if name not in OF_EVERY_MODULE and (names is None or name in names)
        if issubclass(type(value), (dict, list, set, deque))
    }


def parts_held_elsewhere(child: nn.Module, holders: Iterable[nn.Module]) -> nn.Module | None:
    """The first of some modules that has a part of a module, or what is around it, in an attribute
    of its own: a list of layers, a method of one, an object that knows the module to which it
    belongs.
    """
    inside = {id(part) for part in (*child.modules(), *child.parameters(), *child.buffers())}
    own = set(child.modules())
    others = [holder for holder in holders if holder not in own]
    inside |= {id(module) for holder in others for module in _between(holder, child)}
    return next(
        (holder for holder in others if not inside.isdisjoint(map(id, held_aside(holder, own)))),
        None,
    )


def _between(holder: nn.Module, child: nn.Module) -> Iterator[nn.Module]:
    """A module that holds another one, and the modules on the way to that."""
    for name, module in holder.named_modules(remove_duplicate=False):
        if module is child:
            parts = name.split(".")
            yield from (holder.get_submodule(".".join(parts[:i])) for i in range(len(parts)))


def held_aside(holder: nn.Module, others: Iterable[nn.Module]) -> Iterator[Any]:
    """What the attributes of a module hold, but for what lies in its own modules and in others."""
    attributes = [value for name, value in vars(holder).items() if name not in TABLES]
    modules = {id(module) for module in (*holder.modules(), *others)}
    return walk(attributes, closed=lambda part: id(part) in modules)


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _names(constant)
