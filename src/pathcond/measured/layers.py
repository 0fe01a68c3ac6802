"""``BalancedLayers``: balanced norms, in which a weight counts by what its layer does.

    minimise Σ_i c_i θ_i² exp(2 s_i),     c_i = n_b · (a_out / a_in)^(2·share)

    n_b     how many outputs the weight's tensor b has
    a_in    size (root mean square over the batch) of the activations that the weight reads
    a_out   that of the activations that it writes, as the next weights read them

At the minimum, what feeds a unit counts as much as what reads it. A layer with many outputs is made
smaller than by ``BalancedNorms``, and a layer that amplifies, too: its outputs then are nearer in
size to its inputs. With a share of 1 all weight tensors read activations of one size, where each
unit is read by one tensor.

Where the sizes come from. Let a_b be the size of what a tensor b reads, a mean over all its
entries, and a the mean size of what is read from the model's inputs and whatever else has no scale.
Log-scales d that give all tensors inputs of one size have (K d)_j = log(a / a_b) for every unit j
that b reads; where several tensors read it, the mean over them; and d is the least one in the sense
of least squares. Then a_out / a_in stands for exp((K d)_in − (K d)_out).

Means over the units of a layer do not follow scales of single units. So they are measured at one
rescaling of the model, wherever it stands: the minimum for a share of 0. All rescalings of a model
have the same c, and conditioning twice does nothing (under "paper" once BatchNorms have tracked a
batch; see ``criteria.criterion``). The minimum for any other share is that one
moved by share · d.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from ..criteria.criterion import Criterion, Measurement, require_model
from ..criteria.norms import hold, weights_that_count
from ..criteria.problem import Problem, Transform, any_positive, fill_like, sides_of
from ..distributed.sharding import gather, is_sharded, shard_like
from ..lifting.reads import Reads
from ..numerics import without_repeats
from ..rules.energies import power_of
from ..rules.labels import FIXED
from ..solvers.balance import find_balance
from ..symmetry.symmetry import Symmetry

FARTHEST = 6.0  # of |d|: sizes of activations count up to a factor of e⁶
STEPS, PRECISION = 200, 1e-26  # of conjugate gradients; the latter of the squared residual


@dataclass(frozen=True, kw_only=True)
class BalancedLayers(Criterion):
    """Norms in balance, in which layers with many outputs and layers that amplify count more; see
    the head of this module for the formula.

    Weights in front of a BatchNorm have no other side to be in balance with, where its statistics
    follow. Their length decides how fast they learn, and nothing else; they are held at one length.

    Attributes:
        share: How much the size of activations counts, from 0 to 1.
        front: The squared norm at which the weights of every unit in front of a normalization layer
            are held, to a percent or so. torch's initialisation has 1/3. The default is less: these
            weights learn faster then, as much as the balance behind the norm makes others slower.
    """

    share: float = 0.25
    front: float = 0.1
    measures: ClassVar[Measurement] = "reads"
    shares_energy: ClassVar[bool] = False
    is_balance: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not 0 <= self.share <= 1:
            raise ValueError(f"share must lie between 0 and 1, not {self.share}")
        if not 0 < self.front < math.inf:
            raise ValueError(f"front must be a positive number, not {self.front}")

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Reads], model: nn.Module | None
    ) -> dict[str, Tensor]:
        """c θ² of all weights that some unit rescales."""
        weights = weights_that_count(symmetry, require_model(model, self))
        energy = _by_outputs(symmetry, g)
        counted = {name: energy(name, weight) for name, weight in weights.items()}
        if not any_positive(counted):
            return counted
        moved = symmetry.factors(self._moved(symmetry, g, _Layers.of(symmetry, weights, g)))
        return {
            name: values * shard_like(moved[name].to(values.device) ** -2, values)
            for name, values in counted.items()
        }

    def problem(
        self, symmetry: Symmetry, g: Mapping[str, Reads], model: nn.Module | None = None
    ) -> Problem:
        layers = _Layers.of(symmetry, weights_that_count(symmetry, require_model(model, self)), g)
        return layers.problem(self._moved(symmetry, g, layers), self.front)

    def _moved(self, symmetry: Symmetry, g: Mapping[str, Reads], layers: _Layers) -> Tensor:
        """share · d, (num_units,)."""
        if not self.share:
            return layers.norms.zero().cpu()
        balance, _ = find_balance(layers.problem(layers.norms.zero(), self.front))
        return self.share * even_activations(symmetry, g, balance)


def _by_outputs(symmetry: Symmetry, reads: Mapping[str, Reads]) -> Transform:
    """Makes n θ² of a weight: its energy for a share of 0."""

    def energy(name: str, weight: Tensor) -> Tensor:
        return power_of(weight, 2, weight.device).mul_(_outputs(symmetry, name, reads))

    return energy


@dataclass(frozen=True, kw_only=True)
class _Layers:
    """The weights of a model, summed up over classes of equal log-scales, so that moving them is
    cheap.

    Attributes:
        norms: With n θ² as energies.
        sides: How many weights feed and read every unit, (num_units,) each.
        outputs: With n of every weight that is not zero as energies; None where every unit has two
            sides.
        entries: How many weights that are not zero feed and read every unit.
    """

    norms: Problem
    sides: tuple[Tensor, Tensor]
    outputs: Problem | None
    entries: tuple[Tensor, Tensor]

    @classmethod
    def of(
        cls, symmetry: Symmetry, weights: Mapping[str, Tensor], reads: Mapping[str, Reads]
    ) -> _Layers:
        norms = Problem.of(symmetry, weights, power=-2, transform=_by_outputs(symmetry, reads))
        sides = sides_of(
            symmetry, {name: fill_like(weight, 1.0) for name, weight in weights.items()}
        )
        if not bool(((sides[0] > 0) ^ (sides[1] > 0)).any()):
            return cls(norms=norms, sides=sides, outputs=None, entries=sides)
        there = {name: _where_nonzero(weight) for name, weight in weights.items()}
        zeros = {name: ~part for name, part in there.items() if part.dtype == torch.bool}

        def outputs(name: str, ones: Tensor) -> Tensor:
            count = without_repeats(ones).double() * _outputs(symmetry, name, reads)
            return count.expand(ones.shape)

        entries = sides
        if zeros:
            absent = sides_of(symmetry, zeros)
            entries = (sides[0] - absent[0], sides[1] - absent[1])
        return cls(
            norms=norms,
            sides=sides,
            outputs=Problem.of(symmetry, there, power=-2, transform=outputs),
            entries=entries,
        )

    def problem(self, moved: Tensor, front: float) -> Problem:
        """The balance in which weights count by n exp(−2 K moved), those of every unit with one
        side held at a norm.

        Args:
            moved: (num_units,).
            front: The squared norm.
        """
        u = 2 * moved.to(self.norms.device)
        held = front * self._mean_counts(moved)
        return hold(self.norms.shifted(u), sides=self.sides, held=held)

    def _mean_counts(self, moved: Tensor) -> Tensor:
        """The mean of n exp(−2 K moved) over what feeds every unit, less that over what reads it,
        (num_units,); 0 where every unit has two sides.
        """
        if self.outputs is None:
            return torch.zeros_like(moved)
        u = 2 * moved.to(self.outputs.device)
        total = math.exp(self.outputs.log_total)
        into, out = (
            total * side / entries.to(side.device).clamp(min=1.0)
            for side, entries in zip(self.outputs.at(u).sides, self.entries, strict=True)
        )
        return into - out


def _where_nonzero(weight: Tensor) -> Tensor:
    """1 where a weight is not zero, else 0."""
    # Processes may differ in what they find in their parts.
    if not is_sharded(weight) and bool(weight.all()):
        return fill_like(weight, 1.0)
    return weight != 0


def even_activations(symmetry: Symmetry, reads: Mapping[str, Reads], start: Tensor) -> Tensor:
    """d: the log-scales at which all weight tensors read activations of one size, (num_units,); 0
    for units that no weight reads.

    Args:
        symmetry: Of the model.
        reads: What its weights read.
        start: The log-scales from which d goes on, (num_units,).
    """
    started = symmetry.class_log_scales(start)
    count = torch.zeros_like(started)
    total = torch.zeros_like(started)
    for name, read in reads.items():
        scaling = symmetry.scalings.get(name)
        if scaling is None or read.shared:
            continue
        squares = without_repeats(gather(read.squares))
        classes = scaling.minus.long()
        size = float((squares * (2 * started[classes]).exp().to(squares.device)).mean())
        if size > 0:
            classes = classes.unique()
            count[classes] += 1
            total[classes] += math.log(size) / 2
    logs = total / count.clamp(min=1.0)
    read_at_all = count > 0
    # without anything of a fixed size, the mean of all: then only their ratios matter
    level = logs[FIXED] if count[FIXED] else logs[read_at_all].mean() if read_at_all.any() else 0.0
    read_at_all[FIXED] = False
    wanted = torch.where(read_at_all, level - logs, 0.0)
    return _least_squares(symmetry, wanted, read_at_all).clamp(-FARTHEST, FARTHEST)


def _least_squares(symmetry: Symmetry, wanted: Tensor, where: Tensor) -> Tensor:
    """The least d for which K d is nearest to what is wanted of some classes, by conjugate
    gradients: one step, unless units are multiplied with each other.
    """
    K = symmetry.class_matrix
    d = torch.zeros(symmetry.num_units, dtype=torch.float64)
    rest = K.apply_transposed(wanted)
    direction = rest
    square = float(rest @ rest)
    enough = PRECISION * square
    for _ in range(STEPS):
        if square <= enough:
            break
        image = K.apply_transposed(torch.where(where, K @ direction, 0.0))
        step = square / float(direction @ image)
        d, rest = d + step * direction, rest - step * image
        square, before = float(rest @ rest), square
        direction = rest + square / before * direction
    return d


def _outputs(symmetry: Symmetry, name: str, reads: Mapping[str, Reads]) -> float:
    """How many outputs a tensor has: those of its contraction where that was measured, else the
    units that it feeds, else its rows.
    """
    shape = symmetry.shapes[name]
    if name in reads:
        return math.prod(shape) / reads[name].inputs
    fed = int((symmetry.scalings[name].plus.unique() != FIXED).sum())
    return fed or (shape[0] if shape else 1)
