"""Reductions, pooling and interpolation: what is summed or compared must share one scale."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..labels import Labels, constant
from .table import rule

if TYPE_CHECKING:
    from ..scales import Scales

REDUCTION = "Reductions: the scales of what is reduced are equated"
POOLING = "Pooling and interpolation: the scales of each channel's positions are equated"


def _reduced(scales: Scales, x: Any, dim: Any, keepdim: Any) -> Labels:
    labels = scales.labels(x)
    rank = len(labels.shape)
    dims = list(range(rank)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else list(dim)
    axes = [axis % rank for axis in dims] if rank else []
    ids = scales.agree(labels, axes).ids
    shape = tuple(1 if i in axes else size for i, size in enumerate(labels.shape))
    if not keepdim:
        for axis in sorted(axes, reverse=True):
            ids = ids.squeeze(axis)
        shape = tuple(size for i, size in enumerate(labels.shape) if i not in axes)
    return Labels(ids, shape)


@rule("sum", "mean", "amax", "amin", "nansum", "std", family=REDUCTION)
def reduce(scales: Scales, x: Any, dim: Any, keepdim: Any) -> Labels:
    return _reduced(scales, x, dim, keepdim)


@rule("norm", "linalg_vector_norm", family=REDUCTION)
def norm(scales: Scales, x: Any, p: Any, ord: Any, dim: Any, keepdim: Any) -> Labels:
    if 0 in (p, ord):  # the number of nonzero elements
        scales.pin(x, "is counted")
    return _reduced(scales, x, dim, keepdim)


@rule("max", "min", "median", family=REDUCTION)
def extremum(scales: Scales, x: Any, dim: Any, keepdim: Any, other: Any) -> Any:
    if other is not None:
        return scales.merge(x, other, reason="is compared with something that has no scale")
    values = _reduced(scales, x, dim, keepdim)
    return values if dim is None else (values, constant(values.shape))


@rule("var", family=REDUCTION)
def variance(scales: Scales, x: Any, dim: Any, keepdim: Any) -> Labels:
    return scales.combine((2, _reduced(scales, x, dim, keepdim)))


@rule("var_mean", "std_mean", family=REDUCTION)
def variance_and_mean(scales: Scales, x: Any, dim: Any, keepdim: Any) -> Any:
    mean = _reduced(scales, x, dim, keepdim)
    return (scales.combine((2 if scales.node.op == "var_mean" else 1, mean)), mean)


@rule("argmax", "argmin", "argsort", family=REDUCTION)
def position(scales: Scales, x: Any, dim: Any) -> Labels:
    _reduced(scales, x, dim, True)
    return constant(scales.node.shape)


@rule("cumsum", family=REDUCTION)
def running(scales: Scales, x: Any, dim: int) -> Labels:
    return scales.agree(scales.labels(x), [dim])


@rule("sort", "topk", family=REDUCTION)
def ordered(scales: Scales, x: Any, dim: Any) -> Any:
    axis = -1 if dim is None else dim
    ids = scales.agree(scales.labels(x), [axis]).ids
    return Labels(ids, scales.node.shape[0]), constant(scales.node.shape[1])


def _spatial(scales: Scales, x: Any, rank: int) -> Labels:
    """One label per channel, for an op that moves over the last ``rank`` axes."""
    ids = scales.agree(scales.labels(x), range(-rank, 0)).ids
    shape = scales.node.shape
    return Labels(ids, shape[0] if isinstance(shape, list) else shape)


def _pool(rank: int, *ops: str) -> None:
    @rule(*ops, family=POOLING)
    def pool(scales: Scales, x: Any) -> Any:
        pooled = _spatial(scales, x, rank)
        return (pooled, constant(pooled.shape)) if isinstance(scales.node.shape, list) else pooled


_pool(1, "max_pool1d", "avg_pool1d", "adaptive_avg_pool1d", "adaptive_max_pool1d", "max_pool1d_with_indices",
      "upsample_nearest1d", "upsample_linear1d")  # fmt: skip
_pool(2, "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "adaptive_max_pool2d", "max_pool2d_with_indices",
      "upsample_nearest2d", "upsample_bilinear2d", "upsample_bicubic2d", "_upsample_nearest_exact2d",
      "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa", "fractional_max_pool2d")  # fmt: skip
_pool(3, "max_pool3d", "avg_pool3d", "adaptive_avg_pool3d", "adaptive_max_pool3d", "max_pool3d_with_indices",
      "upsample_nearest3d", "upsample_trilinear3d")  # fmt: skip


@rule("grid_sampler", "grid_sampler_2d", "grid_sampler_3d", family=POOLING)
def grid_sample(scales: Scales, input: Any, grid: Any) -> Labels:
    scales.pin(grid, "is a sampling grid")
    labels = scales.labels(input)
    return Labels(scales.agree(labels, range(2, len(labels.shape))).ids, scales.node.shape)
