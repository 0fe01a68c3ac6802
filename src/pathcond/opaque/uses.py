"""What code does with a module that it has at hand: calls it, or anything else.

The code is read, also where the example does not take it. Each expression that may be the module,
or a module around it, is followed: ``self.experts[i]``, names that it is given to, functions that
it is passed to. Every use but a call that is not known to be harmless counts as another.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from types import (
    BuiltinFunctionType,
    ClassMethodDescriptorType,
    CodeType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    WrapperDescriptorType,
)
from typing import Any, TypeAlias

from torch import nn

from ..capture.contents import PLAIN, parts_of
from ..capture.source import Function, functions_of, last_name

# What an expression may be: nothing to do with the module; a module around it, or a container of
# such; the module itself. The greatest counts.
NEITHER, AROUND, ITSELF = range(3)
# An iteration gives values, or tuples of values.
Elements: TypeAlias = "int | list[Elements]"

PASSES_ON = frozenset("enumerate zip list tuple reversed iter next".split())
HARMLESS = frozenset("len isinstance range int print callable hasattr id str repr super".split())
VIEWS = frozenset("items values get keys".split())
NUMBERED = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
CHOOSING = (ast.IfExp, ast.BoolOp, ast.Tuple, ast.List, ast.NamedExpr, ast.Starred)
# Statements and expressions that only ask what something is.
ASKING = (ast.Compare, ast.Expr, ast.If, ast.While, ast.Assert, ast.UnaryOp, ast.FormattedValue)
LOOKING_UP = (ast.Attribute, ast.Subscript)
WRITING = frozenset(
    "append extend insert pop popitem remove clear add discard update setdefault appendleft "
    "__setitem__ __setattr__".split()
)
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
# Members of a class whose functions are known, and those that are not written in Python.
KNOWN_MEMBERS = (
    *(FunctionType, MethodType, property, classmethod, staticmethod, functools.partial),
    *(functools.partialmethod, functools.cached_property, functools.singledispatchmethod),
    *(functools._lru_cache_wrapper, BuiltinFunctionType, MemberDescriptorType),
    *(GetSetDescriptorType, MethodDescriptorType, WrapperDescriptorType, ClassMethodDescriptorType),
)


def only_calls(caller: nn.Module, child: nn.Module, codes: Iterable[CodeType]) -> bool:
    """Whether code does no more with a module than to call it; False where it cannot be read, and
    where the module is handed in from elsewhere.

    Args:
        caller: The module that the code belongs to.
        child: The module in question.
        codes: All code that the caller may run.
    """
    if child not in set(caller.modules()) or _has_other_members(caller):
        return False
    place = _Place(caller, child)
    methods = methods_of(caller)
    functions: dict[str, list[_Uses]] = {}
    for code in codes:
        if code.co_name in COMPREHENSIONS:  # read with the function around it
            continue
        found = [_Uses(each, place, is_method=code in methods) for each in functions_of(code)]
        if not found:
            return False
        functions.setdefault(code.co_name, []).extend(found)
    uses = [each for same in functions.values() for each in same]
    for each in uses:
        each.functions = functions
    learnt = True
    while learnt:
        learnt = any([each.follow() for each in uses])  # noqa: C419  all of them
    return not any(each.finds_another() for each in uses)


class _Place:
    """Where a module is, as seen from the one whose code calls it."""

    def __init__(self, caller: nn.Module, child: nn.Module) -> None:
        named = caller.named_modules(remove_duplicate=False)
        paths = [name.split(".") for name, part in named if part is child]
        self.parts = {part for path in paths for part in path}
        self.last = {path[-1] for path in paths}
        outer = {".".join(path[:-1]) for path in paths}
        self.numbered = any(isinstance(caller.get_submodule(path), NUMBERED) for path in outer)
        self.own = {
            name: ITSELF if module is child else AROUND
            for name, module in caller._modules.items()
            if module is not None and child in set(module.modules())
        }
        self.plain = {
            name
            for part in child.modules()
            for name, value in vars(part).items()
            if type(value) in PLAIN
        }
        self.functions = {n for n, v in vars(caller).items() if type(v) is FunctionType}

    def below(self, name: str | None) -> int:
        """What a module around the one in question has under a name, or a number."""
        if name is None:
            return ITSELF if self.numbered else AROUND
        return ITSELF if name in self.last else AROUND if name in self.parts else NEITHER


class _Uses:
    """One function, and what its names may be."""

    def __init__(self, function: Function, place: _Place, *, is_method: bool) -> None:
        self.place = place
        self.functions: dict[str, list[_Uses]] = {}
        arguments = function.args
        self.arguments = [part.arg for part in (*arguments.posonlyargs, *arguments.args)]
        self.by_name = {*self.arguments, *(part.arg for part in arguments.kwonlyargs)}
        self.roots = set(self.arguments[:1]) if is_method else set()
        decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
        self.is_static = any(getattr(each, "id", "") == "staticmethod" for each in decorators)
        self.known: dict[str, int] = {}
        # whether the parts of what may be the module itself are given names
        self.takes_apart = False
        body = function.body if isinstance(function.body, list) else [function.body]
        self.inside = [pair for part in body for pair in _with_outer(part, function)]

    def follow(self) -> bool:
        """Pass what is known on to names, and to the arguments of other functions; whether that was
        new.
        """
        before = sum(self.known.values())
        news = False
        for node, _ in self.inside:
            if isinstance(node, ast.Assign):
                for target in node.targets:
                    self._bind(target, self._parts(node.value))
            elif isinstance(node, (ast.For, ast.AsyncFor, ast.comprehension)):
                self._bind(node.target, self._elements(node.iter))
            elif isinstance(node, (ast.NamedExpr, ast.AnnAssign)) and node.value is not None:
                self._bind(node.target, self._parts(node.value))
            elif isinstance(node, ast.Call):
                news |= self._pass_on(node)
        return news or sum(self.known.values()) > before

    def _bind(self, target: ast.expr, kinds: Elements) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            self.takes_apart |= kinds == ITSELF
            several = kinds if isinstance(kinds, list) else [kinds] * len(target.elts)
            if len(several) != len(target.elts) or any(
                isinstance(part, ast.Starred) for part in target.elts
            ):
                several = [_greatest(kinds)] * len(target.elts)
            for part, kind in zip(target.elts, several, strict=True):
                self._bind(part.value if isinstance(part, ast.Starred) else part, kind)
        elif isinstance(target, ast.Name):
            self._learn(target.id, _greatest(kinds))

    def _learn(self, name: str, kind: int) -> bool:
        new = kind > self.known.get(name, NEITHER)
        if new:
            self.known[name] = kind
        return new

    def _pass_on(self, call: ast.Call) -> bool:
        news = False
        for callee, name, part in self._handed_over(call):
            if self._is_root(part) and name not in callee.roots:
                callee.roots.add(name)
                news = True
            elif not self._is_root(part):
                news |= callee._learn(name, self._kind(part))
        return news

    def _handed_over(self, call: ast.Call) -> Iterator[tuple[_Uses, str, ast.expr]]:
        """What a call gives to functions that are read: function, name of its argument, part of the
        call.
        """
        # Whatever stands behind ``*more`` may be any argument.
        starred = (i for i, part in enumerate(call.args) if isinstance(part, ast.Starred))
        placed = call.args[: next(starred, None)]
        for callee in self._callees(call):
            for names in self._orders(callee, call.func):
                for name, part in zip(names, placed, strict=False):
                    yield callee, name, part
            for keyword in call.keywords:
                if keyword.arg in callee.by_name:
                    yield callee, keyword.arg, keyword.value  # type: ignore[misc]

    def _orders(self, callee: _Uses, func: ast.expr) -> list[list[str]]:
        """The arguments that a call may give by their places: those behind ``self``, or all."""
        if not isinstance(func, ast.Attribute) or callee.is_static:
            return [callee.arguments]
        if self._is_root(func.value):
            in_attribute = func.attr in self.place.functions
            return [callee.arguments[0 if in_attribute else 1 :]]
        return [callee.arguments[1:], callee.arguments]

    def _callees(self, call: ast.Call) -> list[_Uses]:
        """The functions that a call may go to, among those that are read."""
        if isinstance(call.func, ast.Name):
            return self.functions.get(call.func.id, [])
        if not isinstance(call.func, ast.Attribute):
            return []
        if self._is_root(call.func.value) and call.func.attr in self.place.functions:
            return [each for same in self.functions.values() for each in same if each.roots]
        return self.functions.get(call.func.attr, [])

    def _is_root(self, node: ast.AST) -> bool:
        """Whether an expression is the module that the code belongs to: ``self``."""
        return isinstance(node, ast.Name) and node.id in self.roots and node.id not in self.known

    def _kind(self, node: ast.AST) -> int:
        """What an expression may be."""
        if isinstance(node, ast.Name):
            return AROUND if self._is_root(node) else self.known.get(node.id, NEITHER)
        if isinstance(node, ast.Attribute):
            if self._is_root(node.value):
                return self.place.own.get(node.attr, NEITHER)
            return self.place.below(node.attr) if self._kind(node.value) == AROUND else NEITHER
        if isinstance(node, ast.Subscript):
            return self.place.below(None) if self._kind(node.value) == AROUND else NEITHER
        if isinstance(node, ast.Call):
            return self._kind_of_call(node)
        if isinstance(node, CHOOSING):
            return max(map(self._kind, ast.iter_child_nodes(node)), default=NEITHER)
        return NEITHER

    def _kind_of_call(self, call: ast.Call) -> int:
        if isinstance(call.func, ast.Name) and call.func.id == "getattr":
            return self._kind_of_look_up(call.args)
        if isinstance(call.func, ast.Name) and call.func.id in PASSES_ON:
            kind = max(map(self._kind, call.args), default=NEITHER)
            return max(kind, self.place.below(None)) if kind and call.func.id == "next" else kind
        if isinstance(call.func, ast.Attribute) and call.func.attr in VIEWS:
            kind = self._kind(call.func.value)
            return self.place.below(None) if kind and call.func.attr == "get" else kind
        return NEITHER

    def _kind_of_look_up(self, arguments: list[ast.expr]) -> int:
        """What ``getattr`` gives: with a name that is computed, any part."""
        if len(arguments) < 2 or not self._kind(arguments[0]):
            return NEITHER
        name = arguments[1]
        if not isinstance(name, ast.Constant):
            return ITSELF
        return self._kind(ast.Attribute(arguments[0], str(name.value), ast.Load()))

    def _parts(self, node: ast.expr) -> Elements:
        if isinstance(node, (ast.Tuple, ast.List)):
            return [self._parts(part) for part in node.elts]
        return self._kind(node)

    def _elements(self, node: ast.expr) -> Elements:
        """What an iteration gives."""
        if isinstance(node, (ast.Tuple, ast.List)):
            return max((_greatest(self._parts(part)) for part in node.elts), default=NEITHER)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            parts = [self._elements(part) for part in node.args]
            if node.func.id == "enumerate" and parts:
                return [NEITHER, parts[0]]
            if node.func.id == "zip":
                return parts
            if node.func.id in PASSES_ON:
                return max(map(_greatest, parts), default=NEITHER)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            kind = self._kind(node.func.value)
            if node.func.attr == "items" and kind:
                return [NEITHER, self.place.below(None)]
        return self.place.below(None) if self._kind(node) else NEITHER

    def finds_another(self) -> bool:
        """Whether something else than a call is done with what may be the module, or a global is
        set, by which it may go.
        """
        return (
            self.takes_apart
            or any(isinstance(node, ast.Global) for node, _ in self.inside)
            or any(
                not self._is_harmless(node, outer)
                for node, outer in self.inside
                if isinstance(node, ast.expr)
                and not isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
                and self._kind(node)
            )
        )

    def _is_harmless(self, node: ast.expr, outer: ast.AST) -> bool:
        """Whether one use does nothing but call, pick or ask."""
        itself = self._kind(node) == ITSELF
        if isinstance(outer, ast.Call):
            return outer.func is node or self._may_be_given(node, outer)
        if isinstance(outer, ast.Attribute):
            return not itself or self._is_plain(outer)
        if isinstance(outer, ast.Starred):
            return not itself
        if isinstance(outer, (ast.Subscript, ast.For, ast.AsyncFor, ast.comprehension)):
            return not itself and not (isinstance(outer, ast.Subscript) and outer.slice is node)
        if isinstance(outer, ast.Assign):
            return all(map(_is_name, outer.targets))
        if isinstance(outer, ast.AnnAssign):
            return _is_name(outer.target)
        return isinstance(outer, (*CHOOSING, *ASKING))

    def _is_plain(self, attribute: ast.Attribute) -> bool:
        """Whether an attribute of the module is read that is a number or text."""
        return isinstance(attribute.ctx, ast.Load) and attribute.attr in self.place.plain

    def _may_be_given(self, node: ast.expr, call: ast.Call) -> bool:
        """Whether something may be given to what is called, whose code is read too."""
        if isinstance(call.func, ast.Name) and call.func.id in HARMLESS:
            return True
        if isinstance(call.func, ast.Name) and call.func.id in (*PASSES_ON, "getattr"):
            return self._kind(node) == AROUND
        return any(part is node for _, _, part in self._handed_over(call))


def writes_into_objects(codes: Iterable[CodeType]) -> bool:
    """Whether code writes into what lies in attributes, as ``self.state["far"] = True`` does; True
    where it cannot be read.
    """
    for code in codes:
        functions = functions_of(code)
        if not functions and code.co_name not in COMPREHENSIONS:
            return True
        if any(True for function in functions for _ in _places_written(function)):
            return True
    return False


def attributes_written_into(codes: Iterable[CodeType]) -> set[str]:
    """The names of the attributes into which some code writes, ``state`` of ``self.state["far"]``;
    those of code that can be read.
    """
    functions = (function for code in codes for function in functions_of(code))
    found = {
        _attribute_of(place, names)
        for function in functions
        for place, names in _places_written(function)
    }
    return found - {""}


def _places_written(function: Function) -> Iterator[tuple[ast.AST, Mapping[str, ast.expr]]]:
    """What a function writes into, and the names that it gives to what it looks up."""
    nodes = list(ast.walk(function))
    names = {
        target.id: node.value
        for node in nodes
        if isinstance(node, ast.Assign) and isinstance(node.value, LOOKING_UP)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in nodes:
        if _writes(node, names):
            place: Any = node.func if isinstance(node, ast.Call) else node
            yield place.value, names


def _attribute_of(node: ast.AST, names: Mapping[str, ast.expr]) -> str:
    """The last name of an attribute in what is looked up: ``b`` of ``a.b[0]``."""
    if isinstance(node, ast.Name) and node.id in names:
        node = names[node.id]
    while isinstance(node, ast.Subscript):
        node = node.value
    return node.attr if isinstance(node, ast.Attribute) else ""


def sets_elsewhere(module: nn.Module) -> set[str]:
    """The names of attributes that a module's code sets on something else than itself."""
    found: set[str] = set()
    for code in methods_of(module):
        for function in functions_of(code):
            given = [*function.args.posonlyargs, *function.args.args]
            own = given[0].arg if given else ""
            for node in ast.walk(function):
                if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
                    found |= {node.attr} if getattr(node.value, "id", "") != own else set()
                elif isinstance(node, ast.Call) and last_name(node.func).endswith("setattr"):
                    strings = [part.value for part in node.args if isinstance(part, ast.Constant)]
                    found |= {part for part in strings if isinstance(part, str)}
    return found


def _writes(node: ast.AST, names: Collection[str]) -> bool:
    """Whether a node writes into an attribute of an attribute, into an entry of one, or into what
    has one of some names.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in WRITING and _is_looked_up(node.func.value, names)
    stored = isinstance(getattr(node, "ctx", None), (ast.Store, ast.Del))
    return stored and isinstance(node, LOOKING_UP) and _is_looked_up(node.value, names)


def _is_looked_up(node: ast.AST, names: Collection[str]) -> bool:
    return isinstance(node, LOOKING_UP) or (isinstance(node, ast.Name) and node.id in names)


def methods_of(module: nn.Module) -> set[CodeType]:
    """The code of all functions that a module has as its own, but for those of torch: methods,
    properties, functions in attributes, and what decorators have put something around.
    """
    held = [*map(vars, own_kinds(module)), vars(module)]
    values = (value for each in held for name, value in each.items() if name != "__init__")
    return {function.__code__ for value in values for function in _functions_behind(value)}


def _has_other_members(module: nn.Module) -> bool:
    """Whether a class has members whose code is not known: descriptors of one's own, and objects
    that can be called.
    """
    return any(
        (callable(value) or hasattr(type(value), "__get__"))
        and type(value) not in KNOWN_MEMBERS
        and not isinstance(value, type)
        and type(value).__module__ not in ("types", "typing")  # ``list[int]``
        for kind in own_kinds(module)
        for value in vars(kind).values()
    )


def own_kinds(module: nn.Module) -> list[type]:
    """The classes of a module that are not torch's."""
    return [k for k in type(module).__mro__ if not k.__module__.startswith(("torch.", "builtins"))]


def _functions_behind(value: Any) -> list[FunctionType]:
    """The functions that make a property, a method of a class or a decorated function."""
    found: list[FunctionType] = []
    waiting = [value]
    while waiting:
        part = waiting.pop()
        kind = type(part)
        if kind is FunctionType and part not in found:
            found.append(part)
            inside = [cell for cell in parts_of(part) if type(cell) is FunctionType]
            waiting += [*inside, getattr(part, "__wrapped__", None)]
        elif kind is property:
            waiting += [part.fget, part.fset, part.fdel]
        elif kind in (functools.partial, functools.partialmethod, functools.cached_property):
            waiting.append(part.func)
        elif kind is functools.singledispatchmethod:
            waiting += [part.func, *part.dispatcher.registry.values()]
        elif kind in (classmethod, staticmethod, MethodType, functools._lru_cache_wrapper):
            waiting.append(getattr(part, "__func__", None) or getattr(part, "__wrapped__", None))
    return found


def _greatest(kinds: Elements) -> int:
    return kinds if isinstance(kinds, int) else max(map(_greatest, kinds), default=NEITHER)


def _is_name(target: ast.expr) -> bool:
    """Whether a target of an assignment has names alone."""
    if isinstance(target, (ast.Tuple, ast.List)):
        return all(map(_is_name, target.elts))
    return isinstance(target, ast.Name)


def _with_outer(node: ast.AST, outer: ast.AST) -> Iterator[tuple[ast.AST, ast.AST]]:
    """A node and all inside it, each with the one around it."""
    waiting = [(node, outer)]
    while waiting:
        pair = waiting.pop()
        yield pair
        # of ``f(b=self.block)`` the call, not the keyword
        around = pair[1] if isinstance(pair[0], ast.keyword) else pair[0]
        waiting += [(inner, around) for inner in ast.iter_child_nodes(pair[0])]
