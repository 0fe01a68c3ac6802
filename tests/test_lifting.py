"""Path energy is what full enumeration says it is, obeys the symmetry, and leaves the model
alone.
"""

import copy
import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, seed, settings
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond import (
    EnergyRangeError,
    UnsupportedModelError,
    count_paths,
    diag_g,
    log10_paths,
    path_norm,
)
from pathcond.capture.nodes import Node
from pathcond.lifting import batch_values
from pathcond.lifting.lifting import capture_sample, off_path, path_energy
from pathcond.reference import enumerate_paths, parameter_vector
from pathcond.rules.energies import call

from .cases import CASES, Calls, SelfAttention, families, images, make, prepared
from .strategies import examples, further, path_networks
from .zoo import NORMALIZATIONS, energy_change

EXACT = {"rtol": 1e-12, "atol": 0.0}


def flat(diagonal: dict[str, Tensor]) -> Tensor:
    return torch.cat([g.reshape(-1) for g in diagonal.values()])


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [
        m for n, k in itertools.pairwise(widths) for m in (nn.Linear(n, k, bias=bias), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1]).double()


# -- against enumeration ---------------------------------------------------------------------------


@pytest.mark.parametrize("part", [0, 1, *further(2, 3)])
def test_random_networks_agree_with_full_enumeration(part: int) -> None:
    """diag(G) of jacobians over all paths, ‖Φ‖_p of all paths, their number: to twelve digits."""

    @seed(part)
    @settings(examples(75), deadline=None, database=None)
    @given(path_networks())
    def check(network: tuple[nn.Module, Tensor]) -> None:
        model, x = network
        paths = enumerate_paths(model, x)
        theta = parameter_vector(model)
        sample = capture_sample(model, x)
        for calibrate in (True, False):  # statistics are real, so there is nothing to calibrate
            g = flat(path_energy(model, sample, calibrate=calibrate).diagonal)
            torch.testing.assert_close(g, paths.metric(theta).diag(), **EXACT)
        phi = paths.lift(theta)
        for p in (1, 2, 3.5):
            assert path_energy(model, sample, p=p).norm == pytest.approx(
                float(phi.abs().pow(p).sum()), rel=1e-12
            )
        assert count_paths(model, x) == pytest.approx(len(paths), rel=1e-12)

    check()


OTHER_POOLS = {
    "dilated": lambda h: F.max_pool2d(h, 2, stride=1, dilation=2),
    "ceil": lambda h: F.max_pool2d(h, 3, stride=2, ceil_mode=True),
    "padded": lambda h: F.max_pool2d(h, (3, 2), stride=(2, 1), padding=(1, 0)),
    "adaptive": lambda h: F.adaptive_avg_pool2d(h, (2, 3)),
    "divisor": lambda h: F.avg_pool2d(h, 2, divisor_override=3),
    "border": lambda h: F.avg_pool2d(
        h, 3, stride=2, padding=1, count_include_pad=False, ceil_mode=True
    ),
    "flat": lambda h: F.max_pool1d(h.flatten(2), 3, stride=2).unsqueeze(-1),
    "sum": lambda h: h.sum(2, keepdim=True),
    "mean": lambda h: h.mean((2, 3), keepdim=True),
}


@pytest.mark.parametrize("name", sorted(OTHER_POOLS))
def test_pooling_agrees_with_full_enumeration(name: str) -> None:
    torch.manual_seed(0)
    pool = OTHER_POOLS[name]
    with torch.no_grad():
        width = pool(torch.zeros(1, 2, 4, 5)).numel()
    model = Calls(
        lambda self, x: self.b(pool(F.relu(self.a(x))).flatten(1)),
        a=nn.Conv2d(1, 2, 3, padding=1),
        b=nn.Linear(width, 2),
    )
    model, x = model.double(), torch.randn(1, 1, 4, 5).double()
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    torch.testing.assert_close(flat(diag_g(model, x)), paths.metric(theta).diag(), **EXACT)
    assert count_paths(model, x) == len(paths)
    assert path_norm(model, x, 1) == pytest.approx(float(paths.lift(theta).abs().sum()), rel=1e-12)


@pytest.mark.parametrize("mode", ["linear", "bilinear", "bicubic", "trilinear", "nearest"])
@pytest.mark.parametrize("p", [1, 2])
def test_interpolation_has_the_paths_of_its_own_matrix(mode: str, p: int) -> None:
    """An interpolation is a constant matrix: its Jacobian, entry by entry."""
    shape = {"linear": (4,), "trilinear": (2, 3, 2)}.get(mode, (3, 4))
    model = Calls(
        lambda self, x: F.interpolate(self.a(x), scale_factor=2.5, mode=mode),
        a=nn.Conv2d(1, 1, 1, bias=False),
    )
    model.a = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[len(shape)](1, 1, 1, bias=False)
    nn.init.constant_(model.a.weight, 2.0)
    model, x = model.double(), torch.randn(1, 1, *shape).double()
    matrix = torch.func.jacrev(model)(x).detach()
    assert path_norm(model, x, p) ** p == pytest.approx(float(matrix.abs().pow(p).sum()), rel=1e-12)


def test_max_pooling_has_one_path_per_window_entry() -> None:
    model = nn.Sequential(
        nn.Conv2d(1, 1, 1, bias=False), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4, 1, bias=False)
    )
    assert count_paths(model, torch.randn(1, 1, 4, 4)) == 16


def test_counts_beyond_float64() -> None:
    """A plain network without biases has Π of its widths paths."""
    model, x = mlp(*[300] * 150, bias=False), torch.randn(2, 300).double()
    assert log10_paths(model, x) == pytest.approx(150 * math.log10(300), rel=1e-12)
    with pytest.raises(OverflowError, match=r"10\^371.57 paths.*log10_paths"):
        count_paths(model, x)
    skips = Calls(
        lambda self, x: self.b(sum((self.a(x) for _ in range(3)), x)),
        a=model,
        b=nn.Linear(300, 1, bias=False).double(),
    )
    assert log10_paths(skips, x) == pytest.approx(150 * math.log10(300) + math.log10(3), rel=1e-12)
    assert log10_paths(
        nn.Sequential(nn.Linear(2, 2), nn.Flatten(0)), torch.randn(1, 2)
    ) == pytest.approx(math.log10(6))


def test_zero_weights_count_and_absent_ones_do_not() -> None:
    model = mlp(2, 2, bias=False)
    nn.init.zeros_(model[0].weight)
    assert count_paths(model, torch.randn(1, 2).double()) == 4
    masked = Calls(lambda self, x: F.linear(x, self.a.weight * self.mask), a=model[0])
    masked.register_buffer("mask", torch.eye(2).double())
    assert count_paths(masked, torch.randn(1, 2).double()) == 2


# -- under the symmetry ----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "normalization"), families(NORMALIZATIONS))
def test_rescaling_divides_the_diagonal_by_the_squared_factors(
    name: str, normalization: str
) -> None:
    """g' = g/d² and the path norm stays: with running statistics, calibrated or not (lemma
    path_properties).
    """
    model, _ = make(name)
    symmetry, sample = prepared(name, normalization).symmetry, prepared(name, normalization).sample
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    factors = symmetry.factors(log_scales)
    rescaled = copy.deepcopy(model)
    pathcond.rescale_(rescaled, symmetry, log_scales, verify=False)
    for calibrate in (True, False):
        before = path_energy(model, sample, calibrate=calibrate)
        after = path_energy(rescaled, sample, calibrate=calibrate)
        assert after.norm == pytest.approx(before.norm, rel=1e-11)
        for parameter, g in before.diagonal.items():
            assert energy_change(g, after.diagonal[parameter], factors[parameter]) < 1e-11, (
                parameter,
                calibrate,
            )


def test_energies_are_those_of_the_graph_in_eval_mode() -> None:
    model, inputs = make("batch_norm_mlp")
    expected = diag_g(model, inputs)
    torch.testing.assert_close(flat(diag_g(model.train(), inputs)), flat(expected))


# -- calibration -----------------------------------------------------------------------------------


def test_fresh_batch_norms_are_measured_on_the_batch() -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).double(),
        torch.randn(16, 3).double(),
    )
    settled = copy.deepcopy(model)
    h = settled[0](x)
    # √max(var, ε) stands for √(var + ε)
    settled[1].running_mean, settled[1].running_var = (
        h.mean(0).detach(),
        h.var(0, correction=0).detach() - settled[1].eps,
    )
    settled[1].num_batches_tracked.fill_(1)
    torch.testing.assert_close(flat(diag_g(model, x)), flat(diag_g(settled, x)), **EXACT)
    as_in_the_paper = copy.deepcopy(model)
    as_in_the_paper[1].num_batches_tracked.fill_(1)  # mean 0, variance 1
    torch.testing.assert_close(
        flat(diag_g(model, x, calibrate=False)), flat(diag_g(as_in_the_paper, x)), **EXACT
    )
    assert not torch.allclose(flat(diag_g(model, x)), flat(diag_g(as_in_the_paper, x)), rtol=0.1)


def test_later_batch_norms_see_what_earlier_ones_make_of_the_batch() -> None:
    """Two fresh norms in a row: measured together they are what a train-mode pass would track."""
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3),
        nn.BatchNorm2d(2, affine=False),
        nn.ReLU(),
    ]
    model, x = (
        nn.Sequential(*layers, nn.Flatten(), nn.Linear(32, 2)).double(),
        torch.randn(5, 2, 8, 8).double(),
    )
    tracked = copy.deepcopy(model)
    for norm in (model[1], model[4], tracked[1], tracked[4]):
        norm.momentum, norm.eps = 1.0, 1e-14
    tracked.train()(x)
    for norm, count in ((tracked[1], 5 * 36), (tracked[4], 5 * 16)):
        norm.running_var *= (count - 1) / count  # torch tracks the unbiased variance
    torch.testing.assert_close(flat(diag_g(model, x)), flat(diag_g(tracked, x)), **EXACT)


def normalised(variance: Tensor) -> Tensor:
    """The factor of a norm with ε = 10⁻⁵ as far as it normalises."""
    return variance.sqrt() / (variance + 1e-5)


def gates() -> dict[str, nn.Module]:
    """Networks in which one kind of factor depends on the sample, in one place."""
    parts = {"a": nn.Linear(8, 4), "g": nn.Linear(8, 4), "b": nn.Linear(4, 2)}
    attention = Calls(
        lambda self, x: self.o(self.a(x.unflatten(1, (2, 4)))), a=SelfAttention(), o=nn.Linear(4, 2)
    )
    return {
        "layer_norm": nn.Sequential(nn.Linear(8, 4), nn.LayerNorm(4), nn.ReLU(), nn.Linear(4, 2)),
        "rms_norm": nn.Sequential(nn.Linear(8, 4), nn.RMSNorm(4), nn.ReLU(), nn.Linear(4, 2)),
        "group_norm": nn.Sequential(
            nn.Linear(8, 4), nn.GroupNorm(2, 4), nn.ReLU(), nn.Linear(4, 2)
        ),
        "sigmoid": Calls(lambda self, x: self.b(self.a(x) * self.g(x).sigmoid()), **parts),
        "softmax": Calls(lambda self, x: self.b(self.a(x) * self.g(x).softmax(1)), **parts),
        "glu": nn.Sequential(nn.Linear(8, 8), nn.GLU(), nn.Linear(4, 2)),
        "gelu": nn.Sequential(nn.Linear(8, 4), nn.GELU(), nn.Linear(4, 2)),
        "silu": nn.Sequential(nn.Linear(8, 4), nn.SiLU(), nn.Linear(4, 2)),
        "l2": Calls(
            lambda self, x: self.b(F.normalize(self.a(x))), a=nn.Linear(8, 4), b=nn.Linear(4, 2)
        ),
        "square": Calls(
            lambda self, x: self.b(self.a(x).relu() ** 2), a=nn.Linear(8, 4), b=nn.Linear(4, 2)
        ),
        "where": Calls(
            lambda self, x: torch.where(x[:, :2] > 0, self.a(x), self.b(x)),
            a=nn.Linear(8, 2),
            b=nn.Linear(8, 2),
        ),
        "gather": Calls(
            lambda self, x: self.b(self.a(x).gather(1, x.argsort(1)[:, :3])),
            a=nn.Linear(8, 8),
            b=nn.Linear(3, 2),
        ),
        "attention": attention,
    }


@pytest.mark.parametrize("name", sorted(gates()))
def test_factors_enter_as_their_mean_square_over_the_batch(name: str) -> None:
    """With one such factor on each path the energy of a batch is the mean of the energies of its
    samples.
    """
    torch.manual_seed(0)
    model, x = gates()[name].double(), torch.randn(5, 8).double()
    together = flat(diag_g(model, x))
    alone = torch.stack([flat(diag_g(model, x[i : i + 1])) for i in range(len(x))])
    torch.testing.assert_close(together, alone.mean(0), rtol=1e-11, atol=0)
    # the factor does depend on the sample
    assert float((alone.std(0) / alone.mean(0).clamp(min=1e-300)).max()) > 1e-3


FROZEN: dict[str, Any] = {
    "layer_norm": (
        lambda h: h * normalised(h.var(1, correction=0, keepdim=True)),
        nn.LayerNorm(4, elementwise_affine=False),
    ),
    "group_norm": (
        lambda h: (
            h.view(-1, 2, 2) * normalised(h.view(-1, 2, 2).var(2, correction=0, keepdim=True))
        ).view(-1, 4),
        nn.GroupNorm(2, 4, affine=False),
    ),
    "silu": (lambda h: h * h.sigmoid(), nn.SiLU()),
    "gelu": (lambda h: h * (1 + torch.erf(h / math.sqrt(2))) / 2, nn.GELU()),
    "hardswish": (lambda h: h * F.hardsigmoid(h), nn.Hardswish()),
    "elu": (lambda h: h * torch.where(h > 0, 1.0, torch.expm1(h) / h), nn.ELU()),
}


@pytest.mark.parametrize("name", sorted(FROZEN))
def test_a_factor_is_frozen_at_its_value(name: str) -> None:
    """On one sample the layer is replaced by a multiplication with its factor as a constant."""
    torch.manual_seed(0)
    formula, layer = FROZEN[name]
    a, b, x = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), torch.randn(1, 3).double()
    h = a(x).detach()
    constant = Calls(lambda self, x: self.b(self.a(x) * self.factor), a=a, b=b)
    constant.register_buffer("factor", formula(h) / h)
    torch.testing.assert_close(
        flat(diag_g(nn.Sequential(a, layer, b), x)), flat(diag_g(constant, x)), rtol=1e-9, atol=0
    )
    plain = flat(diag_g(nn.Sequential(a, b), x))
    torch.testing.assert_close(
        flat(diag_g(nn.Sequential(a, layer, b), x, calibrate=False)), plain, **EXACT
    )
    if name in ("silu", "gelu", "hardswish", "elu"):
        torch.testing.assert_close(
            flat(diag_g(nn.Sequential(a, layer, b), x, approximate=True)), plain, **EXACT
        )


@pytest.mark.parametrize("layer", [nn.SiLU, nn.Hardswish, nn.ELU, nn.Mish])
def test_an_in_place_activation_is_measured_before_it_writes(layer: Any) -> None:
    torch.manual_seed(0)
    a, b, x = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), torch.randn(5, 3).double()
    expected = diag_g(nn.Sequential(a, layer(), b), x)
    torch.testing.assert_close(
        diag_g(nn.Sequential(a, layer(inplace=True), b), x), expected, **EXACT
    )


def test_attention_is_frozen_at_its_weights() -> None:
    """Values times the attention weights as constants; queries and keys lie on no path."""
    torch.manual_seed(0)
    q, k, v, o = (nn.Linear(4, 4).double() for _ in range(4))
    x = torch.randn(1, 3, 4).double()

    def attention(self: Any, x: Tensor) -> Tensor:
        heads = [p(x).unflatten(2, (2, 2)).transpose(1, 2) for p in (self.q, self.k, self.v)]
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o(mixed.transpose(1, 2).flatten(2))

    def constant(self: Any, x: Tensor) -> Tensor:
        return self.o(
            (self.weights @ self.v(x).unflatten(2, (2, 2)).transpose(1, 2))
            .transpose(1, 2)
            .flatten(2)
        )

    model, frozen = Calls(attention, q=q, k=k, v=v, o=o), Calls(constant, v=v, o=o)
    scores = (
        q(x).unflatten(2, (2, 2)).transpose(1, 2)
        @ k(x).unflatten(2, (2, 2)).permute(0, 2, 3, 1)
        / math.sqrt(2)
    )
    frozen.register_buffer(
        "weights",
        scores.masked_fill(torch.ones(3, 3).triu(1).bool(), -math.inf).softmax(-1).detach(),
    )
    g, expected = diag_g(model, x), diag_g(frozen, x)
    for name in expected:
        torch.testing.assert_close(g[name], expected[name], **EXACT)
    off = off_path(model, x)
    assert set(off) == {"q.weight", "q.bias", "k.weight", "k.bias"}
    assert all("attention weights" in reason for reason in off.values())
    assert not any(bool(g[name].any()) for name in off)


def test_an_embedding_reads_the_rows_of_the_batch() -> None:
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 1, bias=False)).double()
    tokens = torch.tensor([[0, 1], [0, 2]])
    g = diag_g(model, tokens)["0.weight"]
    weight = model[2].weight.detach().square().view(2, 2)  # (position, column)
    torch.testing.assert_close(
        g,
        torch.stack([weight[0], weight[1] / 2, weight[1] / 2, weight[0] * 0, weight[0] * 0]),
        **EXACT,
    )
    everything = diag_g(model, tokens, calibrate=False)["0.weight"]
    torch.testing.assert_close(everything, weight.sum(0).expand(5, 2), **EXACT)
    assert count_paths(model, tokens) == 5 * 4


# -- where paths end -------------------------------------------------------------------------------


def test_an_output_nonlinearity_is_no_part_of_the_lifting() -> None:
    torch.manual_seed(0)
    model, x = mlp(3, 4, 2), torch.randn(4, 3).double()
    for last in (nn.Softmax(1), nn.LogSoftmax(1), nn.Sigmoid(), nn.Tanh()):
        torch.testing.assert_close(
            flat(diag_g(nn.Sequential(*model, last), x)), flat(diag_g(model, x)), **EXACT
        )


def test_parameters_off_the_paths_are_listed_with_their_reason() -> None:
    model, inputs = make("regnet")
    off = off_path(model, inputs)
    assert set(off) == {"down.weight", "down.bias", "up.weight", "up.bias"}
    assert all("sigmoid" in reason and "cases.py" in reason for reason in off.values())
    prelu, inputs = make("mlp_without_bias")
    assert off_path(prelu, inputs) == {"3.weight": "is the slope of a PReLU at 3"}
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(3, 2))
    off = off_path(normed, torch.randn(2, 3))
    assert off == {
        "parametrizations.weight.original1": "is the direction of a weight norm at "
        "parametrizations.weight.0"
    }
    orthogonal = nn.utils.parametrizations.orthogonal(nn.Linear(3, 2))
    reasons = off_path(orthogonal, torch.randn(2, 3))
    assert "computed from parameters alone" in reasons["parametrizations.weight.original"]
    two_heads = Calls(
        lambda self, x: (self.a(x), self.b(x)) if self.training else self.a(x),
        a=nn.Linear(2, 2),
        b=nn.Linear(2, 2),
    )
    assert set(off_path(two_heads, torch.randn(2, 2))) == {"b.weight", "b.bias"}
    assert off_path(*make("resnet")) == {}


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.Softplus()])
def test_what_is_no_gate_ends_paths_and_starts_new_ones(activation: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = (
        nn.Sequential(nn.Linear(3, 4), activation, nn.Linear(4, 2)).double(),
        torch.randn(6, 3).double(),
    )
    g = diag_g(model, x)
    expected = model[:2](x).detach().square().mean(0)
    torch.testing.assert_close(g["2.weight"], expected.expand(2, 4), **EXACT)
    assert not g["0.weight"].any()
    assert set(off_path(model, x)) == {"0.weight", "0.bias"}
    assert count_paths(model, x) == 4 * 2 + 2


def test_parameters_that_do_not_train_have_no_entry_but_count() -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3).double()
    full = diag_g(model, x)
    model[0].weight.requires_grad_(False)
    part = diag_g(model, x)
    assert set(full) - set(part) == {"0.weight"}
    torch.testing.assert_close(part["2.weight"], full["2.weight"], **EXACT)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    assert diag_g(model, x) == {}


def test_a_shared_weight_counts_once_per_occurrence() -> None:
    """∂‖Φ‖²/∂θ² of y = w·relu(w·x): ‖Φ‖² = ω², so 2ω (eq. diag_g assumes that a path meets a
    parameter once).
    """
    shared = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(shared.weight, 3.0)
    model = Calls(lambda self, x: self.a(F.relu(self.a(x))), a=shared)
    assert diag_g(model, torch.ones(1, 1).double())["a.weight"].item() == 18.0


# -- samples ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("strides", ["as captured", "of another kernel"])
def test_heads_are_put_side_by_side_whatever_their_strides(
    strides: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture has no ``contiguous``, as the kernel leaves heads side by side; the samples must,
    too, though they are joined behind the transposition. In float64 it may be another kernel.
    """

    def forward(self: Any, x: Tensor, view: bool = True) -> Tensor:
        q, v = (part(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for part in (self.q, self.v))
        heads = F.scaled_dot_product_attention(1.5 * q, q, v).transpose(1, 2)
        heads = heads.contiguous().view(*x.shape[:2], 8) if view else heads.flatten(2)
        return self.out(F.silu(heads))  # type: ignore[no-any-return]

    if strides == "of another kernel":

        def call_contiguous(node: Node, *given: Any) -> Any:
            result = call(node, *given)
            return result.contiguous() if node.op.endswith("attention") else result

        monkeypatch.setattr(batch_values, "call", call_contiguous)
    parts = {"q": nn.Linear(8, 8), "v": nn.Linear(8, 8), "out": nn.Linear(8, 3)}
    viewed = Calls(forward, **parts).double()
    flattened = Calls(lambda self, x: forward(self, x, view=False), **parts).double()
    x = torch.randn(3, 5, 8).double()
    for name, g in diag_g(viewed, x).items():
        assert torch.equal(g, diag_g(flattened, x)[name])
        assert bool((g > 0).all()) or name.startswith("q")


def test_a_batch_is_split_only_where_samples_do_not_mix() -> None:
    torch.manual_seed(0)
    batch_first = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).double()
    sequence_first = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=False).double()
    sequence_first.load_state_dict(batch_first.state_dict())
    x = torch.randn(3, 5, 4).double()
    assert len(capture_sample(batch_first, x).inputs) == 3
    assert len(capture_sample(sequence_first, x.transpose(0, 1)).inputs) == 1
    one = x[:1]
    torch.testing.assert_close(
        flat(diag_g(batch_first, one)),
        flat(diag_g(sequence_first, one.transpose(0, 1))),
        rtol=1e-11,
        atol=1e-300,
    )


def test_inputs_of_all_kinds() -> None:
    model = mlp(3, 4, 2)
    expected = flat(diag_g(model, torch.randn(1, 3).double()))
    for inputs in (
        torch.randn(3).double(),
        (torch.randn(4, 3).double(),),
        {"input": torch.randn(2, 3).double()},
    ):
        torch.testing.assert_close(flat(diag_g(model, inputs)), expected, **EXACT)


def test_statistics_of_a_single_value_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    with pytest.raises(UnsupportedModelError, match=r"at least two samples, or calibrate=False"):
        diag_g(model, torch.randn(1, 3))
    assert diag_g(model, torch.randn(1, 3), calibrate=False)


# -- the model is left alone -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    ["batch_norm_mlp", "regnet", "vit", "llama", "slice_assignment", "part_of_a_bias_cleared"],
)
def test_nothing_of_the_model_changes(name: str) -> None:
    model, inputs = make(name)
    for norm in model.modules():
        if isinstance(norm, nn.modules.batchnorm._BatchNorm):
            norm.num_batches_tracked.zero_()
    model.train()
    state = copy.deepcopy(model.state_dict())
    given = copy.deepcopy(inputs)
    random = torch.get_rng_state()
    diag_g(model, inputs)
    path_norm(model, inputs)
    count_paths(model, inputs)
    assert all(torch.equal(tensor, state[key]) for key, tensor in model.state_dict().items())
    assert all(module.training for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(inputs, given, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_is_computed_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    layers = [
        nn.Conv2d(2, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(3 * 36, 4),
        nn.LayerNorm(4),
        nn.Linear(4, 2),
    ]
    model, x = nn.Sequential(*layers).to(dtype), images().to(dtype)
    g = diag_g(model, x)
    assert all(tensor.dtype == torch.float64 for tensor in g.values())
    torch.testing.assert_close(
        flat(g), flat(diag_g(copy.deepcopy(model).double(), x.double())), rtol=1e-11, atol=0
    )
    assert all(parameter.dtype == dtype for parameter in model.parameters())


# -- range -----------------------------------------------------------------------------------------


def test_overflow_names_the_layer() -> None:
    model, x = mlp(3, 3, 3, 3), torch.randn(2, 3).double()
    with torch.no_grad():
        model[0].weight.mul_(1e100)
        model[2].weight.mul_(1e100)
    with pytest.raises(EnergyRangeError, match=r"overflows float64 at linear in 2:"):
        diag_g(model, x)
    with pytest.raises(EnergyRangeError, match="overflows"):
        path_norm(model, x)
    assert path_norm(model, x, p=1) > 1e190


def test_underflow_names_the_parameter() -> None:
    model, x = mlp(3, 3, 3, 3, bias=False), torch.randn(2, 3).double()
    with torch.no_grad():
        model[0].weight.mul_(1e-100)
        model[2].weight.mul_(1e-100)
    with pytest.raises(EnergyRangeError, match="underflows float64"):
        diag_g(model, x)
    one_unit = mlp(3, 3, 3, bias=False)
    with torch.no_grad():
        one_unit[2].weight[:, 1] = 1e-170
    with pytest.raises(EnergyRangeError, match=r"underflows float64 at parameter 0.weight"):
        diag_g(one_unit, x)


def test_zeros_that_are_meant_are_no_underflow() -> None:
    """A gain initialised at zero cuts its branch: g is zero in front of it, and nowhere else."""
    model, inputs = make("resnet")
    with torch.no_grad():
        model[4].bn2.weight.zero_()
    g = diag_g(model, inputs)
    zero = {name for name, tensor in g.items() if not tensor.any()}
    assert zero == {
        f"4.{name}" for name in ("conv1.weight", "bn1.weight", "bn1.bias", "conv2.weight")
    }
    assert bool((g["4.bn2.weight"] > 0).all())


def test_values_that_are_not_numbers_are_refused() -> None:
    model, x = mlp(3, 4, 2), torch.randn(2, 3).double()
    with torch.no_grad():
        model[2].weight[0, 0] = math.nan
    with pytest.raises(EnergyRangeError, match=r"2\.weight .* has NaN or infinite values"):
        diag_g(model, x)
    normed = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).double()
    with pytest.raises(UnsupportedModelError, match="holds 6 NaN"):
        diag_g(normed, torch.full((2, 3), math.nan).double())


@pytest.mark.parametrize("p", [0, -1, math.inf, math.nan])
def test_other_exponents_are_refused(p: float) -> None:
    with pytest.raises(ValueError, match="positive, finite p"):
        path_norm(mlp(2, 2), torch.randn(1, 2).double(), p)


def test_models_without_weights_are_refused() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    with pytest.raises(UnsupportedModelError, match="meta device"):
        diag_g(model, torch.randn(1, 2))


def test_writes_that_cannot_be_followed_are_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x)
        view = h.reshape(2, 2)  # may be a copy, as far as the graph says
        h.mul_(2.0)
        return self.b(view.reshape(1, 4))

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match="writes in place into memory that is shared"):
        diag_g(model, torch.randn(1, 3))


@pytest.mark.cuda
@pytest.mark.parametrize("name", sorted(CASES))
def test_cuda_and_cpu_agree(name: str) -> None:
    model, inputs = make(name)
    expected = flat(diag_g(model, inputs))
    on_gpu = torch.utils._pytree.tree_map(
        lambda x: x.cuda() if isinstance(x, Tensor) else x, inputs
    )
    torch.testing.assert_close(
        flat(diag_g(model.cuda(), on_gpu)).cpu(), expected, rtol=1e-10, atol=0
    )


def test_a_number_that_is_read_from_activations_is_named() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.a(x).relu()
        return self.b(h) * h.max().item()  # type: ignore[no-any-return]

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    with pytest.raises(UnsupportedModelError, match=r"a Python number of a tensor at .*\.item\(\)"):
        pathcond.condition_(model, torch.randn(4, 3))
