"""The gates that a path passes, and their values on a real forward pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map

from ..capture.models import Inputs, as_call
from ..capture.nodes import Graph, Node

MAX_POOLS = {"max_pool1d": F.max_pool1d, "max_pool2d": F.max_pool2d, "max_pool3d": F.max_pool3d}


@dataclass(frozen=True, kw_only=True)
class Gate:
    """A factor of a path that depends on the data: 1 or 0 for a ReLU or a choice, 1 or the slope
    for LeakyReLU, ±1 for abs.

    Attributes:
        node: The operation, by its name in the graph.
        element: Flat position in the operation's result.
        choice: For max-pooling, flat position in its input of the entry that must be the winner;
            else None.
    """

    node: str
    element: int
    choice: int | None = None


def slopes(node: Node, x: Tensor) -> Tensor | None:
    """What an activation multiplies each element of its input with; None if it is no piecewise
    linear activation.

    At exactly zero the slope is that of the negative side (0 for abs): no value depends on it.
    """
    if node.op in ("relu", "clamp", "clamp_min"):
        return (x > 0).double()
    if node.op == "leaky_relu":
        positive = (x > 0).double()
        return positive + (1 - positive) * float(node.bound["negative_slope"])
    if node.op == "abs":
        return x.sign().double()
    return None


def winners(node: Node, x: Tensor) -> Tensor:
    """Flat position in the pool's input of the entry that each window chooses (one of equals); the
    shape of the result.
    """
    a = node.bound
    pool: Any = MAX_POOLS[node.op]
    within: Tensor
    _, within = pool(
        x,
        a["kernel_size"],
        a["stride"] or None,
        a["padding"],
        a["dilation"],
        a["ceil_mode"],
        return_indices=True,
    )
    spatial = int(node.op[-2])  # max_pool2d
    plane = x.shape[-spatial:].numel()
    first = torch.arange(0, x.numel(), plane).view(*x.shape[:-spatial], *[1] * spatial)
    return within + first


def gate_values(graph: Graph, model: nn.Module, inputs: Inputs) -> dict[str, Tensor]:
    """Run the graph on real inputs; for each operation with gates, its slopes or its winners, flat.

    Args:
        graph: Captured from the model in eval mode.
        model: Gives the parameters.
        inputs: As the example inputs of the capture, with the same shapes.
    """
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    given = iter(tree_leaves(as_call(inputs)))
    values: dict[Node, Any] = {}
    gates: dict[str, Tensor] = {}
    for node in graph.nodes:
        if node.target is None:
            leaf: Any = (
                parameters[node.name]
                if node.op == "parameter"
                else next(given)
                if node.op == "input"
                else node.value
            )
            if tuple(leaf.shape) != tuple(node.shape):
                raise ValueError(
                    f"{node.name} has shape {tuple(leaf.shape)}; the paths were "
                    f"listed for {tuple(node.shape)}"
                )
            values[node] = leaf.clone()  # operations that write in place must not reach the model
            continue
        args, kwargs = fill_in((node.args, node.kwargs), values)
        if node.op in MAX_POOLS:
            gates[node.name] = winners(node, args[0]).flatten()
        elif (
            node.args
            and isinstance(args[0], Tensor)
            and (slope := slopes(node, args[0])) is not None
        ):
            gates[node.name] = slope.flatten()
        values[node] = node.target(*args, **kwargs)
    return gates


def fill_in(arguments: Any, values: dict[Node, Any]) -> Any:
    """Arguments of a call with every node replaced by its value."""
    return tree_map(
        lambda argument: values[argument] if isinstance(argument, Node) else argument, arguments
    )
