"""Shared set-up: deterministic hypothesis, torchvision's missing operator schemas."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from . import torchvision_operators  # noqa: F401  before anything imports torchvision

settings.register_profile("pathcond", deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
settings.load_profile("pathcond")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
