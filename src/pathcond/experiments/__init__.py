"""The paper's tables and figures, one module each, behind ``pathcond reproduce NAME``.

A module has two functions: ``run()`` yields rows (frozen dataclasses) as they are ready, ``table(rows)`` lays them out as
text beside the paper's values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, cast

EXPERIMENTS = {
    "table1": "parameters, hidden units and paths of the paper's networks (tab:architecture_stats)",
}


class Experiment(Protocol):
    """What a module of this package offers."""

    def run(self) -> Iterator[Any]:
        """Yield the rows, dataclasses, one by one."""

    def table(self, rows: Sequence[Any]) -> str:
        """The rows as text, beside the paper's values."""


def load(name: str) -> Experiment:
    """Import the experiment of that name; only then are its own imports paid for.

    Raises:
        KeyError: There is none.
    """
    if name not in EXPERIMENTS:
        raise KeyError(name)
    return cast(Experiment, importlib.import_module(f"{__name__}.{name}"))
