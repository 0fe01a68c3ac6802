"""The command line: ``pathcond inspect``, ``condition`` and ``demo``, and what installed packages
add to it.

Exit codes: 0 success, 1 nothing can be rescaled, 2 wrong usage, target or file, 3 the model cannot
be analysed, 4 the rescaling was refused and the model left as it was, 5 some runs of an experiment
failed and the others are kept, 130 stopped by Ctrl-C.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Annotated, Any

try:
    import typer
except ImportError as error:  # pragma: no cover - exercised by installing without the extra
    raise SystemExit(
        'The command line needs the "cli" extra: pip install "pathcond[cli]"'
    ) from error

from ..files import refuse_special
from .exits import NOTHING_TO_RESCALE, WRONG_USAGE, exit_codes

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Rescale ReLU networks without changing their function.",
)


class Normalization(StrEnum):
    """Which side of a normalization layer carries a scale."""

    absorb = "absorb"
    gain = "gain"
    full = "full"
    batch = "batch"
    paper = "paper"


class SolverName(StrEnum):
    """How the log-scales are found."""

    exact = "exact"
    paper = "paper"
    enorm = "enorm"


class CriterionName(StrEnum):
    """What is balanced."""

    paths = "paths"
    curvature = "curvature"
    norms = "norms"
    layers = "layers"


class PaceName(StrEnum):
    """What becomes of the sum of the energies."""

    free = "free"
    keep = "keep"


Target = Annotated[
    str,
    typer.Argument(help="torchvision:NAME, timm:NAME, package.module:factory or file.py:factory"),
]
InputShape = Annotated[
    str | None, typer.Option("--input", help="Shape of a random input, e.g. 2x3x224x224")
]
Side = Annotated[Normalization, typer.Option(help="Which side of a norm carries a scale")]
Approximate = Annotated[
    bool, typer.Option("--approximate", help="Treat smooth activations as ReLU")
]
Exclude = Annotated[
    list[str] | None,
    typer.Option(
        "--exclude", help="A parameter, module or pattern to leave as it is; may be repeated"
    ),
]
MoveFrozen = Annotated[
    bool,
    typer.Option("--move-frozen", help="Also rescale parameters that require no gradient"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")]


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"pathcond {version('pathcond')}")
        raise typer.Exit


@app.callback()
def pathcond(
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and exit", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Rescale ReLU networks without changing their function."""


@app.command()
def inspect(
    target: Target,
    input: InputShape = None,
    normalization: Side = Normalization.batch,
    approximate: Approximate = False,
    exclude: Exclude = None,
    move_frozen: MoveFrozen = False,
    paths: Annotated[
        bool,
        typer.Option(
            "--paths",
            help="Also count paths, and say whether rescaling will do much at small learning rates",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show which units of a model can be rescaled, and what pins the others."""
    with exit_codes():
        from . import actions

        found = actions.inspect(
            target,
            input,
            paths=paths,
            normalization=normalization.value,
            approximate=approximate,
            exclude=exclude or (),
            frozen="move" if move_frozen else "keep",
        )
    typer.echo(json.dumps(found.to_dict(), indent=2) if as_json else str(found))
    if found.symmetry.num_units == 0:
        raise typer.Exit(NOTHING_TO_RESCALE)


@app.command()
def condition(
    target: Target,
    out: Annotated[Path, typer.Option("--out", help="Where the rescaled weights go (safetensors)")],
    checkpoint: Annotated[
        Path | None,
        typer.Option(help="Weights to start from (safetensors); default: as the target comes"),
    ] = None,
    input: InputShape = None,
    normalization: Side = Normalization.batch,
    approximate: Approximate = False,
    exclude: Exclude = None,
    move_frozen: MoveFrozen = False,
    criterion: Annotated[
        CriterionName | None,
        typer.Option(
            help="What is balanced: layers (norms and activations), norms of the weights, "
            "curvature of the outputs, or paths (the path kernel); default: layers, and paths "
            "with --solver paper or --pace keep"
        ),
    ] = None,
    pace: Annotated[
        PaceName,
        typer.Option(
            help="keep: the sum of the energies stays, so that the learning rate can stay"
        ),
    ] = PaceName.free,
    solver: Annotated[
        SolverName, typer.Option(help="exact; paper (ten sweeps); enorm (least norm)")
    ] = SolverName.exact,
    max_log_scale: Annotated[float | None, typer.Option(help="Bound on |log λ|, above 0")] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Measure statistics and gates on the example batch")
    ] = True,
    device: Annotated[str, typer.Option(help="Where to compute, e.g. cuda")] = "cpu",
    report: Annotated[Path | None, typer.Option(help="Also write a page for the browser")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace files that exist")] = False,
    as_json: AsJson = False,
) -> None:
    """Rescale a model's weights to the minimum of a criterion (balanced layers, unless told
    otherwise), and write them to a new checkpoint.
    """
    with exit_codes():
        from . import actions

        with _progress() as progress:
            done = actions.condition(
                target,
                input,
                checkpoint=checkpoint,
                out=out,
                page=report,
                replace=force,
                device=device,
                criterion=criterion.value if criterion else None,
                solver=solver.value,
                pace="keep" if pace is PaceName.keep else None,
                normalization=normalization.value,
                approximate=approximate,
                max_log_scale=max_log_scale,
                calibrate=calibrate,
                progress=progress,
                exclude=exclude or (),
                frozen="move" if move_frozen else "keep",
            )
    typer.echo(json.dumps(done.to_dict(), indent=2) if as_json else str(done))
    if not done.num_units:
        typer.echo(f"Nothing can be rescaled: {out} was not written.", err=True)
        raise typer.Exit(NOTHING_TO_RESCALE)
    typer.echo(f"\nWritten: {out}" + (f", {report}" if report else ""), err=True)


@contextmanager
def _progress() -> Iterator[Any]:
    """A line that says which stage is at work, in a terminal."""
    from rich.console import Console

    says = {
        "symmetry": "finding symmetries",
        "energy": "measuring energies",
        "solve": "solving",
        "rescale": "rescaling and verifying",
    }
    with Console(stderr=True).status("loading") as status:
        yield lambda stage: status.update(f"{says[stage]} …")


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Where the page goes")] = Path("pathcond-demo.html"),
    epochs: Annotated[int, typer.Option(help="Passes over the data per run", min=1)] = 40,
) -> None:
    """Train on handwritten digits with and without conditioning, at tuned and at small rates, and
    write a page with the curves.
    """
    with exit_codes():
        from .demo import run

        refuse_special(out)
        out.parent.mkdir(parents=True, exist_ok=True)
        run(out, epochs=epochs)


PAPER_COMMANDS = {
    "reproduce": "Reproduce a figure or table of the paper.",
    "report": "Make one page of a folder of results.",
    "data": "Data sets of the experiments.",
}


def _add_commands_of_packages() -> None:
    """Commands that installed packages bring along; one that is missing says what to install."""
    for entry in entry_points(group="pathcond.commands"):
        entry.load()(app)
    present = {command.name for command in app.registered_commands} | {
        group.name for group in app.registered_groups
    }
    for name, about in PAPER_COMMANDS.items():
        if name not in present:
            app.command(
                name,
                help=f"{about} Needs the package pathcond-paper.",
                context_settings=ANY_ARGUMENTS,
            )(_not_installed)


ANY_ARGUMENTS = {"allow_extra_args": True, "ignore_unknown_options": True}


def _not_installed(context: typer.Context) -> None:
    typer.echo(
        f"Error: pathcond {context.info_name} belongs to the package pathcond-paper, which is "
        "not installed: run "
        "pip install ./paper in a checkout of pathcond.",
        err=True,
    )
    raise typer.Exit(WRONG_USAGE)


_add_commands_of_packages()


def main() -> None:
    """Entry point of the ``pathcond`` command."""
    app()
