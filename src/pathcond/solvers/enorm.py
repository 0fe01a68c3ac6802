"""Equi-normalization (Stock, Graham, Gribonval and Jégou 2019): the rescaling with the least norm
of the weights.

    Σ_ℓ c_ℓ ‖W_ℓ‖_p^p        c_ℓ = c^{−pℓ},   ℓ counts the layers            (sec. appendix_enorm)

Under t it becomes Σ_i c_i |θ_i|^p exp(p (Kt)_i): the energy E of the path criterion, for u = −p t,
g_i = c_i |θ_i|^p and no linear term. So a cycle over the layers is a sweep of coordinate descent,
and to convergence it is ``Exact``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..criteria.criterion import PATH_KERNEL, Criterion, require_model
from ..criteria.problem import Problem
from ..symmetry.symmetry import Symmetry
from ..wrappers import unwrap
from .coordinate_descent import CoordinateDescent
from .exact import Exact
from .solution import Solution
from .solver import Solver


@dataclass(frozen=True, kw_only=True)
class ENorm(Solver):
    """Settings of ENorm.

    Biases and the parameters of normalization layers do not count in the norm but are scaled along,
    so the function is kept. Units with counted weights on one side only would shrink for ever; they
    stay at scale 1. So does what any ``normalization`` but "paper" sets free around a norm: for
    networks with BatchNorm choose "paper".

    Attributes:
        p: Of the norm.
        c: Above 1, the norm may grow with depth: c is the ratio of the two norms at a unit in
            balance.
        cycles: Passes over the layers; None for the optimum.
        balance_last: Whether to rescale the weights behind which nothing can be rescaled (the
            classifier). Published: no.
    """

    p: float = 2
    c: float = 1
    cycles: int | None = 1
    balance_last: bool = False
    needs_energy: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if (
            not 0 < self.p < math.inf
            or not 0 < self.c < math.inf
            or (self.cycles is not None and self.cycles < 1)
        ):
            raise ValueError(
                f"ENorm needs positive p and c and a cycle, not p={self.p}, "
                f"c={self.c}, cycles={self.cycles}"
            )

    def problem(
        self,
        symmetry: Symmetry,
        g: Mapping[str, Any],
        model: nn.Module | None,
        bounds: tuple[Tensor, Tensor] | None,
        criterion: Criterion = PATH_KERNEL,
    ) -> Problem:
        """Σ_ℓ c_ℓ ‖W_ℓ‖_p^p over the weights that the Symmetry rescales; what was measured and
        the criterion are not used.
        """
        model = require_model(model, self)
        depth = {name: i + 1 for i, group in enumerate(symmetry.groups) for name in group.divided}
        energies = {
            name: self.c ** (-self.p * depth.get(name, 0))
            * weight.detach().double().abs() ** self.p
            for name, weight in unwrap(model).named_parameters()
            if weight.dim() > 1 and name in symmetry.scalings
        }
        problem = Problem.of(symmetry, energies, bounds, power=-self.p)
        held = _one_sided(problem)
        if not self.balance_last:
            held |= _last(symmetry, problem, energies)
        lower = problem.lower.masked_fill(held, 0.0)
        upper = problem.upper.masked_fill(held, 0.0)
        return replace(problem, slope=torch.zeros_like(problem.slope), lower=lower, upper=upper)

    def solve(self, problem: Problem) -> Solution:
        """One or more cycles, or the optimum."""
        if self.cycles is None:
            inner: Solver = Exact(max_log_scale=self.max_log_scale)
        else:
            inner = CoordinateDescent(
                sweeps=self.cycles, tolerance=1e-9, max_log_scale=self.max_log_scale
            )
        solution = inner.solve(problem)
        log_scales, message = solution.log_scales, solution.message
        if self.cycles is not None and not solution.converged:
            message = f"cycles={self.cycles}, as asked for; cycles=None goes on to the optimum"
        return replace(
            solution,
            objective_before=self.objective(problem, 0 * log_scales),
            objective_after=self.objective(problem, log_scales),
            message=message,
        )

    def objective(self, problem: Problem, log_scales: Tensor) -> float:
        """Σ_ℓ c_ℓ ‖W_ℓ‖_p^p."""
        return math.exp(problem.at(problem.power * log_scales).value / problem.weight)


def _one_sided(problem: Problem) -> Tensor:
    """Units that weights only enter or only leave, (num_units,) bool."""
    into, out = problem.at(problem.zero()).sides
    return ~((into > 0) & (out > 0))


def _last(symmetry: Symmetry, problem: Problem, weights: Mapping[str, Tensor]) -> Tensor:
    """Units that are read by weights into pinned units or outputs only, (num_units,) bool."""
    held = torch.zeros_like(problem.slope).bool()
    C = problem.class_matrix
    for name in weights:
        scaling = symmetry.scalings[name]
        if not bool(scaling.plus.any()):
            classes = torch.zeros(C.num_classes, dtype=torch.bool, device=held.device)
            classes[scaling.minus.long().flatten().to(held.device)] = True
            held[C.units[classes[C.classes]]] = True
    return held
