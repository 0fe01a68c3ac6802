"""What the weights of a model multiply: the mean square of the activations that each of them reads.

The energy of what a contraction computes, Σ x² θ² over what it sums, is linear in θ². Its
derivative by θ² is Σ x² over all places at which the weight is used, and with ones in place of x
the number of these places.

>>> import torch
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(2, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1)
... )
>>> x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
>>> reads = measure_reads(model, x)["0.weight"]
>>> reads.squares, reads.inputs
(tensor([[5., 2.]], dtype=torch.float64), 2)
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.models import Inputs
from ..capture.nodes import Graph, Node
from ..distributed.sharding import is_sharded
from ..errors import EnergyRangeError
from ..numerics import without_repeats
from ..rules.energies import Edges, Energies, Frozen, PathSum
from ..rules.picking import MOVES
from ..rules.table import Rule
from ..trees import tree_leaves, tree_map
from ..wrappers import unwrap
from .energy_pass import EnergyPass, Lifted
from .lifting import Lifting, capture_sample, path_energy
from .sample import Prepared, Sample

CONVOLUTIONS = ("conv1d", "conv2d", "conv3d")


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one weight tensor multiplies.

    Attributes:
        squares: The mean square of what every entry multiplies, over the example batch and all
            places at which it is used; in the parameter's shape, float64 (expanded where all
            outputs read the same). Padding is not read, and entries that are not used have 0.
        inputs: How many products one output sums up.
        shared: Whether several calls use this tensor. What they read may have different scales, so
            that the mean follows none of them.
    """

    squares: Tensor
    inputs: int
    shared: bool


def measure_reads(
    model: nn.Module, example_inputs: Inputs | Sample | Prepared, *, approximate: bool = False
) -> dict[str, Reads]:
    """What the trainable weights of linear maps and convolutions multiply, by name.

    Args:
        model, example_inputs, approximate: As in ``diag_g``.
    """
    sample = capture_sample(model, example_inputs)
    reader = Reader()
    for part in sample.all:
        received: dict[str, Tensor] = {}
        lifting = Lifting(unwrap(model), part, calibrate=True, approximate=approximate)
        lifting.run(p=2, deliver=received.__setitem__, kind=reader.walk(received), measure_all=True)
    return reader.collect(sample)


def measure_both(
    model: nn.Module,
    sample: Sample,
    *,
    approximate: bool = False,
    keep: Callable[[Tensor], Tensor] = lambda g: g,
) -> tuple[dict[str, Tensor], dict[str, Reads]]:
    """``diag_g``, or what is kept of it, and ``measure_reads``, with the values of the batch
    computed once for both. Energies that leave the range of float64 are no error here, for what
    weights read does not depend on them.
    """
    reader = Reader()
    energy = path_energy(
        model,
        sample,
        approximate=approximate,
        refuse_out_of_range=False,
        keep=keep,
        walk=reader.walk,
    )
    return energy.diagonal, reader.collect(sample)


class Reader:
    """Collects what weights read, on walks over the graphs of a model.

    Attributes:
        squares: Σ x² of every weight over its places, by name.
        places: Σ 1 likewise.
        inputs: How many products an output of each contraction sums up.
    """

    def __init__(self) -> None:
        self.squares: dict[str, Tensor] = {}
        self.places: dict[str, Tensor] = {}
        self.inputs: dict[Node, int] = {}

    def walk(self, received: dict[str, Tensor]) -> Callable[..., EnergyPass]:
        """A walk that reports here; ``received`` is where gradients of parameters arrive."""
        return partial(_ReadingPass, reader=self, received=received)

    def collect(self, sample: Sample) -> dict[str, Reads]:
        """What was read on all graphs of a sample."""
        calls: dict[str, list[int]] = defaultdict(list)
        for part in sample.all:
            for name, nodes in _uses(part.graph).items():
                calls[name] += [self.inputs.get(node, 0) for node in nodes]
        means = {
            name: without_repeats(total) / without_repeats(self.places[name]).clamp(min=1)
            for name, total in self.squares.items()
        }
        for name, mean in means.items():
            if not math.isfinite(float(mean.sum())):
                raise EnergyRangeError(
                    f"What {name} multiplies is not finite on the example batch: its values, or "
                    "the weights in front of it, are too large."
                )
        return {
            name: Reads(
                squares=mean.expand(self.squares[name].shape),
                inputs=max(calls[name]),
                shared=len(calls[name]) > 1,
            )
            for name, mean in means.items()
            if any(calls[name]) and mean.dim() > 1
        }


def _uses(graph: Graph) -> dict[str, list[Node]]:
    """The calls that use every parameter, as it is or in another shape or order."""
    origins: dict[Node, str] = {}
    found: dict[str, list[Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "parameter":
            origins[node] = node.name
        names = {origins[operand] for operand in node.operands if operand in origins}
        if node.op in MOVES and len(names) == 1:
            origins[node] = names.pop()
        for name in names:
            found[name].append(node)
    return found


class _ReadingPass(EnergyPass):
    """A walk that, beside the energies of paths, sees what every contraction reads: its rule is
    asked for the energy of squares of real values, and of ones.
    """

    def __init__(
        self, *given: Any, reader: Reader, received: dict[str, Tensor], **options: Any
    ) -> None:
        """
        Args:
            given, options: As in ``EnergyPass``.
            reader: Takes what is found.
            received: Where gradients of parameters arrive.
        """
        super().__init__(*given, **options)
        self.reader = reader
        self.received = received
        own = self.energies
        self.counting = Energies(self.batch, own.p, own.approximate, False, own.device)
        # Σ x² θ² and Σ θ² of weights that are views of parameters, or computed from them.
        self.indirect: dict[str, list[Tensor]] = {"squares": [], "places": []}

    def apply(self, node: Node, rule: Rule, arguments: dict[str, Any]) -> Any:
        weights = [a for a in tree_leaves(arguments) if isinstance(a, Edges) and a.power.dim() > 1]
        # Of two weights each would read the other.
        if rule.family.contracts and len(weights) == 1:
            exponent = self.energies.exponent
            self._read(node, rule, arguments, weights[0])
            self.energies.operands = arguments
            self.energies.exponent = exponent
        return super().apply(node, rule, arguments)

    def _read(self, node: Node, rule: Rule, arguments: dict[str, Any], weight: Edges) -> None:
        self.counting.node = node
        self.counting.alternative = self.energies.alternative
        for what, energies in (("squares", self.energies), ("places", self.counting)):
            operands = {
                name: _as_read(energies, node.bound[name], a) for name, a in arguments.items()
            }
            gradient = _gradient(energies, rule, operands, weight)
            if gradient is None:
                return
            if weight.power.requires_grad:
                self._add(what, node, arguments, weight, gradient)
        self.reader.inputs[node] = _count_inputs(self.counting, rule, operands, weight)

    def _add(
        self, what: str, node: Node, arguments: dict[str, Any], weight: Edges, gradient: Tensor
    ) -> None:
        name = next(
            (
                given.name
                for given, a in ((node.bound[name], a) for name, a in arguments.items())
                if a is weight and isinstance(given, Node) and given.op == "parameter"
            ),
            None,
        )
        if name is None or is_sharded(self.batch.parameters[name]):
            self.indirect[what].append((weight.power * gradient).sum())
        else:
            _accumulate(getattr(self.reader, what), name, gradient)

    def collect(self) -> Lifted:
        for what, products in self.indirect.items():
            if products:
                # Paths go through the same views, later.
                torch.stack(products).sum().backward(retain_graph=True)
                for name, gradient in self.received.items():
                    _accumulate(getattr(self.reader, what), name, gradient)
                self.received.clear()
        return super().collect()


def _accumulate(totals: dict[str, Tensor], name: str, gradient: Tensor) -> None:
    totals[name] = totals[name] + gradient if name in totals else gradient


def _as_read(energies: Energies, given: Any, value: Any) -> Any:
    """An operand of a contraction: of what depends on the data the square, or 1 where only places
    are counted.
    """
    if isinstance(value, (list, tuple)):
        return [_as_read(energies, *pair) for pair in zip(given, value, strict=True)]
    return PathSum(energies.frozen_power(given)) if isinstance(value, PathSum) else value


def _gradient(
    energies: Energies, rule: Rule, operands: dict[str, Any], weight: Edges
) -> Tensor | None:
    """The derivative of the energy of a contraction by that of its weight, in its shape; None where
    the rule gives no energy.
    """
    node = energies.node
    shape = weight.power.shape
    # All outputs of a linear map, or of a group of a convolution, read the same.
    plain = operands.get("weight") is weight and node.op in (*CONVOLUTIONS, "linear")
    rows = int(node.bound.get("groups", 1))
    leaf = torch.ones(
        (rows, *shape[1:]) if plain else shape, dtype=torch.float64, device=energies.device
    ).requires_grad_()
    replaced = tree_map(lambda a: Edges(leaf) if a is weight else a, operands)
    if plain:
        replaced["bias"] = None
    result = _energy(energies, rule, replaced)
    if not isinstance(result, Tensor):
        return None
    gradient = torch.autograd.grad(result.sum(), leaf)[0]
    if not plain:
        return gradient
    return gradient.unsqueeze(1).expand(rows, shape[0] // rows, *shape[1:]).reshape(shape)


def _energy(energies: Energies, rule: Rule, operands: dict[str, Any]) -> Any:
    assert rule.energy is not None
    energies.operands = operands
    energies.exponent = 0
    return rule.energy(energies, operands)


def _count_inputs(counting: Energies, rule: Rule, operands: dict[str, Any], weight: Edges) -> int:
    """How many products an output sums up."""
    node = counting.node
    shape = weight.power.shape
    if operands.get("weight") is weight and node.op.startswith("conv"):
        # Padding is not counted in the result, and on a small map may be most of the kernel.
        outputs = shape[0]
        if "transpose" in node.op or node.bound.get("transposed"):
            outputs = shape[1] * int(node.bound["groups"])
        return max(1, shape.numel() // outputs)
    if operands.get("weight") is weight and node.op == "linear":
        return max(1, shape[-1])
    counted = tree_map(
        lambda a: Edges(torch.ones_like(a.power)) if isinstance(a, Edges) else a, operands
    )
    silent = tree_map(partial(_silence, device=counting.device), counted)
    result, biases = (_energy(counting, rule, given) for given in (counted, silent))
    return max(1, round(float((result - biases).max()))) if result.numel() else 1


def _silence(operand: Any, device: torch.device) -> Any:
    """Zeros in place of what depends on the data, whether paths lead to it or end before it."""
    if isinstance(operand, PathSum):
        return PathSum(torch.zeros_like(operand.power))
    if isinstance(operand, Frozen):
        return PathSum(torch.zeros(operand.node.shape, dtype=torch.float64, device=device))
    return operand
