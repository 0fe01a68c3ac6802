"""Where a tensor's value becomes a Python value while a model is traced: what may be decided by it.

A branch that goes by a value which depends on the data or on the weights has other outcomes for
other inputs, and after a rescaling: it is refused, unless it depends on inputs of whole numbers
alone and a watch follows both of its outcomes. What depends on neither is decided. A check that
only raises has one outcome that matters; what it reads must be kept, as an output is.
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
import sysconfig
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import nn

from .. import trees
from ..errors import UnsupportedModelError
from .nodes import TORCH_FOLDER
from .source import last_name, parse, source_of

# Files between the user's call and the mode that sees it.
PLUMBING = frozenset(
    TORCH_FOLDER + name.replace("/", os.sep)
    for name in (
        "_ops.py",
        "overrides.py",
        "_library/utils.py",
        "utils/_python_dispatch.py",
        "_tensor.py",
        "_dynamo/eval_frame.py",
        "_compile.py",
    )
)
_HERE = os.path.dirname(os.path.abspath(__file__))
OWN = (_HERE + os.sep, os.path.join(os.path.dirname(_HERE), "opaque", ""), trees.__file__)
SPEAKING = frozenset(("warn", "warning", "warning_once", "info", "debug", "error", "exception"))
TO_WHOM = ("log", "warn")  # as in ``self.logger`` and ``warnings``
ASSERTING = ("_assert", "_check", "assert", "check")
LEAVING = (ast.Return, ast.Break, ast.Continue)
# Context managers that pass exceptions on, beside all of torch's own.
TRANSPARENT = frozenset(("no_grad", "enable_grad", "inference_mode", "autocast", "nullcontext"))
STANDARD_LIBRARY = sysconfig.get_paths()["stdlib"] + os.sep
SITE_PACKAGES = os.path.join(STANDARD_LIBRARY, "site-packages")


class DecisionError(UnsupportedModelError):
    """The model decides by a value that depends on its inputs or weights."""


@dataclass
class Origins:
    """What a tensor's value depends on. Tensors that share memory share this object too.

    Attributes:
        floats: Parameters and floating-point inputs.
        integers: Inputs of integers and truth values.
        buffers: Buffers, and tensors that are attributes of modules.
        draws: Whether random numbers are among them.
        memory: The buffer or constant whose own memory this is; it does not pass to results.
    """

    floats: set[str] = field(default_factory=set)
    integers: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    draws: bool = False
    memory: str | None = None

    def add(self, other: Origins) -> None:
        self.floats |= other.floats
        self.integers |= other.integers
        self.buffers |= other.buffers
        self.draws |= other.draws

    @property
    def has_inputs(self) -> bool:
        """Whether an input is among them."""
        return bool(self.integers) or any(name.startswith("input ") for name in self.floats)

    @property
    def only_integers(self) -> bool:
        """Whether inputs of integers and truth values decide alone."""
        return bool(self.integers) and not (self.floats or self.buffers or self.draws)

    @classmethod
    def union(cls, parts: Iterable[Origins]) -> Origins:
        total = cls()
        for part in parts:
            total.add(part)
        return total

    def __str__(self) -> str:
        names = sorted(self.floats) or sorted(self.integers)
        shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
        return shown if names else "random numbers"


class SizeNode:
    """A whole number that was read from integer inputs: good for sizes of tensors and nothing else.

    ``edge_index.max().item() + 1`` is the number of nodes of the example's graph. As the node of a
    torch.SymInt it passes for a number wherever torch takes one. Whoever branches on it, counts a
    loop by it or picks an entry with it is told that this cannot be followed.
    """

    constant = None

    def __init__(self, value: int, refused: Callable[[], NoReturn]) -> None:
        self.value = value
        self.refused = refused

    def is_int(self) -> bool:
        return True

    def is_float(self) -> bool:
        return False

    is_bool = is_nested_int = is_constant = is_float

    def is_symbolic(self) -> bool:
        return True

    has_hint = is_symbolic

    def maybe_as_int(self) -> None:
        return None

    def wrap_int(self, number: int) -> SizeNode:
        return SizeNode(number, self.refused)

    def add(self, other: SizeNode) -> SizeNode:
        return self.wrap_int(self.value + other.value)

    def sub(self, other: SizeNode) -> SizeNode:
        return self.wrap_int(self.value - other.value)

    def mul(self, other: SizeNode) -> SizeNode:
        return self.wrap_int(self.value * other.value)

    def _graph_repr(self) -> str:
        return str(self.value)

    __str__ = _graph_repr

    def __getattr__(self, name: str) -> Any:
        # Comparisons, conversions and all other arithmetic.
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *arguments: self.refused()


def size_from_values(value: int, refused: Callable[[], NoReturn]) -> torch.SymInt:
    """A number that may only become a size.

    Args:
        value: The number on the example batch.
        refused: Raises, for whoever wants more.
    """
    return torch.SymInt(SizeNode(value, refused))


def is_size(value: Any) -> bool:
    """Whether a number was read from integer inputs."""
    return isinstance(value, torch.SymInt) and isinstance(value.node, SizeNode)


def plain(value: Any) -> Any:
    """The number behind a size; anything else as it is."""
    if isinstance(value, slice):
        return slice(plain(value.start), plain(value.stop), plain(value.step))
    return value.node.value if is_size(value) else value


# -- places in the user's code ---------------------------------------------------------------------


CALLER = (os.path.join(_HERE, "tracing.py"), "trace_graph")  # the function that calls the model


def frames() -> Iterable[FrameType]:
    """The frames that led here, innermost first, without torch's dispatcher and this tracer; up to
    the call of the model.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if (name, frame.f_code.co_name) == CALLER:
            return
        if name not in PLUMBING and not name.startswith(OWN):
            yield frame
        frame = frame.f_back


def describe(frame: FrameType) -> str:
    """``file.py:123`` and the code on it."""
    name = frame.f_code.co_filename
    code = linecache.getline(name, frame.f_lineno, frame.f_globals).strip()
    return f"{os.path.basename(name)}:{frame.f_lineno} `{code}`"


def user_line() -> str:
    """The innermost line outside torch."""
    for frame in frames():
        if not is_library(frame.f_code.co_filename):
            return describe(frame)
    return ""


def is_library(name: str) -> bool:
    """Whether a file belongs to torch or to Python itself."""
    standard = name.startswith(STANDARD_LIBRARY) and not name.startswith(SITE_PACKAGES)
    return standard or name.startswith(TORCH_FOLDER)


def is_own(frame: FrameType) -> bool:
    """Whether a frame is of the capture itself, which sees sizes and tensors as well."""
    return frame.f_code.co_filename.startswith(OWN)


def calling_module(names: dict[int, str]) -> str:
    """Qualified name of the innermost module that is being called."""
    for frame in frames():
        if frame.f_code is nn.Module._call_impl.__code__:
            name = names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
    return ""


def only_raises() -> bool:
    """Whether the value is asked for by a check: ``assert ...``, or an ``if`` that only raises or
    warns.
    """
    frame = next(iter(frames()), None)
    return frame is not None and is_check(frame)


def is_check(frame: FrameType) -> bool:
    """Whether a frame is at a test whose only consequence is an exception, a warning or a
    message.
    """
    if frame.f_lineno not in _checked_lines(_source_of(frame)):
        return False
    outer: FrameType | None = frame
    while outer is not None and not is_own(outer):
        if not is_library(outer.f_code.co_filename):
            source = _source_of(outer)
            if not source or outer.f_lineno in _caught_lines(source):
                return False
        outer = outer.f_back
    return True


def _source_of(frame: FrameType) -> str:
    return source_of(frame.f_code, frame.f_globals)


@functools.lru_cache(maxsize=64)
def _caught_lines(source: str) -> frozenset[int]:
    """The lines of a file on which an exception may be caught, after which the model goes on."""
    return frozenset(
        line
        for node in ast.walk(parse(source))
        for statement in _caught_statements(node)
        for line in _lines(statement)
    )


def _caught_statements(node: ast.AST) -> list[ast.stmt]:
    """The statements inside a block whose exceptions it may keep to itself."""
    if isinstance(node, (ast.With, ast.AsyncWith)):
        return [] if all(map(_passes_exceptions_on, node.items)) else node.body
    if not isinstance(node, (ast.Try, ast.TryStar)):
        return []
    if any(map(_may_leave, node.finalbody)):
        return [*node.body, *node.orelse, *(part for h in node.handlers for part in h.body)]
    raised = (
        isinstance(handler.body[-1], ast.Raise) and not any(map(_may_leave, handler.body))
        for handler in node.handlers
    )
    return [] if all(raised) else node.body


def _may_leave(statement: ast.stmt) -> bool:
    """Whether a statement may leave its block by something else than an exception."""
    return any(isinstance(part, LEAVING) for part in ast.walk(statement))


def _passes_exceptions_on(item: ast.withitem) -> bool:
    """Whether a context manager is known to keep no exception to itself."""
    called = item.context_expr
    called = called.func if isinstance(called, ast.Call) else called
    return _root_of(called) == "torch" or last_name(called) in TRANSPARENT


@functools.lru_cache(maxsize=64)
def _checked_lines(source: str) -> frozenset[int]:
    """The lines of all tests in a file whose only consequence is an exception."""
    tree = parse(source)
    nodes = list(ast.walk(tree))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    found: set[int] = set()
    others: set[int] = set()
    for node in nodes:
        if isinstance(node, ast.Assert) or (
            isinstance(node, ast.If)
            and _raises(node.body)
            and (isinstance(node.body[-1], ast.Raise) or _raises(node.orelse))
            and not _lets_out(node, functions, tree)
        ):
            # A walrus takes the value out of the test.
            kept = any(isinstance(part, ast.NamedExpr) for part in ast.walk(node.test))
            (others if kept else found).update(_lines(node.test))
        elif (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Call)
            and last_name(node.value.func).startswith(ASSERTING)
            and _remembers_nothing(node.value)
        ):
            found.update(_lines(node.value))
        elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
            others.update(_lines(node.test))
    return frozenset(found - others)


def _root_of(node: ast.expr) -> str:
    """``torch`` of ``torch._assert``."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else ""


def _remembers_nothing(call: ast.Call) -> bool:
    """Whether a check has no object in which to keep what it finds, as ``self.check(...)`` and
    ``check(self, ...)`` have.
    """
    if isinstance(call.func, ast.Attribute):
        return _root_of(call.func) == "torch"
    return not any(isinstance(part, ast.Name) and part.id == "self" for part in call.args)


def _raises(body: list[ast.stmt]) -> bool:
    return all(map(_only_talks, body))


def _lets_out(test: ast.If, functions: Iterable[ast.FunctionDef], tree: ast.Module) -> bool:
    """Whether a name that is assigned under a test is used elsewhere in its function, the innermost
    of a file's.
    """
    inside = set(map(id, ast.walk(test)))
    around = [function for function in functions if test.lineno in _lines(function)]
    scope: ast.AST = max(around, key=lambda function: function.lineno, default=tree)  # type: ignore[arg-type, type-var]
    parts = list(ast.walk(scope))
    names = [name for name in parts if isinstance(name, ast.Name)]
    assigned = {name.id for name in names if id(name) in inside and isinstance(name.ctx, ast.Store)}
    shared = [part for part in parts if isinstance(part, (ast.Global, ast.Nonlocal))]
    return any(name.id in assigned for name in names if id(name) not in inside) or any(
        assigned.intersection(part.names) for part in shared
    )


def _only_talks(statement: ast.stmt) -> bool:
    """Whether a statement raises, warns, logs, or puts together a text for that."""
    if isinstance(statement, ast.Raise):
        return True
    if isinstance(statement, ast.If):
        return all(map(_only_talks, [*statement.body, *statement.orelse]))
    if isinstance(statement, ast.AugAssign):  # of a tensor it would write in place
        return isinstance(statement.value, ast.JoinedStr) or (
            isinstance(statement.value, ast.Constant) and isinstance(statement.value.value, str)
        )
    if isinstance(statement, ast.Assign):
        calls = [part.func for part in ast.walk(statement.value) if isinstance(part, ast.Call)]
        harmless = all(isinstance(called, ast.Name) and called.id == "getattr" for called in calls)
        return harmless and all(isinstance(target, ast.Name) for target in statement.targets)
    if not (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)):
        return False
    called = statement.value.func
    if not (isinstance(called, ast.Attribute) and called.attr in SPEAKING):
        return False
    listener = last_name(called.value).lower()
    return any(part in listener for part in TO_WHOM)


def _lines(node: ast.expr | ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def refuse(origins: Origins, what: str = "its value decides what is computed") -> NoReturn:
    """Name the line that decides by a value, what that value depends on, and what to do."""
    place = user_line()
    raise DecisionError(
        f"The model decides by the value of a tensor at {place}: that tensor depends on "
        f"{origins}, and "
        f"{what}, so for other inputs or other weights the model may take another way than on the "
        "example batch. Write it without a Python decision (torch.where, multiplication by a "
        "mask), "
        "or move it out of the model that is passed here.",
        place=place,
    )
