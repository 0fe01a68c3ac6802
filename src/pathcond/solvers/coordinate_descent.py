"""The paper's algorithm: exact minimisation over one unit after the other (alg.
detailed_rescaling).

Along the unit h, with S_k the energy of the parameters of exponent K_ih = k, E(u_h + δ) = D + Σ_k
S_k e^{−kδ}. Where k = ±1 only (in and out of the unit), X = e^{u_h} is the positive root of

    B (A + W) X² + A D X + C (A − W) = 0                        (lemma calculate_degree_pol)
    B = S_out e^{−u_h},  C = S_in e^{u_h}

A being the weights in less those out (in the paper each parameter weighs 1, and W is p). Units of
one layer meet only through the scalar E, as long as no parameter leads from one of them to another:
then S_in and S_out of the whole layer are two matrix-vector products, and what remains neuron by
neuron is a recurrence of scalars. The iterates are those of the algorithm box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from ..criteria.problem import Problem
from .layers import Layer, Unit, in_layers
from .solution import Solution
from .solver import Solver

DRIFT = 1e-3  # share of what E was when it was last summed up, below which it is summed up again
RESIDUAL = 1e-6  # a gradient per parameter above which standing still is not having arrived


@dataclass(frozen=True, kw_only=True)
class CoordinateDescent(Solver):
    """Settings of the paper's algorithm.

    Attributes:
        sweeps: Most passes over all units.
        tolerance: Stop after a sweep in which the |u_h| moved by less than this in total.
    """

    sweeps: int = 10
    tolerance: float = 1e-6

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sweeps < 1 or not self.tolerance >= 0:
            raise ValueError(
                "CoordinateDescent needs sweeps >= 1 and tolerance >= 0, not "
                f"{self.sweeps} and {self.tolerance}"
            )

    def solve(self, problem: Problem) -> Solution:
        """Sweep until the tolerance or the number of sweeps is reached."""
        problem = problem.bounded(self.max_log_scale)
        before = problem.at(problem.zero())
        for sweeps, (u, moved) in enumerate(self.iterates(problem), start=1):  # noqa: B007 (the last ones count)
            pass
        after = problem.at(u)
        arrived = moved < self.tolerance and after.residual <= max(self.tolerance, RESIDUAL)
        why = (
            f"the last sweep moved u by {moved:.1e} in total and left a gradient of "
            f"{after.residual:.1e} per parameter"
        )
        return Solution(
            # Differs from the paper: the box returns diag(e^v) θ; by prop. equiv_convex_problem D =
            # e^{−v/2}, so t = u/2.
            log_scales=problem.log_scales(u),
            objective_before=before.value,
            objective_after=after.value,
            gradient_norm=after.residual,
            iterations=sweeps,
            converged=arrived,
            message=why if arrived else f"{why}: more sweeps, or Exact(), come closer",
        )

    def iterates(self, problem: Problem) -> Iterator[tuple[Tensor, float]]:
        """After each sweep u, (num_units,), and Σ_h |δ_h| of that sweep; the last ones are those of
        ``solve``.
        """
        problem = problem.bounded(self.max_log_scale)
        u = problem.zero()
        v = problem.class_matrix @ u
        layers = list(in_layers(problem))
        energy = problem.at(u).energy
        measured = energy
        for _ in range(self.sweeps):
            moved = 0.0
            # E is updated layer by layer, and keeps the rounding of what it was
            if energy < DRIFT * measured:
                energy = measured = problem.at(u).energy
            for layer in layers:
                energy, distance = _minimise(layer, problem, u, v, energy)
                moved += distance
            yield u.clone(), moved
            if moved < self.tolerance:
                return


def _minimise(
    layer: Layer | Unit, problem: Problem, u: Tensor, v: Tensor, energy: float
) -> tuple[float, float]:
    """Minimise over the units one by one, in place in u and v; returns the new E and Σ |δ|."""
    if isinstance(layer, Unit):
        old = float(u[layer.unit])
        energy = layer.minimise(problem, u, v, energy)
        return energy, abs(float(u[layer.unit]) - old)
    units, (into, out) = layer.units, layer.energies(problem, v)
    x = u[units].exp()
    columns = [
        into,
        out,
        into / x,
        out * x,
        problem.slope[units],
        problem.lower[units],
        problem.upper[units],
        u[units],
    ]
    numbers = torch.stack(columns).tolist()
    rest = layer.rest(problem, v, energy, sum(numbers[2]) + sum(numbers[3]))
    energy, moved = _recurrence(numbers, rest, problem.weight)
    u[units] = v[layer.classes] = torch.tensor(numbers[-1], dtype=torch.float64, device=u.device)
    return energy, moved


def _recurrence(columns: list[list[float]], outside: float, weight: float) -> tuple[float, float]:
    """The inner loop of the algorithm box, on numbers: C, B, S_in, S_out, A, bounds and u of every
    unit; u is updated in place.

    D, the energy of all parameters but a unit's own, is summed up: outside the layer, of the units
    done, of those to come.
    """
    moved = 0.0
    sqrt = math.sqrt
    log = math.log
    exp = math.exp
    u = columns[-1]
    own = [into + out for into, out in zip(columns[2], columns[3], strict=True)]
    to_come = [0.0, *accumulate(reversed(own[1:]))][::-1]
    done = 0.0
    for h, (c, b, _, _, a, low, high, old) in enumerate(zip(*columns, strict=True)):
        rest = outside + done + to_come[h]
        if c > 0 and b > 0:
            linear = a * rest
            product = 4 * b * (a + weight) * c * (weight - a)
            root = sqrt(linear * linear + product)
            x = (
                (root - linear) / (2 * b * (a + weight))
                if linear <= 0
                else 2 * c * (weight - a) / (root + linear)
            )
        elif c > 0 and a * rest > 0:  # nothing leads out of the unit
            x = c * (weight - a) / (a * rest)
        elif b > 0 and a * rest < 0:  # nothing leads into it
            x = -a * rest / (b * (a + weight))
        else:
            done += own[h]
            continue
        u[h] = min(max(log(x), low), high)
        x = exp(u[h])
        done += b * x + c / x
        moved += abs(u[h] - old)
    return outside + done, moved
