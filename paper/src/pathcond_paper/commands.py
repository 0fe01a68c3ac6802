"""``pathcond reproduce``, ``report`` and ``data``: what this package adds to the command line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from pathcond.cli.exits import exit_codes
from pathcond.files import refuse_special, replacing


def register(app: typer.Typer) -> None:
    """Add the commands to the command line of pathcond."""
    app.command("reproduce")(reproduce)
    app.command("report")(report)
    app.add_typer(data_app, name="data")


data_app = typer.Typer(no_args_is_help=True, help="Data sets of the experiments.")


@data_app.callback()
def data() -> None:
    """Data sets of the experiments."""


@data_app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="cifar10 or mnist")],
    folder: Annotated[
        Path | None,
        typer.Option("--dir", help="Where to; default $PATHCOND_DATA or the user's cache"),
    ] = None,
) -> None:
    """Fetch a data set from where it is published, verified by checksum; goes on where an
    interrupted fetch stopped.
    """
    from .data import get
    from .data.datasets import folder as data_folder

    with exit_codes(), _transfer() as progress:
        place = get(name, data_folder(folder), progress=progress)
    typer.echo(f"{name} is in {place}")


@contextmanager
def _transfer() -> Iterator[Any]:
    """One bar per file, in a terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        tasks: dict[str, Any] = {}

        def progress(file: str, done: int, total: int | None) -> None:
            if file not in tasks:
                tasks[file] = bars.add_task(file, total=total)
            bars.update(tasks[file], completed=done, total=total)

        yield progress


class PresetName(StrEnum):
    """How much of a figure is run."""

    smoke = "smoke"
    cpu = "cpu"
    paper = "paper"


class EngineName(StrEnum):
    """What runs it."""

    local = "local"
    ray = "ray"


def reproduce(
    name: Annotated[
        str | None, typer.Argument(help="Which figure or table, or all; --list shows them")
    ] = None,
    preset: Annotated[
        PresetName,
        typer.Option(
            help="smoke: seconds; cpu: what a laptop can do; paper: the paper's scale, for a GPU"
        ),
    ] = PresetName.cpu,
    device: Annotated[str, typer.Option(help="cpu, cuda (all GPUs) or cuda:N")] = "cpu",
    seeds: Annotated[
        int | None, typer.Option(help="Repetitions instead of the preset's", min=1)
    ] = None,
    only: Annotated[
        list[str] | None,
        typer.Option(
            help="Compute only runs with this setting, e.g. method=exact or depth=3,5; repeatable"
        ),
    ] = None,
    engine: Annotated[
        EngineName, typer.Option(help="Processes of this machine, or a Ray cluster")
    ] = EngineName.local,
    out: Annotated[
        Path | None, typer.Option(help="Folder of results; default: pathcond-results/PRESET")
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(help="Folder of data sets; default: $PATHCOND_DATA or the user's cache"),
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="Processes at once; default: one per GPU or core", min=1)
    ] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be reproduced")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the rows as JSON, and nothing else")
    ] = False,
) -> None:
    """Reproduce a figure or table of the paper, beside the paper's own values.

    Every finished run is kept: the same command goes on with a sweep that was stopped, and only
    draws one that is complete.
    """
    from . import reproduction
    from .reproduction import Request, list_figures

    if show_list:
        typer.echo(list_figures())
        return
    request = Request(
        name=name,
        preset=preset.value,
        device=device,
        seeds=seeds,
        only=only or (),
        engine=engine.value,
        out=out,
        data=data,
        workers=workers,
        as_json=as_json,
    )
    code = reproduction.reproduce(request, program="pathcond reproduce")
    if code:
        raise typer.Exit(code)


def report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of results, as reproduce fills it")
    ],
    out: Annotated[
        Path | None, typer.Option(help="Where the page goes; default: DIR/report.html")
    ] = None,
) -> None:
    """Make one page of a folder of results: all figures, the paper's claims beside what was
    measured, how each was made.
    """
    from .page import page

    target = out or folder / "report.html"
    with exit_codes():
        refuse_special(target)
        text = page(folder)
        try:
            with replacing(target) as new:
                new.write_text(text, encoding="utf-8")
        except OSError as error:
            raise OSError(f"{target} cannot be written: {error.strerror}.") from error
    typer.echo(f"Written: {target}", err=True)
