"""What flows along the edges of a graph while scales are traced, and what becomes of parameters.

Values in flight are of four kinds: ``Labels`` (a tensor that depends on the inputs, or on
parameters through shape ops), ``Weight`` (a parameter, or a view of one, that no op has consumed
yet), ``Known`` (a tensor that depends on neither; it is computed for real) and ``Picked`` (what an
unknown index picks from a stack of parameters, and what is computed from it: experts).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..capture.nodes import Node
from .class_pairs import ClassPairs
from .labels import Labels


@dataclass(frozen=True)
class Weight:
    """A parameter or a view of one.

    Attributes:
        name: The parameter's qualified name.
        shape: Shape of the view.
        index: Position in the flattened parameter of every element of the view; None for the
            parameter itself.
    """

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None

    @property
    def entries(self) -> Tensor:
        """``index``, also of the parameter itself."""
        if self.index is not None:
            return self.index
        return torch.arange(torch.Size(self.shape).numel(), dtype=torch.int32).view(self.shape)


@dataclass(frozen=True)
class Known:
    """A tensor whose value depends on neither inputs nor parameters.

    Attributes:
        value: The value, on CPU (possibly a meta tensor).
        buffer: Name, if it is a buffer itself.
        lasting: False for what comes from buffers and attributes of modules: a zero there may not
            stay one.
        sized: True for what is made of numbers, which may come from the sizes of the example: a
            zero there may be none at other sizes.
    """

    value: Tensor
    buffer: str | None = None
    lasting: bool = True
    sized: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


@dataclass(frozen=True)
class Pick:
    """An unknown index that picks from a stack.

    Two look-ups are known to pick the same member at the same place if their picks are equal.

    Attributes:
        index: The node of the index, or of the offsets of a grouped product.
        writer: The last node so far that wrote into the memory of the index; None if none did.
        count: How many members the stack has.
        grouped: Whether ``index`` holds offsets of sorted rows, not members.
    """

    index: Node
    writer: Node | None
    count: int
    grouped: bool = False


@dataclass(frozen=True)
class Picked:
    """One set of labels per member that an unknown index may pick.

    Element x of the tensor carries the label ``choices[m, x]``, where m is what the index holds at
    its flat position ``place[x]``. Operations that let every element of the result depend on
    elements of one place alone are followed member by member; in front of all others the members
    are equated.

    Attributes:
        choices: Labels of shape (members, *shape), or a Weight of shape (members, *s) where s
            broadcasts to ``shape``.
        shape: Shape of the tensor.
        place: int64, as many axes as ``shape``; size 1 along axes on which the place does not vary.
        pick: The index.
    """

    choices: Labels | Weight
    shape: tuple[int, ...]
    place: Tensor
    pick: Pick


class UnknownNumber:
    """A Python number that depends on data (``.item()``); it carries no scale."""


# A tensor in flight, and whatever else an operation may be given in its place.
Traced: TypeAlias = Labels | Weight | Known | Picked
Operand: TypeAlias = Traced | UnknownNumber | bool | int | float | None
# Axes of a reduction.
Axes: TypeAlias = int | list[int] | None


def _extremes(ids: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """The least and greatest along the axes on which the other is constant."""
    axes = [axis for axis, size in enumerate(other.shape) if size == 1 and ids.shape[axis] > 1]
    return (ids.amin(axes, True), ids.amax(axes, True)) if axes else (ids, ids)


@dataclass
class Scaling:
    """How one parameter or buffer is rescaled: by exp(t[plus] − t[minus]).

    Attributes:
        shape: Shape of the parameter.
        plus, minus: int32 labels that broadcast to ``shape``.
        epsilon: For a running variance, which follows λ²(var + ε) − ε with log λ = t[plus]; else
            None.
    """

    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    epsilon: float | None = None

    @property
    def changes(self) -> bool:
        """Whether some entry is multiplied and divided by different labels.

        Axes along which only one side varies are reduced first, so that nothing of the parameter's
        size is made: if the least of one side is the greatest of the other, and the other way
        round, all are equal.
        """
        dims = len(self.shape)
        plus, minus = (
            ids.reshape((1,) * (dims - ids.dim()) + tuple(ids.shape))
            for ids in (self.plus, self.minus)
        )
        least_plus, most_plus = _extremes(plus, minus)
        least_minus, most_minus = _extremes(minus, plus)
        return bool((least_plus != most_minus).any() or (most_plus != least_minus).any())

    @cached_property
    def class_pairs(self) -> ClassPairs:
        """The classes that multiply the parameter and those that divide it; found once, however
        often the weights change.
        """
        return ClassPairs.of(self.plus, self.minus, len(self.shape))


def is_zero(operand: Any) -> bool:
    """Whether it is the number 0, which is what it is under every scale.

    >>> is_zero(0.0), is_zero(UnknownNumber()), is_zero(None)
    (True, False, False)
    """
    return isinstance(operand, (int, float)) and operand == 0
