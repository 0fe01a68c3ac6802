"""Charts as inline SVG: they scale with the page, follow its colours in light and dark, and need
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import groupby

import torch
from torch import Tensor

WIDTH, LEFT, RIGHT, TOP, BOTTOM = 720, 56, 16, 12, 40
COLOURS = 6  # of the page's style


@dataclass(frozen=True)
class Axis:
    """A linear map from values to positions.

    Attributes:
        low, high: Values at its two ends.
        start, stop: Their positions.
    """

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (value - self.low) / (self.high - self.low) * (self.stop - self.start)

    def ticks(self, most: int = 7) -> list[float]:
        """Round values inside, about evenly spread."""
        raw = (self.high - self.low) / most
        magnitude = 10 ** math.floor(math.log10(raw))
        step = next(m * magnitude for m in (1, 2, 5, 10) if m * magnitude >= raw)
        return [
            i * step
            for i in range(
                math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9) + 1
            )
        ]


@dataclass(frozen=True)
class LogAxis:
    """A logarithmic map from positive values to positions.

    Attributes:
        low, high: Values at its two ends.
        start, stop: Their positions.
    """

    low: float
    high: float
    start: float
    stop: float

    def __call__(self, value: float) -> float:
        return self.start + (math.log(value) - math.log(self.low)) / math.log(
            self.high / self.low
        ) * (self.stop - self.start)

    def ticks(self, most: int = 10) -> list[float]:
        """Round values inside: 1, 2 and 5 of every decade, powers of ten if those are too many, a
            linear axis' if too few.

        >>> LogAxis(0.004, 3, 0, 1).ticks(), LogAxis(0.36, 0.45, 0, 1).ticks(5)
        ([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0], [0.36, 0.38, 0.4, 0.42, 0.44])
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for leading in ((1, 2, 5), (1,)):
            found = [float(f"{m}e{power}") for power in powers for m in leading]
            inside = [value for value in found if self.low <= value <= self.high]
            if 3 <= len(inside) <= most:
                return inside
        return (
            [float(f"{tick:.12g}") for tick in Axis(self.low, self.high, 0, 1).ticks(most)]
            if len(inside) < 3
            else inside
        )


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
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    steps = max((len(s.values) for s in series), default=1)
    x = Axis(first, first + max(steps - 1, 1), LEFT, WIDTH - RIGHT)
    y = Axis(*_padded(low, high), height - BOTTOM, TOP)
    parts = _frame(x, y, height, x_label, y_label)
    for i, s in enumerate(series):
        points = " ".join(
            f"{x(first + k):.1f},{y(v):.1f}" for k, v in enumerate(s.values) if math.isfinite(v)
        )
        parts.append(
            f'<polyline class="line s{i}" '
            f'points="{points}"><title>{escape(s.name)}</title></polyline>'
        )
    return _svg(parts, height, f"{y_label} over {x_label}") + _legend([s.name for s in series])


def bands(
    curves: Sequence[Band], at: Sequence[float], *, x_label: str, y_label: str, height: int = 380
) -> str:
    """Curves over positive positions on a logarithmic axis, with their bands; what is off the scale
    stands at the top edge.
    """
    x = LogAxis(at[0] / 1.15, at[-1] * 1.15, LEFT, WIDTH - RIGHT)
    edge = TOP + 6
    y = _height_axis(curves, height - BOTTOM, edge + 14)
    top = y.high
    parts = _frame(x, y, height, x_label, y_label)
    if any(value > top for curve in curves for value in curve.values):
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{edge + 4}">∞</text>')
    for i, curve in enumerate(curves):
        parts.append(
            _band(
                curve,
                i,
                [x(value) for value in at],
                lambda value: y(value) if value <= top else edge,
                top,
            )
        )
    for i, curve in enumerate(curves):
        shift = 9 * (i - (len(curves) - 1) / 2)
        parts += [
            _off_scale(x(at[k]) + shift, edge, i, curve.tips[k])
            for k, value in enumerate(curve.values)
            if value > top
        ]
    return _svg(parts, height, f"{y_label} over {x_label}") + _legend(
        [curve.name for curve in curves]
    )


def _height_axis(curves: Sequence[Band], start: float, stop: float) -> Axis | LogAxis:
    """Logarithmic if all values are positive, then up to ten times the worst of the best: what blew
    up would flatten the rest.
    """
    finite = [
        v for curve in curves for v in (*curve.values, *curve.low, *curve.high) if math.isfinite(v)
    ]
    if not finite or min(finite) <= 0:
        return Axis(*_padded(min(finite, default=0.0), max(finite, default=1.0)), start, stop)
    best = [min((v for v in curve.values if math.isfinite(v)), default=0.0) for curve in curves]
    low, high = min(finite), max(v for v in finite if v <= 10 * max(*best, min(finite)))
    margin = max((high / low) ** 0.05, 1.01)
    return LogAxis(low / margin, high * margin, start, stop)


def _band(
    curve: Band, number: int, xs: Sequence[float], y: Callable[[float], float], top: float
) -> str:
    """The band where all of it is on the scale, the line, a dot at every value on the scale, a ring
    around the best.
    """
    kind, parts = f"s{number % COLOURS}", []
    for piece in _pieces([math.isfinite(high) and high <= top for high in curve.high]):
        outline = [(xs[k], curve.high[k]) for k in piece] + [
            (xs[k], curve.low[k]) for k in reversed(piece)
        ]
        points = " ".join(f"{px:.1f},{y(value):.1f}" for px, value in outline)
        parts.append(f'<polygon class="band {kind}" points="{points}"/>')
    for piece in _pieces([not math.isnan(value) for value in curve.values]):
        points = " ".join(f"{xs[k]:.1f},{y(curve.values[k]):.1f}" for k in piece)
        parts.append(
            f'<polyline class="line {kind}" '
            f'points="{points}"><title>{escape(curve.name)}</title></polyline>'
        )
    for k, value in enumerate(curve.values):
        if value <= top:
            mark, radius = ("best", 6.5) if k == curve.best else ("dot", 3)
            place = f'cx="{xs[k]:.1f}" cy="{y(value):.1f}" r="{radius}"'
            parts.append(
                f'<circle class="{mark} {kind}" '
                f"{place}><title>{escape(curve.tips[k])}</title></circle>"
            )
    return "".join(parts)


def _off_scale(px: float, py: float, number: int, tip: str) -> str:
    corners = f"{px:.1f},{py - 5:.1f} {px - 4:.1f},{py + 3:.1f} {px + 4:.1f},{py + 3:.1f}"
    return (
        f'<polygon class="off s{number % COLOURS}" '
        f'points="{corners}"><title>{escape(tip)}</title></polygon>'
    )


def _pieces(there: Sequence[bool]) -> list[list[int]]:
    """Positions that follow each other without a gap.

    >>> _pieces([True, True, False, True])
    [[0, 1], [3]]
    """
    groups = groupby(range(len(there)), key=lambda k: there[k])
    return [list(group) for is_there, group in groups if is_there]


def histograms(
    groups: Sequence[tuple[str, Tensor, Tensor]], *, x_label: str, height: int = 260, bins: int = 80
) -> str:
    """Distributions of weighted values, one step curve per (name, values, weights)."""
    ends = [end for _, v, w in groups for end in _bulk(v, w)]
    low, high = _padded(min(ends), max(ends)) if ends else (0.0, 1.0)
    shares = []
    for _, v, w in groups:
        at = ((v - low) / (high - low) * bins).long().clamp(0, bins - 1)
        counts = torch.zeros(bins, dtype=torch.float64).index_add_(0, at, w)
        shares.append(counts / counts.sum().clamp(min=1e-300))
    x = Axis(low, high, LEFT, WIDTH - RIGHT)
    y = Axis(
        0.0, max((float(s.max()) for s in shares), default=1.0) * 1.05 or 1.0, height - BOTTOM, TOP
    )
    parts = _frame(x, y, height, x_label, "share of the parameters")
    for i, ((name, _, _), share) in enumerate(zip(groups, shares, strict=True)):
        edges = [low + (high - low) * k / bins for k in range(bins + 1)]
        corners = [f"{x(edges[0]):.1f},{y(0):.1f}"]
        for k, value in enumerate(share.tolist()):
            corners += [
                f"{x(edges[k]):.1f},{y(value):.1f}",
                f"{x(edges[k + 1]):.1f},{y(value):.1f}",
            ]
        corners.append(f"{x(edges[-1]):.1f},{y(0):.1f}")
        parts.append(
            f'<polygon class="area s{i}" '
            f'points="{" ".join(corners)}"><title>{escape(name)}</title></polygon>'
        )
    return _svg(parts, height, f"distribution of {x_label}") + _legend(
        [name for name, _, _ in groups]
    )


def distributions(rows: Sequence[tuple[str, Tensor]], *, x_label: str) -> str:
    """One row per (name, values): a strip from the least to the greatest, darker between the
    quartiles, a mark at the median.
    """
    name_width, row_height = 190, 18
    height = TOP + BOTTOM + row_height * len(rows)
    values = torch.cat([torch.zeros(1, dtype=torch.float64), *(v for _, v in rows)])
    x = Axis(*_padded(float(values.min()), float(values.max())), LEFT + name_width, WIDTH - RIGHT)
    parts = [_vertical(x, tick, height) for tick in x.ticks()]
    parts.append(
        f'<line class="zero" x1="{x(0):.1f}" x2="{x(0):.1f}" y1="{TOP}" y2="{height - BOTTOM}"/>'
    )
    for i, (name, v) in enumerate(rows):
        middle = TOP + row_height * (i + 0.5)
        low, q1, median, q3, high = (
            float(torch.quantile(v, q)) for q in (0.0, 0.25, 0.5, 0.75, 1.0)
        )
        shown = name if len(name) <= 30 else "…" + name[-29:]
        parts.append(
            f'<text class="name" x="{LEFT + name_width - 8}" '
            f'y="{middle + 4:.1f}">{escape(shown)}</text>'
        )
        tip = f"{name}: log λ from {low:.3f} to {high:.3f}, median {median:.3f}, {len(v)} units"
        strips = (("range", low, high, 6), ("box", q1, q3, 10))
        for kind, start, stop, thick in strips:
            width = max(x(stop) - x(start), 1.0)
            place = (
                f'x="{x(start):.1f}" y="{middle - thick / 2:.1f}" width="{width:.1f}" '
                f'height="{thick}"'
            )
            parts.append(f'<rect class="{kind}" {place}><title>{escape(tip)}</title></rect>')
        parts.append(
            f'<line class="median" x1="{x(median):.1f}" x2="{x(median):.1f}" '
            f'y1="{middle - 6:.1f}" y2="{middle + 6:.1f}"/>'
        )
    parts.append(
        f'<text class="label" x="{(x.start + x.stop) / 2:.0f}" '
        f'y="{height - 6}">{escape(x_label)}</text>'
    )
    return _svg(parts, height, f"distribution of {x_label} by layer")


def _bulk(values: Tensor, weights: Tensor) -> tuple[float, float]:
    """All but the outer thousandths of weighted values; those are drawn in the outermost bins."""
    values, order = values.sort()
    shares = weights[order].cumsum(0)
    low, high = (int(torch.searchsorted(shares, q * shares[-1])) for q in (0.001, 0.999))
    return float(values[low]), float(values[min(high, len(values) - 1)])


def _padded(low: float, high: float) -> tuple[float, float]:
    margin = 0.04 * (high - low) or 0.5
    return low - margin, high + margin


def _vertical(x: Axis | LogAxis, tick: float, height: int) -> str:
    line = (
        f'<line class="grid" x1="{x(tick):.1f}" x2="{x(tick):.1f}" y1="{TOP}" '
        f'y2="{height - BOTTOM}"/>'
    )
    return line + f'<text class="tick" x="{x(tick):.1f}" y="{height - BOTTOM + 15}">{tick:g}</text>'


def _frame(
    x: Axis | LogAxis, y: Axis | LogAxis, height: int, x_label: str, y_label: str
) -> list[str]:
    parts = [_vertical(x, tick, height) for tick in x.ticks()]
    for tick in y.ticks(5):
        parts.append(
            f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(tick):.1f}" '
            f'y2="{y(tick):.1f}"/>'
        )
        parts.append(f'<text class="tick y" x="{LEFT - 6}" y="{y(tick) + 4:.1f}">{tick:g}</text>')
    middle = (TOP + height - BOTTOM) / 2
    parts.append(
        f'<text class="label" x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" '
        f'y="{height - 6}">{escape(x_label)}</text>'
    )
    parts.append(
        f'<text class="label" transform="translate(14 {middle:.0f}) '
        f'rotate(-90)">{escape(y_label)}</text>'
    )
    return parts


def _svg(parts: Sequence[str], height: int, title: str) -> str:
    label = escape(title, quote=True)
    return (
        f'<div class="scroll"><svg viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{label}">{"".join(parts)}</svg></div>'
    )


def _legend(names: Sequence[str]) -> str:
    items = "".join(
        f'<span><i class="key s{i % COLOURS}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{items}</p>'
