"""A comparison in words and as a table; no dependency."""

from __future__ import annotations

import math
from collections.abc import Sequence

from .compared import ComparedRates
from .curves import Curve, Difference, difference
from .runs import Run

SHOWN_RUNS = 6
# the third is the figure's own name
COLUMNS = ("method", "best rate", "", "gain", "decades within 1 %")


def comparison_table(result: ComparedRates) -> str:
    """One line per method, then what can be concluded, and what went wrong."""
    asked = f"{_span(result.rates)}, {_count(len(result.seeds), 'seed')}"
    head = f"{_capital(result.label)} at each method's own best learning rate: {asked}"
    rows = [
        tuple(column or result.label for column in COLUMNS),
        *(cells(curve, result) for curve in result.curves),
    ]
    return "\n".join([head, "", *_align(rows), "", *sentences(result)]).rstrip()


def cells(curve: Curve, result: ComparedRates) -> tuple[str, ...]:
    """A method's line of the table."""
    edge = " (edge)" if curve.at_edge else ""
    against = difference(curve, result[result.baseline]) if curve.name != result.baseline else None
    return (
        curve.name,
        f"{number(curve.best_rate)}{edge}",
        figure(curve),
        percent(against.relative) if against else "–",
        "–" if math.isnan(curve.decades) else f"{curve.decades:.1f}",
    )


def sentences(result: ComparedRates) -> list[str]:
    """What the numbers say, and what they do not."""
    baseline = result[result.baseline]
    found = [_verdict(curve, baseline) for curve in result.curves if curve.name != baseline.name]
    found += [sentence for curve in result.curves for sentence in _doubts(curve)]
    found += [_failure(error, runs) for error, runs in result.failures.items()]
    return [*found, *result.notes]


def _verdict(curve: Curve, baseline: Curve) -> str:
    found = difference(curve, baseline)
    if found is None:
        return (
            f"{quote(curve)} and {quote(baseline)} cannot be compared: one of them has no best "
            "rate."
        )
    if found.mean == 0:
        return f"{quote(curve)} and {quote(baseline)} reach the same, each at its own best rate."
    side = "below" if found.mean > 0 else "above"
    share = "" if math.isnan(found.relative) else f"{100 * abs(found.relative):.2g} % "
    return (
        f"{quote(curve)} comes {share}{side} {quote(baseline)}, each at its own best rate; "
        f"{_noise(found)}."
    )


def _noise(found: Difference) -> str:
    if found.error is None:
        return "one seed does not show how much of that is noise: run more"
    pair = (
        f"{abs(found.mean):.2g} ± {found.error:.1g} (standard error) between runs of the same seed"
    )
    if found.is_clear:
        return f"the difference, {pair}, is more than the noise of the seeds"
    return f"the difference, {pair}, is within the noise of the seeds, so none is shown"


def _doubts(curve: Curve) -> list[str]:
    if curve.best is None:
        if any(math.isnan(mean) for mean in curve.means):
            return [
                f"{quote(curve)} has no rate at which every seed finished: it has no best rate."
            ]
        return [f"{quote(curve)} diverged at every rate, from one seed or more: try smaller ones."]
    if curve.at_edge is None:
        return []
    if curve.at_edge == "only":
        return [
            f"{quote(curve)} was run at one rate, {number(curve.best_rate)}: a grid of "
            "rates is needed to find its best."
        ]
    side = "smaller" if curve.at_edge == "least" else "larger"
    return [
        f"The best rate of {quote(curve)}, {number(curve.best_rate)}, is the {curve.at_edge} "
        "that was run: a better one may lie "
        f"beyond. Widen the grid to {side} rates."
    ]


def _failure(error: str, runs: Sequence[Run]) -> str:
    shown = "; ".join(
        f"{run.method} at {number(run.rate)}, seed {run.seed}" for run in runs[:SHOWN_RUNS]
    )
    more = f" and {len(runs) - SHOWN_RUNS} more" if len(runs) > SHOWN_RUNS else ""
    return f"{_count(len(runs), 'run')} raised {error}: {shown}{more}."


def figure(curve: Curve) -> str:
    """Mean and deviation at the best rate.

    >>> figure(Curve(name="", how="", rates=(1.0,), figures=((0.42, 0.43, 0.41),)))
    '0.42 ± 0.01'
    """
    if curve.best is None:
        return "–"
    return (
        f"{number(curve.mean)} ± {curve.deviation:.2g}"
        if curve.deviation is not None
        else number(curve.mean)
    )


def number(value: float) -> str:
    """Four digits; a dash for none."""
    return "–" if math.isnan(value) else "∞" if math.isinf(value) else f"{value:.4g}"


def percent(share: float) -> str:
    """A share with its sign.

    >>> percent(0.0731), percent(-0.2), percent(-1e-9)
    ('+7.3 %', '-20.0 %', '+0.0 %')
    """
    return "–" if math.isnan(share) else f"{round(100 * share, 1) + 0.0:+.1f} %"


def quote(curve: Curve) -> str:
    return f"“{curve.name}”"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _span(rates: Sequence[float]) -> str:
    if len(rates) == 1:
        return f"one rate, {number(rates[0])}"
    return f"{len(rates)} rates from {number(rates[0])} to {number(rates[-1])}"


def _count(amount: int, noun: str) -> str:
    return f"{amount:,} {noun}{'' if amount == 1 else 's'}"


def _align(rows: Sequence[Sequence[str]]) -> list[str]:
    """Names to the left, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for name, *numbers in rows:
        cells = [
            f"{name:<{widths[0]}}",
            *(f"{cell:>{width}}" for cell, width in zip(numbers, widths[1:], strict=True)),
        ]
        lines.append("  " + "  ".join(cells).rstrip())
    return lines
