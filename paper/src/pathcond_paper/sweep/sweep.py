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
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from pathcond.errors import FailedRunsError
from pathcond.rows import Job, Row, Rows, RowsError, locked

from ..data import load as load_data
from ..figure import Figure, Place, Preset
from ..style import drawings, save
from .engines import ENGINES, Ended, Event, Finished

REPETITIONS = ("seed", "repetition")  # settings of a job whose number the user may choose


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
            known = list(dict.fromkeys(str(job[key]) for job in self.jobs if key in job))
            if not known:
                keys = dict.fromkeys(key for job in self.jobs for key in job)
                raise ValueError(
                    f"Runs of {self.name} have no {key!r}; they have {', '.join(keys)}."
                )
            wanted = {_same(value, known) for value in values}
            if wanted - set(known):
                raise ValueError(
                    f"No run of {self.name} has {key} {' or '.join(wanted - set(known))}; there "
                    f"is {', '.join(known)}."
                )
            jobs = [job for job in jobs if str(job.get(key)) in wanted]
        if not jobs:
            raise ValueError(
                f"No run of {self.name} has all of "
                f"{', '.join(f'{key}={v}' for key, v in self.only.items())}."
            )
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
    def unsettled(self) -> list[Job]:
        """Those to be computed that have a row with which the figure is not content."""
        find = getattr(self.figure, "unsettled", None)
        left = find(list(self.file)) if find else []
        return [job for job in self.chosen if job in left]

    @property
    def rows(self) -> list[Row]:
        """All finished runs, those of the jobs first and in their order, whenever they finished."""
        self._refuse_others()
        order = {_text(job): place for place, job in enumerate(self.jobs)}
        return sorted(self.file, key=lambda row: order.get(_text(row.job), len(order)))

    def run(
        self,
        place: Place,
        *,
        engine: str = "local",
        workers: int | None = None,
        command: str,
        watch: Callable[[Event], object],
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
        with self._alone():
            self._run(place, engine, workers, command, watch)

    def _run(
        self,
        place: Place,
        engine: str,
        workers: int | None,
        command: str,
        watch: Callable[[Event], object],
    ) -> None:
        missing = self.missing + self.unsettled
        if not missing:
            return  # also without the data and the device that they were made with
        # where some runs name their data set, those that name none need none
        named = any("dataset" in job for job in self.jobs)
        for dataset in self.figure.DATASETS[self.preset]:
            if any(job.get("dataset", None if named else dataset) == dataset for job in missing):
                load_data(dataset, place.data)
        module = cast(ModuleType, self.figure).__name__
        tasks = self.figure.together(missing)
        failed = []
        # machines of a cluster share no folder
        unfinished = self.out / "unfinished" if engine == "local" else None
        place = replace(place, rows=tuple(self.rows), unfinished=unfinished)
        with closing(ENGINES[engine](module, tasks, place, workers)) as events:
            for event in events:
                if isinstance(event, Finished):
                    self.file.append(event.job, event.result, {"command": command} | event.origin)
                elif isinstance(event, Ended) and event.problem:
                    failed.append(event)
                watch(event)
        if unfinished and unfinished.exists() and not any(unfinished.iterdir()):
            unfinished.rmdir()
        if failed:
            raise FailedRunsError(self._failures(failed))

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Two sweeps at once would compute everything twice."""
        with (self.out / f".{self.name}.lock").open("w") as file, ExitStack() as held:
            try:
                held.enter_context(locked(file, wait=False))
            except BlockingIOError:
                raise RowsError(
                    f"Another sweep of {self.name} is at work in {self.out}: wait, "
                    "or choose another --out."
                ) from None
            yield

    def _refuse_others(self) -> None:
        """Runs of other settings would be averaged with those of the preset."""
        jobs = [
            {"figure": self.name, "preset": self.preset} | job
            for job in self.figure.jobs(self.preset)
        ]
        shared = {
            key: jobs[0][key]
            for key in jobs[0]
            if key not in REPETITIONS and all(job.get(key) == jobs[0][key] for job in jobs)
        }
        for row in self.file:
            for key, value in shared.items():
                if row.job.get(key) != value:
                    raise RowsError(
                        f"{self.file.path} holds runs of {key} {row.job.get(key)}; those of "
                        f"{key} {value} do not belong beside "
                        "them: choose another folder with --out."
                    )

    def _failures(self, failed: Sequence[Ended]) -> str:
        runs: dict[str, list[Job]] = {}
        for event in failed:
            runs.setdefault(event.problem or "", []).extend(event.jobs)
        count = sum(map(len, runs.values()))
        lines = [
            f"{count} of {len(self.jobs)} runs of {self.name} failed; the others are kept, "
            "and the same command tries again."
        ]
        for problem, jobs in runs.items():
            lines += [*map(label, jobs), textwrap.indent(problem.strip(), "    ")]
        return "\n".join(lines)


@contextmanager
def readable(sweep: Sweep) -> Iterator[None]:
    """What rows that a figure cannot read raise becomes one sentence.

    Raises:
        RowsError: In its place.
    """
    try:
        yield
    except (LookupError, TypeError, ArithmeticError, AttributeError, ValueError) as error:
        if isinstance(error, RowsError):
            raise
        raise RowsError(
            f"{sweep.file.path} holds rows that {sweep.name} cannot read "
            f"({type(error).__name__}: {error}): they are damaged or of "
            "another version. Move the file away, and compute them again."
        ) from error


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
        raise RowsError(
            f"Results cannot go to {out}: {why}. Choose another folder with --out."
        ) from error


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


def to_tensorboard(rows: Sequence[Row], folder: Path, changed: float) -> Path | None:
    """Write every list of numbers among the results as a curve, one TensorBoard run per row, in
    place of older ones.

    Args:
        rows: With the results.
        folder: Where to.
        changed: When the rows last did, in seconds since 1970.

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
    if folder.exists() and folder.stat().st_mtime >= changed:
        return folder
    from torch.utils.tensorboard import SummaryWriter

    shutil.rmtree(folder, ignore_errors=True)  # written again it would show every curve twice
    for run, results in curves.items():
        with SummaryWriter(str(folder / run)) as writer:  # type: ignore[no-untyped-call]
            for name, values in results.items():
                for step, value in enumerate(values):
                    writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call]
    return folder


def _curves(result: dict[str, Any]) -> dict[str, list[float]]:
    def are_numbers(values: list[Any]) -> bool:
        plain = (isinstance(x, int | float) and not isinstance(x, bool) for x in values)
        return bool(values) and all(plain)

    return {
        name: values
        for name, values in result.items()
        if isinstance(values, list) and are_numbers(values)
    }


def _file_name(job: Job) -> str:
    """The job's label as the name of a folder, unlike that of any other job."""
    name = re.sub(r"[^\w.=,+-]+", "_", label(job).replace(", ", ","))
    return (
        name
        if len(name) < 200
        else f"{name[:180]}-{hashlib.sha256(_text(job).encode()).hexdigest()[:12]}"
    )


def _text(job: Job) -> str:
    return json.dumps(job, sort_keys=True)
