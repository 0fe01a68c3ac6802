"""What came of a comparison, by its rows: each method at its own best rate, beside the network as
it is and beside the best that a search found.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from pathcond.rows import Row

from ..sweep.selection import mean, where
from .comparison import CHOOSING, NEAR, by_rate
from .settings import setting_of

DEFAULT = "default"  # stands for what ``find_default`` says


@dataclass(frozen=True)
class Tuned:
    """A method at its own best rate.

    Attributes:
        rate: The best one for the fresh seeds.
        losses, accuracies: Of the fresh seeds at that rate.
        width: Decades of rates at which the choosing seed comes near its best.
        at_edge: Whether the best rate is the first or the last that was tried.
        curve: Of the choosing seed, test loss by rate.
    """

    rate: float
    losses: list[float]
    accuracies: list[float]
    width: float
    at_edge: bool
    curve: dict[float, float]

    @property
    def loss(self) -> float:
        """Mean over the fresh seeds."""
        return mean(self.losses)


def find_tuned(rows: Sequence[Row], setting: str, method: str) -> Tuned | None:
    """A method of a setting, or ``DEFAULT``, at its best rate; None where rows are missing."""
    if method == DEFAULT:
        method = find_default(rows, setting)
    here = where(rows, setting=setting, method=method)
    choosing = [row.result for row in here if row.job["seed"] == CHOOSING]
    fresh = [row.result for row in here if row.job["seed"] != CHOOSING]
    if not choosing or not fresh:
        return None
    curve = by_rate(choosing[0], "test_loss")
    losses = [by_rate(result, "test_loss") for result in fresh]
    rate = min(losses[0], key=lambda rate: mean([loss[rate] for loss in losses]))
    near = [tried for tried in curve if curve[tried] <= min(curve.values()) * (1 + NEAR)]
    return Tuned(
        rate=rate,
        losses=[loss[rate] for loss in losses],
        accuracies=[
            by_rate(result, "test_accuracy")[rate] for result in fresh if "test_accuracy" in result
        ],
        width=math.log10(max(near) / min(near)),
        at_edge=rate in (min(curve), max(curve)),
        curve=curve,
    )


def find_default(rows: Sequence[Row], setting: str) -> str:
    """Under which name the library's default was trained in a setting.

    Without BatchNorms "batch" frees what "absorb" does, and without norms what "full" does; such
    networks were trained under those names.
    """
    if not setting_of(setting).normed:
        return "layers"
    return "layers-batch" if find_tuned(rows, setting, "layers-batch") else "layers-absorb"


def share(rows: Sequence[Row], setting: str, method: str) -> float | None:
    """How much of the searched gain a method has; None where one of the three is missing, or the
    search found nothing.
    """
    found = [find_tuned(rows, setting, name) for name in ("as-is", method, "searched")]
    losses = [one.loss for one in found if one is not None]
    if len(losses) < 3:
        return None
    as_is, ours, best = losses
    return (as_is - ours) / (as_is - best) if best < as_is else None


def at_equal_rates(
    rows: Sequence[Row], setting: str, method: str, up_to: float = 0.5
) -> list[float]:
    """A method's loss over that of the network as it is, of the choosing seed, rate by rate: up to
    a multiple of the best rate of the network as it is. Empty where rows are missing.
    """
    ours = find_tuned(rows, setting, method)
    as_is = find_tuned(rows, setting, "as-is")
    if ours is None or as_is is None:
        return []
    best = min(as_is.curve, key=lambda rate: as_is.curve[rate])
    rates = [rate for rate in as_is.curve if rate <= up_to * best and rate in ours.curve]
    return [ours.curve[rate] / as_is.curve[rate] for rate in rates]
