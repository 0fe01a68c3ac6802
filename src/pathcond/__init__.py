"""PathCond: rescale ReLU networks along their symmetries, without changing the function.

symmetry = pathcond.find_symmetry(model, example_inputs)      # what can be rescaled, and what cannot
pathcond.rescale_(model, symmetry, log_scales)                # in place, verified, all or nothing
pathcond.diag_g(model, example_inputs)                        # diagonal of G = ∂Φᵀ∂Φ, one backward pass
pathcond.path_norm(model, example_inputs, p=2)                # ‖Φ‖_p
pathcond.count_paths(model, example_inputs)                   # how many paths there are
"""

from . import reference, theory
from .errors import EnergyRangeError, RescalingError, UnsupportedModelError
from .lifting import count_paths, diag_g, log10_paths, path_norm
from .rescale import rescale_
from .symmetry import Symmetry, find_symmetry

__version__ = "0.1.0"

__all__ = [
    "EnergyRangeError",
    "RescalingError",
    "Symmetry",
    "UnsupportedModelError",
    "count_paths",
    "diag_g",
    "find_symmetry",
    "log10_paths",
    "path_norm",
    "reference",
    "rescale_",
    "theory",
]
