"""Report: the record of one conditioning."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from .conditioning import Conditioning
from .text import report_table


@dataclass(frozen=True, kw_only=True)
class Report(Conditioning):
    """What was found, what was done, and what it changed.

    Attributes:
        model_name: Class of the model.
        normalization, approximate: As asked for.
        solver, criterion: What was minimised and by what, with their settings.
        solution: The solver's answer; ``log_scales``, ``objective_before`` and ``objective_after``
            are its own.
        groups: The units by layer, in forward order.
        pinned: What stayed at scale 1, by which operation, at which module and line.
        diagonal: diag(G) of every parameter before and after, sampled.
        output_change_eval, output_change_train: Largest change of an output relative to the largest
            output; None if not verified.
        rounded: Whether factors were rounded to powers of two.
        seconds: Wall-clock time of every stage.
        at_bound: Units at a bound, {what sets it: how many}.
    """

    def to_html(self, path: str | os.PathLike[str], *, name: str | None = None) -> Path:
        """Write one self-contained page: log-scales by layer, diag(G), what is pinned, outputs.

        Args:
            path: Of the file.
            name: What the page calls the model; by default the name of its class.

        Returns:
            The path.
        """
        from .page import conditioning_page  # needs an extra

        path = Path(path)
        path.write_text(conditioning_page(self, name), encoding="utf-8")
        return path

    def __str__(self) -> str:
        return report_table(self)
