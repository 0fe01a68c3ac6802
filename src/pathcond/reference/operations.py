"""Each operation by its definition, element by element, on cells. Independent of the library's own
table of rules.

An operation is a generator: it gets the node and the arguments by their ATen names, and yields the
cells of its result row by row. The arguments named in OPERANDS come as Arrays, constants too; all
others as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

from ..capture.nodes import Node
from .cells import Array, Cell, Table, add_gate, indices, per_axis, scale, times
from .gates import Gate

Operation = Callable[[Node, dict[str, Any]], Iterator[Cell]]
OPERATIONS: dict[str, Operation] = {}

OPERANDS = frozenset("self other mat2 input weight bias src".split())

# These only move elements: they run on the addresses of the cells with the very same ATen call.
MOVES = frozenset(
    "alias cat channel_shuffle chunk clone contiguous detach expand expand_as flatten flip "
    "getitem index index_select "
    "lift_fresh_copy movedim narrow permute pixel_shuffle repeat reshape roll select slice split "
    "split_with_sizes squeeze stack "
    "swapaxes t transpose unbind unflatten unsafe_chunk unsafe_split unsqueeze view view_as "
    "_unsafe_view".split()
)


def operation(*names: str) -> Callable[[Operation], Operation]:
    def register(function: Operation) -> Operation:
        OPERATIONS.update(dict.fromkeys(names, function))
        return function

    return register


def table(array: Array | None) -> Table:
    """The cells by position; a missing bias reads as zero everywhere."""
    return Table() if array is None else array.table()


@operation("linear")
def linear(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y[…, o] = Σ_i x[…, i] w[o, i] + b[o]."""
    x = table(a["input"])
    w = table(a["weight"])
    b = table(a["bias"])
    for *batch, o in indices(node.shape):
        yield [
            term for i in range(a["weight"].shape[1]) for term in times(x[(*batch, i)], w[o, i])
        ] + b[(o,)]


@operation("matmul", "mm", "bmm")
def matmul(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y[…, i, j] = Σ_k a[…, i, k] b[…, k, j], batch axes broadcast; a vector counts as a row or a
    column.
    """
    left = a["self"]
    right = a["mat2"] if "mat2" in a else a["other"]
    left = Array(left.addresses if len(left.shape) > 1 else left.addresses[None, :], left.memory)
    right = Array(
        right.addresses if len(right.shape) > 1 else right.addresses[:, None], right.memory
    )
    (rows, inner), columns = left.shape[-2:], right.shape[-1]
    axes = max(len(left.shape), len(right.shape)) - 2
    batch = node.shape[:axes]
    x = left.expand((*batch, rows, inner)).table()
    y = right.expand((*batch, inner, columns)).table()
    for *b, i, j in indices((*batch, rows, columns)):
        yield [term for k in range(inner) for term in times(x[(*b, i, k)], y[(*b, k, j)])]


@operation("conv1d", "conv2d", "conv3d")
def convolution(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y[n, o, s] = Σ_{c, k} x[n, c, s·stride − padding + k·dilation] w[o, c, k] + b[o], c over the
    channels of o's group.
    """
    x = table(a["input"])
    w = table(a["weight"])
    b = table(a["bias"])
    _, channels, *kernel = a["weight"].shape
    stride = per_axis(a["stride"], len(kernel))
    dilation = per_axis(a["dilation"], len(kernel))
    if isinstance(a["padding"], str):
        same = a["padding"] == "same"
        padding = [d * (k - 1) // 2 if same else 0 for d, k in zip(dilation, kernel, strict=True)]
    else:
        padding = per_axis(a["padding"], len(kernel))
    group_size = node.shape[1] // a["groups"]
    for n, o, *s in indices(node.shape):
        first = o // group_size * channels
        cell = list(b[(o,)])
        for c, *k in indices((channels, *kernel)):
            at = [
                si * st - pa + ki * di
                for si, st, pa, ki, di in zip(s, stride, padding, k, dilation, strict=True)
            ]
            cell += times(x[(n, first + c, *at)], w[(o, c, *k)])
        yield cell


@operation("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def transposed_convolution(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y[n, o, s·stride − padding + k·dilation] gets x[n, c, s] w[c, o, k] for every s, c of o's
    group and k; and b[o].
    """
    x = table(a["input"])
    w = table(a["weight"])
    b = table(a["bias"])
    channels, group_size, *kernel = a["weight"].shape
    stride, padding, dilation = (
        per_axis(a[name], len(kernel)) for name in ("stride", "padding", "dilation")
    )
    y = {position: list(b[(position[1],)]) for position in indices(node.shape)}
    for n, c, *s in indices(a["input"].shape):
        first = c // (channels // a["groups"]) * group_size
        for o, *k in indices((group_size, *kernel)):
            at = [
                si * st - pa + ki * di
                for si, st, pa, ki, di in zip(s, stride, padding, k, dilation, strict=True)
            ]
            if (n, first + o, *at) in y:
                y[(n, first + o, *at)] += times(x[(n, c, *s)], w[(c, o, *k)])
    yield from y.values()


@operation("batch_norm")
def batch_norm(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = x γ / √(var + ε) + β per channel. The −γ·mean/σ that completes it is no bias: it starts
    no path (design, section 3).
    """
    if a["training"] or a["running_var"] is None:
        raise NotImplementedError(
            "batch_norm with the statistics of the batch: they depend on the input"
        )
    gamma, beta = table(a["weight"]), table(a["bias"])
    sigma = [math.sqrt(v + a["eps"]) for v in a["running_var"].tolist()]
    for (_, c, *_), cell in a["input"].table().items():
        yield (
            scale(cell if a["weight"] is None else times(cell, gamma[(c,)]), 1 / sigma[c])
            + beta[(c,)]
        )


@operation("relu", "leaky_relu", "abs")
def activation(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = gate · x, one gate per element."""
    for element, cell in enumerate(a["self"]):
        yield add_gate(cell, Gate(node=node.name, element=element))


@operation("clamp", "clamp_min")
def clamp(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """ReLU, where the lower bound is 0 and there is no upper one."""
    if a["min"] != 0 or a.get("max") is not None:
        raise NotImplementedError(
            f"{node.op} with bounds {a['min']} and {a.get('max')}: only min=0 is homogeneous"
        )
    yield from activation(node, a)


@operation("dropout", "feature_dropout", "alpha_dropout", "to", "_to_copy")
def identity(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = x, in eval mode."""
    yield from a["input"] if "input" in a else a["self"]


def windows(node: Node, a: dict[str, Any]) -> Iterator[tuple[list[range], list[tuple[int, ...]]]]:
    """For each element of a pool's result: its window per axis, and the positions of the entries
    inside the image.
    """
    shape = a["self"].shape
    axes = int(node.op[-2])
    kernel = per_axis(a["kernel_size"], axes)
    stride = per_axis(a["stride"] or kernel, axes)
    padding = per_axis(a["padding"], axes)
    dilation = per_axis(a.get("dilation", 1), axes)
    for position in indices(node.shape):
        lead = position[:-axes]
        s = position[-axes:]
        starts = [si * st - pa for si, st, pa in zip(s, stride, padding, strict=True)]
        window = [
            range(start, start + k * d, d)
            for start, k, d in zip(starts, kernel, dilation, strict=True)
        ]
        inside = [
            [at for at in axis if 0 <= at < length]
            for axis, length in zip(window, shape[-axes:], strict=True)
        ]
        yield (
            window,
            [
                (*lead, *(axis[i] for axis, i in zip(inside, at, strict=True)))
                for at in indices([*map(len, inside)])
            ],
        )


@operation("max_pool1d", "max_pool2d", "max_pool3d")
def max_pool(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = Σ of the window, each entry with the gate "it is the winner": one path per entry inside
    the image.
    """
    x = table(a["self"])
    flat = {position: i for i, position in enumerate(x)}
    for element, (_, entries) in enumerate(windows(node, a)):
        gates = [Gate(node=node.name, element=element, choice=flat[entry]) for entry in entries]
        yield [
            term
            for entry, gate in zip(entries, gates, strict=True)
            for term in add_gate(x[entry], gate)
        ]


@operation("avg_pool1d", "avg_pool2d", "avg_pool3d")
def average_pool(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = Σ of the window / k. k counts the zero padding too unless told otherwise, but nothing
    beyond it.
    """
    x = table(a["self"])
    axes = int(node.op[-2])
    ends = [
        n + pad
        for n, pad in zip(a["self"].shape[-axes:], per_axis(a["padding"], axes), strict=True)
    ]
    for window, entries in windows(node, a):
        padded = math.prod(
            min(axis.stop, end) - axis.start for axis, end in zip(window, ends, strict=True)
        )
        k = a.get("divisor_override") or (padded if a["count_include_pad"] else len(entries))
        yield [term for entry in entries for term in scale(x[entry], 1 / k)]


@operation("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
def adaptive_average_pool(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y[s] = mean of x over ⌊s·n/m⌋ … ⌈(s+1)·n/m⌉ − 1 on each axis, for n entries in and m out."""
    x = table(a["self"])
    axes = int(node.op[-2])
    sizes = list(zip(a["self"].shape[-axes:], node.shape[-axes:], strict=True))
    for position in indices(node.shape):
        lead = position[:-axes]
        s = position[-axes:]
        bounds = [(si * n // m, -(-(si + 1) * n // m)) for si, (n, m) in zip(s, sizes, strict=True)]
        k = math.prod(stop - start for start, stop in bounds)
        entries = [
            tuple(start + i for (start, _), i in zip(bounds, at, strict=True))
            for at in indices([q - p for p, q in bounds])
        ]
        yield [term for entry in entries for term in scale(x[(*lead, *entry)], 1 / k)]


@operation("sum", "mean")
def reduction(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = Σ x over the given axes, over their number of entries for a mean."""
    shape = a["self"].shape
    given = a.get("dim")
    axes = {
        axis % len(shape)
        for axis in (range(len(shape)) if given in (None, []) else per_axis(given, 1))
    }
    k = math.prod(shape[axis] for axis in axes) if node.op == "mean" else 1
    sums: dict[tuple[int, ...], Cell] = {}
    for position, cell in a["self"].table().items():
        kept = tuple(i for axis, i in enumerate(position) if axis not in axes)
        sums.setdefault(kept, []).extend(scale(cell, 1 / k))
    yield from sums.values()


@operation("add", "sub")
def addition(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = a ± alpha · b."""
    factor = a.get("alpha", 1) * (-1 if node.op == "sub" else 1)
    for left, right in zip(
        a["self"].expand(node.shape), a["other"].expand(node.shape), strict=True
    ):
        yield left + scale(right, factor)


@operation("mul")
def multiplication(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = a · b, where one of them is a parameter or a constant."""
    for left, right in zip(
        a["self"].expand(node.shape), a["other"].expand(node.shape), strict=True
    ):
        yield times(left, right)


@operation("div")
def division(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = a / c, c constant."""
    for left, right in zip(
        a["self"].expand(node.shape), a["other"].expand(node.shape), strict=True
    ):
        if a.get("rounding_mode") or not (len(right) == 1 and right[0].is_constant):
            raise NotImplementedError("div by anything but a constant that is not zero")
        yield scale(left, 1 / right[0].coefficient)


@operation("neg")
def negation(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = −x."""
    for cell in a["self"]:
        yield scale(cell, -1)


@operation("pad", "constant_pad_nd")
def padding(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """Zeros around (or, with negative widths, less of) the last axes; ``pad`` lists (before, after)
    from the last axis on.
    """
    if a.get("mode", "constant") != "constant" or a["value"] not in (None, 0):
        raise NotImplementedError(
            f"pad with mode {a.get('mode')} and value {a['value']}: only zeros"
        )
    before = [0] * (len(node.shape) - len(a["pad"]) // 2) + a["pad"][::2][::-1]
    x = table(a["self"])
    for position in indices(node.shape):
        yield x[tuple(i - b for i, b in zip(position, before, strict=True))]


@operation("zeros_like", "zero")
def zeros(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = 0."""
    yield from ([] for _ in indices(node.shape))


@operation("copy")
def copy(node: Node, a: dict[str, Any]) -> Iterator[Cell]:
    """y = b, broadcast."""
    yield from a["src"].expand(node.shape)
