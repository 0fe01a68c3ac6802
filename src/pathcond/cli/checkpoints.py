"""safetensors checkpoints in and out: every name accounted for, written all or nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

from ..capture.models import canonical_names
from ..files import refuse_special, replacing


class CheckpointError(ValueError):
    """A checkpoint cannot be read into the model, or may not be written; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a file held besides the values: names in order, and its metadata."""

    names: tuple[str, ...]
    metadata: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> Checkpoint:
        """Names for a model that came without a file: one per tensor, in the order of its
        state_dict.
        """
        first: dict[str, str] = {}
        canonical = canonical_names(model)
        for name in _tensors(model):
            first.setdefault(canonical.get(name, name), name)
        return cls(names=tuple(first.values()))


def load_(model: nn.Module, path: Path) -> Checkpoint:
    """Write a checkpoint's values into the model, which takes over its floating-point types.

    Raises:
        CheckpointError: The file cannot be read, or names and shapes do not fit the model; the
            model is unchanged.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  it is no dict
            metadata = file.metadata() or {}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} cannot be read as safetensors: {error}. If torch.save wrote it, convert it: "
            f"safetensors.torch.save_file(torch.load({path.name!r}), 'new.safetensors')"
        ) from error
    own, canonical = _tensors(model), canonical_names(model)
    problems = [f"{name} is in the file but not in the model" for name in values if name not in own]
    given = {canonical.get(name, name) for name in values}
    problems += [
        f"{name} is in the model but not in the file"
        for name in own
        if canonical.get(name, name) not in given
    ]
    problems += [
        f"{name} is {tuple(value.shape)} in the file and {tuple(own[name].shape)} in the model"
        for name, value in values.items()
        if name in own and own[name].shape != value.shape
    ]
    first: dict[str, tuple[str, Tensor]] = {}
    for name, value in values.items():
        twin, known = first.setdefault(canonical.get(name, name), (name, value))
        if known is not value and not torch.equal(known, value):
            problems.append(f"{twin} and {name} are one tensor in the model and differ in the file")
        if name in own and own[name].dtype.is_floating_point != value.dtype.is_floating_point:
            problems.append(
                f"{name} is {value.dtype} in the file and {own[name].dtype} in the model"
            )
    if problems:
        more = f"\n  … and {len(problems) - 10} more" if len(problems) > 10 else ""
        raise CheckpointError(
            f"{path} does not fit {type(model).__name__}:\n  " + "\n  ".join(problems[:10]) + more
        )
    types = {value.dtype for value in values.values() if value.dtype.is_floating_point}
    if len(types) == 1:
        # what the file does not hold, too; buffers are new tensors then
        own = _tensors(model.to(types.pop()))
    with torch.no_grad():
        for name, value in values.items():
            if value.dtype.is_floating_point and own[name].dtype != value.dtype:
                own[name].data = own[name].data.to(value.dtype)
            own[name].copy_(value)
    return Checkpoint(names=tuple(values), metadata=metadata)


def save(model: nn.Module, path: Path, like: Checkpoint) -> None:
    """Write the model's values under the names of a checkpoint; the file is there as a whole or not
    at all.

    Raises:
        CheckpointError: It could not be written; what was at the path before still is.
    """
    from safetensors.torch import save_file

    own = _tensors(model)
    values: dict[str, Tensor] = {}
    seen: set[int] = set()
    for name in like.names:
        value = own[name].detach().cpu()
        shared = value.numel() > 0 and value.untyped_storage().data_ptr() in seen
        values[name] = value.clone() if shared or not value.is_contiguous() else value
        seen.add(value.untyped_storage().data_ptr())
    try:
        with replacing(path) as new:
            save_file(
                {k: v.contiguous() for k, v in values.items()},
                new,
                metadata={"format": "pt"} | like.metadata,
            )
    except Exception as error:
        raise CheckpointError(f"{path} could not be written: {error}") from error


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """The state_dict without what modules keep in it besides tensors."""
    return {
        name: value
        for name, value in model.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor)
    }


def refuse_other_format(path: Path) -> None:
    """Raise where a name promises torch's own format."""
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise CheckpointError(
            f"--out writes safetensors, which torch.load cannot read: name it "
            f"{path.with_suffix('.safetensors')}, and load it by safetensors.torch.load_file."
        )


def refuse_to_overwrite(path: Path, force: bool) -> None:
    """Raise before any work is done if the path cannot or may not be written."""
    if not path.parent.is_dir():
        raise CheckpointError(f"There is no folder {path.parent}.")
    refuse_special(path)
    if os.path.lexists(path) and not force:
        raise CheckpointError(f"{path} exists: choose another name, or --force to replace it.")
