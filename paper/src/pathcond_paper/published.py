"""diag(G) as the authors' program computes it, for the method "as in the paper".

One ordinary forward pass in eval mode, on ones and with every parameter squared; the diagonal is
the gradient of the sum of its outputs. Without pooling and BatchNorm that is the definition
(``sec:G_matrix``). With them it differs in three ways:

    max-pooling       takes the greatest energy of a window; by the definition all its entries are
                      ends of paths, and energies add up
    average pooling   averages energies; by the definition a path through a window of k entries
                      carries 1/k², and energies add up
    BatchNorm         its γ and β count in p and in the sum of the energies, but no rescaling
                      changes their share

As γ and β stay, conditioning again is not quite idle. The library keeps the definition
(``pathcond.diag_g``); this is for figures that are compared with the paper's.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from pathcond.criteria.criterion import Criterion, Measurement, require_model
from pathcond.criteria.problem import Problem
from pathcond.symmetry.symmetry import Symmetry

# Until then "as in the paper" took diag(G) by its definition: another one with norms or pooling.
SINCE = {"paper": "2026-11-16T22:00"}


@dataclass(frozen=True)
class PublishedKernel(Criterion):
    """The path kernel by the conventions of the authors' program; for networks that take one
    tensor.
    """

    measures: ClassVar[Measurement] = None

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None
    ) -> dict[str, Tensor]:
        example = symmetry.example_inputs
        if not isinstance(example, Tensor):
            raise TypeError(
                f"The network takes {type(example).__name__}, not one tensor: the authors' program "
                "has no answer to that; use PathKernel()"
            )
        return published_diagonal(require_model(model, self), torch.ones_like(example[:1]))

    def problem(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None = None
    ) -> Problem:
        constants = symmetry.uncounted
        scalings = {name: s for name, s in symmetry.scalings.items() if name not in constants}
        counting = replace(symmetry, scalings=scalings, uncounted=frozenset())
        return Problem.of(counting, self.energies(symmetry, g, model))


def published_diagonal(model: nn.Module, ones: Tensor) -> dict[str, Tensor]:
    """diag(G) of all parameters by name, float64.

    Args:
        model: With BatchNorm statistics as they are; it is left as it is.
        ones: One sample of ones.
    """
    twin = copy.deepcopy(model).double().eval()
    squares = {
        name: tensor.detach().square().requires_grad_() for name, tensor in twin.named_parameters()
    }
    statistics = {
        name: tensor.square() for name, tensor in twin.named_buffers() if tensor.is_floating_point()
    }
    with torch.enable_grad():
        paths = functional_call(twin, squares | statistics, (ones.double(),)).sum()
        diagonal = torch.autograd.grad(paths, list(squares.values()))
    return dict(zip(squares, diagonal, strict=True))
