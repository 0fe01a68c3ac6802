"""A sweep: the runs of a figure that have no row yet, computed and kept one by one.

    jobs ─ rows there are ─► missing ─► together ─► engine ─► events ─► one row per finished run

Drawings and curves are made from the rows alone.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from ..data import load as load_data
from .engines import ENGINES, Ended, Event, Finished
from .figure import Figure, Job, Place, Preset, Row
from .rows import Rows, RowsError
from .style import drawings, save


class FailedRunsError(RuntimeError):
    """Some runs have no result; the message names them, with the error of each."""


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """The runs of a figure in a folder.

    Attributes:
        name: Of the figure.
        figure: Its module.
        preset: Which of its sets of runs.
        out: Folder of results.
        seeds: Repetitions, if not the preset's own.
        only: Values that some settings of a run must have to be computed, as text.
    """

    name: str
    figure: Figure
    preset: Preset
    out: Path
    seeds: int | None = None
    only: Mapping[str, Collection[str]] = field(default_factory=dict)

    @property
    def jobs(self) -> list[Job]:
        """All of them."""
        stamp = {"figure": self.name, "preset": self.preset}
        return [stamp | job for job in self.figure.jobs(self.preset, self.seeds)]

    @property
    def chosen(self) -> list[Job]:
        """Those to be computed.

        Raises:
            ValueError: None is, as no run has such a setting.
        """
        jobs = self.jobs
        for key, values in self.only.items():
            known = {str(job[key]): None for job in self.jobs if key in job}
            if not known:
                keys = dict.fromkeys(key for job in self.jobs for key in job)
                raise ValueError(f"Runs of {self.name} have no {key!r}; they have {', '.join(keys)}.")
            if not known.keys() & {_same(value, known) for value in values}:
                raise ValueError(f"No run of {self.name} has {key} {' or '.join(values)}; there is {', '.join(known)}.")
            jobs = [job for job in jobs if str(job.get(key)) in {_same(value, known) for value in values}]
        return jobs

    @property
    def file(self) -> Rows:
        """The results file."""
        return Rows(self.out / f"{self.name}.jsonl")

    @property
    def missing(self) -> list[Job]:
        """The jobs that have no row yet."""
        self._refuse_others()
        return self.file.missing(self.chosen)

    @property
    def rows(self) -> list[Row]:
        """All finished runs, those of the jobs first and in their order, whenever they finished."""
        self._refuse_others()
        order = {_text(job): place for place, job in enumerate(self.jobs)}
        return sorted(self.file, key=lambda row: order.get(_text(row.job), len(order)))

    def run(
        self, place: Place, *, engine: str = "local", workers: int | None = None, command: str, watch: Callable[[Event], object]
    ) -> None:
        """Compute what is missing; each run is in the file as soon as it is finished.

        Args:
            place: Where.
            engine: One of ``ENGINES``.
            workers: Number of processes, if not one per GPU or core.
            command: For the origin of the rows.
            watch: Told what happens.

        Raises:
            FailedRunsError: Once all others are finished.
            RowsError: The results file cannot be used or is full.
            DataError: A data set is not there or not whole; nothing was computed.
            EngineError: There is no such device or cluster; nothing was computed.
        """
        check_folder(self.out)
        missing = self.missing
        if not missing:
            return  # also without the data and the device that they were made with
        for dataset in self.figure.DATASETS[self.preset]:
            load_data(dataset, place.data)
        module, tasks, failed = cast(ModuleType, self.figure).__name__, self.figure.together(missing), []
        with closing(ENGINES[engine](module, tasks, place, workers)) as events:
            for event in events:
                if isinstance(event, Finished):
                    self.file.append(event.job, event.result, {"command": command} | event.origin)
                elif isinstance(event, Ended) and event.problem:
                    failed.append(event)
                watch(event)
        if failed:
            raise FailedRunsError(self._failures(failed))

    def _refuse_others(self) -> None:
        for row in self.file:
            figure, preset = row.job.get("figure"), row.job.get("preset")
            if (figure, preset) != (self.name, self.preset):
                raise RowsError(
                    f"{self.file.path} holds runs of {figure}, preset {preset}; those of {self.name}, preset {self.preset} do not "
                    "belong beside them: choose another folder with --out."
                )

    def _failures(self, failed: Sequence[Ended]) -> str:
        runs: dict[str, list[Job]] = {}
        for event in failed:
            runs.setdefault(event.problem or "", []).extend(event.jobs)
        count = sum(map(len, runs.values()))
        lines = [f"{count} of {len(self.jobs)} runs of {self.name} failed; the others are kept, and the same command tries again."]
        for problem, jobs in runs.items():
            lines += [*map(label, jobs), textwrap.indent(problem.strip(), "    ")]
        return "\n".join(lines)


def check_folder(out: Path) -> None:
    """Make the folder of results if it is not there, and try whether it can be written to.

    Raises:
        RowsError: It cannot.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        why = "it is a file" if out.is_file() else error.strerror
        raise RowsError(f"Results cannot go to {out}: {why}. Choose another folder with --out.") from error


def _same(text: str, known: Collection[str]) -> str:
    """The known value that a text stands for, whatever way its number is written.

    >>> _same("1e-3", ["0.1", "0.001"])
    '0.001'
    """

    def number(value: str) -> float | str:
        try:
            return float(value)
        except ValueError:
            return value

    return next((value for value in known if number(value) == number(text)), text)


def label(job: Job) -> str:
    """A job in a line.

    >>> label({"figure": "toy", "preset": "smoke", "method": "paper", "widths": [2, 3]})
    'method=paper, widths=[2, 3]'
    """
    settings = {key: value for key, value in job.items() if key not in ("figure", "preset")}
    return ", ".join(f"{key}={value}" for key, value in settings.items())


def draw(figure: Figure, rows: Sequence[Row], out: Path) -> list[Path]:
    """Write a figure's drawings as PNG and SVG, byte by byte the same for the same rows.

    Raises:
        ImportError: Without matplotlib; the message says which extra has it.
    """
    paths = []
    for name, drawing in drawings(figure, rows).items():
        for kind in ("png", "svg"):
            save(drawing, out / f"{name}.{kind}", kind)
            paths.append(out / f"{name}.{kind}")
    return paths


def to_tensorboard(rows: Sequence[Row], folder: Path) -> Path | None:
    """Write every list of numbers among the results as a curve, one TensorBoard run per row, in place of what was there.

    Returns:
        The folder; None if TensorBoard is not installed or there is no curve.
    """
    curves = {_file_name(row.job): found for row in rows if (found := _curves(row.result))}
    try:
        import tensorboard  # noqa: F401
    except ImportError:
        return None
    if not curves:
        return None
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)  # written again it would show every curve twice
    for run, results in curves.items():
        with SummaryWriter(str(folder / run)) as writer:  # type: ignore[no-untyped-call]
            for name, values in results.items():
                for step, value in enumerate(values):
                    writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
    return folder


def _curves(result: dict[str, Any]) -> dict[str, list[float]]:
    numbers = lambda values: values and all(isinstance(x, int | float) and not isinstance(x, bool) for x in values)  # noqa: E731
    return {name: values for name, values in result.items() if isinstance(values, list) and numbers(values)}


def _file_name(job: Job) -> str:
    """The job's label as the name of a folder, unlike that of any other job."""
    name = re.sub(r"[^\w.=,+-]+", "_", label(job).replace(", ", ","))
    return name if len(name) < 200 else f"{name[:180]}-{hashlib.sha256(_text(job).encode()).hexdigest()[:12]}"


def _text(job: Job) -> str:
    return json.dumps(job, sort_keys=True)
