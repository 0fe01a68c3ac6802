"""How far a comparison is, in one line of the terminal; elsewhere nothing."""

from __future__ import annotations

import shutil
import time
from types import TracebackType
from typing import TextIO


class Progress:
    """One line that is written over and over.

    Attributes:
        total, done: Runs in all, and those that have a result, some of them from an earlier call.
        made: Runs of this call, by which the time left is told.
    """

    def __init__(self, total: int, done: int, stream: TextIO | None) -> None:
        self.total = total
        self.done = done
        self.made = 0
        self.stream = stream if stream is not None and stream.isatty() else None
        self.wrote = False
        self.start = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            self._write(f"stopped after {self.done} of {self.total} runs")
        if self.stream is not None and self.wrote:
            self.stream.write("\n")
            self.stream.flush()

    def begin(self, text: str) -> None:
        """Say which run is under way."""
        left = (
            f", {about((time.monotonic() - self.start) / self.made * (self.total - self.done))} "
            "left"
            if self.made
            else ""
        )
        self._write(f"{self.done} of {self.total} runs{left}: {text}")

    def end(self) -> None:
        """Count a run."""
        self.made += 1
        self.done += 1
        self._write(f"{self.done} of {self.total} runs")

    def _write(self, text: str) -> None:
        if self.stream is not None:
            width = shutil.get_terminal_size().columns - 1
            self.stream.write(f"\r{text[:width]}\x1b[K")
            self.stream.flush()
            self.wrote = True


def about(seconds: float) -> str:
    """A time in one unit.

    >>> about(12.3), about(200), about(9000)
    ('12 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
