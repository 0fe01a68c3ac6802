"""Plain-text tables for people; no dependency."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from .report import Report
    from .symmetry import Pinned, Symmetry, UnitGroup

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
    return "\n".join([head, "", *_body(rows, symmetry.groups, symmetry.pinned)])


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


def report_table(report: Report) -> str:
    """What ``condition_`` did, in one screen: the criterion, the outputs, the scales of every layer, what is pinned."""
    approximate = ", approximate" if report.approximate else ""
    head = (
        f"{report.model_name} conditioned: {_count(report.num_units, 'unit')} in {_count(len(report.groups), 'group')}, "
        f'normalization="{report.normalization}"{approximate}, {report.solver.partition("(")[0]}'
    )
    before, after = report.spread()
    seconds = ", ".join(f"{stage} {value:.2f}" for stage, value in report.seconds.items())
    rounded = "; factors rounded to powers of two" if report.rounded else ""
    in_eval, in_train = _change(report.output_change_eval), _change(report.output_change_train)
    facts = [
        ("criterion", f"{report.objective_before:.8g} → {report.objective_after:.8g}; {report.solution.message}"),
        *([("diag G", f"{before:.1f} → {after:.1f} decades between the 5th and 95th percentile{_zero_share(report.zero_share)}"),
           ("pace", f"× {report.pace:.2g}: how fast plain SGD moves the paths at the same learning rate")]
          if report.diagonal else []),
        ("outputs", f"changed by {in_eval} in eval mode, {in_train} in train mode{rounded}"),
        ("seconds", f"{sum(report.seconds.values()):.2f} ({seconds})"),
    ]  # fmt: skip
    parts = [head, "", *(f"  {name:<9}  {fact}" for name, fact in facts), ""]
    rows = [("units", "made by", "log λ least … median … greatest", "distribution")]
    for group, row in list(zip(report.groups, report.layers(), strict=True))[:MAX_ROWS]:
        scales = " … ".join(f"{round(row[key], 2) + 0.0:+.2f}" for key in ("least", "median", "greatest"))
        rows.append((f"{row['units']:,}", row["name"], scales, sparkline(report.log_scales[list(group.units)])))
    return "\n".join(parts + _body(rows, report.groups, report.pinned))


def _body(rows: Sequence[tuple[str, str, str, str]], groups: Sequence[UnitGroup], pinned: Sequence[Pinned]) -> list[str]:
    """One line per group, how many more there are, and what is pinned."""
    parts = _aligned(rows) if groups else ["  nothing can be rescaled"]
    if len(groups) > MAX_ROWS:
        rest = groups[MAX_ROWS:]
        parts.append(f"  … and {len(rest)} more groups with {sum(len(g.units) for g in rest):,} units")
    if pinned:
        parts += ["", "Pinned (scale 1):", *(f"  {line}" for line in pinned_lines(pinned))]
    return parts


def sparkline(values: Tensor, bins: int = 16) -> str:
    """The distribution of some values as a row of bars, from the least to the greatest."""
    low, high = float(values.min()), float(values.max())
    if high - low < 1e-9:
        return "█"
    counts = torch.histc(values.double().cpu(), bins, low, high)
    return "".join(" ▁▂▃▄▅▆▇█"[int((8 * count / counts.max()).ceil())] for count in counts)


def _change(change: float | None) -> str:
    return "an unknown amount (not verified)" if change is None else f"{change:.1e}"


def _zero_share(share: float) -> str:
    return f"; {share:.1%} of the parameters have g = 0 and do not count" if share else ""


def pinned_lines(pinned: Sequence[Pinned]) -> list[str]:
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
