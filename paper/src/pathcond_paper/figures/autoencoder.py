"""MNIST autoencoders n - n/c - n/c² and back: final training loss and size of the rescaling over
the compression factor c, three learning rates (``fig:mnist_ae``, ``fig:regimes_all_lrs``,
``sec:regimes``).

The loss is the mean squared error per pixel of standardised images, so that a network that always
answers the mean has 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING

from pathcond.networks import autoencoder
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..sweep.selection import deviation, match_runs, mean, seeds_of, settings_of, spread, where
from ..training.methods import METHODS, OURS, RATE, at_rates, tell_coinciding, tell_each
from ..training.training import Settings, group_jobs, train_jobs

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

OTHER_RATES = (1e-2, 1e-1)
NOTHING = 1e-3  # share of the loss that counts as no difference
INPUTS = {"mnist": 784, "digits": 64}
DATASETS: dict[Preset, tuple[str, ...]] = {
    "smoke": ("digits",),
    "cpu": ("digits",),
    "paper": ("mnist",),
}


# with compression factors and number of seeds
PRESETS: dict[Preset, tuple[Settings, tuple[int, ...], int]] = {
    "smoke": (
        Settings(dataset="digits", epochs=20, batch=64, teleport_every=100, train=512),
        (1, 4),
        1,
    ),
    "cpu": (Settings(dataset="digits", epochs=200, batch=64, teleport_every=500), (1, 2, 4), 3),
    "paper": (Settings(dataset="mnist", epochs=500, teleport_every=5000), (7, 4, 2, 1), 3),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """All methods at the paper's learning rate; at the others all in the preset "paper", else
    three.
    """
    settings, compressions, repetitions = PRESETS[preset]
    return [
        asdict(settings)
        | {"compression": compression, "learning_rate": rate, "method": method, "seed": seed}
        for compression in compressions
        for rate, method in at_rates(OTHER_RATES, preset)
        for seed in range(seeds or repetitions)
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """All runs of one compression factor."""
    return group_jobs(jobs)


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Train them as one stack."""
    build = partial(autoencoder, jobs[0]["compression"], inputs=INPUTS[jobs[0]["dataset"]])
    yield from train_jobs(jobs, build, place, progress, task="reconstruct")


def final(rows: Sequence[Row], **settings: object) -> list[float]:
    """Training loss over the last epoch."""
    return [row.result["train_loss"][-1] for row in where(rows, **settings)]


def scales(rows: Sequence[Row], **settings: object) -> list[float]:
    """Greatest |log λ| of the conditioning before training."""
    return [row.result["max_log_scale"] for row in where(rows, **settings)]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Final loss (top) and greatest log-scale (bottom) over the compression, a column per learning
    rate.
    """
    from ..style import band, legend_below, method_style, panels

    rates = settings_of(rows, "learning_rate") or [RATE]
    drawing, axes = panels(2, len(rates))
    for column, rate in enumerate(rates):
        lower = axes[len(rates) + column]
        for panel, values, label in (
            (axes[column], final, "final training loss"),
            (lower, scales, "max |log λ|"),
        ):
            for method in METHODS:
                here = where(rows, learning_rate=rate, method=method)
                if here and not (values is scales and METHODS[method].condition is None):
                    compressions = settings_of(here, "compression")
                    points = [values(here, compression=compression) for compression in compressions]
                    runs = list(zip(*points, strict=False))
                    band(panel, compressions, runs, **method_style(method, markers=True))
            panel.set(
                xlabel="compression factor", ylabel=label, xticks=settings_of(rows, "compression")
            )
        axes[column].set_title(f"learning rate {rate:g}")
    legend_below(drawing, axes)
    losses = {
        method: [
            mean(final(rows, learning_rate=rate, compression=compression, method=method))
            for rate in rates
            for compression in settings_of(rows, "compression")
        ]
        for method in METHODS
        if where(rows, method=method)
    }
    drawing.set_label(
        "fig:mnist_ae, fig:regimes_all_lrs: final training loss (top) and greatest log-scale "
        f"(bottom) over the compression.{tell_coinciding(losses)}"
    )
    return {"autoencoder": drawing}


def table(rows: Sequence[Row]) -> str:
    """Final training loss by learning rate, method and compression."""
    lines = ["Training loss over the last epoch, mean ± deviation over seeds"]
    for rate in settings_of(rows, "learning_rate"):
        here = where(rows, learning_rate=rate)
        compressions = settings_of(here, "compression")
        lines += [
            "",
            f"{f'learning rate {rate:g}':<36}" + "".join(f"{f'c = {c}':>20}" for c in compressions),
        ]
        for method in METHODS:
            if where(here, method=method):
                cells = [spread(final(here, method=method, compression=c)) for c in compressions]
                lines.append(
                    f"  {METHODS[method].title:<34}" + "".join(f"{cell:>20}" for cell in cells)
                )
    return "\n".join(lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:regimes says of the autoencoders."""
    return [_grows(rows), _in_all(rows), _scale(rows)]


def shares(rows: Sequence[Row], method: str) -> dict[int, float]:
    """By compression, by what share the loss is below the baseline's, over the seeds that both
    have.
    """
    return {
        compression: 1 - ours / baseline
        for compression, (baseline, ours) in _losses(rows, method).items()
    }


def gaps(rows: Sequence[Row], method: str) -> dict[int, float]:
    """By compression, how far the loss is below the baseline's: the mean over those seeds."""
    return {compression: mean(found) for compression, found in _below(rows, method).items()}


def _below(rows: Sequence[Row], method: str) -> dict[int, list[float]]:
    """The same seed by seed."""
    found = {}
    for compression in settings_of(rows, "compression"):
        pairs = match_runs(where(rows, compression=compression), "baseline", method)
        if pairs:
            found[compression] = [baseline - ours for baseline, ours in map(final, pairs)]
    return found


def _losses(rows: Sequence[Row], method: str) -> dict[int, tuple[float, float]]:
    """By compression, the mean final losses of the baseline and of a method."""
    found = {}
    for compression in settings_of(rows, "compression"):
        pairs = match_runs(where(rows, compression=compression), "baseline", method)
        if pairs:
            baseline, ours = (mean(final(runs)) for runs in zip(*pairs, strict=True))
            found[compression] = baseline, ours
    return found


def _grows(rows: Sequence[Row]) -> Claim:
    """By the distance of the losses, which is what the figure shows; their ratio is told beside
    it.
    """
    text = "The effect grows with the compression factor, which makes widths uneven (fig:mnist_ae)"
    here = where(rows, learning_rate=RATE)
    below = _below(here, "paper")
    if len(below) < 2:
        return Claim.not_run(text)
    told = ", ".join(f"{mean(found):.3f} ± {deviation(found):.3f}" for found in below.values())
    return Claim.judge(
        text,
        all(
            mean(a) + max(deviation(a), deviation(b)) < mean(b) for a, b in pairwise(below.values())
        ),
        f"{told} below the baseline's loss at c = {', '.join(map(str, below))} "
        f"({seeds_of(match_runs(here, 'baseline', 'paper'))}).",
        f"As a share of the baseline's loss, {_tell(shares(here, 'paper'), '.1%')}.",
        bound="it is farther below at every larger compression, by more than its deviation over "
        "seeds",
        ours=_ours(here),
    )


def _ours(rows: Sequence[Row]) -> str:
    """How far below the baseline's the losses of the library's own methods are, from the least to
    the greatest compression.
    """
    told = tell_each(
        OURS, lambda method: ", ".join(f"{gap:.3f}" for gap in gaps(rows, method).values())
    )
    return f"{told} below the baseline's." if told else ""


def _in_all(rows: Sequence[Row]) -> Claim:
    """At the paper's learning rate; the others are told beside it."""
    text = "In all cases PathCond achieves smaller training loss (sec:regimes)"
    by_rate = {
        rate: shares(where(rows, learning_rate=rate), "paper")
        for rate in settings_of(rows, "learning_rate")
    }
    if len(by_rate.get(RATE, {})) < 2:
        return Claim.not_run(text)
    others = "; ".join(
        f"learning rate {rate:g}: {_tell(found, '.2%')}"
        for rate, found in by_rate.items()
        if found and rate != RATE
    )
    return Claim.judge(
        text,
        all(share > NOTHING for share in by_rate[RATE].values()),
        f"{_tell(by_rate[RATE], '.2%')} less loss than the baseline.",
        f"At other rates, {others}." if others else "",
        bound=f"it is less by more than {NOTHING:.1%} at every compression",
        ours=_ours(where(rows, learning_rate=RATE)),
    )


def _scale(rows: Sequence[Row]) -> Claim:
    text = (
        "The magnitude of the rescaling grows with the compression at all learning rates "
        "(fig:regimes_all_lrs)"
    )
    here = where(rows, method="paper")
    sizes = {c: mean(scales(here, compression=c)) for c in settings_of(here, "compression")}
    if len(sizes) < 2:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        all(a < b for a, b in pairwise(sizes.values())),
        f"{_tell(sizes, '.2f')} is the greatest |log λ|.",
        "Measured before training, so at every learning rate.",
        bound="it is greater at every larger compression",
    )


def _tell(values: dict[int, float], form: str) -> str:
    """Values and the compressions that they belong to.

    >>> _tell({1: 0.5, 2: 0.25}, ".2f")
    '0.50, 0.25 at c = 1, 2'
    """
    told = ", ".join(format(value, form) for value in values.values())
    return f"{told} at c = {', '.join(map(str, values))}" if values else ""
