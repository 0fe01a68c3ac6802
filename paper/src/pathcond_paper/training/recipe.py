"""What runs that are trained together share, and what they differ in."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from torch import nn

from .methods import METHODS, Method
from .optimizers import Schedule

Task = Literal["classify", "reconstruct"]


@dataclass(frozen=True, kw_only=True)
class Run:
    """What differs between runs that are trained together.

    Attributes:
        method: A name among the recipe's methods.
        learning_rate: The highest one, where it follows a schedule.
        seed: Of the weights and of the batches.
    """

    method: str
    learning_rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What runs that are trained together share.

    Attributes:
        build: Makes the network; its random weights come from the run's seed.
        epochs, batch: How long, and how many samples a step.
        task: "classify" (cross-entropy) or "reconstruct" the input (mean squared error).
        teleport_every: Steps between the teleports of methods that make them.
        teleport_times: How many they make; None for as many as there is time for.
        fitted: Whether to evaluate on the training set too, after every epoch.
        bfloat16: Whether to compute in bfloat16 on a GPU; weights stay float32.
        compiled: Whether a network that is trained alone is compiled on a GPU; where that fails, it
            runs as it is.
        approximate: Whether smooth activations are treated as ReLU.
        optimizer: A name in ``OPTIMIZERS``.
        weight_decay: As the optimizer of torch applies it.
        schedule: How the learning rate changes over all steps.
        augment: Whether to shift images by up to four pixels and to mirror half of them.
        methods: Of the runs, by name.
    """

    build: Callable[[], nn.Module]
    epochs: int
    batch: int = 128
    task: Task = "classify"
    teleport_every: int = 1000
    teleport_times: int | None = None
    fitted: bool = False
    bfloat16: bool = False
    compiled: bool = False
    approximate: bool = False
    optimizer: str = "sgd"
    weight_decay: float = 0.0
    schedule: Schedule = "fixed"
    augment: bool = False
    methods: Mapping[str, Method] = field(default_factory=lambda: METHODS)

    def teleports_after(self, steps: int) -> bool:
        """Whether a teleport comes after so many steps."""
        times = steps // self.teleport_every
        return steps % self.teleport_every == 0 and (
            self.teleport_times is None or times <= self.teleport_times
        )
