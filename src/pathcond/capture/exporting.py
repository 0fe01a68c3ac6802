"""torch.export -> Graph: for what is better not run, and what a run cannot follow. The only file
that knows torch.export.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, OutputKind

from ..errors import UnsupportedModelError
from .contents import tensors_in
from .isolation import attributes_kept
from .models import canonical_names
from .nodes import Graph, Node, alive, called_parameters, op_name, place_of, type_of

# What modules keep their hooks in.
HOOKS = ("_forward_hooks", "_forward_pre_hooks")


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
    reader = _Reader(program, model)
    returned = reader.read(program.graph_module)
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    # A buffer that forward updates must keep its scale too, so mutated buffers count as outputs.
    outputs = [
        out for kind, out in zip(kinds, returned, strict=True) if kind is not OutputKind.TOKEN
    ]
    to_user = [
        out for kind, out in zip(kinds, returned, strict=True) if kind is OutputKind.USER_OUTPUT
    ]
    return Graph(
        nodes=alive(reader.nodes, outputs),
        outputs=tuple(outputs),
        returned=tuple(to_user),
        training=training,
        called=called_parameters(reader.nodes),
    )


@contextmanager
def refusing_state(model: nn.Module) -> Iterator[None]:
    """Export in the body. What forward leaves elsewhere than in its outputs, for its next call or
    for others, torch.export does not show.

    Raises:
        UnsupportedModelError: There is such a thing.
    """
    left: list[str] = []
    given: set[int] = set()
    have_changed: Callable[[], bool]

    def note_given(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal have_changed
        given.update(map(id, tensors_in((args, kwargs))))
        have_changed = before.since_now()

    def look(module: nn.Module, args: Any, kwargs: Any, returned: Any) -> None:
        tables = [vars(part)[name] for part in model.modules() for name in HOOKS]
        hooks = [
            hook for table in tables for hook in table.values() if hook not in (note_given, look)
        ]
        own = {id(part) for part in model.modules()}
        if have_changed():
            left.append("something in attributes of its modules")
        elif any(id(tensor) not in given for tensor in tensors_in((args, kwargs), but=own)):
            left.append("a tensor in what it was given")
        elif any(isinstance(tensor, FakeTensor) for tensor in tensors_in(hooks, but=own)):
            left.append("a tensor with a hook")

    handles = [
        model.register_forward_pre_hook(note_given, prepend=True, with_kwargs=True),
        model.register_forward_hook(look, with_kwargs=True),
    ]
    try:
        with attributes_kept(model) as before:
            yield
    finally:
        for handle in handles:
            handle.remove()
    if left:
        raise UnsupportedModelError(
            f"{type(model).__name__}.forward leaves {left[0]}, which torch.export does not show: "
            "register it as a buffer, or return it"
        )


class _Reader:
    """Makes the nodes of an exported program, in order.

    Attributes:
        nodes: Those so far.
    """

    def __init__(self, program: torch.export.ExportedProgram, model: nn.Module) -> None:
        self.nodes: list[Node] = []
        self._constants = program.constants
        self._specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        self._names = canonical_names(model)
        self._buffers = dict(model.named_buffers(remove_duplicate=False))
        self._tied: dict[str, Node] = {}

    def read(
        self, graph_module: torch.fx.GraphModule, inputs: Iterable[Any] | None = None, at: str = ""
    ) -> Any:
        """Read one graph, and return what it returns.

        Args:
            graph_module: The program's own, or that of a block in it.
            inputs: Of a block; the program's own inputs are leaves.
            at: Prefix of the names of the nodes.
        """
        made: dict[torch.fx.Node, Any] = {}
        given = None if inputs is None else iter(inputs)
        for fx_node in graph_module.graph.nodes:
            args = torch.fx.node.map_arg(fx_node.args, lambda n: made[n])
            kwargs = torch.fx.node.map_arg(fx_node.kwargs, lambda n: made[n])
            if fx_node.op == "placeholder":
                made[fx_node] = self._leaf(fx_node) if given is None else next(given)
            elif fx_node.op == "get_attr":
                attribute = operator.attrgetter(fx_node.target)(graph_module)
                is_tensor = isinstance(attribute, Tensor)
                name = at + fx_node.name
                made[fx_node] = self._constant(name, attribute) if is_tensor else attribute
            elif fx_node.op == "output":
                return args[0]
            # torch.export's own input guards: they compute nothing
            elif fx_node.op == "call_module":
                made[fx_node] = None
            elif isinstance(fx_node.target, torch._ops.HigherOrderOperator):
                made[fx_node] = self._inline(fx_node, args, at)
            elif fx_node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                made[fx_node] = args[0][args[1]]
            else:
                made[fx_node] = self._call(fx_node, args, kwargs, at)
        return None

    def _leaf(self, fx_node: torch.fx.Node) -> Node:
        spec = self._specs[fx_node.name]
        shape, dtype = type_of(fx_node.meta.get("val"))
        if spec.kind is InputKind.CONSTANT_TENSOR:
            # A tensor that is an attribute of a module but no buffer, or a literal in forward.
            return self._constant(spec.target, self._constants[spec.target])
        if spec.kind not in (InputKind.PARAMETER, InputKind.BUFFER):
            return self._add(Node(name=fx_node.name, op="input", shape=shape, dtype=dtype))
        name = self._names[spec.target]
        if name not in self._tied:  # tied names are one leaf
            kind = "parameter" if spec.kind is InputKind.PARAMETER else "buffer"
            value = None if kind == "parameter" else self._buffers[name]
            self._tied[name] = self._add(
                Node(name=name, op=kind, shape=shape, dtype=dtype, value=value)
            )
        return self._tied[name]

    def _constant(self, name: str, value: Tensor) -> Node:
        shape, dtype = type_of(value)
        return self._add(Node(name=name, op="constant", shape=shape, dtype=dtype, value=value))

    def _call(self, fx_node: torch.fx.Node, args: Any, kwargs: Any, at: str) -> Node:
        shape, dtype = type_of(fx_node.meta.get("val"))
        module, line = place_of(fx_node)
        return self._add(
            Node(
                name=at + fx_node.name,
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

    def _inline(self, fx_node: torch.fx.Node, args: Any, at: str) -> Any:
        """Blocks under no_grad or autocast are sub-graphs that run once: their calls join the
        list.
        """
        block = next((i for i, a in enumerate(args) if isinstance(a, torch.fx.GraphModule)), None)
        name = str(fx_node.target)
        if block is None or "wrap_with_" not in name:
            raise UnsupportedModelError(
                f"The model uses {name} at {', '.join(filter(None, place_of(fx_node)))}: "
                "control flow that depends on the data cannot be analysed."
            )
        return self.read(args[block], args[block + 1 :], f"{at}{fx_node.name}.")

    def _add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node
