"""The library's main job on an embedded network: find its symmetries, rescale it, prove that nothing changed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .rescale import rescale_
from .symmetry import find_symmetry


class DemoNet(nn.Module):
    """A residual network with BatchNorm, grouped convolution, squeeze-and-excitation, concatenation and flatten."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.squeeze, self.excite = nn.Linear(16, 4), nn.Linear(4, 16)
        self.side = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(24 * 16, 32)
        self.classifier = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)))
        y = F.relu(self.grouped(x))
        gate = torch.sigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3))))))
        x = x + y * gate[:, :, None, None]
        x = torch.cat([x, F.relu(self.side(x))], dim=1)
        return self.classifier(F.relu(self.head(F.max_pool2d(x, 2).flatten(1))))


def run(say: Callable[[str], object]) -> None:
    """Print the story, one step after the other."""
    torch.manual_seed(0)
    model, batch = DemoNet().double().eval(), torch.randn(8, 3, 8, 8, dtype=torch.float64)
    start = time.perf_counter()
    symmetry = find_symmetry(model, batch, normalization="full")
    say(f"{symmetry}\n\nfound in {time.perf_counter() - start:.2f} s\n")
    before, weight = model(batch), model.grouped.weight.detach().clone()
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    rescaling = rescale_(model, symmetry, log_scales)
    moved = (model.grouped.weight / weight).detach()
    change = ((model(batch) - before).abs().max() / before.abs().max()).item()
    say(f"Rescaled by random λ between e^-2 and e^2: grouped.weight × {moved.min():.3f} … {moved.max():.3f}")
    say(f"Largest relative change of an output: eval {change:.1e}, train {rescaling.output_change_train:.1e}")
    rescale_(model, symmetry, -log_scales)
    back = ((model.grouped.weight - weight).abs().max() / weight.abs().max()).item()
    say(f"The inverse brings the weights back to {back:.1e}")
