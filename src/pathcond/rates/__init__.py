"""Does it pay on my model? Every method at its own best learning rate.

arguments ──► runs ──► comparison ──► words, page
              (compare.py: in order, interrupted and resumed)
"""

from .compare import compare_rates
from .comparison import RateComparison
from .curves import Curve

__all__ = ["Curve", "RateComparison", "compare_rates"]
