"""Solvers: each is a frozen object of settings that turns a problem into a ``Solution``; ``solve``
is their one verb.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ..criteria.criterion import PATH_KERNEL, Criterion
from ..symmetry.symmetry import Symmetry
from .coordinate_descent import CoordinateDescent
from .enorm import ENorm
from .exact import Exact
from .pace import keep_pace
from .solution import Solution
from .solver import Pace, Solver, check_combination

__all__ = ["DEFAULT", "CoordinateDescent", "ENorm", "Exact", "Pace", "Solution", "Solver", "solve"]

DEFAULT = Exact()


def solve(
    symmetry: Symmetry,
    g: Mapping[str, Any],
    *,
    solver: Solver = DEFAULT,
    criterion: Criterion | None = None,
    pace: Pace = None,
    model: nn.Module | None = None,
    bounds: tuple[Tensor, Tensor] | None = None,
) -> Solution:
    """The log-scales at which a criterion is least; nothing is rescaled.

    Args:
        symmetry: From ``find_symmetry``.
        g: From ``diag_g``; for ``BalancedLayers``, from ``measure_reads``.
        solver: ``Exact()``, ``CoordinateDescent()`` or ``ENorm()``.
        criterion: ``PathKernel()``, the default, ``Curvature()``, ``BalancedNorms()``,
            ``BalancedLayers()`` or one of your own.
        pace: "keep" leaves the sum of the energies as it is.
        model: For whatever looks at the weights: all criteria but ``PathKernel``, and ``ENorm``.
        bounds: Least and greatest log λ of every unit, as ``symmetry.log_scale_bounds(model)``
            gives them.

    >>> import torch, pathcond
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 1, bias=False),
    ...     torch.nn.ReLU(),
    ...     torch.nn.Linear(1, 2, bias=False),
    ... )
    >>> symmetry, g = (
    ...     pathcond.find_symmetry(model, torch.ones(1, 2)),
    ...     pathcond.diag_g(model, torch.ones(1, 2)),
    ... )
    >>> solution = pathcond.solve(symmetry, g)
    >>> ratio = (
    ...     g["0.weight"].sum() / g["2.weight"].sum()
    ... )  # as many parameters in as out: at the optimum both sums are alike
    >>> torch.allclose(4 * solution.log_scales, ratio.log())
    True
    """
    check_combination(solver, criterion, pace)
    criterion = criterion or PATH_KERNEL
    problem = solver.problem(symmetry, g, model, bounds, criterion)
    return keep_pace(problem, solver)[1] if pace else solver.solve(problem)
