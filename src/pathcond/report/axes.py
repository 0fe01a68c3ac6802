"""What charts are drawn on: canvases for wide windows and for phones, and axes."""

from __future__ import annotations

import math
from dataclasses import dataclass

TOP = 28
RIGHT = 16
BOTTOM = 40


@dataclass(frozen=True, kw_only=True)
class Canvas:
    """What a chart is drawn on.

    Attributes:
        kind: Class of the drawing, by which the page's style shows it or hides it.
        width: In pixels, as its letters are.
        left: Space for the labels of the vertical axis.
        ticks: About how many labels fit along the horizontal axis.
        names: Space for the names of rows; 0 if they stand above their rows.
    """

    kind: str
    width: int
    left: int
    ticks: int
    names: int

    @property
    def right(self) -> int:
        """Where the horizontal axis ends."""
        return self.width - RIGHT


CANVASES = (
    Canvas(kind="wide", width=720, left=46, ticks=7, names=200),
    Canvas(kind="narrow", width=352, left=40, ticks=5, names=0),
)


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
class LogAxis(Axis):
    """A logarithmic map from positive values to positions."""

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
