"""The algorithm box of the paper (alg. detailed_rescaling), line by line, one neuron at a time: the solvers' yardstick."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pathcond import Symmetry


def index_sets(symmetry: Symmetry, g: dict[str, Tensor]) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """in_h and out_h of every unit, as positions among the parameters with g > 0, and their g."""
    incoming: list[list[Tensor]] = [[] for _ in range(symmetry.num_units)]
    outgoing: list[list[Tensor]] = [[] for _ in range(symmetry.num_units)]
    classes = symmetry.combination
    unit_of = torch.full((classes.num_classes,), -1, dtype=torch.long)
    unit_of[classes.classes] = classes.units
    offset = 0
    for name, values in g.items():
        kept = (values > 0).flatten()
        if name in symmetry.scalings:
            scaling = symmetry.scalings[name]
            for ids, sets in ((scaling.plus, incoming), (scaling.minus, outgoing)):
                units = unit_of[ids.long()].expand(values.shape).flatten()[kept]
                order = units.argsort(stable=True)
                bounds = torch.searchsorted(units[order], torch.arange(symmetry.num_units + 1))
                for unit in range(symmetry.num_units):
                    start, stop = int(bounds[unit]), int(bounds[unit + 1])
                    if stop > start:
                        sets[unit].append(order[start:stop] + offset)
        offset += int(kept.sum())
    empty = torch.zeros(0, dtype=torch.long)
    flat = torch.cat([values.flatten()[(values > 0).flatten()] for values in g.values()])
    return [torch.cat([empty, *sets]) for sets in incoming], [torch.cat([empty, *sets]) for sets in outgoing], flat


def sweeps(into: list[Tensor], out: list[Tensor], values: Tensor, order: list[int]) -> Iterator[Tensor]:
    """u after every sweep over the neurons in the given order."""
    p = len(values)
    u = torch.zeros(len(into), dtype=torch.float64)
    v = torch.zeros(p, dtype=torch.float64)
    E = values.sum()
    while True:
        for h in order:
            out_h, in_h = out[h], into[h]
            S_out, S_in = (v[out_h].exp() * values[out_h]).sum(), (v[in_h].exp() * values[in_h]).sum()
            D = E - S_out - S_in
            A = len(in_h) - len(out_h)
            B = ((v[out_h] - u[h]).exp() * values[out_h]).sum()
            C = ((v[in_h] + u[h]).exp() * values[in_h]).sum()
            root = (-A * D + ((A * D) ** 2 - 4 * B * (A + p) * C * (A - p)).sqrt()) / (2 * B * (A + p))
            delta = root.log() - u[h]
            v[out_h] += delta
            v[in_h] -= delta
            E = D + (v[out_h].exp() * values[out_h]).sum() + (v[in_h].exp() * values[in_h]).sum()
            u[h] += delta
        yield u.clone()
