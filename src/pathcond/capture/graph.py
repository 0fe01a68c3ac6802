"""torch model -> Graph: what the model computes, as a list of ATen calls.

>>> import torch
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
... )
>>> graph = capture(model, torch.randn(5, 3), training=False)
>>> [node.op for node in graph.nodes if node.target is not None]
['linear', 'relu', 'linear']
>>> graph.nodes[-1].args[1].op, graph.nodes[-1].args[1].name
('parameter', '2.weight')
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..errors import HiddenError, UnsupportedModelError
from ..interrupts import uninterrupted
from ..wrappers import unwrap, walk_wrappers
from .contents import PLAIN
from .draws import GlobalDraws, Plan, ScalarDraws, plans
from .explaining import capture_error
from .exporting import export_graph, refusing_state
from .isolation import isolated, quiet, replaced
from .models import Inputs, as_call, canonical_names, fresh_call, require_supported
from .nodes import Graph, Node
from .trace import UnknownTensorError
from .tracing import all_tensors, trace_graph
from .usable import require_usable
from .watching import Place, Watch

__all__ = [
    "Graph",
    "Node",
    "as_call",
    "canonical_names",
    "capture",
    "capture_both_modes",
    "capture_graphs",
    "capture_watched",
    "fresh_call",
    "isolated",
    "replaced",
    "require_supported",
    "unwrap",
    "walk_wrappers",
]

logger = logging.getLogger("pathcond")

# torch.export; a run on real values, with gradients as in training, or without
Way = Literal["export", "run", "trace"]
LARGEST_BATCH = 2**20  # numbers in the inputs up to which a run costs less than torch.export
LARGEST_MODEL = 2**27  # and in the parameters, of which a run needs copies


def capture(model: nn.Module, example_inputs: Inputs, *, training: bool) -> Graph:
    """Follow one call of the model; nothing of the model changes.

    Args:
        model: Any module; wrappers are removed.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs.
        training: Mode to capture; the model's own modes are restored.

    Returns:
        The graph. Where random numbers decide which layers run, the one in which they are largest:
        all layers run.

    Raises:
        UnsupportedModelError: The model rejects the inputs, or its control flow depends on the
            data.
    """
    return _Capture(model, example_inputs, training).first()


def capture_graphs(model: nn.Module, example_inputs: Inputs, *, training: bool) -> list[Graph]:
    """All graphs of one mode: more than one where random numbers decide which layers run.

    A symmetry of the model is one of every graph (see ``draws.plans`` for which ones are captured).

    Args:
        model, example_inputs, training: As in ``capture``.
    """
    return _Capture(model, example_inputs, training).all()


def capture_watched(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    training: bool,
    invert: frozenset[Place] = frozenset(),
    runnable: bool = True,
    follow_values: bool = True,
) -> WatchedGraphs:
    """All graphs of one mode, and what the model decided by sizes meanwhile.

    Args:
        model, example_inputs, training: As in ``capture``.
        invert: Places at which tests by sizes come out the other way, and zeros are ones.
        runnable: Whether the model may run on the values of the inputs.
        follow_values: Whether it may decide by whole numbers among the inputs, because the caller
            follows both outcomes.
    """
    capturing = _Capture(
        model,
        example_inputs,
        training,
        watched=True,
        invert=invert,
        runnable=runnable,
        follow_values=follow_values,
    )
    return WatchedGraphs(tuple(capturing.all()), tuple(capturing.watches), bool(capturing.drawn))


@dataclass(frozen=True)
class WatchedGraphs:
    """All graphs of one mode.

    Attributes:
        graphs: One, or several where random numbers decide which layers run.
        watches: Of the captures that were watched: all, or none if a capture without values was
            quicker.
        drawn: Whether random numbers decide.
    """

    graphs: tuple[Graph, ...]
    watches: tuple[Watch, ...]
    drawn: bool


def capture_both_modes(model: nn.Module, example_inputs: Inputs) -> list[Graph]:
    """All graphs of eval mode, then those of train mode."""
    return [
        graph
        for mode in (False, True)
        for graph in capture_graphs(model, example_inputs, training=mode)
    ]


class _Capture:
    """One model, mode and batch, captured by whatever way works.

    Args:
        model, example_inputs, training: As in ``capture``.
        watched, invert, runnable, follow_values: As in ``capture_watched``.

    Attributes:
        drawn: After the first capture, the single random numbers that the model has drawn.
        watches: What the model decided by sizes in the captures so far, where they were watched.
    """

    def __init__(
        self,
        model: nn.Module,
        example_inputs: Inputs,
        training: bool,
        *,
        watched: bool = False,
        invert: frozenset[Place] = frozenset(),
        runnable: bool = True,
        follow_values: bool = True,
    ) -> None:
        self.model = unwrap(model)
        require_supported(self.model)
        require_usable(*as_call(example_inputs))
        self.inputs = example_inputs
        self.training = training
        self.watched = watched
        self.invert = invert
        self.runnable = runnable
        self.follow_values = follow_values
        self.drawn: list[tuple[str, int]] = []
        self.watches: list[Watch] = []
        self._existing: dict[int, Tensor] | None = None
        self._way: Way = "export"
        self._replace = False

    def all(self) -> list[Graph]:
        """The first graph, then those under other draws, and of later calls."""
        graphs = [self.first()]
        if self.drawn:
            graphs += [self.again(plan) for plan in plans(self.drawn)]
        if not graphs[0].again_after:
            return graphs
        second = self.again(Plan(), calls=1)
        graphs.append(second)
        for calls in second.again_after:
            try:
                graphs.append(self.again(Plan(), calls=calls))
            except UnsupportedModelError:
                raise
            except Exception as error:
                # Numbers that are set on may be some that the model can never have.
                logger.info("The model fails after %d calls: %s", calls, error)
        return graphs

    def first(self) -> Graph:
        """The way that costs less, else the other one; each, where it fails, once more with single
        draws as constants.
        """
        errors: dict[Way, Exception | None] = {}
        for way in self._ways():
            graph, errors[way] = self._try(way, replace=False)
            if graph is None and self._torch_draws:
                graph, again = self._try(way, replace=True)
                errors[way] = errors[way] if way == "export" else again
            if graph is not None:
                return graph
            if isinstance(errors[way], HiddenError):
                raise UnsupportedModelError(
                    f"{type(self.model).__name__} could not be captured: {errors[way]}."
                ) from errors[way]
        exported, traced = errors["export"], errors.get("trace", errors["export"])
        assert exported is not None
        assert traced is not None
        raise capture_error(
            self.model, training=self.training, exported=exported, traced=traced
        ) from traced

    def _ways(self) -> tuple[Way, ...]:
        """A run on real values takes a third of the time of torch.export, unless the model or its
        batch is large: then it is better not run at all.
        """
        if not self.runnable:
            return ("export",)
        args, kwargs = as_call(self.inputs)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        owned = [*self.model.parameters(), *self.model.buffers()]
        small = (
            sum(tensor.numel() for tensor in given) <= LARGEST_BATCH
            and sum(tensor.numel() for tensor in owned) <= LARGEST_MODEL
        )
        # Only a run shows what is written into a dict, list or object that is given.
        holders = not all(
            isinstance(value, Tensor) or type(value) in PLAIN for value in (*args, *kwargs.values())
        )
        runs = (small or holders) and not any(tensor.is_meta for tensor in owned)
        return ("run", "export", "trace") if runs else ("export", "trace")

    def again(self, plan: Plan, *, calls: int = 0) -> Graph:
        """The graph under other draws, or after some calls, the same way as the first one."""
        return self._follow(self._way, plan, replace=self._replace, calls=calls)

    def _try(self, way: Way, *, replace: bool) -> tuple[Graph | None, Exception | None]:
        self._way = way
        self._replace = replace
        self._torch_draws = 0
        try:
            return self._follow(way, Plan(), replace=replace), None
        except Exception as error:
            return None, error

    def _follow(self, way: Way, plan: Plan, *, replace: bool, calls: int = 0) -> Graph:
        """Once more, with all tensors that there are, where the model uses one that is unknown."""
        try:
            return self._run(way, plan, replace=replace, calls=calls)
        except UnknownTensorError:
            self._existing = all_tensors()
        return self._run(way, plan, replace=replace, calls=calls)

    def _run(self, way: Way, plan: Plan, *, replace: bool, calls: int) -> Graph:
        model, training = self.model, self.training
        # Ctrl-C waits: an export that is stopped half way leaves torch unable to export anything
        # else.
        with (
            uninterrupted(),
            isolated(model, training=training),
            quiet(),
            _momentum_as_number(model),
        ):
            from_everywhere = GlobalDraws(plan)
            scalars = ScalarDraws(plan, replace=replace)
            args, kwargs = self._call(way)
            watch = self._new_watch(way) if not calls else None
            try:
                if way == "export":
                    draws = _both(scalars, watch or contextlib.nullcontext())
                    with refusing_state(model):
                        graph = export_graph(model, args, kwargs, training=training, draws=draws)
                else:
                    graph = trace_graph(
                        model,
                        args,
                        kwargs,
                        training=training,
                        draws=scalars,
                        existing=self._existing,
                        gradients=way == "run",
                        call=watch.call if watch is not None else None,
                        calls=calls,
                    )
            finally:
                self._torch_draws = scalars.count
            self.drawn = from_everywhere.list_draws()
            if replace:
                self.drawn += [("torch", i) for i in range(scalars.count)]
            self.watches += [watch] if watch is not None else []
        return graph

    def _new_watch(self, way: Way) -> Watch | None:
        """Only the quickest way is watched by itself: a model that fails under the watch is still
        captured by the others.
        """
        if not self.watched or (way != "run" and not self.invert):
            return None
        return Watch(self.model, self.invert, follow_values=self.follow_values)

    def _call(self, way: Way) -> tuple[tuple, dict[str, Any]]:
        if way != "export":
            return fresh_call(self.model, self.inputs)
        args, kwargs = as_call(self.inputs)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            args, kwargs = tree_map(
                lambda x: x.to("meta") if isinstance(x, Tensor) else x, (args, kwargs)
            )
        return args, kwargs


@contextlib.contextmanager
def _both(
    one: contextlib.AbstractContextManager[Any], other: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    with one, other:
        yield


@contextlib.contextmanager
def _momentum_as_number(model: nn.Module) -> Iterator[None]:
    """``momentum=None`` averages by a count that cannot be followed; no output depends on it."""
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    cumulative = [norm for norm in norms if norm.momentum is None]
    try:
        for module in cumulative:
            module.momentum = 0.1
        yield
    finally:
        for module in cumulative:
            module.momentum = None
