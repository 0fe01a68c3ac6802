"""A sample of diag(G) before and after, small enough to keep."""

from __future__ import annotations

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


def diagonal_sample(
    symmetry: Symmetry, g: dict[str, Tensor], log_scales: Tensor
) -> tuple[DiagonalSample, ...]:
    """Sample g and g' = g exp(−2Kt) of every trainable parameter, or of what this process holds of
    it.

    Args:
        symmetry, g: Of the model before.
        log_scales: t, (num_units,).
    """
    t = symmetry.class_log_scales(log_scales)
    held = {name: local(values) for name, values in g.items()}
    places = {
        name: torch.arange(0, values.numel(), values.numel() // SAMPLES | 1)
        for name, values in held.items()
    }
    taken = (
        torch.cat(
            [values.flatten()[:: values.numel() // SAMPLES | 1] for values in held.values()]
        ).cpu()
        if g
        else torch.empty(0)
    )
    samples = []
    for (name, at), values in zip(
        places.items(), taken.split([len(at) for at in places.values()]), strict=True
    ):
        shape = tuple(held[name].shape)
        moves = torch.zeros(len(at), dtype=torch.float64)
        scaling = symmetry.scalings.get(name)
        if scaling is not None and len(at):
            index = torch.unravel_index(at, shape or (1,))
            plus, minus = (
                cut(ids, g[name]).expand(shape or (1,))[index].long()
                for ids in (scaling.plus, scaling.minus)
            )
            moves = t[plus] - t[minus]
        positive = values > 0
        before = values[positive].log10()
        after = before - 2 * moves[positive] / torch.tensor(10.0, dtype=torch.float64).log()
        zeros = 1 - int(positive.sum()) / max(len(at), 1)
        samples.append(
            DiagonalSample(
                name=name, count=g[name].numel(), zeros=zeros, before=before, after=after
            )
        )
    return tuple(samples)
