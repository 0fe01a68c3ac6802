"""Programs that try to lose, double or misplace paths. Each has a plain twin with the same paths,
or a count by hand.
"""

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathcond import (
    EnergyRangeError,
    UnsupportedModelError,
    count_paths,
    diag_g,
    log10_paths,
    path_norm,
)
from pathcond.lifting.energy_pass import EnergyPass
from pathcond.lifting.lifting import capture_sample, off_path

from .cases import Calls


def layer(n: int, m: int, bias: bool = True, seed: int = 0) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(n, m, bias=bias).double()


def batch(*shape: int) -> Tensor:
    return torch.randn(
        *(shape or (4, 3)), generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )


def with_buffers(
    forward: Callable[..., Any], buffers: dict[str, Tensor], **parts: Any
) -> nn.Module:
    model = Calls(forward, **parts)
    for name, buffer in buffers.items():
        model.register_buffer(name, buffer)
    return model


def sigmoid_of_a_slice(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, :2].sigmoid_()
    return self.b(h)


def sigmoid_of_a_slice_written_back(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h[:, :2] = h[:, :2].sigmoid()
    return self.b(h)


def sum_of_chunks_in_place(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    with torch.no_grad():
        left, right = h.chunk(2, 1)
        left.add_(right)
    return self.b(h)


def sum_of_chunks(self: Any, x: Tensor) -> Tensor:
    left, right = self.a(x).chunk(2, 1)
    return self.b(torch.cat([left + right, right], 1))


def after_dropout(self: Any, x: Tensor) -> Tensor:
    h = F.dropout(self.a(x), 0.1, self.training)
    h += x[:, :1]
    return self.b(h)


def without_dropout(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x) + x[:, :1])


def added_at(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).index_add(1, self.at, x[:, :2], alpha=-2.0))


def added_by_hand(self: Any, x: Tensor) -> Tensor:
    zero = x[:, :1] * 0.0
    return self.b(self.a(x) - 2.0 * torch.cat([x[:, :1], zero, x[:, 1:2], zero], 1))


def scattered(self: Any, x: Tensor) -> Tensor:
    return self.b(self.a(x).scatter(1, self.at.expand(x.shape[0], 2), -3.0))


def written(self: Any, x: Tensor) -> Tensor:
    return self.b(torch.where(self.keep, self.a(x), torch.full_like(self.a(x), -3.0)))


def masked(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.keep * self.a.weight)


def masked_from_the_right(self: Any, x: Tensor) -> Tensor:
    return F.linear(x, self.a.weight * self.keep)


def buffer_written_through_a_view(self: Any, x: Tensor) -> Tensor:
    scale = self.scale.clone()
    self.scale[:1].mul_(0.0)
    return self.a(x * self.scale) + 0.0 * scale.sum()


def scaled(self: Any, x: Tensor) -> Tensor:
    return self.a(x * torch.cat([self.scale[:1] * 0.0, self.scale[1:]]))


def written_into_zeros(self: Any, x: Tensor) -> Tensor:
    z = torch.zeros(x.shape[0], 4).to(x.dtype)
    z[:, :2] = self.a(x)[:, :2]
    return self.b(z)


def means_and_maxima_at(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    zeros, places = h.new_zeros(len(x), 2), self.at.expand(len(x), 4)
    mean = zeros.scatter_reduce(1, places, h, "mean", include_self=False)
    return self.b(torch.cat([mean, zeros.scatter_reduce(1, places, h, "amax")], 1))


def means_and_maxima(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    parts = [h[:, :3].mean(1, keepdim=True), h[:, 3:], h[:, :3].amax(1, keepdim=True), h[:, 3:]]
    return self.b(torch.cat(parts, 1))


def of_a_constant(self: Any, x: Tensor) -> Tensor:
    return self.b(F.relu(self.a(self.start))) + 0.0 * x[:, :1]


def of_a_sum_with_a_constant(self: Any, x: Tensor) -> Tensor:
    return self.b(F.relu(self.a(x.new_zeros(1, 3) + self.start))) + 0.0 * x[:, :1]


AT, KEEP = torch.tensor([0, 2]), torch.tensor([False, True, False, True])
TWINS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], dict[str, Tensor]]] = {
    "sigmoid of a slice": (sigmoid_of_a_slice, sigmoid_of_a_slice_written_back, {}),
    "chunks": (sum_of_chunks_in_place, sum_of_chunks, {}),
    "dropout": (after_dropout, without_dropout, {}),
    "index_add": (added_at, added_by_hand, {"at": AT}),
    "scatter": (scattered, written, {"at": AT[None], "keep": KEEP}),
    "scatter_reduce": (means_and_maxima_at, means_and_maxima, {"at": torch.tensor([[0, 0, 0, 1]])}),
    "constant": (
        of_a_constant,
        of_a_sum_with_a_constant,
        {"start": torch.tensor([[1.0, 0.0, 3.0]]).double()},
    ),
    "mask": (masked, masked_from_the_right, {"keep": torch.eye(4, 3).double()}),
    "buffer": (buffer_written_through_a_view, scaled, {"scale": torch.ones(3).double()}),
    "number": (
        lambda self, x: self.a(x) * 0.1,
        lambda self, x: self.a(x) * self.c,
        {"c": torch.tensor(0.1, dtype=torch.float64)},
    ),
}


@pytest.mark.parametrize("name", sorted(TWINS))
def test_twins_have_the_same_energy(name: str) -> None:
    first, second, buffers = TWINS[name]
    parts = {"a": layer(3, 4), "b": layer(4, 2, seed=1)}
    models = [with_buffers(forward, buffers, **parts).eval() for forward in (first, second)]
    for calibrate in (True, False):
        g, expected = (diag_g(model, batch(), calibrate=calibrate) for model in models)
        assert any(bool(value.any()) for value in expected.values())
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-300)


def test_a_weight_norm_has_the_paths_of_its_magnitude_times_a_constant() -> None:
    """Whatever p and whatever the direction's length."""
    v, magnitude = layer(3, 4), nn.Parameter(torch.rand(4, 1).double())
    direction = v.weight.detach() / v.weight.detach().norm(dim=1, keepdim=True)
    parts = {"a": v, "g": magnitude}
    model = Calls(lambda self, x: F.linear(x, torch._weight_norm(self.a.weight, self.g)), **parts)
    twin = with_buffers(lambda self, x: F.linear(x, self.g * self.c), {"c": direction}, g=magnitude)
    g = diag_g(model, batch())
    torch.testing.assert_close(g["g"], diag_g(twin, batch())["g"], rtol=1e-12, atol=0)
    assert not g["a.weight"].any()
    for p in (1, 2, 3):
        assert path_norm(model, batch(), p) == pytest.approx(path_norm(twin, batch(), p), rel=1e-12)
    assert count_paths(model, batch()) == 12


def written_out(self: Any, x: Tensor) -> Tensor:
    """A two-layer RNN in both directions with the parameters of nn.RNN."""
    for number in range(2):
        both = []
        for suffix, order in (("", range(x.shape[0])), ("_reverse", reversed(range(x.shape[0])))):
            w, u, b, c = (
                getattr(self.rnn, f"{name}_l{number}{suffix}") for name in PARTS_OF_AN_RNN
            )
            h, states = x.new_zeros(x.shape[1], 4), {}
            for step in order:
                h = states[step] = F.relu(F.linear(x[step], w, b) + F.linear(h, u, c))
            both.append(torch.stack([states[step] for step in range(x.shape[0])]))
        x = torch.cat(both, -1)
    return self.head(x)


PARTS_OF_AN_RNN = ("weight_ih", "weight_hh", "bias_ih", "bias_hh")


@pytest.mark.parametrize("calibrate", [True, False])
def test_a_fused_rnn_has_the_paths_of_the_same_steps_written_out(calibrate: bool) -> None:
    torch.manual_seed(0)
    rnn = nn.RNN(3, 4, num_layers=2, nonlinearity="relu", bidirectional=True).double()
    parts = {"rnn": rnn, "head": layer(8, 2)}
    fused = Calls(lambda self, x: self.head(self.rnn(x)[0]), **parts)
    twin, x = Calls(written_out, **parts), batch(5, 2, 3)
    torch.testing.assert_close(fused(x), twin(x))
    g, expected = (diag_g(model, x, calibrate=calibrate) for model in (fused, twin))
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)
    assert count_paths(fused, x) == count_paths(twin, x)
    assert path_norm(fused, x, 1) == pytest.approx(path_norm(twin, x, 1), rel=1e-12)


def test_places_that_the_data_choose_are_averaged() -> None:
    """A sum into one of two places is a sum of alternatives that a condition chooses."""
    parts = {"a": layer(3, 4), "b": layer(4, 2, seed=1), "c": layer(2, 2, seed=2)}

    def scattered(self: Any, x: Tensor) -> Tensor:
        places, h = (x[:, :2] > 0).long(), self.a(x)[:, :2]
        into_zeros = h.new_zeros(len(x), 2)
        rows = torch.arange(len(x))[:, None].expand(-1, 2)
        put = into_zeros.index_put((rows, places), h, accumulate=True)
        return self.c(into_zeros.scatter_add(1, places, h)) + self.c(put)

    def chosen(self: Any, x: Tensor) -> Tensor:
        right, h = x[:, :2] > 0, self.a(x)[:, :2]
        ways = [torch.where(right, 0.0, h).sum(1), torch.where(right, h, 0.0).sum(1)]
        total = torch.stack(ways, 1)
        return self.c(total) + self.c(total)

    models = [Calls(forward, **parts) for forward in (scattered, chosen)]
    torch.testing.assert_close(models[0](batch()), models[1](batch()))
    g, expected = (diag_g(model, batch()) for model in models)
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-300)


def test_a_write_in_place_leaves_the_energy_of_its_source_alone() -> None:
    def in_place(self: Any, x: Tensor) -> Tensor:
        before = self.a(x)
        h = F.relu(before)
        h.index_add_(1, self.at, x[:, :2])
        return self.b(h) + self.b(before)

    def out_of_place(self: Any, x: Tensor) -> Tensor:
        before = self.a(x)
        return self.b(F.relu(before).index_add(1, self.at, x[:, :2])) + self.b(before)

    parts = {"a": layer(3, 4), "b": layer(4, 2, seed=1)}
    g, expected = (
        diag_g(with_buffers(f, {"at": AT}, **parts), batch()) for f in (in_place, out_of_place)
    )
    torch.testing.assert_close(g, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_a_bag_has_the_paths_of_its_rows(mode: str) -> None:
    tokens = torch.tensor([[0, 1, 1], [4, 2, 3]])
    bag = nn.EmbeddingBag(5, 4, mode=mode).double()
    parts = {"bag": bag, "b": layer(4, 2)}
    fused = Calls(lambda self, i: self.b(self.bag(i)), **parts)
    reduce = getattr(torch, mode)
    twin = Calls(lambda self, i: self.b(reduce(F.embedding(i, self.bag.weight), 1)), **parts)
    for calibrate in (True, False):
        g, expected = (diag_g(model, tokens, calibrate=calibrate) for model in (fused, twin))
        torch.testing.assert_close(g, expected, rtol=1e-12, atol=1e-300)
    assert count_paths(fused, tokens) == count_paths(twin, tokens)


@pytest.mark.parametrize("kind", ["index_add", "scatter_add", "index_put", "rows of one"])
def test_uncalibrated_every_row_may_go_anywhere(kind: str) -> None:
    def forward(self: Any, x: Tensor, at: Tensor) -> Tensor:
        h = self.a(x)
        zeros = h.new_zeros(4, 4)
        if kind == "index_add":
            return zeros.index_add(0, at, h)
        if kind == "scatter_add":
            return zeros.scatter_add(0, at[:, None].expand(3, 4), h)
        return zeros.index_put((at,), h if kind == "index_put" else h[:1])

    model = Calls(forward, a=layer(2, 4, bias=False))
    paths = 3 * 4 * 4 * 2  # three entries of the index, four places, four columns, two inputs
    assert count_paths(model, (batch(3, 2), torch.tensor([3, 0, 1]))) == paths


COUNTS: dict[str, tuple[Callable[..., Any], dict[str, Any], int]] = {
    "logits and probabilities": (
        lambda self, x: (self.a(x), self.a(x).softmax(1)),
        {"a": layer(3, 4)},
        32,
    ),
    "logits and their probabilities": (
        lambda self, x: (lambda h: (h, h.softmax(1)))(self.a(x)),
        {"a": layer(3, 4)},
        32,
    ),
    "an output twice": (lambda self, x: (lambda h: (h, h))(self.a(x)), {"a": layer(3, 4)}, 32),
    "a mask as output": (lambda self, x: (self.a(x), x > 0), {"a": layer(3, 4)}, 16),
    "where": (
        lambda self, x: self.a(torch.where(KEEP[:3], x, 0.0)),
        {"a": layer(3, 4, bias=False)},
        4,
    ),
    "masked_fill": (
        lambda self, x: self.a(x.masked_fill(KEEP[:3], 0.0)),
        {"a": layer(3, 4, bias=False)},
        8,
    ),
    "known rows": (
        lambda self, x: self.a(x) + self.e(AT)[0],
        {"a": layer(3, 4), "e": nn.Embedding(50, 4).double()},
        20,
    ),
    "written into zeros": (written_into_zeros, {"a": layer(3, 4), "b": layer(4, 2)}, 18),
    "nothing attended": (
        lambda self, x: F.scaled_dot_product_attention(
            x[:, None], x[:, None], self.a(x)[:, None], attn_mask=KEEP[:1, None]
        ),
        {"a": layer(3, 4)},
        0,
    ),
}


@pytest.mark.parametrize("name", sorted(COUNTS))
def test_counts_by_hand(name: str) -> None:
    forward, parts, expected = COUNTS[name]
    model = Calls(forward, **parts)
    assert {count_paths(model, batch()) for _ in range(3)} == {expected}
    assert math.isfinite(path_norm(model, batch()))


@pytest.mark.parametrize("kind", ["mul", "matmul", "einsum", "addcmul"])
def test_a_product_has_the_paths_of_either_factor_times_the_other(kind: str) -> None:
    """On one sample: the sum of the energies in which one of the two is a constant."""
    a, b, x = layer(3, 4), layer(3, 4, seed=1), batch(1, 3)
    u, v = a(x).detach(), b(x).detach()
    products: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "mul": lambda u, v: u * v,
        "matmul": lambda u, v: u.mT @ v,
        "einsum": lambda u, v: torch.einsum("bi,bi->b", u, v),
        "addcmul": lambda u, v: torch.addcmul(torch.zeros_like(u), u, v),
    }
    product = products[kind]
    both = diag_g(Calls(lambda self, x: product(self.a(x), self.b(x)), a=a, b=b), x)
    left = diag_g(with_buffers(lambda self, x: product(self.a(x), self.v), {"v": v}, a=a), x)
    right = diag_g(with_buffers(lambda self, x: product(self.u, self.b(x)), {"u": u}, b=b), x)
    torch.testing.assert_close(both, left | right, rtol=1e-12, atol=0)
    uncalibrated = path_norm(
        Calls(lambda self, x: product(self.a(x), self.b(x)), a=a, b=b), x, calibrate=False
    )
    energies = [
        F.linear(torch.ones(1, 3).double(), m.weight.square(), m.bias.square()).detach()
        for m in (a, b)
    ]
    assert uncalibrated**2 == pytest.approx(float(product(*energies).sum()), rel=1e-12)


def test_samples_that_mix_are_not_split() -> None:
    # the first row alone does not show it
    model = Calls(lambda self, x: self.a(x.cumsum(0)), a=layer(3, 4))
    assert len(capture_sample(model, batch()).inputs) == 1
    assert count_paths(model, batch()) == 10 * 12 + 4 * 4
    centred = Calls(lambda self, x: self.a(x - x.mean(0)), a=layer(3, 4))
    # constant inputs do not show it either
    assert len(capture_sample(centred, torch.ones(4, 3).double()).inputs) == 1
    scaled = Calls(lambda self, scale, x: self.a(x) * scale, a=layer(3, 4))
    assert len(capture_sample(scaled, (torch.ones(1).double(), batch())).inputs) == 4
    unknown = batch()
    unknown[0, 0] = math.nan
    with pytest.raises(UnsupportedModelError, match="holds 1 NaN"):
        capture_sample(layer(3, 4), unknown)


def test_exponents_of_products_and_sums() -> None:
    """Counts beyond float64 times small ones, and plus small ones."""
    deep = nn.Sequential(*[nn.Linear(100, 100, bias=False) for _ in range(200)])
    parts = {"deep": deep, "a": nn.Linear(100, 100, bias=False)}
    times = Calls(lambda self, x: self.deep(x) * self.a(x), **parts)
    plus = Calls(lambda self, x: torch.addcmul(self.deep(x), self.a(x), self.a(x)), **parts)
    assert log10_paths(times, torch.randn(2, 100)) == pytest.approx(400 + 2 + 2, rel=1e-12)
    assert log10_paths(plus, torch.randn(2, 100)) == pytest.approx(402, rel=1e-12)


def test_inference_mode_changes_nothing() -> None:
    model, x = layer(3, 4), batch()
    expected = diag_g(model, x)
    with torch.inference_mode():
        torch.testing.assert_close(diag_g(model, x), expected)
        assert off_path(model, x) == {}
    with torch.no_grad():
        torch.testing.assert_close(diag_g(model, x), expected)


def test_inputs_that_forward_overwrites_are_copies() -> None:
    x = batch()
    diag_g(nn.Sequential(nn.ReLU(inplace=True), layer(3, 4)), x)
    assert torch.equal(x, batch())


def test_forward_that_writes_its_parameters_is_refused() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=1.0), nn.Linear(3, 2))
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedModelError, match=r"writes into its own parameter 0.weight"):
        diag_g(model, torch.tensor([[0, 1], [2, 3]]))
    assert torch.equal(before, model[0].weight)


def test_instance_norms_never_count_their_batches() -> None:
    """torch leaves num_batches_tracked at 0 there, so statistics other than the initial ones are
    real.
    """
    norm = nn.InstanceNorm1d(2, track_running_stats=True).double()
    model, x = (
        nn.Sequential(nn.Conv1d(1, 2, 1).double(), norm, nn.Conv1d(2, 1, 1).double()),
        batch(3, 1, 5),
    )
    measured = diag_g(model, x)
    norm.running_var.fill_(4.0)
    torch.testing.assert_close(diag_g(model, x), diag_g(model, x, calibrate=False))
    assert not torch.allclose(measured["2.weight"], diag_g(model, x)["2.weight"])


def test_constants_beyond_float64_are_no_zeros() -> None:
    model = with_buffers(
        lambda self, x: self.a(x) + self.c,
        {"c": torch.full((4,), 1e200, dtype=torch.float64)},
        a=layer(3, 4),
    )
    with pytest.raises(EnergyRangeError, match="overflows"):
        path_norm(model, batch())
    assert path_norm(model, batch(), p=1) > 1e200
    with pytest.raises(EnergyRangeError, match="larger p"):
        path_norm(layer(3, 4), batch(), p=1e-3)


def test_nothing_outlives_a_call() -> None:
    """No reference cycle keeps squared weights alive until the garbage collector runs."""
    gc.collect()
    gc.disable()
    try:
        diag_g(layer(3, 4), batch())
        path_norm(layer(3, 4), batch())
        alive = [o for o in gc.get_objects() if type(o) is EnergyPass]
    finally:
        gc.enable()
    assert not alive
