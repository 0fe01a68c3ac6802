"""Whether a model's weights and an example batch can be used; what cannot is named in a
sentence.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_flatten_with_path

from ..distributed.sharding import local
from ..errors import UnsupportedModelError, refuse
from ..memory import has_memory
from ..numerics import ceilings, minima
from .contents import walk

STATISTICS = ("running_mean", "running_var")


def require_usable(args: tuple, kwargs: dict[str, Any]) -> None:
    """Refuse a batch without samples, with NaN or with infinities. All findings in one error.

    −∞ is allowed beside other inputs, because additive attention masks hold it.

    Args:
        args, kwargs: Positional and keyword inputs of one forward call.

    Raises:
        UnsupportedModelError: It names the inputs.
    """
    named = _named_tensors(args, kwargs)
    found = _inside_objects(args, kwargs)
    found += [
        f"{name}{_shape_of(tensor)} is {_describe_kind(tensor)}: give dense tensors"
        for name, tensor in named.items()
        if not has_memory(local(tensor))
    ]
    if not found and named and not any(tensor.numel() for tensor in named.values()):
        shapes = ", ".join(f"{name} {tuple(tensor.shape)}" for name, tensor in named.items())
        found.append(
            f"it is empty ({shapes}): give at least one sample, or two if the model has a BatchNorm"
        )
    floating = {
        name: tensor
        for name, tensor in named.items()
        if tensor.dtype.is_floating_point and tensor.numel() and not tensor.is_meta
        if has_memory(local(tensor))
    }
    for name, tensor in floating.items():
        if bool(tensor.isnan().any()):
            found.append(f"{name} {tuple(tensor.shape)} holds {int(tensor.isnan().sum())} NaN")
        elif bool((tensor == math.inf).any()) or (len(named) == 1 and bool(tensor.isinf().any())):
            found.append(
                f"{name} {tuple(tensor.shape)} holds {int(tensor.isinf().sum())} infinities"
            )
    if found:
        raise UnsupportedModelError(
            "The example batch cannot be used:\n  - " + "\n  - ".join(found)
        )


def unusable_weights(model: nn.Module) -> list[str]:
    """What is wrong with a model's parameters and running statistics, a sentence each."""
    parameters = {n: p for n, p in model.named_parameters() if p.dtype.is_floating_point}
    statistics = {n: b for n, b in model.named_buffers() if n.endswith(STATISTICS)}
    tensors = {n: local(t) for n, t in (parameters | statistics).items() if not t.is_meta}
    unreadable = [
        f"{name} {tuple(tensor.shape)} is {_describe_kind(tensor)}: its entries cannot be read and "
        "written one by one"
        for name, tensor in tensors.items()
        if not has_memory(tensor)
    ]
    if unreadable:
        return unreadable
    not_finite = [
        f"{name} {tuple(tensors[name].shape)} has NaN or infinite values: repair or reload it first"
        for name, ceiling in zip(tensors, ceilings(list(tensors.values())), strict=True)
        if not math.isfinite(ceiling)
    ]
    return not_finite + negative_variances(model)


def negative_variances(model: nn.Module) -> list[str]:
    """Running variances that are none, a sentence each."""
    held = {
        name: buffer
        for name, buffer in model.named_buffers()
        if name.endswith("running_var") and buffer.numel() and not buffer.is_meta
    }
    found = []
    for (name, buffer), least in zip(held.items(), minima(list(held.values())), strict=True):
        if least < 0:
            at = int((buffer < 0).flatten().nonzero()[0])
            value = float(buffer.flatten()[at])
            found.append(
                f"{name}[{at}] is {value:.3g}, a negative variance: repair or reload it first"
            )
    return found


def refuse_unusable_weights(model: nn.Module) -> None:
    """Raise with all that ``unusable_weights`` finds."""
    refuse(unusable_weights(model))


def differing_types(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> str:
    """A sentence on a floating-point input of another type than all parameters, or nothing.

    Many models convert their inputs, so that this only explains why one has failed.
    """
    types = {p.dtype for p in model.parameters() if p.dtype.is_floating_point}
    named = {
        name: t for name, t in _named_tensors(args, kwargs).items() if t.dtype.is_floating_point
    }
    others = {name: tensor for name, tensor in named.items() if tensor.dtype not in types}
    if not types or not others:
        return ""
    name, tensor = next(iter(others.items()))
    own = ", ".join(sorted(map(str, types)))
    return (
        f"{name[0].upper()}{name[1:]} is {tensor.dtype} and the model's parameters are {own}: "
        "convert one of them."
    )


def _shape_of(tensor: Tensor) -> str:
    """The shape, behind a name; nested tensors of the older layout have none."""
    return "" if tensor.is_nested else f" {tuple(tensor.shape)}"


def _describe_kind(tensor: Tensor) -> str:
    """What a tensor is whose elements do not lie in memory one by one."""
    if tensor.is_nested:
        return "nested"
    return "sparse" if tensor.layout != torch.strided else f"of class {type(tensor).__name__}"


def _inside_objects(args: tuple, kwargs: dict[str, Any]) -> list[str]:
    """A sentence for each input that is an object with tensors inside: those cannot be told from
    constants.
    """
    inputs: dict[Any, Any] = dict(enumerate(args)) | kwargs
    leaves = {key: tree_flatten(value)[0] for key, value in inputs.items()}
    return [
        f"input {key} has tensors inside of a {type(leaf).__name__}: pass them as inputs of their "
        "own, or register the class (torch.export.register_dataclass)"
        for key, parts in leaves.items()
        for leaf in parts
        if not isinstance(leaf, Tensor)
        and not callable(leaf)
        and any(
            isinstance(part, Tensor)
            for part in walk([leaf], closed=lambda part: isinstance(part, nn.Module))
        )
    ]


def _named_tensors(args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
    """All tensors of a batch, by position or keyword."""
    inputs: dict[Any, Any] = dict(enumerate(args)) | kwargs
    return {
        f"input {key}" + "".join(map(str, path)): leaf
        for key, value in inputs.items()
        for path, leaf in tree_flatten_with_path(value)[0]
        if isinstance(leaf, Tensor)
    }
