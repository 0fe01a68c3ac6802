"""Tensors to be multiplied in place: parameters, buffers, gradients, optimizer state, averaged
copies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.sharding import local
from ..memory import is_writable, values_of
from ..numerics import ceilings, largest
from .factor import Factor, Product, multiply_


@dataclass(frozen=True)
class Move:
    """One tensor times a power of its parameter's factor.

    Attributes:
        what: What it is, for a person.
        tensor: The tensor, or the part of it that this process holds; of a sparse one its values.
        factor: Of that part.
        power: 1 parameter-like, −1 gradient-like, −2 second moments.
        start: What its entries began with, one number of its type: only what they have gained is
            multiplied. None for zero.
    """

    what: str
    tensor: Tensor
    factor: Factor
    power: int
    start: Tensor | None = None

    @classmethod
    def of(
        cls, what: str, tensor: Tensor, factor: Factor, power: int, start: float | None = None
    ) -> Move:
        """A move of a whole tensor by the factor of its parameter."""
        factor = factor.to(tensor.device)
        if tensor.layout == torch.sparse_coo:
            factor = factor.at(tensor._indices())
        begun = torch.tensor(start, dtype=tensor.dtype) if start else None
        return cls(what, values_of(local(tensor)), factor, power, begun)

    @property
    def gained(self) -> Tensor:
        """What is multiplied."""
        return self.tensor if self.start is None else self.tensor - self.start


@dataclass(frozen=True)
class Setting:
    """One tensor to be overwritten: a running variance, which follows its scale but not by a factor
    of its own.

    Attributes:
        what, tensor: As in ``Move``.
        value: What it will be.
    """

    what: str
    tensor: Tensor
    value: Tensor


def make_(moves: Sequence[Move], products: Iterable[Product] = ()) -> None:
    """Make moves, and other products in the same calls."""
    shifted = [(move.tensor, move.start) for move in moves if move.start is not None]
    for tensor, start in shifted:
        tensor.sub_(start)
    multiply_([*products, *((move.factor, move.tensor, move.power) for move in moves)])
    for tensor, start in shifted:
        tensor.add_(start)


def list_problems(moves: Sequence[Move]) -> list[str]:
    """Why some of these moves cannot be made: memory that cannot be written, or values that would
    leave the tensor's type.
    """
    problems = [
        f"{move.what} cannot be written in place: it shares memory, is made of other tensors or is "
        "an inference tensor"
        for move in moves
        if not is_writable(move.tensor)
    ]
    if problems:
        return problems
    for move, ceiling in zip(moves, ceilings([move.gained for move in moves]), strict=True):
        if not math.isfinite(ceiling):
            continue  # a gradient that has overflowed already is not for us to judge
        smallest, greatest = move.factor.bounds
        growth = greatest**move.power if move.power > 0 else smallest**move.power
        range_ = torch.finfo(move.tensor.dtype).max
        if ceiling * growth <= range_:
            continue
        (peak,) = largest([move.gained])
        if peak * growth > range_:
            problems.append(
                f"{move.what} {tuple(move.tensor.shape)} would overflow {move.tensor.dtype}: "
                f"{peak:.3g} times {growth:.3g}"
            )
    return problems
