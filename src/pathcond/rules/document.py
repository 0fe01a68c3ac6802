"""Writes the page of supported operations from the rule table: ``python -m pathcond.rules.document
FILE``.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

from .table import RULES, Column, Rule

HEAD = """# Supported operations

Generated from the rule table by `make docs`. Operations are ATen names as `torch.export` shows
them; an in-place variant (`relu_`) has the rule of its functional form.
"""

SCALES = """## How log-scales pass

Whatever is not listed pins the scales that reach it to 1: the function is kept, a symmetry may be
lost, and `symmetry.pinned` names the operation.
"""

ENERGY = """## How path energy passes

"The example batch" is measured with `calibrate=True`; without, such a factor is 1. Whatever is not
listed ends the paths that reach it; what it computes is frozen at its value on the example batch,
and `pathcond.lifting.off_path` names the operation.
"""


def page() -> str:
    """The page in Markdown."""
    families: dict[str, list[str]] = {}
    passages: dict[str, list[str]] = {}
    for op, rule in RULES.items():
        families.setdefault(rule.family.title, []).append(op)
        passages.setdefault(_energy(rule), []).append(op)
    return "\n".join([HEAD, SCALES, *_sections(families), ENERGY, *_sections(passages)])


def _sections(groups: dict[str, list[str]]) -> list[str]:
    return [
        f"### {title}\n\n{', '.join(f'`{op}`' for op in sorted(ops))}\n"
        for title, ops in sorted(groups.items())
    ]


def _energy(rule: Rule) -> str:
    return _summary(rule.energy) if rule.energy else "Paths end"


def _summary(column: Column) -> str:
    return (
        (inspect.getdoc(column.function) or "")
        .partition("\n\n")[0]
        .replace("\n", " ")
        .removesuffix(".")
    )


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
