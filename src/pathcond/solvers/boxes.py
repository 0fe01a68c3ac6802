"""The boxes in which ``condition_`` looks for an optimum: where ε stays harmless, near balance, and
within the bound that the user gave.
"""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch import Tensor, nn

from ..criteria.criterion import Criterion
from ..distributed.ranks import Ranks
from ..symmetry.bounds import EpsilonShares
from ..symmetry.symmetry import Symmetry
from .balance import balance_bounds
from .solver import Solver

SMOOTH_BOUND = 2.5  # |log λ| of smooth activations, the paper's |u| ≤ 5 (sec. gelu)
AT_BOUND = 1e-9  # log λ that is nearer to a bound than this is at it


class Boxes:
    """The boxes in which ε stays harmless, weights stay near balance and |log λ| below the bound;
    measured when first asked for.
    """

    def __init__(
        self,
        symmetry: Symmetry,
        model: nn.Module,
        ranks: Ranks,
        solver: Solver,
        criterion: Criterion,
        max_log_scale: float | None,
    ) -> None:
        if max_log_scale is not None and not max_log_scale > 0:
            raise ValueError(
                f"max_log_scale bounds |log λ| and must be positive, not {max_log_scale}"
            )
        # Who asks for the paper's method gets it; ENorm and some criteria are balances themselves.
        self.balanced = (
            max_log_scale is None
            and solver.needs_energy
            and not criterion.is_balance
            and solver.max_log_scale is None
            and symmetry.normalization != "paper"
            and not symmetry.approximate
        )
        if max_log_scale is None:
            max_log_scale = SMOOTH_BOUND if symmetry.approximate else math.inf
        self.symmetry = symmetry
        self.model = model
        self.ranks = ranks
        self.bound = max_log_scale
        self._of_epsilon: dict[float, tuple[Tensor, Tensor]] = {}

    @cached_property
    def epsilon_shares(self) -> EpsilonShares:
        return self.symmetry.epsilon_shares(self.model)

    @cached_property
    def around_balance(self) -> tuple[Tensor, Tensor]:
        if self.balanced:
            return balance_bounds(self.symmetry, self.model)
        whole = torch.full((self.symmetry.num_units,), self.bound, dtype=torch.float64)
        return -whole, whole

    def at(self, share: float) -> tuple[Tensor, Tensor]:
        """Least and greatest log λ of every unit, (num_units,) each."""
        lower, upper = self._set_by_epsilon(share)
        return torch.maximum(lower, self.around_balance[0]), torch.minimum(
            upper, self.around_balance[1]
        )

    def _set_by_epsilon(self, share: float) -> tuple[Tensor, Tensor]:
        if share not in self._of_epsilon:
            lower, upper = self.epsilon_shares.box(share)
            # each process has statistics of its own
            self._of_epsilon[share] = self.ranks.maximum(lower), -self.ranks.maximum(-upper)
        return self._of_epsilon[share]

    def count_at_bound(self, share: float, log_scales: Tensor) -> dict[str, int]:
        """How many units are at a bound, {what sets it: units}.

        Args:
            share: Of ε, for which they were found.
            log_scales: log λ of every unit, (num_units,).
        """
        by_epsilon = _is_at(self._set_by_epsilon(share), log_scales.cpu())
        otherwise = _is_at(self.around_balance, log_scales.cpu()) & ~by_epsilon
        rule = "the bound around balance" if self.balanced else "max_log_scale"
        found = {"the ε of a norm": int(by_epsilon.sum()), rule: int(otherwise.sum())}
        return {name: units for name, units in found.items() if units}

    def is_reached(self, share: float) -> bool:
        """Whether some scale is at the bound that ε sets it for this share."""
        return bool(self.ranks.maximum(torch.tensor(float(self.epsilon_shares.is_reached(share)))))


def _is_at(bounds: tuple[Tensor, Tensor], log_scales: Tensor) -> Tensor:
    """Which units are at one of two bounds, (num_units,) bool."""
    lower, upper = (bound.cpu() for bound in bounds)
    return ((log_scales - lower).abs() <= AT_BOUND) | ((upper - log_scales).abs() <= AT_BOUND)
