"""What ``condition_`` warns of: training that may become worse, and training that will not become
better.
"""

from __future__ import annotations

import logging
import math

from torch import nn

from .criteria.criterion import Criterion
from .lifting.sample import Sample
from .measured.layers import BalancedLayers
from .report import Report
from .rules.families.normalization import NORMALIZATION
from .rules.table import family_of
from .widths import has_even_widths

logger = logging.getLogger("pathcond")

PACE_WARNING = 0.5  # pace below which a warning says so
# decades of diag(G) between the 5th and 95th percentile, by which they may grow before a warning
# says so
SPREAD_WARNING = 2.0
# root mean square of log λ: below the second, training was not seen to differ at any learning rate
# (an MLP with BatchNorm as torch initialises it, under "absorb" with fronts at 1/3: 0.02); below
# the first, the model was conditioned before
SETTLED, IN_BALANCE = 1e-4, 0.05


def warn_of_what_may_hurt(report: Report, criterion: Criterion) -> None:
    """Warn where diag(G) is less even than it was, or plain SGD much slower."""
    if criterion.shares_energy:
        before, after = report.spread()
        if after > before + SPREAD_WARNING:
            logger.warning(
                "The spread of diag(G) grows from %.1f to %.1f decades: most of its sum lies in "
                "parameters that cannot be rescaled, and the others were moved towards them. If "
                "training is worse than before, pass max_log_scale=1.0.",
                before,
                after,
            )
    if report.pace < PACE_WARNING:
        logger.warning(
            "The sum of diag(G) falls to %.2g of what it was, and with it the pace of plain SGD: "
            "to go on as fast as before, divide the learning rate by that (with Adam, by %.2g).",
            report.pace,
            report.paces["Adam"],
        )


def warn_where_nothing_is_gained(report: Report, model: nn.Module, sample: Sample) -> None:
    """Warn where nothing can be rescaled, where weights hardly moved, or where the default gained
    next to nothing at tuned rates (`pathcond reproduce tuned`: an MLP 3 × 500 without norms, 0.8
    %).

    Reports without diag(G), as those of teleports, are passed over: the first call has said it.

    Args:
        report: Of this call.
        model: Not wrapped.
        sample: Its way through it.
    """
    if report.diagonal and not report.num_units:
        logger.warning(
            "Nothing of %s can be rescaled; print the report to read what pins its units. If that "
            "is a layer which the example does not use: delete it, or give other_inputs= that use "
            "it.",
            report.model_name,
        )
    moved = float(report.log_scales.square().mean().sqrt()) if report.num_units else 0.0
    if not report.diagonal or moved <= SETTLED:
        return
    if moved < IN_BALANCE:
        logger.warning(
            "The weights of %s were within %.1f %% of balance already: conditioning does not "
            "change training.",
            report.model_name,
            100 * math.expm1(moved),
        )
    elif (
        report.criterion == repr(BalancedLayers())
        and has_even_widths(model)
        and not _is_normalized(model, sample)
    ):
        logger.warning(
            "All hidden layers of %s have the same width and there is no normalization layer: at "
            "a tuned learning rate such networks gain less than 1 %% (docs/choosing.md).",
            report.model_name,
        )


def _is_normalized(model: nn.Module, sample: Sample) -> bool:
    """Whether some layer normalizes: one of torch's operations, or a module that is called so."""
    nodes = (node for part in sample.all for node in part.graph.nodes)
    return any("norm" in type(module).__name__.lower() for module in model.modules()) or any(
        family_of(node.op) is NORMALIZATION for node in nodes
    )
