"""Where the time of a ``condition_`` goes whose model was captured before: seconds of its steps.

    python -m benchmarks.steps [--models resnet50 densenet121]

    measure     diag(G) and what weights read, on one forward and backward pass
    sums        squared weights summed up over pairs of units
    balance     the point of balance, which the default moves from
    pose        the rest of posing the problem
    bounds      what BatchNorms allow, which takes a forward pass
    minimum     the best log-scales
    outputs     outputs compared in both modes and at other sizes: six forward passes
    write       everything else of ``rescale_``: checks, and the multiplication
    sample      diag(G) after the call, for the report
    rest        what is left

Each is the quickest of a few calls.
"""

from __future__ import annotations

import argparse
import pkgutil
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pathcond

from .calls import REPEATS, build, warm_up
from .measuring import format_row, write

# Functions by the step they are; a step does not count those inside it that are steps themselves.
STEPS = {
    "measure": "pathcond.condition._measure",
    "sums": "pathcond.measured.layers._Layers.of",
    "balance": "pathcond.measured.layers.find_balance",
    "pose": "pathcond.condition._pose",
    "bounds": "pathcond.condition._shares",
    "minimum": "pathcond.condition._solution",
    "outputs": "pathcond.rescaling.rescale._verify",
    "write": "pathcond.condition.rescale_",
    "sample": "pathcond.condition.diagonal_sample",
}
MODELS = ("mlp", "resnet50", "densenet121")


class Stopwatch:
    """Seconds of steps, each without the steps inside it."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(STEPS, 0.0)
        self._inside = [0.0]

    def timed(self, step: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, which adds its seconds to a step."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self._inside.append(0.0)
            start = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                taken = time.perf_counter() - start
                self.seconds[step] += taken - self._inside.pop()
                self._inside[-1] += taken

        return call


@contextmanager
def watching() -> Iterator[Stopwatch]:
    """Time the steps of every call inside."""
    stopwatch = Stopwatch()
    with ExitStack() as stack:
        for step, name in STEPS.items():
            function = pkgutil.resolve_name(name)
            stack.enter_context(mock.patch(name, stopwatch.timed(step, function)))
        yield stopwatch


def measure(name: str) -> dict[str, Any]:
    """Seconds of every step of the quickest call."""
    model, batch = build(name)
    prepared = pathcond.prepare(model, batch)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    rows = []
    for _ in range(REPEATS):
        model.load_state_dict(state)
        with watching() as stopwatch:
            start = time.perf_counter()
            pathcond.condition_(model, prepared)
            whole = time.perf_counter() - start
        rest = whole - sum(stopwatch.seconds.values())
        rows.append({"model": name, "whole": whole, **stopwatch.seconds, "rest": rest})
    return min(rows, key=lambda row: float(row["whole"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--out", default="benchmarks/steps.json")
    options = parser.parse_args()
    warm_up()
    rows = []
    for name in options.models:
        rows.append(measure(name))
        print(format_row(rows[-1]), flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
