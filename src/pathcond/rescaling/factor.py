"""The factor of one tensor, kept as a product of small tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..distributed.sharding import cut, is_sharded
from ..numerics import exp
from ..rules.values import Scaling


@dataclass(frozen=True)
class Factor:
    """The factor of one tensor as a product of small ones: exp(t[plus]) and exp(−t[minus]),
    whichever are not 1.

    Attributes:
        parts: One or two tensors of the tensor's type, on its device; each has as many axes as the
            tensor and broadcasts to it.
        extremes: (least, greatest) value of each part.
        exact: The entries of each part in float64.
    """

    parts: tuple[Tensor, ...]
    extremes: tuple[tuple[float, float], ...]
    exact: tuple[Tensor, ...]

    @property
    def bounds(self) -> tuple[float, float]:
        """Numbers that the factor is nowhere below and nowhere above."""
        return math.prod(low for low, _ in self.extremes), math.prod(
            high for _, high in self.extremes
        )

    def times(self, tensor: Tensor) -> Tensor:
        """tensor · factor, a new tensor."""
        if not tensor.numel():
            return torch.empty_like(tensor)
        first, *others = self.operands(tensor, 1)
        product = tensor * first
        for part in others:
            product *= part
        return product

    def operands(self, tensor: Tensor, power: int) -> list[Tensor]:
        """What to multiply a tensor by, one after the other: factor^power, in its type."""
        if len(self.parts) > 1 and not self._fit(tensor.dtype, power):
            # each alone would leave the tensor's type, or round in it
            one, other = self._shaped()
            parts = [(one**power * other**power).to(tensor.dtype)]
        elif power == 1 and tensor.dtype == self.parts[0].dtype:
            parts = list(self.parts)
        else:
            parts = [(part**power).to(tensor.dtype) for part in self._shaped()]
        return [_spread_out(part, tensor) for part in parts]

    def _shaped(self) -> list[Tensor]:
        """The parts in float64."""
        return [
            exact.reshape(part.shape) for exact, part in zip(self.exact, self.parts, strict=True)
        ]

    def _fit(self, dtype: torch.dtype, power: int) -> bool:
        """Whether parts may be multiplied one after the other: far inside the range of a type of
        many digits.
        """
        wide = all(1e-30 < value**power < 1e30 for pair in self.extremes for value in pair)
        return dtype == torch.float64 or (dtype == torch.float32 and wide)

    def at(self, indices: Tensor) -> Factor:
        """The factor of the values of a sparse tensor (torch.sparse_coo).

        Args:
            indices: Their places, (number of sparse axes, number of values).
        """

        def pick(part: Tensor) -> Tensor:
            axes = zip(part.shape, indices, strict=False)
            return part[tuple(places if size > 1 else places * 0 for size, places in axes)]

        picked, exact = (tuple(map(pick, each)) for each in (self.parts, self._shaped()))
        return Factor(picked, self.extremes, exact)

    def to(self, device: torch.device) -> Factor:
        if self.parts[0].device == device:
            return self
        parts, exact = (
            tuple(part.to(device) for part in each) for each in (self.parts, self.exact)
        )
        return Factor(parts, self.extremes, exact)


Product: TypeAlias = tuple[Factor, Tensor, int]  # factor, tensor, power


def list_factors(
    scalings: Mapping[str, Scaling], t: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Factor]:
    """The factors of tensors, or of what this process holds of them; those that are 1 are left out.

    Args:
        scalings: Of a Symmetry; running variances, which have no factor of their own, are left out.
        t: Log-scales of the classes, (num_classes,).
        tensors: By name, each with a scaling.
    """
    named = {name: each for name, each in tensors.items() if scalings[name].epsilon is None}
    held = list(named.values())
    multiply = _look_up(exp(t), [scalings[name].plus for name in named], held)
    divide = _look_up(exp(-t), [scalings[name].minus for name in named], held)
    found = {}
    for name, *both in zip(named, multiply, divide, strict=True):
        sides = [side for side in both if side is not None]
        if sides:
            found[name] = Factor(*zip(*sides, strict=True))
    return found


# A part of a factor, its least and greatest value, and its entries in float64.
Side: TypeAlias = tuple[Tensor, tuple[float, float], Tensor]


def _look_up(
    scales: Tensor, classes: Sequence[Tensor], tensors: Sequence[Tensor]
) -> Iterator[Side | None]:
    """The scales of the classes of each tensor, on its device; None where all are 1.

    Args:
        scales: (num_classes,) on the CPU.
        classes: Of every tensor; they broadcast to it.
        tensors: As many.
    """
    if not classes:
        return
    # of all at once: a look-up takes its time, however few it looks up
    lengths = [ids.numel() for ids in classes]
    found = scales.index_select(0, torch.cat([ids.flatten() for ids in classes]))
    low, high = (
        torch.segment_reduce(found, kind, lengths=torch.tensor(lengths)).tolist()
        for kind in ("min", "max")
    )
    split = {
        (device, dtype): found.to(device, dtype).split(lengths)
        for device in {tensor.device for tensor in tensors}
        for dtype in {torch.float64, *(tensor.dtype for tensor in tensors)}
    }
    for i, (ids, tensor) in enumerate(zip(classes, tensors, strict=True)):
        if low[i] == high[i] == 1 or not lengths[i]:
            yield None
            continue
        part, exact = (split[tensor.device, dtype][i] for dtype in (tensor.dtype, torch.float64))
        shape = (1,) * (tensor.dim() - ids.dim()) + ids.shape
        if is_sharded(tensor):
            exact = cut(exact.view(shape), tensor)
        yield cut(part.view(shape), tensor), (low[i], high[i]), exact


def multiply_(products: Iterable[Product]) -> None:
    """Multiply tensors in place by powers of their factors."""
    first: list[tuple[Tensor, Tensor]] = []
    second: list[tuple[Tensor, Tensor]] = []
    for factor, tensor, power in products:
        if tensor.numel():
            one, *other = factor.operands(tensor, power)
            first.append((tensor, one))
            second += [(tensor, part) for part in other]
    # No call has a tensor twice: on a GPU all of them may be multiplied at once.
    for pairs in filter(None, (first, second)):
        tensors, by = map(list, zip(*pairs, strict=True))
        torch._foreach_mul_(tensors, by)


def _spread_out(part: Tensor, tensor: Tensor) -> Tensor:
    """A factor of the columns of a tensor, such as the channels that a convolution reads, as long
    as its rows: else each of the few pixels of its kernels would be multiplied apart.
    """
    if part.shape[:1] == (1,) and 1 < part.numel() < tensor[0].numel() and tensor.is_contiguous():
        return part.expand(1, *tensor.shape[1:]).contiguous()
    return part
