"""Shape ops run on the labels themselves, with the same ATen op."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .. import labels as lb
from ..energies import FREEZE, Carried, Energies, Energy
from ..labels import ANY, FIXED, Labels
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Operand

SHAPE = Family("Shape: executed on the labels", reads_parameters=True, selects=True)
PADDING = Family(
    "Padding: zeros fit any scale, other constants are fixed, copies pass on", selects=True
)
VIEWS = tuple(
    (
        "permute transpose t numpy_T adjoint mT squeeze unsqueeze expand expand_as slice select "
        "narrow movedim moveaxis swapaxes swapdims diagonal unfold split split_with_sizes chunk "
        "unbind tensor_split unsafe_split unsafe_chunk broadcast_to hsplit vsplit dsplit rot90"
    ).split()
)


@rule(
    *VIEWS,
    "view_as_real",
    family=SHAPE,
)
def view(scales: Scales, x: Operand) -> Any:
    return scales.through_view(x)


@rule("diag_embed", family=SHAPE)
def diagonal_matrix(scales: Scales, x: Operand, offset: int, dim1: int, dim2: int) -> Labels:
    """What lies off the diagonal is zero, and fits any scale."""
    ids = scales.labels(x).full - ANY  # so that the zeros that come in stand for ANY
    return Labels(torch.diag_embed(ids, offset, dim1, dim2) + ANY, scales.node.shape)


@rule(
    *"view reshape _unsafe_view flatten unflatten view_as reshape_as ravel".split(),
    family=SHAPE,
)
def reshape(scales: Scales, x: Operand, dtype: torch.dtype | None) -> Any:
    if dtype is not None:  # Tensor.view(dtype): the same bits read as another type
        return scales.pin(x, "has its bits read as another type")
    return scales.reshaped(x, scales.node.shape)


@rule(
    *(
        "contiguous clone detach alias lift_fresh lift_fresh_copy lift to _to_copy type_as conj "
        "resolve_conj resolve_neg"
    ).split(),
    family=SHAPE,
)
def same(scales: Scales, x: Operand) -> Any:
    dtype = scales.node.dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return scales.pin(x, f"is converted to {dtype}")
    return x


@rule("cat", "concat", "concatenate", family=SHAPE)
def cat(scales: Scales, tensors: Sequence[Operand], dim: int) -> Labels:
    parts = [scales.labels(tensor) for tensor in tensors]
    parts = [part for part in parts if part.shape != (0,)]  # torch.cat ignores legacy empty tensors
    return lb.concatenate(parts, dim)


@rule("stack", family=SHAPE)
def stack(scales: Scales, tensors: Sequence[Operand], dim: int) -> Labels:
    rank = len(scales.node.shape)
    parts = [scales.labels(tensor) for tensor in tensors]
    return lb.concatenate(
        [lb.through_view(lambda ids: ids.unsqueeze(dim % rank), part) for part in parts], dim % rank
    )


@rule("roll", "flip", family=SHAPE)
def rearrange(scales: Scales, x: Operand, shifts: list[int], dims: list[int]) -> Labels:
    labels = scales.labels(x)
    if scales.node.op == "flip":
        return Labels(labels.along(dims).flip(dims), labels.shape)
    if not dims:
        return lb.compress(torch.roll(labels.full, shifts))
    moved = [
        (shift, dim) for shift, dim in zip(shifts, dims, strict=True) if labels.ids.shape[dim] > 1
    ]
    return Labels(
        torch.roll(labels.ids, [s for s, _ in moved], [d for _, d in moved])
        if moved
        else labels.ids,
        labels.shape,
    )


@rule("repeat", "tile", family=SHAPE)
def repeat(scales: Scales, x: Operand, repeats: list[int] | None, dims: list[int]) -> Labels:
    labels = scales.labels(x)
    times = list(repeats if repeats is not None else dims)
    rank = max(len(times), len(labels.shape))
    times = [1] * (rank - len(times)) + times
    ids = labels.ids.view([1] * (rank - labels.ids.dim()) + list(labels.ids.shape))
    return Labels(
        ids.repeat([1 if size == 1 else n for size, n in zip(ids.shape, times, strict=True)]),
        scales.node.shape,
    )


@rule("repeat_interleave", family=SHAPE)
def repeat_interleave(scales: Scales, x: Operand, repeats: Operand, dim: int | None) -> Labels:
    labels = scales.labels(x)
    if dim is None or not isinstance(repeats, int):
        return scales.pin(x, "is repeated a number of times that depends on data")
    ids = labels.ids if labels.ids.shape[dim] == 1 else labels.ids.repeat_interleave(repeats, dim)
    return Labels(ids, scales.node.shape)


@rule("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", family=SHAPE)
def shuffle(
    scales: Scales,
    x: Operand,
    upscale_factor: int | None,
    downscale_factor: int | None,
    groups: int | None,
) -> Labels:
    labels = scales.labels(x)
    amount = next(n for n in (upscale_factor, downscale_factor, groups) if n is not None)
    inner = range(len(labels.shape) - 3, len(labels.shape)) if groups is None else [1]
    ids = labels.along(inner)
    if groups is not None:  # only channels move: view (groups, C/groups), transpose
        order = torch.arange(labels.shape[1]).view(groups, -1).T.reshape(-1)
        return Labels(ids[:, order], labels.shape)
    return Labels(scales.node.target(ids, amount), scales.node.shape)


@rule(
    "constant_pad_nd",
    "pad",
    family=PADDING,
)
def pad(
    scales: Scales, x: Operand, pad: Sequence[int], value: float | None, mode: str | None
) -> Labels:
    labels = scales.labels(x)
    rank = len(labels.shape)
    axes = [rank - 1 - i // 2 for i, amount in enumerate(pad) if amount]
    if mode not in (None, "constant"):
        return scales.broadcast(scales.agree(labels, axes), scales.node.shape)
    filling = ANY if value in (None, 0) or abs(value) == float("inf") else FIXED
    cropped = [
        axis for i, axis in enumerate(rank - 1 - i // 2 for i in range(len(pad))) if pad[i] < 0
    ]
    grown = [
        axis for i, axis in enumerate(rank - 1 - i // 2 for i in range(len(pad))) if pad[i] > 0
    ]
    if filling == ANY and not cropped and all(labels.ids.shape[axis] == 1 for axis in grown):
        # Zeros fit every scale, so an axis that was constant may stay so.
        return Labels(labels.ids, scales.node.shape)
    return Labels(
        torch.nn.functional.pad(labels.along(axes), pad, value=filling), scales.node.shape
    )


@rule(
    *(
        "reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
        "replication_pad3d _pad_circular"
    ).split(),
    family=PADDING,
)
def copy_pad(scales: Scales, x: Operand, padding: list[int] | None, pad: list[int]) -> Labels:
    labels = scales.labels(x)
    amounts = padding if padding is not None else pad
    axes = [len(labels.shape) - 1 - i // 2 for i in range(len(amounts))]
    return scales.broadcast(scales.agree(labels, axes), scales.node.shape)


@rule("im2col", family=SHAPE)
def im2col(scales: Scales, x: Operand, kernel_size: list[int]) -> Labels:
    labels = scales.labels(x)
    spatial = scales.agree(labels, [-1, -2])
    channels = spatial.along([len(labels.shape) - 3])[..., 0, 0]
    window = kernel_size[0] * kernel_size[1]
    return Labels(channels.repeat_interleave(window, -1).unsqueeze(-1), scales.node.shape)


@rule("col2im", family=SHAPE)
def col2im(scales: Scales, x: Operand, kernel_size: list[int]) -> Labels:
    labels = scales.labels(x)
    window = kernel_size[0] * kernel_size[1]
    columns = Labels(scales.agree(labels, [-1]).along([-2])[..., 0], labels.shape[:-1])
    grouped = lb.reshape(columns, (*columns.shape[:-1], columns.shape[-1] // window, window))
    return Labels(scales.agree(grouped, [-1]).ids[..., None], scales.node.shape)


# -- path energy -----------------------------------------------------------------------------------


@energy(
    *VIEWS,
    *(
        "cat concat concatenate stack roll flip repeat tile repeat_interleave pixel_shuffle "
        "pixel_unshuffle channel_shuffle reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d _pad_circular im2col col2im "
        "diag_embed"
    ).split(),
)
def moved(energies: Energies) -> Energy:
    """The op itself, run on the energies."""
    return energies.itself()


@energy(
    *"view reshape _unsafe_view flatten unflatten view_as reshape_as ravel".split(),
)
def reshaped(energies: Energies, x: Carried, dtype: Any) -> Energy:
    """The op itself, run on the energies."""
    return FREEZE if dtype is not None else energies.summand(x).reshape(energies.node.shape)


@energy(
    *(
        "contiguous clone detach alias lift_fresh lift_fresh_copy lift to _to_copy type_as conj "
        "resolve_conj resolve_neg"
    ).split(),
    measures=False,
)
def converted(energies: Energies, x: Carried) -> Energy:
    """Passes all paths on, unless it rounds to an integer."""
    if not energies.node.dtype.is_floating_point:
        return FREEZE
    return energies.summand(x).clone() if energies.node.op == "clone" else energies.summand(x)


@energy("constant_pad_nd", "pad")
def padded(energies: Energies, pad: Any, value: Carried, mode: str | None) -> Tensor:
    """Zeros have no paths, other constants start some, copies have those of what they copy."""
    constant = mode in (None, "constant") and value not in (None, 0)
    return (
        energies.itself({"value": float(energies.summand(value))})
        if constant
        else energies.itself()
    )
