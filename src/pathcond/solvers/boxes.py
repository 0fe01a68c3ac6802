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
        lower, upper = self.epsilon_shares.box(share)
        # each process has statistics of its own
        lower = self.ranks.maximum(lower)
        upper = -self.ranks.maximum(-upper)
        return torch.maximum(lower, self.around_balance[0]), torch.minimum(
            upper, self.around_balance[1]
        )

    def is_reached(self, share: float) -> bool:
        """Whether some scale is at the bound that ε sets it for this share."""
        return bool(self.ranks.maximum(torch.tensor(float(self.epsilon_shares.is_reached(share)))))
