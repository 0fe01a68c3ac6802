"""A convex criterion F over the log-scales of a Symmetry: value, gradient and Hessian-vector
products in block form.

    F(u) = W · log Σ_i E_i exp(−(Ku)_i) + Σ_i w_i (Ku)_i,     W = Σ_i w_i

over the trainable parameters with energies E_i > 0. At the minimum, the energy E_i exp(−(Ku)_i) is
shared among the sides of every unit as the weights w are. The paper's criterion (eq. optim_with_bz)
has E = diag(G) and w = 1, so that W = p, the number of parameters. u = 2t, for θ' = θ ⊙ exp(Kt) has
the energies E ⊙ exp(−2Kt); energies that grow with the weights, as |θ|^p does, have u = −p t. A
parameter that the class of equal log-scales r multiplies and the class c divides has (Ku)_i = v_r −
v_c, where v = C u is the u of every class. So a parameter tensor enters only through sums over its
(r, c) pairs:

    u   (num_units,)      unknowns             M   (R, C) of a block, Σ E of every pair
    v   (num_classes,)    C u                  n   (num_classes,) weights that it multiplies,
                                                   less those that it divides
    E   Σ_i E_i exp(−(Ku)_i), relative to its value at u = 0                   s = ∂E/∂v

>>> import torch, pathcond
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
... ).double()
>>> x = torch.randn(4, 2).double()
>>> problem = Problem.of(pathcond.find_symmetry(model, x), pathcond.diag_g(model, x))
>>> problem.weight, problem.num_units
(13.0, 3)

Where all energies are equal, the model is at its minimum already (prop. constant-diagonal):

>>> ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
>>> problem = Problem.of(pathcond.find_symmetry(model, x), ones)
>>> problem.at(problem.zero()).residual < 1e-15
True
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..distributed.ranks import ALONE, Ranks
from ..distributed.sharding import counts_here, cut, is_sharded, local, mesh_group
from ..numerics import without_repeats
from ..rules.class_pairs import ClassPairs
from ..rules.values import Scaling
from ..symmetry.symmetry import Symmetry
from ..symmetry.units import ClassMatrix


class NoEnergyError(ValueError):
    """No parameter that counts has an energy: there is nothing to share out."""


# What is given for a parameter, by its name -> its energies, all of the same shape.
Transform = Callable[[str, Tensor], Tensor]

# entries of all blocks up to which a problem is solved on the CPU: there are too few to keep a GPU
# busy
SMALL = 2**21


@dataclass(frozen=True)
class Block:
    """One parameter, summed over pairs of classes of equal log-scales.

    Attributes:
        rows, columns: (R,) and (C,) classes that multiply and that divide it.
        energy: (R, C), Σ of the energies of every pair.
    """

    rows: Tensor
    columns: Tensor
    energy: Tensor


@dataclass(frozen=True)
class Pairs:
    """Single pairs of classes, of all the parameters that are vectors to us: biases, gains,
    depthwise kernels.

    Attributes:
        rows, columns, energy: (n,) each.
    """

    rows: Tensor
    columns: Tensor
    energy: Tensor


@dataclass(frozen=True, kw_only=True)
class Problem:
    """F over one Symmetry, on a box of u.

    Attributes:
        blocks, pairs: The parameters that some unit rescales; energies relative to the sum of all.
        fixed: Energy of the others, likewise relative.
        weight: W.
        log_total: log of the sum of all energies.
        class_matrix: C.
        num_units: Length of u.
        groups: Positions of the units, layer by layer in forward order.
        slope: (num_units,) gradient of the linear term Σ_i w_i (Ku)_i.
        lower, upper: (num_units,) bounds on u, around 0; infinite where there is none.
        power: u / t.
        ranks: Of a sharded model each process has the blocks and pairs of its own parts only;
            energies are summed over all.
    """

    blocks: tuple[Block, ...]
    pairs: Pairs
    fixed: float
    weight: float
    log_total: float
    class_matrix: ClassMatrix
    num_units: int
    groups: tuple[Tensor, ...]
    slope: Tensor
    lower: Tensor
    upper: Tensor
    power: float = 2.0
    ranks: Ranks = ALONE

    @classmethod
    def of(
        cls,
        symmetry: Symmetry,
        energies: Mapping[str, Tensor],
        bounds: tuple[Tensor, Tensor] | None = None,
        *,
        weights: Mapping[str, Tensor | float] | None = None,
        power: float = 2.0,
        transform: Transform = lambda name, values: values,
    ) -> Problem:
        """Collapse energies over the classes of a Symmetry.

        Args:
            symmetry: From ``find_symmetry``.
            energies: By parameter name, such as ``diag_g`` gives them; what is missing counts in
                neither W nor E.
            bounds: Least and greatest log λ of every unit, (num_units,) each, as
                ``Symmetry.log_scale_bounds`` gives them.
            weights: w of every entry, or one for all entries of a parameter; 1 by default. Entries
                without energy have none.
            power: θ exp(s) has the energy E exp(−power · s).
            transform: Makes the energies of a parameter of what is given for it, when they are
                summed up: those of all parameters need not be in memory at a time.

        Raises:
            NoEnergyError: No energy is positive.
            ValueError: Energies or weights are negative or not finite, or the bounds do not contain
                scale 1.
        """
        g = select_counted(symmetry, energies)
        ranks = ranks_of(g)
        device = next((values.device for values in g.values()), torch.device("cpu"))
        sums = _Sums()
        for name, whole in g.items():
            if not local(whole).numel() or (ranks.sharded and not counts_here(whole, ranks.rank)):
                continue
            given = local(whole)
            values = transform(name, given)
            least = without_repeats(values).min()
            # to sum up ones takes no time; to ask a GPU whether they are does
            all_positive = not values.is_cuda and bool(least > 0)
            own_weights = _weights(name, values, weights, all_positive=all_positive)
            sums.least.append(least.double())
            if name in symmetry.scalings:
                pairs = _class_pairs(symmetry.scalings[name], whole)
                sums.add(pairs, values.double(), own_weights, given)
            else:
                sums.add_fixed(values, own_weights)
        total = _require_energy(*sums.total_and_least(device), ranks)
        entries = torch.tensor(float(sum(block.energy.numel() for block in sums.blocks)))
        if float(ranks.maximum(entries)) <= SMALL:
            device = torch.device("cpu")
        class_matrix = symmetry.class_matrix.to(device)
        n, own = _numbers(sums.class_pairs, sums.counts, class_matrix.num_classes, device)
        single = _join(sums.pairs, device)
        kept = (single.rows != single.columns) & (single.energy > 0)
        others = (
            torch.stack(sums.fixed).sum(0).to(device)
            if sums.fixed
            else torch.zeros(2, dtype=torch.float64, device=device)
        )
        others += torch.stack(
            [single.energy[~kept].sum(), torch.tensor(own, dtype=torch.float64, device=device)]
        )
        rest, weight = ranks.sum(others).tolist()
        lower, upper = _box(symmetry.num_units, bounds, device, power)
        return cls(
            blocks=tuple(
                Block(b.rows.to(device), b.columns.to(device), b.energy.to(device).div_(total))
                for b in sums.blocks
            ),
            pairs=Pairs(single.rows[kept], single.columns[kept], single.energy[kept] / total),
            fixed=rest / total,
            weight=weight,
            log_total=math.log(total),
            class_matrix=class_matrix,
            num_units=symmetry.num_units,
            slope=class_matrix.apply_transposed(ranks.sum(n)),
            lower=lower,
            upper=upper,
            power=power,
            ranks=ranks,
            groups=tuple(torch.tensor(group.units, device=device) for group in symmetry.groups),
        )

    @property
    def device(self) -> torch.device:
        return self.slope.device

    @cached_property
    def rows(self) -> Tensor:
        """Classes that multiply, of all blocks and then of the pairs, one after the other."""
        return torch.cat([*(block.rows for block in self.blocks), self.pairs.rows])

    @cached_property
    def columns(self) -> Tensor:
        """The same for those that divide."""
        return torch.cat([*(block.columns for block in self.blocks), self.pairs.columns])

    def spans(self, at_rows: Tensor, at_columns: Tensor) -> list[tuple[range, range]]:
        """Between what whole numbers lie at the rows, and at the columns, of every block.

        Args:
            at_rows: (len(rows),), a number for every entry of ``rows``.
            at_columns: (len(columns),), the same for ``columns``.
        """
        if not self.blocks:
            return []
        found = []
        for axis, numbers in enumerate((at_rows, at_columns)):
            lengths = torch.tensor([block.energy.shape[axis] for block in self.blocks])
            block = torch.arange(len(lengths)).repeat_interleave(lengths).to(self.device)
            ends = torch.stack([numbers[: len(block)], -numbers[: len(block)]])
            least = torch.zeros(2, len(lengths), dtype=ends.dtype, device=self.device)
            least.scatter_reduce_(1, block.expand(2, -1), ends, "amin", include_self=False)
            found.append([range(low, 1 - negative) for low, negative in least.T.tolist()])
        return list(zip(*found, strict=True))

    def through(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """M y for every entry of ``rows`` and Mᵀ x for every entry of ``columns``; x and y are
        (num_classes,).
        """
        x, y = x[self.rows], y[self.columns]
        to_rows = torch.empty_like(x)
        to_columns = torch.empty_like(y)
        row = column = 0
        for block in self.blocks:  # both products at once, while the block is in the cache
            height, width = block.energy.shape
            torch.mv(block.energy, y[column : column + width], out=to_rows[row : row + height])
            torch.mv(block.energy.T, x[row : row + height], out=to_columns[column : column + width])
            row, column = row + height, column + width
        torch.mul(self.pairs.energy, y[column:], out=to_rows[row:])
        torch.mul(self.pairs.energy, x[row:], out=to_columns[column:])
        return to_rows, to_columns

    def energy_without(self, classes: Tensor, v: Tensor) -> float:
        """E of the parameters that none of these classes scale, summed up and not subtracted from
        the whole.
        """
        shrink, grow = (-v).exp(), v.exp()
        shrink[classes] = grow[classes] = 0.0
        return self.fixed + float(
            self.ranks.sum((shrink[self.rows] * self.through(shrink, grow)[0]).sum())
        )

    def zero(self) -> Tensor:
        """u of the model as it is, (num_units,)."""
        return torch.zeros(self.num_units, dtype=torch.float64, device=self.device)

    def log_scales(self, u: Tensor) -> Tensor:
        """log λ of every unit, (num_units,)."""
        return u / self.power

    def bounded(self, max_log_scale: float | None) -> Problem:
        """The same problem on the part of its box with |log λ| ≤ max_log_scale."""
        if max_log_scale is None:
            return self
        most = abs(self.power) * max_log_scale
        return replace(self, lower=self.lower.clamp(min=-most), upper=self.upper.clamp(max=most))

    def within(self, bounds: tuple[Tensor, Tensor] | None) -> Problem:
        """The same problem on the part of its box between two bounds of log λ, (num_units,) each;
        scale 1 is inside.
        """
        lower, upper = _box(self.num_units, bounds, self.device, self.power)
        return replace(
            self, lower=torch.maximum(self.lower, lower), upper=torch.minimum(self.upper, upper)
        )

    def shifted(self, u: Tensor) -> Problem:
        """The same problem with its origin at u, (num_units,), and the same box around that."""
        if not bool(u.any()):
            return self
        v = self.class_matrix @ u
        shrink, grow = (-v).exp(), v.exp()
        blocks = tuple(
            Block(b.rows, b.columns, shrink[b.rows, None] * b.energy * grow[b.columns])
            for b in self.blocks
        )
        rows, columns = self.pairs.rows, self.pairs.columns
        pairs = Pairs(rows, columns, shrink[rows] * self.pairs.energy * grow[columns])
        return replace(self, blocks=blocks, pairs=pairs)

    def at(self, u: Tensor) -> Point:
        """F around u, (num_units,): its value, gradient and Hessian."""
        return Point(self, u)


class _Sums:
    """Energies and weights summed up over classes, one parameter tensor after the other. On a GPU,
    nothing here waits for it.

    Attributes:
        blocks, pairs: Energies of what some unit rescales.
        class_pairs, counts: The classes of every tensor, and the weights of each.
        fixed: (energy, weight) of the tensors that no unit rescales.
        least: The least energy of every tensor.
    """

    def __init__(self) -> None:
        self.blocks: list[Block] = []
        self.pairs: list[Pairs] = []
        self.class_pairs: list[ClassPairs] = []
        self.counts: list[Tensor] = []
        self.fixed: list[Tensor] = []
        self.least: list[Tensor] = []

    def add(
        self, class_pairs: ClassPairs, energies: Tensor, weights: Tensor, given: Tensor
    ) -> None:
        """Add a tensor that some unit rescales.

        Args:
            class_pairs: Of the tensor.
            energies, weights: In its shape.
            given: By the caller, whose memory is not ours to write into.
        """
        self.class_pairs.append(class_pairs)
        self.counts += class_pairs.counts(weights)
        if not class_pairs.dense:
            self.pairs.append(Pairs(*class_pairs.pairs(energies)))
            return
        energy = class_pairs.matrix(energies)
        if energy.untyped_storage().data_ptr() == given.untyped_storage().data_ptr():
            energy = energy.clone()
        if min(energy.shape) > 1:
            self.blocks.append(Block(class_pairs.rows, class_pairs.columns, energy))
        else:
            rows, columns = torch.broadcast_tensors(class_pairs.rows, class_pairs.columns)
            self.pairs.append(Pairs(rows, columns, energy.flatten()))

    def add_fixed(self, energies: Tensor, weights: Tensor) -> None:
        self.fixed.append(torch.stack([energies.sum(dtype=torch.float64), weights.sum().double()]))

    def total_and_least(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The sum of all energies, and the least of them; 0 where there are none."""
        parts: list[Block | Pairs] = [*self.blocks, *self.pairs]
        sums = [*(part.energy.sum() for part in parts), *(energy for energy, _ in self.fixed)]
        none = torch.zeros((), dtype=torch.float64)
        total, least = (
            torch.stack([each.to(device) for each in (none, *found)])
            for found in (sums, self.least)
        )
        return total.sum(), least.min()


class Point:
    """F at one u; what is asked for is computed once.

    Attributes:
        by_row, by_column: Energies that leave through every entry of ``problem.rows`` and
            ``problem.columns``.
    """

    def __init__(self, problem: Problem, u: Tensor) -> None:
        self.problem = problem
        self.u = u.clone()
        v = problem.class_matrix @ u
        # of a parameter that the class multiplies, or divides
        self.shrink = (-v).exp()
        self.grow = v.exp()
        to_rows, to_columns = problem.through(self.shrink, self.grow)
        self.by_row = self.shrink[problem.rows] * to_rows
        self.by_column = self.grow[problem.columns] * to_columns
        self.energy = problem.fixed + float(problem.ranks.sum(self.by_row.sum()))  # E(u) / E(0)

    @property
    def value(self) -> float:
        """F(u)."""
        p = self.problem
        if not 0 < self.energy < math.inf:  # too far out for float64
            return math.inf
        return p.weight * (p.log_total + math.log(self.energy)) + float(p.slope @ self.u)

    @cached_property
    def energy_gradient(self) -> Tensor:
        """∂E/∂u, (num_units,)."""
        return self._gather(-self.by_row, self.by_column)

    @cached_property
    def gradient(self) -> Tensor:
        """∇F(u), (num_units,)."""
        return self.problem.weight / self.energy * self.energy_gradient + self.problem.slope

    @cached_property
    def sides(self) -> tuple[Tensor, Tensor]:
        """Energy of the parameters that each unit multiplies, and of those that it divides,
        (num_units,) each.
        """
        problem = self.problem
        multiplied, divided = (torch.zeros_like(self.grow) for _ in range(2))
        multiplied.index_add_(0, problem.rows, self.by_row)
        divided.index_add_(0, problem.columns, self.by_column)
        multiplied, divided = problem.ranks.sum(torch.stack([multiplied, divided]))
        return problem.class_matrix.sides(multiplied, divided)

    def outward(self, margin: float | Tensor = 1e-9) -> Tensor:
        """Units within a margin of a bound that −∇F points out of, (num_units,) bool."""
        p, g = self.problem, self.gradient
        return ((self.u >= p.upper - margin) & (g < 0)) | ((self.u <= p.lower + margin) & (g > 0))

    def leaving(self, direction: Tensor) -> Tensor:
        """Units at a bound that a direction leads out of, (num_units,) bool."""
        p = self.problem
        return ((self.u >= p.upper) & (direction > 0)) | ((self.u <= p.lower) & (direction < 0))

    @cached_property
    def residual(self) -> float:
        """How far from optimal: the norm of ∇F over the units that may follow it, divided by W."""
        return float(self.gradient.masked_fill(self.outward(), 0.0).norm()) / self.problem.weight

    def laplacian_diagonal(self) -> Tensor:
        """The diagonal of W/E · ∂²E/∂u², (num_units,), each unit's classes taken as independent: an
        upper estimate.
        """
        return (
            self.problem.weight / self.energy * self._gather(self.by_row, self.by_column, power=2)
        )

    def hessian_product(self, d: Tensor) -> Tensor:
        """∇²F(u) · d, (num_units,): a weighted graph Laplacian less a rank-one term."""
        problem = self.problem
        dv = problem.class_matrix @ d
        across, back = problem.through(self.shrink * dv, self.grow * dv)
        laplacian = self._gather(
            dv[problem.rows] * self.by_row - self.shrink[problem.rows] * across,
            dv[problem.columns] * self.by_column - self.grow[problem.columns] * back,
        )
        mean = self.energy_gradient / self.energy
        return problem.weight * (laplacian / self.energy - mean * (mean @ d))

    def _gather(self, at_rows: Tensor, at_columns: Tensor, power: int = 1) -> Tensor:
        """Cᵀ of what the entries of rows and columns bring to their classes (C with its entries to
        a power), (num_units,).
        """
        problem = self.problem
        C = self.problem.class_matrix
        total = (
            torch.zeros_like(self.grow)
            .index_add_(0, problem.rows, at_rows)
            .index_add_(0, problem.columns, at_columns)
        )
        total = problem.ranks.sum(total)
        return replace(C, coefficients=C.coefficients**power).apply_transposed(total)


def _class_pairs(scaling: Scaling, tensor: Tensor) -> ClassPairs:
    """Which classes meet in a parameter, or in what this process holds of it."""
    if not is_sharded(tensor):
        return scaling.class_pairs
    return ClassPairs.of(cut(scaling.plus, tensor), cut(scaling.minus, tensor), tensor.dim())


def _weights(
    name: str,
    values: Tensor,
    weights: Mapping[str, Tensor | float] | None,
    *,
    all_positive: bool,
) -> Tensor:
    """w of every entry of a parameter, in its shape; where it has no energy, zero."""
    if weights is None:
        return fill_like(values, 1.0) if all_positive else values > 0
    given = torch.as_tensor(weights[name], dtype=torch.float64, device=values.device)
    if not bool(((given > 0) & given.isfinite()).all()):
        raise ValueError(f"The weights of {name} must be positive and finite")
    return torch.where(values > 0, given, 0.0)


def _numbers(
    found_pairs: list[ClassPairs], counts: list[Tensor], num_classes: int, device: torch.device
) -> tuple[Tensor, float]:
    """Weights that each class multiplies, less those that it divides, (num_classes,), and the sum
    of all.
    """
    n = torch.zeros(num_classes, dtype=torch.float64, device=device)
    if not counts:
        return n, 0.0
    each = torch.cat(counts).to(device)
    classes = torch.cat(
        [ids for m in found_pairs for ids in (m.rows[m.r.flatten()], m.columns[m.c.flatten()])]
    )
    sizes = [len(part) for part in counts]
    signs = torch.tensor([1.0, -1.0] * len(found_pairs), dtype=torch.float64).repeat_interleave(
        torch.tensor(sizes)
    )
    n.index_add_(0, classes.to(device), signs.to(device) * each)
    return n, float((each * (signs > 0).to(device)).sum())


def _join(pairs: list[Pairs], device: torch.device) -> Pairs:
    if not pairs:
        none = torch.zeros(0, dtype=torch.long, device=device)
        return Pairs(none, none, none.double())
    return Pairs(
        *(
            torch.cat([getattr(part, name) for part in pairs]).to(device)
            for name in ("rows", "columns", "energy")
        )
    )


def select_counted(symmetry: Symmetry, g: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The energies over which F runs."""
    return {name: values for name, values in g.items() if name not in symmetry.uncounted}


def ranks_of(g: Mapping[str, Tensor]) -> Ranks:
    """The processes over which a diagonal is spread."""
    sharded = {name: values for name, values in g.items() if is_sharded(values)}
    return Ranks(group=mesh_group(sharded), sharded=True) if sharded else ALONE


def sides_of(symmetry: Symmetry, values: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Sums of values over the parameters that each unit multiplies, and over those that it divides,
    (num_units,) each: ``Point.sides`` without posing a problem.

    Args:
        symmetry: From ``find_symmetry``.
        values: By parameter name; booleans count as 1.
    """
    g = {
        name: whole
        for name, whole in select_counted(symmetry, values).items()
        if name in symmetry.scalings
    }
    ranks = ranks_of(g)
    device = next((local(whole).device for whole in g.values()), torch.device("cpu"))
    class_matrix = symmetry.class_matrix.to(device)
    total = torch.zeros(2, class_matrix.num_classes, dtype=torch.float64, device=device)
    for name, whole in g.items():
        here = local(whole)
        if ranks.sharded and not (counts_here(whole, ranks.rank) and here.numel()):
            continue
        pairs = _class_pairs(symmetry.scalings[name], whole)
        if pairs.dense and min(len(pairs.rows), len(pairs.columns)) > 1:
            rows = pairs.rows[pairs.r.flatten()]
            columns = pairs.columns[pairs.c.flatten()]
            by_row, by_column = pairs.counts(here)
        else:
            rows, columns, sums = pairs.pairs(here)
            # what one class both multiplies and divides has no scale
            by_row = by_column = sums.double() * (rows != columns).to(device)
        for side, classes, sums in ((0, rows, by_row), (1, columns, by_column)):
            total[side].index_add_(0, classes.to(device), sums.to(device))
    multiplied, divided = ranks.sum(total)
    return class_matrix.sides(multiplied, divided)


def any_positive(g: Mapping[str, Tensor]) -> bool:
    """Whether some of the energies, of which this process may hold a part, is not zero."""
    ranks = ranks_of(g)
    found = torch.tensor([float(bool(local(values).any())) for values in g.values()])
    return bool(ranks.maximum(found).any())


def fill_like(values: Tensor, number: float) -> Tensor:
    """One number in the shape of a tensor, which takes no memory, and no time to be summed up."""
    return torch.full((), number, dtype=torch.float64, device=values.device).expand(values.shape)


def _require_energy(total: Tensor, least: Tensor, ranks: Ranks) -> float:
    """The sum of all energies, if it can be shared out.

    Args:
        total, least: Of what this process holds.
        ranks: The processes.
    """
    whole = float(ranks.sum(total))
    smallest = -float(ranks.maximum(-least))
    if not (math.isfinite(whole) and whole > 0 and smallest >= 0):
        raise (NoEnergyError if whole == 0 <= smallest else ValueError)(
            "Energies must be finite, not negative, and positive somewhere: their sum is "
            f"{whole}, the least {smallest}"
        )
    return whole


def _box(
    num_units: int, bounds: tuple[Tensor, Tensor] | None, device: torch.device, power: float
) -> tuple[Tensor, Tensor]:
    """Bounds on u from those on log λ."""
    if bounds is None:
        upper = torch.full((num_units,), math.inf, dtype=torch.float64, device=device)
        return -upper, upper
    lower, upper = (bound.to(device, torch.float64) for bound in bounds)
    if (
        lower.shape != (num_units,)
        or upper.shape != (num_units,)
        or not bool(((lower <= 0) & (upper >= 0)).all())
    ):
        raise ValueError(
            f"bounds are two vectors of {num_units} log-scales, one not above 0 and "
            "the other not below"
        )
    return (power * lower, power * upper) if power > 0 else (power * upper, power * lower)
