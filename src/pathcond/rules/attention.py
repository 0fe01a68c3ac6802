"""Scaled dot-product attention: queries against keys, values to outputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..labels import Labels
from .contraction import contract
from .table import rule

if TYPE_CHECKING:
    from ..scales import Scales


@rule("scaled_dot_product_attention", family="Attention: query and key scales cancel per head dimension, values pass through")
def attention(scales: Scales, query: Any, key: Any, value: Any, attn_mask: Any, enable_gqa: Any) -> Labels:
    lead = "ABCDEFGH"[: len(query.shape) - 2]
    q, k, v = scales.labels(query), scales.labels(key), scales.labels(value)
    if enable_gqa:  # each key and value head serves a run of query heads
        k, v = (_repeat_heads(labels, q.shape[-3]) for labels in (k, v))
    scores = contract(scales, q, lead + "qd", k, lead + "kd", lead + "qk")
    scales.pin(scores, "passes through softmax, which is not homogeneous")
    scales.pin(attn_mask, "is added to attention scores")
    mixed = scales.agree(v, [-2])
    return scales.broadcast(Labels(mixed.ids, (*v.shape[:-2], q.shape[-2], v.shape[-1])), scales.node.shape)


def _repeat_heads(labels: Labels, heads: int) -> Labels:
    axis = len(labels.shape) - 3
    times = heads // labels.shape[axis]
    ids = labels.ids if labels.ids.shape[axis] == 1 else labels.ids.repeat_interleave(times, axis)
    return Labels(ids, (*labels.shape[:axis], heads, *labels.shape[axis + 1 :]))
