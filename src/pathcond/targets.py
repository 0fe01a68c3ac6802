"""TARGET of the command line -> a model and example inputs.

torchvision:resnet18        a torchvision classification model, random weights
timm:resnet50               a timm model, random weights
package.module:factory      a callable that returns a model, or (model, example_inputs)
path/to/file.py:factory     the same, in a file
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

FORMS = "torchvision:NAME, timm:NAME, package.module:factory or file.py:factory"


class TargetError(ValueError):
    """The target names no model, or gives no example inputs; the message says what to write instead."""


def load_target(target: str, input_shape: tuple[int, ...] | None = None) -> tuple[nn.Module, Any]:
    """Build the model and a batch for it.

    Args:
        target: One of the forms above.
        input_shape: Shape of a random float input; needed where the target does not bring its own.
    """
    source, colon, name = target.rpartition(":")
    if not colon or not source or not name:
        raise TargetError(f"{target!r} is no target: write {FORMS}.")
    if source == "torchvision":
        model, default = _torchvision(name)
    elif source == "timm":
        model, default = _timm(name)
    else:
        model, default = _factory(source, name)
    if input_shape is not None:
        return model, torch.randn(input_shape)
    if default is None:
        raise TargetError(f"{target} returns a model without example inputs: give their shape, e.g. --input 2x3x224x224.")
    return model, default


def parse_shape(text: str) -> tuple[int, ...]:
    """``"2x3x224x224"`` -> (2, 3, 224, 224)."""
    try:
        shape = tuple(int(size) for size in text.lower().split("x"))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise TargetError(f"{text!r} is no shape: write sizes joined by x, e.g. 2x3x224x224.")
    return shape


def _torchvision(name: str) -> tuple[nn.Module, Any]:
    models = _library("torchvision").models
    if name not in models.list_models(module=models):
        raise TargetError(f"torchvision has no classification model {name!r}.{_nearest(name, models.list_models(module=models))}")
    size = 299 if name == "inception_v3" else 224
    return models.get_model(name, weights=None), torch.randn(2, 3, size, size)


def _timm(name: str) -> tuple[nn.Module, Any]:
    timm = _library("timm")
    if not timm.is_model(name):
        raise TargetError(f"timm has no model {name!r}.{_nearest(name, timm.list_models())}")
    model = timm.create_model(name, pretrained=False)
    return model, torch.randn(2, *model.pretrained_cfg["input_size"])


def _library(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise TargetError(f"{name} is not installed: pip install {name}.") from error
    except RuntimeError as error:  # torchvision without its compiled operators
        raise TargetError(f"{name} cannot be imported: {error}") from error


def _factory(source: str, name: str) -> tuple[nn.Module, Any]:
    if source.endswith(".py"):
        path = Path(source)
        spec = importlib.util.spec_from_file_location(path.stem, path) if path.is_file() else None
        if spec is None or spec.loader is None:
            raise TargetError(f"There is no file {source}.")
        module = importlib.util.module_from_spec(spec)
        sys.modules[path.stem] = module
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(source)
        except ImportError as error:
            raise TargetError(f"{source} cannot be imported ({error}): write {FORMS}.") from error
    factory = getattr(module, name, None)
    if not callable(factory):
        raise TargetError(f"{source} has no callable {name!r}.{_nearest(name, dir(module))}")
    made = factory()
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise TargetError(f"{source}:{name} returned {type(made).__name__}: return a model, or (model, example_inputs).")


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, known, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
