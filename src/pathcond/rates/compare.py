"""``compare_rates``: train as is and conditioned over a grid of learning rates, and see whether it
pays.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from ..capture.isolation import same_random_states
from ..capture.models import Inputs
from .arguments import Grid, check_types, grid_of
from .comparison import RateComparison
from .curves import Curve
from .progress import Progress
from .record import Record
from .runs import Beginnings, Run, perform

logger = logging.getLogger("pathcond")

# Factors of 2 around 0.1: what plain SGD on small networks needs lies inside. Adam's rates are
# about 30 times smaller.
RATES = tuple(0.1 * 2.0**k for k in range(-5, 6))


def compare_rates(
    build: Callable[[int], nn.Module],
    train: Callable[[nn.Module, float], Any],
    example_inputs: Inputs | Callable[[int], Inputs],
    *,
    rates: Iterable[float] = RATES,
    methods: Mapping[str, Any] | None = None,
    seeds: int | Iterable[int] = 3,
    rows: str | os.PathLike[str] | None = None,
    label: str = "loss",
    progress: bool = True,
) -> RateComparison:
    """Does conditioning pay on this model, with each method at its own best learning rate?

    At one fixed rate a method can look good because it changes the pace of training. So every
    method is trained at every rate, and what counts is the best that each reaches, with the mean
    over the seeds. All methods and rates of a seed begin from the same weights (which is checked)
    and the same random states. A run is what these lines do, so that it can be made by hand:

        torch.manual_seed(seed); model = build(seed); pathcond.condition_(model, example_inputs);
        train(model, rate)

    A run that diverges is a point at infinity. One that raises is reported in the result, and the
    others go on.

    Args:
        build: Makes a fresh model from a seed.
        train: Trains a model at a learning rate and returns the figure to lower, such as a test
            loss; infinity or NaN if training diverged.
        example_inputs: One batch as ``condition_`` takes it, or a function of the seed that makes
            one.
        rates: Learning rates; by default eleven from 0.003 to 3.2 in factors of 2, which suits SGD.
        methods: By name, what is done to the model before training: None for nothing, a dict of
            options of ``condition_``, or a function of model and example inputs that changes the
            model in place. Default: as is, and ``condition_`` with its defaults. The first that is
            None is what the others are measured by.
        seeds: How many, or which.
        rows: A file to which every finished run is added. With the same file, another call goes on
            where this one was stopped, and a wider grid costs only the runs that are new. Rows know
            the rate, the method, the seed and the initial weights, not what ``train`` does: name
            another file when you change it.
        label: What the figure is, for tables and pages.
        progress: Show the runs and the time left on stderr, if it is a terminal.

    Returns:
        All runs, with a table (``print``), a page (``to_html``) and plain data (``to_dict``).

    Raises:
        ValueError: Arguments that make no sense, all of them named; rows of another comparison.
        TypeError: An argument of another type; ``build`` returned no module, or other weights for
            the same seed; a method returned another model than its own; ``train`` returned no
            number.

    Example: gradient descent on one weight, w²/2, where the best rate is 1.

        >>> import torch
        >>> def build(seed):
        ...     return torch.nn.Linear(1, 1, bias=False)
        >>> def train(model, rate):
        ...     optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        ...     for _ in range(5):
        ...         optimizer.zero_grad()
        ...         (0.5 * model.weight**2).sum().backward()
        ...         optimizer.step()
        ...     return 1 + model.weight.item() ** 2
        >>> result = compare_rates(build, train, torch.ones(1, 1), rates=[0.5, 1.0, 2.0], seeds=2)
        >>> result["as is"].best_rate, result["as is"].mean
        (1.0, 1.0)
        >>> print(result)
        Loss at each method's own best learning rate: 3 rates from 0.5 to 2, 2 seeds
        <BLANKLINE>
          method       best rate   loss    gain  decades within 1 %
          as is                1  1 ± 0       –                 0.3
          conditioned          1  1 ± 0  +0.0 %                 0.3
        <BLANKLINE>
        “conditioned” and “as is” reach the same, each at its own best rate.
    """
    check_types(build, train, label)
    grid = grid_of(rates, methods, seeds)
    record = Record(None if rows is None else Path(rows), grid)
    beginnings = Beginnings(build, example_inputs, record.weights)
    done = sum(record[point] is not None for point in grid)
    errors: set[str] = set()
    with same_random_states(), Progress(len(grid), done, sys.stderr if progress else None) as shown:
        # Rows of a model that has changed since must not pass for runs of this one, even if none is
        # missing.
        for seed in record.weights:
            beginnings.build_model(seed)
        for point in grid:
            if record[point] is None:
                shown.begin(f"{point.method.name} at rate {point.rate:.4g}, seed {point.seed}")
                run = perform(point, beginnings, train)
                record.add(point, run, beginnings.weights_of(point.seed))
                shown.end()
                if run.error is not None and run.error not in errors:
                    # at once, as a mistake that every run will meet is better mended than awaited
                    errors.add(run.error)
                    logger.warning(
                        "%s at rate %.4g, seed %d raised %s; the other runs go on",
                        run.method,
                        run.rate,
                        run.seed,
                        run.error,
                    )
    runs = [record[point] for point in grid]
    found = [run for run in runs if run is not None]
    return comparison_of(grid, found, label, record.notes)


def comparison_of(
    grid: Grid, runs: Iterable[Run], label: str, notes: tuple[str, ...] = ()
) -> RateComparison:
    """The runs of a grid, in its order, as a comparison."""
    found = tuple(runs)
    return RateComparison(
        label=label,
        rates=grid.rates,
        seeds=grid.seeds,
        curves=tuple(_curve(grid, method.name, method.how, found) for method in grid.methods),
        baseline=grid.baseline.name,
        runs=found,
        notes=notes,
    )


def _curve(grid: Grid, name: str, how: str, runs: Iterable[Run]) -> Curve:
    figures = {(run.rate, run.seed): run.figure for run in runs if run.method == name}
    by_rate = tuple(tuple(figures[rate, seed] for seed in grid.seeds) for rate in grid.rates)
    return Curve(name=name, how=how, rates=grid.rates, figures=by_rate)
