"""One run: build, prepare, train, each from random states that depend on the seed alone."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import math
import random
import sys
import sysconfig
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ..capture.isolation import same_random_states
from ..capture.models import Inputs
from ..distributed.sharding import local
from .arguments import Point

logger = logging.getLogger("pathcond")

OURS = Path(__file__).parents[1]
TORCH = Path(torch.__file__).parent
STANDARD_LIBRARY = Path(sysconfig.get_path("stdlib"))
LARGEST = 1e150  # figures beyond have diverged: their squares would leave the range of a float
INSTALLED = {"site-packages", "dist-packages"}  # folders of packages
GENERATED = ("<frozen", "<eval_with_key")  # what files of Python itself and of torch.fx are called


class WrongCallableError(TypeError):
    """``build``, ``train`` or a method does not do what ``compare_rates`` needs; the message says
    what it did.
    """


@dataclass(frozen=True, kw_only=True)
class Run:
    """What came out of one run.

    Attributes:
        method, rate, seed: Which it is.
        figure: That ``train`` returned; infinite if it diverged, NaN if the run raised.
        seconds: Wall-clock time.
        error: What was raised, and where; None if nothing was.
    """

    method: str
    rate: float
    seed: int
    figure: float
    seconds: float
    error: str | None = None


class Beginnings:
    """Builds models and prepares them, and makes sure that one seed has one set of initial weights.

    Attributes:
        build, example_inputs: As given to ``compare_rates``.
        weights: By seed, the digest of its initial weights and the words for where they were seen.
        conditioned: By method, the weights that ``condition_`` found for the seed under way: they
            serve all rates.
    """

    def __init__(
        self,
        build: Callable[[int], nn.Module],
        example_inputs: Inputs | Callable[[int], Inputs],
        weights: dict[int, tuple[str, str]],
    ) -> None:
        self.build = build
        self.example_inputs = example_inputs
        self.weights = dict(weights)
        self.seed: int | None = None
        self.conditioned: dict[str, dict[str, Tensor]] = {}

    def ready(self, point: Point) -> nn.Module:
        """The model of a run; the random states are those behind its build, whatever preparing it
        drew.
        """
        model = self.build_model(point.seed)
        with same_random_states():
            self._prepare(model, point)
        return model

    def build_model(self, seed: int) -> nn.Module:
        """A fresh model.

        Raises:
            WrongCallableError: What was built is no module, or has other weights than that seed had
                before.
        """
        seed_all(seed)
        model = self.build(seed)
        if not isinstance(model, nn.Module):
            raise WrongCallableError(
                f"build({seed}) returned {_show(model)}, not a torch.nn.Module"
            )
        found = digest(model)
        known, where = self.weights.setdefault(seed, (found, "before, in this call"))
        if known != found:
            raise WrongCallableError(
                f"build({seed}) made other initial weights than {where}: runs from different "
                "weights cannot be compared. "
                "Make a new model in every call of build, by its seed alone; if you changed the "
                "model, name another file of rows."
            )
        return model

    def weights_of(self, seed: int) -> str:
        """The digest of the initial weights; empty if none were built."""
        return self.weights[seed][0] if seed in self.weights else ""

    def _prepare(self, model: nn.Module, point: Point) -> None:
        method = point.method
        if method.prepare is None:
            return
        if point.seed != self.seed:
            self.seed = point.seed
            self.conditioned.clear()
        if method.name in self.conditioned:
            _take_over(model, self.conditioned[method.name])
            return
        inputs = (
            self.example_inputs(point.seed)
            if callable(self.example_inputs)
            else self.example_inputs
        )
        returned = method.prepare(model, inputs)
        if isinstance(returned, nn.Module) and returned is not model:
            raise WrongCallableError(
                f"method {method.name!r} returned another model: it must change the one that it is "
                "given in place, for that one is trained"
            )
        if method.only_weights:
            self.conditioned[method.name] = {
                name: tensor.detach().clone() for name, tensor in _tensors(model)
            }


def perform(point: Point, beginnings: Beginnings, train: Callable[[nn.Module, float], Any]) -> Run:
    """Make one run. What it raises becomes a part of the result, but for interrupts and
    ``WrongCallableError``.
    """
    start = time.perf_counter()
    figure = math.nan
    error = None
    try:
        figure = figure_of(train(beginnings.ready(point), point.rate))
    except WrongCallableError:
        raise
    except Exception as raised:
        logger.debug(
            "%s at rate %g, seed %d raised",
            point.method.name,
            point.rate,
            point.seed,
            exc_info=True,
        )
        error = describe_error(raised)
    return Run(
        method=point.method.name,
        rate=point.rate,
        seed=point.seed,
        figure=figure,
        seconds=time.perf_counter() - start,
        error=error,
    )


def figure_of(returned: Any) -> float:
    """The number that ``train`` returned, infinite if it is not finite or too large to reckon with.

    >>> figure_of(torch.tensor(0.5)), figure_of(float("nan")), figure_of(9e307)
    (0.5, inf, inf)
    >>> figure_of(None)
    Traceback (most recent call last):
    pathcond.rates.runs.WrongCallableError: train returned None: ...
    """
    is_number = (
        hasattr(returned, "__float__")
        and not isinstance(returned, bool)
        and getattr(returned, "ndim", 0) == 0
    )
    if isinstance(returned, Tensor):
        returned = returned.detach()
    try:
        figure = float(returned) if is_number else None
    except (TypeError, ValueError, RuntimeError):  # a complex or a meta tensor
        figure = None
    if figure is None:
        raise WrongCallableError(
            f"train returned {_show(returned)}: it must return one number, the figure to lower, "
            "and infinity or NaN if training "
            "diverged"
        )
    return figure if abs(figure) <= LARGEST else math.inf


def seed_all(seed: int) -> None:
    """Begin the random numbers of Python, NumPy (if it is in use) and torch on all devices anew."""
    random.seed(seed)
    torch.manual_seed(seed)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(seed % 2**32)


def digest(model: nn.Module) -> str:
    """Changes with any bit of a parameter or buffer."""
    hashed = hashlib.sha256()
    for name, tensor in _tensors(model):
        hashed.update(f"{name} {tensor.dtype} ".encode())
        if not is_lazy(tensor):
            values = local(tensor.detach()).cpu().contiguous()
            hashed.update(f"{tuple(values.shape)}".encode())
            # NumPy, which would show the same bytes, is not always there.
            hashed.update(ctypes.string_at(values.data_ptr(), values.nbytes))
    return hashed.hexdigest()[:16]


def _tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers, those that are not saved too."""
    return [*model.named_parameters(), *model.named_buffers()]


def _take_over(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(model):
            tensor.copy_(values[name])


def describe_error(error: Exception) -> str:
    """An error in one line: its type, its message, and the line that it came from: the innermost
    one of the user's code, else of this package.
    """
    frames = traceback.extract_tb(error.__traceback__)
    text = " ".join(str(error).split())
    where = "".join(
        f" ({Path(frame.filename).name}:{frame.lineno}, in {frame.name})"
        for frame in sorted(frames, key=_familiarity)[-1:]
    )
    return f"{type(error).__name__}{': ' * bool(text)}{text}{where}"


def _familiarity(frame: traceback.FrameSummary) -> int:
    """How well the user knows the file of a line: his own files best, then installed packages,
    which may hold his model, then this package; torch and the standard library least.
    """
    path = Path(frame.filename)
    if OURS in path.parents:
        return 1
    if TORCH in path.parents or frame.filename.startswith(GENERATED):
        return 0
    if INSTALLED.intersection(path.parts):
        return 2
    return 0 if STANDARD_LIBRARY in path.parents else 3


def _show(value: object) -> str:
    """A value in a message.

    >>> _show((0.3, 0.9)), _show(torch.ones(2)), _show(None)
    ('(0.3, 0.9)', 'a tensor of shape (2,)', 'None')
    """
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    text = repr(value)
    return text if len(text) <= 60 else f"an object of type {type(value).__name__}"
