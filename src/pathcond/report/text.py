"""A Report in one screen of the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..symmetry.text import table_body
from ..text import MAX_ROWS, count_of, name_list, sparkline
from .conditioning import Conditioning

ALIKE = 0.01  # log-scales that differ by less look alike with two decimals


def report_table(report: Conditioning) -> str:
    """What ``condition_`` did, in one screen: the criterion, the outputs, the scales of every
    layer, what is pinned.
    """
    approximate = ", approximate" if report.approximate else ""
    done = "conditioned" if report.changed else "is as it was"
    head = (
        f"{report.model_name} {done}: {count_of(report.num_units, 'unit')} in "
        f"{count_of(len(report.groups), 'group')}, "
        f'normalization="{report.normalization}"{approximate}, {report.solver.partition("(")[0]}'
    )
    before, after = report.spread()
    name = report.criterion.partition("(")[0]
    seconds = ", ".join(f"{stage} {value:.2f}" for stage, value in report.seconds.items())
    rounded = "; factors rounded to powers of two" if report.rounded else ""
    in_eval = _change(report.output_change_eval)
    in_train = _change(report.output_change_train)
    facts = [
        (
            "criterion",
            f"{name}: {report.objective_before:.8g} → {report.objective_after:.8g}; "
            f"{report.solution.message}",
        ),
        *(
            [
                (
                    "diag G",
                    f"{before:.1f} → {after:.1f} decades between the 5th and 95th "
                    f"percentile{_zero_share(report.zero_share)}",
                ),
                ("pace", _pace(report.paces, report.rate_factors)),
            ]
            if report.diagonal
            else []
        ),
        *([("bounds", tell_bounds(report.at_bound))] if report.at_bound else []),
        ("outputs", f"changed by {in_eval} in eval mode, {in_train} in train mode{rounded}"),
        ("seconds", f"{sum(report.seconds.values()):.2f} ({seconds})"),
    ]
    parts = [head, "", *(f"  {name:<9}  {fact}" for name, fact in facts), ""]
    rows = [("units", "made by", "log λ least … median … greatest", "distribution")]
    for group, row in list(zip(report.groups, report.layers(), strict=True))[:MAX_ROWS]:
        scales = " … ".join(
            f"{round(row[key], 2) + 0.0:+.2f}" for key in ("least", "median", "greatest")
        )
        alike = row["greatest"] - row["least"] < ALIKE
        distribution = "█" if alike else sparkline(report.log_scales[list(group.units)])
        rows.append((f"{row['units']:,}", row["name"], scales, distribution))
    return "\n".join(parts + table_body(rows, report.groups, report.pinned))


def paths_table(log10_paths: float, path_norm: float, off_path: dict[str, str], regime: str) -> str:
    """The path lifting in a few lines: how many paths, what lies on none, and whether rescaling
    will do much at small learning rates.
    """
    lines = [f"Paths: 10^{log10_paths:.2f}, ‖Φ‖₂ = {path_norm:.4g}", regime]
    if off_path:
        by_reason: dict[str, list[str]] = {}
        for name, reason in off_path.items():
            by_reason.setdefault(reason.partition(" at ")[0], []).append(name)
        lines += ["", "Parameters on no path (diag G = 0):"]
        lines += [
            f"  {len(names):,}: {reason} [{name_list(names)}]"
            for reason, names in by_reason.items()
        ]
    return "\n".join(lines)


def tell_bounds(at_bound: Mapping[str, int]) -> str:
    """Which units are at a bound, as a sentence.

    >>> tell_bounds({"the ε of a norm": 1200, "max_log_scale": 8})
    '1,200 units go as far as the ε of a norm allows, 8 units as far as max_log_scale'
    """
    (name, units), *others = at_bound.items()
    told = [f"{count_of(units, 'unit')} go as far as {name} allows"]
    return ", ".join([*told, *(f"{count_of(n, 'unit')} as far as {other}" for other, n in others)])


def _change(change: float | None) -> str:
    return "an unknown amount (not verified)" if change is None else f"{change:.1e}"


def _zero_share(share: float) -> str:
    if not share:
        return ""
    return f"; {share:.1%} of the parameters have g = 0: diag G and pace tell nothing about them"


def _pace(paces: Mapping[str, float], rates: Mapping[str, float]) -> str:
    """How fast optimizers learn at the same learning rate, those that learn alike together."""
    kinds: dict[float, list[str]] = {}
    for kind, pace in paces.items():
        kinds.setdefault(pace, []).append(kind)
    alike = [
        f"× {_factor(pace)} for {_enumerate(names)} (rate × {_factor(rates[names[0]])} keeps it)"
        for pace, names in kinds.items()
    ]
    return "; ".join(alike)


def _factor(value: float) -> str:
    """Two digits, and so many decimals that 1.04 is told from 1."""
    return f"{value:.2f}" if 0.1 <= value < 2 else f"{value:.2g}"


def _enumerate(names: Sequence[str]) -> str:
    """
    >>> _enumerate(["SGD", "momentum", "Adam"])
    'SGD, momentum and Adam'
    """
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
