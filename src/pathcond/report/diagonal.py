"""A sample of diag(G) before and after, small enough to keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed.sharding import cut, local
from ..symmetry.symmetry import Symmetry

SAMPLES = 4096  # per parameter tensor


@dataclass(frozen=True, kw_only=True)
class DiagonalSample:
    """Entries of diag(G) at a regular stride through one parameter.

    Attributes:
        name: Of the parameter.
        count, zeros: Its elements, and how many of the sampled share have g = 0.
        before, after: (n,) log10 of the sampled entries that are not zero.
    """

    name: str
    count: int
    zeros: float
    before: Tensor
    after: Tensor


def take_entries(g: Tensor) -> Tensor:
    """The entries that are sampled, of what this process holds of a parameter's diagonal; (n,)."""
    here = local(g).flatten()
    return here[:: _stride(here.numel())].clone()


def _stride(count: int) -> int:
    return count // SAMPLES | 1


def diagonal_sample(
    symmetry: Symmetry,
    parameters: Mapping[str, Tensor],
    entries: Mapping[str, Tensor],
    log_scales: Tensor,
) -> tuple[DiagonalSample, ...]:
    """What was sampled of g, and the same of g' = g exp(−2Kt).

    Args:
        symmetry, parameters: Of the model.
        entries: From ``take_entries``, by name of the parameter.
        log_scales: t, (num_units,).
    """
    t = symmetry.class_log_scales(log_scales)
    # one look at the device for all
    taken = torch.cat(list(entries.values())).cpu() if entries else torch.empty(0)
    samples = []
    for name, values in zip(
        entries, taken.split([len(part) for part in entries.values()]), strict=True
    ):
        parameter = parameters[name]
        shape = tuple(local(parameter).shape)
        at = torch.arange(0, math.prod(shape), _stride(math.prod(shape)))
        moves = torch.zeros(len(at), dtype=torch.float64)
        scaling = symmetry.scalings.get(name)
        if scaling is not None and len(at):
            index = torch.unravel_index(at, shape or (1,))
            plus, minus = (
                cut(ids, parameter).expand(shape or (1,))[index].long()
                for ids in (scaling.plus, scaling.minus)
            )
            moves = t[plus] - t[minus]
        positive = values > 0
        before = values[positive].log10()
        after = before - 2 * moves[positive] / torch.tensor(10.0, dtype=torch.float64).log()
        zeros = 1 - int(positive.sum()) / max(len(at), 1)
        samples.append(
            DiagonalSample(
                name=name, count=parameter.numel(), zeros=zeros, before=before, after=after
            )
        )
    return tuple(samples)
