"""What conditioning gives once everybody has tuned the learning rate: every method at its own best
one, by the test loss (no figure of the paper).

Every method trains at a grid of rates in factors of two, for a fixed number of epochs with a cosine
schedule; the grid grows until the best rate is not at its end. One seed chooses each method's rate;
fresh seeds are trained at that rate and its neighbours, and at further ones while the best is at an
end, and are reported at the best.

A search over one scale per layer (``training.searching``) is the most that rescaling whole layers
can give, and the *share* of a method is how much of that gain it has:

    share = (loss as is − loss) / (loss as is − loss searched)
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..sweep.selection import deviation, mean, settings_of, where
from ..training.unfinished import Unfinished
from ..tuning.best import DEFAULT, at_equal_rates, find_default, find_tuned, share
from ..tuning.comparison import CHOOSING, NEAR, Comparison, beyond
from ..tuning.settings import BY_PRESET, METHODS, SEARCHED, setting_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

# Until then balanced layers had other scales, by up to 0.17 in the mean of a layer.
CHANGED = {"layers": "2026-11-16T17:00"}
GOAL = 0.8  # of the searched gain
DRAWN = ("as-is", "paper", "kernel-full", "curvature", "norms", DEFAULT, "searched")
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


def unsettled(rows: Sequence[Row]) -> list[Job]:
    """The runs of fresh seeds that need further rates: the best one for them is at an end of those
    that they have.
    """
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.job["seed"] != CHOOSING:
            groups.setdefault((row.job["setting"], row.job["method"]), []).append(row)
    return [
        row.job
        for found in groups.values()
        if beyond([row.result for row in found]) is not None
        for row in found
    ]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Let the first seed choose the rates, unless it did in an earlier sweep, then train the others
    at them. Trainings that were finished when an earlier sweep was stopped are not made again.
    """
    name = jobs[0]["setting"]
    methods = list(dict.fromkeys(job["method"] for job in jobs))
    known = {
        (row.job["method"], row.job["seed"]): row.result for row in where(place.rows, setting=name)
    }
    # whichever seeds are left
    parts = [{"figure": "tuned", "setting": name, "method": method} for method in methods]
    unfinished = Unfinished(parts, place)
    comparison = Comparison(setting_of(name), place, methods, known, progress, unfinished)
    comparison.choose()
    yield from comparison.results(jobs, CHOOSING)
    fresh = sorted({job["seed"] for job in jobs} - {CHOOSING})
    comparison.repeat(fresh)
    for seed in fresh:
        yield from comparison.results(jobs, seed)
    unfinished.remove()


def table(rows: Sequence[Row]) -> str:
    """A block per setting: test loss and accuracy at the own best rate, the rate, the width, and
    the share of the searched gain.
    """
    lines = ["Every method at its own best learning rate; mean ± deviation over fresh seeds"]
    for name in _list_reported(rows, METHODS):
        setting = setting_of(name)
        held = " (held out)" if setting.held_out else ""
        lines += ["", f"{setting.title}{held}"]
        lines.append(
            f"  {'':<56}{'test loss':>18}{'accuracy %':>16}{'rate':>10}{'decades':>16}{'share':>8}"
        )
        for method in METHODS:
            found = find_tuned(rows, name, method)
            if found is None:
                continue
            gained = share(rows, name, method)
            accuracy = (
                f"{100 * mean(found.accuracies):.1f} ± {100 * deviation(found.accuracies):.1f}"
                if found.accuracies
                else ""
            )
            rate = f"{found.rate:.3g}{'*' if found.at_edge else ' '}"
            by_loss, by_accuracy = found.width
            decades = f"{by_loss:.1f}" + ("" if by_accuracy is None else f", {by_accuracy:.1f}")
            default = " = the default" if method == find_default(rows, name) else ""
            lines.append(
                f"  {METHODS[method].title + default:<56}"
                f"{f'{found.loss:.4f} ± {deviation(found.losses):.4f}':>18}{accuracy:>16}"
                f"{rate:>10}{decades:>16}"
                f"{'' if gained is None else f'{gained:.0%}':>8}"
            )
    return "\n".join(
        [
            *lines,
            "",
            "* at an end of the rates that the fresh seeds were trained at",
            "Decades: around the best rate, within 1 % of the least loss and, after the comma, "
            "within a point of the best accuracy; of the choosing seed",
        ]
    )


def _list_reported(rows: Sequence[Row], methods: Iterable[str]) -> list[str]:
    """The settings in which fresh seeds of one of these methods are there."""
    return [
        name
        for name in settings_of(rows, "setting")
        if any(find_tuned(rows, name, method) for method in methods)
    ]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Test loss of the choosing seed over the learning rate, a panel per setting; the rate at which
    a method is reported is marked. The table has those that are not drawn.
    """
    from ..style import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION, legend_below, panels

    colours = (BLACK, VERMILION, BLUE, PURPLE, ORANGE, GREEN, SKY)  # as elsewhere, where they are
    names = _list_reported(rows, DRAWN)
    columns = min(3, len(names)) or 1
    drawing, axes = panels(max(1, -(-len(names) // columns)), columns)
    for panel, name in zip(axes, names, strict=False):
        points: list[tuple[float, float]] = []
        for method, colour in zip(DRAWN, colours, strict=True):
            found = find_tuned(rows, name, method)
            if found is None:
                continue
            finite = {rate: loss for rate, loss in found.curve.items() if math.isfinite(loss)}
            title = "the default: balanced layers" if method == DEFAULT else METHODS[method].title
            dash = "--" if method in ("as-is", "searched") else "-"
            panel.plot([*finite], [*finite.values()], dash, color=colour, label=title)
            panel.plot(found.rate, found.curve[found.rate], "o", color=colour)
            points += finite.items()
        panel.set(xscale="log", xlabel="learning rate", ylabel="test loss")
        if as_is := find_tuned(rows, name, "as-is"):
            # Where much is gained, the whole gain; where little is, enough to see it.
            top = as_is.curve[as_is.rate]
            room = max(0.1 * top, 1.2 * (top - min(loss for _, loss in points)))
            highest = top + 2 * room
            shown = [rate for rate, loss in points if loss < highest]
            panel.set_ylim(top - 1.2 * room, highest)
            panel.set_xlim(min(shown) / 2, max(shown) * 2)
        panel.xaxis.set_minor_formatter("")  # they would overlap where few decades are shown
        panel.set_title(setting_of(name).title, fontsize=8)
    for panel in axes[len(names) :]:
        panel.set_visible(False)
    legend_below(drawing, axes)
    drawing.set_label(
        "Test loss of the seed that chooses rates, over the learning rate; a dot is the rate that "
        "is best for the fresh seeds, which may be next to the curve's lowest point."
    )
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
        words: [
            share for name, share in found[DEFAULT].items() if setting_of(name).held_out is held
        ]
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
        bound=f"the mean is at least {GOAL:.0%}",
        goal=True,
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
        as_is = find_tuned(rows, name, "as-is")
        ours = find_tuned(rows, name, DEFAULT)
        if as_is is not None and ours is not None:
            gains[setting_of(name).title] = 1 - ours.loss / as_is.loss
            noise = math.hypot(deviation(as_is.losses), deviation(ours.losses))
            worse |= ours.loss > as_is.loss + noise
    if not gains:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        not worse,
        f"{min(gains.values()):.1%} to {max(gains.values()):.1%} less test loss in {len(gains)} "
        "settings.",
        ", ".join(
            f"{gain:.1%} ({title})"
            for title, gain in sorted(gains.items(), key=lambda pair: pair[1])
        )
        + ".",
        bound="no loss is higher by more than the deviations over seeds, added as squares",
        goal=True,
    )


def _never_slower(rows: Sequence[Row]) -> Claim:
    text = (
        "Goal: at equal rates, up to half the best one of the network as it is, the default has no "
        f"greater loss (by more than {NEAR:.0%})"
    )
    found = {
        setting_of(name).title: ratios
        for name in settings_of(rows, "setting")
        if (ratios := at_equal_rates(rows, name, DEFAULT))
    }
    if not found:
        return Claim.not_run(text)
    slower = {
        title: max(ratios.values())
        for title, ratios in found.items()
        if max(ratios.values()) > 1 + NEAR
    }
    told = [ratio for ratios in found.values() for ratio in ratios.values()]
    above = ", ".join(f"{title} up to {ratio:.2f}" for title, ratio in slower.items())
    return Claim.judge(
        text,
        not slower,
        f"{min(told):.2f} to {max(told):.2f} times the loss"
        f"{'; above 1: ' + above if slower else ''}.",
        "Means over four seeds at rates near the best ones, one seed elsewhere.",
        bound=f"no ratio is above {1 + NEAR:g}",
        goal=True,
    )


def _control(rows: Sequence[Row]) -> Claim:
    """Both are the same steps but for rounding, which large rates let grow."""
    text = (
        "Control: with plain SGD, learning rates by layer in place of the searched scales give the "
        "same, at rates up to half the best one"
    )
    apart = {}
    at_best = []
    for name in settings_of(rows, "setting"):
        scales, rates = (find_tuned(rows, name, method) for method in SEARCHED)
        if scales is None or rates is None:
            continue
        small = [rate for rate in scales.curve if rate <= scales.rate / 2 and rate in rates.curve]
        if not small:
            continue
        apart[setting_of(name).title] = max(
            abs(rates.curve[rate] / scales.curve[rate] - 1) for rate in small
        )
        at_best.append(f"{scales.loss:.4f} and {rates.loss:.4f}")
    if not apart:
        return Claim.not_run(text)
    return Claim.judge(
        text,
        max(apart.values()) < NEAR,
        f"{max(apart.values()):.1%} at most is the difference of test losses, of the choosing "
        "seed.",
        "; ".join(
            f"{title}: {difference:.2%}, at its own best rate {losses}"
            for (title, difference), losses in zip(apart.items(), at_best, strict=True)
        )
        + ".",
        bound=f"it is below {NEAR:.0%}",
        goal=True,
    )
