"""Which module cannot be followed: the one whose code was at work when the capture failed."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..capture.graph import capture
from ..capture.models import Inputs
from ..errors import UnsupportedModelError
from .recording import Recording
from .stubs import stubs

TAG = "_pathcond_number"
ABOUT_DATA = (
    "datadependent",
    "data-dependent",
    "data dependent",
    "depends on the data",
    "dynamic control flow",
)


class _UnknownShapeError(RuntimeError):
    """The shape of a tensor depends on the data."""


class _RaisesAtUnknownShapes(TorchFunctionMode):
    """Stops where a tensor's shape first depends on the data: later failures show up in the wrong
    module.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if (
                isinstance(leaf, Tensor)
                and not all(isinstance(size, int) for size in leaf.shape)
                and not _inside_torch()
            ):
                raise _UnknownShapeError(
                    f"the shape of what {getattr(func, '__name__', func)} "
                    "returns depends on the data"
                )
        return result


def _inside_torch() -> bool:
    """Whether the call at hand was made by torch for its own purposes, while it computes a fake
    tensor.
    """
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(("torch", __name__)):
        if "_subclasses" in frame.f_code.co_filename:
            return True
        frame = frame.f_back
    return False


def culprits(
    model: nn.Module, example_inputs: Inputs, training: bool, recording: Recording | None
) -> list[nn.Module]:
    """The modules whose code was at work when the capture failed, the innermost first."""
    with ExitStack() as stack:
        if recording is not None:
            stack.enter_context(stubs(model, recording))
        modules = stack.enter_context(_tagged(model))
        stack.enter_context(_RaisesAtUnknownShapes())
        try:
            capture(model, example_inputs, training=training)
        except UnsupportedModelError as error:
            chain = _chain(error)
            found = _modules_at_work(chain, modules)
            # A model that fails as a whole, in its own code and for other reasons, is refused with
            # that reason.
            return (
                found
                if any(_is_about_data(e) for e in chain)
                else [m for m in found if m is not model]
            )
    return []


@contextmanager
def _tagged(model: nn.Module) -> Iterator[list[nn.Module]]:
    """Number all modules, for the time of the body: of a model with shared modules torch.export
    runs copies.
    """
    modules = list(model.modules())
    try:
        for number, module in enumerate(modules):
            vars(module)[TAG] = number
        yield modules
    finally:
        for module in modules:
            vars(module).pop(TAG, None)


def _chain(error: BaseException) -> list[BaseException]:
    """An exception and all that led to it."""
    chain: list[BaseException] = []
    current: BaseException | None = error
    while current is not None and current not in chain:
        chain.append(current)
        current = current.__cause__ or current.__context__
    return chain


def _is_about_data(error: BaseException) -> bool:
    """Whether an exception says that control flow or a shape depends on the values of tensors."""
    if isinstance(error, UnsupportedModelError):  # whose advice speaks of it whatever the cause
        return "depends on the data" in str(error).split("\n")[0]
    words = f"{type(error).__name__} {error}".lower()
    return any(word in words for word in ABOUT_DATA)


def _modules_at_work(
    chain: Sequence[BaseException], modules: Sequence[nn.Module]
) -> list[nn.Module]:
    """The modules in whose forward some exceptions were raised, the innermost first."""
    found: list[nn.Module] = []
    # What was raised first has the innermost frames, but may lack those further out.
    for exception in reversed(chain):
        called: list[nn.Module] = []
        trace = exception.__traceback__
        while trace is not None:
            owner = trace.tb_frame.f_locals.get("self")
            number = vars(owner).get(TAG) if isinstance(owner, nn.Module) else None
            if number is not None and trace.tb_frame.f_code.co_name in ("forward", "_call_impl"):
                called.append(modules[number])
            trace = trace.tb_next
        found += reversed(called)
    return list(dict.fromkeys(found))


def has_forward(module: nn.Module) -> bool:
    """Whether a module can be called at all; a ModuleList cannot."""
    return type(module).forward is not nn.Module.forward
