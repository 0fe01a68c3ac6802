"""Parameters, and parts of parameters, that no example reads.

Another input may read them: a longer sequence the next rows of a table of positions, a flag an
auxiliary head. Then their scale must fit the rest of the model, so it is not theirs to choose:

- Entries that lie beyond a slice whose extent comes from an input's size follow the entries that
  were read, where those have one scale along that axis. Otherwise the whole parameter stays as it
  is.
- What a whole parameter reads when its time comes is not known. It can only be something that is in
  sight where its module is called, so all of that keeps its scale.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ..capture.nodes import Graph, Node
from ..rules.factors import UNSET
from ..rules.scales import Scales
from ..rules.values import Scaling


def settle_unread_entries(scales: Scales, reads: Sequence[Mapping[str, Tensor]]) -> None:
    """Let the entries of parameters that were not read follow those that were, or hold the
    parameter.

    Args:
        scales: After all captures were walked over.
        reads: Per example, by name, which entries of a parameter were read: boolean, of its shape;
            parameters that were read as a whole are left out.
    """
    for name, scaling in list(scales.factors.scalings.items()):
        unread = scaling.plus == UNSET
        if name in scales.factors.frozen or not bool(unread.any()):
            continue
        unread = unread.expand(scaling.shape)
        masks = [mask[name] for mask in reads if name in mask]
        axes = [axis for axis in range(unread.dim()) if _extent_varies(masks, axis)]
        filled = _continue_along(scales, scaling, axes)
        if filled is None:
            count = int(unread.sum())
            reason = f"has {count} of {unread.numel()} entries that the example does not read"
            scales.factors.freeze(name, reason, by=scales.node)
        else:
            scales.factors.scalings[name] = filled


def _extent_varies(masks: Sequence[Tensor], axis: int) -> bool:
    """Whether examples of different sizes read different parts of an axis."""
    others = [i for i in range(masks[0].dim()) if i != axis] if masks else []
    lines = [mask.any(others) if others else mask for mask in masks]
    return any(not torch.equal(line, lines[0]) for line in lines[1:])


def _continue_along(scales: Scales, scaling: Scaling, axes: Sequence[int]) -> Scaling | None:
    """The scaling with all entries set, continued along the given axes; None where that is not
    possible.
    """
    plus = scaling.plus.expand(scaling.shape)
    minus = scaling.minus.expand(scaling.shape)
    read = plus != UNSET
    for axis in axes:
        for ids in (plus, minus):
            known = torch.where(read, scales.equations.simplify(ids), UNSET)
            if bool((read & (known != known.amax(axis, keepdim=True))).any()):
                return None
        plus = torch.where(read, plus, plus.amax(axis, keepdim=True))
        minus = torch.where(read, minus, minus.amax(axis, keepdim=True))
        read = plus != UNSET
    return Scaling(scaling.shape, plus, minus, scaling.epsilon) if bool(read.all()) else None


def find_levels(
    unread: Sequence[str], dropped: Sequence[str], graphs: Sequence[Graph]
) -> dict[str, str]:
    """Where parameters that no example reads may come into play.

    Args:
        unread: Names of the parameters.
        dropped: Names of parameters that are read, but for results that are dropped.
        graphs: All captures.

    Returns:
        {path of a module: what its values may meet}: the nearest module around each unread
        parameter that is called at all, and all modules around one that calls a dropped parameter,
        since each may be the one that drops its results.
    """
    called = {""}
    for graph in graphs:
        for node in graph.nodes:
            called.update(_ancestors(node.module))
    levels: dict[str, str] = {}
    for name in unread:
        owner = name.rpartition(".")[0]
        level = next(path for path in _ancestors(owner) if path in called)
        levels.setdefault(level, f"{name}, which the example does not read")
    for name in dropped:
        for level in [path for path in _ancestors(name.rpartition(".")[0]) if path in called][
            1:
        ] or [""]:
            levels.setdefault(level, f"{name}, which the example does not read")
    return levels


def list_in_sight(graph: Graph, level: str) -> Iterator[Node]:
    """The values that the forward method of a module can see: its inputs, what it computes, what
    its children return.
    """
    inside = {
        node for node in graph.nodes if node.target is not None and _is_within(node.module, level)
    }
    for node in inside:
        if node.module == level:
            yield node
        for operand in node.operands:
            if operand.target is not None and operand not in inside:
                yield operand
    for node in graph.nodes:
        child = _child(node.module, level)
        for operand in node.operands:
            if operand in inside and _child(operand.module, level) != child:
                yield operand


def _ancestors(path: str) -> Iterator[str]:
    """A module's path and those of the modules around it, the innermost first.

    >>> list(_ancestors("blocks.0.mlp"))
    ['blocks.0.mlp', 'blocks.0', 'blocks', '']
    """
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _is_within(path: str, level: str) -> bool:
    return not level or path == level or path.startswith(level + ".")


def _child(path: str, level: str) -> str:
    """The child of a module that a path leads through; the path itself if it leads elsewhere.

    >>> (
    ...     _child("blocks.0.mlp.up", "blocks.0"),
    ...     _child("blocks.0", "blocks.0"),
    ...     _child("head", "blocks.0"),
    ... )
    ('mlp', '', 'head')
    """
    if not _is_within(path, level):
        return path
    return (path[len(level) :].lstrip(".") if level else path).partition(".")[0]
