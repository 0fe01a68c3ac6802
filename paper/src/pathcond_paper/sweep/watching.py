"""What is seen of a sweep while it runs: in a terminal bars, elsewhere or without rich a line now
and then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from .engines import Advanced, Ended, Event, Finished

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SILENCE = 10.0  # seconds between two lines where there are no bars


@contextmanager
def watching(name: str, runs: int, stream: TextIO) -> Iterator[Callable[[Event], None]]:
    """Show the events of a sweep of so many runs.

    Yields:
        What is to be told them.
    """
    bars = _bars(stream) if stream.isatty() else None
    if bars is None:
        yield _Lines(name, runs, stream)
        return
    with bars:
        yield _Bars(name, runs, bars)


def _bars(stream: TextIO) -> Progress | None:
    """Bars on a terminal; None without rich."""
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        return None
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TaskProgressColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    return progress.Progress(*columns, console=Console(file=stream), speed_estimate_period=600)


@dataclass
class _Open:
    """A task at work: the runs it began with, the share of them that is done, those finished."""

    runs: int
    share: float = 0.0
    finished: int = 0


class _Count:
    """How far a sweep is, by its events."""

    def __init__(self, runs: int) -> None:
        self.runs = runs
        self.finished = 0
        self.open: dict[int, _Open] = {}

    def hear(self, event: Event) -> None:
        if isinstance(event, Advanced):
            task = self.open.setdefault(event.task, _Open(runs=event.runs))
            # Fewer runs than before: its process was lost, and it began again
            if event.runs < task.runs:
                task.runs = event.runs
                task.finished = 0
            task.share = event.share
        elif isinstance(event, Finished):
            self.finished += 1
            if event.task in self.open:
                self.open[event.task].finished += 1
        elif isinstance(event, Ended):
            self.open.pop(event.task, None)

    @property
    def done(self) -> float:
        """Runs that are finished, and those under way by their share: runs that are trained
        together finish together.
        """
        underway = (max(0.0, task.share * task.runs - task.finished) for task in self.open.values())
        return self.finished + sum(underway)


class _Bars:
    """A bar for each task at work and one for all."""

    def __init__(self, name: str, runs: int, bars: Progress) -> None:
        self.name = name
        self.bars = bars
        self.count = _Count(runs)
        self.all = bars.add_task(name, total=runs, visible=runs > 0)
        self.tasks: dict[int, TaskID] = {}

    def __call__(self, event: Event) -> None:
        self.count.hear(event)
        if isinstance(event, Advanced):
            if event.task not in self.tasks:
                self.tasks[event.task] = self.bars.add_task("", total=1)
            self.bars.update(
                self.tasks[event.task], completed=event.share, description=f"  {event.text}"
            )
        elif isinstance(event, Ended) and event.task in self.tasks:
            self.bars.remove_task(self.tasks.pop(event.task))
        text = f"{self.name}: {self.count.finished} of {self.count.runs} runs"
        self.bars.update(self.all, completed=self.count.done, description=text)


class _Lines:
    """A line every few seconds, and one at the end."""

    def __init__(self, name: str, runs: int, stream: TextIO) -> None:
        self.name = name
        self.stream = stream
        self.count = _Count(runs)
        self.said = time.monotonic()

    def __call__(self, event: Event) -> None:
        self.count.hear(event)
        over = self.count.finished == self.count.runs and isinstance(event, Finished)
        if not over and time.monotonic() - self.said <= SILENCE:
            return
        self.said = time.monotonic()
        doing = f"; {event.text}" if isinstance(event, Advanced) else ""
        share = f"{self.count.done / self.count.runs:.0%} of the work" if self.count.runs else ""
        text = f"{self.name}: {self.count.finished} of {self.count.runs} runs, {share}{doing}\n"
        self.stream.write(text)
        self.stream.flush()
