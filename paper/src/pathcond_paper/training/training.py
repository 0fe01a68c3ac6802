"""The training engine: many runs of one architecture at once, with the data on the device and, on a
GPU, a step as one CUDA graph.

Runs of one seed start from the same weights and see the same batches, shifted and mirrored alike,
whatever their method and learning rate; all of that is drawn on the CPU, so it is the same on every
device. No step waits for Python: batches are picked on the device from the epoch's order, and
losses are summed up there.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathcond.rows import Job, Result
from pathcond.symmetry.symmetry import find_symmetry
from pathcond.teleporting import Teleportation, teleport

from ..data import Dataset, load
from ..figure import Place, Progress
from .augmenting import Shifts
from .methods import RATE
from .optimizers import OPTIMIZERS
from .recipe import Recipe, Run
from .stack import Balance, Stack
from .starting import Start, Starts
from .unfinished import State, Unfinished

# So that activations fit into memory: samples of all runs together, and of one. The latter divides
# the data sets, so that a compiled network is evaluated at one size.
EVALUATED_AT_ONCE, EVALUATED_OF_ONE = 2**17, 5_000
WARM_UPS = 3  # steps before a CUDA graph is recorded


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set on the device; images and points channel by channel of mean 0 and variance 1 over
    the training part.

    Attributes:
        x, y: Training inputs (n, ...) and classes, (n,), or of every token, (n, length).
        test_x, test_y: The same for testing.
    """

    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @classmethod
    def of(
        cls, dataset: Dataset, device: str, *, train: int | None = None, test: int | None = None
    ) -> Data:
        """Standardise a data set, or the first ``train`` and ``test`` samples of its two parts."""
        (x, y), (test_x, test_y) = dataset.train, dataset.test
        x = x[:train].to(device)
        y = y[:train].to(device)
        test_x = test_x[:test].to(device)
        test_y = test_y[:test].to(device)
        if x.dtype == torch.long:  # tokens
            return cls(x=x, y=y, test_x=test_x, test_y=test_y)
        x, test_x = x.float(), test_x.float()
        over = [axis for axis in range(x.dim()) if axis != 1]
        mean = x.mean(over, keepdim=True)
        deviation = x.std(over, keepdim=True)
        return cls(x=(x - mean) / deviation, y=y, test_x=(test_x - mean) / deviation, test_y=test_y)


@dataclass
class Curves:
    """How one run went; one value per epoch in every list.

    Attributes:
        train_loss, train_accuracy: Mean over the epoch's batches, as training saw them.
        fitted_loss, fitted_accuracy: Over the training set after the epoch, in eval mode.
        test_loss, test_accuracy: Over the test set.
        max_log_scale: Greatest |log λ| of the conditioning before training; 0 without.
        layer_scales: Mean log λ of every group of units, likewise.
        left_out: Teleports that were refused because of the weights at that moment.
        stopped_after: Epochs after which training was stopped and went on later.
    """

    train_loss: list[float] = field(default_factory=list)
    train_accuracy: list[float] = field(default_factory=list)
    fitted_loss: list[float] = field(default_factory=list)
    fitted_accuracy: list[float] = field(default_factory=list)
    test_loss: list[float] = field(default_factory=list)
    test_accuracy: list[float] = field(default_factory=list)
    max_log_scale: float = 0.0
    layer_scales: list[float] = field(default_factory=list)
    left_out: int = 0
    stopped_after: list[int] = field(default_factory=list)

    def to_dict(self) -> dict[str, object]:
        """Plain data: numbers of five digits, empty lists left out."""
        rounded = {
            name: [v if isinstance(v, int) else float(f"{v:.5g}") for v in values]
            for name, values in vars(self).items()
            if isinstance(values, list)
        }
        kept = {name: values for name, values in rounded.items() if values}
        return kept | {
            "max_log_scale": float(f"{self.max_log_scale:.5g}"),
            "left_out": self.left_out,
        }


def train(
    runs: Sequence[Run],
    recipe: Recipe,
    data: Data,
    progress: Progress = lambda share, what: None,
    starts: Starts | None = None,
    unfinished: Unfinished | None = None,
) -> list[Curves]:
    """Train runs together; deterministic for the same runs on the same device.

    Args:
        runs: What differs between them.
        recipe: What they share.
        data: On the device where to train.
        progress: Told the share of epochs done.
        starts: From an earlier call with the same recipe, so that no network is conditioned twice.
        unfinished: Where states are kept; training goes on from one that is there, and comes to the
            same curves.

    Returns:
        The curves, in the order of the runs.
    """
    if len(data.x) < recipe.batch:
        raise ValueError(f"{len(data.x)} samples do not fill a batch of {recipe.batch}")
    # Runs that are balanced after every step come first, then those after every epoch: a slice
    # each.
    places = sorted(
        range(len(runs)),
        key=lambda i: {"step": 0, "epoch": 1, None: 2}[recipe.methods[runs[i].method].balance],
    )
    with _repeatable(data.x.device):
        session = _Session([runs[i] for i in places], recipe, data, starts)
        if unfinished and (state := unfinished.load()):
            session.load_state(state)
        while (epoch := session.epochs) < recipe.epochs:
            session.epoch()
            progress((epoch + 1) / recipe.epochs, f"epoch {epoch + 1} of {recipe.epochs}")
            if unfinished:
                unfinished.keep(session.state)
    curves = dict(zip(places, session.finish(), strict=True))
    return [curves[i] for i in range(len(runs))]


class _Session:
    """Runs in training."""

    def __init__(
        self, runs: Sequence[Run], recipe: Recipe, data: Data, starts: Starts | None
    ) -> None:
        self.runs = runs
        self.recipe = recipe
        self.data = data
        device = data.x.device
        starts = starts or Starts(recipe, data.x[: recipe.batch])
        started = [starts.of(run.method, run.seed) for run in runs]
        models = [start.model for start in started]
        self.curves = [Curves(**start.describe_scales()) for start in started]
        compile_with = "inductor" if recipe.compiled and device.type == "cuda" else None
        self.stack = Stack(models, compile_with=compile_with)
        balanced = [recipe.methods[run.method].balance for run in runs]
        by_step = balanced.count("step")
        by_epoch = balanced.count("epoch")
        self.by_step = slice(0, by_step)
        self.by_epoch = slice(by_step, by_step + by_epoch)
        self.balance = None
        if by_step or by_epoch:
            example = data.x[: recipe.batch]
            self.balance = Balance(
                find_symmetry(
                    models[0], example, normalization="paper", approximate=recipe.approximate
                )
            )
        self.teleports = dict(self._teleports(starts))

        self.steps = len(data.x) // recipe.batch
        self.seeds = sorted({run.seed for run in runs})
        self.generators = [torch.Generator().manual_seed(seed) for seed in self.seeds]
        self.seed_of_run = torch.tensor([self.seeds.index(run.seed) for run in runs], device=device)
        self.order = torch.zeros(
            self.steps, len(self.seeds), recipe.batch, dtype=torch.long, device=device
        )
        self.position = torch.zeros(1, dtype=torch.long, device=device)
        self.rates = torch.tensor([run.learning_rate for run in runs], device=device)
        self.sums = torch.zeros(2, len(runs), device=device)  # of losses and of right answers
        self.optimizer = OPTIMIZERS[recipe.optimizer](
            list(self.stack.parameters.values()),
            self.rates,
            weight_decay=recipe.weight_decay,
            schedule=recipe.schedule,
            steps=self.steps * recipe.epochs,
            factors=_stack_factors(started),
        )
        self.shifts = Shifts(data.x, self.order.shape) if recipe.augment else None
        self.trained = [*self.stack.tensors(), *self.optimizer.tensors()]
        changed = [*self.trained, self.position, self.sums]
        self.step = _record_graph(self._step, changed) if device.type == "cuda" else self._step

    def _teleports(self, starts: Starts) -> Iterator[tuple[int, Teleportation]]:
        for i, run in enumerate(self.runs):
            method = self.recipe.methods[run.method]
            if method.teleports:
                if self.recipe.optimizer != "sgd":
                    raise ValueError("Only plain SGD, which has no state to move, teleports here")
                network = self.stack.network(i)
                optimizer = torch.optim.SGD(network.parameters(), lr=run.learning_rate)
                yield (
                    i,
                    teleport(
                        optimizer,
                        network,
                        starts.prepare_for(method),
                        schedule=self.recipe.teleports_after,
                        approximate=self.recipe.approximate,
                        **(method.condition or {}),
                    ),
                )

    def _step(self) -> None:
        """One step of all runs."""
        rows = self.order.index_select(0, self.position)[0]  # (seeds, batch)
        x, y = self.data.x[rows], self.data.y[rows]
        if self.shifts:
            x = self.shifts.apply(x, self.position)
        x, y = x[self.seed_of_run], y[self.seed_of_run]  # (runs, batch, ...)
        self.stack.train()
        with self._autocast():
            outputs = self.stack(x)
            losses = self._losses(outputs, x, y)
        # No run's loss depends on another's weights, so that the sum has each one's gradient.
        gradients = torch.autograd.grad(losses.sum(), list(self.stack.parameters.values()))
        with torch.no_grad():
            self.optimizer.step(gradients)
            if self.by_step.stop and self.balance:
                self.balance.cycle_(self.stack, self.by_step)
            self.sums[0] += losses
            if self.recipe.task == "classify":
                self.sums[1] += (outputs.argmax(-1) == y).float().flatten(1).mean(-1)
            self.position += 1

    def epoch(self) -> None:
        """One pass over the data, and an evaluation."""
        permutations = torch.stack(
            [torch.randperm(len(self.data.x), generator=generator) for generator in self.generators]
        )
        used = permutations[:, : self.steps * self.recipe.batch].view(
            len(self.seeds), self.steps, self.recipe.batch
        )
        self.order.copy_(used.transpose(0, 1))
        if self.shifts:
            self.shifts.draw(self.generators)
        self.position.zero_()
        self.sums.zero_()
        for _ in range(self.steps):
            self.step()
            for handle in self.teleports.values():
                handle.step()
        if self.balance and self.by_epoch.stop > self.by_epoch.start:
            self.balance.cycle_(self.stack, self.by_epoch)
        self._record("train", self.sums / self.steps)
        self._record("test", self._evaluate(self.data.test_x, self.data.test_y))
        if self.recipe.fitted:
            self._record("fitted", self._evaluate(self.data.x, self.data.y))

    @torch.no_grad()
    def _evaluate(self, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss and accuracy in eval mode, (2, runs)."""
        total = torch.zeros_like(self.sums)
        self.stack.train(False)
        size = max(1, min(EVALUATED_AT_ONCE // len(self.runs), EVALUATED_OF_ONE))
        for inputs, classes in zip(x.split(size), y.split(size), strict=True):
            with self._autocast():
                outputs = self.stack(inputs, shared=True)
                total[0] += (
                    len(inputs)
                    / len(x)
                    * self._losses(outputs, inputs.expand(len(self.runs), *inputs.shape), classes)
                )
            if self.recipe.task == "classify":
                right = (outputs.argmax(-1) == classes).float().flatten(1).mean(-1)
                total[1] += len(inputs) / len(x) * right
        return total

    def _losses(self, outputs: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Mean loss of every run, (runs,)."""
        if outputs.dtype == torch.bfloat16:
            outputs = outputs.float()
        if self.recipe.task == "reconstruct":
            return (outputs - x.flatten(2)).square().mean((1, 2))
        y = y.expand(outputs.shape[:-1])
        return (
            F.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none")
            .view(len(outputs), -1)
            .mean(-1)
        )

    def _autocast(self) -> torch.autocast | nullcontext[None]:
        if not self.recipe.bfloat16 or self.data.x.device.type != "cuda":
            return nullcontext()
        # a recorded step must cast anew
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=False)

    def _record(self, what: str, values: Tensor) -> None:
        losses, accuracies = values.tolist()
        for i, curves in enumerate(self.curves):
            getattr(curves, f"{what}_loss").append(losses[i])
            if self.recipe.task == "classify":
                getattr(curves, f"{what}_accuracy").append(accuracies[i])

    @property
    def epochs(self) -> int:
        """How many are done."""
        return len(self.curves[0].train_loss)

    def state(self) -> State:
        """All that another session of the same runs needs to go on after this epoch."""
        return {
            "trained": [tensor.detach().cpu() for tensor in self.trained],
            "generators": [generator.get_state() for generator in self.generators],
            "teleports": {i: handle.state_dict() for i, handle in self.teleports.items()},
            "curves": [vars(curves) for curves in self.curves],
        }

    @torch.no_grad()
    def load_state(self, state: State) -> None:
        """Go on from there; tensors stay where they are, as a recorded step expects."""
        for tensor, kept in zip(self.trained, state["trained"], strict=True):
            tensor.copy_(kept)
        for generator, kept in zip(self.generators, state["generators"], strict=True):
            generator.set_state(kept)
        for i, handle in self.teleports.items():
            handle.load_state_dict(state["teleports"][i])
        self.curves = [Curves(**curves) for curves in state["curves"]]
        for curves in self.curves:
            curves.stopped_after.append(self.epochs)

    def finish(self) -> list[Curves]:
        for i, handle in self.teleports.items():
            self.curves[i].left_out = handle.left_out
        return self.curves


def _stack_factors(started: Sequence[Start]) -> list[Tensor] | None:
    """The factors of learning rates of all runs, parameter by parameter, if some run has any."""
    if all(start.rate_factors is None for start in started):
        return None
    parameters = [dict(start.model.named_parameters()) for start in started]
    factors = [start.rate_factors or {} for start in started]
    return [
        torch.stack(
            [
                given.get(name, torch.ones_like(own[name]))
                for given, own in zip(factors, parameters, strict=True)
            ]
        ).detach()
        for name in parameters[0]
    ]


def _record_graph(step: Callable[[], None], changed: Sequence[Tensor]) -> Callable[[], None]:
    """The step as one CUDA graph; the warm-up that recording needs leaves no trace in what the step
    changes.
    """
    kept = [tensor.detach().clone() for tensor in changed]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for tensor, before in zip(changed, kept, strict=True):
            tensor.copy_(before)
    return graph.replay


@contextmanager
def _repeatable(device: torch.device) -> Iterator[None]:
    """Deterministic kernels, matrix products in TF32 (the settings of the process come back)."""
    precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn
    flags = cudnn.deterministic, cudnn.benchmark
    torch.set_float32_matmul_precision("high")
    cudnn.deterministic = True
    cudnn.benchmark = False
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(precision)
        cudnn.deterministic, cudnn.benchmark = flags


APART = ("method", "learning_rate", "seed")  # what runs that are trained together may differ in


def group_jobs(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs that can be trained together; those at the paper's learning rate first, so that a sweep
    that is cut short has them.
    """
    groups: dict[str, list[Job]] = {}
    for job in sorted(jobs, key=lambda job: job["learning_rate"] != RATE):
        shared = {key: value for key, value in job.items() if key not in APART}
        groups.setdefault(
            json.dumps([job["learning_rate"] == RATE, shared], sort_keys=True), []
        ).append(job)
    return list(groups.values())


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the runs of a preset share, as part of their jobs; ``train`` and ``test`` are numbers of
    samples, None for all.
    """

    dataset: str
    epochs: int
    batch: int = 128
    teleport_every: int = 1000
    train: int | None = None
    test: int | None = None


def train_jobs(
    jobs: Sequence[Job],
    build: Callable[[], nn.Module],
    place: Place,
    progress: Progress,
    **options: Any,
) -> Iterator[tuple[Job, Result]]:
    """Train a group of jobs that have ``Settings``; ``options`` are further ones of the
    ``Recipe``.
    """
    job = jobs[0]
    recipe = Recipe(
        build=build,
        epochs=job["epochs"],
        batch=job["batch"],
        teleport_every=job["teleport_every"],
        **options,
    )
    data = Data.of(
        load(job["dataset"], place.data), place.device, train=job["train"], test=job["test"]
    )
    runs = [Run(**{key: job[key] for key in APART}) for job in jobs]
    unfinished = Unfinished(jobs, place)
    found = train(runs, recipe, data, progress, unfinished=unfinished)
    for job, curves in zip(jobs, found, strict=True):
        yield job, curves.to_dict()
    unfinished.remove()


def epochs_to(target: float, accuracy: Sequence[float]) -> float:
    """The first epoch, counted from 1, after which an accuracy is reached; infinity if never.

    >>> epochs_to(0.99, [0.5, 0.992, 0.98])
    2
    """
    return next(
        (epoch for epoch, value in enumerate(accuracy, start=1) if value >= target), math.inf
    )
