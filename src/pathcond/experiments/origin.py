"""How a row came about: device, versions and date of the process that computed it, and never the name of a machine."""

from __future__ import annotations

import platform
from datetime import datetime, timezone
from pathlib import Path

import torch

from .. import __version__


def origin(device: str) -> dict[str, str]:
    """What there is to say about a run that ends now on a device.

    >>> sorted(origin("cpu"))
    ['date', 'device', 'pathcond', 'python', 'torch']
    """
    return {
        "device": torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else _processor(),
        "torch": torch.__version__,
        "pathcond": __version__,
        "python": platform.python_version(),
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }


def _processor() -> str:
    """Its model where Linux tells it, or what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
