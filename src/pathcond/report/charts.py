"""Charts as inline SVG: they follow the page's colours in light and dark, and need nothing else.

Every chart is drawn twice, for wide windows and for phones; the page's style shows one of the two.
In a drawing that is only made smaller nobody could read the letters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import torch
from torch import Tensor

from ..text import count_of
from .axes import BOTTOM, CANVASES, RIGHT, TOP, Axis, Canvas, LogAxis

# Axes reach from the 1st to the 99th percentile: a few outliers would leave a chart empty.
BULK = (0.01, 0.99)
COLOURS = 6  # of the page's style


@dataclass(frozen=True)
class Band:
    """One curve with what it varies by.

    Attributes:
        name: In the legend.
        values: One per position; infinite if it is beyond every scale, NaN if there is none.
        low, high: Ends of the band around each value.
        tips: What is shown of each value under the mouse.
        best: Position of the value to be marked, if any.
    """

    name: str
    values: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]
    tips: Sequence[str]
    best: int | None


@dataclass(frozen=True)
class Series:
    """One line: its name, and a value per step (NaN where there is none)."""

    name: str
    values: Sequence[float]


def lines(
    series: Sequence[Series], *, x_label: str, y_label: str, first: int = 0, height: int = 320
) -> str:
    """Values over steps, one line per series; up to six are told apart by colour and dash."""
    finite = [v for s in series for v in s.values if math.isfinite(v)]
    low, high = _pad(min(finite), max(finite)) if finite else (0.0, 1.0)
    steps = max((len(s.values) for s in series), default=1)

    def draw(canvas: Canvas) -> str:
        x = Axis(first, first + max(steps - 1, 1), canvas.left, canvas.right)
        y = Axis(low, high, height - BOTTOM, TOP)
        parts = _frame(canvas, x, y, height, x_label, y_label)
        # The first is drawn last: where lines meet, its dashes leave the others to be seen.
        for i, s in reversed(list(enumerate(series))):
            points = " ".join(
                f"{x(first + k):.1f},{y(v):.1f}" for k, v in enumerate(s.values) if math.isfinite(v)
            )
            parts.append(
                f'<polyline class="line s{i % COLOURS}" points="{points}">{_tip(s.name)}</polyline>'
            )
        return _svg(canvas, parts, height, f"{y_label} over {x_label}")

    return _draw_all(draw) + _legend([s.name for s in series], "line")


def bands(
    curves: Sequence[Band], at: Sequence[float], *, x_label: str, y_label: str, height: int = 380
) -> str:
    """Curves over positive positions on a logarithmic axis, with their bands; what is off the scale
    stands at the top edge.
    """
    edge = TOP + 6
    y = _height_axis(curves, height - BOTTOM, edge + 14)
    top = y.high

    def draw(canvas: Canvas) -> str:
        x = LogAxis(at[0] / 1.15, at[-1] * 1.15, canvas.left, canvas.right)
        parts = _frame(canvas, x, y, height, x_label, y_label)
        if any(value > top for curve in curves for value in curve.values):
            parts.append(f'<text class="tick y" x="{canvas.left - 6}" y="{edge + 4}">∞</text>')
        places = [x(value) for value in at]
        for i, curve in enumerate(curves):
            parts.append(_band(curve, i, places, lambda v: y(v) if v <= top else edge, top))
        for i, curve in enumerate(curves):
            shift = 9 * (i - (len(curves) - 1) / 2)
            parts += [
                _off_scale(places[k] + shift, edge, i, curve.tips[k])
                for k, value in enumerate(curve.values)
                if value > top
            ]
        return _svg(canvas, parts, height, f"{y_label} over {x_label}")

    return _draw_all(draw) + _legend([curve.name for curve in curves], "line")


def is_band_cut(curves: Sequence[Band]) -> bool:
    """Whether ``bands`` leaves out a part of some band, because it would leave the scale."""
    top = _height_axis(curves, 0.0, 1.0).high
    return any(
        low < high and high > top
        for curve in curves
        for low, high in zip(curve.low, curve.high, strict=True)
    )


def _height_axis(curves: Sequence[Band], start: float, stop: float) -> Axis:
    """Logarithmic if all values are positive, then up to ten times the worst of the best: what blew
    up would flatten the rest.
    """
    finite = [
        v for curve in curves for v in (*curve.values, *curve.low, *curve.high) if math.isfinite(v)
    ]
    if not finite or min(finite) <= 0:
        return Axis(*_pad(min(finite, default=0.0), max(finite, default=1.0)), start, stop)
    best = [min((v for v in curve.values if math.isfinite(v)), default=0.0) for curve in curves]
    low = min(finite)
    high = max(v for v in finite if v <= 10 * max(*best, min(finite)))
    margin = max((high / low) ** 0.05, 1.01)
    return LogAxis(low / margin, high * margin, start, stop)


def _band(
    curve: Band, number: int, xs: Sequence[float], y: Callable[[float], float], top: float
) -> str:
    """The band where all of it is on the scale, the line, a dot at every value on the scale, a ring
    around the best.
    """
    kind = f"s{number % COLOURS}"
    parts = []
    for piece in _pieces([high <= top for high in curve.high]):
        outline = [(xs[k], curve.high[k]) for k in piece] + [
            (xs[k], curve.low[k]) for k in reversed(piece)
        ]
        points = " ".join(f"{px:.1f},{y(value):.1f}" for px, value in outline)
        parts.append(f'<polygon class="band {kind}" points="{points}"/>')
    for piece in _pieces([not math.isnan(value) for value in curve.values]):
        points = " ".join(f"{xs[k]:.1f},{y(curve.values[k]):.1f}" for k in piece)
        parts.append(
            f'<polyline class="line {kind}" points="{points}">{_tip(curve.name)}</polyline>'
        )
    for k, value in enumerate(curve.values):
        if value <= top:
            mark, radius = ("best", 6.5) if k == curve.best else ("dot", 3)
            place = f'cx="{xs[k]:.1f}" cy="{y(value):.1f}" r="{radius}"'
            parts.append(f'<circle class="{mark} {kind}" {place}>{_tip(curve.tips[k])}</circle>')
    return "".join(parts)


def _off_scale(px: float, py: float, number: int, tip: str) -> str:
    corners = f"{px:.1f},{py - 5:.1f} {px - 4:.1f},{py + 3:.1f} {px + 4:.1f},{py + 3:.1f}"
    kind = f"off s{number % COLOURS}"
    return f'<polygon class="{kind}" points="{corners}">{_tip(tip)}</polygon>'


def _pieces(there: Sequence[bool]) -> list[list[int]]:
    """Positions that follow each other without a gap.

    >>> _pieces([True, True, False, True])
    [[0, 1], [3]]
    """
    groups = groupby(range(len(there)), key=lambda k: there[k])
    return [list(group) for is_there, group in groups if is_there]


def histograms(
    groups: Sequence[tuple[str, Tensor, Tensor]], *, x_label: str, height: int = 260, bins: int = 60
) -> str:
    """Distributions of weighted values, one step curve per (name, values, weights).

    The axis reaches from the 1st to the 99th percentile, and says so. The outermost bars hold
    what lies beyond.
    """
    ends = [end for _, v, w in groups for end in _bulk(v, w)]
    low, high = _pad(min(ends), max(ends)) if ends else (0.0, 1.0)
    shares = [_shares(v, w, low, high, bins) for _, v, w in groups]
    highest = max((float(s.max()) for s in shares), default=1.0) * 1.05 or 1.0

    def draw(canvas: Canvas) -> str:
        x = Axis(low, high, canvas.left, canvas.right)
        y = Axis(0.0, 100 * highest, height - BOTTOM, TOP)
        parts = _frame(
            canvas, x, y, height, f"{x_label} · 1st to 99th percentile", "% of the parameters"
        )
        for i, ((name, _, _), share) in enumerate(zip(groups, shares, strict=True)):
            corners = _steps(share, x, y, low, high)
            parts.append(f'<polygon class="area s{i}" points="{corners}">{_tip(name)}</polygon>')
        return _svg(canvas, parts, height, f"distribution of {x_label}")

    return _draw_all(draw) + _legend([name for name, _, _ in groups], "area")


def distributions(rows: Sequence[tuple[str, Tensor]], *, x_label: str) -> str:
    """One row per (name, values): a strip with the quartiles and the median of the values.

    Strips reach from the 1st to the 99th percentile, and are darker between the quartiles.
    """
    quantiles = [
        [float(torch.quantile(v, q)) for q in (BULK[0], 0.25, 0.5, 0.75, BULK[1])] for _, v in rows
    ]
    low, high = _pad(
        min([0.0, *(q[0] for q in quantiles)]), max([0.0, *(q[-1] for q in quantiles)])
    )

    def draw(canvas: Canvas) -> str:
        row_height = 18 if canvas.names else 34
        height = TOP + BOTTOM + row_height * len(rows)
        x = Axis(low, high, max(canvas.names, RIGHT), canvas.right)
        parts = [_vertical(x, tick, height) for tick in x.ticks(canvas.ticks)]
        parts.append(_line("zero", x(0), TOP, x(0), height - BOTTOM))
        for i, ((name, v), at) in enumerate(zip(rows, quantiles, strict=True)):
            middle = TOP + row_height * (i + 0.5) + (0 if canvas.names else 7)
            parts.append(_row_name(canvas, name, middle))
            ends = f"from {float(v.min()):.3f} to {float(v.max()):.3f}"
            tip = f"{name}: {x_label} {ends}, median {at[2]:.3f}, {count_of(len(v), 'unit')}"
            parts += _strip(x, at, middle, tip)
        parts.append(_label(x, height, f"{x_label} · 1st to 99th percentile"))
        return _svg(canvas, parts, height, f"distribution of {x_label} by layer")

    return _draw_all(draw)


def _row_name(canvas: Canvas, name: str, middle: float) -> str:
    """In front of its row, or above it on a narrow canvas; long names lose their beginning."""
    most = 30 if canvas.names else 44
    shown = escape(name if len(name) <= most else "…" + name[1 - most :])
    if canvas.names:
        return f'<text class="name" x="{canvas.names - 8}" y="{middle + 4:.1f}">{shown}</text>'
    return f'<text class="name above" x="{RIGHT}" y="{middle - 10:.1f}">{shown}</text>'


def _strip(x: Axis, quantiles: Sequence[float], middle: float, tip: str) -> list[str]:
    low, q1, median, q3, high = quantiles
    parts = []
    for kind, start, stop, thick in (("range", low, high, 6), ("box", q1, q3, 10)):
        width = max(x(stop) - x(start), 1.0)
        place = (
            f'x="{x(start):.1f}" y="{middle - thick / 2:.1f}" width="{width:.1f}" height="{thick}"'
        )
        parts.append(f'<rect class="{kind}" {place}>{_tip(tip)}</rect>')
    mark = f'x1="{x(median):.1f}" x2="{x(median):.1f}" y1="{middle - 6:.1f}" y2="{middle + 6:.1f}"'
    return [*parts, f'<line class="median" {mark}/>']


def _shares(values: Tensor, weights: Tensor, low: float, high: float, bins: int) -> Tensor:
    """Share of the weight in every bin; what lies outside counts in the outermost bins."""
    at = ((values - low) / (high - low) * bins).long().clamp(0, bins - 1)
    counts = torch.zeros(bins, dtype=torch.float64).index_add_(0, at, weights)
    return counts / counts.sum().clamp(min=1e-300)


def _steps(share: Tensor, x: Axis, y: Axis, low: float, high: float) -> str:
    """Corners of a step curve, closed along the axis."""
    edges = [low + (high - low) * k / len(share) for k in range(len(share) + 1)]
    corners = [f"{x(edges[0]):.1f},{y(0):.1f}"]
    for k, value in enumerate((100 * share).tolist()):
        corners += [f"{x(edges[k]):.1f},{y(value):.1f}", f"{x(edges[k + 1]):.1f},{y(value):.1f}"]
    return " ".join([*corners, f"{x(edges[-1]):.1f},{y(0):.1f}"])


def _bulk(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """The 1st and the 99th percentile of weighted values.

    >>> values = torch.cat([torch.linspace(0, 1, 1000), torch.tensor([50.0])])
    >>> low, high = _bulk(values, torch.ones(1001))
    >>> low > 0, high < 1
    (True, True)
    """
    values, order = values.sort()
    shares = weights[order].cumsum(0)
    low, high = (int(torch.searchsorted(shares, q * shares[-1])) for q in BULK)
    return float(values[low]), float(values[min(high, len(values) - 1)])


def _pad(low: float, high: float) -> tuple[float, float]:
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _vertical(x: Axis, tick: float, height: int) -> str:
    line = _line("grid", x(tick), TOP, x(tick), height - BOTTOM)
    return line + f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 15}">{tick:g}</text>'


def _label(x: Axis, height: int, text: str) -> str:
    middle = (x.start + x.stop) / 2
    return f'<text class="label" x="{middle:.0f}" y="{height - 6}">{escape(text)}</text>'


def _frame(canvas: Canvas, x: Axis, y: Axis, height: int, x_label: str, y_label: str) -> list[str]:
    """Grid, ticks and labels; that of the vertical axis stands above it and needs no turning."""
    most = canvas.ticks + 3 * isinstance(x, LogAxis)
    parts = [_vertical(x, tick, height) for tick in x.ticks(most)]
    for tick in y.ticks(5):
        parts.append(_line("grid", canvas.left, y(tick), canvas.right, y(tick)))
        parts.append(
            f'<text class="tick y" x="{canvas.left - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>'
        )
    parts.append(_label(x, height, x_label))
    parts.append(f'<text class="above" x="4" y="{TOP - 14}">{escape(y_label)}</text>')
    return parts


def _draw_all(draw: Callable[[Canvas], str]) -> str:
    return "".join(draw(canvas) for canvas in CANVASES)


def _svg(canvas: Canvas, parts: Sequence[str], height: int, title: str) -> str:
    head = f'class="chart {canvas.kind}" viewBox="0 0 {canvas.width} {height}" role="img"'
    return f'<svg {head} aria-label="{escape(title, quote=True)}">{"".join(parts)}</svg>'


def _line(kind: str, x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _tip(text: str) -> str:
    """What is shown while the pointer rests there."""
    return f"<title>{escape(text)}</title>"


def _legend(names: Sequence[str], kind: str) -> str:
    """Names beside a piece of the line as it is drawn, dashes and all, or of the area."""
    pieces = {
        "line": '<line class="line s{}" x1="1" y1="6" x2="33" y2="6"/>',
        "area": '<rect class="area s{}" x="1" y="1" width="32" height="10"/>',
    }
    key = '<svg class="key" viewBox="0 0 34 12" aria-hidden="true">{}</svg>'
    items = (
        f"<span>{key.format(pieces[kind].format(i % COLOURS))}{escape(name)}</span>"
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'
