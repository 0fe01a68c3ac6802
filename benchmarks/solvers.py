"""Speed of the solvers beside the paper's algorithm box written out, and of Exact on large
networks.

    python -m benchmarks.solvers [--models resnet50 vgg16] [--out benchmarks/solvers.json]

All on normalization "paper" and statistics as they come for the paper's three architectures, where
``naive`` runs the box's ten sweeps neuron by neuron (``reference.box_sweeps``) in the same process,
and the solvers' seconds include posing the problem.
Gap is (F − F*) / (F(0) − F*). The large networks are calibrated on a batch of two and solved under
"paper" and "full" to a gradient norm of 1e-8 per parameter.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from tests import torchvision_operators  # noqa: F401  before torchvision is imported
from torch import nn

from pathcond import diag_g, find_symmetry
from pathcond.criteria.problem import Problem
from pathcond.networks import cifar_nv, mlp, resnet18_c
from pathcond.reference import Connectivity, box_sweeps
from pathcond.solvers import CoordinateDescent, Exact, Solution

from .measuring import format_row, median_seconds, write

PAPER: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "cifar_nv": cifar_nv,
    "resnet18_c": resnet18_c,
}
LARGE = ("resnet50", "resnet152", "vgg16", "densenet121", "mobilenet_v3_large")
SWEEPS = 10


def beside_naive(name: str, repeats: int) -> dict[str, Any]:
    """CoordinateDescent and Exact against the algorithm box on one of the paper's architectures."""
    torch.manual_seed(0)
    model, x = PAPER[name]().eval(), torch.randn(2, 3, 32, 32)
    symmetry, g = find_symmetry(model, x, normalization="paper"), diag_g(model, x, calibrate=False)
    connectivity = Connectivity.of(symmetry, g)
    start = time.perf_counter()
    iterates = list(itertools.islice(box_sweeps(connectivity), SWEEPS))
    seconds_naive = time.perf_counter() - start
    problem = Problem.of(symmetry, g)
    descent, exact, quick = (
        CoordinateDescent(sweeps=SWEEPS, tolerance=0),
        Exact(),
        Exact(tolerance=1e-5),
    )
    optimum, swept = Exact(tolerance=1e-13).solve(problem), descent.solve(problem)
    row: dict[str, Any] = {
        "model": name,
        "units": symmetry.num_units,
        "seconds_naive": seconds_naive,
    }
    row["difference_of_iterates"] = float((2 * swept.log_scales - iterates[-1]).abs().max())
    row["gap_coordinate_descent"] = gap(swept, optimum)
    row["gap_exact"] = gap(exact.solve(problem), optimum)
    row["gap_exact_1e-5"] = gap(quick.solve(problem), optimum)
    posing = row["seconds_problem"] = median_seconds(lambda: Problem.of(symmetry, g), repeats)
    for what, solver in (
        ("coordinate_descent", descent),
        ("exact", exact),
        ("exact_1e-5", quick),
    ):
        seconds = median_seconds(partial(solver.solve, problem), repeats)
        row[f"naive_over_{what}"] = seconds_naive / (posing + seconds)
    return row


def gap(solution: Solution, optimum: Solution) -> float:
    return (solution.objective_after - optimum.objective_after) / (
        optimum.objective_before - optimum.objective_after
    )


def large(name: str, repeats: int) -> list[dict[str, Any]]:
    """Seconds of Exact on a network of torchvision, under "paper" and "full"."""
    import torchvision

    torch.manual_seed(0)
    model: nn.Module = torchvision.models.get_model(name, weights=None).eval()
    x, solver, rows = torch.randn(2, 3, 224, 224), Exact(tolerance=1e-8), []
    g = diag_g(model, x)
    for normalization in ("paper", "full"):
        symmetry = find_symmetry(model, x, normalization=normalization)
        problem = Problem.of(symmetry, g)
        row: dict[str, Any] = {
            "model": name,
            "normalization": normalization,
            "units": symmetry.num_units,
        }
        row |= {
            "parameters": int(problem.weight),
            "gradient_norm": solver.solve(problem).gradient_norm,
        }
        row["seconds_exact"] = median_seconds(partial(solver.solve, problem), repeats)
        row["seconds_problem"] = median_seconds(partial(Problem.of, symmetry, g), 1)
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="*", default=[*PAPER, *LARGE])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", default="benchmarks/solvers.json")
    arguments = parser.parse_args()
    rows = []
    for name in arguments.models:
        new = (
            [beside_naive(name, arguments.repeats)]
            if name in PAPER
            else large(name, arguments.repeats)
        )
        for row in new:
            print(format_row(row), flush=True)
        rows += new
    write(arguments.out, rows)


if __name__ == "__main__":
    main()
