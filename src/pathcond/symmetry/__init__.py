"""Which units of a model can be rescaled: ``find_symmetry`` and all that it needs."""

from .symmetry import Normalization, Pinned, Symmetry, UnitGroup, find_symmetry

__all__ = ["Normalization", "Pinned", "Symmetry", "UnitGroup", "find_symmetry"]
