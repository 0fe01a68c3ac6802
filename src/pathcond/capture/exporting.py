"""torch.export -> Graph: for what is better not run, and what a run cannot follow. The only file
that knows torch.export.
"""

from __future__ import annotations

import operator
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind

from ..errors import UnsupportedModelError
from .models import canonical_names
from .nodes import (
    Graph,
    Node,
    alive,
    called_parameters,
    op_name,
    place_of,
    type_of,
)


def export_graph(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    training: bool,
    draws: AbstractContextManager[Any],
) -> Graph:
    """Follow one call with fake tensors.

    Args:
        model: In the mode to capture.
        args, kwargs: Of the call.
        training: That mode.
        draws: Entered while the model runs: sees every call, to count or replace random numbers.
    """
    with draws:
        program = torch.export.export(model, args, kwargs, strict=False)
    return _read(program, model, training)


def _read(program: torch.export.ExportedProgram, model: nn.Module, training: bool) -> Graph:
    names = canonical_names(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(
        model.named_buffers(remove_duplicate=False)
    )
    leaves: dict[str, Node] = {}
    nodes: list[Node] = []
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    def leaf(fx_node: torch.fx.Node) -> Node:
        spec = specs[fx_node.name]
        shape, dtype = type_of(fx_node.meta.get("val"))
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            name = names[spec.target]
            if name not in leaves:  # tied names are one leaf
                kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
                value = None if kind == "parameter" else tensors[name]
                leaves[name] = Node(name=name, op=kind, shape=shape, dtype=dtype, value=value)
                nodes.append(leaves[name])
            return leaves[name]
        if spec.kind is InputKind.CONSTANT_TENSOR:
            # A tensor that is an attribute of a module but no buffer, or a literal in forward.
            return add(
                Node(
                    name=spec.target,
                    op="constant",
                    shape=shape,
                    dtype=dtype,
                    value=program.constants[spec.target],
                )
            )
        return add(Node(name=fx_node.name, op="input", shape=shape, dtype=dtype))

    def add(node: Node) -> Node:
        nodes.append(node)
        return node

    def walk(graph_module: torch.fx.GraphModule, inputs: list[Any] | None, prefix: str) -> Any:
        made: dict[torch.fx.Node, Any] = {}
        placeholders = iter(inputs or [])
        for fx_node in graph_module.graph.nodes:
            args = torch.fx.node.map_arg(fx_node.args, lambda n: made[n])
            kwargs = torch.fx.node.map_arg(fx_node.kwargs, lambda n: made[n])
            if fx_node.op == "placeholder":
                made[fx_node] = next(placeholders) if inputs is not None else leaf(fx_node)
            elif fx_node.op == "get_attr":
                made[fx_node] = operator.attrgetter(fx_node.target)(graph_module)
                if isinstance(made[fx_node], Tensor):
                    value = made[fx_node]
                    made[fx_node] = add(
                        Node(
                            name=prefix + fx_node.name,
                            op="constant",
                            shape=tuple(value.shape),
                            dtype=value.dtype,
                            value=value,
                        )
                    )
            elif fx_node.op == "output":
                return args[0]
            # torch.export's own input guards: they compute nothing
            elif fx_node.op == "call_module":
                made[fx_node] = None
            elif isinstance(fx_node.target, torch._ops.HigherOrderOperator):
                made[fx_node] = inline(fx_node, args, prefix)
            elif fx_node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                made[fx_node] = args[0][args[1]]
            else:
                shape, dtype = type_of(fx_node.meta.get("val"))
                module, line = place_of(fx_node)
                made[fx_node] = add(
                    Node(
                        name=prefix + fx_node.name,
                        op=op_name(fx_node.target),
                        target=fx_node.target,
                        args=args,
                        kwargs=kwargs,
                        shape=shape,
                        dtype=dtype,
                        module=module,
                        line=line,
                    )
                )
        return None

    def inline(fx_node: torch.fx.Node, args: tuple, prefix: str) -> Any:
        """Blocks under no_grad or autocast are sub-graphs that run once: their calls join the
        list.
        """
        at = next((i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)), None)
        name = str(fx_node.target)
        wraps_once = "wrap_with_" in name
        if at is None or not wraps_once:
            raise UnsupportedModelError(
                f"The model uses {name} at {', '.join(place_of(fx_node))}: "
                "control flow that depends on the data cannot be analysed."
            )
        return walk(args[at], list(args[at + 1 :]), f"{prefix}{fx_node.name}.")

    returned = walk(program.graph_module, None, "")
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    # A buffer that forward updates must keep its scale too, so mutated buffers count as outputs.
    outputs = [
        out for kind, out in zip(kinds, returned, strict=True) if kind is not OutputKind.TOKEN
    ]
    to_user = [
        out for kind, out in zip(kinds, returned, strict=True) if kind is OutputKind.USER_OUTPUT
    ]
    return Graph(
        nodes=alive(nodes, outputs),
        outputs=tuple(outputs),
        returned=tuple(to_user),
        training=training,
        called=called_parameters(nodes),
    )
