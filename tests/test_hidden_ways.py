"""What one run of a model does not show: ways that it takes after a caught exception, under other
draws or with other numbers among its attributes, and what it hands out beside its outputs.
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
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


def suppressed(self: Any, x: Tensor) -> Tensor:
    with contextlib.suppress(ValueError):
        if x.abs().max() > 10:
            raise ValueError("out of range")
        return self.b(torch.relu(self.a(x)))
    return self.b(torch.tanh(self.a(x)))


class Swallowing:
    def __enter__(self) -> None: ...

    def __exit__(self, *exception: object) -> bool:
        return True


def swallowed(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad(), Swallowing():
        if x.abs().max() > 10:
            raise ValueError("out of range")
        return self.b(torch.relu(self.a(x)))
    return self.b(torch.tanh(self.a(x)))


def raised_again_unless_lenient(self: Any, x: Tensor) -> Tensor:
    try:
        if x.abs().max() > 10:
            raise ValueError("out of range")
        return self.b(torch.relu(self.a(x)))
    except ValueError:
        if self.lenient:
            return self.b(torch.tanh(self.a(x)))
        raise


def left_in_the_end(self: Any, x: Tensor) -> Tensor:
    y = self.b(torch.tanh(self.a(x)))
    try:
        if x.abs().max() > 10:
            raise ValueError("out of range")
        y = self.b(torch.relu(self.a(x)))
    finally:
        return y  # noqa: B012


class Guard:
    """Keeps what it is told."""

    large = False

    def check(self, value: float) -> None:
        self.large = value > 10

    def warning(self, text: str) -> None:
        self.large = True


def a_check_of_another_object(self: Any, x: Tensor) -> Tensor:
    self.guard.check(x.abs().max().item())
    return self.b(torch.tanh(self.a(x)) if self.guard.large else torch.relu(self.a(x)))


def check_range(model: Any, value: float) -> None:
    model.large = value > 10


def a_check_that_is_given_the_model(self: Any, x: Tensor) -> Tensor:
    check_range(self, x.abs().max().item())
    return self.b(torch.tanh(self.a(x)) if self.large else torch.relu(self.a(x)))


def a_warning_that_is_kept(self: Any, x: Tensor) -> Tensor:
    self.guard.large = False
    if x.abs().max() > 10:
        self.guard.warning("large input")
    return self.b(torch.tanh(self.a(x)) if self.guard.large else torch.relu(self.a(x)))


CHECKS = [
    raised,
    asserted,
    asserted_inside,
    a_check_of_its_own,
    suppressed,
    swallowed,
    raised_again_unless_lenient,
    left_in_the_end,
    a_check_of_another_object,
    a_check_that_is_given_the_model,
    a_warning_that_is_kept,
]


@pytest.mark.parametrize("forward", CHECKS)
def test_checks_after_which_the_model_goes_on(forward: Forward) -> None:
    model, far = network(forward, guard=Guard(), lenient=True, large=False), batch(9, 20.0)
    model.check_range = note_range.__get__(model)
    before = model(far)
    with contextlib.suppress(UnsupportedModelError):
        condition_(model, batch())
    torch.testing.assert_close(model(far), before)


def raising(self: Any, x: Tensor) -> Tensor:
    if x.abs().max() > 10:
        raise ValueError("out of range")
    return self.b(torch.relu(self.a(x)))


WITHOUT_SOURCE = """
def lenient(forward):
    def wrapped(self, x):
        try:
            return forward(self, x)
        except ValueError:
            return self.b(self.a(x).tanh())
    return wrapped
"""


def test_an_exception_that_code_without_source_may_catch() -> None:
    namespace: dict[str, Any] = {}
    exec(WITHOUT_SOURCE, namespace)
    model, far = network(namespace["lenient"](raising)), batch(9, 20.0)
    before = model(far)
    with contextlib.suppress(UnsupportedModelError):
        condition_(model, batch())
    torch.testing.assert_close(model(far), before)


IMPORTED = """
def forward(self, x):
    h = self.a(x).relu()
    if x.abs().max() > 10:
        h = h.tanh()
    return self.b(h)
"""


def test_a_file_that_was_edited_after_it_was_imported(tmp_path: Path) -> None:
    """What it says now is not what the model does: there, the branch is a check."""
    file, namespace = tmp_path / "edited.py", {}
    exec(compile(IMPORTED, str(file), "exec"), namespace)
    file.write_text(IMPORTED.replace("h = h.tanh()", "raise ValueError"))
    assert find_symmetry(network(namespace["forward"]), batch()).num_units == 0


def checked(self: Any, x: Tensor) -> Tensor:
    try:
        if x.abs().max() > 10:
            raise ValueError("out of range")
    except ValueError as error:
        raise RuntimeError("the input") from error
    return self.b(torch.relu(self.a(x)))


def checked_without_gradients(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch._assert(x.abs().max() < 10, "out of range")
        assert x.abs().max() < 10
    return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("forward", [checked, checked_without_gradients])
def test_a_check_whose_exception_goes_on_is_a_check(forward: Forward) -> None:
    assert find_symmetry(network(forward), batch()).num_units == 8


# Calls after which the next one goes another way


def another_way_once_called(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h = h if self.previous is None else torch.tanh(h)
    self.previous = x.detach()
    return self.b(h)


def another_way_once_listed(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    h = torch.tanh(h) if self.calls else h
    self.calls.append(len(x))
    return self.b(h)


def another_way_after_a_while(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.count > 4 else h)


def a_branch_that_fades_in(self: Any, x: Tensor) -> Tensor:
    self.counts["calls"] += 1
    h = torch.relu(self.a(x))
    return self.b(h + (1.0 if self.counts["calls"] > 5 else 0.0))


def another_way_every_third_call(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    h = torch.relu(self.a(x))
    return self.b(h if self.count % 3 else torch.tanh(h))


def another_way_when_counted_down(self: Any, x: Tensor) -> Tensor:
    self.left -= 1
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.left == 0 else h)


def another_way_by_a_number_that_was_none(self: Any, x: Tensor) -> Tensor:
    self.previous = 1 if self.previous is None else self.previous + 1
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.previous == 4 else h)


def another_way_by_a_new_entry(self: Any, x: Tensor) -> Tensor:
    self.counts["new"] = self.counts.get("new", 0) + 1
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.counts["new"] == 5 else h)


def another_way_by_a_counter(self: Any, x: Tensor) -> Tensor:
    self.counter["calls"] += 1
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.counter["calls"] == 6 else h)


def another_way_by_an_integer_of_numpy(self: Any, x: Tensor) -> Tensor:
    self.small = self.small + np.int64(1)
    h = torch.relu(self.a(x))
    return self.b(torch.tanh(h) if self.small > 6 else h)


LATER = [
    another_way_once_called,
    another_way_once_listed,
    another_way_after_a_while,
    a_branch_that_fades_in,
    another_way_every_third_call,
    another_way_when_counted_down,
    another_way_by_a_number_that_was_none,
    another_way_by_a_new_entry,
    another_way_by_a_counter,
    another_way_by_an_integer_of_numpy,
]


def another_way_by_a_default(self: Any, x: Tensor) -> Tensor:
    return self.remember(torch.relu(self.a(x)))


class Remembering(Calls):
    def remember(self, h: Tensor, calls: list[int] = []) -> Tensor:  # noqa: B006
        calls.append(len(h))
        return self.b(h if len(calls) < 2 else torch.tanh(h))


def test_what_a_call_leaves_behind_in_a_default() -> None:
    parts = {"a": nn.Linear(6, 8), "b": nn.Linear(8, 6)}
    model = Remembering(another_way_by_a_default, **parts).double()
    assert find_symmetry(model, batch()).num_units == 0
    assert Remembering.remember.__defaults__ == ([],)


def with_attributes(forward: Forward) -> nn.Module:
    plain = {"previous": None, "count": 0, "left": 5, "small": np.int64(0)}
    return network(forward, calls=[], counts={"calls": 0}, counter=Counter(), **plain)


@pytest.mark.parametrize("forward", LATER)
def test_what_a_call_leaves_behind_decides_about_the_next(forward: Forward) -> None:
    model, same = with_attributes(forward), with_attributes(forward)
    x = batch(9)
    condition_(model, batch())
    assert not model.calls
    assert not model.counter
    assert model.previous is None
    assert model.counts == {"calls": 0}
    assert model.count == model.small == 0
    assert model.left == 5
    for _ in range(8):
        torch.testing.assert_close(model(x), same(x))


@pytest.mark.parametrize("period", [63, 100, 128, 1000])
def test_another_way_at_every_so_many_calls(period: int) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        self.count += 1
        h = torch.relu(self.a(x))
        return self.b(h if self.count % period else torch.tanh(h))

    assert find_symmetry(network(forward, count=0), batch()).num_units == 0


def kept_in_a_buffer(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    self.memory = h.detach().mean(0)
    return self.b(h)


def registered_at_the_first_call(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    if not hasattr(self, "first"):
        self.register_buffer("first", h.detach().mean(0))
    return self.b(h + self.first)


@pytest.mark.parametrize("forward", [kept_in_a_buffer, registered_at_the_first_call])
def test_what_forward_keeps_in_new_buffers(forward: Forward) -> None:
    model, same = network(forward), network(forward)
    for each in (model, same):
        each.register_buffer("memory", None)
    x = batch(9)
    condition_(model, batch())
    assert dict(model.named_buffers()) == {}
    for _ in range(3):
        torch.testing.assert_close(model(x), same(x))
        torch.testing.assert_close(dict(model.named_buffers()), dict(same.named_buffers()))


def a_row_per_call(self: Any, x: Tensor) -> Tensor:
    self.count += 1
    return self.b(torch.relu(self.a(x + [0.1, 0.2, 0.3][self.count])))


def test_a_number_that_cannot_go_on_for_ever() -> None:
    assert find_symmetry(network(a_row_per_call, count=0), batch()).num_units == 8


def a_table_made_once(self: Any, x: Tensor) -> Tensor:
    if self.previous is None:
        self.previous = torch.arange(6.0, dtype=x.dtype)
    return self.b(torch.relu(self.a(x + self.previous)))


def test_a_table_that_the_first_call_makes_costs_nothing() -> None:
    assert find_symmetry(network(a_table_made_once, previous=None), batch()).num_units == 8


# What a run cannot follow, so that torch.export is asked


def with_a_literal(forward: Forward) -> Forward:
    """Only torch.export can follow a constructor of Python values."""

    def wrapped(self: Any, *inputs: Any) -> Tensor:
        torch.Tensor([2.0]) * 1.0
        return forward(self, *inputs)

    return wrapped


def plain_network(self: Any, x: Tensor, features: Any = None) -> Tensor:
    return self.b(torch.relu(self.a(x)))


@pytest.mark.parametrize("forward", [another_way_after_a_while, another_way_once_listed])
def test_state_that_an_export_does_not_show(forward: Forward) -> None:
    with pytest.raises(UnsupportedModelError, match="leaves something in attributes"):
        find_symmetry(with_attributes(with_a_literal(forward)), batch())


def test_what_an_exported_model_hands_out() -> None:
    kept: dict[str, Tensor] = {}
    hooked = network(with_a_literal(plain_network))
    assert find_symmetry(hooked, batch()).num_units == 8
    hooked.a.register_forward_hook(lambda module, given, output: kept.update(h=output))
    with pytest.raises(UnsupportedModelError, match="leaves a tensor with a hook"):
        find_symmetry(hooked, batch())
    with pytest.raises(UnsupportedModelError, match="leaves a tensor in what it was given"):
        find_symmetry(network(with_a_literal(into_a_dict)), (batch(), {}))


# Tests of whether values are finite


def a_quotient(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x))
    shares = h / h.sum(-1, keepdim=True)  # no numbers where all of h is zero
    return self.b(torch.tanh(h) if torch.isnan(shares).any() else h)


def missing_values(self: Any, x: Tensor) -> Tensor:
    missing = torch.isnan(x)
    h = torch.relu(self.a(x.masked_fill(missing, 0.0)))
    return self.b(h + missing.double().mean() if missing.any() else h)


@pytest.mark.parametrize("forward", [a_quotient, missing_values])
def test_values_that_may_well_be_no_numbers(forward: Forward) -> None:
    model = network(forward)
    with torch.no_grad():
        model.a.weight.abs_()
        model.a.bias.abs_()
    x = batch().abs()
    far = torch.cat([x, -5 * x])
    if forward is missing_values:
        far[0, 0] = torch.nan
    before = model(far)
    assert find_symmetry(model, x).num_units == 0
    condition_(model, x)
    torch.testing.assert_close(model(far), before)


def overflow(self: Any, x: Tensor) -> Tensor:
    h = torch.relu(self.a(x)) / 2
    h = h * torch.rsqrt(x.square().mean() + 1e-6) * (x.shape[0] / 3)
    return self.b(h.clamp(-9, 9) if not torch.isfinite(h).all() else h)


def test_a_test_for_overflow_is_followed() -> None:
    assert find_symmetry(network(overflow), batch()).num_units == 8


# Entries that are handed to Python one by one


@pytest.mark.parametrize("name", ["apply_", "map_"])
def test_entries_that_python_computes_are_refused(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.relu(self.a(x)).detach()
        if name == "apply_":
            h.apply_(lambda value: min(value, 5.0))
        else:
            h.map_(h, lambda value, other: min(value, 5.0))
        return self.b(h)

    with pytest.raises(UnsupportedModelError, match="entries one by one in Python"):
        find_symmetry(network(forward), batch())


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


def into_what_lies_deep(self: Any, x: Tensor, held: dict) -> Tensor:
    h = torch.relu(self.a(x))
    held.setdefault("all", []).append({"h": (h,)})
    return self.b(h)


def into_a_method(self: Any, x: Tensor, keep: Callable[[Tensor], None]) -> Tensor:
    h = torch.relu(self.a(x))
    keep(h)
    return self.b(h)


@dataclass(slots=True)
class Slots:
    features: Any = None


@pytest.mark.parametrize(
    ("forward", "make", "take"),
    [
        (into_a_dict, dict, lambda held: held["features"]),
        (into_a_list, list, lambda held: held[-1]),
        (into_an_object, SimpleNamespace, lambda held: held.features),
        (into_an_object, Slots, lambda held: held.features),
        (into_an_object, nn.Module, lambda held: held.features),
        (into_what_lies_deep, dict, lambda held: held["all"][-1]["h"][0]),
        (into_a_method, lambda: [].append, lambda keep: keep.__self__[-1]),
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
