"""What cannot be worked with is named in a sentence, and the model stays what it was."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

import pathcond
from pathcond import (
    RescalingError,
    UnsupportedModelError,
    condition_,
    diag_g,
    find_symmetry,
    prepare,
)

from .cases import Calls

VERBS: dict[str, Callable[[Any, Any], object]] = {
    "find_symmetry": find_symmetry,
    "prepare": prepare,
    "condition_": condition_,
    "diag_g": diag_g,
    "teleport": lambda model, batch: pathcond.teleport(
        torch.optim.SGD(model.parameters()), model, batch
    ),
}


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))


def with_entry(value: float) -> Tensor:
    batch = torch.randn(6, 3)
    batch[1, 2] = value
    return batch


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (torch.empty(0, 3), r"empty \(input 0 \(0, 3\)\)"),
        (with_entry(math.nan), r"input 0 \(6, 3\) holds 1 NaN"),
        (with_entry(math.inf), r"input 0 \(6, 3\) holds 1 infinities"),
        (with_entry(-math.inf), r"input 0 \(6, 3\) holds 1 infinities"),
        ({"input": with_entry(math.nan)}, r"input input \(6, 3\) holds 1 NaN"),
        (
            torch.randn(6, 3).double(),
            r"Input 0 is torch.float64 and the model's parameters are "
            r"torch.float32",
        ),
    ],
)
def test_batches(verb: str, batch: Any, message: str) -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match=message):
        VERBS[verb](model, batch)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("verb", ["condition_", "find_symmetry", "prepare"])
@pytest.mark.parametrize(
    ("first", "batch", "error"),
    [
        (nn.Embedding(10, 4), torch.full((3, 5), 99), "IndexError: index out of range"),
        (nn.Linear(4, 4), torch.ones(3, 4, dtype=torch.long), "RuntimeError: .* same dtype"),
    ],
)
def test_a_batch_on_which_the_model_fails_at_its_values(
    verb: str, first: nn.Module, batch: Tensor, error: str
) -> None:
    """The sizes fit, so that shapes alone show nothing wrong."""
    model = nn.Sequential(first, nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match=f"fails on the example batch: {error}"):
        VERBS[verb](model, batch)


def test_a_batch_of_fewer_digits_than_the_model() -> None:
    with pytest.raises(
        UnsupportedModelError,
        match=r"float32 and the model's parameters are "
        r"torch.float64",
    ):
        find_symmetry(network().double(), torch.randn(6, 3))


def test_batches_that_the_model_converts_are_welcome() -> None:
    class Converting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to(self[0].weight.dtype))

    model = Converting(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    assert condition_(model, torch.randn(6, 3).double()).num_units == 4


def test_masks_may_be_infinite() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.last(self.first(mask.softmax(-1) @ x).relu())

    mask = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -math.inf)
    assert condition_(Masked(), (torch.randn(5, 3), mask)).num_units == 4


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_no_module(verb: str) -> None:
    if verb != "teleport":
        with pytest.raises(
            TypeError,
            match=r"The model is of type OrderedDict: pass a "
            r"torch.nn.Module",
        ):
            VERBS[verb](network().state_dict().copy(), torch.randn(6, 3))
        with pytest.raises(
            TypeError, match="The model is the class Linear, not one of its instances"
        ):
            VERBS[verb](nn.Linear, torch.randn(6, 3))
    else:
        optimizer = torch.optim.SGD(network().parameters())
        with pytest.raises(
            TypeError,
            match=r"The model is of type function: pass a "
            r"torch.nn.Module",
        ):
            pathcond.teleport(optimizer, network, torch.randn(6, 3))  # type: ignore[arg-type]


def test_weights() -> None:
    model, batch = network(), torch.randn(6, 3)
    symmetry = find_symmetry(model, batch)
    model[1].running_var[2] = -0.25
    with pytest.raises(RescalingError, match=r"1.running_var\[2\] is -0.25, a negative variance"):
        condition_(model, batch)
    with pytest.raises(RescalingError, match=r"1.running_var\[2\] is -0.25, a negative variance"):
        pathcond.rescale_(model, symmetry, torch.ones(8))
    model[1].running_var[2] = math.nan
    model[0].bias.data[1] = math.inf
    with pytest.raises(RescalingError) as caught:
        condition_(model, batch)
    assert "0.bias (4,) has NaN or infinite values" in str(caught.value)
    assert "1.running_var (4,) has NaN or infinite values" in str(caught.value)


def test_a_generator_of_the_models_own() -> None:
    generator = torch.Generator().manual_seed(0)

    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).relu() * torch.rand(4, generator=generator))

    with pytest.raises(
        UnsupportedModelError,
        match=r"draws random numbers from a generator of "
        r"its own at .*test_usable.py",
    ):
        condition_(Noisy(), torch.randn(6, 3))


def test_complex_parameters() -> None:
    model = nn.Sequential(nn.Linear(3, 4, dtype=torch.complex64))
    with pytest.raises(
        UnsupportedModelError,
        match=r"0.weight has dtype torch.complex64: "
        r"complex numbers are not supported",
    ):
        find_symmetry(model, torch.randn(6, 3, dtype=torch.complex64))


def test_the_meta_device_has_no_weights_to_condition() -> None:
    with torch.device("meta"):
        model, batch = network(), torch.randn(6, 3)
    assert prepare(model, batch).symmetry.num_units == 8
    with pytest.raises(UnsupportedModelError, match="on the meta device and has no weights"):
        condition_(model, batch)


def parameter_at_the_first_call(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "w"):
        self.w = nn.Parameter(torch.randn(3, 4))
    return nn.functional.linear(torch.relu(self.a(x)), self.w)


def parameter_in_place_of_none(self: Any, x: Tensor) -> Tensor:
    if self.w is None:
        self.w = nn.Parameter(torch.randn(3, 4))
    return nn.functional.linear(torch.relu(self.a(x)), self.w)


def layer_at_the_first_call(self: Any, x: Tensor) -> Tensor:
    if not len(self.layers):
        self.layers.append(nn.Linear(4, 3))
    return self.layers[0](torch.relu(self.a(x)))


@pytest.mark.parametrize(
    ("forward", "parts", "named"),
    [
        (parameter_at_the_first_call, {}, "w"),
        (parameter_in_place_of_none, {"w": None}, "w"),
        (layer_at_the_first_call, {"layers": nn.ModuleList()}, "layers.0.weight, layers.0.bias"),
    ],
)
def test_parameters_that_the_first_call_makes(forward: Any, parts: Any, named: str) -> None:
    """Trial runs would leave them behind, made of tensors without values."""
    model, x = Calls(forward, a=nn.Linear(3, 4), **parts), torch.randn(6, 3)
    before = list(model.state_dict())
    with pytest.raises(
        UnsupportedModelError, match=rf"first call makes parameters \({re.escape(named)}\)"
    ):
        condition_(model, x)
    assert list(model.state_dict()) == before
    outputs = model(x)  # now they are there
    assert condition_(model, x).num_units == 4
    torch.testing.assert_close(model(x), outputs)


def tie(model: nn.Sequential) -> None:
    model[2].weight = model[4].weight


def drop_a_bias(model: nn.Sequential) -> None:
    model[2].bias = None


@pytest.mark.parametrize("change", [tie, drop_a_bias, nn.Module.double])
def test_models_that_changed_since_they_were_prepared(change: Any) -> None:
    layers = [nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3)]
    model, x = nn.Sequential(*layers), torch.randn(6, 3)
    prepared = pathcond.prepare(model, x)
    change(model)
    with pytest.raises(pathcond.MismatchError, match="has changed since its Symmetry was found"):
        condition_(model, prepared)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(pathcond.MismatchError, match="has changed since its Symmetry was found"):
        pathcond.teleport(optimizer, model, prepared)


def test_tensors_that_are_resized_in_place() -> None:
    """As CrossMapLRN2d does with its results: what shares their memory cannot be told."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.CrossMapLRN2d(3), nn.Conv2d(4, 2, 3))
    x = torch.randn(2, 3, 8, 8)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UnsupportedModelError, match="writes in place into memory that is shared"):
        condition_(model, x)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_named(layout: torch.layout) -> None:
    batch = torch.nested.nested_tensor([torch.randn(5, 3), torch.randn(2, 3)], layout=layout)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="input 0 is nested: give dense tensors"):
        condition_(model, batch)


def test_a_packed_sequence_is_one_input() -> None:
    def forward(self: Any, packed: PackedSequence) -> Tensor:
        padded, _ = pad_packed_sequence(packed, batch_first=True)
        return self.b(torch.relu(self.a(padded)))

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    same = copy.deepcopy(model)
    batch, other = (
        pack_sequence([torch.randn(n, 3).double() for n in lengths])
        for lengths in ((5, 3), (7, 6, 2, 1))
    )
    assert condition_(model, batch).num_units == 4
    torch.testing.assert_close(model(other), same(other))


class Graph:
    def __init__(self, x: Tensor, batch: Tensor) -> None:
        self.x, self.batch = x, batch


def test_tensors_inside_of_objects_are_no_inputs() -> None:
    """Whether what it decides depends on them could not be told."""

    def forward(self: Any, graph: Graph) -> Tensor:
        h = torch.relu(self.a(graph.x))
        return self.b(h + 1 if int(graph.batch.max()) > 1 else h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    graph = Graph(torch.randn(8, 3), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1]))
    with pytest.raises(UnsupportedModelError, match="input 0 has tensors inside of a Graph"):
        condition_(model, (graph,))
