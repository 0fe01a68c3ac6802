"""A method over the learning rates, and two methods beside each other."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Literal

# share of the best figure by which another may be worse and still count as good as the best
CLOSE = 0.01

# Student's t: a mean of n paired differences is beyond the noise, with 95 % confidence, where it is
# this many standard errors away from zero; by n - 1.
T95 = (
    12.71,
    4.30,
    3.18,
    2.78,
    2.57,
    2.45,
    2.36,
    2.31,
    2.26,
    2.23,
    2.20,
    2.18,
    2.16,
    2.14,
    2.13,
    2.12,
    2.11,
    2.10,
    2.09,
)


@dataclass(frozen=True, kw_only=True)
class Curve:
    """What a method reached at every learning rate.

    Attributes:
        name: Of the method.
        how: The same in a word of code.
        rates: Ascending.
        figures: Per rate, one per seed: infinite where a run diverged, NaN where it raised.

    >>> curve = Curve(
    ...     name="as is",
    ...     how="",
    ...     rates=(0.1, 0.2, 0.4),
    ...     figures=((3.0, 5.0), (1.0, 3.0), (math.inf, 2.0)),
    ... )
    >>> curve.means
    (4.0, 2.0, inf)
    >>> curve.best_rate, curve.at_edge
    (0.2, None)
    """

    name: str
    how: str
    rates: tuple[float, ...]
    figures: tuple[tuple[float, ...], ...]

    @property
    def means(self) -> tuple[float, ...]:
        """Over the seeds; infinite where one diverged, NaN where one raised."""
        return tuple(statistics.fmean(seeds) for seeds in self.figures)

    @property
    def best(self) -> int | None:
        """Position of the rate with the least mean over the seeds; None if no rate has a finite
        one.
        """
        finite = [i for i, mean in enumerate(self.means) if math.isfinite(mean)]
        return min(finite, key=self.means.__getitem__, default=None)

    @property
    def best_rate(self) -> float:
        """The best rate; NaN if there is none."""
        return math.nan if self.best is None else self.rates[self.best]

    @property
    def best_figures(self) -> tuple[float, ...]:
        """At the best rate, one per seed; empty if there is none."""
        return () if self.best is None else self.figures[self.best]

    @property
    def mean(self) -> float:
        """Of the seeds at the best rate; infinite if there is none."""
        return math.inf if self.best is None else self.means[self.best]

    @property
    def deviation(self) -> float | None:
        """Standard deviation over the seeds at the best rate; None of a single seed."""
        return statistics.stdev(self.best_figures) if len(self.best_figures) > 1 else None

    @property
    def close(self) -> tuple[float, float] | None:
        """The least and the greatest of the rates around the best, without a gap, whose means are
        within 1 % of its.
        """
        if self.best is None:
            return None
        limit = self.mean + CLOSE * abs(self.mean)
        first = last = self.best
        while first > 0 and self.means[first - 1] <= limit:
            first -= 1
        while last + 1 < len(self.rates) and self.means[last + 1] <= limit:
            last += 1
        return self.rates[first], self.rates[last]

    @property
    def decades(self) -> float:
        """The width of ``close``: 0 if the neighbours of the best rate are worse by more than 1 %;
        NaN without a best rate.
        """
        return math.log10(self.close[1] / self.close[0]) if self.close else math.nan

    @property
    def at_edge(self) -> Literal["least", "greatest", "only"] | None:
        """Whether the best rate is the least or the greatest that was run, so that a better one may
        lie beyond.

        Rates at which a run raised count as not run: who knows what would have come out.
        """
        if self.best is None:
            return None
        ran = [i for i, mean in enumerate(self.means) if not math.isnan(mean)]
        if len(ran) == 1:
            return "only"
        return {ran[0]: "least", ran[-1]: "greatest"}.get(self.best)  # type: ignore[return-value]


@dataclass(frozen=True, kw_only=True)
class Difference:
    """How much lower a method comes than another, each at its own best rate.

    Attributes:
        paired: Seed by seed, the other's figure less the method's: positive where the method is
            better.
        relative: Their mean as a share of the other's figure; NaN if that is zero.
    """

    paired: tuple[float, ...]
    relative: float

    @property
    def mean(self) -> float:
        return statistics.fmean(self.paired)

    @property
    def error(self) -> float | None:
        """Standard error of the mean; None of a single seed."""
        count = len(self.paired)
        return statistics.stdev(self.paired) / math.sqrt(count) if count > 1 else None

    @property
    def is_clear(self) -> bool:
        """Whether zero lies outside the 95 % confidence interval (Student's t) of the mean.

        >>> (
        ...     Difference(paired=(1.0, 1.1, 0.9), relative=0.1).is_clear,
        ...     Difference(paired=(1.0, 0.1, -0.4), relative=0.1).is_clear,
        ... )
        (True, False)
        """
        if self.error is None:
            return False
        freedom = len(self.paired) - 1
        quantile = T95[freedom - 1] if freedom <= len(T95) else 1.96 + 2.6 / freedom
        return abs(self.mean) > quantile * self.error


def difference(method: Curve, other: Curve) -> Difference | None:
    """Of two methods at their best rates; None if one of them has none."""
    if method.best is None or other.best is None:
        return None
    paired = tuple(
        theirs - ours for ours, theirs in zip(method.best_figures, other.best_figures, strict=True)
    )
    relative = statistics.fmean(paired) / abs(other.mean) if other.mean else math.nan
    return Difference(paired=paired, relative=relative)
