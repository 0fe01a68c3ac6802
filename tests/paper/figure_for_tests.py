"""A figure whose runs do what files in the data folder say, and note there that they were begun.

``raise-b-1`` makes the run of method b and seed 1 raise, ``kill-b-1`` kill its process once,
``kill-always-b-1`` always, ``wait-b-1`` wait until the file is gone; ``state-b-1`` makes it leave a
state where a sweep has a place for one. Processes of every engine import it by name; as a program
it is the command line with this figure.
"""

import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from unittest import mock

from pathcond.rows import Job, Result, Row
from pathcond_paper.figure import Claim, Place, Preset, Progress
from pathcond_paper.style import band, panels

DATASETS = {"smoke": (), "cpu": ("mnist",), "paper": ()}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    return [{"method": method, "seed": seed} for seed in range(seeds or 2) for method in ("a", "b")]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    return [
        [job for job in jobs if job["seed"] == seed]
        for seed in sorted({job["seed"] for job in jobs})
    ]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    assert place.data is not None
    print("what a library may print")
    for number, job in enumerate(jobs):
        name = f"{job['method']}-{job['seed']}"
        progress(number / len(jobs), name)
        with (place.data / "begun").open("a") as file:
            file.write(f"{name} {os.getpid()}\n")
        while (place.data / f"wait-{name}").exists():
            time.sleep(0.05)
        if (place.data / f"raise-{name}").exists():
            raise ArithmeticError(f"no luck with {name}")
        if (place.data / f"kill-{name}").exists():
            (place.data / f"kill-{name}").unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if (place.data / f"kill-always-{name}").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        if (place.data / f"state-{name}").exists() and place.unfinished:
            place.unfinished.mkdir(parents=True, exist_ok=True)
            (place.unfinished / name).touch()
        if (place.data / f"tensor-{name}").exists():
            yield job, {"loss": {1, 2}}  # no JSON
        yield (
            job,
            {
                "loss": [1.0 / (step + 1 + job["seed"]) for step in range(3)],
                "best": 0.5,
                "name": name,
            },
        )


def plot(rows: Sequence[Row]) -> dict:
    drawing, (axes,) = panels(1, 1)
    for method in ("a", "b"):
        band(
            axes,
            range(3),
            [row.result["loss"] for row in rows if row.job["method"] == method],
            label=method,
        )
    return {"fake": drawing}


def table(rows: Sequence[Row]) -> str:
    return "\n".join(f"{row.result['name']} {row.result['best']}" for row in rows)


def claims(rows: Sequence[Row]) -> list[Claim]:
    return [
        Claim(
            paper="it gets better (fig:fake)",
            decides=f"in {len(rows)} runs",
            ours="it does, too",
            verdict="reproduced",
        )
    ]


if __name__ == "__main__":
    from pathcond.cli import commands as cli
    from pathcond_paper import reproduction

    # a shell's background processes ignore it, and so would we
    signal.signal(signal.SIGINT, signal.default_int_handler)
    figure = sys.modules["tests.paper.figure_for_tests"] = sys.modules[__name__]
    figure.__name__ = "tests.paper.figure_for_tests"
    with mock.patch.multiple(reproduction, FIGURES={"fake": "for tests"}, load=lambda name: figure):
        cli.main()
