"""Reductions, pooling and interpolation: what is summed or compared must share one scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import labels as lb
from ..energies import FREEZE, Carried, Energies, Energy
from ..labels import Labels, constant
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Axes, Operand

REDUCTION = Family("Reductions: the scales of what is reduced are equated")
POOLING = Family(
    "Pooling and interpolation: the scales of each channel's positions are equated",
    reads_parameters=True,
)


def _reduce(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Labels:
    labels = scales.labels(x)
    rank = len(labels.shape)
    dims = (
        list(range(rank))
        if dim is None or dim == []
        else [dim]
        if isinstance(dim, int)
        else list(dim)
    )
    axes = [axis % rank for axis in dims] if rank else []
    ids = scales.agree(labels, axes).ids
    shape = tuple(1 if i in axes else size for i, size in enumerate(labels.shape))
    if not keepdim:
        for axis in sorted(axes, reverse=True):
            ids = ids.squeeze(axis)
        shape = tuple(size for i, size in enumerate(labels.shape) if i not in axes)
    return Labels(ids, shape)


@rule(
    *"sum mean amax amin nansum nanmean std".split(),
    family=REDUCTION,
)
def reduce(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Labels:
    return _reduce(scales, x, dim, keepdim)


@rule("norm", "linalg_vector_norm", family=REDUCTION)
def norm(
    scales: Scales, x: Operand, p: float | None, ord: float | None, dim: Axes, keepdim: bool | None
) -> Labels:
    if 0 in (p, ord):  # the number of nonzero elements
        scales.pin(x, "is counted")
    return _reduce(scales, x, dim, keepdim)


@rule("aminmax", family=REDUCTION)
def extrema(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Any:
    values = _reduce(scales, x, dim, keepdim)
    return values, values


@rule("kthvalue", family=REDUCTION)
def ranked_value(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Any:
    values = _reduce(scales, x, dim, keepdim)
    return values, constant(values.shape)


@rule("trace", family=REDUCTION)
def trace(scales: Scales, x: Operand) -> Labels:
    return _reduce(scales, lb.through_view(torch.diagonal, scales.labels(x)), None, False)


@rule("diff", family=REDUCTION)
def difference(scales: Scales, x: Operand, dim: int, prepend: Operand, append: Operand) -> Labels:
    """Differences along an axis, which shares one scale with what is put before and behind it."""
    parts = [
        scales.agree(scales.labels(part), [dim])
        for part in (x, prepend, append)
        if part is not None
    ]
    lines = [Labels(part.ids, _with_size_one(part.shape, dim)) for part in parts]
    merged = scales.merge(*lines, reason="is subtracted from something that has no scale")
    return Labels(merged.ids, scales.node.shape)


def _with_size_one(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return tuple(1 if i == dim % len(shape) else size for i, size in enumerate(shape))


@rule("max", "min", "median", family=REDUCTION)
def extremum(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None, other: Operand) -> Any:
    if other is not None:
        return scales.merge(x, other, reason="is compared with something that has no scale")
    values = _reduce(scales, x, dim, keepdim)
    return values if dim is None else (values, constant(values.shape))


@rule("var", family=REDUCTION)
def variance(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Labels:
    return scales.combine((2, _reduce(scales, x, dim, keepdim)))


@rule("var_mean", "std_mean", family=REDUCTION)
def variance_and_mean(scales: Scales, x: Operand, dim: Axes, keepdim: bool | None) -> Any:
    mean = _reduce(scales, x, dim, keepdim)
    return (scales.combine((2 if scales.node.op == "var_mean" else 1, mean)), mean)


@rule("argmax", "argmin", "argsort", family=REDUCTION)
def position(scales: Scales, x: Operand, dim: Axes) -> Labels:
    _reduce(scales, x, dim, True)
    return constant(scales.node.shape)


@rule("cummax", "cummin", family=REDUCTION)
def running_extremum(scales: Scales, x: Operand, dim: int) -> Any:
    values = scales.agree(scales.labels(x), [dim])
    return values, constant(values.shape)


@rule("cumsum", family=REDUCTION)
def running(scales: Scales, x: Operand, dim: int) -> Labels:
    return scales.agree(scales.labels(x), [dim])


@rule("sort", "topk", family=REDUCTION)
def ordered(scales: Scales, x: Operand, dim: int | None) -> Any:
    axis = -1 if dim is None else dim
    ids = scales.agree(scales.labels(x), [axis]).ids
    return Labels(ids, scales.node.shape[0]), constant(scales.node.shape[1])


def _spatial(scales: Scales, x: Operand, rank: int) -> Labels:
    """One label per channel, for an op that moves over the last ``rank`` axes."""
    ids = scales.agree(scales.labels(x), range(-rank, 0)).ids
    shape = scales.node.shape
    return Labels(ids, shape[0] if isinstance(shape, list) else shape)


def _pool(rank: int, *ops: str) -> None:
    @rule(*ops, family=POOLING)
    def pool(scales: Scales, x: Operand) -> Any:
        pooled = _spatial(scales, x, rank)
        return (pooled, constant(pooled.shape)) if isinstance(scales.node.shape, list) else pooled


_pool(
    1,
    "max_pool1d",
    "avg_pool1d",
    "adaptive_avg_pool1d",
    "adaptive_max_pool1d",
    "max_pool1d_with_indices",
    "upsample_nearest1d",
    "upsample_linear1d",
    "_upsample_nearest_exact1d",
)
_pool(
    2,
    "max_pool2d",
    "avg_pool2d",
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "max_pool2d_with_indices",
    "upsample_nearest2d",
    "upsample_bilinear2d",
    "upsample_bicubic2d",
    "_upsample_nearest_exact2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
    "fractional_max_pool2d",
    "max_unpool2d",
)
_pool(
    3,
    "max_pool3d",
    "avg_pool3d",
    "adaptive_avg_pool3d",
    "adaptive_max_pool3d",
    "max_pool3d_with_indices",
    "upsample_nearest3d",
    "upsample_trilinear3d",
    "_upsample_nearest_exact3d",
    "fractional_max_pool3d",
    "max_unpool3d",
)


@rule("cdist", family=REDUCTION)
def distances(scales: Scales, x1: Operand, x2: Operand, p: float) -> Labels:
    """Every row of one is compared with every row of the other, so they share one scale."""
    if p == 0:
        scales.pin(x2, "is counted")
        return scales.labels(scales.pin(x1, "is counted"))
    one, other = (scales.agree(scales.labels(x), [-1, -2]) for x in (x1, x2))
    shapes = [(*labels.shape[:-2], 1, 1) for labels in (one, other)]
    rows = [Labels(x.ids, shape) for x, shape in zip((one, other), shapes, strict=True)]
    merged = scales.merge(*rows, reason="is compared with something that has no scale")
    return Labels(scales.broadcast(merged, scales.node.shape).ids, scales.node.shape)


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", family=POOLING)
def grid_sample(scales: Scales, input: Operand, grid: Operand) -> Labels:
    scales.pin(grid, "is a sampling grid")
    labels = scales.labels(input)
    return Labels(scales.agree(labels, range(2, len(labels.shape))).ids, scales.node.shape)


# -- path energy -----------------------------------------------------------------------------------


@energy(
    *(
        "sum cumsum nansum upsample_nearest1d upsample_nearest2d upsample_nearest3d "
        "_upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
    ).split(),
)
def summed(energies: Energies) -> Tensor:
    """The op itself, run on the energies."""
    return energies.itself()


@energy("mean")
def averaged(energies: Energies, x: Carried) -> Tensor:
    """The average of n elements has paths of weight 1/n from each."""
    total = energies.itself()
    return total * (energies.summand(x).numel() / max(1, total.numel())) ** (1 - energies.p)


@energy("amax", "amin", "max", "min", "median")
def selected(
    energies: Energies, x: Carried, dim: Axes, keepdim: bool | None, other: Carried
) -> Energy:
    """One path per element that may be selected."""
    if other is not None:
        return energies.summand(x) + energies.summand(other)
    power = energies.summand(x)
    dims = list(range(power.dim())) if dim is None or dim == [] else dim
    total = power.sum(dims, keepdim=bool(keepdim))
    return (total, FREEZE) if isinstance(energies.node.shape, list) else total


@energy("max_unpool2d", "max_unpool3d", measures=True)
def unpooled(energies: Energies, x: Carried) -> Tensor:
    """Where the example batch sends it; uncalibrated one path per place that it may be sent to."""
    power = energies.summand(x)
    if energies.calibrate:
        return energies.averaged(lambda at: energies.itself({"indices": at}), "indices")
    axes = list(range(-len(energies.node.bound["output_size"]), 0))
    return power.sum(axes, keepdim=True).expand(energies.node.shape)


@energy("sort", "topk")
def ranked(energies: Energies, x: Carried, dim: Axes) -> Energy:
    """One path per element that may be selected."""
    total = energies.summand(x).sum(-1 if dim is None else dim, keepdim=True)
    return total.expand(energies.node.shape[0]), FREEZE


@energy("var_mean", "std_mean", measures=True)
def spread_and_mean(energies: Energies, x: Carried, dim: Axes, keepdim: bool | None) -> Energy:
    """The mean has paths of weight 1/n from each element; the spread ends them."""
    power = energies.summand(x)
    mean = power.mean(list(range(power.dim())) if dim is None else dim, keepdim=bool(keepdim))
    return FREEZE, mean * (power.numel() / mean.numel()) ** (1 - energies.p)


@energy(
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
    "max_pool1d_with_indices",
    "max_pool2d_with_indices",
    "max_pool3d_with_indices",
)
def max_pool_energy(
    energies: Energies,
    x: Carried,
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
) -> Energy:
    """One path per entry of the window."""
    shape = energies.node.shape[0] if isinstance(energies.node.shape, list) else energies.node.shape
    total = _window_sum(
        energies.summand(x), shape, kernel_size, stride or kernel_size, padding, dilation
    )
    return (total, FREEZE) if isinstance(energies.node.shape, list) else total


@energy("avg_pool1d", "avg_pool2d", "avg_pool3d")
def avg_pool_energy(
    energies: Energies, x: Carried, kernel_size: list[int], stride: list[int], padding: list[int]
) -> Tensor:
    """Paths of weight 1/n from each of the n entries of the window."""
    power = energies.summand(x)
    average = energies.itself()
    if energies.p == 1:
        return average
    rank = len(kernel_size)
    ones = power.detach().new_ones((1, 1, *power.shape[power.dim() - rank :]))
    shape = (1, 1, *average.shape[average.dim() - rank :])
    entries = _window_sum(ones, shape, kernel_size, stride or kernel_size, padding, [1])
    weight = energies.itself({"self": ones}) / entries  # 1/n, whatever the op counts at the border
    return average * weight.reshape(shape[2:]) ** (energies.p - 1)


@energy("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_avg_pool_energy(energies: Energies, x: Carried, output_size: list[int]) -> Tensor:
    """Paths of weight 1/n from each of the n entries of the window."""
    power = energies.summand(x)
    sizes = _adaptive_sizes(
        power.shape[power.dim() - len(output_size) :], energies.node.shape[-len(output_size) :]
    )
    return energies.itself() * sizes.to(energies.device) ** (1 - energies.p)


@energy("adaptive_max_pool1d", "adaptive_max_pool2d", "adaptive_max_pool3d")
def adaptive_max_pool_energy(energies: Energies, x: Carried, output_size: list[int]) -> Energy:
    """One path per entry of the window."""
    power = energies.summand(x)
    shape = energies.node.shape[0]
    rank = len(output_size)
    pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[rank]
    sizes = _adaptive_sizes(power.shape[power.dim() - rank :], shape[-rank:])
    return pool(power, shape[-rank:]) * sizes.to(energies.device), FREEZE


@energy(
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
    "_upsample_bilinear2d_aa",
    "_upsample_bicubic2d_aa",
)
def interpolated(energies: Energies, x: Carried) -> Tensor:
    """Paths of the interpolation's own weights, one matrix per axis."""
    power = energies.summand(x)
    rank = power.dim() - 2
    for axis in range(rank):
        weights = energies.power(_interpolation(energies, power, rank, axis))
        power = torch.tensordot(power, weights, dims=([2 + axis], [1])).movedim(-1, 2 + axis)
    return power


def _interpolation(energies: Energies, power: Tensor, rank: int, axis: int) -> Tensor:
    """(out, in) weights of the op along one axis: its response to unit rows that are constant along
    the others.
    """
    source = [
        energies.operands[next(iter(energies.operands))].power.shape[2 + i] for i in range(rank)
    ]
    rows = torch.eye(source[axis], dtype=torch.float64, device=energies.device)
    rows = rows.view(
        1, source[axis], *[source[axis] if i == axis else 1 for i in range(rank)]
    ).expand(1, -1, *source)
    response = energies.itself({next(iter(energies.operands)): rows.contiguous()})
    others = [i for i in range(2, 2 + rank) if i != 2 + axis]
    for i in sorted(others, reverse=True):
        response = response.select(i, 0)
    return response[0].T


def _window_sum(
    x: Tensor, shape: Any, kernel_size: Any, stride: Any, padding: Any, dilation: Any
) -> Tensor:
    """Sum over the windows of a pooling op whose result has the given shape; padding counts as
    zero.
    """
    rank = len(kernel_size)
    kernel, step, pad, spread = (
        list(v) * rank if len(v) == 1 else list(v) for v in (kernel_size, stride, padding, dilation)
    )
    size = x.shape[x.dim() - rank :]
    target = shape[len(shape) - rank :]
    amounts: list[int] = []
    for axis in reversed(range(rank)):
        needed = (target[axis] - 1) * step[axis] + (kernel[axis] - 1) * spread[axis] + 1
        amounts += [pad[axis], max(0, needed - size[axis] - pad[axis])]
    padded = F.pad(x.reshape(-1, 1, *size), amounts)
    window = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    convolve = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[rank]
    total = convolve(padded, window, stride=step, dilation=spread)
    for axis, length in enumerate(target):
        total = total.narrow(2 + axis, 0, length)
    return total.reshape(shape)


def _adaptive_sizes(size: Any, target: Any) -> Tensor:
    """Number of entries of every window of an adaptive pooling."""
    sizes = torch.ones([1] * len(target), dtype=torch.float64)
    for axis, (n, m) in enumerate(zip(size, target, strict=True)):
        i = torch.arange(m)
        along = -(-((i + 1) * n) // m) - i * n // m
        sizes = sizes * along.double().view([-1 if a == axis else 1 for a in range(len(target))])
    return sizes
