"""Rescaling is exact, all or nothing, and leaves everything else alone."""

import copy
import math
import os
import random
import signal
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.rescaling import rescale

from .cases import CASES, Calls, make, prepared
from .zoo import outputs


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def random_scales(symmetry: pathcond.Symmetry) -> Tensor:
    return torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2


@pytest.mark.parametrize("name", CASES)
def test_inverse_restores(name: str) -> None:
    model, _ = make(name)
    symmetry = prepared(name, "full").symmetry
    before, log_scales = snapshot(model), random_scales(symmetry)
    pathcond.rescale_(model, symmetry, log_scales)
    assert symmetry.num_units == 0 or not unchanged(model, before)
    pathcond.rescale_(model, symmetry, -log_scales)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, before[key], rtol=1e-12, atol=1e-14)


def test_two_rescalings_add_up() -> None:
    model, inputs = make("resnet")
    twin = copy.deepcopy(model)
    symmetry = pathcond.find_symmetry(model, inputs)
    a, b = random_scales(symmetry) / 2, random_scales(symmetry) / 2
    pathcond.rescale_(model, symmetry, a)
    pathcond.rescale_(model, symmetry, b)
    pathcond.rescale_(twin, symmetry, a + b)
    for key, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, twin.state_dict()[key], rtol=1e-12, atol=0)


def test_verification_writes_what_it_checked() -> None:
    """Train-mode verification must not leak batch statistics into the model."""
    model, inputs = make("resnet")
    symmetry = pathcond.find_symmetry(model, inputs)
    log_scales = random_scales(symmetry)
    twin = copy.deepcopy(model)
    pathcond.rescale_(model, symmetry, log_scales, verify=True)
    pathcond.rescale_(twin, symmetry, log_scales, verify=False)
    assert unchanged(model, snapshot(twin))


def test_tensors_keep_identity_and_address() -> None:
    model, inputs = make("resnet")
    symmetry = pathcond.find_symmetry(model, inputs)
    before = {
        name: (id(t), t.data_ptr())
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }
    pathcond.rescale_(model, symmetry, random_scales(symmetry))
    assert before == {
        name: (id(t), t.data_ptr())
        for name, t in [*model.named_parameters(), *model.named_buffers()]
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_powers_of_two_are_bitwise_exact(dtype: torch.dtype) -> None:
    model, inputs = make("vgg_with_flatten")
    model, inputs = model.to(dtype), inputs.to(dtype)
    symmetry = pathcond.find_symmetry(model, inputs)
    before = outputs(model, inputs, training=False)
    report = pathcond.rescale_(model, symmetry, random_scales(symmetry), round_to_power_of_two=True)
    assert report.rounded
    assert report.output_change_eval == 0
    assert all(
        torch.equal(a, b)
        for a, b in zip(before, outputs(model, inputs, training=False), strict=True)
    )


def test_rounding_is_the_default_for_half_precision_only() -> None:
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    assert not pathcond.rescale_(model, symmetry, random_scales(symmetry)).rounded
    model, inputs = model.bfloat16(), inputs.bfloat16()
    symmetry = pathcond.find_symmetry(model, inputs)
    assert pathcond.rescale_(model, symmetry, random_scales(symmetry)).rounded


def test_gradients_move_along() -> None:
    """∂L/∂(dθ) = (∂L/∂θ)/d: the moved gradient is the gradient of the moved model."""
    model, inputs = make("resnet_without_norm")
    symmetry = pathcond.find_symmetry(model, inputs)
    model(inputs).square().sum().backward()
    pathcond.rescale_(model, symmetry, random_scales(symmetry))
    moved = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model(inputs).square().sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(moved[name], parameter.grad, rtol=1e-9, atol=1e-12)


def _grouped_and_single(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.norm(self.conv(x)))
    h = F.relu(self.grouped(h + F.relu(self.depthwise(h)) * self.gain))
    return self.last(self.slope(self.linear(h.flatten(1))))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_every_entry_is_multiplied_by_its_factor(
    dtype: torch.dtype, layout: torch.memory_format
) -> None:
    """Weights, gradients and moments, in any layout: kernels of all sorts, a single number and a
    transposed weight.
    """
    torch.manual_seed(0)
    model = Calls(
        _grouped_and_single,
        conv=nn.Conv2d(3, 8, 3),
        norm=nn.BatchNorm2d(8),
        depthwise=nn.Conv2d(8, 8, 3, padding=1, groups=8),
        grouped=nn.Conv2d(8, 12, 3, groups=2, bias=False),
        linear=nn.Linear(48, 10),
        slope=nn.PReLU(10),
        last=nn.Linear(10, 4),
    )
    model.gain = nn.Parameter(torch.tensor(1.3))
    model.linear.weight = nn.Parameter(model.linear.weight.detach().T.contiguous().T)
    model = model.to(dtype).to(memory_format=layout)
    inputs = torch.randn(4, 3, 6, 6, dtype=dtype)
    optimizer = torch.optim.Adam(model.parameters())
    model(inputs).square().sum().backward()
    optimizer.step()
    symmetry = pathcond.find_symmetry(model, inputs, normalization="full")
    octaves = torch.randint(-2, 3, (symmetry.num_units,)).double()
    log_scales = octaves * math.log(2) if dtype == torch.bfloat16 else random_scales(symmetry)
    factors = symmetry.factors(log_scales)
    powers = {"gradient": -1, "exp_avg": -1, "exp_avg_sq": -2}

    def values() -> dict[tuple[str, str], Tensor]:
        found = {("", name): tensor for name, tensor in model.state_dict().items()}
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                moments = {"gradient": parameter.grad, **optimizer.state[parameter]}
                found |= {(kind, name): moments[kind] for kind in powers}
        return {key: t.clone() for key, t in found.items() if t.dtype.is_floating_point}

    before = values()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
    assert sum(bool((factor != 1).any()) for factor in factors.values()) >= 11
    for (kind, name), after in values().items():
        expected = before[kind, name].double() * factors[name] ** powers.get(kind, 1)
        rounding = 8 * torch.finfo(dtype).eps
        torch.testing.assert_close(after.double(), expected, rtol=rounding, atol=0)


# -- bad input: a clear error and an untouched model ----------------------------------------------


def refusal(
    model: nn.Module, symmetry: pathcond.Symmetry, log_scales: object, **options: object
) -> str:
    before = snapshot(model)
    with pytest.raises(pathcond.RescalingError) as error:
        pathcond.rescale_(model, symmetry, log_scales, **options)
    after = model.state_dict()
    assert all(
        tensor.equal(after[name]) or (tensor != tensor).any() for name, tensor in before.items()
    )
    return str(error.value)


def test_wrong_length() -> None:
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    assert "has 9 units" in refusal(model, symmetry, torch.zeros(8))


def test_non_finite_scales_and_weights_are_all_named() -> None:
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    scales = torch.zeros(9)
    scales[3] = float("nan")
    with torch.no_grad():
        model[0].weight[0, 0] = float("inf")
        model[2].bias[1] = float("nan")
        # an output's bias is not scaled, but no output can be compared any more
        model[4].bias[0] = float("nan")
    message = refusal(model, symmetry, scales)
    for part in ("log_scales[3] is nan", "0.weight (4, 3)", "2.bias (5,)", "4.bias (2,)"):
        assert part in message


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("scale", "word"), [(12.0, "overflow"), (-30.0, "underflow")])
def test_leaving_the_range_of_float16(scale: float, word: str, verify: bool) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).half()
    symmetry = pathcond.find_symmetry(model, torch.randn(5, 3).half())
    message = refusal(model, symmetry, torch.full((4,), scale), verify=verify)
    assert f"{word} torch.float16" in message
    assert "0.weight (4, 3)" in message


def test_a_changed_model() -> None:
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    model[1] = nn.GELU()
    assert "has changed" in refusal(model, symmetry, torch.zeros(9))


def test_a_meta_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).to("meta")
    symmetry = pathcond.find_symmetry(model, torch.randn(5, 3))
    assert symmetry.num_units == 4
    with pytest.raises(pathcond.RescalingError, match="meta device"):
        pathcond.rescale_(model, symmetry, torch.zeros(4))


def test_a_variance_that_would_become_negative() -> None:
    model, inputs = make("batch_norm_mlp")
    with torch.no_grad():
        model[1].running_var[2] = 1e-7
    symmetry = pathcond.find_symmetry(model, inputs)
    message = refusal(model, symmetry, torch.full((symmetry.num_units,), -3.0))
    assert "1.running_var[2]" in message
    assert "log_scale_bounds" in message


def test_a_dependence_that_the_graph_does_not_show() -> None:
    """A hook that is registered after the search adds a constant: verification catches it."""
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    handle = model[0].register_forward_hook(lambda module, args, out: out + 1.0)
    message = refusal(model, symmetry, torch.ones(9))
    assert "eval output would change" in message
    assert handle.id in model[0]._forward_hooks


@pytest.mark.parametrize("training", [False, True])
def test_a_model_with_a_generator_of_its_own(training: bool) -> None:
    class Noisy(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
            self.numbers = random.Random(0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (
                self.numbers.random() if self.training is training else 1.0
            )

    model = Noisy()
    symmetry = pathcond.find_symmetry(model, torch.randn(5, 3))
    message = refusal(model, symmetry, torch.ones(4), train_tolerance=1e-2)
    assert "the model draws random numbers from a generator of its own" in message
    assert ("train mode" if training else "eval mode") in message


class TestOptimizers:
    """An optimizer that is passed must be one of the model's."""

    def setup_method(self) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = make("mlp")
        self.other, _ = make("mlp")
        self.symmetry = pathcond.find_symmetry(self.model, self.inputs)
        self.own = torch.optim.SGD(self.model.parameters())
        self.foreign = torch.optim.Adam(self.other.parameters())

    @pytest.mark.parametrize("state", ["transport", "reset", "keep"])
    def test_of_another_model(self, state: str) -> None:
        for optimizer in (self.foreign, [self.own, self.foreign]):
            options = {"optimizer": optimizer, "optimizer_state": state}
            assert "Adam holds none of the model's parameters" in refusal(
                self.model, self.symmetry, torch.ones(9), **options
            )
        before = snapshot(self.model)
        with pytest.raises(pathcond.RescalingError, match="holds none"):
            pathcond.condition_(self.model, self.inputs, optimizer=self.foreign)
        assert unchanged(self.model, before)
        with pytest.raises(pathcond.RescalingError, match="holds none"):
            pathcond.teleport([self.foreign, self.own], self.model, self.inputs)

    def test_of_two_models(self) -> None:
        joint = torch.optim.SGD([*self.model.parameters(), *self.other.parameters()])
        pathcond.rescale_(self.model, self.symmetry, torch.ones(9), optimizer=joint)

    def test_of_some_of_its_parameters(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level("INFO", logger="pathcond")
        pathcond.rescale_(self.model, self.symmetry, torch.ones(9), optimizer=self.own)
        assert "in no optimizer" not in caplog.text
        some = torch.optim.SGD(self.model[0].parameters())
        pathcond.rescale_(self.model, self.symmetry, torch.ones(9), optimizer=some)
        assert "3 rescaled parameters are in no optimizer: 2.weight" in caplog.text

    def test_of_float32_masters(self) -> None:
        masters = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        optimizer = torch.optim.SGD(masters.values())
        pathcond.rescale_(
            self.model, self.symmetry, torch.ones(9), optimizer=optimizer, copies=[masters]
        )


# -- everything else is as before ------------------------------------------------------------------


def test_mode_random_state_statistics_and_hooks_are_as_before() -> None:
    model, inputs = make("resnet")
    model.train()
    model[1].eval()
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    hooks = list(model._forward_hooks)
    before, modes = snapshot(model), [m.training for m in model.modules()]
    requires = [p.requires_grad for p in model.parameters()]
    states = torch.get_rng_state(), random.getstate()
    symmetry = pathcond.find_symmetry(model, inputs)
    assert unchanged(model, before)
    pathcond.rescale_(model, symmetry, torch.zeros(symmetry.num_units))
    with pytest.raises(pathcond.RescalingError):
        pathcond.rescale_(model, symmetry, torch.full((symmetry.num_units,), 1e6))
    assert unchanged(model, before)
    assert modes == [m.training for m in model.modules()]
    assert requires == [p.requires_grad for p in model.parameters()]
    assert hooks == list(model._forward_hooks)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1] == random.getstate()


def test_dropout_draws_the_same_numbers_before_and_after() -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)).double()
    symmetry = pathcond.find_symmetry(model, torch.randn(5, 3).double())
    report = pathcond.rescale_(model, symmetry, random_scales(symmetry))
    assert report.output_change_train < 1e-12


def test_wrapped_models_are_unwrapped() -> None:
    model, inputs = make("mlp")
    wrapped = nn.DataParallel(model)
    symmetry = pathcond.find_symmetry(wrapped, inputs)
    before = outputs(model, inputs, training=False)
    pathcond.rescale_(wrapped, symmetry, random_scales(symmetry))
    compiled = torch.compile(model, backend="eager")
    assert pathcond.find_symmetry(compiled, inputs).num_units == 9
    pathcond.rescale_(compiled, symmetry, random_scales(symmetry))
    torch.testing.assert_close(
        outputs(model, inputs, training=False), before, rtol=1e-12, atol=1e-12
    )


def test_distributed_data_parallel_is_unwrapped(tmp_path: object) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model, inputs = make("mlp")
        wrapped = nn.parallel.DistributedDataParallel(model)
        symmetry = pathcond.find_symmetry(wrapped, inputs)
        assert (
            pathcond.rescale_(wrapped, symmetry, random_scales(symmetry)).output_change_eval < 1e-12
        )
    finally:
        torch.distributed.destroy_process_group()


def test_tied_weights_are_scaled_once() -> None:
    model = Calls(
        lambda self, x: self.c(F.relu(self.a(x)) + F.relu(self.b(x))),
        a=nn.Linear(3, 4),
        b=nn.Linear(3, 4),
        c=nn.Linear(4, 2),
    ).double()
    model.b.weight = model.a.weight
    inputs = torch.randn(5, 3).double()
    symmetry = pathcond.find_symmetry(model, inputs)
    assert symmetry.num_units == 4
    assert "b.weight" not in symmetry.factors(torch.zeros(4))
    assert pathcond.rescale_(model, symmetry, random_scales(symmetry)).output_change_eval < 1e-12
    assert model.b.weight is model.a.weight


def test_a_module_under_two_names_keeps_its_parameters() -> None:
    """Verification must put back what it replaced: every name, the very same object."""
    shared = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU())
    model = nn.Sequential(shared, nn.Sequential(shared), nn.Linear(3, 2)).double()
    before = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    x = torch.randn(6, 3).double()
    symmetry = pathcond.find_symmetry(model, x)
    pathcond.rescale_(model, symmetry, torch.full((symmetry.num_units,), 0.5).double())
    pathcond.diag_g(model, x)
    symmetry.log_scale_bounds(model)
    after = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    assert [(name, id(t)) for name, t in after] == [(name, id(t)) for name, t in before]
    assert all(isinstance(p, nn.Parameter) for p in model.parameters())


def test_ctrl_c_in_the_middle_of_writing_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = make("mlp")
    symmetry = pathcond.find_symmetry(model, inputs)
    twin, log_scales = copy.deepcopy(model), random_scales(symmetry)
    pathcond.rescale_(twin, symmetry, log_scales)
    write = rescale._Plan.write

    def interrupted(plan: rescale._Plan) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        write(plan)

    monkeypatch.setattr(rescale._Plan, "write", interrupted)
    # background processes of a shell ignore it
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            pathcond.rescale_(model, symmetry, log_scales)
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)
    assert unchanged(model, snapshot(twin))


class MomentumEncoder(nn.Module):
    """Part of the model is an average of another part, as the key encoder of MoCo is."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
        self.q[1].running_mean.normal_()
        self.q[1].running_var.uniform_(0.3, 2)
        self.k = copy.deepcopy(self.q).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q(x), self.k(x)


def test_copies_that_are_part_of_the_model_are_verified_with_it() -> None:
    torch.manual_seed(0)
    model = MomentumEncoder().double().eval()
    x = torch.randn(6, 5).double()
    before, weights = model(x), copy.deepcopy(model.state_dict())
    symmetry = pathcond.find_symmetry(model, x)
    log_scales = torch.linspace(-1, 1, symmetry.num_units)
    without_statistics = {f"q.{name}": t for name, t in model.k.named_parameters()}
    with pytest.raises(pathcond.RescalingError, match=r"give all of its state_dict\(\)"):
        pathcond.rescale_(model, symmetry, log_scales, copies=[without_statistics])
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    average = {f"q.{name}": t for name, t in model.k.state_dict().items()}
    pathcond.rescale_(model, symmetry, log_scales, copies=[average])
    for own, averaged in zip(model.q.state_dict().values(), average.values(), strict=True):
        torch.testing.assert_close(own, averaged)
    torch.testing.assert_close(model(x), before)
