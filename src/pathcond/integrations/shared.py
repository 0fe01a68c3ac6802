"""What the callbacks of all frameworks do: condition before the first step, teleport while the
model trains, keep the report.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import distributed, nn

from ..capture.models import Inputs
from ..condition import condition_, prepare
from ..distributed.ranks import several_processes
from ..lifting.sample import Prepared
from ..report import Report
from ..rescaling.optimizer_state import Optimizers
from ..teleporting import EXAMPLES, Teleportation, refuse_options, refuse_settings, teleport

# options of ``condition_`` and ``teleport`` alike, beside those that only pass through
OWN_OPTIONS = ("criterion", "pace", "solver", "normalization")

logger = logging.getLogger("pathcond")


class ConditionedTraining:
    """A training run, conditioned before its first step and teleported while it goes on.

    Attributes:
        report: Of the last conditioning or teleport; None before the first.
        teleportation: The handle that ``pathcond.teleport`` returned; None where nothing is
            teleported.
    """

    def __init__(
        self,
        example_inputs: Inputs | Prepared | None = None,
        *,
        condition: bool = True,
        every: int | Literal["epoch"] | None = None,
        schedule: Callable[[int], bool] | None = None,
        inputs: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        refuse_settings(1 if every is None else every, schedule)
        refuse_options(type(self).__name__, options, *OWN_OPTIONS)
        self.example_inputs = example_inputs
        self.condition = condition
        self.every = every
        self.schedule = schedule
        self.inputs = inputs
        self.options = options
        self.report: Report | None = None
        self.teleportation: Teleportation | None = None

    @property
    def teleports(self) -> bool:
        """Whether the model is to be teleported while it trains."""
        return self.every is not None or self.schedule is not None

    def has_work(self, fresh: bool) -> bool:
        """Whether a run is to be conditioned or teleported at all."""
        return (fresh and self.condition) or self.teleports

    def start(
        self,
        model: nn.Module,
        optimizer: Optimizers,
        example_inputs: Inputs | Prepared,
        *,
        fresh: bool,
        counts: dict[str, int],
        epochs: int,
        on_report: Callable[[Report], object] = lambda report: None,
        copies: Sequence[nn.Module] = (),
        group: Any = None,
    ) -> None:
        """Condition a fresh run; from here on, teleport if asked to.

        Args:
            model, optimizer, example_inputs: As for ``pathcond.teleport``.
            fresh: Whether no step has been taken yet.
            counts: The state of the run's teleports so far.
            epochs: How many are over: a checkpoint of the last step of one was written before that
                epoch was told to end.
            on_report: Called with the report of the conditioning and of each teleport.
            copies: Averages that the framework keeps, beside those of the user.
            group: The processes that train copies of the model, unless the user said which.
        """
        options = (
            {"group": group} | self.options | {"copies": [*self.options.get("copies", ()), *copies]}
        )

        def keep(report: Report) -> None:
            self.report = report
            on_report(report)

        begin = time.perf_counter()
        captured = {name: options.pop(name) for name in EXAMPLES if name in options}
        settings = {
            name: options[name]
            for name in ("normalization", "approximate", "frozen", "criterion")
            if name in options
        }
        prepared = prepare(model, example_inputs, **settings, **captured)
        preparing = {"symmetry": time.perf_counter() - begin}
        if fresh and self.condition:
            report = condition_(model, prepared, optimizer=optimizer, **options)
            keep(replace(report, seconds=report.seconds | preparing))
            logger.info("%s", self.report)
        if self.teleports:
            every = 1 if self.every is None else self.every  # a schedule takes its place
            handle = teleport(
                optimizer,
                model,
                prepared,
                every=every,
                schedule=self.schedule,
                on_teleport=keep,
                **options,
            )
            handle.load_state_dict(counts)
            self.teleportation = handle
            while handle.epochs < epochs:
                handle.end_epoch()

    def stop(self) -> None:
        """End the teleports; their handle stays to be looked at."""
        if self.teleportation is not None:
            self.teleportation.remove()

    def metrics(self, report: Report) -> dict[str, float]:
        """What goes to a logger."""
        values = {
            "objective_before": report.objective_before,
            "objective_after": report.objective_after,
            "output_change_eval": report.output_change_eval,
            "output_change_train": report.output_change_train,
            "max_abs_log_scale": float(report.log_scales.abs().max()) if report.num_units else 0.0,
            "seconds": sum(report.seconds.values()),
            "teleports": self.teleportation.teleports if self.teleportation is not None else 0,
        }
        return {f"pathcond/{name}": value for name, value in values.items() if value is not None}


def counts_at(steps: int, epochs: int) -> dict[str, int]:
    """The state of teleports of which no checkpoint tells, after so many steps and epochs."""
    return {"steps": steps, "epochs": epochs, "teleports": 0, "left_out": 0}


def all_processes() -> Any:
    """The group of all processes, for a model that is not wrapped; None where there is only one."""
    return (
        distributed.group.WORLD
        if several_processes() and distributed.get_world_size() > 1
        else None
    )


def sharding_error(what: str) -> ValueError:
    """Why a callback comes too late for parameters that are sharded, and what to do."""
    return ValueError(
        f"{what} shards the parameters before PathCondCallback sees them. In its place, call "
        "pathcond.condition_(model, batch) "
        "before the Trainer gets the model; to teleport, pathcond.prepare(model, batch) before "
        "fully_shard and "
        "pathcond.teleport(optimizer, model, prepared) after it."
    )


def import_first(*names: str, extra: str) -> Any:
    """The first of these modules that can be imported; of several, one that the program has
    imported already.
    """
    for name in sorted(names, key=lambda name: name not in sys.modules):
        try:
            return importlib.import_module(name)
        except ImportError as error:
            cause = error
    raise ImportError(
        f'pathcond.integrations.{extra} needs {" or ".join(names)}: pip install "pathcond[{extra}]"'
    ) from cause
