"""Optimizer state in new coordinates: θ → d ⊙ θ takes gradients to gradients / d.

Each kind of state scales by a power of d, the parameter's own factor, so that it becomes what the moved gradients
would have built up:

    −1   gradient-like: momentum, first moments
    −2   second moments
     0   already normalised by second moments
     1   parameter-like copies
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .errors import RescalingError
from .factor import Factor
from .memory import is_writable

POWERS = {
    "momentum_buffer": -1,
    "exp_avg": -1,
    "grad_avg": -1,
    "exp_avg_sq": -2,
    "max_exp_avg_sq": -2,
    "square_avg": -2,
    "sum": -2,
    "exp_inf": -1,
    "ax": 1,
}
# The same name means something else here: averages of gradients already divided by their own size.
NORMALISED = {"RMSprop": ("momentum_buffer",), "Adadelta": ("acc_delta",)}
UNSCALED = ("step", "eta", "mu", "mu_product")
CHOICES = ("transport", "reset", "keep")


def transport(
    optimizer: torch.optim.Optimizer, optimizer_state: str, model: nn.Module, factors: dict[str, Factor]
) -> list[Callable[[], Any]]:
    """Plan the moves of an optimizer's state; nothing is written before the returned actions are called.

    Raises:
        RescalingError: A state of unknown meaning; it names it and offers the other choices.
    """
    if optimizer_state not in CHOICES:
        raise ValueError(f"optimizer_state={optimizer_state!r}; choose one of {', '.join(map(repr, CHOICES))}")
    if optimizer_state == "keep":
        return []
    moves: list[Callable[[], Any]] = []
    unknown = []
    parameters = dict(model.named_parameters())
    for name, factor in factors.items():
        parameter = parameters.get(name)
        state = optimizer.state.get(parameter, {}) if parameter is not None else {}
        if optimizer_state == "reset":
            if state:
                moves.append(state.clear)
            continue
        for key, value in state.items():
            if not isinstance(value, Tensor) or key in UNSCALED + NORMALISED.get(type(optimizer).__name__, ()):
                continue
            if not is_writable(value):
                unknown.append(f"the state {key!r} of {name} cannot be written in place")
            elif key in POWERS and value.shape == parameter.shape:  # type: ignore[union-attr]
                moves.append(lambda f=factor, v=value, p=POWERS[key]: f.times(v, power=p, out=v))  # type: ignore[misc]
            else:
                unknown.append(
                    f"{type(optimizer).__name__} keeps state {key!r} {tuple(value.shape)} for {name}, of unknown meaning"
                )
    if unknown:
        raise RescalingError(
            "The model was not changed, because its optimizer state cannot be moved along:\n  - "
            + "\n  - ".join(unknown[:10])
            + '\nPass optimizer_state="reset" to start it anew, or "keep" to leave it as it is.'
        )
    return moves
