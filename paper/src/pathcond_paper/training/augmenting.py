"""Images shifted by a few pixels and mirrored, on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

MARGIN = 4  # pixels by which an image may be shifted to each side; zeros come in


class Shifts:
    """How every image of an epoch is shifted and mirrored.

    Args:
        images: (n, channels, height, width), for their size and device.
        shape: Of the epoch's order: steps, seeds, batch.
    """

    def __init__(self, images: Tensor, shape: Sequence[int]) -> None:
        self.size = images.shape[-2:]
        # per image: rows down, columns to the right, whether it is mirrored
        self.drawn = torch.zeros(*shape, 3, dtype=torch.long, device=images.device)

    def draw(self, generators: Sequence[torch.Generator]) -> None:
        """Draw those of the next epoch, one generator per seed."""
        steps, _, batch, _ = self.drawn.shape
        for seed, generator in enumerate(generators):
            shifts = torch.randint(2 * MARGIN + 1, (steps, batch, 2), generator=generator)
            mirrored = torch.randint(2, (steps, batch, 1), generator=generator)
            self.drawn[:, seed] = torch.cat([shifts, mirrored], -1).to(self.drawn.device)

    def apply(self, x: Tensor, position: Tensor) -> Tensor:
        """A batch for every seed, (seeds, batch, channels, height, width), shifted and mirrored.

        Args:
            x: The batches.
            position: Which step of the epoch it is, (1,).
        """
        drawn = self.drawn.index_select(0, position)[0]
        down, right, mirrored = drawn.unbind(-1)
        height, width = self.size
        rows = down[..., None] + torch.arange(height, device=x.device)
        columns = torch.arange(width, device=x.device)
        columns = torch.where(mirrored[..., None].bool(), columns.flip(0), columns)
        columns = right[..., None] + columns
        padded = F.pad(x, [MARGIN] * 4)
        seeds = torch.arange(x.shape[0], device=x.device)[:, None, None, None, None]
        images = torch.arange(x.shape[1], device=x.device)[:, None, None, None]
        channels = torch.arange(x.shape[2], device=x.device)[:, None, None]
        return padded[
            seeds, images, channels, rows[:, :, None, :, None], columns[:, :, None, None, :]
        ]
