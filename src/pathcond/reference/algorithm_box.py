"""The paper's algorithm as its box has it (alg. detailed_rescaling), line by line, one neuron at a
time: the solvers' yardstick.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..criteria.problem import select_counted
from ..symmetry.symmetry import Symmetry


@dataclass(frozen=True)
class Connectivity:
    """The columns of the paper's B (eq. def_B).

    Attributes:
        into, out: in_h and out_h of every unit, as positions among the parameters that count.
        order: Units in forward order.
        g: (p,) diagonal of G over those parameters.
    """

    into: Sequence[Tensor]
    out: Sequence[Tensor]
    order: Sequence[int]
    g: Tensor

    @classmethod
    def of(cls, symmetry: Symmetry, g: Mapping[str, Tensor]) -> Connectivity:
        """Read it from a Symmetry whose classes of equal log-scales are one unit each, or fixed, as
        in the paper's networks.
        """
        g = select_counted(symmetry, g)
        device = next(iter(g.values())).device
        classes = symmetry.class_matrix
        unit_of = torch.full((classes.num_classes,), -1, dtype=torch.long)
        unit_of[classes.classes] = classes.units
        sides: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, values in g.items():
            scaling = symmetry.scalings.get(name)
            for ids, units in zip(
                (scaling.plus, scaling.minus) if scaling else (None, None), sides, strict=True
            ):
                of = torch.tensor(-1) if ids is None else unit_of[ids.long()]
                units.append(of.to(device).expand(values.shape)[values > 0])
        into, out = (_columns(torch.cat(units), symmetry.num_units) for units in sides)
        order = [unit for group in symmetry.groups for unit in group.units]
        return cls(into, out, order, torch.cat([values[values > 0] for values in g.values()]))


def _columns(units: Tensor, num_units: int) -> Sequence[Tensor]:
    """Positions of every unit, from the unit (or −1) of every position."""
    counts = torch.bincount(units + 1, minlength=num_units + 1).tolist()
    return units.argsort(stable=True).split(counts)[1:]


def box_sweeps(connectivity: Connectivity) -> Iterator[Tensor]:
    """u, (num_units,), after every sweep over the neurons; there is no last one.

    >>> import itertools, pathcond
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(2, 3), torch.nn.ReLU(), torch.nn.Linear(3, 1)
    ... ).double()
    >>> x = torch.ones(1, 2).double()
    >>> symmetry, g = pathcond.find_symmetry(model, x), pathcond.diag_g(model, x)
    >>> u = next(itertools.islice(box_sweeps(Connectivity.of(symmetry, g)), 9, None))
    >>> solution = pathcond.solve(
    ...     symmetry, g, solver=pathcond.CoordinateDescent(sweeps=10, tolerance=0)
    ... )
    >>> torch.allclose(u, 2 * solution.log_scales, atol=1e-12)
    True
    """
    g = connectivity.g
    p = len(connectivity.g)
    E = connectivity.g.sum()
    u = torch.zeros(len(connectivity.into), dtype=g.dtype, device=g.device)
    v = torch.zeros_like(g)
    while True:
        for h in connectivity.order:
            in_h, out_h = connectivity.into[h], connectivity.out[h]
            D = E - (v[out_h].exp() * g[out_h]).sum() - (v[in_h].exp() * g[in_h]).sum()
            A = len(in_h) - len(out_h)
            B = ((v[out_h] - u[h]).exp() * g[out_h]).sum()
            C = ((v[in_h] + u[h]).exp() * g[in_h]).sum()
            root = (-A * D + ((A * D) ** 2 - 4 * B * (A + p) * C * (A - p)).sqrt()) / (
                2 * B * (A + p)
            )
            delta = root.log() - u[h]
            v[out_h] += delta
            v[in_h] -= delta
            E = D + (v[out_h].exp() * g[out_h]).sum() + (v[in_h].exp() * g[in_h]).sum()
            u[h] += delta
        yield u.clone()
