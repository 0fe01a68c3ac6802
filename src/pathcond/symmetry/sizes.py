"""The example at other sizes: another batch size, length or resolution.

A captured graph has the sizes of its example baked in: how far a table of positions is read, what a
mean divides by, which branch an ``if x.shape[1] > 10`` takes. A symmetry must hold for every input
that the model accepts, so the model is captured a second time on inputs of other sizes, and the
equations of both captures must hold.

>>> import torch
>>> model = torch.nn.Sequential(
...     torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU(), torch.nn.AdaptiveAvgPool2d(1)
... )
>>> [
...     tuple(other.inputs.shape)
...     for other in examples_of_other_sizes(model, torch.randn(2, 3, 8, 8))
... ]
[(3, 3, 4, 4)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..capture.isolation import isolated, quiet
from ..capture.models import as_call
from ..capture.outputs import example_outputs
from ..interrupts import uninterrupted

# Sizes up to this one are not halved: an axis of one element hides what depends on its size.
SMALL = 3
# The batch size of derived examples: small, so that they cost little, and not the usual two.
BATCH = 3


@dataclass(frozen=True)
class Example:
    """Inputs of one forward call.

    Attributes:
        inputs: A Tensor, a tuple of positional inputs or a dict of keyword inputs.
        given: Whether the user gave them; otherwise they were derived from the user's.
        runnable: Whether the model can be run on them for real. Indices that the user gave may
            point beyond an axis that was cut; on an accelerator such a read cannot be caught.
    """

    inputs: Any
    given: bool = True
    runnable: bool = True


@dataclass(frozen=True)
class _Axes:
    """Axes of input tensors that have one size and change together.

    Attributes:
        places: (position of the tensor among the inputs, axis) pairs.
        size: Their size in the example.
        others: Sizes to try, the preferred one first.
    """

    places: tuple[tuple[int, int], ...]
    size: int
    others: tuple[int, ...]


def examples_of_other_sizes(model: nn.Module, example_inputs: Any) -> list[Example]:
    """Examples that differ from the given one in every size that the model lets vary.

    Values are those of the example, cut or repeated. Where all sizes can change together there is
    one example, else one per size; none if the model takes the example's sizes only.

    Args:
        model: Any module, not wrapped; it is run on the candidates in eval mode and not changed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
    """
    call = as_call(example_inputs)
    leaves, structure = tree_flatten(call)

    def resized(changes: Sequence[tuple[_Axes, int]]) -> Example:
        new = list(leaves)
        for axes, size in changes:
            for at, axis in axes.places:
                new[at] = _resize(new[at], axis, size)
        args, kwargs = tree_unflatten(new, structure)
        inputs = kwargs if kwargs else args[0] if isinstance(example_inputs, Tensor) else args
        return Example(inputs, given=False, runnable=_is_runnable(model, leaves, changes))

    accepted: list[tuple[_Axes, int]] = []
    for axes in _groups(leaves):
        for candidate in (axes, *_split(axes)):
            size = next(
                (s for s in axes.others if _accepts(model, resized([(candidate, s)]))), None
            )
            if size is not None:
                accepted.append((candidate, size))
            if size is not None and candidate is axes:
                break
    if not accepted:
        return []
    together = resized(accepted)
    if len(accepted) == 1 or _accepts(model, together):
        return [together]
    return [resized([change]) for change in accepted]


def _groups(leaves: Sequence[Any]) -> Iterator[_Axes]:
    """The batch axes first, then all other axes by their size."""
    shapes = {at: tuple(leaf.shape) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    firsts = [shape[0] for shape in shapes.values() if shape]
    batch = max(firsts, key=firsts.count, default=0)
    by_size: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for at, shape in shapes.items():
        for axis, size in enumerate(shape):
            by_size.setdefault((axis == 0 and size == batch, size), []).append((at, axis))
    for (is_batch, size), places in sorted(by_size.items(), key=lambda item: not item[0][0]):
        if is_batch:
            others: tuple[int, ...] = (BATCH if size != BATCH else BATCH - 1,)
        elif size > SMALL:
            others = (size // 2, (3 * size) // 4, (3 * size) // 2)
        else:
            others = (size + 2, 2 * size)
        yield _Axes(tuple(places), size, others)


def _split(axes: _Axes) -> Iterator[_Axes]:
    """The same axes one position at a time: length and width may have the same size by chance."""
    positions = sorted({axis for _, axis in axes.places})
    if len(positions) < 2:
        return
    for position in positions:
        places = tuple((at, axis) for at, axis in axes.places if axis == position)
        yield _Axes(places, axes.size, axes.others)


def _resize(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The tensor cut to a size along an axis, or repeated from its start."""
    places = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    if tensor.is_meta:
        places = places.to("meta")
    return tensor.index_select(axis, places)


def _is_runnable(
    model: nn.Module, leaves: Sequence[Any], changes: Sequence[tuple[_Axes, int]]
) -> bool:
    device = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device in ("cpu", "meta"):
        return device == "cpu"
    indices = {
        at
        for at, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor) and leaf.dim() and not leaf.dtype.is_floating_point
    }
    longer = any(size > axes.size for axes, size in changes)
    cut_with_the_rest = all(indices <= {at for at, _ in axes.places} for axes, _ in changes)
    return not indices or (cut_with_the_rest and not longer)


def _accepts(model: nn.Module, example: Example) -> bool:
    """Whether the model runs on an example, in eval mode; for real where that is safe."""
    try:
        with quiet():
            if example.runnable:
                example_outputs(model, example.inputs, {}, training=False)
            else:
                _run_on_shapes(model, example.inputs)
    # Whatever a model raises on sizes that it was not made for.
    except Exception:
        return False
    return True


def _run_on_shapes(model: nn.Module, example_inputs: Any) -> None:
    """Run the model without computing a value."""
    on_meta = any(parameter.is_meta for parameter in model.parameters())
    with uninterrupted(), FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def without_value(tensor: Tensor) -> Tensor:
            return fake.from_tensor(tensor.to("meta") if on_meta else tensor)

        args, kwargs = tree_map_only(Tensor, without_value, as_call(example_inputs))
        with isolated(model, training=False), torch.no_grad():
            model(*args, **kwargs)
