"""The path lifting Φ: the diagonal of its kernel, its norms, and the number of its paths."""

from .lifting import (
    PathEnergy,
    capture_sample,
    count_paths,
    diag_g,
    log10_paths,
    off_path,
    path_energy,
    path_norm,
)
from .sample import Prepared, Sample

__all__ = [
    "PathEnergy",
    "Prepared",
    "Sample",
    "capture_sample",
    "count_paths",
    "diag_g",
    "log10_paths",
    "off_path",
    "path_energy",
    "path_norm",
]
