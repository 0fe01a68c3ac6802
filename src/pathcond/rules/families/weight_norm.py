"""Weight norm, w = g · v/‖v‖: the magnitude g carries the scale of a row, the direction v stays.

A scale of v cancels, and one column of it cannot follow what it reads without turning the others.
So v keeps its values, and w has a scale per element of g: outputs have scales of their own, inputs
share one, which g can divide out.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..energies import Carried, Energies
from ..labels import Labels
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Traced

WEIGHT_NORM = Family(
    "Weight norm: the magnitude carries the scale, the direction stays", reads_parameters=True
)


@rule("_weight_norm", family=WEIGHT_NORM)
def weight_norm(scales: Scales, v: Traced, g: Traced) -> Labels:
    scales.pin(v, "is the direction of a weight norm, whose scale cancels")
    if torch.broadcast_shapes(v.shape, g.shape) != v.shape:
        raise ValueError(f"a magnitude of shape {g.shape} does not fit a direction of {v.shape}")
    return scales.broadcast(scales.labels(g), v.shape)


# -- path energy -----------------------------------------------------------------------------------


@energy("_weight_norm")
def weight_norm_energy(energies: Energies, v: Carried, g: Carried, dim: int) -> Tensor:
    """The magnitude lengthens paths, times the direction as a constant, which lies on none of
    them.
    """
    energies.end("v", "is the direction of a weight norm")
    power = energies.factor(v).detach()
    if energies.p:
        length = torch.norm_except_dim(energies.real_of(energies.node.bound["v"]), 2, dim)
        power = power / length**energies.p
    return power * energies.factor(g)
