"""What a real run of the example feeds to the modules that opaque modules call, and what opaque
modules read themselves.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from ..capture.contents import walk
from ..capture.isolation import attributes_kept, isolated, replaced, weights_kept
from ..capture.models import Inputs, fresh_call
from ..errors import UnsupportedModelError
from .arguments import tells_more

# Code that runs while an opaque module is at work, and is not its own: torch's, and what watches.
NOT_THEIRS = ("torch.", "pathcond.opaque.", "pathcond.capture.", "pathcond.trees")


@dataclass(frozen=True)
class Call:
    """One call of a module, with copies of the tensors it was given."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def kind(self) -> Any:
        """The same for calls that differ in values and sizes of tensors alone."""
        leaves, spec = tree_flatten((self.args, self.kwargs))
        return str(spec), tuple(
            (leaf.dim(), leaf.dtype) if isinstance(leaf, Tensor) else repr(leaf) for leaf in leaves
        )

    @property
    def numel(self) -> int:
        """Elements of all tensors; 0 if one of them is empty."""
        sizes = [
            leaf.numel()
            for leaf in tree_leaves((self.args, self.kwargs))
            if isinstance(leaf, Tensor)
        ]
        return sum(sizes) if all(sizes) else 0


@dataclass
class Recording:
    """One run of the example.

    Attributes:
        opaque: The modules that cannot be followed.
        error: Why.
        calls: Calls of other modules, made by opaque ones.
        returned: What the outermost opaque modules returned, call by call.
        callers: For each of them, the opaque modules that call it.
        executed: For each opaque module, the code that ran on its behalf.
        reads: {id of a parameter or buffer that an opaque module reads itself: why it must stay as
            it is}.
        handed: {module that is handed to an opaque one: its name}.
        entangled: Callers of opaque modules that write into their inputs or return them, or that
            are told more than tensors by them: these are opaque too.
    """

    opaque: Sequence[nn.Module]
    error: UnsupportedModelError
    calls: dict[nn.Module, list[Call]] = field(default_factory=dict)
    returned: dict[nn.Module, list[Any]] = field(default_factory=dict)
    callers: dict[nn.Module, list[nn.Module]] = field(default_factory=dict)
    executed: dict[nn.Module, set[CodeType]] = field(default_factory=dict)
    reads: dict[int, str] = field(default_factory=dict)
    handed: dict[nn.Module, str] = field(default_factory=dict)
    entangled: list[nn.Module] = field(default_factory=list)


def record(
    model: nn.Module,
    example_inputs: Inputs,
    opaque: Sequence[nn.Module],
    *,
    training: bool,
    error: UnsupportedModelError,
) -> Recording:
    """Run the example once, in the given mode; nothing of the model changes."""
    recording = Recording(opaque=tuple(opaque), error=error)
    args, kwargs = fresh_call(model, example_inputs)
    # In train mode forward updates statistics: of copies, and under the names of the originals.
    originals = dict(model.named_buffers())
    copies = {name: buffer.detach().clone() for name, buffer in originals.items()}
    known = [*model.parameters(), *(buffer for buffer in originals.values())]
    owners = {
        tensor.untyped_storage().data_ptr(): id(tensor)
        for tensor in known
        if tensor.numel() and not tensor.is_meta
    }
    owners |= {
        copy.untyped_storage().data_ptr(): id(originals[name])
        for name, copy in copies.items()
        if copy.numel()
    }
    watch = _Watch(recording, owners)
    with ExitStack() as stack:
        stack.enter_context(isolated(model, training=training))
        stack.enter_context(attributes_kept(model))
        stack.enter_context(weights_kept(model))
        stack.enter_context(replaced(model, copies))
        stack.enter_context(torch.no_grad())
        stack.enter_context(watch.hooked(model))
        stack.enter_context(watch)
        stack.enter_context(watch.profiled())
        model(*args, **kwargs)
    return recording


@dataclass(frozen=True)
class _Given:
    """What a module was called with.

    Attributes:
        tensors: With the number of times that they had been written into.
        arguments: All, positional ones and by name.
    """

    tensors: list[tuple[Tensor, int]]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]


class _Watch(TorchDispatchMode):
    """Follows which module is at work, and notes the parameters that opaque ones read
    themselves.
    """

    def __init__(self, recording: Recording, owners: dict[int, int]) -> None:
        super().__init__()
        self.recording = recording
        self.owners = owners
        self.opaque = set(recording.opaque)
        self.stack: list[nn.Module] = []
        self.given: list[_Given] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.stack and self.stack[-1] in self.opaque:
            self._read((args, kwargs), type(self.stack[-1]).__name__)
        return func(*args, **(kwargs or {}))

    def _read(self, tree: Any, kind: str) -> None:
        """Parameters, or views of them, among some tensors."""
        for leaf in tree_leaves(tree):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                owner = self.owners.get(leaf.untyped_storage().data_ptr())
                if owner is not None:
                    reason = f"is read by {kind} itself, which cannot be captured"
                    self.recording.reads.setdefault(owner, reason)

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Hooks on all modules, for the time of the body."""
        with ExitStack() as stack:
            for module in model.modules():
                before = module.register_forward_pre_hook(
                    self._enter, prepend=True, with_kwargs=True
                )
                stack.callback(before.remove)
                after = module.register_forward_hook(self._leave, always_call=True)
                stack.callback(after.remove)
            yield

    @contextmanager
    def profiled(self) -> Iterator[None]:
        """Note the code that opaque modules execute themselves, for the time of the body."""
        before = sys.getprofile()

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            at_work = event == "call" and bool(self.stack) and self.stack[-1] in self.opaque
            if at_work and not frame.f_globals.get("__name__", "").startswith(NOT_THEIRS):
                self.recording.executed.setdefault(self.stack[-1], set()).add(frame.f_code)

        # What the garbage collector calls would count as theirs.
        collects = gc.isenabled()
        gc.disable()
        sys.setprofile(profile)
        try:
            yield
        finally:
            sys.setprofile(before)
            if collects:
                gc.enable()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called_by_opaque = bool(self.stack) and self.stack[-1] in self.opaque
        if called_by_opaque:
            self._read((args, kwargs), type(self.stack[-1]).__name__)
        if module in self.opaque:
            self._note_handed(module, args, kwargs)
        self.stack.append(module)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.given.append(_Given([(tensor, tensor._version) for tensor in tensors], (args, kwargs)))
        if called_by_opaque and module not in self.opaque:
            copies = tree_map(
                lambda x: x.detach().clone() if isinstance(x, Tensor) else x, (args, kwargs)
            )
            self.recording.calls.setdefault(module, []).append(Call(*copies))
            self.recording.callers.setdefault(module, []).append(self.stack[-2])

    def _note_handed(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Modules and parameters among the arguments of an opaque module, inside of objects too."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if not isinstance(leaf, Tensor)]
        for part in walk(leaves, closed=lambda part: isinstance(part, nn.Module)):
            if isinstance(part, nn.Module):
                self.recording.handed.setdefault(part, type(module).__name__)
            elif isinstance(part, Tensor):
                self._read(part, type(module).__name__)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        # a hook of the user's raised before ours ran
        if not self.stack or self.stack[-1] is not module:
            return
        self.stack.pop()
        given = self.given.pop()
        if module not in self.opaque:
            return
        self._read(output, type(module).__name__)
        if any(outer in self.opaque for outer in self.stack):
            return
        tensors = given.tensors
        memory = {tensor.untyped_storage().data_ptr() for tensor, _ in tensors if tensor.numel()}
        returned = [
            leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.numel()
        ]
        shared = any(leaf.untyped_storage().data_ptr() in memory for leaf in returned)
        if self.stack and (
            shared
            or not tensors
            or any(tensor._version != version for tensor, version in tensors)
            or tells_more(module, *given.arguments, output)
        ):
            self.recording.entangled.append(self.stack[-1])
        self.recording.returned.setdefault(module, []).append(output)
