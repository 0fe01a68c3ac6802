"""Look-ups: a known index is executed on the labels, an unknown one equates what it may pick.

Members of a stack of parameters that an unknown index picks from stay apart (``picking``).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import FREEZE, Carried, Edges, Energies, Energy, Frozen, PathSum
from ..labels import Labels, constant
from ..picking import pick_from
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Known, Operand

SUM_OF_ROWS, MEAN_OF_ROWS = 0, 1  # modes of embedding_bag
INDEXING = Family(
    "Look-ups: known indices are executed on the labels, unknown ones equate what they may pick "
    "(experts stay apart)",
    reads_parameters=True,
    selects=True,
)


@rule("embedding", family=INDEXING)
def embedding(scales: Scales, weight: Operand, indices: Any) -> Labels:
    """Which rows are read depends on the data, so all rows share one log-scale per column."""
    scales.pin(indices, "is an index")
    weight = scales.simplify(weight)
    if scales.is_weight(weight):
        nothing = torch.zeros(1, 1, dtype=torch.int32)
        columns = scales.factors.scale(weight, nothing, [1, weight.shape[1]], by=scales.node)
    else:
        columns = scales.agree(scales.labels(weight), [0]).ids
    shape = scales.node.shape[0] if isinstance(scales.node.shape, list) else scales.node.shape
    return Labels(columns.view([1] * (len(shape) - 1) + [columns.shape[-1]]), shape)


@rule("embedding_bag", family=replace(INDEXING, selects=False))
def embedding_bag(
    scales: Scales, weight: Operand, indices: Any, offsets: Operand, per_sample_weights: Operand
) -> Any:
    """Sums, means and maxima of rows: one log-scale per column, plus that of the rows' weights."""
    shape, *others = scales.node.shape
    scales.pin(offsets, "is an index")
    columns = embedding(scales, weight, indices).ids.reshape(1, -1)
    bags = Labels(columns, shape)
    if per_sample_weights is not None:
        labels = scales.labels(per_sample_weights)
        common = scales.agree(labels, range(len(labels.shape))).ids.reshape(1, 1)
        bags = Labels(scales.combine_ids((1, columns), (1, common)), shape)
    return bags, *[constant(other) for other in others]


@rule("index", family=INDEXING)
def index(scales: Scales, x: Operand, indices: Any) -> Any:
    if scales.lasting_value(indices[0]) is None and all(given is None for given in indices[1:]):
        picked = pick_from(scales, x, scales.node.bound["indices"][0])
        if picked is not None:
            scales.pin(indices[0], "is an index")
            return picked
    values = [None if given is None else scales.lasting_value(given) for given in indices]
    known = all(
        given is None or value is not None for given, value in zip(indices, values, strict=True)
    )
    x = scales.simplify(x)
    if known and scales.is_weight(x):
        return scales.picked(
            x, lambda at: at[tuple(slice(None) if v is None else v for v in values)]
        )
    labels = scales.labels(x)
    masks = [
        getattr(given, "dtype", None) in (torch.bool, torch.uint8)
        for given in scales.node.bound["indices"]
    ]
    axes: list[int] = []
    axis = 0
    for given, is_mask in zip(indices, masks, strict=True):
        width = len(given.shape) if is_mask else 1
        axes += range(axis, axis + width) if given is not None else []
        axis += width
    if known:
        return Labels(
            labels.along(axes)[tuple(slice(None) if v is None else v for v in values)],
            scales.node.shape,
        )
    agreed = scales.agree(labels, axes)
    picks: list[Any] = []
    for given, is_mask in zip(indices, masks, strict=True):
        scales.pin(given, "is an index")
        if given is None:
            picks.append(slice(None))
        elif is_mask:  # a mask stands for one index per axis, all of one length
            picks += [torch.zeros(1, dtype=torch.long)] * len(given.shape)
        else:
            picks.append(torch.zeros([1] * len(given.shape), dtype=torch.long))
    return Labels(agreed.ids[tuple(picks)], scales.node.shape)


@rule("index_select", family=INDEXING)
def index_select(scales: Scales, x: Operand, dim: int, index: Operand) -> Any:
    x, value = scales.simplify(x), scales.lasting_value(index)
    if value is not None and scales.is_weight(x):
        return scales.picked(x, lambda at: at.index_select(dim, value))
    if value is None:
        scales.pin(index, "is an index")
        picked = pick_from(scales, x, scales.node.bound["index"]) if dim == 0 else None
        if picked is not None:
            return picked
    labels = scales.labels(x)
    if value is None:
        return Labels(scales.agree(labels, [dim]).ids, scales.node.shape)
    return Labels(labels.along([dim]).index_select(dim, value), scales.node.shape)


@rule("gather", "take_along_dim", family=INDEXING)
def gather(scales: Scales, x: Operand, dim: int, index: Operand, indices: Any) -> Labels:
    scales.pin(index if index is not None else indices, "is an index")
    labels = scales.agree(scales.labels(x), [dim])
    varying = [
        i
        for i, size in enumerate(labels.ids.shape)
        if size > 1 and labels.shape[i] != scales.node.shape[i]
    ]
    return Labels(scales.agree(labels, varying).ids, scales.node.shape)


@rule("tril", "triu", family=INDEXING)
def triangle(scales: Scales, x: Operand) -> Labels:
    return scales.labels(x)


# -- path energy -----------------------------------------------------------------------------------


@energy("embedding", measures=True)
def embedding_energy(energies: Energies, weight: Carried, indices: Any) -> Tensor:
    """The rows that the example batch reads; uncalibrated one path per row."""
    table = energies.summand(weight)
    if not energies.calibrate and not isinstance(indices, Known):
        return table.sum(0).expand(energies.node.shape)
    return energies.averaged(lambda rows: F.embedding(rows, table), "indices")


@energy("embedding_bag", measures=True)
def embedding_bag_energy(
    energies: Energies,
    weight: Carried,
    indices: Any,
    offsets: Any,
    mode: int,
    per_sample_weights: Any,
) -> Energy:
    """The rows that the example batch reads, 1/n of each in a mean; uncalibrated one path per
    row.
    """
    others = [FREEZE] * (len(energies.node.shape) - 1)
    if isinstance(weight, PathSum) or (not energies.calibrate and not isinstance(offsets, Known)):
        return FREEZE
    table = energies.factor(weight)
    settings: dict[str, Any] = {"mode": SUM_OF_ROWS, "sparse": False, "scale_grad_by_freq": False}
    if per_sample_weights is not None:
        settings["per_sample_weights"] = energies.factor(per_sample_weights)

    def bags(at: Tensor, starts: Tensor) -> Tensor:
        chosen = settings | {"indices": at, "offsets": starts}
        total: Tensor = energies.itself({"weight": table, **chosen})[0]
        if mode != MEAN_OF_ROWS:
            return total
        sizes = energies.itself({"weight": torch.ones_like(table[:, :1]), **chosen})[0]
        return total * sizes.clamp(min=1) ** -energies.p

    if energies.calibrate or isinstance(indices, Known):
        return energies.averaged(bags, "indices", "offsets"), *others
    # Every entry of a bag may be any row but the padding: as if a table held their sum alone.
    padding = energies.node.bound.get("padding_idx")
    if padding is not None:
        table = table.index_fill(0, torch.tensor([padding], device=energies.device), 0.0)
        settings["padding_idx"] = None
    table = table.sum(0, keepdim=True)
    entries = energies.node.bound["indices"].shape
    first = torch.zeros(entries, dtype=torch.long, device=energies.device)
    return bags(first, offsets.value), *others


@energy("index", measures=True)
def index_energy(energies: Energies, x: Carried, indices: Any) -> Energy:
    """What the example batch picks; uncalibrated one path per element that may be picked."""
    power = energies.summand(x)
    unknown = any(isinstance(given, (Frozen, PathSum)) for given in indices)
    if unknown and isinstance(x, Edges) and _picks_rows(energies.node.bound["indices"]):
        return energies.picked(
            lambda at: _rows(power, at, energies.node.shape), "indices", len(power), edges=True
        )
    if not unknown or energies.calibrate:
        return energies.averaged(lambda at: power[_subscript(at)], "indices")
    if any(given is not None and _is_mask(given) for given in energies.node.bound["indices"]):
        return FREEZE
    picked = power.sum([i for i, given in enumerate(indices) if given is not None], keepdim=True)
    return picked[_subscript(_origins(energies.node.bound["indices"]))].expand(energies.node.shape)


def _subscript(indices: Any) -> tuple[Any, ...]:
    return tuple(slice(None) if given is None else given for given in indices)


def _origins(indices: Any) -> list[Tensor | None]:
    """Indices of the same rank that all point to the first element."""
    ranks = [None if given is None else len(given.shape) for given in indices]
    return [None if n is None else torch.zeros([1] * n, dtype=torch.long) for n in ranks]


def _is_mask(index: Any) -> bool:
    return index.dtype == torch.bool


def _picks_rows(indices: Any) -> bool:
    """Whether one index picks along the first axis and no other does."""
    first, *others = indices
    return first is not None and not _is_mask(first) and all(given is None for given in others)


def _rows(power: Tensor, at: Any, shape: Any) -> Tensor:
    """Rows of a tensor by an index, or one of its rows everywhere."""
    return power[at].expand(shape) if isinstance(at, int) else power[at]


@energy("index_select", "gather", "take_along_dim", measures=True)
def picked(energies: Energies, x: Carried, dim: int, index: Any, indices: Any) -> Energy:
    """What the example batch picks; uncalibrated one path per element that may be picked."""
    name = "index" if index is not None else "indices"
    given = index if index is not None else indices
    if (
        isinstance(x, Edges)
        and not isinstance(given, Known)
        and energies.node.op == "index_select"
        and dim == 0
    ):
        power = energies.summand(x)
        return energies.picked(
            lambda at: _rows(power, at, energies.node.shape), name, len(power), edges=True
        )
    if isinstance(given, Known) or energies.calibrate:
        power = energies.summand(x)
        return energies.averaged(lambda at: energies.itself({"self": power, name: at}), name)
    return energies.summand(x).sum(dim, keepdim=True).expand(energies.node.shape)


@energy("tril", "triu")
def triangle_energy(energies: Energies) -> Tensor:
    """The op itself, run on the energies."""
    return energies.itself()
