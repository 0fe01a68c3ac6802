"""Models that decide by values of whole numbers and truth values among their inputs, as those of
Hugging Face do by the attention mask: both outcomes are followed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pathcond
from pathcond.capture.outputs import output_change

from .cases import Calls
from .zoo import outputs

WIDTH, INNER = 5, 6

Meets = Callable[[Any, Tensor, Tensor], Tensor]


def model_of(meets: Meets, **parts: Any) -> nn.Module:
    """relu(a x), what a mask decides to do with it, then b, and a block that is always the same."""

    def forward(self: Any, x: Tensor, mask: Tensor) -> Tensor:
        return self.tail(self.b(meets(self, F.relu(self.a(x)), mask)))

    tail = nn.Sequential(nn.Linear(3, INNER), nn.ReLU(), nn.Linear(INNER, 2))
    parts |= {"a": nn.Linear(3, WIDTH), "b": nn.Linear(WIDTH, 3), "tail": tail}
    return Calls(forward, **parts).double()


def masks(length: int = 4, batch: int = 6) -> dict[str, Tensor]:
    some = torch.arange(batch * length).view(batch, length) % 3 > 0
    return {
        "all": torch.ones(batch, length, dtype=torch.bool),
        "none": torch.zeros(batch, length, dtype=torch.bool),
        "some": some,
        "first": torch.arange(length).expand(batch, length) < 1,
        "numbers": torch.arange(batch * length).view(batch, length) - 7,
    }


def tanh_if_all(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.tanh() if mask.all() else h


def tanh_unless_all(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    if mask.bool().sum() == mask.numel():
        return h
    return h.tanh()


def one_is_added_by_a_flag(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    flag = (mask != 0).any().item()
    return h + 1 if flag else h


def a_flag_is_added(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h + (mask != 0).all().item()


def a_test_behind_a_test(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    if mask.any() and not mask.all():
        return h.tanh()
    return h


def a_loop_over_columns(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    for column in mask.unbind(1):
        if not column.any():
            h = h.tanh()
    return h


def a_mask_that_is_written(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    mask = mask.long().clone()
    mask[:, 0] = 1
    mask += torch.zeros(1, dtype=torch.long)
    return h.tanh() if (mask == 1).all() else h


def a_layer_for_masks(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return self.c(h) if mask.all() else h


PINNING: dict[str, Meets] = {
    meets.__name__: meets
    for meets in (
        tanh_if_all,
        tanh_unless_all,
        one_is_added_by_a_flag,
        a_flag_is_added,
        a_test_behind_a_test,
        a_loop_over_columns,
        a_mask_that_is_written,
    )
}


def doubled_if_all(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return 2 * h if mask.all() else h


def masked_unless_all(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h if mask.all() else h * mask.bool()[..., None]


HARMLESS: dict[str, Meets] = {
    meets.__name__: meets for meets in (doubled_if_all, masked_unless_all)
}


def check_on_all_masks(model: nn.Module, example: str) -> pathcond.Symmetry:
    """Rescale at random: outputs must keep on every mask, at every size, in both modes."""
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    inputs = [
        (torch.randn(batch, length, 3, dtype=torch.float64), mask)
        for batch, length in ((6, 4), (1, 4), (3, 9))
        for mask in masks(length, batch).values()
    ]
    symmetry = pathcond.find_symmetry(model, (x, masks()[example]))
    calls = [(given, mode) for given in inputs for mode in (False, True)]
    before = [outputs(model, given, training=mode) for given, mode in calls]
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2)
    for (given, mode), expected in zip(calls, before, strict=True):
        assert output_change(expected, outputs(model, given, training=mode)) < 1e-9
    return symmetry


@pytest.mark.parametrize("example", masks())
@pytest.mark.parametrize("meets", PINNING.values(), ids=PINNING)
def test_both_outcomes_must_keep_the_function(meets: Meets, example: str) -> None:
    torch.manual_seed(0)
    assert check_on_all_masks(model_of(meets), example).num_units == 3 + INNER


@pytest.mark.parametrize("example", masks())
@pytest.mark.parametrize("meets", HARMLESS.values(), ids=HARMLESS)
def test_outcomes_that_do_no_harm_cost_nothing(meets: Meets, example: str) -> None:
    torch.manual_seed(0)
    assert check_on_all_masks(model_of(meets), example).num_units == WIDTH + 3 + INNER


@pytest.mark.parametrize("example", ["all", "some"])
def test_parameters_of_the_other_way_take_part(example: str) -> None:
    torch.manual_seed(0)
    model = model_of(a_layer_for_masks, c=nn.Linear(WIDTH, WIDTH, bias=False))
    symmetry = check_on_all_masks(model, example)
    assert symmetry.num_units >= 3 + INNER
    assert symmetry.scalings.keys() >= {"tail.0.weight", "tail.2.weight"}


def a_weight_decides(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.tanh() if (mask * self.b.weight.sum()).any() else h


def a_mask_that_activations_were_written_into(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    mask = mask.long().clone()
    mask[:, 0] = (h.sum((1, 2)) > 3).long()
    return h.tanh() if mask.all() else h


def a_view_that_activations_were_written_into(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    mask = mask.long().clone()
    mask.view(-1)[0] = (h.sum() > 3).long()
    return h.tanh() if mask.all() else h


def a_draw_decides(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.tanh() if (mask * torch.rand(1) > 0.5).all() else h


def a_number_decides(self: Any, h: Tensor, mask: Tensor) -> Tensor:
    return h.tanh() if mask.long().sum().item() > 3 else h


@pytest.mark.parametrize(
    "meets",
    [
        a_weight_decides,
        a_mask_that_activations_were_written_into,
        a_view_that_activations_were_written_into,
        a_draw_decides,
        a_number_decides,
    ],
)
def test_what_else_decides_is_refused_as_ever(meets: Meets) -> None:
    torch.manual_seed(0)
    x = torch.randn(6, 4, 3, dtype=torch.float64)
    try:
        symmetry = pathcond.find_symmetry(model_of(meets), (x, masks()["some"]))
    except pathcond.UnsupportedModelError:
        return
    assert not {"a.weight", "b.weight"} & symmetry.scalings.keys()


def test_a_loop_that_would_not_end_is_left_alone() -> None:
    def forward(self: Any, h: Tensor, mask: Tensor) -> Tensor:
        while mask.any():
            h, mask = 2 * h, mask[:, 1:]
        return h

    torch.manual_seed(0)
    symmetry = check_on_all_masks(model_of(forward), "some")
    assert symmetry.num_units in (3 + INNER, WIDTH + 3 + INNER)


def test_energies_are_those_of_the_way_that_the_batch_goes() -> None:
    """The first sample alone has no padding."""
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[1, 2:] = False
    inputs = (torch.randn(3, 4, 3, dtype=torch.float64), mask)
    torch.manual_seed(0)
    model = model_of(masked_unless_all)
    always = model_of(lambda self, h, mask: h * mask[..., None])
    always.load_state_dict(model.state_dict())
    assert pathcond.path_norm(model, inputs) == pathcond.path_norm(always, inputs)
    whole = (inputs[0], torch.ones_like(mask))
    assert pathcond.path_norm(model, whole) != pathcond.path_norm(always, inputs)


@pytest.mark.parametrize("example", ["none", "ones", "padded"])
def test_attention_masks_of_transformers(example: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=50,
        hidden_size=8,
        num_hidden_layers=1,
        intermediate_size=12,
        num_attention_heads=2,
        max_position_embeddings=16,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).double().eval()
    ids = torch.randint(0, 50, (3, 7))
    padded = torch.ones_like(ids)
    padded[1, :3] = 0
    batches = {"none": {"input_ids": ids, "use_cache": False}}
    batches["ones"] = batches["none"] | {"attention_mask": torch.ones_like(ids)}
    batches["padded"] = batches["none"] | {"attention_mask": padded}
    symmetry = pathcond.find_symmetry(model, batches[example])
    assert symmetry.num_units == 24  # values of heads, pairs of queries and keys, gated units
    before = [outputs(model, batch, training=False) for batch in batches.values()]
    pathcond.rescale_(model, symmetry, torch.rand(24, dtype=torch.float64) * 4 - 2, verify=False)
    for batch, expected in zip(batches.values(), before, strict=True):
        assert output_change(expected, outputs(model, batch, training=False)) < 1e-9


class Chosen(nn.Module):
    """relu(a h), and tanh of it where a given index is zero somewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 3)

    def forward(self, h: Tensor, index: Tensor) -> Tensor:
        hidden = F.relu(self.a(h))
        return self.b(hidden.tanh() if (index == 0).any() else hidden)


def test_whole_numbers_that_an_opaque_module_makes_of_activations_are_no_inputs() -> None:
    """What it calls is captured by itself, on numbers that decide otherwise on other inputs."""

    def forward(self: Any, x: Tensor) -> Tensor:
        index = x.argmax(1)
        if float(x.sum()) > 1e6:  # nobody can follow this
            return x
        return self.inner(x, index)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), Calls(forward, inner=Chosen())).double().eval()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(3)), model[0].bias.zero_()
    never = torch.tensor([[-1.0, 2.0, 0.5], [-1.0, 0.5, 2.0]]).double()
    inputs = [never, -never, torch.randn(5, 3).double()]
    before = [outputs(model, x, training=False) for x in inputs]
    symmetry = pathcond.find_symmetry(model, never)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    pathcond.rescale_(model, symmetry, log_scales, verify=False)
    for x, expected in zip(inputs, before, strict=True):
        assert output_change(expected, outputs(model, x, training=False)) < 1e-9


class Special(nn.Module):
    """Whether tokens are among some, by a way that nobody can follow."""

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tensor([token in (1, 2) for token in ids.flatten().tolist()])


def test_truth_values_that_an_opaque_module_returns_are_not_followed() -> None:
    def forward(self: Any, x: Tensor, ids: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(h.tanh() if self.special(ids).any() else h)

    torch.manual_seed(0)
    parts = {"special": Special(), "a": nn.Linear(3, WIDTH), "b": nn.Linear(WIDTH, 2)}
    model = Calls(forward, **parts).double().eval()
    x = torch.randn(4, 3).double()
    inputs = [(x, torch.full((4,), 7)), (x, torch.arange(4))]
    before = [outputs(model, given, training=False) for given in inputs]
    try:
        symmetry = pathcond.find_symmetry(model, inputs[0])
    except pathcond.UnsupportedModelError:
        return
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    pathcond.rescale_(model, symmetry, log_scales, verify=False)
    for given, expected in zip(inputs, before, strict=True):
        assert output_change(expected, outputs(model, given, training=False)) < 1e-9
