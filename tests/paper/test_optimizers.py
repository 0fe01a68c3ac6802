"""Optimizers over stacked networks make the steps of torch's own, run by run."""

import math

import pytest
import torch
from torch import nn

from pathcond_paper.training.augmenting import MARGIN, Shifts
from pathcond_paper.training.optimizers import OPTIMIZERS, Schedule, factor

RATES = (0.1, 0.02)
STEPS = 7


def torchs(name: str, parameters: list, rate: float, decay: float) -> torch.optim.Optimizer:
    if name == "adamw":
        return torch.optim.AdamW(parameters, lr=rate, weight_decay=decay)
    momentum = 0.9 if name == "momentum" else 0.0
    return torch.optim.SGD(parameters, lr=rate, momentum=momentum, weight_decay=decay)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("decay", [0.0, 0.3])
@pytest.mark.parametrize("schedule", ["fixed", "cosine", "warm-up and cosine"])
def test_steps_are_torchs(name: str, decay: float, schedule: Schedule) -> None:
    start = [torch.randn(3, 4).double(), torch.randn(5).double()]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(STEPS)]
    stacked = [torch.stack([p, p]) for p in start]
    rates = torch.tensor(RATES).double()
    ours = OPTIMIZERS[name](stacked, rates, weight_decay=decay, schedule=schedule, steps=STEPS)
    for gradient in gradients:
        ours.step([torch.stack([g, g]) for g in gradient])
    for run, rate in enumerate(RATES):
        theirs = [nn.Parameter(p.clone()) for p in start]
        optimizer = torchs(name, theirs, rate, decay)
        for step, gradient in enumerate(gradients):
            share = float(factor(schedule, torch.tensor(float(step)).double(), STEPS))
            optimizer.param_groups[0]["lr"] = rate * share
            for parameter, g in zip(theirs, gradient, strict=True):
                parameter.grad = g.clone()
            optimizer.step()
        for a, b in zip(stacked, theirs, strict=True):
            torch.testing.assert_close(a[run], b.detach(), rtol=1e-6, atol=1e-8)


def test_the_cosine_is_torchs() -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    for step in range(STEPS):
        expected = optimizer.param_groups[0]["lr"]
        assert float(factor("cosine", torch.tensor(float(step)), STEPS)) == pytest.approx(expected)
        optimizer.step()
        schedule.step()


def test_the_warm_up_begins_low_and_ends_at_the_cosine() -> None:
    steps = 100
    factors = [float(factor("warm-up and cosine", torch.tensor(float(k)), steps)) for k in (0, 50)]
    assert factors[0] == pytest.approx(1 / 5, rel=1e-3)
    assert factors[1] == pytest.approx(0.5 * (1 + math.cos(math.pi / 2)))


def test_images_are_shifted_and_mirrored_seed_by_seed() -> None:
    images = torch.randn(6, 3, 8, 8)
    shifts = Shifts(images, (2, 2, 4))  # steps, seeds, batch
    shifts.draw([torch.Generator().manual_seed(seed) for seed in (0, 1)])
    order = torch.tensor([[0, 1, 2, 3], [0, 1, 2, 3]])
    found = shifts.apply(images[order], torch.tensor([1]))
    assert not torch.equal(found[0], found[1])
    for seed in range(2):
        for place, image in enumerate(images[:4]):
            down, right, mirrored = shifts.drawn[1, seed, place].tolist()
            padded = torch.nn.functional.pad(image, [MARGIN] * 4)
            expected = padded[:, down : down + 8, right : right + 8]
            expected = expected.flip(-1) if mirrored else expected
            assert torch.equal(found[seed, place], expected)
