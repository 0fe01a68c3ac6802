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


def _peak(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    try:
        if tensor.numel():
            return torch.maximum(tensor.amax(), -tensor.amin()).double()
    except NotImplementedError:  # sparse, of a type of eight bits, or of a class of its own
        pass
    return torch.zeros((), dtype=torch.float64)


def largest(tensors: Iterable[Tensor]) -> list[float]:
    """The largest absolute value of each tensor; NaN if it holds one, 0 where torch cannot look
    inside. One wait for the device, however many there are.
    """
    peaks = list(map(_peak, tensors))
    by_device: dict[torch.device, list[int]] = {}
    for i, peak in enumerate(peaks):
        by_device.setdefault(peak.device, []).append(i)
    found = [0.0] * len(peaks)
    for places in by_device.values():
        for i, value in zip(places, torch.stack([peaks[i] for i in places]).tolist(), strict=True):
            found[i] = value
    return found
