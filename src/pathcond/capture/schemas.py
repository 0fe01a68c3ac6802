"""Schemas of ATen calls, read once each: torch describes them anew whenever it is asked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from torch._ops import OpOverload


class Argument(NamedTuple):
    """An argument of a call.

    Attributes:
        name: Its name.
        default: Its value where none is given.
        shared: Whether a result may share its memory.
        written: Whether the call overwrites it.
    """

    name: str
    default: Any
    shared: bool
    written: bool


@dataclass(frozen=True)
class Schema:
    """What a call takes and does.

    Attributes:
        name: Namespace and name, such as ``aten::linear``.
        arguments: In order.
        writes: Whether it overwrites any argument.
    """

    name: str
    arguments: tuple[Argument, ...]
    writes: bool

    def bind(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by their names, defaults filled in."""
        bound = {argument.name: argument.default for argument in self.arguments}
        bound.update((a.name, value) for a, value in zip(self.arguments, args, strict=False))
        return bound | kwargs


@cache
def schema_of(call: OpOverload) -> Schema:
    schema = call._schema
    return Schema(
        name=schema.name,
        arguments=tuple(
            Argument(
                name=a.name,
                default=a.default_value,
                shared=a.alias_info is not None,
                written=a.alias_info is not None and a.alias_info.is_write,
            )
            for a in schema.arguments
        ),
        writes=schema.is_mutable,
    )
