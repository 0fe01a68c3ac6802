"""Ctrl-C at any moment leaves the model as it was, or completely rescaled, and the process around
it as it was.
"""

from __future__ import annotations

import contextlib
import dis
import functools
import logging
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

import pathcond
from pathcond import Curvature, interrupts
from pathcond.capture import isolation
from pathcond.interrupts import HELD, interruptible, uninterrupted
from pathcond.lifting.lifting import diag_g

from .strategies import DRAWS_ALL

PACKAGE = str(Path(pathcond.__file__).parent)
WATCHED = (PACKAGE, contextlib.__file__, torch.autograd.grad_mode.__file__)
# Where context managers are entered and left: an interrupt does most harm there.
WAYS_OUT = (contextlib.__file__, interrupts.__file__, isolation.__file__)
# A call after an interrupted one may show a few steps less, and end before it is stopped.
LOSES_STEPS = sys.version_info >= (3, 12)


@pytest.fixture(autouse=True)
def _heeds_ctrl_c() -> Iterator[None]:
    """Processes that a shell starts in the background ignore Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupt:
    """Sends a signal to this process at the N-th step that Python takes inside the watched files.

    Attributes:
        at: N; None for never.
        steps: How many there were.
        by_line: The steps of every line that was run.
    """

    def __init__(self, at: int | None) -> None:
        self.at = at
        self.steps = 0
        self.by_line: dict[tuple[str, int], list[int]] = {}

    def __enter__(self) -> Interrupt:
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(WATCHED):
            return None
        frame.f_trace_opcodes = True
        return self._stepped

    def _stepped(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and frame.f_lasti not in _offsets_of_nothing(frame.f_code):
            self.steps += 1
            if self.at is None:
                self.by_line.setdefault((frame.f_code.co_filename, frame.f_lineno or 0), []).append(
                    self.steps
                )
            if self.steps == self.at:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self._stepped


@functools.cache
def _offsets_of_nothing(code: CodeType) -> frozenset[int]:
    """Steps that do nothing, as the one that stands for ``try:``. Python answers no signal there,
    and does not count them as inside of the ``with`` around: only a tracer can stop at them.
    """
    steps = dis.get_instructions(code)
    return frozenset(step.offset for step in steps if step.opname == "NOP")


class Small(nn.Module):
    """Layers with a norm, a weight under two names and a module under two."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(3, 4),
            nn.BatchNorm1d(4, momentum=None),
            nn.Linear(4, 4),
        )
        self.again, self.last = self.second, nn.Linear(4, 2)
        self.bias = self.last.bias

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return self.last(torch.relu(self.again(x)))


class Trained:
    """A model that has been trained for a few steps, with gradients and optimizer state, in a
    mixture of modes.
    """

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = Small()
        self.inputs = torch.randn(6, 3)
        self.optimizer = torch.optim.Adam(self.model.parameters())
        for _ in range(2):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().sum().backward()
            self.optimizer.step()
        self.model.second.eval()
        self.old = self.snapshot()
        self.objects = self.identities()

    def tensors(self) -> dict[str, Tensor]:
        tables = [("model", dict(self.model.state_dict(keep_vars=True)))]
        tables += [("grad", {name: p.grad for name, p in self.model.named_parameters()})]
        tables += [(f"state {i}", state) for i, state in enumerate(self.optimizer.state.values())]
        return {
            f"{title} {name}": t
            for title, table in tables
            for name, t in table.items()
            if isinstance(t, Tensor)
        }

    def snapshot(self) -> dict[str, Tensor]:
        return {name: tensor.detach().clone() for name, tensor in self.tensors().items()}

    def identities(self) -> list[Any]:
        tables = [
            table for m in self.model.modules() for table in (m._parameters, m._buffers, m._modules)
        ]
        return [(id(table), [(name, id(held)) for name, held in table.items()]) for table in tables]

    def is_as_in(self, snapshot: dict[str, Tensor]) -> bool:
        now = self.tensors()
        return now.keys() == snapshot.keys() and all(
            torch.equal(now[name], value) for name, value in snapshot.items()
        )

    def back_to_old(self) -> None:
        with torch.no_grad():
            for name, tensor in self.tensors().items():
                tensor.copy_(self.old[name])


def has_hooks_on_saved_tensors() -> bool:
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
            return False
    except RuntimeError:
        return True


def surroundings(trained: Trained) -> list[Any]:
    """All that a call may change for a while, besides tensors."""
    return [
        trained.identities(),
        [module.training for module in trained.model.modules()],
        trained.model.norm.momentum,
        [signal.getsignal(number) for number in HELD],
        sys.stderr,
        logging.getLogger("torch").level,
        torch.is_grad_enabled(),
        has_hooks_on_saved_tensors(),
        [type(mode) for mode in torch.overrides._get_current_function_mode_stack()],
        [type(mode) for mode in _get_current_dispatch_mode_stack()],
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.backends.cuda.matmul.allow_tf32,
        torch.get_num_threads(),
        random.getstate(),
        torch.get_rng_state().tolist(),
    ]


def interrupt_everywhere(
    trained: Trained, call: Callable[[], object], points: int
) -> tuple[int, int]:
    """Interrupt ``call`` at so many steps, half of them where context managers are at work and one
    of them the last, and look each time at what it leaves behind.

    Returns:
        How often the model was the old one and how often the new one.
    """
    # The first ones fill caches and take more steps; Python 3.13 sees all steps of a line only once
    # it was traced before.
    for _ in range(3):
        with Interrupt(None) as whole:
            call()
        new = trained.snapshot()
        trained.back_to_old()
    around = surroundings(trained)
    found = [0, 0]
    draw = random.Random(0)
    at_work = [
        step for line in whole.by_line if line[0] in WAYS_OUT for step in whole.by_line[line]
    ]
    lines = draw.sample(sorted(whole.by_line), min(points - points // 2, len(whole.by_line)))
    steps = [draw.choice(whole.by_line[line]) for line in lines]
    steps[0] = max(step for taken in whole.by_line.values() for step in taken)  # all is written
    for at in steps + draw.sample(at_work, points // 2):
        try:
            with Interrupt(at):
                call()
        except KeyboardInterrupt:
            pass
        else:
            assert LOSES_STEPS, f"not interrupted at step {at}"
        line = next(line for line, taken in whole.by_line.items() if at in taken)
        assert surroundings(trained) == around, f"interrupted at {line}, step {at}"
        is_new = not trained.is_as_in(trained.old)
        assert not is_new or trained.is_as_in(new), (
            f"half of a rescaling, interrupted at {line}, step {at}"
        )
        found[is_new] += 1
        trained.back_to_old()
    return found[0], found[1]


@pytest.fixture
def trained() -> Trained:
    return Trained()


def test_conditioning_is_whole_or_not_at_all(trained: Trained) -> None:
    prepared = pathcond.prepare(trained.model, trained.inputs)
    old, new = interrupt_everywhere(
        trained,
        lambda: pathcond.condition_(trained.model, prepared, optimizer=trained.optimizer),
        points=200 if DRAWS_ALL else 70,
    )
    assert old > 0
    assert new > 0


def test_rescaling_is_whole_or_not_at_all(trained: Trained) -> None:
    symmetry = pathcond.find_symmetry(trained.model, trained.inputs)
    scales = torch.linspace(-0.5, 0.5, symmetry.num_units)
    old, new = interrupt_everywhere(
        trained,
        lambda: pathcond.rescale_(trained.model, symmetry, scales, optimizer=trained.optimizer),
        points=320 if DRAWS_ALL else 200,
    )
    assert old > 0
    assert new > 0


@pytest.mark.parametrize(
    ("what", "points"),
    [("capture", 24 if DRAWS_ALL else 16), ("path energies", 160), ("curvature", 60)],
)
def test_looking_at_a_model_leaves_everything_as_it_was(
    trained: Trained, what: str, points: int
) -> None:
    prepared = pathcond.prepare(trained.model, trained.inputs)
    g = diag_g(trained.model, prepared.sample)
    looks: dict[str, Callable[[], object]] = {
        "capture": lambda: pathcond.prepare(trained.model, trained.inputs),
        "path energies": lambda: diag_g(trained.model, prepared.sample),
        "curvature": lambda: Curvature(steps=1).energies(prepared.symmetry, g, trained.model),
    }
    assert interrupt_everywhere(trained, looks[what], points) == (points, 0)


def test_the_loop_that_puts_weights_back_finishes_whatever_is_raised_in_it(
    trained: Trained,
) -> None:
    """As another thread may raise (PyThreadState_SetAsyncExc), which cannot be put off: at every
    line of that loop.
    """
    prepared = pathcond.prepare(trained.model, trained.inputs)
    for lines in range(1, 30, 4):
        left = [lines]

        def stepped(frame: FrameType, event: str, argument: Any, left: list[int] = left) -> Any:
            if frame.f_code.co_name != "_put_back":
                return None
            left[0] -= event == "line"
            if not left[0]:
                sys.settrace(None)
                raise KeyboardInterrupt
            return stepped

        sys.settrace(stepped)
        with pytest.raises(KeyboardInterrupt):
            pathcond.condition_(trained.model, prepared)
        assert trained.identities() == trained.objects
        assert trained.is_as_in(trained.old)


def test_an_interrupt_is_never_lost_and_comes_once() -> None:
    done = []

    def body(error: Exception | None = None) -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            done.append("body")
            if error is not None:
                raise error

    with pytest.raises(KeyboardInterrupt):
        body()
    with pytest.raises(KeyboardInterrupt) as caught:
        body(ValueError("of the body"))
    assert done == ["body", "body"]
    assert isinstance(caught.value.__context__, ValueError)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_gets_through_while_the_model_runs_and_only_once() -> None:
    done = []

    def pressed_twice() -> None:
        with uninterrupted():
            try:
                with interruptible():
                    signal.raise_signal(signal.SIGINT)
                    done.append("never")
            finally:
                signal.raise_signal(signal.SIGINT)
                done.append("weights are back")

    def pressed_before() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            with interruptible():  # it has waited long enough
                done.append("never")

    with pytest.raises(KeyboardInterrupt):
        pressed_twice()
    with pytest.raises(KeyboardInterrupt):
        pressed_before()
    assert done == ["weights are back"]


def test_handlers_that_may_look_at_the_model_wait_until_it_is_whole() -> None:
    """As those of schedulers do, which save a checkpoint when the machine is taken away."""
    seen: list[str] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGUSR1)}
    try:
        signal.signal(signal.SIGUSR1, lambda number, frame: seen.append("saved"))
        signal.signal(signal.SIGINT, lambda number, frame: seen.append("stopped"))
        with uninterrupted():
            with interruptible():
                signal.raise_signal(signal.SIGUSR1)
                signal.raise_signal(signal.SIGINT)
                seen.append("model ran")
            seen.append("weights are back")
        assert seen == ["model ran", "weights are back", "saved", "stopped"]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_ignored_signals_and_other_threads_are_left_alone() -> None:
    handlers: list[Any] = []

    def look() -> None:
        with uninterrupted(), interruptible():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        look()
        signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)
    assert handlers == [signal.default_int_handler, signal.SIG_IGN]
