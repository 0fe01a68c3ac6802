"""Results as lines of JSON, one per finished run: appended and never rewritten, so that a killed
sweep goes on where it stopped.

The first line names the format. A *job* is what identifies a run, plain settings such as
``{"figure": "mlp-depth", "depth": 3, "method": "baseline", "seed": 0}``; its *result* is what came
out, its *origin* how. A line that a killed process left unfinished does not count, and the next
append cuts it off.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows, where two sweeps must not share a folder
    fcntl = None  # type: ignore[assignment]

FORMAT = 1
HEADER = json.dumps({"format": FORMAT}).encode() + b"\n"


Job = dict[str, Any]  # settings that identify a run: strings, numbers, lists of them
Result = dict[str, Any]  # what came out: the same, and NaN


@dataclass(frozen=True)
class Row:
    """A finished run.

    Attributes:
        job: What identifies it.
        result: What came out.
        origin: How it was made: command, device, versions, commit, date.
    """

    job: Job
    result: Result
    origin: dict[str, Any]


class RowsError(ValueError):
    """A results file cannot be used; the message names it and says what to do."""


@dataclass(frozen=True)
class Rows:
    """The results file of some experiments; it need not exist yet.

    Attributes:
        path: Where it is.
    """

    path: Path

    def __iter__(self) -> Iterator[Row]:
        """Every finished run, in the order in which they finished; the last, where one was computed
        again.
        """
        found: dict[str, Row] = {}
        if self.path.exists():
            with self.path.open("rb") as file:
                for row in self._read_finished(file):
                    found[_key(row.job)] = row
        yield from found.values()

    def missing(self, jobs: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The jobs that have no row yet."""
        done = {_key(row.job) for row in self}
        return [dict(job) for job in jobs if _key(job) not in done]

    def append(
        self, job: Mapping[str, Any], result: Mapping[str, Any], origin: Mapping[str, Any]
    ) -> None:
        """Add a finished run: as a whole or not at all, whatever other processes append at the same
        time.
        """
        line = (
            json.dumps(
                {"job": job, "result": result, "origin": origin}, allow_nan=True, sort_keys=True
            ).encode()
            + b"\n"
        )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab+") as file, locked(file):
            end = self._cut_unfinished(file)
            file.seek(0)
            if end:
                next(self._read_finished(file), None)  # or it would be continued in another format
            else:
                line = HEADER + line
            try:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            except OSError as error:
                os.ftruncate(file.fileno(), end)
                full = "the disk is full" if error.errno == errno.ENOSPC else str(error)
                raise RowsError(
                    f"{self.path} could not take another row: {full}. What it holds "
                    "is whole; go on later."
                ) from error

    def _read_finished(self, file: IO[bytes]) -> Iterator[Row]:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:
                if not line.endswith(b"\n"):
                    return  # of a process that was killed
                raise RowsError(
                    f"{self.path}, line {number} is no JSON: {error}. Move the file away, or "
                    "mend that line."
                ) from error
            if number == 1 and row != json.loads(HEADER):
                found = row.get("format") if isinstance(row, dict) else None
                raise RowsError(
                    f"{self.path} is of another version (format {found!r}, this is {FORMAT}) or "
                    "no results file: move it away, or "
                    "choose another folder."
                )
            if row == json.loads(HEADER):
                continue  # the first line, here or of a file that was appended as a whole
            parts = ("job", "result", "origin")
            if (
                not isinstance(row, dict)
                or row.keys() != set(parts)
                or not all(isinstance(row[part], dict) for part in parts)
            ):
                raise RowsError(
                    f"{self.path}, line {number} is no row of results: mend or delete that line."
                )
            yield Row(**row)

    def _cut_unfinished(self, file: IO[bytes]) -> int:
        """Cut off a line that was not finished; returns where the next one goes."""
        end = _whole_lines(file)
        file.seek(end)
        rest = file.read()
        try:
            json.loads(rest)
        except ValueError:
            if not end and rest and not HEADER.startswith(rest):
                raise RowsError(
                    f"{self.path} is no results file: move it away, or choose another folder."
                ) from None
            os.ftruncate(file.fileno(), end)
            return end
        file.write(b"\n")  # whole, but for the newline that an editor took
        return end + len(rest) + 1


def _key(job: Mapping[str, Any]) -> str:
    return json.dumps(job, sort_keys=True)


def _whole_lines(file: IO[bytes]) -> int:
    """Where the last whole line ends."""
    end = file.seek(0, os.SEEK_END)
    while end:
        start = max(0, end - 2**16)
        file.seek(start)
        at = file.read(end - start).rfind(b"\n")
        if at >= 0:
            return start + at + 1
        end = start
    return 0


@contextmanager
def locked(file: IO[Any], *, wait: bool = True) -> Iterator[None]:
    """Hold a file against other processes.

    Raises:
        BlockingIOError: Another holds it, and we are not to wait.
    """
    if fcntl is None:
        yield
        return
    fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    try:
        yield
    finally:
        fcntl.flock(file, fcntl.LOCK_UN)
