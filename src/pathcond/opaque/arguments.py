"""What code that cannot be followed may tell others but by the values of tensors.

Whether a module does the same whatever such code calls it with: ``forward(self, x)`` can only be
called with one tensor, as on the example. With an argument that may be left out, or that is a
number, the module may do something else on other inputs, for that code computes and chooses by the
data. And whether such code itself returns, or leaves in its arguments, what its caller may decide
by.
"""

from __future__ import annotations

import ast
import dis
import inspect
import math
from collections.abc import Iterator
from enum import Enum
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..capture.contents import PLAIN
from ..capture.source import Function, functions_of
from .uses import methods_of

# Their optional arguments are masks and sizes, which change no scale.
SAFE_OPTIONS = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MultiheadAttention),
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer),
)
# What a tensor is like, but for its values.
KINDS = frozenset("dtype dim ndim ndimension is_floating_point is_complex shape size".split())
COLLECTING = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def takes_tensors_alone(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``forward`` needs all of its arguments, each of them a tensor.

    Args:
        module: The module.
        args, kwargs: What it is called with on the example.
    """
    if type(module) in SAFE_OPTIONS:
        return True
    try:
        parameters = inspect.signature(module.forward).parameters.values()
    except (TypeError, ValueError):
        return False
    optional = any(p.kind in COLLECTING or p.default is not p.empty for p in parameters)
    given = [*args, *kwargs.values()]
    return (
        not optional
        and all(isinstance(value, Tensor) for value in given)
        and not any(map(_asks_for_kinds, module.modules()))
        # Of several, one may be None on other inputs.
        and (len(given) < 2 or not any(map(_asks_for_none, module.modules())))
    )


def tells_more(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> bool:
    """Whether a module returns more than tensors whose sizes do not depend on values, or may write
    into what it is given: on other inputs that may be something else.

    Args:
        module: It cannot be followed.
        args, kwargs, output: Of one call.
    """
    returned = tree_leaves(output)
    if not all(isinstance(leaf, Tensor) for leaf in returned):
        return True
    if isinstance(output, (list, dict)) or _returns_in_several_forms(module):
        return True
    if any(map(_can_be_written, (*args, *kwargs.values()))):
        return True
    sizes = {1}
    for leaf in (*tree_leaves((args, kwargs)), *module.parameters(), *module.buffers()):
        if isinstance(leaf, Tensor):
            shape = leaf.shape
            sizes.update(
                math.prod(shape[i:j])
                for i in range(len(shape))
                for j in range(i + 1, len(shape) + 1)
            )
    for part in module.modules():
        sizes.update(value for value in vars(part).values() if type(value) is int)
    return any(size not in sizes for leaf in returned for size in leaf.shape)


def _returns_in_several_forms(module: nn.Module) -> bool:
    """Whether ``forward`` may return nothing in one place and something in another, or tuples of
    several lengths; True where it cannot be read.
    """
    code = getattr(module.forward, "__code__", None)
    functions = functions_of(code) if code is not None else ()
    forms = [_forms_of(value) for function in functions for value in _returns_of(function)]
    return not functions or len(set().union(*forms)) > 1


def _returns_of(function: ast.AST) -> Iterator[ast.expr | None]:
    """What a function returns, without the functions inside of it."""
    if isinstance(function, ast.Lambda):
        yield function.body
    for node in ast.iter_child_nodes(function):
        if isinstance(node, ast.Return):
            yield node.value
        elif not isinstance(node, Function):
            yield from _returns_of(node)


def _forms_of(returned: ast.expr | None) -> set[str]:
    if isinstance(returned, ast.IfExp):
        return _forms_of(returned.body) | _forms_of(returned.orelse)
    if returned is None or (isinstance(returned, ast.Constant) and returned.value is None):
        return {"nothing"}
    return {f"{len(returned.elts)} parts" if isinstance(returned, ast.Tuple) else "something"}


def _can_be_written(value: Any) -> bool:
    """Whether an argument can be written into, or holds what can."""
    if isinstance(value, tuple):
        return any(map(_can_be_written, value))
    return not isinstance(value, (Tensor, *PLAIN, torch.dtype, torch.device, Enum, slice, range))


def _asks_for_none(module: nn.Module) -> bool:
    return any(map(_compares_with_none, methods_of(module)))


def _asks_for_kinds(module: nn.Module) -> bool:
    """Whether a module may decide by the type or the number of axes of a tensor."""
    return any(map(_compares_kinds, methods_of(module)))


def _compares_kinds(code: CodeType) -> bool:
    """Whether some code both reads what a tensor is like and tests something."""
    tests = any(
        step.opname in ("COMPARE_OP", "CONTAINS_OP", "IS_OP") or "JUMP_IF" in step.opname
        for step in dis.get_instructions(code)
    )
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return (tests and not KINDS.isdisjoint(code.co_names)) or any(map(_compares_kinds, inner))


def _compares_with_none(code: CodeType) -> bool:
    """Whether some code has ``is None``, or another test of whether two things are the same."""
    names = (step.opname for step in dis.get_instructions(code))
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(name == "IS_OP" or name.endswith("NONE") for name in names) or any(
        map(_compares_with_none, inner)
    )
