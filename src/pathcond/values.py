"""What flows along the edges of a graph while scales are traced, and what becomes of parameters.

Values in flight are of three kinds: ``Labels`` (a tensor that depends on the inputs, or on parameters through shape
ops), ``Weight`` (a parameter, or a view of one, that no op has consumed yet) and ``Known`` (a tensor that depends on
neither; it is computed for real).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .meeting import Meeting


@dataclass(frozen=True)
class Weight:
    """A parameter or a view of one.

    Attributes:
        name: The parameter's qualified name.
        shape: Shape of the view.
        index: Position in the flattened parameter of every element of the view; None for the parameter itself.
    """

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None


@dataclass(frozen=True)
class Known:
    """A tensor whose value depends on neither inputs nor parameters.

    Attributes:
        value: The value, on CPU (possibly a meta tensor).
        buffer: Name, if it is a buffer itself.
        lasting: False for what comes from buffers and attributes of modules: a zero there may not stay one.
    """

    value: Tensor
    buffer: str | None = None
    lasting: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


class UnknownNumber:
    """A Python number that depends on data (``.item()``); it carries no scale."""


@dataclass
class Scaling:
    """How one parameter or buffer is rescaled: by exp(t[plus] − t[minus]).

    Attributes:
        shape: Shape of the parameter.
        plus, minus: int32 labels that broadcast to ``shape``.
        epsilon: For a running variance, which follows λ²(var + ε) − ε with log λ = t[plus]; else None.
    """

    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    epsilon: float | None = None

    @cached_property
    def meeting(self) -> Meeting:
        """The classes that multiply the parameter and those that divide it; found once, however often the weights change."""
        return Meeting.of(self.plus, self.minus, len(self.shape))
