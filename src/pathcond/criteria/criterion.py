"""A criterion says what a rescaling is to share out: an energy for every parameter, and a weight.

    F(t) = W · log Σ_i E_i exp(−2 s_i) + 2 Σ_i w_i s_i,     s = K t,  W = Σ_i w_i

At the minimum, the two sides of every unit have energies in proportion to their weights, as far as
its paths allow. Every criterion gives E and w to the same ``Problem``, and every solver minimises
it.

A criterion must obey one law: the energies of the rescaled model are E exp(−2s). Then the minimum
is the same model, whatever rescaling of it is conditioned, and conditioning twice does nothing.
diag(G) and what weights read follow rescalings in all cases but one: under "paper", BatchNorms that
have tracked no batch are measured on the example, whose σ follows a scale in front of them, and the
rescaling leaves the model's σ as it is. Then a second call moves the model again.

>>> import torch, pathcond
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
... ).double()
>>> x = torch.randn(4, 2).double()
>>> symmetry, g = pathcond.find_symmetry(model, x), pathcond.diag_g(model, x)
>>> problem = PathKernel().problem(symmetry, g)
>>> problem.weight  # every parameter weighs 1
13.0
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Tensor, nn

from ..symmetry.symmetry import Symmetry
from .problem import Problem

# What is measured on the batch for a criterion.
Measurement = Literal["diagonal", "reads"] | None


class Criterion(ABC):
    """What is minimised over the rescalings of a model; for one of your own, say what ``energies``
    are.

    Attributes:
        measures: What ``energies`` is given: the "diagonal" of G (``diag_g``), the "reads" of the
            weights (``measure_reads``), or nothing.
        shares_energy: Whether the energies fall as weights grow, and F has a linear term; then
            ``pace="keep"`` makes sense.
        is_balance: Whether the minimum is a balance of weights itself. Others are kept near one
            (``balance_bounds``), as theirs may lie anywhere.
        needs_whole_batch: Whether ``symmetry.example_inputs`` must hold every sample of the batch,
            as for a loss that has a label for each; otherwise it may hold the first ones only.
    """

    measures: ClassVar[Measurement] = "diagonal"
    shares_energy: ClassVar[bool] = True
    is_balance: ClassVar[bool] = False

    @property
    def needs_whole_batch(self) -> bool:
        return False

    @abstractmethod
    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None
    ) -> Mapping[str, Tensor]:
        """E by parameter name, each in its parameter's shape, not negative; entries of zero do not
        count.

        Args:
            symmetry: Of the model; ``symmetry.example_inputs`` is the batch.
            g: diag(G) of the trainable parameters, float64; or what else it ``measures``.
            model: The model, not to be changed.
        """

    def weights(
        self, symmetry: Symmetry, energies: Mapping[str, Tensor], model: nn.Module | None
    ) -> Mapping[str, Tensor | float] | None:
        """w by parameter name, for every entry or one for all of them, positive; None for 1
        everywhere. They must be the same for all rescalings of a model.
        """
        return None

    def problem(
        self, symmetry: Symmetry, g: Mapping[str, Any], model: nn.Module | None = None
    ) -> Problem:
        """F without bounds.

        Args:
            symmetry, g, model: As in ``energies``.

        Raises:
            NoEnergyError: No parameter that counts has an energy.
        """
        energies = self.energies(symmetry, g, model)
        for name, values in energies.items():
            if tuple(values.shape) != tuple(symmetry.shapes[name]):
                raise ValueError(
                    f"The energies of {name} have shape {tuple(values.shape)}, not "
                    f"{tuple(symmetry.shapes[name])}"
                )
        return Problem.of(symmetry, energies, weights=self.weights(symmetry, energies, model))


@dataclass(frozen=True)
class PathKernel(Criterion):
    """The paper's criterion (eq. optim_with_bz): E is diag(G) of the path kernel, and every
    parameter weighs 1.
    """

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Tensor], model: nn.Module | None
    ) -> Mapping[str, Tensor]:
        return g


PATH_KERNEL = PathKernel()


def check_criterion(criterion: object) -> None:
    """Raise where a name or a class was given in place of a criterion."""
    if not isinstance(criterion, Criterion):
        raise TypeError(
            "criterion must be PathKernel(), Curvature(), BalancedNorms(), BalancedLayers() or a "
            f"Criterion of your own, not {criterion!r}"
        )


def require_model(model: nn.Module | None, criterion: object) -> nn.Module:
    """The model, for a criterion that cannot do without."""
    if model is None:
        raise ValueError(f"{criterion!r} looks at the weights: pass the model")
    return model
