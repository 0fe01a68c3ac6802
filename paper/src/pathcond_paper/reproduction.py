"""The ``reproduce`` command without its front end: ``pathcond.cli.commands`` and ``__main__`` both
call it.

It needs torch alone. Progress bars need rich, drawings need matplotlib; without them it writes
plain lines, and says which command draws the rows.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from difflib import get_close_matches
from pathlib import Path

from pathcond.cli.exits import INTERRUPTED, RUNS_FAILED, WRONG_USAGE, exit_code
from pathcond.errors import FailedRunsError
from pathcond.rows import Row

from . import FIGURES, load
from .citing import cite
from .figure import Place, Preset
from .sweep.sweep import Sweep, draw, readable, to_tensorboard
from .sweep.watching import watching


@dataclass(frozen=True, kw_only=True)
class Request:
    """What a user asks to reproduce.

    Attributes:
        name: A figure, or "all".
        preset: How much of it.
        device: "cpu", "cuda" or "cuda:N".
        seeds: Repetitions, if not the preset's own.
        only: Settings that runs must have to be computed, such as "depth=3,5".
        engine: One of ``ENGINES``.
        out: Folder of results; None for the default one.
        data: Folder of the data sets; None for the default one.
        workers: Number of processes, if not one per GPU or core.
        as_json: Print the rows as JSON, and nothing else.
    """

    name: str | None
    preset: Preset = "cpu"
    device: str = "cpu"
    seeds: int | None = None
    only: Sequence[str] = ()
    engine: str = "local"
    out: Path | None = None
    data: Path | None = None
    workers: int | None = None
    as_json: bool = False

    @property
    def folder(self) -> Path:
        """Where results go."""
        return self.out or Path("pathcond-results") / self.preset

    def command(self, program: str, figure: str) -> str:
        """The command that asks for this, of one figure; folders are left out, as machines differ
        in them.

        >>> Request(name="all", preset="smoke", only=["depth=3"]).command("reproduce", "toy")
        'reproduce toy --preset smoke --device cpu --only depth=3'
        """
        words = [program, figure, "--preset", self.preset, "--device", shlex.quote(self.device)]
        words += ["--seeds", str(self.seeds)] if self.seeds else []
        for setting in self.only:
            words += ["--only", shlex.quote(setting)]
        words += ["--engine", self.engine] if self.engine != "local" else []
        words += ["--workers", str(self.workers)] if self.workers else []
        return " ".join(words)


def reproduce(request: Request, *, program: str) -> int:
    """Compute what is missing of a figure, or of all, and show it.

    Args:
        request: What is asked for.
        program: How the front end was called, for the origin of the rows.

    Returns:
        The exit code; messages went to stderr.
    """
    if request.name is None or request.name not in (*FIGURES, "all"):
        _complain(f"Error: {_unknown(request.name)}")
        return WRONG_USAGE
    rows: list[Row] = []
    codes: dict[str, int] = {}
    for figure in FIGURES if request.name == "all" else (request.name,):
        try:
            _reproduce_one(figure, request, program, rows)
        except KeyboardInterrupt:
            _complain(
                f"Stopped. Finished runs are kept in {request.folder}; the same command goes on."
            )
            return INTERRUPTED
        except Exception as error:
            code = exit_code(error)
            if code is None:
                raise
            _complain(f"Error: {error}")
            codes[figure] = code
    if request.as_json and (rows or not codes):
        _say(json.dumps([asdict(row) for row in rows], indent=2))
    if not codes:
        return 0
    if request.name == "all":
        _complain(f"Error: {', '.join(codes)} failed, as said above; the same command tries again.")
        if len(codes) < len(FIGURES):
            return RUNS_FAILED
    return codes.popitem()[1] if len(set(codes.values())) == 1 else RUNS_FAILED


def list_figures() -> str:
    """All figures and tables, a line each."""
    width = max(map(len, FIGURES))
    return "\n".join(f"  {name:{width}}  {description}" for name, description in FIGURES.items())


def _reproduce_one(figure: str, request: Request, program: str, rows: list[Row]) -> None:
    """Compute and show a figure; its rows are added to the list even where some runs failed."""
    sweep = Sweep(
        name=figure,
        figure=load(figure),
        preset=request.preset,
        seeds=request.seeds,
        out=request.folder,
        only=_settings(request.only),
    )
    failure = _compute(sweep, request, request.command(program, figure))
    rows += sweep.rows
    _show(sweep, text=not request.as_json)
    if failure:
        raise failure


def _settings(only: Sequence[str]) -> dict[str, list[str]]:
    """Values by setting, of texts such as "depth=3,5"."""
    settings: dict[str, list[str]] = {}
    for text in only:
        key, equals, values = text.partition("=")
        if not (key and equals and values):
            raise ValueError(
                f"--only {text}: write it as SETTING=VALUE, several values with "
                "commas between them."
            )
        settings.setdefault(key, []).extend(values.split(","))
    return settings


def _unknown(name: str | None) -> str:
    near = get_close_matches(name or "", [*FIGURES, "all"], n=1, cutoff=0.5)
    problem = "Say what to reproduce." if name is None else f"There is no {name!r} to reproduce."
    meant = f" Did you mean {near[0]!r}?" if near else ""
    return f"{problem}{meant} Choose one of these, or all:\n{list_figures()}"


def _compute(sweep: Sweep, request: Request, command: str) -> FailedRunsError | None:
    """Compute what is missing, watched; returns what failed."""
    place = Place(device=request.device, data=request.data.resolve() if request.data else None)
    runs = len(sweep.missing) + len(sweep.unsettled)
    # What libraries print must not mix with rows that a program reads
    with watching(sweep.name, runs, sys.stderr) as watch, redirect_stdout(sys.stderr):
        try:
            sweep.run(
                place, engine=request.engine, workers=request.workers, command=command, watch=watch
            )
        except FailedRunsError as failure:
            return failure
    return None


def _show(sweep: Sweep, *, text: bool) -> None:
    """The table and the claims as text, if asked for, and the files of a figure."""
    rows = sweep.rows
    if not rows:
        return
    written = [sweep.file.path]
    with readable(sweep):
        if text:
            _say(_as_text(sweep, rows))
        try:
            written += draw(sweep.figure, rows, sweep.out)
        except ImportError as error:
            page = f"pathcond report {shlex.quote(str(sweep.out))}"
            _complain(
                f"No drawings: {error}\nThe rows are written; once it is there, this draws "
                f"them: {page}"
            )
        folder = sweep.out / "tensorboard" / sweep.name
        curves = to_tensorboard(rows, folder, sweep.file.path.stat().st_mtime)
    written += [curves] if curves else []
    _complain(f"Written: {', '.join(map(str, written))}")


def _as_text(sweep: Sweep, rows: Sequence[Row]) -> str:
    lines = []
    if sweep.preset != "paper":
        lines += [f"Preset {sweep.preset}: smaller networks and data than the paper's.", ""]
    lines += [cite(sweep.figure.table(rows)), ""]
    if sweep.preset == "smoke":
        return "\n".join([*lines, "No verdicts: these runs only show that all of it runs."])
    for claim in sweep.figure.claims(rows):
        lines += [f"{claim.verdict}: {cite(claim.paper)}"]
        lines += [f"    {cite(line)}" for line in (claim.decides, claim.more) if line]
        lines += [f"    This library: {claim.ours}"] if claim.ours else []
    return "\n".join(lines)


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _complain(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
