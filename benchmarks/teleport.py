"""Cost of teleporting once per epoch beside the same training without it, and of one teleport in
training steps, by stage.

    python -m benchmarks.teleport [--device cuda] [--epochs 3] [--steps 390] [--out FILE]

CIFAR-NV by SGD with momentum on images of CIFAR-10's size and number, through the ``DataLoader`` of
benchmarks/conditioning.py. Two networks train in turns, an epoch each, so that whatever else the
machine does falls on both; an epoch is 390 batches of 128, or as many as asked for, scaled up. The
overhead is the time in teleports over the median epoch without any: the difference of two epochs is
also given, but noise of some per cent hides it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

import pathcond
from pathcond.networks import cifar_nv

from .conditioning import Images, step
from .measuring import file_of, format_row, write

STEPS_PER_EPOCH = 390


class Training:
    """One network in training."""

    def __init__(self, batch: Tensor, device: str, **teleport: Any) -> None:
        torch.manual_seed(0)
        self.model, self.device = cifar_nv().to(device).train(), device
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3, momentum=0.9)
        self.teleport = (
            pathcond.teleport(
                self.optimizer,
                self.model,
                batch.to(device),
                criterion=pathcond.PathKernel(),
                normalization="absorb",
                **teleport,
            )
            if teleport
            else None
        )

    def epoch(self, images: Images, steps: int) -> tuple[float, float]:
        """Seconds of so many steps, and of the teleport after them."""
        start = time.perf_counter()
        for x, y in islice(DataLoader(images, batch_size=128, shuffle=True), steps):
            step(self.model, self.optimizer, x, y, self.device)
        trained = time.perf_counter()
        if self.teleport is not None:
            self.teleport.end_epoch()
            if self.device == "cuda":
                torch.cuda.synchronize()
        return trained - start, time.perf_counter() - trained


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS_PER_EPOCH)
    parser.add_argument("--batch", type=int, default=16, help="samples of the example batch")
    parser.add_argument("--out")
    options = parser.parse_args()
    images = Images(50_000)
    batch = torch.stack([images[i][0] for i in range(options.batch)])
    without, with_ = Training(batch, options.device), Training(batch, options.device, every="epoch")
    for training in (without, with_):
        training.epoch(images, 3)  # warm
    epochs: list[float] = []
    epochs_with: list[float] = []
    teleports: list[float] = []
    stages: list[dict[str, float]] = []
    scale = STEPS_PER_EPOCH / options.steps
    for _ in range(options.epochs):
        epochs.append(without.epoch(images, options.steps)[0] * scale)
        seconds, teleport = with_.epoch(images, options.steps)
        epochs_with.append(seconds * scale + teleport)
        teleports.append(teleport)
        assert with_.teleport is not None
        assert with_.teleport.report is not None
        stages.append(with_.teleport.report.seconds)
    epoch, teleport = statistics.median(epochs), statistics.median(teleports)
    a_step = epoch / STEPS_PER_EPOCH
    row = {
        "model": "cifar_nv",
        "device": options.device,
        "batch": options.batch,
        "seconds_epoch": epoch,
        "seconds_teleport": teleport,
        "overhead": teleport / epoch,
        "difference_of_epochs": statistics.median(epochs_with) / epoch - 1,
        "steps_per_teleport": teleport / a_step,
        **{
            f"steps_{stage}": statistics.median(s[stage] for s in stages) / a_step
            for stage in stages[0]
        },
    }
    print(format_row(row), flush=True)
    write(options.out or file_of("teleport", options.device), [row])


if __name__ == "__main__":
    main()
