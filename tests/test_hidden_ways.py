"""What one run of a model does not show: ways that it takes after a caught exception, under other
draws or with other numbers among its attributes, and what it hands out beside its outputs.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond import UnsupportedModelError, condition_, find_symmetry
from pathcond.capture.outputs import output_change

from .cases import Calls

Forward = Callable[..., Tensor]


def network(forward: Forward, **parts: Any) -> nn.Module:
    torch.manual_seed(0)
    return Calls(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 6), **parts).double()


def batch(samples: int = 16, size: float = 1.0) -> Tensor:
    return size * torch.randn(samples, 6, dtype=torch.float64)


# Exceptions that are caught


def raised(self: Any, x: Tensor) -> Tensor:
    try:
        if x.abs().max() > 10:
            raise ValueError("out of range")
        h = torch.relu(self.a(x))
    except ValueError:
        h = torch.tanh(self.a(x))
    return self.b(h)


def asserted(self: Any, x: Tensor) -> Tensor:
    try:
        assert x.abs().max() < 10
        return self.b(torch.relu(self.a(x)))
    except AssertionError:
        return self.b(torch.tanh(self.a(x)))


def asserted_inside(self: Any, x: Tensor) -> Tensor:
    def require_small() -> None:
        assert x.abs().max() < 10

    try:
        require_small()
    except AssertionError:
        return self.b(torch.tanh(self.a(x)))
    return self.b(torch.relu(self.a(x)))


def a_check_of_its_own(self: Any, x: Tensor) -> Tensor:
    self.check_range(x.abs().max().item())
    return self.b(torch.tanh(self.a(x)) if self.large else torch.relu(self.a(x)))


def note_range(self: Any, value: float) -> None:
    self.large = value > 10


@pytest.mark.parametrize("forward", [raised, asserted, asserted_inside, a_check_of_its_own])
def test_checks_after_which_the_model_goes_on(forward: Forward) -> None:
    model, far = network(forward), batch(9, 20.0)
    model.check_range = note_range.__get__(model)
    before = model(far)
    with contextlib.suppress(UnsupportedModelError):
        condition_(model, batch())
    torch.testing.assert_close(model(far), before)


def checked(self: Any, x: Tensor) -> Tensor:
    try:
        if x.abs().max() > 10:
            raise ValueError("out of range")
    except ValueError as error:
        raise RuntimeError("the input") from error
    return self.b(torch.relu(self.a(x)))


def test_a_check_whose_exception_goes_on_is_a_check() -> None:
    assert find_symmetry(network(checked), batch()).num_units == 8


# Draws with more than two outcomes

DRAWS: dict[str, Callable[[], int]] = {
    "randint": lambda: random.randint(0, 2),
    "choice": lambda: random.choice([0, 1, 2]),
    "numpy": lambda: int(np.random.randint(3)),
    "torch": lambda: int(torch.randint(0, 3, (1,))),
}


@pytest.mark.parametrize("name", DRAWS)
def test_noise_at_one_of_three_depths(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        depth = DRAWS[name]() if self.training else -1
        h = torch.relu(self.a(x + (depth == 0)))
        h = torch.relu(self.c(h + (depth == 1)))
        return self.b(h + (depth == 2))

    model, x = network(forward, c=nn.Linear(8, 8)).train(), batch(9)

    def outputs() -> list[Tensor]:
        found = []
        for seed in range(12):
            random.seed(seed)
            np.random.seed(seed)
            torch.manual_seed(seed)
            found.append(model(x).detach())
        return found

    before = outputs()
    condition_(model, batch())
    assert output_change(before, outputs()) < 1e-12


# Numbers that are zero today


def fading(self: Any, x: Tensor) -> Tensor:
    other = self.d(torch.relu(self.c(x)))
    return (1 - self.share) * self.b(torch.relu(self.a(x))) + self.share * other


def penalised(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return torch.cat([self.b(h).flatten(), (self.share * h.square().mean()).view(1)])


def shifted(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    return self.b(torch.relu(h + self.share * torch.arange(8.0)))


@pytest.mark.parametrize("forward", [fading, penalised, shifted])
def test_numbers_that_are_zero_may_become_others(forward: Forward) -> None:
    model = network(forward, c=nn.Linear(6, 8), d=nn.Linear(8, 6))
    x = batch(9)
    model.share = 0.5
    before = model(x)
    model.share = 0.0
    condition_(model, batch())
    model.share = 0.5
    torch.testing.assert_close(model(x), before)


# What is written into containers that were given


def into_a_dict(self: Any, x: Tensor, held: dict) -> Tensor:
    held["features"] = torch.relu(self.a(x))
    return self.b(held["features"])


def into_a_list(self: Any, x: Tensor, held: list) -> Tensor:
    held.append(torch.relu(self.a(x)))
    return self.b(held[-1])


def into_an_object(self: Any, x: Tensor, held: SimpleNamespace) -> Tensor:
    held.features = torch.relu(self.a(x))
    return self.b(held.features)


@pytest.mark.parametrize(
    ("forward", "make", "take"),
    [
        (into_a_dict, dict, lambda held: held["features"]),
        (into_a_list, list, lambda held: held[-1]),
        (into_an_object, SimpleNamespace, lambda held: held.features),
    ],
)
def test_features_written_into_what_is_given(forward: Forward, make: Any, take: Any) -> None:
    model, x = network(forward), batch(9)
    given = make()
    model(x, given)
    before = take(given)
    condition_(model, (batch(), make()))
    given = make()
    model(x, given)
    torch.testing.assert_close(take(given), before)


# Other names of weights


@pytest.mark.parametrize("read", [torch.as_tensor, torch.asarray, torch.from_numpy])
def test_weights_that_are_read_as_arrays(read: Callable[[Any], Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        beside = torch.relu(nn.functional.linear(x, read(self.array)))
        return self.b(torch.relu(self.a(x))) + beside.sum(-1, keepdim=True)

    model, x = network(forward), batch(9)
    model.array = model.a.weight.detach().numpy()
    before = model(x)
    with contextlib.suppress(UnsupportedModelError):
        condition_(model, batch())
    torch.testing.assert_close(model(x), before)


def test_parts_that_are_got_by_a_computed_name() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        y = self.net(x)
        return y if y.abs().max() < 50 else getattr(self.net, self.tap)(x)

    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    model, far = Calls(forward, net=net).double(), batch(9, 1000.0)
    model.tap = "0"
    before = model(far)
    condition_(model, batch())
    torch.testing.assert_close(model(far), before)


def test_values_and_places_of_a_maximum_are_outputs() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        return self.b(torch.relu(self.a(x))).max(-1)

    assert find_symmetry(network(forward), batch()).num_units == 8


def test_sparse_outputs_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Any:
        h = torch.relu(self.a(x))
        return self.b(h), h.to_sparse()

    with pytest.raises(UnsupportedModelError, match="returns a sparse tensor"):
        condition_(network(forward), batch())


def test_copies_that_are_no_list() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    for copies in (3, model):
        with pytest.raises(TypeError, match="copies is a list"):
            pathcond.condition_(model, torch.randn(4, 6), copies=copies)  # type: ignore[arg-type]
