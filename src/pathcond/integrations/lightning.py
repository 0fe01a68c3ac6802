"""PathCond in PyTorch Lightning.

trainer = lightning.Trainer(callbacks=[PathCondCallback(every=500)])
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from torch import nn

from ..capture.models import Inputs
from ..errors import UnsupportedModelError
from ..lifting.sample import Prepared
from ..report import Report
from ..wrappers import unwrap
from .batches import inputs_of, move_inputs
from .shared import ConditionedTraining, all_processes, counts_at, import_first, sharding_error

if TYPE_CHECKING:
    import lightning.pytorch as pl
else:
    pl = import_first("lightning.pytorch", "pytorch_lightning", extra="lightning")


class PathCondCallback(ConditionedTraining, pl.Callback):
    """Condition the model before its first step and, with ``every`` or ``schedule``, again while it
    trains.

    A resumed run goes on where its checkpoint was written: it is not conditioned again and
    teleports at the same steps. Every logger of the Trainer gets ``pathcond/objective_before``,
    ``pathcond/objective_after`` and so on. Averages that Lightning's own callbacks keep
    (StochasticWeightAveraging, EMAWeightAveraging) move along.

    Args:
        example_inputs: One batch of the model's inputs, as for ``pathcond.condition_``. Default:
            those of the first training batch; if the model is teleported, they go into every
            checkpoint, or a resumed run would measure on others.
        condition: False leaves the weights before the first step as they are.
        every: Optimizer steps between teleports, or "epoch"; None for no teleports.
        schedule: In place of ``every``: told the number of steps taken, it says whether to teleport
            now.
        module: Qualified name of the part to condition, for instance "net"; "" is all that
            ``forward`` does.
        inputs: Turns a training batch into the model's inputs. Default: a Tensor itself, the first
            element of a tuple or list.
        **options: Any other of ``pathcond.condition_``: ``criterion``, ``pace``, ``solver``,
            ``normalization``, ``copies``, ...

    Attributes:
        report: Of the last conditioning or teleport; None before the first.
        teleportation: The handle that ``pathcond.teleport`` returned; None where nothing is
            teleported.
    """

    def __init__(
        self, example_inputs: Inputs | Prepared | None = None, *, module: str = "", **settings: Any
    ) -> None:
        super().__init__(example_inputs, **settings)
        self.module = module
        self._started = False
        self._conditioned = False
        self._forget()

    def _forget(self) -> None:
        """Be as before the first run."""
        self.load_state_dict({"conditioned": False, "teleportation": None, "inputs": None})
        self.report = None

    @property
    def state_key(self) -> str:
        return self._generate_state_key(module=self.module)

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        sharded = (
            pl.strategies.FSDPStrategy,
            pl.strategies.DeepSpeedStrategy,
            pl.strategies.ModelParallelStrategy,
        )
        if isinstance(trainer.strategy, sharded):
            raise sharding_error(type(trainer.strategy).__name__)
        if stage == "fit" and trainer.global_step == 0:
            # what an earlier run of another Trainer left; a checkpoint is loaded after this
            self._forget()

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = False
        given = self.example_inputs if self.example_inputs is not None else self._batch_inputs
        if given is not None and self.has_work(self._fresh(trainer)):
            converted = (
                given
                if isinstance(given, Prepared)
                else trainer.precision_plugin.convert_input(given)
            )
            self._start(trainer, pl_module, move_inputs(converted, pl_module.device))

    def on_train_batch_start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._started and self.has_work(self._fresh(trainer)):
            example_inputs = (self.inputs or inputs_of)(batch)
            self._batch_inputs = example_inputs if self.teleports else None
            self._start(trainer, pl_module, example_inputs)

    def _fresh(self, trainer: pl.Trainer) -> bool:
        return trainer.global_step == 0 and not self._conditioned

    def _start(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, example_inputs: Inputs | Prepared
    ) -> None:
        def log(report: Report) -> None:
            for logger in trainer.loggers:
                logger.log_metrics(self.metrics(report), step=trainer.global_step)

        counts = self._counts() or counts_at(trainer.global_step, trainer.current_epoch)
        try:
            self.start(
                self._conditioned_part(pl_module),
                trainer.optimizers,
                example_inputs,
                fresh=self._fresh(trainer),
                counts=counts,
                epochs=trainer.current_epoch,
                on_report=log,
                copies=self._averages(trainer),
                group=all_processes()
                if isinstance(trainer.strategy, pl.strategies.DDPStrategy)
                else None,
            )
        except UnsupportedModelError as error:
            parts = ", ".join(
                name
                for name, part in pl_module.named_children()
                if next(part.parameters(), None) is not None
            )
            advice = (
                f"To condition a part of {type(pl_module).__name__} ({parts}): "
                "PathCondCallback(module=..., inputs=...)."
            )
            raise UnsupportedModelError(f"{error}\n{advice}") from error
        self._started = self._conditioned = True

    def _conditioned_part(self, pl_module: pl.LightningModule) -> nn.Module:
        if self.module:
            return pl_module.get_submodule(self.module)
        # the same parameters and modules; but what its forward logs is no step of training
        quiet = copy.copy(pl_module)
        vars(quiet).update(_trainer=pl_module._trainer, log=_nothing, log_dict=_nothing)
        return quiet

    def _averages(self, trainer: pl.Trainer) -> list[nn.Module]:
        """What callbacks such as EMAWeightAveraging keep of the conditioned part: it moves
        along.
        """
        models = [getattr(callback, "_average_model", None) for callback in trainer.callbacks]  # type: ignore[attr-defined]
        return [
            unwrap(model).get_submodule(self.module)
            for model in models
            if isinstance(model, nn.Module)
        ]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.teleportation is not None:
            self.teleportation.end_epoch()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.stop()

    def on_exception(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException
    ) -> None:
        self.stop()

    def _counts(self) -> dict[str, int] | None:
        return (
            self._loaded_counts if self.teleportation is None else self.teleportation.state_dict()
        )

    def state_dict(self) -> dict[str, Any]:
        held = self._batch_inputs
        inputs = None if held is None else move_inputs(held, "cpu")
        return {"conditioned": self._conditioned, "teleportation": self._counts(), "inputs": inputs}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._conditioned = state_dict["conditioned"]
        self._batch_inputs = state_dict["inputs"]
        self._loaded_counts: dict[str, int] | None = state_dict["teleportation"]
        self.teleportation = None  # made when the optimizers are there


def _nothing(*args: Any, **kwargs: Any) -> None:
    """In place of ``LightningModule.log``."""
