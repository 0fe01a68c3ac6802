"""The function is kept for every input that a model accepts, not only for inputs of the example's
sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.outputs import output_change
from pathcond.symmetry.captures import capture_all

from .cases import Calls, families, make, prepared
from .zoo import NORMALIZATIONS, as_double, other_sizes, outputs


@dataclass(frozen=True)
class Program:
    """A model, the example that it is captured on, and inputs of other sizes.

    Attributes:
        units: How many units can be rescaled.
    """

    model: nn.Module
    example: Any
    others: list[Any]
    units: int


PROGRAMS: dict[str, Callable[[], Program]] = {}


def program(build: Callable[[], Program]) -> Callable[[], Program]:
    PROGRAMS[build.__name__] = build
    return build


def tokens(length: int, batch: int = 3) -> Tensor:
    return torch.randint(0, 11, (batch, length))


def positions(read: Callable[[Tensor, int], Tensor], shape: tuple[int, ...] = (16, 4)) -> Program:
    """Tokens plus what is read of a table of positions, then a feed-forward."""

    def forward(self: Any, ids: Tensor) -> Tensor:
        h = self.embed(ids) + read(self.table, ids.shape[1])
        return self.b(F.relu(self.a(h)))

    parts = {"embed": nn.Embedding(11, 4), "a": nn.Linear(4, 6), "b": nn.Linear(6, 2)}
    model = Calls(forward, **parts, table=nn.Parameter(torch.randn(shape)))
    return Program(model, tokens(7), [tokens(12), tokens(16, batch=1), tokens(3)], units=10)


@program
def sliced_positions() -> Program:
    return positions(lambda table, length: table[:length])


@program
def last_positions() -> Program:
    return positions(lambda table, length: table[16 - length :])


@program
def narrowed_positions() -> Program:
    return positions(lambda table, length: table.narrow(0, 0, length))


@program
def positions_by_range() -> Program:
    return positions(lambda table, length: table[torch.arange(length)])


@program
def positions_selected() -> Program:
    return positions(lambda table, length: table.index_select(0, torch.arange(length)))


@program
def positions_gathered() -> Program:
    return positions(
        lambda table, length: table.gather(0, torch.arange(length)[:, None].expand(-1, 4))
    )


@program
def positions_in_a_batch_of_one() -> Program:
    return positions(lambda table, length: table[:, :length], shape=(1, 16, 4))


@program
def interpolated_positions() -> Program:
    def read(table: Tensor, length: int) -> Tensor:
        resized = F.interpolate(table.t()[None], size=length, mode="linear")
        return resized[0].t() if length != len(table) else table

    built = positions(read, shape=(7, 4))
    return Program(built.model, built.example, [tokens(12), tokens(3)], units=10)


@program
def a_plane_of_positions() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.stem(x) + self.table[:, : x.shape[2], : x.shape[3]]
        return self.b(F.relu(self.a(h))).mean((2, 3))

    parts = {"stem": nn.Conv2d(2, 3, 1), "a": nn.Conv2d(3, 5, 1), "b": nn.Conv2d(5, 2, 1)}
    model = Calls(forward, **parts, table=nn.Parameter(torch.randn(3, 12, 12)))
    others = [torch.randn(2, 2, 12, 12), torch.randn(2, 2, 9, 5), torch.randn(1, 2, 4, 11)]
    return Program(model, torch.randn(2, 2, 6, 6), others, units=8)


@program
def a_gain_for_every_position() -> Program:
    """Every position has a scale of its own: later ones cannot follow, so the tables stay."""

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(x[..., 0] * self.up[: x.shape[1]])
        return (h * self.down[: x.shape[1]]).sum(1, keepdim=True)

    tables = {"up": nn.Parameter(torch.randn(9)), "down": nn.Parameter(torch.randn(9))}
    return Program(Calls(forward, **tables), torch.randn(3, 5, 1), [torch.randn(2, 9, 1)], units=0)


@program
def relative_positions() -> Program:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = F.relu(self.a(self.embed(ids)))
        at = torch.arange(ids.shape[1])
        bias = self.table[(at[:, None] - at[None]).clamp(-6, 6) + 6]
        return torch.einsum("nsd,tsd->ntd", h, F.relu(bias))

    parts = {
        "embed": nn.Embedding(11, 4),
        "a": nn.Linear(4, 3),
        "table": nn.Parameter(torch.randn(13, 3)),
    }
    return Program(Calls(forward, **parts), tokens(4), [tokens(12), tokens(7)], units=4)


@program
def buckets_of_distance() -> Program:
    def forward(self: Any, ids: Tensor) -> Tensor:
        at = torch.arange(ids.shape[1])
        bucket = ((at[:, None] - at[None]).abs() // 2).clamp(max=4)
        return self.b(F.relu(self.a(self.embed(ids)).unsqueeze(1) + self.buckets(bucket)))

    parts = {"embed": nn.Embedding(11, 4), "a": nn.Linear(4, 3), "buckets": nn.Embedding(5, 3)}
    return Program(Calls(forward, **parts, b=nn.Linear(3, 2)), tokens(4), [tokens(12)], units=7)


@program
def constant_that_vanishes_at_this_size() -> Program:
    def forward(self: Any, ids: Tensor) -> Tensor:
        h = F.relu(self.a(self.embed(ids)))
        return self.b(h + (ids.shape[1] - 7))

    parts = {"embed": nn.Embedding(11, 4), "a": nn.Linear(4, 6), "b": nn.Linear(6, 2)}
    return Program(Calls(forward, **parts), tokens(7), [tokens(8), tokens(6)], units=4)


@program
def constant_that_vanishes_at_this_batch_size() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)) + (x.shape[0] - 6) * self.c)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Parameter(torch.randn(4)))
    model.register_buffer("d", torch.ones(4))
    return Program(model, torch.randn(6, 3), [torch.randn(1, 3), torch.randn(9, 3)], units=4)


@program
def mean_that_divides_by_the_length() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)).sum(1) / x.shape[1] ** 0.5)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    return Program(
        model, torch.randn(6, 5, 3), [torch.randn(2, 9, 3), torch.randn(1, 1, 3)], units=4
    )


@program
def mask_cut_to_length() -> Program:
    def forward(self: Any, ids: Tensor) -> Tensor:
        length = ids.shape[1]
        h = F.relu(self.a(self.embed(ids)))
        return self.b(self.mask[:length, :length] @ h)

    model = Calls(forward, embed=nn.Embedding(11, 4), a=nn.Linear(4, 6), b=nn.Linear(6, 2))
    model.register_buffer("mask", torch.ones(16, 16).tril())
    return Program(model, tokens(7), [tokens(12), tokens(1)], units=10)


@program
def token_expanded_to_the_batch() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = torch.cat([self.token.expand(len(x), -1, -1), self.a(x)], 1)
        return self.b(F.relu(h)).sum(1)

    parts = {
        "token": nn.Parameter(torch.randn(1, 1, 4)),
        "a": nn.Linear(3, 4),
        "b": nn.Linear(4, 2),
    }
    return Program(Calls(forward, **parts), torch.randn(2, 5, 3), [torch.randn(4, 8, 3)], units=4)


@program
def another_layer_for_long_inputs() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return (self.long if x.shape[1] > 20 else self.short)(h)

    parts = {"a": nn.Linear(3, 4), "long": nn.Linear(4, 2), "short": nn.Linear(4, 2)}
    return Program(Calls(forward, **parts), torch.randn(2, 5, 3), [torch.randn(2, 30, 3)], units=4)


@program
def positions_flipped() -> Program:
    return replace(positions(lambda table, length: table.flip(0)[:length]), units=6)


@program
def positions_rolled() -> Program:
    return replace(positions(lambda table, length: table.roll(length, 0)[:length]), units=6)


@program
def two_tables_of_positions_joined() -> Program:
    return replace(positions(lambda table, length: torch.cat([table[:1], table])[:length]), units=6)


@program
def triangle_of_positions() -> Program:
    return replace(positions(lambda table, length: torch.tril(table)[:length]), units=6)


@program
def units_cut_to_the_length() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x)) * F.relu(self.gate(x))
        return self.b(h[..., : x.shape[1]].sum(-1, keepdim=True))

    parts = {"a": nn.Linear(3, 9), "gate": nn.Linear(3, 9), "b": nn.Linear(1, 2)}
    return Program(
        Calls(forward, **parts),
        torch.randn(2, 6, 3),
        [torch.randn(2, 9, 3), torch.randn(4, 2, 3)],
        units=0,
    )


@program
def outputs_cut_to_the_length() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)))[..., : x.shape[1]]

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 9))
    return Program(
        model, torch.randn(2, 6, 3), [torch.randn(2, 9, 3), torch.randn(4, 2, 3)], units=4
    )


def branches(combine: Callable[[list[Tensor], int], Tensor]) -> Program:
    """As many of nine branches as the input is long; all of them are computed."""

    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(combine([F.relu(branch(x)) for branch in self.branches], x.shape[1]))

    model = Calls(
        forward, branches=nn.ModuleList(nn.Linear(3, 4) for _ in range(9)), b=nn.Linear(4, 2)
    )
    return Program(
        model, torch.randn(2, 6, 3), [torch.randn(2, 9, 3), torch.randn(4, 2, 3)], units=0
    )


@program
def branches_dropped_from_a_list() -> Program:
    return branches(lambda found, length: sum(found[:length], torch.zeros(())))


@program
def branches_dropped_from_a_stack() -> Program:
    return branches(lambda found, length: torch.stack(found)[:length].sum(0))


@program
def padding_that_this_length_does_not_need() -> Program:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        missing = -h.shape[1] % 4
        h = torch.cat([h, self.padding[:missing].expand(len(h), missing, 5)], 1)
        return self.b(h.unflatten(1, (-1, 4)).flatten(2))

    model = Calls(
        forward, a=nn.Linear(3, 5), b=nn.Linear(20, 2), padding=nn.Parameter(torch.randn(4, 5))
    )
    return Program(
        model, torch.randn(2, 8, 3), [torch.randn(2, 7, 3), torch.randn(1, 5, 3)], units=0
    )


@program
def optional_input() -> Program:
    def forward(self: Any, x: Tensor, y: Tensor | None = None) -> Tensor:
        h = F.relu(self.a(x))
        h = h if y is None else h + F.relu(self.side(y))
        return self.out(h)

    out = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
    model = Calls(forward, a=nn.Linear(3, 4), side=nn.Linear(2, 4), out=out)
    pair = (torch.randn(2, 3), torch.randn(2, 2))
    return Program(model, torch.randn(6, 3), [torch.randn(2, 3), pair], units=5)


@program
def elastic_width() -> Program:
    def forward(self: Any, x: Tensor, width: int = 4) -> Tensor:
        h = F.relu(F.linear(x, self.up[:width]))
        return self.b(F.relu(F.linear(h, self.down[:, :width])))

    tables = {"up": nn.Parameter(torch.randn(6, 3)), "down": nn.Parameter(torch.randn(5, 6))}
    model = Calls(forward, **tables, b=nn.Linear(5, 2))
    return Program(model, torch.randn(6, 3), [torch.randn(2, 3), (torch.randn(2, 3), 6)], units=0)


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("normalization", ["absorb", "full"])
def test_outputs_keep_at_other_sizes(name: str, normalization: str) -> None:
    torch.manual_seed(0)
    built = PROGRAMS[name]()
    model, example, others = built.model.double(), as_double(built.example), as_double(built.others)
    symmetry = pathcond.find_symmetry(model, example, normalization=normalization)
    assert symmetry.num_units == built.units
    before = [outputs(model, inputs, training=False) for inputs in others]
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    pathcond.rescale_(model, symmetry, log_scales)
    for inputs, expected in zip(others, before, strict=True):
        assert output_change(expected, outputs(model, inputs, training=False)) < 1e-10


# Their indices are made for the sizes that they have.
OF_ONE_SIZE = ("assignments_by_index", "embedding_bags")


@pytest.mark.parametrize(("name", "normalization"), families(NORMALIZATIONS))
def test_families_at_other_sizes(name: str, normalization: str) -> None:
    model, inputs = make(name)
    others = other_sizes(model, inputs)
    assert bool(others) == (name not in OF_ONE_SIZE)
    symmetry = prepared(name, normalization).symmetry
    before = [outputs(model, other, training=False) for other in others]
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 2 - 1)
    for other, expected in zip(others, before, strict=True):
        assert output_change(expected, outputs(model, other, training=False)) < 1e-9


@st.composite
def sliced_programs(draw: st.DrawFn) -> Program:
    """Layers with tables that are read up to the length of the input, in ways that do and do not
    fit together.
    """
    width = draw(st.integers(2, 4))
    kinds = draw(
        st.lists(
            st.sampled_from(["add", "gain", "tail", "static", "shifted", "branch"]),
            min_size=1,
            max_size=3,
        )
    )
    length = draw(st.integers(1, 6))
    tables = {f"t{i}": nn.Parameter(torch.randn(12, width)) for i in range(len(kinds))}
    layers = {f"l{i}": nn.Linear(width, width) for i in range(len(kinds))}
    rows = draw(st.integers(1, 6))

    def forward(self: Any, x: Tensor) -> Tensor:
        n = x.shape[1]
        h = self.enter(x)
        for i, kind in enumerate(kinds):
            table = getattr(self, f"t{i}")
            h = getattr(self, f"l{i}")(F.relu(h))
            if kind == "add":
                h = h + table[:n]
            elif kind == "gain":
                h = h * table[:n]
            elif kind == "tail":
                h = h + table[12 - n :].flip(0)
            elif kind == "static":
                h = h + table[:rows].sum(0)
            elif kind == "shifted":
                h = torch.cat([h, h + table[1 : n + 1]], 1)[:, :n]
            elif kind == "branch" and n > 6:
                h = h + table[0]
        return self.leave(F.relu(h)).sum(1)

    model = Calls(forward, enter=nn.Linear(2, width), leave=nn.Linear(width, 2), **tables, **layers)
    others = [torch.randn(2, size, 2) for size in (1, 4, 11)]
    return Program(model, torch.randn(3, length, 2), others, units=0)


@given(sliced_programs())
@settings(max_examples=15, deadline=None)
def test_drawn_programs_at_other_sizes(built: Program) -> None:
    model = built.model.double()
    symmetry = pathcond.find_symmetry(model, built.example.double())
    before = [outputs(model, other.double(), training=False) for other in built.others]
    pathcond.rescale_(model, symmetry, torch.randn(symmetry.num_units, dtype=torch.float64))
    for other, expected in zip(built.others, before, strict=True):
        assert output_change(expected, outputs(model, other.double(), training=False)) < 1e-9


def test_second_example_frees_what_the_first_does_not_reach() -> None:
    built = optional_input()
    model, pair = built.model.double(), as_double(built.others[1])
    first = as_double(built.example)
    assert pathcond.find_symmetry(model, first).num_units == 5
    symmetry = pathcond.find_symmetry(model, first, other_inputs=pair)
    assert symmetry.num_units == 4 + 5
    before = outputs(model, pair, training=False)
    pathcond.rescale_(model, symmetry, torch.randn(9, dtype=torch.float64))
    assert output_change(before, outputs(model, pair, training=False)) < 1e-12
    several = pathcond.find_symmetry(model, first, other_inputs=[pair, first])
    assert several.num_units == 9


def test_what_is_not_read_is_named() -> None:
    symmetry = pathcond.find_symmetry(optional_input().model, torch.randn(6, 3))
    assert any("may meet side." in pin.reason and pin.name == "a" for pin in symmetry.pinned)
    symmetry = pathcond.find_symmetry(elastic_width().model, torch.randn(6, 3))
    reasons = {pin.name: pin.reason for pin in symmetry.pinned}
    assert reasons["up"] == "has 6 of 18 entries that the example does not read"


def test_rescaling_is_verified_on_all_examples() -> None:
    """Something that the graph cannot show and that only the second example meets is noticed before
    the first write.
    """
    state = {"secret": 0.0}

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(h + state["secret"]) if len(x) == 5 else self.b(h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    five = torch.randn(5, 3, dtype=torch.float64)
    symmetry = pathcond.find_symmetry(
        model, torch.randn(6, 3, dtype=torch.float64), other_inputs=five
    )
    state["secret"] = 1.0
    weights = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(pathcond.RescalingError, match="the eval output would change"):
        pathcond.rescale_(model, symmetry, torch.ones(4, dtype=torch.float64))
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())


def test_a_model_without_a_result_at_other_sizes() -> None:
    """Units that are off for all of a few samples have no deviation; on the user's batch they
    have.
    """

    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.c(F.relu(self.b(h / h.std(0, unbiased=False, keepdim=True))))  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = Calls(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 8), c=nn.Linear(8, 4)).double().eval()
    x = torch.randn(64, 6).double()
    assert outputs(model, x[:3], training=False)[0].isnan().any()
    before = outputs(model, x, training=False)
    report = pathcond.condition_(model, x)
    assert report.num_units == 16
    assert output_change(before, outputs(model, x, training=False)) < 1e-12


def test_modes_with_one_program_are_captured_once_at_other_sizes() -> None:
    layers = [nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Dropout(), nn.Linear(4, 2)]
    given_sizes, other = capture_all(nn.Sequential(*layers), torch.randn(6, 3))
    assert len(given_sizes.graphs) == 2
    assert [graph.training for graph in other.graphs] == [False]
    model, inputs = make("mlp")
    model.extra = nn.Linear(2, 2).double()
    model.forward = lambda x: (
        model.extra(nn.Sequential.forward(model[:5], x)) if model.training else model[:5](x)
    )
    given_sizes, other = capture_all(model, inputs)
    assert [graph.training for graph in other.graphs] == [False, True]


def test_without_values_train_mode_runs_at_the_sizes_of_the_example_alone() -> None:
    """On the meta device captures are not watched; runs beside them see what sizes decide. At other
    sizes, train mode is known to go the way of eval mode.
    """
    ran: list[tuple[bool, int]] = []

    def noting(module: nn.Module, args: Any) -> None:
        ran.append((module.training, len(args[0])))

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    model.register_forward_pre_hook(noting)
    captures = capture_all(model, torch.randn(6, 3, device="meta"))
    assert [[graph.training for graph in each.graphs] for each in captures] == [
        [False, True],
        [False],
    ]
    assert [size for training, size in ran if training] == [6, 6]
