"""Stacks of parameters that an unknown index picks from: every member has scales of its own.

A mixture of experts reads ``W[chosen]`` from a stack W of shape (experts, out, in), where
``chosen`` depends on the data. What is computed from it row by row is followed once per expert, as
``Picked``; what mixes rows, or meets what another index picked, must have the same scales whichever
experts were chosen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from ..capture.nodes import Node
from ..trees import tree_leaves, tree_map
from . import labels as lb
from .labels import ANY, Labels
from .values import Known, Operand, Pick, Picked, Weight

# Tables with more rows than this (vocabularies, positions) share one scale per column.
MAX_MEMBERS = 512
# A stack's place in an index is followed through no larger tensors.
MAX_PLACES = 1 << 22

# Ops that pass elements on unchanged, each to one place or more.
MOVES = frozenset(
    "permute transpose t numpy_T adjoint mT squeeze unsqueeze expand expand_as slice select narrow "
    "movedim moveaxis swapaxes swapdims split split_with_sizes chunk unbind tensor_split "
    "unsafe_split "
    "unsafe_chunk broadcast_to hsplit vsplit dsplit view reshape _unsafe_view flatten unflatten "
    "view_as "
    "reshape_as ravel contiguous clone detach alias lift_fresh to _to_copy type_as".split()
)
RESHAPES = frozenset("view reshape _unsafe_view flatten unflatten view_as reshape_as ravel".split())
COPIES = frozenset("contiguous clone detach alias lift_fresh to _to_copy type_as".split())
# Ops whose result has the labels of their only operand, element by element.
PASSES = frozenset("relu leaky_relu abs neg dropout positive".split())
PASSES_APPROXIMATELY = frozenset("gelu silu elu celu selu mish softplus hardswish".split())
# Ops whose rules speak in products, sums and contractions alone, which know what is picked.
FOLLOWED = frozenset(
    "add sub rsub maximum minimum where masked_fill clamp clamp_min clamp_max threshold gt ge lt "
    "le eq "
    "ne mul multiply div divide true_divide square sqrt pow linear matmul mm bmm einsum baddbmm "
    "addmm "
    "_grouped_mm transformers::grouped_mm_fallback".split()
)
# An index is the same flat list of members after these.
KEEPS_ORDER = frozenset(
    "view reshape _unsafe_view flatten unflatten ravel squeeze unsqueeze contiguous clone detach "
    "alias to _to_copy".split()
)
INTEGERS = (torch.int64, torch.int32)


class Words(Protocol):
    """The words of ``Scales`` by which members of a stack are followed."""

    @property
    def approximate(self) -> bool: ...

    @property
    def writers(self) -> Mapping[Node, Node]: ...

    def simplify(self, value: Any) -> Any: ...

    def labels(self, value: Operand) -> Labels: ...

    def through_view(self, x: Any) -> Any: ...

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any: ...

    def agree(self, labels: Labels, axes: Iterable[int]) -> Labels: ...


def pick_from(scales: Words, stack: Any, index: Any, *, rows: int | None = None) -> Picked | None:
    """What an index picks along the first axis of a stack of parameters; None where members must
    share their scales.

    Args:
        scales: The walk.
        stack: (members, *rest).
        index: The node of the index, (*places), or of offsets, (members,).
        rows: With offsets, the number of rows that they divide into one run per member.

    Returns:
        (*places, *rest), or (rows, *rest) with offsets.
    """
    stack = scales.simplify(stack)
    if not isinstance(stack, Weight) or not isinstance(index, Node) or index.dtype not in INTEGERS:
        return None
    members, *rest = stack.shape
    if not 1 < members <= MAX_MEMBERS:
        return None
    pick = pick_of(scales, index, members, grouped=rows is not None)
    places = index.shape if rows is None else (rows,)
    count = torch.Size(places).numel()
    if count > MAX_PLACES:
        return None
    choices = scales.reshaped(stack, (members, *[1] * len(places), *rest))
    place = torch.arange(count).view(*places, *[1] * len(rest))
    return Picked(choices, (*places, *rest), place, pick)


def pick_of(scales: Words, index: Node, members: int, *, grouped: bool) -> Pick:
    """The identity of an index: the same for all that hold the same members in the same flat
    order.
    """
    chain = same_order(index)
    # What has been written into may differ from what was copied from it before.
    root = index if any(node in scales.writers for node in chain) else chain[-1]
    return Pick(root, scales.writers.get(root), members, grouped)


def same_order(index: Node) -> list[Node]:
    """An index and what it is a copy or a reshape of, up to where it is computed: the same members
    in the same flat order.
    """
    chain = [index]
    while (
        chain[-1].op in KEEPS_ORDER
        and chain[-1].operands
        and chain[-1].operands[0].dtype in INTEGERS
    ):
        chain.append(chain[-1].operands[0])
    return chain


def collapse(scales: Words, value: Any) -> Any:
    """The labels of what is picked if they may not depend on the member; any other value as it
    is.
    """
    if not isinstance(value, Picked):
        return value
    choices = scales.labels(value.choices)
    ids = scales.agree(choices, [0]).ids[0]
    return Labels(ids, value.shape)


def simplify(value: Any) -> Any:
    """Plain labels where they do not depend on the member."""
    if not isinstance(value, Picked) or not isinstance(value.choices, Labels):
        return value
    ids = value.choices.ids
    return Labels(ids[0], value.shape) if bool((ids == ids[:1]).all()) else value


def follow(scales: Words, node: Node, rule: Any, arguments: dict[str, Any]) -> Any:
    """The result of an op on picked operands, member by member; None where the members have to be
    equated.
    """
    first = next(iter(arguments.values()))
    others = [
        leaf for leaf in tree_leaves(list(arguments.values())[1:]) if isinstance(leaf, Picked)
    ]
    alone = isinstance(first, Picked) and not others
    if node.op in MOVES:
        return _move(scales, node, first) if alone else None
    if node.op in PASSES or (node.op in PASSES_APPROXIMATELY and scales.approximate):
        return replace(first, choices=_expand(scales, first)) if alone else None
    return rule.scales(scales, arguments) if node.op in FOLLOWED and rule is not None else None


def _expand(scales: Words, value: Picked) -> Labels:
    """One set of labels per member, for what may still be a parameter."""
    return Labels(scales.labels(value.choices).ids, (value.pick.count, *value.shape))


def _move(scales: Words, node: Node, x: Picked) -> Any:
    if node.op in COPIES:
        return x if isinstance(node.dtype, torch.dtype) and node.dtype.is_floating_point else None
    if torch.Size(x.shape).numel() > MAX_PLACES or node.bound.get("dtype") is not None:
        return None
    weight = x.choices if isinstance(x.choices, Weight) else None
    ids = weight.entries if weight is not None else x.choices.ids  # type: ignore[union-attr]
    place = Labels(x.place, x.shape)
    if node.op in RESHAPES:
        moved = [lb.reshape(Labels(ids, (x.pick.count, *x.shape)), (x.pick.count, *node.shape))]
        places = [lb.reshape(place, node.shape)]
    else:
        members = [
            tree_leaves(scales.through_view(Labels(ids[i], x.shape))) for i in range(len(ids))
        ]
        moved = [_stack(parts) for parts in zip(*members, strict=True)]
        places = tree_leaves(scales.through_view(place))
    results = []
    for labels, at in zip(moved, places, strict=True):
        choices = (
            replace(weight, shape=tuple(labels.ids.shape), index=labels.ids)
            if weight is not None
            else labels
        )
        results.append(Picked(choices, at.shape, at.ids, x.pick))
    return results if isinstance(node.shape, list) else results[0]


def _stack(parts: Sequence[Labels]) -> Labels:
    return Labels(torch.stack([part.ids for part in parts]), (len(parts), *parts[0].shape))


def stretch(value: Picked, shape: Sequence[int]) -> Picked:
    """What is picked seen as a tensor of the given shape (leading axes added)."""
    rank = len(shape)
    ids = _align(value.choices.ids, rank, members=True)  # type: ignore[union-attr]
    choices = Labels(ids, (value.pick.count, *shape))
    return Picked(choices, tuple(shape), _align(value.place, rank), value.pick)


def together(scales: Words, values: Sequence[Any]) -> tuple[list[Any], Picked | None]:
    """Operands of an elementwise op with the members as an axis in front of all others.

    Returns:
        The operands and what the result is made like; or the operands with their members equated,
        and None.
    """
    shape = tuple(torch.broadcast_shapes(*[getattr(value, "shape", ()) for value in values]))
    picked = [value for value in values if isinstance(value, Picked)]
    places = [_align(value.place, len(shape)) for value in picked]
    alike = all(value.pick == picked[0].pick for value in picked)
    if not alike or not all(same_places(place, places[0]) for place in places):
        return [collapse(scales, value) for value in values], None

    def with_members(value: Any) -> Any:
        if not isinstance(value, Picked):
            return value
        if isinstance(value.choices, Weight):
            members, *rest = value.choices.shape
            return scales.reshaped(value.choices, (members, *[1] * (len(shape) - len(rest)), *rest))
        ids = _align(value.choices.ids, len(shape), members=True)
        return Labels(ids, (value.pick.count, *[1] * (len(shape) - len(value.shape)), *value.shape))

    model = Picked(picked[0].choices, shape, torch.broadcast_tensors(*places)[0], picked[0].pick)
    return [with_members(value) for value in values], model


def result_like(model: Picked, labels: Labels) -> Picked:
    """Labels with the members in front as what is picked."""
    return replace(model, choices=Labels(labels.ids, (model.pick.count, *model.shape)))


def same_places(a: Tensor, b: Tensor) -> bool:
    """Whether every element is at the same place in both, which broadcast to each other."""
    a, b = torch.broadcast_tensors(a, b)
    return bool((a == b).all())


def may_stay_apart(scales: Words, values: Sequence[Any]) -> bool:
    """Whether a sum leaves the members their own scales: all that is added was picked too, or is
    zero.
    """
    return all(isinstance(value, Picked) or _is_zero(scales, value) for value in values)


def _is_zero(scales: Words, value: Any) -> bool:
    if isinstance(value, Weight):
        return False
    if not isinstance(value, (Labels, Known, bool, int, float)):
        return False
    return bool((scales.labels(value).ids == ANY).all())


def _align(ids: Tensor, rank: int, *, members: bool = False) -> Tensor:
    """Axes of size 1 in front of a tensor, or between its members and the rest, so that it
    broadcasts to ``rank`` axes.
    """
    lead = ids.shape[:1] if members else ()
    rest = ids.shape[len(lead) :]
    return ids.reshape(*lead, *[1] * (rank - len(rest)), *rest)


def collapse_all(scales: Words, arguments: Any) -> Any:
    """All operands with the members of what is picked equated."""
    return tree_map(lambda value: collapse(scales, value), arguments)
