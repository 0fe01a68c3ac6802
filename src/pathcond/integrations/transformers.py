"""PathCond in Hugging Face's Trainer.

trainer = transformers.Trainer(model, args, train_dataset=data)
trainer.add_callback(PathCondCallback(every=500, log=trainer.log))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..capture.isolation import isolated
from ..capture.models import Inputs
from ..interrupts import interruptible, uninterrupted
from ..lifting.sample import Prepared
from ..report import Report
from ..wrappers import unwrap
from .batches import first_batch, inputs_of, move_inputs
from .shared import ConditionedTraining, all_processes, counts_at, import_first, sharding_error

if TYPE_CHECKING:
    import transformers
else:
    transformers = import_first("transformers", extra="transformers")

# Where counts are kept in ``trainer_state.json``. No ExportableState:
# args.restore_callback_states_from_checkpoint would make a new callback of one, and inputs, solver
# and functions cannot go through JSON.
KEY = "pathcond"


class PathCondCallback(ConditionedTraining, transformers.TrainerCallback):
    """Condition the model before its first step and, with ``every`` or ``schedule``, again while it
    trains.

    A resumed run goes on where its checkpoint was written: it is not conditioned again and
    teleports at the same steps.

    Args:
        example_inputs: One batch of the model's inputs, as for ``pathcond.condition_``. Default:
            those of the first training batch, drawn beforehand such that training sees the same
            batches and random numbers as without. (Of a stream that cannot be begun twice that
            batch would be lost to training: give example inputs.)
        condition: False leaves the weights before the first step as they are.
        every: Optimizer steps between teleports, or "epoch"; None for no teleports.
        schedule: In place of ``every``: told the number of steps taken, it says whether to teleport
            now.
        inputs: Turns a training batch into the model's inputs. Default: a mapping without its
            labels, a Tensor itself, the first element of a tuple or list.
        log: Called with ``{"pathcond/objective_before": ..., ...}``: ``trainer.log`` sends them
            where the loss goes. Default: they are only written into ``trainer.state.log_history``.
        **options: Any other of ``pathcond.condition_``: ``criterion``, ``pace``, ``solver``,
            ``normalization``, ``copies``, ...

    Attributes:
        report: Of the last conditioning or teleport; None before the first.
        teleportation: The handle that ``pathcond.teleport`` returned; None where nothing is
            teleported.
    """

    def __init__(
        self,
        example_inputs: Inputs | Prepared | None = None,
        *,
        log: Callable[[dict[str, float]], object] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(example_inputs, **settings)
        self.log = log
        self._logged: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.fsdp or args.deepspeed:
            raise sharding_error("FSDP" if args.fsdp else "DeepSpeed")
        self.stop()  # of a run that was interrupted
        self.teleportation = self.report = self._logged = None
        model = unwrap(kwargs["model"])
        saved = state.stateful_callbacks.get(KEY)
        fresh = state.global_step == 0 and saved is None
        epochs = int(state.epoch or 0)
        if self.has_work(fresh):
            given = self.example_inputs
            if given is None:
                # The mode stays, all random states are brought back.
                with uninterrupted(), isolated(model, training=model.training), interruptible():
                    given = self._inputs_of(first_batch(kwargs["train_dataloader"]), model, args)
            self.start(
                model,
                innermost(kwargs["optimizer"]),
                move_inputs(given, next(model.parameters()).device),
                fresh=fresh,
                counts=saved or counts_at(state.global_step, epochs),
                epochs=epochs,
                group=all_processes(),
            )
        self._tell(state, control)

    def _inputs_of(self, batch: Any, model: nn.Module, args: Any) -> Any:
        if self.inputs is not None or not isinstance(batch, Mapping):
            return (self.inputs or inputs_of)(batch)
        labels = (
            transformers.utils.find_labels(type(model))
            if args.label_names is None
            else args.label_names
        )
        return {key: value for key, value in batch.items() if key not in labels}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._tell(state, control)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.teleportation is not None:
            self.teleportation.end_epoch()
        self._tell(state, control)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.stop()

    def _tell(self, state: Any, control: Any) -> None:
        """Put the counts where the next checkpoint takes them from, and log the report if it is
        new.
        """
        counts = counts_at(state.global_step, int(state.epoch or 0))
        state.stateful_callbacks[KEY] = (
            counts if self.teleportation is None else self.teleportation.state_dict()
        )
        if self.report is None or self.report is self._logged:
            return
        self._logged = self.report
        metrics = self.metrics(self.report)
        if self.log is None:
            state.log_history.append(metrics | {"step": state.global_step})
        else:
            due = control.should_log
            self.log(metrics)
            # Trainer.log takes any call for the one that was due, and would leave out the loss
            control.should_log = due


def innermost(optimizer: Any) -> torch.optim.Optimizer:
    """The torch optimizer inside accelerate's."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer  # type: ignore[no-any-return]
