"""Several processes over gloo: copies (DistributedDataParallel) and shards (fully_shard) of one
model.
"""

import copy
import itertools
import logging
import os
import signal
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional as F

import pathcond
from pathcond import errors
from pathcond.distributed import ranks, sharding
from pathcond.lifting import lifting
from pathcond.rescaling import rescale

from .processes import FORKED

STEPS = 12


def network() -> nn.Sequential:
    """Widths that two processes cannot share evenly, one of them 1."""
    torch.manual_seed(1)
    sizes = (6, 13, 1, 7, 9, 3)
    layers = [
        layer
        for a, b in itertools.pairwise(sizes)
        for layer in (nn.Linear(a, b), nn.LeakyReLU(0.1))
    ]
    return nn.Sequential(*layers[:-1]).double()


def convolutional() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Conv2d(2, 5, 3),
        nn.BatchNorm2d(5),
        nn.ReLU(),
        nn.Conv2d(5, 6, 3, groups=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 3),
    ).double()


def data(shape: tuple[int, ...], seed: int = 2) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Tensor) -> None:
    for x in batches:
        optimizer.zero_grad()
        F.mse_loss(model(x), x.flatten(1)[:, :3]).backward()
        optimizer.step()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: value.full_tensor() if sharding.is_sharded(value) else value
        for name, value in model.state_dict().items()
    }


def shard(model: nn.Sequential, **options: Any) -> nn.Sequential:
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, **options)
    return fully_shard(model, **options)


def spawned(
    worker: Callable[..., Any], folder: Path, processes: int = 2, *arguments: Any
) -> list[Any]:
    """What ``worker(rank, *arguments)`` returns in each process."""
    if processes not in TEAMS:
        TEAMS[processes] = [_hire() for _ in range(processes)]
    team = TEAMS[processes]
    for rank, (_, connection) in enumerate(team):
        connection.send((rank, worker, processes, str(folder), arguments))
    try:
        for _, connection in team:
            failure = connection.recv()
            assert failure is None, failure
    except (AssertionError, EOFError):
        del TEAMS[processes]
        for process, _ in team:
            process.kill()
        raise
    return [torch.load(folder / f"result.{rank}", weights_only=False) for rank in range(processes)]


# Processes by how many work together. They stay: what they import at first use is then there.
TEAMS: dict[int, list[tuple[Any, Connection]]] = {}


def _hire() -> tuple[Any, Connection]:
    ours, theirs = multiprocessing.Pipe()
    process = FORKED.Process(target=_work, args=(theirs,), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _work(orders: Connection) -> None:
    while True:
        order = orders.recv()
        try:
            _run(*order)
            orders.send(None)
        except Exception:
            orders.send(f"process {order[0]}:\n{traceback.format_exc()}")


def _run(
    rank: int, worker: Callable[..., Any], processes: int, folder: str, arguments: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=processes
    )
    torch.save(worker(rank, *arguments), f"{folder}/result.{rank}")
    # gloo aborts a process whose peer closes the connection while it is still listening
    distributed.barrier()
    distributed.destroy_process_group()


def refusal(action: Callable[[], object]) -> tuple[str, str]:
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# -- copies ----------------------------------------------------------------------------------------


def copies(rank: int) -> Any:
    """Each process has half of every batch, and an example batch of its own."""
    model = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    handle = pathcond.teleport(optimizer, model, data((8, 6), seed=10 + rank), every=4)
    train(model, optimizer, data((STEPS, 16, 6))[:, rank::2])
    after = copy.deepcopy(model.module.state_dict())

    bare = refusal(lambda: pathcond.teleport(optimizer, model.module, data((8, 6))))
    named = pathcond.teleport(optimizer, model.module, data((8, 6)), group=distributed.group.WORLD)
    assert named.now() is not None

    before = copy.deepcopy(model.module.state_dict())
    if rank == 1:
        with torch.no_grad():
            model.module[0].weight[2, 3] += 1e-15
    drifted = copy.deepcopy(model.module.state_dict())
    diverged = refusal(handle.now)
    untouched = all(torch.equal(v, drifted[k]) for k, v in model.module.state_dict().items())
    model.module.load_state_dict(before)

    symmetry = pathcond.find_symmetry(model, data((8, 6)))
    other_scales = refusal(
        lambda: pathcond.rescale_(model, symmetry, torch.full((symmetry.num_units,), 0.1 * rank))
    )
    optimizer.state[model.module[0].weight]["odd"] = torch.ones(13, 6) if rank == 1 else 0
    one_refuses = refusal(
        lambda: pathcond.rescale_(
            model, symmetry, torch.ones(symmetry.num_units), optimizer=optimizer
        )
    )
    untouched &= all(torch.equal(v, before[k]) for k, v in model.module.state_dict().items())
    return {
        "weights": after,
        "state": optimizer.state_dict()["state"],
        "teleports": (handle.teleports, handle.left_out),
        "bare": bare,
        "diverged": diverged,
        "other_scales": other_scales,
        "one_refuses": one_refuses,
        "isolated": untouched,
    }


def test_copies_stay_the_same_and_one_that_differs_is_named(tmp_path: Path) -> None:
    first, second = spawned(copies, tmp_path)
    assert first["teleports"] == second["teleports"] == (3, 0)
    assert all(
        torch.equal(value, second["weights"][name]) for name, value in first["weights"].items()
    )
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    # the first process's batch counts
    pathcond.teleport(optimizer, model, data((8, 6), seed=10), every=4)
    train(model, optimizer, data((STEPS, 16, 6)))
    for name, value in model.state_dict().items():
        torch.testing.assert_close(first["weights"][name], value, rtol=1e-9, atol=1e-12)
    for result in (first, second):
        assert result["bare"][0] == "ValueError"
        assert "group=torch.distributed.group.WORLD" in result["bare"][1]
        assert result["diverged"][0] == "DivergedError"
        assert "rank 1 has other parameters than the other ranks: 0.weight" in result["diverged"][1]
        assert result["other_scales"][0] == "DivergedError"
        assert "rank 1 has other log-scales" in result["other_scales"][1]
        assert result["one_refuses"][0] == "MismatchError"
        assert "rank 1: " in result["one_refuses"][1]
        assert "'odd'" in result["one_refuses"][1]
        assert result["isolated"]


def redundant(rank: int) -> Any:
    """Adam whose state the processes share out among themselves, beside Adam; and a bare model, of
    which the user is told.
    """
    results = []
    for build in (
        torch.optim.Adam,
        lambda p, lr: ZeroRedundancyOptimizer(p, torch.optim.Adam, lr=lr),
    ):
        model = nn.parallel.DistributedDataParallel(network())
        optimizer = build(model.parameters(), 1e-2)
        handle = pathcond.teleport(optimizer, model, data((8, 6)), every=4)
        train(model, optimizer, data((STEPS, 16, 6))[:, rank::2])
        results.append((model.module.state_dict(), (handle.steps, handle.teleports)))
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pathcond").addHandler(handler)
    pathcond.condition_(network(), data((8, 6), seed=rank))
    return results, said


def test_state_that_is_shared_out_moves_too(tmp_path: Path) -> None:
    for ((weights, counts), (others, same_counts)), said in spawned(redundant, tmp_path):
        assert counts == same_counts == (STEPS, 3)
        for name, value in weights.items():
            torch.testing.assert_close(others[name], value, rtol=1e-9, atol=1e-12)
        assert [message for message in said if "a model of its own" in message]


def odd_one(rank: int) -> Any:
    model = nn.parallel.DistributedDataParallel(network())
    if rank == 0:
        with torch.no_grad():
            model.module[2].bias += 1
    return refusal(lambda: pathcond.condition_(model, data((8, 6))))


def test_of_three_the_odd_one_is_named_even_if_it_is_the_first(tmp_path: Path) -> None:
    for kind, message in spawned(odd_one, tmp_path, 3):
        assert kind == "DivergedError"
        assert "rank 0 has other parameters than the other ranks: 2.bias" in message
        assert "rank 1 has" not in message


def test_checksums_see_one_bit_and_the_order() -> None:
    tensor = torch.randn(40, 70)
    flipped, swapped, columns = tensor.clone(), tensor.clone(), tensor.clone()
    flipped.view(torch.int32)[3, 3] ^= 1
    swapped[0], swapped[1] = tensor[1], tensor[0]
    columns[:, 0], columns[:, 1] = tensor[:, 1], tensor[:, 0]
    sums = {
        ranks.checksum(t)
        for t in (tensor, flipped, swapped, columns, tensor.double(), torch.zeros(0))
    }
    assert len(sums) == 6
    assert ranks.checksum(tensor.t().contiguous().t()) == ranks.checksum(tensor)


# -- shards ----------------------------------------------------------------------------------------


class Gathered:
    """Notes how many elements of whole parameters are alive at a time."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self.most = 0

    def __call__(self, tensor: Tensor) -> Tensor:
        import weakref

        made = sharding.gather(tensor)
        if sharding.is_sharded(tensor):
            self.alive = [ref for ref in self.alive if ref() is not None] + [
                weakref.ref(made.untyped_storage())
            ]
            self.most = max(
                self.most, sum(ref().nbytes() // made.element_size() for ref in self.alive)
            )
        return made


def shards(rank: int, kind: str, options: dict[str, Any]) -> Any:
    build, shape = (network, (16, 6)) if kind == "network" else (convolutional, (8, 2, 8, 8))
    model = build()
    normalization = options["normalization"]
    prepared = pathcond.prepare(model, data(shape, seed=10), normalization=normalization)
    model = shard(model)
    report = pathcond.condition_(model, prepared, **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    handle = pathcond.teleport(optimizer, model, prepared, every=4, **options)
    train(model, optimizer, data((STEPS, *shape)))
    model.eval()
    with torch.no_grad():
        out = model(data(shape, seed=11))
    sharding.reshard(model)
    state = {
        k: {n: v.full_tensor() if sharding.is_sharded(v) else v for n, v in s.items()}
        for k, s in optimizer.state_dict()["state"].items()
    }
    return {
        "conditioned": report.log_scales,
        "scales": handle.report.log_scales,
        "weights": whole(model),
        "state": state,
        "out": out,
        "teleports": (handle.teleports, handle.left_out),
        "sharded": sharding.is_sharded(model[0].weight),
        "full": get_model_state_dict(
            model, options=dcp.state_dict.StateDictOptions(full_state_dict=True)
        ),
        "change": report.output_change_eval,
    }


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("network", {"normalization": "absorb"}),
        ("network", {"normalization": "absorb", "solver": pathcond.CoordinateDescent()}),
        ("network", {"normalization": "absorb", "solver": pathcond.ENorm()}),
        ("convolutional", {"normalization": "full"}),
        ("convolutional", {"normalization": "full", "criterion": pathcond.BalancedLayers()}),
    ],
    ids=["exact", "sweeps", "enorm", "convolutional", "layers"],
)
def test_shards_are_conditioned_as_the_whole_is(
    kind: str, options: dict[str, Any], tmp_path: Path
) -> None:
    first, second = spawned(shards, tmp_path, 2, kind, options)
    build, shape = (network, (16, 6)) if kind == "network" else (convolutional, (8, 2, 8, 8))
    model = build()
    report = pathcond.condition_(model, data(shape, seed=10), **options)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    handle = pathcond.teleport(optimizer, model, data(shape, seed=10), every=4, **options)
    train(model, optimizer, data((STEPS, *shape)))
    assert handle.report is not None
    assert report.log_scales.abs().max() > 0.05
    for result in (first, second):
        assert result["sharded"]
        assert result["change"] < 1e-12
        assert result["teleports"] == (handle.teleports, handle.left_out) == (3, 0)
        torch.testing.assert_close(result["conditioned"], report.log_scales, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(result["scales"], handle.report.log_scales, rtol=1e-5, atol=1e-7)
        for name, value in model.state_dict().items():
            torch.testing.assert_close(result["weights"][name], value, rtol=1e-6, atol=1e-9)
        for key, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                torch.testing.assert_close(result["state"][key][name], value, rtol=1e-5, atol=1e-10)
    assert all(
        torch.equal(value, second["weights"][name]) for name, value in first["weights"].items()
    )
    unsharded = build().eval()  # a checkpoint of the shards is one of the whole
    unsharded.load_state_dict(first["full"])
    with torch.no_grad():
        torch.testing.assert_close(
            unsharded(data(shape, seed=11)), first["out"], rtol=1e-12, atol=1e-13
        )


def deep() -> nn.Sequential:
    with torch.device("meta"):
        return nn.Sequential(
            *[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.ReLU())]
        )


def loaded(model: nn.Sequential, values: dict[str, Tensor]) -> nn.Sequential:
    """A model from the meta device with the values of an unsharded checkpoint."""
    model.to_empty(device="cpu")
    set_model_state_dict(
        model, dict(values), options=dcp.state_dict.StateDictOptions(full_state_dict=True)
    )
    return model


def careful(rank: int) -> Any:
    """A deep network from the meta device: what is gathered, what is refused, bfloat16 forwards."""
    torch.manual_seed(0)
    values = {name: torch.randn(p.shape) / 5 for name, p in deep().named_parameters()}
    batch = torch.randn(4, 32)
    prepared = pathcond.prepare(deep(), batch)
    model = loaded(shard(deep()), values)
    watch = Gathered()
    lifting.gather = watch  # type: ignore[assignment]
    pathcond.condition_(model, prepared)
    unprepared = refusal(lambda: pathcond.condition_(model, batch))
    twin = loaded(deep(), values)
    pathcond.condition_(twin, batch)
    sharded = whole(model)
    low = loaded(shard(deep(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)), values)
    report = pathcond.condition_(low, prepared)
    return {
        "most": watch.most / sum(p.numel() for p in model.parameters()),
        "unprepared": unprepared,
        "rounded": report.rounded,
        "same": all(
            torch.allclose(value, sharded[name], rtol=1e-5, atol=1e-7)
            for name, value in twin.state_dict().items()
        ),
        "change": report.output_change_eval,
    }


def test_no_process_gathers_the_whole_model(tmp_path: Path) -> None:
    for result in spawned(careful, tmp_path):
        assert 0 < result["most"] < 0.35  # of twelve layers, those at work
        assert result["unprepared"][0] == "UnsupportedModelError"
        assert "pathcond.prepare(model, batch) before fully_shard" in result["unprepared"][1]
        assert result["same"]
        assert result["rounded"]
        assert result["change"] == 0.0


class Raising(nn.Module):
    """Fails in forward once it is told to."""

    calls_left = 10**9

    def forward(self, x: Tensor) -> Tensor:
        Raising.calls_left -= 1  # attributes of the module itself come back after a trial
        if Raising.calls_left < 0:
            raise RuntimeError("no more")
        return x


def between(rank: int) -> Any:
    """Teleports in states that training leaves behind: after validation, between accumulations, in
    failing forwards.
    """
    model: Any = nn.Sequential(*network(), Raising())
    prepared = pathcond.prepare(model, data((8, 6)))
    fully_shard(model)  # the root alone, which a pass without backward leaves whole
    twin = nn.Sequential(*network(), Raising())
    optimizer, other = (torch.optim.SGD(m.parameters(), 0.05, momentum=0.9) for m in (model, twin))
    handle, expected = (
        pathcond.teleport(optimizer, model, prepared, every="epoch"),
        pathcond.teleport(
            other, twin, prepared, every="epoch", group=distributed.new_subgroups(1)[0]
        ),
    )
    for m, o, h in ((model, optimizer, handle), (twin, other, expected)):
        for epoch in range(2):
            train(m, o, data((3, 16, 6), seed=epoch))
            with torch.no_grad():
                m.eval()(data((16, 6)))
            m.train()
            h.end_epoch()
    after_validation = max(
        float((value - whole(model)[name]).abs().max()) for name, value in twin.state_dict().items()
    )

    before = {name: sharding.local(p).clone() for name, p in model.named_parameters()}
    failing = 0
    for passes in range(4):  # of verification go well, the next one does not
        Raising.calls_left = passes
        failing += handle.now() is None
    Raising.calls_left = 10**9
    kept = all(torch.equal(sharding.local(p), before[name]) for name, p in model.named_parameters())
    for m in (model, twin):
        m.zero_grad()
        F.mse_loss(m(data((16, 6))), data((16, 3))).backward()
    gradients = zip(model.parameters(), twin.parameters(), strict=True)
    kept &= all(
        torch.allclose(p.grad.full_tensor(), q.grad, rtol=1e-9, atol=1e-12) for p, q in gradients
    )
    model.zero_grad()

    model.set_requires_gradient_sync(False)
    F.mse_loss(model(data((16, 6))), data((16, 3))).backward()
    left_out = handle.left_out
    waiting = handle.now() is None and handle.left_out == left_out + 1
    return {
        "validation": after_validation,
        "failing": failing,
        "kept": kept,
        "waiting": waiting,
        "teleports": handle.teleports,
    }


def test_teleports_between_passes_of_shards(tmp_path: Path) -> None:
    for result in spawned(between, tmp_path):
        assert result["validation"] < 1e-12
        assert result["teleports"] == 2
        assert result["failing"] == 4
        assert result["kept"]
        assert result["waiting"]


def odd_cases(rank: int) -> Any:
    """A sharded model with a layer that is not, which drifts; uneven inputs under ``join``."""
    model: Any = network()
    prepared = pathcond.prepare(model, data((8, 6)))
    fully_shard(model, ignored_params={model[4].weight})
    if rank == 1:
        with torch.no_grad():
            model[4].weight[0, 0] += 1
    drifted = refusal(lambda: pathcond.condition_(model, prepared))
    copies = nn.parallel.DistributedDataParallel(network())
    optimizer = torch.optim.SGD(copies.parameters(), 0.1)
    handle = pathcond.teleport(optimizer, copies, data((8, 6)), every=100)
    with copies.join():
        joined = refusal(handle.now)
    return {"drifted": drifted, "joined": joined}


def test_parts_that_drift_and_processes_that_part(tmp_path: Path) -> None:
    for result in spawned(odd_cases, tmp_path):
        assert result["drifted"][0] == "DivergedError"
        assert "rank 1 has other parameters than the other ranks: 4.weight" in result["drifted"][1]
        assert result["joined"][0] == "MismatchError"


def on_a_mesh(rank: int) -> Any:
    """Four processes: two pairs that shard a model each, with a parameter that is not; and all four
    as replicas of shards.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    expected = pathcond.condition_(
        network(), data((8, 6)), group=distributed.new_subgroups(1)[0]
    ).log_scales
    differences = []
    for part, kept_whole in ((mesh["shard"], True), (mesh, False)):
        model: Any = network()
        prepared = pathcond.prepare(model, data((8, 6)))
        fully_shard(model, mesh=part, ignored_params={model[4].weight} if kept_whole else None)
        differences.append(
            float((pathcond.condition_(model, prepared).log_scales - expected).abs().max())
        )
    return differences


def test_meshes_of_some_and_of_all_processes(tmp_path: Path) -> None:
    for differences in spawned(on_a_mesh, tmp_path, 4):
        assert max(differences) < 1e-8


# -- a process that dies ---------------------------------------------------------------------------


def dying(rank: int, kind: str, moment: str, folder: str) -> Any:
    """Writes a checkpoint, then the last process dies while a rescaling is on its way."""
    model: Any = network()
    prepared = pathcond.prepare(model, data((8, 6)))
    model = nn.parallel.DistributedDataParallel(model) if kind == "copies" else shard(model)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    train(model, optimizer, data((3, 16, 6)))
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=f"{folder}/checkpoint")
    before = {name: sharding.local(p).clone() for name, p in model.named_parameters()}
    if rank == 1:
        place = (rescale._Plan, "write") if moment == "writing" else (rescale, "_verify")
        setattr(*place, lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL))
    failed = refusal(lambda: pathcond.condition_(model, prepared))
    kept = all(torch.equal(sharding.local(p), before[name]) for name, p in model.named_parameters())
    torch.save((failed, kept), f"{folder}/survivor.{rank}")
    os._exit(0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("moment", ["verifying", "writing"])
@pytest.mark.parametrize("kind", ["copies", "shards"])
def test_a_process_that_dies_leaves_a_checkpoint_that_loads(
    kind: str, moment: str, tmp_path: Path
) -> None:
    processes = [
        FORKED.Process(
            target=_run, args=(r, dying, 2, str(tmp_path), (kind, moment, str(tmp_path)))
        )
        for r in range(2)
    ]
    for process in processes:
        process.start()
    deadline = time.monotonic() + 120
    for process in processes:
        process.join(max(1.0, deadline - time.monotonic()))
    assert processes[1].exitcode == -signal.SIGKILL
    assert processes[0].exitcode == 0, "the survivor neither finished nor raised"
    failed, kept = torch.load(tmp_path / "survivor.0", weights_only=False)
    if moment == "verifying":
        assert failed[0]  # it says so ...
        assert kept  # ... and has written nothing
    else:
        assert not failed[0]
        assert not kept
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    weights, state = get_state_dict(model, optimizer)
    saved = {"model": weights, "optimizer": state}
    dcp.load(saved, checkpoint_id=str(tmp_path / "checkpoint"), no_dist=True)
    set_state_dict(
        model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"]
    )
    other = network()
    other_optimizer = torch.optim.Adam(other.parameters(), 1e-2)
    train(other, other_optimizer, data((3, 16, 6)))
    for name, value in other.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, rtol=1e-9, atol=1e-12)
    assert pathcond.condition_(model, data((8, 6)), optimizer=optimizer).output_change_eval < 1e-12


def test_kinds_of_errors_survive_the_way_between_processes() -> None:
    told = [None, ("TrainChangeError", "too much"), None]
    joint = ranks._joint(told)
    assert isinstance(joint, errors.TrainChangeError)
    assert str(joint) == "rank 1: too much"
    assert str(ranks._joint([("RescalingError", "no")] * 2)) == "no"
