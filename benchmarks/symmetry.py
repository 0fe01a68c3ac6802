"""Cost of the symmetry search beside the capture, memory of labels beside the activations, speed of
rescale_ beside mul_.

    python -m benchmarks.symmetry [--models resnet50 vgg16] [--out benchmarks/symmetry.json]

All figures of one model come from one process, so that ratios survive a noisy machine.
"""

from __future__ import annotations

import argparse
import warnings
from functools import partial
from typing import Any

import torch
from tests import torchvision_operators  # noqa: F401  before torchvision is imported

import pathcond
from pathcond.capture.graph import capture
from pathcond.capture.nodes import Graph
from pathcond.symmetry.captures import Captured
from pathcond.symmetry.sizes import Example
from pathcond.symmetry.symmetry import symmetry_of

from .measuring import PeakMemory, activation_bytes, format_row, median_seconds, write

MODELS = ("resnet50", "densenet201", "swin_t", "vgg16")


def measure(name: str, repeats: int) -> dict[str, Any]:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    inputs = torch.randn(2, 3, 224, 224)

    def capture_both() -> list[Graph]:
        return [capture(model, inputs, training=training) for training in (False, True)]

    graphs = capture_both()  # warm
    walked = [Captured(example=Example(inputs), graphs=tuple(graphs))]
    seconds_capture = median_seconds(capture_both, repeats)
    row: dict[str, Any] = {"model": name, "seconds_capture": seconds_capture}
    for normalization in ("absorb", "full"):
        seconds = median_seconds(
            partial(symmetry_of, model, walked, normalization=normalization), repeats
        )
        row[f"search_over_capture_{normalization}"] = seconds / seconds_capture
    with PeakMemory(model) as memory:
        symmetry = symmetry_of(model, walked, normalization="full")
    row["labels_over_activations"] = memory.peak / activation_bytes(graphs[0])
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    size = sum(p.numel() * p.element_size() for p in parameters)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 0.2 - 0.1

    def plain() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.0)

    seconds_plain = median_seconds(plain, repeats)
    seconds_rescale = median_seconds(
        lambda: pathcond.rescale_(model, symmetry, log_scales, verify=False), repeats
    )
    row |= {
        "parameter_megabytes": size / 1e6,
        "mul_gigabytes_per_second": size / seconds_plain / 1e9,
        "rescale_gigabytes_per_second": size / seconds_rescale / 1e9,
        "rescale_over_mul": seconds_rescale / seconds_plain,
    }
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", default="benchmarks/symmetry.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in options.models:
        rows.append(measure(name, options.repeats))
        print(format_row(rows[-1]), flush=True)
    write(options.out, rows)


if __name__ == "__main__":
    main()
