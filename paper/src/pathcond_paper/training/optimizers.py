"""Optimizers over stacked networks: every run has a learning rate of its own, (runs,), and all of a
step stays on the device.

They make the steps of torch.optim's SGD and AdamW, network by network.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Schedule = Literal["fixed", "cosine", "warm-up and cosine"]
MOMENTUM = 0.9
BETAS = (0.9, 0.999)
EPSILON = 1e-8
WARM_UP = 0.05  # share of the steps over which the rate grows from zero


class Optimizer(ABC):
    """One step after the other.

    Args:
        parameters: Stacked, (runs, ...) each; changed in place.
        rates: Learning rate of every run, (runs,).
        weight_decay: As torch's optimizer of the same name applies it.
        schedule: What the rates are multiplied by, over all steps.
        steps: How many there will be.
        factors: What the rates of every parameter are multiplied by, in the shapes of the
            parameters; None for 1 everywhere.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        rates: Tensor,
        *,
        weight_decay: float,
        schedule: Schedule,
        steps: int,
        factors: Sequence[Tensor] | None = None,
    ) -> None:
        self.parameters = list(parameters)
        # In the shapes of the parameters: broadcasting them takes several times as long as a step.
        self.rates = [_along(rates, p).expand_as(p).contiguous().detach() for p in self.parameters]
        if factors is not None:
            self.rates = [rate * own for rate, own in zip(self.rates, factors, strict=True)]
        self.weight_decay = weight_decay
        self.schedule = schedule
        self.steps = steps
        self.done = torch.zeros((), dtype=torch.float64, device=rates.device)

    def tensors(self) -> list[Tensor]:
        """All that a step changes besides the parameters."""
        return [self.done]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Move the parameters by one step."""
        share = factor(self.schedule, self.done, self.steps)
        self.done += 1
        self._move(gradients, share)

    @abstractmethod
    def _move(self, gradients: Sequence[Tensor], share: Tensor) -> None:
        """The step itself, with this share of the rates."""


class SGD(Optimizer):
    """torch.optim.SGD without momentum."""

    def _move(self, gradients: Sequence[Tensor], share: Tensor) -> None:
        for parameter, gradient, rate in zip(self.parameters, gradients, self.rates, strict=True):
            if self.weight_decay:
                gradient = gradient.add(parameter, alpha=self.weight_decay)
            parameter.addcmul_(gradient * share, rate, value=-1)


class Momentum(Optimizer):
    """torch.optim.SGD with momentum 0.9."""

    def __init__(self, parameters: Sequence[Tensor], rates: Tensor, **options: object) -> None:
        super().__init__(parameters, rates, **options)  # type: ignore[arg-type]
        self.velocities = [torch.zeros_like(p, requires_grad=False) for p in parameters]

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.velocities]

    def _move(self, gradients: Sequence[Tensor], share: Tensor) -> None:
        parts = zip(self.parameters, gradients, self.rates, self.velocities, strict=True)
        for parameter, gradient, rate, velocity in parts:
            velocity.mul_(MOMENTUM).add_(gradient)
            if self.weight_decay:
                velocity.add_(parameter, alpha=self.weight_decay)
            parameter.addcmul_(velocity * share, rate, value=-1)


class AdamW(Optimizer):
    """torch.optim.AdamW; without weight decay it is Adam."""

    def __init__(self, parameters: Sequence[Tensor], rates: Tensor, **options: object) -> None:
        super().__init__(parameters, rates, **options)  # type: ignore[arg-type]
        self.means = [torch.zeros_like(p, requires_grad=False) for p in parameters]
        self.squares = [torch.zeros_like(p, requires_grad=False) for p in parameters]

    def tensors(self) -> list[Tensor]:
        return [*super().tensors(), *self.means, *self.squares]

    def _move(self, gradients: Sequence[Tensor], share: Tensor) -> None:
        # ``done`` counts this step already, as in torch.
        mean_share, square_share = (1 - beta**self.done for beta in BETAS)
        parts = zip(self.parameters, gradients, self.rates, self.means, self.squares, strict=True)
        for parameter, gradient, rate, mean, square in parts:
            mean.lerp_(gradient, 1 - BETAS[0])
            square.mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
            if self.weight_decay:
                parameter.addcmul_(parameter, rate * (share * self.weight_decay), value=-1)
            length = square.sqrt().mul_(square_share.rsqrt()).add_(EPSILON)
            direction = torch.div(mean, length, out=length).mul_(share / mean_share)
            parameter.addcmul_(direction, rate, value=-1)


OPTIMIZERS: dict[str, type[Optimizer]] = {"sgd": SGD, "momentum": Momentum, "adamw": AdamW}


def factor(schedule: Schedule, done: Tensor, steps: int) -> Tensor:
    """What the learning rate is multiplied by after ``done`` of ``steps`` steps.

    >>> [round(float(factor("cosine", torch.tensor(k), 4)), 3) for k in range(4)]
    [1.0, 0.854, 0.5, 0.146]
    """
    if schedule == "fixed":
        return torch.ones_like(done)
    cosine = 0.5 * (1 + torch.cos(math.pi * done / steps))
    if schedule == "cosine":
        return cosine
    return cosine * ((done + 1) / (WARM_UP * steps)).clamp(max=1.0)


def _along(rates: Tensor, parameter: Tensor) -> Tensor:
    """Rates (runs,) as a tensor that broadcasts to (runs, ...)."""
    return rates.to(parameter.dtype).view(-1, *[1] * (parameter.dim() - 1))
