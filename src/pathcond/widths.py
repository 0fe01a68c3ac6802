"""How wide the layers of a model are."""

from __future__ import annotations

import math
from collections.abc import Iterator

from torch import Tensor, nn


def weight_layers(model: nn.Module) -> Iterator[tuple[int, int, Tensor]]:
    """Inputs, outputs and weight of every matrix and every convolution's kernel; of a recurrent
    layer all gates are one width, and the number of rows of a table is none.
    """
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    for parameter in model.parameters():
        owner = owners[id(parameter)]
        if isinstance(owner, nn.modules.conv._ConvNd) and parameter.dim() > 2:
            yield owner.in_channels, owner.out_channels, parameter
        elif parameter.dim() == 2 and not isinstance(owner, (nn.Embedding, nn.EmbeddingBag)):
            outputs, inputs = parameter.shape
            if isinstance(owner, nn.RNNBase):
                outputs = math.gcd(outputs, owner.hidden_size)
            yield inputs, outputs, parameter


def has_even_widths(model: nn.Module) -> bool:
    """Whether a feedforward model has at least two hidden layers, all of one width, and outputs
    that are no wider.

    The layer that was registered last counts as the one that makes the outputs.

    >>> def chain(*widths: int) -> nn.Module:
    ...     return nn.Sequential(*(nn.Linear(*pair) for pair in zip(widths, widths[1:])))
    >>> has_even_widths(chain(9, 5, 5, 2)), has_even_widths(chain(9, 5, 4, 2))
    (True, False)
    >>> has_even_widths(chain(9, 5, 5, 9)), has_even_widths(chain(9, 5, 2))
    (False, False)
    """
    if any(isinstance(module, nn.RNNBase | nn.RNNCellBase) for module in model.modules()):
        return False
    *hidden, last = [outputs for _, outputs, _ in weight_layers(model)] or [0]
    return len(hidden) > 1 and len(set(hidden)) == 1 and last <= hidden[0]
