"""The one table of operation rules: ATen name -> how log-scales pass through it.

A rule is a function of the propagation in progress and of the op's arguments, which it names as the ATen
schema does (``x`` stands for the first argument whatever its name). It returns the labels of the result and
states, through ``scales``, which labels must be equal, fixed, or combined. An op without a rule fixes all
that reaches it: a missing rule costs symmetries, never correctness.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..scales import Scales

ScaleRule = Callable[..., Any]


@dataclass(frozen=True)
class Rule:
    """How one ATen op treats log-scales.

    Attributes:
        scales: The rule itself.
        family: Heading under which the documentation lists the op.
        wants: Names of the op's arguments that the rule reads.
    """

    scales: ScaleRule
    family: str
    wants: tuple[str, ...]

    def __call__(self, scales: Scales, arguments: dict[str, Any]) -> Any:
        first = next(iter(arguments.values()), None)
        return self.scales(scales, **{name: first if name == "x" else arguments.get(name) for name in self.wants})


RULES: dict[str, Rule] = {}


def rule(*ops: str, family: str) -> Callable[[ScaleRule], ScaleRule]:
    """Enter a function into the table for the given ATen names."""

    def enter(function: ScaleRule) -> ScaleRule:
        wants = tuple(inspect.signature(function).parameters)[1:]
        for op in ops:
            if op in RULES:
                raise ValueError(f"two rules for {op}")
            RULES[op] = Rule(function, family, wants)
        return function

    return enter
