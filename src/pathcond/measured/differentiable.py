"""Calls of a model that can be differentiated twice: with the statistics of the batch, and without
kernels that have a first derivative only.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ..capture.calibration import ARGUMENTS, OF_INSTANCES, without_epsilon
from ..errors import UnsupportedModelError

BAG_ARGUMENTS = tuple(inspect.signature(F.embedding_bag).parameters)


@contextmanager
def differentiable() -> Iterator[None]:
    """Have a model's calls differentiable twice."""
    with (
        torch.enable_grad(),
        _BatchStatistics(),
        _PlainBags(),
        sdpa_kernel(SDPBackend.MATH),
        torch.backends.cudnn.flags(enabled=False),
    ):
        yield


class _PlainBags(TorchFunctionMode):
    """Has bags of embeddings add up rows of their table: torch's own kernel has a first derivative
    only.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is not F.embedding_bag:
            return func(*args, **kwargs)
        options = dict(zip(BAG_ARGUMENTS, args, strict=False)) | kwargs
        mode = options.get("mode", "mean")
        if mode == "max" or options.get("max_norm") is not None:
            return func(*args, **kwargs)
        ids, table, weights = (
            options.get(name) for name in ("input", "weight", "per_sample_weights")
        )
        if ids.dim() == 2:
            count, length = ids.shape
            bags = torch.arange(count, device=ids.device).repeat_interleave(length)
        else:
            starts = options["offsets"]
            starts = starts[:-1] if options.get("include_last_offset") else starts
            count = len(starts)
            places = torch.arange(len(ids), device=ids.device)
            bags = torch.searchsorted(starts.long(), places, right=True) - 1
        ids = ids.flatten()
        counted = torch.ones(len(ids), dtype=table.dtype, device=ids.device)
        if (padding := options.get("padding_idx")) is not None:
            counted = counted * (ids != padding % len(table))
        shares = counted if weights is None else counted * weights.flatten()
        rows = F.embedding(ids, table) * shares[:, None]
        sums = table.new_zeros(count, table.shape[1]).index_add(0, bags, rows)
        if mode == "sum":
            return sums
        sizes = counted.new_zeros(count).index_add(0, bags, counted)
        return sums / sizes.clamp(min=1)[:, None]


class _BatchStatistics(TorchFunctionMode):
    """Has BatchNorms and InstanceNorms normalise by their input, as in train mode, and without the
    share of ε.

    √max(var, ε) in place of √(var + ε) follows scales in front of the norm
    (``calibration.without_epsilon``).
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in ARGUMENTS:
            return func(*args, **kwargs)
        options = dict(zip(ARGUMENTS[func], args, strict=False)) | kwargs
        x = options["input"]
        gain = options.get("weight")
        shift = options.get("bias")
        axes = [axis for axis in range(x.dim()) if axis != 1][func in OF_INSTANCES :]
        if math.prod(x.shape[axis] for axis in axes) < 2:
            raise UnsupportedModelError(
                "Curvature uses the statistics of the batch, and a normalization layer has a "
                "single value per channel in its input "
                f"of shape {tuple(x.shape)}: pass at least two samples."
            )
        variance = without_epsilon(
            x.var(axes, correction=0, keepdim=True), options.get("eps", 1e-5)
        )
        out = (x - x.mean(axes, keepdim=True)) / variance.sqrt()
        per_channel = (-1, *[1] * (x.dim() - 2))
        out = out if gain is None else out * gain.reshape(per_channel)
        return out if shift is None else out + shift.reshape(per_channel)
