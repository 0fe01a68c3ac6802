"""How the benchmarks measure: time, memory, and where results go."""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from pathcond.capture.nodes import Graph
from pathcond_paper import origin


class PeakMemory(TorchDispatchMode):
    """Largest number of bytes alive at a time among the tensors made inside; the model's own do not
    count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        held = [*model.parameters(), *model.buffers()]
        # storage -> tensors that hold it
        self.tensors: dict[int, int] = {t.untyped_storage()._cdata: 1 for t in held}
        self.bytes = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and not isinstance(tensor, FakeTensor)
                and not tensor.is_sparse
            ):
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


class GpuMemory:
    """As ``PeakMemory`` counts them, the bytes that a GPU has given out."""

    def __enter__(self) -> GpuMemory:
        torch.cuda.reset_peak_memory_stats()
        self.before = torch.cuda.memory_allocated()
        return self

    def __exit__(self, *failure: object) -> None:
        self.peak = torch.cuda.max_memory_allocated() - self.before


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


def format_row(row: dict[str, Any]) -> str:
    return " ".join(
        f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}"
        for key, value in row.items()
    )


def commit_of(checkout: Path) -> str:
    """The commit of a checkout, with "+changes" where its library differs from it; of a copy
    without its history, what $PATHCOND_COMMIT says.
    """
    return origin.commit_of(checkout / "src" / "pathcond") or os.environ.get(origin.COMMIT, "")


def _processor() -> str:
    """Its name, where the system tells it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()


def file_of(benchmark: str, device: str) -> str:
    """Where a benchmark writes unless told otherwise; figures of a GPU are kept apart.

    >>> file_of("growth", "cuda:1")
    'benchmarks/growth_cuda.json'
    """
    return f"benchmarks/{benchmark}{'_cuda' if device.startswith('cuda') else ''}.json"


def write(path: str, rows: list[dict[str, Any]], **more: Any) -> None:
    """Write rows with the machine and the commit that they were measured on."""
    environment = {
        "commit": commit_of(Path(__file__).parents[1]),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "processor": _processor(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }
    with open(path, "w") as file:
        json.dump({"environment": environment, "rows": rows, **more}, file, indent=1)
        file.write("\n")
