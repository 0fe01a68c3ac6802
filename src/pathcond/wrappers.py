"""The user's own module inside DataParallel, DistributedDataParallel, AveragedModel, torch.compile
and accelerate.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterator
from types import MethodType
from typing import cast

import torch
from torch import nn


def compiler_is_loaded() -> bool:
    """Whether anything can have been compiled: importing torch's compiler takes two seconds, which
    is not worth it to look for what cannot be there.
    """
    return "torch._dynamo" in sys.modules


def is_compiled(model: nn.Module) -> bool:
    """Whether the model is what ``torch.compile`` returns."""
    return compiler_is_loaded() and isinstance(model, torch._dynamo.eval_frame.OptimizedModule)


def walk_wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """A model and, one after the other, what is inside DataParallel, DistributedDataParallel,
    AveragedModel and torch.compile.

    accelerate puts autocast into ``forward`` itself; the last one has its own forward back.
    """
    if not isinstance(model, nn.Module):
        what = (
            f"the class {model.__name__}, not one of its instances"
            if isinstance(model, type)
            else f"of type {type(model).__name__}"
        )
        raise TypeError(f"The model is {what}: pass a torch.nn.Module.")
    wrappers = (
        nn.DataParallel,
        nn.parallel.DistributedDataParallel,
        torch.optim.swa_utils.AveragedModel,
    )
    while True:
        yield model
        if is_compiled(model):
            model = cast(nn.Module, model._orig_mod)
        elif isinstance(model, wrappers):
            model = model.module
        elif "_original_forward" in vars(model):
            original = vars(model)["_original_forward"]
            model = copy.copy(model)  # the same parameters, buffers and modules
            del model._original_forward
            model.forward = (
                MethodType(original.__func__, model) if hasattr(original, "__func__") else original
            )  # type: ignore
        else:
            return


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without any wrapper."""
    *_, inner = walk_wrappers(model)
    return inner
