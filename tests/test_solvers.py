"""Solvers against the algorithm box written out, against scipy, and against each other."""

import itertools

import pytest
import torch
from benchmarks.naive import sweeps
from scipy.optimize import minimize
from torch import nn

from pathcond import diag_g, find_symmetry
from pathcond.problem import Problem
from pathcond.solvers import CoordinateDescent

from .cases import make
from .test_problem import objective, written_out

CONVERGED = CoordinateDescent(sweeps=5000, tolerance=1e-12)
PLAIN = ("mlp", "mlp_without_bias", "vgg_with_flatten", "unet", "conv_1d_and_3d", "also_an_output")


@pytest.mark.parametrize("name", PLAIN)
def test_coordinate_descent_has_the_iterates_of_the_algorithm_box(name: str) -> None:
    model, inputs = make(name)
    symmetry, g = find_symmetry(model, inputs, normalization="paper"), diag_g(model, inputs)
    order = [unit for group in symmetry.groups for unit in group.units]
    problem = Problem.of(symmetry, g)
    for count, expected in enumerate(itertools.islice(sweeps(symmetry, g, order), 5), start=1):
        solution = CoordinateDescent(sweeps=count, tolerance=0).solve(problem)
        torch.testing.assert_close(2 * solution.log_scales, expected, rtol=0, atol=1e-12)
        assert solution.iterations == count


@pytest.mark.parametrize("normalization", ["absorb", "full", "paper"])
@pytest.mark.parametrize("name", [*PLAIN, "resnet", "densenet", "square", "self_edge", "product_of_branches", "used_twice", "vit"])
def test_coordinate_descent_finds_the_minimum_that_scipy_finds(name: str, normalization: str) -> None:
    """Residual streams, self-edges, exponents of ±2 and units that share parameters included."""
    model, inputs = make(name)
    symmetry, g = find_symmetry(model, inputs, normalization=normalization), diag_g(model, inputs)
    if not symmetry.num_units:
        return
    problem, (exponents, flat) = Problem.of(symmetry, g), written_out(symmetry, g)
    solution = CONVERGED.solve(problem)
    assert solution.objective_after <= solution.objective_before
    assert solution.objective_before == pytest.approx(float(objective(exponents, flat, torch.zeros(symmetry.num_units).double())))

    def value_and_gradient(u: object) -> tuple[float, object]:
        point = problem.at(torch.as_tensor(u, dtype=torch.float64))
        return point.value, point.gradient.numpy()

    start = torch.zeros(symmetry.num_units, dtype=torch.float64).numpy()
    best = minimize(value_and_gradient, start, jac=True, method="L-BFGS-B", options={"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-9})
    assert solution.objective_after <= best.fun + 1e-6 * max(1.0, solution.objective_before - best.fun)


def test_a_bound_holds() -> None:
    model, inputs = make("vgg_with_flatten")
    problem = Problem.of(find_symmetry(model, inputs), diag_g(model, inputs))
    free = CONVERGED.solve(problem).log_scales.abs().max()
    bounded = CoordinateDescent(sweeps=100, max_log_scale=float(free) / 2).solve(problem)
    assert bounded.log_scales.abs().max() == pytest.approx(float(free) / 2)
    assert bounded.objective_after < bounded.objective_before


def test_one_neuron_by_hand() -> None:
    """u·relu(v·x + w): two parameters in of g = u² each, one out of g = v² + w²; at the optimum all three are alike."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    x = torch.randn(4, 1).double()
    symmetry, g = find_symmetry(model, x), diag_g(model, x)
    solution = CONVERGED.solve(Problem.of(symmetry, g))
    into, out = float(g["0.weight"]), float(g["2.weight"])
    factor = float((2 * solution.log_scales).exp())  # g_in / X and g_out · X; ∂F = 0 where their sums are as 2 to 1
    assert 2 * into / factor == pytest.approx(2 * out * factor, rel=1e-9)


@pytest.mark.parametrize("settings", [{"sweeps": 0}, {"tolerance": -1.0}, {"tolerance": float("nan")}, {"max_log_scale": 0.0}])
def test_bad_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError, match=r"CoordinateDescent needs|max_log_scale bounds"):
        CoordinateDescent(**settings)
