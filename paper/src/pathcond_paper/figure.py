"""What a module of a figure offers, and the nouns that pass between it, the sweep and the
report.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from pathcond.rows import Job, Result, Row

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

__all__ = [
    "PRESETS",
    "Claim",
    "Figure",
    "Job",
    "Place",
    "Preset",
    "Progress",
    "Result",
    "Row",
    "Verdict",
]

Preset = Literal["smoke", "cpu", "paper"]
PRESETS: tuple[Preset, ...] = ("smoke", "cpu", "paper")
# of the paper's claims, and of goals of our own
Verdict = Literal["reproduced", "not reproduced", "met", "missed", "not run"]
# the share that is done, and a few words on what is being done
Progress = Callable[[float, str], object]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where runs are computed.

    Attributes:
        device: A torch device.
        data: Folder of the data sets; None for the default one.
        rows: The figure's runs that are finished already, for those that build on them.
        unfinished: Folder for the states of long trainings, so that they can go on when stopped;
            None to keep none.
    """

    device: str = "cpu"
    data: Path | None = None
    rows: Sequence[Row] = ()
    unfinished: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the paper, or a goal of our own, beside what was measured.

    Attributes:
        paper: What it says, with its label.
        verdict: On the method as published; "not run" if rows are missing.
        decides: The numbers that the verdict goes by, in at most 25 words.
        details: All others, with seeds and spread.
        bound: Up to where the verdict is a good one, which the sentence may leave open.
        ours: What the library does in place of the paper's method, where that is another thing, in
            at most 25 words.
    """

    paper: str
    verdict: Verdict
    decides: str = ""
    details: str = ""
    bound: str = ""
    ours: str = ""

    @classmethod
    def not_run(cls, paper: str) -> Claim:
        return cls(paper=paper, verdict="not run")

    @classmethod
    def judge(
        cls,
        paper: str,
        holds: bool,
        decides: str,
        details: str = "",
        *,
        bound: str,
        ours: str = "",
        goal: bool = False,
    ) -> Claim:
        """Reproduced or not; a goal is met or missed."""
        good: Verdict = "met" if goal else "reproduced"
        bad: Verdict = "missed" if goal else "not reproduced"
        return cls(
            paper=paper,
            verdict=good if holds else bad,
            decides=decides,
            details=details,
            bound=f"{good.capitalize()} if {bound}.",
            ours=ours,
        )

    @property
    def more(self) -> str:
        """What is folded away beneath the numbers that decide."""
        return " ".join(filter(None, (self.details, self.bound)))


class Figure(Protocol):
    """A module of this package.

    Attributes:
        DATASETS: By preset, names of the data sets that ``run`` reads; empty if it makes its own.
        CHANGED: By method, or by part where a figure has no methods, the day since which its runs
            are made as they are now: the page tells how many rows are older. A figure without it
            has none.

    A module may also have ``unsettled(rows)``: the runs among finished ones that have to go on.
    """

    DATASETS: Mapping[Preset, Sequence[str]]

    def jobs(self, preset: Preset, seeds: int | None = None) -> list[Job]:
        """All runs of a preset; ``seeds`` replaces its number of repetitions."""

    def together(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """The runs that share work or a device, as lists; each is one task for one process."""

    def run(
        self, jobs: Sequence[Job], place: Place, progress: Progress
    ) -> Iterator[tuple[Job, Result]]:
        """Compute one such list; yields each run as soon as it is finished."""

    def plot(self, rows: Sequence[Row]) -> dict[str, Drawing]:
        """Drawings by file name without suffix, the figure's own name first; whatever rows there
        are. The label of a drawing is its caption.
        """

    def table(self, rows: Sequence[Row]) -> str:
        """The rows as text for the terminal, beside the paper's values."""

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        """The paper's claims that this figure is about, each with its verdict; "not run" without
        rows.
        """
