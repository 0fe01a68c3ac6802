"""Picking rows, and numbers over seeds as text.

By hand, and not by pandas: rows are a few hundred dicts with curves inside, and a GPU machine with
torch and numpy alone must be able to go on with them.

>>> spread([3, 4, 5])
'4 ± 0.82'
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pathcond.rows import Job, Row


def where(rows: Iterable[Row], **settings: Any) -> list[Row]:
    """The rows whose jobs have these settings."""
    found = list(rows)
    for key, value in settings.items():
        found = [row for row in found if row.job.get(key) == value]
    return found


def settings_of(rows: Iterable[Row], key: str) -> list[Any]:
    """The distinct values of one setting, in ascending order."""
    return sorted({row.job[key] for row in rows})


def describe_jobs(some: Sequence[Job], jobs: Sequence[Job]) -> str:
    """Which of the jobs some of them are, in few words: what ``--only`` would have to say.

    >>> jobs = [{"rate": rate, "seed": seed} for rate in (1, 2, 3) for seed in (0, 1)]
    >>> describe_jobs(
    ...     [job for job in jobs if job["rate"] > 1 and job["seed"] or job["rate"] == 1], jobs
    ... )
    'rate=1; seed=1'
    """
    keys = [
        key
        for key in dict.fromkeys(key for job in jobs for key in job)
        if len({str(job.get(key)) for job in jobs}) > 1
    ]
    # dict for a set that keeps its order
    parts = [{key: {str(job.get(key)): None} for key in keys} for job in some]
    for merged in sorted(keys, key=lambda key: key != "seed"):
        by_rest: dict[str, dict[str, dict[str, None]]] = {}
        for part in parts:
            rest = json.dumps(
                {key: sorted(values) for key, values in part.items() if key != merged}
            )
            kept = by_rest.setdefault(rest, part)
            kept[merged] = kept[merged] | part[merged]
        parts = list(by_rest.values())
    return "; ".join(dict.fromkeys(_shortest(part, some, jobs) for part in parts))


def _shortest(part: Mapping[str, Iterable[str]], some: Sequence[Job], jobs: Sequence[Job]) -> str:
    """A part without the settings that say nothing: where all jobs with the other settings are
    among those that are meant.
    """
    left = {key: set(values) for key, values in part.items()}
    # those first that only some have
    for key in sorted(left, key=lambda key: all(job.get(key) is not None for job in jobs)):
        others = {other: values for other, values in left.items() if other != key}
        if all(
            job in some
            for job in jobs
            if all(str(job.get(other)) in values for other, values in others.items())
        ):
            left = others
    return " ".join(
        f"{key}={','.join(value for value in part[key] if value in values)}"
        for key, values in left.items()
    )


def match_runs(rows: Iterable[Row], *methods: str) -> list[tuple[Row, ...]]:
    """Runs of these methods that differ in the method alone, side by side; what one of them lacks
    is left out.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        others = {key: value for key, value in row.job.items() if key != "method"}
        found.setdefault(json.dumps(others, sort_keys=True), {})[row.job["method"]] = row
    return [
        tuple(by[method] for method in methods)
        for by in found.values()
        if all(method in by for method in methods)
    ]


def seeds_of(pairs: Iterable[Sequence[Row]]) -> str:
    """Over how many seeds a comparison goes, in words."""
    count = len({row.job["seed"] for pair in pairs for row in pair})
    return f"{count} seed{'s' * (count != 1)}"


def seeds_at_rates(rows: Iterable[Row], *methods: str) -> str:
    """Over how many seeds these methods are compared at each learning rate."""
    pairs = match_runs(rows, *methods)
    by_rate = {
        rate: [pair for pair in pairs if pair[0].job["learning_rate"] == rate]
        for rate in settings_of((pair[0] for pair in pairs), "learning_rate")
    }
    return ", ".join(f"{seeds_of(found)} at {rate:g}" for rate, found in by_rate.items())


def mean(values: Sequence[float]) -> float:
    """NaN of nothing; infinite if one is."""
    return math.fsum(values) / len(values) if values else math.nan


def deviation(values: Sequence[float]) -> float:
    """Standard deviation over the values; NaN where it has none."""
    center = mean(values)
    return (
        math.sqrt(mean([(value - center) ** 2 for value in values]))
        if math.isfinite(center)
        else math.nan
    )


def spread(values: Sequence[float], digits: int = 2, unit: str = "") -> str:
    """Mean ± standard deviation."""
    if not values:
        return "–"
    if any(not math.isfinite(value) for value in values):
        return "diverged" if any(math.isnan(value) for value in values) else "never"
    center = mean(values)
    decimals = (
        max(0, digits - 1 - math.floor(math.log10(deviation(values))))
        if deviation(values) > 0
        else digits
    )
    if len(values) == 1 or not deviation(values):
        return f"{center:.{max(digits, 3)}g}{unit}"
    return f"{_plain(center, decimals)} ± {_plain(deviation(values), decimals)}{unit}"


def _plain(value: float, decimals: int) -> str:
    text = f"{value:.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
