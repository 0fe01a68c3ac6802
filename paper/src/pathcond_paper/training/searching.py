"""The best that any rescaling of whole layers can do: a random search, then a local one, scored by
the test loss.

It is an upper bound and no method: it trains hundreds of networks to find one scale per layer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from ..figure import Progress
from .methods import Method
from .recipe import Recipe, Run
from .starting import Starts
from .training import Data, train

FARTHEST = 2.0  # of the first log-scales
# Of the candidates that go on into the next round, and the deviations of what is added to them.
ROUNDS = ((16, 0.5), (8, 0.25))
SEED = 0


@dataclass(frozen=True)
class Candidate:
    """One log-scale for every group of units, and a learning rate."""

    log_scales: tuple[float, ...]
    learning_rate: float


def search(
    recipe: Recipe,
    data: Data,
    rates: Sequence[float],
    candidates: int,
    progress: Progress = lambda share, what: None,
) -> Candidate:
    """The candidate with the least test loss at the end of training.

    Args:
        recipe: How to train; its methods are not looked at.
        data: On the device.
        rates: The grid of learning rates; candidates lie between its ends.
        candidates: How many are trained together, in each of three rounds.
        progress: Told the share that is done.
    """
    generator = torch.Generator().manual_seed(SEED)
    starts = Starts(recipe, data.x[: recipe.batch])
    layers = len(starts.prepare_for(Method(title="", layer_scales=())).symmetry.groups)
    low, high = math.log(min(rates)), math.log(max(rates))

    def draw() -> Candidate:
        scales = (2 * torch.rand(layers, generator=generator) - 1) * FARTHEST
        rate = low + (high - low) * float(torch.rand((), generator=generator))
        return Candidate(tuple(scales.tolist()), math.exp(rate))

    def near(candidate: Candidate, deviation: float) -> Candidate:
        scales = torch.tensor(candidate.log_scales) + deviation * torch.randn(
            layers, generator=generator
        )
        factor = math.exp(deviation * float(torch.randn((), generator=generator)))
        return Candidate(tuple(scales.tolist()), candidate.learning_rate * factor)

    unmoved = [Candidate((0.0,) * layers, rate) for rate in rates]
    tried = unmoved + [draw() for _ in range(candidates - len(unmoved))]
    scored: list[tuple[float, Candidate]] = []
    for number, (kept, deviation) in enumerate([*ROUNDS, (1, 0.0)]):
        losses = _score(recipe, data, tried)
        scored = sorted([*scored, *zip(losses, tried, strict=True)], key=lambda pair: pair[0])
        progress((number + 1) / (len(ROUNDS) + 1), f"least test loss {scored[0][0]:.4g}")
        best = [candidate for _, candidate in scored[:kept]]
        tried = [near(best[i % kept], deviation) for i in range(candidates)]
    return scored[0][1]


def _score(recipe: Recipe, data: Data, candidates: Sequence[Candidate]) -> list[float]:
    """Final test losses; infinite where training diverged."""
    methods = {
        str(i): Method(title="", layer_scales=candidate.log_scales)
        for i, candidate in enumerate(candidates)
    }
    runs = [
        Run(method=str(i), learning_rate=candidate.learning_rate, seed=SEED)
        for i, candidate in enumerate(candidates)
    ]
    curves = train(runs, replace(recipe, methods=methods), data)
    losses = [run.test_loss[-1] for run in curves]
    return [loss if math.isfinite(loss) else math.inf for loss in losses]
