"""Plain-text tables for people; no dependency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .symmetry import Pinned, Symmetry

MAX_ROWS = 40
MAX_NAMES = 2


def symmetry_table(symmetry: Symmetry) -> str:
    """What can be rescaled and what cannot, one line per group and per reason."""
    approximate = ", approximate" if symmetry.approximate else ""
    head = (
        f"Symmetry of {symmetry.model_name}: {_count(symmetry.num_units, 'unit')} in "
        f'{_count(len(symmetry.groups), "group")}, normalization="{symmetry.normalization}"{approximate}'
    )
    rows = [("units", "made by", "multiplied by λ", "divided by λ")]
    for group in symmetry.groups[:MAX_ROWS]:
        rows.append((f"{len(group.units):,}", group.name or "(model)", _names(group.multiplied), _names(group.divided)))
    parts = [head, ""]
    parts += _aligned(rows) if symmetry.groups else ["  nothing can be rescaled"]
    if len(symmetry.groups) > MAX_ROWS:
        rest = symmetry.groups[MAX_ROWS:]
        parts.append(f"  … and {len(rest)} more groups with {sum(len(g.units) for g in rest):,} units")
    if symmetry.pinned:
        parts += ["", "Pinned (scale 1):"]
        parts += [f"  {line}" for line in _pinned_lines(symmetry.pinned)]
    return "\n".join(parts)


def paths_table(log10_paths: float, path_norm: float, off_path: dict[str, str], regime: str) -> str:
    """The path lifting in a few lines: how many paths, what lies on none, and whether rescaling will do much."""
    lines = [f"Paths: 10^{log10_paths:.2f}, ‖Φ‖₂ = {path_norm:.4g}", regime]
    if off_path:
        by_reason: dict[str, list[str]] = {}
        for name, reason in off_path.items():
            by_reason.setdefault(reason.partition(" at ")[0], []).append(name)
        lines += ["", "Parameters on no path (diag G = 0):"]
        lines += [f"  {len(names):,}: {reason} [{_names(names)}]" for reason, names in by_reason.items()]
    return "\n".join(lines)


def _pinned_lines(pinned: Sequence[Pinned]) -> list[str]:
    by_reason: dict[tuple[str, str], list[Pinned]] = {}
    for pin in pinned:
        by_reason.setdefault((pin.operation, pin.reason), []).append(pin)
    lines = []
    for (operation, reason), pins in list(by_reason.items())[:MAX_ROWS]:
        units, parameters = sum(pin.units for pin in pins), sum(pin.units == 0 for pin in pins)
        amounts = [_count(units, "unit")] * bool(units) + [_count(parameters, "parameter")] * bool(parameters)
        place = next((pin.line or pin.module for pin in pins if pin.line or pin.module), "")
        where = f"{operation} at {place}" if place else operation
        lines.append(f"{' and '.join(amounts)} of {_names([pin.name for pin in pins])}: {reason} [{where}]")
    if len(by_reason) > MAX_ROWS:
        lines.append(f"… and {len(by_reason) - MAX_ROWS} more reasons")
    return lines


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _names(names: Sequence[str]) -> str:
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


def _aligned(rows: Sequence[tuple[str, str, str, str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    return [f"  {row[0]:>{widths[0]}}  {row[1]:<{widths[1]}}  {row[2]:<{widths[2]}}  {row[3]}".rstrip() for row in rows]
