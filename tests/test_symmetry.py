"""The search finds neither more nor fewer symmetries than there are, and says what pins the
rest.
"""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

import pathcond
from pathcond.capture.outputs import output_change
from pathcond.reference import count_symmetries
from pathcond.reference.symmetries import _coordinates, _find_dropped

from .cases import CASES, NORMED, Calls, RMSNorm, families, make, prepared
from .zoo import NORMALIZATIONS, WITH_BATCH, outputs, randomise


def units(model: nn.Module, inputs: object, **options: object) -> int:
    return pathcond.find_symmetry(model, inputs, **options).num_units


def change(
    model: nn.Module, inputs: object, symmetry: pathcond.Symmetry, *, training: bool = False
) -> float:
    """Relative change of the outputs under random log-scales, measured by us; the weights are put
    back.
    """
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = outputs(model, inputs, training=training)
    pathcond.rescale_(
        model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2, verify=False
    )
    after = outputs(model, inputs, training=training)
    model.load_state_dict(state)
    return output_change(before, after)


def counted(name: str, normalization: str) -> int:
    """The numerical rank; once for all values that hold the same, as all do of a network without
    norms.
    """
    model, inputs = make(name)
    coordinates = _coordinates(model)
    held = _find_dropped(model, coordinates, normalization) & coordinates.keys()
    key = name, frozenset(held), normalization == "paper"
    if key not in COUNTED:
        COUNTED[key] = count_symmetries(model, inputs, normalization=normalization)
    return COUNTED[key]


COUNTED: dict[tuple[str, frozenset[str], bool], int] = {}


@pytest.mark.parametrize(("name", "normalization"), families(WITH_BATCH))
def test_neither_more_nor_fewer(name: str, normalization: str) -> None:
    model, inputs = make(name)
    symmetry = prepared(name, normalization).symmetry
    assert symmetry.num_units == counted(name, normalization)
    assert change(model, inputs, symmetry) < 1e-12
    if normalization == "gain":
        assert change(model, inputs, symmetry, training=True) < 1e-12


@pytest.mark.parametrize("name", sorted(CASES))
def test_values_of_normalization_differ_where_there_are_norms(name: str) -> None:
    """``families`` relies on it."""
    found = [prepared(name, value).symmetry for value in WITH_BATCH]
    kinds = {(symmetry.num_units, symmetry.groups, symmetry.pinned) for symmetry in found}
    assert (len(kinds) > 1) == (name in NORMED)
    if name not in NORMED:
        log_scales = torch.randn(found[0].num_units, dtype=torch.float64)
        first, *others = (symmetry.factors(log_scales) for symmetry in found)
        assert all(other.keys() == first.keys() for other in others)
        assert all(torch.equal(other[key], first[key]) for other in others for key in first)


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [("absorb", 4), ("gain", 4), ("full", 8), ("paper", 4), ("batch", 8)],
)
def test_units_of_conv_norm_conv(normalization: str, expected: int) -> None:
    assert units(*make("conv_bn_conv"), normalization=normalization) == expected


def test_batch_frees_what_lies_behind_norms_with_running_statistics() -> None:
    """Three norms of four channels, each with a layer of 5, 6 and 7 units behind it."""
    norms = (
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, track_running_stats=False),
        nn.LayerNorm(4),
    )
    for norm, hidden, expected in zip(norms, (5, 6, 7), (4 + 4 + 5, 6, 7), strict=True):
        model = nn.Sequential(
            nn.Linear(3, 4), norm, nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2)
        ).double()
        x = torch.randn(6, 3, dtype=torch.float64)
        assert units(model, x, normalization="batch") == expected
        assert count_symmetries(model, x, normalization="batch") == expected


GOLDEN = {"resnet18": 4800, "vgg16": 12416, "alexnet": 9344, "squeezenet1_0": 2976}


@pytest.mark.parametrize("name", GOLDEN)
def test_hidden_units_of_known_models(name: str) -> None:
    """Every hidden channel or neuron has a scale under "absorb": the counts of the paper's table
    where it has them.
    """
    import torchvision

    with torch.device("meta"):  # to draw 138 million weights takes longer than the search
        model = torchvision.models.get_model(name, weights=None)
    assert units(model, torch.randn(2, 3, 64, 64), normalization="absorb") == GOLDEN[name]


def test_the_oracle_itself() -> None:
    """A 2-3-3-2 MLP has 6 symmetries; the count would be 11 from a single θ."""
    model = nn.Sequential(
        nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 2)
    ).double()
    assert count_symmetries(model, torch.randn(4, 2).double()) == 6


# -- nothing silently wrong -----------------------------------------------------------------------


def network(middle: object, width: int = 4, out: int | None = None) -> tuple[nn.Module, Tensor]:
    model = Calls(
        lambda self, x: self.b(middle(self.a(x))),
        a=nn.Linear(3, width),
        b=nn.Linear(out or width, 2),
    )
    return model.double(), torch.randn(6, 3).double()


PINNING = {
    "plus one": (lambda h: F.relu(h) + 1.0, "added"),
    "relu6": (F.relu6, "clamped"),
    "pad with ones": (lambda h: F.pad(F.relu(h), (0, 1), value=1.0).cumsum(1), "summed"),
    "sigmoid": (torch.sigmoid, "sigmoid"),
    "gelu": (F.gelu, "gelu"),
    "clamp at one": (lambda h: h.clamp(min=1.0), "clamped"),
    "hardtanh": (F.hardtanh, "clamped"),
    "compared with a constant": (lambda h: h * (h > 0.5), "compared"),
    "unknown op": (lambda h: torch.special.bessel_j0(h), "no rule"),
    "fractional power": (lambda h: F.relu(h) ** 0.3, "power"),
    "gate of a glu": (lambda h: F.glu(torch.cat([torch.ones_like(h), h], 1)), "glu"),
    "written into ones": (
        lambda h: torch.ones_like(h).index_copy(1, h.argsort(1)[0], h),
        "written",
    ),
    "product of neighbours": (lambda h: h.scatter_reduce(0, h.argsort(0), h, "prod"), "multiplied"),
    "difference from ones": (lambda h: h.diff(prepend=torch.ones_like(h[:, :1])), "subtracted"),
    "distance to a point": (lambda h: torch.cdist(h, torch.eye(4).double()), "compared"),
    "alpha dropout": (lambda h: F.alpha_dropout(h, 0.3, True), "no rule"),
}


@pytest.mark.parametrize("name", PINNING)
def test_what_is_not_homogeneous_pins(name: str) -> None:
    middle, reason = PINNING[name]
    model, x = network(middle, out=5 if name == "pad with ones" else 4)
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 0
    pins = [pin for pin in symmetry.pinned if pin.name == "a"]
    assert pins
    assert all(reason in pin.reason for pin in pins)
    assert all(".py:" in pin.line for pin in pins)


FREE = {
    "pad with zeros": lambda h: F.pad(F.relu(h), (0, 1)),
    "mask of zeros": lambda h: F.relu(h) * torch.tensor([1.0, 0.0, 1.0, 1.0], dtype=torch.float64),
    "compared with zero": lambda h: h * (h > 0),
    "masked fill with zero": lambda h: h.masked_fill(h < 0, 0.0),
    "where": lambda h: torch.where(h > 0, h, 0.1 * h),
    "minimum and maximum": lambda h: torch.maximum(h, 0.1 * h) + torch.minimum(h, 0 * h),
    "written into zeros by cat": lambda h: torch.cat([h.new_zeros(6, 1), F.relu(h)], 1),
    "einsum": lambda h: torch.einsum("ij->ji", F.relu(h)).t(),
    "diagonal matrices": lambda h: F.relu(h).diag_embed().sum(1),
    "running maximum": lambda h: F.relu(h).cummax(0)[0],
    "turned by ninety degrees": lambda h: F.relu(h).rot90().rot90(3),
    "filled rows": lambda h: F.relu(h).index_fill(0, torch.tensor([1, 3]), 0.0),
    "what is not a number": lambda h: torch.where(h.isnan(), 0.0, F.relu(h)),
    "negative entries overwritten": lambda h: h.index_put((h < 0,), h.new_zeros(())),
    "lp pooling": lambda h: F.lp_pool1d(F.relu(h).t(), 2, 2).repeat_interleave(2, 1).t(),
}


@pytest.mark.parametrize("name", FREE)
def test_homogeneous_by_meaning(name: str) -> None:
    out = 5 if name in ("pad with zeros", "written into zeros by cat") else 4
    model, x = network(FREE[name], out=out)
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 4
    assert change(model, x, symmetry) < 1e-12


def test_a_reshape_whose_sizes_happen_to_match() -> None:
    """(N, 4, 2, 2) flattened and regrouped as 4 × 4 mixes channels although the number 4
    survives.
    """
    model = Calls(
        lambda self, x: self.b(F.relu(self.a(x)).permute(0, 2, 3, 1).reshape(-1, 4, 2, 2)),
        a=nn.Conv2d(2, 4, 3),
        b=nn.Conv2d(4, 2, 1),
    ).double()
    x = torch.randn(3, 2, 4, 4).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == count_symmetries(model, x) == 1
    assert change(model, x, symmetry) < 1e-12


def test_a_zero_buffer_may_change_so_it_pins() -> None:
    model, x = network(lambda h: F.relu(h))
    model.register_buffer("offset", torch.zeros(4).double())
    model._function = lambda self, x: self.b(F.relu(self.a(x)) + self.offset)
    assert units(model, x) == 0


def test_a_norm_whose_statistics_are_read_elsewhere_keeps_them() -> None:
    model = (
        Calls(
            lambda self, x: self.b(F.relu(self.bn(self.a(x)))) + self.bn.running_mean[:2],
            a=nn.Linear(3, 4),
            bn=nn.BatchNorm1d(4),
            b=nn.Linear(4, 2),
        )
        .double()
        .eval()
    )
    randomise(model)
    x = torch.randn(6, 3).double()
    symmetry = pathcond.find_symmetry(model, x, normalization="absorb")
    assert symmetry.num_units == 0
    assert change(model, x, symmetry) == 0
    behind = pathcond.find_symmetry(model, x)
    assert behind.num_units == 4
    assert change(model, x, behind) < 1e-12


def test_a_norm_shared_by_two_branches() -> None:
    model = (
        Calls(
            lambda self, x: self.c(F.relu(self.bn(self.a(x))) + F.relu(self.bn(self.b(x)))),
            a=nn.Linear(3, 4),
            b=nn.Linear(3, 4),
            bn=nn.BatchNorm1d(4),
            c=nn.Linear(4, 2),
        )
        .double()
        .eval()
    )
    randomise(model)
    x = torch.randn(6, 3).double()
    for normalization in NORMALIZATIONS:
        symmetry = pathcond.find_symmetry(model, x, normalization=normalization)
        assert symmetry.num_units == count_symmetries(model, x, normalization=normalization)
        assert change(model, x, symmetry) < 1e-12


def test_writing_in_place_reaches_every_alias() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        view = h[:, :2]
        view.add_(1.0)
        return self.b(h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double()
    x = torch.randn(6, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert change(model, x, symmetry) < 1e-12


@pytest.mark.parametrize("kind", ["parametrize", "spectral_norm", "weight_norm and another"])
def test_reparametrised_weights_are_frozen(kind: str) -> None:
    model, x = network(F.relu)
    if kind == "parametrize":
        parametrizations.orthogonal(model.a)
    elif kind == "spectral_norm":
        parametrizations.spectral_norm(model.a)
    else:
        parametrizations.weight_norm(model.a)
        parametrize.register_parametrization(model.a, "weight", nn.Softplus())
    model.eval()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 0
    assert any(pin.name.startswith("a.") for pin in symmetry.pinned)
    assert change(model, x, symmetry) == 0


@pytest.mark.parametrize("old", [False, True])
@pytest.mark.parametrize("dim", [0, None])
def test_the_magnitude_of_a_weight_norm_carries_the_scale(old: bool, dim: int | None) -> None:
    model, x = network(F.relu)
    if old:
        with pytest.warns(FutureWarning):
            nn.utils.weight_norm(model.a, dim=dim)
    else:
        parametrizations.weight_norm(model.a, dim=dim)
    magnitude, direction = (name for name, p in model.a.named_parameters() if name != "bias")
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == (1 if dim is None else 4)
    factors = symmetry.factors(torch.ones(symmetry.num_units))
    assert bool((factors[f"a.{magnitude}"] == torch.e).all())
    assert bool((factors[f"a.{direction}"] == 1).all())
    assert any(
        pin.name == f"a.{direction}" and "direction" in pin.reason for pin in symmetry.pinned
    )
    assert change(model, x, symmetry) < 1e-12


def test_pruned_modules_keep_their_units() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.ReLU(), nn.Conv1d(4, 4, 1), nn.ReLU(), nn.Conv1d(4, 2, 1)
    )
    model = Calls(lambda self, x: self.net[1:](self.net[0](x).mT), net=model.double())
    for layer in (model.net[0], model.net[2], model.net[4]):
        prune.random_unstructured(layer, "weight", amount=3)
    prune.random_unstructured(model.net[0], "bias", amount=1)
    x = torch.randn(5, 6, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 8
    assert change(model, x, symmetry) < 1e-12
    with torch.no_grad():  # a mask may be drawn anew
        for layer in (model.net[0], model.net[2], model.net[4]):
            layer.weight_mask.fill_(1.0)
    assert change(model, x, symmetry) < 1e-12


def test_parameters_that_overlap_in_memory_are_frozen() -> None:
    model, x = network(F.relu)
    model.a.bias = nn.Parameter(model.a.weight.detach()[:, 0])
    symmetry = pathcond.find_symmetry(model, x)
    assert any("shares memory" in pin.reason for pin in symmetry.pinned)
    assert symmetry.num_units == 0


def test_frozen_parameters_are_scaled_like_any_other_if_asked() -> None:
    model, x = network(F.relu)
    model.a.requires_grad_(False)
    symmetry = pathcond.find_symmetry(model, x, frozen="move")
    assert symmetry.num_units == 4
    pathcond.rescale_(model, symmetry, torch.ones(4))
    assert not model.a.weight.requires_grad


def test_zero_weights_do_not_matter() -> None:
    model, x = network(F.relu)
    nn.init.zeros_(model.b.weight)
    assert units(model, x) == 4


def test_train_only_heads_are_kept() -> None:
    def forward(self: nn.Module, x: Tensor) -> object:
        h = F.relu(self.a(x))
        return (self.b(h), torch.sigmoid(h[:, :2])) if self.training else self.b(h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)).double().eval()
    x = torch.randn(6, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 2
    assert change(model, x, symmetry, training=True) < 1e-12


# -- normalization --------------------------------------------------------------------------------


def test_train_mode_is_kept_within_the_bounds() -> None:
    model, x = make("resnet")
    with torch.no_grad():
        model[0].weight.mul_(0.02)  # small activations: ε of the first norm matters
    symmetry = pathcond.find_symmetry(model, x)
    lower, upper = symmetry.log_scale_bounds(model)
    assert (lower <= 0).all()
    assert (upper >= 0).all()
    assert lower.isfinite().any()
    free = torch.full((symmetry.num_units,), -4.0, dtype=torch.float64)
    unsafe = pathcond.rescale_(copy.deepcopy(model), symmetry, free)
    safe = pathcond.rescale_(copy.deepcopy(model), symmetry, torch.maximum(free, lower))
    assert unsafe.output_change_train > 1e-2 > safe.output_change_train
    assert safe.output_change_eval < 1e-9


def test_paper_changes_train_mode_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, x = make("batch_norm_mlp")
    symmetry = pathcond.find_symmetry(model, x, normalization="paper")
    report = pathcond.rescale_(model, symmetry, torch.ones(symmetry.num_units))
    assert report.output_change_eval < 1e-9
    assert report.output_change_train > 0.1
    assert "eval mode only" in caplog.text


def test_approximate_admits_smooth_activations_and_fronts_of_norms() -> None:
    model = nn.Sequential(
        nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 5), nn.GELU(), nn.Linear(5, 2)
    ).double()
    x = torch.randn(6, 3).double()
    assert units(model, x) == 0
    symmetry = pathcond.find_symmetry(model, x, approximate=True)
    assert symmetry.num_units == 6  # one in front of the norm, five GELU units
    report = pathcond.rescale_(model, symmetry, torch.full((6,), 0.1), tolerance=1.0)
    assert 1e-9 < report.output_change_eval < 0.1


@pytest.mark.parametrize("approximate", [False, True])
@pytest.mark.parametrize("normalization", WITH_BATCH)
def test_a_norm_written_out_obeys_the_same_table(normalization: str, approximate: bool) -> None:
    built_in, written_out = (
        nn.Sequential(nn.Linear(3, 4), norm(4), nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))
        for norm in (nn.RMSNorm, RMSNorm)
    )
    options = {"normalization": normalization, "approximate": approximate}
    front = approximate and normalization in ("absorb", "full", "batch")
    behind = normalization in ("gain", "full")
    expected = 5 + front + 4 * behind
    assert [units(model, torch.randn(6, 3), **options) for model in (built_in, written_out)] == [
        expected,
        expected,
    ]


# -- the Symmetry itself --------------------------------------------------------------------------


def test_factors_are_what_rescaling_multiplies_by() -> None:
    model, x = make("resnet")
    symmetry = pathcond.find_symmetry(model, x, normalization="full")
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) - 0.5
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pathcond.rescale_(model, symmetry, log_scales)
    factors = symmetry.factors(log_scales)
    assert set(factors) == {name for name, tensor in before.items() if tensor.is_floating_point()}
    for name, tensor in model.state_dict().items():
        expected = before[name] * factors[name] if name in factors else before[name]
        assert factors.get(name, expected).shape == tensor.shape
        torch.testing.assert_close(tensor, expected, rtol=1e-12, atol=0)


def test_groups_name_every_unit_once_and_both_sides() -> None:
    model, x = make("resnet_without_norm")
    symmetry = pathcond.find_symmetry(model, x)
    assert sorted(unit for group in symmetry.groups for unit in group.units) == list(
        range(symmetry.num_units)
    )
    stream = symmetry.groups[0]
    assert stream.name == "0"
    assert {"0.weight", "2.conv2.weight", "3.conv2.bias"} <= set(stream.multiplied)
    assert {"2.conv1.weight", "3.conv1.weight", "6.weight"} <= set(stream.divided)


def test_the_table_is_readable_and_complete() -> None:
    model, x = make("regnet")
    text = str(pathcond.find_symmetry(model, x))
    assert text.startswith("Symmetry of Calls: ")
    for word in (
        "units",
        "reduce.{weight,bias}",
        "sigmoid at cases.py:",
        "is an output of the model",
    ):
        assert word in text


def test_arguments_that_no_example_gives_are_named() -> None:
    """A state that the caller passes pins what starts from zeros without it."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.RNN(3, 5, nonlinearity="relu", batch_first=True)
            self.head = nn.Linear(5, 2)

        def forward(self, x: Tensor, state: Tensor | None = None, *, last: bool = True) -> Tensor:
            y = self.head(self.rnn(x, state)[0])
            return y[:, -1] if last else y

    model, x = Recurrent(), torch.randn(2, 6, 3)
    alone = pathcond.find_symmetry(model, x)
    assert alone.not_given == ("state", "last")
    assert "what forward does with state, last. No example gives them" in str(alone)
    both = pathcond.find_symmetry(
        model, {"x": x, "last": False}, other_inputs=(x, torch.randn(1, 2, 5))
    )
    assert (alone.num_units, both.num_units) == (5, 0)
    assert both.not_given == ()
    assert "Not looked at" not in str(both)


def test_to_dict_is_json() -> None:
    model, x = make("vit")
    data = json.loads(json.dumps(pathcond.find_symmetry(model, x).to_dict()))
    assert data["num_units"] == sum(group["units"] for group in data["groups"])
    assert {"name", "units", "operation", "module", "line", "reason"} == set(data["pinned"][0])


@pytest.mark.parametrize(
    ("offset", "units"),
    [
        (lambda self, x: 0.0, 8),
        (lambda self, x: 1.0, 4),
        (lambda self, x: x.shape[0] - 6, 4),  # zero for the example alone
        (lambda self, x: float(self.training), 4),  # zero in eval mode alone
    ],
)
def test_gains_plus_zero_are_gains(offset: Callable[..., float], units: int) -> None:
    def forward(self: Calls, x: Tensor) -> Tensor:
        return self.b(F.relu(self.a(x)) * (self.gain.weight[0] + offset(self, x)))

    model = Calls(
        forward, a=nn.Linear(3, 4), gain=nn.Linear(4, 1, bias=False), b=nn.Linear(4, 2)
    ).double()
    example = torch.randn(6, 3).double()
    symmetry = pathcond.find_symmetry(model, example)
    assert symmetry.num_units == units
    for x in (example, torch.randn(9, 3).double()):
        assert change(model, x, symmetry) < 1e-12


def test_unknown_normalization_is_refused() -> None:
    with pytest.raises(ValueError, match="'absorb', 'gain', 'full', 'batch', 'paper'"):
        pathcond.find_symmetry(*network(F.relu), normalization="layer")


@pytest.mark.parametrize(
    "name", ["resnet", "vit", "llama", "shufflenet", "masked_weights", "relu_rnn"]
)
def test_the_meta_device_gives_the_same_symmetry(name: str) -> None:
    model, inputs = make(name)
    real = prepared(name, "batch").symmetry
    meta = pathcond.find_symmetry(copy.deepcopy(model).to("meta"), inputs)
    assert (meta.num_units, meta.groups) == (real.num_units, real.groups)


def test_the_batch_size_does_not_matter() -> None:
    model, _ = make("regnet")
    small, large = (pathcond.find_symmetry(model, torch.randn(n, 2, 8, 8).double()) for n in (2, 7))
    assert (small.num_units, small.groups, small.pinned) == (
        large.num_units,
        large.groups,
        large.pinned,
    )


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
def test_the_paper_leaves_batch_norms_out_of_its_criterion(normalization: str) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, bias=False),
        nn.BatchNorm2d(4, affine=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 8),
        nn.LayerNorm(8),
        nn.Linear(8, 2),
    )
    symmetry = pathcond.find_symmetry(model, torch.randn(2, 3, 8, 8), normalization=normalization)
    assert symmetry.uncounted == ({"1.weight", "1.bias"} if normalization == "paper" else set())
