"""Stand-ins for opaque modules: one call in the graph around them, which leads back to the module
itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_map, tree_unflatten

from ..capture.contents import tensors_in
from ..capture.isolation import (
    OF_EVERY_MODULE,
    attributes_kept,
    isolated,
    replaced,
    weights_kept,
)
from ..capture.nodes import Graph, Node
from ..errors import UnsupportedModelError
from ..interrupts import uninterrupted
from .recording import Recording

_NONE = object()  # an argument that is None
_counter = itertools.count()


@dataclass(frozen=True, eq=False)
class Site:
    """One call of an opaque module: the target of its node in the graph around it.

    Attributes:
        module: The module.
        spec: How its tensors and other arguments nest.
        arguments: All leaves of its arguments; None in place of tensors.
        types: Of the tensors that it is given.
    """

    module: nn.Module
    spec: TreeSpec
    arguments: tuple[Any, ...]
    types: tuple[torch.dtype, ...]

    def __call__(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """What the module returns, in its own precision; the call leaves no trace."""
        # behind the arguments, what lies in attributes
        given = iter([tensor.to(dtype) for tensor, dtype in zip(tensors, self.types, strict=False)])
        leaves = [
            next(given).clone() if argument is None else argument for argument in self.arguments
        ]
        args, kwargs = tree_unflatten(
            [None if leaf is _NONE else leaf for leaf in leaves], self.spec
        )
        buffers = {name: buffer.detach().clone() for name, buffer in self.module.named_buffers()}
        with (
            uninterrupted(),
            isolated(self.module, training=False),
            attributes_kept(self.module),
            weights_kept(self.module),
            replaced(self.module, buffers),
            torch.no_grad(),
        ):
            returned = self.module(*args, **kwargs)
        return [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]


# What opaque modules returned on the example; while a model is captured, and no longer.
_recorded: dict[int, list[Tensor]] = {}


@torch.library.custom_op(
    "pathcond::opaque", mutates_args=(), schema="(Tensor[] tensors, int site) -> Tensor[]"
)
def _opaque(tensors: list[Tensor], site: int) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in _recorded[site]]


@_opaque.register_fake
def _(tensors: list[Tensor], site: int) -> list[Tensor]:
    return [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in _recorded[site]]


@contextmanager
def stubs(model: nn.Module, recording: Recording) -> Iterator[dict[int, Site]]:
    """Opaque modules return tensors like the recorded ones, by one call that no rule knows.

    The model may be run several times. To be used inside ``uninterrupted``.
    """
    own: dict[int, Site] = {}
    saved = [(module, vars(module).get("forward")) for module in [model, *recording.returned]]
    outputs: dict[nn.Module, Iterator[Any]] = {}
    forward_of_model = model.forward
    before = {id(tensor) for module in recording.returned for tensor in _in_attributes(module)}

    def restart(*args: Any, **kwargs: Any) -> Any:
        outputs.update({module: iter(returned) for module, returned in recording.returned.items()})
        return forward_of_model(*args, **kwargs)

    def stub(module: nn.Module) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            returned = next(outputs[module], None)
            if returned is None:
                raise UnsupportedModelError(
                    f"{type(module).__name__} is called more often while it is captured than on "
                    "real values"
                )
            leaves, spec = tree_flatten((args, kwargs))
            tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
            others = tuple(
                None if isinstance(leaf, Tensor) else _NONE if leaf is None else leaf
                for leaf in leaves
            )
            made = [leaf for leaf in tree_leaves(returned) if isinstance(leaf, Tensor)]
            types = tuple(tensor.dtype for tensor in tensors)
            number = next(_counter)
            own[number] = Site(module, spec, others, types)
            _recorded[number] = made
            kept = [t for t in _in_attributes(module) if id(t) not in before]
            results = iter(torch.ops.pathcond.opaque([*tensors, *kept], number))
            return tree_map(
                lambda leaf: next(results) if isinstance(leaf, Tensor) else leaf, returned
            )

        return forward

    try:
        for module in recording.returned:
            module.forward = stub(module)  # type: ignore[method-assign]
        model.forward = restart  # type: ignore[method-assign]
        yield own
    finally:
        for module, forward in saved:
            if forward is None:
                vars(module).pop("forward", None)
            else:
                module.forward = forward  # type: ignore[method-assign]
        for number in own:
            _recorded.pop(number, None)


def _in_attributes(module: nn.Module) -> list[Tensor]:
    """The tensors in attributes of a module and of its parts, but for parameters and buffers."""
    attributes = [
        value
        for part in module.modules()
        for name, value in vars(part).items()
        if name not in OF_EVERY_MODULE
    ]
    own = {id(part) for part in module.modules()}
    return list(tensors_in(attributes, but=own))


def with_sites(graph: Graph, sites: dict[int, Site]) -> Graph:
    """The graph with every call of an opaque module bound to the module itself."""

    def bind(node: Node) -> Node:
        if node.op != "pathcond::opaque":
            return node
        site = sites[node.args[1]]
        return replace(node, op="opaque", target=site, args=(node.args[0],), kwargs={}, line="")

    return rebuild(graph, bind)


def rebuild(graph: Graph, change: Callable[[Node], Node]) -> Graph:
    made: dict[Node, Node] = {}

    def swap(tree: Any) -> Any:
        return tree_map(lambda leaf: made.get(leaf, leaf) if isinstance(leaf, Node) else leaf, tree)

    for node in graph.nodes:
        made[node] = change(replace(node, args=swap(node.args), kwargs=swap(node.kwargs)))
    return replace(
        graph,
        nodes=tuple(made.values()),
        outputs=tuple(swap(list(graph.outputs))),
        returned=tuple(swap(list(graph.returned))),
        varying=frozenset(made[node] for node in graph.varying if node in made),
    )
