"""Ctrl-C and other signals wait while a model holds trial weights, or half of a rescaling.

A signal handler written in Python runs between two steps of whatever is being executed, and may
raise there: inside the loop that puts the weights back, or before its first line. So handlers are
put off while a model is not as its owner knows it, and Ctrl-C is let through only where the model
itself runs:

    with uninterrupted(), replaced(model, values):
        with interruptible():
            outputs = model(inputs)

An interrupt that is let through puts off all others, so that nothing stops the way out. That way
must begin at ``interruptible``, the last of a ``with``: an ExitStack, or the end of a context that
a generator makes, is Python code itself, and an interrupt in it would skip what lies around. Nor
may one of torch's modes lie around it: torch takes a mode off while it calls it, and an interrupt
would keep it from being put back. There ``let_interrupts_through`` opens between two steps.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

# Signals that people, schedulers and timers send. Ctrl-C is the first to wait and the last to
# come back.
NAMES = ("SIGINT", "SIGBREAK", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2")
HELD = tuple(getattr(signal, name) for name in NAMES if hasattr(signal, name))


class _Guard:
    """Stands in for the handlers of several signals, and notes which of them were called."""

    def __init__(self) -> None:
        self.handlers: dict[int, Any] = {}
        self.waiting: list[int] = []
        self.is_open = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        # Python's own handler of Ctrl-C only raises. Others may look at the model, to save it for
        # instance: they always wait.
        if self.is_open and self.handlers[number] is signal.default_int_handler:
            self.is_open = False
            self.handlers[number](number, frame)
        if number not in self.waiting:
            self.waiting.append(number)

    def install(self) -> None:
        for number in HELD:
            handler = signal.getsignal(number)
            # Ignored signals stay ignored, the system's own action stays with the system, and None
            # is a handler written in C.
            if callable(handler):
                self.handlers[number] = handler
                signal.signal(number, self)

    def remove(self) -> None:
        """Bring all handlers back, then call those that have waited."""
        try:
            for number, handler in reversed(self.handlers.items()):
                signal.signal(number, handler)
        finally:
            self._deliver(list(self.waiting))

    def set_open(self, is_open: bool) -> None:
        """Let Ctrl-C through or not; one that has waited goes through at once."""
        self.is_open = is_open
        if (
            is_open
            and signal.SIGINT in self.waiting
            and self.handlers[signal.SIGINT] is signal.default_int_handler
        ):
            self.waiting.remove(signal.SIGINT)
            self(signal.SIGINT, sys._getframe())

    def _deliver(self, numbers: list[int]) -> None:
        if numbers:
            first, *others = numbers
            try:
                self.handlers[first](first, sys._getframe())
            finally:
                self._deliver(others)


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put off signal handlers until the body is done. Other threads than the first never run
    any.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    around = _guard()
    if around is not None:
        with _set(around, is_open=False):
            yield
        return
    guard = _Guard()
    try:
        guard.install()
        yield
    finally:
        guard.remove()


@contextmanager
def interruptible() -> Iterator[None]:
    """Inside ``uninterrupted``: let Ctrl-C through while the body runs, once."""
    around = _guard()
    if around is None:
        yield
        return
    with _set(around, is_open=True):
        yield


def let_interrupts_through() -> None:
    """Inside ``uninterrupted``: a Ctrl-C that has waited is raised here."""
    with interruptible():
        pass


@contextmanager
def _set(guard: _Guard, *, is_open: bool) -> Iterator[None]:
    before = guard.is_open
    try:
        guard.set_open(is_open)
        yield
    finally:
        guard.set_open(before)


def _guard() -> _Guard | None:
    """The guard that is in place, for the thread that runs handlers."""
    if threading.current_thread() is not threading.main_thread():
        return None
    handler: Any = signal.getsignal(signal.SIGINT)
    return handler if isinstance(handler, _Guard) else None
