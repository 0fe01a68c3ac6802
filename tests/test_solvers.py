"""Solvers against the algorithm box written out, against scipy, and against each other."""

import itertools
from collections.abc import Callable

import pytest
import torch
from scipy.optimize import minimize
from torch import nn

from pathcond import diag_g, find_symmetry
from pathcond.criteria.problem import Problem
from pathcond.networks import cifar_nv, mlp, resnet18_c
from pathcond.reference import Connectivity, box_sweeps
from pathcond.solvers import CoordinateDescent, Exact

from .cases import diagonal, make, prepared
from .test_problem import objective, written_out

CONVERGED = CoordinateDescent(sweeps=5000, tolerance=1e-12)
PLAIN = ("mlp", "mlp_without_bias", "vgg_with_flatten", "unet", "conv_1d_and_3d", "also_an_output")


@pytest.mark.parametrize("name", PLAIN)
def test_coordinate_descent_has_the_iterates_of_the_algorithm_box(name: str) -> None:
    symmetry, g = prepared(name, "paper").symmetry, diagonal(name)
    problem = Problem.of(symmetry, g)
    for count, expected in enumerate(
        itertools.islice(box_sweeps(Connectivity.of(symmetry, g)), 5), start=1
    ):
        solution = CoordinateDescent(sweeps=count, tolerance=0).solve(problem)
        torch.testing.assert_close(2 * solution.log_scales, expected, rtol=0, atol=1e-12)
        assert solution.iterations == count


@pytest.mark.parametrize(
    ("build", "units", "count"),
    [
        (mlp, 1500, 2),
        (cifar_nv, 1792, 2),
        (resnet18_c, 3904, 1),
        pytest.param(mlp, 1500, 10, marks=pytest.mark.zoo),
        pytest.param(cifar_nv, 1792, 10, marks=pytest.mark.zoo),
        pytest.param(resnet18_c, 3904, 10, marks=pytest.mark.zoo),
    ],
)
def test_the_papers_architectures_have_the_same_iterates(
    build: Callable[[], nn.Module], units: int, count: int
) -> None:
    """After every sweep, to 1e-12; "paper", uncalibrated, as published."""
    torch.manual_seed(0)
    model, x = build().eval(), torch.randn(2, 3, 32, 32)
    symmetry, g = find_symmetry(model, x, normalization="paper"), diag_g(model, x, calibrate=False)
    assert symmetry.num_units == units
    problem = Problem.of(symmetry, g)
    for sweep, expected in enumerate(
        itertools.islice(box_sweeps(Connectivity.of(symmetry, g)), count), start=1
    ):
        solution = CoordinateDescent(sweeps=sweep, tolerance=0).solve(problem)
        torch.testing.assert_close(2 * solution.log_scales, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("normalization", ["absorb", "full", "paper"])
@pytest.mark.parametrize(
    "name",
    [
        *PLAIN,
        "resnet",
        "densenet",
        "square",
        "self_edge",
        "product_of_branches",
        "used_twice",
        "vit",
    ],
)
@pytest.mark.parametrize("solver", [CONVERGED, Exact()], ids=lambda solver: type(solver).__name__)
def test_the_minimum_is_the_one_that_scipy_finds(
    solver: CoordinateDescent | Exact, name: str, normalization: str
) -> None:
    """Residual streams, self-edges, exponents of ±2 and units that share parameters included."""
    symmetry, g = prepared(name, normalization).symmetry, diagonal(name)
    if not symmetry.num_units:
        return
    problem, (exponents, flat) = Problem.of(symmetry, g), written_out(symmetry, g)
    solution = solver.solve(problem)
    assert solution.converged, solution.message
    assert solution.gradient_norm < 1e-8
    assert solution.objective_after <= solution.objective_before
    assert solution.objective_before == pytest.approx(
        float(objective(exponents, flat, torch.zeros(symmetry.num_units).double()))
    )

    def value_and_gradient(u: object) -> tuple[float, object]:
        point = problem.at(torch.as_tensor(u, dtype=torch.float64))
        return point.value, point.gradient.numpy()

    start = torch.zeros(symmetry.num_units, dtype=torch.float64).numpy()
    best = minimize(
        value_and_gradient,
        start,
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9},
    )
    assert solution.objective_after <= best.fun + 1e-6 * max(
        1.0, solution.objective_before - best.fun
    )


def test_a_constant_diagonal_stays() -> None:
    """prop. constant-diagonal: u = 0 is the minimiser."""
    model, inputs = make("mlp")
    symmetry = find_symmetry(model, inputs)
    g = {name: torch.full_like(values, 3.0) for name, values in diag_g(model, inputs).items()}
    for solver in (Exact(), CONVERGED):
        assert float(solver.solve(Problem.of(symmetry, g)).log_scales.abs().max()) < 1e-12


def test_deep_networks_and_zero_gains() -> None:
    torch.manual_seed(0)
    layers = [part for _ in range(50) for part in (nn.Linear(8, 8), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(8, 3)).double(), torch.randn(4, 8).double()
    deep = Exact().solve(Problem.of(find_symmetry(model, x), diag_g(model, x)))
    assert deep.converged, deep.message
    model, inputs = make("resnet")
    with torch.no_grad():
        model[4].bn2.weight.zero_()
    cut = Exact().solve(Problem.of(find_symmetry(model, inputs), diag_g(model, inputs)))
    assert cut.converged, cut.message
    assert bool(cut.log_scales.isfinite().all())


def test_one_neuron_by_hand() -> None:
    """u·relu(v·x + w): two parameters in of g = u² each, one out of g = v² + w²; at the optimum all
    three are alike.
    """
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    x = torch.randn(4, 1).double()
    symmetry, g = find_symmetry(model, x), diag_g(model, x)
    solution = CONVERGED.solve(Problem.of(symmetry, g))
    into, out = float(g["0.weight"]), float(g["2.weight"])
    # g_in / X and g_out · X; ∂F = 0 where their sums are as 2 to 1
    factor = float((2 * solution.log_scales).exp())
    assert 2 * into / factor == pytest.approx(2 * out * factor, rel=1e-9)


@pytest.mark.parametrize(
    "settings", [{"tolerance": 0.0}, {"max_steps": 0}, {"max_log_scale": -1.0}]
)
def test_bad_settings_of_the_exact_solver_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"Exact needs|max_log_scale bounds"):
        Exact(**settings)


@pytest.mark.parametrize(
    "settings",
    [{"sweeps": 0}, {"tolerance": -1.0}, {"tolerance": float("nan")}, {"max_log_scale": 0.0}],
)
def test_bad_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"CoordinateDescent needs|max_log_scale bounds"):
        CoordinateDescent(**settings)
