"""The method "as in the paper" against the authors' program: its diagonal, its loop, and log-scales
that were recorded from it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pathcond.condition import prepare
from pathcond.criteria.problem import Problem
from pathcond.lifting.lifting import diag_g
from pathcond.lifting.sample import Prepared
from pathcond.networks import cifar_nv, mlp, resnet18_c
from pathcond_paper.published import PublishedKernel, published_diagonal
from pathcond_paper.training.methods import AS_IN_PAPER

RECORDED = json.loads(Path(__file__).with_name("published_log_scales.json").read_text())
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(mlp, (500,) * 4, batch_norm=True),
    "cifar-nv": partial(cifar_nv, bias=True),
    "resnet18-c": resnet18_c,
}


def pose(model: nn.Module, images: Tensor) -> tuple[Prepared, Problem]:
    prepared = prepare(model, images, normalization="paper")
    return prepared, PublishedKernel().problem(prepared.symmetry, {}, model)


def small() -> nn.Module:
    """Both poolings, a BatchNorm, biases."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 5, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(5, 4, 3, padding=1, bias=False),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 6, 1),
        nn.ReLU(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(6 * 2 * 2, 3),
    )


def test_without_pooling_and_norms_it_is_the_definition() -> None:
    torch.manual_seed(0)
    model = mlp((7, 5), inputs=6, outputs=4)
    ours = diag_g(model, torch.randn(2, 6))
    theirs = published_diagonal(model, torch.ones(1, 6))
    assert list(ours) == list(theirs)
    for name, g in ours.items():
        torch.testing.assert_close(theirs[name], g, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("pool", "factor"),
    # of the energies of 4 equal entries: the greatest, not the sum; the mean, not the sum of
    # (1/4)² each
    [(nn.MaxPool2d(2), 1 / 4), (nn.AvgPool2d(2), 4)],
)
def test_what_pooling_does(pool: nn.Module, factor: float) -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 1, bias=False), nn.ReLU(), pool, nn.Flatten())
    ours = diag_g(model, torch.randn(2, 1, 2, 2))["0.weight"]
    theirs = published_diagonal(model, torch.ones(1, 1, 2, 2))["0.weight"]
    torch.testing.assert_close(theirs, factor * ours, rtol=1e-6, atol=0)


def test_parameters_of_a_norm_are_constants() -> None:
    model, images = small(), torch.randn(2, 3, 8, 8)
    prepared, problem = pose(model, images)
    assert problem.weight == sum(parameter.numel() for parameter in model.parameters())
    g = published_diagonal(model, torch.ones(1, 3, 8, 8))
    total = sum(float(values.sum()) for values in g.values())
    last = g["10.bias"].sum() + g["4.weight"].sum() + g["4.bias"].sum()
    assert problem.fixed == pytest.approx(float(last) / total, rel=1e-9)
    assert prepared.symmetry.num_units == 5 + 4 + 6


def test_its_sweeps_are_those_of_the_published_loop() -> None:
    """The loop written out with the matrix B, parameter by parameter."""
    model, images = small(), torch.randn(2, 3, 8, 8)
    prepared, problem = pose(model, images)
    g = published_diagonal(model, torch.ones(1, 3, 8, 8))
    norm = {"4.weight", "4.bias"}
    columns = []
    for unit in range(prepared.symmetry.num_units):
        along = torch.zeros(prepared.symmetry.num_units, dtype=torch.float64)
        along[unit] = 1.0
        factors = prepared.symmetry.factors(along)
        column = [
            torch.zeros(g[n].numel()) if n in norm else -factors[n].log().flatten() for n in g
        ]
        columns.append(torch.cat([part.double() for part in column]).round())
    b, energies = torch.stack(columns, 1), torch.cat([values.flatten() for values in g.values()])
    u = torch.zeros(b.shape[1], dtype=torch.float64)
    for _ in range(10):
        for h in range(len(u)):
            rest = (b @ u - b[:, h] * u[h]).exp() * energies
            into, out = (rest[b[:, h] == sign].sum() for sign in (-1, 1))
            other = rest[b[:, h] == 0].sum()
            a = float((b[:, h] == -1).sum() - (b[:, h] == 1).sum())
            p = len(energies)
            root = ((a * other) ** 2 - 4 * out * (a + p) * into * (a - p)).sqrt()
            u[h] = ((root - a * other) / (2 * out * (a + p))).log()
    found = AS_IN_PAPER["solver"].solve(problem).log_scales
    torch.testing.assert_close(2 * found, u, rtol=0, atol=1e-10)
    assert u.abs().max() > 0.5


@pytest.mark.parametrize("name", NETWORKS)
def test_log_scales_are_those_recorded_from_the_authors_program(name: str) -> None:
    """To the rounding of its diagonal, which is in float32; their ResNet leaves the last 512 units
    out.
    """
    model = fill(NETWORKS[name]())
    prepared, problem = pose(model, torch.randn(2, 3, 32, 32))
    free = torch.full_like(problem.slope, math.inf)
    if name == "resnet18-c":
        free[list(prepared.symmetry.groups[-1].units)] = 0.0
    problem = replace(problem, lower=-free, upper=free)
    found = AS_IN_PAPER["solver"].solve(problem).log_scales[free > 0]
    recorded = torch.tensor(RECORDED["log_scales"][name], dtype=torch.float64)
    torch.testing.assert_close(found[:: RECORDED["every"]], recorded, rtol=0, atol=2e-6)
    assert recorded.abs().max() > 0.2


def fill(model: nn.Module) -> nn.Module:
    """Weights that depend on no random numbers: those that the program was given."""
    with torch.no_grad():
        for k, (name, parameter) in enumerate(model.named_parameters()):
            module = model.get_submodule(name.rpartition(".")[0])
            if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d):
                continue
            i = torch.arange(parameter.numel(), dtype=torch.float64)
            fan_in = module.weight[0].numel()
            values = torch.sin(1 + k + 0.61 * i + 0.01 * i * (k + 1)) / math.sqrt(fan_in)
            parameter.copy_(values.view_as(parameter))
    return model


def test_a_network_of_two_inputs_is_refused() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = mlp((4,), inputs=3, outputs=2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            out: Tensor = self.layer(x + y)
            return out

    model, example = Sum(), (torch.randn(2, 3), torch.randn(2, 3))
    symmetry = prepare(model, example, normalization="paper").symmetry
    with pytest.raises(TypeError, match="tuple, not one tensor"):
        PublishedKernel().energies(symmetry, {}, model)
