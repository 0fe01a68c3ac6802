"""Cost of the symmetry search beside the capture, memory of labels beside the activations, speed of rescale_ beside mul_.

    python -m benchmarks.symmetry [--models resnet50 vgg16] [--out benchmarks/symmetry.json]

All figures of one model come from one process, so that ratios survive a noisy machine.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from tests import torchvision_operators  # noqa: F401  before torchvision is imported
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pathcond
from pathcond.graph import Graph, capture
from pathcond.symmetry import symmetry_of

MODELS = ("resnet50", "densenet201", "swin_t", "vgg16")


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes alive at a time among the tensors made inside; the model's own do not count."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        self.tensors: dict[int, int] = {t.untyped_storage()._cdata: 1 for t in held}  # storage -> tensors that hold it
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and not tensor.is_sparse:
                storage, size = tensor.untyped_storage()._cdata, tensor.untyped_storage().nbytes()
                if self.tensors.setdefault(storage, 0) == 0:
                    self.bytes += size
                self.tensors[storage] += 1
                weakref.finalize(tensor, self._drop, storage, size)
        self.peak = max(self.peak, self.bytes)
        return result

    def _drop(self, storage: int, size: int) -> None:
        self.tensors[storage] -= 1
        self.bytes -= size if self.tensors[storage] == 0 else 0


def activation_bytes(graph: Graph) -> int:
    """Bytes of all results that are no views, as a forward pass that keeps them would hold."""
    total = 0
    for node in graph.nodes:
        if isinstance(node.target, torch._ops.OpOverload) and isinstance(node.shape, tuple):
            is_view = any(a.alias_info is not None for a in node.target._schema.arguments)
            total += 0 if is_view else torch.Size(node.shape).numel() * node.dtype.itemsize
    return total


def median_seconds(action: Callable[[], object], repeats: int) -> float:
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(name: str, repeats: int) -> dict[str, Any]:
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.get_model(name, weights=None).eval()
    inputs = torch.randn(2, 3, 224, 224)

    def captured() -> list[Graph]:
        return [capture(model, inputs, training=training) for training in (False, True)]

    graphs = captured()  # warm
    seconds_capture = median_seconds(captured, repeats)
    row: dict[str, Any] = {"model": name, "seconds_capture": seconds_capture}
    for normalization in ("absorb", "full"):
        seconds = median_seconds(lambda n=normalization: symmetry_of(model, inputs, graphs, normalization=n), repeats)
        row[f"search_over_capture_{normalization}"] = seconds / seconds_capture
    with PeakMemory(model) as memory:
        symmetry = symmetry_of(model, inputs, graphs, normalization="full")
    row["labels_over_activations"] = memory.peak / activation_bytes(graphs[0])
    parameters = [p for p in model.parameters() if p.is_floating_point()]
    size = sum(p.numel() * p.element_size() for p in parameters)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 0.2 - 0.1

    def plain() -> None:
        with torch.no_grad():
            for parameter in parameters:
                parameter.mul_(1.0)

    seconds_plain = median_seconds(plain, repeats)
    seconds_rescale = median_seconds(lambda: pathcond.rescale_(model, symmetry, log_scales, verify=False), repeats)
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
        print(" ".join(f"{key}={value:.3g}" if isinstance(value, float) else f"{value}" for key, value in rows[-1].items()))
    environment = {"torch": torch.__version__, "threads": torch.get_num_threads(), "machine": platform.machine()}
    with open(options.out, "w") as file:
        json.dump({"environment": environment, "rows": rows}, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
