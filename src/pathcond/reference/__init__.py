"""Slow, by-the-definition oracles. Tests and documentation hold the library against them.

symmetries      how many rescaling symmetries a network has, as a numerical rank
paths           every path of a tiny network: Φ, its Jacobian, P and G
divergences     spectral Bregman divergences, and PathCond's criterion before any simplification
flows           gradient flow, its ideal in the lifted space, and natural-gradient flow
algorithm_box   the paper's coordinate descent, neuron by neuron
"""

from .algorithm_box import Connectivity, box_sweeps
from .divergences import (
    FROBENIUS,
    LOGDET,
    VON_NEUMANN,
    Divergence,
    divergence,
    divergence_plus,
    plus_logdet_of_rescaling,
    rescaled_divergence,
)
from .flows import gradient_flow, ideal_flow, natural_gradient_flow
from .gates import Gate
from .paths import Path, Paths, enumerate_paths, parameter_vector
from .symmetries import count_symmetries

__all__ = [
    "FROBENIUS",
    "LOGDET",
    "VON_NEUMANN",
    "Connectivity",
    "Divergence",
    "Gate",
    "Path",
    "Paths",
    "box_sweeps",
    "count_symmetries",
    "divergence",
    "divergence_plus",
    "enumerate_paths",
    "gradient_flow",
    "ideal_flow",
    "natural_gradient_flow",
    "parameter_vector",
    "plus_logdet_of_rescaling",
    "rescaled_divergence",
]
