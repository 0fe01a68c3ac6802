"""Programs that try to slip a scale past the rules. Each keeps its function under whatever symmetry
is found.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.outputs import output_change
from pathcond.reference import count_symmetries

from .cases import Calls
from .zoo import NORMALIZATIONS, as_double, outputs, randomise

HOSTILE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def hostile(build: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    HOSTILE[build.__name__] = build
    return build


def between(middle: Callable[[Tensor], Tensor], out: int = 4) -> tuple[nn.Module, Tensor]:
    return Calls(
        lambda self, x: self.b(middle(F.relu(self.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(out, 2)
    ), torch.randn(6, 3)


@hostile
def mean_of_a_draw() -> Any:
    return between(lambda h: torch.normal(h, 1.0))


@hostile
def deviation_of_a_draw() -> Any:
    return between(lambda h: torch.normal(0.0, h + 1e-3))


@hostile
def probability_of_a_draw() -> Any:
    return between(lambda h: torch.bernoulli(h / (1 + h.sum())))


@hostile
def condition_larger_than_both_values() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(torch.where(x > 0, h.sum(0), h.mean(0)).t())

    return Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), torch.randn(4, 4)


@hostile
def copied_into_integers() -> Any:
    return between(lambda h: torch.zeros_like(h, dtype=torch.long).copy_(h * 3).double())


@hostile
def summed_as_integers() -> Any:
    return between(lambda h: (h * 3).detach().unsqueeze(2).sum(2, dtype=torch.long).double())


@hostile
def rounded_to_single_precision() -> Any:
    return between(lambda h: h.float().double())


@hostile
def statistics_from_a_bias() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        normed = F.instance_norm(
            x[:, :1].expand(-1, 4, -1), self.a.bias.detach(), self.v, use_input_stats=False
        )
        return self.b(F.relu(self.a(x))).sum() + normed

    model = Calls(forward, a=nn.Conv1d(3, 4, 1), b=nn.Conv1d(4, 2, 1))
    model.register_buffer("v", torch.ones(4))
    return model, torch.randn(4, 3, 5)


@hostile
def batch_statistics_in_eval_mode() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.batch_norm(self.a(x), self.m, self.v, training=True)))

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    model.register_buffer("m", torch.zeros(4))
    model.register_buffer("v", torch.ones(4))
    return model, torch.randn(6, 3)


@hostile
def two_views_of_one_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if self.training else self.b(torch.where(x > 0, self.w, self.w.t()))

    return Calls(forward, w=nn.Parameter(torch.randn(4, 4)), b=nn.Linear(4, 2)), torch.randn(4, 4)


@hostile
def overlapping_slices_of_one_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.linear(x, self.w[:4])) + F.relu(F.linear(x, self.w[2:])))

    return Calls(forward, w=nn.Parameter(torch.randn(6, 3)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def expanded_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.linear(x, self.w.expand(4, 3)) * self.w.expand(4, 3).sum(1)))

    return Calls(forward, w=nn.Parameter(torch.randn(1, 3)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def written_as_a_list() -> Any:
    def middle(h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        torch._foreach_add_([z], 1.0)
        return h + z

    return between(middle)


@hostile
def attribute_that_shares_memory() -> Any:
    model = Calls(
        lambda self, x: self.o(F.relu(self.c(F.relu(self.a(x))))) + (x @ self.w).sum(),
        a=nn.Linear(4, 4).double(),
        c=nn.Linear(4, 4).double(),
        o=nn.Linear(4, 2).double(),
    )
    model.w = model.a.weight.detach()
    return model, torch.randn(4, 4)


@hostile
def transposed_in_place() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x[:, :1, None] * self.w
        h.transpose_(1, 2)
        return self.b(h.mean(1))

    return Calls(forward, w=nn.Parameter(torch.randn(4, 5)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def zero_channels_into_a_norm() -> Any:
    model = Calls(
        lambda self, x: self.b(F.relu(self.bn(F.pad(self.a(x), (0, 1))))),
        a=nn.Linear(3, 3),
        bn=nn.BatchNorm1d(4),
        b=nn.Linear(4, 2),
    )
    return model, torch.randn(6, 3)


@hostile
def buffers_shared_between_norms() -> Any:
    model = Calls(
        lambda self, x: self.c(F.relu(self.n(self.a(x))) + F.relu(self.m(self.b(x)))),
        a=nn.Linear(3, 4),
        b=nn.Linear(3, 4),
        n=nn.BatchNorm1d(4),
        m=nn.BatchNorm1d(4),
        c=nn.Linear(4, 2),
    ).double()
    model.m.running_mean, model.m.running_var = model.n.running_mean, model.n.running_var
    return model, torch.randn(6, 3)


@hostile
def clamped_by_a_number_from_the_data() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(torch.minimum(h, x.abs().max()))

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def zero_to_the_power_of_zero() -> Any:
    return between(lambda h: h + torch.zeros(4, dtype=torch.float64) ** 0)


@hostile
def aliases_through_dropout() -> Any:
    def middle(h: Tensor) -> Tensor:
        same = F.dropout(h, 0.5, training=False)
        same.add_(1.0)
        return h

    return between(middle)


@hostile
def slice_written_into_zeros() -> Any:
    def middle(h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        z[:, :2] = h[:, 2:]
        return z + h

    return between(middle)


@hostile
def recurrent_state_is_returned() -> Any:
    return Calls(
        lambda self, x: self.r(x), r=nn.RNN(3, 4, num_layers=2, nonlinearity="relu")
    ), torch.randn(5, 2, 3)


@hostile
def recurrent_state_from_outside() -> Any:
    def forward(self: Any, x: Tensor, h: Tensor) -> Tensor:
        return self.b(self.r(x, h)[0])

    rnn = nn.RNN(3, 4, nonlinearity="relu")
    return Calls(forward, r=rnn, b=nn.Linear(4, 2)), (torch.randn(5, 2, 3), torch.randn(1, 2, 4))


@hostile
def recurrent_state_from_another_layer() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        out, h = self.r(x, F.relu(self.a(x[:1])))
        return self.b(out) + self.c(h).tanh()

    parts = {"a": nn.Linear(3, 4), "b": nn.Linear(4, 2), "c": nn.Linear(4, 2)}
    return Calls(forward, r=nn.RNN(3, 4, nonlinearity="relu"), **parts), torch.randn(5, 2, 3)


@hostile
def recurrent_weights_are_tied() -> Any:
    rnn = nn.RNN(4, 4, num_layers=2, nonlinearity="relu", bidirectional=False)
    rnn.weight_hh_l1, rnn.weight_ih_l1 = rnn.weight_hh_l0, rnn.weight_hh_l0
    return Calls(lambda self, x: self.b(self.r(x)[0]), r=rnn, b=nn.Linear(4, 2)), torch.randn(
        5, 2, 4
    )


def gated_recurrence(kind: Callable[..., nn.Module]) -> Any:
    return Calls(
        lambda self, x: self.b(self.r(x)[0]), r=kind(3, 4), b=nn.Linear(4, 2)
    ), torch.randn(5, 2, 3)


@hostile
def recurrence_with_tanh() -> Any:
    return gated_recurrence(nn.RNN)


@hostile
def long_short_term_memory() -> Any:
    return gated_recurrence(nn.LSTM)


@hostile
def gated_recurrent_unit() -> Any:
    return gated_recurrence(nn.GRU)


@hostile
def added_into_a_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(self.p.index_add(0, x.argsort(0)[:, 0], F.relu(self.a(x))))

    parts = {"p": nn.Parameter(torch.randn(6, 4)), "a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
    return Calls(forward, **parts), torch.randn(6, 3)


@hostile
def written_over_part_of_a_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        table = self.p.index_copy(0, torch.tensor([0, 2]), F.relu(self.a(x))[:2])
        return self.b(table * self.p)

    parts = {"p": nn.Parameter(torch.randn(6, 4)), "a": nn.Linear(3, 4), "b": nn.Linear(4, 2)}
    return Calls(forward, **parts), torch.randn(6, 3)


@hostile
def channels_scattered_by_the_data() -> Any:
    return between(lambda h: torch.zeros_like(h).scatter_add(1, h.argsort(1), h.flip(1)))


@hostile
def indices_with_a_slice_between_them() -> Any:
    def middle(h: Tensor) -> Tensor:
        z = h.new_zeros(2, 4, 6)
        rows = (h.sum(1) > 1).long()
        z[rows, :, torch.arange(6)] = h * h.new_tensor([1.0, 2.0, 0.0, 1.0])
        return z.sum(0).t()

    return between(middle)


@hostile
def one_value_for_many_places() -> Any:
    def middle(h: Tensor) -> Tensor:
        h = h.clone()
        h[h > 1] = h[0, 0]
        return h

    return between(middle)


@hostile
def elements_in_order_of_a_mask() -> Any:
    return between(lambda h: h.masked_scatter(h > 1, h.flip(1)))


@hostile
def direction_of_a_weight_norm_is_read_elsewhere() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        v = self.a.parametrizations.weight.original1
        return self.b(F.relu(self.a(x)) + F.relu(F.linear(x, v)))

    layer = nn.utils.parametrizations.weight_norm(nn.Linear(3, 4))
    return Calls(forward, a=layer, b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def masked_weight_is_read_unmasked() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(
            F.relu(F.linear(x, self.mask * self.w)) + F.relu(F.linear(x.flip(1), self.w)) ** 2
        )

    model = Calls(forward, w=nn.Parameter(torch.randn(4, 3)), b=nn.Linear(4, 2))
    model.register_buffer("mask", torch.ones(4, 3).tril())
    return model, torch.randn(6, 3)


@hostile
def bags_weighed_by_what_also_gates() -> Any:
    def forward(self: Any, tokens: Tensor, x: Tensor) -> Tensor:
        weights = F.relu(self.w(x))
        return self.b(self.e(tokens, per_sample_weights=weights)) * weights.sigmoid().mean(
            1, keepdim=True
        )

    parts = {"e": nn.EmbeddingBag(7, 3, mode="sum"), "w": nn.Linear(3, 4), "b": nn.Linear(3, 2)}
    return Calls(forward, **parts), (torch.randint(0, 7, (5, 4)), torch.randn(5, 3))


@hostile
def bag_of_rows_with_a_maximal_norm() -> Any:
    bag = nn.EmbeddingBag(7, 3, mode="sum", max_norm=0.5)
    return Calls(lambda self, i: self.b(self.e(i)), e=bag, b=nn.Linear(3, 2)), torch.randint(
        0, 7, (5, 4)
    )


@hostile
def halves_of_a_glu_from_one_unit() -> Any:
    return between(lambda h: F.glu(torch.cat([h, h], 1)))


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_function_is_kept(name: str, normalization: str) -> None:
    model, x = HOSTILE[name]()
    model, x = model.double().eval(), as_double(x)
    shared = name == "attribute_that_shares_memory"
    if not shared:
        randomise(model)
    symmetry = pathcond.find_symmetry(model, x, normalization=normalization)
    before = outputs(model, x, training=False)
    pathcond.rescale_(
        model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2, verify=False
    )
    assert output_change(before, outputs(model, x, training=False)) < 1e-12


def weight_then(use: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Calls(
        lambda self, x: self.b(F.relu(use(x, self.w))),
        w=nn.Parameter(torch.randn(4, 3)),
        b=nn.Linear(4, 2),
    )


ORDINARY = {
    "equalised learning rate": lambda: weight_then(lambda x, w: F.linear(x, w * 0.1)),
    "einsum with an ellipsis": lambda: weight_then(lambda x, w: torch.einsum("...i,oi", x, w)),
    "cumulative average": lambda: nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Linear(4, 2)
    ),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_spellings_are_not_missed(name: str) -> None:
    model, x = ORDINARY[name]().double(), torch.randn(6, 3).double()
    units = 8 if name == "cumulative average" else 4  # in front of the norm and behind it
    assert pathcond.find_symmetry(model, x).num_units == count_symmetries(model, x) == units


def test_causal_masks_of_infinities_do_not_matter() -> None:
    model, x = between(lambda h: h)
    model.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))
    model._function = lambda self, x: self.b((x @ x.t() + self.mask).softmax(1) @ F.relu(self.a(x)))
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 4
    assert pathcond.rescale_(model, symmetry, torch.ones(4)).output_change_eval < 1e-6


# -- inputs and buffers that the example does not show ---------------------------------------------


def recurrence(self: Any, x: Tensor) -> Tensor:
    h = x.new_zeros(x.shape[1], 4)
    for step in x:
        h = F.relu(self.w(step) + self.u(h))
    return self.b(h)


def recurrence_parts() -> dict[str, nn.Module]:
    return {"w": nn.Linear(3, 4), "u": nn.Linear(4, 4, bias=False), "b": nn.Linear(4, 2)}


def recurrence_of_a_frozen_weight(self: Any, x: Tensor) -> Tensor:
    return self.u.weight.sigmoid().sum() + recurrence(self, x)


def padded_to_five(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.w(x[..., None])).squeeze(-1)
    return self.b(F.relu(self.u(F.pad(h, (0, 5 - x.shape[1])))))


def padded_parts() -> dict[str, nn.Module]:
    return {"w": nn.Linear(1, 1), "u": nn.Linear(5, 4), "b": nn.Linear(4, 2)}


def neighbours(self: Any, x: Tensor, edges: Tensor) -> Tensor:
    h = F.relu(self.w(x))
    return self.b(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


def edges(*pairs: tuple[int, int]) -> Tensor:
    return torch.tensor(pairs).t()


OTHERS: dict[str, Callable[[], tuple[nn.Module, Any, Any, int]]] = {
    "longer sequences": lambda: (
        Calls(recurrence, **recurrence_parts()),
        torch.randn(3, 2, 3),
        torch.randn(7, 1, 3),
        4,
    ),
    # One step alone reads its recurrent weight with zeros; the example at another size has more of
    # them.
    "more than one step": lambda: (
        Calls(recurrence, **recurrence_parts()),
        torch.randn(1, 2, 3),
        torch.randn(7, 1, 3),
        4,
    ),
    "more than one step with a frozen weight": lambda: (
        Calls(recurrence_of_a_frozen_weight, **recurrence_parts()),
        torch.randn(1, 2, 3),
        torch.randn(7, 1, 3),
        1,
    ),
    "longer sequences with a frozen weight": lambda: (
        Calls(recurrence_of_a_frozen_weight, **recurrence_parts()),
        torch.randn(3, 2, 3),
        torch.randn(7, 1, 3),
        1,
    ),
    "fused, more than one step": lambda: (
        Calls(
            lambda self, x: self.b(self.r(x)[0]),
            r=nn.RNN(3, 4, nonlinearity="relu"),
            b=nn.Linear(4, 2),
        ),
        torch.randn(1, 2, 3),
        torch.randn(7, 1, 3),
        4,
    ),
    "less padding": lambda: (
        Calls(padded_to_five, **padded_parts()),
        torch.randn(6, 3),
        torch.randn(2, 5),
        5,
    ),
    "another graph": lambda: (
        Calls(neighbours, w=nn.Linear(3, 4), b=nn.Linear(4, 2)),
        (torch.randn(3, 3), edges((0, 1), (1, 0))),
        (torch.randn(5, 3), edges((4, 2), (3, 2), (0, 0))),
        4,
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_inputs_of_other_sizes_are_kept_too(name: str) -> None:
    torch.manual_seed(0)
    model, example, other, units = OTHERS[name]()
    model, example, other = model.double().eval(), as_double(example), as_double(other)
    symmetry = pathcond.find_symmetry(model, example)
    assert symmetry.num_units == units
    before = [outputs(model, x, training=False) for x in (example, other)]
    pathcond.rescale_(model, symmetry, torch.rand(units, dtype=torch.float64) * 4 - 2, verify=False)
    after = [outputs(model, x, training=False) for x in (example, other)]
    assert max(map(output_change, before, after)) < 1e-12


PICKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "an index": lambda h, order: h[:, order],
    "index_select": lambda h, order: h.index_select(1, order),
    "gather": lambda h, order: h.gather(1, order.expand(len(h), -1)),
    "embedding": lambda h, order: F.embedding(order, h.t()).t(),
}


@pytest.mark.parametrize("name", PICKS)
def test_an_index_in_a_buffer_may_change(name: str) -> None:
    torch.manual_seed(0)
    model = Calls(
        lambda self, x: self.b(PICKS[name](F.relu(self.a(x)), self.order)),
        a=nn.Linear(3, 6),
        b=nn.Linear(6, 2),
    ).double()
    model.register_buffer("order", torch.tensor([5, 0, 3, 1, 2, 4]))
    other = copy.deepcopy(model)
    x = torch.randn(8, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units), verify=False)
    for each in (model, other):
        each.order.copy_(torch.tensor([2, 4, 5, 3, 0, 1]))
    torch.testing.assert_close(model(x), other(x))


def test_a_state_of_zeros_in_a_buffer_may_change() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.start.expand(x.shape[1], 4)
        for step in x:
            h = F.relu(self.w(step) + self.u(h))
        return self.b(h)

    model = Calls(forward, **recurrence_parts()).double()
    model.register_buffer("start", torch.zeros(4).double())
    x = torch.randn(3, 2, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    model.start.fill_(1.0)
    before = outputs(model, x, training=False)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    pathcond.rescale_(model, symmetry, log_scales, verify=False)
    assert output_change(before, outputs(model, x, training=False)) < 1e-12


def test_statistics_that_are_not_saved_with_the_model() -> None:
    """Who loads the state into a model of the same class has the statistics from before."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double()
    norm = model[1]
    for name in ("running_mean", "running_var"):
        norm.register_buffer(name, getattr(norm, name), persistent=False)
    other = copy.deepcopy(model).eval()
    x = torch.randn(8, 3).double()
    expected = other(x)
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 4  # the gain and bias with the last layer
    assert any("persistent=False" in pinned.reason for pinned in symmetry.pinned)
    pathcond.condition_(model, x)
    other.load_state_dict(model.state_dict())
    torch.testing.assert_close(other(x), expected)


# -- train mode that goes a way of its own ---------------------------------------------------------


def writes_into_what_dropout_returns(self: Any, x: Tensor) -> Tensor:
    """In eval mode that is the hidden layer itself, in train mode a copy."""
    h = self.a(x)
    F.dropout(h.view(-1, 4), 0.5, self.training).mul_(self.gain)
    return self.b(h)


def reads_an_index_through_an_earlier_view(self: Any, x: Tensor) -> Tensor:
    index = self.order.view(4)
    if self.training:
        self.order.copy_(self.other)
    return self.b(self.a(x)[:, index])


def keeps_statistics_as_integers(self: Any, x: Tensor) -> Tensor:
    y = self.b(self.norm(self.a(x)) * self.factor)
    if self.training:
        self.factor.copy_(self.norm.running_var)
    return y


def clamps_by_a_buffer_that_it_fills(self: Any, x: Tensor) -> Tensor:
    low = self.low.fill_(-1) if self.training else None
    return self.b(torch.clamp(self.a(x), min=low, max=torch.zeros(4, dtype=torch.long)))


def picks_by_a_norm_of_constants(self: Any, x: Tensor) -> Tensor:
    c = torch.tensor([[0.0, 1, 2, 3], [0, 3, 2, 1]], dtype=torch.float64)
    normed = F.batch_norm(c, self.mean, self.variance, None, None, self.training, 0.0)
    return self.b(self.a(x)[:, normed.abs().round().long()[0].clamp(max=3)])


def shifts_large_batches(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(h + 1 if self.training and len(x) > 7 else h)


def rewrites_an_index_behind_its_use(self: Any, x: Tensor) -> Tensor:
    y = self.b(self.a(x)[:, self.order])
    if self.training:
        self.order.copy_(self.other)
    return y


def reassigns_an_index_behind_its_use(self: Any, x: Tensor) -> Tensor:
    y = self.b(self.a(x)[:, self.order])
    if self.training:
        self.order = self.other + 0
    return y


ORDERS = {"order": [2, 0, 3, 1], "other": [0, 1, 2, 3]}
# and the buffers that they have
TRAIN_ONLY: dict[Callable[..., Any], dict[str, list[Any]]] = {
    writes_into_what_dropout_returns: {},
    reads_an_index_through_an_earlier_view: ORDERS,
    keeps_statistics_as_integers: {"factor": [1, 1, 1, 1]},
    clamps_by_a_buffer_that_it_fills: {"low": [0, 0, 0, 0]},
    picks_by_a_norm_of_constants: {"mean": [0.0] * 4, "variance": [1.0] * 4},
    shifts_large_batches: {},
    rewrites_an_index_behind_its_use: ORDERS,
    reassigns_an_index_behind_its_use: ORDERS,
}


def twice(model: nn.Module, x: Tensor, *, training: bool) -> Tensor:
    """What two calls return, of which the first may leave something behind for the second."""
    copied = copy.deepcopy(model).train(training)
    torch.manual_seed(0)
    with torch.no_grad():
        return torch.stack([copied(x), copied(x)])


@pytest.mark.parametrize("forward", TRAIN_ONLY)
def test_train_mode_may_go_a_way_of_its_own(forward: Callable[..., Any]) -> None:
    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    if forward is writes_into_what_dropout_returns:
        model.gain = nn.Parameter(torch.rand(4) + 1)
    if forward is keeps_statistics_as_integers:
        model.norm = nn.BatchNorm1d(4, eps=1e-14)
    for name, values in TRAIN_ONLY[forward].items():
        model.register_buffer(name, torch.tensor(values))
    model = model.double()
    symmetry = pathcond.find_symmetry(model, as_double(torch.randn(5, 3)), normalization="full")
    others = [as_double(torch.randn(size, 3)) for size in (5, 9)]
    before = [twice(model, x, training=mode) for x in others for mode in (False, True)]
    log_scales = torch.linspace(-1, 1, symmetry.num_units, dtype=torch.float64)
    pathcond.rescale_(model, symmetry, log_scales, verify=False)
    after = [twice(model, x, training=mode) for x in others for mode in (False, True)]
    assert output_change(before, after) < 1e-9
