"""Solutions in powers of two, which multiply floating-point numbers without rounding."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from ..criteria.problem import Problem
from .solution import Solution
from .solver import Solver


def to_powers_of_two(
    solution: Solution, solver: Solver, problem: Problem, bounds: tuple[Tensor, Tensor]
) -> Solution:
    """The solution with every λ a power of two within its bounds: the nearest, or towards 1, or 1,
    whichever is best.

    Args:
        solution: Of ``solver`` on ``problem``.
        bounds: Least and greatest log λ of every unit, (num_units,) each.
    """
    lower, upper = (bound.to(solution.log_scales) for bound in bounds)
    octaves = solution.log_scales / math.log(2)
    choices = []
    for whole in (octaves.round(), octaves.trunc(), torch.zeros_like(octaves)):
        log_scales = whole * math.log(2)
        outside = (log_scales < lower - 1e-9) | (log_scales > upper + 1e-9)
        log_scales = torch.where(outside, octaves.trunc() * math.log(2), log_scales)
        choices.append((solver.objective(problem, log_scales), log_scales))
    least, log_scales = min(choices, key=lambda choice: choice[0])
    return replace(
        solution,
        log_scales=log_scales,
        objective_after=least,
        message=f"{solution.message}; then rounded to powers of two",
    )
