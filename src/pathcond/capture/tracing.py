"""Real values -> Graph: the quickest way, and one for models that torch.export cannot follow.

One call of the model runs on copies of its parameters and buffers. Every ATen call is noted as the
model makes it, before autograd and before composite operations are taken apart. Where a value
becomes a Python value, `decisions` says whether the model may decide by it.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher

from ..errors import HiddenError, UnsupportedModelError
from ..trees import tree_map
from .contents import tensors_in
from .isolation import LATE, attributes_kept, isolated, replaced, weights_kept
from .models import returned_leaves
from .modes import Calls, Conversions
from .nodes import Graph, Node, alive, called_parameters
from .trace import Trace, UnknownTensorError

# Calls after which a model that counts them may go another way: the first ones, which a short
# period or warm-up decides about, and late ones, around a multiple of longer periods.
COUNTED = (*range(2, 9), *range(LATE, LATE + 4))


def trace_graph(
    model: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
    *,
    training: bool,
    draws: AbstractContextManager[Any],
    existing: Mapping[int, Tensor] | None = None,
    gradients: bool = False,
    call: Callable[..., Any] | None = None,
    calls: int = 0,
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
        call: Calls the model, given it and its arguments.
        calls: How many calls went before, which have left something in attributes. One is made;
            for the others, whole numbers that it has counted are set on.

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
    unwritten = tree_map(_clone, (args, kwargs))
    trace = Trace(model, args, kwargs, {**copies, **buffers}, existing)
    own = {id(module) for module in model.modules()}
    given = {id(tensor) for tensor in tensors_in((args, kwargs), but=own)}
    # With gradients, but nobody will ask for them: nothing is kept for the backward pass.
    forget = torch.autograd.graph.saved_tensors_hooks(lambda tensor: None, lambda kept: kept)
    grad_mode = forget if gradients else torch.no_grad()
    tensors = {**copies, **buffers}
    with attributes_kept(model) as before, replaced(model, tensors), grad_mode:
        if calls:
            first_args, first_kwargs = tree_map(_clone, unwritten)
            model(*first_args, **first_kwargs)
            before.mark()
            before.count_on(calls)
            trace.existing = all_tensors()
        with enable_python_dispatcher(), Calls(trace), Conversions(trace), draws, _written_out():
            result = call(model, *args, **kwargs) if call is not None else model(*args, **kwargs)
        if isinstance(trace.refused, UnknownTensorError):
            raise trace.refused
        if trace.refused is not None:
            raise HiddenError(
                f"the model catches what stops its capture, and goes another way: {trace.refused}"
            ) from trace.refused
        trace.note_reassigned(model)
        trace.note_kept(model)
        trace.hold(t for t in tensors_in((args, kwargs), but=own) if id(t) not in given)
        again_after: tuple[int, ...] = ()
        if calls == 0 and before.have_changed():
            again_after = (1,)
        elif calls == 1 and before.have_counted():
            again_after = COUNTED
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
        again_after=again_after,
    )


def _clone(leaf: Any) -> Any:
    return leaf.clone() if isinstance(leaf, Tensor) else leaf


@contextlib.contextmanager
def _written_out() -> Iterator[None]:
    """Attention and encoder layers as torch writes them out, not as one fused operation."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


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
        weights_kept(model),
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
