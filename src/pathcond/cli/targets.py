"""TARGET of the command line -> a model and example inputs.

torchvision:resnet18        a torchvision classification model, random weights
timm:resnet50               a timm model, random weights
package.module:factory      a callable that returns a model, or (model, example_inputs)
path/to/file.py:factory     the same, in a file
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

FORMS = "torchvision:NAME, timm:NAME, package.module:factory or file.py:factory"
MAX_MESSAGE = 300  # characters of an error in the user's code


class TargetError(ValueError):
    """The target names no model, or gives no example inputs; the message says what to write
    instead.
    """


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
        raise TargetError(
            f"{target} returns a model without example inputs: give their shape, "
            "e.g. --input 2x3x224x224."
        )
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
        raise TargetError(
            "torchvision has no classification model "
            f"{name!r}.{_nearest(name, models.list_models(module=models))}"
        )
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
    module = _file(source) if source.endswith(".py") else _module(source)
    factory = getattr(module, name, None)
    if isinstance(factory, (nn.Module, ModuleType)):
        kind = "a model" if isinstance(factory, nn.Module) else "a Python module"
        raise TargetError(
            f"{source}:{name} is {kind}, not a function that makes a model: write one without "
            "arguments, and name that."
        )
    if not callable(factory):
        raise TargetError(f"{source} has no callable {name!r}.{_nearest(name, dir(module))}")
    required = _required_arguments(factory)
    if required:
        raise TargetError(
            f"{source}:{name} needs arguments ({', '.join(required)}), and is called without "
            "any: name a function that calls it."
        )
    with _their_errors(f"{source}:{name}", source):
        made = factory()
    if isinstance(made, nn.Module):
        return made, None
    if isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], nn.Module):
        return made
    raise TargetError(
        f"{source}:{name} returned {type(made).__name__}: return a model, or "
        "(model, example_inputs)."
    )


def _file(source: str) -> ModuleType:
    path = Path(source)
    # random.py must not hide Python's own
    name = path.stem if path.stem not in sys.modules else f"pathcond_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path) if path.is_file() else None
    if spec is None or spec.loader is None:
        raise TargetError(f"There is no file {source}.")
    _look_in(path.resolve().parent)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where pickle and dataclasses look for it
    with _their_errors(source, source):
        spec.loader.exec_module(module)
    return module


def _module(source: str) -> ModuleType:
    _look_in(Path.cwd())
    try:
        with _their_errors(source, source):
            return importlib.import_module(source)
    except TargetError as error:
        missing = getattr(error.__cause__, "name", None)
        if isinstance(error.__cause__, ModuleNotFoundError) and f"{source}.".startswith(
            f"{missing}."
        ):
            raise TargetError(
                f"{source} cannot be imported ({error.__cause__}): write {FORMS}."
            ) from error
        raise


def _look_in(folder: Path) -> None:
    """Let the user's code import what lies in a folder, unless a module of that name is found
    elsewhere.
    """
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _required_arguments(factory: Any) -> list[str]:
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (ValueError, TypeError):  # a callable written in C
        return []
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [
        p.name
        for p in parameters
        if p.default is inspect.Parameter.empty and p.kind not in optional
    ]


@contextmanager
def _their_errors(what: str, source: str) -> Iterator[None]:
    """Whatever the user's code raises becomes one line: their error, and the line of theirs where
    it came from.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        message = " ".join(str(error.msg if isinstance(error, SyntaxError) else error).split())
        shown = type(error).__name__ + (f": {message[:MAX_MESSAGE]}" if message else "")
        raise TargetError(
            f"{what} failed with {shown}, at {_their_place(error, source)}"
        ) from error


def _their_place(error: BaseException, source: str) -> str:
    """``file.py:12 `code` `` of the last line in the user's own file; else of the last line that is
    in no installed package.
    """
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno} `{(error.text or '').strip()}`"
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename != __file__
    ]
    real = [frame for frame in frames if not frame.filename.startswith("<")]  # <frozen importlib>
    own = [frame for frame in real if os.path.realpath(frame.filename) == os.path.realpath(source)]
    installed = tuple(os.path.realpath(folder) for folder in set(sysconfig.get_paths().values()))
    others = [frame for frame in real if not os.path.realpath(frame.filename).startswith(installed)]
    for found in (own, others, real, frames):
        if found:
            return f"{found[-1].filename}:{found[-1].lineno} `{(found[-1].line or '').strip()}`"
    return source


def _nearest(name: str, known: list[str]) -> str:
    import difflib

    close = difflib.get_close_matches(name, [other for other in known if other != name], n=1)
    return f" Did you mean {close[0]!r}?" if close else ""
