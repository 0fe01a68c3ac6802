"""Trial runs leave nothing behind in what modules hold, however deep it lies."""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from pathcond import BalancedLayers, Curvature, PathKernel, condition_
from pathcond.criteria.criterion import Criterion


class Holding(nn.Module):
    """A network, and what a subclass keeps of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 6)
        self.held: Any = self.start()

    def start(self) -> Any:
        return None

    def forward(self, x: Tensor) -> Tensor:
        return self.keep(self.b(torch.relu(self.a(x))))

    def keep(self, y: Tensor) -> Tensor:
        return y


def holding(start: Callable[[], Any], keep: Callable[[Any, Tensor], Tensor]) -> Holding:
    methods = {"start": lambda self: start(), "keep": lambda self, y: keep(self.held, y)}
    return type("Held", (Holding,), methods)()


def in_a_deque(held: deque, y: Tensor) -> Tensor:
    held.append(y.detach().mean(0))
    return y + 0.1 * sum(held)


def in_a_default_dict(held: defaultdict, y: Tensor) -> Tensor:
    return in_a_deque(held["outputs"], y)


def in_a_list(held: list, y: Tensor) -> Tensor:
    held.append(len(y))
    return y


def in_a_list_of_lists(held: list, y: Tensor) -> Tensor:
    return in_a_deque(held[0], y)


def in_place(held: list, y: Tensor) -> Tensor:
    return y + held[0].add_(y.detach().mean(0))


@dataclass(slots=True, weakref_slot=True)
class Slots:
    calls: int = 0


ELSEWHERE: list[Slots] = []


def behind_a_proxy() -> Any:
    ELSEWHERE.append(Slots())
    return weakref.proxy(ELSEWHERE[-1])


def in_a_counter(held: Any, y: Tensor) -> Tensor:
    held.calls += 1
    return y * min(1.0, 0.1 * held.calls)


def in_an_array(held: dict, y: Tensor) -> Tensor:
    held["calls"] += 1
    return y


STATES: dict[str, tuple[Callable[[], Any], Callable[[Any, Tensor], Tensor]]] = {
    "a deque": (lambda: deque(maxlen=2), in_a_deque),
    "a defaultdict": (lambda: defaultdict(list), in_a_default_dict),
    "a list of lists": (lambda: [[]], in_a_list_of_lists),
    "a tensor in a list": (lambda: [torch.zeros(6)], in_place),
    "an object": (lambda: SimpleNamespace(calls=0), in_a_counter),
    "slots": (Slots, in_a_counter),
    "an object behind a weak proxy": (behind_a_proxy, in_a_counter),
    "an array": (lambda: {"calls": np.zeros(1)}, in_an_array),
}


@pytest.mark.parametrize("name", STATES)
def test_state_is_what_it_was(name: str) -> None:
    x = torch.randn(8, 6)
    torch.manual_seed(0)
    model = holding(*STATES[name])
    torch.manual_seed(0)
    twin = holding(*STATES[name])
    assert condition_(model, x).num_units == 8
    assert str(model.held) == str(twin.held)
    for _ in range(3):
        torch.testing.assert_close(model(x), twin(x))


class Cached(Holding):
    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.relu(x @ self.transposed() + self.a.bias))

    def transposed(self) -> Tensor:
        raise NotImplementedError


class InAnObject(Cached):
    def start(self) -> SimpleNamespace:
        return SimpleNamespace(found={})

    def transposed(self) -> Tensor:
        found: dict[str, Tensor] = self.held.found
        return found.setdefault("weight", self.a.weight.t())


class InTheMethod(Cached):
    @functools.cache  # noqa: B019
    def transposed(self) -> Tensor:
        return self.a.weight.t()


@pytest.mark.parametrize("kind", [InAnObject, InTheMethod])
@pytest.mark.parametrize("called", [False, True])
def test_cached_views_are_those_of_the_weights(kind: type[Cached], called: bool) -> None:
    """Not of copies in their place, which would never learn."""
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 6)
    before = model(x) if called else None
    condition_(model, x)
    outputs = model(x)
    if before is not None:
        torch.testing.assert_close(outputs, before)
    outputs.sum().backward()
    assert model.a.weight.grad is not None
    with torch.no_grad():
        model.a.weight.mul_(2)
    assert not torch.equal(model(x), outputs)


@pytest.mark.parametrize("samples", [4, 400])
def test_tensors_that_the_first_call_makes(samples: int) -> None:
    """A large batch is captured without values: those must not stay in the model."""

    class Grid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1)
            self.register_buffer("grid", None)

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.conv(x))
            if self.grid is None:
                self.grid = torch.linspace(0, 1, h.shape[-1])
            return self.head(h) + self.grid

    model, x = Grid(), torch.randn(samples, 3, 32, 32)
    assert condition_(model, x).num_units == 4
    assert model.grid is None
    assert type(model(x)) is Tensor


def test_a_large_tensor_that_is_an_attribute() -> None:
    model = holding(lambda: torch.zeros(2**22 + 1), lambda held, y: y + held.add_(1)[:6])
    assert condition_(model, torch.randn(8, 6)).num_units == 8
    assert not model.held.any()


def test_a_weak_proxy_of_something_that_is_gone() -> None:
    model = holding(list, in_a_list)
    model.held = [weakref.proxy(Slots())]  # as a module of Lightning has after its trainer
    assert condition_(model, torch.randn(8, 6)).num_units == 8
    assert len(model.held) == 1


def followed(weight: nn.Parameter) -> None:
    pass


def in_place(weight: nn.Parameter) -> None:
    weight.data *= 0.9


def by_assignment(weight: nn.Parameter) -> None:
    weight.data = 0.9 * weight.data


class Writing(nn.Module):
    """Counts its calls, and may write into its weights past autograd: then it is opaque."""

    def __init__(self, write: Callable[[nn.Parameter], None]) -> None:
        super().__init__()
        self.write = write
        self.layer = nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(()))
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer.weight)
        self.calls += 1
        self.count += 1
        return self.layer(x)


@pytest.mark.parametrize("write", [followed, in_place, by_assignment])
@pytest.mark.parametrize(
    "criterion",
    [BalancedLayers(), PathKernel(), Curvature(), Curvature(loss=lambda out: out.square().mean())],
    ids=["layers", "paths", "curvature", "curvature of a loss"],
)
def test_measuring_calls_leave_nothing_behind(
    criterion: Criterion, write: Callable[[nn.Parameter], None]
) -> None:
    first = Writing(write)
    model = nn.Sequential(
        first, nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 2), nn.Tanh()
    ).eval()
    weights = first.layer.weight.detach().clone()
    memory = first.layer.weight.data_ptr()
    report = condition_(model, torch.randn(6, 4), criterion=criterion)
    assert report.num_units == (15 if write is followed else 7)
    assert float(first.calls) == first.count == 0
    assert first.layer.weight.data_ptr() == memory
    if write is not followed:
        torch.testing.assert_close(first.layer.weight.detach(), weights, rtol=0, atol=0)
