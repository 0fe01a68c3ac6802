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
    if not entries:
        return ()
    sizes = [len(part) for part in entries.values()]
    # one look at the device for all
    taken = torch.cat(list(entries.values())).cpu()
    moves = torch.cat([_moves(symmetry, name, parameters[name], t) for name in entries])
    logs = taken.log10()
    moved = logs - 2 / math.log(10) * moves
    samples = []
    for name, *parts in zip(
        entries, *(each.split(sizes) for each in (taken > 0, logs, moved)), strict=True
    ):
        positive, before, after = parts
        zeros = len(positive) - int(positive.sum())
        if zeros:
            before, after = before[positive], after[positive]
        samples.append(
            DiagonalSample(
                name=name,
                count=parameters[name].numel(),
                zeros=zeros / max(len(positive), 1),
                before=before,
                after=after,
            )
        )
    return tuple(samples)


def _moves(symmetry: Symmetry, name: str, parameter: Tensor, t: Tensor) -> Tensor:
    """The log of what each sampled entry of a parameter is multiplied by, (n,).

    Args:
        symmetry: Of the model.
        name, parameter: Whose diagonal was sampled.
        t: Of every class, (num_classes,).
    """
    shape = tuple(local(parameter).shape) or (1,)
    at = torch.arange(0, math.prod(shape), _stride(math.prod(shape)))
    scaling = symmetry.scalings.get(name)
    if scaling is None:
        return torch.zeros(len(at), dtype=torch.float64)
    plus, minus = (
        t[cut(ids, parameter).flatten()[_positions(at, shape, tuple(cut(ids, parameter).shape))]]
        for ids in (scaling.plus, scaling.minus)
    )
    return plus - minus


def _positions(at: Tensor, shape: tuple[int, ...], small: tuple[int, ...]) -> Tensor:
    """Where the entries of a tensor lie in one that broadcasts to it.

    Args:
        at: Flat positions in the tensor, (n,).
        shape: Of the tensor.
        small: Of the one that broadcasts to it.

    >>> _positions(torch.tensor([0, 1, 4, 5]), (3, 2), (1, 2))
    tensor([0, 1, 0, 1])
    """
    found = torch.zeros_like(at)
    shape = shape[len(shape) - len(small) :]
    step = inner = 1
    for size, kept in zip(reversed(shape), reversed(small), strict=True):
        if kept > 1:
            found += step * (at // inner % size)
        step, inner = step * kept, inner * size
    return found
