"""What came of a comparison, by its rows: each method at its own best rate, beside the network as
it is and beside the best that a search found.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pathcond.rows import Row

from ..sweep.selection import mean, where
from .comparison import CHOOSING, NEAR, by_rate
from .settings import setting_of

ONE_POINT = 0.01  # of accuracy
DEFAULT = "default"  # stands for what ``find_default`` says


@dataclass(frozen=True)
class Tuned:
    """A method at its own best rate.

    Attributes:
        rate: The best one for the fresh seeds.
        losses, accuracies: Of the fresh seeds at that rate.
        width: Decades of rates around the best at which the choosing seed comes near it, without a
            gap: by the loss, and by the accuracy, None where there is none.
        at_edge: Whether the best rate is the first or the last that the fresh seeds were trained
            at.
        curve: Of the choosing seed, test loss by rate.
    """

    rate: float
    losses: list[float]
    accuracies: list[float]
    width: tuple[float, float | None]
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
    errors = (
        {tried: 1 - value for tried, value in by_rate(choosing[0], "test_accuracy").items()}
        if "test_accuracy" in choosing[0]
        else None
    )
    return Tuned(
        rate=rate,
        losses=[loss[rate] for loss in losses],
        accuracies=[
            by_rate(result, "test_accuracy")[rate] for result in fresh if "test_accuracy" in result
        ],
        width=(
            width_near(curve, min(curve.values()) * (1 + NEAR)),
            width_near(errors, min(errors.values()) + ONE_POINT) if errors else None,
        ),
        at_edge=rate in (min(losses[0]), max(losses[0])),
        curve=curve,
    )


def width_near(curve: Mapping[float, float], limit: float) -> float:
    """Decades of rates around the best at which a curve stays below a limit.

    >>> width_near({1.0: 0.5, 10.0: 0.1, 100.0: 0.2, 1000.0: 0.9, 10000.0: 0.1}, 0.3)
    1.0
    """
    rates = sorted(curve)
    first = last = rates.index(min(rates, key=lambda rate: curve[rate]))
    while first and curve[rates[first - 1]] <= limit:
        first -= 1
    while last + 1 < len(rates) and curve[rates[last + 1]] <= limit:
        last += 1
    return math.log10(rates[last] / rates[first])


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
) -> dict[float, float]:
    """A method's loss over that of the network as it is, rate by rate, up to a multiple of the best
    rate of the network as it is: means over the seeds that both were trained with at a rate, which
    are all of them near their best rates and the choosing one elsewhere. Empty where rows are
    missing.
    """
    as_is = find_tuned(rows, setting, "as-is")
    if as_is is None:
        return {}
    method = find_default(rows, setting) if method == DEFAULT else method
    ours, others = (
        {
            (rate, row.job["seed"]): loss
            for row in where(rows, setting=setting, method=name)
            for rate, loss in by_rate(row.result, "test_loss").items()
        }
        for name in (method, "as-is")
    )
    pairs: dict[float, list[tuple[float, float]]] = {}
    for rate, seed in sorted(ours.keys() & others.keys()):
        if rate <= up_to * as_is.rate:
            pairs.setdefault(rate, []).append((ours[rate, seed], others[rate, seed]))
    return {
        rate: mean([a for a, _ in found]) / mean([b for _, b in found])
        for rate, found in pairs.items()
    }
