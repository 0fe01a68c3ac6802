"""Seconds of a whole ``condition_``, through public names alone, so that the library of another
checkout can be asked too.

    PYTHONPATH=OTHER_CHECKOUT/src:. python -m benchmarks.calls [resnet50 swin_t]

prints them as JSON, by model. The networks are this checkout's.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from tests import torchvision_operators  # noqa: F401  before torchvision is imported
from torch import Tensor, nn

import pathcond

# From its file: the library that is imported may be another, which has it elsewhere or not at all.
_spec = importlib.util.spec_from_file_location(
    "networks", Path(__file__).parents[1] / "src" / "pathcond" / "networks.py"
)
assert _spec is not None
assert _spec.loader is not None
networks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(networks)

SIZES = {"swin_t": 224}  # of images of torchvision's models; 64 for the others
OWN: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: networks.mlp(batch_norm=True),
    "cifar_nv": networks.cifar_nv,
    "resnet18_c": networks.resnet18_c,
}
MODELS = (*OWN, "resnet50", "densenet121", "swin_t")
REPEATS = 3


def build(name: str) -> tuple[nn.Module, Tensor]:
    """A model and a batch for it."""
    torch.manual_seed(0)
    if name in OWN:
        return OWN[name](), torch.randn(32, 3, 32, 32)
    import torchvision

    size = SIZES.get(name, 64)
    return torchvision.models.get_model(name, weights=None), torch.randn(2, 3, size, size)


def quickest(action: Callable[[], object]) -> float:
    """Seconds of the quickest of a few runs."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def measure_call(name: str) -> float:
    """Seconds of a whole ``condition_``."""
    model, batch = build(name)
    state = {key: value.clone() for key, value in model.state_dict().items()}

    def condition() -> None:
        model.load_state_dict(state)
        pathcond.condition_(model, batch)

    return quickest(condition)


def warm_up() -> None:
    """The first call of a process also pays for importing the tracer."""
    pathcond.condition_(networks.mlp((16,), inputs=8), torch.randn(4, 8))


if __name__ == "__main__":
    warm_up()
    print(json.dumps({name: measure_call(name) for name in sys.argv[1:] or MODELS}))
