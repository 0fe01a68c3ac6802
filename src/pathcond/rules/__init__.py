"""Operation rules, one file per family; importing this package fills the table."""

from .families import (
    attention,
    contraction,
    elementwise,
    experts,
    indexing,
    normalization,
    recurrent,
    reduction,
    scattering,
    shape,
    weight_norm,
)
from .table import RULES, Rule

__all__ = [
    "RULES",
    "Rule",
    "attention",
    "contraction",
    "elementwise",
    "experts",
    "indexing",
    "normalization",
    "recurrent",
    "reduction",
    "scattering",
    "shape",
    "weight_norm",
]
