"""Look-ups: a known index is executed on the labels, an unknown one equates what it may pick.

Members of a stack of parameters that an unknown index picks from stay apart (``picking``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..energies import FREEZE, Apart, Edges, Frozen, PathSum
from ..labels import Labels
from ..picking import pick_from
from ..values import Known
from .table import energy, rule

if TYPE_CHECKING:
    from ..energies import Energies
    from ..scales import Scales

INDEXING = "Look-ups: known indices are executed on the labels, unknown ones equate what they may pick (experts stay apart)"


@rule("embedding", family=INDEXING)
def embedding(scales: Scales, weight: Any, indices: Any) -> Labels:
    """Which rows are read depends on the data, so all rows share one log-scale per column."""
    scales.pin(indices, "is an index")
    weight = scales.simplified(weight)
    if scales.is_weight(weight):
        columns = scales.scale_weight(weight, torch.zeros(1, 1, dtype=torch.int32), [1, weight.shape[1]])
    else:
        columns = scales.agree(scales.labels(weight), [0]).ids
    rank = len(scales.node.shape)
    return Labels(columns.view([1] * (rank - 1) + [columns.shape[-1]]), scales.node.shape)


@rule("index", family=INDEXING)
def index(scales: Scales, x: Any, indices: Any) -> Any:
    if scales.value(indices[0]) is None and all(given is None for given in indices[1:]):
        picked = pick_from(scales, x, scales.node.bound["indices"][0])
        if picked is not None:
            scales.pin(indices[0], "is an index")
            return picked
    labels = scales.labels(x)
    values = [None if given is None else scales.value(given) for given in indices]
    known = all(given is None or value is not None for given, value in zip(indices, values, strict=True))
    axes: list[int] = []
    axis = 0
    for given, value in zip(indices, values, strict=True):
        width = value.dim() if value is not None and value.dtype == torch.bool else 1
        axes += range(axis, axis + width) if given is not None else []
        axis += width
    if known:
        return Labels(labels.along(axes)[tuple(slice(None) if v is None else v for v in values)], scales.node.shape)
    agreed = scales.agree(labels, axes)
    for given in indices:
        scales.pin(given, "is an index")
    picks = tuple(slice(None) if given is None else torch.zeros([1] * len(given.shape), dtype=torch.long) for given in indices)
    return Labels(agreed.ids[picks], scales.node.shape)


@rule("index_select", family=INDEXING)
def index_select(scales: Scales, x: Any, dim: int, index: Any) -> Any:
    value = scales.value(index)
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
def gather(scales: Scales, x: Any, dim: int, index: Any, indices: Any) -> Labels:
    scales.pin(index if index is not None else indices, "is an index")
    labels = scales.agree(scales.labels(x), [dim])
    varying = [i for i, size in enumerate(labels.ids.shape) if size > 1 and labels.shape[i] != scales.node.shape[i]]
    return Labels(scales.agree(labels, varying).ids, scales.node.shape)


@rule("scatter", "index_put", "index_copy", "index_add", "scatter_add", "masked_scatter", "slice_scatter", "select_scatter",
      family=INDEXING)  # fmt: skip
def scatter(scales: Scales, x: Any, index: Any, indices: Any, src: Any, values: Any, value: Any, source: Any) -> Labels:
    """Rare in networks: what is written and what it is written into are fixed."""
    for operand in (index, *(indices or ()), src, values, value, source):
        scales.pin(operand, "is written into part of a tensor")
    return scales.pin(x, "is partly overwritten")


@rule("tril", "triu", family=INDEXING)
def triangle(scales: Scales, x: Any) -> Labels:
    return scales.labels(x)


# -- path energy ------------------------------------------------------------------------------------


@energy("embedding", measures=True)
def embedding_energy(energies: Energies, weight: Any, indices: Any) -> Tensor:
    """The rows that the example batch reads; uncalibrated one path per row."""
    table = energies.summand(weight)
    if not energies.calibrate and not isinstance(indices, Known):
        return table.sum(0).expand(energies.node.shape)
    return energies.averaged(lambda rows: F.embedding(rows, table), "indices")


@energy("index", measures=True)
def index_energy(energies: Energies, x: Any, indices: Any) -> Any:
    """Known indices are executed on the energies, others as the example batch picks; uncalibrated one path per element."""
    power = energies.summand(x)
    if any(isinstance(given, (Frozen, PathSum)) for given in indices):
        if any(given is None for given in indices[:1]) or any(given is not None for given in indices[1:]):
            return FREEZE
        if isinstance(x, Edges) or energies.calibrate:
            edges = isinstance(x, Edges)
            rows = energies.picked(lambda at: _rows(power, at, energies.node.shape), "indices", len(power), edges=edges)
            # What is picked from activations has one scale, whichever row it is: their average has it too.
            return rows.average() if isinstance(rows, Apart) and not edges else rows
        return power.sum(0).expand(energies.node.shape)
    return energies.summand(x)[tuple(slice(None) if given is None else given.value for given in indices)]


def _rows(power: Tensor, at: Any, shape: Any) -> Tensor:
    """Rows of a tensor by an index, or one of its rows everywhere."""
    return power[at].expand(shape) if isinstance(at, int) else power[at]


@energy("index_select", "gather", "take_along_dim", measures=True)
def picked(energies: Energies, x: Any, dim: int, index: Any, indices: Any) -> Any:
    """What the example batch picks; uncalibrated one path per element that may be picked."""
    name = "index" if index is not None else "indices"
    given = index if index is not None else indices
    if isinstance(x, Edges) and not isinstance(given, Known) and energies.node.op == "index_select" and dim == 0:
        power = energies.summand(x)
        return energies.picked(lambda at: _rows(power, at, energies.node.shape), name, len(power), edges=True)
    if isinstance(given, Known) or energies.calibrate:
        power = energies.summand(x)
        return energies.averaged(lambda at: energies.itself({"self": power, name: at}), name)
    return energies.summand(x).sum(dim, keepdim=True).expand(energies.node.shape)


@energy("tril", "triu", "slice_scatter", "select_scatter", "index_put", "index_copy", "index_add", "scatter", "scatter_add")
def placed(energies: Energies, index: Any, indices: Any, alpha: Any, value: Any, reduce: Any) -> Any:
    """Known indices are executed on the energies; others end the paths."""
    unknown = [given for given in (index, *(indices or ())) if isinstance(given, (Frozen, PathSum))]
    if unknown or reduce is not None:
        return FREEZE
    numbers = {"alpha": energies.power(alpha)} if alpha is not None else {}
    numbers |= {"value": energies.summand(value)} if isinstance(value, (int, float)) else {}
    return energies.itself({name: float(number) for name, number in numbers.items()})
