"""MLPs with BatchNorm on CIFAR-10, 2 to 8 hidden layers of 500: epochs to 99 % training accuracy,
and the same over learning rates (``fig:cifar10_fc``, ``fig:conv_speed_all_lrs``, ``sec:faster``).

Training accuracy is taken after the epoch, in eval mode, over the whole training set; that of the
steps themselves, in train mode and with weights that still move, is told beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import TYPE_CHECKING

from torch import nn

from pathcond.networks import mlp
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..published import SINCE
from ..sweep.selection import match_runs, mean, seeds_at_rates, seeds_of, settings_of, spread, where
from ..training.methods import (
    AT_OTHER_RATES,
    METHODS,
    OURS,
    RATE,
    at_rates,
    tell_coinciding,
    tell_each,
)
from ..training.training import Settings, epochs_to, group_jobs, train_jobs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

TARGET = 0.99
OTHER_RATES = (1e-4, 1e-2, 1e-1)
OPEN = "An open marker at the top is a run that did not get there."
FITTED, RUNNING = "fitted_accuracy", "train_accuracy"  # after an epoch, and over its steps
INPUTS = {"cifar10": 3072, "digits": 64}
CHANGED = SINCE
DATASETS: dict[Preset, tuple[str, ...]] = {
    "smoke": ("digits",),
    "cpu": ("digits",),
    "paper": ("cifar10",),
}


# Depths with the greatest gain first: a sweep that is cut short has those.
# with width, depths and number of seeds
PRESETS: dict[Preset, tuple[Settings, int, tuple[int, ...], int]] = {
    "smoke": (
        Settings(dataset="digits", epochs=8, batch=64, teleport_every=20, train=512),
        48,
        (2, 4),
        1,
    ),
    "cpu": (Settings(dataset="digits", epochs=60, batch=64, teleport_every=100), 128, (3, 5, 8), 2),
    "paper": (Settings(dataset="cifar10", epochs=100), 500, (3, 5, 8, 2, 4, 6, 7), 3),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """All methods at the paper's learning rate; at the others all in the preset "paper", else
    three.
    """
    settings, width, depths, repetitions = PRESETS[preset]
    return [
        asdict(settings)
        | {"width": width, "depth": depth, "learning_rate": rate, "method": method, "seed": seed}
        for depth in depths
        for rate, method in at_rates(OTHER_RATES, preset)
        for seed in range(seeds or repetitions)
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """All runs of one depth."""
    return group_jobs(jobs)


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Train them as one stack."""
    yield from train_jobs(jobs, partial(network, jobs[0]), place, progress, fitted=True)


def network(job: Job, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Module:
    """The MLP of a job."""
    hidden = (job["width"],) * job["depth"]
    return mlp(hidden, inputs=INPUTS[job["dataset"]], batch_norm=True, activation=activation)


def epochs(rows: Sequence[Row], accuracy: str = FITTED, **settings: object) -> list[float]:
    """Epochs to the target of the runs with these settings; infinity where it was not reached."""
    return [epochs_to(TARGET, row.result[accuracy]) for row in where(rows, **settings)]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Epochs to the target over parameters, curves of one depth, and the same over learning
    rates.
    """
    drawings = {"mlp-depth": depth_drawing(where(rows, learning_rate=RATE), "fig:cifar10_fc")}
    if len(settings_of(rows, "learning_rate")) > 1:
        drawings["mlp-depth-rates"] = _rates_drawing(rows)
    return drawings


def depth_drawing(rows: Sequence[Row], label: str) -> Drawing:
    """The paper's three panels; ``label`` is that of its figure."""
    from ..style import band, legend_below, method_style, panels

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
            band(
                middle,
                steps,
                [[100 * a for a in row.result["fitted_accuracy"]] for row in found],
                **style,
            )
            band(right, steps, [row.result["fitted_loss"] for row in found], **style)
    middle.set(title=f"{shown} hidden layers", xlabel="epoch", ylabel="training accuracy, %")
    right.set(title=f"{shown} hidden layers", xlabel="epoch", ylabel="training loss", yscale="log")
    legend_below(drawing, (left, middle))
    drawing.set_label(
        f"{label}: epochs to {TARGET:.0%} training accuracy by size, and training accuracy and "
        f"loss with {shown} hidden layers. {OPEN}{_tell_coinciding(rows)}"
    )
    return drawing


def _tell_coinciding(rows: Sequence[Row]) -> str:
    """Which methods need the same number of epochs at every depth."""
    depths = settings_of(rows, "depth")
    return tell_coinciding(
        {
            method: [mean(epochs(rows, depth=depth, method=method)) for depth in depths]
            for method in METHODS
            if where(rows, method=method)
        }
    )


def _rates_drawing(rows: Sequence[Row]) -> Drawing:
    from ..style import legend_below, panels

    rates = settings_of(rows, "learning_rate")
    drawing, axes = panels(1, len(rates), width=2.8)
    for panel, rate in zip(axes, rates, strict=True):
        _epochs_panel(
            panel,
            [
                row
                for row in where(rows, learning_rate=rate)
                if row.job["method"] in (*AT_OTHER_RATES, "default", "enorm")
            ],
        )
        panel.set_title(f"learning rate {rate:g}")
    legend_below(drawing, axes)
    drawing.set_label(
        f"fig:conv_speed_all_lrs: epochs to {TARGET:.0%} training accuracy by size, at four "
        f"learning rates. {OPEN}"
    )
    return drawing


def _epochs_panel(axes: Axes, rows: Sequence[Row]) -> None:
    """Epochs to the target over the number of parameters; an open marker on the upper edge where a
    run never got there.
    """
    from ..style import band, method_style

    longest = max((row.job["epochs"] for row in rows), default=1)
    for method in METHODS:
        style = method_style(method, markers=True)
        points = {
            depth: epochs(rows, depth=depth, method=method)
            for depth in settings_of(where(rows, method=method), "depth")
        }
        if not points:
            continue
        x = [_parameters(rows[0].job, depth) / 1e6 for depth in points]
        seeds = min(map(len, points.values()))
        reached = [
            [found[seed] if math.isfinite(found[seed]) else math.nan for found in points.values()]
            for seed in range(seeds)
        ]
        band(axes, x, reached, **style)
        never = [
            at for at, found in zip(x, points.values(), strict=True) if any(map(math.isinf, found))
        ]
        if never:
            look = {"color": style["color"], "markerfacecolor": "none", "clip_on": False}
            axes.plot(never, [longest] * len(never), style["marker"], **look)
    axes.set(xlabel="parameters, millions", ylabel="epochs", ylim=(0, longest * 1.02))


def _parameters(job: Job, depth: int) -> int:
    width = job["width"]
    inputs = INPUTS[job["dataset"]]
    return inputs * width + (depth - 1) * width**2 + 2 * depth * width + 10 * width + 10


def table(rows: Sequence[Row]) -> str:
    """Epochs to the target, best test accuracy, and how far accuracy falls again, by learning rate,
    depth and method.
    """
    reached = (
        f"Epochs to {TARGET:.0%} training accuracy, mean ± deviation over seeds [best test "
        "accuracy, %]"
    )
    after = f"Least training accuracy after {TARGET:.0%} was first reached, of all seeds, %"
    return "\n".join([reached, *_by_depth(rows, _cell), "", after, *_by_depth(rows, _least_after)])


def _by_depth(rows: Sequence[Row], cell: Callable[[Sequence[Row]], str]) -> Iterator[str]:
    for rate in settings_of(rows, "learning_rate"):
        here = where(rows, learning_rate=rate)
        yield from (
            "",
            f"learning rate {rate:g}",
            _line("", [f"{depth} layers" for depth in settings_of(here, "depth")]),
        )
        for method in METHODS:
            if where(here, method=method):
                cells = [
                    cell(where(here, method=method, depth=depth))
                    for depth in settings_of(here, "depth")
                ]
                yield _line(METHODS[method].title, cells)


def _line(name: str, cells: Sequence[str]) -> str:
    return f"  {name:<34}" + "".join(f"{cell:>22}" for cell in cells)


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return "–"
    found = epochs(rows)
    if any(not math.isfinite(row.result["fitted_loss"][-1]) for row in rows):
        text = "diverged"
    else:
        text = f"> {rows[0].job['epochs']}" if any(map(math.isinf, found)) else spread(found)
    return f"{text} [{100 * mean([max(row.result['test_accuracy']) for row in rows]):.1f}]"


def _least_after(rows: Sequence[Row]) -> str:
    curves = [row.result[FITTED] for row in rows]
    least = [
        min(curve[int(first) - 1 :])
        for curve in curves
        if math.isfinite(first := epochs_to(TARGET, curve))
    ]
    return f"{100 * min(least):.1f}" if least else "–"


@dataclass(frozen=True)
class Speedup:
    """How a method fares beside the baseline at one depth.

    Attributes:
        times: How many times fewer epochs it takes to the target; 0 if it does not get there in
            every run.
        bound: Whether that is a lower bound, the baseline having stopped short.
    """

    times: float
    bound: bool

    def __str__(self) -> str:
        if not self.times:
            return "neither" if self.bound else "never"
        return f"{'≥ ' * self.bound}{self.times:.2f}×"


def speedups(rows: Sequence[Row], method: str, accuracy: str = FITTED) -> dict[int, Speedup]:
    """By depth, over the seeds that both the method and the baseline have."""
    found = {}
    for depth in settings_of(rows, "depth"):
        pairs = match_runs(where(rows, depth=depth), "baseline", method)
        if pairs:
            longest = rows[0].job["epochs"]
            baseline, ours = (epochs(runs, accuracy) for runs in zip(*pairs, strict=True))
            times = mean([min(epoch, longest) for epoch in baseline]) / mean(ours)
            found[depth] = Speedup(times, any(map(math.isinf, baseline)))
    return found


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:faster and sec:add_faster say of depth, of ENorm and of the learning rate, and
    sec:experiments of generalization.
    """
    here = where(rows, learning_rate=RATE)
    return [*depth_claims(here), *_rate_claims(rows), _generalizes(here)]


def depth_claims(rows: Sequence[Row]) -> list[Claim]:
    """The claims at the paper's learning rate."""
    paper = speedups(rows, "paper")
    return [_faster(rows, paper), _smaller(rows), _strongest(rows, paper), _enorm(rows)]


def _faster(rows: Sequence[Row], paper: dict[int, Speedup]) -> Claim:
    text = "PathCond reaches 99 % up to 1.5 times faster at the same learning rate (sec:faster)"
    if not paper:
        return Claim.not_run(text)
    best = max(paper, key=lambda depth: paper[depth].times)
    seeds = seeds_of(match_runs(rows, "baseline", "paper"))
    return Claim.judge(
        text,
        paper[best].times >= 1.4,
        f"{paper[best]} fewer epochs than the baseline at most, with {best} hidden layers "
        f"({seeds}).",
        f"By depth: {tell(paper)}. {in_train_mode(rows)} {_fewest(rows)} {ours_by_depth(rows)}",
        bound="it is at least 1.4 times at one depth",
        ours=ours(rows),
    )


def running_speedups(rows: Sequence[Row]) -> dict[int, Speedup]:
    """Those of the paper's method in train mode, at the depths where it or the baseline reaches
    the target.
    """
    found = speedups(rows, "paper", RUNNING)
    return {depth: one for depth, one in found.items() if one.times or not one.bound}


def in_train_mode(rows: Sequence[Row]) -> str:
    """The same by the accuracy of the steps themselves, as a sentence."""
    found = tell(speedups(rows, "paper", RUNNING))
    return f"By the accuracy of the steps themselves, in train mode: {found}."


def ours(rows: Sequence[Row]) -> str:
    """How the library's own methods fare beside the baseline, at worst and at best."""

    def ends(method: str) -> str:
        # where neither gets there, nothing is known
        found = [one for one in speedups(rows, method).values() if one.times or not one.bound]
        if not found:
            return ""
        least, most = (end(found, key=lambda one: one.times) for end in (min, max))
        return f"{least} to {most}"

    told = tell_each(OURS, ends)
    return f"{told} fewer epochs than the baseline." if told else ""


def ours_by_depth(rows: Sequence[Row]) -> str:
    """The same depth by depth."""
    told = tell_each(OURS, lambda method: tell(speedups(rows, method)))
    return f"This library: {told}." if told else ""


def _fewest(rows: Sequence[Row]) -> str:
    """Which method that conditions once needs the fewest epochs at every depth, if one does."""
    once = [
        name
        for name, method in METHODS.items()
        if method.condition is not None and not method.teleports
    ]
    first = set()
    for depth in settings_of(rows, "depth"):
        here = where(rows, depth=depth)
        needed = {name: mean(found) for name in once if (found := epochs(here, method=name))}
        first |= {min(needed, key=lambda name: needed[name])} if needed else set()
    if len(first) != 1 or len(settings_of(rows, "depth")) < 2:
        return ""
    (name,) = first
    points = _points(gains_by(rows, "depth", name, of=_best_test))
    return (
        f"Fewest at every depth, conditioned once: {METHODS[name].title}; points of best test "
        f"accuracy beside the baseline: {points}."
    )


def _smaller(rows: Sequence[Row]) -> Claim:
    text = (
        "A model of 2.5M parameters (5 hidden layers) matches baselines of 3.25M (8) (sec:faster)"
    )
    small = epochs(rows, depth=5, method="paper")
    large = epochs(rows, depth=8, method="baseline")
    if not small or not large:
        return Claim.not_run(text)
    sizes = [f"{_parameters(rows[0].job, depth) / 1e6:.2g}M" for depth in (5, 8)]

    def needed(method: str) -> str:
        found = epochs(rows, depth=5, method=method)
        return f"{spread(found)} epochs" if found else ""

    others = tell_each(OURS, needed)
    return Claim.judge(
        text,
        mean(small) <= mean(large) < math.inf,
        f"{spread(small)} epochs with 5 layers ({sizes[0]}), {spread(large)} the baseline with 8 "
        f"({sizes[1]}).",
        bound="it needs no more epochs",
        ours=f"With 5 layers {others}." if others else "",
    )


def _strongest(rows: Sequence[Row], paper: dict[int, Speedup]) -> Claim:
    """Over the depths at which the baseline reaches the target: elsewhere its gain is not known.
    Consistent is what holds in train mode too.
    """
    text = (
        "The network of 3 hidden layers gains most, deeper ones less but consistently (sec:faster)"
    )
    known = {depth: found for depth, found in paper.items() if not found.bound}
    if 3 not in known or len(known) < 2:
        return Claim.not_run(text)
    running = {depth: found for depth, found in running_speedups(rows).items() if depth in known}
    most = known[3].times >= max(found.times for found in known.values())
    gains = all(found.times > 1 for by in (known, running) for found in by.values())
    least = min(running, key=lambda depth: running[depth].times, default=3)
    in_steps = f"; in train mode {running[least]} at {least} layers" if running else ""
    return Claim.judge(
        text,
        most and gains,
        f"{known[3]} at 3 layers, {_least(known)} at least{in_steps}.",
        f"By depth: {tell(paper)}. {in_train_mode(rows)} Points of training accuracy above the "
        f"baseline, mean over epochs: {_points(gains_by(rows, 'depth', 'paper'))}. "
        f"{ours_by_depth(rows)}",
        bound="no other depth gains more, and every depth gains, in train mode too",
        ours=ours(rows),
    )


def _least(found: dict[int, Speedup]) -> Speedup:
    return min(found.values(), key=lambda each: each.times)


def _enorm(rows: Sequence[Row]) -> Claim:
    text = "ENorm does not yield improvements (sec:faster)"
    step = speedups(rows, "enorm")
    if not step:
        return Claim.not_run(text)
    epoch = speedups(rows, "enorm-epoch")
    most = max(found.times for found in step.values())
    return Claim.judge(
        text,
        most < 1.1,
        f"{most:.2f}× fewer epochs than the baseline at most, after every step.",
        f"Every step {tell(step)}; every epoch {tell(epoch) or 'not run'}.",
        bound="it is less than 1.1 times at every depth",
    )


def _rate_claims(rows: Sequence[Row]) -> list[Claim]:
    small = (
        "It matches or exceeds the baseline at small to moderate learning rates, most at small "
        "ones (sec:faster)"
    )
    large = (
        "As the learning rate increases the effect becomes less pronounced, yet remains comparable "
        "to the baseline and ENorm (sec:faster)"
    )
    falls = "Performance degrades at larger learning rates (sec:add_faster, fig:conv_speed_all_lrs)"
    never = "Rescaling at initialization never degrades the training dynamics (Section 1)"
    gains = gains_by(rows, "learning_rate", "paper")
    low, high = (
        [gain for rate, gain in gains.items() if (rate <= RATE) == is_low]
        for is_low in (True, False)
    )
    if not low or not high:
        return [Claim.not_run(text) for text in (small, large, falls, never)]
    seeds = seeds_at_rates(rows, "baseline", "paper")
    told = f"{_points(gains)} points of training accuracy beside the baseline."
    details = f"Means over epochs and depths; {seeds}."
    others = _ours_by_rate(rows)
    highest = max(gains)
    at_highest = gains_by(where(rows, learning_rate=highest), "depth", "paper")
    deepest = min(at_highest, key=lambda depth: at_highest[depth])
    enorm = gains_by(rows, "learning_rate", "enorm")
    worst = _worst_by_rate(rows, "paper")
    rate, (depth, loss) = min(worst.items(), key=lambda pair: _second(pair[1]))
    return [
        Claim.judge(
            small,
            min(low) > -0.5 and max(low) >= max(high),
            told,
            details,
            bound=f"no rate up to {RATE:g} loses more than 0.5 points, and none above gains more",
            ours=others,
        ),
        Claim.judge(
            large,
            at_highest[deepest] > -2 and high[-1] < max(low),
            f"{high[-1]:+.1f} points of training accuracy at {highest:g}, mean over depths; "
            f"{at_highest[deepest]:+.1f} with {deepest:g} layers.",
            f"By depth at {highest:g}: {_points(at_highest)}. ENorm beside the baseline: "
            f"{_points(enorm) or 'not run'}. {details}",
            bound="it is less than at small rates, and no depth loses 2 points or more",
            ours=others,
        ),
        Claim.judge(
            falls,
            high[-1] < min(0, gains.get(RATE, 0)),
            told,
            details,
            bound=f"the gain at {highest:g} is below that at {RATE:g}, and below zero",
            ours=others,
        ),
        Claim.judge(
            never,
            loss > -0.5,
            f"{loss:+.1f} points of training accuracy beside the baseline at worst, at {rate:g} "
            f"with {depth:g} layers.",
            f"At worst: {', '.join(_tell_worst({rate: worst[rate]}) for rate in worst)}. {seeds}.",
            bound="no depth loses more than 0.5 points at any rate",
            ours=tell_each(OURS, lambda method: _tell_worst(_worst_by_rate(rows, method))),
        ),
    ]


def _ours_by_rate(rows: Sequence[Row]) -> str:
    """Points that the library's own methods gain at each learning rate; the rates once, where all
    have the same.
    """
    gains = {method: gains_by(rows, "learning_rate", method) for method in OURS}
    if len({tuple(by_rate) for by_rate in gains.values()}) > 1:
        return tell_each(OURS, lambda method: _points(gains[method]))
    values = tell_each(OURS, lambda method: ", ".join(f"{g:+.1f}" for g in gains[method].values()))
    return f"{values} at {', '.join(f'{rate:g}' for rate in gains[OURS[0]])}"


def _worst_by_rate(rows: Sequence[Row], method: str) -> dict[float, tuple[float, float]]:
    """The depth that gains least at each learning rate, and the points that it gains."""
    found = {}
    for rate in settings_of(rows, "learning_rate"):
        by_depth = gains_by(where(rows, learning_rate=rate), "depth", method)
        if by_depth:
            found[rate] = min(by_depth.items(), key=_second)
    return found


def _tell_worst(worst: dict[float, tuple[float, float]]) -> str:
    """The least of what ``_worst_by_rate`` found."""
    if not worst:
        return ""
    rate, (depth, gain) = min(worst.items(), key=lambda pair: _second(pair[1]))
    return f"{gain:+.1f} at {rate:g} with {depth:g} layers"


def _second(pair: tuple[float, float]) -> float:
    return pair[1]


def _generalizes(rows: Sequence[Row]) -> Claim:
    text = (
        "The same accuracy in up to 1.5 times fewer epochs without compromising generalization: "
        "MLPs (sec:experiments)"
    )
    paper = gains_by(rows, "depth", "paper", of=_best_test)
    if not paper:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        min(paper.values()) >= -0.5,
        f"{min(paper.values()):+.1f} to {max(paper.values()):+.1f} points of best test accuracy "
        f"beside the baseline ({seeds_of(match_runs(rows, 'baseline', 'paper'))}).",
        f"By depth: {_points(paper)}. This library: "
        + tell_each(OURS, lambda method: _points(gains_by(rows, "depth", method, of=_best_test)))
        + ".",
        bound="no depth loses more than 0.5 points",
        ours=tell_each(OURS, lambda method: _range(gains_by(rows, "depth", method, of=_best_test))),
    )


def _best_test(row: Row) -> float:
    return max(row.result["test_accuracy"])


def _mean_accuracy(row: Row) -> float:
    return mean(row.result[FITTED])


def gains_by(
    rows: Sequence[Row], setting: str, method: str, of: Callable[[Row], float] = _mean_accuracy
) -> dict[float, float]:
    """Points above the baseline by a setting, over the runs that both have; if not told of what, of
    accuracy over all epochs.
    """
    found = {}
    for value in settings_of(rows, setting):
        pairs = match_runs(where(rows, **{setting: value}), "baseline", method)
        if pairs:
            found[value] = 100 * mean([of(ours) - of(baseline) for baseline, ours in pairs])
    return found


def _points(gains: dict[float, float]) -> str:
    return ", ".join(f"{gain:+.1f} at {setting:g}" for setting, gain in gains.items())


def _range(gains: dict[float, float]) -> str:
    return f"{min(gains.values()):+.1f} to {max(gains.values()):+.1f}" if gains else ""


def tell(by_depth: dict[int, Speedup]) -> str:
    return ", ".join(f"{found} at {depth}" for depth, found in by_depth.items())
