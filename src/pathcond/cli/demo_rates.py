"""What holds at tuned learning rates: an autoencoder of uneven widths on handwritten digits, each
method at its own best rate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..criteria.criterion import PathKernel
from ..networks import mlp
from ..rates import RateComparison, compare_rates

HIDDEN = (64, 16, 64)
WIDTHS = "-".join(map(str, (64, *HIDDEN, 64)))
RATES = tuple(0.1 * 2.0**k for k in range(7))
SEEDS = 4
TRAINING_SHARE = 0.8
METHODS: dict[str, Any] = {
    "as is": None,
    "conditioned": {},
    "conditioned by the path kernel": {"criterion": PathKernel()},
}


def compare(x: Tensor, *, batch: int, epochs: int) -> RateComparison:
    """Test loss of the reconstruction over the learning rate, as is and conditioned.

    Args:
        x: (images, 64), of which a random fifth is for testing.
        batch: Images per step.
        epochs: Passes over the others, with a cosine schedule.
    """
    shuffled = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    training, test = shuffled.split(
        [round(TRAINING_SHARE * len(x)), len(x) - round(TRAINING_SHARE * len(x))]
    )

    def train(model: nn.Module, rate: float) -> Tensor:
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, epochs * (len(training) // batch)
        )
        for _ in range(epochs):
            for rows in torch.randperm(len(training))[: len(training) // batch * batch].split(
                batch
            ):
                optimizer.zero_grad()
                F.mse_loss(model(training[rows]), training[rows]).backward()
                optimizer.step()
                schedule.step()
        with torch.no_grad():
            return F.mse_loss(model(test), test)

    return compare_rates(
        build, train, training[:256], rates=RATES, methods=METHODS, seeds=SEEDS, label="test loss"
    )


def build(seed: int) -> nn.Module:
    return mlp(HIDDEN, inputs=64, outputs=64)
