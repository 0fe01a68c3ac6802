"""``python -m pathcond_paper reproduce …``: the command for machines with torch and numpy alone.

The options and the rows are those of ``pathcond reproduce``, which needs typer and rich.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from .figure import PRESETS
from .reproduction import Request, list_figures, reproduce
from .sweep.engines import ENGINES

PROGRAM = "python -m pathcond_paper"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    options = vars(_parser().parse_args(arguments))
    options.pop("command")
    if options.pop("list"):
        sys.stdout.write(f"{list_figures()}\n")
        return 0
    return reproduce(Request(**options), program=f"{PROGRAM} reproduce")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="The paper's figures and tables.")
    commands = parser.add_subparsers(dest="command", required=True)
    about = "Reproduce a figure or table; finished runs are kept, and the same command goes on."
    command = commands.add_parser("reproduce", help=about, description=about, allow_abbrev=False)
    add = command.add_argument
    add("name", nargs="?", help="which figure or table, or all; --list shows them")
    add("--preset", choices=PRESETS, default="cpu", help="smoke: seconds; paper: for a GPU")
    add("--device", default="cpu", help="cpu, cuda (all GPUs) or cuda:N")
    add("--seeds", type=_positive, help="repetitions instead of the preset's")
    add(
        "--only",
        action="append",
        default=[],
        metavar="SETTING=VALUE[,VALUE]",
        help="compute only runs with this setting, e.g. depth=3,5; repeatable",
    )
    add("--engine", choices=tuple(ENGINES), default="local", help="processes, or a Ray cluster")
    add("--out", type=Path, help="folder of results; default: pathcond-results/PRESET")
    add("--data", type=Path, help="folder of data sets; default: $PATHCOND_DATA or the cache")
    add("--workers", type=_positive, help="processes at once; default: one per GPU or core")
    add("--list", action="store_true", help="show what can be reproduced")
    add("--json", dest="as_json", action="store_true", help="print the rows as JSON")
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not at least 1")
    return number


if __name__ == "__main__":
    sys.exit(main())
