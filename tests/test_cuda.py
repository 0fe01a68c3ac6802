"""On a GPU: the same log-scales as on the CPU, addresses that a recorded graph can rely on, sharded
parameters over NCCL.
"""

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.criteria.problem import Problem
from pathcond.networks import cifar_nv, mlp
from pathcond_paper.figure import Place
from pathcond_paper.training import training, unfinished
from pathcond_paper.training.methods import METHODS

from .test_indices import EDGES, Graph, RelativePositions

pytestmark = pytest.mark.cuda


def network() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(192, 5),
    )


def images(count: int = 16) -> Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_teleports_of_both_devices_agree(dtype: torch.dtype) -> None:
    reports = []
    for device in ("cpu", "cuda"):
        model = network().to(device, dtype)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        handle = pathcond.teleport(optimizer, model, images().to(device, dtype), every=1)
        F.mse_loss(
            model(images().to(device, dtype)), torch.ones(16, 5, device=device, dtype=dtype)
        ).backward()
        optimizer.step()
        assert (handle.teleports, handle.left_out) == (1, 0)
        assert handle.report is not None
        reports.append(handle.report)
    # bfloat16: one octave
    tolerance = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.7}[dtype]
    torch.testing.assert_close(
        reports[0].log_scales, reports[1].log_scales.cpu(), rtol=0, atol=tolerance
    )
    # A running variance plus ε is a power of two times what it was, up to the rounding of its type.
    largest = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 2.0**-7}[dtype]
    assert reports[1].output_change_eval < largest
    assert reports[1].rounded == (dtype == torch.bfloat16)


class ByMask(nn.Module):
    """Scales by 2 what a mask leaves out, unless there is nothing left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.layers(x)
        return h if mask.all() else torch.where(mask[..., None], h, 2 * h)


@pytest.mark.parametrize(
    ("build", "inputs"),
    [
        (RelativePositions, (torch.randn(2, 3, 8, 8),)),
        (Graph, (torch.randn(6, 3), EDGES)),
        (ByMask, (torch.randn(2, 6, 4), torch.ones(2, 6, dtype=torch.bool))),
        (lambda: nn.EmbeddingBag(7, 4), (torch.randint(0, 7, (3, 5)),)),
        (lambda: nn.EmbeddingBag(7, 4), (torch.randint(0, 7, (6,)), torch.tensor([0, 2, 4]))),
    ],
)
def test_sizes_that_would_end_the_process_are_given_up(
    build: Callable[[], nn.Module], inputs: tuple[Tensor, ...]
) -> None:
    model = build()
    on_cpu = pathcond.find_symmetry(model, inputs)
    on_gpu = pathcond.find_symmetry(model.cuda(), tuple(x.cuda() for x in inputs))
    torch.cuda.synchronize()
    assert on_gpu.num_units == on_cpu.num_units
    assert len(on_gpu.examples) == len(on_cpu.examples)
    pathcond.condition_(model, tuple(x.cuda() for x in inputs))
    torch.cuda.synchronize()


def test_a_large_problem_stays_on_the_device() -> None:
    model = nn.Sequential(
        nn.Linear(8, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 3)
    ).cuda()
    x = torch.randn(4, 8, device="cuda")
    symmetry, g = pathcond.find_symmetry(model, x), pathcond.diag_g(model, x)
    on_device = Problem.of(symmetry, g)
    on_host = Problem.of(symmetry, {name: values.cpu() for name, values in g.items()})
    assert on_device.device.type == "cuda"
    assert on_host.device.type == "cpu"
    here, there = pathcond.Exact().solve(on_host), pathcond.Exact().solve(on_device)
    torch.testing.assert_close(here.log_scales, there.log_scales.cpu(), rtol=0, atol=1e-6)


def test_a_recorded_training_step_goes_on_after_a_teleport() -> None:
    """The whole step is one CUDA graph, which reads and writes fixed addresses; ``handle.step``
    counts its replays.
    """
    model, twin = network().cuda(), network().cuda()
    inputs, target = images().cuda(), torch.ones(16, 5, device="cuda")
    batches = [images().cuda() + i for i in range(9)]

    def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)
        F.mse_loss(model(inputs), target).backward()
        optimizer.step()

    optimizers = [
        torch.optim.SGD(m.parameters(), 1e-2, momentum=0.9, foreach=True) for m in (model, twin)
    ]
    handle = pathcond.teleport(optimizers[0], model, inputs.clone(), every=4)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            train_step(model, optimizers[0])
            train_step(twin, optimizers[1])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        train_step(model, optimizers[0])
    assert handle.steps == 3  # recording is no step
    for m, o in ((twin, optimizers[1]),):
        m.load_state_dict(copy.deepcopy(model.state_dict()))
        o.load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    addresses = [t.data_ptr() for t in [*model.parameters(), *model.buffers()]]
    by_hand = pathcond.prepare(twin, inputs.clone())
    for i, batch in enumerate(batches, start=4):
        inputs.copy_(batch)
        graph.replay()
        handle.step()
        train_step(twin, optimizers[1])
        if i % 4 == 0:
            pathcond.condition_(
                twin, by_hand, solver=pathcond.Exact(tolerance=1e-4), optimizer=optimizers[1]
            )
    assert handle.teleports == 3
    assert [t.data_ptr() for t in [*model.parameters(), *model.buffers()]] == addresses
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_fused_steps_that_a_scaler_skips() -> None:
    model = network().cuda()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3, fused=True)
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    handle = pathcond.teleport(optimizer, model, images().cuda(), every=2)
    for i in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(images().cuda()).float().square().mean() * (
                float("inf") if i in (1, 2, 5) else 1.0
            )
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (handle.steps, handle.teleports, handle.left_out) == (5, 2, 0)


def test_sharded_parameters_on_the_device(tmp_path: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group(
        "nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        model = network().cuda()
        prepared = pathcond.prepare(model, images().cuda())
        twin = copy.deepcopy(model)
        for layer in (model[0], model[3], model[6], model):
            fully_shard(layer)
        optimizer = torch.optim.Adam(model.parameters(), 1e-3)
        handle = pathcond.teleport(optimizer, model, prepared, every=1)
        report = pathcond.condition_(model, prepared)
        expected = pathcond.condition_(twin, prepared)
        torch.testing.assert_close(
            report.log_scales.cpu(), expected.log_scales.cpu(), rtol=0, atol=1e-6
        )
        model(images().cuda()).square().mean().backward()
        optimizer.step()
        assert (handle.teleports, handle.left_out) == (1, 0)
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores", "ignore:The CUDA Graph is empty")
def test_compiled_by_inductor_without_recompiling() -> None:
    model = network().cuda()
    compiled = torch.compile(model, mode="reduce-overhead")  # CUDA graphs inside
    optimizer = torch.optim.SGD(model.parameters(), 1e-2, momentum=0.9)
    handle = pathcond.teleport(optimizer, compiled, images().cuda(), every=3)
    for i in range(12):
        if i == 4:
            torch._dynamo.config.error_on_recompile = True
        optimizer.zero_grad()
        torch.compiler.cudagraph_mark_step_begin()
        F.mse_loss(compiled(images().cuda() + i), torch.ones(16, 5, device="cuda")).backward()
        optimizer.step()
    torch._dynamo.config.error_on_recompile = False
    assert (handle.teleports, handle.left_out) == (4, 0)


@pytest.mark.parametrize(
    "build",
    [
        partial(mlp, (24, 24, 24), inputs=192, outputs=5, batch_norm=True),
        partial(cifar_nv, 5, width=8, final_norm=True),
    ],
)
def test_training_as_a_graph(
    build: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every method: recorded as step by step, twice the same bits, and close to the CPU."""
    x, y = (
        torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0)),
        torch.arange(256) % 5,
    )
    recipe = training.Recipe(build=build, epochs=3, batch=32, teleport_every=5, fitted=True)
    stacks = [[training.Run(method=method, learning_rate=0.01, seed=0)] for method in METHODS]
    if isinstance(build(), nn.Sequential) and isinstance(build()[0], nn.Flatten):
        stacks = [[run for stack in stacks for run in stack]]  # MLPs are trained together

    def trained(device: str) -> list[training.Curves]:
        data = training.Data(
            x=x.to(device), y=y.to(device), test_x=x[:64].to(device), test_y=y[:64].to(device)
        )
        return [curves for runs in stacks for curves in training.train(runs, recipe, data)]

    recorded = trained("cuda")
    assert recorded == trained("cuda")
    monkeypatch.setattr(training, "_record_graph", lambda step, changed: step)
    assert recorded == trained("cuda")
    for found, wanted in zip(recorded, trained("cpu"), strict=True):
        assert found.train_loss == pytest.approx(wanted.train_loss, rel=0.02)  # TF32


def test_a_training_that_was_stopped_goes_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the recorded step of another session."""
    monkeypatch.setattr(unfinished, "INTERVAL", 0.0)
    monkeypatch.setattr(unfinished, "origin", lambda device: {"commit": "a"})
    x = torch.randn(256, 3, 8, 8, generator=torch.Generator().manual_seed(0)).cuda()
    y = torch.arange(256).cuda() % 5
    data = training.Data(x=x, y=y, test_x=x[:64], test_y=y[:64])
    build = partial(cifar_nv, 5, width=8, final_norm=True)
    recipe = training.Recipe(build=build, epochs=4, batch=32, bfloat16=True, optimizer="momentum")
    runs = [training.Run(method="baseline", learning_rate=0.01, seed=0)]
    (whole,) = training.train(runs, recipe, data)

    def go_on(progress: Callable[[float, str], object]) -> training.Curves:
        kept = unfinished.Unfinished([{"seed": 0}], Place(device="cuda", unfinished=tmp_path))
        (curves,) = training.train(runs, recipe, data, progress, unfinished=kept)
        return curves

    def stop(share: float, what: str) -> None:
        if share == 0.75:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        go_on(stop)
    found = go_on(lambda share, what: None)
    assert found.stopped_after == [2]
    assert (found.train_loss, found.test_loss) == (whole.train_loss, whole.test_loss)
