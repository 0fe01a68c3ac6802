"""The Python code of files, as text and as a syntax tree."""

from __future__ import annotations

import ast
import functools
import linecache
import re
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any, TypeAlias

# Names that need not stand in the source: of arguments of comprehensions, and what a class has.
UNWRITTEN = re.compile(r"\.|__\w+__$")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def source_of(code: CodeType, namespace: dict[str, Any] | None = None) -> str:
    """The file that some code is from, as text; empty if it cannot be read, or if it says something
    else by now: it may have been edited since it was imported.
    """
    source = "".join(linecache.getlines(code.co_filename, namespace))
    return source if _fits(code, source) else ""


def line_of(frame: FrameType) -> str:
    """The line that a frame is at; empty if it cannot be read."""
    lines = source_of(frame.f_code, frame.f_globals).splitlines()
    return lines[frame.f_lineno - 1] if frame.f_lineno <= len(lines) else ""


@functools.lru_cache(maxsize=4096)
def _fits(code: CodeType, source: str) -> bool:
    """Whether all names that some code reads are found on its lines.

    Names of tools that write into code while it is imported, as pytest does, have signs that no
    name has: then there is nothing to compare.
    """
    names = [*code.co_names, *code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]]
    if any(name.startswith("@") for name in names):
        return True
    last = max((line for *_, line in code.co_lines() if line), default=code.co_firstlineno)
    lines = source.splitlines()[code.co_firstlineno - 1 : last]
    if len(lines) <= last - code.co_firstlineno:
        return False
    text = "\n".join(lines)
    return all(_as_written(name) in text for name in names if not UNWRITTEN.match(name))


def _as_written(name: str) -> str:
    """A name as it stands in the source: of a private one, the compiled code has the class too.

    >>> _as_written("_Net__scale")
    '__scale'
    """
    return name[name.index("__") :] if re.match(r"_[^_]\w*?__", name) else name


@functools.lru_cache(maxsize=64)
def parse(source: str) -> ast.Module:
    """A file's code; none where it is no Python."""
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return ast.Module(body=[], type_ignores=[])


@functools.lru_cache(maxsize=4096)
def functions_of(code: CodeType) -> tuple[Function, ...]:
    """The functions of a file that some code may be: more than one where lambdas share a line, none
    where the file cannot be read.
    """
    return tuple(
        function
        for function in _functions(parse(source_of(code)))
        if _first_line(function) == code.co_firstlineno and _name(function) == code.co_name
    )


def _functions(tree: ast.Module) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def _first_line(function: Function) -> int:
    decorators = [] if isinstance(function, ast.Lambda) else function.decorator_list
    return min([function.lineno, *(decorator.lineno for decorator in decorators)])


def _name(function: Function) -> str:
    return "<lambda>" if isinstance(function, ast.Lambda) else function.name


def last_name(node: ast.expr) -> str:
    """``_assert`` of ``torch._assert``."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
