"""Recurrent layers with ReLU: h' = relu(W x + b + U h + c), one scale per hidden unit.

Rows of W and U and both biases are multiplied by the scale of the unit that they feed, columns of
U and of the next layer's W are divided by the scale of the unit that they read. A state has the
same scales at every step, so a sequence of any length keeps its function. RNNs with tanh, LSTMs
and GRUs have no rule: their units are fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..energies import FREEZE, Carried, Energies, Energy, PathSum
from ..labels import Labels
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Operand, Traced
from .contraction import contract

RECURRENT = Family(
    "Recurrent layers with ReLU: one scale per hidden unit, the same at every step",
    contracts=True,
    recurrent=True,
)
BIAS = "is added to a bias that has no scale"
STATE = "is a state that something without a scale enters"


@rule("rnn_relu_cell", family=RECURRENT)
def cell(
    scales: Scales,
    input: Operand,
    hx: Operand,
    w_ih: Traced,
    w_hh: Traced,
    b_ih: Traced | None,
    b_hh: Traced | None,
) -> Labels:
    out = _feed(scales, _per_unit(scales, input), w_ih, b_ih)
    out = scales.merge(out, _feed(scales, _per_unit(scales, hx), w_hh, b_hh), reason=STATE)
    return scales.broadcast(out, scales.node.shape)


@rule("rnn_relu", family=RECURRENT)
def rnn(
    scales: Scales,
    x: Operand,
    hx: Operand,
    params: Sequence[Operand],
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
) -> Any:
    """Layers follow each other; the two directions of a layer read the same and have units
    apart.
    """
    directions = 2 if bidirectional else 1
    cells = _cells(params, has_biases)
    initial = scales.labels(hx)
    states: list[Labels] = []
    layer = _per_unit(scales, x)
    for number in range(num_layers):
        outputs: list[Labels] = []
        for position in range(number * directions, (number + 1) * directions):
            state = Labels(initial.along([0])[position], initial.shape[1:])
            outputs.append(_recurrence(scales, layer, _per_unit(scales, state), *cells[position]))
        states += outputs
        ids = torch.cat([output.full for output in outputs])
        layer = Labels(ids, tuple(ids.shape))
    result_shape, state_shape = scales.node.shape
    final = torch.stack([state.full for state in states])
    final = final.view(len(states), *[1] * (len(state_shape) - 2), -1)
    return scales.broadcast(layer, result_shape), Labels(final, state_shape)


def _recurrence(
    scales: Scales,
    x: Labels,
    state: Labels,
    w_ih: Traced,
    w_hh: Traced,
    b_ih: Traced | None,
    b_hh: Traced | None,
) -> Labels:
    """The scales of one direction of one layer; what enters the state must fit what it becomes."""
    out = scales.merge(_feed(scales, x, w_ih, b_ih), state, reason=STATE)
    return scales.merge(out, _feed(scales, out, w_hh, b_hh), reason=STATE)


def _feed(scales: Scales, x: Labels, weight: Traced, bias: Traced | None) -> Labels:
    """Labels of W x + b, (units,)."""
    out = contract(scales, x, "i", weight, "oi", "o")
    return out if bias is None else scales.merge(out, bias, reason=BIAS)


def _per_unit(scales: Scales, x: Operand) -> Labels:
    """One label per element of the last axis: steps and samples share them."""
    labels = scales.labels(x)
    rank = len(labels.shape)
    ids = scales.agree(labels, range(rank - 1)).along([rank - 1])
    return Labels(ids.reshape(-1), labels.shape[-1:])


def _cells(params: Sequence[Any], has_biases: bool) -> list[tuple[Any, Any, Any, Any]]:
    """(W, U, b, c) of every layer and direction in order; b and c are None without biases."""
    if has_biases:
        return [(p[0], p[1], p[2], p[3]) for p in _runs(params, 4)]
    return [(p[0], p[1], None, None) for p in _runs(params, 2)]


def _runs(params: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [params[start : start + size] for start in range(0, len(params), size)]


# -- path energy -----------------------------------------------------------------------------------


@energy("rnn_relu")
def rnn_energy(energies: Energies, params: Any, has_biases: bool) -> Energy:
    """Step by step as written out: the op itself on energies and |θ|^p, where ReLU does nothing."""
    if any(isinstance(p, PathSum) for p in params):
        return FREEZE
    matrices = [i % 4 < 2 or not has_biases for i in range(len(params))]
    powers = [
        energies.factor(p) if matrix else energies.summand(p)
        for p, matrix in zip(params, matrices, strict=True)
    ]
    with torch.backends.cudnn.flags(enabled=False):  # which has no backward pass in eval mode
        return energies.itself({"params": powers, "dropout": 0.0})


@energy("rnn_relu_cell")
def cell_energy(energies: Energies, w_ih: Carried, w_hh: Carried) -> Energy:
    """Step by step as written out: the op itself on energies and |θ|^p, where ReLU does nothing."""
    if isinstance(w_ih, PathSum) or isinstance(w_hh, PathSum):
        return FREEZE
    powers: dict[str, Tensor] = {"w_ih": energies.factor(w_ih), "w_hh": energies.factor(w_hh)}
    return energies.itself(powers)
