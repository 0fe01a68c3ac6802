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
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..capture.nodes import Graph, Node
from ..errors import EnergyRangeError
from ..rules.energies import Edges, PathSum
from ..rules.picking import MOVES
from ..rules.table import Rule
from ..trees import tree_leaves, tree_map
from ..wrappers import unwrap
from .energy_pass import EnergyPass, Lifted
from .lifting import Lifting, capture_sample
from .sample import Sample


@dataclass(frozen=True, kw_only=True)
class Reads:
    """What one weight tensor multiplies.

    Attributes:
        squares: The mean square of what every entry multiplies, over the example batch and all
            places at which it is used; in the parameter's shape, float64. Padding is not read, and
            entries that are not used have 0.
        inputs: How many products one output sums up.
        shared: Whether several calls use this tensor. What they read may have different scales, so
            that the mean follows none of them.
    """

    squares: Tensor
    inputs: int
    shared: bool


def measure_reads(
    model: nn.Module, example_inputs: Any, *, approximate: bool = False
) -> dict[str, Reads]:
    """What the trainable weights of linear maps and convolutions multiply, by name.

    Args:
        model, example_inputs, approximate: As in ``diag_g``.
    """
    sample = capture_sample(model, example_inputs)
    squares: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    calls: dict[str, list[int]] = defaultdict(list)
    for part in sample.all:
        _add(squares, _gradients(model, part, approximate, measured=True)[0])
        counted, inputs = _gradients(model, part, approximate, measured=False)
        _add(places, counted)
        for name, nodes in _uses(part.graph).items():
            calls[name] += [inputs.get(node, 0) for node in nodes]
    for name, total in squares.items():
        if not math.isfinite(float(total.sum())):
            raise EnergyRangeError(
                f"What {name} multiplies is not finite on the example batch: its values, or the "
                "weights in front of it, are too large."
            )
    return {
        name: Reads(
            squares=total / places[name].clamp(min=1),
            inputs=max(calls[name]),
            shared=len(calls[name]) > 1,
        )
        for name, total in squares.items()
        if any(calls[name]) and total.dim() > 1
    }


def _add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, values in more.items():
        total[name] = total[name] + values if name in total else values


def _gradients(
    model: nn.Module, sample: Sample, approximate: bool, *, measured: bool
) -> tuple[dict[str, Tensor], dict[Node, int]]:
    """Σ x² of every weight over its places; or Σ 1, and how many inputs each contraction sums."""
    lifting = Lifting(unwrap(model), sample, calibrate=measured, approximate=approximate)
    received: dict[str, Tensor] = {}
    inputs: dict[Node, int] = {}

    lifted = lifting.run(
        p=2,
        received=received,
        count=not measured,
        kind=partial(_ReadingPass, inputs_of=inputs),
        measure_all=measured,
    )
    if lifted.total.requires_grad:
        lifted.total.backward()
    return received, inputs


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
    """A walk on which every contraction reads the squares of real values, or ones where it counts,
    in place of the energy of paths; its total is the sum over all contractions.
    """

    def __init__(self, *given: Any, inputs_of: dict[Node, int], **options: Any) -> None:
        """
        Args:
            given, options: As in ``EnergyPass``.
            inputs_of: Takes, where it counts, how many products an output of each contraction sums
                up.
        """
        super().__init__(*given, **options)
        self.inputs_of = inputs_of
        self.contracted: list[Tensor] = []

    def apply(self, node: Node, rule: Rule, arguments: dict[str, Any]) -> Any:
        weights = [a for a in tree_leaves(arguments) if isinstance(a, Edges) and a.power.dim() > 1]
        # Of two weights each would read the other.
        if not rule.family.contracts or len(weights) != 1:
            return super().apply(node, rule, arguments)
        operands = {name: self._as_read(node.bound[name], a) for name, a in arguments.items()}
        self.energies.exponent = 0
        result = self._apply_to(node, rule, operands)
        if isinstance(result, Tensor):
            self.contracted.append(result)
            if not self.energies.calibrate:
                self.inputs_of[node] = self._inputs(node, rule, operands, result)
        return result

    def _apply_to(self, node: Node, rule: Rule, operands: dict[str, Any]) -> Any:
        self.energies.operands = operands
        return super().apply(node, rule, operands)

    def _inputs(self, node: Node, rule: Rule, operands: dict[str, Any], result: Tensor) -> int:
        """How many products an output sums up."""
        weight = operands.get("weight")
        if isinstance(weight, Edges) and node.op.startswith("conv"):
            # Padding is not counted in the result, and on a small map may be most of the kernel.
            outputs = weight.power.shape[0]
            if "transpose" in node.op or node.bound.get("transposed"):
                outputs = weight.power.shape[1] * int(node.bound["groups"])
            return max(1, weight.power.numel() // outputs)
        silent = tree_map(
            lambda a: PathSum(torch.zeros_like(a.power)) if isinstance(a, PathSum) else a,
            operands,
        )
        biases = self._apply_to(node, rule, silent)
        assert isinstance(biases, Tensor)
        return max(1, round(float((result - biases).detach().max()))) if result.numel() else 1

    def _as_read(self, given: Any, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._as_read(*pair) for pair in zip(given, value, strict=True)]
        return PathSum(self.energies.frozen_power(given)) if isinstance(value, PathSum) else value

    def collect(self) -> Lifted:
        total = torch.zeros((), dtype=torch.float64, device=self.energies.device)
        for result in self.contracted:
            total = total + result.sum()
        return Lifted(total=total, exponent=0, cuts=self.energies.cuts)
