"""Parameters, hidden units and paths of the paper's networks (``tab:architecture_stats``).

The paper's number of paths is the sum of the outputs of an ordinary forward pass, every parameter 1 and the input ones. That
takes max-pooling as the maximum and average pooling as the mean, where the definition (``def:path_lifting``) has one path per
entry of the window; BatchNorm, with fresh statistics, passes its input on and adds its bias, 1. Both counts are given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from ..lifting import log10_paths
from .architectures import cifar_nv, mlp, resnet, vgg16

IMAGE = (1, 3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A row of the paper's table, as printed; the paths in the format of ``printed_paths``."""

    parameters: int
    hidden_units: int
    paths: str


@dataclass(frozen=True, kw_only=True)
class Row:
    """One network.

    Attributes:
        model: Its name in the paper.
        parameters: Number of trainable parameters.
        hidden_units: Channels of all convolutions, those of shortcuts too, and hidden neurons; not the classifier's.
        paths: Number of paths by the paper's convention.
        log10_true_paths: log10 of the number of paths by the definition.
        paper: What the paper prints.
    """

    model: str
    parameters: int
    hidden_units: int
    paths: float
    log10_true_paths: float
    paper: Printed

    @property
    def agreement(self) -> tuple[bool, bool, bool]:
        """Whether parameters, hidden units and paths are what the paper prints, to its last digit."""
        ours = Printed(parameters=self.parameters, hidden_units=self.hidden_units, paths=printed_paths(self.paths))
        return (
            ours.parameters == self.paper.parameters,
            ours.hidden_units == self.paper.hidden_units,
            ours.paths == self.paper.paths,
        )


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Printed]] = {
    "MLP 3×500": (mlp, Printed(parameters=2_042_510, hidden_units=1_500, paths="3.84e12")),
    "CIFAR-NV": (cifar_nv, Printed(parameters=2_616_576, hidden_units=1_792, paths="4.13e26")),
    "ResNet-18": (partial(resnet, 18), Printed(parameters=11_689_512, hidden_units=4_800, paths="2.24e53")),
    "ResNet-34": (partial(resnet, 34), Printed(parameters=21_797_672, hidden_units=8_512, paths="1.19e100")),
    "ResNet-50": (partial(resnet, 50), Printed(parameters=25_557_032, hidden_units=26_560, paths="2.64e136")),
    "VGG-16": (vgg16, Printed(parameters=138_357_544, hidden_units=12_416, paths="5.89e54")),
}


def run() -> Iterator[Row]:
    """Build one network after the other and count."""
    for name, (build, paper) in NETWORKS.items():
        model, ones = all_ones(build), torch.ones(IMAGE, dtype=torch.float64)
        with torch.no_grad():
            paths = model(ones).sum().item()
        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        yield Row(
            model=name,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            hidden_units=sum(layer.weight.shape[0] for layer in layers[:-1]),
            paths=paths,
            log10_true_paths=log10_paths(model, ones),
            paper=paper,
        )


def all_ones(build: Callable[[], nn.Module]) -> nn.Module:
    """The network in eval mode and float64, every parameter 1, statistics fresh; memory is taken once and never copied."""
    with torch.device("meta"):
        model = build().double().eval()
    model.to_empty(device="cpu")
    for module in model.modules():
        if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
            module.reset_running_stats()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1)
    return model


def printed_paths(paths: float) -> str:
    """As the paper prints it: three digits.

    >>> printed_paths(2_244_789 * 10.0**47)
    '2.24e53'
    """
    mantissa, exponent = f"{paths:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def table(rows: Sequence[Row]) -> str:
    """Ours beside the paper's, cell by cell."""
    lines = [("", "parameters", "paper", "", "hidden units", "paper", "", "paths¹", "paper", "", "paths²")]
    for row in rows:
        parameters, hidden_units, paths = ("✓" if agrees else "✗" for agrees in row.agreement)
        fraction, exponent = math.modf(row.log10_true_paths)
        lines.append((
            row.model,
            f"{row.parameters:,}", f"{row.paper.parameters:,}", parameters,
            f"{row.hidden_units:,}", f"{row.paper.hidden_units:,}", hidden_units,
            printed_paths(row.paths), row.paper.paths, paths,
            f"{10**fraction:.2f}e{exponent:.0f}",
        ))  # fmt: skip
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    wrong = sum(not agrees for row in rows for agrees in row.agreement)
    return "\n".join([
        "Networks of the paper on a 3×32×32 image (tab:architecture_stats)",
        "",
        *("  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in lines),
        "",
        f"✓ as the paper prints it, ✗ not: {wrong or 'no'} cell{'s differ' if wrong != 1 else ' differs'}.",
        "¹ The paper's convention: the outputs of one forward pass with all parameters and inputs 1. Max-pooling is then one path",
        "  per window and average pooling the mean of its paths; BatchNorm has fresh statistics and adds its bias, 1.",
        "² The definition (def:path_lifting): one path per entry of a pooling window, so never fewer.",
    ])  # fmt: skip
