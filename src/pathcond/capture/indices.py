"""Errors that a GPU reports too late.

On a CPU ``table[7]`` of seven rows raises an IndexError. On a GPU the kernel notices it when the
call has long returned, and from then on the process can use that GPU no more. Sizes that a model
was not made for are tried on purpose, and nobody's process may end by that: what such kernels would
stop at is looked at before they start, and raised as on a CPU.

>>> import torch
>>> with AsOnCPU():
...     torch.nn.functional.embedding(torch.tensor([7]), torch.ones(7, 2))
Traceback (most recent call last):
...
IndexError: index out of range: aten::embedding reads at 7 of 7 places
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Arguments: TypeAlias = dict[str, Any]
# places and how many there are, with those counted from the end or without
Read: TypeAlias = tuple[Tensor, int, bool]


def as_on_cpu(model: nn.Module) -> AbstractContextManager[object]:
    """What runs inside raises what it would raise on a CPU, before a GPU comes to it."""
    tensors = chain(model.parameters(), model.buffers())
    return nullcontext() if all(t.device.type in ("cpu", "meta") for t in tensors) else AsOnCPU()


class AsOnCPU(TorchDispatchMode):
    """Looks at the arguments of every call that a GPU would stop at."""

    # those of torch that take functions, such as flex_attention, are passed on
    supports_higher_order_operators = True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = func.name() if isinstance(func, torch._ops.OpOverload) else ""
        family = name.removeprefix("aten::").partition(".")[0].rstrip("_")
        reads, values = READS.get(family), VALUES.get(family)
        if reads is None and values is None:
            return func(*args, **kwargs)
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if any(isinstance(t, FakeTensor) or t.is_meta for t in tensors):  # without values
            return func(*args, **kwargs)
        if any(type(t) not in (Tensor, nn.Parameter) for t in tensors):
            return NotImplemented  # a tensor in several parts comes here again, part by part
        schema = func._schema.arguments
        given = dict(zip([argument.name for argument in schema], args, strict=False)) | kwargs
        arguments = {argument.name: argument.default_value for argument in schema} | given
        with torch._C.DisableTorchFunction():
            for index, count, from_end in reads(arguments) if reads else ():
                _require_within(func.name(), index, count, from_end)
            if values and not values(arguments):
                raise RuntimeError(f"{func.name()} does not take such values")
        return func(*args, **kwargs)


def _require_within(name: str, index: Tensor, count: int, from_end: bool) -> None:
    if index.numel() == 0:
        return
    low, high = (int(value) for value in torch.aminmax(index))
    if low < (-count if from_end else 0) or high >= count:
        place = high if high >= count else low
        raise IndexError(f"index out of range: {name} reads at {place} of {count} places")


def _along(arguments: Arguments, *, from_end: bool = False) -> Iterator[Read]:
    """``index`` along ``dim``."""
    tensor = arguments["self"]
    count = tensor.shape[arguments["dim"]] if tensor.dim() else 1
    yield arguments["index"], count, from_end


def _by_axis(arguments: Arguments) -> Iterator[Read]:
    """``tensor[index, mask, index]``: one index for each axis; a mask for as many as it has."""
    axis = 0
    for index in arguments["indices"]:
        is_mask = index is not None and index.dtype in (torch.bool, torch.uint8)
        if index is not None and not is_mask:
            yield index, arguments["self"].shape[axis], True
        axis += index.dim() if is_mask else 1


def _rows(arguments: Arguments) -> Iterator[Read]:
    table = arguments["weight"] if "weight" in arguments else arguments["self"]
    yield arguments["indices"], table.shape[0], False


def _anywhere(arguments: Arguments) -> Iterator[Read]:
    yield arguments["index"], arguments["self"].numel(), True


def _classes(arguments: Arguments) -> Iterator[Read]:
    """The class of every sample, among as many as it has scores."""
    scores, target = arguments["self"], arguments["target"]
    if target.is_floating_point():  # shares of all classes
        return
    if "ignore_index" in arguments:
        target = target[target != arguments["ignore_index"]]
    yield target, scores.shape[1 if scores.dim() > 1 else 0], False


def _several_classes(arguments: Arguments) -> Iterator[Read]:
    """Likewise, several for each sample; -1 ends them."""
    yield arguments["target"] + 1, arguments["self"].shape[-1] + 1, False


def _of_output(arguments: Arguments) -> Iterator[Read]:
    yield arguments["indices"], math.prod(arguments["output_size"]), False


# In inference mode a call that consists of others comes as one.
BAGS = ("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag")
LOSSES = ("nll_loss_forward", "nll_loss2d_forward", "multi_margin_loss")
LOSSES_OF_OTHERS = ("cross_entropy_loss", "nll_loss", "nll_loss2d", "nll_loss_nd")

READS: dict[str, Callable[[Arguments], Iterator[Read]]] = {
    **dict.fromkeys(
        (
            "gather",
            "index_add",
            "index_copy",
            "index_reduce",
            "index_select",
            "scatter",
            "scatter_add",
            "scatter_reduce",
        ),
        _along,
    ),
    "index_fill": lambda arguments: _along(arguments, from_end=True),
    **dict.fromkeys(
        ("index", "index_put", "_index_put_impl", "_unsafe_index", "_unsafe_index_put"), _by_axis
    ),
    **dict.fromkeys(("embedding", "embedding_renorm", *BAGS), _rows),
    **dict.fromkeys(("take", "put"), _anywhere),
    **dict.fromkeys((*LOSSES, *LOSSES_OF_OTHERS), _classes),
    **dict.fromkeys(("multilabel_margin_loss_forward", "multilabel_margin_loss"), _several_classes),
    **dict.fromkeys(("max_unpool2d", "max_unpool3d"), _of_output),
}


def _is_share(values: Tensor) -> bool:
    return bool(((values >= 0) & (values <= 1)).all())


def _are_weights(arguments: Arguments) -> bool:
    """Numbers to draw by: none negative, not all zero."""
    weights = arguments["self"]
    return bool((weights.isfinite() & (weights >= 0)).all() and (weights.sum(-1) > 0).all())


def _are_probabilities(arguments: Arguments) -> bool:
    p = arguments["p"] if "p" in arguments else arguments["self"]
    return _is_share(p) if isinstance(p, Tensor) else True  # a number is looked at at once


def _is_rate(arguments: Arguments) -> bool:
    return bool((arguments["self"] >= 0).all())


def _follow_each_other(arguments: Arguments) -> bool:
    """Bags, each from where it starts to where the next one does, from the first index on."""
    starts = arguments["offsets"]
    ends = torch.cat([starts[1:], starts.new_tensor([len(arguments["indices"])])])
    return bool((starts[:1] == 0).all() and (starts <= ends).all())


def _fill_the_output(arguments: Arguments) -> bool:
    """As many repetitions as the output, where its size is given, has places."""
    repeats, places = arguments["repeats"], arguments["output_size"]
    if not isinstance(repeats, Tensor):
        return True  # a number is looked at at once
    if "self" in arguments:  # one number may stand for all
        tensor, dim = arguments["self"], arguments["dim"]
        repeats = repeats.expand(tensor.numel() if dim is None else tensor.shape[dim])
    return bool((repeats >= 0).all()) and places in (None, int(repeats.sum()))


def _suffice(arguments: Arguments) -> bool:
    """As many values as the mask has places."""
    mask, _ = torch.broadcast_tensors(arguments["mask"], arguments["self"])
    return int(mask.sum()) <= arguments["source"].numel()


VALUES: dict[str, Callable[[Arguments], bool]] = {
    **dict.fromkeys(BAGS, _follow_each_other),
    "_assert_async": lambda arguments: bool(arguments["self"].all()),
    "bernoulli": _are_probabilities,
    "binary_cross_entropy": lambda arguments: _is_share(arguments["self"]),
    "masked_scatter": _suffice,
    "multinomial": _are_weights,
    "poisson": _is_rate,
    "repeat_interleave": _fill_the_output,
}
