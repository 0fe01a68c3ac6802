"""Whether code that cannot be followed gives a module the same kind of arguments on every input.

``expert(x[chosen])`` does; ``block(x, int(x.mean()))`` and ``block(x, mask if far else None)`` do
not: the number, or whether there is a mask, goes by the data, and the module may do something else
for others. What a call is given is read from the source: each name is traced back to where it was
assigned, and an ``if`` in between may ask for what the user passed or the model was built with, and
for nothing else.
"""

from __future__ import annotations

import ast
import functools
import itertools
import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import Tensor, nn

# Functions and methods that make Python values of tensors.
CONVERTING = frozenset(
    "int float bool complex round len max min any all sum item tolist numpy".split()
)
TO_PYTHON = frozenset(("item", "tolist", "numpy"))
# What may be asked of a tensor without asking for its values.
OF_TYPE = frozenset("dtype device shape ndim size dim is_cuda requires_grad layout".split())
ASKING = frozenset("isinstance hasattr getattr callable issubclass".split())
TARGETS = (ast.Name, ast.Tuple, ast.List, ast.Starred)
CHOOSING = (ast.Name, ast.IfExp, ast.BoolOp, ast.NamedExpr)
# Expressions that make a tensor, where a name holds one.
COMPUTING = (ast.Call, ast.BinOp, ast.UnaryOp, ast.Subscript, ast.Attribute, ast.Name)
COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
BRANCHING = (ast.If, ast.While, ast.Try, ast.TryStar, ast.Match)
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def has_settled_arguments(
    frames: Iterable[FrameType], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether a module is called with arguments whose kinds do not depend on the data.

    Args:
        frames: Of the code that calls it, and of what calls that, up to the module that cannot be
            followed.
        args, kwargs: What it is called with.
    """
    given = (args, kwargs)
    for frame in frames:
        if not _is_settled_in(frame, *given):
            return False
        given = ((), {})  # what the outer ones call is not the module
    return True


def _is_settled_in(frame: FrameType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    code = frame.f_code
    position = _position(code, frame.f_lasti)
    source = "".join(linecache.getlines(code.co_filename, frame.f_globals))
    path = _find_call(source, position) if position is not None else None
    return path is not None and _Scope(frame, path).is_settled(args, kwargs)


@functools.lru_cache(maxsize=1024)
def _position(code: CodeType, at: int) -> tuple[int, int, int, int] | None:
    """Where in its file an instruction comes from: first and last line, first and last column."""
    line, end_line, column, end_column = list(code.co_positions())[at // 2]
    if line is None or end_line is None or column is None or end_column is None:
        return None
    return line, end_line, column, end_column


@functools.lru_cache(maxsize=1024)
def _find_call(source: str, position: tuple[int, int, int, int]) -> tuple[ast.AST, ...] | None:
    """The call or comprehension at a position of a file, as the last of all that it lies in, from
    its function on.
    """
    for path in _paths(_parse(source), around=position):
        node = path[-1]
        if isinstance(node, (ast.Call, *COMPREHENSIONS)) and position == _span(node):
            functions = [i for i, part in enumerate(path) if isinstance(part, FUNCTIONS)]
            return tuple(path[max(functions, default=0) :])
    return None


@functools.lru_cache(maxsize=64)
def _parse(source: str) -> ast.Module:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


def _span(node: ast.expr) -> tuple[int, int, int, int]:
    end_line = node.end_lineno if node.end_lineno is not None else node.lineno
    end_column = node.end_col_offset if node.end_col_offset is not None else node.col_offset
    return node.lineno, end_line, node.col_offset, end_column


def _paths(
    root: ast.AST, *, around: tuple[int, int, int, int] | None = None
) -> Iterator[list[ast.AST]]:
    """Every node, or those on the lines around a position, as the last of all that it lies in."""
    waiting: list[list[ast.AST]] = [[root]]
    while waiting:
        path = waiting.pop()
        yield path
        waiting += [
            [*path, child]
            for child in ast.iter_child_nodes(path[-1])
            if around is None or _is_around(child, around)
        ]


def _is_around(node: ast.AST, position: tuple[int, int, int, int]) -> bool:
    """Whether a node has all lines of a position; parts of a syntax tree without lines may."""
    first, last = getattr(node, "lineno", None), getattr(node, "end_lineno", None)
    return first is None or last is None or first <= position[0] <= position[1] <= last


@dataclass(frozen=True)
class _Stored:
    """One place where a name is given a value.

    Attributes:
        branches: The branches that it lies in, as (test or block, which part of it).
        value: What it is given; None where that is not to be seen.
    """

    branches: frozenset[tuple[ast.AST, str]]
    value: ast.expr | None


class _Scope:
    """One function at the moment of a call."""

    def __init__(self, frame: FrameType, path: tuple[ast.AST, ...]) -> None:
        self.frame = frame
        self.call = path[-1]
        self.here = _branches(path)
        self.stored: dict[str, list[_Stored]] = {}
        self.attributes: set[str] = set()
        self.asked: set[str] = set()
        self.optional = _names_with_defaults(path[0])
        for inner in _paths(path[0]):
            self._store(inner)

    def _store(self, path: list[ast.AST]) -> None:
        node = path[-1]
        written = isinstance(getattr(node, "ctx", None), ast.Store)
        if isinstance(node, ast.Attribute) and written:
            self.attributes.add(node.attr)
        if isinstance(node, ast.Name) and written:
            statement = next(p for p in reversed(path[:-1]) if not isinstance(p, TARGETS))
            value = getattr(statement, "value", None) or getattr(statement, "iter", None)
            stored = _Stored(_branches(path), value)
            self.stored.setdefault(node.id, []).append(stored)

    def is_settled(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether no argument varies in kind.

        Args:
            args, kwargs: What is called here is given, as far as that is known.
        """
        if not isinstance(self.call, ast.Call):  # a comprehension, in which the call is
            return not any(map(self._varies, [g.iter for g in self.call.generators]))  # type: ignore[attr-defined]
        starred = any(isinstance(node, ast.Starred) for node in self.call.args)
        known: dict[ast.expr, Any] = {}
        if not starred:
            known |= zip(self.call.args, args, strict=False)
        known |= {k.value: kwargs.get(k.arg) for k in self.call.keywords if k.arg is not None}
        given = [*self.call.args, *(keyword.value for keyword in self.call.keywords)]
        return not any(
            self._varies(node)
            for node in given
            # whatever made a tensor makes one on other inputs, too
            if not holds_tensors(known.get(node)) or isinstance(node, CHOOSING)
        )

    def _varies(self, node: ast.AST) -> bool:
        """Whether the kind of an expression's value may depend on the data."""
        if self._is_module(node):
            return False
        name = self._tensor_in(node)
        if name is not None:
            return self._name_varies(name)
        if isinstance(node, ast.Name):
            return self._name_varies(node.id)
        if isinstance(node, ast.IfExp):
            branches = (node.body, node.orelse)
            return not self._may_decide(node.test) or any(map(self._varies, branches))
        if isinstance(node, (ast.BoolOp, ast.NamedExpr, ast.Await, ast.Yield, ast.YieldFrom)):
            return not self._may_decide(node)
        if isinstance(node, ast.Call) and _called(node) in CONVERTING:
            return True
        if isinstance(node, ast.Attribute) and node.attr in self.attributes:
            return True
        return any(map(self._varies, ast.iter_child_nodes(node)))

    def _is_module(self, node: ast.AST) -> bool:
        """Whether an expression picks a module: ``self.experts[number]``. Which one is called goes
        by the data, and each is looked at by itself.
        """
        if isinstance(node, ast.Name):
            return isinstance(self.frame.f_locals.get(node.id), nn.Module)
        if isinstance(node, ast.Attribute):
            return self._is_module(node.value) and node.attr in self._modules
        return isinstance(node, ast.Subscript) and self._is_module(node.value)

    @functools.cached_property
    def _modules(self) -> set[str]:
        """Names under which the modules in sight have parts."""
        values = self.frame.f_locals.values()
        inside = [part for v in values if isinstance(v, nn.Module) for part in v.modules()]
        return {name for part in inside for name in part._modules}

    def _tensor_in(self, node: ast.AST) -> str | None:
        """The name of a tensor that an expression makes another tensor of: ``x`` of ``x[rows]`` and
        of ``x.flatten(1)``.
        """
        if isinstance(node, ast.Name):
            return node.id if holds_tensors(self.frame.f_locals.get(node.id)) else None
        if isinstance(node, (ast.Subscript, ast.Starred)):
            return self._tensor_in(node.value)
        if isinstance(node, ast.BinOp):
            return self._tensor_in(node.left) or self._tensor_in(node.right)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            plain = node.func.attr in OF_TYPE or node.func.attr in TO_PYTHON
            return None if plain else self._tensor_in(node.func.value)
        return None

    def _name_varies(self, name: str) -> bool:
        if name in self.asked:  # it is assigned from itself
            return False
        self.asked.add(name)
        stored = self.stored.get(name, [])
        chosen = any(
            not self._may_decide(branch.test if isinstance(branch, ast.If) else None)
            for each in stored
            for branch, _ in each.branches - self.here
        )
        values = [each.value for each in stored]
        if not holds_tensors(self.frame.f_locals.get(name)):
            return chosen or any(value is None or self._varies(value) for value in values)
        if any(isinstance(v, (ast.IfExp, ast.BoolOp)) and self._varies(v) for v in values):
            return True
        return chosen and (
            name in self.optional or not all(isinstance(value, COMPUTING) for value in values)
        )

    def _may_decide(self, test: ast.AST | None) -> bool:
        """Whether a test asks only for what the user passed and what the model was built with."""
        if test is None:
            return False
        if isinstance(test, ast.Compare) and all(
            isinstance(op, (ast.Is, ast.IsNot)) for op in test.ops
        ):
            return True
        if isinstance(test, ast.Call) and _called(test) in ASKING:
            return True
        if isinstance(test, (ast.Attribute, ast.Call)) and _called(test) in OF_TYPE:
            return True
        if isinstance(test, ast.Name):
            value = self.frame.f_locals.get(test.id)
            return not isinstance(value, Tensor) and not self._name_varies(test.id)
        if isinstance(test, (ast.Call, ast.NamedExpr)):
            return False
        if isinstance(test, ast.Attribute) and test.attr in self.attributes:
            return False
        return all(map(self._may_decide, ast.iter_child_nodes(test)))


def _names_with_defaults(function: ast.AST) -> set[str]:
    """Parameters of a function that need not be given."""
    if not isinstance(function, FUNCTIONS):
        return set()
    arguments = function.args
    places = [*arguments.posonlyargs, *arguments.args]
    last = places[len(places) - len(arguments.defaults) :]
    return {argument.arg for argument in [*last, *arguments.kwonlyargs]}


def _called(node: ast.AST) -> str:
    """The last name of what is called, or of an attribute."""
    function = node.func if isinstance(node, ast.Call) else node
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _branches(path: Iterable[ast.AST]) -> frozenset[tuple[ast.AST, str]]:
    """The branches that a node lies in, by the way that leads to it."""
    found = set()
    for outer, inner in itertools.pairwise(path):
        if isinstance(outer, BRANCHING):
            part = next(
                name
                for name, value in ast.iter_fields(outer)
                if value is inner or (isinstance(value, list) and any(v is inner for v in value))
            )
            found.add((outer, part))
    return frozenset(found)


def holds_tensors(value: Any) -> bool:
    """Whether a value is a tensor, or several."""
    if isinstance(value, (tuple, list)):
        return bool(value) and all(map(holds_tensors, value))
    return isinstance(value, Tensor)
