"""What is seen of a sweep while it runs: in a terminal a bar per task at work and one for all, elsewhere a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .engines import Advanced, Ended, Event, Finished

SILENCE = 10.0  # seconds between two lines where there is no terminal


@contextmanager
def watching(name: str, runs: int, console: Console) -> Iterator[Callable[[Event], None]]:
    """Show the events of a sweep of so many runs.

    Yields:
        What is to be told them.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, speed_estimate_period=600) as bars:
        yield _Watch(name, runs, console, bars)


@dataclass
class _Open:
    """A task at work: its bar, the runs that it began with, their share that is done, those that are finished."""

    bar: TaskID
    runs: int
    share: float = 0.0
    finished: int = 0


class _Watch:
    def __init__(self, name: str, runs: int, console: Console, bars: Progress) -> None:
        self.name, self.runs, self.console, self.bars = name, runs, console, bars
        self.finished, self.said, self.open = 0, time.monotonic(), dict[int, _Open]()
        self.all = bars.add_task(name, total=runs, visible=runs > 0)

    def __call__(self, event: Event) -> None:
        if isinstance(event, Advanced):
            if event.task not in self.open:
                self.open[event.task] = _Open(bar=self.bars.add_task("", total=1), runs=event.runs)
            task = self.open[event.task]
            if event.runs < task.runs:  # again, after its process was lost
                task.runs, task.finished = event.runs, 0
            task.share = event.share
            self.bars.update(task.bar, completed=event.share, description=f"  {event.text}")
        elif isinstance(event, Finished):
            self.finished += 1
            if event.task in self.open:
                self.open[event.task].finished += 1
        elif isinstance(event, Ended) and event.task in self.open:
            self.bars.remove_task(self.open.pop(event.task).bar)
        # Runs that are trained together finish together: those under way count for their share.
        underway = sum(max(0.0, task.share * task.runs - task.finished) for task in self.open.values())
        text = f"{self.name}: {self.finished} of {self.runs} runs"
        self.bars.update(self.all, completed=self.finished + underway, description=text)
        over = self.finished == self.runs and isinstance(event, Finished)
        if not self.console.is_terminal and (over or time.monotonic() - self.said > SILENCE):
            self.said = time.monotonic()
            self.console.print(text, highlight=False)
