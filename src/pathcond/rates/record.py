"""Finished runs in a file of rows, so that an interrupted comparison goes on where it stopped."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from ..files import refuse_special
from ..rows import Row, Rows, RowsError
from .arguments import Grid, Point
from .runs import Run, figure_of

KEYS = {"method", "how", "rate", "seed"}
Key = tuple[str, float, int]


class Record:
    """What is known of a grid from earlier calls, and where the next results go.

    Runs that raised are not written: the next call makes them again.

    Attributes:
        runs: By method, rate and seed.
        weights: By seed, the digest of the initial weights and the words for where they were seen.
        notes: What is in the file besides, in sentences.
    """

    def __init__(self, path: Path | None, grid: Grid) -> None:
        """Read the file, if there is one.

        Raises:
            SpecialFileError: The path leads to a folder or a device.
            RowsError: It is no file of rows of a comparison, or one of its methods is another one
                of the same name.
        """
        self.rows = Rows(path) if path is not None else None
        self.runs: dict[Key, Run] = {}
        self.weights: dict[int, tuple[str, str]] = {}
        self.notes: tuple[str, ...] = ()
        if self.rows is not None:
            refuse_special(self.rows.path)
            self._read(self.rows, grid)

    def __getitem__(self, point: Point) -> Run | None:
        return self.runs.get(_key(point))

    def add(self, point: Point, run: Run, weights: str) -> None:
        """Keep a run that has just finished."""
        self.runs[_key(point)] = run
        if self.rows is not None and run.error is None:
            job = {
                "method": point.method.name,
                "how": point.method.how,
                "rate": point.rate,
                "seed": point.seed,
            }
            origin = {"seconds": round(run.seconds, 3), "torch": torch.__version__}
            self.rows.append(job, {"figure": run.figure, "weights": weights}, origin)

    def _read(self, rows: Rows, grid: Grid) -> None:
        wanted = {_key(point) for point in grid}
        how = {method.name: method.how for method in grid.methods}
        others = 0
        for row in rows:
            _refuse_foreign(rows.path, row, how)
            key = (row.job["method"], row.job["rate"], row.job["seed"])
            if key not in wanted:
                others += 1
                continue
            seconds = float(row.origin.get("seconds", 0.0))
            self.runs[key] = Run(
                method=key[0],
                rate=key[1],
                seed=key[2],
                figure=figure_of(row.result["figure"]),
                seconds=seconds,
            )
            self._meet(rows.path, key[2], row.result["weights"])
        if others:
            counted = "1 run" if others == 1 else f"{others:,} runs"
            self.notes = (
                f"{rows.path} holds {counted} of other rates, methods or seeds too, "
                "which are left out here.",
            )

    def _meet(self, path: Path, seed: int, weights: str) -> None:
        known, _ = self.weights.setdefault(seed, (weights, f"those of the runs in {path}"))
        if known != weights:
            raise RowsError(
                f"{path} holds runs of seed {seed} that began from different "
                "weights: name another file."
            )


def _refuse_foreign(path: Path, row: Row, how: Mapping[str, str]) -> None:
    if (
        row.job.keys() != KEYS
        or row.result.keys() != {"figure", "weights"}
        or not isinstance(row.result["figure"], float)
    ):
        raise RowsError(f"{path} holds rows that are none of compare_rates: name another file.")
    name, made = row.job["method"], row.job["how"]
    if how.get(name, made) != made:
        raise RowsError(
            f"{path} holds runs of another method {name!r}: it was {made}, now it is "
            f"{how[name]}. Name one of them "
            "differently, or name another file."
        )


def _key(point: Point) -> Key:
    return point.method.name, point.rate, point.seed
