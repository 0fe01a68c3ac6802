"""How a row came about: device, versions, commit and date of the process that computed it, and
never the name of a machine.
"""

from __future__ import annotations

import ast
import os
import platform
import subprocess
from collections.abc import Sequence
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


def is_as_at(commit: str | None, package: Path, *, but: Sequence[str] = ()) -> bool:
    """Whether a package does what it did at a commit of its checkout; False where that is unknown.

    Args:
        commit: Of a row, say.
        package: Its folder.
        but: Parts of it that may have changed.
    """
    now = commit_of(package)
    if not commit or now is None or now.endswith(CHANGED):
        return False
    parts = [".", *(f":(exclude){part}" for part in but)]
    changed = _git(package, "diff", "--name-only", "--relative", commit, now, "--", *parts)
    return changed is not None and all(
        _does_the_same(*(_git(package, "show", f"{at}:./{name}") for at in (commit, now)))
        for name in changed.splitlines()
    )


def _does_the_same(before: str | None, after: str | None) -> bool:
    """Whether two versions of a file are the same program; None is no file."""
    if before is None or after is None:
        return False
    try:
        first, second = (ast.dump(_WithoutTexts().visit(ast.parse(s))) for s in (before, after))
    except SyntaxError:  # no Python
        return False
    return first == second


class _WithoutTexts(ast.NodeTransformer):
    """Drops docstrings, and empties messages: strings of three words or more, which people read.

    >>> _does_the_same(
    ...     "f('a key', 'It is so.')  # why", "'New.'; f('a key', f'It was {x} then.')"
    ... )
    True
    >>> _does_the_same("f('a key')", "f('another key')")
    False
    """

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        alone = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if alone else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        text = isinstance(node.value, str) and len(node.value.split()) >= 3
        return ast.Constant("") if text else node

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.expr:
        parts = [part.value for part in node.values if isinstance(part, ast.Constant)]
        return ast.Constant("") if len(" ".join(map(str, parts)).split()) >= 3 else node


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
