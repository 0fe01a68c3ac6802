"""Methods of one setting trained at their own rates: on a grid that grows until its best rate is
not at an end, then with fresh seeds around that rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pathcond.rows import Job, Result

from ..data import load
from ..figure import Place, Progress
from ..training.recipe import Run
from ..training.searching import search
from ..training.starting import Starts
from ..training.training import Curves, Data, train
from ..training.unfinished import State, Unfinished
from .settings import METHODS, SEARCHED, Setting

CHOOSING = 0  # the seed by which rates are chosen
EXTENSIONS = 6  # of the grid, by a factor of two each
NEAR = 0.01  # above the least loss, as a share of it: what counts as near the best


class Comparison:
    """Methods of one setting, each at its own rates; ``known`` has what came of earlier sweeps, by
    method and seed, ``unfinished`` the trainings of one that was stopped.
    """

    def __init__(
        self,
        setting: Setting,
        place: Place,
        methods: Sequence[str],
        known: Mapping[tuple[str, int], Result],
        progress: Progress,
        unfinished: Unfinished,
    ) -> None:
        self.setting = setting
        self.methods = methods
        self.known = known
        self.chosen = {method: found for (method, seed), found in known.items() if seed == CHOOSING}
        self.progress = progress
        self.unfinished = unfinished
        before = unfinished.load() or {"curves": [], "layer_scales": None}
        self.curves = {Run(**run): Curves(**curves) for run, curves in before["curves"]}
        self.trained_before = set(self.curves)
        self.layer_scales: Sequence[float] | None = before["layer_scales"]
        dataset = load(setting.dataset, place.data)
        self.data = Data.of(dataset, place.device, train=setting.train, test=setting.test)
        tried = dict(METHODS)
        if set(methods) & set(SEARCHED):
            self.layer_scales = self._search()
            unfinished.keep(self._state)
            for method in SEARCHED:
                tried[method] = replace(METHODS[method], layer_scales=self.layer_scales)
        every = len(self.data.x) // setting.batch
        self.recipe = replace(setting.recipe(tried), teleport_every=every)
        self.starts = Starts(self.recipe, self.data.x[: setting.batch])

    def _search(self) -> Sequence[float]:
        """The best scales of a search, or those that an earlier one found."""
        if self.layer_scales is not None:
            return self.layer_scales
        if "searched" in self.chosen:
            found: Sequence[float] = self.chosen["searched"]["layer_scales"]
            return found
        setting = self.setting
        recipe = self.setting.recipe(METHODS)
        return search(
            recipe, self.data, setting.rates, setting.candidates, self.progress
        ).log_scales

    def choose(self) -> None:
        """Train the choosing seed on the grid, and on more rates where one that is as good as the
        best is at an end: units that died at every rate of the grid make it flat.
        """
        rates = {
            method: list(self.setting.rates) for method in self.methods if method not in self.chosen
        }
        for _ in range(1 + EXTENSIONS):
            self._train([(method, rate, CHOOSING) for method in rates for rate in rates[method]])
            for method, grid in rates.items():
                losses = self._losses(method)
                near = [rate for rate in grid if losses[rate] <= min(losses.values()) * (1 + NEAR)]
                if min(near) == min(grid):
                    grid.append(min(grid) / 2)
                if max(near) == max(grid):
                    grid.append(max(grid) * 2)

    def repeat(self, seeds: Sequence[int]) -> None:
        """Train fresh seeds at every method's best rate and its neighbours, and at further rates
        while the best one for them is at an end.
        """
        if not seeds:
            return
        windows = {method: self._window(method, seeds) for method in self.methods}
        for _ in range(1 + EXTENSIONS):
            self._train(
                [
                    (method, rate, seed)
                    for method, window in windows.items()
                    for rate in window
                    for seed in seeds
                ]
            )
            for method, window in windows.items():
                results = [self._result(method, seed) for seed in seeds]
                further = beyond(results)
                window.extend([further] if further else [])

    def _window(self, method: str, seeds: Sequence[int]) -> list[float]:
        """The rates of fresh seeds to begin with: those that an earlier sweep trained, or the best
        one of the choosing seed and its neighbours.
        """
        before = [self.known[method, seed] for seed in seeds if (method, seed) in self.known]
        if before:
            return sorted(set.union(*(set(result["learning_rate"]) for result in before)))
        return [factor * self._best(method) for factor in (0.5, 1.0, 2.0)]

    def results(self, jobs: Sequence[Job], seed: int) -> Iterator[tuple[Job, Result]]:
        """What the runs of one seed came to, over the learning rate, and how many of them an
        earlier sweep had finished when it was stopped.
        """
        for job in jobs:
            if job["seed"] == seed:
                runs = self._runs(job["method"], seed)
                before = len(self.trained_before & set(runs))
                stopped = {"stopped_after": before} if before else {}
                yield job, self._result(job["method"], seed) | stopped

    def _runs(self, method: str, seed: int) -> dict[Run, Curves]:
        return {
            run: curves
            for run, curves in self.curves.items()
            if run.method == method and run.seed == seed
        }

    def _result(self, method: str, seed: int) -> Result:
        """All that is known of a method with a seed, over the learning rate."""
        runs = self._runs(method, seed)
        found = [self.known[method, seed]] if (method, seed) in self.known else []
        if runs:
            found.append(_over_rates({run.learning_rate: curves for run, curves in runs.items()}))
        return _joined(found)

    def _best(self, method: str) -> float:
        losses = self._losses(method)
        return min(losses, key=lambda rate: losses[rate])

    def _losses(self, method: str) -> dict[float, float]:
        """Of the choosing seed by rate, as rows have them: ties come out alike."""
        if method in self.chosen:
            return by_rate(self.chosen[method], "test_loss")
        return {
            run.learning_rate: _last_values(curves)["test_loss"]
            for run, curves in self.curves.items()
            if run.method == method and run.seed == CHOOSING
        }

    def _train(self, wanted: Sequence[tuple[str, float, int]]) -> None:
        runs = [Run(method=method, learning_rate=rate, seed=seed) for method, rate, seed in wanted]
        runs = [run for run in runs if run not in self.curves and not self._is_known(run)]
        for start in range(0, len(runs), self.setting.at_once):
            part = runs[start : start + self.setting.at_once]
            found = train(part, self.recipe, self.data, self.progress, self.starts)
            self.curves.update(zip(part, found, strict=True))
            self.unfinished.keep(self._state)

    def _is_known(self, run: Run) -> bool:
        found = self.known.get((run.method, run.seed))
        return found is not None and run.learning_rate in found["learning_rate"]

    def _state(self) -> State:
        return {
            "curves": [(vars(run), vars(curves)) for run, curves in self.curves.items()],
            "layer_scales": self.layer_scales,
        }


def _over_rates(runs: Mapping[float, Curves]) -> Result:
    """The ends of several runs, by learning rate."""
    ends = [_last_values(curves) for curves in runs.values()]
    told = {"max_log_scale", "layer_scales"}
    first = next(iter(runs.values())).to_dict()
    return {
        "learning_rate": list(runs),
        **{name: [end[name] for end in ends] for name in ends[0]},
        **{name: value for name, value in first.items() if name in told},
    }


def _joined(results: Sequence[Result]) -> Result:
    """Results at several rates as one, in the order of the rates.

    >>> _joined(
    ...     [{"learning_rate": [2.0], "loss": [0.5]}, {"learning_rate": [1.0], "loss": [0.4]}]
    ... )
    {'learning_rate': [1.0, 2.0], 'loss': [0.4, 0.5]}
    """
    rates = [rate for result in results for rate in result["learning_rate"]]
    order = sorted(range(len(rates)), key=lambda place: rates[place])
    by_rate = [
        key
        for key, values in results[0].items()
        if key != "layer_scales" and isinstance(values, list)
    ]
    joined = {
        key: [values[place] for place in order]
        for key in by_rate
        for values in [[value for result in results for value in result[key]]]
    }
    return results[0] | joined


def beyond(results: Sequence[Result]) -> float | None:
    """The next rate to try, where the best of some seeds is at an end of those that all of them
    have; None where it is not, or enough were tried.

    >>> beyond([{"learning_rate": [1.0, 2.0, 4.0], "test_loss": [0.3, 0.4, 0.5]}])
    0.5
    """
    losses = [by_rate(result, "test_loss") for result in results]
    rates = sorted(set.intersection(*(set(loss) for loss in losses)))
    best = min(rates, key=lambda rate: sum(loss[rate] for loss in losses))
    if len(rates) >= 3 + EXTENSIONS or best not in (rates[0], rates[-1]):
        return None
    return best / 2 if best == rates[0] else best * 2


def _last_values(curves: Curves) -> dict[str, float]:
    """What a run came to after its last epoch; a loss that is not a number is infinite."""
    return {
        name: _finite(values[-1])
        for name, values in curves.to_dict().items()
        if isinstance(values, list) and name != "layer_scales"
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def by_rate(result: Result, name: str) -> dict[float, float]:
    """What a row has of one measure, by learning rate."""
    return dict(zip(result["learning_rate"], result[name], strict=True))
