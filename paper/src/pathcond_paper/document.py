"""Writes the page of the docs that sets the paper's claims beside our measurements, from the rows
of a folder of results:

    python -m pathcond_paper.document results/paper docs/reproduction.md

The drawings are written to the folder of results.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from urllib.parse import quote

from . import load
from .citing import cite
from .figure import Claim
from .page import WORDS, Reproduction, counts, gather
from .sweep.sweep import draw

HEAD = """# The paper, reproduced

Every figure and table of the paper with its claims: reproduced, not reproduced, or not run. The
verdict is on the paper's method as its authors published it, by the numbers that stand first; what
this library does in its place is said apart. Where the paper gives no number to hold a sentence
against, the bound that decides is ours; it stands with each claim, under "More on these claims".
Goals of our own are met or missed. Generated from the rows of results by `make docs`; `pathcond
report` makes a page of the same with all numbers.
"""


def write(folder: Path, out: Path) -> None:
    """Write the page, and the drawings into the folder of results."""
    for figure in gather(folder):
        if figure.rows:
            draw(load(figure.name), figure.rows, folder)
    out.write_text(page(folder, out), encoding="utf-8")


def page(folder: Path, out: Path) -> str:
    """The page in Markdown.

    Args:
        folder: Of results.
        out: Where the page will be; links are relative to there.
    """
    figures = gather(folder)
    total = counts([claim for figure in figures for claim in figure.claims])
    parts = [
        HEAD,
        _table(("claims", *total), [("number", *map(str, total.values()))]),
        _table(("in tables and figures", "is"), [(_text(t), _text(about)) for t, about in WORDS]),
    ]
    for figure in figures:
        if figure.rows:
            parts += _section(figure, folder, out)
    missing = [figure for figure in figures if not figure.rows]
    if missing:
        parts += ["## Not run\n", *_not_run(missing)]
    return "\n".join(parts)


def _section(figure: Reproduction, folder: Path, out: Path) -> Iterator[str]:
    yield f"## {_text(figure.title)}\n"
    yield f"{_text(figure.about)}\n"
    for name in figure.drawings:
        path = Path(os.path.relpath(folder / f"{name}.png", out.parent)).as_posix()
        caption = _text(str(figure.drawings[name].get_label()))
        yield f"![{caption}]({quote(path)})\n"
        yield f"{caption}\n"
    claims = [
        (_text(claim.paper), _text(claim.decides or "–"), f"**{claim.verdict}**")
        for claim in figure.claims
    ]
    yield _table(("paper", "measured", "verdict"), claims)
    notes = [note for claim in figure.claims if (note := _note(claim))]
    if notes:
        yield f"<details><summary>More on these claims</summary>\n\n{''.join(notes)}\n</details>\n"
    if figure.made:
        facts = "; ".join(f"{key}: {value}" for key, value in figure.made.facts.items())
        left = f" Not run: {_text(figure.made.left)}." if figure.made.left else ""
        runs = f"{_text(figure.made.runs)}.{left} {_text(facts)}"
        yield f"`{figure.name}` ({_text(figure.labels)}), {runs}.\n"
        commands = "".join(
            f"{line}\n" for command in figure.made.commands for line in command.splitlines()
        )
        yield (
            f"<details><summary>Commands</summary><pre>\n{escape(commands, quote=False)}</pre>"
            "</details>\n"
        )
    numbers = escape(cite(load(figure.name).table(figure.rows)))
    yield f"<details><summary>All numbers</summary><pre>\n{numbers}\n</pre></details>\n"


def _note(claim: Claim) -> str:
    """The details of a claim and what the library does, as an entry of a list."""
    ours = f" **This library:** {_text(claim.ours)}" if claim.ours else ""
    if not claim.more and not ours:
        return ""
    return f"- *{_text(claim.paper)}* {_text(claim.more)}{ours}\n"


def _not_run(figures: list[Reproduction]) -> Iterator[str]:
    for figure in figures:
        yield f"### {_text(figure.title)}\n"
        yield f"`{figure.name}` ({_text(figure.labels)})\n"
        yield f"    {figure.command}\n"
        yield "".join(f"- {_text(claim.paper)}\n" for claim in figure.claims)


def _table(head: tuple[str, ...], lines: Sequence[tuple[str, ...]]) -> str:
    return "".join(f"| {' | '.join(line)} |\n" for line in (head, ("---",) * len(head), *lines))


def _text(text: str) -> str:
    """Text that Markdown shows as it is, in one line.

    >>> _text("a|b <i> [x](y)")
    'a\\\\|b &lt;i&gt; \\\\[x\\\\](y)'
    """
    text = (
        " ".join(cite(text).split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    )
    return re.sub(r"([\\`*\[\]|])", r"\\\1", text)


if __name__ == "__main__":
    write(*map(Path, sys.argv[1:]))
