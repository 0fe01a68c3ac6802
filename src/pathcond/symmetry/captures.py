"""All captures that a model's Symmetry must satisfy: both modes, on every example, at other
sizes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.indices import as_on_cpu
from ..capture.models import Inputs
from ..capture.nodes import Graph, Node, is_empty
from ..capture.outputs import require_fitting_types
from ..capture.watching import Place, Watch
from ..errors import UnsupportedModelError
from ..opaque.around import Around, capture_around, capture_inverted
from ..opaque.recording import Recording
from ..trees import tree_leaves, tree_map
from .branches import Run, UnwatchableError, Way, find_other_ways, watch_run
from .sizes import Example, OtherSizes, find_other_sizes, is_on_meta

logger = logging.getLogger("pathcond")

# Options in which calls differ between the modes of one and the same program.
BY_MODE = {
    "dropout": ("p", "train"),
    "batch_norm": ("training", "momentum"),
    "instance_norm": ("use_input_stats", "momentum"),
}


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a model computes on one example.

    Attributes:
        example: The inputs.
        graphs: Eval mode first, then every form that train mode takes, then what is called by
            modules that cannot be followed.
        frozen: Parameters and buffers that must stay as they are, and why.
        unreached: {module that another example may reach: its parameters and buffers}.
        unfollowed: {module that takes another way at sizes which no example has: where it does so}.
        known: The modules that cannot be followed, where there are some.
        watches: What it decides by sizes, as far as the captures show that.
        run: The same, where they show all of it.
    """

    example: Example
    graphs: tuple[Graph, ...]
    frozen: Mapping[str, str] = field(default_factory=dict)
    unreached: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unfollowed: Mapping[str, str] = field(default_factory=dict)
    known: Recording | None = None
    watches: tuple[Watch, ...] = ()
    run: Run | None = None


def capture_all(
    model: nn.Module, example_inputs: Inputs, other_inputs: Inputs | None = None
) -> list[Captured]:
    """Capture a model on the user's examples, on one of other sizes, and where it takes other ways
    at further sizes.

    Args:
        model: Any module, not wrapped.
        example_inputs: One batch: a Tensor, a tuple of positional inputs or a dict of keyword
            inputs.
        other_inputs: A second example, or a list of them.

    Raises:
        UnsupportedModelError: The model cannot be captured on an example that the user gave.
    """
    others = other_inputs if isinstance(other_inputs, list) else [other_inputs]
    given = [Example(example_inputs), *(Example(inputs) for inputs in others if inputs is not None)]
    for example in given:
        require_fitting_types(model, example.inputs)
    found = [_capture(model, Way(example=example)) for example in given]
    sizes = find_other_sizes(model, example_inputs)
    try:
        runs = [_run_of(model, capture) for capture in found]
        first = (found[0], runs[0])
        resized = [c for e in sizes.examples for c in _capture_resized(model, e, first)]
        runs += [_run_of(model, capture) for capture in resized]
        return _with_other_ways(model, [*found, *resized], runs, sizes)
    except UnwatchableError as error:
        if other_inputs is None:
            raise
        logger.info("Only the examples that were given are looked at: %s", error)
        return [*found, *(c for e in sizes.examples for c in _capture_resized(model, e))]


def _run_of(model: nn.Module, captured: Captured, modes: Sequence[bool] = (False, True)) -> Run:
    """What a model decides by sizes, by a run of its own where the captures do not show all."""
    if captured.run is not None:
        return captured.run
    return replace(watch_run(model, captured.example, modes), elsewhere=captured.watches)


def _capture_resized(
    model: nn.Module, example: Example, first: tuple[Captured, Run] | None = None
) -> list[Captured]:
    """Capture a model at other sizes than the first example's, if that is possible; in eval mode
    alone, if train mode is known to go the same way.
    """
    try:
        if first is not None and _has_one_program(first[0]):
            captured = _capture(model, Way(example=example), (False,), first[0].known)
            run = _run_of(model, captured, (False,))
            if run.goes_as(first[1]):
                return [replace(captured, run=run)]
        return [_capture(model, Way(example=example), known=first[0].known if first else None)]
    except UnwatchableError:
        raise
    except UnsupportedModelError as error:
        logger.info("The model cannot be captured at other sizes than the example's: %s", error)
        return []


def _with_other_ways(
    model: nn.Module, found: list[Captured], runs: Sequence[Run], sizes: OtherSizes
) -> list[Captured]:
    """Captures of the ways that the model takes at sizes which none of the examples has."""
    known = found[0].known
    others = find_other_ways(model, runs, sizes, opaque=known.opaque if known else ())
    unfollowed = list(others.unfollowed)
    for way in others.ways:
        try:
            found.append(_capture(model, way, known=known))
        except UnsupportedModelError as error:
            logger.info("A way through the model cannot be captured: %s", error)
            unfollowed += way.shows
    first = replace(
        found[0],
        unfollowed={decision.module: str(decision.place) for decision in reversed(unfollowed)},
    )
    return [first, *found[1:]]


def _capture(
    model: nn.Module,
    way: Way,
    modes: Sequence[bool] = (False, True),
    known: Recording | None = None,
) -> Captured:
    """Capture a model on a way in all modes; in eval mode alone where it fails in train mode on
    inputs that nobody gave. The first capture knows which modules are opaque.
    """
    example = way.example
    runnable = example.runnable or not is_on_meta(model)
    try:
        with as_on_cpu(model):
            if not way.invert:
                found = capture_around(
                    model, example.inputs, modes=modes, runnable=runnable, known=known
                )
                return _join_modes(example, found)
            return _capture_inverted(model, way, modes, known, runnable=runnable)
    except UnsupportedModelError:
        if len(modes) == 1 or example.given:
            raise
    return _capture(model, way, modes[:1], known)


def _capture_inverted(
    model: nn.Module,
    way: Way,
    modes: Sequence[bool],
    known: Recording | None,
    *,
    runnable: bool,
) -> Captured:
    """Capture a model on a way on which some of its decisions are turned."""
    graphs: list[Graph] = []
    met: set[Place] = set()
    for training in modes:
        found = capture_inverted(
            model, way.example.inputs, way.invert, known, training=training, runnable=runnable
        )
        graphs += found.graphs
        met = met.union(*(watch.met for watch in found.watches))
    if not way.invert <= met:
        raise UnsupportedModelError(
            "run again with a decision turned the other way, the model did not come to that "
            "decision"
        )
    return Captured(example=way.example, graphs=tuple(graphs))


def _join_modes(example: Example, modes: Sequence[Around]) -> Captured:
    watches = tuple(watch for mode in modes for watch in mode.watches)
    # Runs under other draws cannot be compared with those that will be tried.
    whole = all(len(mode.watches) == 1 and not mode.drawn for mode in modes)
    graphs = [graph for mode in modes for graph in mode.graphs]
    parts = [part for mode in modes for part in mode.parts]
    frozen = {name: reason for mode in modes for name, reason in mode.frozen.items()}
    unreached = {path: names for mode in modes for path, names in mode.unreached.items()}
    return Captured(
        example=example,
        graphs=(*graphs, *parts),
        frozen=frozen,
        unreached=unreached,
        known=modes[0].known,
        watches=watches,
        run=Run(example, watches) if whole else None,
    )


def _has_one_program(captured: Captured) -> bool:
    """Whether a capture of train mode at another size tells nothing new."""
    return len(captured.graphs) == 2 and is_same_program(*captured.graphs)


def is_same_program(graph: Graph, other: Graph) -> bool:
    """Whether two graphs make the same calls on the same values and return the same of them, up to
    what the mode changes.

    This is no reason to look at one of them alone: what dropout returns may be its input or a copy,
    which matters where it is written into.

    >>> import torch
    >>> layers = [
    ...     torch.nn.Linear(3, 4),
    ...     torch.nn.BatchNorm1d(4),
    ...     torch.nn.Dropout(),
    ...     torch.nn.Linear(4, 2),
    ... ]
    >>> model = torch.nn.Sequential(*layers)
    >>> from pathcond.capture.graph import capture_both_modes
    >>> is_same_program(*capture_both_modes(model, torch.randn(5, 3)))
    True
    """
    return _spell_out(graph) == _spell_out(other) and _holds_same_constants(graph, other)


def _spell_out(graph: Graph) -> list[Any]:
    """All calls by their numbers, then what is returned and what is special about some calls."""
    number: dict[Node, Any] = {}
    calls: list[Any] = []

    def by_number(tree: Any) -> Any:
        return tree_map(lambda a: number.get(a) if isinstance(a, Node) else a, tree)

    for node in graph.nodes:
        if node.target is None:
            number[node] = (node.op, node.name, node.dtype)
        elif _only_counts(node):
            number[node] = "a count"
        else:
            ignored = BY_MODE.get(node.op, ())
            arguments = {name: a for name, a in node.bound.items() if name not in ignored}
            number[node] = len(calls)
            calls.append((str(node.target), node.shape, node.dtype, repr(by_number(arguments))))
    kept = [output for output in graph.outputs if not _is_count(output)]
    calls.append([repr(by_number(kept)), repr(by_number(list(graph.returned))), graph.outlet])
    calls += [sorted(map(repr, map(by_number, part))) for part in (graph.varying, graph.cached)]
    return calls


def _holds_same_constants(graph: Graph, other: Graph) -> bool:
    one, two = (
        {node.name: node.value for node in g.nodes if node.op == "constant"} for g in (graph, other)
    )
    return one.keys() == two.keys() and all(_is_same(one[name], two[name]) for name in one)


def _is_same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None or one.is_meta or other.is_meta:
        return one is other
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _is_count(output: Any) -> bool:
    return isinstance(output, Node) and output.target is not None and _only_counts(output)


def _only_counts(node: Node) -> bool:
    """Whether the node advances an integer buffer: a norm counts its batches in train mode."""
    return (
        node.writes
        and isinstance(node.dtype, torch.dtype)
        and not node.dtype.is_floating_point
        and all(operand.op == "buffer" for operand in node.operands)
    )


def list_frozen_by_routing(captured: Sequence[Captured]) -> dict[str, str]:
    """Parameters and buffers that must stay because control flow depends on the data, and why.

    A module that no example reaches may share its parameters with one that is reached: they stay
    too.
    """
    found = {name: reason for capture in captured for name, reason in capture.frozen.items()}
    for path, names in captured[0].unreached.items():
        if all(path in capture.unreached for capture in captured[1:]):
            reason = "belongs to a module that the example never reaches: give a batch that does"
            found |= {name: reason for name in names if name not in found}
    return found


def list_parameters_read(captured: Iterable[Captured]) -> set[str]:
    """Names of all parameters that some capture reads.

    Results that ``forward`` always drops (a pooler that nobody asks for) may come from any
    parameter. Where it depends on the example which results are dropped, another input may use them
    all: then only parameters that an output depends on count.
    """
    needed = [
        set().union(*(_parameters_needed(graph) for graph in capture.graphs))
        for capture in captured
    ]
    called = [set().union(*(graph.called for graph in capture.graphs)) for capture in captured]
    dropped = [names - found for names, found in zip(called, needed, strict=True)]
    always = all(names == dropped[0] for names in dropped)
    return set().union(*needed, *(called if always else ()))


def _parameters_needed(graph: Graph) -> set[str]:
    """Parameters that an output depends on, or a call that writes in place."""
    reached = [operand for node in graph.nodes if not is_empty(node) for operand in node.operands]
    returned = [leaf for leaf in tree_leaves(graph.outputs) if isinstance(leaf, Node)]
    return {node.name for node in (*reached, *returned) if node.op == "parameter"}
