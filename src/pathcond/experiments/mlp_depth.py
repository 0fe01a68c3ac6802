"""MLPs with BatchNorm on CIFAR-10, 2 to 8 hidden layers of 500: epochs to 99 % training accuracy, and the same over learning
rates (``fig:cifar10_fc``, ``fig:conv_speed_all_lrs``, ``sec:faster``).

Training accuracy is taken after the epoch, in eval mode, over the whole training set.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from .architectures import mlp
from .figure import Claim, Job, Place, Preset, Progress, Result, Row
from .methods import AT_OTHER_RATES, METHODS
from .selection import mean, settings_of, spread, where
from .training import RATE, Recipe, epochs_to, grouped, trained

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

TARGET = 0.99
OTHER_RATES = (1e-4, 1e-2, 1e-1)
INPUTS = {"cifar10": 3072, "digits": 64}
DATASETS: dict[Preset, tuple[str, ...]] = {"smoke": ("digits",), "cpu": ("digits",), "paper": ("cifar10",)}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What all runs of a preset share; ``train`` and ``test`` are numbers of samples, None for all."""

    dataset: str
    width: int
    epochs: int
    batch: int = 128
    teleport_every: int = 1000
    train: int | None = None
    test: int | None = None


# Depths with the greatest gain first: a sweep that is cut short has those.
PRESETS: dict[Preset, tuple[Settings, tuple[int, ...], int]] = {  # with depths and number of seeds
    "smoke": (Settings(dataset="digits", width=48, epochs=8, batch=64, teleport_every=50), (2, 4), 1),
    "cpu": (Settings(dataset="digits", width=256, epochs=60, batch=64, teleport_every=100), (3, 5, 8), 3),
    "paper": (Settings(dataset="cifar10", width=500, epochs=100), (3, 5, 8, 2, 4, 6, 7), 3),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """All methods at the paper's learning rate, three at the others."""
    settings, depths, repetitions = PRESETS[preset]
    pairs = [(RATE, method) for method in METHODS] + [(rate, method) for rate in OTHER_RATES for method in AT_OTHER_RATES]
    return [
        asdict(settings) | {"depth": depth, "learning_rate": rate, "method": method, "seed": seed}
        for depth in depths
        for rate, method in pairs
        for seed in range(seeds or repetitions)
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """All runs of one depth."""
    return grouped(jobs)


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Train them as one stack."""
    job = jobs[0]
    build = partial(mlp, (job["width"],) * job["depth"], inputs=INPUTS[job["dataset"]], batch_norm=True)
    recipe = Recipe(
        build=build, epochs=job["epochs"], batch=job["batch"], teleport_every=job["teleport_every"], fitted=True,
    )  # fmt: skip
    yield from trained(jobs, recipe, place, progress)


def epochs(rows: Sequence[Row], **settings: object) -> list[float]:
    """Epochs to the target of the runs with these settings; infinity where it was not reached."""
    return [epochs_to(TARGET, row.result["fitted_accuracy"]) for row in where(rows, **settings)]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Epochs to the target over parameters, curves of one depth, and the same over learning rates."""
    drawings = {"mlp-depth": depth_drawing(where(rows, learning_rate=RATE))}
    if len(settings_of(rows, "learning_rate")) > 1:
        drawings["mlp-depth-rates"] = _rates_drawing(rows)
    return drawings


def depth_drawing(rows: Sequence[Row]) -> Drawing:
    """The paper's three panels."""
    from .style import band, method_style, panels

    drawing, (left, middle, right) = panels(1, 3)
    _epochs_panel(left, rows)
    left.set_title(f"epochs to {TARGET:.0%}")
    depths = settings_of(rows, "depth")
    shown = 3 if 3 in depths else depths[0] if depths else None
    for method in METHODS:
        found = where(rows, depth=shown, method=method)
        if found:
            style = method_style(method)
            steps = range(1, len(found[0].result["train_loss"]) + 1)
            band(middle, steps, [[100 * a for a in row.result["fitted_accuracy"]] for row in found], **style)
            band(right, steps, [row.result["fitted_loss"] for row in found], **style)
    middle.set(title=f"{shown} hidden layers", xlabel="epoch", ylabel="training accuracy, %")
    right.set(title=f"{shown} hidden layers", xlabel="epoch", ylabel="training loss", yscale="log")
    drawing.legend(*middle.get_legend_handles_labels(), loc="outside lower center", ncols=4, fontsize=8)
    return drawing


def _rates_drawing(rows: Sequence[Row]) -> Drawing:
    from .style import panels

    rates = settings_of(rows, "learning_rate")
    drawing, axes = panels(1, len(rates), width=2.8)
    for panel, rate in zip(axes, rates, strict=True):
        _epochs_panel(panel, [row for row in where(rows, learning_rate=rate) if row.job["method"] in AT_OTHER_RATES])
        panel.set_title(f"learning rate {rate:g}")
    drawing.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    return drawing


def _epochs_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Epochs to the target over the number of parameters; an open marker on the upper edge where a run never got there."""
    from .style import band, method_style

    longest = max((row.job["epochs"] for row in rows), default=1)
    for method in METHODS:
        style = method_style(method, markers=True)
        points = {depth: epochs(rows, depth=depth, method=method) for depth in settings_of(where(rows, method=method), "depth")}
        if not points:
            continue
        x = [_parameters(rows[0].job, depth) / 1e6 for depth in points]
        seeds = min(map(len, points.values()))
        reached = [[found[seed] if math.isfinite(found[seed]) else math.nan for found in points.values()] for seed in range(seeds)]
        band(axes, x, reached, **style)
        never = [at for at, found in zip(x, points.values(), strict=True) if any(map(math.isinf, found))]
        if never:
            look = {"color": style["color"], "markerfacecolor": "none", "clip_on": False}
            axes.plot(never, [longest] * len(never), style["marker"], **look)
    axes.set(xlabel="parameters, millions", ylabel="epochs", ylim=(0, longest * 1.02))


def _parameters(job: Job, depth: int) -> int:
    width, inputs = job["width"], INPUTS[job["dataset"]]
    return inputs * width + (depth - 1) * width**2 + 2 * depth * width + 10 * width + 10


def table(rows: Sequence[Row]) -> str:
    """Epochs to the target, and best test accuracy, by learning rate, depth and method."""
    lines = [f"Epochs to {TARGET:.0%} training accuracy, mean ± deviation over seeds [best test accuracy, %]"]
    for rate in settings_of(rows, "learning_rate"):
        here = where(rows, learning_rate=rate)
        lines += ["", f"learning rate {rate:g}", _line("", [f"{depth} layers" for depth in settings_of(here, "depth")])]
        for method in METHODS:
            if where(here, method=method):
                cells = [_cell(where(here, method=method, depth=depth)) for depth in settings_of(here, "depth")]
                lines.append(_line(METHODS[method].title, cells))
    return "\n".join(lines)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<32}" + "".join(f"{cell:>22}" for cell in cells)


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    found = epochs(rows)
    if any(map(math.isinf, found)):
        best = mean([row.result["fitted_accuracy"][-1] for row in rows])
        text = f"> {rows[0].job['epochs']}" if not math.isnan(best) and best > 0.2 else "diverged"
    else:
        text = spread(found)
    return f"{text} [{100 * mean([max(row.result['test_accuracy']) for row in rows]):.1f}]"


def speedups(rows: Sequence[Row], method: str) -> dict[int, tuple[float, bool]]:
    """By depth, how many times fewer epochs than the baseline, and whether it is a lower bound: the baseline stopped short."""
    found = {}
    for depth in settings_of(rows, "depth"):
        ours, baseline = epochs(rows, depth=depth, method=method), epochs(rows, depth=depth, method="baseline")
        if ours and baseline and all(map(math.isfinite, ours)):
            longest = rows[0].job["epochs"]
            found[depth] = (mean([min(e, longest) for e in baseline]) / mean(ours), any(map(math.isinf, baseline)))
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:faster says of depth, of ENorm and of the learning rate."""
    return [*depth_claims(where(rows, learning_rate=RATE)), *_rate_claims(rows)]


def depth_claims(rows: Sequence[Row]) -> list[Claim]:
    """The claims at the paper's learning rate."""
    faster = "PathCond reaches 99 % up to 1.5 times faster at the same learning rate (sec:faster)"
    smaller = "A model of 2.5M parameters matches 3.25M-parameter baselines (sec:faster)"
    strongest = "The network of 3 hidden layers gains most, deeper ones less but consistently (sec:faster)"
    enorm = "ENorm does not yield improvements (sec:faster)"
    if not rows:
        return [Claim(paper=text, measured="", verdict="not run") for text in (faster, smaller, strongest, enorm)]
    paper, ours = speedups(rows, "paper"), speedups(rows, "default")
    seeds = len(settings_of(rows, "seed"))
    most, better = (max((times for times, _ in found.values()), default=0.0) for found in (paper, ours))
    found = [
        Claim(
            paper=faster,
            measured=f"as in the paper {_times(paper)}; default {_times(ours)} fewer epochs ({seeds} seeds)",
            verdict="better" if better > max(most, 1.5) else "reproduced" if most >= 1.4 else "not reproduced",
        ),
    ]
    small, large = epochs(rows, depth=5, method="paper"), epochs(rows, depth=8, method="baseline")
    if small and large:
        found.append(Claim(
            paper=smaller,
            measured=f"5 layers (2.5M) as in the paper {spread(small)} epochs, default "
            f"{spread(epochs(rows, depth=5, method='default'))}; baseline of 8 layers (3.3M) {spread(large)}",
            verdict="reproduced" if mean(small) <= mean(large) else "not reproduced",
        ))  # fmt: skip
    if 3 in paper and len(paper) > 1:
        at = max((depth for depth, (_, bound) in paper.items() if not bound), key=lambda depth: paper[depth][0], default=3)
        consistent = all(times > 1 for times, _ in paper.values())
        found.append(Claim(
            paper=strongest,
            measured=f"as in the paper the gain is greatest at {at} layers; by depth {_times(paper)}",
            verdict="reproduced" if at == 3 and consistent else "not reproduced",
        ))  # fmt: skip
    balanced = speedups(rows, "enorm")
    if balanced:
        found.append(Claim(
            paper=enorm, measured=f"every step {_times(balanced)}, every epoch {_times(speedups(rows, 'enorm-epoch'))}",
            verdict="reproduced" if all(times < 1.1 for times, _ in balanced.values()) else "not reproduced",
        ))  # fmt: skip
    return found


def _rate_claims(rows: Sequence[Row]) -> list[Claim]:
    small = "It matches or exceeds the baseline at small to moderate learning rates, most at small ones (sec:faster)"
    large = "At larger learning rates the effect becomes less pronounced (fig:conv_speed_all_lrs)"
    rates = settings_of(rows, "learning_rate")
    if len(rates) < 2:
        return [Claim(paper=text, measured="", verdict="not run") for text in (small, large)]
    gains = {method: {rate: _gain(where(rows, learning_rate=rate), method) for rate in rates} for method in ("paper", "default")}
    text = "; ".join(
        f"{METHODS[method].title}: " + ", ".join(f"{gain:+.1f} at {rate:g}" for rate, gain in by_rate.items())
        for method, by_rate in gains.items()
    )
    measured = f"points of training accuracy above the baseline, mean over the epochs and depths: {text}"
    paper = gains["paper"]
    return [
        Claim(paper=small, measured=measured,
              verdict="reproduced" if all(paper[rate] > 0 for rate in rates if rate <= RATE) else "not reproduced"),
        Claim(paper=large, measured=measured,
              verdict="reproduced" if paper[rates[-1]] < max(paper[rate] for rate in rates if rate <= RATE) else "not reproduced"),
    ]  # fmt: skip


def _gain(rows: Sequence[Row], method: str) -> float:
    """Points of training accuracy above the baseline, over all epochs and depths."""
    over = lambda name: mean([mean(row.result["fitted_accuracy"]) for row in where(rows, method=name)])  # noqa: E731
    return 100 * (over(method) - over("baseline"))


def _times(by_depth: dict[int, tuple[float, bool]]) -> str:
    return ", ".join(f"{'≥ ' if bound else ''}{times:.2f}× at {depth}" for depth, (times, bound) in by_depth.items()) or "none"
