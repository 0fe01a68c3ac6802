"""The command line: ``pathcond inspect TARGET``, ``pathcond demo`` and ``pathcond reproduce NAME``.

Exit codes: 0 success, 1 nothing can be rescaled, 2 wrong usage or target, 3 the model cannot be analysed.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from enum import Enum
from typing import Annotated, Any

try:
    import typer
except ImportError as error:  # pragma: no cover - exercised by installing without the extra
    raise SystemExit('The command line needs the "cli" extra: pip install "pathcond[cli]"') from error

from torch import nn

from .errors import EnergyRangeError, UnsupportedModelError
from .lifting import log10_paths, off_path, path_norm
from .symmetry import find_symmetry
from .tables import paths_table
from .targets import TargetError, load_target, parse_shape
from .theory import regime

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
    paths: Annotated[bool, typer.Option("--paths", help="Also count paths, and say whether rescaling will do much")] = False,
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
        lifting = _lifting(model, inputs, normalization.value, approximate) if paths else None
    except (UnsupportedModelError, EnergyRangeError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(UNSUPPORTED) from error
    if as_json:
        typer.echo(json.dumps(symmetry.to_dict() | ({"paths": lifting} if lifting else {}), indent=2))
    else:
        typer.echo(str(symmetry) + (f"\n\n{paths_table(**lifting)}" if lifting else ""))
    if symmetry.num_units == 0:
        raise typer.Exit(NOTHING_TO_RESCALE)


def _lifting(model: nn.Module, inputs: Any, normalization: Any, approximate: bool) -> dict[str, Any]:
    return {
        "log10_paths": log10_paths(model, inputs),
        "path_norm": path_norm(model, inputs, approximate=approximate),
        "off_path": off_path(model, inputs),
        "regime": str(regime(model, inputs, normalization=normalization, approximate=approximate)),
    }


@app.command()
def demo() -> None:
    """Find the symmetries of a small embedded network, rescale it at random, and show that nothing changed."""
    from .demo import run

    run(typer.echo)


@app.command()
def reproduce(
    name: Annotated[str | None, typer.Argument(help="Which table or figure; --list shows them")] = None,
    show_list: Annotated[bool, typer.Option("--list", help="Show what can be reproduced")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table")] = False,
) -> None:
    """Reproduce a table or figure of the paper, beside the paper's own values."""
    from .experiments import EXPERIMENTS, load

    known = "\n".join(f"  {known}  {description}" for known, description in EXPERIMENTS.items())
    if show_list:
        typer.echo(known)
    elif name not in EXPERIMENTS:
        problem = "Say what to reproduce" if name is None else f"There is no {name!r} to reproduce"
        typer.echo(f"Error: {problem}. There is:\n{known}", err=True)
        raise typer.Exit(WRONG_TARGET)
    else:
        experiment = load(name)
        rows = list(experiment.run())
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2) if as_json else experiment.table(rows))


def main() -> None:
    """Entry point of the ``pathcond`` command."""
    app()
