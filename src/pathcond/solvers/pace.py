"""The optimum among the rescalings that leave the sum of the energies as it was.

On E(u) = E(0) the criterion F = W log E + slope·u has only its linear term left, so what is sought
is

    minimise slope·u   over   E(u) ≤ E(0)   and the box

a convex problem: E is convex, and the minimum lies where E(u) = E(0) unless the box does not reach
there. For some multiplier μ ≥ 0 it has slope + μ ∇E = 0, up to the bounds. So has the minimiser of
W' log(c + E) + slope·u, with μ = W' / (c + E). That is a Problem again, with another weight or more
fixed energy, and its E(u) falls as W' grows and rises with c. Where F alone would raise the sum, W'
≥ W is sought, where it would lower it, c ≥ 0: with these it has a minimum whenever F has one.
"""

from __future__ import annotations

import math
from dataclasses import replace

from ..criteria.problem import Problem
from .exact import Exact
from .solution import Solution
from .solver import Solver

FARTHEST = 24.0  # of log(W'/W) and of log(1 + c)
KEPT = 1e-9  # of log E(u)
STEPS = 60


def keep_pace(problem: Problem, solver: Solver) -> tuple[Problem, Solution]:
    """Solve for the least linear term at the same energy.

    Args:
        problem: F on a box; its energies are relative to their sum, so that E(0) = 1.
        solver: What minimises a Problem.

    Returns:
        The Problem that has the same minimiser without the constraint, and the solution, whose
        objectives are those of F.
    """
    problem = problem.bounded(solver.max_log_scale)
    tilted, solution, gap = _solve_tilted(problem, solver, 0.0)
    near = 0.0
    near_gap = gap
    step = math.copysign(0.25, -gap)
    # Find the other side: a weight or constant at which the energy is too low where it was too
    # high, or the other way round.
    while abs(gap) > KEPT and (gap > 0) == (near_gap > 0) and abs(near + step) <= FARTHEST:
        tilted, solution, gap = _solve_tilted(problem, solver, near + step)
        far = near + step
        far_gap = gap
        if (gap > 0) == (near_gap > 0):
            near = far
            near_gap = far_gap
            step = 2 * step
    if abs(gap) > KEPT and (gap > 0) != (near_gap > 0):
        tilted, solution, gap = _between(problem, solver, (near, near_gap), (far, far_gap))
    ends = problem.at(problem.zero()), problem.at(problem.power * solution.log_scales)
    kept = (
        "as it was"
        if abs(gap) < 1e-6
        else f"{math.exp(gap):.4g} of what it was, as near as bounds allow"
    )
    message = f"the sum of its energies is {kept}; {solution.message}"
    return tilted, replace(
        solution, objective_before=ends[0].value, objective_after=ends[1].value, message=message
    )


def unconstrained_at_zero(problem: Problem) -> Problem:
    """The Problem without the constraint in whose minimiser u = 0 would be, if it is the
    constrained minimiser at all.
    """
    point = problem.at(problem.zero())
    free = (problem.lower < 0) & (problem.upper > 0) & (point.energy_gradient != 0)
    gradient = point.energy_gradient[free]
    slope = problem.slope[free]
    squares = float(gradient @ gradient)
    multiplier = -float(slope @ gradient) / squares if squares else 0.0
    return replace(problem, weight=max(multiplier * point.energy, 1e-300))


def _solve_tilted(problem: Problem, solver: Solver, x: float) -> tuple[Problem, Solution, float]:
    """The minimiser for W' = W e^{−x}, where x < 0, or for c = e^x − 1: the Problem, its solution
    and log E(u).
    """
    if x < 0:
        tilted = replace(problem, weight=problem.weight * math.exp(-x))
    else:
        tilted = replace(problem, fixed=problem.fixed + math.expm1(x))
        # Its gradient is by 1 + c smaller than that of the energies alone.
        if isinstance(solver, Exact):
            solver = replace(solver, tolerance=solver.tolerance * math.exp(-x))
    solution = solver.solve(tilted)
    return tilted, solution, math.log(problem.at(problem.power * solution.log_scales).energy)


def _between(
    problem: Problem, solver: Solver, a: tuple[float, float], b: tuple[float, float]
) -> tuple[Problem, Solution, float]:
    """The root of log E(u) between two points of opposite sign, by false position with halved ends
    (Illinois).
    """
    side = 0
    for _ in range(STEPS):
        x = (a[0] * b[1] - b[0] * a[1]) / (b[1] - a[1])
        tilted, solution, gap = _solve_tilted(problem, solver, x)
        if abs(gap) <= KEPT or abs(b[0] - a[0]) <= 1e-15 * max(1.0, abs(x)):
            break
        if (gap > 0) == (b[1] > 0):
            b, a = (x, gap), ((a[0], a[1] / 2) if side == 1 else a)
            side = 1
        else:
            a, b = (x, gap), ((b[0], b[1] / 2) if side == -1 else b)
            side = -1
    return tilted, solution, gap
