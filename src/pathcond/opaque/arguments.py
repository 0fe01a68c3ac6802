"""Whether a module does the same whatever code that cannot be followed calls it with.

``forward(self, x)`` can only be called with one tensor, as on the example. With an argument that
may be left out, or that is a number, the module may do something else on other inputs, for that
code computes and chooses by the data.
"""

from __future__ import annotations

import dis
import inspect
from types import CodeType
from typing import Any

from torch import Tensor, nn

from .uses import methods_of

# Their optional arguments are masks and sizes, which change no scale.
SAFE_OPTIONS = (
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.MultiheadAttention),
    *(nn.TransformerEncoder, nn.TransformerEncoderLayer),
    *(nn.TransformerDecoder, nn.TransformerDecoderLayer),
)
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
        # Of several, one may be None on other inputs.
        and (len(given) < 2 or not any(map(_asks_for_none, module.modules())))
    )


def _asks_for_none(module: nn.Module) -> bool:
    return any(map(_compares_with_none, methods_of(module)))


def _compares_with_none(code: CodeType) -> bool:
    """Whether some code has ``is None``, or another test of whether two things are the same."""
    names = (step.opname for step in dis.get_instructions(code))
    inner = (constant for constant in code.co_consts if isinstance(constant, CodeType))
    return any(name == "IS_OP" or name.endswith("NONE") for name in names) or any(
        map(_compares_with_none, inner)
    )
