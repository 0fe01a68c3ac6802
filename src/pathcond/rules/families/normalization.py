"""Normalization layers: which side carries a scale is the user's choice (`normalization`).

A norm y = γ (x − μ)/σ + β has two symmetries per channel: in front (x, μ and σ times λ) and behind
(γ and β times λ, the outgoing weights over λ).

    value      in front                       behind
    "absorb"   free, statistics follow        fixed
    "gain"     fixed                          free, γ and β carry it
    "full"     free, statistics follow        free, γ and β carry it
    "batch"    free, statistics follow        free with running statistics, else fixed
    "paper"    tied to behind, μ and β follow, γ and σ stay

Running statistics absorb a scale in front exactly: μ → λμ, var → λ²(var + ε) − ε. Norms without
them (LayerNorm, GroupNorm, RMSNorm, InstanceNorm) are invariant only up to ε, so their front is
fixed unless ``approximate`` is set; under "paper" nothing there can follow, and both sides are
fixed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...capture.nodes import Graph, Node
from .. import labels as lb
from ..energies import Carried, Energies
from ..labels import FIXED, Labels
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Operand

NORMALIZATION = Family("Normalization: by the choice of `normalization`")
WITH_STATISTICS = ("batch_norm", "cudnn_batch_norm", "instance_norm")  # running ones, if any
FRONT_FREE = ("absorb", "full", "batch")
BEHIND_FREE = ("gain", "full")
# in units of ε: a path through a norm has a little energy even where the norm sees nothing
LEAST_VARIANCE = 1e-12


@rule("batch_norm", "cudnn_batch_norm", family=NORMALIZATION)
def batch_norm(
    scales: Scales,
    input: Operand,
    weight: Operand,
    bias: Operand,
    running_mean: Operand,
    running_var: Operand,
    eps: float,
    training: bool,
) -> Labels:
    x = scales.labels(input)
    per_channel = scales.agree(x, [axis for axis in range(len(x.shape)) if axis != 1])
    # a channel of zeros does not stay zero behind μ and β
    per_channel = Labels(per_channel.ids.clamp(min=FIXED), x.shape)
    channels = per_channel.along([1]).flatten()
    tail = (-1, *[1] * (len(x.shape) - 2))
    on_the_batch = training and not scales.training
    if on_the_batch or not (scales.is_buffer(running_mean) and scales.is_buffer(running_var)):
        scales.pin(per_channel, "feeds a normalization without running statistics")
        scales.pin(running_mean, "is used as the mean of a normalization")
        scales.pin(running_var, "is used as the variance of a normalization")
        return _behind(scales, x.shape, weight, bias, tail, tracked=False)
    if scales.normalization == "gain":
        scales.pin(per_channel, 'feeds a normalization (fixed under normalization="gain")')
    else:
        scales.factors.follow(running_mean, channels, by=scales.node)
        if scales.normalization == "paper":  # which excludes BatchNorm (sec. appendix_enorm)
            scales.uncounted.update(
                value.name for value in (weight, bias) if scales.is_weight(value)
            )
            scales.pin(weight, 'is the gain of a normalization (fixed under normalization="paper")')
            return _plus_bias(scales, Labels(per_channel.ids, x.shape), bias, tail)
        scales.factors.follow(running_var, channels, by=scales.node, epsilon=eps)
    return _behind(scales, x.shape, weight, bias, tail, tracked=True)


@rule("instance_norm", family=NORMALIZATION)
def instance_norm(
    scales: Scales,
    input: Operand,
    weight: Operand,
    bias: Operand,
    running_mean: Operand,
    running_var: Operand,
    eps: float,
    use_input_stats: bool,
) -> Labels:
    if running_mean is not None:
        return batch_norm(
            scales, input, weight, bias, running_mean, running_var, eps, use_input_stats
        )
    x = scales.labels(input)
    _in_front(scales, x, range(2, len(x.shape)))
    return _behind(scales, x.shape, weight, bias, (-1, *[1] * (len(x.shape) - 2)))


@rule("layer_norm", "rms_norm", family=NORMALIZATION)
def layer_norm(
    scales: Scales, input: Operand, normalized_shape: Sequence[int], weight: Operand, bias: Operand
) -> Labels:
    x = scales.labels(input)
    _in_front(scales, x, range(len(x.shape) - len(normalized_shape), len(x.shape)))
    return _behind(scales, x.shape, weight, bias, tuple(normalized_shape))


@rule("group_norm", family=NORMALIZATION)
def group_norm(
    scales: Scales, input: Operand, num_groups: int, weight: Operand, bias: Operand
) -> Labels:
    x = scales.labels(input)
    batch, channels, *space = x.shape
    grouped = lb.reshape(x, (batch, num_groups, channels // num_groups, *space))
    _in_front(scales, grouped, range(2, len(grouped.shape)))
    return _behind(scales, x.shape, weight, bias, (-1, *[1] * len(space)))


def _in_front(scales: Scales, x: Labels, axes: Iterable[int]) -> None:
    """Norms that measure their own statistics: one scale per normalised set, exact only up to ε."""
    agreed = scales.agree(x, axes)
    if not (scales.approximate and scales.normalization in FRONT_FREE):
        scales.pin(agreed, f"feeds {scales.node.op}, whose ε does not scale")


def _behind(
    scales: Scales,
    shape: tuple[int, ...],
    weight: Operand,
    bias: Operand,
    tail: tuple[int, ...],
    *,
    tracked: bool = False,
) -> Labels:
    """γ (x − μ)/σ + β: the normalised input has no scale, γ may give it one. ``tracked`` says that
    μ and σ are running statistics.
    """
    out = lb.constant(shape)
    if weight is not None:
        gain = scales.reshaped(weight, tail)
        if scales.normalization in BEHIND_FREE or (tracked and scales.normalization == "batch"):
            out = scales.combine((1, out), (1, gain))
        else:
            scales.pin(gain, _gain_reason(scales))
    return _plus_bias(scales, out, bias, tail)


def _plus_bias(scales: Scales, out: Labels, bias: Operand, tail: tuple[int, ...]) -> Labels:
    if bias is None:
        return out
    reason = f'is the bias of a normalization (fixed under normalization="{scales.normalization}")'
    return scales.broadcast(
        scales.merge(out, scales.reshaped(bias, tail), reason=reason), out.shape
    )


def _gain_reason(scales: Scales) -> str:
    return f'is the gain of a normalization (fixed under normalization="{scales.normalization}")'


@dataclass(frozen=True)
class HandwrittenNorms:
    """Normalizations spelled out in primitive ops, as in Llama and T5: x · rsqrt(mean(x²) + ε) · γ.

    Attributes:
        epsilon_sums: The nodes that compute "statistic + ε".
        gains: The products of the normalised tensor with γ.
    """

    epsilon_sums: frozenset[Node]
    gains: frozenset[Node]


ROOTS = ("rsqrt", "sqrt")
CASTS = ("to", "_to_copy", "type_as", "clone", "contiguous", "alias")


def find_handwritten(graph: Graph) -> HandwrittenNorms:
    """Recognise hand-written norms, so that they obey the same table as nn.RMSNorm and
    nn.LayerNorm.
    """
    users: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        for arg in node.args:
            if isinstance(arg, Node):
                users.setdefault(arg, []).append(node)

    def source(node: Any) -> Any:
        while isinstance(node, Node) and node.op in CASTS:
            node = node.args[0]
        return node

    def readers(node: Node) -> list[Node]:
        direct = users.get(node, [])
        return [r for user in direct for r in (readers(user) if user.op in CASTS else [user])]

    epsilon_sums: set[Node] = set()
    gains: set[Node] = set()
    for node in graph.nodes:
        root = node.op in ROOTS or (
            node.op == "pow" and len(node.args) > 1 and node.args[1] in (-0.5, 0.5)
        )
        shifted = source(node.args[0]) if root and node.args else None
        if not (
            isinstance(shifted, Node)
            and shifted.op == "add"
            and isinstance(shifted.args[1], (int, float))
        ):
            continue
        statistic = source(shifted.args[0])
        if not (isinstance(statistic, Node) and statistic.op in ("mean", "var", "getitem")):
            continue
        epsilon_sums.add(shifted)
        for normalised in readers(node):
            if normalised.op in ("mul", "div"):
                gains.update(
                    user
                    for user in readers(normalised)
                    if user.op == "mul"
                    and any(
                        isinstance(source(arg), Node) and source(arg).op == "parameter"
                        for arg in user.args
                    )
                )
    return HandwrittenNorms(frozenset(epsilon_sums), frozenset(gains))


def handwritten_epsilon(scales: Scales, x: Operand) -> Labels:
    """statistic + ε: ε is ignored where the front of a norm may be rescaled approximately, else
    fixes it.
    """
    if scales.approximate and scales.normalization in FRONT_FREE:
        return scales.labels(x)
    return scales.merge(x, 1.0, reason="feeds a normalization whose ε does not scale")


def handwritten_gain(scales: Scales, x: Operand, other: Operand) -> Labels:
    """normalised · γ, in either order."""
    if scales.normalization not in BEHIND_FREE:
        for operand in (x, other):
            if scales.is_weight(operand):
                scales.pin(operand, _gain_reason(scales))
    return scales.combine((1, x), (1, other))


# -- path energy -----------------------------------------------------------------------------------


@energy("batch_norm", "cudnn_batch_norm", measures=True)
def batch_norm_energy(
    energies: Energies, input: Carried, weight: Carried, bias: Carried, eps: float
) -> Tensor:
    """Times |γ/σ|^p, plus |β|^p; the −γμ/σ of a BatchNorm starts no path."""
    _, variance = energies.statistics()
    x = energies.summand(input)
    tail = (-1, *[1] * (x.dim() - 2))
    return _affine(
        energies, x, energies.power((variance + eps).rsqrt()).reshape(tail), weight, bias, tail
    )


@energy("instance_norm", measures=True)
def instance_norm_energy(
    energies: Energies,
    input: Carried,
    running_mean: Carried,
    weight: Carried,
    bias: Carried,
    eps: float,
) -> Tensor:
    """Times |γ/σ|^p, plus |β|^p."""
    if running_mean is not None:
        return batch_norm_energy(energies, input, weight, bias, eps)
    x = energies.summand(input)
    tail = (-1, *[1] * (x.dim() - 2))
    return _affine(
        energies, x, _inverse_deviation(energies, list(range(2, x.dim())), eps), weight, bias, tail
    )


@energy("layer_norm", "rms_norm", measures=True)
def layer_norm_energy(
    energies: Energies,
    input: Carried,
    normalized_shape: Sequence[int],
    weight: Carried,
    bias: Carried,
    eps: float,
) -> Tensor:
    """Times |γ/σ|^p, plus |β|^p."""
    x = energies.summand(input)
    axes = list(range(x.dim() - len(normalized_shape), x.dim()))
    centred = energies.node.op == "layer_norm"
    eps = torch.finfo(torch.float64).eps if eps is None else eps
    factor = _inverse_deviation(energies, axes, eps, centred=centred)
    return _affine(energies, x, factor, weight, bias, tuple(normalized_shape))


@energy("group_norm", measures=True)
def group_norm_energy(
    energies: Energies, input: Carried, num_groups: int, weight: Carried, bias: Carried, eps: float
) -> Tensor:
    """Times |γ/σ|^p, plus |β|^p."""
    x = energies.summand(input)
    batch, channels, *space = x.shape

    def inverse_deviation(v: Tensor) -> Tensor:
        variance = v.reshape(batch, num_groups, -1).var(-1, correction=0)
        factor = _normalised_part(variance, eps).repeat_interleave(channels // num_groups, 1)
        return factor.reshape(batch, channels, *[1] * len(space))

    return _affine(
        energies,
        x,
        energies.measured(inverse_deviation, "input"),
        weight,
        bias,
        (-1, *[1] * len(space)),
    )


def _inverse_deviation(
    energies: Energies, axes: list[int], eps: float, *, centred: bool = True
) -> Tensor:
    """|1/σ|^p over the given axes, frozen at its value on the example batch."""

    def function(v: Tensor) -> Tensor:
        variance = (
            v.var(axes, correction=0, keepdim=True)
            if centred
            else v.square().mean(axes, keepdim=True)
        )
        return _normalised_part(variance, eps)

    return energies.measured(function, "input")


def _normalised_part(variance: Tensor, eps: float) -> Tensor:
    """√var/(var + ε): the factor 1/√(var + ε) as far as it normalises, √(var/(var + ε)), and not as
    far as it divides by √ε.

    Tokens that start at zero have var = 0. The factor 1/√ε is their slope at this one point, a
    million for ε = 10⁻¹², and nothing that a step of training would see: the output is bounded.
    Paths from such a token hardly pass through the norm.
    """
    return variance.clamp(min=LEAST_VARIANCE * eps).sqrt() / (variance + eps)


def _affine(
    energies: Energies,
    x: Tensor,
    factor: Tensor,
    weight: Carried,
    bias: Carried,
    tail: tuple[int, ...],
) -> Tensor:
    """|γ|^p · factor · x + |β|^p."""
    if weight is not None:
        factor = factor * energies.factor(weight).reshape(tail)
    out = x * factor
    return out if bias is None else out + energies.summand(bias).reshape(tail)
