"""The graph of one forward pass: values and ATen calls in order, with their place in the user's
code.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import UnsupportedModelError
from .schemas import schema_of

TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True)
class _Named:
    """A call of ATen or another library by its name."""

    name: str
    overload: str

    def call(self) -> Any:
        namespace, name = self.name.split("::")
        return getattr(getattr(getattr(torch.ops, namespace), name), self.overload)


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One value of the graph: a leaf (parameter, buffer, constant, input) or the result of one ATen
    call.

    Attributes:
        name: Qualified name for a parameter or buffer (the first of tied names), else the name in
            the graph.
        op: "parameter", "buffer", "constant", "input", "getitem", or the ATen name without its
            overload and without the underscore of an in-place op ("relu" for
            ``aten.relu_.default``).
        target: The callable behind ``op``; None for leaves.
        args: Positional arguments; other nodes appear as Node.
        kwargs: Keyword arguments, likewise.
        shape: Shape of the value; a list of shapes where the op returns several tensors; None if it
            returns none.
        dtype: Data type of the value; a list where the op returns several tensors.
        value: The tensor itself, for buffers and constants.
        module: Qualified name of the innermost module that made the call ("" for the model itself).
        line: ``file.py:123`` of the innermost frame outside torch, and the code on it.
    """

    name: str
    op: str
    target: Any = None
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    shape: Any = None
    dtype: Any = None
    value: Tensor | None = None
    module: str = ""
    line: str = ""

    def __repr__(self) -> str:
        return f"%{self.name}"

    def __getstate__(self) -> dict[str, Any]:
        """For pickling, which ATen calls do not support: the name of the call."""
        state = {key: vars(self)[key] for key in self.__dataclass_fields__}
        if isinstance(self.target, torch._ops.OpOverload):
            state["target"] = _Named(schema_of(self.target).name, self.target._overloadname)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        if isinstance(state["target"], _Named):
            state["target"] = state["target"].call()
        vars(self).update(state)

    @property
    def where(self) -> str:
        """The place of this call for a person: module path and source line."""
        return ", ".join(part for part in (self.module, self.line) if part) or self.name

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        return tuple(arg for arg in tree_leaves((self.args, self.kwargs)) if isinstance(arg, Node))

    @property
    def writes(self) -> bool:
        """Whether it overwrites an argument."""
        return isinstance(self.target, torch._ops.OpOverload) and schema_of(self.target).writes

    @cached_property
    def bound(self) -> dict[str, Any]:
        """All arguments by the names of the ATen schema, defaults filled in."""
        if not isinstance(self.target, torch._ops.OpOverload):
            return {str(i): arg for i, arg in enumerate(self.args)}
        return schema_of(self.target).bind(self.args, self.kwargs)


START = Node(name="start", op="start")  # no node yet


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All calls of one forward pass in order.

    Attributes:
        nodes: Leaves first, then calls in execution order.
        outputs: Everything the model returns, flattened, and the buffers that forward updates.
        returned: What the model returns alone.
        training: Mode in which the model was captured.
        varying: Calls that a number enters which was read from integer inputs: no constants,
            although they read no input.
        called: Parameters that any call reads, also those whose result reaches no output.
        cached: Outputs that are returned inside a cache, for the model's own next call; they are
            kept, and no paths end there.
        outlet: What becomes of the outputs, in words that follow "this unit".
        again_after: After how many calls another one may go another way, because attributes of
            modules have changed.
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    returned: tuple[Any, ...]
    training: bool
    varying: frozenset[Node] = frozenset()
    called: frozenset[str] = frozenset()
    cached: frozenset[Node] = frozenset()
    outlet: str = "is an output of the model"
    again_after: tuple[int, ...] = ()


def alive(nodes: list[Node], outputs: list[Any]) -> tuple[Node, ...]:
    """Leaves, calls that an output depends on, and calls that write in place."""
    needed = {leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Node)}
    for node in reversed(nodes):
        if node in needed or node.writes:
            needed.add(node)
            needed.update(node.operands)
    return tuple(node for node in nodes if node.target is None or node in needed)


def called_parameters(nodes: list[Node]) -> frozenset[str]:
    """Parameters that any call reads, whether or not an output depends on it; a slice of no entries
    reads none.
    """
    calls = [node for node in nodes if not is_empty(node)]
    return frozenset(
        operand.name for node in calls for operand in node.operands if operand.op == "parameter"
    )


def is_empty(node: Node) -> bool:
    return isinstance(node.shape, tuple) and 0 in node.shape


def op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        schema = schema_of(target)
        namespace, name = schema.name.split("::")
        if namespace != "aten":
            return f"{namespace}::{name}"
        inplace = name.endswith("_") and not name.startswith("__") and schema.writes
        return name[:-1] if inplace else name
    return getattr(target, "__name__", str(target))


def type_of(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        if not all(isinstance(size, int) for size in value.shape):
            raise UnsupportedModelError(
                f"A tensor's shape {tuple(value.shape)} depends on the data (a mask or .item() "
                "decides it)."
            )
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        types = [type_of(v) for v in value]
        return [shape for shape, _ in types], [dtype for _, dtype in types]
    return None, None


def place_of(fx_node: torch.fx.Node) -> tuple[str, str]:
    stack = list((fx_node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack else ""
    frames = list(FRAME.finditer(fx_node.meta.get("stack_trace") or ""))
    users = [frame for frame in frames if not frame["file"].startswith(TORCH_FOLDER)]
    if not users:
        return module, ""
    frame = users[-1]
    return (module, f"{os.path.basename(frame['file'])}:{frame['line']} `{frame['code'].strip()}`")
