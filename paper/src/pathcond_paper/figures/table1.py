"""Parameters, hidden units and paths of the paper's networks (``tab:architecture_stats``).

The paper's number of paths is the sum of the outputs of an ordinary forward pass, every parameter 1
and the input ones. That takes max-pooling as the maximum and average pooling as the mean, where the
definition (``def:path_lifting``) has one path per entry of the window; BatchNorm, with fresh
statistics, passes its input on and adds its bias, 1. Both counts are given here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn

from pathcond.lifting.lifting import log10_paths
from pathcond.networks import cifar_nv, mlp, resnet, vgg16
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

DATASETS: Mapping[Preset, Sequence[str]] = {"smoke": (), "cpu": (), "paper": ()}
IMAGE = (1, 3, 32, 32)


@dataclass(frozen=True, kw_only=True)
class Printed:
    """A row of the paper's table, as printed; the paths in the format of ``format_paths``."""

    parameters: int
    hidden_units: int
    paths: str


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Printed]] = {
    "MLP 3×500": (mlp, Printed(parameters=2_042_510, hidden_units=1_500, paths="3.84e12")),
    "CIFAR-NV": (cifar_nv, Printed(parameters=2_616_576, hidden_units=1_792, paths="4.13e26")),
    "ResNet-18": (
        partial(resnet, 18),
        Printed(parameters=11_689_512, hidden_units=4_800, paths="2.24e53"),
    ),
    "ResNet-34": (
        partial(resnet, 34),
        Printed(parameters=21_797_672, hidden_units=8_512, paths="1.19e100"),
    ),
    "ResNet-50": (
        partial(resnet, 50),
        Printed(parameters=25_557_032, hidden_units=26_560, paths="2.64e136"),
    ),
    "VGG-16": (vgg16, Printed(parameters=138_357_544, hidden_units=12_416, paths="5.89e54")),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """A network each; nothing is random, so ``seeds`` changes nothing. "smoke" has the two that are
    counted at once.
    """
    names = list(NETWORKS)[:2] if preset == "smoke" else list(NETWORKS)
    return [{"figure": "table1", "network": name} for name in names]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """Each by itself: VGG-16 alone takes more than 1 GB."""
    return [[job] for job in jobs]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Build one network after the other and count.

    Each result has the number of trainable parameters; of hidden units, which are the channels of
    all convolutions, those of shortcuts too, and hidden neurons, but not the classifier's; of paths
    by the paper's convention; and log10 of the number of paths by the definition.
    """
    for n, job in enumerate(jobs):
        progress(n / len(jobs), job["network"])
        model = all_ones(NETWORKS[job["network"]][0])
        ones = torch.ones(IMAGE, dtype=torch.float64)
        with torch.no_grad():
            paths = model(ones).sum().item()
        layers = [m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Linear)]
        result = {
            "parameters": sum(parameter.numel() for parameter in model.parameters()),
            "hidden_units": sum(layer.weight.shape[0] for layer in layers[:-1]),
            "paths": paths,
            "log10_true_paths": log10_paths(model, ones),
        }
        yield job, result


def all_ones(build: Callable[[], nn.Module]) -> nn.Module:
    """The network in eval mode and float64, every parameter 1, statistics fresh; memory is taken
    once and never copied.
    """
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


def format_paths(paths: float) -> str:
    """As the paper prints it: three digits.

    >>> format_paths(2_244_789 * 10.0**47)
    '2.24e53'
    """
    mantissa, exponent = f"{paths:.2e}".split("e")
    return f"{mantissa}e{int(exponent)}"


def agreement(row: Row) -> tuple[bool, bool, bool]:
    """Whether parameters, hidden units and paths are what the paper prints, to its last digit."""
    paper = NETWORKS[row.job["network"]][1]
    ours = row.result
    return (
        ours["parameters"] == paper.parameters,
        ours["hidden_units"] == paper.hidden_units,
        format_paths(ours["paths"]) == paper.paths,
    )


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Nothing: it is a table."""
    return {}


def table(rows: Sequence[Row]) -> str:
    """Ours beside the paper's, cell by cell."""
    lines = [
        (
            "",
            "parameters",
            "paper",
            "",
            "hidden units",
            "paper",
            "",
            "paths¹",
            "paper",
            "",
            "paths²",
        )
    ]
    for row in rows:
        ours = row.result
        paper = NETWORKS[row.job["network"]][1]
        parameters, hidden_units, paths = ("✓" if agrees else "✗" for agrees in agreement(row))
        fraction, exponent = math.modf(ours["log10_true_paths"])
        lines.append(
            (
                row.job["network"],
                f"{ours['parameters']:,}",
                f"{paper.parameters:,}",
                parameters,
                f"{ours['hidden_units']:,}",
                f"{paper.hidden_units:,}",
                hidden_units,
                format_paths(ours["paths"]),
                paper.paths,
                paths,
                f"{10**fraction:.2f}e{exponent:.0f}",
            )
        )
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    wrong = _wrong(rows)
    return "\n".join(
        [
            "Networks of the paper on a 3×32×32 image (tab:architecture_stats)",
            "",
            *(
                "  ".join([name.ljust(first), *map(str.rjust, cells, others)])
                for name, *cells in lines
            ),
            "",
            f"✓ as the paper prints it, ✗ not: {wrong or 'no'} "
            f"cell{'s differ' if wrong != 1 else ' differs'}.",
            "¹ The paper's convention: the outputs of one forward pass with all parameters and "
            "inputs 1. Max-pooling is then one path",
            "  per window and average pooling the mean of its paths; BatchNorm has fresh "
            "statistics "
            "and adds its bias, 1.",
            "² The definition (def:path_lifting): one path per entry of a pooling window, so never "
            "fewer.",
        ]
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """The table, and what it says it counts."""
    printed = "Parameters, hidden units and paths of six networks (tab:architecture_stats)."
    definition = (
        "The paths column is the number of paths from input pixels to output logits "
        "(sec:arch_stats)."
    )
    if {row.job["network"] for row in rows} < set(NETWORKS):
        return [Claim.not_run(printed), Claim.not_run(definition)]
    cells = 3 * len(rows)
    wrong = _wrong(rows)
    more = {
        row.job["network"]: row.result["log10_true_paths"] - math.log10(row.result["paths"])
        for row in rows
    }
    short = {name: factor for name, factor in more.items() if factor > 0.01}
    factors = ", ".join(f"{name} by 10^{factor:.1f}" for name, factor in short.items())
    return [
        Claim.judge(
            printed,
            not wrong,
            f"{cells - wrong} of {cells} cells as printed, by the paper's convention.",
            bound="all cells are as printed",
        ),
        Claim.judge(
            definition,
            not short,
            f"{len(short)} networks have more: {factors}."
            if short
            else f"{len(more)} networks have as many.",
            "By the definition (def:path_lifting) there is a path per entry of a pooling window.",
            bound="the column is within 2 % of that number",
        ),
    ]


def _wrong(rows: Sequence[Row]) -> int:
    """Cells that are not as the paper prints them."""
    return sum(not agrees for row in rows for agrees in agreement(row))
