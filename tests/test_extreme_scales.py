"""Models whose optimum runs away: tokens that start at zero, tiny embeddings, a share of ε that
bounds a scale.

They are what small transformers from a configuration show (benchmarks/transformers_training.py),
cut down to a few modules.
"""

from __future__ import annotations

import copy
import logging
import math
from functools import partial

import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond import CoordinateDescent, Criterion, PathKernel, condition_, diag_g
from pathcond.networks import mlp
from pathcond.solvers.balance import WIDTH, balance_bounds

from .cases import make


class Tokens(nn.Module):
    """A transformer of one layer, whose class token and positions start as they do in DeiT and
    YOLOS: at zero.
    """

    def __init__(self, size: float = 0.02, width: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(6, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.positions = nn.Parameter(torch.zeros(1, 5, width))
        self.first, self.second, self.last = (nn.LayerNorm(width, eps=1e-12) for _ in range(3))
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 3)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=0.02)
                nn.init.zeros_(module.bias)
        nn.init.normal_(self.embed.weight, std=size)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.embed(x)], 1) + self.positions
        h = h + self.out(self.value(self.first(h)).mean(1, keepdim=True).expand_as(h))
        h = h + self.down(self.up(self.second(h)).relu())
        return self.head(self.last(h))


def trained(
    model: nn.Module, x: Tensor, optimizer: type[torch.optim.Optimizer], steps: int = 20
) -> float:
    """The loss after some steps; NaN or infinite if training diverges."""
    target = torch.randn(model(x).shape, generator=torch.Generator().manual_seed(7))
    stepper = optimizer(model.parameters(), lr=1e-3)
    for _ in range(steps):
        stepper.zero_grad()
        (model(x) - target).square().mean().backward()
        stepper.step()
    with torch.no_grad():
        return float((model(x) - target).square().mean())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("criterion", "normalization"),
    [(None, "absorb"), (PathKernel(), "absorb"), (PathKernel(), "full")],
)
@pytest.mark.parametrize("size", [0.02, 1e-4, 1e-10])
def test_training_goes_on_where_tokens_or_embeddings_are_next_to_zero(
    size: float,
    criterion: Criterion | None,
    normalization: str,
    optimizer: type[torch.optim.Optimizer],
) -> None:
    model, x = Tokens(size), torch.randn(8, 4, 6)
    as_is = trained(copy.deepcopy(model), x, optimizer)
    condition_(model, x, criterion=criterion, normalization=normalization)
    assert trained(model, x, optimizer) <= 1.05 * as_is


@pytest.mark.parametrize("normalization", ["absorb", "full"])
def test_scales_stay_near_balance(normalization: str) -> None:
    model, x = Tokens(1e-4).double(), torch.randn(8, 4, 6).double()
    symmetry = pathcond.find_symmetry(model, x, normalization=normalization)
    free = copy.deepcopy(model)
    by_paths = partial(condition_, criterion=PathKernel(), normalization=normalization)
    unbounded = by_paths(free, x, max_log_scale=math.inf).log_scales
    lower, upper = balance_bounds(symmetry, model)
    assert bool(((unbounded < lower - 0.5) | (unbounded > upper + 0.5)).any())
    found = by_paths(model, x).log_scales
    assert bool(((found >= lower - 1e-9) & (found <= upper + 1e-9)).all())
    assert float(by_paths(model, x).log_scales.abs().max()) < 1e-6


def test_all_rescalings_of_a_model_have_one_point_of_balance() -> None:
    """The centre of the box moves by −t where the weights move by t."""
    model, x = Tokens().double(), torch.randn(8, 4, 6).double()
    symmetry = pathcond.find_symmetry(model, x, normalization="full")
    wide = 1e3  # so that the box is not widened to hold the model
    before = balance_bounds(symmetry, model, wide)
    t = torch.rand(symmetry.num_units, dtype=torch.float64) * 10 - 5
    pathcond.rescale_(model, symmetry, t, verify=False)
    for one, other in zip(before, balance_bounds(symmetry, model, wide), strict=True):
        torch.testing.assert_close(
            symmetry.class_matrix @ one, symmetry.class_matrix @ (other + t), rtol=0, atol=1e-5
        )


def test_a_unit_that_reads_into_zeros_stays() -> None:
    """Its scale would only say how fast the zeros learn, against whatever else there is."""
    model, x = mlp((8,), inputs=4).double(), torch.randn(16, 4).double()
    with torch.no_grad():
        model[-1].weight.zero_()
    assert float(condition_(model, x).log_scales.abs().max()) == 0.0


def test_the_method_of_the_paper_and_infinity_have_no_bound() -> None:
    model, x = Tokens(1e-10).double(), torch.randn(8, 4, 6).double()
    symmetry = pathcond.find_symmetry(model, x, normalization="paper")
    optimum = pathcond.solve(symmetry, diag_g(model, x)).log_scales
    assert float(optimum.abs().max()) > 2 * WIDTH
    for options in ({"normalization": "paper"}, {"max_log_scale": math.inf}):
        found = condition_(copy.deepcopy(model), x, criterion=PathKernel(), **options).log_scales
        torch.testing.assert_close(found, optimum, rtol=0, atol=1e-6)
    bounded = condition_(model, x, solver=CoordinateDescent(), max_log_scale=0.5).log_scales
    assert float(bounded.abs().max()) == pytest.approx(0.5)


def test_weights_far_from_balance_may_go_as_far_as_that() -> None:
    """The bound is on what is out of balance, not on λ."""
    model, x = mlp((16,), inputs=8).double(), torch.randn(16, 8).double()
    with torch.no_grad():
        model[1].weight.mul_(1e-6)
        model[1].bias.mul_(1e-6)
    assert float(condition_(model, x).log_scales.min()) > 2 * WIDTH


def test_a_spread_that_grows_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Tokens(1e-4), torch.randn(8, 4, 6)
    with caplog.at_level(logging.WARNING, logger="pathcond"):
        report = condition_(
            model, x, criterion=PathKernel(), normalization="full", max_log_scale=math.inf
        )
    before, after = report.spread()
    assert after > before + 2
    assert "spread of diag(G) grows" in caplog.text


def norms(scale: float, eps: float, tracked: bool) -> tuple[nn.Module, Tensor]:
    """A deep network whose batch variances are small against ε, or not so small."""
    torch.manual_seed(0)
    parts = [(nn.Linear(24, 24), nn.BatchNorm1d(24, eps=eps), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*(module for part in parts for module in part), nn.Linear(24, 5)).double()
    x = torch.randn(64, 24, dtype=torch.float64)
    with torch.no_grad():
        for part in parts:
            part[0].weight.mul_(scale)
        if tracked:
            model(x)
    return model.eval(), x


@pytest.mark.parametrize("tracked", [False, True])
@pytest.mark.parametrize("normalization", ["absorb", "full"])
@pytest.mark.parametrize(
    ("scale", "eps"), [(1, 1e-5), (1, 1e-3), (0.3, 1e-3), (0.05, 1e-5), (0.01, 1e-3)]
)
def test_twice_does_nothing_where_epsilon_bounds_a_scale(
    scale: float, eps: float, normalization: str, tracked: bool
) -> None:
    model, x = norms(scale, eps, tracked)
    assert condition_(model, x, normalization=normalization).output_change_train <= 1e-2
    assert float(condition_(model, x, normalization=normalization).log_scales.abs().max()) < 1e-6


@pytest.mark.parametrize(
    ("scale", "eps", "train_tolerance"), [(3, 1e-4, 1e-3), (0.3, 1e-5, 3e-4), (1, 1e-5, 1e-4)]
)
def test_twice_does_nothing_where_the_box_had_to_be_tightened(
    scale: float, eps: float, train_tolerance: float
) -> None:
    """Compared with the model that the first call left, the larger box may seem harmless: in the
    first case it would.
    """
    model, x = norms(scale, eps, tracked=False)
    by_paths = partial(condition_, criterion=PathKernel(), train_tolerance=train_tolerance)
    wide = by_paths(copy.deepcopy(model), x, train_tolerance=1.0).log_scales
    report = by_paths(model, x)
    assert report.output_change_train <= train_tolerance
    assert float((report.log_scales - wide).abs().max()) > 0.1
    assert float(report.log_scales.abs().max()) > 0.1
    assert float(by_paths(model, x).log_scales.abs().max()) < 1e-6


def test_the_box_of_epsilon_does_not_move_with_the_model() -> None:
    model, x = make("resnet")
    symmetry = pathcond.find_symmetry(model, x)
    lower, upper = symmetry.log_scale_bounds(model, 1e-2)
    t = (torch.rand(symmetry.num_units, dtype=torch.float64) - 0.5).clamp(lower, upper)
    pathcond.rescale_(model, symmetry, t)
    after = symmetry.log_scale_bounds(model, 1e-2)
    torch.testing.assert_close(after[0] + t, lower, rtol=0, atol=1e-9)
    assert torch.equal(after[1].isinf(), upper.isinf())
