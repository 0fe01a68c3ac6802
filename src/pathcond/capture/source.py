"""The Python code of files, as text and as a syntax tree."""

from __future__ import annotations

import ast
import functools
import linecache
from collections.abc import Iterator
from types import CodeType
from typing import Any, TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


def source_of(code: CodeType, namespace: dict[str, Any] | None = None) -> str:
    """The file that some code is from, as text; empty if it cannot be read."""
    return "".join(linecache.getlines(code.co_filename, namespace))


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
