"""What a model computes on the example batch: its outputs, how much they change, and its samples
one by one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed.sharding import computes_in, reshard
from ..errors import UnsupportedModelError
from ..interrupts import interruptible, uninterrupted
from .indices import as_on_cpu
from .isolation import attributes_kept, isolated, replaced, weights_kept
from .models import Inputs, as_call, fresh_call, returned_leaves
from .tf32 import backends_of, without_tf32
from .usable import differing_types


def default_tolerance(model: nn.Module, computed_in: Iterable[torch.dtype] = ()) -> float:
    """√eps of the least precise type: far above rounding, far below a wrong symmetry.

    Args:
        model: Its parameters' types count, and those that ``fully_shard`` runs it in.
        computed_in: Further types that outputs pass through, such as those of ``torch.autocast``
            inside forward.
    """
    types = {parameter.dtype for parameter in model.parameters()} | computes_in(model) | {
        *computed_in
    } or {torch.float32}
    return max(math.sqrt(torch.finfo(dtype).eps) for dtype in types)


def example_outputs(
    model: nn.Module,
    example_inputs: Inputs,
    values: dict[str, Tensor],
    *,
    training: bool,
    call: Callable[..., Any] | None = None,
) -> list[Tensor]:
    """Floating-point outputs, and checksums of text, with some tensors replaced; buffers are
    copies, so statistics stay as they are.

    Args:
        model: Any module.
        example_inputs: Of one call.
        values: {name of a parameter or buffer: what stands in its place}.
        training: Mode to run in.
        call: Calls the model, given it and its arguments. Ctrl-C waits until it is done: it may
            watch the model by one of torch's modes.
    """
    args, kwargs = fresh_call(model, example_inputs)
    buffers = {
        name: values.get(name, buffer).detach().clone() for name, buffer in model.named_buffers()
    }
    with (
        uninterrupted(),
        isolated(model, training=training),
        attributes_kept(model),
        weights_kept(model, values.values()),
        replaced(model, values | buffers),
        torch.no_grad(),
        without_tf32(backends_of(model, example_inputs)),
    ):
        try:
            if call is not None:
                outputs = call(model, *args, **kwargs)
            else:
                with interruptible():
                    outputs = model(*args, **kwargs)
        finally:
            reshard(model)
    leaves = [_checksum(leaf) for leaf in returned_leaves(outputs)]
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point]


def _checksum(leaf: Any) -> Any:
    """Text as a number, so that text that is made of hidden values changes as a tensor does."""
    if isinstance(leaf, str):
        leaf = leaf.encode()
    return torch.tensor([zlib.crc32(leaf)]).double() if isinstance(leaf, bytes) else leaf


def require_fitting_types(model: nn.Module, example_inputs: Inputs) -> None:
    """Refuse a batch of another floating-point type than the parameters', if the model does not
    convert it.

    A capture would not notice, because it computes no values.
    """
    found = differing_types(model, *as_call(example_inputs))
    if not found or any(parameter.is_meta for parameter in model.parameters()):
        return
    try:
        example_outputs(model, example_inputs, {}, training=False)
    except RuntimeError as error:
        raise UnsupportedModelError(
            f"{found} The model fails on it: {str(error).splitlines()[0]}"
        ) from error


def output_change(before: list[Tensor], after: list[Tensor]) -> float:
    """Largest |after − before| of any output over the largest |before| of the same output."""
    change = 0.0
    for a, b in zip(before, after, strict=True):
        if a.numel():
            finite = a.double().masked_fill(a.isinf(), 0.0)
            scale = float(finite.abs().max()) or 1.0
            # Equal infinities, such as those of masked logits, are no change.
            difference = (
                float(torch.where(a == b, 0.0, (a.double() - b.double()).abs()).max()) / scale
            )
            change = difference if math.isnan(difference) else max(change, difference)
            if math.isnan(change):
                return change
    return change


def split_samples(model: nn.Module, example_inputs: Inputs) -> list[Any]:
    """The example batch as one-sample batches; a single one, the whole, where samples are not told
    apart.

    Samples lie along the first axis of every input that has the most frequent length there. Whether
    that is so is tried, on slightly disturbed inputs: in eval mode each of two samples must get the
    same outputs alone as together.
    """
    inputs = as_call(example_inputs)
    length = count_samples(inputs)
    samples = partial(_samples, length)
    # Without values nothing can be tried.
    if length < 2 or any(
        leaf.is_meta
        for leaf in [*tree_leaves(inputs), *model.parameters()]
        if isinstance(leaf, Tensor)
    ):
        return [example_inputs]
    # forward may write them
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    disturbed = tree_map(_disturb, inputs)
    try:
        with as_on_cpu(model):
            paired, *alone = (
                example_outputs(model, samples(*bounds, disturbed), values, training=False)
                for bounds in ((0, 2), (0, 1), (1, 2))
            )
    except Exception:  # whatever a model raises when its inputs are cut where they must not be
        return [example_inputs]
    for i, single in enumerate(alone):
        cut = [out[i : i + 1] if out.dim() and out.shape[0] == 2 else out for out in paired]
        same_shapes = [out.shape for out in cut] == [out.shape for out in single]
        if not same_shapes or not output_change(single, cut) <= default_tolerance(model):
            return [example_inputs]
    return [samples(i, i + 1, inputs) for i in range(length)]


def first_samples(model: nn.Module, example_inputs: Inputs, count: int) -> Any:
    """The first samples of the example batch; all of it where it has no more, or where samples are
    not told apart.
    """
    inputs = as_call(example_inputs)
    length = count_samples(inputs)
    if length <= count or len(split_samples(model, example_inputs)) == 1:
        return example_inputs
    first = _samples(length, 0, count, inputs)
    return first[0] if isinstance(example_inputs, Tensor) else first


def count_samples(inputs: Inputs) -> int:
    """How many samples a batch has: the most frequent length of its tensors' first axes."""
    lengths = [
        leaf.shape[0]
        for leaf in tree_leaves(inputs)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1
    ]
    return max(lengths, key=lengths.count, default=1)


def _samples(length: int, start: int, stop: int, inputs: Inputs) -> Any:
    """Some samples of all inputs of one call that have as many as ``length``."""

    def part(x: Any) -> Any:
        return x[start:stop] if isinstance(x, Tensor) and x.dim() and x.shape[0] == length else x

    args, kwargs = tree_map(part, inputs)
    return kwargs or args


def _disturb(x: Any) -> Any:
    """Floating-point inputs away from constants and from values that are not finite."""
    if not isinstance(x, Tensor) or not x.dtype.is_floating_point or x.is_meta:
        return x
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x)
    finite = torch.where(x.isfinite(), x, 0)
    return finite + 0.1 * noise * (finite.abs().max() if bool(finite.any()) else 1)
