"""Cost of a whole ``condition_`` beside one training epoch.

    python -m benchmarks.conditioning [--device cuda] [--images 50000] [--out FILE]

The epoch is SGD on as many images of CIFAR-10's size as asked for, through a plain ``DataLoader``
(batches of 128, shuffled, no worker processes) whose dataset turns one uint8 image at a time into a
normalised float tensor. ``condition_`` runs on the first batch: ``captured`` on a model whose graph
and symmetry are known already (as in training, where they are found once), ``whole`` with both
captures. The first call of a process also pays for importing the tracer, so it is called once
before on another network.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from pathcond import Report, condition_
from pathcond.condition import prepare
from pathcond.networks import cifar_nv, mlp, resnet18_c

from .measuring import file_of, format_row, write

ARCHITECTURES = {
    "mlp": lambda: mlp(batch_norm=True),
    "cifar_nv": cifar_nv,
    "resnet18_c": resnet18_c,
}


class Images(Dataset):
    """Random images of CIFAR-10's size and number, one at a time."""

    def __init__(self, count: int) -> None:
        self.pixels = torch.randint(0, 256, (count, 3, 32, 32), dtype=torch.uint8)
        self.labels = torch.randint(0, 10, (count,))

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return (self.pixels[i].float() / 255 - 0.5) / 0.25, self.labels[i]


def epoch_seconds(model: nn.Module, images: Images, device: str) -> float:
    """One epoch of plain SGD; the first batches, which compile and allocate, are not timed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    model.train()
    x, y = next(iter(DataLoader(images, batch_size=128)))
    for _ in range(2):
        step(model, optimizer, x, y, device)
    start = time.perf_counter()
    for x, y in DataLoader(images, batch_size=128, shuffle=True):
        step(model, optimizer, x, y, device)
    return time.perf_counter() - start


def step(
    model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor, device: str
) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x.to(device)), y.to(device))
    loss.backward()
    optimizer.step()
    return loss.item()  # waits for the device, as logging the loss does


def measure(name: str, images: Images, device: str) -> dict[str, Any]:
    torch.manual_seed(0)
    batch = torch.stack([images[i][0] for i in range(128)]).to(device)
    seconds_epoch = epoch_seconds(ARCHITECTURES[name]().to(device), images, device)
    row: dict[str, Any] = {
        "model": name,
        "device": device,
        "images": len(images),
        "seconds_epoch": seconds_epoch,
    }
    whole = best_of([condition_(ARCHITECTURES[name]().to(device), batch) for _ in range(3)])
    model = ARCHITECTURES[name]().to(device)
    prepared, weights = (
        prepare(model, batch),
        {name: value.clone() for name, value in model.state_dict().items()},
    )
    reports = []
    for _ in range(5):
        model.load_state_dict(weights)
        reports.append(condition_(model, prepared))
    warm = best_of(reports)
    for key, seconds in (("captured", warm), ("whole", whole)):
        row |= {
            f"seconds_{key}": sum(seconds.values()),
            f"{key}_over_epoch": sum(seconds.values()) / seconds_epoch,
        }
    return row | {f"seconds_{stage}": value for stage, value in whole.items()}


def best_of(reports: list[Report]) -> dict[str, float]:
    """Seconds by stage of the quickest."""
    return min((report.seconds for report in reports), key=lambda seconds: sum(seconds.values()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--models", nargs="*", default=list(ARCHITECTURES))
    parser.add_argument("--out")
    options = parser.parse_args()
    condition_(mlp((16,), inputs=8).to(options.device), torch.randn(4, 8, device=options.device))
    images, rows = Images(options.images), []
    for name in options.models:
        rows.append(measure(name, images, options.device))
        print(format_row(rows[-1]), flush=True)
    write(options.out or file_of("conditioning", options.device), rows)


if __name__ == "__main__":
    main()
