"""What weights read, against written-out computations and their law; the balance of layers."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathcond import (
    BalancedLayers,
    BalancedNorms,
    CoordinateDescent,
    EnergyRangeError,
    PathKernel,
    RescalingError,
    condition_,
    find_symmetry,
    measure_reads,
    prepare,
    rescale_,
    solve,
)
from pathcond.criteria.problem import Problem
from pathcond.measured.layers import even_activations
from pathcond.networks import mlp
from pathcond.solvers.balance import balance_bounds

from .cases import CASES, make, prepared


class Calls(nn.Module):
    """A forward of its own, with a weight ``w``."""

    def __init__(self, forward: Callable[..., Any], *shape: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(*shape))
        self.own = forward

    def forward(self, x: Tensor) -> Any:
        return self.own(self, x)


class TestReads:
    def test_a_linear_layer_reads_its_inputs_and_a_convolution_its_patches(self) -> None:
        model = nn.Sequential(
            nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)
        ).double()
        x = torch.randn(6, 2, 4, 4).double()
        found = measure_reads(model, x)
        squares, inside = (
            F.unfold(v, 3, padding=1).mean((0, 2)) for v in (x**2, torch.ones_like(x))
        )
        torch.testing.assert_close(
            found["0.weight"].squares, (squares / inside).view(2, 3, 3).expand(3, 2, 3, 3)
        )
        hidden = model[:3](x).detach()
        torch.testing.assert_close(found["3.weight"].squares, hidden.square().mean(0).expand(5, 48))

    @pytest.mark.parametrize(
        ("module", "shape", "inputs"),
        [
            (nn.Linear(6, 4), (2, 6), 6),
            (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 1, 1), 36),  # most of the kernel reads padding
            (nn.Conv1d(4, 6, 3, groups=2), (2, 4, 5), 6),
            (nn.ConvTranspose1d(4, 6, 3, groups=2), (2, 4, 5), 6),
            (Calls(lambda self, x: x @ self.w, 6, 4), (2, 6), 6),
            (Calls(lambda self, x: F.linear(x, self.w.T), 6, 4), (2, 6), 6),
            (Calls(lambda self, x: torch.einsum("ni,oi->no", x, self.w), 4, 6), (2, 6), 6),
            (
                Calls(lambda self, x: torch.addmm(torch.ones(4), x, self.w), 6, 4),
                (2, 6),
                6,
            ),
            # Paths end at the softmax; what is read is what it returns.
            (Calls(lambda self, x: x.softmax(-1) @ self.w, 6, 4), (2, 6), 6),
            (Calls(lambda self, x: F.linear(x.softmax(-1), self.w), 4, 6), (2, 6), 6),
        ],
    )
    def test_how_many_products_an_output_sums_up(
        self, module: nn.Module, shape: tuple[int, ...], inputs: int
    ) -> None:
        (reads,) = measure_reads(module.double(), torch.randn(shape).double()).values()
        assert reads.inputs == inputs
        assert not reads.shared

    @pytest.mark.parametrize(
        "forward",
        [
            lambda self, x: (x @ self.w) @ self.w,
            lambda self, x: x @ self.w + self.w[0],
            lambda self, x: (x @ self.w, self.w.sum()),
        ],
    )
    def test_weights_that_are_used_twice_are_shared(self, forward: Callable[..., Any]) -> None:
        (reads,) = measure_reads(Calls(forward, 3, 3), torch.randn(2, 3)).values()
        assert reads.shared

    @pytest.mark.parametrize("name", sorted(CASES))
    def test_they_follow_the_scales_in_front(self, name: str) -> None:
        model, _ = make(name)
        captured = prepared(name, "full")
        symmetry = captured.symmetry
        before = measure_reads(model, captured.sample)
        scales = 0.5 * torch.rand(symmetry.num_units, dtype=torch.float64)
        rescale_(model, symmetry, scales, train_tolerance=None)
        after = measure_reads(model, captured.sample)
        classes = symmetry.class_log_scales(scales)
        assert before.keys() == after.keys()
        for weight, reads in before.items():
            if reads.shared or weight not in symmetry.scalings:
                continue
            factor = (2 * classes[symmetry.scalings[weight].minus.long()]).exp()
            expected = reads.squares * factor
            torch.testing.assert_close(
                after[weight].squares, expected, rtol=1e-9, atol=1e-12 * float(expected.max())
            )

    def test_values_that_are_not_finite_are_refused(self) -> None:
        model = mlp((4,), inputs=3, outputs=2).double()
        with torch.no_grad():
            model.get_parameter("1.weight").fill_(1e200)
        with pytest.raises(EnergyRangeError, match=r"What 3\.weight multiplies is not finite"):
            measure_reads(model, torch.ones(2, 3).double())


OPTIONS = {"normalization": "full", "max_log_scale": math.inf}


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_what_feeds_a_unit_counts_as_much_as_what_reads_it(share: float) -> None:
    torch.manual_seed(0)
    model, x = mlp((9, 4, 7), inputs=12, outputs=3).double(), torch.randn(20, 12).double()
    captured = prepare(model, x, normalization="full")
    # the size of what each layer reads, where norms alone are in balance
    balanced = copy.deepcopy(model)
    condition_(balanced, captured, criterion=BalancedLayers(share=0.0), **OPTIONS)
    sizes = []
    for layer in balanced:
        if isinstance(layer, nn.Linear):
            sizes.append(float(x.square().mean().sqrt()))
        x = layer(x).detach()

    criterion = BalancedLayers(share=share)
    condition_(model, captured, criterion=criterion, **OPTIONS)
    weights = [p.detach() for p in model.parameters() if p.dim() > 1]
    # the last layer's outputs have no scale, and count as what is read first
    ratios = [b / a for a, b in pairwise([*sizes, sizes[0]])]
    counts = [len(w) * ratio ** (2 * share) for w, ratio in zip(weights, ratios, strict=True)]
    for (into, c), (out, d) in pairwise(zip(weights, counts, strict=True)):
        torch.testing.assert_close(
            c * into.square().sum(1), d * out.square().sum(0), rtol=1e-4, atol=0
        )


def test_weights_in_front_of_a_norm_are_held_at_one_length() -> None:
    torch.manual_seed(0)
    model = mlp((9, 4, 7), inputs=12, outputs=3, batch_norm=True).double()
    x = torch.randn(20, 12).double()
    condition_(model, x, criterion=BalancedLayers(front=2.0), **OPTIONS)
    for weight in [p.detach() for p in model.parameters() if p.dim() > 1][:-1]:
        torch.testing.assert_close(
            weight.square().sum(1), torch.full((len(weight),), 2.0).double(), rtol=0.05, atol=0
        )


@pytest.mark.parametrize("name", ["products_of_inputs", "resnet", "llama", "used_twice"])
def test_even_activations_solve_their_least_squares(name: str) -> None:
    """The dense solution, for units that are multiplied with each other too."""
    model, _ = make(name)
    captured = prepared(name, "full")
    symmetry, reads = captured.symmetry, measure_reads(model, captured.sample)
    start = torch.randn(symmetry.num_units, dtype=torch.float64)
    found, started = even_activations(symmetry, reads, start), symmetry.class_log_scales(start)
    logs: dict[int, list[float]] = {}
    for weight, read in reads.items():
        if weight in symmetry.scalings and not read.shared:
            minus = symmetry.scalings[weight].minus.long().expand_as(read.squares)
            size = (read.squares * (2 * started[minus]).exp()).mean().sqrt().log()
            for cls in minus.unique().tolist():
                logs.setdefault(cls, []).append(float(size))
    means = {cls: sum(values) / len(values) for cls, values in logs.items()}
    level = means.pop(0, sum(means.values()) / max(len(means), 1))
    rows = symmetry.class_matrix @ torch.eye(symmetry.num_units, dtype=torch.float64)[0]
    dense = torch.stack(
        [symmetry.class_matrix @ row for row in torch.eye(symmetry.num_units, dtype=torch.float64)],
        dim=1,
    )
    assert dense.shape[0] == len(rows)
    wanted = torch.tensor([level - mean for mean in means.values()], dtype=torch.float64)
    expected = torch.linalg.pinv(dense[list(means)]) @ wanted
    torch.testing.assert_close(found, expected, rtol=1e-8, atol=1e-10)


def test_solve_takes_what_was_read() -> None:
    model, x = mlp((5,), inputs=4, outputs=3).double(), torch.randn(8, 4).double()
    symmetry = find_symmetry(model, x)
    solution = solve(symmetry, measure_reads(model, x), criterion=BalancedLayers(), model=model)
    report = condition_(model, x, criterion=BalancedLayers(), max_log_scale=math.inf)
    torch.testing.assert_close(report.log_scales, solution.log_scales)


@pytest.mark.parametrize("options", [{"share": -0.1}, {"share": 1.5}, {"front": 0.0}])
def test_settings_without_a_meaning_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must"):
        BalancedLayers(**options)


def test_dead_units_and_a_batch_of_zeros_leave_the_norms_to_decide() -> None:
    layers = [nn.Linear(4, 5, bias=False), nn.ReLU(), nn.Linear(5, 3, bias=False)]
    model, x = nn.Sequential(*layers).double(), torch.zeros(8, 4).double()
    report = condition_(model, x, criterion=BalancedLayers())
    assert bool(report.log_scales.isfinite().all())
    assert float(condition_(model, x, criterion=BalancedLayers()).log_scales.abs().max()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_twice_does_nothing_in_every_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = mlp((9, 4), inputs=6, outputs=3).to(dtype), torch.randn(8, 6).to(dtype)
    condition_(model, x, criterion=BalancedLayers())
    assert float(condition_(model, x, criterion=BalancedLayers()).log_scales.abs().max()) < 1e-6


class Depthwise(nn.Module):
    """A stream read by a depthwise convolution, a pointwise one and an identity side by side, as in
    RepVGG and RepViT, and by a block in front of a norm: scaling both leaves that block as it is.
    """

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 3, bias=False), nn.BatchNorm2d(width))
        self.mix = nn.Sequential(
            nn.Conv2d(width, 9, 1, bias=False),
            nn.BatchNorm2d(9),
            nn.ReLU(),
            nn.Conv2d(9, width, 1, bias=False),
            nn.BatchNorm2d(width),
        )
        self.wide = nn.Conv2d(width, width, 3, padding=1, groups=width, bias=False)
        self.wide_norm = nn.BatchNorm2d(width)
        self.point = nn.Conv2d(width, width, 1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.mix(x)
        x = self.norm(self.wide_norm(self.wide(x)) + self.point(x) + x)
        return self.head(x.mean((2, 3)))


@pytest.mark.parametrize("criterion", [BalancedLayers(), BalancedNorms(), BalancedLayers(share=0)])
def test_a_weight_that_no_scale_changes_holds_none(
    criterion: BalancedLayers | BalancedNorms,
) -> None:
    """The pointwise convolution is multiplied and divided by the stream: what the stream is in
    balance with is the gains in front of it, or scales go to infinity.
    """
    torch.manual_seed(0)
    model, x = Depthwise().double(), torch.randn(16, 3, 8, 8).double()
    for _ in range(20):
        model(torch.randn_like(x))
    before = model.eval()(x)
    report = condition_(model, x, criterion=criterion)
    assert 0.1 < float(report.log_scales.abs().max()) < 3
    torch.testing.assert_close(model(x), before, rtol=1e-10, atol=1e-10)
    assert float(condition_(model, x, criterion=criterion).log_scales.abs().max()) < 1e-6


class RunsOff(BalancedNorms):
    """It falls for ever as scales grow."""

    def problem(self, *arguments: Any) -> Problem:
        problem = super().problem(*arguments)
        return replace(problem, slope=problem.slope + 2 * problem.weight)


def test_a_criterion_without_a_minimum_is_refused() -> None:
    model, x = make("mlp")
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RescalingError, match="has no minimum: it still falls where units of "):
        condition_(model, x, criterion=RunsOff())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    report = condition_(model, x, criterion=RunsOff(), max_log_scale=1.0)
    assert float(report.log_scales.abs().max()) == pytest.approx(1.0)


class TestDefault:
    def test_it_is_the_criterion_unless_the_paper_or_the_pace_asks_for_paths(self) -> None:
        model, x = make("mlp")
        found = {
            "": condition_(copy.deepcopy(model), x),
            "solver": condition_(copy.deepcopy(model), x, solver=CoordinateDescent()),
            "pace": condition_(copy.deepcopy(model), x, pace="keep"),
        }
        assert found[""].criterion == repr(BalancedLayers())
        assert found["solver"].criterion == found["pace"].criterion == repr(PathKernel())

    def test_the_box_around_balance_does_not_hold_it(self) -> None:
        """A bottleneck lies where that box does not reach: its centre counts entries, not
        outputs.
        """
        torch.manual_seed(0)
        widths = (500, 250, 125, 15, 125, 250, 500)
        model, x = mlp(widths, inputs=392, outputs=392), torch.randn(8, 392)
        captured = prepare(model, x)
        lower, upper = balance_bounds(captured.symmetry, model)
        solution = solve(
            captured.symmetry,
            measure_reads(model, captured.sample),
            criterion=BalancedLayers(),
            model=model,
        )
        found = condition_(model, captured).log_scales
        torch.testing.assert_close(found, solution.log_scales)
        assert bool(((found < lower) | (found > upper)).any()), "the case would test nothing"

    def test_a_model_of_zeros_is_left_alone(self) -> None:
        model, x = mlp((4,), inputs=3, outputs=2), torch.randn(5, 3)
        for parameter in model.parameters():
            nn.init.zeros_(parameter)
        assert "nothing to condition" in condition_(model, x).solution.message

    def test_it_says_where_nothing_is_gained(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.manual_seed(0)
        x = torch.randn(64, 300)
        with caplog.at_level(logging.WARNING, logger="pathcond"):
            uneven = mlp((50, 5, 50), inputs=300, outputs=300)
            condition_(uneven, x)
            condition_(uneven, x)
            assert not caplog.text
            fresh = mlp((300, 300), inputs=300, batch_norm=True)
            settled = {"criterion": BalancedLayers(front=1 / 3), "normalization": "absorb"}
            condition_(fresh, x, **settled)
            assert "conditioning does not change training" in caplog.text
            caplog.clear()
            condition_(fresh, x, **settled)
            assert not caplog.text

    @pytest.mark.parametrize(
        ("make_model", "warns"),
        [
            (lambda: mlp((40, 40), inputs=30), True),
            (lambda: mlp((40, 40, 40), inputs=60), True),
            (lambda: convolutions(8, 8), True),
            (lambda: convolutions(8, 6), False),
            (lambda: mlp((40,), inputs=30), False),
            (lambda: mlp((40, 20, 40), inputs=30), False),
            (lambda: mlp((12, 12), inputs=30, outputs=30), False),
            (lambda: mlp((40, 40), inputs=30, batch_norm=True), False),
            (lambda: Standardised(mlp((40, 40), inputs=30)), False),
        ],
    )
    def test_it_says_where_equal_widths_gain_next_to_nothing(
        self, make_model: Callable[[], nn.Module], warns: bool, caplog: pytest.LogCaptureFixture
    ) -> None:
        torch.manual_seed(0)
        model = make_model()
        size = next(w for w in model.parameters() if w.dim() > 1).shape[1]
        x = torch.randn(16, size, 9, 9) if size == 3 else torch.randn(16, size)
        says = "have the same width and there is no normalization layer: at a tuned"
        with caplog.at_level(logging.WARNING, logger="pathcond"):
            for options in ({"criterion": BalancedNorms()}, {"describe": False}):
                condition_(copy.deepcopy(model), x, **options)
            assert says not in caplog.text
            condition_(model, x)
            assert caplog.text.count(says) == warns
            condition_(model, x)
            assert caplog.text.count(says) == warns, "it moved nothing"

    def test_it_says_where_nothing_can_be_rescaled(self, caplog: pytest.LogCaptureFixture) -> None:
        torch.manual_seed(0)
        layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2)]
        model, x = nn.Sequential(*layers), torch.randn(6, 4)
        model.left_over = nn.Linear(7, 2)
        model.forward = nn.Sequential(*layers).forward  # type: ignore[method-assign]
        assert condition_(model, x).num_units == 0
        assert "a layer which the example does not use: delete it" in caplog.text
        caplog.clear()
        del model.left_over
        assert condition_(model, x).num_units == 15
        assert "can be rescaled" not in caplog.text


def convolutions(first: int, second: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, first, 3),
        nn.ReLU(),
        nn.Conv2d(first, second, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(25 * second, 5),
    )


class Standardised(nn.Module):
    """Normalizes by a function; there is no module for it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(nn.functional.layer_norm(x, x.shape[1:]))  # type: ignore[no-any-return]
