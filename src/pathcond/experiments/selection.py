"""Picking rows, and numbers over seeds as text.

>>> spread([3, 4, 5])
'4 ± 0.82'
"""

from __future__ import annotations

import json
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


def matched(rows: Iterable[Row], *methods: str) -> list[tuple[Row, ...]]:
    """Runs of these methods that differ in the method alone, side by side; what one of them lacks is left out."""
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        others = {key: value for key, value in row.job.items() if key != "method"}
        found.setdefault(json.dumps(others, sort_keys=True), {})[row.job["method"]] = row
    return [tuple(by[method] for method in methods) for by in found.values() if all(method in by for method in methods)]


def seeds_of(pairs: Iterable[Sequence[Row]]) -> str:
    """Over how many seeds a comparison goes, in words."""
    count = len({row.job["seed"] for pair in pairs for row in pair})
    return f"{count} seed{'s' * (count != 1)}"


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
