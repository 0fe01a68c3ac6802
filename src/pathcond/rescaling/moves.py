"""Tensors to be multiplied in place: parameters, buffers, gradients, optimizer state, averaged
copies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.sharding import local
from ..memory import is_writable
from ..numerics import ceilings, largest
from .factor import Factor


@dataclass(frozen=True)
class Move:
    """One tensor times a power of its parameter's factor.

    Attributes:
        what: What it is, for a person.
        tensor: The tensor, or the part of it that this process holds.
        factor: Of that part.
        power: 1 parameter-like, −1 gradient-like, −2 second moments.
    """

    what: str
    tensor: Tensor
    factor: Factor
    power: int

    @classmethod
    def of(cls, what: str, tensor: Tensor, factor: Factor, power: int) -> Move:
        return cls(what, local(tensor), factor.to(tensor.device), power)


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


def list_problems(moves: Sequence[Move]) -> list[str]:
    """Why some of these moves cannot be made: memory that cannot be written, or values that would
    leave the tensor's type.
    """
    problems = [
        f"{move.what} cannot be written in place: it is sparse, shares memory, is made of other "
        "tensors or is an inference tensor"
        for move in moves
        if not is_writable(move.tensor)
    ]
    if problems:
        return problems
    for move, ceiling in zip(moves, ceilings([move.tensor for move in moves]), strict=True):
        if not math.isfinite(ceiling):
            continue  # a gradient that has overflowed already is not for us to judge
        smallest, greatest = move.factor.bounds
        growth = greatest**move.power if move.power > 0 else smallest**move.power
        range_ = torch.finfo(move.tensor.dtype).max
        if ceiling * growth <= range_:
            continue
        (peak,) = largest([move.tensor])
        if peak * growth > range_:
            problems.append(
                f"{move.what} {tuple(move.tensor.shape)} would overflow {move.tensor.dtype}: "
                f"{peak:.3g} times {growth:.3g}"
            )
    return problems
