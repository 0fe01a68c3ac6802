"""What conditioning does to an optimizer's step, and rescalings that leave the sum of the energies
as it was.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from scipy.optimize import minimize
from torch import Tensor, nn

import pathcond
from pathcond import (
    BalancedLayers,
    BalancedNorms,
    CoordinateDescent,
    Criterion,
    Curvature,
    ENorm,
    Exact,
    PathKernel,
    condition_,
    diag_g,
    find_symmetry,
)
from pathcond.criteria.problem import Problem
from pathcond.reference import enumerate_paths, parameter_vector
from pathcond.solvers.pace import keep_pace

from .cases import diagonal, make, prepared

CASES = ("mlp", "resnet", "densenet", "used_twice", "square", "batch_norm_mlp")


def random_problem(name: str, normalization: str, seed: int) -> Problem:
    """Random weights over three decades, and random energies over two beside diag(G)."""
    symmetry = prepared(name, normalization).symmetry
    generator = torch.Generator().manual_seed(seed)

    def spread(values: Tensor, decades: float) -> Tensor:
        return 10 ** (
            decades * (torch.rand(values.shape, generator=generator, dtype=torch.float64) - 0.5)
        )

    energies = {name: values * spread(values, 2) for name, values in diagonal(name).items()}
    weights = {name: spread(values, 3) for name, values in energies.items()}
    return Problem.of(symmetry, energies, weights=weights)


def scipys(problem: Problem) -> float:
    """The least linear term over E(u) ≤ E(0) and the box, by scipy."""

    def energy(u: Any) -> float:
        return math.log(problem.at(torch.as_tensor(u, dtype=torch.float64)).energy)

    def energy_gradient(u: Any) -> Any:
        point = problem.at(torch.as_tensor(u, dtype=torch.float64))
        return -(point.energy_gradient / point.energy).numpy()

    slope = (problem.slope / problem.weight).numpy()
    found = minimize(
        lambda u: float(slope @ u),
        problem.zero().numpy(),
        jac=lambda u: slope,
        method="SLSQP",
        bounds=list(
            zip(
                problem.lower.clamp(min=-30).tolist(),
                problem.upper.clamp(max=30).tolist(),
                strict=True,
            )
        ),
        constraints={"type": "ineq", "fun": lambda u: -energy(u), "jac": energy_gradient},
        options={"maxiter": 500, "ftol": 1e-12},
    )
    assert energy(found.x) < 1e-6
    return float(found.fun)


@pytest.mark.parametrize("boxed", [False, True])
@pytest.mark.parametrize("normalization", ["absorb", "full"])
@pytest.mark.parametrize("name", CASES)
def test_the_constrained_optimum_is_scipys(name: str, normalization: str, boxed: bool) -> None:
    for seed in range(2):
        problem = random_problem(name, normalization, seed)
        if boxed:
            generator = torch.Generator().manual_seed(seed)
            lower, upper = torch.rand(
                2, problem.num_units, generator=generator, dtype=torch.float64
            )
            problem = problem.within((-lower, upper))
        _, solution = keep_pace(problem, Exact())
        u = problem.power * solution.log_scales
        assert bool(((u >= problem.lower) & (u <= problem.upper)).all())
        energy = problem.at(u).energy
        assert energy <= 1 + 1e-6
        if not boxed:
            assert energy == pytest.approx(1, abs=1e-6)
        own, best = float(problem.slope @ u) / problem.weight, scipys(problem)
        assert own == pytest.approx(best, abs=1e-5 * max(1.0, abs(best)))


def test_energies_that_would_fall_are_kept_too() -> None:
    """F alone lowers the sum here; more fixed energy, in the place of a larger weight, brings it
    back.
    """
    problem = random_problem("batch_norm_mlp", "absorb", 0)
    free = Exact().solve(problem)
    assert problem.at(2 * free.log_scales).energy != pytest.approx(1, abs=1e-2)
    for sign in (1, -1):
        # The same problem from another starting point, at which the sum is larger, or smaller, than
        # at the optimum.
        start = free.log_scales + sign * 0.5
        shifted = replace(
            problem, blocks=tuple(moved(problem, start)), pairs=moved_pairs(problem, start)
        )
        total = shifted.at(shifted.zero()).energy
        relative = replace(
            shifted,
            fixed=shifted.fixed / total,
            blocks=tuple(replace(block, energy=block.energy / total) for block in shifted.blocks),
            pairs=replace(shifted.pairs, energy=shifted.pairs.energy / total),
        )
        _, solution = keep_pace(relative, Exact())
        assert relative.at(2 * solution.log_scales).energy == pytest.approx(1, abs=1e-6)
        assert float(relative.slope @ (2 * solution.log_scales)) <= 1e-9


def moved(problem: Problem, t: Tensor) -> list[Any]:
    v = problem.class_matrix @ (2 * t)
    return [
        replace(b, energy=(-v[b.rows]).exp()[:, None] * b.energy * v[b.columns].exp())
        for b in problem.blocks
    ]


def moved_pairs(problem: Problem, t: Tensor) -> Any:
    v, pairs = problem.class_matrix @ (2 * t), problem.pairs
    return replace(pairs, energy=pairs.energy * (v[pairs.columns] - v[pairs.rows]).exp())


@pytest.mark.parametrize("normalization", ["absorb", "gain", "full", "paper"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "batch_norm_mlp", "vit"])
def test_keeping_the_pace_twice_does_nothing(name: str, normalization: str) -> None:
    model, _ = make(name)
    captured = prepared(name, normalization)
    options: dict[str, Any] = {
        "normalization": normalization,
        "pace": "keep",
        "max_log_scale": math.inf,
    }
    report = condition_(model, captured, **options)
    assert report.objective_after <= report.objective_before + 1e-9 * abs(report.objective_before)
    if report.num_units:
        # In front of norms ε bounds the scales, and "paper" leaves their parameters out of the sum.
        if normalization in ("gain", "full") or name in ("mlp", "vit"):
            assert report.pace == pytest.approx(1, abs=1e-6)
        assert float(condition_(model, captured, **options).log_scales.abs().max()) < 1e-5


def test_the_sum_of_the_curvature_is_kept_by_curvature() -> None:
    model, x = make("mlp")
    criterion, symmetry = Curvature(), find_symmetry(model, x)

    def total() -> float:
        return sum(
            float(values.sum())
            for values in criterion.energies(symmetry, diag_g(model, x), model).values()
        )

    before = total()
    condition_(model, x, criterion=criterion, pace="keep")
    assert total() == pytest.approx(before, rel=1e-5)


def test_the_papers_sweeps_keep_the_pace_too() -> None:
    model, x = make("mlp")
    assert condition_(model, x, solver=CoordinateDescent(), pace="keep").pace == pytest.approx(
        1, abs=1e-6
    )


def test_bounds_that_do_not_reach_there_are_told() -> None:
    model, x = make("mlp")
    with torch.no_grad():  # an optimum that is far, and slower
        model[0].weight.mul_(1e-3)
        model[0].bias.mul_(1e-3)
        model[2].weight.mul_(1e3)
    report = condition_(model, x, pace="keep", max_log_scale=0.01)
    assert report.pace < 1 - 1e-3
    assert "as near as bounds allow" in report.solution.message


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pace": "fast"}, 'pace must be None or "keep"'),
        ({"pace": "keep", "criterion": BalancedNorms()}, "has no energy whose sum could be kept"),
        ({"pace": "keep", "solver": ENorm()}, "criterion of its own"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    model, x = make("mlp")
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=message):
        condition_(model, x, **options)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))


class Sign(torch.optim.Optimizer):
    """The least that is sign-like."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter -= group["lr"] * parameter.grad.sign()


MADE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-7),
    "momentum": lambda params: torch.optim.SGD(params, lr=1e-7, momentum=0.9),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-7, eps=1e-30),
    "sign": lambda params: Sign(params, lr=1e-7),
}


def network() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2), nn.ReLU(), nn.Linear(2, 3)
    ).double()
    with torch.no_grad():
        model[0].weight.mul_(10)
        model[4].weight.mul_(0.1)
    return model, torch.randn(5, 3).double()


@pytest.mark.parametrize("kind", sorted(MADE))
def test_the_pace_is_what_a_step_gains_where_the_loss_pulls_at_paths_in_any_direction(
    kind: str,
) -> None:
    """The loss ⟨r, Φ(θ)⟩ with r normal, one step of the optimizer: means over r before and after
    are as the report says.
    """
    model, x = network()
    paths, generator = enumerate_paths(model, x[:1]), torch.Generator().manual_seed(0)
    pulls = torch.randn(400, len(paths), generator=generator, dtype=torch.float64)

    def gained(theta: Tensor) -> float:
        total = 0.0
        for pull in pulls:
            moving = theta.clone().requires_grad_()
            optimizer = MADE[kind]([moving])
            loss = pull @ paths.lift(moving)
            loss.backward()
            # with the gradient of the first step, to first order
            for _ in range(3 if kind == "momentum" else 1):
                optimizer.step()
            total += float(pull @ paths.lift(theta) - pull @ paths.lift(moving.detach()))
        return total

    before = gained(parameter_vector(model))
    report = condition_(model, x)
    after = gained(parameter_vector(model))
    assert report.paces[kind] == pytest.approx(after / before, rel=0.05)
    assert abs(math.log(report.paces[kind])) > 0.1, "the case would test nothing"
    assert report.rate_factors[kind] == pytest.approx(1 / report.paces[kind])


@cache
def conditioned(
    criterion: Criterion, seed: int
) -> tuple[nn.Module, nn.Module, tuple[Tensor, Tensor], Mapping[str, float]]:
    """A network as it was and conditioned, data to train it on, and its rate factors; once for all
    optimizers.
    """
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4), nn.ReLU(), nn.Linear(4, 10)
    ).double()
    with torch.no_grad():
        model[0].weight.mul_(3)
        model[0].bias.mul_(3)
    x, y = torch.randn(256, 20).double(), torch.randn(256, 10).double()
    before = copy.deepcopy(model)
    report = condition_(model, x, criterion=criterion)
    return before, model, (x, y), report.rate_factors


@pytest.mark.parametrize(("criterion", "factor"), [(PathKernel(), 2), (BalancedLayers(), 2.2)])
@pytest.mark.parametrize("kind", sorted(MADE))
def test_a_real_loss_gains_about_that_and_the_rate_factor_makes_up_for_it(
    kind: str, criterion: Criterion, factor: float
) -> None:
    """On data nothing pulls in all directions alike, so the pace is an estimate: within a factor of
    2 here.
    """
    ratios = []
    for seed in range(6):
        before, after, (x, y), rate_factors = conditioned(criterion, seed)

        def gained(model: nn.Module, x: Tensor = x, y: Tensor = y) -> float:
            model = copy.deepcopy(model)
            optimizer, loss = MADE[kind](model.parameters()), nn.functional.mse_loss(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                return float(loss.detach() - nn.functional.mse_loss(model(x), y))

        ratios.append(gained(after) / gained(before) * rate_factors[kind])
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    assert 1 / factor < mean < factor


def test_the_report_says_it() -> None:
    model, x = make("mlp")
    report = condition_(model, x)
    assert report.pace == report.paces["SGD"] == report.paces["momentum"]
    assert report.paces["Adam"] == report.paces["sign"]
    data = report.to_dict()
    assert data["paces"] == report.paces
    assert data["rate_factors"]["Adam"] == pytest.approx(1 / report.paces["Adam"])
    assert data["criterion"] == repr(BalancedLayers())
    for part in ("SGD and momentum", "Adam and sign", "keeps it"):
        assert part in str(report)


def test_solve_keeps_the_pace() -> None:
    model, x = make("resnet")
    symmetry, g = find_symmetry(model, x, normalization="paper"), diag_g(model, x)
    solution = pathcond.solve(symmetry, g, pace="keep")
    assert Problem.of(symmetry, g).at(2 * solution.log_scales).energy == pytest.approx(1, abs=1e-6)
