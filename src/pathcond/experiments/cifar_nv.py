"""The fully convolutional network CIFAR-NV on CIFAR-10: training and test curves, four learning rates (``fig:cifar10_conv``,
``fig:generalize_all_lrs``, ``sec:generalize``).

The network has the BatchNorm behind the classifier that the paper's text names. 40,000 images train; the 10,000 left out are not
used, for nothing is tuned. Test accuracy is on the official test set; "best" is the greatest over the epochs, as in the paper. On a
GPU activations are bfloat16, weights and updates float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from .architectures import cifar_nv
from .figure import Claim, Job, Place, Preset, Progress, Result, Row
from .methods import AT_OTHER_RATES, METHODS
from .selection import mean, settings_of, spread, where
from .training import RATE, Recipe, epochs_to, trained

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

LONGER = {1e-4: 500 / 128}  # the smallest learning rate is given more epochs
OTHER_RATES = (1e-2, 5e-4, 1e-4)
CHANNELS = {"cifar10": 3, "digits": 1}
SMOOTHING = 0.2  # weight of a new epoch in the curves
DATASETS: dict[Preset, tuple[str, ...]] = {"smoke": ("digits",), "cpu": ("cifar10",), "paper": ("cifar10",)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a preset share; ``train`` and ``test`` are numbers of samples, None for all."""

    dataset: str
    width: int
    batch: int = 128
    teleport_every: int = 1000
    train: int | None = None
    test: int | None = None


PRESETS: dict[Preset, tuple[Settings, int, int]] = {  # with epochs and number of seeds
    "smoke": (Settings(dataset="digits", width=8, batch=32, teleport_every=10, train=320, test=100), 2, 1),
    "cpu": (Settings(dataset="cifar10", width=16, teleport_every=50, train=2000, test=1000), 20, 1),
    "paper": (Settings(dataset="cifar10", width=128, train=40_000), 128, 3),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """All methods at the paper's learning rate, three at the others; seed by seed, the three first."""
    settings, epochs, repetitions = PRESETS[preset]
    others = [method for method in METHODS if method not in AT_OTHER_RATES]
    pairs = [(RATE, AT_OTHER_RATES), (RATE, others), *((rate, AT_OTHER_RATES) for rate in OTHER_RATES)]
    return [
        asdict(settings) | {"epochs": round(epochs * LONGER.get(rate, 1)), "learning_rate": rate, "method": method, "seed": seed}
        for rate, methods in pairs
        for seed in range(seeds or repetitions)
        for method in methods
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """One by one: a network of convolutions fills a GPU by itself."""
    return [[job] for job in jobs]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Train one."""
    job = jobs[0]
    build = partial(cifar_nv, inputs=CHANNELS[job["dataset"]], width=job["width"], final_norm=True)
    recipe = Recipe(
        build=build, epochs=job["epochs"], batch=job["batch"], teleport_every=job["teleport_every"], bfloat16=True,
    )  # fmt: skip
    yield from trained(jobs, recipe, place, progress)


def smoothed(values: Sequence[float]) -> list[float]:
    """Exponential moving average, as in the paper's figure.

    >>> smoothed([1.0, 0.0])
    [1.0, 0.8]
    """
    found: list[float] = []
    for value in values:
        found.append(value if not found else SMOOTHING * value + (1 - SMOOTHING) * found[-1])
    return found


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Loss, training and test accuracy over the epochs, one drawing per learning rate."""
    rates = sorted(settings_of(rows, "learning_rate"), key=lambda rate: (rate != RATE, rate))
    return {"cifar-nv" if rate == RATE else f"cifar-nv-{rate:g}": _drawing(where(rows, learning_rate=rate)) for rate in rates}


def _drawing(rows: Sequence[Row]) -> Drawing:
    from .style import band, method_style, panels

    drawing, axes = panels(1, 3)
    for panel, key, title in zip(
        axes, ("train_loss", "train_accuracy", "test_accuracy"), ("training loss", "training accuracy, %", "test accuracy, %"),
        strict=True,
    ):  # fmt: skip
        factor = 100 if key.endswith("accuracy") else 1
        for method in METHODS:
            found = where(rows, method=method)
            if found:
                curves = [smoothed([factor * value for value in row.result[key]]) for row in found]
                band(panel, range(1, len(curves[0]) + 1), curves, **method_style(method))
        panel.set(xlabel="epoch", ylabel=title)
    axes[1].set_title(f"learning rate {rows[0].job['learning_rate']:g}")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return drawing


def best(rows: Sequence[Row]) -> list[float]:
    """Best test accuracy of every run, in percent."""
    return [100 * max(row.result["test_accuracy"]) for row in rows]


def table(rows: Sequence[Row]) -> str:
    """Best and last test accuracy, and epochs to 99 % training accuracy, by learning rate and method."""
    lines = [f"{'':<34}{'seeds':>6}{'best test, %':>18}{'last test, %':>18}{'epochs to 99 % train':>24}"]
    for rate in settings_of(rows, "learning_rate"):
        lines += ["", f"learning rate {rate:g}"]
        for method in METHODS:
            found = where(rows, learning_rate=rate, method=method)
            if found:
                last = spread([100 * row.result["test_accuracy"][-1] for row in found])
                reached = spread([epochs_to(0.99, row.result["train_accuracy"]) for row in found])
                lines.append(f"  {METHODS[method].title:<32}{len(found):>6}{spread(best(found)):>18}{last:>18}{reached:>24}")
    return "\n".join(lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:generalize says."""
    better_text = "PathCond reaches 80 % best test accuracy, baseline and ENorm 77 % (sec:generalize)"
    earlier_text = "Near-optimal performance about 20 epochs earlier than the baseline (sec:generalize)"
    rates_text = "Its advantage is greatest at small to moderate learning rates (fig:generalize_all_lrs)"
    here = where(rows, learning_rate=RATE)
    baseline, paper, ours = (where(here, method=method) for method in AT_OTHER_RATES)
    if not (baseline and paper and ours):
        return [Claim(paper=text, measured="", verdict="not run") for text in (better_text, earlier_text, rates_text)]
    enorm = where(here, method="enorm")
    gain, default_gain = mean(best(paper)) - mean(best(baseline)), mean(best(ours)) - mean(best(baseline))
    seeds = len(settings_of(here, "seed"))
    found = [
        Claim(
            paper=better_text,
            measured=f"best test accuracy: baseline {spread(best(baseline))} %, ENorm {spread(best(enorm))} %, as in the paper "
            f"{spread(best(paper))} %, default {spread(best(ours))} % ({seeds} seeds)",
            verdict="reproduced" if max(gain, default_gain) >= 2 else "not reproduced",
        ),
        _earlier(earlier_text, baseline, paper, ours),
    ]
    rates = settings_of(rows, "learning_rate")
    if len(rates) < 2:
        return [*found, Claim(paper=rates_text, measured="", verdict="not run")]
    gains = {rate: mean(best(where(rows, learning_rate=rate, method="paper"))) -
             mean(best(where(rows, learning_rate=rate, method="baseline"))) for rate in rates}  # fmt: skip
    measured = "as in the paper, points of best test accuracy above the baseline: "
    return [*found, Claim(
        paper=rates_text, measured=measured + ", ".join(f"{gain:+.1f} at {rate:g}" for rate, gain in gains.items()),
        verdict="reproduced" if gains[rates[-1]] < max(gains.values()) else "not reproduced",
    )]  # fmt: skip


def _earlier(text: str, baseline: Sequence[Row], paper: Sequence[Row], ours: Sequence[Row]) -> Claim:
    """How much sooner the smoothed training accuracy reaches what the baseline has at its end."""
    level = mean([smoothed(row.result["train_accuracy"])[-1] for row in baseline])
    reached = [mean([epochs_to(level, smoothed(row.result["train_accuracy"])) for row in rows]) for rows in (baseline, paper, ours)]
    earlier = [rows[0].job["epochs"] - epoch for rows, epoch in zip((paper, ours), reached[1:], strict=True)]
    measured = (
        f"the baseline's last training accuracy ({100 * level:.1f} %) is reached {earlier[0]:.0f} epochs earlier as in the paper, "
        f"{earlier[1]:.0f} by default"
    )
    if not earlier[0] >= 10:
        return Claim(paper=text, measured=measured, verdict="not reproduced")
    return Claim(paper=text, measured=measured, verdict="better" if earlier[1] > earlier[0] else "reproduced")
