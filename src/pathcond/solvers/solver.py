"""What every solver is: settings, the problem it solves, and how it solves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ..criteria.criterion import PATH_KERNEL, Criterion, check_criterion
from ..criteria.problem import Problem
from ..symmetry.symmetry import Symmetry
from .solution import Solution

# What becomes of the sum of the energies: free, or kept.
Pace = Literal["keep"] | None


@dataclass(frozen=True, kw_only=True)
class Solver(ABC):
    """Settings of a solver.

    Attributes:
        max_log_scale: Bound on |log λ|; the paper's |u| ≤ 5 for smooth activations is 2.5.
    """

    max_log_scale: float | None = None
    needs_energy: ClassVar[bool] = True  # whether its problem is made of a criterion's energies

    def __post_init__(self) -> None:
        if self.max_log_scale is not None and not self.max_log_scale > 0:
            raise ValueError(
                f"max_log_scale bounds |log λ| and must be positive, not {self.max_log_scale}"
            )

    def problem(
        self,
        symmetry: Symmetry,
        g: Mapping[str, Any],
        model: nn.Module | None,
        bounds: tuple[Tensor, Tensor] | None,
        criterion: Criterion = PATH_KERNEL,
    ) -> Problem:
        """What it solves: the criterion of what was measured, unless it has one of its own."""
        return criterion.problem(symmetry, g, model).within(bounds)

    def objective(self, problem: Problem, log_scales: Tensor) -> float:
        """What it minimises, at log λ per unit, (num_units,)."""
        return problem.at(problem.power * log_scales).value

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """The log-scales it finds."""


def check_solver(solver: object) -> None:
    """Raise where a name or a class was given in place of a solver."""
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be Exact(), CoordinateDescent() or ENorm(), not {solver!r}")


def check_combination(solver: object, criterion: object, pace: object) -> None:
    """Raise where solver, criterion and pace are not what they should be, or do not go together.

    Args:
        solver: To be checked.
        criterion: The same; None is what the solver takes by itself.
        pace: The same.
    """
    check_solver(solver)
    if criterion is not None:
        check_criterion(criterion)
    assert isinstance(solver, Solver)
    assert isinstance(criterion, Criterion | None)
    if pace not in (None, "keep"):
        raise ValueError(f'pace must be None or "keep", not {pace!r}')
    if not solver.needs_energy and (criterion is not None or pace):
        raise ValueError(
            f"{type(solver).__name__}() minimises a criterion of its own: give neither criterion "
            "nor pace, or another solver "
            "(criterion=BalancedNorms() has its energy)"
        )
    if pace and criterion is not None and not criterion.shares_energy:
        raise ValueError(
            f'{criterion!r} has no energy whose sum could be kept: pace="keep" '
            "needs PathKernel() or Curvature()"
        )
