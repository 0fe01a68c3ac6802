"""Random small networks: chains, skips, concatenations, groups, shared weights, gates, norms,
constants; tiny ones by paths.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import settings
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
    "shuffle": lambda h: (
        h.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2) if h.shape[1] % 2 == 0 else h
    ),
}
PINNING = {
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "plus_one": lambda h: h + 1.0,
    "softmax": lambda h: h.softmax(1),
}


# `make test-all` sets it, and draws as many examples as a test names; `make test` half of them.
DRAWS_ALL = "PATHCOND_TEST_ALL" in os.environ


def examples(count: int) -> settings:
    """How many examples a test draws, as a decorator."""
    return settings(max_examples=count if DRAWS_ALL else count // 2)


def further(*values: Any) -> list[Any]:
    """Values of a parameter, tuples of several, that only repeat what others test: `make test-all`
    takes them.
    """
    tuples = [value if isinstance(value, tuple) else (value,) for value in values]
    return [pytest.param(*values, marks=pytest.mark.slow) for values in tuples]


@dataclass(frozen=True)
class Step:
    """One operation on earlier tensors; ``sources`` count from the end, modulo what exists."""

    kind: str
    sources: tuple[int, ...]
    width: int = 0
    option: Any = None


class RandomNet(nn.Module):
    """Executes steps; tensors are (N, C, 3, 3) throughout, and the last one goes through a linear
    head.
    """

    def __init__(self, steps: tuple[Step, ...]) -> None:
        super().__init__()
        self.steps = steps
        self.layers = nn.ModuleDict()
        widths = [INPUT_CHANNELS]
        for i, step in enumerate(steps):
            widths.append(
                self._build(str(i), step, [widths[-1 - s % len(widths)] for s in step.sources])
            )
        self.head = nn.Linear(widths[-1], 2)

    def _build(self, key: str, step: Step, widths: list[int]) -> int:
        width = widths[0]
        if step.kind == "conv":
            groups = step.option["groups"] if width % step.option["groups"] == 0 else 1
            out = step.width * groups
            self.layers[key] = nn.Conv2d(
                width, out, 3, padding=1, groups=groups, bias=step.option["bias"]
            )
            return out
        if step.kind == "norm":
            norms = {
                "batch": nn.BatchNorm2d(width),
                "bare": nn.BatchNorm2d(width, affine=False),
                "group": nn.GroupNorm(1, width),
            }
            self.layers[key] = norms[step.option]
        elif step.kind == "gain":
            self.layers[key] = nn.ParameterList([nn.Parameter(torch.randn(width, 1, 1))])
        elif step.kind == "shared":
            self.layers[key] = nn.Conv2d(width, width, 1, bias=step.option)
        elif step.kind in ("add", "mul"):
            # brings the second operand to the width of the first
            self.layers[key] = nn.Conv2d(widths[1], width, 1)
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
        st.builds(
            Step, st.just("norm"), one, option=st.sampled_from(["batch", "batch", "bare", "group"])
        ),
        st.builds(Step, st.just("shared"), one, option=st.booleans()),
        st.builds(Step, st.sampled_from(["add", "mul", "cat"]), two),
        st.builds(Step, st.sampled_from(["gain", "slice", "skip"]), one),
    )


def networks() -> st.SearchStrategy[RandomNet]:
    """Networks of up to seven steps."""
    return st.lists(_steps(), min_size=1, max_size=7).map(lambda steps: RandomNet(tuple(steps)))


MOST_PATHS = 20_000
ACTIVATIONS = {"relu": nn.ReLU(), "inplace": nn.ReLU(inplace=True), "leaky": nn.LeakyReLU(0.2)}


class PathNet(nn.Module):
    """One sample through a few layers, then a linear head on the last tensor; steps that would
    exceed MOST_PATHS are left out.

    Tensors are (1, C) or, in front of a flatten, (1, C, H, W). "add" and "cat" reach back to any
    earlier tensor that fits.
    """

    def __init__(self, shape: tuple[int, ...], steps: tuple[Step, ...], head_bias: bool) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self.layers = nn.ModuleList()
        made, paths = [torch.zeros(1, *shape)], [1]  # most paths into one element
        for step in steps:
            layer = self._layer(step, made).eval()
            h = self._apply_step(step, layer, made)
            n = self._paths(step, layer, made, paths)
            if n * h.numel() * 2 <= MOST_PATHS and h.numel() > 0:
                self.steps.append(step)
                self.layers.append(layer)
                made.append(h.detach())
                paths.append(n)
        self.head = nn.Linear(made[-1].numel(), 2, bias=head_bias)

    def _layer(self, step: Step, made: list[Tensor]) -> nn.Module:
        width, is_image, option = made[-1].shape[1], made[-1].dim() == 4, step.option
        if step.kind == "layer" and not is_image:
            return nn.Linear(width, step.width, bias=option["bias"])
        if step.kind == "layer":
            groups = option["groups"] if width % option["groups"] == 0 else 1
            kernel, padding = min(option["kernel"], *made[-1].shape[2:]), option["padding"] % 2
            return nn.Conv2d(
                width,
                step.width * groups,
                kernel,
                option["stride"],
                padding,
                groups=groups,
                bias=option["bias"],
            )
        if step.kind == "pool" and is_image:
            kernel = min(option["kernel"], *made[-1].shape[2:])
            padding, ceil = option["padding"] % (kernel // 2 + 1), option["ceil"]
            if option["max"]:
                return nn.MaxPool2d(kernel, option["stride"], padding, ceil_mode=ceil)
            return nn.AvgPool2d(
                kernel,
                option["stride"],
                padding,
                ceil_mode=ceil,
                count_include_pad=option["include"],
            )
        if step.kind == "norm":
            return nn.BatchNorm2d(width) if is_image else nn.BatchNorm1d(width)
        return (
            ACTIVATIONS[option]
            if step.kind == "activation"
            else nn.Flatten()
            if step.kind == "flatten"
            else nn.Identity()
        )

    def _paths(self, step: Step, layer: nn.Module, made: list[Tensor], paths: list[int]) -> int:
        n = paths[-1]
        if isinstance(layer, (nn.Linear, nn.Conv2d)):
            return n * layer.weight[0].numel() + 1
        if isinstance(layer, (nn.MaxPool2d, nn.AvgPool2d)):
            return n * int(layer.kernel_size) ** 2
        other = paths[self._partner(step, made)]
        return {"norm": n + 1, "add": n + other, "cat": max(n, other)}.get(step.kind, n)

    @staticmethod
    def _partner(step: Step, made: list[Tensor]) -> int:
        """The tensor that "add" or "cat" joins with the last one: one of those that fit."""
        axis = 2 if step.kind == "cat" else 1
        h = made[-1]
        fits = [
            i
            for i, other in enumerate(made)
            if other.dim() == h.dim() and other.shape[axis:] == h.shape[axis:]
        ]
        return fits[step.sources[0] % len(fits)]

    def _apply_step(self, step: Step, layer: nn.Module, made: list[Tensor]) -> Tensor:
        if step.kind == "add":
            return made[-1] + made[self._partner(step, made)]
        if step.kind == "cat":
            return torch.cat([made[self._partner(step, made)], made[-1]], 1)
        inplace = isinstance(layer, nn.ReLU) and layer.inplace
        return layer(made[-1].clone() if inplace else made[-1])

    def forward(self, x: Tensor) -> Tensor:
        made = [x]
        for step, layer in zip(self.steps, self.layers, strict=True):
            made.append(self._apply_step(step, layer, made))
        return self.head(made[-1].flatten(1))


def _path_steps() -> st.SearchStrategy[Step]:
    none, bools = st.just((0,)), st.booleans()
    sizes = {"kernel": st.integers(1, 3), "stride": st.integers(1, 2), "padding": st.integers(0, 1)}
    layer = st.fixed_dictionaries({**sizes, "groups": st.sampled_from([1, 1, 2]), "bias": bools})
    pool = st.fixed_dictionaries(
        {**sizes, "kernel": st.integers(2, 3), "ceil": bools, "include": bools, "max": bools}
    )
    return st.one_of(
        st.builds(Step, st.just("layer"), none, st.integers(1, 3), layer),
        st.builds(Step, st.just("layer"), none, st.integers(1, 3), layer),
        st.builds(Step, st.just("activation"), none, option=st.sampled_from(sorted(ACTIVATIONS))),
        st.builds(Step, st.just("activation"), none, option=st.sampled_from(sorted(ACTIVATIONS))),
        st.builds(Step, st.just("pool"), none, option=pool),
        st.builds(Step, st.sampled_from(["norm", "flatten"]), none),
        st.builds(Step, st.sampled_from(["add", "cat"]), st.tuples(st.integers(0, 5))),
    )


@st.composite
def path_networks(draw: st.DrawFn) -> tuple[nn.Module, Tensor]:
    """A network whose paths ``reference.enumerate_paths`` can list, below MOST_PATHS, and one
    sample; float64, eval mode.

    Statistics, gains and biases are random, and none is zero.
    """
    from .zoo import randomise

    shape = draw(st.sampled_from([(2,), (3,), (1, 3, 3), (2, 4, 3), (2, 2, 4)]))
    steps = draw(st.lists(_path_steps(), min_size=3, max_size=8))
    seed, head_bias = draw(st.integers(0, 5)), draw(st.booleans())
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = PathNet(shape, tuple(steps), head_bias).double()
        x = torch.randn(1, *shape, dtype=torch.float64)
    randomise(model, seed)
    return model.eval(), x
