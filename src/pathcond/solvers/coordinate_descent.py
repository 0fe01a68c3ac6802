"""The paper's algorithm: exact minimisation over one unit after the other (alg. detailed_rescaling).

Along the unit h, with S_k the energy of the parameters of exponent K_ih = k, E(u_h + δ) = D + Σ_k S_k e^{−kδ}. Where k = ±1
only (in and out of the unit), X = e^{u_h} is the positive root of

    B (A + p) X² + A D X + C (A − p) = 0        B = S_out e^{−u_h},  C = S_in e^{u_h}       (lemma calculate_degree_pol)

A being the number of parameters in less those out. Units of one layer meet only through the scalar E, as long as no parameter
leads from one of them to another: then S_in and S_out of the whole layer are two matrix-vector products, and what remains
neuron by neuron is a recurrence of scalars. The iterates are those of the algorithm box.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..problem import Block, Problem
from .solution import Solution


@dataclass(frozen=True, kw_only=True)
class CoordinateDescent:
    """Settings of the paper's algorithm.

    Attributes:
        sweeps: Most passes over all units.
        tolerance: Stop after a sweep in which the |u_h| moved by less than this in total.
        max_log_scale: Bound on |log λ|; the paper's |u| ≤ 5 for smooth activations is 2.5.
    """

    sweeps: int = 10
    tolerance: float = 1e-6
    max_log_scale: float | None = None

    def __post_init__(self) -> None:
        if self.sweeps < 1 or not self.tolerance >= 0:
            raise ValueError(f"CoordinateDescent needs a sweep and a tolerance >= 0, not {self.sweeps} and {self.tolerance}")
        if self.max_log_scale is not None and not self.max_log_scale > 0:
            raise ValueError(f"max_log_scale bounds |log λ| and must be positive, not {self.max_log_scale}")

    def solve(self, problem: Problem) -> Solution:
        """Sweep until the tolerance or the number of sweeps is reached."""
        u = torch.zeros(problem.num_units, dtype=torch.float64, device=problem.slope.device)
        before, layers, energy = problem.at(u), list(_layers(problem)), 1.0
        bound = math.inf if self.max_log_scale is None else 2 * self.max_log_scale
        sweeps = 0
        while sweeps < self.sweeps:
            sweeps, moved = sweeps + 1, 0.0
            for layer in layers:
                energy, distance = layer.minimise(problem, u, energy, bound)
                moved += distance
            if moved < self.tolerance:
                break
        after = problem.at(u)
        why = f"the last sweep moved u by {moved:.1e} in total"
        return Solution(
            # Differs from the paper: the box returns diag(e^v) θ; by prop. equiv_convex_problem D = e^{−v/2}, so t = u/2.
            log_scales=u / 2, objective_before=before.value, objective_after=after.value, iterations=sweeps,
            gradient_norm=float(after.gradient.norm()) / problem.num_parameters, converged=moved < self.tolerance,
            message=why if moved < self.tolerance else f"{why}: more sweeps, or Exact(), come closer to the optimum",
        )  # fmt: skip


@dataclass(frozen=True)
class _Side:
    """The parameters of one block that lead into (or out of) units of a layer.

    Attributes:
        members: (m,) positions in the layer.
        others: (C,) classes at the other end, or (m,) where each unit meets one.
        energy: (m, C) or (m,).
    """

    members: Tensor
    others: Tensor
    energy: Tensor

    def sums(self, weights: Tensor) -> Tensor:
        """Σ over the other end of energy · weights[class], (m,)."""
        other = weights[self.others]
        return self.energy @ other if self.energy.dim() == 2 else self.energy * other


@dataclass(frozen=True)
class _Layer:
    """Units that no parameter connects with each other, each with one class of exponent 1 to itself.

    Attributes:
        units, classes: (n,) positions in u and in v.
        incoming, outgoing: Their parameters.
    """

    units: Tensor
    classes: Tensor
    incoming: list[_Side]
    outgoing: list[_Side]

    def minimise(self, problem: Problem, u: Tensor, energy: float, bound: float) -> tuple[float, float]:
        """Minimise over the units one by one, in place; returns the new E and Σ |δ|."""
        v = problem.combination @ u
        shrink, grow = (-v).exp(), v.exp()
        into, out = (torch.zeros(len(self.units), dtype=torch.float64, device=u.device) for _ in range(2))
        for side in self.incoming:
            into.index_add_(0, side.members, side.sums(grow))
        for side in self.outgoing:
            out.index_add_(0, side.members, side.sums(shrink))
        # B and C do not contain the unit's own scale; S_out and S_in do.
        x = grow[self.classes]
        columns = torch.stack([into, out, into / x, out * x, problem.slope[self.units], u[self.units]]).tolist()
        energy, moved = _recurrence(columns, energy, problem.num_parameters, bound)
        u[self.units] = torch.tensor(columns[-1], dtype=torch.float64, device=u.device)
        return energy, moved


def _recurrence(columns: list[list[float]], energy: float, p: int, bound: float) -> tuple[float, float]:
    """The inner loop of the algorithm box, on numbers: C, B, S_in, S_out, A and u of every unit; u is updated in place."""
    moved, sqrt, log, exp, u = 0.0, math.sqrt, math.log, math.exp, columns[-1]
    for h, (c, b, into, out, a, old) in enumerate(zip(*columns, strict=True)):
        rest = energy - into - out
        if c > 0 and b > 0:
            linear, product = a * rest, 4 * b * (a + p) * c * (p - a)
            root = sqrt(linear * linear + product)
            x = (root - linear) / (2 * b * (a + p)) if linear <= 0 else 2 * c * (p - a) / (root + linear)
        elif c > 0 and a * rest > 0:  # nothing leads out of the unit
            x = c * (p - a) / (a * rest)
        elif b > 0 and a * rest < 0:  # nothing leads into it
            x = -a * rest / (b * (a + p))
        else:
            continue
        new = min(max(log(x), -bound), bound)
        x = exp(new)
        energy = rest + b * x + c / x
        moved += abs(new - old)
        u[h] = new
    return energy, moved


@dataclass(frozen=True)
class _Unit:
    """A unit of any kind: with several classes, exponents other than ±1, or parameters to others of its layer.

    Attributes:
        unit: Position in u.
        exponents: (num_classes,) of every class in this unit.
    """

    unit: int
    exponents: Tensor

    def minimise(self, problem: Problem, u: Tensor, energy: float, bound: float) -> tuple[float, float]:
        """Newton along one coordinate, in place; returns the new E and |δ|."""
        sums = self._energies(problem, u)
        rest = energy - sum(sums.values())
        slope, p, old = float(problem.slope[self.unit]), problem.num_parameters, float(u[self.unit])
        if not sums:
            return energy, 0.0
        delta = _minimum(sums, max(rest, 0.0), slope, p, (-bound - old, bound - old))
        u[self.unit] += delta
        return max(rest, 0.0) + sum(s * math.exp(-k * delta) for k, s in sums.items()), abs(delta)

    def _energies(self, problem: Problem, u: Tensor) -> dict[float, float]:
        """{exponent k ≠ 0: Σ g_i e^{−(Ku)_i} of the parameters with K_ih = k}."""
        v = problem.combination @ u
        sums: dict[float, float] = {}
        for block in problem.blocks:
            k_row, k_column = self.exponents[block.rows], self.exponents[block.columns]
            if not bool(k_row.any()) and not bool(k_column.any()):
                continue
            if block.energy.dim() == 1:
                k, e = k_row - k_column, block.energy * (v[block.columns] - v[block.rows]).exp()
            else:
                k = k_row[:, None] - k_column
                e = (-v[block.rows]).exp()[:, None] * block.energy * v[block.columns].exp()
            for value in torch.unique(k[k != 0]).tolist():
                sums[value] = sums.get(value, 0.0) + float(e[k == value].sum())
        return {k: s for k, s in sums.items() if s > 0}


def _minimum(sums: dict[float, float], rest: float, slope: float, p: int, limits: tuple[float, float]) -> float:
    """argmin over δ of p log(rest + Σ_k S_k e^{−kδ}) + slope · δ, a convex function, by Newton with bisection."""
    low, high = max(limits[0], -700.0 / max(map(abs, sums))), min(limits[1], 700.0 / max(map(abs, sums)))
    delta = 0.0
    for _ in range(200):
        terms = [(k, s * math.exp(-k * delta)) for k, s in sums.items()]
        total = rest + sum(e for _, e in terms)
        mean = sum(-k * e for k, e in terms) / total
        gradient = p * mean + slope
        low, high = (delta, high) if gradient < 0 else (low, delta)
        curvature = p * (sum(k * k * e for k, e in terms) / total - mean * mean)
        step = -gradient / curvature if curvature > 0 else math.inf
        new = delta + step if low < delta + step < high else (low + high) / 2
        if abs(new - delta) <= 1e-15 * max(1.0, abs(delta)):
            return new
        delta = new
    return delta


def _layers(problem: Problem) -> Iterator[_Layer | _Unit]:
    """The units in order: whole layers where they are independent of each other, single units otherwise."""
    C = problem.combination
    per_unit = torch.bincount(C.units, minlength=problem.num_units)
    per_class = torch.bincount(C.classes, minlength=C.num_classes)
    own = torch.full((problem.num_units,), -1, dtype=torch.long, device=C.units.device)
    plain = (per_unit[C.units] == 1) & (per_class[C.classes] == 1) & (C.coefficients == 1)
    own[C.units[plain]] = C.classes[plain]
    for units in problem.groups:
        layer = _independent(problem, units, own[units]) if bool((own[units] >= 0).all()) else None
        if layer is not None:
            yield layer
            continue
        for unit in units.tolist():
            exponents = torch.zeros(C.num_classes, dtype=torch.float64, device=C.units.device)
            exponents[C.classes[C.units == unit]] = C.coefficients[C.units == unit]
            yield _Unit(unit, exponents)


def _independent(problem: Problem, units: Tensor, classes: Tensor) -> _Layer | None:
    """The units as a layer; None if a parameter leads from one of them to another."""
    place = torch.full((problem.combination.num_classes,), -1, dtype=torch.long, device=classes.device)
    place[classes] = torch.arange(len(classes), device=classes.device)
    incoming, outgoing = [], []
    for block in problem.blocks:
        rows, columns = place[block.rows], place[block.columns]
        if bool((rows >= 0).any()) and bool((columns >= 0).any()) and _connects(block, rows, columns):
            return None
        incoming += _side(rows, block.columns, block.energy)
        outgoing += _side(columns, block.rows, block.energy.T)
    return _Layer(units, classes, incoming, outgoing)


def _connects(block: Block, rows: Tensor, columns: Tensor) -> bool:
    if block.energy.dim() == 1:
        return bool(((rows >= 0) & (columns >= 0) & (block.count > 0)).any())
    return bool((block.count[rows >= 0][:, columns >= 0] > 0).any())


def _side(place: Tensor, others: Tensor, energy: Tensor) -> list[_Side]:
    at = (place >= 0).nonzero().flatten()
    if not len(at):
        return []
    if energy.dim() == 1:
        return [_Side(place[at], others[at], energy[at])]
    return [_Side(place[at], others, energy if len(at) == len(place) else energy[at])]
