"""Models, weights and files that try to make ``condition_`` corrupt something, or say what is not
so.
"""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

import pathcond
from pathcond import CoordinateDescent, ENorm, Exact, PathKernel, RescalingError, condition_, diag_g
from pathcond.capture.outputs import output_change
from pathcond.condition import prepare
from pathcond.criteria.problem import Problem
from pathcond.networks import mlp

from .cases import Calls


def net(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1]).double()


def unchanged(model: nn.Module, state: dict[str, Tensor]) -> bool:
    return all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


class Subclass(nn.Parameter):
    pass


@pytest.mark.parametrize("kind", ["subclass", "numpy"])
def test_shared_memory_of_any_kind_is_left_alone(kind: str) -> None:
    """Two weights over one memory: as subclasses of Parameter, or as overlapping views that torch
    knows no common storage of.
    """
    model, x = net(4, 4, 4, 2), torch.randn(8, 4).double()
    if kind == "subclass":
        model[0].weight = Subclass(model[0].weight.detach())
        model[2].weight = Subclass(model[0].weight.detach())
    else:
        flat = np.random.default_rng(0).normal(size=20)
        model[0].weight = nn.Parameter(torch.from_numpy(flat[:16]).view(4, 4))
        model[2].weight = nn.Parameter(torch.from_numpy(flat[4:]).view(4, 4))
    before = model(x).detach()
    report = condition_(model, x)
    assert output_change([before], [model(x).detach()]) < 1e-9
    assert any("shares memory" in pin.reason for pin in report.pinned)


def test_memory_that_is_shared_only_after_the_symmetry_was_found() -> None:
    model, x = net(4, 4, 4, 2), torch.randn(8, 4).double()
    prepared = prepare(model, x)
    model[2].weight.data = model[0].weight.data
    with pytest.raises(RescalingError, match="share memory"):
        condition_(model, prepared)


def test_prepared_models_read_the_buffers_that_the_model_has_now() -> None:
    model, x = mlp((8, 8), inputs=4, batch_norm=True).double().eval(), torch.randn(16, 4).double()
    model(x)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d):
            module.num_batches_tracked.fill_(1)
    prepared = prepare(model, x)
    state = {
        k: 10 * v if k.endswith("running_var") else v.clone() for k, v in model.state_dict().items()
    }
    model.load_state_dict(state, assign=True)
    fresh = copy.deepcopy(model)
    torch.testing.assert_close(
        condition_(model, prepared).log_scales, condition_(fresh, x).log_scales
    )


def test_gradients_that_cannot_be_written_are_refused_before_the_first_write() -> None:
    model, x = net(4, 4, 2), torch.randn(8, 4).double()
    with torch.inference_mode():
        gradient = torch.ones(4, 4).double()
    model[0].weight.grad = gradient
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(RescalingError, match="inference tensor"):
        condition_(model, x)
    assert unchanged(model, state)


@pytest.mark.parametrize("wrong", [-1, float("nan"), "small"])
@pytest.mark.parametrize("name", ["tolerance", "train_tolerance"])
def test_tolerances_that_are_none_are_refused_at_once(name: str, wrong: object) -> None:
    with pytest.raises(ValueError, match=f"{name}=.*give a number that is not negative"):
        condition_(net(4, 4, 2), torch.randn(8, 3), **{name: wrong})


def test_gradients_that_are_one_tensor_are_refused() -> None:
    model, x = net(4, 4, 4, 2), torch.randn(8, 4).double()
    model[0].weight.grad = model[2].weight.grad = torch.ones(4, 4).double()
    with pytest.raises(RescalingError, match="share memory"):
        condition_(model, x)


def test_optimizer_state_that_cannot_be_written_is_refused_before_the_first_write() -> None:
    model, x = net(4, 4, 2), torch.randn(8, 4).double()
    optimizer = torch.optim.Adam(model.parameters())
    model(x).sum().backward()
    optimizer.step()
    optimizer.state[model[2].weight]["exp_avg"] = torch.ones(1, 1).double().expand(2, 4)
    state, first = (
        copy.deepcopy(model.state_dict()),
        optimizer.state[model[0].weight]["exp_avg"].clone(),
    )
    with pytest.raises(RescalingError, match="cannot be written"):
        condition_(model, x, optimizer=optimizer)
    assert unchanged(model, state)
    assert torch.equal(optimizer.state[model[0].weight]["exp_avg"], first)


def test_scalar_parameters() -> None:
    model = Calls(
        lambda self, x: self.b((self.gain * self.a(x)).relu()), a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    ).double()
    model.gain = nn.Parameter(torch.tensor(3.0).double())
    x = torch.randn(5, 3).double()
    before = model(x).detach()
    report = condition_(model, x)
    torch.testing.assert_close(model(x), before)
    assert {sample.name for sample in report.diagonal} == {
        name for name, _ in model.named_parameters()
    }


def test_the_batch_is_not_written_into() -> None:
    model = nn.Sequential(
        nn.ReLU(inplace=True),
        nn.Linear(4, 8),
        nn.BatchNorm1d(8),
        nn.ReLU(inplace=True),
        nn.Linear(8, 2),
    ).double()
    x = torch.randn(16, 4).double()
    kept = x.clone()
    condition_(model, x)
    assert torch.equal(x, kept)


@pytest.mark.parametrize("seed", range(5))
def test_powers_of_two_never_make_it_worse_and_are_what_is_reported(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = (
        mlp((24, 6, 24), inputs=12).to(torch.bfloat16),
        torch.randn(8, 12, dtype=torch.bfloat16),
    )
    g, before = diag_g(model, x), model[1].weight.detach().clone()
    symmetry = pathcond.find_symmetry(model, x)
    report = condition_(model, x, criterion=PathKernel(), max_log_scale=1.0)
    assert report.rounded
    assert report.objective_after <= report.objective_before
    assert float(report.log_scales.abs().max()) <= 1.0
    assert report.objective_after == pytest.approx(
        Problem.of(symmetry, g).at(2 * report.log_scales).value
    )
    applied = (model[1].weight / before).detach().float().log()[:, 0]
    torch.testing.assert_close(
        applied, report.log_scales[list(symmetry.groups[0].units)].float(), atol=1e-6, rtol=0
    )


def test_half_precision_weights_next_to_zero_do_not_stop_it() -> None:
    torch.manual_seed(0)
    model, x = mlp((200, 200), inputs=100).half(), torch.randn(8, 100).half()
    with torch.no_grad():
        model[1].weight[0, 0] = 6e-8  # the least that float16 holds
    before = model(x).detach()
    report = condition_(model, x)
    assert float(report.log_scales.abs().max()) > 0
    assert output_change([before], [model(x).detach()]) < 1e-2


@pytest.mark.parametrize(
    "solver", [Exact(), CoordinateDescent(sweeps=500)], ids=lambda s: type(s).__name__
)
def test_energies_that_cancel(solver: pathcond.Exact) -> None:
    """One unit holds all but 1e-20 of the energy: what is left of E must be summed up, not
    subtracted.
    """
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1)).double()
    x = torch.randn(4, 1).double()
    symmetry = pathcond.find_symmetry(model, x)
    g = {
        "0.weight": torch.full((1, 1), 1e20).double(),
        "0.bias": torch.zeros(1).double(),
        "2.weight": torch.zeros(1, 1).double(),
        "2.bias": torch.ones(1).double(),
    }
    solution = pathcond.solve(symmetry, g, solver=solver)
    assert solution.converged
    # F = 2 log(1e20/X + 1) + log X: least at X = 1e20
    assert float(solution.log_scales[0]) == pytest.approx(math.log(1e20) / 2)


def test_nothing_to_condition_is_said() -> None:
    x = torch.randn(5, 4).double()
    frozen = net(4, 4, 2).requires_grad_(False)
    state = copy.deepcopy(frozen.state_dict())
    assert "nothing can be rescaled" in condition_(frozen, x).solution.message
    moved = condition_(frozen, x, frozen="move", criterion=PathKernel())
    assert "no trainable parameter" in moved.solution.message
    assert unchanged(frozen, state)
    for solver in (Exact(), ENorm(), CoordinateDescent()):
        assert condition_(nn.Linear(4, 2).double(), x, solver=solver).num_units == 0
    zero = net(4, 4, 2)
    for parameter in zero.parameters():
        nn.init.zeros_(parameter)
    assert torch.equal(zero(x), torch.zeros(5, 2).double())
    condition_(zero, x)
    assert torch.equal(zero(x), torch.zeros(5, 2).double())


def test_masked_logits_of_minus_infinity_are_no_change() -> None:
    mask = torch.tensor([0.0, -math.inf]).double()
    model = Calls(
        lambda self, x: self.b(self.a(x).relu()) + mask, a=nn.Linear(3, 4), b=nn.Linear(4, 2)
    ).double()
    assert condition_(model, torch.randn(5, 3).double()).output_change_eval < 1e-9


def test_batch_norm_by_its_other_name() -> None:
    """torch.batch_norm instead of the module: ε bounds the scales all the same."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = torch.batch_norm(
            self.a(x), self.weight, self.bias, self.mean, self.var, self.training, 0.1, 0.1, False
        )
        return self.b(F.relu(h))

    model = Calls(forward, a=nn.Linear(6, 8), b=nn.Linear(8, 2)).double()
    model.weight, model.bias = (
        nn.Parameter(torch.ones(8).double()),
        nn.Parameter(torch.zeros(8).double()),
    )
    model.register_buffer("mean", torch.zeros(8).double())
    model.register_buffer("var", torch.ones(8).double())
    report = condition_(model, torch.randn(32, 6).double())
    assert report.output_change_train <= 1e-2


def test_many_reasons_make_a_page() -> None:
    functions = [
        torch.sigmoid,
        torch.tanh,
        F.gelu,
        F.silu,
        F.softplus,
        F.mish,
        torch.sin,
        torch.cos,
        torch.exp,
        F.elu,
    ]

    class Many(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(2, 2) for _ in range(5 * len(functions)))

        def forward(self, x: Tensor) -> Tensor:
            return sum(
                functions[i % len(functions)](layer(x) + i) for i, layer in enumerate(self.layers)
            )

    from pathcond.report.page import conditioning_page

    assert "Pinned" in conditioning_page(condition_(Many(), torch.randn(3, 2)))


@pytest.mark.parametrize("solver", ["exact", Exact])
def test_solvers_are_objects(solver: object) -> None:
    with pytest.raises(TypeError, match=r"Exact\(\)"):
        condition_(net(4, 4, 2), torch.randn(5, 4).double(), solver=solver)


class WritesItsWeights(nn.Module):
    """6 → 9 → 4, with something written into the first weight by ``write``."""

    def __init__(self, write: Callable[[nn.Module], None]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(6, 9), nn.Linear(9, 4)
        self._write = write

    def forward(self, x: Tensor) -> Tensor:
        self._write(self)
        return self.b(torch.relu(self.a(x)))


@torch.no_grad()
def clamp_in_train_mode(model: nn.Module) -> None:
    if model.training:
        model.a.weight.clamp_(-0.1, 0.1)


def clamp_data_in_train_mode(model: nn.Module) -> None:
    if model.training:
        model.a.weight.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def normalise(model: nn.Module) -> None:
    model.a.weight.div_(model.a.weight.norm(dim=1, keepdim=True))


@torch.no_grad()
def write_through_a_view(model: nn.Module) -> None:
    torch.mul(model.a.weight[:2], 2, out=model.a.weight[:2])


@pytest.mark.parametrize("function", [pathcond.find_symmetry, prepare, condition_])
@pytest.mark.parametrize(
    "write",
    [clamp_in_train_mode, clamp_data_in_train_mode, normalise, write_through_a_view, None],
)
def test_models_that_write_their_weights_are_not_run_for_good(
    write: Callable[[nn.Module], None] | None, function: Callable[..., object]
) -> None:
    torch.manual_seed(0)
    if write is None:
        model: nn.Module = nn.Sequential(nn.Embedding(20, 6, max_norm=1.0), nn.Linear(6, 4))
        x = torch.randint(0, 20, (8, 3))
    else:
        model, x = WritesItsWeights(write), torch.randn(8, 6)
    before = copy.deepcopy(model.state_dict())
    refused = write not in (clamp_in_train_mode, clamp_data_in_train_mode)
    if refused and function is not pathcond.find_symmetry:
        with pytest.raises(pathcond.UnsupportedModelError, match="writes into its own parameter"):
            function(model, x)
    else:
        function(model, x)
    assert unchanged(model, before)


def test_attributes_are_what_they_were() -> None:
    def forward(self: Calls, x: Tensor) -> Tensor:
        self.calls += 1
        self.sizes.append(len(x))
        self.seen[len(self.seen)] = x
        if self.training:
            self.mean.mul_(0.9).add_(0.1 * x.mean(0))
        return self.b(torch.relu(self.a(x - self.mean)))

    torch.manual_seed(0)
    parts = {"a": nn.Linear(6, 9), "b": nn.Linear(9, 4), "mean": torch.zeros(6)}
    model = Calls(forward, **parts, calls=0, sizes=[], seen={})
    held = model.sizes, model.seen, model.mean
    assert condition_(model, torch.randn(8, 6) + 5).num_units == 9
    assert model.calls == 0
    assert (model.sizes, model.seen, model.mean) == held
    assert not model.sizes
    assert not model.seen
    assert not model.mean.any()


class Quantised(Tensor):
    """Whole numbers and a scale, which computes as their product and takes no in-place writes."""

    @staticmethod
    def __new__(cls, whole: Tensor, scale: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, whole.shape, dtype=scale.dtype)

    def __init__(self, whole: Tensor, scale: Tensor) -> None:
        self.whole, self.scale = whole, scale

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls(args[0].whole, args[0].scale)

        def product(value: object) -> object:
            return value.whole * value.scale if isinstance(value, cls) else value

        return func(*tree_map(product, args), **tree_map(product, kwargs or {}))


def test_weights_that_are_made_of_other_tensors_are_refused() -> None:
    model = mlp((9, 7), inputs=6, outputs=4)
    index = next(i for i, layer in enumerate(model) if isinstance(layer, nn.Linear))
    shape = model[index].weight.shape
    whole = torch.randint(-9, 9, shape)
    model[index].weight = nn.Parameter(Quantised(whole, torch.tensor(0.1)))
    with pytest.raises(RescalingError, match=f"{index}.weight .* is of class Quantised"):
        condition_(model, torch.randn(8, 6))


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("convert", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_sparse_inputs_are_refused_by_name(convert: Callable[[Tensor], Tensor]) -> None:
    model = Calls(lambda self, x, y: torch.sparse.mm(y, self.a(x)), a=nn.Linear(3, 2))
    with pytest.raises(pathcond.UnsupportedModelError, match=r"input 1 \(8, 8\) is sparse"):
        condition_(model, (torch.randn(8, 3), convert(torch.eye(8))))


class Keeper:
    """A hook, and an object that has one."""

    def __init__(self) -> None:
        self.found: dict[str, list[Tensor]] = defaultdict(list)

    def __call__(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.found["relu"].append(output)

    def hook(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self(module, inputs, output)


class KeepingModule(nn.Module):
    """A module beside the model whose method is a hook."""

    def hook(self, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        self.found = {"relu": [output]}


class Slots:
    __slots__ = ("found",)


HOOKS = ["object", "method", "closure", "slots", "partial", "default", "module", "for all modules"]


@pytest.mark.parametrize("kind", HOOKS)
def test_what_hooks_keep_is_held(kind: str) -> None:
    keeper: Any = {"slots": Slots, "module": KeepingModule}.get(kind, Keeper)()

    def keep(store: Any, module: nn.Module, inputs: tuple, output: Tensor) -> None:
        if isinstance(module, nn.ReLU):
            store.found = {"relu": [output]}

    def closure(*given: Any) -> None:
        keep(keeper, *given)

    def default(module: nn.Module, inputs: tuple, output: Tensor, store: Any = keeper) -> None:
        keep(store, module, inputs, output)

    hooks: dict[str, Any] = {
        "object": keeper,
        "closure": closure,
        "slots": closure,
        "partial": partial(keep, keeper),
        "default": default,
    }
    torch.manual_seed(0)
    model, x = mlp((9, 7), inputs=6, outputs=4), torch.randn(8, 6)
    relu = next(layer for layer in model if isinstance(layer, nn.ReLU))
    with ExitStack() as stack:
        if kind == "for all modules":
            everywhere = nn.modules.module.register_module_forward_hook(closure)
            stack.callback(everywhere.remove)
        else:
            relu.register_forward_hook(hooks.get(kind) or keeper.hook)
        model(x)
        before = keeper.found["relu"][-1]
        held = 7 if kind == "for all modules" else 9  # of the last ReLU, or the first
        assert condition_(model, torch.randn(8, 6)).num_units == 16 - held
        model(x)
        torch.testing.assert_close(keeper.found["relu"][-1], before)


@pytest.mark.parametrize("strides", [(1, 1), (4, 4), (12, 8), (9, 1)])
def test_elements_that_share_memory(strides: tuple[int, int]) -> None:
    torch.manual_seed(0)
    model, x = mlp((9, 7), inputs=6, outputs=4), torch.randn(8, 6)
    index = [i for i, layer in enumerate(model) if isinstance(layer, nn.Linear)][1]
    model[index].weight = nn.Parameter(torch.randn(200).as_strided((7, 9), strides))
    before = model(x)
    units = condition_(model, x).num_units
    assert units == 16 if strides == (9, 1) else units < 16
    torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
