"""What the commands do. The front end loads this file when a command runs, and torch with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from ..capture.models import Inputs
from ..capture.usable import unusable_weights
from ..condition import condition_
from ..criteria.criterion import Criterion, PathKernel
from ..criteria.norms import BalancedNorms
from ..lifting.lifting import capture_sample, log10_paths, off_path, path_norm
from ..lifting.sample import Prepared
from ..measured.curvature import Curvature
from ..measured.layers import BalancedLayers
from ..report import Report
from ..report.text import paths_table
from ..solvers import CoordinateDescent, ENorm, Exact, Solver
from ..symmetry.symmetry import FrozenPolicy, Normalization, Symmetry, find_symmetry
from ..theory import regime
from ..wrappers import unwrap
from .checkpoints import (
    Checkpoint,
    CheckpointError,
    load_,
    refuse_other_format,
    refuse_to_overwrite,
    save,
)
from .targets import TargetError, load_target, parse_shape

CRITERIA: dict[str, Criterion] = {
    "paths": PathKernel(),
    "curvature": Curvature(),
    "norms": BalancedNorms(),
    "layers": BalancedLayers(),
}
SOLVERS: dict[str, Solver] = {
    "exact": Exact(),
    "paper": CoordinateDescent(),
    "enorm": ENorm(cycles=None),
}


@dataclass(frozen=True)
class Inspection:
    """What ``pathcond inspect`` found.

    Attributes:
        symmetry: Of the model.
        unusable: Weights that cannot be rescaled as they are, a line each.
        paths: Facts about its paths, where they were asked for.
    """

    symmetry: Symmetry
    unusable: list[str]
    paths: dict[str, Any] | None

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        paths = {"paths": self.paths} if self.paths else {}
        return self.symmetry.to_dict() | {"unusable_weights": self.unusable} | paths

    def __str__(self) -> str:
        text = str(self.symmetry) + (f"\n\n{paths_table(**self.paths)}" if self.paths else "")
        if not self.unusable:
            return text
        lines = ["", "Weights that cannot be rescaled as they are:"]
        return "\n".join([text, *lines, *(f"  {line}" for line in self.unusable)])


def inspect(
    target: str,
    shape: str | None,
    *,
    paths: bool,
    normalization: Normalization,
    approximate: bool,
    exclude: Iterable[str],
    frozen: FrozenPolicy,
) -> Inspection:
    """Find the symmetries of a target and, if asked for, count its paths."""
    model, inputs = _load(target, shape)
    symmetry = find_symmetry(
        model,
        inputs,
        normalization=normalization,
        approximate=approximate,
        exclude=exclude,
        frozen=frozen,
    )
    unusable = unusable_weights(unwrap(model))
    found = None
    if paths and not unusable:
        prepared = Prepared(symmetry=symmetry, sample=capture_sample(model, inputs))
        found = {
            "log10_paths": log10_paths(model, prepared),
            "path_norm": path_norm(model, prepared, approximate=approximate),
            "off_path": off_path(model, prepared),
            "regime": str(regime(model, prepared, approximate=approximate)),
        }
    return Inspection(symmetry, unusable, found)


def condition(
    target: str,
    shape: str | None,
    *,
    checkpoint: Path | None,
    out: Path,
    page: Path | None,
    replace: bool,
    device: str,
    criterion: str | None,
    solver: str,
    progress: Callable[[str], object],
    **options: Any,
) -> Report:
    """Condition a target, and write its weights and the page of the report.

    Args:
        target, shape: What to load, and the shape of a random input.
        checkpoint: Weights to start from; None for the target's own.
        out, page: Files to write; ``out`` only where something can be rescaled.
        replace: Whether files that exist are replaced.
        device: Where to compute.
        criterion, solver: Names in ``CRITERIA`` and ``SOLVERS``; no criterion for the default.
        progress, options: As for ``condition_``.
    """
    refuse_other_format(out)
    for path in (out, *([page] if page else [])):
        refuse_to_overwrite(path, replace)
    if page and page.resolve() == out.resolve():
        raise CheckpointError(f"--out and --report are the same file, {out}: name two.")
    model, inputs = _load(target, shape)
    like = load_(model, checkpoint) if checkpoint else Checkpoint.of(model)
    model, inputs = _move(model, inputs, device)
    done = condition_(
        model,
        inputs,
        criterion=CRITERIA[criterion] if criterion else None,
        solver=SOLVERS[solver],
        progress=progress,
        **options,
    )
    if page:
        done.to_html(page, name=target)
    if done.num_units:
        save(model, out, like)
    return done


def _load(target: str, shape: str | None) -> tuple[nn.Module, Any]:
    return load_target(target, parse_shape(shape) if shape else None)


def _move(model: nn.Module, inputs: Inputs, device: str) -> tuple[nn.Module, Any]:
    """Model and inputs on the device, floating-point inputs in the model's type."""
    try:
        if torch.device(device).type == "meta":
            raise TargetError("The meta device has no weights to rescale.")
        model = model.to(device)
    except (RuntimeError, AssertionError) as error:
        raise TargetError(f"The device {device!r} cannot be used: {error}") from error
    dtype = next((p.dtype for p in model.parameters() if p.dtype.is_floating_point), torch.float32)

    def adapt(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return x.to(device, dtype if x.dtype.is_floating_point else None)

    return model, tree_map(adapt, inputs)
