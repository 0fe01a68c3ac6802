"""Tensors of which each process holds a part (DTensor, as ``fully_shard`` makes them).

``fully_shard`` cuts every parameter along an axis into one piece per process, the last ones smaller
or empty where the length does not divide. Pieces are rescaled where they are; a whole parameter
exists only while it is being looked at.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedModelError


def is_sharded(tensor: Any) -> bool:
    """Whether a tensor is a DTensor. Only a program that has imported them can hold one."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def sharded_parameters(model: nn.Module) -> dict[str, Any]:
    """The parameters of which this process holds a part only, by name."""
    return {
        name: parameter for name, parameter in model.named_parameters() if is_sharded(parameter)
    }


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor; writing to it writes to the tensor."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined, no-any-return]


def gather(tensor: Tensor) -> Tensor:
    """The whole tensor; every process must ask for it at once."""
    if not is_sharded(tensor):
        return tensor.detach()
    with torch.no_grad():
        return tensor.full_tensor()  # type: ignore[attr-defined, no-any-return]


def cut(value: Tensor, tensor: Tensor) -> Tensor:
    """The part of ``value``, which broadcasts to the whole tensor, that belongs to what this
    process holds of it.
    """
    if not is_sharded(tensor):
        return value
    ahead = tensor.dim() - value.dim()
    for axis, (start, length) in enumerate(_place(tensor)[ahead:]):
        if value.shape[axis] == tensor.shape[axis + ahead]:  # or it is broadcast along this axis
            value = value.narrow(axis, start, length)
    return value


def shard_like(value: Tensor, tensor: Any) -> Tensor:
    """``value``, known as a whole to every process, sharded as the tensor is."""
    if not is_sharded(tensor):
        return value
    from torch.distributed.tensor import DTensor

    part = cut(value, tensor).clone()  # or the whole would stay in memory
    return DTensor.from_local(
        part,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=value.shape,
        stride=value.contiguous().stride(),
    )


def counts_here(tensor: Any, rank: int) -> bool:
    """Of the processes that hold the same part of a tensor, whether this is the one that counts it
    in sums over all of them.
    """
    if not is_sharded(tensor):
        return rank == 0
    coordinate = tensor.device_mesh.get_coordinate()
    return all(
        at == 0
        for at, placement in zip(coordinate, tensor.placements, strict=True)
        if placement.is_replicate()
    )


def mesh_group(parameters: dict[str, Any]) -> Any:
    """The processes that hold the parts of these parameters.

    Raises:
        UnsupportedModelError: They are spread in a way that is not followed.
    """
    found = []
    for name, parameter in parameters.items():
        kinds = {type(placement).__name__ for placement in parameter.placements} - {
            "Shard",
            "Replicate",
        }
        if kinds:
            found.append(
                f"{name} is placed as {parameter.placements}: only Shard and Replicate "
                "are understood"
            )
    meshes = {id(p.device_mesh): p.device_mesh for p in parameters.values()}
    first = next(iter(meshes.values()))
    whole = all(mesh.size() == torch.distributed.get_world_size() for mesh in meshes.values())
    if not whole and (first.ndim > 1 or any(mesh != first for mesh in meshes.values())):
        found.append(
            "parameters lie on meshes of "
            f"{[tuple(mesh.shape) for mesh in meshes.values()]} processes, not on one"
        )
    if found:
        raise UnsupportedModelError(
            "This sharded model cannot be rescaled:\n  - " + "\n  - ".join(found[:10])
        )
    return torch.distributed.group.WORLD if whole else first.get_group()


def reshard(model: nn.Module) -> None:
    """Give back what a forward pass has gathered; ``fully_shard`` keeps the root's parameters whole
    until a backward pass.
    """
    for module in _shards(model):
        state = module._get_fsdp_state()
        for part in (state, getattr(state, "_fsdp_param_group", None)):
            running = getattr(part, "_training_state", None)
            if (
                getattr(running, "name", "") == "FORWARD"
            ):  # a forward pass that raised has left it there, and would keep what it has
                part._training_state = type(running).IDLE  # type: ignore[union-attr]
        module.reshard()


def has_unreduced_gradients(model: nn.Module) -> bool:
    """Whether ``fully_shard`` holds gradients of whole parameters that wait to be summed over the
    processes.
    """
    for module in _shards(model):
        group = getattr(module._get_fsdp_state(), "_fsdp_param_group", None)
        for parameter in group.fsdp_params if group is not None else ():
            whole = getattr(parameter, "_unsharded_param", None)
            if (
                getattr(whole, "grad", None) is not None
                or getattr(parameter, "unsharded_accumulated_grad", None) is not None
            ):
                return True
    return False


def computes_in(model: nn.Module) -> set[torch.dtype]:
    """The types in which ``fully_shard`` runs a model: those of its mixed-precision policies."""
    groups = [
        getattr(module._get_fsdp_state(), "_fsdp_param_group", None) for module in _shards(model)
    ]
    found = {group.mp_policy.param_dtype for group in groups if group is not None}
    return {dtype for dtype in found if dtype is not None}


def original_class(module: nn.Module) -> type:
    """The class a module had before ``fully_shard`` put a subclass of its own in its place."""
    cls = type(module)
    if not hasattr(module, "_get_fsdp_state"):
        return cls
    return next(base for base in cls.__mro__[1:] if not base.__name__.startswith("FSDP"))


def _shards(model: nn.Module) -> list[Any]:
    """The modules that ``fully_shard`` was called on."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return []
    return [module for module in model.modules() if hasattr(module, "_get_fsdp_state")]


def _place(tensor: Any) -> list[tuple[int, int]]:
    """(first, number) of the positions along every axis that this process holds."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return [
        (min(int(start), size), int(length))
        for start, length, size in zip(offset, shape, tensor.shape, strict=True)
    ]
