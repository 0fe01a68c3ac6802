"""What optimizers hold, however it is nested: other optimizers, and tensors of the weights' shapes
that lie beside the state of each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Sampler

from ..capture.contents import walk
from ..distributed.sharding import is_sharded, local
from ..memory import storage_of

LEVELS = 6  # of containers and objects in each other
# Modules and tensors are looked at as they are, and other optimizers by themselves; the rest is
# code, or data.
CLOSED = (
    *(Tensor, nn.Module, torch.optim.Optimizer),
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(DataLoader, Dataset, Sampler),
)
STANDARD = ("state", "param_groups", "defaults")  # attributes of every optimizer
HOOKS = "_optimizer_"  # with which their names begin


def with_inner(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """An optimizer and those that it holds, each behind the one that holds it: Lookahead,
    ZeroRedundancyOptimizer and accelerate's hold one, containers several.
    """
    found = [optimizer]
    for one in found:  # grows while it is gone through
        held = _inside(value for _, value in _attributes(one))
        known = set(map(id, found))
        found += [
            other
            for other in held
            if isinstance(other, torch.optim.Optimizer) and id(other) not in known
        ]
    return found


def list_aside(optimizer: torch.optim.Optimizer, known: Iterable[Tensor]) -> list[str]:
    """Where an optimizer keeps tensors of its parameters' shapes, or all of its parameters in one
    row, other than by parameter: the slow weights of a Lookahead, say.

    Args:
        optimizer: Those that it holds are looked at by themselves.
        known: Tensors that move along, or stay, whoever else holds them.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    own = {id(parameter): parameter for group in groups for parameter in group}.values()
    shapes = {parameter.shape for parameter in own if parameter.dim()}
    rows = (sum(p.numel() for p in some) for some in (*groups, own) if len(some) > 1)
    shapes |= {torch.Size((length,)) for length in rows}
    by_parameter = (state for owner, state in optimizer.state.items() if isinstance(owner, Tensor))
    gradients = (parameter.grad for parameter in own if parameter.grad is not None)
    memories = set(map(_memory, (*own, *gradients, *known, *_tensors_in(by_parameter))))
    held: list[tuple[Any, Any]] = list(_attributes(optimizer))
    held += [(key, value) for key, value in optimizer.state.items() if not isinstance(key, Tensor)]
    held += [
        (key, value)
        for group in optimizer.param_groups
        for key, value in group.items()
        if key != "params"
    ]
    found = {
        str(name)
        for name, value in held
        if any(
            tensor.shape in shapes
            and tensor.dtype.is_floating_point
            and _memory(tensor) not in memories
            for tensor in _tensors_in([value])
        )
    }
    return sorted(found)


def _inside(values: Iterable[Any]) -> Iterator[Any]:
    """Some values and what lies in them, but not in modules, tensors and optimizers."""
    return walk(values, closed=lambda value: isinstance(value, CLOSED), levels=LEVELS)


def _attributes(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """What an optimizer has beside that which every one has."""
    for name, value in vars(optimizer).items():
        if name not in STANDARD and not name.startswith(HOOKS):
            yield name, value


def _memory(tensor: Tensor) -> int:
    """What tells its memory from others'; of a tensor without any, itself."""
    return storage_of(local(tensor) if is_sharded(tensor) else tensor) or id(tensor)


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors inside of some values, and the parameters of modules there."""
    for value in _inside(values):
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, nn.Module):
            yield from value.parameters()
