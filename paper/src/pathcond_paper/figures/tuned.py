"""What conditioning gives once everybody has tuned the learning rate: every method at its own best
one, by the test loss (no figure of the paper).

Every method trains at a grid of rates in factors of two, for a fixed number of epochs with a cosine
schedule; the grid grows until the best rate is not at its end. One seed chooses each method's rate;
fresh seeds are trained at that rate and its neighbours, and reported at the best of these three.

A search over one scale per layer (``training.searching``) is the most that rescaling whole layers
can give, and the *share* of a method is how much of that gain it has:

    share = (loss as is − loss) / (loss as is − loss searched)

Networks that are marked as held out take no part in any choice, such as that of the default.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import nn

from pathcond.criteria.criterion import Criterion, PathKernel
from pathcond.criteria.norms import BalancedNorms
from pathcond.measured.curvature import Curvature
from pathcond.measured.layers import BalancedLayers
from pathcond.networks import cifar_nv, mlp
from pathcond.rows import Job, Result, Row

from ..data import load
from ..figure import Claim, Place, Preset, Progress
from ..sweep.selection import deviation, mean, settings_of, where
from ..training.candidates import Moments, activations, between, blend, bound, by_rank, minimise
from ..training.methods import AS_IN_PAPER, Method
from ..training.networks import LanguageModel, VisionTransformer, resnet20
from ..training.optimizers import Schedule
from ..training.recipe import Recipe, Run, Task
from ..training.searching import search
from ..training.starting import Starts
from ..training.training import Curves, Data, train
from ..training.unfinished import State, Unfinished

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

CHOOSING = 0  # the seed by which rates are chosen
EXTENSIONS = 6  # of the grid, by a factor of two each
NEAR = 0.01  # above the least loss, as a share of it: what counts as near the best
GOAL = 0.8  # of the searched gain
SEARCHED = ("searched", "searched-rates")
DEFAULT = "default"  # stands for what ``find_default`` says
DRAWN = ("as-is", "paper", "kernel-full", "curvature", "norms", DEFAULT, "searched")
BY_SIZE = Curvature(weight="size")
BY_OUTPUTS = BalancedLayers(share=0.0, front=1.0)


def _by(criterion: Criterion, normalization: str) -> dict[str, Any]:
    """Arguments of ``condition_``."""
    return {"criterion": criterion, "normalization": normalization}


METHODS: dict[str, Method] = {
    "as-is": Method(title="as is"),
    "paper": Method(title="ten sweeps, as in the paper", condition=AS_IN_PAPER),
    "kernel-paper": Method(title="path kernel, exact, paper", condition=_by(PathKernel(), "paper")),
    "kernel-absorb": Method(
        title="path kernel, exact, absorb", condition=_by(PathKernel(), "absorb")
    ),
    "kernel-gain": Method(title="path kernel, exact, gain", condition=_by(PathKernel(), "gain")),
    "kernel-full": Method(title="path kernel, exact, full", condition=_by(PathKernel(), "full")),
    "keep": Method(
        title="path kernel, full, pace kept",
        condition=_by(PathKernel(), "full") | {"pace": "keep"},
    ),
    "curvature": Method(title="curvature, full", condition=_by(Curvature(), "full")),
    "curvature-by-size": Method(title="curvature by size, full", condition=_by(BY_SIZE, "full")),
    "curvature-by-rank": Method(title="curvature by rank as it stands, full", rescaling=by_rank()),
    "moments": Method(title="curvature by moments, full", condition=_by(Moments(), "full")),
    "frobenius": Method(
        title="curvature by Frobenius norms, full", condition=_by(Moments(root=True), "full")
    ),
    "norms": Method(title="balanced norms, full", condition=_by(BalancedNorms(), "full")),
    "norms-gain": Method(title="balanced norms, gain", condition=_by(BalancedNorms(), "gain")),
    "norms-by-outputs": Method(
        title="balanced norms by outputs, full", condition=_by(BY_OUTPUTS, "full")
    ),
    "activations": Method(
        title="activations of one size, full", rescaling=activations(0, by_unit=False)
    ),
    "norms-activations": Method(
        title="a quarter from norms to activations",
        rescaling=between(minimise(BalancedNorms()), activations(1, by_unit=False), 0.25),
    ),
    "outputs-activations": Method(
        title="a quarter from outputs to activations",
        rescaling=between(minimise(BY_OUTPUTS), activations(0, by_unit=False), 0.25),
    ),
    "layers-batch": Method(
        title="balanced layers, batch", condition=_by(BalancedLayers(), "batch")
    ),
    "layers-absorb": Method(
        title="balanced layers, absorb, fronts at a third",
        condition=_by(BalancedLayers(front=1 / 3), "absorb"),
    ),
    "layers-absorb-front": Method(
        title="balanced layers, absorb, fronts at norm one",
        condition=_by(BalancedLayers(front=1.0), "absorb"),
    ),
    "layers-gain": Method(title="balanced layers, gain", condition=_by(BalancedLayers(), "gain")),
    "layers": Method(
        title="balanced layers, full, fronts at a third",
        condition=_by(BalancedLayers(front=1 / 3), "full"),
    ),
    "layers-front": Method(
        title="balanced layers, full, fronts at norm one",
        condition=_by(BalancedLayers(front=1.0), "full"),
    ),
    "teleport": Method(
        title="balanced norms, again after an epoch",
        condition=_by(BalancedNorms(), "full"),
        teleports=True,
    ),
    "default-teleport": Method(
        title="the default, again after an epoch", condition={}, teleports=True
    ),
    "blend": Method(title="half curvature, half norms, full", rescaling=blend()),
    "bound": Method(title="curvature × squared norm, full", rescaling=bound(BY_SIZE)),
    "bound-kernel": Method(title="path kernel × squared norm, full", rescaling=bound(PathKernel())),
    "lsuv": Method(title="LSUV (another function)", data_dependent=True),
    "searched": Method(title="searched, one scale per layer"),
    "searched-rates": Method(title="the same as rates of parameters", as_rates=True),
}
# Without normalization layers these are "kernel-full", "norms" and "layers".
NEED_A_NORM = (
    "kernel-paper",
    "kernel-absorb",
    "kernel-gain",
    "norms-gain",
    "layers-absorb",
    "layers-absorb-front",
    "layers-gain",
    "layers-front",
    "layers-batch",
)
# Teleports move no state here, and rates of parameters are the same for plain SGD alone.
NEED_PLAIN_SGD = ("teleport", "default-teleport", "searched-rates")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A network, what it is trained on, and how.

    Attributes:
        title: For tables.
        build: Makes the network.
        dataset: Its name.
        task, optimizer, schedule, weight_decay, augment, epochs, batch: As in ``Recipe``.
        rates: The grid of learning rates.
        normed: Whether it has normalization layers.
        candidates: Of the search, in each of its rounds; 0 for none.
        held_out: Whether it is kept from every choice.
        train, test: Numbers of samples, None for all.
        at_once: How many runs are trained together; convolutions run one by one.
        bfloat16: As in ``Recipe``.
        methods: Which are tried; None for all that make a difference.
    """

    title: str
    build: Callable[[], nn.Module]
    dataset: str
    task: Task = "classify"
    optimizer: str = "sgd"
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    augment: bool = False
    epochs: int = 10
    batch: int = 128
    rates: Sequence[float]
    normed: bool = False
    candidates: int = 0
    held_out: bool = False
    train: int | None = None
    test: int | None = None
    at_once: int = 700
    bfloat16: bool = False
    methods: Sequence[str] | None = None

    def list_methods(self) -> list[str]:
        """The methods that are compared."""
        left_out = set(() if self.normed else NEED_A_NORM)
        left_out |= set() if self.candidates else set(SEARCHED)
        left_out |= set() if self.optimizer == "sgd" else set(NEED_PLAIN_SGD)
        names = METHODS if self.methods is None else self.methods
        return [name for name in names if name not in left_out]

    def recipe(self, methods: Mapping[str, Method]) -> Recipe:
        """How to train."""
        return Recipe(
            build=self.build,
            epochs=self.epochs,
            batch=self.batch,
            task=self.task,
            optimizer=self.optimizer,
            schedule=self.schedule,
            weight_decay=self.weight_decay,
            augment=self.augment,
            bfloat16=self.bfloat16,
            methods=methods,
            teleport_times=1,
        )


def _powers(lowest: int, highest: int) -> tuple[float, ...]:
    """Powers of two.

    >>> _powers(-2, 1)
    (0.25, 0.5, 1.0, 2.0)
    """
    return tuple(2.0**k for k in range(lowest, highest + 1))


SMALL = partial(mlp, (112, 16, 112), inputs=784, outputs=784)
DEEP = partial(mlp, (1000, 500, 250, 30, 250, 500, 1000), inputs=784, outputs=784)
DIGITS = partial(mlp, (9, 2, 9), inputs=64, outputs=64)
TRANSFORMERS = (
    "as-is",
    "kernel-absorb",
    "kernel-full",
    "keep",
    "curvature",
    "norms",
    "norms-by-outputs",
    "norms-activations",
    "outputs-activations",
    "layers-batch",
    "layers-absorb",
    "layers-absorb-front",
    "layers-gain",
    "layers",
    "layers-front",
    "lsuv",
)
# The published conventions have none for attention. Beside LayerNorms "paper" frees what "absorb"
# does, and "gain" what "full" does.
CONVOLUTIONS = (*TRANSFORMERS, "paper", "kernel-paper", "kernel-gain")


def _autoencoder(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return Setting(title=title, build=build, dataset="mnist", task="reconstruct", **options)


def _images(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return Setting(title=title, build=build, dataset="cifar10", augment=True, **options)


def _convolutions(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return _images(
        title,
        build,
        optimizer="momentum",
        weight_decay=5e-4,
        epochs=6,
        normed=True,
        at_once=1,
        bfloat16=True,
        methods=CONVOLUTIONS,
        **options,
    )


SETTINGS: dict[str, Setting] = {
    "ae-sgd": _autoencoder(
        "autoencoder 784-112-16, SGD", SMALL, rates=_powers(-4, 9), candidates=384
    ),
    "ae-adam": _autoencoder(
        "autoencoder 784-112-16, Adam",
        SMALL,
        optimizer="adamw",
        rates=_powers(-13, -1),
        candidates=384,
    ),
    "deep-ae-sgd": _autoencoder(
        "autoencoder 784-1000-500-250-30, SGD", DEEP, rates=_powers(-4, 9), candidates=256
    ),
    "deep-ae-momentum": _autoencoder(
        "autoencoder 784-1000-500-250-30, momentum",
        DEEP,
        optimizer="momentum",
        rates=_powers(-7, 6),
        candidates=256,
    ),
    "deep-ae-adam": _autoencoder(
        "autoencoder 784-1000-500-250-30, Adam",
        DEEP,
        optimizer="adamw",
        rates=_powers(-15, -3),
        candidates=256,
    ),
    "mlp-bn-sgd": _images(
        "MLP with BatchNorm 3 × 500, SGD",
        partial(mlp, batch_norm=True),
        rates=_powers(-10, 3),
        normed=True,
        candidates=256,
    ),
    "mlp-sgd": _images("MLP 3 × 500, SGD", mlp, rates=_powers(-10, 2), candidates=256),
    "funnel-momentum": _images(
        "MLP 1000-300-100-30, momentum",
        partial(mlp, (1000, 300, 100, 30)),
        optimizer="momentum",
        rates=_powers(-13, -1),
        candidates=256,
        held_out=True,
    ),
    "cifar-ae-adam": Setting(
        title="autoencoder 3072-512-64 on CIFAR-10, Adam",
        build=partial(mlp, (512, 64, 512), outputs=3072),
        dataset="cifar10",
        task="reconstruct",
        optimizer="adamw",
        rates=_powers(-15, -3),
        candidates=256,
        held_out=True,
    ),
    "cifar-nv": _convolutions(
        "CIFAR-NV, momentum", partial(cifar_nv, bias=True), rates=_powers(-13, -2)
    ),
    "cifar-nv-norm": _convolutions(
        "CIFAR-NV with a last BatchNorm, momentum",
        partial(cifar_nv, final_norm=True),
        rates=_powers(-11, 0),
    ),
    "resnet20": _convolutions("ResNet-20, momentum", resnet20, rates=_powers(-9, 2)),
    "vit": _images(
        "vision transformer, AdamW",
        VisionTransformer,
        optimizer="adamw",
        weight_decay=0.05,
        schedule="warm-up and cosine",
        rates=_powers(-13, -4),
        normed=True,
        methods=TRANSFORMERS,
        at_once=40,
    ),
    "language-model": Setting(
        title="language model, AdamW",
        build=LanguageModel,
        dataset="python-help",
        optimizer="adamw",
        weight_decay=0.1,
        schedule="warm-up and cosine",
        batch=32,
        epochs=10,
        rates=_powers(-13, -4),
        normed=True,
        methods=TRANSFORMERS,
        at_once=120,
        held_out=True,
    ),
}
QUICK: dict[str, Setting] = {
    "digits-ae-sgd": Setting(
        title="digits autoencoder 64-9-2, SGD",
        build=DIGITS,
        dataset="digits",
        task="reconstruct",
        epochs=20,
        batch=64,
        rates=_powers(-3, 6),
        candidates=64,
    ),
    "digits-bn-momentum": Setting(
        title="digits MLP with BatchNorm 32-8, momentum",
        build=partial(mlp, (32, 8), inputs=64, batch_norm=True),
        dataset="digits",
        optimizer="momentum",
        epochs=10,
        batch=64,
        rates=_powers(-9, 1),
        normed=True,
    ),
}
SMOKE = {
    f"smoke-{name}": replace(
        setting, epochs=2, rates=setting.rates[4:7], candidates=min(setting.candidates, 8)
    )
    for name, setting in QUICK.items()
}
BY_PRESET: dict[Preset, Mapping[str, Setting]] = {"smoke": SMOKE, "cpu": QUICK, "paper": SETTINGS}
DATASETS: dict[Preset, tuple[str, ...]] = {
    "smoke": (),
    "cpu": (),
    "paper": ("mnist", "cifar10"),
}
SEEDS: dict[Preset, int] = {"smoke": 2, "cpu": 4, "paper": 4}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """Every method with every seed; one seed more than those that are reported."""
    return [
        {"setting": name, "dataset": setting.dataset, "method": method, "seed": seed}
        for name, setting in BY_PRESET[preset].items()
        for method in setting.list_methods()
        for seed in range(seeds or SEEDS[preset])
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """The runs of one setting."""
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        groups.setdefault(job["setting"], []).append(job)
    return list(groups.values())


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Let the first seed choose the rates, unless it did in an earlier sweep, then train the others
    at them. Trainings that were finished when an earlier sweep was stopped are not made again.
    """
    name = jobs[0]["setting"]
    methods = list(dict.fromkeys(job["method"] for job in jobs))
    chosen = {
        row.job["method"]: row.result for row in where(place.rows, setting=name, seed=CHOOSING)
    }
    # whichever seeds are left
    parts = [{"figure": "tuned", "setting": name, "method": method} for method in methods]
    unfinished = Unfinished(parts, place)
    comparison = _Comparison(_setting(name), place, methods, chosen, progress, unfinished)
    comparison.choose()
    yield from comparison.results(jobs, CHOOSING)
    fresh = sorted({job["seed"] for job in jobs} - {CHOOSING})
    comparison.repeat(fresh)
    for seed in fresh:
        yield from comparison.results(jobs, seed)
    unfinished.remove()


class _Comparison:
    """Methods of one setting, each at its own rates; ``chosen`` has what the choosing seed came to,
    of methods for which it is known, ``unfinished`` the trainings of a comparison that was stopped.
    """

    def __init__(
        self,
        setting: Setting,
        place: Place,
        methods: Sequence[str],
        chosen: Mapping[str, Result],
        progress: Progress,
        unfinished: Unfinished,
    ) -> None:
        self.setting = setting
        self.methods = methods
        self.chosen = chosen
        self.progress = progress
        self.unfinished = unfinished
        before = unfinished.load() or {"curves": [], "layer_scales": None}
        self.curves = {Run(**run): Curves(**curves) for run, curves in before["curves"]}
        self.trained_before = set(self.curves)
        self.layer_scales: Sequence[float] | None = before["layer_scales"]
        dataset = load(setting.dataset, place.data)
        self.data = Data.of(dataset, place.device, train=setting.train, test=setting.test)
        known = dict(METHODS)
        if set(methods) & set(SEARCHED):
            self.layer_scales = self._search()
            unfinished.keep(self._state)
            for method in SEARCHED:
                known[method] = replace(METHODS[method], layer_scales=self.layer_scales)
        every = len(self.data.x) // setting.batch
        self.recipe = replace(setting.recipe(known), teleport_every=every)
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
        """Train fresh seeds at every method's best rate and its neighbours."""
        self._train(
            [
                (method, factor * self._best(method), seed)
                for method in self.methods
                for factor in (0.5, 1.0, 2.0)
                for seed in seeds
            ]
        )

    def results(self, jobs: Sequence[Job], seed: int) -> Iterator[tuple[Job, Result]]:
        """What the runs of one seed came to, over the learning rate, and how many of them an
        earlier sweep had finished when it was stopped.
        """
        for job in jobs:
            if job["seed"] == seed:
                runs = {
                    run: curves
                    for run, curves in self.curves.items()
                    if run.method == job["method"] and run.seed == seed
                }
                by_rate = {run.learning_rate: curves for run, curves in runs.items()}
                before = len(self.trained_before & set(runs))
                stopped = {"stopped_after": before} if before else {}
                yield job, _over_rates(dict(sorted(by_rate.items()))) | stopped

    def _best(self, method: str) -> float:
        losses = self._losses(method)
        return min(losses, key=lambda rate: losses[rate])

    def _losses(self, method: str) -> dict[float, float]:
        """Of the choosing seed by rate, as rows have them: ties come out alike."""
        if method in self.chosen:
            return _by_rate(self.chosen[method], "test_loss")
        return {
            run.learning_rate: _last_values(curves)["test_loss"]
            for run, curves in self.curves.items()
            if run.method == method and run.seed == CHOOSING
        }

    def _train(self, wanted: Sequence[tuple[str, float, int]]) -> None:
        runs = [Run(method=method, learning_rate=rate, seed=seed) for method, rate, seed in wanted]
        runs = [run for run in runs if run not in self.curves]
        for start in range(0, len(runs), self.setting.at_once):
            part = runs[start : start + self.setting.at_once]
            found = train(part, self.recipe, self.data, self.progress, self.starts)
            self.curves.update(zip(part, found, strict=True))
            self.unfinished.keep(self._state)

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


def _last_values(curves: Curves) -> dict[str, float]:
    """What a run came to after its last epoch; a loss that is not a number is infinite."""
    return {
        name: _finite(values[-1])
        for name, values in curves.to_dict().items()
        if isinstance(values, list) and name != "layer_scales"
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else math.inf


def _setting(name: str) -> Setting:
    return {**SETTINGS, **QUICK, **SMOKE}[name]


@dataclass(frozen=True)
class Tuned:
    """A method at its own best rate.

    Attributes:
        rate: The best one for the fresh seeds.
        losses, accuracies: Of the fresh seeds at that rate.
        width: Decades of rates at which the choosing seed comes near its best.
        at_edge: Whether the best rate is the first or the last that was tried.
        curve: Of the choosing seed, test loss by rate.
    """

    rate: float
    losses: list[float]
    accuracies: list[float]
    width: float
    at_edge: bool
    curve: dict[float, float]

    @property
    def loss(self) -> float:
        """Mean over the fresh seeds."""
        return mean(self.losses)


def tuned(rows: Sequence[Row], setting: str, method: str) -> Tuned | None:
    """A method of a setting, or ``DEFAULT``, at its best rate; None where rows are missing."""
    if method == DEFAULT:
        method = find_default(rows, setting)
    here = where(rows, setting=setting, method=method)
    choosing = [row.result for row in here if row.job["seed"] == CHOOSING]
    fresh = [row.result for row in here if row.job["seed"] != CHOOSING]
    if not choosing or not fresh:
        return None
    curve = _by_rate(choosing[0], "test_loss")
    losses = [_by_rate(result, "test_loss") for result in fresh]
    rate = min(losses[0], key=lambda rate: mean([loss[rate] for loss in losses]))
    near = [tried for tried in curve if curve[tried] <= min(curve.values()) * (1 + NEAR)]
    return Tuned(
        rate=rate,
        losses=[loss[rate] for loss in losses],
        accuracies=[
            _by_rate(result, "test_accuracy")[rate] for result in fresh if "test_accuracy" in result
        ],
        width=math.log10(max(near) / min(near)),
        at_edge=rate in (min(curve), max(curve)),
        curve=curve,
    )


def _by_rate(result: Result, name: str) -> dict[float, float]:
    return dict(zip(result["learning_rate"], result[name], strict=True))


def find_default(rows: Sequence[Row], setting: str) -> str:
    """Under which name the library's default was trained in a setting.

    Without BatchNorms "batch" frees what "absorb" does, and without norms what "full" does; such
    networks were trained under those names.
    """
    if not _setting(setting).normed:
        return "layers"
    return "layers-batch" if tuned(rows, setting, "layers-batch") else "layers-absorb"


def share(rows: Sequence[Row], setting: str, method: str) -> float | None:
    """How much of the searched gain a method has; None where one of the three is missing, or the
    search found nothing.
    """
    found = [tuned(rows, setting, name) for name in ("as-is", method, "searched")]
    losses = [one.loss for one in found if one is not None]
    if len(losses) < 3:
        return None
    as_is, ours, best = losses
    return (as_is - ours) / (as_is - best) if best < as_is else None


def table(rows: Sequence[Row]) -> str:
    """A block per setting: test loss and accuracy at the own best rate, the rate, the width, and
    the share of the searched gain.
    """
    lines = ["Every method at its own best learning rate; mean ± deviation over fresh seeds"]
    for name in _list_reported(rows, METHODS):
        setting = _setting(name)
        held = " (held out)" if setting.held_out else ""
        lines += ["", f"{setting.title}{held}"]
        lines.append(
            f"  {'':<38}{'test loss':>18}{'accuracy %':>16}{'rate':>10}{'decades':>9}{'share':>8}"
        )
        for method in METHODS:
            found = tuned(rows, name, method)
            if found is None:
                continue
            gained = share(rows, name, method)
            accuracy = (
                f"{100 * mean(found.accuracies):.1f} ± {100 * deviation(found.accuracies):.1f}"
                if found.accuracies
                else ""
            )
            rate = f"{found.rate:.3g}{'*' if found.at_edge else ''}"
            lines.append(
                f"  {METHODS[method].title:<38}"
                f"{f'{found.loss:.4f} ± {deviation(found.losses):.4f}':>18}{accuracy:>16}"
                f"{rate:>10}{found.width:>9.1f}"
                f"{'' if gained is None else f'{gained:.0%}':>8}"
            )
    return "\n".join([*lines, "", "* at an end of the grid"])


def _list_reported(rows: Sequence[Row], methods: Iterable[str]) -> list[str]:
    """The settings in which fresh seeds of one of these methods are there."""
    return [
        name
        for name in settings_of(rows, "setting")
        if any(tuned(rows, name, method) for method in methods)
    ]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Test loss of the choosing seed over the learning rate, a panel per setting; the rate at which
    a method is reported is marked. The table has those that are not drawn.
    """
    from ..style import CYCLE, legend_below, panels

    names = _list_reported(rows, DRAWN)
    columns = min(3, len(names)) or 1
    drawing, axes = panels(max(1, -(-len(names) // columns)), columns)
    for panel, name in zip(axes, names, strict=False):
        points: list[tuple[float, float]] = []
        for colour, method in zip(CYCLE, DRAWN, strict=True):
            found = tuned(rows, name, method)
            if found is None:
                continue
            finite = {rate: loss for rate, loss in found.curve.items() if math.isfinite(loss)}
            title = "the default: balanced layers" if method == DEFAULT else METHODS[method].title
            dash = "--" if method in ("as-is", "searched") else "-"
            panel.plot([*finite], [*finite.values()], dash, color=colour, label=title)
            panel.plot(found.rate, found.curve[found.rate], "o", color=colour)
            points += finite.items()
        panel.set(xscale="log", xlabel="learning rate", ylabel="test loss")
        if as_is := tuned(rows, name, "as-is"):
            # Where much is gained, the whole gain; where little is, enough to see it.
            top = as_is.curve[as_is.rate]
            room = max(0.1 * top, 1.2 * (top - min(loss for _, loss in points)))
            highest = top + 2 * room
            shown = [rate for rate, loss in points if loss < highest]
            panel.set_ylim(top - 1.2 * room, highest)
            panel.set_xlim(min(shown) / 2, max(shown) * 2)
        panel.xaxis.set_minor_formatter("")  # they would overlap where few decades are shown
        panel.set_title(_setting(name).title, fontsize=8)
    for panel in axes[len(names) :]:
        panel.set_visible(False)
    legend_below(drawing, axes)
    return {"tuned": drawing}


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Goals of our own: the paper compares at fixed rates."""
    return [_mean_share(rows), _never_worse(rows), _never_slower(rows), _control(rows)]


def _mean_share(rows: Sequence[Row]) -> Claim:
    text = f"Goal: at tuned rates the default has {GOAL:.0%} of the gain that a search finds"
    compared = [name for name in METHODS if name not in (*SEARCHED, "as-is", "lsuv")]
    found = {method: _shares(rows, method) for method in (*compared, DEFAULT)}
    most = max(map(len, found.values()))
    if not most:
        return Claim.not_run(text)
    # Means over other settings could not be compared.
    means = {method: mean([*each.values()]) for method, each in found.items() if len(each) == most}
    default = means.pop(DEFAULT, 0.0)
    parts = {
        words: [share for name, share in found[DEFAULT].items() if _setting(name).held_out is held]
        for held, words in ((False, "where choices were made"), (True, "held out"))
    }
    return Claim.judge(
        text,
        default >= GOAL,
        f"{default:.0%}, mean over {most} settings ("
        + ", ".join(f"{mean(part):.0%} {words}" for words, part in parts.items() if part)
        + ").",
        "Others: "
        + ", ".join(
            f"{METHODS[method].title} {means[method]:.0%}"
            for method in sorted(means, key=lambda method: -means[method])
        )
        + ".",
    )


def _shares(rows: Sequence[Row], method: str) -> dict[str, float]:
    """How much of the searched gain a method has, by setting, where it is known."""
    found = {name: share(rows, name, method) for name in settings_of(rows, "setting")}
    return {name: one for name, one in found.items() if one is not None}


def _never_worse(rows: Sequence[Row]) -> Claim:
    text = (
        "Goal: at tuned rates the default is nowhere worse than the network as it is, by more than "
        "the seeds differ"
    )
    gains = {}
    worse = False
    for name in settings_of(rows, "setting"):
        as_is = tuned(rows, name, "as-is")
        ours = tuned(rows, name, DEFAULT)
        if as_is is not None and ours is not None:
            gains[_setting(name).title] = 1 - ours.loss / as_is.loss
            noise = math.hypot(deviation(as_is.losses), deviation(ours.losses))
            worse |= ours.loss > as_is.loss + noise
    if not gains:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        not worse,
        f"Test loss lower by {min(gains.values()):.1%} to {max(gains.values()):.1%} in "
        f"{len(gains)} settings.",
        ", ".join(
            f"{gain:.1%} ({title})"
            for title, gain in sorted(gains.items(), key=lambda pair: pair[1])
        )
        + ".",
    )


def _never_slower(rows: Sequence[Row]) -> Claim:
    text = (
        "Goal: at equal rates, up to half the best one of the network as it is, the default has no "
        f"greater loss (by more than {NEAR:.0%})"
    )
    found = {
        _setting(name).title: ratios
        for name in settings_of(rows, "setting")
        if (ratios := at_equal_rates(rows, name, DEFAULT))
    }
    if not found:
        return Claim.not_run(text)
    slower = {title: max(ratios) for title, ratios in found.items() if max(ratios) > 1 + NEAR}
    told = [ratio for ratios in found.values() for ratio in ratios]
    above = ", ".join(f"{title} up to {ratio:.2f}" for title, ratio in slower.items())
    return Claim.judge(
        text,
        not slower,
        f"{min(told):.2f} to {max(told):.2f} times the loss of the choosing seed"
        f"{'; above 1: ' + above if slower else ''}.",
    )


def at_equal_rates(
    rows: Sequence[Row], setting: str, method: str, up_to: float = 0.5
) -> list[float]:
    """A method's loss over that of the network as it is, of the choosing seed, rate by rate: up to
    a multiple of the best rate of the network as it is. Empty where rows are missing.
    """
    ours = tuned(rows, setting, method)
    as_is = tuned(rows, setting, "as-is")
    if ours is None or as_is is None:
        return []
    best = min(as_is.curve, key=lambda rate: as_is.curve[rate])
    rates = [rate for rate in as_is.curve if rate <= up_to * best and rate in ours.curve]
    return [ours.curve[rate] / as_is.curve[rate] for rate in rates]


def _control(rows: Sequence[Row]) -> Claim:
    """Both are the same steps but for rounding, which large rates let grow."""
    text = (
        "Control: rates of parameters in place of the searched scales give the same with plain "
        "SGD, at rates up to half the best one"
    )
    apart = {}
    at_best = []
    for name in settings_of(rows, "setting"):
        scales, rates = (tuned(rows, name, method) for method in SEARCHED)
        if scales is None or rates is None:
            continue
        small = [rate for rate in scales.curve if rate <= scales.rate / 2 and rate in rates.curve]
        if not small:
            continue
        apart[_setting(name).title] = max(
            abs(rates.curve[rate] / scales.curve[rate] - 1) for rate in small
        )
        at_best.append(f"{scales.loss:.4f} and {rates.loss:.4f}")
    if not apart:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        max(apart.values()) < NEAR,
        f"Test losses of the choosing seed differ by at most {max(apart.values()):.1%}.",
        "; ".join(
            f"{title}: {difference:.2%}, at its own best rate {losses}"
            for (title, difference), losses in zip(apart.items(), at_best, strict=True)
        )
        + ".",
    )
