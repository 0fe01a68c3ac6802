"""PathCond: rescale ReLU networks along their symmetries, without changing the function.

report = pathcond.condition_(model, example_inputs)           # all of the below, verified
handle = pathcond.teleport(optimizer, model, example_inputs)  # the same every few steps of training
symmetry = pathcond.find_symmetry(model, example_inputs)      # what can be rescaled
pathcond.solve(symmetry, g, solver=pathcond.Exact())           # the best log-scales
pathcond.PathKernel(), Curvature(), BalancedNorms(), BalancedLayers()   # what is balanced
pathcond.rescale_(model, symmetry, log_scales)                # in place, verified, all or nothing
pathcond.diag_g(model, example_inputs)                        # diagonal of G = ∂Φᵀ∂Φ
pathcond.path_norm(model, example_inputs, p=2)                # ‖Φ‖_p
pathcond.count_paths(model, example_inputs)                   # how many paths there are
pathcond.compare_rates(build, train, example_inputs)          # does it pay at tuned rates
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import reference, theory
    from .condition import condition_, prepare
    from .criteria.criterion import Criterion, PathKernel
    from .criteria.norms import BalancedNorms
    from .errors import (
        DivergedError,
        EnergyRangeError,
        MismatchError,
        RescalingError,
        TrainChangeError,
        UnsupportedModelError,
    )
    from .lifting.lifting import count_paths, diag_g, log10_paths, path_norm
    from .lifting.reads import Reads, measure_reads
    from .lifting.sample import Prepared
    from .measured.curvature import Curvature
    from .measured.layers import BalancedLayers
    from .rates import RateComparison, compare_rates
    from .report import Report
    from .rescaling.rescale import Rescaling, rescale_
    from .solvers import CoordinateDescent, ENorm, Exact, Solution, Solver, solve
    from .symmetry.symmetry import Symmetry, find_symmetry
    from .teleporting import Teleportation, teleport

__version__ = "0.1.0"

__all__ = [
    "BalancedLayers",
    "BalancedNorms",
    "CoordinateDescent",
    "Criterion",
    "Curvature",
    "DivergedError",
    "ENorm",
    "EnergyRangeError",
    "Exact",
    "MismatchError",
    "PathKernel",
    "Prepared",
    "RateComparison",
    "Reads",
    "Report",
    "Rescaling",
    "RescalingError",
    "Solution",
    "Solver",
    "Symmetry",
    "Teleportation",
    "TrainChangeError",
    "UnsupportedModelError",
    "compare_rates",
    "condition_",
    "count_paths",
    "diag_g",
    "find_symmetry",
    "log10_paths",
    "measure_reads",
    "path_norm",
    "prepare",
    "reference",
    "rescale_",
    "solve",
    "teleport",
    "theory",
]

# Where the public names are. They are loaded when they are first used: torch takes seconds, and a
# command line that only prints its help does without.
_ROOMS = {
    "condition": ["condition_", "prepare"],
    "criteria.criterion": ["Criterion", "PathKernel"],
    "criteria.norms": ["BalancedNorms"],
    "errors": [
        "DivergedError",
        "EnergyRangeError",
        "MismatchError",
        "RescalingError",
        "TrainChangeError",
        "UnsupportedModelError",
    ],
    "lifting.lifting": ["count_paths", "diag_g", "log10_paths", "path_norm"],
    "lifting.reads": ["Reads", "measure_reads"],
    "lifting.sample": ["Prepared"],
    "measured.curvature": ["Curvature"],
    "measured.layers": ["BalancedLayers"],
    "rates": ["RateComparison", "compare_rates"],
    "report": ["Report"],
    "rescaling.rescale": ["Rescaling", "rescale_"],
    "solvers": ["CoordinateDescent", "ENorm", "Exact", "Solution", "Solver", "solve"],
    "symmetry.symmetry": ["Symmetry", "find_symmetry"],
    "teleporting": ["Teleportation", "teleport"],
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    """A public name, or a module of the package."""
    room = _ROOM_OF.get(name)
    if room is not None:
        value = getattr(import_module(f".{room}", __name__), name)
        globals()[name] = value
        return value
    if not name.startswith("_"):
        try:
            return import_module(f".{name}", __name__)
        except ModuleNotFoundError as error:
            if error.name != f"{__name__}.{name}":
                raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
