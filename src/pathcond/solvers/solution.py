"""What every solver returns."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Log-scales, and how far they were brought.

    Attributes:
        log_scales: log λ per unit, (num_units,) float64.
        objective_before, objective_after: F at scale 1 and at ``log_scales``.
        gradient_norm: Euclidean norm of ∇F there, divided by the sum of the weights; of a bounded
            problem, of its projection.
        iterations: Sweeps or Newton steps.
        converged: Whether the solver's own tolerance was met.
        message: Why it stopped and, if it did not converge, what to do.
    """

    log_scales: Tensor
    objective_before: float
    objective_after: float
    gradient_norm: float
    iterations: int
    converged: bool
    message: str

    @classmethod
    def nothing(cls, num_units: int, reason: str) -> Solution:
        """Every unit at scale 1, because there is nothing to solve."""
        return cls(
            log_scales=torch.zeros(num_units, dtype=torch.float64),
            objective_before=0.0,
            objective_after=0.0,
            gradient_norm=0.0,
            iterations=0,
            converged=True,
            message=reason,
        )

    def without_rounding(self, precision: float) -> Solution:
        """Scale 1 for every unit where no scale reaches beyond the rounding of the weights, so that
        weights which are at the optimum stay bit for bit.

        Args:
            precision: Relative distance between neighbouring numbers.
        """
        greatest = float(self.log_scales.abs().max()) if self.log_scales.numel() else 0.0
        if not 0 < greatest <= precision:
            return self
        return replace(
            self,
            log_scales=torch.zeros_like(self.log_scales),
            objective_after=self.objective_before,
            message="the weights are at the optimum, up to their rounding",
        )
