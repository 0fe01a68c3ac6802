"""The modes of torch under which a call is traced: one sees its ATen calls, the other where tensors
become Python values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import HiddenError, UnsupportedModelError
from ..trees import tree_leaves, tree_map
from .decisions import Origins, frames, is_size, plain, refuse, size_from_values, user_line
from .nodes import TORCH_FOLDER
from .schemas import schema_of
from .size_numbers import running
from .trace import Trace

READS_VALUES = torch.Tag.data_dependent_output
SHAPE_BY_VALUES = torch.Tag.dynamic_output_shape
DRAWS = torch.Tag.nondeterministic_seeded
# Operations whose sizes depend on values although no tag says so, and the operand that decides.
DECIDING_OPERAND = {
    "masked_select": "mask",
    "repeat_interleave": "repeats",
    "_pack_padded_sequence": "lengths",
}
OPAQUE = "pathcond::opaque"  # a module that cannot be followed
# Operations beside torch's own whose sizes depend on sizes alone; an opaque module returns the same
# sizes as on the example.
SIZED_BY_SIZES = frozenset(
    f"torchvision::{name}"
    for name in ("roi_align", "roi_pool", "ps_roi_align", "ps_roi_pool", "deform_conv2d")
) | {OPAQUE}
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
BY_PYTHON = (Tensor.apply_, Tensor.map_, Tensor.map2_)  # hand every entry to a function
LITERALS = (torch.tensor, torch.as_tensor, torch.asarray, Tensor.new_tensor)
# Python numbers in these are sizes, and change no value.
SIZED = ("zeros", "ones", "empty", "new_zeros", "new_ones", "new_empty", "rand", "randn", "expand")
COUNTED = ("arange", "full", "new_full", "eye", "one_hot")


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


class Calls(SchemaCheckMode):
    """Sees every ATen call as the model makes it.

    torch admits three kinds of modes before dispatch, and of these SchemaCheckMode is the one that
    watches real values; nothing of its checks is used.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __init__(self, trace: Trace) -> None:
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
        if func is torch.ops.aten.lift_fresh.default and not trace.knows(args[0]):
            return self._literal(args[0])
        if schema_of(func).name.startswith("aten::set_"):
            raise UnsupportedModelError(
                f"the model gives a tensor other memory at {user_line()}: use a new tensor instead"
            )
        operands = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        origins = Origins.union(trace.origins(tensor) for tensor in operands)
        origins.draws |= DRAWS in func.tags and not _is_still(func, args, kwargs)
        if schema_of(func).name == OPAQUE:
            origins.floats.add("what a module returns that cannot be followed")
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
        if made or schema_of(func).writes:
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


class Conversions(TorchFunctionMode):
    """Sees where tensors become Python values, and Python values tensors."""

    def __init__(self, trace: Trace) -> None:
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
        if func in BY_PYTHON:
            raise HiddenError(
                f"the model computes entries one by one in Python at {user_line()}: use operations "
                "on whole tensors (clamp, where)"
            )
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
                made = self._with_sizes(func, args, kwargs)
            trace.refuse_memory_of_weights(made)
            return made
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
        if not (running.watch and running.watch.follows_value and origins.only_integers):
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
def _set(trace: Trace, name: str) -> Iterator[None]:
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


def _sizes_by_values(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the shape of a result depends on the values of an operand."""
    schema = schema_of(func)
    namespace, name = schema.name.split("::")
    if namespace not in ("aten", "prims", "prim"):
        return schema.name not in SIZED_BY_SIZES
    bound = schema.bind(args, kwargs)
    if name in ("index", "_unsafe_index"):
        return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in bound["indices"])
    if name == "one_hot":
        return bool(bound["num_classes"] == -1)
    if name == "repeat_interleave":
        return bound.get("output_size") is None and isinstance(bound.get("repeats"), Tensor)
    return SHAPE_BY_VALUES in func.tags or name == "_pack_padded_sequence"


def _deciding_operands(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[Tensor]:
    """The operands whose values decide the shape of the result."""
    schema = schema_of(func)
    bound = schema.bind(args, kwargs)
    name = schema.name.split("::")[1]
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
    bound = schema_of(func).bind(args, kwargs)
    return bound.get("train") is False or bound.get("dropout_p", None) == 0.0
