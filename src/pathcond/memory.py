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
        plain = tensor.is_contiguous()
        reach = tensor.numel() if plain else _reach(tensor)
        spans.append((str(tensor.device), start, start + reach * tensor.element_size(), name))
        if not plain and _overlaps_itself(tensor):
            yield name, name
    spans.sort()
    last: tuple[str, int, str] | None = None  # of the spans so far, the one that ends last
    for device, start, end, name in spans:
        if last is not None and last[0] == device and start < last[1]:
            yield last[2], name
        if last is None or last[0] != device or end > last[1]:
            last = (device, end, name)


def _reach(tensor: Tensor) -> int:
    """How many elements its memory spans."""
    return 1 + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _overlaps_itself(tensor: Tensor) -> bool:
    """Whether two elements of a tensor share memory."""
    axes = sorted(
        (stride, size)
        for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
        if size > 1
    )
    reach, nested = 0, True
    for stride, size in axes:
        nested &= stride > reach
        reach += (size - 1) * stride
    if nested:  # each axis steps over all that those with shorter steps reach
        return False
    places = torch.zeros(1, dtype=torch.long)
    for stride, size in axes:
        places = (places[:, None] + stride * torch.arange(size)).flatten()
    return len(places.unique()) < len(places)


def is_writable(tensor: Tensor) -> bool:
    """Whether every element can be written in place, and has memory of its own."""
    if not has_memory(tensor) or tensor.is_inference():
        return False
    strides = zip(tensor.stride(), tensor.shape, strict=True)
    return all(stride > 0 for stride, size in strides if size > 1)


def values_of(tensor: Tensor) -> Tensor:
    """Where the numbers of a tensor lie: its values, if it is sparse (torch.sparse_coo), even if
    some stand for the same place.
    """
    return tensor._values() if tensor.layout == torch.sparse_coo else tensor


def has_memory(tensor: Tensor) -> bool:
    """Whether the elements of a tensor lie in memory one by one. Those of sparse tensors do not,
    nor those of classes that are made of other tensors, as quantised weights are: what writing into
    them does is theirs to say.
    """
    if tensor.layout != torch.strided or tensor.is_nested:
        return False
    try:
        return tensor.is_meta or not tensor.numel() or tensor.data_ptr() != 0
    except (RuntimeError, NotImplementedError):
        return False


def storage_of(tensor: Tensor) -> int | None:
    """What identifies the memory that a tensor is a part of; None where it has none of its own."""
    if tensor.layout != torch.strided:
        return None
    try:
        return tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):  # of a class that is made of other tensors
        return None
