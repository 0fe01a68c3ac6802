"""Statistics of the example batch, measured without touching the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .graph import fresh_call, replaced, untouched
from .interrupts import interruptible, uninterrupted
from .sharding import reshard

ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), ("input", "running_mean", "running_var")),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), ("input", "weight", "bias", "running_mean", "running_var")),
}


class _VarianceRecorder(TorchFunctionMode):
    """Notes the batch variance of whatever enters a batch_norm or instance_norm that keeps running statistics."""

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.variances: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in ARGUMENTS:
            options = dict(zip(ARGUMENTS[func], args, strict=False)) | (kwargs or {})
            name = self.names.get(id(options.get("running_var")))
            if name is not None:
                x = options["input"].detach().double()
                variance = x.var([axis for axis in range(x.dim()) if axis != 1], correction=0).cpu()
                self.variances[name] = torch.minimum(variance, self.variances.get(name, variance))
        return func(*args, **(kwargs or {}))


def batch_variances(model: nn.Module, example_inputs: Any) -> dict[str, Tensor]:
    """Variance per channel in front of every norm with running statistics, on the example batch in train mode.

    Returns:
        {name of the running variance: (channels,) float64}; the smallest one where a norm is used twice.
    """
    args, kwargs = fresh_call(model, example_inputs)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    recorder = _VarianceRecorder({id(buffer): name for name, buffer in buffers.items()})
    with uninterrupted(), untouched(model, training=True), replaced(model, buffers), torch.no_grad(), recorder:
        try:
            with interruptible():
                model(*args, **kwargs)
        finally:
            reshard(model)
    return recorder.variances
