"""The record of one call that is being traced: every ATen call so far, and what each of its tensors
depends on.
"""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as of_all_modules
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import HiddenError, UnsupportedModelError
from ..memory import storage_of
from ..trees import tree_leaves, tree_map
from .contents import PLAIN, tensors_in
from .decisions import DecisionError, Origins, calling_module, only_raises, refuse, user_line
from .finiteness import TESTS, tells_finite
from .isolation import TABLES, defaults_of
from .models import canonical_names
from .nodes import Node, op_name, type_of

# Hooks that are called for every module.
ALL_HOOKS = (of_all_modules._global_forward_hooks, of_all_modules._global_forward_pre_hooks)


class UnknownTensorError(Exception):
    """The model uses a tensor of which it is not known whether it was there before the call."""


class Trace:
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
        self.finite: set[Node] = set()
        self.refused: Exception | None = None
        self.paused = False
        self.literal = False
        self.sized = False
        self.modules = {id(module): name for name, module in model.named_modules()}
        self._named: Counter[str] = Counter()
        self._node = WeakTensorKeyDictionary()
        self._origins = WeakTensorKeyDictionary()
        self.existing = existing
        self._copies = copies
        self._memory = [
            (name, tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)
            for name, tensor in [*model.named_parameters(), *model.named_buffers()]
            if tensor.device.type == "cpu" and tensor.layout == torch.strided
        ]
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

    def knows(self, tensor: Tensor) -> bool:
        return tensor in self._node

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
        if self.existing is None:
            raise UnknownTensorError
        if id(tensor) not in self.existing:
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
            if all(tells_finite(self.node(tensor), self.finite) for tensor in tensors):
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
        if node.op in TESTS and bool(torch.isfinite(tree_leaves(args)[0]).all()):
            self.finite.add(node)
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

    def refuse_memory_of_weights(self, tensor: Tensor) -> None:
        """Refuse a constant that lies in the memory of a parameter or buffer, as one that was made
        of an array of NumPy may.
        """
        start = tensor.data_ptr()
        for name, first, last in self._memory:
            if first <= start < last:
                raise HiddenError(
                    f"the model reads {name} as an array of NumPy at {user_line()}: read the "
                    "parameter itself"
                )

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
        modules = list(model.modules())
        kept = [
            value
            for module in modules
            for name, value in vars(module).items()
            if name not in TABLES and not _is_empty(value)
        ]
        # Buffers that were none before, or not there; others are written as ``copy_`` does.
        kept += [
            buffer
            for name, buffer in model.named_buffers(remove_duplicate=False)
            if name not in self._copies
        ]
        kept += [vars(tensor) for tensor in self._copies.values()]
        kept += [*ALL_HOOKS, *defaults_of(modules)]
        known = {id(module) for module in modules}
        self.hold(
            tensor
            for tensor in tensors_in(kept, but=known)
            if tensor in self._origins and self._origins[tensor].has_inputs
        )

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Keep what was computed as it is, as outputs are kept: somebody may read it."""
        self.checked += [
            self._node[tensor]
            for tensor in tensors
            if tensor in self._node and self._node[tensor].target is not None
        ]


def _is_empty(value: Any) -> bool:
    """As most attributes of a module are: flags, and tables of hooks without any."""
    return type(value) in PLAIN or (type(value) in (dict, OrderedDict, list) and not value)


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


def _same_memory(one: Tensor, other: Tensor) -> bool:
    memory = storage_of(one)
    return one is other or (memory is not None and memory == storage_of(other))
