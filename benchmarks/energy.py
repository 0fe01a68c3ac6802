"""Cost of diag(G) beside a float64 forward and backward pass of one sample, and how it grows with
depth.

    python -m benchmarks.energy [--models resnet18 vgg16] [--device cuda] [--out FILE]

``energy`` is the walk and the backward pass on a captured model with running statistics,
``calibrated`` the same where statistics are measured on a batch of two, ``capture`` what comes
before them once per model. Memory is what is alive beyond the model and the activations of one
sample, in multiples of the parameters' own bytes.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from functools import partial
from typing import Any

import torch
from tests import torchvision_operators  # noqa: F401  before torchvision is imported
from torch import Tensor, nn

from pathcond.lifting.lifting import capture_sample, path_energy
from pathcond.lifting.sample import Sample

from .measuring import PeakMemory, activation_bytes, file_of, format_row, median_seconds, write

MODELS = ("resnet18", "resnet50", "resnet152", "vgg16")
DEPTHS = (2, 4, 8, 16, 32, 64)


def seconds_of(action: Any, repeats: int, device: str) -> float:
    def run_and_synchronise() -> None:
        action()
        if device != "cpu":
            torch.cuda.synchronize()

    run_and_synchronise()  # warm
    return median_seconds(run_and_synchronise, repeats)


def forward_and_backward(model: nn.Module, x: Tensor) -> None:
    """What diag(G) is compared with: one sample through the model in float64, and the gradient of
    every parameter.
    """
    model.zero_grad(set_to_none=True)
    model(x).sum().backward()


def naive_seconds(model: nn.Module, x: Tensor, repeats: int, device: str) -> float:
    naive = copy.deepcopy(model).double()
    return seconds_of(lambda: forward_and_backward(naive, x.double()), repeats, device)


def measure(name: str, repeats: int, device: str) -> dict[str, Any]:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval().to(device)
    batch = torch.randn(2, 3, 224, 224, device=device)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("num_batches_tracked"):
            buffer.fill_(1)  # running statistics count as real, so that nothing is measured
    seconds_naive = naive_seconds(model, batch[:1], repeats, device)
    sample = capture_sample(model, batch)
    seconds_capture = seconds_of(lambda: capture_sample(model, batch), 1, device)
    seconds_energy = seconds_of(lambda: path_energy(model, sample), repeats, device)
    row: dict[str, Any] = {
        "model": name,
        "device": device,
        "seconds_forward_backward": seconds_naive,
    }
    row |= {
        "energy_over_forward_backward": seconds_energy / seconds_naive,
        "extra_memory_over_parameters": memory(model, sample),
    }
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("num_batches_tracked"):
            buffer.fill_(0)
    seconds_calibrated = seconds_of(lambda: path_energy(model, sample), repeats, device)
    row["calibrated_over_forward_backward"] = seconds_calibrated / seconds_naive
    row["extra_memory_calibrated"] = memory(model, sample)
    row["capture_over_forward_backward"] = seconds_capture / seconds_naive
    return row


def memory(model: nn.Module, sample: Sample) -> float:
    """Peak of the energy pass beyond the activations, over the bytes of the parameters."""
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    activations = activation_bytes(sample.graph) * 8 // 4  # in float64
    with PeakMemory(model) as peak:
        energy = path_energy(model, sample)
    assert energy.norm >= 0
    return (peak.peak - activations) / own


def depth_exponent(repeats: int, device: str) -> tuple[float, list[dict[str, Any]]]:
    """Least-squares slope of log(seconds) over log(depth) for MLPs of width 512, capture included
    and not.
    """
    rows = []
    for depth in DEPTHS:
        layers = [layer for _ in range(depth) for layer in (nn.Linear(512, 512), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(512, 10)).to(device)
        x = torch.randn(2, 512, device=device)
        sample = capture_sample(model, x)
        seconds = seconds_of(partial(path_energy, model, sample), repeats, device)
        rows.append({"depth": depth, "seconds": seconds})
    points = [(math.log(row["depth"]), math.log(row["seconds"])) for row in rows]
    mean_x, mean_y = (sum(values) / len(points) for values in zip(*points, strict=True))
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / sum(
        (x - mean_x) ** 2 for x, _ in points
    )
    return slope, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        rows.append(measure(name, options.repeats, options.device))
        print(format_row(rows[-1]), flush=True)
    exponent, depths = depth_exponent(options.repeats, options.device)
    print(f"MLPs of depth {DEPTHS[0]} to {DEPTHS[-1]}: seconds ~ depth^{exponent:.2f}")
    write(
        options.out or file_of("energy", options.device),
        rows,
        depth_exponent=exponent,
        depths=depths,
    )


if __name__ == "__main__":
    main()
