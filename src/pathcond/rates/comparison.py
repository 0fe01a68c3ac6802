"""RateComparison: the record of one comparison."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .curves import Curve, difference
from .runs import Run


@dataclass(frozen=True, kw_only=True)
class RateComparison:
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

    label: str
    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    curves: tuple[Curve, ...] = field(repr=False)
    baseline: str
    runs: tuple[Run, ...] = field(repr=False)
    notes: tuple[str, ...] = field(default=(), repr=False)

    def __getitem__(self, name: str) -> Curve:
        """The curve of a method.

        Raises:
            KeyError: There is no method of that name.
        """
        found = {curve.name: curve for curve in self.curves}
        if name not in found:
            raise KeyError(f"there is no method {name!r}; there are {', '.join(map(repr, found))}")
        return found[name]

    @property
    def failures(self) -> dict[str, tuple[Run, ...]]:
        """Runs that raised, by their error."""
        errors = dict.fromkeys(run.error for run in self.runs if run.error is not None)
        return {error: tuple(run for run in self.runs if run.error == error) for error in errors}

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON: what is infinite or missing is None."""
        return {
            "label": self.label,
            "rates": list(self.rates),
            "seeds": list(self.seeds),
            "baseline": self.baseline,
            "methods": [self._summary(curve) for curve in self.curves],
            "runs": [_plain(run) for run in self.runs],
            "notes": list(self.notes),
        }

    def _summary(self, curve: Curve) -> dict[str, Any]:
        against = difference(curve, self[self.baseline]) if curve.name != self.baseline else None
        return {
            "name": curve.name,
            "how": curve.how,
            "best_rate": _finite(curve.best_rate),
            "mean": _finite(curve.mean),
            "deviation": curve.deviation,
            "relative_gain": _finite(against.relative) if against else None,
            "paired_difference": against.mean if against else None,
            "standard_error": against.error if against else None,
            "beyond_noise": against.is_clear if against else None,
            "decades_within_1_percent": _finite(curve.decades),
            "at_edge": curve.at_edge,
            "means": [_finite(mean) for mean in curve.means],
        }

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
        from .words import comparison_table

        return comparison_table(self)


def _plain(run: Run) -> dict[str, Any]:
    outcome = "raised" if run.error else "finished" if math.isfinite(run.figure) else "diverged"
    return {
        "method": run.method,
        "rate": run.rate,
        "seed": run.seed,
        "outcome": outcome,
        "figure": _finite(run.figure),
        "error": run.error,
        "seconds": run.seconds,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
