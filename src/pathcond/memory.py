"""Which tensors share memory, and which can be written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor


def find_overlaps(named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, str]]:
    """Pairs of names of different tensors whose memory overlaps, by address; a name beside itself
    if its own elements do.
    """
    spans: list[tuple[str, int, int, str]] = []
    for name, tensor in named:
        if tensor.is_meta or not tensor.numel() or tensor.layout != torch.strided:
            continue
        try:
            start = tensor.data_ptr()
        except RuntimeError:  # a subclass without memory of its own
            continue
        reach = 1 + sum(
            (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        )
        spans.append((str(tensor.device), start, start + reach * tensor.element_size(), name))
        if reach < tensor.numel():
            yield name, name
    spans.sort()
    last: tuple[str, int, str] | None = None  # of the spans so far, the one that ends last
    for device, start, end, name in spans:
        if last is not None and last[0] == device and start < last[1]:
            yield last[2], name
        if last is None or last[0] != device or end > last[1]:
            last = (device, end, name)


def is_writable(tensor: Tensor) -> bool:
    """Whether every element can be written in place, and has memory of its own."""
    strides = (
        zip(tensor.stride(), tensor.shape, strict=True)
        if tensor.layout == torch.strided
        else [(0, 2)]
    )
    return not tensor.is_inference() and all(stride > 0 for stride, size in strides if size > 1)
