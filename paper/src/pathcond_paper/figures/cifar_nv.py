"""The fully convolutional network CIFAR-NV on CIFAR-10: training and test curves, four learning
rates (``fig:cifar10_conv``, ``fig:generalize_all_lrs``, ``sec:generalize``).

The network that the paper's text describes is not the one that the authors' program trains. Both
are here:

    as published   convolutions with biases, nothing behind the classifier; 50,000 images
    as described   no biases, a BatchNorm behind the classifier; 40,000 images train, and the 10,000
                   left out are not used, for nothing is tuned

Test accuracy is on the official test set; "best" is the greatest over the epochs, as in the paper.
Of the published network training accuracy is taken after the epoch and in eval mode, as its authors
do; of the other over the epoch's steps. On a GPU activations are bfloat16, weights and updates
float32; what that changes is measured by runs of the published network in float32 alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from pathcond.networks import cifar_nv
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..published import SINCE
from ..sweep.selection import match_runs, mean, seeds_at_rates, seeds_of, settings_of, spread, where
from ..training.methods import AT_OTHER_RATES, METHODS, OURS, RATE, tell_coinciding, tell_each
from ..training.training import Settings, epochs_to, train_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

LONGER = {1e-4: 500 / 128}  # the smallest learning rate is given more epochs
OTHER_RATES = (1e-2, 5e-4, 1e-4)
CHANNELS = {"cifar10": 3, "digits": 1}
NEAR_80 = 78.0  # %, of best test accuracy
LEVELS = (0.9, 0.95, 0.98, 0.99, 0.999)  # of training accuracy at which runs are compared
NEAR_OPTIMAL = 0.99  # the one that decides, as with the MLPs
ABOUT_20 = 15  # epochs
SMOOTHING = 0.2  # weight of a new epoch in the curves
COINCIDE = 0.02  # share by which mean losses of curves that coincide may differ
CHANGED = SINCE
DATASETS: dict[Preset, tuple[str, ...]] = {
    "smoke": ("digits",),
    "cpu": ("cifar10",),
    "paper": ("cifar10",),
}


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One of the networks, and how it is trained.

    Attributes:
        name: For titles and claims.
        final_norm, bias: As ``cifar_nv`` has them.
        train: How many images train; None for all.
        accuracy: Which of a run's curves is its training accuracy.
        float32: True for activations in float32 on a GPU too.
    """

    name: str
    final_norm: bool
    bias: bool
    train: int | None
    accuracy: str
    float32: bool = False

    def keys(self) -> Job:
        """What its jobs have in common; those in float32 alone say so."""
        return {"final_norm": self.final_norm, "bias": self.bias} | (
            {"float32": True} if self.float32 else {}
        )

    def select(self, rows: Sequence[Row]) -> list[Row]:
        return where(rows, **({"float32": None} | self.keys()))


PUBLISHED = Variant(
    name="as published", final_norm=False, bias=True, train=None, accuracy="fitted_accuracy"
)
DESCRIBED = Variant(
    name="as described", final_norm=True, bias=False, train=40_000, accuracy="train_accuracy"
)
VARIANTS = (PUBLISHED, DESCRIBED)
PRECISE = replace(PUBLISHED, name="as published, in float32", float32=True)
IN_FLOAT32 = ("baseline", "paper")  # with one seed

PRESETS: dict[Preset, tuple[Settings, int, int]] = {  # with width and number of seeds
    "smoke": (
        Settings(dataset="digits", epochs=2, batch=32, teleport_every=5, train=128, test=64),
        8,
        1,
    ),
    "cpu": (
        Settings(dataset="cifar10", epochs=10, batch=32, teleport_every=50, train=1000, test=500),
        16,
        1,
    ),
    "paper": (Settings(dataset="cifar10", epochs=128), 128, 3),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """All methods at the paper's learning rate, three at the others; seed by seed, the published
    network and the three methods first.
    """
    settings, width, repetitions = PRESETS[preset]
    others = [method for method in METHODS if method not in AT_OTHER_RATES]
    plan: list[tuple[float, Variant, Sequence[str], int]] = [
        (rate, variant, methods, seeds or repetitions)
        for rate, methods in (
            (RATE, AT_OTHER_RATES),
            (RATE, others),
            *((rate, AT_OTHER_RATES) for rate in OTHER_RATES[:: 2 if preset == "smoke" else 1]),
        )
        for variant in VARIANTS
    ]
    if preset == "paper":
        plan.append((RATE, PRECISE, IN_FLOAT32, 1))
    return [
        asdict(
            replace(
                settings,
                epochs=round(settings.epochs * LONGER.get(rate, 1)),
                train=settings.train or variant.train,
            )
        )
        | variant.keys()
        | {"width": width, "learning_rate": rate, "method": method, "seed": seed}
        for rate, variant, methods, repeated in plan
        for seed in range(repeated)
        for method in methods
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """One by one: a network of convolutions fills a GPU by itself."""
    return [[job] for job in jobs]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Train one."""
    job = jobs[0]
    build = partial(
        cifar_nv,
        inputs=CHANNELS[job["dataset"]],
        width=job["width"],
        final_norm=job["final_norm"],
        bias=job["bias"],
    )
    fitted = _variant_of(job).accuracy == "fitted_accuracy"
    bfloat16 = not job.get("float32")
    yield from train_jobs(
        jobs, build, place, progress, bfloat16=bfloat16, compiled=True, fitted=fitted
    )


def _variant_of(job: Job) -> Variant:
    keys = job["final_norm"], job["bias"]
    return next(variant for variant in VARIANTS if (variant.final_norm, variant.bias) == keys)


def smooth(values: Sequence[float]) -> list[float]:
    """Exponential moving average, as in the paper's figure.

    >>> smooth([1.0, 0.0])
    [1.0, 0.8]
    """
    found: list[float] = []
    for value in values:
        found.append(value if not found else SMOOTHING * value + (1 - SMOOTHING) * found[-1])
    return found


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Loss, training and test accuracy over the epochs, one drawing per network and learning
    rate.
    """
    rates = sorted(settings_of(rows, "learning_rate"), key=lambda rate: (rate != RATE, rate))
    drawings = {}
    stems = {
        PUBLISHED: "cifar-nv",
        DESCRIBED: "cifar-nv-described",
        PRECISE: "cifar-nv-float32",
    }
    for variant, stem in stems.items():
        for rate in rates:
            found = where(variant.select(rows), learning_rate=rate)
            if found:
                name = stem if rate == RATE else f"{stem}-{rate:g}"
                drawings[name] = _drawing(found, variant)
    return drawings


def _drawing(rows: Sequence[Row], variant: Variant) -> Drawing:
    from ..style import band, legend_below, method_style, panels

    drawing, axes = panels(1, 3)
    for panel, key, title in zip(
        axes,
        ("train_loss", variant.accuracy, "test_accuracy"),
        ("training loss", "training accuracy, %", "test accuracy, %"),
        strict=True,
    ):
        factor = 100 if key.endswith("accuracy") else 1
        for method in METHODS:
            found = where(rows, method=method)
            if found:
                curves = [smooth([factor * value for value in row.result[key]]) for row in found]
                band(panel, range(1, len(curves[0]) + 1), curves, **method_style(method))
        panel.set(xlabel="epoch", ylabel=title)
    rate = rows[0].job["learning_rate"]
    axes[0].set_title(f"{variant.name}, learning rate {rate:g}", loc="left")
    legend_below(drawing, axes)
    label = "fig:cifar10_conv" if rate == RATE else "fig:generalize_all_lrs"
    losses = {
        method: [mean([mean(row.result["train_loss"]) for row in found])]
        for method in METHODS
        if (found := where(rows, method=method))
    }
    bands = "bands are deviations over seeds" if len(settings_of(rows, "seed")) > 1 else "one seed"
    drawing.set_label(
        f"{label}, CIFAR-NV {variant.name}, learning rate {rate:g}: training loss, training and "
        f"test accuracy, smoothed; {bands}." + tell_coinciding(losses, COINCIDE)
    )
    return drawing


def best(rows: Sequence[Row]) -> list[float]:
    """Best test accuracy of every run, in percent."""
    return [100 * max(row.result["test_accuracy"]) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Best and last test accuracy, and epochs to 99 % training accuracy, by network, learning rate
    and method.
    """
    head = f"{'':<36}{'seeds':>6}{'best test, %':>18}{'last test, %':>18}{'to 99 % train':>20}"
    lines = [head]
    for variant in (*VARIANTS, PRECISE):
        there = variant.select(rows)
        for rate in settings_of(there, "learning_rate"):
            lines += ["", f"{variant.name}, learning rate {rate:g}"]
            for method in METHODS:
                found = where(there, learning_rate=rate, method=method)
                if found:
                    lines.append(_line(METHODS[method].title, found, variant))
    return "\n".join(lines)


def _line(title: str, rows: Sequence[Row], variant: Variant) -> str:
    last = spread([100 * row.result["test_accuracy"][-1] for row in rows])
    reached = spread([epochs_to(0.99, row.result[variant.accuracy]) for row in rows])
    return f"  {title:<34}{len(rows):>6}{spread(best(rows)):>18}{last:>18}{reached:>20}"


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:experiments, sec:generalize and sec:add_generalize say, of both networks, the
    published one first.
    """
    return [
        claim
        for variant in VARIANTS
        for there in [variant.select(rows)]
        for here in [where(there, learning_rate=RATE)]
        for in_float32 in [PRECISE.select(rows) if variant is PUBLISHED else []]
        for claim in (
            _better(here, there, variant, in_float32),
            _earlier(here, variant),
            _generalizes(here, variant),
            _rates(there, variant),
            _converges(there, variant),
        )
    ]


def _gain(rows: Sequence[Row], method: str) -> float:
    """Points of best test accuracy above the baseline, over the seeds that both have; NaN without
    any.
    """
    pairs = match_runs(rows, "baseline", method)
    return mean(
        [ours - baseline for baseline, ours in ((*best([a]), *best([b])) for a, b in pairs)]
    )


def _better(
    rows: Sequence[Row], at_all_rates: Sequence[Row], variant: Variant, in_float32: Sequence[Row]
) -> Claim:
    text = (
        f"CIFAR-NV {variant.name}: PathCond reaches 80 % best test accuracy, baseline and ENorm "
        "77 % (sec:generalize)"
    )
    pairs = match_runs(rows, "baseline", "paper")
    if not pairs:
        return Claim.not_run(text)
    paper, baseline = (mean(best(where(rows, method=name))) for name in ("paper", "baseline"))

    def accuracies(rows: Sequence[Row], methods: Iterable[str]) -> str:
        def accuracy(method: str) -> str:
            found = where(rows, method=method)
            return f"{spread(best(found))} % ({seeds_of([found])})" if found else ""

        return tell_each(methods, accuracy)

    precision = (
        f"in float32 {accuracies(in_float32, METHODS)}" if in_float32 else "none was in float32"
    )
    details = [
        f"{accuracies(rows, METHODS)}.",
        f"Runs on a GPU have activations in bfloat16; {precision}.",
        _count_dead(at_all_rates, variant),
        _count_jumps(at_all_rates),
    ]
    return Claim.judge(
        text,
        _gain(rows, "paper") >= 2 and paper >= NEAR_80,
        f"{paper:.1f} % as in the paper, {baseline:.1f} % the baseline ({seeds_of(pairs)}).",
        " ".join(filter(None, details)),
        bound=f"it reaches {NEAR_80:g} %, and the baseline 2 points less",
        ours=accuracies(rows, OURS),
    )


def _count_dead(rows: Sequence[Row], variant: Variant) -> str:
    """In how many runs a class may have died: one of ten that is never answered leaves 90 % at
    most. No class dies behind a norm.
    """
    if variant.final_norm:
        return ""
    below = sum(max(row.result[variant.accuracy]) <= 0.9 for row in rows)
    if below:
        return f"{below} of {len(rows)} runs stay at 90 % in training: a class may have died."
    return f"No class died: all {len(rows)} runs, of all learning rates, pass 90 % in training."


def _count_jumps(rows: Sequence[Row]) -> str:
    """How many runs end while the loss has jumped up, as it does for an epoch now and then: their
    last accuracy is one of those, not a level that they stay at.
    """

    def jumps(losses: Sequence[float]) -> list[int]:
        return [
            epoch
            for epoch, (before, after) in enumerate(pairwise(losses), start=2)
            if after > 1.5 * before + 0.005
        ]

    found = [jumps(row.result["train_loss"]) for row in rows]
    at_end = sum(
        bool(epochs) and epochs[-1] == len(row.result["train_loss"])
        for row, epochs in zip(rows, found, strict=True)
    )
    if not any(found):
        return ""
    ends = f"; {at_end} end in such an epoch, and their last accuracy is low by it" * bool(at_end)
    return (
        f"In {sum(map(bool, found))} of {len(rows)} runs the training loss jumps up in single "
        f"epochs and returns{ends}."
    )


def _earlier(rows: Sequence[Row], variant: Variant) -> Claim:
    """How much sooner the smoothed training accuracy is near its best."""
    text = (
        f"CIFAR-NV {variant.name}: near-optimal performance about 20 epochs earlier than baseline "
        "methods (sec:generalize)"
    )
    others = {
        other: found
        for other in ("baseline", "enorm", "enorm-epoch")
        if (found := match_runs(rows, other, "paper"))
    }
    if "baseline" not in others:
        return Claim.not_run(text)
    leads = {
        level: {other: _lead(found, level, variant)[0] for other, found in others.items()}
        for level in LEVELS
    }
    least = min(others, key=lambda other: leads[NEAR_OPTIMAL][other])
    lead, seeds = _lead(others[least], NEAR_OPTIMAL, variant)

    def ahead(method: str) -> str:
        found = match_runs(rows, "baseline", method)
        if not found:
            return ""
        lead, seeds = _lead(found, NEAR_OPTIMAL, variant)
        return f"{_signed(lead)} ({seeds})"

    told = tell_each(OURS, ahead)
    by_level = "; ".join(
        f"{100 * level:g} % {', '.join(_signed(lead) for lead in by_other.values())}"
        for level, by_other in leads.items()
    )
    titles = "; ".join(METHODS[other].title for other in others)
    return Claim.judge(
        text,
        lead >= ABOUT_20,
        f"{_signed(lead)} epochs sooner than {METHODS[least].title}, at {100 * NEAR_OPTIMAL:g} % "
        f"training accuracy ({seeds}).",
        f"Epochs sooner than {titles}, at a training accuracy of {by_level}.",
        bound=f"it is at least {ABOUT_20} epochs sooner than each, at {100 * NEAR_OPTIMAL:g} %",
        ours=f"{told} epochs sooner than the baseline." if told else "",
    )


def _signed(lead: float) -> str:
    return f"{lead:+.1f}" if math.isfinite(lead) else "never there"


def _generalizes(rows: Sequence[Row], variant: Variant) -> Claim:
    text = (
        f"CIFAR-NV {variant.name}: faster without compromising generalization (sec:experiments, "
        "fig:cifar10_conv)"
    )
    pairs = match_runs(rows, "baseline", "paper")
    if not pairs:
        return Claim.not_run(text)
    gain = _gain(rows, "paper")
    ours = tell_each(
        OURS,
        lambda method: (
            f"{_gain(rows, method):+.1f}" if match_runs(rows, "baseline", method) else ""
        ),
    )
    return Claim.judge(
        text,
        gain >= -0.5,
        f"{gain:+.1f} points of best test accuracy beside the baseline ({seeds_of(pairs)}).",
        bound="it loses at most 0.5 points; the line above judges how much faster it is",
        ours=f"{ours}." if ours else "",
    )


def _lead(pairs: Sequence[Sequence[Row]], level: float, variant: Variant) -> tuple[float, str]:
    """By how many epochs the second of each pair is sooner at a level of smoothed training
    accuracy, and over which seeds.

    One that never gets there has the end of training; -∞ if it is the second.
    """
    first, second = (
        [epochs_to(level, smooth(row.result[variant.accuracy])) for row in runs]
        for runs in zip(*pairs, strict=True)
    )
    longest = len(pairs[0][0].result[variant.accuracy])
    return mean([min(epoch, longest) for epoch in first]) - mean(second), seeds_of(pairs)


def _gains(rows: Sequence[Row], method: str) -> dict[float, float]:
    """Points of best test accuracy above the baseline by learning rate."""
    by_rate = {rate: where(rows, learning_rate=rate) for rate in settings_of(rows, "learning_rate")}
    return {
        rate: _gain(found, method)
        for rate, found in by_rate.items()
        if match_runs(found, "baseline", method)
    }


def _told(rows: Sequence[Row], method: str) -> str:
    """The same as text."""
    return ", ".join(f"{gain:+.1f} at {rate:g}" for rate, gain in _gains(rows, method).items())


def _told_seeds(rows: Sequence[Row]) -> str:
    """Over how many seeds each method is compared with the baseline, by learning rate."""

    def seeds(method: str) -> str:
        found = seeds_at_rates(rows, "baseline", method)
        return f"has {found}" if found else ""

    return f"{tell_each(('paper', *OURS), seeds)}."


def _rates(rows: Sequence[Row], variant: Variant) -> Claim:
    text = (
        f"CIFAR-NV {variant.name}: its advantage is greatest at small to moderate learning rates "
        "(sec:add_generalize, fig:generalize_all_lrs)"
    )
    gains = _gains(rows, "paper")
    low, high = (
        [gain for rate, gain in gains.items() if (rate <= RATE) == is_low]
        for is_low in (True, False)
    )
    if not any(rate < RATE for rate in gains) or not high:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        max(low) > max(0, *high),
        f"{_told(rows, 'paper')} points of best test accuracy above the baseline.",
        _told_seeds(rows),
        bound=f"it is greater at a rate up to {RATE:g} than at every larger one",
        ours=tell_each(OURS, lambda method: _told(rows, method)),
    )


def _converges(rows: Sequence[Row], variant: Variant) -> Claim:
    text = (
        f"CIFAR-NV {variant.name}: performance converges to the baseline's as learning rates "
        "increase (sec:add_generalize)"
    )
    gains = _gains(rows, "paper")
    highest = max(gains, default=RATE)
    if RATE not in gains or highest == RATE:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        abs(gains[highest]) < abs(gains[RATE]) / 2,
        f"{_told(rows, 'paper')} points of best test accuracy above the baseline.",
        _told_seeds(rows),
        bound=f"the distance at {highest:g} is less than half of that at {RATE:g}",
        ours=tell_each(OURS, lambda method: _told(rows, method)),
    )
