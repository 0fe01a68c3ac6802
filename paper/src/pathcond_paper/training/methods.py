"""The ways to train that the figures compare; all start from the same weights and see the same
batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from pathcond.criteria.criterion import PathKernel
from pathcond.lifting.sample import Prepared
from pathcond.solvers import CoordinateDescent

from ..figure import Preset
from ..published import PublishedKernel


@dataclass(frozen=True, kw_only=True)
class Method:
    """One of them.

    Attributes:
        title: For legends and tables.
        about: What it is, for somebody who has not read the paper.
        condition: Options of ``condition_`` before training; None to start as initialised.
        balance: After what an ENorm cycle runs, if at all.
        teleports: Whether to condition again every so many steps.
        starts_as_is: Whether the first teleport is the first conditioning.
        rescaling: In place of ``condition``, what gives the log-scales of a captured network under
            "full".
        layer_scales: In place of ``condition``, a log-scale for every group of units under "full".
        as_rates: Leave the weights where they are, and give every one of them the learning rate
            that makes plain SGD take the same steps.
        data_dependent: Start from ``lsuv_`` instead, another function.
    """

    title: str
    about: str = ""
    condition: Mapping[str, Any] | None = None
    balance: Literal["step", "epoch"] | None = None
    teleports: bool = False
    starts_as_is: bool = False
    rescaling: Callable[[nn.Module, Prepared], Tensor] | None = None
    layer_scales: Sequence[float] | None = None
    as_rates: bool = False
    data_dependent: bool = False

    @property
    def normalization(self) -> str | None:
        """Under which the network is captured to be rescaled; None where it is not."""
        if self.rescaling is not None or self.layer_scales is not None:
            return "full"
        if self.condition is None:
            return None
        return str(self.condition.get("normalization", "batch"))


# The paper's criterion at its true optimum, with the scales in front of norms.
PATHS = {"criterion": PathKernel(), "normalization": "absorb"}
# The authors' program stops early where a sweep moves all u by less than 0.01 together.
AS_IN_PAPER = {
    "criterion": PublishedKernel(),
    "solver": CoordinateDescent(sweeps=10, tolerance=1e-2),
    "normalization": "paper",
}
METHODS = {
    "baseline": Method(title="baseline", about="The network as torch initialises it."),
    "enorm": Method(
        title="ENorm, every step",
        about="An older method, which makes the sum of squared weights as small as rescaling can; "
        "one cycle of it after every step of training.",
        balance="step",
    ),
    "enorm-epoch": Method(
        title="ENorm, every epoch", about="The same after every epoch.", balance="epoch"
    ),
    "paper": Method(
        title="PathCond as in the paper",
        about="The paper's method as its authors' program runs it: ten sweeps before training.",
        condition=AS_IN_PAPER,
    ),
    "paper-exact": Method(
        title="norms tied as in the paper, exact",
        about="The same scales at the exact optimum of the paper's criterion, measured on a batch.",
        condition={"criterion": PathKernel(), "normalization": "paper"},
    ),
    "exact": Method(
        title="PathCond, exact",
        about="The exact optimum of the paper's criterion with this library's treatment of norms: "
        'condition_ with criterion=PathKernel(), normalization="absorb".',
        condition=PATHS,
    ),
    "default": Method(
        title="PathCond, the default",
        about="What condition_(model, batch) does: balanced layers.",
        condition={},
    ),
    "teleport": Method(
        title="PathCond, teleporting",
        about="PathCond, exact, again every so many steps of training.",
        condition=PATHS,
        teleports=True,
    ),
}
RATE = 1e-3  # of the paper's main figures
AT_OTHER_RATES = ("baseline", "paper", "exact")
OURS = ("exact", "default")  # what the library does in place of the paper's method


def tell_each(methods: Iterable[str], tell: Callable[[str], str]) -> str:
    """What there is to tell of each method, after its title; nothing of those without.

    >>> tell_each(("exact", "default"), {"exact": "1.5×", "default": ""}.__getitem__)
    'PathCond, exact 1.5×'
    """
    return "; ".join(f"{METHODS[name].title} {text}" for name in methods if (text := tell(name)))


def tell_coinciding(curves: Mapping[str, Sequence[float]], within: float = 0.04) -> str:
    """Which methods have the same curve, as a sentence for a caption; empty if none have.

    Args:
        curves: By method, its values; where one is not finite nothing is compared.
        within: Share by which values may differ.

    >>> tell_coinciding({"baseline": [1.0, 2.0], "enorm": [1.01, 2.0], "default": [0.5, 1.0]})
    ' Curves that coincide: “baseline” and “ENorm, every step”.'
    """

    def coincide(one: str, other: str) -> bool:
        pairs = zip(curves[one], curves[other], strict=True)
        finite = [(a, b) for a, b in pairs if math.isfinite(a) and math.isfinite(b)]
        return bool(finite) and all(abs(a - b) <= within * abs(b) for a, b in finite)

    groups: list[list[str]] = []
    for method in curves:
        same = next((group for group in groups if coincide(group[0], method)), None)
        if same is None:
            groups.append([method])
        else:
            same.append(method)
    titles = [[f"“{METHODS[name].title}”" for name in group] for group in groups]
    told = [f"{', '.join(first)} and {last}" for *first, last in titles if first]
    return f" Curves that coincide: {'; '.join(told)}." if told else ""


def at_rates(others: Sequence[float], preset: Preset) -> list[tuple[float, str]]:
    """Learning rates and methods: all methods at the paper's rate; at the others all in the preset
    "paper", else three.
    """
    methods = tuple(METHODS) if preset == "paper" else AT_OTHER_RATES
    return [(RATE, method) for method in METHODS] + [
        (rate, method) for rate in others for method in methods
    ]
