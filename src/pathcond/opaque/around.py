"""Modules that cannot be followed, because what they call depends on the data: a sparse dispatch
over experts.

Such a module is opaque. Its inputs and outputs are pinned and its own parameters stay as they are;
the modules that it calls are captured on their own, on what the example feeds them, and may be
rescaled inside.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from torch import nn

from ..capture.decisions import is_library
from ..capture.graph import WatchedGraphs, capture_watched
from ..capture.isolation import LOCK
from ..capture.models import Inputs, canonical_names
from ..capture.nodes import Graph, Node
from ..capture.watching import Place, Watch
from ..errors import UnsupportedModelError
from ..interrupts import uninterrupted
from ..wrappers import unwrap
from .arguments import takes_tensors_alone
from .culprits import culprits, has_forward
from .reaching import (
    attributes_set,
    attributes_set_by,
    code_of,
    containers_of,
    held_aside,
    may_reach_into,
    mentions,
    parts_held_elsewhere,
    share_objects,
)
from .recording import Call, Recording, record
from .stubs import rebuild, stubs, with_sites
from .uses import attributes_written_into, writes_into_objects

# More ways to call one module than this are not captured: the module is left alone.
MAX_KINDS = 4
# Attempts to find the modules that cannot be followed.
MAX_ATTEMPTS = 64


@dataclass(frozen=True, kw_only=True)
class Child:
    """A module that an opaque module calls.

    Attributes:
        name: Its qualified name.
        module: The module.
        inputs: Example inputs, one for each way in which it is called.
        caller: What it returns its outputs to, in words.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    caller: str


@dataclass(frozen=True, kw_only=True)
class Around:
    """A model in one mode, around and inside its opaque modules.

    Attributes:
        graphs: All that could be followed; an opaque module is one call in it. Several where random
            numbers decide which layers run.
        parts: The graphs of what opaque modules call, with the model's names.
        known: The modules that cannot be followed and why, for captures of other inputs too.
        children: What they call.
        frozen: Parameters and buffers that must stay as they are, and why.
        unreached: {module inside an opaque one that this example does not reach: its parameters and
            buffers}.
        watches: What it decided by sizes meanwhile, where that was to be seen.
        drawn: Whether random numbers decide what it does.
    """

    graphs: tuple[Graph, ...]
    parts: tuple[Graph, ...] = ()
    known: Recording | None = None
    children: tuple[Child, ...] = ()
    frozen: dict[str, str] = field(default_factory=dict)
    unreached: dict[str, tuple[str, ...]] = field(default_factory=dict)
    watches: tuple[Watch, ...] = ()
    drawn: bool = False

    @property
    def graph(self) -> Graph:
        """The first of the graphs."""
        return self.graphs[0]


def capture_around(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    modes: Sequence[bool] = (False, True),
    inside: bool = True,
    runnable: bool = True,
    known: Recording | None = None,
    follow_values: bool = True,
) -> list[Around]:
    """Capture a model in each mode, around and inside what cannot be followed.

    Args:
        model: Any module; wrappers are removed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
        modes: True for train mode.
        inside: Whether to capture what opaque modules call.
        runnable: Whether the model may run on the values of the inputs.
        known: Opaque modules that another capture has found.
        follow_values: As in ``capture_watched``.

    Raises:
        UnsupportedModelError: Nothing of the model can be followed.
    """
    model = unwrap(model)
    found: list[tuple[Around, Recording | None]] = []
    for training in modes:
        known = next((recording for _, recording in found if recording is not None), known)
        # Modules hold stand-ins meanwhile, which nobody may find in them.
        with uninterrupted(), LOCK:
            found.append(
                _around(
                    model,
                    example_inputs,
                    training,
                    known,
                    runnable=runnable,
                    follow_values=follow_values,
                )
            )
    if all(recording is None for _, recording in found):
        return [around for around, _ in found]
    recordings = [recording for _, recording in found if recording is not None]
    children, frozen, unreached = _children(model, recordings)
    opaque = tuple(dict.fromkeys(module for recording in recordings for module in recording.opaque))
    captured = []
    for (around, _), training in zip(found, modes, strict=True):
        parts: list[Graph] = []
        for child in children if inside else ():
            try:
                # Whole numbers that it is given may depend on activations.
                inner = [
                    capture_around(child.module, inputs, modes=(training,), follow_values=False)[0]
                    for inputs in child.inputs
                ]
            except UnsupportedModelError as error:
                frozen |= dict.fromkeys(
                    names_inside(model, child.module).values(),
                    f"belongs to a module that cannot be captured: {error}",
                )
                continue
            own = names_inside(model, child.module)
            parts += [
                relocate(part, child, own) for each in inner for part in (*each.graphs, *each.parts)
            ]
            frozen |= {own[name]: reason for each in inner for name, reason in each.frozen.items()}
            for each in inner:
                for path, names in each.unreached.items():
                    unreached[f"{child.name}.{path}"] = tuple(own[name] for name in names)
        captured.append(
            replace(
                around,
                parts=tuple(parts),
                children=children,
                # A copy of the error does not keep the frames that raised it.
                known=Recording(opaque=opaque, error=copy.copy(recordings[0].error)),
            )
        )
    if inside and not any(
        graph.nodes for each in captured for graph in (*each.graphs, *each.parts)
    ):
        raise next(recording.error for recording in recordings)
    return [replace(each, frozen=frozen, unreached=unreached) for each in captured]


def capture_inverted(
    model: nn.Module,
    example_inputs: Inputs,
    invert: frozenset[Place],
    known: Recording | None,
    *,
    training: bool,
    runnable: bool,
) -> WatchedGraphs:
    """Capture a model in one mode with other outcomes than its sizes have. Opaque modules return
    what they return without these.

    Args:
        model, example_inputs, training, runnable: As in ``capture_watched``.
        invert: Places at which tests by sizes come out the other way.
        known: Its opaque modules, where it has some.
    """
    capture = partial(
        capture_watched, model, example_inputs, training=training, invert=invert, runnable=runnable
    )
    if known is None:
        return capture()
    if model in known.opaque or not runnable:
        raise known.error
    with uninterrupted(), LOCK:
        recording = _record(model, example_inputs, list(known.opaque), training, known.error)
        with stubs(model, recording) as sites:
            found = capture()
    return replace(found, graphs=tuple(with_sites(graph, sites) for graph in found.graphs))


def children_on(model: nn.Module, example_inputs: Inputs, captured: Around) -> tuple[Child, ...]:
    """What opaque modules call in eval mode on other inputs than those that the model was captured
    with.
    """
    model = unwrap(model)
    if captured.known is None:
        return ()
    error = UnsupportedModelError(f"{type(model).__name__} cannot be run on the example batch")
    with uninterrupted():
        recording = record(
            model, example_inputs, captured.known.opaque, training=False, error=error
        )
    return _children(model, [recording])[0]


def _around(
    model: nn.Module,
    example_inputs: Inputs,
    training: bool,
    known: Recording | None,
    *,
    runnable: bool,
    follow_values: bool,
) -> tuple[Around, Recording | None]:
    """The graphs around all opaque modules; and what was recorded, if there are any.

    Args:
        model, example_inputs, training: As in ``capture``.
        known: Of another mode or other inputs, where opaque modules have been found already.
        runnable, follow_values: As in ``capture_around``.
    """
    capture = partial(
        capture_watched,
        model,
        example_inputs,
        training=training,
        runnable=runnable,
        follow_values=follow_values,
    )
    opaque: list[nn.Module] = list(known.opaque) if known is not None else []
    if known is not None:
        first = known.error
        suspects: list[nn.Module] = list(known.opaque)
        if not runnable:  # nothing can be recorded
            raise first
    else:
        try:
            found = capture()
            return Around(graphs=found.graphs, watches=found.watches, drawn=found.drawn), None
        except UnsupportedModelError as error:
            first = error
        if not runnable:  # nothing can be recorded
            raise first
        suspects = culprits(model, example_inputs, training, None)
        if not suspects:
            raise first
    for attempt in range(MAX_ATTEMPTS):
        if attempt or known is None:
            culprit = next((module for module in suspects if module not in opaque), model)
            opaque += [module for module in _written_alike(model, culprit) if module not in opaque]
        try:
            recording = _record(model, example_inputs, opaque, training, first)
        except Exception as error:  # the model does not run on the example either
            if known is None:
                raise first from None
            mode = "train" if training else "eval"
            raise UnsupportedModelError(
                f"{type(model).__name__} fails in {mode} mode on the example batch: "
                f"{type(error).__name__}: {error}. Both modes "
                "are needed: give a batch that holds all that they ask for (targets, say)."
            ) from error
        if model in opaque:
            nothing = Graph(nodes=(), outputs=(), returned=(), training=training)
            return Around(graphs=(nothing,)), recording
        try:
            with stubs(model, recording) as sites:
                # Of what it decides, nothing is known that happens inside of opaque modules.
                graphs = capture().graphs
            return Around(graphs=tuple(with_sites(graph, sites) for graph in graphs)), recording
        except UnsupportedModelError:
            pass  # what is raised next must not carry this along
        suspects = culprits(model, example_inputs, training, recording) or [model]
    raise first


def _record(
    model: nn.Module,
    example_inputs: Inputs,
    opaque: list[nn.Module],
    training: bool,
    error: UnsupportedModelError,
) -> Recording:
    """A run of the example; callers that share memory with an opaque module become opaque too, or
    are told something by it, and join the list.
    """
    while True:
        recording = record(model, example_inputs, opaque, training=training, error=error)
        told = [*recording.entangled, *_told_by(model, recording)]
        entangled = [module for module in dict.fromkeys(told) if module not in opaque]
        if not entangled:
            return recording
        opaque += entangled


def _told_by(model: nn.Module, recording: Recording) -> list[nn.Module]:
    """Modules around and beside opaque ones that mention attributes which these set, or write
    into, and may decide by them; or that hold a container into which these write.
    """
    found: list[nn.Module] = []
    for outer in recording.opaque:
        inside = set(outer.modules())
        others = [module for module in model.modules() if module not in inside]
        executed = recording.executed.get(outer, ())
        codes = [c for c in code_of(outer, executed) if not is_library(c.co_filename)]
        written = attributes_written_into(codes)
        left = attributes_set(codes) | written
        held = containers_of([outer], names=written)
        found += [
            module
            for module in others
            if not (left.isdisjoint(mentions(module)) and held.isdisjoint(containers_of([module])))
        ]
    return found


def _written_alike(model: nn.Module, culprit: nn.Module) -> list[nn.Module]:
    """A module that cannot be followed, and all others with the same code; containers of torch have
    none of their own.
    """
    if culprit is model or type(culprit).__module__.startswith("torch."):
        return [culprit]
    return [module for module in model.modules() if type(module) is type(culprit)]


def relocate(graph: Graph, child: Child, names: dict[str, str]) -> Graph:
    """The graph of a module with the names that its parameters and modules have in the model around
    it.

    Args:
        graph: Of the module.
        child: The module.
        names: {name in the module: name in the model}.
    """

    def move(node: Node) -> Node:
        name = names.get(node.name, node.name) if node.op in ("parameter", "buffer") else node.name
        return replace(
            node, name=name, module=".".join(part for part in (child.name, node.module) if part)
        )

    return replace(
        rebuild(graph, move),
        called=frozenset(names.get(name, name) for name in graph.called),
        outlet=f"is returned to {child.caller}",
    )


def _children(
    model: nn.Module, recordings: Sequence[Recording]
) -> tuple[tuple[Child, ...], dict[str, str], dict[str, tuple[str, ...]]]:
    """What opaque modules call, all that must stay as it is, and the modules that they do not
    call.
    """
    names = _names(model)
    paths = {module: name for name, module in model.named_modules()}
    calls: dict[nn.Module, list[Call]] = {}
    frozen: dict[str, str] = {}
    for recording in recordings:
        for module, of_module in recording.calls.items():
            calls.setdefault(module, []).extend(of_module)
        frozen |= {
            names[tensor]: reason for tensor, reason in recording.reads.items() if tensor in names
        }
        for part, kind in recording.handed.items():
            reason = f"is handed to {kind}, which cannot be captured"
            frozen |= dict.fromkeys(_names_held(part, names), reason)
    children = []
    reached: set[nn.Module] = set()
    opaque = dict.fromkeys(module for recording in recordings for module in recording.opaque)
    around = dict.fromkeys(inner for outer in opaque for inner in outer.modules())
    for module, of_module in calls.items():
        inputs = _kinds(module, of_module)
        if inputs is None:
            reached.update(module.modules())
            reason = "belongs to a module that is called in ways too many or too unusual to capture"
            frozen |= dict.fromkeys(names_inside(model, module).values(), reason)
        elif inputs:
            reached.update(module.modules())
            caller = _caller(module, recordings)
            children.append(Child(name=paths[module], module=module, inputs=inputs, caller=caller))
            why = _why_frozen(model, module, of_module, recordings, around)
            if why:
                reason = f"belongs to a module that is called by {caller}; on other inputs, {why}"
                frozen |= dict.fromkeys(names_inside(model, module).values(), reason)
    for module in dict.fromkeys(part for outer in opaque for part in _within_reach(outer)):
        if module in reached and module not in calls and module not in opaque:
            reason = "is a part of a module and has a second name, by which it may be called alone"
            frozen |= dict.fromkeys(names_inside(model, module).values(), reason)
    for outer in opaque:
        reason = f"may be reached by {type(outer).__name__}, which cannot be captured"
        for holder in outer.modules():
            for part in held_aside(holder, outer.modules()):
                for name in _names_held(part, names):
                    frozen.setdefault(name, reason)
    unreached: dict[str, tuple[str, ...]] = {}
    for module in around:
        if module in opaque:
            kind = type(module).__name__
            reason = (
                f"belongs to {kind}, which cannot be captured, and is not read through a module "
                "that it calls"
            )
            for name in _names_of(module, names, recurse=False):
                frozen.setdefault(name, reason)
        elif module not in reached:
            # A ModuleList cannot be reached at all.
            unreached[paths[module]] = _names_of(module, names, recurse=has_forward(module))
    return tuple(children), frozen, unreached


def _within_reach(module: nn.Module) -> Iterator[nn.Module]:
    """The modules that the code of one calls by their names, or through containers."""
    for part in module.children():
        yield part
        if not has_forward(part):
            yield from _within_reach(part)


def _why_frozen(
    model: nn.Module,
    child: nn.Module,
    calls: Sequence[Call],
    recordings: Sequence[Recording],
    around: Iterable[nn.Module],
) -> str:
    """What code that cannot be followed may do to a module that it calls; empty if it only calls
    it.
    """
    if not all(takes_tensors_alone(child, call.args, call.kwargs) for call in calls):
        return "it may be called with other arguments, for it takes more than tensors"
    if _may_be_reached_into(child, recordings):
        return "that code may read, change or call its parts"
    setter = attributes_set_by(model, child)
    if setter is not None:
        return f"{type(setter).__name__} may set attributes by which it decides"
    holder = parts_held_elsewhere(child, around)
    if holder is not None:
        return f"{type(holder).__name__}, which has its parts in an attribute, may use them"
    return ""


def _caller(child: nn.Module, recordings: Sequence[Recording]) -> str:
    """The opaque modules that call a module, in words, and why they are opaque, where that is
    known.
    """
    callers = [caller for recording in recordings for caller in recording.callers.get(child, ())]
    kinds = " and ".join(dict.fromkeys(type(caller).__name__ for caller in callers))
    opaque = {type(module) for recording in recordings for module in recording.opaque}
    # The error is about the first module that was found. Others may be opaque for other reasons.
    places = [recording.error.place for recording in recordings] if len(opaque) == 1 else []
    why = next((f": {place} decides by the value of a tensor" for place in places if place), "")
    return f"{kinds or 'a module'}, which cannot be captured{why}"


def _names_held(part: Any, names: Mapping[int, str]) -> list[str]:
    """The names of a parameter or buffer, or of all in a module, as far as the model has them; none
    of anything else.
    """
    tensors = [*part.parameters(), *part.buffers()] if isinstance(part, nn.Module) else [part]
    return [names[id(tensor)] for tensor in tensors if id(tensor) in names]


def _names_of(module: nn.Module, names: Mapping[int, str], *, recurse: bool) -> tuple[str, ...]:
    tensors = [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]
    return tuple(names[id(tensor)] for tensor in tensors)


def _may_be_reached_into(child: nn.Module, recordings: Sequence[Recording]) -> bool:
    """Whether an opaque module around this one may, on other inputs, read or call what is inside
    it.
    """
    for recording in recordings:
        around = [module for module in recording.opaque if child in set(module.modules())]
        for caller in dict.fromkeys([*recording.callers.get(child, ()), *around]):
            codes = code_of(caller, recording.executed.get(caller, ()))
            if may_reach_into(child, caller, codes):
                return True
        for other in recording.opaque:
            codes = code_of(other, recording.executed.get(other, ()))
            if share_objects(child.modules(), [other]) and writes_into_objects(codes):
                return True
    return False


def _kinds(module: nn.Module, calls: Sequence[Call]) -> tuple[Any, ...] | None:
    """Example inputs for each way in which a module is called: the largest of those that differ in
    sizes alone.

    Empty if it is only ever called on nothing, None if it is called in too many ways.
    """
    kinds: dict[Any, Call] = {}
    for call in calls:
        if not call.numel:
            continue
        largest = kinds.get(call.kind)
        if largest is None or call.numel > largest.numel:
            kinds[call.kind] = call
    inputs = [_as_inputs(module, call) for call in kinds.values()]
    return (
        None if len(inputs) > MAX_KINDS or any(each is None for each in inputs) else tuple(inputs)
    )


def _as_inputs(module: nn.Module, call: Call) -> Any:
    """A call as a tuple of positional or a dict of keyword inputs; None if it is neither."""
    if not call.kwargs:
        return call.args
    try:
        bound = inspect.signature(module.forward).bind(*call.args, **call.kwargs)
    except (TypeError, ValueError):
        return None
    if bound.args and any(name not in bound.arguments for name in call.kwargs):
        return None
    by_name = dict(bound.arguments)
    kinds = inspect.signature(module.forward).parameters
    plain = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return by_name if all(kinds[name].kind in plain for name in by_name) else None


def _names(model: nn.Module) -> dict[int, str]:
    """{id of a parameter or buffer: its first name}."""
    first = canonical_names(model)
    tensors = [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]
    return {id(tensor): first[name] for name, tensor in tensors}


def names_inside(model: nn.Module, module: nn.Module) -> dict[str, str]:
    """{name of a parameter or buffer in a module: its first name in the model}."""
    names = _names(unwrap(model))
    tensors = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: names[id(tensor)] for name, tensor in tensors}
