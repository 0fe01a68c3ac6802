"""PathCond: rescale ReLU networks along their symmetries, without changing the function.

symmetry = pathcond.find_symmetry(model, example_inputs)      # what can be rescaled, and what cannot
pathcond.rescale_(model, symmetry, log_scales)                # in place, verified, all or nothing
"""

from . import reference
from .errors import RescalingError, UnsupportedModelError
from .rescale import rescale_
from .symmetry import Symmetry, find_symmetry

__version__ = "0.1.0"

__all__ = [
    "RescalingError",
    "Symmetry",
    "UnsupportedModelError",
    "find_symmetry",
    "reference",
    "rescale_",
]
