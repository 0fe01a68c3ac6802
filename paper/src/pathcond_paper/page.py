"""A folder of results as one page: every figure with its drawings, the paper's claims beside ours,
and how it was made.
"""

from __future__ import annotations

import re
import shlex
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from pathcond.report.page import render
from pathcond.rows import Job, Row, Rows, RowsError

from . import FIGURES, load
from .citing import cite
from .figure import PRESETS, Claim, Figure, Preset, Verdict
from .style import drawings, save
from .sweep.selection import describe_jobs
from .sweep.sweep import Sweep, readable
from .training.methods import METHODS

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

VERDICTS: tuple[Verdict, ...] = get_args(Verdict)
VERSIONS = ("pathcond", "torch", "python")
# What each figure shows, for somebody who has not read the paper.
ABOUT = {
    "toy": "A single neuron, trained from three starts as it is and conditioned: how fast the loss "
    "falls, and which way the weights and the function take.",
    "mlp-depth": "How many passes over the data networks of 2 to 8 hidden layers need until they "
    "classify 99 % of the training images right; fewer is better.",
    "cifar-nv": "Training and test accuracy of a convolutional network, epoch by epoch; higher is "
    "better. Two networks: “as published” is the one that the authors trained, with biases and "
    "no BatchNorm behind the classifier; “as described” is that of their text, without biases and "
    "with that BatchNorm.",
    "autoencoder": "How well networks that squeeze images through a narrow layer reproduce them, "
    "over how narrow it is; a lower loss is better.",
    "regimes": "How far conditioning moves the weights of a fresh network, over how uneven its "
    "widths and how large its weights are.",
    "timing": "How long conditioning takes, beside one pass over the training data.",
    "convergence": "How close the paper's algorithm is to the optimum after each of its sweeps; "
    "lower is better.",
    "smooth": "With smooth activations a rescaling keeps the function only nearly: how much the "
    "outputs change, and whether training still gains.",
    "tuned": "Networks as they are and conditioned in several ways, each at the learning rate that "
    "is best for it: the loss on test data, beside what a search over scales of layers finds.",
    "criteria": "Small examples in which several ways to choose a rescaling give the same answer.",
    "table1": "How large the paper's networks are: parameters, hidden units that can be rescaled, "
    "and paths from inputs to outputs.",
}
MEANINGS: dict[Verdict, str] = {
    "reproduced": "our runs of the paper's method agree with its sentence",
    "not reproduced": "our runs of the paper's method do not agree with it",
    "met": "a goal of our own that our runs reach",
    "missed": "a goal of our own that they do not reach",
    "not run": "there are no runs to tell by",
}
# Methods, and words of the tables.
WORDS = (
    *((method.title, method.about) for method in METHODS.values()),
    (
        "seed",
        "One repetition with other random weights and batches; ± is the standard deviation over "
        "seeds.",
    ),
    (
        "never, neither",
        "The method did not get there in all of its runs; neither it nor the baseline did.",
    ),
)
SAID_APART = ("command", "commit", "date", "seconds", *VERSIONS)


@dataclass(frozen=True, kw_only=True)
class Made:
    """How the rows of a figure came about.

    Attributes:
        runs: How many there are, and of how many.
        left: Which are not there, by their settings; empty if all are.
        commands: That made them.
        facts: What is known besides, each with its distinct values: devices, versions, days.
    """

    runs: str
    left: str
    commands: tuple[str, ...]
    facts: dict[str, str]


@dataclass(frozen=True, kw_only=True)
class Reproduction:
    """A figure of the paper and what there is of it.

    Attributes:
        name, title, labels: Of the figure, in words, and in the paper.
        about: What it shows, in a sentence.
        command: That runs it.
        claims: The paper's, with their verdicts.
        rows: Empty if it was not run; then it has neither drawings nor text, and was not made.
        drawings: By name of the file.
        text: The rows as a table.
        made: How.
    """

    name: str
    title: str
    labels: str
    about: str = ""
    command: str
    claims: Sequence[Claim]
    rows: Sequence[Row] = ()
    drawings: dict[str, Drawing]
    text: str = ""
    made: Made | None = None


def gather(folder: Path) -> list[Reproduction]:
    """All figures of the paper from the results files of a folder.

    Raises:
        RowsError: There are none, or one cannot be used; the message names it.
    """
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        near = ", ".join(sorted({str(path.parent) for path in folder.glob("*/*.jsonl")}))
        how = (
            f"there are some in {near}."
            if near
            else f"pathcond reproduce all --out {shlex.quote(str(folder))} makes some."
        )
        raise RowsError(f"There are no results in {folder}: {how}")
    unknown = [str(path) for name, path in files.items() if name not in FIGURES]
    if unknown:
        raise RowsError(
            f"{', '.join(unknown)}: no figure has this name. Move it away; there is "
            f"{', '.join(FIGURES)}."
        )
    presets = {preset: None for name in files for preset in [_preset(Rows(files[name]))] if preset}
    return [_reproduction(name, folder, next(iter(presets), "paper")) for name in FIGURES]


def counts(claims: Sequence[Claim]) -> dict[Verdict, int]:
    """Number of claims by verdict, in the order of the verdicts."""
    return {verdict: sum(claim.verdict == verdict for claim in claims) for verdict in VERDICTS}


def page(folder: Path) -> str:
    """The page of a folder of results: one file, nothing to load.

    Raises:
        RowsError: There are no results, or they cannot be used.
        ImportError: Without matplotlib or jinja2.
    """
    figures = gather(folder)
    shown = [
        {
            "figure": figure,
            "counts": {verdict: count for verdict, count in counts(figure.claims).items() if count},
            "images": list(_images(figure)),
        }
        for figure in figures
    ]
    return render(
        "results.html.jinja",
        package="pathcond_paper",
        cite=cite,
        title="PathCond: the paper, reproduced",
        total=counts([claim for figure in figures for claim in figure.claims]),
        meanings=MEANINGS,
        words=WORDS,
        shown=[entry for entry in shown if cast(Reproduction, entry["figure"]).rows],
        missing=[entry for entry in shown if not cast(Reproduction, entry["figure"]).rows],
    )


def _preset(file: Rows) -> Preset | None:
    """Of the first row; one file holds one preset."""
    first = next(iter(file), None)
    if first is None:
        return None
    found = first.job.get("preset") if isinstance(first.job, dict) else None
    if found not in PRESETS:
        raise RowsError(
            f"{file.path} holds a run of the preset {found!r}, not "
            f"{', '.join(PRESETS)}: it is none of reproduce."
        )
    return cast(Preset, found)


def _reproduction(name: str, folder: Path, usual: Preset) -> Reproduction:
    figure = load(name)
    file = Rows(folder / f"{name}.jsonl")
    preset = _preset(file)
    title, _, labels = FIGURES[name].rpartition(" (")
    known: dict[str, Any] = {
        "name": name,
        "title": title[:1].upper() + title[1:],
        "labels": labels.removesuffix(")"),
        "about": ABOUT.get(name, ""),
        "command": f"pathcond reproduce {name} --preset {preset or usual} --out "
        f"{shlex.quote(str(folder))}",
    }
    if preset is None:
        return Reproduction(**known, claims=figure.claims([]), drawings={})
    sweep = Sweep(name=name, figure=figure, preset=preset, out=folder)
    with readable(sweep):
        return _read(figure, sweep, known)


def _read(figure: Figure, sweep: Sweep, known: dict[str, Any]) -> Reproduction:
    rows = sweep.rows
    drawn, made = drawings(figure, rows), _made(sweep, rows)
    return Reproduction(
        **known,
        rows=rows,
        claims=figure.claims(rows),
        drawings=drawn,
        text=figure.table(rows),
        made=made,
    )


def _made(sweep: Sweep, rows: Sequence[Row]) -> Made:
    missing = sweep.missing
    count = f"{len(rows):,} of {len(rows) + len(missing):,}" if missing else f"{len(rows):,}"
    origins = [row.origin for row in rows]
    keys = dict.fromkeys(key for origin in origins for key in origin if key not in SAID_APART)
    facts = {
        str(key): ", ".join(_distinct(origins, key))
        for key in sorted(keys, key=lambda key: key != "device")
    }
    versions = [
        f"{key} {', '.join(found)}" for key in VERSIONS if (found := _distinct(origins, key))
    ]
    days = sorted({date[:10] for date in _distinct(origins, "date")})
    facts |= {"versions": "; ".join(versions)} if versions else {}
    facts["commit"] = _commits(origins)
    older = _older(rows, getattr(sweep.figure, "CHANGED", {}))
    facts |= {"older than the code they depend on": older} if older else {}
    facts |= {"date": " to ".join(dict.fromkeys((days[0], days[-1])))} if days else {}
    facts |= {"time of all runs": spent} if (spent := _spent(origins)) else {}
    smaller = "" if sweep.preset == "paper" else ", smaller than the paper's"
    return Made(
        runs=f"{count} runs of the preset {sweep.preset}{smaller}",
        left=describe_jobs(missing, sweep.jobs),
        commands=tuple(
            dict.fromkeys(_today(command, sweep.jobs) for command in _distinct(origins, "command"))
        ),
        facts=facts,
    )


def _older(rows: Sequence[Row], changed: Mapping[str, str]) -> str:
    """How many rows of which methods were made before the method changed; empty if none were.

    >>> old, new = ({"date": f"2026-11-{day}T00:00:00"} for day in (14, 16))
    >>> rows = [Row({"method": "paper"}, {}, origin) for origin in (old, old, new)]
    >>> _older(rows, {"paper": "2026-11-15"})
    '2 rows of paper, which changed on 2026-11-15'
    """
    kinds = [(str(row.job.get("method", row.job.get("part"))), row.origin) for row in rows]
    counted = Counter(
        kind
        for kind, origin in kinds
        if kind in changed and str(origin.get("date", "")) < changed[kind]
    )
    return ", ".join(
        f"{count:,} row{'s' * (count != 1)} of {method}, which changed on {changed[method][:10]}"
        for method, count in counted.items()
    )


def _commits(origins: Sequence[dict[str, Any]]) -> str:
    """The commits that rows were made at, with their numbers of rows.

    >>> _commits([{"commit": "c" * 40}, {"commit": None}, {}])
    'cccccccccccc (1 row), not recorded (2 rows)'
    """
    counted = Counter(origin.get("commit") for origin in origins)
    return ", ".join(
        f"{_short(commit)} ({count:,} row{'s' * (count != 1)})" for commit, count in counted.items()
    )


def _short(commit: object) -> str:
    """A commit with the first twelve of its digits.

    >>> _short("0123456789abcdef+changes")
    '0123456789ab+changes'
    """
    if not commit:
        return "not recorded"
    digits, plus, changes = str(commit).partition("+")
    return f"{digits[:12]}{plus}{changes}"


def _today(command: str, jobs: Sequence[Job]) -> str:
    """A command as it is given now: by the program's name, without methods that are gone.

    >>> jobs = [{"method": "paper"}, {"method": "exact"}]
    >>> _today("python -m pathcond.experiments reproduce toy --only method=old,exact", jobs)
    'python -m pathcond_paper reproduce toy --only method=exact'
    """
    methods = {job.get("method") for job in jobs}

    def keep(found: re.Match[str]) -> str:
        return ",".join(name for name in found[0].split(",") if name in methods) or found[0]

    command = command.replace("python -m pathcond.experiments ", "python -m pathcond_paper ")
    return re.sub(r"(?<=--only method=)[\w,-]+", keep, command)


def _spent(origins: Sequence[dict[str, Any]]) -> str:
    """The time of all runs, device by device where there are several.

    >>> _spent([{"device": "A", "seconds": 90}, {"device": "B", "seconds": 5}])
    '1 min 30 s on A, 5.0 s on B'
    """
    seconds: dict[str, float] = {}
    for origin in origins:
        found = origin.get("seconds")
        if isinstance(found, int | float):
            device = str(origin.get("device", "an unknown device"))
            seconds[device] = seconds.get(device, 0.0) + found
    if len(seconds) < 2:
        return "".join(map(_duration, seconds.values()))
    return ", ".join(f"{_duration(found)} on {device}" for device, found in seconds.items())


def _distinct(origins: Sequence[dict[str, Any]], key: str) -> list[str]:
    """The values that occur, as text, in the order of their first row."""
    return list(dict.fromkeys(str(origin[key]) for origin in origins if key in origin))


def _duration(seconds: float) -> str:
    """In words, two units at most.

    >>> _duration(7384), _duration(61), _duration(2.34)
    ('2 h 3 min', '1 min 1 s', '2.3 s')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes_left = divmod(minutes, 60)
    return f"{hours} h {minutes_left} min" if hours else f"{minutes} min {rest} s"


def _images(figure: Reproduction) -> Iterator[dict[str, Any]]:
    """The drawings of a figure, each with the one for narrow screens."""
    narrow = drawings(load(figure.name), figure.rows, stacked=True) if figure.rows else {}
    for name, drawing in figure.drawings.items():
        width, height = drawing.get_size_inches()
        yield {
            "caption": str(drawing.get_label()),
            "source": _address(drawing),
            "stacked": _address(narrow[name]),
            "width": round(96 * width),
            "height": round(96 * height),
        }


def _address(drawing: Drawing) -> str:
    """An address that holds a drawing whole: identifiers of several SVG would clash on a page,
    inside images they do not.
    """
    file = BytesIO()
    # letters as outlines, the same with whatever fonts there are
    save(drawing, file, "svg", **{"svg.fonttype": "path"})
    return f"data:image/svg+xml;base64,{b64encode(file.getvalue()).decode()}"
