"""Grouped matrix products (rows sorted by expert, each run of rows times the matrix of its expert),
and opaque modules.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..energies import FREEZE, Carried, Energies, Energy
from ..energies import grouped_product as multiply
from ..labels import Labels, constant
from ..picking import pick_from
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Operand, Traced
from .contraction import contract

GROUPED = "_grouped_mm", "transformers::grouped_mm_fallback"


@rule(
    *GROUPED,
    family=Family(
        "Grouped products: each expert's weights read the scales of their rows and give fresh ones"
    ),
)
def grouped_product(
    scales: Scales, x: Traced, mat2: Traced, weight: Traced, offs: Operand, bias: Traced | None
) -> Any:
    """(rows, in) with a stack (experts, in, out): rows offs[e - 1] to offs[e] meet matrix e ->
    (rows, out).
    """
    stack = mat2 if mat2 is not None else weight
    scales.pin(offs, "divides rows into groups")
    if offs is None or bias is not None or len(x.shape) != 2 or len(stack.shape) != 3:
        for operand in (x, stack, bias):
            scales.pin(operand, "takes part in a grouped product of a form that is not traced")
        return constant(scales.node.shape)
    picked = pick_from(scales, stack, scales.node.bound["offs"], rows=x.shape[0])
    if picked is not None:
        return contract(scales, x, "ri", picked, "rio", "ro")
    matrices = scales.agree(scales.labels(stack), [0])
    return contract(scales, x, "ri", Labels(matrices.ids[0], matrices.shape[1:]), "io", "ro")


def opaque(scales: Scales, x: Traced) -> Any:
    """What enters a module that cannot be captured is fixed, and so is what it returns."""
    kind = type(scales.node.target.module).__name__
    scales.pin(x, f"enters {kind}, which cannot be captured")
    return [constant(shape) for shape in scales.node.shape]


# -- path energy -----------------------------------------------------------------------------------


@energy(*GROUPED, measures=True)
def grouped_energy(
    energies: Energies, x: Carried, mat2: Carried, weight: Carried, bias: Carried
) -> Energy:
    """Energies multiply and are summed; rows meet the expert that they meet on the example
    batch.
    """
    left, right, *_ = energies.node.bound
    stack = mat2 if mat2 is not None else weight
    if bias is not None or energies.node.bound["offs"] is None or len(energies.node.shape) != 2:
        return FREEZE

    def product(at: Any) -> Tensor:
        if isinstance(at, int):
            return energies.product(lambda a, b: a @ b[at], left, right)
        return energies.product(lambda a, b: multiply(a, b, at), left, right)

    return energies.picked(product, "offs", len(energies.summand(stack)), edges=False)
