"""What holds at tuned learning rates: an autoencoder of uneven widths on handwritten digits, each
method at its own best rate.

All runs train at once, as one network whose tensors have one more axis: that is many times faster
than ``compare_rates``, which takes any model and any way to train it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap
from torch.nn import functional as F

from ..networks import mlp
from ..rates import RateComparison
from ..rates.arguments import grid_of
from ..rates.compare import comparison_of
from ..rates.runs import Beginnings, Run, figure_of

HIDDEN = (64, 32, 8, 32, 64)
WIDTHS = "-".join(map(str, (64, *HIDDEN, 64)))
RATES = tuple(0.2 * 2.0**k for k in range(6))
SEEDS = 6
TRAINING_SHARE = 0.8


def compare(
    x: Tensor, *, batch: int, epochs: int, on_epoch: Callable[[int], None] = lambda epoch: None
) -> RateComparison:
    """Test loss of the reconstruction over the learning rate, as is and conditioned.

    Args:
        x: (images, 64), of which a random fifth is for testing.
        batch: Images per step.
        epochs: Passes over the others, with a cosine schedule.
        on_epoch: Called after every pass with its number, from 1.
    """
    start = time.perf_counter()
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    training, test = shuffled.split(
        [round(TRAINING_SHARE * len(x)), len(x) - round(TRAINING_SHARE * len(x))]
    )
    grid = grid_of(RATES, None, SEEDS)
    beginnings = Beginnings(build, training[:256], {})
    models = [beginnings.ready(point) for point in grid]
    rates = torch.tensor([point.rate for point in grid])
    seeds = torch.tensor([point.seed for point in grid])
    stacked, _ = stack_module_state(models)  # type: ignore[arg-type]
    parameters = {name: values.detach() for name, values in stacked.items()}

    def loss(values: dict[str, Tensor], images: Tensor) -> Tensor:
        return F.mse_loss(functional_call(models[0], values, (images,)), images)

    gradients = vmap(grad(loss))
    steps = len(training) // batch
    for epoch in range(epochs):
        # Runs of one seed see the same batches.
        orders = torch.stack([order(len(training), seed, epoch) for seed in range(SEEDS)])
        for step, rows in enumerate(orders[:, : steps * batch].split(batch, dim=1)):
            done = (epoch * steps + step) / (epochs * steps)
            pace = rates * (0.5 + 0.5 * math.cos(math.pi * done))
            slopes = gradients(parameters, training[rows[seeds]])
            for name, values in parameters.items():
                values.addcmul_(pace.view(-1, *[1] * (values.dim() - 1)), slopes[name], value=-1)
        on_epoch(epoch + 1)
    losses = vmap(loss, in_dims=(0, None))(parameters, test)
    seconds = (time.perf_counter() - start) / len(grid)
    runs = [
        Run(
            method=point.method.name,
            rate=point.rate,
            seed=point.seed,
            figure=figure_of(figure),
            seconds=seconds,
        )
        for point, figure in zip(grid, losses, strict=True)
    ]
    return comparison_of(grid, runs, "test loss")


def build(seed: int) -> nn.Module:
    return mlp(HIDDEN, inputs=64, outputs=64)


def order(count: int, seed: int, epoch: int) -> Tensor:
    """The order in which the runs of a seed see the images in an epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(1000 * seed + epoch))
