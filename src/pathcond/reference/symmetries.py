"""The true number of rescaling symmetries, as a numerical rank; `find_symmetry` is held against
it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from ..capture.isolation import replaced
from ..capture.models import Inputs, as_call

BATCH_NORMS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
OTHER_NORMS = (nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
CONVOLUTIONS = nn.modules.conv._ConvNd


class _Differentiable(TorchFunctionMode):
    """LeakyReLU in place of ReLU (as homogeneous, but nothing is ever dead); norms that are
    differentiable in their statistics.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        clamps_at_zero = func in (torch.clamp, Tensor.clamp) and (
            args[1:] == (0,) or kwargs == {"min": 0}
        )
        if clamps_at_zero or func in (torch.relu, torch.relu_, Tensor.relu, Tensor.relu_, F.relu):
            return F.leaky_relu(args[0], 0.3)
        if func in (F.batch_norm, F.instance_norm):
            options = (
                dict(zip(("input", "running_mean", "running_var"), args, strict=False)) | kwargs
            )
            return _norm(**options, axes=[2, 3, 4] if func is F.instance_norm else [0, 2, 3, 4])
        return func(*args, **kwargs)


def _norm(
    input: Tensor,
    running_mean: Any,
    running_var: Any,
    weight: Any,
    bias: Any,
    eps: float,
    axes: list[int],
    training: bool = False,
    use_input_stats: bool = False,
    **_: Any,
) -> Tensor:
    """BatchNorm or InstanceNorm by the definition, differentiable in everything, ε = 0 allowed."""
    shape = (-1, *[1] * (input.dim() - 2))
    if training or use_input_stats:
        variance, mean = torch.var_mean(
            input, [axis for axis in axes if axis < input.dim()], correction=0, keepdim=True
        )
    else:
        mean = running_mean.view(shape)
        variance = running_var.view(shape)
    y = (input - mean) / (variance + eps).sqrt()
    y = y if weight is None else y * weight.view(shape)
    return y if bias is None else y + bias.view(shape)


def count_symmetries(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    normalization: str = "batch",
    samples: int = 4,
    seed: int = 0,
) -> int:
    """The true number of independent diagonal rescalings that keep the function, as a numerical
    rank.

    With R the row and column generators of all parameters (per group for grouped convolutions) and
    J(θ) the Jacobian of the outputs, a combination R·c is a symmetry if J(θ)·diag(θ)·R·c = 0 for
    all θ; one θ is not enough, so random ones are stacked until the rank stands still:

        count = rank(R) − rank(stack of J(θ_k)·diag(θ_k)·R)

    Elements that no output depends on (a key's bias, which softmax cancels) are left out. ε of
    LayerNorm and its kin is set to 0.1, so that invariance up to ε does not pass for a symmetry.
    Coordinates are the parameters and, for BatchNorm, the running mean and σ = √(var + ε). Rows
    come from eval mode and from train mode with ε = 0. "absorb" drops γ and β from R, "batch"
    those of norms without running statistics, "gain" mean and σ, "paper" γ, σ and the train rows.
    The direction of a weight norm, whose own scale cancels, is dropped always.

    Args:
        model: A small network; it is copied.
        example_inputs: Gives shapes and types; floating-point inputs are drawn anew.
        normalization: As in ``find_symmetry``.
        samples: Least number of random θ.
        seed: Of the random θ and inputs.
    """
    model = copy.deepcopy(model).double()
    for module in model.modules():
        own_statistics = isinstance(module, BATCH_NORMS) and module.running_var is None
        if (
            own_statistics
            or isinstance(module, OTHER_NORMS)
            or type(module).__name__.endswith("RMSNorm")
        ):
            setattr(module, "eps", 0.1)  # noqa: B010
    generator = torch.Generator().manual_seed(seed)
    coordinates = _coordinates(model)
    sizes = {name: tensor.shape for name, tensor in coordinates.items()}
    generators = _generators(model, sizes, _find_dropped(model, sizes, normalization))
    modes = (False,) if normalization == "paper" else (False, True)
    influence = torch.zeros(generators.shape[0], dtype=torch.float64)
    stacked = torch.zeros(0, generators.shape[1], dtype=torch.float64)
    ranks: list[int] = []
    while len(ranks) < samples or ranks[-1] != ranks[-3]:
        theta = {
            name: _draw(shape, generator, positive=name.endswith("#sigma"))
            for name, shape in sizes.items()
        }
        inputs = tree_map(lambda x: _redraw(x, generator), example_inputs)
        flat_theta = torch.cat([theta[name].flatten() for name in sizes])
        for training in modes:
            jacobian = _jacobian(model, theta, inputs, training)
            influence = torch.maximum(influence, jacobian.abs().amax(0))
            rows = (jacobian * flat_theta) @ generators
            stacked = torch.cat([stacked, rows / rows.norm(dim=1, keepdim=True).clamp(min=1e-12)])
        # Only the row space matters: an orthonormal basis of it keeps the stack small.
        _, values, basis = torch.linalg.svd(stacked, full_matrices=False)
        kept = values > 1e-8 * values[0]
        stacked = values[kept, None] * basis[kept]
        ranks.append(int(kept.sum()))
    alive = generators[influence > 1e-10 * influence.max()]
    return _rank(alive.T @ alive) - ranks[-1]


def _coordinates(model: nn.Module) -> dict[str, Tensor]:
    """Parameters, and "prefix#mean", "prefix#sigma" of every norm with running statistics."""
    coordinates = {name: parameter.detach() for name, parameter in model.named_parameters()}
    for prefix, module in model.named_modules():
        if isinstance(module, BATCH_NORMS) and module.running_var is not None:
            assert module.running_mean is not None
            coordinates[f"{prefix}#mean"] = module.running_mean
            coordinates[f"{prefix}#sigma"] = module.running_var
    return coordinates


def _find_dropped(model: nn.Module, names: Any, normalization: str) -> set[str]:
    """Coordinates that the policy does not let move."""
    gains = set()
    biases = set()
    without_statistics = set()
    for prefix, module in model.named_modules():
        if isinstance(module, BATCH_NORMS + OTHER_NORMS) or type(module).__name__.endswith(
            "RMSNorm"
        ):
            gains.add(f"{prefix}.weight")
            biases.add(f"{prefix}.bias")
            if getattr(module, "running_var", None) is None:
                without_statistics |= {f"{prefix}.weight", f"{prefix}.bias"}
    directions = {name for name in names if name.endswith((".weight_v", "weight.original1"))}
    means, sigmas = ({name for name in names if name.endswith(end)} for end in ("#mean", "#sigma"))
    held = {
        "absorb": gains | biases,
        "gain": means | sigmas,
        "full": set(),
        "batch": without_statistics,
        "paper": gains | sigmas,
    }
    return held[normalization] | directions


def _generators(model: nn.Module, sizes: dict[str, torch.Size], dropped: set[str]) -> Tensor:
    """R, one column per generator: the indicator of a row or column of one parameter."""
    convolutions = {
        f"{prefix}.weight": m for prefix, m in model.named_modules() if isinstance(m, CONVOLUTIONS)
    }
    columns = []
    offset = 0
    total = sum(shape.numel() for shape in sizes.values())
    for name, shape in sizes.items():
        index = torch.arange(offset, offset + shape.numel()).view(shape)
        offset += shape.numel()
        if name in dropped:
            continue
        if name in convolutions:
            groups = convolutions[name].groups
            slices = list(index.unbind(0))
            slices += [column for part in index.chunk(groups, 0) for column in part.unbind(1)]
        elif index.dim() <= 1:
            slices = list(index.reshape(-1))
        # a line of elements along each axis: rows and columns of a matrix, of each matrix in a
        # batch
        else:
            slices = [
                line
                for axis in range(index.dim())
                for line in index.movedim(axis, -1).reshape(-1, index.shape[axis])
            ]
        for members in slices:
            column = torch.zeros(total, dtype=torch.float64)
            column[members.reshape(-1)] = 1
            columns.append(column)
    return torch.stack(columns, 1)


def _draw(shape: torch.Size, generator: torch.Generator, *, positive: bool) -> Tensor:
    """Random values away from zero, of the size that keeps a layer's output of order one."""
    magnitude = torch.rand(shape, generator=generator, dtype=torch.float64) + 0.5
    if positive:
        return magnitude
    sign = torch.randint(0, 2, shape, generator=generator).double() * 2 - 1
    fan_in = shape[1:].numel() if len(shape) > 1 else 1
    return sign * magnitude / max(1, fan_in) ** 0.5


def _redraw(x: Any, generator: torch.Generator) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return x


def _jacobian(
    model: nn.Module, theta: dict[str, Tensor], example_inputs: Inputs, training: bool
) -> Tensor:
    """∂ outputs / ∂ coordinates, (outputs, coordinates)."""
    args, kwargs = as_call(example_inputs)
    epsilons = {
        m: m.eps
        for m in model.modules()
        if isinstance(m, BATCH_NORMS) and m.running_var is not None
    }
    prefixes = {
        f"{prefix}#": module for prefix, module in model.named_modules() if module in epsilons
    }

    def forward(flat: Tensor) -> Tensor:
        values: dict[str, Tensor] = {}
        offset = 0
        for name, tensor in theta.items():
            part = flat[offset : offset + tensor.numel()].view(tensor.shape)
            offset += tensor.numel()
            if name.endswith("#mean"):
                values[name.replace("#mean", ".running_mean").lstrip(".")] = part
            elif name.endswith("#sigma"):
                module = prefixes[name.removesuffix("sigma")]
                values[name.replace("#sigma", ".running_var").lstrip(".")] = (
                    part.square() - epsilons[module]
                )
            else:
                values[name] = part
        if training:  # batch statistics only; running ones would be updated in place
            values = {
                name: v
                for name, v in values.items()
                if not name.endswith(("running_mean", "running_var"))
            }
        with _Differentiable(), replaced(model, values):
            outputs = model(*args, **kwargs)
        tensors = [
            out.reshape(-1)
            for out in tree_leaves(outputs)
            if isinstance(out, Tensor) and out.is_floating_point()
        ]
        return torch.cat(tensors)

    flat = torch.cat([tensor.flatten() for tensor in theta.values()]).requires_grad_()
    model.train(training)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for module in epsilons:
            module.eps = 0.0 if training else epsilons[module]
        return _rows(forward, flat)
    finally:
        for module, eps in epsilons.items():
            module.eps = eps
        for name, buffer in model.named_buffers():
            buffer.data.copy_(buffers[name])


def _rows(forward: Callable[[Tensor], Tensor], flat: Tensor, most: int = 64) -> Tensor:
    """Jacobian rows by reverse mode, of random combinations of the outputs if there are many."""
    outputs = forward(flat)
    if outputs.numel() > most:
        generator = torch.Generator().manual_seed(0)
        weights = torch.randn(most, outputs.numel(), generator=generator, dtype=torch.float64)
    else:
        weights = torch.eye(outputs.numel(), dtype=torch.float64)
    rows = [torch.autograd.grad(outputs, flat, w, retain_graph=True)[0] for w in weights]
    return torch.stack(rows)


def _rank(gram: Tensor) -> int:
    values = torch.linalg.eigvalsh(gram)
    return int((values > 1e-9 * values[-1]).sum())
