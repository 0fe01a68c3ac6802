"""Which units of a model can be rescaled: ``find_symmetry`` and all that it needs."""

from .symmetry import Normalization, Symmetry, find_symmetry
from .units import Pinned, UnitGroup

__all__ = ["Normalization", "Pinned", "Symmetry", "UnitGroup", "find_symmetry"]
