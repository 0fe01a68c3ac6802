"""What every solver is: settings, the problem it solves, and how it solves it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from ..symmetry.symmetry import Symmetry
from .problem import Problem
from .solution import Solution


@dataclass(frozen=True, kw_only=True)
class Solver(ABC):
    """Settings of a solver.

    Attributes:
        max_log_scale: Bound on |log λ|; the paper's |u| ≤ 5 for smooth activations is 2.5.
    """

    max_log_scale: float | None = None
    needs_energy: ClassVar[bool] = True  # whether its problem is made of diag(G)

    def __post_init__(self) -> None:
        if self.max_log_scale is not None and not self.max_log_scale > 0:
            raise ValueError(
                f"max_log_scale bounds |log λ| and must be positive, not {self.max_log_scale}"
            )

    def problem(
        self,
        symmetry: Symmetry,
        g: Mapping[str, Tensor],
        model: nn.Module | None,
        bounds: tuple[Tensor, Tensor] | None,
    ) -> Problem:
        """What it solves: the criterion of the paper, unless it has one of its own."""
        return Problem.of(symmetry, g, bounds)

    def objective(self, problem: Problem, log_scales: Tensor) -> float:
        """What it minimises, at log λ per unit, (num_units,)."""
        return problem.at(2 * log_scales).value

    @abstractmethod
    def solve(self, problem: Problem) -> Solution:
        """The log-scales it finds."""


def check_solver(solver: object) -> None:
    """Raise where a name or a class was given in place of a solver."""
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be Exact(), CoordinateDescent() or ENorm(), not {solver!r}")
