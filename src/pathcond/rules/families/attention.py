"""Scaled dot-product attention: queries against keys, values to outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..energies import Carried, Energies
from ..labels import Labels
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Known, Operand, Traced
from .contraction import contract


@rule(
    "scaled_dot_product_attention",
    family=Family("Attention: query and key scales cancel per head dimension, values pass through"),
)
def attention(
    scales: Scales, query: Traced, key: Traced, value: Traced, attn_mask: Operand, enable_gqa: Any
) -> Labels:
    lead = "ABCDEFGH"[: len(query.shape) - 2]
    q = scales.labels(query)
    k = scales.labels(key)
    v = scales.labels(value)
    if enable_gqa:  # each key and value head serves a run of query heads
        k, v = (_repeat_heads(labels, q.shape[-3]) for labels in (k, v))
    scores = contract(scales, q, lead + "qd", k, lead + "kd", lead + "qk")
    scales.pin(scores, "passes through softmax, which is not homogeneous")
    scales.pin(attn_mask, "is added to attention scores")
    mixed = scales.agree(v, [-2])
    return scales.broadcast(
        Labels(mixed.ids, (*v.shape[:-2], q.shape[-2], v.shape[-1])), scales.node.shape
    )


def _repeat_heads(labels: Labels, heads: int) -> Labels:
    axis = len(labels.shape) - 3
    times = heads // labels.shape[axis]
    ids = labels.ids if labels.ids.shape[axis] == 1 else labels.ids.repeat_interleave(times, axis)
    return Labels(ids, (*labels.shape[:axis], heads, *labels.shape[axis + 1 :]))


# -- path energy -----------------------------------------------------------------------------------


@energy("scaled_dot_product_attention", measures=True)
def attention_energy(
    energies: Energies,
    query: Carried,
    key: Carried,
    value: Carried,
    attn_mask: Any,
    is_causal: bool,
    scale: float,
    enable_gqa: bool,
) -> Tensor:
    """Paths lead from the values, times the attention weights frozen at their value on the example
    batch.
    """
    v = energies.summand(value)
    for name in ("query", "key", "attn_mask"):
        energies.end(name, "makes attention weights")

    def weights(q: Tensor, k: Tensor, mask: Any) -> Tensor:
        if enable_gqa:
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        scores = q @ k.transpose(-1, -2) * (scale if scale is not None else q.shape[-1] ** -0.5)
        if is_causal:
            scores = scores.masked_fill(
                ~torch.ones_like(scores, dtype=torch.bool).tril(), -torch.inf
            )
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
            )
        nowhere = (scores == -torch.inf).all(-1, keepdim=True)
        return scores.softmax(-1).masked_fill(nowhere, 0.0)

    if energies.calibrate:
        mixing = energies.measured(weights, "query", "key", "attn_mask")
    else:
        mixing = torch.ones(
            *energies.node.shape[:-1], v.shape[-2], dtype=torch.float64, device=energies.device
        )
        mixing = mixing.tril() if is_causal else mixing
        if isinstance(attn_mask, Known):
            mask = attn_mask.value
            mixing = mixing * (mask if mask.dtype == torch.bool else mask != -torch.inf)
    if enable_gqa:
        v = v.repeat_interleave(energies.node.shape[-3] // v.shape[-3], -3)
    return mixing @ v
