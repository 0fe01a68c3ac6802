"""The ways to train that the figures compare; all start from the same weights and see the same
batches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pathcond.solvers import CoordinateDescent

from ..figure import Preset


@dataclass(frozen=True, kw_only=True)
class Method:
    """One of them.

    Attributes:
        title: For legends and tables.
        condition: Options of ``condition_`` before training; None to start as initialised.
        balance: After what an ENorm cycle runs, if at all.
        teleports: Whether to condition again every so many steps.
    """

    title: str
    condition: Mapping[str, Any] | None = None
    balance: Literal["step", "epoch"] | None = None
    teleports: bool = False


AS_IN_PAPER = {"solver": CoordinateDescent(sweeps=10), "normalization": "paper", "calibrate": False}
METHODS = {
    "baseline": Method(title="baseline"),
    "enorm": Method(title="ENorm, every step", balance="step"),
    "enorm-epoch": Method(title="ENorm, every epoch", balance="epoch"),
    "paper": Method(title="PathCond as in the paper", condition=AS_IN_PAPER),
    "paper-exact": Method(
        title="the same, exact and calibrated", condition={"normalization": "paper"}
    ),
    "default": Method(title="PathCond (default)", condition={}),
    "teleport": Method(title="PathCond, teleporting", condition={}, teleports=True),
}
RATE = 1e-3  # of the paper's main figures
AT_OTHER_RATES = ("baseline", "paper", "default")


def at_rates(others: Sequence[float], preset: Preset) -> list[tuple[float, str]]:
    """Learning rates and methods: all methods at the paper's rate; at the others all in the preset
    "paper", else three.
    """
    methods = tuple(METHODS) if preset == "paper" else AT_OTHER_RATES
    return [(RATE, method) for method in METHODS] + [
        (rate, method) for rate in others for method in methods
    ]
