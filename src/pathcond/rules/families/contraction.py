"""Contractions: linear, convolution, matmul, einsum. One function serves all of them.

Axes are named by letters, as in einsum. A weight W whose axes are split into those of the output
(o), those that are summed (i) and those of both (g, groups) is rescaled by exp(t[g, o] − t'[g, i]):
t' is the log-scale it reads, t a fresh one per output unit. Letters that only the input has are
positions; a weight meets all of them, so their log-scales are equated.
"""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor

from .. import labels as lb
from ..energies import Carried, Energies
from ..labels import ANY, Labels
from ..picking import collapse_all, same_places
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Picked, Traced, Weight

CONTRACTION = Family(
    "Contractions: weights read the scales of their inputs and give fresh ones to their outputs",
    contracts=True,
)
MEMBERS = "#"  # the axis of a stack's members, which no equation of einsum has
# beyond this many terms a product of two activations is fixed instead of traced
MAX_PRODUCTS = 1 << 22


def contract(scales: Scales, x: Traced, x_axes: str, w: Traced, w_axes: str, out_axes: str) -> Any:
    """Labels of einsum("x_axes,w_axes->out_axes"); the result has one axis per letter, size 1 where
    constant.

    It is ``Picked`` if an operand is: each member is contracted by itself.
    """
    given = (x, w)
    x, w = (scales.simplify(operand) for operand in given)
    if isinstance(x, Picked) or isinstance(w, Picked):
        return _contract_picked(scales, x, x_axes, w, w_axes, out_axes)
    if scales.is_weight(x) and not scales.is_weight(w):
        return contract(scales, w, w_axes, x, x_axes, out_axes)
    if scales.is_weight(w):
        return _through_weight(scales, scales.labels(x), x_axes, w, w_axes, out_axes)
    a, b = scales.labels(x), scales.labels(w)
    sizes = dict(zip(x_axes, a.shape, strict=True)) | dict(zip(w_axes, b.shape, strict=True))
    sizes |= {axis: size for axis, size in zip(x_axes, a.shape, strict=True) if size > 1}
    shape = tuple(sizes[axis] for axis in out_axes)
    for operand, other in zip(given, (b, a), strict=True):
        if scales.is_weight(operand):  # a frozen one, or a weight would have read it
            if bool((other.ids == ANY).all()):
                return scales.factors.read_zeros(operand, shape, by=scales.node)
            scales.factors.read_frozen.add(operand.name)
    if a.fixed and b.fixed:
        return lb.constant(shape)
    joint = out_axes + "".join(sorted(set(x_axes + w_axes) - set(out_axes)))
    a = _agree_where_constant(scales, a, x_axes, b, w_axes, out_axes)
    b = _agree_where_constant(scales, b, w_axes, a, x_axes, out_axes)
    a_ids = _arrange(a.ids, x_axes, joint)
    b_ids = _arrange(b.ids, w_axes, joint)
    size = 1
    for m, n in zip(a_ids.shape, b_ids.shape, strict=True):
        size *= max(m, n)
    if size > MAX_PRODUCTS:
        reason = "takes part in a product of two activations that is too large to trace"
        scales.pin(a, reason)
        scales.pin(b, reason)
        return lb.constant(shape)
    products = scales.combine_ids((1, a_ids), (1, b_ids))
    summed = list(range(len(out_axes), len(joint)))
    agreed = scales.agree(Labels(products, tuple(sizes[axis] for axis in joint)), summed)
    return Labels(agreed.ids.reshape(agreed.ids.shape[: len(out_axes)]), shape)


def _agree_where_constant(
    scales: Scales, a: Labels, a_axes: str, b: Labels, b_axes: str, out_axes: str
) -> Labels:
    """Equate the labels of ``a`` along summed axes on which those of ``b`` do not vary.

    The sum over i of a_i · b asks for that anyway. Doing it first keeps the table of all products
    small.
    """
    if bool((b.ids == ANY).any()):
        return a
    varying = {axis for axis, size in zip(b_axes, b.ids.shape, strict=True) if size > 1}
    kept = varying | set(out_axes)
    return scales.agree(a, [i for i, axis in enumerate(a_axes) if axis not in kept])


def _contract_picked(
    scales: Scales, x: Traced, x_axes: str, w: Traced, w_axes: str, out_axes: str
) -> Any:
    """A contraction of what an index picked, with the members as one more axis that is not
    summed.
    """
    if (
        isinstance(x, Picked)
        and scales.is_weight(x.choices)
        and not (isinstance(w, Picked) and scales.is_weight(w.choices))
    ):
        x, x_axes, w, w_axes = w, w_axes, x, x_axes
    operands = ((x, x_axes), (w, w_axes))
    apart = all(
        _sums_no_places(value, axes, out_axes)
        for value, axes in operands
        if isinstance(value, Picked)
    )
    if scales.is_weight(x) or scales.is_weight(w) or not apart:
        x, w = collapse_all(scales, (x, w))
        return contract(scales, x, x_axes, w, w_axes, out_axes)
    places = [
        _arrange(value.place, axes, out_axes)
        for value, axes in operands
        if isinstance(value, Picked)
    ]
    if (
        isinstance(x, Picked)
        and isinstance(w, Picked)
        and not (x.pick == w.pick and same_places(*places))
    ):
        return contract(scales, collapse_all(scales, x), x_axes, w, w_axes, out_axes)
    pick = next(value.pick for value in (w, x) if isinstance(value, Picked))

    def with_members(value: Any) -> Any:
        if isinstance(value, Picked):
            return value.choices
        labels = scales.labels(value)
        return Labels(labels.ids[None], (pick.count, *labels.shape))

    sizes: dict[str, int] = {}
    for axis, size in [*zip(x_axes, x.shape, strict=True), *zip(w_axes, w.shape, strict=True)]:
        sizes[axis] = max(size, sizes.get(axis, 1))
    product = contract(
        scales,
        with_members(x),
        MEMBERS + x_axes,
        with_members(w),
        MEMBERS + w_axes,
        MEMBERS + out_axes,
    )
    shape = tuple(sizes[axis] for axis in out_axes)
    place = torch.broadcast_tensors(*places)[0]
    return Picked(Labels(product.ids, (pick.count, *shape)), shape, place, pick)


def _sums_no_places(value: Picked, axes: str, out_axes: str) -> bool:
    """Whether no elements of different places are summed."""
    return all(
        size == 1 or axis in out_axes for axis, size in zip(axes, value.place.shape, strict=True)
    )


def _through_weight(
    scales: Scales, x: Labels, x_axes: str, w: Weight, w_axes: str, out_axes: str
) -> Labels:
    w_sizes = dict(zip(w_axes, w.shape, strict=True))
    positions = [i for i, axis in enumerate(x_axes) if w_sizes.get(axis, 1) == 1]
    read = _arrange(scales.agree(x, positions).ids, x_axes, w_axes)
    sizes = w_sizes | {
        axis: size
        for axis, size in zip(x_axes, x.shape, strict=True)
        if size > 1 or axis not in w_axes
    }
    fresh_shape = [
        size if axis in out_axes else 1 for axis, size in zip(w_axes, w.shape, strict=True)
    ]
    given = scales.factors.scale(w, read, fresh_shape, by=scales.node)
    return Labels(_arrange(given, w_axes, out_axes), tuple(sizes[axis] for axis in out_axes))


def _arrange(ids: Any, axes: str, target: str) -> Any:
    """Reorder axes by letter; letters that are missing become axes of size 1, extra ones must have
    size 1.
    """
    extra = [i for i, axis in enumerate(axes) if axis not in target]
    for i in sorted(extra, reverse=True):
        ids = ids.squeeze(i)
    kept = [axis for axis in axes if axis in target]
    ids = ids.permute([kept.index(axis) for axis in target if axis in kept])
    for i, axis in enumerate(target):
        if axis not in kept:
            ids = ids.unsqueeze(i)
    return ids


def _with_bias(scales: Scales, out: Labels, bias: Traced | None) -> Labels:
    out = scales.broadcast(out, scales.node.shape)
    if bias is None:
        return out
    return scales.broadcast(
        scales.merge(out, bias, reason="is added to a bias that has no scale"), scales.node.shape
    )


@rule("linear", family=CONTRACTION)
def linear(scales: Scales, input: Traced, weight: Traced, bias: Traced | None) -> Labels:
    lead = _letters(len(input.shape) - 1)
    if len(weight.shape) == 1:
        return _with_bias(scales, contract(scales, input, lead + "i", weight, "i", lead), bias)
    return _with_bias(scales, contract(scales, input, lead + "i", weight, "oi", lead + "o"), bias)


@rule("matmul", "mm", "bmm", "mv", "dot", family=CONTRACTION)
def matmul(
    scales: Scales,
    x: Traced,
    other: Traced | None,
    mat2: Traced | None,
    vec: Traced | None,
    tensor: Traced | None,
) -> Labels:
    right = next(operand for operand in (other, mat2, vec, tensor) if operand is not None)
    return scales.broadcast(_matmul(scales, x, right), scales.node.shape)


def _matmul(scales: Scales, a: Traced, b: Traced) -> Labels:
    rank_a, rank_b = len(a.shape), len(b.shape)
    lead = _letters(max(rank_a, rank_b) - 2)
    a_axes = "i" if rank_a == 1 else lead[len(lead) - (rank_a - 2) :] + "mi"
    b_axes = "i" if rank_b == 1 else lead[len(lead) - (rank_b - 2) :] + "io"
    out_axes = lead + ("m" if rank_a > 1 else "") + ("o" if rank_b > 1 else "")
    return contract(scales, a, a_axes, b, b_axes, out_axes)


@rule("outer", "ger", family=CONTRACTION)
def outer(scales: Scales, x: Traced, vec2: Traced) -> Labels:
    return contract(scales, x, "i", vec2, "j", "ij")


@rule("inner", family=CONTRACTION)
def inner(scales: Scales, x: Traced, other: Traced) -> Labels:
    """Both are summed over their last axis."""
    left = _letters(len(x.shape) - 1)
    right = ascii_letters[: len(other.shape) - 1]
    return contract(scales, x, left + "z", other, right + "z", left + right)


@rule("tensordot", family=CONTRACTION)
def tensordot(
    scales: Scales, x: Traced, other: Traced, dims_self: Sequence[int], dims_other: Sequence[int]
) -> Labels:
    left = list(_letters(len(x.shape)))
    right = list(ascii_letters[: len(other.shape)])
    for one, two in zip(dims_self, dims_other, strict=True):
        right[two] = left[one]
    shared = {left[one % len(left)] for one in dims_self}
    out = "".join(axis for axis in left + right if axis not in shared)
    return contract(scales, x, "".join(left), other, "".join(right), out)


@rule("addmm", "baddbmm", "addmv", family=CONTRACTION)
def addmm(
    scales: Scales,
    x: Traced,
    mat1: Traced,
    mat2: Traced,
    batch1: Traced,
    batch2: Traced,
    mat: Traced,
    vec: Traced,
) -> Labels:
    a = next(operand for operand in (mat1, batch1, mat) if operand is not None)
    b = next(operand for operand in (mat2, batch2, vec) if operand is not None)
    return _with_bias(scales, _matmul(scales, a, b), x)


@rule("einsum", family=CONTRACTION)
def einsum(scales: Scales, equation: str, tensors: Sequence[Traced]) -> Labels:
    axes, out = _spell_out(equation, [len(tensor.shape) for tensor in tensors])
    if any(len(set(term)) < len(term) for term in axes):
        for tensor in tensors:
            scales.pin(tensor, f"takes part in einsum {equation!r}, which is not traced")
        return lb.constant(scales.node.shape)
    if len(tensors) == 1:
        labels = scales.labels(tensors[0])
        summed = [i for i, axis in enumerate(axes[0]) if axis not in out]
        return Labels(_arrange(scales.agree(labels, summed).ids, axes[0], out), scales.node.shape)
    # Two at a time: a letter is summed as soon as neither the rest nor the output has it.
    made, made_axes = tensors[0], axes[0]
    for i in range(1, len(tensors)):
        needed = set(out).union(*axes[i + 1 :])
        kept = "".join(a for a in dict.fromkeys(made_axes + axes[i]) if a in needed)
        kept = out if i == len(tensors) - 1 else kept
        made = contract(scales, made, made_axes, tensors[i], axes[i], kept)
        made_axes = kept
    return scales.broadcast(made, scales.node.shape)


def _spell_out(equation: str, ranks: list[int]) -> tuple[list[str], str]:
    """An einsum equation with the ellipsis as letters and the output written down."""
    terms, arrow, out = equation.replace(" ", "").partition("->")
    axes = terms.split(",")
    hidden = [
        rank - len(term.replace("...", "")) if "..." in term else 0
        for term, rank in zip(axes, ranks, strict=True)
    ]
    spare = [letter for letter in ascii_letters if letter not in equation][: max(hidden)]
    ellipsis = "".join(spare)
    axes = [
        term.replace("...", ellipsis[len(ellipsis) - count :])
        for term, count in zip(axes, hidden, strict=True)
    ]
    if not arrow:
        joined = "".join(axes)
        out = ellipsis + "".join(
            sorted(a for a in set(joined) if joined.count(a) == 1 and a not in ellipsis)
        )
    return axes, out.replace("...", ellipsis)


@rule("bilinear", family=CONTRACTION)
def bilinear(
    scales: Scales, input1: Traced, input2: Traced, weight: Traced, bias: Traced | None
) -> Labels:
    """Σ_ij x_i W_oij y_j: W reads the product of what both inputs carry."""
    one, other = (scales.agree(scales.labels(x), range(len(x.shape) - 1)) for x in (input1, input2))
    rows = Labels(one.ids.reshape(-1, 1), (one.shape[-1], 1))
    columns = Labels(other.ids.reshape(1, -1), (1, other.shape[-1]))
    pairs = scales.combine((1, rows), (1, columns))
    return _with_bias(scales, contract(scales, pairs, "ij", weight, "oij", "o"), bias)


@rule(
    *"conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d".split(),
    family=CONTRACTION,
)
def convolution(
    scales: Scales,
    input: Traced,
    weight: Traced,
    bias: Traced | None,
    groups: int,
    transposed: bool | None,
) -> Labels:
    """(N, g·i, space) with weight (g·o, i, kernel), or (g·i, o, kernel) if transposed -> (N, g·o,
    space).
    """
    transposed = transposed or scales.node.op.startswith("conv_transpose")
    kernel = len(weight.shape) - 2
    x = scales.labels(input)
    spatial = range(len(x.shape) - kernel, len(x.shape))
    x = scales.agree(x, spatial)
    unbatched = len(x.shape) == kernel + 1
    channels = x.shape[0 if unbatched else 1]
    per_channel = Labels(
        x.along([0 if unbatched else 1]).flatten(1 if unbatched else 2)[..., 0],
        x.shape[: 1 if unbatched else 2],
    )
    lead = "" if unbatched else "n"
    grouped_x = lb.reshape(per_channel, (*per_channel.shape[:-1], groups, channels // groups))
    rows, columns, *window = weight.shape
    grouped_w = scales.reshaped(weight, (groups, rows // groups, columns, *window))
    w_axes = ("gio" if transposed else "goi") + _letters(kernel)
    out = contract(scales, grouped_x, lead + "gi", grouped_w, w_axes, lead + "go")
    shape = scales.node.shape
    out = lb.reshape(out, (*out.shape[:-2], out.shape[-2] * out.shape[-1]))
    out = Labels(out.ids[(..., *[None] * kernel)], shape)
    if bias is None:
        return out
    aligned = scales.reshaped(bias, (-1, *[1] * kernel))
    return scales.broadcast(
        scales.merge(out, aligned, reason="is added to a bias that has no scale"), shape
    )


def _letters(count: int) -> str:
    return "ABCDEFGHJKLMNOPQRSTUVWXYZ"[:count]


# -- path energy -----------------------------------------------------------------------------------


@energy(
    *(
        "linear conv1d conv2d conv3d convolution conv_transpose1d conv_transpose2d conv_transpose3d"
    ).split(),
)
def weighted_sum(energies: Energies, bias: Carried) -> Tensor:
    """Weights lengthen the paths of what they read, biases start new ones: the op itself on
    energies and |θ|^p.
    """
    biases = [] if bias is None else [bias]

    def multiply(x: Tensor, w: Tensor) -> Tensor:  # the bias once, even if there are two terms
        return energies.itself(
            {"input": x, "weight": w, "bias": energies.summand(biases.pop()) if biases else None}
        )

    return energies.product(multiply, "input", "weight")


@energy("outer", "ger", "inner")
def vector_product(energies: Energies) -> Tensor:
    """Energies multiply and are summed."""
    left, right, *_ = energies.node.bound
    multiply = torch.inner if energies.node.op == "inner" else torch.outer
    return energies.product(multiply, left, right)


@energy("tensordot")
def tensordot_energy(
    energies: Energies, dims_self: Sequence[int], dims_other: Sequence[int]
) -> Tensor:
    """Energies multiply and are summed."""
    dims = (list(dims_self), list(dims_other))
    return energies.product(lambda a, b: torch.tensordot(a, b, dims), "self", "other")


@energy("matmul", "mm", "bmm", "mv", "dot")
def matrix_product(energies: Energies) -> Tensor:
    """Energies multiply and are summed."""
    left, right, *_ = energies.node.bound
    return energies.product(torch.matmul, left, right)


@energy("addmm", "baddbmm", "addmv")
def matrix_product_plus(energies: Energies, x: Carried, alpha: float, beta: float) -> Tensor:
    """Energies multiply and are summed; what is added starts paths."""
    _, left, right, *_ = energies.node.bound
    return energies.plus(
        energies.product(torch.matmul, left, right) * energies.power(alpha), x, times=beta
    )


@energy("bilinear")
def bilinear_energy(energies: Energies, bias: Carried) -> Tensor:
    """Energies multiply and are summed; what is added starts paths."""

    def multiply(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("...i,...j,oij->...o", x, y, w)

    total = energies.product(multiply, "input1", "input2", "weight")
    return total if bias is None else energies.plus(total, bias)


@energy("einsum")
def einsum_energy(energies: Energies, equation: str) -> Tensor:
    """Energies multiply and are summed."""
    return energies.product(lambda *terms: torch.einsum(equation, *terms), "tensors")
