"""Pages for the browser: one file, no scripts, nothing to load."""

from __future__ import annotations

from typing import Any

import torch

from ..symmetry.text import pinned_lines
from ..text import count_of
from . import charts
from .conditioning import Conditioning
from .text import tell_bounds

SHOWN_LAYERS = 80
STAGES = {
    "symmetry": "captures the model, finds what can be rescaled",
    "energy": "measures diag(G) and what else the criterion needs",
    "solve": "finds the best scales",
    "rescale": "writes the weights, checks the outputs",
}


def render(template: str, *, package: str = "pathcond.report", **values: Any) -> str:
    """A template with its values; charts arrive as ready markup, all else is escaped.

    Args:
        template: Name of the file.
        package: Whose template it is; it may extend those of this package.
        values: What it shows.
    """
    try:
        from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        raise ImportError(
            'Pages need the "report" extra: pip install "pathcond[report]"'
        ) from error
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package), PackageLoader("pathcond.report")]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(**values)


def conditioning_page(report: Conditioning, name: str | None = None) -> str:
    """The page of one conditioning, under the given name or that of the model's class."""
    values = conditioning(report, name)
    done = "conditioned" if report.changed else "as it was"
    return render("conditioning.html.jinja", title=f"{values['name']}, {done}", **values)


def conditioning(report: Conditioning, name: str | None = None) -> dict[str, Any]:
    """What ``conditioning_body.html.jinja`` shows."""
    from markupsafe import Markup

    rows = [
        (group.name or "(model)", report.log_scales[list(group.units)].cpu())
        for group in report.groups[:SHOWN_LAYERS]
    ]
    weights = [
        torch.full_like(s.before, s.count / max(len(s.before), 1))
        for s in report.diagonal
        if len(s.before)
    ]
    sides = [
        (
            side,
            torch.cat([getattr(s, side) for s in report.diagonal if len(s.before)]),
            torch.cat(weights),
        )
        for side in ("before", "after")
        if weights
    ]
    message = report.solution.message
    return {
        "report": report,
        "name": name or report.model_name,
        "counted": f"{count_of(report.num_units, 'unit')} in "
        f"{count_of(len(report.groups), 'group')}",
        "message": message[:1].upper() + message[1:],
        "stages": STAGES,
        "layers": report.layers(),
        "shown": SHOWN_LAYERS,
        "spread": report.spread(),
        "changes": {
            "eval": _percent(report.output_change_eval),
            "train": _percent(report.output_change_train),
        },
        "bounds": tell_bounds(report.at_bound) if report.at_bound else "",
        "pinned": [line.partition(": ")[::2] for line in pinned_lines(report.pinned)],
        "scales_chart": Markup(charts.distributions(rows, x_label="log λ")),
        "diagonal_chart": Markup(charts.histograms(sides, x_label="log10 g")),
    }


def _percent(change: float | None) -> str:
    return "not verified" if change is None else f"{change:.1e}"
