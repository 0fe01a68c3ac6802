"""Figures without training of networks: toy, criteria, regimes, convergence."""

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import pathcond
from pathcond.criteria.problem import Problem
from pathcond.rows import Row
from pathcond.solvers import CoordinateDescent
from pathcond_paper import FIGURES, load
from pathcond_paper.figure import Claim, Figure, Place
from pathcond_paper.figures import convergence, criteria, regimes, toy

NAMES = ("toy", "criteria", "regimes", "convergence")


def smoke(figure: Figure) -> Iterator[Row]:
    """The rows of a figure's smallest preset; the jobs must be those that were asked for, each
    once.
    """
    jobs = figure.jobs("smoke")
    groups = figure.together(jobs)
    assert sorted(map(str, (job for group in groups for job in group))) == sorted(map(str, jobs))
    for group in groups:
        shares: list[float] = []
        for job, result in figure.run(
            group, Place(), lambda share, what, shares=shares: shares.append(share)
        ):
            assert job in group
            yield Row(job, result, {})
        assert shares == sorted(shares)
        assert 0 <= shares[0] <= shares[-1] <= 1


@cache
def rows_of(name: str) -> list[Row]:
    return list(smoke(load(name)))


def verdicts(claims: list[Claim]) -> list[str]:
    return [claim.verdict for claim in claims]


@pytest.mark.parametrize("name", NAMES)
def test_a_figure_without_rows_says_so(name: str) -> None:
    figure = load(name)
    assert set(verdicts(figure.claims([]))) == {"not run"}
    assert next(iter(figure.plot([]))) == name
    assert figure.table([])


@pytest.mark.parametrize("name", NAMES)
def test_presets(name: str) -> None:
    figure = load(name)
    counts = [len(figure.jobs(preset)) for preset in ("smoke", "cpu", "paper")]
    assert counts == sorted(counts)
    assert counts[0] < counts[2]
    assert len(figure.jobs("paper", seeds=1)) < len(figure.jobs("paper", seeds=2)) < counts[2]
    assert not any(figure.DATASETS.values())


def test_running_needs_no_plotting_libraries() -> None:
    code = (
        "import sys\n"
        "for name in ('matplotlib', 'scipy', 'sklearn'): sys.modules[name] = None\n"
        "from pathcond_paper import load\n"
        f"for name in {tuple(FIGURES)}: load(name)\n"
        "figure = load('toy')\n"
        "from pathcond_paper.figure import Place\n"
        "list(figure.run(figure.jobs('smoke', seeds=0)[:1], Place(), lambda share, what: None))\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


# Toy.


def test_conditioned_starts_are_faster_and_closer_to_the_ideal_flow() -> None:
    found = [row for row in rows_of("toy") if "start" in row.job]
    assert [tuple(row.job["start"]) for row in found] == list(toy.STARTS)
    for row in found:
        plain, rescaled = row.result["plain"], row.result["rescaled"]
        assert rescaled["mean_loss"] < plain["mean_loss"] / 2
        assert rescaled["distance"] < plain["distance"] / 2
        assert rescaled["loss"][0] == pytest.approx(plain["loss"][0], rel=1e-9)  # the same function
        assert len(plain["path"]) == len(plain["loss"]) == len(row.result["ideal"]) == toy.KEPT
    assert verdicts(toy.claims(rows_of("toy"))) == ["reproduced", "reproduced"]
    assert verdicts(toy.claims(found[:2])) == ["not run", "not run"]


def test_claims_of_toy_can_fail() -> None:
    swapped = [
        replace(
            row,
            result=row.result | {"plain": row.result["rescaled"], "rescaled": row.result["plain"]},
        )
        for row in rows_of("toy")
    ]
    assert verdicts(toy.claims(swapped)) == ["not reproduced", "not reproduced"]


def test_a_conditioned_neuron_is_balanced() -> None:
    u, v, w = toy.condition_starts(
        torch.tensor([[0.2, 1.5, -3.0], [4.0, 0.1, 0.3]], dtype=torch.float64)
    ).T
    torch.testing.assert_close(u.square(), v.square() + w.square(), rtol=1e-6, atol=0)
    torch.testing.assert_close(u * v, torch.tensor([0.3, 0.4], dtype=torch.float64))


def test_lifted_loss_is_the_loss_where_u_is_positive() -> None:
    theta, x = torch.randn(50, 3, dtype=torch.float64), torch.randn(20, dtype=torch.float64)
    theta[:, 0].abs_()
    torch.testing.assert_close(toy.lifted_loss(toy.lift(theta), x), toy.loss(theta, x))


def test_distance_of_curves_does_not_see_speed() -> None:
    t = torch.linspace(0, 1, 301, dtype=torch.float64)
    slow, fast = (torch.stack([s, s.square()], dim=1) for s in (t, t**3))
    assert toy.distance(slow, fast) < 1e-3
    assert toy.distance(slow, slow + torch.tensor([0.0, 2.0])) == pytest.approx(2)


def test_plot_of_toy() -> None:
    losses, lifts, parameters = toy.plot(rows_of("toy"))["toy"].axes
    assert len(losses.get_lines()) == 2 * 3
    assert (
        sum(line.get_linestyle() == ":" and len(line.get_xdata()) > 0 for line in lifts.get_lines())
        == 3
    )
    ends = [
        line.get_xydata()[-1]
        for line in lifts.get_lines()
        if line.get_linestyle() == "-" and len(line.get_xdata()) > 1
    ]
    assert len(ends) == 3
    assert all(math.dist(end, (1, 0)) < 0.1 for end in ends)
    assert len(parameters.get_lines()) == 1 + 3 * 4


# Criteria.


def test_criteria_coincide() -> None:
    alike = {
        "condition",
        "operator",
        "inverse",
        "pathcond",
        *(f"{kind} {n}" for kind in ("gradient", "norm") for n in "12∞s"),
    }
    for row in rows_of("criteria"):
        t = row.result["minimisers"]
        balanced = [
            math.log(math.prod(map(abs, row.result["theta"]))) / len(row.result["theta"])
            - math.log(abs(x))
            for x in row.result["theta"]
        ]
        for name in alike & t.keys():
            assert t[name] == pytest.approx(balanced, abs=1e-6), name
        assert (t["trace"] is None) == (row.result["curvature"] < 0)
        if t["trace"] is not None:
            assert t["trace"] == pytest.approx(balanced, abs=1e-6)


def test_a_norm_that_sees_the_order_tells_criteria_apart() -> None:
    found = [
        criteria.apart(row.result, "gradient w", "norm w")
        for row in rows_of("criteria")
        if row.job["length"] == 2
    ]
    assert found == pytest.approx([math.log(2)] * len(found), abs=1e-6)


def test_claims_of_criteria() -> None:
    found = rows_of("criteria")
    assert verdicts(criteria.claims(found)) == ["not reproduced", *["reproduced"] * 4]
    # or the condition on ℓ'' would not show
    assert any(row.result["curvature"] < 0 for row in found)
    first = next(row for row in found if row.job["length"] == 2 and row.result["curvature"] > 0)
    moved = first.result["minimisers"] | {"norm 2": [1.0, -1.0]}
    wrong = [
        replace(first, result=first.result | {"minimisers": moved}),
        *(row for row in found if row is not first),
    ]
    assert verdicts(criteria.claims(wrong))[1:3] == ["not reproduced", "not reproduced"]


@pytest.mark.parametrize("loss", criteria.LOSSES)
def test_derivatives_are_those_of_autograd(loss: str) -> None:
    theta = torch.randn(4, dtype=torch.float64)
    slope = torch.func.grad(criteria.LOSSES[loss])
    a, b = torch.func.grad(slope)(theta.prod()), slope(theta.prod())
    gradient, hessian = criteria.derivatives(a, b, theta)

    def whole(x: torch.Tensor) -> torch.Tensor:
        return criteria.LOSSES[loss](x.prod())

    torch.testing.assert_close(gradient, torch.func.grad(whole)(theta))
    torch.testing.assert_close(hessian, torch.func.hessian(whole)(theta))


def test_spectrum_is_that_of_torch() -> None:
    theta = torch.randn(20, 2, dtype=torch.float64)
    a, b = torch.randn(2, 20, dtype=torch.float64)
    functions, hessian = criteria.criteria(a, b, 2), criteria.derivatives(a, b, theta)[1]
    torch.testing.assert_close(functions["operator"](theta), torch.linalg.matrix_norm(hessian, 2))
    torch.testing.assert_close(
        functions["condition"](theta), torch.linalg.cond(hessian), rtol=1e-6, atol=0
    )


def test_what_has_no_minimiser_is_not_given_one() -> None:
    theta = torch.tensor([[0.5, -2.0]], dtype=torch.float64)
    assert criteria.bisection(lambda x: -x.square().sum(-1), theta).isnan().all()  # falls for ever
    assert criteria.bisection(lambda x: x.prod(-1), theta).isnan().all()  # constant
    assert (
        criteria.newton(lambda x: -x.square().sum(-1), torch.ones(1, 3, dtype=torch.float64))
        .isnan()
        .all()
    )


def test_plot_of_criteria() -> None:
    first, second = criteria.plot(rows_of("criteria"))["criteria"].axes
    assert len(first.get_yticks()) == 14
    assert len(second.get_yticks()) == 4
    assert len(first.get_lines()) == len(criteria.LOSSES) + 1
    assert max(x for line in second.get_lines()[:-1] for x in line.get_xdata()) < criteria.AGREEMENT


# Regimes.


@given(
    alpha=st.floats(1e-4, 1e4),
    seed=st.integers(0, 2**31),
)
def test_widths(alpha: float, seed: int) -> None:
    widths = regimes.sample_widths(alpha, torch.Generator().manual_seed(seed))
    assert len(widths) == 8
    assert sum(widths) == 256
    assert min(widths) >= 1


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=10), st.integers(10, 300))
def test_largest_remainders(weights: list[float], total: int) -> None:
    shares = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    widths = regimes.with_largest_remainders(shares, total)
    assert sum(widths) == total
    exact = 1 + shares * (total - len(shares))
    assert (torch.tensor(widths) - exact).abs().max() < 1 + 1e-9


def test_small_alpha_is_uneven_and_large_alpha_even() -> None:
    generator = torch.Generator().manual_seed(0)
    widest = [
        [max(regimes.sample_widths(alpha, generator)) for _ in range(20)] for alpha in (0.1, 100.0)
    ]
    assert min(widest[0]) > max(widest[1])
    assert max(widest[1]) < 50


def test_dirichlet_has_the_right_variance() -> None:
    generator = torch.Generator().manual_seed(0)
    for alpha in (0.3, 2.0):
        shares = torch.stack([regimes.dirichlet(alpha, 8, generator) for _ in range(3000)])
        assert float(shares.var(0).mean()) == pytest.approx(7 / 64 / (8 * alpha + 1), rel=0.05)


def test_rescaling_grows_with_unevenness_and_as_the_variance_falls() -> None:
    found = rows_of("regimes")
    assert verdicts(regimes.claims(found)) == ["reproduced", "reproduced"]
    for row in found:
        largest = row.result["largest"]["exact"][: regimes.GAINS.index(1.0) + 1]
        assert largest == sorted(largest, reverse=True)
    upside_down = [replace(row, job=row.job | {"alpha": 1 / row.job["alpha"]}) for row in found]
    assert verdicts(regimes.claims(upside_down))[0] == "not reproduced"
    backwards = [
        replace(
            row,
            result=row.result | {"largest": {k: v[::-1] for k, v in row.result["largest"].items()}},
        )
        for row in found
    ]
    assert verdicts(regimes.claims(backwards))[1] == "not reproduced"


def test_magnitudes_are_those_of_condition() -> None:
    job = regimes.jobs("smoke")[0]
    ((_, result),) = regimes.run([job], Place(), lambda share, what: None)
    generator = torch.Generator().manual_seed(job["seed"])
    widths = [32, *regimes.sample_widths(job["alpha"], generator), 32]
    assert widths[1:-1] == result["widths"]
    layers = [nn.Linear(*pair) for pair in pairwise(widths)]
    model = nn.Sequential(*(m for layer in layers for m in (layer, nn.ReLU())))[:-1].double()
    with torch.no_grad():
        for parameter in model.parameters():  # a = 1
            parameter.copy_(
                torch.randn(parameter.shape, dtype=torch.float64, generator=generator) / 32**0.5
            )
    # The figure has no bound; by default weights stay near balance.
    report = pathcond.condition_(
        model,
        torch.ones(1, 32, dtype=torch.float64),
        criterion=pathcond.PathKernel(),
        max_log_scale=math.inf,
    )
    place = result["gains"].index(1.0)
    assert result["largest"]["exact"][place] == pytest.approx(
        float(report.log_scales.abs().max()), rel=1e-6
    )


def test_spearman_is_that_of_scipy() -> None:
    scipy_stats = pytest.importorskip("scipy.stats")
    x, y = torch.randint(0, 6, (2, 30)).tolist()
    assert regimes.spearman(x, y) == pytest.approx(scipy_stats.spearmanr(x, y).statistic)


def test_plot_of_regimes() -> None:
    exact, sweeps = regimes.plot(rows_of("regimes"))["regimes"].axes
    for panel in (exact, sweeps):
        assert len(panel.get_lines()) == len(regimes.GAINS)
        assert all(len(line.get_xdata()) == regimes.ALPHAS["smoke"] for line in panel.get_lines())


# Convergence.


def test_gaps_fall_and_exact_has_none() -> None:
    for row in rows_of("convergence"):
        result = row.result
        gap, of_paper = result["gap"], result["gap_of_paper"]
        assert len(gap) == len(of_paper) == 101
        assert len(result["step"]) == 100
        assert gap[0] == of_paper[0] == 1
        assert all(later <= earlier + 1e-9 for earlier, later in pairwise(gap))
        assert abs(result["exact_gap"][-1]) < 1e-6
        assert of_paper[-1] == 0
        # F* is below F(u_100)
        assert all(mine >= theirs - 1e-9 for mine, theirs in zip(gap, of_paper, strict=True))
        assert gap[1] > 1e-4  # a sweep is not enough, or the figure would show nothing


def test_iterates_are_those_of_the_solver() -> None:
    model = convergence.NETWORKS["small MLP"]()
    images = torch.randn(convergence.IMAGES["small MLP"])
    problem = Problem.of(
        pathcond.find_symmetry(model, images, normalization="paper"), pathcond.diag_g(model, images)
    )
    iterates = list(CoordinateDescent(sweeps=4, tolerance=0).iterates(problem))
    assert len(iterates) == 4
    before = problem.zero()
    for sweeps, (u, moved) in enumerate(iterates, start=1):
        solution = CoordinateDescent(sweeps=sweeps, tolerance=0).solve(problem)
        torch.testing.assert_close(u, 2 * solution.log_scales, rtol=0, atol=0)
        assert moved == pytest.approx(float((u - before).abs().sum()))
        before = u
    assert len(list(CoordinateDescent(sweeps=1000, tolerance=1e-3).iterates(problem))) < 100


def as_if_of_the_paper(rows: list[Row], **changes: float) -> list[Row]:
    """The rows of one small network under the names of the paper's networks."""
    found = [row for row in rows if row.job["network"] == "small CNN"]
    return [
        replace(row, job=row.job | {"network": network}, result=row.result | changes)
        for row in found
        for network in convergence.OF_PAPER
    ]


def test_claims_of_convergence() -> None:
    found = rows_of("convergence")
    # its networks are not the paper's
    assert set(verdicts(convergence.claims(found))) == {"not run"}
    assert verdicts(convergence.claims(as_if_of_the_paper(found))) == [
        "reproduced",
        "not reproduced",
        "reproduced",
        "reproduced",
        "not reproduced",
        "reproduced",
        "reproduced",
    ]
    # A solver that leaves nothing does not make ten sweeps near-optimal.
    slow = as_if_of_the_paper(
        found, gap=[1 - 0.025 * min(k, 20) for k in range(101)], step=[0.1] * 100, exact_gap=[0.0]
    )
    assert verdicts(convergence.claims(slow)) == [
        "not reproduced",
        "reproduced",
        "not reproduced",
        "not reproduced",
        "not reproduced",
        "not reproduced",
        "not reproduced",
    ]


def test_plot_of_convergence() -> None:
    axes = convergence.plot(rows_of("convergence"))["convergence"].axes
    assert len(axes) == 2 * len(convergence.DIAGONALS)
    for steps in axes[1::2]:
        assert [line.get_label() for line in steps.get_lines()] == ["small MLP", "small CNN"]
    for gaps in axes[::2]:
        solid = [
            line
            for line in gaps.get_lines()
            if line.get_linestyle() == "-" and len(line.get_xdata()) == 101
        ]
        assert len(solid) == 2


@pytest.mark.parametrize("name", NAMES)
def test_tables_have_a_line_for_every_group(name: str) -> None:
    text = load(name).table(rows_of(name))
    expected = {
        "toy": "(0.3, 3, -1)",
        "criteria": "‖∇²L‖",
        "regimes": "a = 0.01",
        "convergence": "small CNN, published",
    }
    assert expected[name] in text
    assert len(text.splitlines()) > len(load(name).table([]).splitlines())
    assert max(map(len, text.splitlines())) <= 132
