"""One suite over all solvers: what is true of each, whatever it minimises."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from scipy.optimize import minimize
from torch import Tensor, nn

import pathcond
from pathcond import CoordinateDescent, ENorm, Exact, diag_g, find_symmetry
from pathcond.criteria.problem import Problem
from pathcond.lifting.lifting import capture_sample
from pathcond.lifting.sample import Prepared, Sample
from pathcond.solvers import Solver
from pathcond.symmetry.captures import capture_all
from pathcond.symmetry.symmetry import Symmetry, symmetry_of

from .cases import diagonal, make
from .cases import prepared as case
from .strategies import RandomNet, examples, further, networks
from .test_problem import random_weights
from .test_random_networks import prepared

SOLVERS: dict[str, Solver] = {
    "exact": Exact(),
    "descent": CoordinateDescent(),
    "descent to the end": CoordinateDescent(sweeps=5000, tolerance=1e-12),
    "enorm": ENorm(),
    "enorm to the end": ENorm(cycles=None, balance_last=True),
}
TO_THE_END = ("exact", "descent to the end", "enorm to the end")
# Residual streams, concatenation, shared weights, self-edges, exponents of ±2, products of units.
CASES = (
    "mlp",
    "resnet",
    "densenet",
    "used_twice",
    "self_edge",
    "square",
    "product_of_branches",
    "vgg_with_flatten",
    "vit",
)


def posed(solver: Solver, name: str) -> tuple[Symmetry, nn.Module, Sample, Problem]:
    model, _ = make(name)
    captured = case(name, "paper")
    problem = solver.problem(captured.symmetry, diagonal(name), model, None)
    return captured.symmetry, model, captured.sample, problem


@pytest.fixture(params=sorted(SOLVERS))
def solver(request: pytest.FixtureRequest) -> Solver:
    return SOLVERS[request.param]


@pytest.fixture(params=TO_THE_END)
def minimiser(request: pytest.FixtureRequest) -> Solver:
    return SOLVERS[request.param]


@pytest.mark.parametrize("name", CASES)
def test_the_criterion_is_convex_and_the_solution_no_worse_than_the_start(
    solver: Solver, name: str
) -> None:
    problem = posed(solver, name)[3]
    for _ in range(5):
        ends = [3 * torch.randn(problem.num_units, dtype=torch.float64) for _ in range(2)]
        left, right = (problem.at(end).value for end in ends)
        for share in (0.2, 0.5, 0.9):
            between = problem.at(share * ends[0] + (1 - share) * ends[1]).value
            assert between <= share * left + (1 - share) * right + 1e-9 * abs(left)
    solution = solver.solve(problem)
    assert solution.objective_after <= solution.objective_before
    assert bool(solution.log_scales.isfinite().all())


@pytest.mark.parametrize("name", CASES)
def test_more_sweeps_never_increase_the_criterion(name: str) -> None:
    for made in (lambda n: CoordinateDescent(sweeps=n, tolerance=0), lambda n: ENorm(cycles=n)):
        problem = posed(made(1), name)[3]
        values = [made(n).solve(problem).objective_after for n in (1, 2, 3, 5, 8)]
        assert all(later <= earlier + 1e-12 * abs(earlier) for earlier, later in pairwise(values))
        assert values[0] <= made(1).solve(problem).objective_before


# ten sweeps depend on the order of the neurons
@pytest.mark.parametrize("key", sorted(SOLVERS.keys() - {"descent"}))
def test_channels_may_be_permuted(key: str) -> None:
    """The log-scales of a network with permuted channels are the permuted log-scales."""
    solver = SOLVERS[key]
    model, inputs = make("vgg_with_flatten")
    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    order = torch.randperm(convolutions[0].out_channels)
    found = []
    for permuted in (False, True):
        if permuted:
            with torch.no_grad():
                convolutions[0].weight.copy_(convolutions[0].weight[order].clone())
                convolutions[0].bias.copy_(convolutions[0].bias[order].clone())
                convolutions[1].weight.copy_(convolutions[1].weight[:, order].clone())
        symmetry = find_symmetry(model, inputs)
        problem = solver.problem(symmetry, diag_g(model, inputs), model, None)
        found.append(solver.solve(problem).log_scales[list(symmetry.groups[0].units)])
    torch.testing.assert_close(found[1], found[0][order], rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_constant_factor_of_g_changes_nothing(name: str) -> None:
    symmetry, g = case(name, "paper").symmetry, diagonal(name)
    for solver in (Exact(), CoordinateDescent()):
        scaled = [
            pathcond.solve(symmetry, {k: c * v for k, v in g.items()}, solver=solver)
            for c in (1.0, 1e-40, 1e40)
        ]
        for other in scaled[1:]:
            torch.testing.assert_close(other.log_scales, scaled[0].log_scales, rtol=0, atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_the_optimum_does_not_depend_on_the_starting_point(minimiser: Solver, name: str) -> None:
    """Start elsewhere, by rescaling the model first: the optimum in the new coordinates is the same
    model.
    """
    symmetry, model, sample, problem = posed(minimiser, name)
    first = minimiser.solve(problem)
    assert first.converged, first.message
    start = torch.randn(symmetry.num_units, dtype=torch.float64)
    pathcond.rescale_(model, symmetry, start, verify=False)
    second = minimiser.solve(minimiser.problem(symmetry, diag_g(model, sample), model, None))
    difference = (symmetry.class_matrix @ (second.log_scales + start - first.log_scales)).abs()
    # units with no counted parameter stay wherever they are
    moved = problem.at(problem.zero()).laplacian_diagonal() > 0
    if bool(moved.all()):
        assert float(difference.max()) < 1e-4
    if not isinstance(minimiser, ENorm):
        shift = float(problem.slope @ (2 * start))
        assert second.objective_after + shift == pytest.approx(first.objective_after, rel=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_box_is_kept_and_its_optimum_is_scipys(minimiser: Solver, name: str) -> None:
    problem = posed(minimiser, name)[3]
    free = minimiser.solve(problem).log_scales.abs().max()
    if not float(free) > 1e-3:
        return
    bounded = replace(minimiser, max_log_scale=float(free) / 3)
    solution = bounded.solve(problem)
    assert float(solution.log_scales.abs().max()) <= float(free) / 3 * (1 + 1e-12)
    assert solution.converged, solution.message
    boxed = problem.bounded(float(free) / 3)

    def value_and_gradient(u: object) -> tuple[float, object]:
        point = boxed.at(torch.as_tensor(u, dtype=torch.float64))
        return point.value / point.problem.weight, point.gradient.numpy() / point.problem.weight

    bounds = list(zip(boxed.lower.tolist(), boxed.upper.tolist(), strict=True))
    best = minimize(
        value_and_gradient,
        boxed.zero().numpy(),
        jac=True,
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 3000},
    )
    own = (
        solution.objective_after
        if not isinstance(minimiser, ENorm)
        else math.log(solution.objective_after) * problem.weight
    )
    assert own / problem.weight <= best.fun + 1e-8


@pytest.mark.parametrize("seed", [0, *further(1, 2)])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("key", ["exact", "descent to the end"])
def test_the_optimum_for_any_weights_is_scipys(key: str, name: str, seed: int) -> None:
    """Weights over three decades, energies over eight beside those of diag(G)."""
    symmetry, g = case(name, "full").symmetry, diagonal(name)
    spread = {name: values ** (8 / 3) for name, values in random_weights(g, seed + 100).items()}
    problem = Problem.of(
        symmetry, {name: g[name] * spread[name] for name in g}, weights=random_weights(g, seed)
    )
    solution = SOLVERS[key].solve(problem)
    # thousands of sweeps may still move by 1e-10
    assert solution.converged or key != "exact", solution.message
    assert solution.gradient_norm < 1e-8

    def value_and_gradient(u: object) -> tuple[float, object]:
        point = problem.at(torch.as_tensor(u, dtype=torch.float64))
        return point.value / problem.weight, point.gradient.numpy() / problem.weight

    best = minimize(
        value_and_gradient,
        problem.zero().numpy(),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": 5000, "gtol": 1e-9},
    )
    assert solution.objective_after / problem.weight <= best.fun + 1e-8


def test_units_may_differ_in_their_bounds() -> None:
    """Bounds of one side only, of zero width, and none: the projected gradient vanishes, and scipy
    finds no better point.
    """
    symmetry, g = case("resnet", "full").symmetry, diagonal("resnet")
    n = symmetry.num_units
    lower, upper = -torch.rand(n).double(), torch.rand(n).double()
    lower[::3], upper[1::3], lower[:4], upper[2:6] = -math.inf, math.inf, 0.0, 0.0
    for solver in (Exact(), CoordinateDescent(sweeps=5000, tolerance=1e-12)):
        solution = pathcond.solve(symmetry, g, solver=solver, bounds=(lower, upper))
        assert solution.converged, solution.message
        assert bool(((solution.log_scales >= lower) & (solution.log_scales <= upper)).all())
        assert solution.gradient_norm < 1e-8
    with pytest.raises(ValueError, match="one not above 0"):
        pathcond.solve(symmetry, g, bounds=(lower + 1, upper + 1))


@examples(40)
@given(networks())
def test_random_networks(net: RandomNet) -> None:
    """On any graph Exact gets at least as low as thousands of sweeps."""
    model, x = prepared(net, 0)
    symmetry, g = find_symmetry(model, x, normalization="full"), diag_g(model, x)
    if not symmetry.num_units or not any(bool(v.any()) for v in g.values()):
        return
    exact = pathcond.solve(symmetry, g)
    swept = pathcond.solve(symmetry, g, solver=CoordinateDescent(sweeps=3000, tolerance=1e-11))
    assert exact.converged, exact.message
    assert exact.gradient_norm < 1e-8
    scale = max(1.0, exact.objective_before - exact.objective_after)
    assert exact.objective_after <= swept.objective_after + 1e-8 * scale


def deep(depth: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    layers = [part for _ in range(depth) for part in (nn.Linear(6, 6), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(6, 3)).double(), torch.randn(4, 6).double()


@cache
def captured_deep(depth: int) -> tuple[Symmetry, Sample]:
    model, x = deep(depth)
    return find_symmetry(model, x), capture_sample(model, x)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
@pytest.mark.parametrize("depth", [10, 50])
def test_extreme_initialisations(minimiser: Solver, scale: float, depth: int) -> None:
    """Every other layer times 1e±8, the ones between over it, fifty layers deep: energies over
    hundreds of decades.
    """
    model, _ = deep(depth)
    symmetry, sample = captured_deep(depth)
    usual = minimiser.solve(minimiser.problem(symmetry, diag_g(model, sample), model, None))
    with torch.no_grad():
        for i, layer in enumerate(m for m in model if isinstance(m, nn.Linear)):
            if i < depth:
                layer.weight.mul_(scale if i % 2 == 0 else 1 / scale)
                layer.bias.mul_(scale if i % 2 == 0 else 1.0)
    extreme = minimiser.solve(minimiser.problem(symmetry, diag_g(model, sample), model, None))
    assert extreme.converged, extreme.message
    for solution in (usual, extreme):
        assert bool(solution.log_scales.isfinite().all())
    shift = torch.zeros(symmetry.num_units, dtype=torch.float64)
    for i, group in enumerate(symmetry.groups):
        shift[list(group.units)] = math.log(scale) if i % 2 == 0 else 0.0
    torch.testing.assert_close(extreme.log_scales + shift, usual.log_scales, rtol=0, atol=1e-3)


@cache
def zero_gains() -> tuple[nn.Module, dict[str, Tensor], list[Symmetry], Prepared]:
    """timm's least ResNet: the last gain of every block is zero, and with it most of g."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model = timm.create_model("test_resnet").eval()
    x = torch.randn(2, 3, 64, 64)
    captured = capture_all(model, x)
    symmetries = [
        symmetry_of(model, captured, normalization=normalization)
        for normalization in ("absorb", "full", "paper")
    ]
    sample = capture_sample(model, x)
    return model, diag_g(model, sample), symmetries, Prepared(symmetry=symmetries[1], sample=sample)


def test_zero_weights_and_zero_gains(solver: Solver) -> None:
    if isinstance(solver, CoordinateDescent) and solver.sweeps > 10:
        return  # thousands of sweeps over 1,712 units
    model, g, symmetries, prepared = zero_gains()
    assert sum(int((v == 0).sum()) for v in g.values()) > 0.2 * sum(v.numel() for v in g.values())
    for symmetry in symmetries:
        solution = pathcond.solve(symmetry, g, solver=solver, model=model)
        assert bool(solution.log_scales.isfinite().all())
        assert solution.objective_after <= solution.objective_before
        problem = solver.problem(symmetry, g, model, None)
        alone = problem.at(problem.zero()).laplacian_diagonal() == 0
        assert not bool(solution.log_scales[alone].any()), (
            "units without parameters of g > 0 stay at scale 1"
        )
    if solver == Exact():
        report = pathcond.condition_(copy.deepcopy(model), prepared, normalization="full")
        assert report.solution.converged
        assert report.zero_share > 0.2


def test_all_zero_diagonals_are_refused() -> None:
    model, inputs = make("mlp")
    symmetry = find_symmetry(model, inputs)
    with pytest.raises(ValueError, match="positive somewhere"):
        pathcond.solve(
            symmetry, {name: torch.zeros_like(v) for name, v in diag_g(model, inputs).items()}
        )


def squares(model: nn.Module) -> float:
    return sum(float(p.detach().square().sum()) for p in model.parameters() if p.dim() > 1)


class TestENorm:
    """What is its own."""

    def test_balances_the_norms_around_every_unit(self) -> None:
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        solution = pathcond.solve(
            symmetry, {}, solver=ENorm(cycles=None, balance_last=True), model=model
        )
        assert solution.converged
        assert solution.objective_before == pytest.approx(squares(model))
        pathcond.rescale_(model, symmetry, solution.log_scales)
        weights = [p for p in model.parameters() if p.dim() > 1]
        for left, right in pairwise(weights):
            torch.testing.assert_close(
                left.square().sum(1), right.square().sum(0), rtol=1e-6, atol=0
            )
        assert solution.objective_after == pytest.approx(squares(model))

    @pytest.mark.parametrize(("p", "c"), [(1, 1.0), (2, 1.2), (3, 0.8)])
    def test_p_and_c(self, p: float, c: float) -> None:
        """In balance the norm in front, times c, is the norm behind: as in the published step
        (right / (left · c))^½.
        """
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        solution = pathcond.solve(
            symmetry, {}, solver=ENorm(p=p, c=c, cycles=None, balance_last=True), model=model
        )
        pathcond.rescale_(model, symmetry, solution.log_scales)
        weights = [w for w in model.parameters() if w.dim() > 1]
        for left, right in pairwise(weights):
            torch.testing.assert_close(c * left.norm(p, 1), right.norm(p, 0), rtol=1e-5, atol=0)

    def test_one_cycle_by_hand(self) -> None:
        """Layer after layer, λ = (‖out‖ / ‖in‖)^½ with what the layers before have left; the
        classifier is not touched.
        """
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        weights = [w.detach().clone() for w in model.parameters() if w.dim() > 1]
        expected = torch.zeros(symmetry.num_units, dtype=torch.float64)
        for i, group in enumerate(symmetry.groups[:-1]):
            scale = (weights[i + 1].norm(dim=0) / weights[i].norm(dim=1)).sqrt()
            weights[i], weights[i + 1] = scale[:, None] * weights[i], weights[i + 1] / scale
            expected[list(group.units)] = scale.log()
        solution = pathcond.solve(symmetry, {}, solver=ENorm(), model=model)
        torch.testing.assert_close(solution.log_scales, expected, rtol=0, atol=1e-12)

    def test_biases_do_not_count_and_the_function_is_kept(self) -> None:
        model, x = make("mlp")
        before = model(x)
        with torch.no_grad():
            model[0].bias.mul_(100)
        loud = pathcond.solve(find_symmetry(model, x), {}, solver=ENorm(), model=model)
        with torch.no_grad():
            model[0].bias.div_(100)
        report = pathcond.condition_(model, x, solver=ENorm())
        torch.testing.assert_close(loud.log_scales, report.log_scales)
        torch.testing.assert_close(model(x), before)

    def test_needs_the_model_and_leaves_one_sided_units_alone(self) -> None:
        model, x = make("batch_norm_mlp")
        symmetry = find_symmetry(model, x)
        with pytest.raises(ValueError, match="pass the model"):
            pathcond.solve(symmetry, diag_g(model, x), solver=ENorm())
        solution = pathcond.solve(symmetry, {}, solver=ENorm(cycles=None), model=model)
        assert solution.objective_after > 0.1 * solution.objective_before

    @pytest.mark.parametrize(
        "settings", [{"p": 0}, {"c": -1}, {"cycles": 0}, {"p": math.inf}, {"max_log_scale": 0}]
    )
    def test_bad_settings(self, settings: dict) -> None:
        with pytest.raises(ValueError, match=r"ENorm needs|max_log_scale bounds"):
            ENorm(**settings)
