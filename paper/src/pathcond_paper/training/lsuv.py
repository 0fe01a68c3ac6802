"""Layer-sequential unit variance (Mishkin and Matas 2016): a start that looks at the data, and is
another function than torch's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

LAYERS = (nn.Linear, nn.Conv2d)
ROUNDS = 3  # of measuring and dividing


@torch.no_grad()
def lsuv_(model: nn.Module, example: Tensor, *, seed: int = 0) -> None:
    """Orthogonal weights, biases of zero, and outputs of variance one on the batch, layer by layer
    in the order of the call.

    >>> model = nn.Sequential(nn.Linear(8, 20), nn.ReLU(), nn.Linear(20, 4))
    >>> x = torch.randn(64, 8)
    >>> lsuv_(model, x)
    >>> round(model(x).std().item(), 2)
    1.0
    """
    layers = [module for module in model.modules() if isinstance(module, LAYERS)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for layer in layers:
            weight = torch.empty_like(layer.weight, device="cpu")
            layer.weight.copy_(nn.init.orthogonal_(weight))
            if layer.bias is not None:
                layer.bias.zero_()

    def divide(layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> Tensor:
        for _ in range(ROUNDS):
            deviation = output.std()
            if not 0 < float(deviation) < float("inf"):
                break
            layer.weight.div_(deviation)  # type: ignore[operator,union-attr]
            output = layer.forward(*inputs)
        return output

    training = model.training
    handles = [layer.register_forward_hook(divide) for layer in layers]
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        model.train()(example)
    finally:
        for handle in handles:
            handle.remove()
        model.train(training)
        for name, buffer in model.named_buffers():
            buffer.copy_(statistics[name])
