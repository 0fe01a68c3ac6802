"""Small computations that several rooms share."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .memory import has_memory


def exp(log_scales: Tensor) -> Tensor:
    """exp, exactly a power of two where the argument is a whole multiple of log 2."""
    octaves = log_scales / math.log(2)
    whole = octaves.round()
    power = torch.ldexp(torch.ones_like(whole), whole.int())
    return torch.where(
        (octaves - whole).abs() < 1e-12 * whole.abs().clamp(min=1), power, log_scales.exp()
    )


def without_repeats(values: Tensor) -> Tensor:
    """A tensor with size 1 along the axes on which it was expanded, to which it broadcasts."""
    for axis, stride in enumerate(values.stride()):
        if stride == 0 and values.shape[axis] > 1:
            values = values.narrow(axis, 0, 1)
    return values


# Squares of float32 numbers between these neither vanish nor overflow; nor does their sum.
SQUARES = (1e-30, 1e30)


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of a tensor, NaN if it holds one; zeros where torch cannot
    look inside.
    """
    try:
        if tensor.numel():
            low, high = tensor.detach().aminmax()
            return low, high
    except NotImplementedError:  # sparse, of a type of eight bits, or of a class of its own
        pass
    return torch.zeros(()), torch.zeros(())


def largest(tensors: Sequence[Tensor]) -> list[float]:
    """The largest absolute value of each tensor; NaN if it holds one, 0 where torch cannot look
    inside. One wait for each device and type, however many tensors there are.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor([2], dtype=torch.float64)])
    [3.0, 2.0]
    """
    extremes = list(map(_extremes, tensors))
    low, high = (_read([pair[side] for pair in extremes]) for side in (0, 1))
    return [
        math.nan if math.isnan(most) else max(most, -least)
        for least, most in zip(low, high, strict=True)
    ]


def ceilings(tensors: Sequence[Tensor]) -> list[float]:
    """A number that no absolute value in each tensor exceeds; as ``largest`` where it holds values
    that are not finite, and where the quickest way, a product of the tensor with itself, is none.

    >>> [round(ceiling) for ceiling in ceilings([torch.tensor([4.0, -3.0]), torch.tensor([2])])]
    [5, 2]
    """
    quick = list(map(_is_plain, tensors))
    flat = [t.detach().view(-1) for t, is_quick in zip(tensors, quick, strict=True) if is_quick]
    squares = iter(_read([torch.dot(numbers, numbers) for numbers in flat]))
    found = [_root(next(squares)) if is_quick else math.nan for is_quick in quick]
    left = [i for i, ceiling in enumerate(found) if not math.isfinite(ceiling)]
    for i, value in zip(left, largest([tensors[i] for i in left]), strict=True):
        found[i] = value
    return found


def _root(square: float) -> float:
    """A number above the root of a rounded sum of squares, of which small ones may have vanished;
    not finite where they may have overflowed.
    """
    return 1.01 * math.sqrt(max(square, SQUARES[0])) if square < SQUARES[1] else math.nan


def minima(tensors: Sequence[Tensor]) -> list[float]:
    """The least value of each tensor, with one wait for each device and type."""
    return _read([tensor.detach().min() for tensor in tensors])


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor lie one after the other for a processor, in one of its own
    types.
    """
    return (
        tensor.device.type == "cpu"
        and tensor.dtype in (torch.float32, torch.float64)
        and has_memory(tensor)
        and tensor.is_contiguous()
    )


def _read(numbers: Sequence[Tensor]) -> list[float]:
    """Single numbers, with one wait for each device and type."""
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, number in enumerate(numbers):
        alike.setdefault((number.device, number.dtype), []).append(i)
    found = [0.0] * len(numbers)
    for places in alike.values():
        values = torch.stack([numbers[i] for i in places]).double().tolist()
        for i, value in zip(places, values, strict=True):
            found[i] = value
    return found
