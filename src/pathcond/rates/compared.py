"""What one comparison of learning rates found, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from .curves import Curve, difference
from .runs import Run


@dataclass(frozen=True, kw_only=True)
class ComparedRates:
    """All that a ``RateComparison`` shows, which says what each attribute is."""

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
