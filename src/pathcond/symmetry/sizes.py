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
...     for other in find_other_sizes(model, torch.randn(2, 3, 8, 8)).examples
... ]
[(3, 3, 5, 5)]
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from ..capture.indices import as_on_cpu
from ..capture.isolation import attributes_kept, isolated, quiet
from ..capture.models import Inputs, as_call
from ..capture.outputs import example_outputs
from ..interrupts import uninterrupted

# Sizes up to this one are not halved: an axis of one element hides what depends on its size.
SMALL = 3
# Sizes up to this one are doubled, if the model takes no smaller ones.
SHORT = 64
# Axes of one size of which all combinations are tried, and sizes for each.
MANY = 4
FEW = 2
# Batch sizes of derived examples: small, so that they cost little, and not the usual two.
BATCHES = (3, 5, 7)


@dataclass(frozen=True)
class Example:
    """Inputs of one forward call.

    Attributes:
        inputs: A Tensor, a tuple of positional inputs or a dict of keyword inputs.
        given: Whether the user gave them; otherwise they were derived from the user's.
        runnable: Whether what the model computes of them for real means something; not where
            outcomes of its decisions were put in their place.
    """

    inputs: Inputs
    given: bool = True
    runnable: bool = True

    def numel(self) -> int:
        """Numbers in all tensors of the inputs."""
        leaves = tree_flatten(as_call(self.inputs))[0]
        return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


@dataclass(frozen=True)
class Axes:
    """Axes of input tensors that have one size and change together.

    Attributes:
        places: (position of the tensor among the inputs, axis) pairs.
        size: Their size in the example.
        others: Sizes to try, the preferred one first.
        batch: Whether samples lie along them.
        followers: Axes of another size that must change with them: twice as long, or longer by one.
    """

    places: tuple[tuple[int, int], ...]
    size: int
    others: tuple[int, ...]
    batch: bool = False
    followers: tuple[Follower, ...] = ()

    def resized(self, size: int) -> Iterator[tuple[int, int, int]]:
        """(position of the tensor, axis, its size) of all that changes, if these get a size."""
        yield from ((at, axis, size) for at, axis in self.places)
        for follower in self.followers:
            yield from follower.resized(self.size, size)

    def size_in(self, example: Example) -> int:
        """Their size in another example of the same structure."""
        at, axis = self.places[0]
        return int(tree_flatten(as_call(example.inputs))[0][at].shape[axis])


@dataclass(frozen=True)
class Follower:
    """Axes that are as many times as long as others, or longer by as much, whatever their size.

    Attributes:
        places: (position of the tensor among the inputs, axis) pairs.
        size: Their size in the example.
        times: Whether the ratio stays; else the difference does.
    """

    places: tuple[tuple[int, int], ...]
    size: int
    times: bool

    def resized(self, before: int, after: int) -> Iterator[tuple[int, int, int]]:
        """As of ``Axes``, where the axes that are followed change from one size to another."""
        size = self.size * after // before if self.times else self.size + after - before
        yield from ((at, axis, max(size, 0)) for at, axis in self.places)


@dataclass(frozen=True)
class OtherSizes:
    """The sizes that a model lets vary.

    Attributes:
        model: The model.
        axes: Axes of the inputs that can change, one by one.
        examples: The example at other sizes: one if all axes can change together, else one for
            each; none if the model takes the example's sizes only.
    """

    axes: tuple[Axes, ...]
    examples: tuple[Example, ...]

    def resize(self, example: Example, axes: Axes, size: int) -> Example:
        """An example at one more size, cut or repeated along these axes."""
        return _resize_example(example, [(axes, size)])

    def apply_to(self, example: Example) -> bool:
        """Whether the axes are those of this example too: a second one may have other inputs."""
        leaves = tree_flatten(as_call(example.inputs))[0]
        places = [place for axes in self.axes for place in axes.places]
        return all(
            at < len(leaves) and isinstance(leaves[at], Tensor) and axis < leaves[at].dim()
            for at, axis in places
        )


def find_other_sizes(model: nn.Module, example_inputs: Inputs) -> OtherSizes:
    """Examples that differ from the given one in every size that the model lets vary.

    Values are those of the example, cut or repeated.

    Args:
        model: Any module, not wrapped; it is run on the candidates in eval mode and not changed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
    """
    example = Example(example_inputs)
    groups = list(_groups(tree_flatten(as_call(example_inputs))[0]))
    accepted: list[tuple[Axes, int]] = []
    together = True  # whether the model takes all changes at once

    def accepts(axes: Axes, sizes: Sequence[int]) -> bool:
        nonlocal together
        for size in sizes:
            change = (axes, size)
            # With a smaller batch, if the model takes that, a run costs less.
            beside = _accepts(model, _resize_example(example, [*accepted, change]))
            if beside or (accepted and _accepts(model, _resize_example(example, [change]))):
                accepted.append(change)
                together &= beside
                return True
        return False

    def varied() -> set[tuple[int, int]]:
        return {place for axes, _ in accepted for place in axes.places}

    for axes in groups:
        if not accepts(axes, axes.others):
            for part in _split(axes):
                accepts(part, axes.others)
    for axes in _that_depend_on_each_other(groups, varied()):
        if varied().isdisjoint(axes.places):
            accepts(axes, axes.others[:FEW])
    changes = [accepted] if together else [[change] for change in accepted]
    examples = [_resize_example(example, each) for each in changes if each]
    return OtherSizes(tuple(axes for axes, _ in accepted), tuple(examples))


def _that_depend_on_each_other(
    groups: Sequence[Axes], varied: set[tuple[int, int]]
) -> Iterator[Axes]:
    """Axes that may vary together where they do not alone: all that have one size, some of these,
    or those of one input with those of another.
    """
    left = [axes for axes in groups if varied.isdisjoint(axes.places)]
    by_size: dict[int, list[Axes]] = {}
    for axes in left:
        by_size.setdefault(axes.size, []).append(axes)
    for same in by_size.values():
        places = tuple(place for axes in same for place in axes.places)
        size = same[0].size
        most = len(places) if len(same) > 1 else len(places) - 1
        for count in range(most, 1, -1) if len(places) <= MANY else ():
            for some in itertools.combinations(places, count):
                yield Axes(some, size, _other_lengths(size))
    for one, other in itertools.permutations(left, 2):
        inputs = {at for at, _ in one.places}
        if one.size < other.size and inputs.isdisjoint(at for at, _ in other.places):
            for times in (True, False) if other.size % one.size == 0 else (False,):
                yield replace(one, followers=(Follower(other.places, other.size, times),))


def _resize_example(example: Example, changes: Sequence[tuple[Axes, int]]) -> Example:
    leaves, structure = tree_flatten(as_call(example.inputs))
    new = list(leaves)
    for axes, size in changes:
        for at, axis, length in axes.resized(size):
            new[at] = _resize(new[at], axis, length)
    args, kwargs = tree_unflatten(new, structure)
    inputs = kwargs if kwargs else args[0] if isinstance(example.inputs, Tensor) else args
    return replace(example, inputs=inputs, given=False)


def _groups(leaves: Sequence[Any]) -> Iterator[Axes]:
    """The batch axes first, then all other axes by their size."""
    shapes = {at: tuple(leaf.shape) for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor)}
    firsts = [shape[0] for shape in shapes.values() if shape]
    batch = max(firsts, key=firsts.count, default=0)
    by_size: dict[tuple[bool, int], list[tuple[int, int]]] = {}
    for at, shape in shapes.items():
        for axis, size in enumerate(shape):
            by_size.setdefault((axis == 0 and size == batch, size), []).append((at, axis))
    for (is_batch, size), places in sorted(by_size.items(), key=lambda item: not item[0][0]):
        yield Axes(
            tuple(places),
            size,
            _other_batches(size) if is_batch else _other_lengths(size),
            batch=is_batch,
        )


def _other_batches(size: int) -> tuple[int, ...]:
    """A small batch size that does not divide the example's; the second is for models that are made
    for it.
    """
    return next((small,) for small in (*BATCHES, size + 1) if size % small)


def _other_lengths(size: int) -> tuple[int, ...]:
    """Sizes to try in place of one, the preferred one first: shorter, to cost little, and with no
    divisor in common.

    What happens only at odd sizes, or at those that are no multiple of 4, shows itself at one of
    the two.

    >>> _other_lengths(8), _other_lengths(7), _other_lengths(2)
    ((5, 4, 6, 12, 16), (4, 3, 5, 10, 14), (5, 4))
    """
    if size <= SMALL:
        return (2 * size + 1, size + 2, 2 * size) if size != 2 else (5, 4)
    coprime = [m for m in range(2, size) if math.gcd(m, size) == 1 and (m - size) % 2]
    awkward = min(coprime, key=lambda m: (abs(2 * m - size), -m))
    usual = (size // 2, (3 * size) // 4, (3 * size) // 2)
    # Networks that halve five times take nothing else.
    halved = (size - 32,) if size > 32 and size % 32 == 0 else ()
    doubled = (2 * size,) if size <= SHORT else ()
    return tuple(dict.fromkeys((awkward, *usual, *halved, *doubled)))


def _split(axes: Axes) -> Iterator[Axes]:
    """The same axes one position at a time: length and width may have the same size by chance."""
    positions = sorted({axis for _, axis in axes.places})
    if len(positions) < 2:
        return
    for position in positions:
        places = tuple((at, axis) for at, axis in axes.places if axis == position)
        yield replace(axes, places=places)


def _resize(tensor: Tensor, axis: int, size: int) -> Tensor:
    """The tensor cut to a size along an axis, or repeated from its start."""
    if size <= tensor.shape[axis]:  # many times quicker than picking
        return tensor.narrow(axis, 0, size).clone(memory_format=torch.contiguous_format)
    places = torch.arange(size, device=tensor.device) % tensor.shape[axis]
    if tensor.is_meta:
        places = places.to("meta")
    return tensor.index_select(axis, places)


def _accepts(model: nn.Module, example: Example) -> bool:
    """Whether the model runs on an example, in eval mode."""
    try:
        run_lightly(model, example)
    # Whatever a model raises on sizes that it was not made for.
    except Exception:
        return False
    return True


def run_lightly(
    model: nn.Module,
    example: Example,
    *,
    training: bool = False,
    call: Callable[..., Any] | None = None,
) -> None:
    """Run a model to see whether and how it takes an example; on shapes alone where values are not
    there or mean nothing.

    Args:
        model, example: What to run.
        training: In which mode.
        call: Calls the model, given it and its arguments.
    """
    with uninterrupted(), quiet():
        if example.runnable and not is_on_meta(model):
            with as_on_cpu(model):
                example_outputs(model, example.inputs, {}, training=training, call=call)
        else:
            _run_on_shapes(model, example.inputs, training, call)


def is_on_meta(model: nn.Module) -> bool:
    """Whether a model has parameters without values."""
    return any(parameter.is_meta for parameter in model.parameters())


def _run_on_shapes(
    model: nn.Module, example_inputs: Inputs, training: bool, call: Callable[..., Any] | None
) -> None:
    """Run the model without computing a value."""
    on_meta = is_on_meta(model)
    with FakeTensorMode(allow_non_fake_inputs=True) as fake:

        def without_value(tensor: Tensor) -> Tensor:
            return fake.from_tensor(tensor.to("meta") if on_meta else tensor)

        args, kwargs = tree_map_only(Tensor, without_value, as_call(example_inputs))
        with isolated(model, training=training), attributes_kept(model), torch.no_grad():
            call(model, *args, **kwargs) if call is not None else model(*args, **kwargs)
