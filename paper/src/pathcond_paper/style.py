"""How all figures look: one set of colours that colour-blind readers tell apart, a dash for each,
bands for the spread over seeds.

>>> sorted(STYLES)[:2]
['baseline', 'default']
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

import torch

from pathcond.rows import Row

from .figure import Figure
from .training.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

# Okabe and Ito's colours, apart in hue and in lightness.
BLACK, ORANGE, SKY, GREEN, BLUE, VERMILION, PURPLE = (
    "#000000",
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
    "#CC79A7",
)
STACKED = ContextVar("STACKED", default=False)  # whether panels lie below each other
BROWN = "#7A4F2B"  # of ours: their yellow is hard to see on white
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY, BLACK)  # where lines are no methods
LEGEND_COLUMN = 2.4  # inches
STYLES: dict[str, dict[str, Any]] = {
    "baseline": {"color": BLACK, "linestyle": "--", "marker": "o"},
    "enorm": {"color": ORANGE, "linestyle": ":", "marker": "s"},
    "enorm-epoch": {"color": SKY, "linestyle": ":", "marker": "D"},
    "paper": {"color": VERMILION, "linestyle": "-.", "marker": "^"},
    "paper-exact": {"color": PURPLE, "linestyle": "-.", "marker": "v"},
    "exact": {"color": BLUE, "linestyle": "-", "marker": "P"},
    "default": {"color": GREEN, "linestyle": "-", "marker": "d"},
    "teleport": {"color": BROWN, "linestyle": "-", "marker": "X"},
}
RC: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.dpi": 150,
    "svg.fonttype": "none",
    "svg.hashsalt": "pathcond",
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
}


def drawings(figure: Figure, rows: Sequence[Row], *, stacked: bool = False) -> dict[str, Drawing]:
    """A figure's drawings in the common style, by file name without suffix; ``stacked`` for a
    narrow screen, with all panels below each other.
    """
    before = STACKED.set(stacked)
    try:
        with in_style():
            return figure.plot(rows)
    finally:
        STACKED.reset(before)


def save(
    drawing: Drawing, file: Path | IO[bytes], kind: Literal["png", "svg"], **options: Any
) -> None:
    """Write a drawing, byte by byte the same for the same rows; ``options`` are further settings of
    matplotlib.
    """
    with in_style(**options):  # the salt of an SVG's identifiers counts when it is written
        drawing.savefig(file, format=kind, metadata={"Date": None} if kind == "svg" else {})


@contextmanager
def in_style(**options: Any) -> Iterator[None]:
    """Matplotlib with the common settings."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ImportError(
            'Figures need the "experiments" extra: pip install "pathcond-paper[experiments]"'
        ) from error
    with rc_context(RC | options):
        yield


def panels(
    rows: int, columns: int, *, width: float = 3.4, height: float = 2.7
) -> tuple[Drawing, list[Axes]]:
    """A drawing of rows × columns panels, and the panels row by row."""
    from matplotlib.figure import Figure

    if STACKED.get():
        rows, columns = rows * columns, 1
    drawing = Figure(figsize=(width * columns, height * rows), layout="constrained")
    return drawing, list(drawing.subplots(rows, columns, squeeze=False).flat)


def band(
    axes: Axes, x: Sequence[float], runs: Sequence[Sequence[float]], *, label: str, **style: Any
) -> None:
    """The mean over runs as a line, and one standard deviation to each side, as far as runs reach,
    as a band.

    Args:
        axes: Panel to draw on.
        x: (n,) positions.
        runs: (repetitions, n) values; NaN and infinity leave gaps. None of them: nothing is drawn.
        label: For the legend.
        style: Of the line: color, linestyle, marker.
    """
    if not runs:
        return
    values = torch.tensor([list(run) for run in runs], dtype=torch.float64)
    mean = values.mean(0)
    spread = values.std(0, correction=0)
    low = torch.maximum(mean - spread, values.amin(0))
    high = torch.minimum(mean + spread, values.amax(0))
    axes.plot(x, mean, label=label, **style)
    if mean.isfinite().any():  # a band of gaps alone cannot be drawn on a logarithmic axis
        axes.fill_between(list(x), low, high, color=style.get("color"), alpha=0.18, linewidth=0)


def legend_below(drawing: Drawing, panels: Sequence[Axes]) -> None:
    """One legend for all panels, of every line that one of them has."""
    labels = {
        label: handle
        for axes in panels
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    if labels:
        columns = max(1, int(drawing.get_figwidth() // LEGEND_COLUMN))
        drawing.legend(
            [*labels.values()],
            [*labels],
            loc="outside lower center",
            ncols=min(columns, 4),
            fontsize=8,
        )


def method_style(method: str, *, markers: bool = False) -> dict[str, Any]:
    """Colour, dash, label and, for few points, marker of a method."""
    style = {"label": METHODS[method].title} | STYLES[method]
    if not markers:
        style.pop("marker")
    return style
