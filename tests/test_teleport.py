"""Teleportation: at the right steps, without changing the function, and without anything else
noticing.
"""

import copy
import gc
import inspect
import logging
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import pathcond
from pathcond.condition import ConditionOptions
from pathcond.errors import MismatchError
from pathcond.solvers import Solution, Solver
from pathcond.teleporting import Teleportation


class Nothing(Solver):
    """Leaves every unit where it is."""

    def solve(self, problem: Any) -> Solution:
        return Solution.nothing(problem.num_units, "nothing asked for")


class StochasticDepth(nn.Module):
    """A residual block that is left out half of the time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, 12), nn.Linear(12, width)

    def forward(self, x: Tensor) -> Tensor:
        kept = (
            (torch.rand(len(x), 1, dtype=x.dtype, device=x.device) < 0.5).to(x.dtype) * 2
            if self.training
            else 1.0
        )
        return x + kept * self.second(F.relu(self.first(x)))


class Checkpointed(nn.Module):
    """Recomputes its block in the backward pass."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, use_reentrant=False) if self.training else self.block(x)


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(6, 16),
        nn.BatchNorm1d(16),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(16, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    )


def data(steps: int, seed: int = 2, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(
        steps, 32, 6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return F.mse_loss(model(x), x[:, :3])


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    model.train()
    for x in batches:
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()


def example() -> Tensor:
    return data(1, seed=3)[0]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 1e-2)


def assert_same(one: Any, other: Any) -> None:
    """Bit for bit, in any nesting of dicts and lists."""
    if isinstance(one, Tensor):
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    else:
        assert one == other


# -- nothing else notices --------------------------------------------------------------------------


def test_identity_factors_are_training_without_it_bit_for_bit() -> None:
    """Dropout's draws, running statistics, gradients, optimizer state: all as they would have
    been.
    """
    results = []
    for teleporting in (False, True):
        model = network()
        optimizer = adam(model)
        if teleporting:
            handle = pathcond.teleport(optimizer, model, example(), every=1, solver=Nothing())
        torch.manual_seed(5)
        train(model, optimizer, data(20))
        results.append(
            (
                model.state_dict(),
                optimizer.state_dict(),
                [p.grad for p in model.parameters()],
                torch.get_rng_state(),
            )
        )
    assert handle.teleports == 20
    assert handle.left_out == 0
    assert "teleports=20, left_out=0" in repr(handle)
    assert_same(*results)


def test_addresses_modes_and_hooks_stay() -> None:
    model = network()
    optimizer = adam(model)
    handle = pathcond.teleport(optimizer, model, example(), every=5)
    model[3].eval()  # a part that its user keeps in eval mode
    before = [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
    modes = [module.training for module in model.modules()]
    weights = [p.detach().clone() for p in model.parameters()]
    for x in data(10):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
    assert handle.teleports == 2
    assert [t.data_ptr() for t in [*model.parameters(), *model.buffers()]] == before
    assert [module.training for module in model.modules()] == modes
    assert not any(torch.equal(p, w) for p, w in zip(model.parameters(), weights, strict=True))


def test_compiled_models_are_not_compiled_again() -> None:
    from torch._dynamo.utils import counters

    for compiled_in_place in (False, True):
        torch._dynamo.reset()
        model = network()
        trained: nn.Module = model
        if compiled_in_place:
            model.compile(backend="eager")
        else:
            trained = torch.compile(model, backend="eager")  # type: ignore[assignment]
        optimizer = adam(model)
        handle = pathcond.teleport(optimizer, trained, example(), every=2)
        train(trained, optimizer, data(2))
        counters.clear()
        with torch._dynamo.config.patch(error_on_recompile=True):
            train(trained, optimizer, data(10))
        assert handle.teleports == 6
        assert handle.left_out == 0
        assert not counters["graph_break"]
        assert counters["stats"]["unique_graphs"] == 0


# -- at the right steps ----------------------------------------------------------------------------


def test_a_teleport_is_condition_after_the_step() -> None:
    model = network()
    twin = copy.deepcopy(model)
    optimizer, other = adam(model), adam(twin)
    solver = pathcond.Exact()
    handle = pathcond.teleport(optimizer, model, example(), every=3, solver=solver)
    for i, x in enumerate(data(7), start=1):
        torch.manual_seed(i)
        train(model, optimizer, x[None])
        torch.manual_seed(i)
        train(twin, other, x[None])
        if i % 3 == 0:
            report = pathcond.condition_(twin, example(), solver=solver, optimizer=other)
    assert (handle.steps, handle.teleports) == (7, 2)
    assert handle.report is not None
    assert torch.equal(handle.report.log_scales, report.log_scales)
    assert handle.report.log_scales.abs().max() > 1e-3
    assert_same(
        (model.state_dict(), optimizer.state_dict()), (twin.state_dict(), other.state_dict())
    )


def test_micro_steps_of_accumulation_are_no_steps() -> None:
    model = network()
    optimizer = adam(model)
    handle = pathcond.teleport(optimizer, model, example(), every=2)
    for i, x in enumerate(data(12), start=1):
        loss_of(model, x).backward()
        if i % 3 == 0:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
    assert (handle.steps, handle.teleports) == (4, 2)


def test_gradients_that_accumulate_across_a_teleport_move_along() -> None:
    """Halfway through an accumulation, teleporting by hand: the step that follows sees gradients of
    the new coordinates.
    """
    model = network().double().eval()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    handle = pathcond.teleport(optimizer, model, example().double(), every=100)
    first, second = data(2, dtype=torch.float64)
    loss_of(model, first).backward()
    assert handle.now() is not None
    loss_of(model, second).backward()
    accumulated = [p.grad.clone() for p in model.parameters()]
    optimizer.zero_grad()
    (loss_of(model, first) + loss_of(model, second)).backward()
    for parameter, sums in zip(model.parameters(), accumulated, strict=True):
        torch.testing.assert_close(parameter.grad, sums, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_scaler_skips_are_no_steps(fused: bool) -> None:
    """A plain optimizer's step is not called; a fused one's is, and does nothing."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    asked: list[int] = []
    handle = pathcond.teleport(optimizer, model, example(), every=2)
    scheduled = pathcond.teleport(
        optimizer, model, example(), schedule=lambda step: bool(asked.append(step))
    )
    overflowing = {1, 3, 4, 6, 7}
    for i, x in enumerate(data(9)):
        optimizer.zero_grad()
        loss = loss_of(model, x) * (float("inf") if i in overflowing else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert handle.steps == scheduled.steps == 9 - len(overflowing)
    assert handle.teleports == 2
    assert asked == [1, 2, 3, 4]
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_schedule_epochs_and_removal() -> None:
    model = network()
    optimizer = adam(model)
    scheduled = pathcond.teleport(optimizer, model, example(), schedule=lambda step: step in (1, 4))
    by_epoch = pathcond.teleport(optimizer, model, example(), every="epoch")
    for _ in range(2):
        train(model, optimizer, data(3))
        by_epoch.end_epoch()
        scheduled.end_epoch()  # its schedule knows steps only
    assert (scheduled.teleports, by_epoch.teleports, by_epoch.epochs, by_epoch.steps) == (
        2,
        2,
        2,
        6,
    )
    scheduled.remove()
    by_epoch.remove()
    train(model, optimizer, data(3))
    assert (scheduled.steps, by_epoch.steps) == (6, 6)


def test_a_resumed_run_teleports_at_the_same_steps() -> None:
    def start() -> tuple[nn.Module, torch.optim.Optimizer, Teleportation]:
        model = network()
        optimizer = adam(model)
        return model, optimizer, pathcond.teleport(optimizer, model, example(), every=4)

    batches = data(14)
    whole, optimizer, handle = start()
    for i, x in enumerate(batches):
        torch.manual_seed(i)
        train(whole, optimizer, x[None])
    first, first_optimizer, first_handle = start()
    for i, x in enumerate(batches[:6]):
        torch.manual_seed(i)
        train(first, first_optimizer, x[None])
    saved = copy.deepcopy(
        (first.state_dict(), first_optimizer.state_dict(), first_handle.state_dict())
    )
    resumed, resumed_optimizer, resumed_handle = start()
    for part, state in zip((resumed, resumed_optimizer, resumed_handle), saved, strict=True):
        part.load_state_dict(state)
    for i, x in enumerate(batches[6:], start=6):
        torch.manual_seed(i)
        train(resumed, resumed_optimizer, x[None])
    assert (
        resumed_handle.state_dict()
        == handle.state_dict()
        == {"steps": 14, "epochs": 0, "teleports": 3, "left_out": 0}
    )
    assert_same(
        (resumed.state_dict(), resumed_optimizer.state_dict()),
        (whole.state_dict(), optimizer.state_dict()),
    )
    for wrong, error in (
        ({"step": 3}, ValueError),
        (None, TypeError),
        ([3, 0, 0, 0], TypeError),
        (handle.state_dict() | {"steps": -1}, ValueError),
    ):
        with pytest.raises(error, match="not the state of a teleport"):
            handle.load_state_dict(wrong)
    assert handle.steps == 14


# -- methods ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("every", [1, "epoch"])
def test_enorm_as_a_training_method(every: Any) -> None:
    """One cycle per iteration or per epoch is one ``solve`` and ``rescale_`` after each."""
    model = network()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin))
    options: dict[str, Any] = {"solver": pathcond.ENorm(), "normalization": "paper"}
    handle = pathcond.teleport(optimizer, model, example(), every=every, verify=False, **options)
    symmetry = pathcond.find_symmetry(twin, example(), normalization="paper")

    def balance() -> None:
        solution = pathcond.solve(symmetry, {}, solver=pathcond.ENorm(), model=twin)
        assert solution.log_scales.abs().max() > 0
        pathcond.rescale_(twin, symmetry, solution.log_scales, optimizer=other, verify=False)

    for epoch in range(2):
        for i, x in enumerate(data(3, seed=epoch)):
            torch.manual_seed(i)
            train(model, optimizer, x[None])
            torch.manual_seed(i)
            train(twin, other, x[None])
            if every == 1:
                balance()
        handle.end_epoch()
        if every == "epoch":
            balance()
    assert handle.teleports == (6 if every == 1 else 2)
    assert_same(
        (model.state_dict(), optimizer.state_dict()), (twin.state_dict(), other.state_dict())
    )
    assert "diag G" not in str(handle.report)  # which ENorm does not look at


def test_averages_of_the_model_keep_their_function() -> None:
    model = network()
    optimizer = adam(model)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    swa = AveragedModel(model, use_buffers=True)
    handle = pathcond.teleport(optimizer, model, example(), every=1000, copies=[ema, swa])
    x = data(1)[0]
    for _ in range(3):
        train(model, optimizer, data(4))
        ema.update_parameters(model)
        swa.update_parameters(model)
        with torch.no_grad():
            before = [averaged.eval()(x) for averaged in (ema, swa)]
            assert handle.now() is not None
            after = [averaged(x) for averaged in (ema, swa)]
        for one, other in zip(before, after, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    without = copy.deepcopy(ema)
    pathcond.condition_(model, example(), round_to_power_of_two=True)
    assert_same(without.state_dict(), ema.state_dict())  # only what is passed moves


def test_a_copy_of_another_model_is_refused() -> None:
    model = network()
    before = copy.deepcopy(model.state_dict())
    for wrong, why in (
        (nn.Linear(6, 16), r"has no 0\.weight"),
        ({"0.weight": torch.ones(2, 2)}, r"\(2, 2\) in a copy"),
    ):
        with pytest.raises(MismatchError, match=why):
            pathcond.condition_(model, example(), copies=[wrong])
    with pytest.raises(pathcond.RescalingError, match="share memory"):
        pathcond.condition_(model, example(), copies=[{"0.weight": model[0].weight.detach()}])
    assert_same(model.state_dict(), before)


# -- precision -------------------------------------------------------------------------------------


def test_autocast_around_the_step_changes_nothing() -> None:
    model = network()
    optimizer = adam(model)
    handle = pathcond.teleport(optimizer, model, example(), every=3)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        train(model, optimizer, data(6))
    assert (handle.teleports, handle.left_out) == (2, 0)
    assert handle.report is not None
    assert handle.report.output_change_eval is not None
    assert handle.report.output_change_eval < 1e-5  # of float32, not of bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_weights_move_by_powers_of_two(dtype: torch.dtype) -> None:
    model = nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 3)
    ).to(dtype)
    with torch.no_grad():
        model[0].weight.mul_(8)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
    handle = pathcond.teleport(optimizer, model, example().to(dtype), every=2)
    model.eval()
    outputs = []
    for x in data(4, dtype=dtype):
        optimizer.zero_grad()
        loss_of(model, x).backward()
        optimizer.step()
        outputs.append(model(x).detach())
    assert handle.teleports == 2
    assert handle.report is not None
    assert handle.report.rounded
    assert handle.report.output_change_eval == 0.0
    octaves = handle.report.log_scales / torch.tensor(2.0).double().log()
    assert torch.equal(octaves, octaves.round())


def test_float32_masters_of_bfloat16_weights() -> None:
    """The optimizer trains float32 masters; the model is their copy in bfloat16. Both move, and
    stay each other's copy.
    """
    model = nn.Sequential(
        nn.Linear(6, 16),
        nn.ReLU(),
        nn.LayerNorm(16),
        nn.Linear(16, 12),
        nn.ReLU(),
        nn.Linear(12, 3),
    ).bfloat16()
    with torch.no_grad():
        model[3].weight.mul_(16)
    masters = {name: p.detach().float().requires_grad_() for name, p in model.named_parameters()}
    optimizer = torch.optim.Adam(masters.values(), 1e-3)
    with pytest.raises(ValueError, match="holds none of the model's parameters"):
        pathcond.teleport(optimizer, model, example().bfloat16())
    handle = pathcond.teleport(optimizer, model, example().bfloat16(), every=2, copies=[masters])
    before = {name: master.detach().clone() for name, master in masters.items()}
    for x in data(6, dtype=torch.bfloat16):
        loss_of(model, x).backward()
        for name, parameter in model.named_parameters():
            masters[name].grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(masters[name].detach())
    assert (handle.teleports, handle.left_out) == (3, 0)
    # steps of 1e-3 alone do not
    assert (masters["3.weight"] / before["3.weight"]).detach().abs().log2().median().abs() >= 1
    in_full = copy.deepcopy(model).float()
    in_full.load_state_dict(masters)
    with torch.no_grad():
        torch.testing.assert_close(
            in_full(example()), model(example().bfloat16()).float(), rtol=0.1, atol=0.1
        )


# -- all kinds of training -------------------------------------------------------------------------


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    """Different learning rates and weight decay; the backbone's first layer is frozen."""
    model[0].requires_grad_(False)
    weights = [p for p in model.parameters() if p.dim() > 1 and p.requires_grad]
    others = [p for p in model.parameters() if p.dim() == 1 and p.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": weights, "weight_decay": 0.1},
            {"params": others, "lr": 1e-4, "weight_decay": 0.0},
        ],
        1e-3,
    )


class Images(nn.Module):
    """Convolutions in channels-last memory, for batches of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 8, 2),
            nn.ReLU(),
            nn.Conv2d(8, 4, 1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(8, 3),
        )
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(
            x.view(-1, 2, 3, 1).expand(-1, -1, -1, 2).contiguous(memory_format=torch.channels_last)
        )


@pytest.mark.parametrize(
    ("build", "make_optimizer"),
    [
        (network, grouped),
        (Images, adam),
        (
            lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), StochasticDepth(8), nn.Linear(8, 3)),
            adam,
        ),
        (
            lambda: nn.Sequential(
                Checkpointed(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8))),
                nn.Linear(8, 3),
            ),
            adam,
        ),
    ],
)
def test_kinds_of_training(
    build: Callable[[], nn.Module], make_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
) -> None:
    model = build()
    optimizer = make_optimizer(model)
    handle = pathcond.teleport(optimizer, model, example(), every=3)
    x, changes = data(1)[0], []
    for batch in data(9):
        model.train()
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    for _ in range(2):
        before = model.eval()(x)
        assert handle.now() is not None
        changes.append(float((model(x) - before).detach().abs().max()))
    assert (handle.teleports, handle.left_out) == (5, 0)
    assert max(changes) < 1e-4


@pytest.mark.slow
def test_ten_thousand_steps_leak_nothing_and_drift_nowhere() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    x, batches, changes = data(1)[0], data(50), []

    def measured() -> Tensor:
        with torch.no_grad():
            modes = model.training
            out = model.eval()(x)
            model.train(modes)
            return out

    original = Teleportation.now

    class Watched(Teleportation):
        def now(self) -> Any:
            before = measured()
            report = original(self)
            changes.append(float((measured() - before).abs().max() / before.abs().max()))
            return report

    handle = pathcond.teleport(optimizer, model, example(), every=10)
    handle.__class__ = Watched
    memory, objects = [], []
    for step in range(10_000):
        train(model, optimizer, batches[step % 50][None])
        if step % 1000 == 999:
            gc.collect()
            memory.append(_resident())
            objects.append(len(gc.get_objects()))
    assert (handle.steps, handle.teleports, handle.left_out) == (10_000, 1000, 0)
    assert len(changes) == 1000
    assert max(changes) < 1e-4
    assert objects[-1] - objects[2] < 1000  # not one object per teleport
    assert memory[-1] - memory[2] < 8 * 2**20
    assert loss_of(model, batches[0]).item() < 1.0


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# -- refusals --------------------------------------------------------------------------------------


def test_a_teleport_that_cannot_be_made_is_left_out_and_training_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    optimizer = adam(model)
    handle = pathcond.teleport(optimizer, model, example(), every=1)
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with caplog.at_level(logging.WARNING, "pathcond"):
        train(model, optimizer, data(10))
    assert (handle.steps, handle.teleports, handle.left_out) == (10, 0, 10)
    assert caplog.text.count("was left out") == 5
    assert "0.weight" in caplog.text


def test_state_that_cannot_be_moved_stops_the_run() -> None:
    model = network()
    optimizer = adam(model)
    pathcond.teleport(optimizer, model, example(), every=2)
    train(model, optimizer, data(1))
    optimizer.state[model[0].weight]["curvature"] = torch.ones(16, 6)
    with pytest.raises(MismatchError, match="curvature"):
        train(model, optimizer, data(1))


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"every": 0}, ValueError, "number of steps"),
        ({"every": "step"}, ValueError, "number of steps"),
        ({"every": True}, ValueError, "number of steps"),
        ({"solver": "exact"}, TypeError, "Exact"),
        ({"schedule": 5}, TypeError, "function"),
        ({"schedule": lambda: True}, TypeError, "function of one argument"),
        ({"on_teleport": None}, TypeError, "function of one argument"),
        ({"on_teleport": lambda report, step: None}, TypeError, "function of one argument"),
        ({"tolerance": -1}, ValueError, "not negative"),
        ({"train_tolerance": float("nan")}, ValueError, "not negative"),
        ({"optimizer": None}, TypeError, "optimizer is None"),
        ({"toleranse": 1.0}, TypeError, "toleranse"),
        ({"normalization": "none"}, ValueError, "absorb"),
    ],
)
def test_bad_settings_are_refused_at_once(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    model = network()
    given = {"optimizer": adam(model), "model": model, "example_inputs": example()} | options
    with pytest.raises(error, match=why):
        pathcond.teleport(**given)


@pytest.mark.parametrize("schedule", [{3}.__contains__, (3).__eq__, lambda step, every=3: False])
def test_anything_that_takes_one_argument_is_a_schedule(schedule: Any) -> None:
    model = network()
    pathcond.teleport(adam(model), model, example(), schedule=schedule).remove()


def test_parameters_that_no_optimizer_holds_are_pointed_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = network()
    with caplog.at_level(logging.WARNING, "pathcond"):
        pathcond.teleport(torch.optim.SGD(model[0].parameters(), 0.1), model, example())
    assert "4 trainable parameters are in no optimizer" not in caplog.text
    assert "6 trainable parameters are in no optimizer" in caplog.text
    assert "1.bias, 4.weight, ..." in caplog.text
    caplog.clear()
    wider = [*model.parameters(), nn.Parameter(torch.zeros(1))]
    with caplog.at_level(logging.WARNING, "pathcond"):
        pathcond.teleport(torch.optim.SGD(wider[1:], 0.1), model, example())
    assert "also trains 1 parameter outside of the model" in caplog.text
    assert "1 trainable parameter is in no optimizer" in caplog.text
    with pytest.raises(ValueError, match="holds none"):
        pathcond.teleport(torch.optim.SGD(network().parameters(), 0.1), model, example())


def test_options_that_are_passed_on_are_those_of_condition() -> None:
    own = {"model", "example_inputs", "criterion", "pace", "solver", "normalization", "optimizer"}
    taken = inspect.signature(pathcond.condition_).parameters.keys() - own
    assert ConditionOptions.__annotations__.keys() == taken
