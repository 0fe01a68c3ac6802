"""The factor of one tensor, kept as a product of small tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.sharding import cut


@dataclass(frozen=True)
class Factor:
    """The factor of one tensor as a product of small ones: exp(t[plus]) and exp(−t[minus]),
    whichever are not 1.

    Attributes:
        parts: One or two float64 tensors on the tensor's device; each broadcasts to the tensor.
        extremes: (least, greatest) value of each part.
    """

    parts: tuple[Tensor, ...]
    extremes: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, parts: Sequence[Tensor], tensor: Tensor) -> Factor:
        """The factor that multiplies a tensor, or what this process holds of it, from parts on the
        CPU.
        """
        extremes = tuple(
            (float(low), float(high)) for low, high in (part.aminmax() for part in parts)
        )
        return cls(tuple(cut(part, tensor).to(tensor.device) for part in parts), extremes)

    @property
    def bounds(self) -> tuple[float, float]:
        """Numbers that the factor is nowhere below and nowhere above."""
        return math.prod(low for low, _ in self.extremes), math.prod(
            high for _, high in self.extremes
        )

    def times(self, tensor: Tensor, power: int = 1, out: Tensor | None = None) -> Tensor:
        """tensor · factor^power, written into ``out`` (a new tensor by default; may be the tensor
        itself).
        """
        out = torch.empty_like(tensor) if out is None else out
        if not tensor.numel():
            return out
        parts = [part if power == 1 else part**power for part in self.parts]
        if len(parts) > 1 and not self._fit(tensor.dtype, power):
            # each alone would leave the tensor's type, or round in it
            parts = [math.prod(parts[1:], start=parts[0])]
        parts = [part.to(tensor.dtype) for part in parts]
        source, target = tensor, out
        if (
            tensor.dim() > 0
            and tensor.is_contiguous()
            and out.is_contiguous()
            and all(_one_sided(part) for part in parts)
        ):
            # As a matrix every part is a column or a row, which multiplies at the speed of memory.
            source = tensor.view(len(tensor), -1)
            target = out.view(len(out), -1)
            parts = [_as_vector(part, tensor.shape) for part in parts]
        for part in parts:
            source = torch.mul(source, part, out=target)
        return out

    def _fit(self, dtype: torch.dtype, power: int) -> bool:
        """Whether parts may be multiplied one after the other: far inside the range of a type of
        many digits.
        """
        wide = all(1e-30 < value**power < 1e30 for pair in self.extremes for value in pair)
        return dtype == torch.float64 or (dtype == torch.float32 and wide)

    def to(self, device: torch.device) -> Factor:
        return Factor(tuple(part.to(device) for part in self.parts), self.extremes)


def _one_sided(part: Tensor) -> bool:
    """True if a factor varies along the first axis only, or along the others only."""
    return part.dim() == 0 or part.shape[0] == 1 or part.numel() == part.shape[0]


def _as_vector(part: Tensor, shape: torch.Size) -> Tensor:
    """A one-sided factor of a tensor of the given shape as a column (rows, 1) or a row (1,
    columns).
    """
    if part.dim() and part.shape[0] == part.numel() > 1:
        return part.reshape(-1, 1)
    part = part.reshape([1] * (len(shape) - part.dim()) + list(part.shape))
    return part.expand(1, *shape[1:]).reshape(1, -1)
