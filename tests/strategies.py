"""Random small networks: chains, skips, concatenations, groups, shared weights, gates, norms, constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

INPUT_CHANNELS = 2
HOMOGENEOUS = {
    "relu": F.relu,
    "leaky": lambda h: F.leaky_relu(h, 0.2),
    "clamp": lambda h: h.clamp(min=0),
    "abs": torch.abs,
    "max_pool": lambda h: F.max_pool2d(h, 2, stride=1, padding=1)[..., :3, :3],
    "avg_pool": lambda h: F.avg_pool2d(h, 3, stride=1, padding=1),
    "flip": lambda h: h.flip(1),
    "roll": lambda h: h.roll(1, 1),
    "transpose": lambda h: h.transpose(2, 3),
    "shuffle": lambda h: h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if h.shape[1] % 2 == 0 else h,
}
PINNING = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "plus_one": lambda h: h + 1.0,
    "softmax": lambda h: h.softmax(1),
}


@dataclass(frozen=True)
class Step:
    """One operation on earlier tensors; ``sources`` count from the end, modulo what exists."""

    kind: str
    sources: tuple[int, ...]
    width: int = 0
    option: Any = None


class RandomNet(nn.Module):
    """Executes steps; tensors are (N, C, 3, 3) throughout, and the last one goes through a linear head."""

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleDict()
        widths = [INPUT_CHANNELS]
        for i, step in enumerate(steps):
            widths.append(self._build(str(i), step, [widths[-1 - s % len(widths)] for s in step.sources]))
        self.head = nn.Linear(widths[-1], 2)

    def _build(self, key: str, step: Step, widths: list[int]) -> int:
        width = widths[0]
        if step.kind == "conv":
            groups = step.option["groups"] if width % step.option["groups"] == 0 else 1
            out = step.width * groups
            self.layers[key] = nn.Conv2d(width, out, 3, padding=1, groups=groups, bias=step.option["bias"])
            return out
        if step.kind == "norm":
            norms = {"batch": nn.BatchNorm2d(width), "bare": nn.BatchNorm2d(width, affine=False), "group": nn.GroupNorm(1, width)}
            self.layers[key] = norms[step.option]
        elif step.kind == "gain":
            self.layers[key] = nn.ParameterList([nn.Parameter(torch.randn(width, 1, 1))])
        elif step.kind == "shared":
            self.layers[key] = nn.Conv2d(width, width, 1, bias=step.option)
        elif step.kind in ("add", "mul"):
            self.layers[key] = nn.Conv2d(widths[1], width, 1)  # brings the second operand to the width of the first
        elif step.kind == "cat":
            return widths[0] + widths[1]
        elif step.kind == "slice":
            return (width + 1) // 2
        return width

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for i, step in enumerate(self.steps):
            sources = [made[-1 - s % len(made)] for s in step.sources]
            layer = self.layers[str(i)] if str(i) in self.layers else None  # noqa: SIM401  a ModuleDict has no get
            made.append(self._apply_step(step, layer, *sources))
        return self.head(made[-1].mean((2, 3)))

    def _apply_step(self, step: Step, layer: Any, h: Tensor, other: Tensor | None = None) -> Tensor:
        if step.kind in ("conv", "norm"):
            return layer(h)
        if step.kind == "gain":
            return h * layer[0]
        if step.kind == "shared":
            return layer(F.relu(layer(h)))
        if step.kind == "add":
            return h + layer(other)
        if step.kind == "mul":
            return h * F.relu(layer(other))
        if step.kind == "cat":
            return torch.cat([h, other], 1)
        if step.kind == "skip":
            return h + h.abs()
        if step.kind == "slice":
            return h[:, ::2]
        return (HOMOGENEOUS | PINNING)[step.option](h)


def _steps() -> st.SearchStrategy[Step]:
    one, two = st.tuples(st.integers(0, 2)), st.tuples(st.integers(0, 3), st.integers(0, 3))
    conv = st.fixed_dictionaries({"groups": st.sampled_from([1, 1, 2]), "bias": st.booleans()})
    return st.one_of(
        st.builds(Step, st.just("conv"), one, st.integers(1, 3), conv),
        st.builds(Step, st.just("conv"), one, st.integers(1, 3), conv),
        st.builds(Step, st.just("apply"), one, option=st.sampled_from(sorted(HOMOGENEOUS))),
        st.builds(Step, st.just("apply"), one, option=st.sampled_from(sorted(PINNING))),
        st.builds(Step, st.just("norm"), one, option=st.sampled_from(["batch", "batch", "bare", "group"])),
        st.builds(Step, st.just("shared"), one, option=st.booleans()),
        st.builds(Step, st.sampled_from(["add", "mul", "cat"]), two),
        st.builds(Step, st.sampled_from(["gain", "slice", "skip"]), one),
    )


def networks() -> st.SearchStrategy[RandomNet]:
    """Networks of up to seven steps."""
    return st.lists(_steps(), min_size=1, max_size=7).map(lambda steps: RandomNet(tuple(steps)))
