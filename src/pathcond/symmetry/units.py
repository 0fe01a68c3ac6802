"""What can be rescaled, as plain data: units, what is pinned, and which units make a scale."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class UnitGroup:
    """Units that one layer makes: ``relu(W x)`` with W of 4 rows is a group of 4 units, fed by W.

    Attributes:
        name: The first module that gives these units their scale.
        units: Their positions in the vector of log-scales.
        multiplied: Parameters and buffers that are multiplied by λ: those that feed the units.
        divided: Parameters that are divided by λ: those that read the units.
    """

    name: str
    units: tuple[int, ...]
    multiplied: tuple[str, ...]
    divided: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Pinned:
    """Units or a parameter that cannot be rescaled.

    Attributes:
        name: The module whose units are pinned, or the parameter.
        units: How many units; 0 for a parameter.
        operation: The operation that pins them.
        module: The module that calls it.
        line: Source line of that call.
        reason: Why, in words that follow the name: "is an output of the model".
    """

    name: str
    units: int
    operation: str
    module: str
    line: str
    reason: str

    def __str__(self) -> str:
        subject = f"{self.name} ({self.units} units)" if self.units else self.name
        place = ", ".join(part for part in (self.module, self.line) if part)
        return f"{subject} {self.reason} [{self.operation}{' at ' + place if place else ''}]"


@dataclass(frozen=True)
class ClassMatrix:
    """Classes of equal log-scales as integer combinations of units: a sparse matrix, entries sorted
    by class.

    Attributes:
        classes, units: (entries,) positions.
        coefficients: (entries,) float64, integer-valued.
        num_classes, num_units: Rows and columns of the matrix.
    """

    classes: Tensor
    units: Tensor
    coefficients: Tensor
    num_classes: int
    num_units: int

    def __matmul__(self, log_scales: Tensor) -> Tensor:
        """Log-scales of the classes, (num_classes,) float64, from those of the units."""
        terms = self.coefficients * log_scales[self.units]
        return torch.zeros(self.num_classes, dtype=torch.float64, device=terms.device).index_add_(
            0, self.classes, terms
        )

    def apply_transposed(self, values: Tensor) -> Tensor:
        """Values of the classes summed over the units they depend on, (num_units,) float64."""
        terms = self.coefficients * values[self.classes]
        return self._sum_by_units(terms)

    def sides(self, multiplied: Tensor, divided: Tensor) -> tuple[Tensor, Tensor]:
        """Sums over what each unit multiplies and over what it divides, (num_units,) each.

        Args:
            multiplied, divided: The same of every class, (num_classes,) float64 each.
        """
        positive = self.coefficients > 0
        found = []
        for up, down in ((multiplied, divided), (divided, multiplied)):
            terms = self.coefficients.abs() * torch.where(
                positive, up[self.classes], down[self.classes]
            )
            found.append(self._sum_by_units(terms))
        return found[0], found[1]

    def _sum_by_units(self, terms: Tensor) -> Tensor:
        zeros = torch.zeros(self.num_units, dtype=torch.float64, device=terms.device)
        return zeros.index_add_(0, self.units, terms)

    def to(self, device: torch.device) -> ClassMatrix:
        return replace(
            self,
            classes=self.classes.to(device),
            units=self.units.to(device),
            coefficients=self.coefficients.to(device),
        )
