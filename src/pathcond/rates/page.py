"""A comparison as a page: the curves, what they say, and every number as a table."""

from __future__ import annotations

import math
from html import escape
from typing import Any

from ..report import charts
from ..report.page import render
from .compared import ComparedRates
from .curves import Curve
from .words import cells, number, sentences


def comparison_page(result: ComparedRates) -> str:
    """The page of one comparison."""
    title = f"{result.label[:1].upper()}{result.label[1:]} over the learning rate"
    return render("rates.html.jinja", title=title, **comparing(result))


def comparison_frame(result: ComparedRates) -> str:
    """The page as a frame: its style stays its own inside a notebook."""
    page = escape(comparison_page(result), quote=True)
    title = f"{escape(result.label)} over the learning rate"
    return (
        f'<iframe title="{title}" style="width:100%;height:48rem;border:0" '
        f'srcdoc="{page}"></iframe>'
    )


def comparing(result: ComparedRates) -> dict[str, Any]:
    """What ``rates_body.html.jinja`` shows."""
    curves = [_band(curve) for curve in result.curves]
    chart = charts.bands(curves, result.rates, x_label="learning rate", y_label=result.label)
    return {
        "result": result,
        "best_rows": [cells(curve, result) for curve in result.curves],
        "sentences": sentences(result),
        "figures": [
            (number(rate), [_outcome(curve, k) for curve in result.curves])
            for k, rate in enumerate(result.rates)
        ],
        "rates_chart": chart,
        "band_is_cut": charts.is_band_cut(curves),
    }


def _band(curve: Curve) -> charts.Band:
    """The curve with a band from the least to the greatest of the seeds."""
    return charts.Band(
        name=curve.name,
        values=curve.means,
        low=[min(seeds) for seeds in curve.figures],
        high=[
            max(seeds) if not any(map(math.isnan, seeds)) else math.nan for seeds in curve.figures
        ],
        tips=[
            f"{curve.name} at {number(rate)}: {_outcome(curve, k)}"
            for k, rate in enumerate(curve.rates)
        ],
        best=curve.best,
    )


def _outcome(curve: Curve, k: int) -> str:
    """What came out at one rate: mean and range of the seeds, or what kept them from a mean."""
    seeds = curve.figures[k]
    raised = sum(map(math.isnan, seeds))
    diverged = sum(map(math.isinf, seeds))
    if raised or diverged:
        counts = [
            f"{count} of {len(seeds)} {what}"
            for count, what in ((diverged, "diverged"), (raised, "raised"))
            if count
        ]
        return ", ".join(counts)
    if len(seeds) == 1:
        return number(seeds[0])
    return f"{number(curve.means[k])} ({number(min(seeds))} to {number(max(seeds))})"
