"""Units that are computed and then dropped: ``relu(W x)[..., :n]`` reads the first n rows of W
only.

Nothing holds the scale of a unit that reaches no output of any example. Another input may read it
all the same, and then it must fit its neighbours, but what it will meet is not known. So such units
keep their scale, and so does the rest of the parameters that feed them. A parameter that is read
for such units alone counts as one that no example reads.

The same goes for what a cut leaves nothing of but zeros: ``cat([zeros(16), h])[:-16]`` is h moved
back by 16, and all zeros where h is no longer than that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from ..capture.nodes import Node
from ..rules.factors import UNSET
from ..rules.labels import ANY, FIXED, Labels
from ..rules.scales import Scales
from ..rules.table import family_of
from ..rules.values import Scaling

# Ops whose results have labels of their own, element by element.
ELEMENTWISE = frozenset(
    "mul multiply div divide true_divide square sqrt rsqrt reciprocal pow".split()
)

CUTTING = frozenset(("slice", "narrow"))
# A call of one program, on whatever example: its name, module and line.
Call: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True)
class Step:
    """The labels of one call.

    Attributes:
        node: The call.
        operands: Labels of what it reads, as they were when it was made; of parameters, those that
            it asks of them.
        results: Labels of what it returns; empty where it returns something else than labels.
        made: Labels that its rule has made: those of the results, and of values inside, such as the
            states of a recurrence.
    """

    node: Node
    operands: tuple[Labels, ...]
    results: tuple[Labels, ...]
    made: range = range(0)


def find_used(scales: Scales, steps: Sequence[Step], outputs: Iterable[Labels]) -> Tensor:
    """Which labels an output depends on, (labels so far,) boolean.

    Args:
        scales: After the walk over the graph.
        steps: Its calls in order.
        outputs: What the graph returns.
    """
    classes = scales.equations.simplify(torch.arange(scales.equations.count, dtype=torch.int32))
    # At ANY, the last place, stands what carries no scale.
    root = torch.cat([classes, torch.tensor([FIXED], dtype=torch.int32)])
    used = torch.zeros(len(classes), dtype=torch.bool)
    # What carries no scale may be read by anything.
    used[FIXED] = True
    own = torch.zeros_like(used)
    # of what one call returns and others read, from the last of these back to that call
    known: dict[int, Tensor] = {}

    def roots(labels: Labels) -> Tensor:
        found = known.get(id(labels.ids))
        if found is None:
            found = known[id(labels.ids)] = root[labels.ids]
        return found

    for labels in outputs:
        used[root[labels.ids]] = True
    for step in reversed(steps):
        results = list(map(roots, step.results))
        operands = list(map(roots, step.operands))
        for labels in step.results:
            known.pop(id(labels.ids), None)
        inside = root[step.made.start : step.made.stop]
        if step.node.op in ELEMENTWISE and len(results) == 1:
            for ids in operands:
                ids, mask = torch.broadcast_tensors(ids, used[results[0]])
                used[ids[mask]] = True
        elif not _selects(step.node) and (
            not results or any(bool(used[ids].any()) for ids in results)
        ):
            # The states of one layer of a recurrence feed the next, returned or not.
            returned = results if not family_of(step.node.op).recurrent else []
            for ids in returned:
                own[ids] = True
            for ids in (*operands, inside):
                used[ids[~own[ids]]] = True
            for ids in returned:
                own[ids] = False
    return used[root[:ANY]]


def find_used_anywhere(scales: Scales, used: Sequence[Tensor]) -> Tensor:
    """Labels that equal one which some graph uses, (labels,) boolean.

    Args:
        scales: After all captures were walked over.
        used: From ``find_used``, per graph; later graphs have more labels.
    """
    root = scales.equations.simplify(torch.arange(scales.equations.count, dtype=torch.int32)).long()
    classes = torch.zeros(len(root), dtype=torch.bool)
    classes[FIXED] = True
    for mask in used:
        classes[root[: len(mask)][mask]] = True
    return classes[root]


def list_dropped(scales: Scales, used: Tensor) -> list[str]:
    """Parameters that are read for nothing but results that are dropped: another input may read all
    of them.

    Args:
        scales: After all captures were walked over.
        used: From ``find_used_anywhere``.
    """
    found = []
    for name, scaling in scales.factors.scalings.items():
        given = _given_labels(scaling)
        if (
            name in scales.factors.shapes
            and name not in scales.factors.frozen
            and given.numel()
            and not used[given].any()
        ):
            found.append(name)
    return found


def hold_dropped(scales: Scales, used: Tensor) -> None:
    """Keep the scale of units that no output depends on, and of those that come from the same
    parameter.

    Args:
        scales: After all captures were walked over.
        used: From ``find_used_anywhere``.
    """
    output = Node(name="output", op="output")
    for name, scaling in scales.factors.scalings.items():
        given = _given_labels(scaling)
        if name not in scales.factors.frozen and not bool(used[given].all()):
            reason = f"comes from {name}, some results of which the example drops"
            scales.equations.pin(given.to(torch.int32), by=output, reason=reason)
    dropped = (~used).nonzero().flatten().to(torch.int32)
    scales.equations.pin(
        dropped, by=output, reason="is dropped on the example, though another input may read it"
    )


def find_cut_off(steps: Iterable[Step]) -> dict[Call, Tensor | None]:
    """For every call that cuts a tensor, the labels of what it reads if it leaves zeros alone,
    (n,); None if it leaves more, or nothing.
    """
    found: dict[Call, Tensor | None] = {}
    for step in steps:
        if step.node.op in CUTTING and step.results:
            leaves_more = any(
                0 in labels.shape or bool((labels.ids != ANY).any()) for labels in step.results
            )
            read = torch.cat([labels.ids.flatten().unique() for labels in step.operands])
            call = (step.node.name, step.node.module, step.node.line)
            found[call] = None if leaves_more else read
    return found


def hold_cut_off(scales: Scales, cuts: Sequence[Mapping[Call, Tensor | None]]) -> None:
    """Keep the scale of units of which some call leaves nothing but zeros on all examples.

    Args:
        scales: After all captures were walked over.
        cuts: From ``find_cut_off``, per graph.
    """
    shown = {call for each in cuts for call, labels in each.items() if labels is None}
    for each in cuts:
        for call, labels in each.items():
            if labels is not None and call not in shown:
                name, module, line = call
                node = Node(name=name, op="slice", module=module, line=line)
                reason = "is cut off on the example, which leaves zeros alone"
                scales.equations.pin(labels, by=node, reason=reason)


def _given_labels(scaling: Scaling) -> Tensor:
    """The labels that a parameter gives, as positions."""
    return _positions(scaling.plus[scaling.plus != UNSET])


def _selects(node: Node) -> bool:
    return node.op == "getitem" or family_of(node.op).selects


def _positions(ids: Tensor) -> Tensor:
    """Labels as positions; zeros count as what carries no scale."""
    return torch.where(ids == ANY, FIXED, ids).long()
