"""Shared set-up: deterministic hypothesis, torchvision's missing operator schemas."""

import os
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

from . import torchvision_operators  # noqa: F401  before anything imports torchvision
from .strategies import examples

settings.register_profile(
    "pathcond",
    parent=examples(100),
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("pathcond")

workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
# oneDNN takes several times as long as torch's own kernels for layers as small as these
torch.backends.mkldnn.set_flags(False)  # type: ignore[attr-defined]
# Threads that fight for cores are many times slower; only those of this process count.
cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
torch.set_num_threads(max(1, min(torch.get_num_threads(), cores // workers)))


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _torch_is_left_as_it_was() -> Iterator[None]:
    """A mode or hook that stays behind sees, and may change, everything that comes later."""
    yield
    assert not torch.overrides._get_current_function_mode_stack()
    with torch.autograd.graph.disable_saved_tensors_hooks("a hook on saved tensors stayed behind"):
        pass


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests marked ``cuda`` exist only where there is a GPU."""
    if not torch.cuda.is_available():
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("cuda")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("cuda")]
