"""Why a model could not be captured, in words: which line of the user's code, and what to do."""

from __future__ import annotations

import linecache
import os
import traceback

from torch import nn

from ..errors import UnsupportedModelError
from .decisions import DecisionError
from .models import HiddenOutputError
from .nodes import TORCH_FOLDER

OWN_FOLDER = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
BY_VALUES = (
    "GuardOnDataDependentSymNode",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
)


def capture_error(
    model: nn.Module, *, training: bool, exported: Exception, traced: Exception
) -> UnsupportedModelError:
    """One error of what torch.export and the trace on real values met.

    Args:
        model: The model.
        training: Mode that was captured.
        exported: What torch.export raised.
        traced: What the trace on real values raised.
    """
    head = (
        f"{type(model).__name__} could not be captured in {'train' if training else 'eval'} mode: "
    )
    if isinstance(traced, HiddenOutputError):
        return UnsupportedModelError(f"{head}{traced}.")
    if isinstance(traced, DecisionError):
        return UnsupportedModelError(
            f"{head}its control flow depends on the data. {traced}", place=traced.place
        )
    if isinstance(traced, UnsupportedModelError):
        if type(exported).__name__ not in BY_VALUES:
            return UnsupportedModelError(
                f"{head}{traced}.\ntorch.export cannot follow it either: {_summary(exported)}"
            )
        place = user_line(exported)
        return UnsupportedModelError(
            f"{head}its control flow depends on the data: {place} decides by the value of a "
            "tensor. Write it without a Python decision (torch.where, multiplication by a mask). "
            f"Also, {traced}.",
            place=place,
        )
    if isinstance(exported, UnsupportedModelError):
        return UnsupportedModelError(f"{head}{exported}")
    return UnsupportedModelError(f"{head}{_summary(traced)}\n{_hints(traced, training)}")


def user_line(error: BaseException) -> str:
    """``file.py:123`` and the code on it, of the innermost frame of an error outside torch."""
    for frame, number in reversed(list(traceback.walk_tb(error.__traceback__))):
        name = os.path.abspath(frame.f_code.co_filename)
        if not name.startswith((TORCH_FOLDER, OWN_FOLDER)):
            code = linecache.getline(name, number, frame.f_globals).strip()
            return f"{os.path.basename(name)}:{number} `{code}`"
    return ""


def _summary(error: Exception) -> str:
    first = str(error).strip().split("\n")[0][:500]
    place = user_line(error)
    return f"{type(error).__name__}: {first}" + (f" [at {place}]" if place else "")


def _hints(error: Exception, training: bool) -> str:
    samples = " (BatchNorm in train mode needs at least two samples)" if training else ""
    cache = (
        ". Of a Hugging Face decoder set model.config.use_cache = False"
        if "Cache" in str(error)
        else ""
    )
    hint = (
        "If the model itself fails on these inputs, check their shapes, types and "
        f"device{samples}{cache}."
    )
    if isinstance(error, TypeError) and " argument" in str(error):
        hint += (
            " A dict is passed as keyword arguments, a tuple as positional ones: leave labels out, "
            "and write (batch,) if forward takes one tuple."
        )
    return hint
