"""Plain text for people: numbers with nouns, lists of names, columns; no dependency."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

MAX_ROWS = 40
MAX_NAMES = 2


def count_of(number: int, noun: str) -> str:
    """``1 unit``, ``2,000 units``."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def count_are(number: int, noun: str) -> str:
    """``1 unit is``, ``2,000 units are``."""
    return f"{count_of(number, noun)} {'is' if number == 1 else 'are'}"


def first_of(names: Sequence[str], shown: int = 3) -> str:
    """``a, b, c, ...``: the first of some names."""
    return ", ".join([*names[:shown], *(["..."] if len(names) > shown else [])])


def name_list(names: Sequence[str]) -> str:
    """``conv.weight, bn.{bias,running_mean} +3``: by module, the first few, and how many more."""
    by_module: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        module, _, leaf = name.rpartition(".")
        by_module.setdefault(module, []).append(leaf)
    shown = []
    for module, leaves in list(by_module.items())[:MAX_NAMES]:
        leaf = leaves[0] if len(leaves) == 1 else "{" + ",".join(leaves) + "}"
        shown.append(f"{module}.{leaf}" if module else leaf or "(model)")
    more = len(by_module) - MAX_NAMES
    return (", ".join(shown) + (f" +{more}" if more > 0 else "")) or "–"


def align(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    """Rows of a table as lines: numbers to the right, text to the left."""
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [
        f"  {row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip()
        for row in rows
    ]


def sparkline(values: Tensor, bins: int = 16) -> str:
    """The distribution of some values as a row of bars, from the least to the greatest."""
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-9:
        return "█"
    counts = torch.histc(values.double().cpu(), bins, low, high)
    return "".join(" ▁▂▃▄▅▆▇█"[int((8 * count / counts.max()).ceil())] for count in counts)
