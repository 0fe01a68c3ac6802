"""How a row came about: device, versions, commit and date of the process that computed it, and
never the name of a machine.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

import torch

import pathcond

PACKAGES = (Path(pathcond.__file__).parent, Path(__file__).parent)
CHANGED = "+changes"
COMMIT = "PATHCOND_COMMIT"  # names the commit where the package is a copy without its history


def origin(device: str) -> dict[str, str | None]:
    """What there is to say about a run that ends now on a device.

    >>> sorted(origin("cpu"))
    ['commit', 'date', 'device', 'pathcond', 'python', 'torch']
    """
    return {
        "device": torch.cuda.get_device_name(device)
        if torch.device(device).type == "cuda"
        else _processor(),
        "torch": torch.__version__,
        "pathcond": pathcond.__version__,
        "commit": commit(),
        "python": platform.python_version(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


@cache
def commit() -> str | None:
    """The commit that this process runs: of the checkout, or as $PATHCOND_COMMIT says; None if
    unknown.

    Found once per process: files may change while it runs, the code that it has loaded does not.
    """
    found = [commit_of(package) for package in PACKAGES]
    changed = [name for name in found if name and name.endswith(CHANGED)]
    return next(filter(None, [*changed, *found, os.environ.get(COMMIT)]), None)


def commit_of(package: Path) -> str | None:
    """The commit of the checkout that a package lies in, "+changes" if the package differs from it.

    None where there is no git, or where the checkout around the package is another project's, which
    is so for a package installed below it.
    """
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    found = _git(package, "rev-parse", "HEAD")
    changes = _git(package, "status", "--porcelain", ".")
    if found is None or changes is None:
        return None
    return found + CHANGED if changes else found


def is_as_at(commit: str | None, package: Path) -> bool:
    """Whether a package is what it was at a commit of its checkout; False where that is unknown."""
    now = commit_of(package)
    if not commit or now is None or now.endswith(CHANGED):
        return False
    return _git(package, "diff", "--quiet", commit, now, "--", ".") is not None


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says about a folder; None if it fails."""
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip()


def _processor() -> str:
    """Its model where Linux tells it, or what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, platform.processor() or platform.machine())
