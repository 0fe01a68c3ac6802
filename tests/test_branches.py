"""What a model does only at sizes that neither the example has nor the one derived from it."""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import logging
import math
import operator
import pickle
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.graph import capture_watched
from pathcond.capture.outputs import output_change
from pathcond.capture.size_numbers import bare, ends_of
from pathcond.capture.watching import BY_VALUES, Watch
from pathcond.symmetry.captures import capture_all

from .cases import Calls
from .zoo import Entry, outputs, transformers_entries

WIDTH = 4  # units that meet something at some sizes
INNER = 6
ALWAYS = 3 + INNER  # units that never do


@dataclass(frozen=True)
class Program:
    """A model whose first layer meets something at some sizes, and whose second block never does.

    Attributes:
        model: (batch, length, 3) -> (batch, ..., 2).
        units: How many units can be rescaled.
        length, batch: Of the example.
        drawn: What it was drawn as, to be printed where it fails.
    """

    model: nn.Module
    units: int = ALWAYS
    length: int = 8
    batch: int = 6
    drawn: tuple[Any, ...] = ()


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[build.__name__] = build
    return build


def block(meets: Callable[[Any, Tensor, Tensor], Tensor], **parts: Any) -> nn.Module:
    """relu(a x), what happens to it at some sizes, then b, and a block that is always the same."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.tail(self.b(meets(self, F.relu(self.a(x)), x)))

    tail = nn.Sequential(nn.Linear(3, INNER), nn.ReLU(), nn.Linear(INNER, 2))
    return Calls(forward, a=nn.Linear(3, WIDTH), b=nn.Linear(WIDTH, 3), tail=tail, **parts)


@program
def one_is_added_at_odd_lengths() -> Program:
    return Program(block(lambda self, h, x: h + x.shape[1] % 2))


@program
def nothing_is_added_at_two_lengths() -> Program:
    return Program(block(lambda self, h, x: h + (x.shape[1] - 8) * (x.shape[1] - 4)))


@program
def nothing_is_added_at_the_lengths_of_both_examples() -> Program:
    return Program(block(lambda self, h, x: h + (x.shape[1] - 8) * (x.shape[1] - 5)))


@program
def a_sixteenth_of_the_length_is_added() -> Program:
    return Program(block(lambda self, h, x: h + x.shape[1] // 16))


@program
def padded_with_ones_to_a_multiple() -> Program:
    return Program(block(lambda self, h, x: F.pad(h, (0, 0, 0, -x.shape[1] % 4), value=1.0)))


@program
def padded_with_ones_to_a_least_length() -> Program:
    return Program(block(lambda self, h, x: F.pad(h, (0, 0, 0, max(0, 4 - x.shape[1])), value=1.0)))


@program
def ones_are_joined_to_long_inputs() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        return torch.cat([h, torch.ones(len(h), x.shape[1] // 13, WIDTH, dtype=h.dtype)], 1)

    return Program(block(meets))


@program
def tanh_for_long_inputs() -> Program:
    return Program(block(lambda self, h, x: h.tanh() if x.shape[1] > 10 else h))


@program
def tanh_for_very_long_inputs() -> Program:
    """Too long to be tried: the branch is forced."""
    return Program(block(lambda self, h, x: h.tanh() if x.numel() > 10**6 else h))


@program
def one_is_added_to_a_single_sample() -> Program:
    return Program(block(lambda self, h, x: h + 1 if x.shape[0] == 1 else h))


@program
def one_is_added_to_a_single_sample_by_len() -> Program:
    return Program(block(lambda self, h, x: h if len(x) - 1 else h + 1))


@program
def tanh_for_large_batches() -> Program:
    return Program(block(lambda self, h, x: h.tanh() if x.size(0) > 8 else h))


@program
def the_last_chunk_is_filled() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        chunks = []
        for chunk in h.split(4, 1):
            if chunk.shape[1] < 4:
                chunk = torch.cat(
                    [chunk, torch.ones(len(h), 4 - chunk.shape[1], WIDTH, dtype=h.dtype)], 1
                )
            chunks.append(chunk)
        return torch.cat(chunks, 1)

    return Program(block(meets))


@program
def one_test_inside_another() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[1] > 10:
            h = h * 2
            if x.shape[0] == 7:
                h = h + 1
        return h

    return Program(block(meets))


@program
def the_outcome_is_kept_in_a_name() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        long = x.shape[1] > 10
        h = h * 2
        return h + long

    return Program(block(meets))


@program
def a_ratio_decides() -> Program:
    return Program(block(lambda self, h, x: h + 1 if x.shape[1] / 2 > 5.5 else h))


@program
def each_layer_decides_for_itself() -> Program:
    """The first layer sees the whole length, the second one half of it: both lines are one."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(3, WIDTH)
            self.down = nn.Linear(WIDTH, 3)

        def forward(self, x: Tensor) -> Tensor:
            h = F.relu(self.up(x))
            return self.down(h.tanh() if h.shape[1] > 6 else h)

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.tail(self.second(self.first(x)[:, ::2]))

    tail = nn.Sequential(nn.Linear(3, INNER), nn.ReLU(), nn.Linear(INNER, 2))
    return Program(Calls(forward, first=Layer(), second=Layer(), tail=tail), units=3 + ALWAYS)


@program
def a_layer_for_odd_lengths() -> Program:
    """What reads the units at odd lengths has a symmetry with them."""
    return Program(
        block(
            lambda self, h, x: F.relu(self.odd(h)) if x.shape[1] % 2 else h,
            odd=nn.Linear(WIDTH, WIDTH),
        ),
        units=WIDTH + ALWAYS,
    )


@program
def tanh_for_short_inputs_while_training() -> Program:
    """The modes go one way on the example, and two on the one that is derived from it."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        return h.tanh() if x.shape[1] < 7 and self.training else h

    return Program(block(meets))


@program
def tanh_for_each_row_that_is_missing_while_training() -> Program:
    """Nothing is tested: the loop has no turn on the example."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(8 - x.shape[1]):
            h = h.tanh() if self.training else h.relu()
        return h

    return Program(block(meets))


@program
def what_is_beyond_a_length_is_sorted_out() -> Program:
    return Program(block(lambda self, h, x: h + sorted((0, x.shape[1] - 9))[1]))


@program
def tanh_for_each_row_beyond_a_length() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        for _ in range(9, x.shape[1]):
            h = h.tanh()
        return h

    return Program(block(meets))


@program
def tanh_for_each_row_beyond_a_great_length() -> Program:
    """Too long to be tried: the loop is given one turn."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        assert isinstance(range(x.shape[1]), range)
        return functools.reduce(lambda h, _: h.tanh(), range(x.shape[1] - 500), h)

    return Program(block(meets))


@program
def tanh_behind_the_first_turn_of_a_loop() -> Program:
    """The example has room for one window, and a second one meets what the first has left."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        parts: list[Tensor] = []
        for start in range(0, x.shape[1], 500):
            part = h[:, start : start + 500]
            parts.append(part + 1 if parts else part)
        return torch.cat(parts, 1)

    return Program(block(meets))


def in_chunks(later: Callable[[Tensor], Tensor]) -> Callable[[Any, Tensor, Tensor], Tensor]:
    """What happens to chunks of 64 rows, the last one filled up, behind the first one."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        padded = F.pad(h, (0, 0, 0, -h.shape[1] % 64))
        parts: list[Tensor] = []
        for i in range(padded.shape[1] // 64):
            part = padded[:, 64 * i : 64 * (i + 1)]
            parts.append(later(part) if parts else part)
        return torch.cat(parts, 1)[:, : h.shape[1]]

    return meets


@program
def tanh_behind_the_first_chunk() -> Program:
    return Program(block(in_chunks(torch.tanh)))


@program
def relu_behind_the_first_chunk() -> Program:
    """Fits every scale."""
    return Program(block(in_chunks(torch.relu)), units=WIDTH + ALWAYS)


def all_but_the_first(cut: Callable[[Tensor], Any]) -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        first, *others = cut(h)
        return torch.cat([first, *(part.tanh() for part in others)], 1)

    return Program(block(meets))


@program
def tanh_for_all_pieces_but_the_first() -> Program:
    return all_but_the_first(lambda h: h.split(500, 1))


def folded(h: Tensor) -> Tensor:
    """(batch, length, width) -> (batch, windows, 500, width)."""
    return F.pad(h, (0, 0, 0, -h.shape[1] % 500)).unflatten(1, (-1, 500))


@program
def tanh_for_all_windows_but_the_first() -> Program:
    return all_but_the_first(lambda h: folded(h).unbind(1))


@program
def tanh_for_the_second_half_of_windows() -> Program:
    return all_but_the_first(lambda h: folded(h).chunk(2, 1))


@program
def moved_back_further_than_the_example_is_long() -> Program:
    """``h`` is cut off, and zeros alone are left."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        moved = torch.cat([h.new_zeros(len(h), 16, WIDTH), h], 1)[:, :-16]
        return h * (1 + moved.tanh())

    return Program(block(meets))


@program
def one_is_added_behind_a_range_of_positions() -> Program:
    """What is added is made of the length, and zero for short inputs."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], dtype=h.dtype)
        return h + (at - 14).clamp(min=0)[:, None]

    return Program(block(meets))


@program
def one_is_added_for_each_row_beyond_a_length() -> Program:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        return h + (torch.ones(x.shape[1], dtype=h.dtype).sum() - 12).clamp(min=0)

    return Program(block(meets))


@program
def tanh_at_lengths_of_a_set() -> Program:
    return Program(block(lambda self, h, x: h.tanh() if x.shape[1] in {11, 13} else h))


@program
def tanh_at_lengths_of_a_set_of_its_own() -> Program:
    """What a set says cannot be inverted: an input of such a length is tried."""
    model = block(lambda self, h, x: h.tanh() if x.shape[1] in self.special else h)
    model.special = {11, 1000}
    return Program(model)


@program
def tanh_at_great_lengths_of_a_set_of_its_own() -> Program:
    """Too long to be tried."""
    model = block(lambda self, h, x: h.tanh() if x.shape[1] in self.special else h)
    model.special = {11, 1_000_000}
    return Program(model, units=INNER)


@program
def doubled_for_long_inputs() -> Program:
    """Fits every scale: nothing is pinned."""
    return Program(block(lambda self, h, x: h * 2 if x.shape[1] > 10 else h), units=WIDTH + ALWAYS)


@program
def one_is_added_behind_a_fixed_position() -> Program:
    return Program(block(lambda self, h, x: torch.cat([h[:, :10], h[:, 10:] + 1], 1)))


@program
def positions_beyond_a_limit_are_held() -> Program:
    """Too long to be tried, and there is no test to invert: all that the model itself sees keeps
    its scale.
    """
    return Program(
        block(lambda self, h, x: torch.cat([h[:, :500], h[:, 500:] + 1], 1)), units=INNER
    )


@program
def a_check_of_the_length() -> Program:
    """Raises on inputs that the model does not accept: nothing is pinned."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        if not is_short(x.shape[1]):
            complain()
        return h

    return Program(block(meets), units=WIDTH + ALWAYS)


def is_short(length: int) -> bool:
    return length <= 1000


def complain() -> None:
    raise ValueError("too long")


def inputs_of_all_sizes() -> list[Tensor]:
    lengths = [torch.randn(6, length, 3, dtype=torch.float64) for length in range(1, 21)]
    batches = [torch.randn(batch, 8, 3, dtype=torch.float64) for batch in range(1, 11)]
    sizes = [(7, 12, 3), (1, 13, 3), (1, 600, 3)]
    both = [torch.randn(shape, dtype=torch.float64) for shape in sizes]
    return [*lengths, *batches, *both]


def check_at_all_sizes(built: Program) -> pathcond.Symmetry:
    """Rescale at random: outputs must keep at every size, in both modes."""
    model = built.model.double()
    example = torch.randn(built.batch, built.length, 3, dtype=torch.float64)
    inputs = inputs_of_all_sizes()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    symmetry = pathcond.find_symmetry(model, example)
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    calls = [(x, mode) for x in inputs for mode in (False, True)]
    before = [outputs(model, x, training=mode) for x, mode in calls]
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2)
    for (x, mode), expected in zip(calls, before, strict=True):
        change = output_change(expected, outputs(model, x, training=mode))
        assert change < 1e-9, (tuple(x.shape), mode)
    return symmetry


@pytest.mark.parametrize("name", PROGRAMS)
def test_outputs_keep_at_all_sizes(name: str) -> None:
    torch.manual_seed(0)
    built = PROGRAMS[name]()
    assert check_at_all_sizes(built).num_units == built.units


@pytest.mark.parametrize(
    "name",
    [
        "tanh_for_very_long_inputs",
        "tanh_for_each_row_beyond_a_great_length",
        "what_is_beyond_a_length_is_sorted_out",
        "tanh_for_short_inputs_while_training",
    ],
)
def test_outputs_keep_where_a_model_is_exported(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathcond.capture.graph.LARGEST_BATCH", 0)
    test_outputs_keep_at_all_sizes(name)


# What the first layer meets, and how many units more or less can be rescaled than those that never
# meet anything.
MEETINGS: dict[str, tuple[Callable[[Any, Tensor, Tensor], Tensor], int]] = {
    "pieces: written beyond a position": (lambda self, h, x: write_ones(h, slice(10, None)), 0),
    "pieces: cut with a new axis": (lambda self, h, x: add_one(h[:, 10:, None], h), 0),
    "pieces: split at a position": (
        lambda self, h, x: torch.cat(
            [h.tensor_split([10], 1)[0], h.tensor_split([10], 1)[1] + 1], 1
        ),
        0,
    ),
    "by chance: few of the last rows": (
        lambda self, h, x: h[:, -4:].tanh() if h[:, -4:].shape[1] < 4 else h,
        0,
    ),
    "by chance: number of pieces": (
        lambda self, h, x: h.tanh() if len(h.split(10, 1)) > 1 else h,
        0,
    ),
    "by chance: cut and whole are as long": (
        lambda self, h, x: h.tanh() if x[:, :10].shape[1] != x.shape[1] else h,
        0,
    ),
    "numbers: bits": (lambda self, h, x: h.tanh() if x.shape[1].bit_length() > 4 else h, 0),
    "numbers: no remainder": (
        lambda self, h, x: h.tanh() if (x.shape[1] / 11).is_integer() else h,
        0,
    ),
    "numbers: divided by a size": (
        lambda self, h, x: h.tanh() if divmod(10, x.shape[1])[0] == 0 else h,
        0,
    ),
    "numbers: torch.numel": (lambda self, h, x: h.tanh() if torch.numel(x) > 250 else h, 0),
    "numbers: an ordering function": (
        lambda self, h, x: h.tanh() if operator.gt(x.shape[1], 10) else h,
        0,
    ),
    "places: two lambdas of a line": (
        lambda self, h, x: functools.reduce(lambda h, f: f(h, x.shape[1]), OF_ONE_LINE, h),
        0,
    ),
    "forced: no number on the example": (
        lambda self, h, x: h + math.log(x.shape[1] - 100) if x.shape[1] > 100 else h,
        INNER - ALWAYS,
    ),
    "forced: a check of its own": (
        lambda self, h, x: for_long(h) if x.shape[1] >= 100 else h,
        INNER - ALWAYS,
    ),
    "checks: added in place": (lambda self, h, x: add_in_place(h), 0),
    "checks: else of a message": (lambda self, h, x: tanh_unless_told(h), 0),
    "harmless: at least one": (lambda self, h, x: h / max(x.shape[1], 1), WIDTH),
    "harmless: windows": (lambda self, h, x: torch.cat(windows(h), 1), WIDTH),
    "harmless: from the end": (
        lambda self, h, x: torch.stack([h[:, x.shape[1] - 1 - t] for t in range(x.shape[1])], 1),
        WIDTH,
    ),
}


# fmt: off
OF_ONE_LINE = [lambda h, n: h.tanh() if n > 10 else h, lambda h, n: h.relu() if n < 10 else h]
# fmt: on


def write_ones(h: Tensor, at: slice) -> Tensor:
    h = h.clone()
    h[:, at] = 1.0
    return h


def add_one(part: Tensor, h: Tensor) -> Tensor:
    return torch.cat([h[:, :10], (part + 1)[:, :, 0]], 1)


def for_long(h: Tensor) -> Tensor:
    if h.shape[1] < 100:
        raise ValueError("too short")
    return h.tanh()


def add_in_place(h: Tensor) -> Tensor:
    h = h.clone()
    shift(h)
    return h


def shift(h: Tensor) -> None:
    if h.shape[1] > 10:
        h += 1


def tanh_unless_told(h: Tensor) -> Tensor:
    if h.shape[1] <= 10:
        logging.debug("short")
    else:
        return h.tanh()
    return h


def windows(h: Tensor) -> list[Tensor]:
    found, start = [], 0
    while start < h.shape[1]:
        found.append(h[:, start : start + 4])
        start += 4
    return found


@pytest.mark.parametrize("name", MEETINGS)
def test_what_else_sizes_decide(name: str) -> None:
    torch.manual_seed(0)
    meets, more = MEETINGS[name]
    assert check_at_all_sizes(Program(block(meets))).num_units == ALWAYS + more


TESTS: dict[str, Callable[[int, int], bool]] = {
    "longer": lambda n, k: n > k,
    "equal": lambda n, k: n == k,
    "multiple": lambda n, k: n % k == 0,
    "no multiple": lambda n, k: bool(n % k),
    "inverse": lambda n, k: not k - n,
    "between": lambda n, k: k < n < k + 3,
    "ceiling": lambda n, k: -(-n // 3) > k,
}
EFFECTS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "tanh": lambda h, k: h.tanh(),
    "one": lambda h, k: h + 1,
    "double": lambda h, k: h * 2,
    "ones": lambda h, k: torch.cat([h, torch.ones_like(h[:, :1])], 1),
    "mixed": lambda h, k: h + h.flip(-1),
}
NUMBERS: dict[str, Callable[[int, int], int]] = {
    "rest": lambda n, k: n % k,
    "quotient": lambda n, k: n // k,
    "missing": lambda n, k: -n % k,
    "product": lambda n, k: (n - k) * (n - 5) * (n - 8),
    "more": lambda n, k: max(0, n - k),
}


@st.composite
def deciding_programs(draw: st.DrawFn) -> Program:
    """Layers between which sizes decide what happens, or enter as numbers."""
    axes = draw(st.sampled_from([(0,), (1,), (0, 1), (1, 1), (0, 0)]))
    decisions = TESTS | NUMBERS
    names = [draw(st.sampled_from(sorted(decisions))) for _ in axes]
    limits = [draw(st.integers(1, 14 if axis else 9)) for axis in axes]
    effects = [draw(st.sampled_from(sorted(EFFECTS))) if name in TESTS else "" for name in names]
    modes = [draw(st.sampled_from([(False, True), (False, True), (True,), (False,)])) for _ in axes]
    steps = list(
        zip(axes, limits, [decisions[name] for name in names], effects, modes, strict=True)
    )

    def forward(self: Any, x: Tensor) -> Tensor:
        h = x
        for layer, (axis, limit, decide, effect, modes) in zip(self.layers, steps, strict=True):
            h = F.relu(layer(h))
            if not effect:
                h = h + decide(x.shape[axis], limit)
            elif decide(x.shape[axis], limit) and self.training in modes:
                h = EFFECTS[effect](h, limit)
        return self.tail(h)

    widths = [3, *[WIDTH] * len(steps)]
    layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(widths))
    tail = nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, 2))
    model = Calls(forward, layers=layers, tail=tail)
    return Program(
        model,
        length=draw(st.integers(2, 9)),
        batch=draw(st.integers(2, 7)),
        drawn=tuple(zip(axes, names, limits, effects, modes, strict=True)),
    )


# Models of two inputs whose sizes depend on each other: they decide by the first one's length.
PAIRS: dict[str, tuple[Callable[..., Tensor], Callable[[int], tuple[Tensor, ...]]]] = {
    "twice as long": (
        lambda self, h, y: h.repeat_interleave(2, 1) * y,
        lambda n: (torch.randn(6, n, 3), torch.randn(6, 2 * n, 4)),
    ),
    "longer by one": (
        lambda self, h, y: torch.cat([h, h[:, :1]], 1) * y,
        lambda n: (torch.randn(6, n, 3), torch.randn(6, n + 1, 1)),
    ),
    "the other axis of a mask": (
        lambda self, h, y: h * y.T[..., None],
        lambda n: (torch.randn(n, 6, 3), torch.randn(6, n)),
    ),
    "flat": (
        lambda self, h, y: h * (1 + y).view(h.shape[0], h.shape[1], 1),
        lambda n: (torch.randn(6, n, 3), torch.randn(6 * n)),
    ),
}


@pytest.mark.parametrize("name", PAIRS)
def test_inputs_whose_sizes_depend_on_each_other(name: str) -> None:
    torch.manual_seed(0)
    joined, inputs = PAIRS[name]

    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        long = (x.shape[0] if "axis" in name else x.shape[1]) > 10
        return self.b(joined(self, h.tanh() if long else h, y))

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert pathcond.find_symmetry(model, inputs(8)).num_units == 0


def test_one_condition_for_all_samples() -> None:
    def forward(self: Any, x: Tensor, y: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b((h.tanh() if y.shape[0] != x.shape[0] else h) * y)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    examples = torch.randn(6, 8, 3), torch.randn(6, 1, 4)
    assert pathcond.find_symmetry(model, examples).num_units == 0


@pytest.mark.parametrize("draw", [lambda: torch.rand(()), random.random], ids=["torch", "Python"])
def test_decisions_that_few_draws_lead_to(draw: Callable[[], Any]) -> None:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        if self.training and draw() < 0.001:
            return h.tanh() if x.shape[1] > 10 else h * 2
        return h

    assert pathcond.find_symmetry(block(meets), torch.randn(6, 8, 3)).num_units <= ALWAYS


def test_a_cut_by_a_number_that_was_read_from_inputs_is_watched_while_it_is_captured() -> None:
    def forward(self: Any, ids: Tensor, lengths: Tensor) -> Tensor:
        return self.b(F.relu(self.a(ids[:, : lengths.max().item()])))

    model = Calls(forward, a=nn.Embedding(9, 5), b=nn.Linear(5, 2))
    inputs = torch.randint(0, 9, (3, 6)), torch.tensor([4, 3, 2])
    assert len(capture_watched(model, inputs, training=False).watches) == 1


def test_a_size_that_is_returned() -> None:
    model = Calls(
        lambda self, x: (self.b(F.relu(self.a(x))), x.shape[1]),
        a=nn.Linear(3, 4),
        b=nn.Linear(4, 2),
    )
    assert pathcond.find_symmetry(model, torch.randn(6, 8, 3)).num_units == 4


@given(deciding_programs())
@settings(max_examples=10, deadline=None)
def test_drawn_programs_keep_at_all_sizes(built: Program) -> None:
    assert check_at_all_sizes(built).num_units >= INNER


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit", "resnet"])
def test_transformers_need_no_more_captures(name: str) -> None:
    entry: Entry = next(e for e in transformers_entries() if e.name == f"transformers:{name}")
    assert len(capture_all(*entry.build())) == 2


def test_plain_networks_need_no_more_captures() -> None:
    import torchvision

    mlp = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)
    )
    assert len(capture_all(mlp, torch.randn(6, 3))) == 2
    assert (
        len(capture_all(torchvision.models.resnet18(weights=None), torch.randn(2, 3, 32, 32))) == 2
    )


def test_decisions_are_seen_while_the_model_is_captured() -> None:
    """No run of the example for them alone, and few samples for all that is tried."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    shapes: list[tuple[int, ...]] = []
    model.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    capture_all(model, torch.randn(16, 3, 12, 12))
    assert shapes.count((16, 3, 12, 12)) == 2  # both modes
    taken = [shape for shape in shapes if shape[1] == 3 and shape != (16, 3, 12, 12)]
    # whether it takes three samples, and other lengths too; then the capture
    assert taken == [(3, 3, 12, 12), (3, 3, 7, 7), (3, 3, 7, 7)]


def test_what_is_not_followed_is_named() -> None:
    symmetry = pathcond.find_symmetry(
        positions_beyond_a_limit_are_held().model, torch.randn(6, 8, 3)
    )
    (reason,) = {pin.reason for pin in symmetry.pinned if pin.name == "a"}
    assert reason.startswith("may meet the other way at test_branches.py:")
    assert reason.endswith("give an input that takes it by other_inputs=)")
    longer = pathcond.find_symmetry(
        positions_beyond_a_limit_are_held().model,
        torch.randn(6, 8, 3),
        other_inputs=torch.randn(1, 501, 3),
    )
    assert longer.num_units == ALWAYS


def test_forced_runs_are_not_verified() -> None:
    symmetry = pathcond.find_symmetry(tanh_for_very_long_inputs().model, torch.randn(6, 8, 3))
    assert [example.runnable for example in symmetry.examples] == [True, True, False]


def test_sizes_that_a_model_keeps_are_plain_numbers() -> None:
    cached: list[int] = []

    @functools.lru_cache
    def rows(length: int) -> int:
        cached.append(length)
        return length + 1

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        self.length = x.shape[1]
        self.by_length[x.shape[1]] = len(x)
        return h * rows(x.shape[1])

    model = block(meets)
    model.by_length = {}
    model.length = None
    assert pathcond.find_symmetry(model, torch.randn(6, 8, 3)).num_units == WIDTH + ALWAYS
    assert model.length is None
    for number in (*cached, *model.by_length, *model.by_length.values()):
        assert [
            type(n) for n in (number + 0, copy.deepcopy(number), pickle.loads(pickle.dumps(number)))
        ] == [int] * 3
        assert number > 0
        assert torch.zeros(number, number - 1)[: number - 2].shape == (number - 2, number - 1)
    assert (
        pathcond.find_symmetry(copy.deepcopy(model), torch.randn(6, 8, 3)).num_units
        == WIDTH + ALWAYS
    )


def test_len_and_range_are_brought_back() -> None:
    before = builtins.len, builtins.range
    with pytest.raises(ValueError, match="stop"), Watch(nn.Linear(2, 2)):
        raise ValueError("stop")
    assert (builtins.len, builtins.range) == before


def test_a_model_whose_source_cannot_be_read() -> None:
    """As it is where a model is typed at the prompt."""
    names: dict[str, Any] = {}
    exec("def meets(self, h, x):\n    return h + max(0, x.shape[1] - 9)", names)
    assert check_at_all_sizes(Program(block(names["meets"]))).num_units == ALWAYS


def test_an_inverted_loop_ends() -> None:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        while x.shape[1] > 100_000:
            h = h * 1
        return h

    def asks_once_more(self: Any, h: Tensor, x: Tensor) -> Tensor:
        n = x.shape[1]
        while n > 100_000:
            h = h * 1
        return h

    for way in (meets, asks_once_more):
        assert pathcond.find_symmetry(block(way), torch.randn(6, 8, 3)).num_units == INNER


@pytest.mark.parametrize(
    "meets",
    [
        lambda self, h, x: F.pad(h, (0, 0, 0, max(3 - x.shape[1] % 2, 0))),
        lambda self, h, x: h if x.shape[1] % 2 < 2 else h.tanh(),
        lambda self, h, x: h.tanh() if -(-x.shape[1] // 4) <= 0 else h,
        lambda self, h, x: h.tanh() if x.shape[1] / 2 == 0 else h,
        lambda self, h, x: h.tanh() if math.ceil(x.shape[1] / 4) * 4 < 1 else h,
        lambda self, h, x: h + x.shape[1] % 1,
        lambda self, h, x: h.tanh() if x.shape[0] * x.shape[1] == -1 else h,
        lambda self, h, x: h.tanh() if x.shape[1] // x.shape[0] < 0 else h,
        lambda self, h, x: torch.cat([h[..., :WIDTH], h[..., WIDTH:].tanh()], -1),
    ],
    ids=[
        "padding",
        "rest",
        "number of blocks",
        "half",
        "rounded up",
        "always zero",
        "product",
        "quotient",
        "features",
    ],
)
def test_what_comes_out_one_way_at_all_sizes_is_not_followed(meets: Callable[..., Tensor]) -> None:
    model, x = block(meets), torch.randn(6, 8, 3)
    assert len(capture_all(model, x)) == 2
    assert pathcond.find_symmetry(model, x).num_units == WIDTH + ALWAYS


STEPS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "truediv": operator.truediv,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "rest of": lambda n, k: k % n if n else k,
    "rest of a fraction": lambda n, k: (k + 0.5) % n if n else k,
    "taken from": lambda n, k: k - n,
    "over": lambda n, k: k // n if n else k,
    "neg": lambda n, _: -n,
    "abs": lambda n, _: abs(n),
    "ceil": lambda n, _: math.ceil(n),
    "floor": lambda n, _: math.floor(n),
    "round": lambda n, _: round(n),
    "square": lambda n, _: n * n,
}


@given(
    st.lists(
        st.tuples(st.sampled_from(sorted(STEPS)), st.integers(-3, 4) | st.just("before")),
        max_size=6,
    ),
    st.integers(1, 60),
    st.integers(1, 60),
)
def test_numbers_made_of_sizes_lie_between_their_ends(
    steps: list[tuple[str, int | str]], size: int, other: int
) -> None:
    with Watch(nn.Linear(2, 2)):
        # with a constant, or with the number before this one
        before, number = torch.empty(size, other).shape
        for name, constant in steps:
            k: Any = before if constant == "before" else constant
            if name in ("truediv", "floordiv", "mod") and bare(k) == 0:
                continue
            if name == "pow" and (abs(bare(number)) > 100 or abs(bare(k)) > 4):
                continue
            found = STEPS[name](number, abs(k) if name == "pow" else k)
            before, number = number, found
            least, greatest = ends_of(number)
            assert least <= bare(number) <= greatest


def test_the_same_question_of_the_same_number_has_one_answer() -> None:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        n = x.shape[1]
        h = F.relu(h) if n > 100_000 else h
        if n > 200_000:
            h = 2 * h
        return h.abs() if n > 100_000 else h

    model, x = block(meets), torch.randn(6, 8, 3)
    with Watch(model) as watch:
        model(x)
    first, other, again = watch.decisions
    assert (first.repeats, other.repeats, again.repeats) == (None, None, first.place)
    inverted = Watch(model, frozenset([first.place]))
    with inverted:
        model(x)
    assert [d.outcome for d in inverted.decisions] == [True, False, True]
    assert pathcond.find_symmetry(model, x).num_units == WIDTH + ALWAYS


def test_a_question_that_cannot_be_followed_pins_where_it_is_asked_again() -> None:
    class Asks(nn.Module):
        def __init__(self, otherwise: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 3)
            self.otherwise = otherwise

        def forward(self, x: Tensor, n: int) -> Tensor:
            h = F.relu(self.a(x))
            return self.b(self.otherwise(h) if n > 100_000 else h)  # type: ignore[no-any-return]

    def forward(self: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        return self.second(self.first(x, n), n)  # type: ignore[no-any-return]

    x = torch.randn(6, 8, 3)
    for otherwise, units in ((lambda h: h.view(-1, 7, 4), 0), (F.relu, 4 + 3 + 4)):
        model = Calls(forward, first=Asks(otherwise), second=Asks(F.relu))
        assert pathcond.find_symmetry(model, x).num_units == units


def test_an_outcome_that_leads_around_another() -> None:
    """As a mask that attention is given for long inputs, behind which it asks for no lengths."""

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        if x.shape[1] > 100_000:
            return h.abs()
        return F.relu(h) if x.shape[1] > 200_000 else h

    assert pathcond.find_symmetry(block(meets), torch.randn(6, 8, 3)).num_units == WIDTH + ALWAYS


def test_outcomes_are_put_in_place_around_what_cannot_be_followed() -> None:
    """As in attention, beside experts that are called by the values of their inputs."""

    class Opaque(nn.Module):
        def forward(self, h: Tensor) -> Tensor:
            h = h if h.shape[1] < 100_000 else h.tanh()
            return 2 * h if h.sum() > 0 else -h

    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        return h if x.shape[1] < 100_000 else self.way(h)

    x = torch.randn(6, 8, 3)
    for way, units in ((F.relu, WIDTH), (torch.tanh, 0)):
        model = nn.Sequential(block(meets), Opaque())
        model[0].way = way
        symmetry = pathcond.find_symmetry(model, x)
        assert symmetry.num_units == units + ALWAYS
        (reason,) = {pin.reason for pin in symmetry.pinned if pin.name == "0.tail.2"}
        assert reason == "enters Opaque, which cannot be captured"


def test_a_model_that_does_not_run_under_the_watch_is_refused() -> None:
    def meets(self: Any, h: Tensor, x: Tensor) -> Tensor:
        if type(x.shape[1]) is not int:
            raise TypeError("sizes must be plain numbers")
        return h.tanh() if x.shape[1] > 1000 else h

    model, x = block(meets), torch.randn(6, 8, 3)
    with pytest.raises(pathcond.UnsupportedModelError, match=r"watched \(TypeError.*other_inputs"):
        pathcond.find_symmetry(model, x)
    # the user says what there is
    assert pathcond.find_symmetry(model, x, other_inputs=torch.randn(6, 9, 3)).num_units > 0


@pytest.mark.parametrize(
    "is_other",
    [lambda n: n > 16, lambda n: n < 20, lambda n: n == 32, lambda n: n % 4, lambda n: n == 4],
    ids=["many", "fewer", "as given", "no fours", "four"],
)
def test_decisions_by_the_number_of_samples_of_a_large_batch(
    is_other: Callable[[int], object],
) -> None:
    """The ways of the batch, of a few samples and of all numbers between."""
    model = block(lambda self, h, x: torch.tanh(h) if is_other(x.shape[0]) else h).double().eval()
    x = torch.randn(32, 8, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == ALWAYS
    rescaled = copy.deepcopy(model)
    pathcond.rescale_(rescaled, symmetry, torch.randn(symmetry.num_units), verify=False)
    for count in (1, 3, 4, 5, 16, 17, 31, 32, 33):
        other = torch.randn(count, 8, 3).double()
        with torch.no_grad():
            assert output_change([model(other)], [rescaled(other)]) < 1e-12


TOKENS = {
    "nonzero": lambda i: (i == 7).nonzero().numel(),
    "nonzero, a column": lambda i: (i == 7).nonzero()[:, 0].shape[0] > 0,
    "where": lambda i: len(torch.where(i == 7)[0]),
    "argwhere": lambda i: torch.argwhere(i == 7).size(0),
    "a mask": lambda i: i[i > 5].numel() > 0,
    "masked_select": lambda i: i.masked_select(i > 5).flatten().shape[0],
    "unique": lambda i: i.unique().numel() > 4,
    "torch.unique with counts": lambda i: torch.unique(i, return_counts=True)[0].numel() > 4,
    "a number": lambda i: i.unique().numel() // 5,
    "one_hot": lambda i: F.one_hot(i).shape[-1] > 4,
    "bincount": lambda i: torch.bincount(i.flatten()).numel() > 4,
}


FIXED_BY_NUMBERS: dict[str, Callable[[Tensor], Tensor]] = {
    "one_hot with a number of classes": lambda i: F.one_hot(i, 9),
    "repeat_interleave by a number": lambda i: i.repeat_interleave(3, dim=1),
    "where with three operands": lambda i: torch.where(condition=i > 1, input=i, other=0),
    "flatten by name": lambda i: torch.flatten(input=i),
    "squeeze by name": lambda i: torch.squeeze(input=i),
}


@pytest.mark.parametrize("make", FIXED_BY_NUMBERS.values(), ids=FIXED_BY_NUMBERS)
def test_sizes_that_no_value_decides_are_no_decisions_by_values(
    make: Callable[[Tensor], Tensor],
) -> None:
    with Watch(nn.Identity()) as watch:
        way = "one" if make(torch.arange(28).view(7, 4) % 3).shape[-1] > 1 else "other"
    assert way == "one"
    assert watch.decisions
    assert all(BY_VALUES not in decision.sources for decision in watch.decisions)


@pytest.mark.parametrize("decide", TOKENS.values(), ids=TOKENS)
def test_decisions_by_sizes_that_depend_on_integer_values(decide: Callable[[Tensor], int]) -> None:
    """Whether there is such a token: no example of another size need have one."""

    def forward(self: Any, x: Tensor, i: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        h = h + 1 if decide(i) else h
        return self.tail(self.b(h))  # type: ignore[no-any-return]

    tail = nn.Sequential(nn.Linear(3, INNER), nn.ReLU(), nn.Linear(INNER, 2))
    model = Calls(forward, a=nn.Linear(3, WIDTH), b=nn.Linear(WIDTH, 3), tail=tail).double().eval()
    symmetry = pathcond.find_symmetry(
        model, (torch.randn(7, 3).double(), torch.arange(28).view(7, 4) % 3)
    )
    assert symmetry.num_units == ALWAYS
    rescaled = copy.deepcopy(model)
    pathcond.rescale_(rescaled, symmetry, torch.randn(ALWAYS), verify=False)
    x = torch.randn(5, 3).double()
    with torch.no_grad():
        for tokens in (
            torch.arange(20).view(5, 4) % 8,
            torch.ones(5, 4).long(),
            torch.full((5, 4), 7),
        ):
            change = output_change([model(x, tokens)], [rescaled(x, tokens)])
            assert change < 1e-12
