"""The callbacks, in real Trainers of Lightning and transformers."""

from __future__ import annotations

import copy
import csv
import importlib
import logging
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import transformers
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

import pathcond
from pathcond.criteria.problem import Problem
from pathcond.integrations.batches import first_batch
from pathcond.integrations.lightning import PathCondCallback as LightningCallback
from pathcond.integrations.shared import import_first
from pathcond.integrations.transformers import PathCondCallback as TransformersCallback
from pathcond.solvers import Solution, Solver

from .strategies import further

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*does not have many workers"),
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.. is deprecated"),
    pytest.mark.filterwarnings("ignore:.*tensorboardX.*has been removed"),
    pytest.mark.filterwarnings("ignore:mkldnn_matmul failed"),  # CPUs without bfloat16
]

SAMPLES, BATCH = 32, 8
STEPS = SAMPLES // BATCH  # per epoch


@dataclass(frozen=True, kw_only=True)
class Nothing(Solver):
    """Leaves every unit at scale 1."""

    def solve(self, problem: Problem) -> Solution:
        return Solution.nothing(problem.num_units, "nothing")


@dataclass(frozen=True, kw_only=True)
class Double(Solver):
    """Doubles every unit's scale each time."""

    def solve(self, problem: Problem) -> Solution:
        return replace(
            Solution.nothing(problem.num_units, "doubled"),
            log_scales=torch.ones(problem.num_units).double().mul(2).log(),
        )


class Gated(nn.Module):
    """ReLU layers of uneven width, and a gate, whose value on the example batch enters diag(G);
    dropout if asked for.
    """

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(6, 24), nn.Linear(24, 5), nn.Linear(24, 5)
        self.last, self.dropout = nn.Linear(5, 3), nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dropout(self.first(x).relu())
        return self.last(self.second(x) * self.gate(x).sigmoid())


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(SAMPLES, 6, generator=generator),
        torch.randint(3, (SAMPLES,), generator=generator),
    )


def same(one: nn.Module, other: nn.Module) -> bool:
    """Bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def seeded(seed: int = 0) -> None:
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


class PowerCutError(Exception):
    pass


# -- Lightning -------------------------------------------------------------------------------------


class Lit(pl.LightningModule):
    """Trains ``Gated``."""

    def __init__(
        self,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
        lr: float = 0.05,
        **options: Any,
    ) -> None:
        super().__init__()
        self.net, self.loss = Gated(**options), nn.CrossEntropyLoss()
        self.make_optimizer, self.lr = optimizer, lr

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.make_optimizer(self.parameters(), lr=self.lr)


class OtherOrderEveryEpoch(Sampler[int]):
    """Reproducible shuffling: Lightning tells it the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(
            torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        )

    def __len__(self) -> int:
        return SAMPLES


def lightning_trainer(*callbacks: pl.Callback, **options: Any) -> pl.Trainer:
    settings = {"max_epochs": 1, "logger": False, "enable_checkpointing": False} | options
    quiet = {
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
    }
    return pl.Trainer(accelerator="cpu", callbacks=list(callbacks), **quiet, **settings)


def fitted(
    module: pl.LightningModule, *callbacks: pl.Callback, shuffle: bool = False, **options: Any
) -> pl.LightningModule:
    lightning_trainer(*callbacks, **options).fit(
        module, DataLoader(samples(), BATCH, shuffle=shuffle)
    )
    return module


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    loggers = [
        logging.getLogger(name)
        for name in ("lightning.pytorch", "pytorch_lightning", "transformers")
    ]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.mark.parametrize("given", [False, True])
def test_lightning_conditions_before_the_first_step(
    given: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With learning rate 0 the weights after training are those that condition_ gives."""
    module = Lit(torch.optim.SGD, lr=0.0)
    inputs = torch.randn(BATCH, 6) if given else samples()[:BATCH][0]
    by_hand, fresh = copy.deepcopy(module), copy.deepcopy(module)
    expected = pathcond.condition_(by_hand, inputs)
    callback = LightningCallback(inputs if given else None)
    with caplog.at_level(logging.INFO, "pathcond"):
        fitted(module, callback)
    assert same(module, by_hand)
    assert not same(module, fresh)
    assert torch.equal(callback.report.log_scales, expected.log_scales)
    assert callback.teleportation is None
    assert str(callback.report) in [record.getMessage() for record in caplog.records]


def test_lightning_options_and_the_part_to_condition() -> None:
    module = Lit(torch.optim.SGD, lr=0.0)
    by_hand = copy.deepcopy(module)
    pathcond.condition_(
        by_hand.net, samples()[:BATCH][0], solver=pathcond.ENorm(), normalization="paper"
    )
    fitted(module, LightningCallback(module="net", solver=pathcond.ENorm(), normalization="paper"))
    assert same(module, by_hand)


def test_lightning_leaves_fresh_weights_alone_if_told_to() -> None:
    module = Lit(torch.optim.SGD, lr=0.0)
    before = copy.deepcopy(module)
    callback = LightningCallback(condition=False)
    assert same(fitted(module, callback), before)
    assert callback.report is None


def test_lightning_counts_steps_not_batches_and_logs_them(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    callback = LightningCallback(every=2)
    fitted(Lit(), callback, logger=logger, accumulate_grad_batches=2, max_epochs=2)
    handle = callback.teleportation
    assert (handle.steps, handle.teleports, handle.epochs) == (2 * STEPS // 2, 2, 2)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["pathcond/seconds"]]
    # Lightning numbers the first step 0; it is also the step before which the model was
    # conditioned.
    assert [(int(row["step"]), float(row["pathcond/teleports"])) for row in rows] == [
        (0, 0),
        (1, 1),
        (3, 2),
    ]
    names = (
        "objective_before objective_after output_change_eval output_change_train max_abs_log_scale "
        "seconds teleports"
    )
    assert {key for key in rows[0] if key.startswith("pathcond/")} == {
        f"pathcond/{name}" for name in names.split()
    }
    assert float(rows[0]["pathcond/objective_after"]) < float(rows[0]["pathcond/objective_before"])
    assert float(rows[-1]["pathcond/max_abs_log_scale"]) == float(
        callback.report.log_scales.abs().max()
    )


def test_what_was_not_measured_is_not_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    fitted(Lit(), LightningCallback(verify=False), logger=logger)
    with open(Path(logger.log_dir) / "metrics.csv") as file:
        names = csv.DictReader(file).fieldnames
    assert "pathcond/objective_after" in names
    assert "pathcond/output_change_eval" not in names


class Validated(Lit):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.training_step(batch, batch_idx))


class CutPower(pl.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: pl.Trainer, *args: Any) -> None:
        if trainer.global_step == self.step:
            self.optimizer = trainer.optimizers[0]
            assert self.optimizer._optimizer_step_post_hooks
            raise PowerCutError


CHECKPOINTS = {
    "after an epoch": {"save_on_train_epoch_end": True},
    "after validation, before the epoch is over": {"save_on_train_epoch_end": False},
    "after the last step of an epoch": {"every_n_train_steps": STEPS},
}


@pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty")
@pytest.mark.parametrize("every", [3, "epoch"])
@pytest.mark.parametrize("saved", CHECKPOINTS)
def test_lightning_resumed_run_equals_the_uninterrupted_one(
    saved: str, every: Any, tmp_path: Path
) -> None:
    """Example inputs are those of the first batch: each epoch begins with another one, so the
    checkpoint must bring them along.
    """

    def run(
        epochs: int, *others: pl.Callback, checkpoint: Path | None = None
    ) -> tuple[Validated, LightningCallback]:
        seeded(7 if checkpoint else 0)  # other weights and random numbers, were they not loaded
        module, callback = Validated(), LightningCallback(every=every)
        saving = ModelCheckpoint(tmp_path, filename="{step}", save_top_k=-1, **CHECKPOINTS[saved])
        trainer = lightning_trainer(
            callback, saving, *others, max_epochs=epochs, enable_checkpointing=True
        )
        loader = DataLoader(samples(), BATCH, sampler=OtherOrderEveryEpoch())
        trainer.fit(
            module, loader, DataLoader(samples(), BATCH), ckpt_path=checkpoint, weights_only=False
        )
        return module, callback

    whole, expected = run(3)
    for file in tmp_path.iterdir():
        file.unlink()
    with pytest.raises(PowerCutError):
        run(3, cut := CutPower(STEPS + 2))
    assert not cut.optimizer._optimizer_step_post_hooks
    resumed, callback = run(3, checkpoint=tmp_path / f"step={STEPS}.ckpt")
    assert same(resumed, whole)
    assert callback.teleportation.state_dict() == expected.teleportation.state_dict()
    assert expected.teleportation.teleports == (4 if every == 3 else 3)


def test_lightning_conditions_each_run_of_a_callback_once() -> None:
    callback = LightningCallback(every=3)
    first = Lit()
    trainer = lightning_trainer(callback)
    trainer.fit(first, DataLoader(samples(), BATCH))
    trainer.fit_loop.max_epochs = 2
    trainer.fit(first, DataLoader(samples(), BATCH))  # goes on, and counts on
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (2 * STEPS, 2)
    second, by_hand = (Lit(torch.optim.SGD, lr=0.0) for _ in range(2))
    by_hand.load_state_dict(second.state_dict())
    pathcond.condition_(by_hand, samples()[:BATCH][0])
    callback.every = None
    assert same(fitted(second, callback), by_hand)  # a run of another model begins anew


def test_lightning_callback_that_changes_nothing_does_not_disturb_training() -> None:
    def run(*callbacks: pl.Callback) -> pl.LightningModule:
        seeded()
        return fitted(Lit(dropout=0.3), *callbacks, shuffle=True, max_epochs=2)

    callback = LightningCallback(every=1, solver=Nothing())
    assert same(run(callback), run())
    assert callback.teleportation.teleports == 2 * STEPS


@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
@pytest.mark.parametrize("given", [False, True])
def test_lightning_precision(precision: str, given: bool) -> None:
    callback = LightningCallback(samples()[:BATCH][0] if given else None, every=2)
    fitted(Lit(), callback, precision=precision)
    assert callback.teleportation.teleports == 2
    assert callback.report.num_units == 24 + 5
    assert callback.report.rounded == (precision == "bf16-true")


def test_lightning_schedule() -> None:
    callback = LightningCallback(schedule=lambda steps: steps in (1, 3))
    fitted(Lit(), callback)
    assert callback.teleportation.teleports == 2


class TwoOptimizers(Lit):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        others = [
            *self.net.second.parameters(),
            *self.net.gate.parameters(),
            *self.net.last.parameters(),
        ]
        return [
            torch.optim.Adam(self.net.first.parameters()),
            torch.optim.SGD(others, lr=0.1, momentum=0.9),
        ]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            optimizer.step()


def test_lightning_manual_optimization_with_two_optimizers(
    caplog: pytest.LogCaptureFixture,
) -> None:
    callback = LightningCallback(every=2)
    fitted(TwoOptimizers(), callback)
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (STEPS, 2)
    assert "in no optimizer" not in caplog.text


class Toggling(Lit):
    """Freezes the parameters of each other optimizer while one steps."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.net.first.parameters())
        rest = [p for name, p in self.net.named_parameters() if not name.startswith("first.")]
        return first, torch.optim.SGD(rest, 0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()
            self.untoggle_optimizer(optimizer)


def test_lightning_toggled_optimizers_need_frozen_parameters_to_move() -> None:
    with pytest.raises(
        pathcond.RescalingError, match=r'net.first.bias.*toggle_optimizer(.|\n)*frozen="move"'
    ):
        fitted(Toggling(), LightningCallback(every=2))
    callback = LightningCallback(every=2, frozen="move")
    fitted(Toggling(), callback)
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (STEPS, 2)


@pytest.mark.parametrize("make", [LightningCallback, TransformersCallback])
@pytest.mark.parametrize(
    ("settings", "error", "why"),
    [
        ({"evry": 2}, TypeError, "PathCondCallback has no option evry"),
        ({"every": 0}, ValueError, "number of steps"),
        ({"schedule": lambda: True}, TypeError, "of one argument"),
        ({"every": 2, "tolerance": -1.0}, ValueError, "not negative"),
        ({"optimizer": None}, TypeError, "no option optimizer"),
    ],
)
def test_settings_are_looked_at_when_a_callback_is_made(
    make: Callable[..., Any], settings: dict[str, Any], error: type[Exception], why: str
) -> None:
    with pytest.raises(error, match=why):
        make(**settings)
    make(solver=Nothing(), normalization="gain", pace=None, criterion=None, max_samples=8)


@pytest.mark.parametrize("module", ["", "net"])
@pytest.mark.parametrize(
    "average", [partial(StochasticWeightAveraging, 1e-30, swa_epoch_start=1), EMAWeightAveraging]
)
def test_lightning_averages_move_along(average: Callable[[], pl.Callback], module: str) -> None:
    """With learning rate 0 the function stays as it was: so must that of the average, which the
    model gets at the end.
    """
    model, x = Lit(torch.optim.SGD, lr=0.0), samples()[:][0]
    before = model(x)
    callback = LightningCallback(every=1, module=module, solver=Double())
    fitted(model, callback, average(), max_epochs=3)
    assert callback.teleportation.teleports == 3 * STEPS
    torch.testing.assert_close(model(x), before)


class LogsInForward(Lit):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.log("norm", y.norm(), on_epoch=True)
        return y


def test_lightning_forward_that_logs_is_followed_and_logs_only_what_trains() -> None:
    def logged(*callbacks: pl.Callback) -> Tensor:
        trainer = lightning_trainer(*callbacks)
        seeded()
        trainer.fit(LogsInForward(), DataLoader(samples(), BATCH))
        return trainer.callback_metrics["norm_epoch"]

    assert torch.equal(logged(LightningCallback(every=1, solver=Nothing())), logged())


class WithoutForward(Lit):
    forward = pl.LightningModule.forward

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch["x"]), batch["y"])


def test_lightning_says_how_to_name_the_part_and_its_inputs() -> None:
    data = DataLoader([{"x": x, "y": y} for x, y in samples()], BATCH)
    with pytest.raises(TypeError, match=r"is a dict with x, y.*inputs=lambda batch"):
        lightning_trainer(LightningCallback()).fit(WithoutForward(), data)
    with pytest.raises(
        pathcond.UnsupportedModelError,
        match=r"a part of WithoutForward \(net\): PathCondCallback\(module=",
    ):
        lightning_trainer(LightningCallback(inputs=lambda batch: batch["x"])).fit(
            WithoutForward(), data
        )
    callback = LightningCallback(inputs=lambda batch: batch["x"], module="net")
    lightning_trainer(callback).fit(WithoutForward(), data)
    assert callback.report.num_units == 24 + 5
    # asks for nothing that it does not need
    lightning_trainer(LightningCallback(condition=False)).fit(WithoutForward(), data)


def test_sharded_strategies_are_refused_with_what_to_do() -> None:
    trainer = SimpleNamespace(strategy=pl.strategies.ModelParallelStrategy(), global_step=0)
    with pytest.raises(
        ValueError, match=r"ModelParallelStrategy shards.*pathcond\.condition_.*pathcond\.prepare"
    ):
        LightningCallback().setup(trainer, Lit(), "fit")
    for arguments, name in (
        ({"fsdp": True, "deepspeed": None}, "FSDP"),
        ({"fsdp": None, "deepspeed": "zero.json"}, "DeepSpeed"),
    ):
        with pytest.raises(
            ValueError, match=rf"{name} shards.*pathcond\.condition_.*pathcond\.prepare"
        ):
            TransformersCallback().on_train_begin(SimpleNamespace(**arguments), None, None)


# -- transformers ----------------------------------------------------------------------------------


class Classifier(nn.Module):
    """A plain module as the Trainer takes it."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = Gated(dropout)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.net(x)
        return (
            {"logits": logits}
            if labels is None
            else {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}
        )


class Noisy(Dataset[dict[str, Tensor]]):
    """Samples that draw from every random state there is."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x, label = samples()[index]
        return {
            "x": x + 0.1 * torch.randn(6) + 0.1 * random.random() + 0.1 * numpy.random.rand(),
            "labels": label,
        }


def records() -> list[dict[str, Tensor]]:
    return [{"x": x, "labels": label} for x, label in samples()]


def llama() -> transformers.LlamaForCausalLM:
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    config = transformers.LlamaConfig(
        vocab_size=50, hidden_size=32, intermediate_size=64, num_hidden_layers=1, **heads
    )
    return transformers.LlamaForCausalLM(config)


def sentences() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(50, (SAMPLES, 7), generator=generator)
    return [{"input_ids": row, "labels": row} for row in tokens]


def transformers_trainer(
    model: nn.Module,
    data: Any,
    folder: Path,
    *callbacks: Any,
    optimizer: torch.optim.Optimizer | None = None,
    **options: Any,
) -> transformers.Trainer:
    settings = {
        "max_steps": STEPS,
        "save_strategy": "no",
        "learning_rate": 0.01,
        "logging_strategy": "no",
    } | options
    arguments = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=BATCH,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **settings,
    )
    trainer = transformers.Trainer(
        model,
        arguments,
        train_dataset=data,
        callbacks=list(callbacks),
        optimizers=(optimizer, None),
    )
    trainer.remove_callback(transformers.PrinterCallback)
    return trainer


def trained(
    model: nn.Module,
    data: Any,
    folder: Path,
    *callbacks: Any,
    resume: Path | None = None,
    **options: Any,
) -> Any:
    trainer = transformers_trainer(model, data, folder, *callbacks, **options)
    trainer.train(resume_from_checkpoint=str(resume) if resume else None)
    return trainer


@pytest.mark.parametrize("given", [False, True])
def test_transformers_conditions_before_the_first_step(
    given: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With learning rate 0 the weights after training are those that condition_ gives;
    BatchEncodings are inputs too.
    """
    model, data = llama(), sentences()
    tokens = torch.stack([row["input_ids"] for row in (data[-BATCH:] if given else data[:BATCH])])
    by_hand, fresh = copy.deepcopy(model), copy.deepcopy(model)
    expected = pathcond.condition_(by_hand, {"input_ids": tokens})
    callback = TransformersCallback(
        transformers.BatchEncoding({"input_ids": tokens}) if given else None
    )
    with caplog.at_level(logging.INFO, "pathcond"):
        trained(
            model, data, tmp_path, callback, learning_rate=0.0, train_sampling_strategy="sequential"
        )
    assert same(model, by_hand)
    assert not same(model, fresh)
    assert torch.equal(callback.report.log_scales, expected.log_scales)
    assert str(callback.report) in [record.getMessage() for record in caplog.records]


def test_transformers_takes_the_batch_that_training_begins_with(tmp_path: Path) -> None:
    seen: list[Tensor] = []

    class Remembers(Classifier):
        def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
            if labels is not None:
                seen.append(x)
            return super().forward(x, labels)

    drawn: list[Any] = []
    callback = TransformersCallback(inputs=lambda batch: drawn.append(batch) or {"x": batch["x"]})
    trained(Remembers(), records(), tmp_path, callback)
    assert len(seen) == STEPS
    assert torch.equal(drawn[0]["x"], seen[0])


def test_transformers_counts_steps_not_batches_and_logs_them(tmp_path: Path) -> None:
    callback = TransformersCallback(every=2)
    trainer = trained(
        Classifier(), records(), tmp_path, callback, gradient_accumulation_steps=2, max_steps=5
    )
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (5, 2)
    rows = [row for row in trainer.state.log_history if "pathcond/seconds" in row]
    assert [(row["step"], row["pathcond/teleports"]) for row in rows] == [(0, 0), (2, 1), (4, 2)]
    assert rows[0]["pathcond/objective_after"] < rows[0]["pathcond/objective_before"]
    assert rows[-1]["pathcond/max_abs_log_scale"] == float(callback.report.log_scales.abs().max())


@pytest.mark.parametrize(("strategy", "every"), [("steps", STEPS), ("epoch", "epoch")])
def test_transformers_log_function_gets_the_metrics_and_the_loss_is_logged_as_before(
    strategy: str, every: Any, tmp_path: Path
) -> None:
    class Listening(transformers.TrainerCallback):
        def __init__(self) -> None:
            self.heard: list[dict[str, float]] = []

        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any
        ) -> None:
            self.heard.append(dict(logs))

    def run(
        callback: TransformersCallback | None, folder: str
    ) -> tuple[Any, list[dict[str, float]]]:
        listening = Listening()
        seeded()
        trainer = transformers_trainer(
            Classifier(),
            records(),
            tmp_path / folder,
            listening,
            max_steps=2 * STEPS,
            logging_strategy=strategy,
            logging_steps=1,
        )
        if callback is not None:
            callback.log = trainer.log
            trainer.add_callback(callback)
        trainer.train()
        return trainer, listening.heard

    _, expected = run(None, "without")
    trainer, heard = run(TransformersCallback(every=every, solver=Nothing()), "with")
    assert [row["loss"] for row in heard if "loss" in row] == [
        row["loss"] for row in expected if "loss" in row
    ]
    ours = [row for row in heard if "pathcond/teleports" in row]
    assert [row["pathcond/teleports"] for row in ours] == [0, 1, 2]
    assert [row["step"] for row in trainer.state.log_history if "pathcond/teleports" in row] == [
        0,
        STEPS,
        2 * STEPS,
    ]


class Stop(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            raise PowerCutError


# The last step of an epoch, and one within.
@pytest.mark.parametrize(
    ("saved", "every"),
    [(STEPS, 3), (STEPS + 1, "epoch"), *further((STEPS, "epoch"), (STEPS + 1, 3))],
)
def test_transformers_resumed_run_equals_the_uninterrupted_one(
    saved: int, every: Any, tmp_path: Path
) -> None:
    """The Trainer restores the order of the samples and the random numbers, so that dropout is the
    same.
    """

    def run(
        callback: TransformersCallback, *others: Any, folder: str, resume: Path | None = None
    ) -> nn.Module:
        seeded(7 if resume else 0)
        model = Classifier(dropout=0.3)
        # With restore_callback_states_from_checkpoint the Trainer replaces callbacks that export
        # their state by new ones.
        saving = {
            "save_strategy": "steps",
            "save_steps": saved,
            "restore_callback_states_from_checkpoint": True,
        }
        trained(
            model,
            records(),
            tmp_path / folder,
            callback,
            *others,
            resume=resume,
            max_steps=3 * STEPS,
            **saving,
        )
        return model

    expected, callback = (TransformersCallback(every=every) for _ in range(2))
    whole = run(expected, folder="whole")
    with pytest.raises(PowerCutError):
        run(TransformersCallback(every=every), Stop(saved + 1), folder="cut")
    resumed = run(callback, folder="cut", resume=tmp_path / "cut" / f"checkpoint-{saved}")
    assert same(resumed, whole)
    assert callback.teleportation.state_dict() == expected.teleportation.state_dict()
    assert expected.teleportation.teleports == (4 if every == 3 else 3)


def test_transformers_resumes_from_a_checkpoint_that_knows_nothing_of_it(tmp_path: Path) -> None:
    saving = {"save_strategy": "steps", "save_steps": 2}
    trained(Classifier(), records(), tmp_path, max_steps=2, **saving)
    callback = TransformersCallback(every=2)
    resumed = trained(
        Classifier(),
        records(),
        tmp_path,
        callback,
        resume=tmp_path / "checkpoint-2",
        max_steps=4,
        **saving,
    )
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (4, 1)
    # not conditioned
    assert [row["step"] for row in resumed.state.log_history if "pathcond/seconds" in row] == [4]


def test_transformers_callback_that_changes_nothing_does_not_disturb_training(
    tmp_path: Path,
) -> None:
    def run(*callbacks: Any) -> nn.Module:
        seeded()
        model = Classifier(dropout=0.3)
        trained(model, Noisy(), tmp_path, *callbacks, max_steps=2 * STEPS)
        return model

    callback = TransformersCallback(every=1, solver=Nothing())
    assert same(run(callback), run())
    assert callback.teleportation.teleports == 2 * STEPS


def test_transformers_trainer_that_was_interrupted_may_train_again(tmp_path: Path) -> None:
    callback, stop = TransformersCallback(every=2), Stop(3)
    trainer = transformers_trainer(Classifier(), records(), tmp_path, callback, stop)
    with pytest.raises(PowerCutError):
        trainer.train()
    trainer.remove_callback(stop)
    trainer.train()
    assert (callback.teleportation.steps, callback.teleportation.teleports) == (STEPS, 2)
    assert not trainer.optimizer.optimizer._optimizer_step_post_hooks


def test_transformers_optimizer_that_has_state_already_moves_along(tmp_path: Path) -> None:
    """As that of a Trainer that trains a second time."""

    class Look(transformers.TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.first = getattr(self, "first", None) or copy.deepcopy(
                optimizer.state_dict()["state"]
            )

    x, labels = samples()[:]
    model = Classifier()
    by_hand = copy.deepcopy(model)
    optimizer, expected = (
        torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, by_hand)
    )
    for one, its_optimizer in ((model, optimizer), (by_hand, expected)):
        one(x, labels)["loss"].backward()
        its_optimizer.step()
    pathcond.condition_(by_hand, {"x": x}, solver=Double(), optimizer=expected)
    trained(
        model,
        records(),
        tmp_path,
        TransformersCallback({"x": x}, solver=Double()),
        look := Look(),
        optimizer=optimizer,
    )
    for index, state in expected.state_dict()["state"].items():
        assert torch.equal(look.first[index]["momentum_buffer"], state["momentum_buffer"])


class DrawnHere(TensorDataset):
    """Refuses to be read by a worker."""

    def __getitem__(self, index: int) -> Any:
        assert torch.utils.data.get_worker_info() is None
        return super().__getitem__(index)


def test_the_first_batch_is_drawn_without_a_trace() -> None:
    def loader(**options: Any) -> DataLoader[Any]:
        generator = torch.Generator().manual_seed(3)
        return DataLoader(
            DrawnHere(*samples().tensors), BATCH, shuffle=True, generator=generator, **options
        )

    ours = loader(num_workers=1, persistent_workers=True, timeout=9)
    expected = next(iter(loader()))
    for _ in range(2):
        assert torch.equal(first_batch(ours)[0], expected[0])
    assert ours.num_workers == 1
    with pytest.raises(ValueError, match="no batch"):
        first_batch([])


def test_transformers_mixed_precision_is_analysed_as_written(tmp_path: Path) -> None:
    """accelerate puts autocast into the model's own forward, where rounded activations would pin
    every unit.
    """
    callback = TransformersCallback(every=2)
    model = Classifier()
    trained(model, records(), tmp_path, callback, bf16=True)
    assert "_original_forward" in vars(model)
    assert callback.report.num_units == 24 + 5
    assert callback.teleportation.teleports == 2


def test_transformers_labels_by_name(tmp_path: Path) -> None:
    """``label_names`` says which keys are no inputs; the default goes by the names of forward's
    arguments.
    """

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Gated()

        def forward(self, x: Tensor, target: Tensor | None = None) -> dict[str, Tensor]:
            logits = self.net(x)
            return (
                {"logits": logits}
                if target is None
                else {"loss": nn.functional.cross_entropy(logits, target)}
            )

    data = [{"x": x, "target": label} for x, label in samples()]
    callback = TransformersCallback()
    trained(Named(), data, tmp_path, callback, label_names=["target"])
    assert callback.report.output_change_eval < 1e-5


# -- libraries that are missing --------------------------------------------------------------------


def reimported(monkeypatch: pytest.MonkeyPatch, name: str, *missing: str) -> Any:
    """A module of ours, imported again where some others are not installed."""
    for other in missing:
        monkeypatch.setitem(sys.modules, other, None)
    monkeypatch.delitem(sys.modules, name)
    return importlib.import_module(name)


@pytest.mark.parametrize(
    ("framework", "missing"),
    [("lightning", ["lightning.pytorch", "pytorch_lightning"]), ("transformers", ["transformers"])],
)
def test_missing_library_is_named_with_the_extra_that_brings_it(
    framework: str, missing: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ImportError, match=rf'pip install "pathcond\[{framework}\]"'):
        reimported(monkeypatch, f"pathcond.integrations.{framework}", *missing)


def test_a_program_that_has_imported_one_of_two_libraries_gets_that_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Callbacks of ``lightning`` do not work in a Trainer of ``pytorch_lightning``, and the one
    brings the other along.
    """
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    assert import_first("colorsys", "json", extra="") is sys.modules["json"]
    assert import_first("colorsys", extra="") is sys.modules["colorsys"]


def test_pytorch_lightning_serves_where_lightning_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    older = pytest.importorskip("pytorch_lightning")
    callback = reimported(
        monkeypatch, "pathcond.integrations.lightning", "lightning.pytorch"
    ).PathCondCallback(every=2)

    class Module(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = Gated()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x)

        training_step = Lit.training_step
        loss = staticmethod(nn.functional.cross_entropy)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    trainer = older.Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )
    trainer.fit(Module(), DataLoader(samples(), BATCH))
    assert callback.teleportation.teleports == 2
