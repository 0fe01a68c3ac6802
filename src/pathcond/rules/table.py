"""The one table of operation rules: ATen name -> how log-scales pass through it, and how path
energy does.

A rule's two columns are functions of the walk in progress and of the op's arguments, which they
name as the ATen schema does (``x`` stands for the first argument whatever its name).

- The ``scales`` column returns the labels of the result and states, through ``scales``, which
  labels must be equal, fixed, or combined. An op without a rule fixes all that reaches it: a
  missing rule costs symmetries, never correctness.
- The ``energy`` column returns the path energy of the result. An op without one ends all paths that
  reach it; what it computes is frozen at its value on the example batch.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Column:
    """One function of the table.

    Attributes:
        function: The function itself.
        wants: Names of the op's arguments that it reads.
    """

    function: Callable[..., Any]
    wants: tuple[str, ...]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Column:
        return cls(function, tuple(inspect.signature(function).parameters)[1:])

    def __call__(self, walk: Any, arguments: dict[str, Any]) -> Any:
        first = next(iter(arguments.values()), None)
        return self.function(
            walk, **{name: first if name == "x" else arguments.get(name) for name in self.wants}
        )


@dataclass(frozen=True)
class Family:
    """Operations that treat scales alike.

    Attributes:
        title: Heading under which the documentation lists them.
        reads_parameters: Whether they may be asked about parameters alone, as views are; other
            arithmetic on parameters makes a constant.
        contracts: Whether they multiply what they read by weights, and sum up.
        selects: Whether a result holds some elements of an operand and drops the others.
        recurrent: Whether states inside feed each other.
    """

    title: str
    reads_parameters: bool = False
    contracts: bool = False
    selects: bool = False
    recurrent: bool = False


@dataclass(frozen=True)
class Rule:
    """How one ATen op treats log-scales and path energy.

    Attributes:
        scales: How log-scales pass.
        family: The operations that it belongs to.
        energy: How path energy passes; None where paths end.
        measures: Whether the energy depends on the op's operands on the example batch (σ of a norm,
            a gate).
    """

    scales: Column
    family: Family
    energy: Column | None = None
    measures: bool = True


RULES: dict[str, Rule] = {}
NO_FAMILY = Family("")


def family_of(op: str) -> Family:
    """The family of an ATen name; one without any trait if it has no rule."""
    return RULES[op].family if op in RULES else NO_FAMILY


def rule(*ops: str, family: Family) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the ``scales`` column for the given ATen names."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if op in RULES:
                raise ValueError(f"two rules for {op}")
            RULES[op] = Rule(Column.of(function), family)
        return function

    return enter


def energy(*ops: str, measures: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Enter a function into the ``energy`` column of ops that have a rule."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for op in ops:
            if RULES[op].energy is not None:
                raise ValueError(f"two energy rules for {op}")
            RULES[op] = replace(RULES[op], energy=Column.of(function), measures=measures)
        return function

    return enter
