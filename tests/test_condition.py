"""``condition_``: the whole story, its report and its refusals."""

from __future__ import annotations

import copy
import json
import logging
import math
import re
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.measuring import PeakMemory
from scipy.optimize import minimize
from torch import nn

import pathcond
from pathcond import (
    BalancedLayers,
    CoordinateDescent,
    Criterion,
    Curvature,
    EnergyRangeError,
    ENorm,
    PathKernel,
    RescalingError,
    condition_,
    diag_g,
    reference,
)
from pathcond.capture.outputs import output_change
from pathcond.condition import EPSILON_SHARES, prepare
from pathcond.criteria.problem import Problem
from pathcond.networks import mlp
from pathcond.reference import enumerate_paths
from pathcond_paper.data import load

from .cases import CASES, families, make, prepared
from .test_reference import built, generators, parameter_vector
from .zoo import NORMALIZATIONS, WITH_BATCH, outputs


@pytest.mark.parametrize(("name", "normalization"), families(WITH_BATCH))
def test_conditioning_keeps_the_function_and_twice_does_nothing(
    name: str, normalization: str
) -> None:
    """Statistics are frozen: ``make`` leaves BatchNorms that have tracked batches."""
    model, inputs = make(name)
    captured = prepared(name, normalization)
    before = [outputs(model, inputs, training=training) for training in (False, True)]
    report = condition_(model, captured, normalization=normalization)
    after = [outputs(model, inputs, training=training) for training in (False, True)]
    assert output_change(before[0], after[0]) < 1e-9
    if normalization != "paper":
        assert output_change(before[1], after[1]) <= 1e-2
    assert report.objective_after <= report.objective_before
    if report.num_units:
        again = condition_(model, captured, normalization=normalization)
        assert float((captured.symmetry.class_matrix @ again.log_scales).abs().max()) < 1e-6


def moved_the_second_time(*, tracked: bool, **options: Any) -> float:
    """By how much conditioning moves an MLP with BatchNorms that was conditioned before."""
    torch.manual_seed(0)
    model = mlp((30, 8, 30), inputs=20, batch_norm=True).double()
    x = torch.randn(64, 20).double()
    if tracked:
        model.train()(x)
    condition_(model, x, **options)
    return float(condition_(model, x, **options).log_scales.abs().max())


@pytest.mark.parametrize("criterion", [BalancedLayers(), PathKernel(), Curvature()])
def test_under_paper_only_fresh_statistics_move_a_second_time(criterion: Criterion) -> None:
    """Fresh ones are measured on the batch, whose σ follows a scale in front; the model's does
    not. Without measuring, or once they have tracked a batch, nothing moves.
    """
    options: dict[str, Any] = {"criterion": criterion, "normalization": "paper"}
    assert moved_the_second_time(tracked=False, **options) > 0.05
    assert moved_the_second_time(tracked=True, **options) < 1e-6
    uncalibrated = moved_the_second_time(tracked=False, calibrate=False, **options)
    # What weights read is always measured.
    assert uncalibrated > 0.05 if criterion == BalancedLayers() else uncalibrated < 1e-6


@pytest.mark.parametrize("normalization", ["batch", "absorb", "gain", "full"])
@pytest.mark.parametrize("criterion", [BalancedLayers(), PathKernel()])
def test_under_other_values_fresh_statistics_do_not_move_either(
    criterion: Criterion, normalization: str
) -> None:
    options: dict[str, Any] = {"criterion": criterion, "normalization": normalization}
    assert moved_the_second_time(tracked=False, **options) < 1e-6


@pytest.mark.parametrize("name", ["mlp", "vit", "llama", "convnext", "relu_rnn", "resnet"])
def test_the_second_time_no_bit_of_a_weight_changes(name: str) -> None:
    """In float32, whose rounding leaves the optimum a little aside."""
    torch.manual_seed(0)
    model, inputs = CASES[name]()
    captured = pathcond.prepare(model, inputs)
    assert condition_(model, captured).log_scales.abs().max() > 0.01
    before = {key: value.clone() for key, value in model.state_dict().items()}
    report = condition_(model, captured)
    assert report.objective_after == report.objective_before
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("normalization", ["absorb", "full"])
def test_scales_in_front_of_a_norm_go_as_far_as_train_outputs_allow(normalization: str) -> None:
    """Unbounded, the optimum would change the train output by far more than 1 %: the box tightens
    until it does not.
    """
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(20, 30),
        nn.BatchNorm1d(30, eps=2e-3),
        nn.ReLU(),
        nn.Linear(30, 30),
        nn.BatchNorm1d(30, eps=2e-3),
        nn.ReLU(),
        nn.Linear(30, 5),
    ).double()
    x = torch.randn(64, 20).double()
    free = copy.deepcopy(model)
    symmetry = pathcond.find_symmetry(free, x, normalization=normalization)
    unbounded = pathcond.solve(symmetry, diag_g(free, x))
    assert (
        pathcond.rescale_(free, symmetry, unbounded.log_scales.clamp(min=-1)).output_change_train
        > 1e-2
    )
    report = condition_(model, x, normalization=normalization)
    assert report.output_change_eval < 1e-9
    assert report.output_change_train <= 1e-2
    assert float(report.log_scales.abs().max()) > 1e-4
    strict = condition_(
        mlp((8,), inputs=4, batch_norm=True).double(),
        torch.randn(32, 4).double(),
        train_tolerance=1e-7,
    )
    assert strict.output_change_train <= 1e-7


def test_a_train_change_that_cannot_be_had_is_refused_and_nothing_changes() -> None:
    model, x = make("batch_norm_mlp")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RescalingError, match="train_tolerance"):
        condition_(model, x, train_tolerance=0.0)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_the_divergence_decreases_and_stays_near_its_own_optimum(
    record_property: pytest.RecordProperty,
) -> None:
    """D₊ from the full G of enumerated paths: F is its surrogate, so its optimum lowers D₊ without
    reaching the least.
    """
    shares = []
    prepared = pathcond.prepare(*built("mlp"))  # of the same shape as the others
    symmetry = prepared.symmetry
    for seed in range(20):
        torch.manual_seed(seed)
        model, x = built("mlp")
        theta, K = parameter_vector(model), generators(model, x)
        J = enumerate_paths(model, x).jacobian(theta)
        g = J.square().sum(0)
        solution = pathcond.solve(symmetry, diag_g(model, prepared.sample))
        factors = symmetry.factors(solution.log_scales)
        moves = torch.cat([factors[name].log().reshape(-1) for name, _ in model.named_parameters()])
        u = 2 * torch.linalg.lstsq(K, moves[:, None]).solution[:, 0]
        # an admissible rescaling of the reference, too
        torch.testing.assert_close(K @ u / 2, moves, atol=1e-9, rtol=0)

        value = partial(reference.rescaled_divergence, K, theta, g)
        start, reached = value(torch.zeros(6).double()), value(u)
        least = minimize(lambda u: value(torch.as_tensor(u)), u.numpy(), method="L-BFGS-B").fun  # noqa: B023
        assert reached < start
        shares.append((reached - least) / (start - least))
    record_property("share of the decrease of D₊ that is left", shares)
    median, best, worst = (
        f"{100 * share:.0f} %" for share in (sorted(shares)[10], min(shares), max(shares))
    )
    page = (Path(__file__).parent.parent / "docs" / "conditioning.md").read_text()
    assert (
        f"leaves {median} of its possible decrease in the median, {best} at best and {worst} at "
        "worst"
    ) in " ".join(page.split())


def test_a_general_optimiser_finds_no_better_rescaling() -> None:
    """Adam on log-scales, F computed from diag(G) of the rescaled model itself: nothing of ours but
    ``rescale_``.
    """
    model, x = make("resnet")
    symmetry = pathcond.find_symmetry(model, x, normalization="full")
    solution = pathcond.solve(symmetry, diag_g(model, x))

    def criterion(t: torch.Tensor) -> float:
        moved = copy.deepcopy(model)
        pathcond.rescale_(moved, symmetry, t, verify=False)
        g = torch.cat([v.flatten() for v in diag_g(moved, x).values()])
        factors = symmetry.factors(t)
        shift = sum(float(factors[name].log().sum()) for name, _ in model.named_parameters())
        return len(g) * float(g.sum().log()) + 2 * shift

    least = criterion(solution.log_scales)
    assert least == pytest.approx(solution.objective_after, rel=1e-9)
    for step in (1e-2, 1e-1, 0.5):
        for _ in range(5):
            trial = solution.log_scales + step * torch.randn(
                symmetry.num_units, dtype=torch.float64
            )
            assert criterion(trial) > least


def test_units_that_nothing_reaches_and_models_without_units_are_left_alone() -> None:
    smooth = nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2))
    state = copy.deepcopy(smooth.state_dict())
    report = condition_(smooth, torch.randn(5, 3))
    assert report.num_units == 0
    assert str(report).startswith("Sequential is as it was: 0 units")
    assert "nothing can be rescaled" in str(report)
    assert all(torch.equal(value, state[name]) for name, value in smooth.state_dict().items())
    approximate = condition_(smooth, torch.randn(5, 3), approximate=True)
    assert approximate.num_units == 4
    assert float(approximate.log_scales.abs().max()) <= 2.5
    assert approximate.output_change_eval > 0


def test_the_papers_computation_for_gelu_is_bounded() -> None:
    """sec. gelu: |u| ≤ 5, by default with approximate=True."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(3, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 1)
    )
    with torch.no_grad():
        model[0].weight.mul_(1e-4)
    report = condition_(model, torch.randn(5, 3), approximate=True, solver=CoordinateDescent())
    assert float(report.log_scales.abs().max()) == pytest.approx(2.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_types_and_power_of_two_factors(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = mlp((32, 32), inputs=16).to(dtype), torch.randn(8, 16, dtype=dtype)
    before = model(x)
    report = condition_(model, x, round_to_power_of_two=None if dtype == torch.bfloat16 else True)
    assert report.rounded
    assert torch.equal(model(x), before)  # bit for bit


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_pace_is_the_change_of_the_trace_of_the_path_kernel(normalization: str) -> None:
    torch.manual_seed(0)
    model, x = mlp((300, 20, 60), inputs=30, batch_norm=True).double(), torch.randn(64, 30).double()
    # which leaves statistics as they are, so that those of the batch are others afterwards
    calibrate = normalization != "paper"
    before = sum(float(g.sum()) for g in diag_g(model, x, calibrate=calibrate).values())
    report = condition_(model, x, normalization=normalization, calibrate=calibrate)
    after = sum(float(g.sum()) for g in diag_g(model, x, calibrate=calibrate).values())
    # of large parameters there is a sample
    assert report.pace == pytest.approx(after / before, rel=0.02)
    assert report.to_dict()["pace"] == report.pace
    assert f"× {report.pace:.2g}" in str(report)


def test_a_norm_behind_the_classifier_slows_sgd_down_and_a_larger_learning_rate_makes_up_for_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nothing but γ and β then fixes the size of the weights, and theirs asks for large ones."""
    x, y = load("digits").train
    x = x.flatten(1).float()
    x = (x - x.mean()) / x.std()

    def accuracies(conditioned: bool, at_pace: bool = False) -> float:
        torch.manual_seed(0)
        model, learning_rate = (
            mlp((128,) * 4, inputs=64, batch_norm=True).append(nn.BatchNorm1d(10)),
            1e-3,
        )
        if conditioned:
            by_paths = {"criterion": PathKernel(), "normalization": "absorb"}
            pace = condition_(model, x[:256], **by_paths).pace
            assert pace < 0.3
            assert "pace of plain SGD" in caplog.text
            learning_rate /= pace if at_pace else 1
        optimizer, found = torch.optim.SGD(model.parameters(), lr=learning_rate), []
        for _ in range(12):
            for batch in torch.randperm(len(x)).split(64):
                nn.functional.cross_entropy(model.train()(x[batch]), y[batch]).backward()
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                found.append(float((model.eval()(x).argmax(1) == y).float().mean()))
        return sum(found) / len(found)

    slow, baseline, paced = accuracies(True), accuracies(False), accuracies(True, at_pace=True)
    assert slow < baseline - 0.1
    assert paced > baseline - 0.02


def test_prepared_models_are_captured_once() -> None:
    model, x = make("batch_norm_mlp")
    other = copy.deepcopy(model)
    prepared = prepare(model, x, normalization="full")
    torch.testing.assert_close(
        condition_(model, prepared, normalization="full").log_scales,
        condition_(other, x, normalization="full").log_scales,
    )
    with pytest.raises(ValueError, match="prepared with normalization='full'"):
        condition_(model, prepared)


def test_a_second_call_is_at_the_bounds_of_the_first() -> None:
    """Where no scale is at a bound, a channel whose ε happens to weigh as much as a tighter bound
    allows does not make the box of that bound the model's.
    """
    torch.manual_seed(0)
    norms = [nn.BatchNorm2d(16), nn.BatchNorm2d(32)]
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3, bias=False), norms[0], nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, bias=False), norms[1], nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )
    model(torch.randn(64, 1, 20, 20))
    x = torch.randn(16, 1, 20, 20)
    norms[0].eps = 1e-12
    share = EPSILON_SHARES[2]
    for _ in range(3):
        condition_(model, x)
        weighs = pathcond.find_symmetry(model, x).epsilon_shares(model).batch
        norms[1].eps *= share / float(weighs.max())
    assert pathcond.find_symmetry(model, x).epsilon_shares(model).is_reached(share)
    assert condition_(model, x).at_bound == {}


def test_of_a_large_batch_the_first_samples_are_used() -> None:
    model, first = make("batch_norm_mlp")
    x = torch.cat([first, 10 * torch.randn_like(first)])
    scales = [
        condition_(copy.deepcopy(model), inputs, max_samples=most).log_scales
        for inputs, most in ((first, None), (x, len(first)), (x, None))
    ]
    torch.testing.assert_close(scales[1], scales[0], rtol=0, atol=0)
    assert not torch.allclose(scales[2], scales[0])
    assert len(prepare(model, x, max_samples=3).symmetry.example_inputs) == 3
    assert len(prepare(model, x.repeat(100, 1)).symmetry.example_inputs) == 256
    with pytest.raises(ValueError, match="max_samples must be at least 2"):
        condition_(model, x, max_samples=1)


def test_samples_that_are_not_apart_are_kept_together() -> None:
    class Whole(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x - x.mean(0))  # type: ignore[no-any-return]

    x = torch.randn(6, 4)
    model = Whole(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    assert len(prepare(model, x, max_samples=2).symmetry.example_inputs) == 6


def test_optimizer_state_moves_along() -> None:
    model, x = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).square().sum().backward()
    optimizer.step()
    weight, momentum = (
        model[0].weight.detach().clone(),
        optimizer.state[model[0].weight]["momentum_buffer"].clone(),
    )
    condition_(model, x, optimizer=optimizer)
    factor = model[0].weight.detach() / weight
    torch.testing.assert_close(
        optimizer.state[model[0].weight]["momentum_buffer"], momentum / factor
    )


def test_the_stages_are_told_as_they_begin() -> None:
    model, x = make("mlp")
    heard: list[str] = []
    report = condition_(model, x, progress=heard.append)
    assert heard == ["symmetry", "energy", "solve", "rescale"] == list(report.seconds)


class Tags(HTMLParser):
    """Checks that tags close, and collects the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag not in ("meta", "line", "rect", "polyline", "polygon", "br", "link"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        if tag in ("rect", "polyline", "polygon", "line"):
            return
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


class TestReport:
    @pytest.fixture
    def report(self) -> pathcond.Report:
        model, x = make("resnet")
        return condition_(model, x)

    def test_in_the_terminal(self, report: pathcond.Report) -> None:
        text = str(report)
        for part in (
            "criterion",
            "diag G",
            "outputs",
            "seconds",
            "Pinned",
            "log λ",
            'normalization="batch"',
        ):
            assert part in text
        assert max(len(line) for line in text.splitlines()) < 160

    def test_as_data(self, report: pathcond.Report) -> None:
        data = json.loads(json.dumps(report.to_dict()))
        assert (
            data["num_units"]
            == len(data["log_scales"])
            == sum(row["units"] for row in data["layers"])
        )
        assert data["objective_after"] < data["objective_before"]
        assert data["seconds"].keys() == {"symmetry", "energy", "solve", "rescale"}
        assert data["pinned"][0].keys() >= {"reason", "operation", "module", "line"}

    def test_as_a_page(self, report: pathcond.Report, tmp_path: Path) -> None:
        path = report.to_html(tmp_path / "report.html")
        page = path.read_text(encoding="utf-8")
        assert not re.search(r"(src|href)=|<script|url\(|@import", page), (
            "the page must load nothing"
        )
        tags = Tags()
        tags.feed(page)
        assert not tags.open
        for part in (
            "Log-scales by layer",
            "diag(G), before and after",
            "Pinned",
            "Seconds",
            "eval mode",
            "train mode",
        ):
            assert part in tags.text
        for group in report.groups:
            assert group.name in tags.text

    def test_names_are_escaped(self, tmp_path: Path) -> None:
        class Odd(nn.Sequential):
            pass

        Odd.__name__ = "<b>Odd</b>"
        model = Odd()
        model.add_module("<i>", nn.Linear(2, 3))
        model.add_module("relu", nn.ReLU())
        model.add_module("out", nn.Linear(3, 1))
        page = (
            condition_(model, torch.randn(4, 2))
            .to_html(tmp_path / "odd.html")
            .read_text(encoding="utf-8")
        )
        assert "<b>Odd" not in page
        assert "<i>" not in page
        assert "&lt;b&gt;Odd" in page

    def test_the_diagonal_after_is_that_of_the_rescaled_model(self) -> None:
        model, x = make("densenet")
        report = condition_(model, x, normalization="paper")
        g = diag_g(model, x)
        for sample in report.diagonal:
            expected = g[sample.name].flatten()
            torch.testing.assert_close(
                sample.after, expected[expected > 0].log10(), rtol=0, atol=1e-9
            )

    def test_the_share_of_zeros(self) -> None:
        model, x = make("resnet")
        with torch.no_grad():
            model[4].bn2.weight.zero_()
        g = diag_g(model, x)
        zeros = sum(int((v == 0).sum()) for v in g.values()) / sum(v.numel() for v in g.values())
        report = condition_(model, x)
        assert report.zero_share == pytest.approx(zeros)
        assert "have g = 0" in str(report)


def test_enorm_through_condition(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make("batch_norm_mlp")
    with caplog.at_level(logging.ERROR, logger="pathcond"):
        report = condition_(model, x, solver=ENorm(cycles=None), normalization="paper")
    assert report.objective_after <= report.objective_before
    assert report.output_change_eval < 1e-9


def test_the_default_does_not_need_path_energies_in_the_range_of_float64() -> None:
    """Only the report shows diag(G) then, and does without it."""
    layers = [part for _ in range(24) for part in (nn.Linear(8, 8), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(8, 3)).double()
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.dim() > 1):
            weight.mul_(1e-9)
    x = torch.randn(4, 8).double()
    with pytest.raises(EnergyRangeError, match="underflows float64"):
        condition_(copy.deepcopy(model), x, criterion=pathcond.PathKernel())
    undescribed = condition_(copy.deepcopy(model), x, describe=False)
    report = condition_(model, x)
    assert torch.equal(report.log_scales, undescribed.log_scales)
    assert report.log_scales.abs().max() > 0.1
    assert report.diagonal == ()
    assert "diag G" not in str(report)


def test_the_report_counts_the_units_at_a_bound() -> None:
    x = torch.randn(16, 6)
    model = mlp((5, 4), inputs=6, outputs=3, batch_norm=True).train()
    free = condition_(copy.deepcopy(model), x)
    assert not free.at_bound
    assert "bounds" not in str(free)
    bounded = condition_(copy.deepcopy(model), x, max_log_scale=0.01)
    at_bound = int((bounded.log_scales.abs() >= 0.01 - 1e-9).sum())
    assert bounded.at_bound == {"max_log_scale": at_bound} == bounded.to_dict()["units_at_bound"]
    for layer in (module for module in model if isinstance(module, nn.Linear)):
        nn.init.normal_(layer.weight, std=1e-4)
    held = condition_(model, x)
    norms = sum(len(group.units) for group in held.groups if group.name in ("1", "4"))
    assert held.at_bound["the ε of a norm"] >= norms > 0
    assert "units go as far as the ε of a norm allows" in str(held)


def test_a_bound_is_checked() -> None:
    model, x = make("mlp")
    assert float(condition_(model, x, max_log_scale=0.01).log_scales.abs().max()) <= 0.01
    for bad in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="must be positive"):
            condition_(model, x, max_log_scale=bad)


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(CASES))
def test_cuda_finds_the_same_scales(name: str) -> None:
    model, inputs = make(name)
    there = torch.utils._pytree.tree_map(
        lambda x: x.cuda() if isinstance(x, torch.Tensor) else x, inputs
    )
    on_gpu = condition_(copy.deepcopy(model).cuda(), there, normalization="full")
    on_cpu = condition_(model, inputs, normalization="full")
    torch.testing.assert_close(on_gpu.log_scales.cpu(), on_cpu.log_scales, rtol=0, atol=1e-5)


def test_the_gradient_of_a_bounded_problem_leaves_out_what_is_held() -> None:
    model, x = make("mlp")
    symmetry, g = pathcond.find_symmetry(model, x), diag_g(model, x)
    zero = torch.zeros(symmetry.num_units, dtype=torch.float64)
    point = Problem.of(symmetry, g, (zero, zero)).at(zero)
    assert point.residual == 0.0
    assert float(point.gradient.norm()) > 0


class InnerAutocast(nn.Module):
    """Float32 weights; the last layer computes in another type."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.first, self.second, self.last = nn.Linear(8, 32), nn.Linear(32, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(torch.relu(self.first(x)))
        with torch.autocast("cpu", dtype=self.dtype):
            return self.last(x).float()


@pytest.mark.parametrize(("dtype", "units"), [(torch.bfloat16, 40), (torch.float16, 32)])
def test_autocast_inside_forward_sets_the_precision(dtype: torch.dtype, units: int) -> None:
    """Values that enter float16 keep their scale, because other inputs could overflow it."""
    model, x = InnerAutocast(dtype), torch.randn(64, 8)
    with torch.no_grad():
        model.first.weight *= torch.logspace(-1, 1, 32)[:, None]
        model.second.weight *= torch.logspace(-1, 1, 8)[:, None]
    others = torch.randn(500, 8) * torch.logspace(-2, 2, 500)[:, None]
    before = model(others)
    report = condition_(model, x)
    assert report.num_units == units
    assert report.rounded
    assert report.log_scales.any()
    assert torch.equal(model(others), before)  # powers of two commute with rounding


def test_conversions_elsewhere_do_not_loosen_the_tolerance() -> None:
    class Aside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last, self.aside = nn.Linear(8, 32), nn.Linear(32, 4), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.last(torch.relu(self.first(x))), self.aside(x).bfloat16()

    symmetry = pathcond.find_symmetry(Aside(), torch.randn(5, 8))
    assert symmetry.num_units == 32
    assert symmetry.computed_in == {torch.float32}
    assert not condition_(Aside(), torch.randn(5, 8)).rounded


def test_memory_is_that_of_two_problems_and_a_copy() -> None:
    """Layers between hidden units are blocks of the criterion, of which the solver holds two; then
    the weights that are verified. Neither squares of all weights nor diag(G) are held beside them.
    """
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.ReLU())]
    model, x = nn.Sequential(*layers, nn.Linear(256, 4)).double(), torch.randn(2, 256).double()
    prepared = pathcond.prepare(model, x)
    with PeakMemory(model) as memory:
        pathcond.condition_(model, prepared)
    assert memory.peak < 3.5 * sum(p.numel() * p.element_size() for p in model.parameters())
