"""Picking rows, and numbers over seeds as text.

>>> spread([3, 4, 5])
'4 ± 0.82'
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from .figure import Row


def where(rows: Iterable[Row], **settings: Any) -> list[Row]:
    """The rows whose jobs have these settings."""
    return [row for row in rows if all(row.job.get(key) == value for key, value in settings.items())]


def settings_of(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of one setting, in ascending order."""
    return sorted({row.job[key] for row in rows})


def mean(values: Sequence[float]) -> float:
    """NaN of nothing; infinite if one is."""
    return sum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over the values; NaN where it has none."""
    center = mean(values)
    return math.sqrt(mean([(value - center) ** 2 for value in values])) if math.isfinite(center) else math.nan


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    if any(not math.isfinite(value) for value in values):
        return "diverged" if any(math.isnan(value) for value in values) else "never"
    center = mean(values)
    decimals = max(0, digits - 1 - math.floor(math.log10(deviation(values)))) if deviation(values) > 0 else digits
    if len(values) == 1 or not deviation(values):
        return f"{center:.{max(digits, 3)}g}{unit}"
    return f"{_plain(center, decimals)} ± {_plain(deviation(values), decimals)}{unit}"


def _plain(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
