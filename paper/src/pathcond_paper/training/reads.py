"""What the weights of a model multiply: the mean square of the activations that each of them reads.

The energy of what a contraction computes, Σ x² θ² over what it sums, is linear in θ². Its
derivative by θ² is Σ x² over all places at which the weight is used, and with ones in place of x
the number of these places.

>>> import torch
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(2, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1)
... )
>>> x = torch.tensor([[1.0, 2.0], [3.0, 0.0]])
>>> mean_squares(model, x)["0.weight"]
tensor([[5., 2.]], dtype=torch.float64)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathcond.lifting.energy_pass import EnergyPass, Lifted
from pathcond.lifting.lifting import Walk, capture_sample
from pathcond.lifting.sample import Sample
from pathcond.rules.energies import Edges, PathSum
from pathcond.rules.table import Rule
from pathcond.trees import tree_leaves
from pathcond.wrappers import unwrap


def mean_squares(
    model: nn.Module, example_inputs: Any, *, approximate: bool = False
) -> dict[str, Tensor]:
    """The mean square, over the example batch and all places at which it is used, of what every
    entry of a weight multiplies.

    Args:
        model, example_inputs, approximate: As in ``diag_g``.

    Returns:
        {name: float64 tensor of the parameter's shape} for the trainable weights of contractions;
        entries that are not used are zero. Padding is not read.
    """
    sample = capture_sample(model, example_inputs)
    squares: dict[str, Tensor] = {}
    places: dict[str, Tensor] = {}
    for part in sample.all:
        _add(squares, _gradients(model, part, approximate, measured=True))
        _add(places, _gradients(model, part, approximate, measured=False))
    return {name: total / places[name].clamp(min=1) for name, total in squares.items()}


def _add(total: dict[str, Tensor], more: dict[str, Tensor]) -> None:
    for name, values in more.items():
        total[name] = total[name] + values if name in total else values


def _gradients(
    model: nn.Module, sample: Sample, approximate: bool, *, measured: bool
) -> dict[str, Tensor]:
    """Σ x² of every weight over its places, or Σ 1."""
    walk = Walk(unwrap(model), sample, calibrate=measured, approximate=approximate)
    received: dict[str, Tensor] = {}
    lifted = walk.run(p=2, received=received, kind=_Reads, measure_all=measured)
    if lifted.total.requires_grad:
        lifted.total.backward()
    return received


@dataclass
class _Reads(EnergyPass):
    """A walk on which every contraction reads the squares of real values, or ones uncalibrated, in
    place of the energy of paths; its total is the sum over all contractions.
    """

    contracted: list[Tensor] = field(default_factory=list)

    def _apply(self, rule: Rule, arguments: dict[str, Any]) -> Any:
        if not rule.family.contracts or not any(
            isinstance(a, Edges) for a in tree_leaves(arguments)
        ):
            return super()._apply(rule, arguments)
        self.operands = {
            name: self._as_read(self.node.bound[name], value) for name, value in arguments.items()
        }
        self.exponent = 0
        result = super()._apply(rule, self.operands)
        self.contracted += [result] if isinstance(result, Tensor) else []
        return result

    def _as_read(self, given: Any, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._as_read(*pair) for pair in zip(given, value, strict=True)]
        return PathSum(self._frozen_power(given)) if isinstance(value, PathSum) else value

    def _collected(self) -> Lifted:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for result in self.contracted:
            total = total + result.sum()
        return Lifted(total=total, exponent=0, cuts=self.cuts)
