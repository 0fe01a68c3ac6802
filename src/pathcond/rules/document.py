"""Writes the page of supported operations from the rule table: ``python -m pathcond.rules.document FILE``."""

from __future__ import annotations

import sys
from pathlib import Path

from . import RULES

HEAD = """# Supported operations

Generated from the rule table by `make docs`. Operations are ATen names as `torch.export` shows them; an in-place
variant (`relu_`) has the rule of its functional form. Whatever is not listed pins the scales that reach it to 1: the
function is kept, a symmetry may be lost, and `symmetry.pinned` names the operation.
"""


def page() -> str:
    """The page in Markdown."""
    families: dict[str, list[str]] = {}
    for op, rule in RULES.items():
        families.setdefault(rule.family, []).append(op)
    parts = [HEAD]
    for family, ops in sorted(families.items()):
        listed = ", ".join(f"`{op}`" for op in sorted(ops))
        parts.append(f"## {family}\n\n{listed}\n")
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page())
