"""Units of a problem layer by layer: what leads into each and out of it, and the exact minimum over
one of them or all.

Along one unit h, with B and C the energy that leaves and enters it at u_h = 0 and E_rest all other
energy,

    E(u_h) = E_rest + B X + C / X,   X = e^{u_h}
    F = W log E + A u_h,   A: weights in, less those out

At the minimum over any set of such units, B_h X_h − C_h / X_h = −a_h E with a = A/W: each X_h is a
closed form of E alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from ..criteria.problem import Block, Pairs, Problem

CANCELLED = 1e-6  # a difference this much smaller than its terms has lost too many digits
NEWTON_STEPS, PRECISION = 50, 1e-10  # on the energy of a layer's minimum


@dataclass(frozen=True)
class Side:
    """Parameters of one block that lead into units of a layer, or out of them.

    Attributes:
        members: (m,) positions in the layer; of single pairs they may repeat.
        others: (C,) classes at the other end, or (m,) of single pairs.
        energy: (m, C) or (m,).
        sign: 1 where the other end divides the parameters, −1 where it multiplies them.
    """

    members: Tensor
    others: Tensor
    energy: Tensor
    sign: int

    def sums(self, v: Tensor) -> Tensor:
        """Σ over the other end of energy · e^{±v}, (m,)."""
        other = (self.sign * v[self.others]).exp()
        return self.energy @ other if self.energy.dim() == 2 else self.energy * other


@dataclass(frozen=True)
class Layer:
    """Units that no parameter connects with each other, each with one class of exponent 1 to
    itself.

    Attributes:
        units, classes: (n,) positions in u and in v.
        incoming, outgoing: Their parameters.
    """

    units: Tensor
    classes: Tensor
    incoming: list[Side]
    outgoing: list[Side]

    def energies(self, problem: Problem, v: Tensor) -> tuple[Tensor, Tensor]:
        """C and B of every unit, (n,) each: what enters and what leaves it, its own scale taken
        out.
        """
        into, out = (
            torch.zeros(len(self.units), dtype=torch.float64, device=v.device) for _ in range(2)
        )
        for total, sides in ((into, self.incoming), (out, self.outgoing)):
            for side in sides:
                total.index_add_(0, side.members, side.sums(v))
        into, out = problem.ranks.sum(torch.stack([into, out]))
        return into, out

    def rest(self, problem: Problem, v: Tensor, energy: float, own: float) -> float:
        """E without the energy of these units, which ``own`` is the sum of."""
        rest = energy - own
        return rest if rest > CANCELLED * energy else problem.energy_without(self.classes, v)

    def minimise(self, problem: Problem, u: Tensor, v: Tensor, energy: float) -> float:
        """Move all units to their common minimum, in place in u and v; returns the new E."""
        into, out = self.energies(problem, v)
        x = u[self.units].exp()
        a = problem.slope[self.units] / problem.weight
        low = problem.lower[self.units].exp()
        high = problem.upper[self.units].exp()
        movable = ((into > 0) & (out > 0)) | ((into > 0) & (a > 0)) | ((out > 0) & (a < 0))
        rest = self.rest(problem, v, energy, float((out * x + into / x).sum()))
        product = 2 * (into * out).sqrt()
        grows, size = a > 0, a.abs()
        for _ in range(NEWTON_STEPS):  # on E = E_rest + Σ_h (B_h X_h + C_h / X_h)
            pull = size * energy
            root = torch.hypot(pull, product)
            # Of the two forms of the solution, the one without cancellation.
            twice = root + pull
            best = torch.where(grows, 2 * into / twice, twice / (2 * out))
            x = torch.where(movable, best, x).clamp(low, high)
            following = torch.where(movable & (x > low) & (x < high), a * a / root, 0.0)
            gap, slope = torch.stack([(out * x + into / x).sum(), following.sum()]).tolist()
            step = (rest + gap - energy) / max(1 - energy * slope, 1e-3)
            energy = max(energy + step, energy / 16)
            if abs(step) <= PRECISION * energy:
                break
        u[self.units] = v[self.classes] = x.log().clamp(
            problem.lower[self.units], problem.upper[self.units]
        )
        return rest + gap


@dataclass(frozen=True)
class Unit:
    """A unit of any kind: with several classes, exponents other than ±1, or parameters to others of
    its layer.

    Attributes:
        unit: Position in u.
        exponents: (num_classes,) of every class in this unit.
    """

    unit: int
    exponents: Tensor

    def minimise(self, problem: Problem, u: Tensor, v: Tensor, energy: float) -> float:
        """Newton along one coordinate, in place in u and v; returns the new E."""
        sums = self._energies(problem, v)
        if not sums:
            return energy
        rest = max(energy - sum(sums.values()), 0.0)
        old = float(u[self.unit])
        limits = (float(problem.lower[self.unit]) - old, float(problem.upper[self.unit]) - old)
        delta = _minimum(sums, rest, float(problem.slope[self.unit]), problem.weight, limits)
        u[self.unit] += delta
        v += delta * self.exponents
        return rest + sum(s * math.exp(-k * delta) for k, s in sums.items())

    def _energies(self, problem: Problem, v: Tensor) -> dict[float, float]:
        """{exponent k ≠ 0: Σ g_i e^{−(Ku)_i} of the parameters with K_ih = k}."""
        sums: dict[float, float] = {}
        parts: list[Block | Pairs] = [*problem.blocks, problem.pairs]
        for block in parts:
            k_row = self.exponents[block.rows]
            k_column = self.exponents[block.columns]
            if not bool(k_row.any()) and not bool(k_column.any()):
                continue
            if block.energy.dim() == 1:
                k = k_row - k_column
                e = block.energy * (v[block.columns] - v[block.rows]).exp()
            else:
                k = k_row[:, None] - k_column
                e = (-v[block.rows]).exp()[:, None] * block.energy * v[block.columns].exp()
            for value in torch.unique(k[k != 0]).tolist():
                sums[value] = sums.get(value, 0.0) + float(e[k == value].sum())
        if problem.ranks.sharded:
            found = torch.tensor(list(sums.items()), dtype=torch.float64).view(-1, 2)
            sums = {}
            for value, part in problem.ranks.concatenate(found).tolist():
                sums[value] = sums.get(value, 0.0) + part
        return {k: s for k, s in sums.items() if s > 0}


def _minimum(
    sums: dict[float, float], rest: float, slope: float, p: float, limits: tuple[float, float]
) -> float:
    """argmin over δ of p log(rest + Σ_k S_k e^{−kδ}) + slope · δ, a convex function, by Newton with
    bisection.
    """
    low = max(limits[0], -700.0 / max(map(abs, sums)))
    high = min(limits[1], 700.0 / max(map(abs, sums)))
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


def in_layers(problem: Problem) -> Iterator[Layer | Unit]:
    """The units in order: whole layers where they are independent of each other, single units
    otherwise.
    """
    C = problem.class_matrix
    for units, layer in zip(problem.groups, layers_of(problem), strict=True):
        if layer is not None:
            yield layer
            continue
        for unit in units.tolist():
            exponents = torch.zeros(C.num_classes, dtype=torch.float64, device=C.units.device)
            exponents[C.classes[C.units == unit]] = C.coefficients[C.units == unit]
            yield Unit(unit, exponents)


def layers_of(problem: Problem) -> Iterator[Layer | None]:
    """Every group of units as a layer; None where its units are not independent of each other."""
    own = _own_classes(problem)
    sides = _Sides(problem, own)
    for group, units in enumerate(problem.groups):
        plain = bool((own[units] >= 0).all()) and group not in sides.coupled
        yield (
            Layer(units, own[units], sides.incoming[group], sides.outgoing[group])
            if plain
            else None
        )


def _own_classes(problem: Problem) -> Tensor:
    """The class that a unit has to itself and with exponent 1, (num_units,); -1 where it is
    otherwise.
    """
    C = problem.class_matrix
    per_unit = torch.bincount(C.units, minlength=problem.num_units)
    per_class = torch.bincount(C.classes, minlength=C.num_classes)
    plain = (per_unit[C.units] == 1) & (per_class[C.classes] == 1) & (C.coefficients == 1)
    own = torch.full((problem.num_units,), -1, dtype=torch.long, device=C.units.device)
    own[C.units[plain]] = C.classes[plain]
    return own


class _Sides:
    """All blocks cut by the layers at their ends.

    Attributes:
        incoming, outgoing: Sides per layer.
        coupled: Layers with a parameter from one of their units to another.
    """

    def __init__(self, problem: Problem, own: Tensor) -> None:
        # layer and position in it of every class; -1 for classes of no single unit
        self.layer, self.place = (
            torch.full((problem.class_matrix.num_classes,), -1, device=own.device) for _ in range(2)
        )
        for layer, units in enumerate(problem.groups):
            plain = (own[units] >= 0).nonzero().flatten()
            self.layer[own[units[plain]]] = layer
            self.place[own[units[plain]]] = plain
        self.incoming: list[list[Side]] = [[] for _ in problem.groups]
        self.outgoing: list[list[Side]] = [[] for _ in problem.groups]
        self.coupled: set[int] = set()
        spans = problem.spans(self.layer[problem.rows], self.layer[problem.columns])
        for block, (above, below) in zip(problem.blocks, spans, strict=True):
            self._cut(block.rows, block.columns, block.energy, 1, above)
            self._cut(block.columns, block.rows, block.energy.T, -1, below)
            self._couple(
                block, range(max(above.start, below.start, 0), min(above.stop, below.stop))
            )
        pairs = problem.pairs
        anywhere = range(-1, len(problem.groups))
        self._cut(pairs.rows, pairs.columns, pairs.energy, 1, anywhere)
        self._cut(pairs.columns, pairs.rows, pairs.energy, -1, anywhere)
        rows = self.layer[pairs.rows]
        columns = self.layer[pairs.columns]
        self.coupled |= set(rows[rows == columns].unique().tolist())
        seen = torch.tensor(
            [layer in self.coupled for layer in range(len(problem.groups))],
            dtype=torch.float64,
            device=own.device,
        )
        self.coupled = set(problem.ranks.maximum(seen).nonzero().flatten().tolist())

    def _couple(self, block: Block, layers: range) -> None:
        """Note which of these layers have a parameter of the block from one unit to another."""
        for layer in layers:
            own = self.layer == layer
            if bool((block.energy[own[block.rows]][:, own[block.columns]] > 0).any()):
                self.coupled.add(layer)

    def _cut(self, ends: Tensor, others: Tensor, energy: Tensor, sign: int, among: range) -> None:
        """Give every layer its side of a block, ends of which are in some of the layers."""
        sides = self.incoming if sign == 1 else self.outgoing
        if not len(ends):
            return
        if len(among) == 1:
            (layer,) = among
            if layer >= 0:
                sides[layer].append(Side(self.place[ends], others, energy, sign))
            return
        layers, place = self.layer[ends], self.place[ends]
        order = layers.argsort(stable=True)
        for at, layer in zip(
            order.split(torch.bincount(layers + 1).tolist()),
            range(-1, int(layers.max()) + 1),
            strict=True,
        ):
            if layer >= 0 and len(at):
                sides[layer].append(
                    Side(place[at], others if energy.dim() == 2 else others[at], energy[at], sign)
                )
