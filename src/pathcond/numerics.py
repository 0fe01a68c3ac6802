"""Small computations that several rooms share."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


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


# From here on a processor finds the extremes of float32 numbers quicker one after the other.
LARGE = 2**15


def _extremes(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the greatest value of a tensor, NaN if it holds one; zeros where torch cannot
    look inside.
    """
    tensor = tensor.detach()
    try:
        if tensor.dtype == torch.float32 and tensor.numel() > LARGE and not tensor.is_cuda:
            return tensor.amin(), tensor.amax()
        if tensor.numel():
            low, high = tensor.aminmax()
            return low, high
    except NotImplementedError:  # sparse, of a type of eight bits, or of a class of its own
        pass
    return torch.zeros(()), torch.zeros(())


def largest(tensors: Iterable[Tensor]) -> list[float]:
    """The largest absolute value of each tensor; NaN if it holds one, 0 where torch cannot look
    inside. One wait for each device and type, however many tensors there are.

    >>> largest([torch.tensor([1.0, -3.0]), torch.tensor([2], dtype=torch.float64)])
    [3.0, 2.0]
    """
    extremes = list(map(_extremes, tensors))
    alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (low, _) in enumerate(extremes):
        alike.setdefault((low.device, low.dtype), []).append(i)
    found = [0.0] * len(extremes)
    for places in alike.values():
        low, high = (torch.stack([extremes[i][side] for i in places]).double() for side in (0, 1))
        for i, value in zip(places, torch.maximum(high, -low).tolist(), strict=True):
            found[i] = value
    return found
