"""The command line: ``pathcond inspect TARGET`` and ``pathcond demo``.

Exit codes: 0 success, 1 nothing can be rescaled, 2 wrong usage or target, 3 the model cannot be analysed.
"""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

try:
    import typer
except ImportError as error:  # pragma: no cover - exercised by installing without the extra
    raise SystemExit('The command line needs the "cli" extra: pip install "pathcond[cli]"') from error

from .errors import UnsupportedModelError
from .symmetry import find_symmetry
from .targets import TargetError, load_target, parse_shape

NOTHING_TO_RESCALE, WRONG_TARGET, UNSUPPORTED = 1, 2, 3

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Rescale ReLU networks without changing their function.")


class Normalization(str, Enum):
    """Which side of a normalization layer carries a scale."""

    absorb = "absorb"
    gain = "gain"
    full = "full"
    paper = "paper"


@app.callback()
def pathcond() -> None:
    """Rescale ReLU networks without changing their function."""


@app.command()
def inspect(
    target: Annotated[str, typer.Argument(help="torchvision:NAME, timm:NAME, package.module:factory or file.py:factory")],
    input: Annotated[str | None, typer.Option(help="Shape of a random input, e.g. 2x3x224x224")] = None,
    normalization: Annotated[Normalization, typer.Option(help="Which side of a norm carries a scale")] = Normalization.absorb,
    approximate: Annotated[bool, typer.Option(help="Treat smooth activations as ReLU")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Show which units of a model can be rescaled, and what pins the others."""
    try:
        model, inputs = load_target(target, parse_shape(input) if input else None)
    except TargetError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(WRONG_TARGET) from error
    try:
        symmetry = find_symmetry(model, inputs, normalization=normalization.value, approximate=approximate)
    except UnsupportedModelError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(UNSUPPORTED) from error
    typer.echo(json.dumps(symmetry.to_dict(), indent=2) if as_json else str(symmetry))
    if symmetry.num_units == 0:
        raise typer.Exit(NOTHING_TO_RESCALE)


@app.command()
def demo() -> None:
    """Find the symmetries of a small embedded network, rescale it at random, and show that nothing changed."""
    from .demo import run

    run(typer.echo)


def main() -> None:
    """Entry point of the ``pathcond`` command."""
    app()
