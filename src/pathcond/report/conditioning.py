"""What one conditioning found and did, as data."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from ..solvers import Solution
from ..symmetry.units import Pinned, UnitGroup
from .diagonal import DiagonalSample

# {kind of optimizer: q}: to first order, one of its steps lowers the loss by the learning rate
# times Σ_i |∂L/∂θ_i|^q, up to a factor that no rescaling changes. Adam divides a gradient by its
# own size, as taking its sign does.
OPTIMIZERS = {"SGD": 2, "momentum": 2, "Adam": 1, "sign": 1}


@dataclass(frozen=True, kw_only=True)
class Conditioning:
    """All that a ``Report`` shows, which says what each attribute is."""

    model_name: str
    normalization: str
    approximate: bool
    solver: str
    criterion: str
    solution: Solution
    groups: tuple[UnitGroup, ...] = field(repr=False)
    pinned: tuple[Pinned, ...] = field(repr=False)
    diagonal: tuple[DiagonalSample, ...] = field(repr=False)
    output_change_eval: float | None
    output_change_train: float | None
    rounded: bool
    seconds: dict[str, float]
    at_bound: dict[str, int] = field(default_factory=dict)

    @property
    def log_scales(self) -> Tensor:
        """log λ per unit, (num_units,) float64, as the solver found them."""
        return self.solution.log_scales

    @property
    def objective_before(self) -> float:
        """The solver's criterion before."""
        return self.solution.objective_before

    @property
    def objective_after(self) -> float:
        """The solver's criterion after."""
        return self.solution.objective_after

    @property
    def num_units(self) -> int:
        return len(self.log_scales)

    @property
    def changed(self) -> bool:
        """Whether any unit has another scale than 1; otherwise the model is as it was."""
        return bool(self.log_scales.any())

    @property
    def num_parameters(self) -> int:
        """Trainable parameters."""
        return sum(sample.count for sample in self.diagonal)

    @property
    def zero_share(self) -> float:
        """Share of the trainable parameters with g = 0, which do not count in the criterion; from
        the sample.
        """
        return sum(sample.zeros * sample.count for sample in self.diagonal) / max(
            self.num_parameters, 1
        )

    def spread(self) -> tuple[float, float]:
        """Decades between the 5th and 95th percentile of diag(G), before and after."""
        counts = [sample.count / max(len(sample.before), 1) for sample in self.diagonal]
        return _decades([s.before for s in self.diagonal], counts), _decades(
            [s.after for s in self.diagonal], counts
        )

    @property
    def pace(self) -> float:
        """The sum of diag(G) after over that before, from the sample; 1 without one.

        diag(G) sums up to the trace of the path kernel: to first order, plain SGD at the same
        learning rate moves the paths this many times as fast as before. Scales in front of
        normalization layers can change it much.
        """
        return self.paces["SGD"]

    @property
    def paces(self) -> dict[str, float]:
        """How many times as fast as before an optimizer learns at the same learning rate, to first
        order, by its kind.

        A step of plain SGD lowers the loss by the learning rate times Σ_i (∂L/∂θ_i)², with momentum
        by 1/(1 − β) times that. Steps of Adam and of sign-like optimizers (Lion, Signum) have the
        same length whatever the gradient, and lower it in proportion to Σ_i |∂L/∂θ_i|. If ∂L/∂Φ is
        normal and points anywhere, ∂L/∂θ_i has the variance g_i: the sums become Σ g_i and Σ √g_i,
        and the pace is that after over that before. From the sample of diag(G); 1 without one.
        """
        return {kind: 10.0 ** self._log10_growth(q / 2) for kind, q in OPTIMIZERS.items()}

    @property
    def rate_factors(self) -> dict[str, float]:
        """What to multiply the learning rate by to keep the pace, by kind of optimizer."""
        return {kind: 1 / pace for kind, pace in self.paces.items()}

    def _log10_growth(self, power: float) -> float:
        before, after = (_log10_sum(self.diagonal, when, power) for when in ("before", "after"))
        return after - before

    def layers(self) -> list[dict[str, Any]]:
        """One row per group of units: name, number of units, least, median and greatest log λ."""
        rows = []
        for group in self.groups:
            t = self.log_scales[list(group.units)].cpu()
            rows.append(
                {
                    "name": group.name or "(model)",
                    "units": len(t),
                    "least": float(t.min()),
                    "median": float(t.median()),
                    "greatest": float(t.max()),
                }
            )
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        before, after = self.spread()
        solution = {
            key: value for key, value in asdict(self.solution).items() if key != "log_scales"
        }
        return {
            "model": self.model_name,
            "normalization": self.normalization,
            "approximate": self.approximate,
            "solver": self.solver,
            "criterion": self.criterion,
            "num_units": self.num_units,
            "num_parameters": self.num_parameters,
            "zero_share": self.zero_share,
            **solution,
            "decades_of_diagonal_before": before,
            "decades_of_diagonal_after": after,
            "pace": self.pace,
            "paces": self.paces,
            "rate_factors": self.rate_factors,
            "output_change_eval": self.output_change_eval,
            "output_change_train": self.output_change_train,
            "rounded_to_powers_of_two": self.rounded,
            "units_at_bound": dict(self.at_bound),
            "seconds": dict(self.seconds),
            "layers": self.layers(),
            "pinned": [asdict(pin) for pin in self.pinned],
            "log_scales": self.log_scales.tolist(),
        }


def _log10_sum(
    samples: tuple[DiagonalSample, ...], when: Literal["before", "after"], power: float
) -> float:
    """log10 of the sum of diag(G) to a power; the mean of a sample stands for its parameter."""
    logs = [
        math.log10(sample.count * (1 - sample.zeros) / len(values)) + power * values
        for sample in samples
        if len(values := getattr(sample, when))
    ]
    return float(torch.logsumexp(torch.cat(logs) * math.log(10), 0)) / math.log(10) if logs else 0.0


def _decades(samples: list[Tensor], counts: list[float]) -> float:
    """Between the 5th and 95th percentile of all samples, where those of the i-th tensor stand for
    counts[i] values each.
    """
    if not any(len(sample) for sample in samples):
        return 0.0
    values, order = torch.cat(samples).sort()
    shares = torch.cat(
        [torch.full_like(sample, count) for sample, count in zip(samples, counts, strict=True)]
    )[order].cumsum(0)
    low, high = (
        values[int(torch.searchsorted(shares, q * shares[-1]).clamp(max=len(values) - 1))]
        for q in (0.05, 0.95)
    )
    return float(high - low)
