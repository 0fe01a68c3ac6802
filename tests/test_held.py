"""Parameters that stay as they are: frozen ones, and those that the user excludes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.outputs import output_change

from .cases import Calls, make
from .zoo import outputs


class LoRA(nn.Module):
    """A frozen layer with a trainable correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def adapted() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(
        LoRA(nn.Linear(3, 4)), nn.ReLU(), LoRA(nn.Linear(4, 5)), nn.ReLU(), nn.Linear(5, 2)
    )
    return model.double(), torch.randn(6, 3, dtype=torch.float64)


def test_an_adapter_still_fits_the_base_that_it_was_trained_on() -> None:
    model, x = adapted()
    other, _ = adapted()
    base = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
    before = outputs(model, x, training=False)
    report = pathcond.condition_(model, x)
    adapter = {name: p for name, p in model.named_parameters() if p.requires_grad}
    assert all(torch.equal(model.get_parameter(name), value) for name, value in base.items())
    other.load_state_dict(adapter, strict=False)
    assert output_change(before, outputs(other, x, training=False)) < 1e-12
    # The two units between down and up of each adapter are all that is free of the base.
    assert report.solution.log_scales.numel() == 4
    named = {pin.name for pin in report.pinned if "does not require a gradient" in pin.reason}
    assert named == set(base)


def test_frozen_weights_move_if_asked() -> None:
    model, x = adapted()
    assert pathcond.find_symmetry(model, x, frozen="move").num_units == 4 + 4 + 5
    report = pathcond.condition_(model, x, frozen="move")
    assert report.solution.log_scales.numel() == 13


def test_statistics_of_a_frozen_norm_stay() -> None:
    model, x = make("batch_norm_mlp")
    model[1].requires_grad_(False)
    statistics = {name: buffer.clone() for name, buffer in model[1].named_buffers()}
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 10  # around the other norm
    pathcond.rescale_(model, symmetry, torch.randn(10, dtype=torch.float64))
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model[1].named_buffers())


def test_weights_frozen_after_the_search_are_noticed() -> None:
    model, x = make("mlp")
    symmetry = pathcond.find_symmetry(model, x)
    model[2].requires_grad_(False)
    with pytest.raises(
        pathcond.RescalingError,
        match=r'2\.bias, 2\.weight no longer requires a gradient(.|\n)*teleport again(.|\n)*"move"',
    ):
        pathcond.rescale_(model, symmetry, torch.ones(symmetry.num_units))


@pytest.mark.parametrize("exclude", [None, 3, [1], {"0": 1}])
def test_what_is_no_name_cannot_be_excluded(exclude: Any) -> None:
    with pytest.raises(TypeError, match="exclude takes names or patterns"):
        pathcond.find_symmetry(nn.Linear(2, 1), torch.ones(3, 2), exclude=exclude)


@pytest.mark.parametrize(
    ("exclude", "units"), [("4.weight", 4), ("2", 0), (["*.bias"], 0), (["0.*"], 5), ((), 9)]
)
def test_excluded_parameters_stay(exclude: Any, units: int) -> None:
    model, x = make("mlp")
    symmetry = pathcond.find_symmetry(model, x, exclude=exclude)
    assert symmetry.num_units == units
    before = {name: p.clone() for name, p in model.named_parameters()}
    pathcond.rescale_(model, symmetry, torch.randn(units, dtype=torch.float64))
    kept = {pin.name for pin in symmetry.pinned if "is excluded by" in pin.reason}
    assert all(torch.equal(model.get_parameter(name), before[name]) for name in kept)
    assert bool(kept) == bool(exclude)


def test_a_name_that_excludes_nothing_is_an_error() -> None:
    model, x = make("mlp")
    with pytest.raises(
        ValueError,
        match=r"exclude names no parameter or module of Sequential: "
        r"'head'",
    ):
        pathcond.find_symmetry(model, x, exclude=["0", "head"])


def test_excluding_one_name_of_a_tied_weight_holds_it() -> None:
    def forward(self: Any, ids: Tensor) -> Tensor:
        return F.linear(self.b(F.relu(self.a(self.embed(ids)))), self.head.weight)

    parts = {
        "embed": nn.Embedding(7, 3),
        "a": nn.Linear(3, 4),
        "b": nn.Linear(4, 3),
        "head": nn.Linear(3, 7, bias=False),
    }
    model = Calls(forward, **parts)
    model.head.weight = model.embed.weight
    symmetry = pathcond.find_symmetry(model, torch.randint(0, 7, (5, 4)), exclude="head")
    assert "embed.weight" not in symmetry.scalings
    assert symmetry.num_units == 4


def test_teleport_and_prepare_take_the_same_options() -> None:
    model, x = adapted()
    prepared = pathcond.prepare(model, x, frozen="move", exclude="4.weight")
    assert prepared.symmetry.num_units == 8
    with pytest.raises(ValueError, match="prepared with frozen='move', not 'keep'"):
        pathcond.condition_(model, prepared)
    with pytest.raises(ValueError, match="pass other_inputs and exclude to prepare"):
        pathcond.condition_(model, prepared, frozen="move", exclude="0")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    held = model.get_parameter("4.weight").clone()
    handle = pathcond.teleport(optimizer, model, x, every=1, frozen="move", exclude="4.weight")
    handle.now()
    assert torch.equal(model.get_parameter("4.weight"), held)
    assert handle.report.solution.log_scales.numel() == 8
