"""RateComparison: the record of one comparison."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .compared import ComparedRates
from .words import comparison_table


@dataclass(frozen=True, kw_only=True)
class RateComparison(ComparedRates):
    """What every method reached at every learning rate.

    Attributes:
        label: What the figure is, such as "test loss".
        rates: Ascending.
        seeds: Of the initial weights.
        curves: One per method, in the order they were given.
        baseline: Name of the method that the others are measured by.
        runs: All of them, in the order in which they were made.
        notes: What else there is to say, in sentences.
    """

    def to_html(self, path: str | os.PathLike[str]) -> Path:
        """Write one self-contained page: the figure over the learning rate, a curve per method, and
        all numbers as tables.
        """
        from .page import comparison_page

        path = Path(path)
        path.write_text(comparison_page(self), encoding="utf-8")
        return path

    def _repr_html_(self) -> str | None:
        """The page inside a notebook; None, which shows the text, without the "report" extra."""
        from .page import comparison_frame

        try:
            return comparison_frame(self)
        except ImportError:
            return None

    def __str__(self) -> str:
        return comparison_table(self)
