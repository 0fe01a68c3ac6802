"""Writes and sums into places of a tensor: message passing, caches, assignments by index.

What goes to a place must have the scale of what is there already; zeros fit any. A known index says
which element goes where, element by element. An unknown one may send any element along its axis to
any place along it, so these share one scale, while the other axes keep theirs apart.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...trees import tree_leaves
from ..energies import FREEZE, Carried, Energies, Energy, Frozen, PathSum
from ..labels import ANY, Labels
from ..scales import Scales
from ..table import energy, rule
from ..values import Operand
from .indexing import INDEXING

MAX_EXACT = 1 << 20  # larger targets are treated as if the index were unknown
PRODUCTS = ("prod", "multiply")
WRITTEN = "is written into a tensor that has no scale"


@rule("index_add", "index_copy", "index_reduce", family=INDEXING)
def into_rows(
    scales: Scales, x: Operand, dim: int, index: Operand, source: Operand, reduce: str | None
) -> Labels:
    if reduce in PRODUCTS:
        return _pin_both(scales, x, source)
    target = scales.labels(x)
    value = scales.lasting_value(index)
    if value is None or _too_large(target):
        return _anywhere(scales, target, dim, index, scales.labels(source))
    places = _positions(target).index_select(dim, value)
    overwrites = scales.node.op == "index_copy"
    return _exactly(scales, x, places, scales.labels(source), overwrites=overwrites)


@rule("scatter", "scatter_add", "scatter_reduce", family=INDEXING)
def scatter(
    scales: Scales,
    x: Operand,
    dim: int,
    index: Operand,
    src: Operand,
    value: Operand,
    reduce: str | None,
) -> Labels:
    if src is None:
        return _with_number(scales, x, value, reduce)
    if reduce in PRODUCTS:
        return _pin_both(scales, x, src)
    target = scales.labels(x)
    at = scales.lasting_value(index)
    if at is None or _too_large(target):
        return _anywhere(scales, target, dim, index, scales.labels(src))
    read = scales.labels(src).full[tuple(slice(size) for size in at.shape)]
    overwrites = scales.node.op == "scatter" and reduce is None
    places = _positions(target).gather(dim, at)
    return _exactly(scales, x, places, Labels(read, tuple(read.shape)), overwrites=overwrites)


@rule("index_fill", family=INDEXING)
def index_fill(scales: Scales, x: Operand, value: Operand) -> Labels:
    return _with_number(scales, x, value, None)


@rule("index_put", family=INDEXING)
def index_put(
    scales: Scales, x: Operand, indices: Any, values: Operand, accumulate: bool
) -> Labels:
    target, source = scales.labels(x), scales.labels(values)
    given = [None if index is None else scales.lasting_value(index) for index in indices]
    known = all(i is None or v is not None for i, v in zip(indices, given, strict=True))
    if known and not _too_large(target):
        places = _positions(target)[tuple(slice(None) if v is None else v for v in given)]
        full = torch.broadcast_to(source.full, places.shape)
        return _exactly(
            scales, x, places, Labels(full, tuple(full.shape)), overwrites=not accumulate
        )
    for index in indices:
        scales.pin(index, "is an index")
    if torch.Size(source.shape).numel() == 1:
        return _with_number(scales, x, Labels(source.ids.reshape(()), ()), None)
    axes, places_first, rank = _indexed_axes(scales.node.bound["indices"])
    # Values broadcast to the region that is written: the indexed axes of the target become ``rank``
    # axes, in front if indices with slices between them are given, else in place of the first.
    kept = len(target.shape) - len(axes)
    missing = kept + rank - len(source.shape)
    ids = source.ids.reshape([1] * missing + list(source.ids.shape))
    shape = (*[1] * missing, *source.shape)
    start = 0 if places_first else axes[0]
    ids = scales.agree(Labels(ids, shape), range(start, start + rank)).ids
    ids = ids.reshape([*ids.shape[:start], *ids.shape[start + rank :]])
    for axis in axes:
        ids = ids.unsqueeze(axis)
    spread = Labels(ids, tuple(ids.shape))
    return scales.merge(scales.agree(target, axes), spread, reason=WRITTEN)


@rule("masked_scatter", family=INDEXING)
def masked_scatter(scales: Scales, x: Operand, mask: Operand, source: Operand) -> Labels:
    """Elements are taken in order, whatever their place in the source, so all of them share one
    scale.
    """
    scales.pin(mask, "decides a masked_scatter")
    labels = scales.labels(source)
    common = scales.agree(labels, range(len(labels.shape))).ids.reshape(())
    return _with_number(scales, x, Labels(common, ()), None)


@rule("slice_scatter", "select_scatter", family=INDEXING)
def into_view(
    scales: Scales,
    x: Operand,
    src: Operand,
    dim: int,
    start: int | None,
    end: int | None,
    step: int | None,
    index: int,
) -> Labels:
    positions = _positions(scales.labels(x))
    if scales.node.op == "select_scatter":
        places = positions.select(dim, index)
    else:
        places = torch.ops.aten.slice(positions, dim, start, end, step)
    return _exactly(scales, x, places, scales.labels(src), overwrites=True)


def _too_large(target: Labels) -> bool:
    return torch.Size(target.shape).numel() > MAX_EXACT


def _positions(target: Labels) -> Tensor:
    return torch.arange(torch.Size(target.shape).numel()).view(target.shape)


def _pin_both(scales: Scales, x: Operand, source: Operand) -> Labels:
    scales.pin(source, "is multiplied into a tensor a number of times that depends on data")
    return scales.labels(scales.pin(x, "is multiplied a number of times that depends on data"))


def _with_number(scales: Scales, x: Operand, value: Operand, reduce: str | None) -> Labels:
    """One value for all places: each of them must have its scale. A number multiplies without
    one.
    """
    if reduce in PRODUCTS:
        return scales.labels(x)
    merged = scales.merge(scales.labels(x), value, reason=WRITTEN)
    return scales.broadcast(merged, scales.node.shape)


def _anywhere(scales: Scales, target: Labels, dim: int, index: Operand, source: Labels) -> Labels:
    """Any element along the axis may go to any place along it; so along axes cut to the index's
    size.
    """
    scales.pin(index, "is an index")
    rank = len(target.shape)
    mixed = {dim % rank} | {i for i in range(rank) if source.shape[i] != target.shape[i]}
    shape = tuple(1 if i in mixed else size for i, size in enumerate(source.shape))
    spread = Labels(scales.agree(source, mixed).ids, shape)
    return scales.merge(scales.agree(target, mixed), spread, reason=WRITTEN)


def _exactly(
    scales: Scales, x: Operand, places: Tensor, source: Labels, *, overwrites: bool
) -> Labels:
    """Write labels to known places of the flattened target; what meets there is equated."""
    target = scales.labels(x)
    memory = target.full.reshape(-1).clone()
    at = places.reshape(-1)
    labels = source.full.reshape(-1)
    if overwrites:
        if scales.is_weight(x):
            # Nothing else may read these elements of the parameter: they are no units of their own.
            scales.equations.pin(memory[at], by=scales.node, reason="is overwritten")
        memory[at] = ANY
    merged = memory.scatter_reduce(0, at, labels, "amax")
    scales.equations.equate(merged, memory, by=scales.node, reason=WRITTEN)
    scales.equations.equate(merged[at], labels, by=scales.node, reason=WRITTEN)
    return Labels(merged.view(target.shape), target.shape)


def _indexed_axes(indices: Any) -> tuple[list[int], bool, int]:
    """Axes that are indexed, whether slices lie between them, and the rank of the indices
    together.
    """
    axes: list[int] = []
    rank = axis = 0
    for given in indices:
        width = len(given.shape) if given is not None and given.dtype == torch.bool else 1
        if given is not None:
            axes += range(axis, axis + width)
            rank = max(rank, 1 if given.dtype == torch.bool else len(given.shape))
        axis += width
    return axes, axes != list(range(axes[0], axes[0] + len(axes))), rank


# -- path energy -----------------------------------------------------------------------------------


@energy("slice_scatter", "select_scatter")
def placed(energies: Energies) -> Tensor:
    """The op itself, run on the energies."""
    return energies.itself()


@energy(
    *"index_put index_copy index_add index_fill scatter scatter_add scatter_reduce".split(),
    measures=True,
)
def scattered(
    energies: Energies,
    x: Carried,
    index: Any,
    indices: Any,
    alpha: float,
    value: Carried,
    reduce: str | None,
) -> Energy:
    """Where the example batch sends it; uncalibrated one path per place that it may be sent to."""
    if reduce in PRODUCTS:
        return FREEZE
    unknown = any(isinstance(i, (Frozen, PathSum)) for i in (index, *tree_leaves(indices)))
    if unknown and not energies.calibrate:
        return _send_anywhere(energies)
    settings: dict[str, Any] = {}
    if alpha is not None:
        settings["alpha"] = float(energies.power(alpha))
    if isinstance(value, (int, float)):
        settings["value"] = float(energies.summand(value))
    if energies.node.op == "scatter_reduce":
        settings["reduce"] = "sum"  # a maximum has one path per element that may be selected
    name = "index" if index is not None else "indices"
    target = energies.summand(x)

    def send(at: Any) -> Tensor:
        # An in-place op would write into the energy of what it is given.
        total: Tensor = energies.itself({"self": target.clone(), name: at, **settings})
        return total if reduce != "mean" else total * _shares(energies, at) ** -energies.p

    return energies.averaged(send, name)


def _shares(energies: Energies, index: Tensor) -> Tensor:
    """How many elements each place of a mean is the average of."""
    ones = torch.ones(energies.node.shape, dtype=torch.float64, device=energies.device)
    counted = ones.new_ones(energies.node.bound["src"].shape)
    shares: Tensor = energies.itself(
        {"self": ones, "index": index, "src": counted, "reduce": "sum"}
    )
    return shares


def _send_anywhere(energies: Energies) -> Energy:
    """Whatever is written may go to any place along the indexed axes."""
    bound = energies.node.bound
    operands = energies.operands
    if energies.node.op == "index_put":
        return _put_anywhere(energies)
    source = next(operands[name] for name in ("src", "source", "value") if name in operands)
    target = energies.summand(operands["self"])
    sent = energies.summand(source)
    if sent.dim():
        sent = sent.sum(bound["dim"], keepdim=True)
    return target + sent * energies.power(bound.get("alpha", 1))


def _put_anywhere(energies: Energies) -> Energy:
    indices = energies.node.bound["indices"]
    target, sent = (energies.summand(energies.operands[name]) for name in ("self", "values"))
    if sent.numel() == 1:
        return target + sent.reshape(())
    given = [index for index in indices if index is not None]
    if any(index.dtype == torch.bool for index in given):
        return FREEZE
    axes, places_first, rank = _indexed_axes(indices)
    start = 0 if places_first else axes[0]
    kept = target.dim() - len(axes)
    sent = sent.reshape([1] * (kept + rank - sent.dim()) + list(sent.shape))
    times = torch.broadcast_shapes(*[index.shape for index in given])
    sent = sent.expand([-1] * start + list(times) + [-1] * (kept - start))
    sent = sent.sum(list(range(start, start + rank)))
    for axis in axes:
        sent = sent.unsqueeze(axis)
    return target + sent
