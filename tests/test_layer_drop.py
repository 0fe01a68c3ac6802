"""Train modes that draw which layers run: what any of their graphs needs is held."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.draws import HIGH, LOW, GlobalDraws, Plan
from pathcond.capture.graph import capture_graphs
from pathcond.capture.outputs import output_change

from .cases import Calls
from .zoo import as_double, randomise

DRAW_ONE = random.random  # bound before anything could replace it

STYLES = {
    "torch.rand([])": lambda: bool(torch.rand([]) < 0.4),
    "torch.rand(1).item()": lambda: torch.rand(1).item() < 0.4,
    "random.random": lambda: random.random() < 0.4,
    "random.uniform": lambda: random.uniform(0, 1) < 0.4,
    "a function that was imported": lambda: DRAW_ONE() < 0.4,
    "numpy.random.uniform": lambda: np.random.uniform(0, 1) < 0.4,
}


def dropping(style: str, layers: int = 3) -> tuple[nn.Module, Tensor]:
    """Layers with a norm behind them, so that a scale in front of a layer that is dropped goes
    on.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.first(x))
        for layer in self.layers:
            if not (self.training and STYLES[style]()):
                h = F.relu(layer(h))
        return self.last(h)

    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)) for _ in range(layers))
    model = Calls(forward, first=nn.Linear(3, 4), layers=blocks, last=nn.Linear(4, 2)).double()
    randomise(model)
    return model, as_double(torch.randn(6, 3))


def train_outputs(model: nn.Module, x: Tensor, seed: int) -> Tensor:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    with torch.no_grad():
        return model.train()(x)


@pytest.mark.parametrize(
    ("style", "normalization"),
    [
        pytest.param(style, normalization, marks=[] if i % 3 == j else pytest.mark.slow)
        for i, style in enumerate(STYLES)
        for j, normalization in enumerate(("absorb", "gain", "full"))
    ],
)
def test_every_draw_keeps_its_outputs(style: str, normalization: str) -> None:
    model, x = dropping(style)
    symmetry = pathcond.find_symmetry(model, x, normalization=normalization)
    before = [train_outputs(model, x, seed) for seed in range(60)]
    assert len({tuple(out.flatten().tolist()) for out in before}) >= 7  # of eight ways
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 2 - 1
    pathcond.rescale_(model, symmetry, log_scales, verify=False)
    after = [train_outputs(model, x, seed) for seed in range(60)]
    assert max(output_change([a], [b]) for a, b in zip(before, after, strict=True)) < 1e-9


def test_residual_layers_that_may_be_dropped_keep_their_units() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.first(x)
        for up, down in zip(self.up, self.down, strict=True):
            if not (self.training and torch.rand([]) < 0.4):
                h = h + down(F.relu(up(h)))
        return self.last(h)

    wide, narrow = (
        nn.ModuleList(nn.Linear(*sizes) for _ in range(5)) for sizes in ((4, 6), (6, 4))
    )
    model = Calls(
        forward, first=nn.Linear(3, 4), up=wide, down=narrow, last=nn.Linear(4, 2)
    ).double()
    symmetry = pathcond.find_symmetry(model, torch.randn(6, 3).double())
    assert symmetry.num_units == 5 * 6 + 4


def test_a_model_without_draws_has_one_graph() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.ReLU(), nn.Linear(4, 2))
    assert len(capture_graphs(model, torch.randn(5, 3), training=True)) == 1


def test_more_layers_than_combinations_can_be_tried() -> None:
    model, x = dropping("random.random", layers=6)
    symmetry = pathcond.find_symmetry(model, x, normalization="full")
    before = [train_outputs(model, x, seed) for seed in range(60)]
    pathcond.rescale_(
        model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 2 - 1, verify=False
    )
    after = [train_outputs(model, x, seed) for seed in range(60)]
    assert max(output_change([a], [b]) for a, b in zip(before, after, strict=True)) < 1e-9


def test_draws_come_out_as_planned() -> None:
    states = random.getstate(), np.random.get_state()
    try:
        draws = GlobalDraws(Plan(others=frozenset([("python", 1), ("numpy", 2)])))
        assert [random.random() for _ in range(3)] == pytest.approx([HIGH, LOW, HIGH], abs=1e-7)
        assert np.random.uniform(size=4) == pytest.approx([HIGH, HIGH, LOW, HIGH], abs=1e-7)
        assert draws.list_draws() == [("python", i) for i in range(3)] + [
            ("numpy", i) for i in range(4)
        ]
        # Methods that reject numbers come to an end under extreme ones too.
        for base in (LOW, HIGH):
            GlobalDraws(Plan(base=base))
            np.random.normal(size=50)
            np.random.permutation(50)
            random.shuffle(list(range(50)))
            random.gauss(0, 1)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
