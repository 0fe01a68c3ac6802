"""torch model -> Graph: what the model computes, as a list of ATen calls. The only file that knows torch.export.

>>> import torch
>>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
>>> graph = capture(model, torch.randn(5, 3), training=False)
>>> [node.op for node in graph.nodes if node.target is not None]
['linear', 'relu', 'linear']
>>> graph.nodes[-1].args[1].op, graph.nodes[-1].args[1].name
('parameter', '2.weight')
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import operator
import os
import random
import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from .errors import UnsupportedModelError
from .sharding import is_sharded

TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in [^\n]+\n\s*(?P<code>[^\n]*)')


@dataclass(frozen=True, eq=False, kw_only=True)
class Node:
    """One value of the graph: a leaf (parameter, buffer, constant, input) or the result of one ATen call.

    Attributes:
        name: Qualified name for a parameter or buffer (the first of tied names), else the name in the graph.
        op: "parameter", "buffer", "constant", "input", "getitem", or the ATen name without its overload and
            without the underscore of an in-place op ("relu" for ``aten.relu_.default``).
        target: The callable behind ``op``; None for leaves.
        args: Positional arguments; other nodes appear as Node.
        kwargs: Keyword arguments, likewise.
        shape: Shape of the value; a list of shapes where the op returns several tensors; None if it returns none.
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

    @property
    def where(self) -> str:
        """The place of this call for a person: module path and source line."""
        return ", ".join(part for part in (self.module, self.line) if part) or self.name

    @cached_property
    def operands(self) -> tuple[Node, ...]:
        """The nodes that this one reads."""
        return tuple(arg for arg in tree_leaves((self.args, self.kwargs)) if isinstance(arg, Node))

    @cached_property
    def bound(self) -> dict[str, Any]:
        """All arguments by the names of the ATen schema, defaults filled in."""
        if not isinstance(self.target, torch._ops.OpOverload):
            return {str(i): arg for i, arg in enumerate(self.args)}
        arguments = self.target._schema.arguments
        bound = {a.name: a.default_value for a in arguments}
        return bound | {a.name: value for a, value in zip(arguments, self.args, strict=False)} | self.kwargs


@dataclass(frozen=True, kw_only=True)
class Graph:
    """All calls of one forward pass in order.

    Attributes:
        nodes: Leaves first, then calls in execution order.
        outputs: Everything the model returns, flattened, and the buffers that forward updates.
        returned: What the model returns alone.
        training: Mode in which the model was captured.
        outlet: What becomes of the outputs, in words that follow "this unit".
    """

    nodes: tuple[Node, ...]
    outputs: tuple[Any, ...]
    returned: tuple[Any, ...]
    training: bool
    outlet: str = "is an output of the model"


def wrapped(model: nn.Module) -> Iterator[nn.Module]:
    """A model and, one after the other, what is inside DataParallel, DistributedDataParallel, AveragedModel and torch.compile.

    accelerate puts autocast into ``forward`` itself; the last one has its own forward back.
    """
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel, torch.optim.swa_utils.AveragedModel)
    while True:
        yield model
        if isinstance(model, torch._dynamo.eval_frame.OptimizedModule):
            model = model._orig_mod
        elif isinstance(model, wrappers):
            model = model.module
        elif "_original_forward" in vars(model):
            original = vars(model)["_original_forward"]
            model = copy.copy(model)  # the same parameters, buffers and modules
            del model._original_forward
            model.forward = MethodType(original.__func__, model) if hasattr(original, "__func__") else original  # type: ignore
        else:
            return


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module, without any wrapper."""
    *_, inner = wrapped(model)
    return inner


def as_call(example_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """Example inputs (Tensor, tuple, list or dict) as positional and keyword arguments of one forward call."""
    if example_inputs is None:
        raise UnsupportedModelError(
            "No example inputs were given. The model's operations are found by following one batch through it: "
            "pass a Tensor, a tuple of positional inputs or a dict of keyword inputs, e.g. torch.randn(2, 3, 224, 224)."
        )
    if isinstance(example_inputs, Tensor):
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    if hasattr(example_inputs, "keys"):  # dict, and Hugging Face's BatchEncoding
        return (), {key: example_inputs[key] for key in example_inputs.keys()}  # noqa: SIM118
    raise UnsupportedModelError(
        f"Example inputs have type {type(example_inputs).__name__}; "
        "pass a Tensor, a tuple of positional inputs or a dict of keyword inputs."
    )


def fresh_call(model: nn.Module, example_inputs: Any) -> tuple[tuple, dict[str, Any]]:
    """``as_call`` with copies of the tensors, for ops that write into them, where the model's parameters are."""
    device = next((parameter.device for parameter in model.parameters()), None)

    def copied(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.clone() if device is None or device.type == "meta" else x.to(device, copy=True)

    return tree_map(copied, as_call(example_inputs))  # type: ignore[no-any-return]


@contextlib.contextmanager
def untouched(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the body with the model in the given mode, as it is written: without autocast and without compiled code.

    Every module's mode and all random states are restored.
    """
    modes = [(module, module.training) for module in model.modules() if module.training != training]
    python_state, torch_state = random.getstate(), torch.get_rng_state()
    numpy = sys.modules.get("numpy")  # only a program that has imported it can draw from it
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if cuda else []
    try:
        for module, _ in modes:  # train() may do more than that: LoRA layers merge their weights in it
            module.training = training
        with contextlib.ExitStack() as stack:
            for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(torch.compiler.set_stance("force_eager"))  # or what we try would be compiled for good
            yield
    finally:
        for module, mode in modes:
            module.training = mode
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body with some parameters and buffers replaced, by identity: all names of a tied tensor at once.

    torch.func.functional_call is no alternative: of a module that is used under two names it leaves the replacement behind.
    """
    places = [
        (f"{prefix}.{name}" if prefix else name, table, name, tensor)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    replacements = {id(tensor): values[full] for full, _, _, tensor in places if full in values}
    saved = [(table, name, tensor) for _, table, name, tensor in places if id(tensor) in replacements]
    try:
        for table, name, tensor in saved:
            table[name] = replacements[id(tensor)]  # type: ignore[index]
        yield
    finally:
        for table, name, tensor in saved:
            table[name] = tensor  # type: ignore[index]


def require_supported(model: nn.Module, *, sharded: bool = False) -> None:
    """Refuse what cannot be captured at all: lazy, quantised or sharded parameters. All findings in one error.

    Args:
        model: Any module.
        sharded: Whether parameters may be sharded, because the model was captured before.
    """
    found = []
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            found.append(f"parameter {name} of a lazy module has no shape yet: run the model once on a batch first")
        elif is_sharded(parameter) and not sharded:
            found.append(
                f"parameter {name} is sharded: call pathcond.prepare(model, batch) before fully_shard (on the meta device if the "
                "whole model fits nowhere), and pass what it returns in place of the batch"
            )
        elif not parameter.dtype.is_floating_point:
            found.append(f"parameter {name} has dtype {parameter.dtype}: quantised or integer weights have no scale")
    for name, buffer in model.named_buffers():
        if buffer is not None and buffer.is_quantized:
            found.append(f"buffer {name} is quantised: rescale the model before quantising it")
    for name, module in model.named_modules():
        if type(module).__name__ == "FullyShardedDataParallel":
            found.append(f"module {name!r} is FullyShardedDataParallel, whose flat parameters mix layers: use fully_shard")
        if type(module).__module__.startswith(("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")):
            found.append(f"module {name} ({type(module).__name__}) is quantised: rescale the model before quantising it")
    if found:
        more = f"\n  ... and {len(found) - 10} more" if len(found) > 10 else ""
        raise UnsupportedModelError("This model cannot be rescaled:\n  - " + "\n  - ".join(found[:10]) + more)


def capture(model: nn.Module, example_inputs: Any, *, training: bool) -> Graph:
    """Follow one call of the model with fake tensors; nothing of the model changes.

    Args:
        model: Any module; wrappers are removed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
        training: Mode to capture; the model's own modes are restored.

    Raises:
        UnsupportedModelError: The model rejects the inputs, or its control flow depends on the data.
    """
    model = unwrap(model)
    require_supported(model)
    args, kwargs = as_call(example_inputs)
    if any(parameter.is_meta for parameter in model.parameters()):
        args, kwargs = tree_map(lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs))
    with untouched(model, training=training), warnings.catch_warnings(), _quiet_export(), _momentum_as_number(model):
        warnings.simplefilter("ignore")
        try:
            try:
                program = torch.export.export(model, args, kwargs, strict=False)
            except Exception:
                if not training:
                    raise
                with _ScalarDrawsAtOneHalf():  # LayerDrop, as in OPT: `if torch.rand([]) < p` skips a layer
                    program = torch.export.export(model, args, kwargs, strict=False)
        except Exception as error:
            mode = "train" if training else "eval"
            summary = str(error).strip().split("\n")[0][:500]
            raise UnsupportedModelError(
                f"{type(model).__name__} could not be captured in {mode} mode: {type(error).__name__}: {summary}\n"
                "If the model rejects the inputs, check their shapes, types and device"
                + (" (BatchNorm in train mode needs at least two samples)" if training else "")
                + (". Of a Hugging Face decoder set model.config.use_cache = False" if "Cache" in summary else "")
                + ". If its control flow depends on the data (an `if` on a tensor's value), torch.export cannot follow it: "
                "torch.export.export(model, inputs, strict=False) shows the place."
            ) from error
    return _read(program, model, training)


@contextlib.contextmanager
def _momentum_as_number(model: nn.Module) -> Iterator[None]:
    """``momentum=None`` averages by a count that export cannot follow; no output depends on it."""
    cumulative = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase) and m.momentum is None]
    try:
        for module in cumulative:
            module.momentum = 0.1
        yield
    finally:
        for module in cumulative:
            module.momentum = None


class _ScalarDrawsAtOneHalf(TorchFunctionMode):
    """Makes control flow on single random numbers deterministic, as far as it goes through ``torch.rand([])``."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.rand and args and tuple(args[0] if isinstance(args[0], (tuple, list)) else args) == ():
            return torch.tensor(0.5)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _quiet_export() -> Iterator[None]:
    """torch.export logs its failures and prints half a graph; ours reach the user as one error."""
    torch_logger = logging.getLogger("torch")
    level = torch_logger.level
    torch_logger.setLevel(logging.CRITICAL)
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        torch_logger.setLevel(level)


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> its first name; tied tensors are the same object."""
    first: dict[int, str] = {}
    names = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def _read(program: torch.export.ExportedProgram, model: nn.Module, training: bool) -> Graph:
    names = canonical_names(model)
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    leaves: dict[str, Node] = {}
    nodes: list[Node] = []
    specs = {spec.arg.name: spec for spec in program.graph_signature.input_specs}

    def leaf(fx_node: torch.fx.Node) -> Node:
        spec = specs[fx_node.name]
        shape, dtype = _type_of(fx_node.meta.get("val"))
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
            return add(Node(name=spec.target, op="constant", shape=shape, dtype=dtype, value=program.constants[spec.target]))
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
                        Node(name=prefix + fx_node.name, op="constant", shape=tuple(value.shape), dtype=value.dtype, value=value)
                    )
            elif fx_node.op == "output":
                return args[0]
            elif fx_node.op == "call_module":  # torch.export's own input guards: they compute nothing
                made[fx_node] = None
            elif isinstance(fx_node.target, torch._ops.HigherOrderOperator):
                made[fx_node] = inline(fx_node, args, prefix)
            elif fx_node.target is operator.getitem and isinstance(args[0], (tuple, list)):
                made[fx_node] = args[0][args[1]]
            else:
                shape, dtype = _type_of(fx_node.meta.get("val"))
                module, line = _place(fx_node)
                made[fx_node] = add(
                    Node(name=prefix + fx_node.name, op=_op_name(fx_node.target), target=fx_node.target, args=args,
                         kwargs=kwargs, shape=shape, dtype=dtype, module=module, line=line)
                )  # fmt: skip
        return None

    def inline(fx_node: torch.fx.Node, args: tuple, prefix: str) -> Any:
        """Blocks under no_grad or autocast are sub-graphs that run once: their calls join the list."""
        at = next((i for i, arg in enumerate(args) if isinstance(arg, torch.fx.GraphModule)), None)
        name = str(fx_node.target)
        wraps_once = "wrap_with_" in name
        if at is None or not wraps_once:
            raise UnsupportedModelError(
                f"The model uses {name} at {', '.join(_place(fx_node))}: control flow that depends on the data cannot be analysed."
            )
        return walk(args[at], list(args[at + 1 :]), f"{prefix}{fx_node.name}.")

    returned = walk(program.graph_module, None, "")
    kinds = [spec.kind for spec in program.graph_signature.output_specs]
    # A buffer that forward updates must keep its scale too, so mutated buffers count as outputs.
    outputs = [out for kind, out in zip(kinds, returned, strict=True) if kind is not OutputKind.TOKEN]
    to_user = [out for kind, out in zip(kinds, returned, strict=True) if kind is OutputKind.USER_OUTPUT]
    return Graph(nodes=_alive(nodes, outputs), outputs=tuple(outputs), returned=tuple(to_user), training=training)


def _alive(nodes: list[Node], outputs: list[Any]) -> tuple[Node, ...]:
    """Leaves, calls that an output depends on, and calls that write in place."""
    needed = {leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Node)}
    for node in reversed(nodes):
        writes = isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable
        if node in needed or writes:
            needed.add(node)
            needed.update(node.operands)
    return tuple(node for node in nodes if node.target is None or node in needed)


def _op_name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        namespace, name = target._schema.name.split("::")
        if namespace != "aten":
            return f"{namespace}::{name}"
        inplace = name.endswith("_") and not name.startswith("__") and target._schema.is_mutable
        return name[:-1] if inplace else name
    return getattr(target, "__name__", str(target))


def _type_of(value: Any) -> tuple[Any, Any]:
    if isinstance(value, Tensor):
        if not all(isinstance(size, int) for size in value.shape):
            raise UnsupportedModelError(
                f"A tensor's shape {tuple(value.shape)} depends on the data (a mask or .item() decides it)."
            )
        return tuple(value.shape), value.dtype
    if isinstance(value, (tuple, list)):
        types = [_type_of(v) for v in value]
        return [shape for shape, _ in types], [dtype for _, dtype in types]
    return None, None


def _place(fx_node: torch.fx.Node) -> tuple[str, str]:
    stack = list((fx_node.meta.get("nn_module_stack") or {}).values())
    module = stack[-1][0] if stack else ""
    frames = list(FRAME.finditer(fx_node.meta.get("stack_trace") or ""))
    users = [frame for frame in frames if not frame["file"].startswith(TORCH_FOLDER)]
    if not users:
        return module, ""
    frame = users[-1]
    return module, f"{os.path.basename(frame['file'])}:{frame['line']} `{frame['code'].strip()}`"
