"""Statistics of the example batch, measured without touching the model's own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ..distributed.sharding import reshard
from ..interrupts import uninterrupted
from .isolation import attributes_kept, isolated, replaced, weights_kept
from .models import Inputs, fresh_call

FUNCTIONAL = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)
NATIVE = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
ARGUMENTS: dict[Any, tuple[str, ...]] = {
    **dict.fromkeys((F.batch_norm, F.instance_norm), FUNCTIONAL),
    **dict.fromkeys((torch.batch_norm, torch.instance_norm), NATIVE),
}
OF_INSTANCES = (F.instance_norm, torch.instance_norm)


def without_epsilon(variance: Tensor, epsilon: float) -> Tensor:
    """The variance by which a norm divides when it is measured: its own, or ε where that is larger.

    √(var + ε) does not follow a scale in front of the norm, √max(var, ε) does as long as var > ε.
    What is measured so is the same for every rescaling of a model.
    """
    return variance.clamp(min=epsilon)


class _VarianceRecorder(TorchFunctionMode):
    """Notes the batch variance of whatever enters a batch_norm or instance_norm that keeps running
    statistics.

    These norms pass on what they would without ε, so that the variances behind them do not depend
    on its share.
    """

    def __init__(self, names: dict[int, str]) -> None:
        super().__init__()
        self.names = names
        self.variances: dict[str, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in ARGUMENTS:
            return func(*args, **kwargs)
        options = dict(zip(ARGUMENTS[func], args, strict=False)) | kwargs
        name = self.names.get(id(options.get("running_var")))
        x = options["input"].detach().double()
        axes = [axis for axis in range(x.dim()) if axis != 1]
        if name is not None:
            variance = x.var(axes, correction=0).cpu()
            self.variances[name] = torch.minimum(variance, self.variances.get(name, variance))
        out = func(*args, **kwargs)
        if name is None or not options.get("training", options.get("use_input_stats", False)):
            return out
        return _with_other_epsilon(
            out, x.var(axes[func in OF_INSTANCES :], correction=0, keepdim=True), options
        )


def _with_other_epsilon(out: Tensor, variance: Tensor, options: dict[str, Any]) -> Tensor:
    """The output of a norm, divided by √max(var, ε) in place of √(var + ε)."""
    epsilon = options.get("eps", 1e-5)
    bias = options.get("bias")
    ratio = ((variance + epsilon) / without_epsilon(variance, epsilon)).sqrt().to(out.dtype)
    if bias is None:
        return out * ratio
    shift = bias.detach().reshape(-1, *[1] * (out.dim() - 2)).to(out.dtype)
    return (out - shift) * ratio + shift


def batch_variances(model: nn.Module, example_inputs: Inputs) -> dict[str, Tensor]:
    """Variance per channel in front of every norm with running statistics, on the example batch in
    train mode.

    Returns:
        {name of the running variance: (channels,) float64}; the smallest one where a norm is used
        twice.
    """
    args, kwargs = fresh_call(model, example_inputs)
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    recorder = _VarianceRecorder({id(buffer): name for name, buffer in buffers.items()})
    with (
        uninterrupted(),
        isolated(model, training=True),
        attributes_kept(model),
        weights_kept(model),
        replaced(model, buffers),
        torch.no_grad(),
        recorder,
    ):
        try:
            model(*args, **kwargs)
        finally:
            reshard(model)
    return recorder.variances
