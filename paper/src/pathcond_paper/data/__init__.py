"""Data sets of the experiments: read from disk in their official layouts, fetched with
checksums.
"""

from .datasets import DATASETS, Dataset, load
from .downloading import DownloadError, get
from .formats import DataError, MissingDataError

__all__ = ["DATASETS", "DataError", "Dataset", "DownloadError", "MissingDataError", "get", "load"]
