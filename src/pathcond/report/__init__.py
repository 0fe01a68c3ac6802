"""What ``condition_`` did: a table for the terminal, a page for the browser, plain data for
scripts.
"""

from .diagonal import DiagonalSample, diagonal_sample, take_entries
from .report import Report

__all__ = ["DiagonalSample", "Report", "diagonal_sample", "take_entries"]
