"""The box of log-scales in which ε of a BatchNorm stays harmless in train mode.

A scale λ in front of a norm leaves its output as it is, but for ε: the share of ε in the normaliser
changes.

    q = ε / var of the example batch        q' = q / λ²
    ρ = ε / (running variance + ε)          ρ' = ρ / λ²        (positive while ρ' < 1)

Both follow λ by a law of their own, so the box is drawn in q and ρ and not in λ: it does not move
with the model. For a share s it says q' ≤ s; where q is more than s already, the scale stays as it
is. Whatever s, ρ' is at most 1/2, or what it is. So no q changes by more than s, and a unit that
has reached its bound is at the same bound when it is conditioned again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..capture.calibration import batch_variances
from ..capture.models import Inputs
from ..rules.labels import FIXED
from ..rules.values import Scaling
from ..wrappers import unwrap
from .units import ClassMatrix

LARGEST_RUNNING = 0.5  # ρ of a running variance that is as small as ε
NEAR = 1e-3  # relative: a share that is closer to its bound than this has reached it


@dataclass(frozen=True, kw_only=True)
class EpsilonShares:
    """What ε weighs in the norms of one model, channel by channel; one entry per channel that a
    scale reaches.

    Attributes:
        class_matrix: Classes of equal log-scales in terms of units.
        classes: (n,) positions in its rows.
        batch: (n,) q.
        running: (n,) ρ.
    """

    class_matrix: ClassMatrix
    classes: Tensor
    batch: Tensor
    running: Tensor

    @classmethod
    def of(
        cls,
        model: nn.Module,
        example_inputs: Inputs,
        scalings: Mapping[str, Scaling],
        class_matrix: ClassMatrix,
    ) -> EpsilonShares:
        """Measure them on the example batch in train mode."""
        model = unwrap(model)
        norms = {name: s for name, s in scalings.items() if s.epsilon is not None}
        buffers = dict(model.named_buffers())
        variances = batch_variances(model, example_inputs) if norms else {}
        classes, batch, running = ([torch.zeros(0, dtype=torch.float64)] for _ in range(3))
        for name, variance in variances.items():
            if name not in norms:
                continue
            scaling = norms[name]
            assert scaling.epsilon is not None
            classes.append(scaling.plus.expand(scaling.shape).double())
            batch.append(scaling.epsilon / variance)
            running.append(
                scaling.epsilon / (buffers[name].detach().cpu().double() + scaling.epsilon)
            )
        return cls(
            class_matrix=class_matrix,
            classes=torch.cat(classes).long(),
            batch=torch.cat(batch),
            running=torch.cat(running),
        )

    def box(self, share: float) -> tuple[Tensor, Tensor]:
        """Least and greatest log λ of every unit, (num_units,) each; scale 1 is always inside.

        Args:
            share: The most by which a share of ε may change.
        """
        if not 0 <= share < 1:
            raise ValueError(
                f"share = {share}: it is a change of a share of ε, at least 0 and less than 1"
            )
        stays = ~(self.batch <= (1 + NEAR) * share)
        # the greatest λ⁻²
        growth = torch.minimum(
            share / self.batch, self.running.clamp(min=LARGEST_RUNNING) / self.running
        )
        num_classes = self.class_matrix.num_classes
        down, up = (torch.full((num_classes,), math.inf, dtype=torch.float64) for _ in range(2))
        # −down ≤ t of a class ≤ up
        down.scatter_reduce_(
            0, self.classes, torch.where(stays, 0.0, 0.5 * growth.clamp(min=1.0).log()), "amin"
        )
        up.scatter_reduce_(
            0, self.classes, torch.full_like(growth, math.inf).masked_fill(stays, 0.0), "amin"
        )
        down[FIXED] = up[FIXED] = math.inf
        return self._of_units(down, up)

    def is_reached(self, share: float) -> bool:
        """Whether some scale is at its bound for this share."""
        return bool((((self.batch / share - 1).abs() < NEAR) & (self.classes != FIXED)).any())

    def _of_units(self, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        """The box of the units from that of the classes. Where several units make a class, the
        first has all its room.
        """
        C = self.class_matrix
        first = torch.ones_like(C.classes, dtype=torch.bool)
        first[1:] = C.classes[1:] != C.classes[:-1]
        rising = C.coefficients > 0
        size = C.coefficients.abs()
        sides = []
        for below, above in ((down, up), (up, down)):
            room = torch.where(rising, below[C.classes], above[C.classes]) / size
            room = torch.where(first | room.isinf(), room, 0.0)
            whole = torch.full((C.num_units,), math.inf, dtype=torch.float64)
            sides.append(whole.scatter_reduce_(0, C.units, room, "amin"))
        return -sides[0], sides[1]
