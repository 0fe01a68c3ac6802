"""Solvers of the criterion: each is a frozen object of settings with ``solve(problem) -> Solution``."""

from .coordinate_descent import CoordinateDescent
from .exact import Exact
from .solution import Solution

__all__ = ["CoordinateDescent", "Exact", "Solution"]
