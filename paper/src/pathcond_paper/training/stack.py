"""Networks of one architecture as one: every parameter stacked along a first axis, (runs, ...).

A training step of small networks leaves a GPU mostly idle; stacked, many of them take little longer
than one.

>>> import torch
>>> stack = Stack([torch.nn.Linear(3, 2) for _ in range(4)])
>>> stack(torch.randn(4, 5, 3)).shape
torch.Size([4, 5, 2])
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from pathcond.symmetry.symmetry import Symmetry

Backend = str | Callable[..., Any]


class Stack:
    """Several networks, called with one batch each.

    Args:
        models: Of one architecture.
        compile_with: The backend of ``torch.compile`` for a network by itself, which runs as it is
            where that fails; None to try nothing.

    Attributes:
        runs: How many.
        parameters, buffers: By name, (runs, ...) each.
    """

    def __init__(self, models: Sequence[nn.Module], *, compile_with: Backend | None = None) -> None:
        self.runs = len(models)
        stacked, self.buffers = stack_module_state(list(models))
        # Copies, or a stack of one would share its memory with the network
        self.parameters: dict[str, Tensor] = {
            name: p.detach().clone().requires_grad_() for name, p in stacked.items()
        }
        self._template = copy.deepcopy(models[0]).to("meta")
        self._alone: Callable[..., Tensor] = self._one
        if compile_with is not None and self.runs == 1:
            self._alone = _compiled(self._one, compile_with)

    def train(self, mode: bool = True) -> None:
        """Train or eval mode, for all."""
        self._template.train(mode)

    def __call__(self, x: Tensor, *, shared: bool = False) -> Tensor:
        """Outputs, (runs, batch, ...), of one batch for each, (runs, batch, ...), or of a shared
        one, (batch, ...).
        """
        # as the network itself: convolutions stay ungrouped, and images may lie as they like them
        if self.runs == 1:
            parameters = {name: tensor.squeeze(0) for name, tensor in self.parameters.items()}
            buffers = {name: tensor.squeeze(0) for name, tensor in self.buffers.items()}
            x = x if shared else x.squeeze(0)
            x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
            return self._alone(parameters, buffers, x).unsqueeze(0)
        outputs: Tensor = vmap(self._one, in_dims=(0, 0, None if shared else 0))(
            self.parameters, self.buffers, x
        )
        return outputs

    def _one(self, parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        outputs: Tensor = functional_call(self._template, (parameters, buffers), (x,))
        return outputs

    def tensors(self) -> list[Tensor]:
        """All that training changes."""
        return [*self.parameters.values(), *self.buffers.values()]

    def network(self, run: int) -> nn.Module:
        """One of the networks as a module; its tensors are parts of the stack, so what changes one
        changes the other.
        """
        module = copy.deepcopy(self._template)
        for name, stacked in self.parameters.items():
            owner, _, leaf = name.rpartition(".")
            setattr(module.get_submodule(owner), leaf, nn.Parameter(stacked.detach()[run]))
        for name, stacked in self.buffers.items():
            owner, _, leaf = name.rpartition(".")
            module.get_submodule(owner).register_buffer(leaf, stacked[run])
        return module


def _compiled(function: Callable[..., Tensor], backend: Backend) -> Callable[..., Tensor]:
    """The function compiled for every size that it is called with; as it is where that fails."""
    torch.compiler.reset()  # torch keeps eight versions of a function: none of earlier stacks
    compiled = torch.compile(function, backend=backend, dynamic=False)

    def call(*arguments: Any) -> Tensor:
        with torch._dynamo.config.patch(suppress_errors=True):
            return compiled(*arguments)

    return call


@dataclass(frozen=True)
class Layer:
    """Hidden units between two weights of a chain.

    Attributes:
        into, out: Names of the weights that make the units (along axis 0) and that read them (along
            axis 1).
        followers: Names of the vectors that are scaled along: biases, means of a BatchNorm.
    """

    into: str
    out: str
    followers: tuple[str, ...]


class Balance:
    """One cycle of ENorm (p = 2, c = 1) on the first networks of a stack, as ``ENorm()`` makes one
    on a network by itself.

    Unit by unit λ⁴ = ‖row out‖² / ‖row in‖², layer by layer (``sec:appendix_enorm``); all of it
    runs on the device, so that a CUDA graph can hold it. Chains only.
    """

    def __init__(self, symmetry: Symmetry) -> None:
        self.layers = [
            layer
            for layer in map(_Chain(symmetry).layer, range(len(symmetry.groups)))
            if layer is not None
        ]

    @torch.no_grad()
    def cycle_(self, stack: Stack, runs: slice) -> None:
        """Rescale the networks of these runs, in place."""
        tensors = {
            name: tensor[runs]
            for held in (stack.parameters, stack.buffers)
            for name, tensor in held.items()
        }
        for layer in self.layers:
            into, out = tensors[layer.into], tensors[layer.out]
            # (runs, units)
            norms_in = torch.linalg.vector_norm(into, dim=list(range(2, into.dim())))
            norms_out = torch.linalg.vector_norm(
                out, dim=[axis for axis in range(1, out.dim()) if axis != 2]
            )
            scale = torch.where(
                (norms_in > 0) & (norms_out > 0), (norms_out / norms_in).sqrt(), 1.0
            )
            into.mul_(scale.view(*scale.shape, *[1] * (into.dim() - 2)))
            out.div_(scale.view(scale.shape[0], 1, scale.shape[1], *[1] * (out.dim() - 3)))
            for name in layer.followers:
                tensors[name].mul_(scale)


class _Chain:
    """Reads the layers of a chain from its Symmetry."""

    def __init__(self, symmetry: Symmetry) -> None:
        self.symmetry = symmetry
        self.weights = {
            name for name, scaling in symmetry.scalings.items() if len(scaling.shape) > 1
        }

    def layer(self, index: int) -> Layer | None:
        """The layer of one group of units; None for the last, which ENorm leaves alone."""
        group = self.symmetry.groups[index]
        into, out = (
            [name for name in names if name in self.weights]
            for names in (group.multiplied, group.divided)
        )
        others = [name for name in group.divided if name not in self.weights]
        rows = [self.symmetry.scalings[name].shape[0] for name in into]
        columns = [self.symmetry.scalings[name].shape[1] for name in out]
        if others or rows != [len(group.units)] or columns != [len(group.units)]:
            raise ValueError(
                "Only chains of layers are balanced in a stack; the units of "
                f"{group.name} have {into} and {out}"
            )
        if not bool(self.symmetry.scalings[out[0]].plus.any()):
            return None
        return Layer(
            into[0], out[0], tuple(name for name in group.multiplied if name not in self.weights)
        )
