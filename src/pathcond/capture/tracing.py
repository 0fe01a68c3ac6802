"""Real values -> Graph: the quickest way, and one for models that torch.export cannot follow.

One call of the model runs on copies of its parameters and buffers. Every ATen call is noted as the
model makes it, before autograd and before composite operations are taken apart. Where a value
becomes a Python value, `decisions` says whether the model may decide by it.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import operator
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UnsupportedModelError
from ..trees import tree_leaves, tree_map
from .decisions import (
    DecisionError,
    Origins,
    calling_module,
    frames,
    is_size,
    only_raises,
    plain,
    refuse,
    size_from_values,
    user_line,
)
from .isolation import attributes_kept, isolated, replaced
from .models import canonical_names, returned_leaves
from .nodes import (
    TORCH_FOLDER,
    Graph,
    Node,
    alive,
    called_parameters,
    op_name,
    type_of,
)

READS_VALUES = torch.Tag.data_dependent_output
SHAPE_BY_VALUES = torch.Tag.dynamic_output_shape
DRAWS = torch.Tag.nondeterministic_seeded
# Operations whose sizes depend on values although no tag says so, and the operand that decides.
DECIDING_OPERAND = {
    "masked_select": "mask",
    "repeat_interleave": "repeats",
    "_pack_padded_sequence": "lengths",
}
# Operations of other libraries whose sizes depend on sizes alone.
SIZED_BY_SIZES = frozenset(
    f"torchvision::{name}"
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
)
TESTS_OF_FINITENESS = ("isinf", "isnan", "isfinite")
LOGIC = (
    "any",
    "all",
    "logical_not",
    "logical_or",
    "logical_and",
    "bitwise_not",
    "bitwise_or",
    "bitwise_and",
)
AS_NUMBER = (
    Tensor.item,
    Tensor.__bool__,
    Tensor.__int__,
    Tensor.__float__,
    Tensor.__index__,
    Tensor.__complex__,
)
AS_DATA = (
    Tensor.tolist,
    Tensor.numpy,
    Tensor.__array__,
    Tensor.__dlpack__,
    Tensor.untyped_storage,
    Tensor.storage,
    Tensor.__deepcopy__,
    Tensor.__reduce_ex__,
    Tensor.__format__,
)
LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
# Python numbers in these are sizes, and change no value.
SIZED = ("zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "rand", "randn", "expand")
COUNTED = ("arange", "full", "new_full", "eye", "one_hot")


def trace_graph(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    training: bool,
    draws: AbstractContextManager[Any],
    existing: Mapping[int, Tensor] | None = None,
    gradients: bool = False,
) -> Graph:
    """Run one call and note what it computes; the model is bit for bit what it was.

    Args:
        model: On real data, in the mode to capture.
        args, kwargs: Of the call; copies, because operations may write into them.
        training: That mode.
        draws: Entered while the model runs: sees every call first, to count or replace random
            numbers.
        existing: All tensors that there are (``all_tensors``), where the model uses some that are
            neither its own nor made by a call.
        gradients: Whether autograd may be on, as in training. Without it, models may write into
            their parameters.

    Raises:
        UnknownTensorError: There are such tensors, and ``existing`` is not given.
        UnsupportedModelError: It decides by values that depend on inputs or weights, or computes a
            tensor in a way that cannot be seen.
    """
    if any(t.is_meta for t in [*model.parameters(), *model.buffers()]):
        raise UnsupportedModelError(
            "a model on the meta device has no values to decide by: load it on a real device"
        )
    copies = {
        name: nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
        for name, parameter in model.named_parameters()
    }
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    # Operations may write into the inputs, which are needed once more where a buffer decides.
    unwritten = tree_map(lambda a: a.clone() if isinstance(a, Tensor) else a, (args, kwargs))
    trace = _Trace(model, args, kwargs, {**copies, **buffers}, existing)
    # With gradients, but nobody will ask for them: nothing is kept for the backward pass.
    forget = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept)
    grad_mode = forget if gradients else torch.no_grad()
    with attributes_kept(model), replaced(model, {**copies, **buffers}), grad_mode:
        with enable_python_dispatcher(), _Calls(trace), _Conversions(trace), draws, _written_out():
            result = model(*args, **kwargs)
        if isinstance(trace.refused, UnknownTensorError):
            raise trace.refused
        if trace.refused is not None:
            raise HiddenError(
                f"the model catches what stops its capture, and goes another way: {trace.refused}"
            ) from trace.refused
        trace.note_reassigned(model)
        trace.note_kept(model)
    if trace.decided_by and not training:
        trace.written |= _buffers_written_in_train_mode(model, *unwritten)
    trace.refuse_changing_buffers()
    returned, everything = (
        [trace.output(leaf) for leaf in returned_leaves(result, caches=caches)]
        for caches in (False, True)
    )
    cached = [leaf for leaf in everything if isinstance(leaf, Node) and leaf not in returned]
    outputs = [*returned, *cached, *trace.checked]
    return Graph(
        nodes=alive(trace.nodes, outputs),
        outputs=tuple(outputs),
        returned=tuple(returned),
        training=training,
        varying=frozenset(trace.varying),
        called=called_parameters(trace.nodes),
        cached=frozenset(cached),
    )


@contextlib.contextmanager
def _written_out() -> Iterator[None]:
    """Attention and encoder layers as torch writes them out, not as one fused operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


class HiddenError(UnsupportedModelError):
    """The model does what torch.export would not show: it must not be asked."""


class UnknownTensorError(Exception):
    """The model uses a tensor of which it is not known whether it was there before the call."""


def all_tensors() -> dict[int, Tensor]:
    """Every tensor of the process by its id: attributes, globals, what functions close over. It
    takes longer than most calls.
    """
    return {id(o): o for o in gc.get_objects() if issubclass(type(o), Tensor)}


def _buffers_written_in_train_mode(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> set[str]:
    """Names of the buffers that one call in train mode changes; all of them where that call
    fails.
    """
    before = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    after = {name: buffer.clone() for name, buffer in before.items()}
    with (
        isolated(model, training=True),
        attributes_kept(model),
        replaced(model, after),
        torch.no_grad(),
    ):
        try:
            model(*args, **kwargs)
            after = dict(model.named_buffers())
        # Whatever a model raises that is not meant to be trained on such a batch.
        except Exception:
            return set(before)
    return {
        name for name in before if name not in after or not torch.equal(before[name], after[name])
    }


class _Trace:
    """What is known of every tensor of one call, and the calls so far."""

    def __init__(
        self,
        model: nn.Module,
        args: tuple,
        kwargs: dict[str, Any],
        copies: dict[str, Tensor],
        existing: Mapping[int, Tensor] | None,
    ) -> None:
        self.nodes: list[Node] = []
        self.checked: list[Node] = []
        self.varying: set[Node] = set()
        self.decided_by: dict[str, str] = {}
        self.written: set[str] = set()
        self.finite: dict[Node, bool] = {}
        self.refused: Exception | None = None
        self.paused = False
        self.literal = False
        self.sized = False
        self.modules = {id(module): name for name, module in model.named_modules()}
        self._named: Counter[str] = Counter()
        self._node = WeakTensorKeyDictionary()
        self._origins = WeakTensorKeyDictionary()
        self._existing = existing
        self._copies = copies
        self._add_leaves(model, args, kwargs)

    def _add_leaves(self, model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        names = canonical_names(model)
        parameters = {id(p) for p in model.parameters()}
        tensors = [
            *model.named_parameters(remove_duplicate=False),
            *model.named_buffers(remove_duplicate=False),
        ]
        leaves: dict[str, Node] = {}
        for name, tensor in tensors:
            first = names[name]
            if first not in leaves:
                is_parameter = id(tensor) in parameters
                leaves[first] = Node(
                    name=first,
                    op="parameter" if is_parameter else "buffer",
                    shape=tuple(tensor.shape),
                    dtype=tensor.dtype,
                    value=None if is_parameter else tensor,
                )
                kind = (
                    {"floats": {f"parameter {first}"}}
                    if is_parameter
                    else {"buffers": {first}, "memory": first}
                )
                copy = self._copies.get(first, tensor)
                self.know(copy, self.add(leaves[first]), Origins(**kind))  # type: ignore[arg-type]
                # The model may hold its own tensors in other places too, such as a list.
                self.know(tensor, leaves[first], self.origins(copy))
        self._buffer_names = {
            id(self._copies[n]): n
            for n, leaf in leaves.items()
            if leaf.op == "buffer" and n in self._copies
        }
        for position, (name, leaf) in enumerate(_named_inputs(model, args, kwargs)):
            shape, dtype = type_of(leaf)
            node = self.add(Node(name=name, op="input", shape=shape, dtype=dtype))
            if isinstance(leaf, Tensor):
                name = f"input {position}"
                floats = leaf.dtype.is_floating_point or leaf.dtype.is_complex
                self.know(
                    leaf, node, Origins(floats={name}) if floats else Origins(integers={name})
                )

    @contextlib.contextmanager
    def remembering_refusals(self) -> Iterator[None]:
        """What is refused stays refused, also where the model catches every exception."""
        try:
            yield
        except (UnsupportedModelError, UnknownTensorError) as error:
            self.refused = self.refused or error
            raise

    # -- what is known of a tensor -----------------------------------------------------------------

    def name(self, op: str) -> str:
        """The next name of a node, as torch.export numbers them: ``linear``, ``linear_1``."""
        self._named[op] += 1
        return op if self._named[op] == 1 else f"{op}_{self._named[op] - 1}"

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node

    def know(self, tensor: Tensor, node: Node, origins: Origins) -> None:
        self._node[tensor] = node
        self._origins[tensor] = origins

    def node(self, tensor: Tensor) -> Node:
        if tensor not in self._node:
            self._meet(tensor)
        return self._node[tensor]  # type: ignore[no-any-return]

    def origins(self, tensor: Tensor) -> Origins:
        self.node(tensor)
        return self._origins[tensor]  # type: ignore[no-any-return]

    def _meet(self, tensor: Tensor) -> None:
        """A tensor that no call has made is a constant, if it was there before the call."""
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise UnsupportedModelError(
                f"the model uses torch.vmap or another transform of torch.func at {user_line()}: "
                "write the batched computation out (torch.bmm, torch.einsum)"
            )
        if self._existing is None:
            raise UnknownTensorError
        if id(tensor) not in self._existing:
            raise UnsupportedModelError(
                f"a tensor of shape {tuple(tensor.shape)} at {user_line()} was made in a way "
                "that cannot be followed "
                "(torch.Tensor(...), torch.from_numpy, pickle, autograd inside forward): make "
                "it by "
                "torch.tensor or torch.as_tensor, or outside of forward"
            )
        name = self.name("constant")
        self.know(tensor, self.constant(name, tensor), Origins(buffers={name}, memory=name))

    def constant(self, name: str, tensor: Tensor) -> Node:
        value = tensor.detach()
        return self.add(
            Node(name=name, op="constant", shape=tuple(value.shape), dtype=value.dtype, value=value)
        )

    def output(self, leaf: Any) -> Any:
        return self.node(leaf) if isinstance(leaf, Tensor) else leaf

    # -- decisions ---------------------------------------------------------------------------------

    def may_read(self, tensors: Iterable[Tensor], *, size: bool) -> Origins:
        """Refuse a decision by the values of these tensors, or note what must be kept for it.

        Args:
            tensors: Whose values decide.
            size: Whether only the size of a result depends on them.
        """
        tensors = list(tensors)
        origins = Origins.union(self.origins(tensor) for tensor in tensors)
        if not size:
            if only_raises():
                # Whether it raises must not change: what is checked is kept, as outputs are.
                self.checked += [self.node(tensor) for tensor in tensors] if origins.floats else []
                return origins
            if all(self._tells_finite(self.node(tensor)) for tensor in tensors):
                return origins
        if origins.floats or origins.draws or (origins.integers and not size):
            refuse(
                origins,
                "the size of a result depends on it"
                if size
                else "its value decides what is computed",
            )
        place = user_line()
        for name in origins.buffers:
            self.decided_by.setdefault(name, place)
        return origins

    def _tells_finite(self, node: Node) -> bool:
        """Whether a truth value only says that some tensor is finite: that is so for all usual
        inputs.
        """
        if node.op in TESTS_OF_FINITENESS:
            return self.finite.get(node, False)
        return (
            node.op in LOGIC and bool(node.operands) and all(map(self._tells_finite, node.operands))
        )

    def refuse_changing_buffers(self) -> None:
        """A branch on a buffer holds as long as nobody writes into the buffer."""
        for name in sorted(self.decided_by.keys() & self.written):
            raise DecisionError(
                f"The model decides by the value of buffer {name} at {self.decided_by[name]}, "
                "and forward "
                "updates that buffer: it may go another way later. Write it without a Python "
                "decision "
                "(torch.where), or move it out of the model that is passed here."
            )

    # -- calls -------------------------------------------------------------------------------------

    def note(
        self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any, *, origins: Origins
    ) -> None:
        """Add one call to the graph, with a node for each of its results."""
        shape, dtype = type_of(result)
        as_nodes = tree_map(lambda a: self.node(a) if isinstance(a, Tensor) else a, (args, kwargs))
        node = self.add(
            Node(
                name=self.name(op_name(func)),
                op=op_name(func),
                target=func,
                args=as_nodes[0],
                kwargs=as_nodes[1],
                shape=shape,
                dtype=dtype,
                module=calling_module(self.modules),
                line=user_line(),
            )
        )
        if self.sized:
            self.varying.add(node)
            origins.integers.add("sizes that were read from integer inputs")
        if node.op in TESTS_OF_FINITENESS:
            self.finite[node] = bool(torch.isfinite(tree_leaves(args)[0]).all())
        shared = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if isinstance(result, Tensor):
            self.know(result, node, self._origins_of(result, shared, origins))
            return
        for position, part in enumerate(result if isinstance(result, (list, tuple)) else ()):
            if isinstance(part, Tensor):
                picked = Node(
                    name=self.name("getitem"),
                    op="getitem",
                    target=operator.getitem,
                    args=(node, position),
                    shape=tuple(part.shape),
                    dtype=part.dtype,
                    module=node.module,
                    line=node.line,
                )
                self.know(part, self.add(picked), self._origins_of(part, shared, origins))

    def _origins_of(self, result: Tensor, operands: list[Tensor], origins: Origins) -> Origins:
        for operand in operands:
            if _same_memory(result, operand):
                shared = self.origins(operand)
                shared.add(origins)
                return shared
        return Origins.union([origins])

    def note_written(self, tensor: Tensor, origins: Origins) -> None:
        """The memory of a tensor has changed: what shares it depends on more now."""
        own = self.origins(tensor)
        own.add(origins)
        self.written |= {own.memory} if own.memory is not None else set()

    def note_reassigned(self, model: nn.Module) -> None:
        """``self.average = 0.9 * self.average + ...`` writes a buffer as well as ``copy_`` does."""
        current = dict(model.named_buffers(remove_duplicate=False))
        for copy_id, name in self._buffer_names.items():
            new = current.get(name)
            if new is not None and id(new) != copy_id and new in self._node:
                copy = self._copies[name]
                self.add(
                    Node(
                        name=self.name("copy"),
                        op="copy",
                        target=torch.ops.aten.copy_.default,
                        args=(self.node(copy), self.node(new)),
                        shape=tuple(copy.shape),
                        dtype=copy.dtype,
                    )
                )
                self.written.add(name)

    def note_kept(self, model: nn.Module) -> None:
        """``self.previous = hidden``: a later call, or the training loop, may read it. What is
        computed from inputs and kept in an attribute is held as outputs are; weights that are
        computed from others (weight norm, pruning) are made anew in every call.
        """
        tables = ("_parameters", "_buffers", "_modules")
        for module in model.modules():
            kept = [value for name, value in vars(module).items() if name not in tables]
            for tensor in (tensor for value in kept for tensor in _tensors_in(value)):
                if tensor in self._node and self._node[tensor].target is not None:
                    origins = self._origins[tensor]
                    if origins.integers or any(o.startswith("input ") for o in origins.floats):
                        self.checked.append(self._node[tensor])


def _tensors_in(value: Any, levels: int = 4) -> Iterator[Tensor]:
    """Tensors in a value, in containers and in attributes of objects, a few levels deep."""
    here, seen = [value], {id(value)}
    for _ in range(levels + 1):
        yield from (part for part in here if isinstance(part, Tensor))
        # by their ids: parts need not be hashable
        inside = {id(part): part for holder in here for part in _contents_of(holder)}
        here = [part for at, part in inside.items() if at not in seen]
        seen |= inside.keys()


def _contents_of(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    if isinstance(value, (list, tuple, set, deque)):
        return list(value)
    if isinstance(value, (Tensor, type, ModuleType, nn.Module)):
        return []
    return list(getattr(value, "__dict__", {}).values())


def _named_inputs(
    model: nn.Module, args: tuple, kwargs: dict[str, Any]
) -> Iterator[tuple[str, Any]]:
    """The leaves of a call, named after the arguments of ``forward``; those of one argument are
    numbered.
    """
    try:
        names = [*inspect.signature(model.forward).bind(*args, **kwargs).arguments][: len(args)]
    except (TypeError, ValueError):  # no signature, or *args
        names = []
    names += [f"input_{i}" for i in range(len(names), len(args))]
    for name, value in [*zip(names, args, strict=True), *kwargs.items()]:
        leaves = torch.utils._pytree.tree_leaves(value)
        for i, leaf in enumerate(leaves):
            yield (name if len(leaves) == 1 else f"{name}_{i}"), leaf


@dataclass
class _Inside:
    """What a composite operation did with values while it ran."""

    reads: bool = False
    sizes: bool = False


class _Below(TorchDispatchMode):
    """Sees the basic operations that one call is made of."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, to keep it from compiling this class."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.found = _Inside()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.found.reads |= READS_VALUES in func.tags
        self.found.sizes |= _sizes_by_values(func, args, kwargs)
        return func(*args, **kwargs)


class _Calls(SchemaCheckMode):
    """Sees every ATen call as the model makes it.

    torch admits three kinds of modes before dispatch, and of these SchemaCheckMode is the one that
    watches real values; nothing of its checks is used.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, trace: _Trace) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)  # type: ignore[attr-defined]
        self.trace = trace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction(), torch._C._DisablePythonDispatcher():  # type: ignore[attr-defined]
            if self.trace.paused:
                return func(*args, **kwargs)
            with self.trace.remembering_refusals():
                return self._note(func, args, kwargs)

    def _note(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        trace = self.trace
        if func is torch.ops.aten.lift_fresh.default and args[0] not in trace._node:
            return self._literal(args[0])
        if func._schema.name.startswith("aten::set_"):
            raise UnsupportedModelError(
                f"the model gives a tensor other memory at {user_line()}: use a new tensor instead"
            )
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        origins = Origins.union(trace.origins(tensor) for tensor in operands)
        origins.draws |= DRAWS in func.tags and not _is_still(func, args, kwargs)
        versions = [tensor._version for tensor in operands]
        below = _Below()
        with below:
            result = func(*args, **kwargs)
        made = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        reads = READS_VALUES in func.tags or below.found.reads
        if _sizes_by_values(func, args, kwargs) or (made and below.found.sizes):
            trace.may_read(_deciding_operands(func, args, kwargs), size=True)
        elif reads and not made:
            trace.may_read(operands, size=False)
        if made or func._schema.is_mutable:
            trace.note(func, args, kwargs, result, origins=origins)
        for tensor, version in zip(operands, versions, strict=True):
            if tensor._version != version:
                trace.note_written(tensor, origins)
        return result

    def _literal(self, tensor: Tensor) -> Tensor:
        """A tensor of Python values; they have been looked through, unless the caller is a
        constructor.
        """
        caller = next(iter(frames()), None)
        trusted = caller is not None and caller.f_code.co_filename.startswith(TORCH_FOLDER)
        if not self.trace.literal and not trusted:
            raise UnsupportedModelError(
                f"a tensor is made of Python values by a constructor at {user_line()}, whose "
                "values cannot be "
                "followed: use torch.tensor or torch.as_tensor"
            )
        name = self.trace.name("lifted_tensor")
        self.trace.know(tensor, self.trace.constant(name, tensor.detach().clone()), Origins())
        return tensor


class _Conversions(TorchFunctionMode):
    """Sees where tensors become Python values, and Python values tensors."""

    def __init__(self, trace: _Trace) -> None:
        super().__init__()
        self.trace = trace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.trace.paused:
            return func(*args, **kwargs)
        with self.trace.remembering_refusals():
            return self._follow(func, args, kwargs)

    def _follow(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        trace = self.trace
        if func == Tensor.data.__get__:  # type: ignore[attr-defined]
            return args[0].detach()
        if func == Tensor.data.__set__:  # type: ignore[attr-defined]
            raise HiddenError(f"the model assigns to .data at {user_line()}: use copy_ instead")
        if func is Tensor.__repr__:
            with _set(trace, "paused"):
                return func(*args, **kwargs)
        if func in AS_NUMBER:
            return self._number(func, args[0])
        if func in AS_DATA:
            trace.may_read(args[:1], size=False)
            return func(*args, **kwargs)
        if func in LITERALS:
            given = args[1:] if func is Tensor.new_tensor else args[:1]
            inside = [t for t in _python_leaves((given, kwargs)) if isinstance(t, Tensor)]
            if not (
                inside and func in (torch.as_tensor, torch.asarray) and isinstance(args[0], Tensor)
            ):
                trace.may_read(inside, size=False)
            with _set(trace, "literal"):
                return self._with_sizes(func, args, kwargs)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            # A list among the indices becomes a tensor, and so does a number that is written.
            parts = [*(args[1] if isinstance(args[1], tuple) else args[1:2]), *args[2:]]
            lists = [part for part in parts if isinstance(part, (list, int, float))]
            trace.may_read([t for t in tree_leaves(lists) if isinstance(t, Tensor)], size=False)
            with _set(trace, "literal") if lists else contextlib.nullcontext():
                return self._with_sizes(func, args, kwargs)
        return self._with_sizes(func, args, kwargs)

    def _number(self, func: Any, tensor: Tensor) -> Any:
        """One element as a Python number."""
        trace = self.trace
        origins = trace.origins(tensor)
        whole = not (
            tensor.dtype.is_floating_point or tensor.dtype.is_complex or tensor.dtype == torch.bool
        )
        if (
            func is Tensor.item
            and whole
            and origins.integers
            and not origins.floats
            and not origins.draws
        ):
            trace.may_read([tensor], size=True)
            with _set(trace, "paused"):
                value = int(func(tensor))
            what = "a number that was read from it is used for more than the size of a tensor"
            return size_from_values(value, lambda: refuse(origins, what))
        trace.may_read([tensor], size=False)
        with _set(trace, "paused"):
            return func(tensor)

    def _with_sizes(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call a function; of numbers that were read from integer inputs only sizes may be made."""
        leaves = _python_leaves((args, kwargs))
        sizes = [leaf for leaf in leaves if is_size(leaf)]
        if not sizes:
            return func(*args, **kwargs)
        args, kwargs = tree_map(plain, (args, kwargs))
        name = getattr(func, "__name__", "")
        if name in SIZED:
            return func(*args, **kwargs)
        origins = Origins.union(self.trace.origins(t) for t in leaves if isinstance(t, Tensor))
        if name not in COUNTED and (origins.floats or origins.draws or not origins.integers):
            sizes[0].node.refused()
        with _set(self.trace, "sized"):
            return func(*args, **kwargs)


@contextlib.contextmanager
def _set(trace: _Trace, name: str) -> Iterator[None]:
    before = getattr(trace, name)
    setattr(trace, name, True)
    try:
        yield
    finally:
        setattr(trace, name, before)


def _python_leaves(tree: Any) -> list[Any]:
    """All leaves, the bounds of slices among them."""
    found = []
    for leaf in tree_leaves(tree):
        found += [leaf.start, leaf.stop, leaf.step] if isinstance(leaf, slice) else [leaf]
    return found


def _bind(func: Any, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    arguments = func._schema.arguments
    given = {a.name: value for a, value in zip(arguments, args, strict=False)}
    return {a.name: a.default_value for a in arguments} | given | kwargs


def _sizes_by_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the shape of a result depends on the values of an operand."""
    namespace, name = func._schema.name.split("::")
    if namespace not in ("aten", "prims", "prim"):
        return func._schema.name not in SIZED_BY_SIZES
    bound = _bind(func, args, kwargs)
    if name in ("index", "_unsafe_index"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in bound["indices"])
    if name == "one_hot":
        return bool(bound["num_classes"] == -1)
    if name == "repeat_interleave":
        return bound.get("output_size") is None and isinstance(bound.get("repeats"), Tensor)
    return SHAPE_BY_VALUES in func.tags or name == "_pack_padded_sequence"


def _deciding_operands(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands whose values decide the shape of the result."""
    bound = _bind(func, args, kwargs)
    name = func._schema.name.split("::")[1]
    if name in ("index", "_unsafe_index"):
        return [
            i for i in bound["indices"] if i is not None and i.dtype in (torch.bool, torch.uint8)
        ]
    if name in DECIDING_OPERAND:
        return [bound[DECIDING_OPERAND[name]]]
    return [t for t in tree_leaves(bound) if isinstance(t, Tensor)]


def _is_still(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether an operation that can draw does not: dropout in eval mode, attention without
    dropout.
    """
    bound = _bind(func, args, kwargs)
    return bound.get("train") is False or bound.get("dropout_p", None) == 0.0


def _same_memory(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    try:
        return one.untyped_storage()._cdata == other.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError):
        return False
