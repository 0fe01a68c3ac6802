"""A Symmetry as a table: what can be rescaled and what cannot."""

from __future__ import annotations

from collections.abc import Sequence

from ..text import MAX_NAMES, MAX_ROWS, align, count_of, name_list
from .units import Pinned, UnitGroup


def symmetry_table(
    head: str, groups: Sequence[UnitGroup], pinned: Sequence[Pinned], not_given: Sequence[str]
) -> str:
    """What can be rescaled and what cannot, one line per group and per reason; and what was not
    looked at.
    """
    rows = [("units", "made by", "multiplied by λ", "divided by λ")]
    for group in groups[:MAX_ROWS]:
        rows.append(
            (
                f"{len(group.units):,}",
                group.name or "(model)",
                name_list(group.multiplied),
                name_list(group.divided),
            )
        )
    parts = [head, "", *table_body(rows, groups, pinned)]
    if not_given:
        more = f" and {len(not_given) - MAX_NAMES} more" if len(not_given) > MAX_NAMES else ""
        parts += [
            "",
            f"Not looked at: what forward does with {', '.join(not_given[:MAX_NAMES])}{more}. "
            f"No example gives {'it' if len(not_given) == 1 else 'them'}; other_inputs= takes one "
            "that does.",
        ]
    return "\n".join(parts)


def table_body(
    rows: Sequence[tuple[str, str, str, str]], groups: Sequence[UnitGroup], pinned: Sequence[Pinned]
) -> list[str]:
    """One line per group, how many more there are, and what is pinned."""
    parts = align(rows) if groups else ["  nothing can be rescaled"]
    if len(groups) > MAX_ROWS:
        rest = groups[MAX_ROWS:]
        parts.append(
            f"  … and {len(rest)} more groups with {sum(len(g.units) for g in rest):,} units"
        )
    if pinned:
        parts += ["", "Pinned (scale 1):", *(f"  {line}" for line in pinned_lines(pinned))]
    return parts


def pinned_lines(pinned: Sequence[Pinned]) -> list[str]:
    """What keeps scale 1, one line per reason."""
    by_reason: dict[tuple[str, str], list[Pinned]] = {}
    for pin in pinned:
        by_reason.setdefault((pin.operation, pin.reason), []).append(pin)
    lines = []
    for (operation, reason), pins in list(by_reason.items())[:MAX_ROWS]:
        units = sum(pin.units for pin in pins)
        parameters = sum(pin.units == 0 for pin in pins)
        amounts = [count_of(units, "unit")] * bool(units) + [
            count_of(parameters, "parameter")
        ] * bool(parameters)
        place = next((pin.line or pin.module for pin in pins if pin.line or pin.module), "")
        where = f"{operation} at {place}" if place else operation
        lines.append(
            f"{' and '.join(amounts)} of {name_list([pin.name for pin in pins])}: "
            f"{reason} [{where}]"
        )
    if len(by_reason) > MAX_ROWS:
        lines.append(f"… and {len(by_reason) - MAX_ROWS} more reasons")
    return lines
