"""Conditioning during training: the paper's Algorithm 1 (alg. ideal) as a hook on the optimizer.

    θ_{k+½} = D_k θ_k                       every few steps: the best rescaling; the
                                            optimizer's state moves along
    θ_{k+1} = θ_{k+½} − μ_k ∇L(θ_{k+½})     the optimizer's own step

What does not depend on the weights, the captured graph and its Symmetry, is found once.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Unpack

import torch
from torch import Tensor, nn

from .capture.models import Inputs, require_supported
from .capture.outputs import example_outputs
from .condition import ConditionOptions, condition_, prepare
from .criteria.criterion import Criterion
from .distributed.ranks import Ranks, refuse_unclear
from .errors import EnergyRangeError, MismatchError, RescalingError
from .interrupts import interruptible, uninterrupted
from .lifting.sample import Prepared
from .report import Report
from .rescaling.holdings import with_inner
from .rescaling.optimizer_state import Optimizers, list_optimizers, require_own
from .rescaling.rescale import list_copies, refuse_tolerances
from .solvers import Exact, Pace, Solver
from .solvers.solver import check_combination
from .symmetry.symmetry import Normalization
from .text import count_are, count_of, first_of
from .wrappers import unwrap

logger = logging.getLogger("pathcond")

EXAMPLES = ("other_inputs", "exclude", "max_samples")  # for the capture, which is made once
BETWEEN_STEPS = Exact(tolerance=1e-4)  # the next step moves the optimum by more than this
WRAPPER_FILE = inspect.getfile(torch.optim.Optimizer)
COUNTS = ("steps", "epochs", "teleports", "left_out")  # attributes that a checkpoint keeps
WARNINGS = 5  # of teleports that were left out, before they are only counted


def teleport(
    optimizer: Optimizers,
    model: nn.Module,
    example_inputs: Inputs | Prepared,
    *,
    every: int | Literal["epoch"] = 100,
    criterion: Criterion | None = None,
    pace: Pace = None,
    solver: Solver = BETWEEN_STEPS,
    normalization: Normalization = "batch",
    schedule: Callable[[int], bool] | None = None,
    on_teleport: Callable[[Report], object] = lambda report: None,
    **options: Unpack[ConditionOptions],
) -> Teleportation:
    """Condition a model again and again while it trains, without changing its function.

    After every N-th step that the optimizer really takes, the weights move to the best rescaling
    and the optimizer's state with them. Micro-steps of gradient accumulation and steps that a
    GradScaler skips are no steps. Training starts wherever the weights are: call ``condition_``
    before the first step.

    Args:
        optimizer: The optimizer of the model; all of them as a list, if there are several: the last
            one's steps count.
        model: As it is trained, wrapped or not.
        example_inputs: One batch, as for ``condition_``, or what ``prepare`` made.
        every: Steps between teleports, or "epoch": then ``Teleportation.end_epoch`` is to be
            called.
        criterion, pace: What is balanced, and whether the sum of its energies stays, as in
            ``condition_``.
        solver: ``Exact()``, ``CoordinateDescent()`` or ``ENorm()``, which every=1 makes the
            training method of Stock et al.
        normalization: As in ``condition_``.
        schedule: In place of ``every``: told the number of steps taken, it says whether to teleport
            now.
        on_teleport: Called with the report of each.
        **options: Any other of ``condition_``: ``optimizer_state``, ``copies``, ``verify``,
            ``train_tolerance``, ``group``, ...

    Returns:
        A handle: ``remove()`` ends it, ``state_dict()`` goes into the checkpoint.

    Raises:
        UnsupportedModelError: The model cannot be captured.
        MismatchError: From ``optimizer.step()``: the state of this optimizer cannot be moved. A
            teleport that is refused because of the weights at that moment (NaN, overflow) is left
            out with a warning instead, and training goes on.

    >>> import torch, pathcond
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... )
    >>> optimizer = torch.optim.Adam(model.parameters())
    >>> handle = pathcond.teleport(optimizer, model, torch.randn(16, 8), every=2)
    >>> for _ in range(5):
    ...     loss = model(torch.randn(16, 8)).square().mean()
    ...     loss.backward()
    ...     optimizer.step()
    >>> handle.steps, handle.teleports
    (5, 2)
    """
    check_combination(solver, criterion, pace)
    refuse_settings(every, schedule)
    if not _takes_one(on_teleport):
        raise TypeError(f"on_teleport={on_teleport!r}: give a function of one argument, the report")
    refuse_options("teleport", options)
    optimizers = list_optimizers(optimizer)
    if not optimizers:
        raise TypeError(
            "optimizer is None, and teleport counts the steps of one: give the optimizer that "
            "trains the model, or a list of them"
        )
    group = options.get("group")
    copies = list_copies(options.get("copies", ()))
    require_supported(unwrap(model), sharded=isinstance(example_inputs, Prepared))
    refuse_unclear(model, group)
    ranks = Ranks.of(model, group)
    # What is asked of the capture; a second time it must be the same.
    settings: dict[str, Any] = {
        "normalization": normalization,
        "approximate": options.get("approximate", False),
        "frozen": options.get("frozen", "keep"),
    }
    examples = {name: options[name] for name in EXAMPLES if name in options}  # type: ignore[literal-required]
    with ranks.together():
        prepared = prepare(model, example_inputs, criterion=criterion, **settings, **examples)
        _compare(optimizers, model, copies)
        # inputs that do not fit fail now
        example_outputs(unwrap(model), prepared.symmetry.example_inputs, {}, training=False)
    fingerprint = torch.tensor(list(prepared.symmetry.fingerprint.encode()), dtype=torch.uint8)
    ranks.same(
        "Symmetry",
        {"fingerprint": fingerprint, "num_units": torch.tensor(prepared.symmetry.num_units)},
    )
    passed: dict[str, Any] = {"describe": False, **options, **settings}
    passed = {name: value for name, value in passed.items() if name not in examples}
    passed |= {
        "criterion": criterion,
        "pace": pace,
        "solver": solver,
        "optimizer": optimizers,
        "copies": copies,
    }
    return Teleportation(model, prepared, every, schedule, on_teleport, passed)


class Teleportation:
    """A running teleport; made by ``teleport``.

    Attributes:
        steps: Steps that the optimizer has taken.
        epochs: Calls of ``end_epoch``.
        teleports: How often the weights were moved.
        left_out: How often they could not be.
        report: Of the last teleport.
    """

    def __init__(
        self,
        model: nn.Module,
        prepared: Prepared,
        every: int | Literal["epoch"],
        schedule: Callable[[int], bool] | None,
        on_teleport: Callable[[Report], object],
        options: dict[str, Any],
    ) -> None:
        self._model = model
        self._prepared = prepared
        self._options = options
        self._schedule = schedule
        self._stride = 1
        self._on_teleport = on_teleport
        if schedule is None and every != "epoch":
            self._schedule = lambda steps: steps % every == 0
            self._stride = every
        self._steps = self.epochs = self.teleports = self.left_out = 0
        self.report: Report | None = None
        self._decided = 0  # the step at which it was last looked whether to teleport
        # steps among those counted that a GradScaler may have skipped, still on the device
        self._skipped: Tensor | None = None
        last = with_inner(options["optimizer"][-1])
        # accelerate's cannot be
        hooked = next(found for found in last if hasattr(found, "_optimizer_step_post_hooks"))
        # Not a decorator: importing torch's compiler takes longer than the rest of this package.
        self._hook = hooked.register_step_post_hook(torch.compiler.disable(self._after_step))

    def __repr__(self) -> str:
        return (
            f"Teleportation(steps={self.steps}, epochs={self.epochs}, teleports={self.teleports}, "
            f"left_out={self.left_out})"
        )

    @property
    def steps(self) -> int:
        if self._skipped is not None:
            self._steps -= int(self._skipped)
            self._skipped = None
        return self._steps

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return  # a CUDA graph is being recorded: no step has been taken
        if _is_inner_call(optimizer):
            return  # a subclass goes on after its base's step
        # how a GradScaler tells fused optimizers to do nothing
        skipped = getattr(optimizer, "found_inf", None)
        if skipped is not None:
            skipped = (skipped.detach() > 0).long().sum()
            self._skipped = skipped if self._skipped is None else self._skipped + skipped
        self.step()

    def step(self) -> None:
        """Count one step, and teleport if it is time. The hook calls it; call it yourself after
        replaying a CUDA graph.
        """
        self._steps += 1
        if self._schedule is None or self._steps % self._stride:
            return  # not time even if no step was skipped: so the device is seldom waited for
        steps = self.steps
        if steps != self._decided:  # or this one was skipped
            self._decided = steps
            if self._schedule(steps):
                self.now()

    def end_epoch(self) -> None:
        """Tell that an epoch is over; teleports if ``every="epoch"``."""
        self.epochs += 1
        if self._schedule is None:
            self.now()

    def now(self) -> Report | None:
        """Teleport at once.

        Returns:
            What was done; None if it was refused, with a warning, and the model is as it was.
        """
        if torch._C._current_graph_task_id() != -1:
            raise MismatchError(
                "optimizer.step() was called inside backward(), when the gradients that later "
                "layers have passed on belong to the weights as they are. Teleport between steps: "
                "schedule=lambda step: False, and handle.now() after backward()."
            )
        try:
            with uninterrupted(), _one_thread(self._model), interruptible():
                report = condition_(self._model, self._prepared, **self._options)
        except MismatchError:
            raise
        except (RescalingError, EnergyRangeError) as error:
            self.left_out += 1
            if self.left_out <= WARNINGS:
                logger.warning("The teleport after step %d was left out. %s", self.steps, error)
            return None
        self.teleports, self.report = self.teleports + 1, report
        self._on_teleport(report)
        return report

    def remove(self) -> None:
        """End it; the weights stay where they are."""
        self._hook.remove()

    def state_dict(self) -> dict[str, int]:
        """What a resumed run needs to teleport at the same steps; plain numbers."""
        return {name: getattr(self, name) for name in COUNTS}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on counting where another run stopped."""
        if not isinstance(state, Mapping):
            raise TypeError(
                f"This is not the state of a teleport, which is a dict of {', '.join(COUNTS)}: "
                f"{state!r}"
            )
        missing = [key for key in COUNTS if not isinstance(state.get(key), int)]
        if missing:
            raise ValueError(f"This is not the state of a teleport: it has no {', '.join(missing)}")
        negative = [f"{key}={state[key]}" for key in COUNTS if state[key] < 0]
        if negative:
            raise ValueError(
                "This is not the state of a teleport, whose counts are not negative: "
                f"{', '.join(negative)}"
            )
        self._steps = self._decided = state["steps"]
        self._skipped = None
        self.epochs = state["epochs"]
        self.teleports = state["teleports"]
        self.left_out = state["left_out"]


@contextmanager
def _one_thread(model: nn.Module) -> Iterator[None]:
    """Run the body on one core if the model is on a GPU: what is then left to the CPU is too small
    to wake the others for.
    """
    threads = torch.get_num_threads()
    try:
        if any(parameter.is_cuda for parameter in model.parameters()):
            torch.set_num_threads(1)
        yield
    finally:
        if threads != torch.get_num_threads():
            torch.set_num_threads(threads)


def refuse_settings(every: Any, schedule: Any) -> None:
    """Raise if one of these cannot be used."""
    if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise ValueError(f'every={every!r}: give a number of steps, or "epoch"')
    if schedule is not None and not _takes_one(schedule):
        raise TypeError(
            f"schedule={schedule!r}: give a function of one argument, the number of steps, that "
            "says whether to teleport"
        )


def _takes_one(function: Any) -> bool:
    """Whether something can be called with one argument, as far as that can be known."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # written in C, without a signature
        pass
    return True


def refuse_options(what: str, options: Mapping[str, Any], *more: str) -> None:
    """Raise options that ``condition_`` does not have, or that it cannot use.

    Args:
        what: What they were given to.
        options: By name.
        more: Names of options that are allowed too.
    """
    known = {*ConditionOptions.__annotations__, *more}
    unknown = options.keys() - known
    if unknown:
        raise TypeError(
            f"{what} has no option {', '.join(sorted(unknown))}; beside its own it takes "
            f"{', '.join(sorted(known))}"
        )
    refuse_tolerances(options.get("tolerance"), options.get("train_tolerance"))


def _is_inner_call(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the step that has just ended was called by another step of the same optimizer
    (``super().step()``).
    """
    running = 0
    frame = sys._getframe(1)
    # torch's wrapper around a step calls the hooks; a step of a step has two of them
    while frame is not None:
        if frame.f_code.co_filename == WRAPPER_FILE and frame.f_code.co_name == "wrapper":
            running += frame.f_locals.get("self") is optimizer
        frame = frame.f_back  # type: ignore[assignment]
    return running > 1


def _compare(optimizers: list[torch.optim.Optimizer], model: nn.Module, copies: Any) -> None:
    """Refuse optimizers of another model; warn where they and the model do not hold the same
    parameters.
    """
    held = require_own(optimizers, unwrap(model), copies)
    masters = [copy for copy in copies if isinstance(copy, Mapping)]
    parameters = dict(unwrap(model).named_parameters())
    outside = [
        name
        for name, parameter in parameters.items()
        if id(parameter) not in held and not any(id(copy.get(name)) in held for copy in masters)
    ]
    masters_held = {id(tensor) for copy in masters for tensor in copy.values()}
    foreign = [
        p for p in held.values() if id(p) not in {id(p) for p in parameters.values()} | masters_held
    ]
    if foreign:
        logger.warning(
            "The optimizer also trains %s outside of the model. If any of them reads hidden units "
            "of this model (a second head), pass the module that holds both: pathcond sees only "
            "the model that it is given.",
            count_of(len(foreign), "parameter"),
        )
    training = [name for name in outside if parameters[name].requires_grad]
    if training:
        logger.warning(
            "%s in no optimizer given to teleport (%s): if another one trains them, pass both as a "
            "list, or its state is not rescaled.",
            count_are(len(training), "trainable parameter"),
            first_of(training),
        )
