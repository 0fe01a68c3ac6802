"""Seconds of conditioning beside those of a training epoch, over depth and by step (``fig:timing``,
``fig:timing_mlp``).

``costs`` says what is measured of a network. All runs are one task: side by side they would slow
each other down.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch

from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..published import SINCE
from ..sweep.selection import mean, spread
from .costs import SWEEPS, Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Drawing

DATASETS: dict[Preset, tuple[str, ...]] = {"smoke": (), "cpu": (), "paper": ()}
PARTS = {
    "epoch": "epoch of SGD",
    "whole": "with captures",
    "exact": "exact",
    "paper": "ten sweeps",
    "box": "neuron by neuron",
}
STEPS = {"symmetry": "symmetry (B)", "energy": "diag(G)", "solve": "solver", "rescale": "rescaling"}
MOST_LINEAR = 1.2  # an exponent of growth up to which time counts as linear
MOST_OF_AN_EPOCH = 1.1
MOST_OF_THE_TIME = 0.95
CHANGED = SINCE  # the part "paper"
# conditioning in epochs; for the last the upper end
IN_PAPER = {"MLP 3×500": 1.03, "CIFAR-NV": 0.22, "ResNet-18-C": 1.03}


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How much of it a preset measures.

    Attributes:
        depths, width: Hidden layers of the MLPs, and their width.
        images: Of an epoch.
        batch, steps: Images a step, and steps measured.
        convolutional: The same two for the convolutional networks; None to leave those out.
        repetitions: By part.
    """

    depths: Sequence[int]
    width: int
    images: int
    batch: int
    steps: int
    convolutional: tuple[int, int] | None
    repetitions: dict[str, int]


PRESETS: dict[Preset, Plan] = {
    "smoke": Plan(
        depths=(1, 3),
        width=16,
        images=512,
        batch=32,
        steps=4,
        convolutional=None,
        repetitions={"epoch": 2, "exact": 2, "paper": 2, "whole": 1, "box": 1},
    ),
    "cpu": Plan(
        depths=range(1, 9),
        width=500,
        images=50_000,
        batch=128,
        steps=5,
        convolutional=(4, 1),
        repetitions={"epoch": 3, "exact": 3, "paper": 3, "whole": 1, "box": 1},
    ),
    "paper": Plan(
        depths=range(1, 9),
        width=500,
        images=50_000,
        batch=128,
        steps=60,
        convolutional=(128, 60),
        repetitions={"epoch": 10, "exact": 10, "paper": 10, "whole": 3, "box": 1},
    ),
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """Network by network, part by part; the box once."""
    plan = PRESETS[preset]
    networks: list[Job] = [
        {"network": "mlp", "depth": depth, "width": plan.width} for depth in plan.depths
    ]
    settings = [network | {"batch": plan.batch, "steps": plan.steps} for network in networks]
    if plan.convolutional:
        batch, steps = plan.convolutional
        settings += [
            {"network": name, "batch": batch, "steps": steps} for name in ("cifar-nv", "resnet18-c")
        ]
    return [
        network | {"images": plan.images, "part": part, "repetition": repetition}
        for network in settings
        for part, repetitions in plan.repetitions.items()
        for repetition in range(repetitions if seeds is None or part == "box" else seeds)
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """All in one process, one after the other."""
    return [list(jobs)] if jobs else []


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Measure them, each network warmed up once."""
    device = torch.device(place.device)
    done = 0
    for title, same in groupby(jobs, key=network_title):
        network: Network | None = None
        for job in same:
            progress(done / len(jobs), f"{title}, {PARTS[job['part']]}")
            network = network or Network(job, device)
            yield job, network.measure(job)
            done += 1


def network_title(job: Job) -> str:
    """A network's name in tables and legends.

    >>> network_title({"network": "mlp", "depth": 3, "width": 500})
    'MLP 3×500'
    """
    if job["network"] == "mlp":
        return f"MLP {job['depth']}×{job['width']}"
    return {"cifar-nv": "CIFAR-NV", "resnet18-c": "ResNet-18-C"}[job["network"]]


def seconds_of(rows: Sequence[Row], part: str) -> dict[str, list[float]]:
    """By network, the seconds of a part in all repetitions."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.job["part"] == part:
            found.setdefault(network_title(row.job), []).append(sum(row.result["seconds"].values()))
    return found


def shares_of(rows: Sequence[Row], part: str, network: str) -> dict[str, float]:
    """By step, its share of the seconds of a part; empty without rows."""
    here = [row for row in rows if row.job["part"] == part and network_title(row.job) == network]
    total = sum(sum(row.result["seconds"].values()) for row in here)
    return (
        {step: sum(row.result["seconds"].get(step, 0.0) for row in here) / total for step in STEPS}
        if total
        else {}
    )


def sizes_of(rows: Sequence[Row]) -> dict[str, int]:
    """By network, its number of parameters, in the order of the jobs: MLPs by depth, then the
    others.
    """
    order = sorted(
        rows,
        key=lambda row: (row.job["network"] != "mlp", row.job.get("depth", 0), row.job["network"]),
    )
    return {network_title(row.job): row.result["parameters"] for row in order}


def over_size(rows: Sequence[Row], part: str) -> tuple[list[int], list[list[float]]]:
    """Numbers of parameters of the MLPs, ascending, and the seconds of a part for each."""
    seconds = seconds_of([row for row in rows if row.job["network"] == "mlp"], part)
    sizes = sizes_of(rows)
    networks = sorted(seconds, key=sizes.__getitem__)
    return [sizes[network] for network in networks], [seconds[network] for network in networks]


@dataclass(frozen=True, kw_only=True)
class Line:
    """A least-squares line y ≈ intercept + slope · x, and the share r2 of the variance of y that it
    explains.
    """

    intercept: float
    slope: float
    r2: float

    @classmethod
    def through(cls, x: Sequence[float], y: Sequence[float]) -> Line:
        """Fit it.

        >>> Line.through([1, 2, 3], [3, 5, 7])
        Line(intercept=1.0, slope=2.0, r2=1.0)
        """
        center_x, center_y = mean(x), mean(y)
        slope = sum((a - center_x) * (b - center_y) for a, b in zip(x, y, strict=True)) / sum(
            (a - center_x) ** 2 for a in x
        )
        intercept = center_y - slope * center_x
        total = sum((b - center_y) ** 2 for b in y)
        left = sum((b - intercept - slope * a) ** 2 for a, b in zip(x, y, strict=True))
        return cls(intercept=intercept, slope=slope, r2=1 - left / total if total else 0.0)


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Seconds by network, seconds over the MLPs' size, shares by step."""
    from ..style import legend_below, panels

    drawing, (left, middle, right) = panels(1, 3, width=4.0, height=3.6)
    shown = _list_compared(rows)
    _seconds_panel(left, rows, shown)
    _depth_panel(middle, rows)
    _steps_panel(right, rows, shown)
    legend_below(drawing, (left, right))
    drawing.set_label(
        "fig:timing, fig:timing_mlp: seconds of conditioning beside an epoch, over the size of "
        "MLPs, and by step; bars and bands are deviations over repetitions. CIFAR-NV is the "
        "network that Table 1 counts: no biases, no last BatchNorm."
    )
    return {"timing": drawing}


def _style(part: str) -> dict[str, Any]:
    from ..style import BLACK, BLUE, ORANGE, SKY, VERMILION

    color, dash, marker = {
        "epoch": (BLACK, "--", "o"),
        "whole": (SKY, "-", "s"),
        "exact": (BLUE, "-", "P"),
        "paper": (VERMILION, "-.", "^"),
        "box": (ORANGE, ":", "D"),
    }[part]
    return {"color": color, "linestyle": dash, "marker": marker, "label": PARTS[part]}


def _seconds_panel(axes: Axes, rows: Sequence[Row], shown: Sequence[str]) -> None:
    """One mark per part and network, with the deviation over the repetitions."""
    from ..sweep.selection import deviation

    for number, part in enumerate(PARTS):
        found = {
            network: seconds
            for network, seconds in seconds_of(rows, part).items()
            if network in shown
        }
        if not found:
            continue
        at = [shown.index(network) + 0.14 * (number - 2) for network in found]
        style = _style(part) | {"linestyle": "none"}
        axes.errorbar(
            at,
            [mean(s) for s in found.values()],
            yerr=[deviation(s) for s in found.values()],
            capsize=2,
            **style,
        )
    axes.set(
        title="beside an epoch",
        ylabel="seconds",
        yscale="log",
        xlim=(-0.5, max(len(shown), 1) - 0.5),
    )
    axes.set_xticks(range(len(shown)), shown)


def _depth_panel(axes: Axes, rows: Sequence[Row]) -> None:
    from ..style import band

    for part in PARTS:
        sizes, seconds = over_size(rows, part)
        if sizes:
            repetitions = range(min(map(len, seconds)))
            band(
                axes,
                [size / 1e6 for size in sizes],
                [[s[i] for s in seconds] for i in repetitions],
                **_style(part),
            )
    axes.set(title="MLPs by depth", xlabel="parameters, millions", ylabel="seconds", yscale="log")


def _steps_panel(axes: Axes, rows: Sequence[Row], shown: Sequence[str]) -> None:
    """A bar per network and way to condition it, from left to right its steps."""
    from ..style import BLUE, GREEN, ORANGE, PURPLE

    names, bars = [], []
    for network in shown:
        for part in ("whole", "exact", "paper", "box"):
            shares = shares_of(rows, part, network)
            if shares:
                names.append(f"{network}, {PARTS[part]}")
                bars.append(shares)
    start = [0.0] * len(bars)
    for step, color in zip(STEPS, (PURPLE, GREEN, BLUE, ORANGE), strict=True):
        width = [100 * shares[step] for shares in bars]
        axes.barh(
            range(len(bars)),
            width,
            left=start,
            color=color,
            label=STEPS[step],
            edgecolor="white",
            linewidth=0.5,
        )
        start = [a + b for a, b in zip(start, width, strict=True)]
    axes.set_yticks(range(len(bars)), names, fontsize=7)
    axes.invert_yaxis()
    axes.grid(visible=False, axis="y")
    axes.set(title="by step", xlabel="% of the time", xlim=(0, 100))


def table(rows: Sequence[Row]) -> str:
    """Seconds by network and part, % of an epoch, and shares by step."""
    sizes = sizes_of(rows)
    seconds = {part: seconds_of(rows, part) for part in PARTS}
    costs = [("", "parameters", *PARTS.values())]
    steps = [("", *STEPS.values())]
    for network, size in sizes.items():
        epoch = mean(seconds["epoch"].get(network, []))
        cells = (
            _cell(seconds[part].get(network, []), math.nan if part == "epoch" else epoch)
            for part in PARTS
        )
        costs.append((network, f"{size:,}", *cells))
        for part in ("whole", "exact", "paper", "box"):
            shares = shares_of(rows, part, network)
            if shares and network in _list_compared(rows):
                steps.append(
                    (
                        f"{network}, {PARTS[part]}",
                        *(f"{100 * share:.1f}" for share in shares.values()),
                    )
                )
    return "\n".join(
        [
            "Seconds, mean ± deviation over the repetitions [% of an epoch]",
            *_align(costs),
            "",
            "Share of each step, %",
            *_align(steps),
            "",
            _how(rows),
        ]
    )


def _list_compared(rows: Sequence[Row]) -> list[str]:
    """The networks of ``fig:timing``, or the deepest of those there are."""
    networks = list(sizes_of(rows))
    return [network for network in networks if network in IN_PAPER] or networks[-1:]


def _align(lines: Sequence[Sequence[str]]) -> list[str]:
    first, *others = (max(map(len, column)) for column in zip(*lines, strict=True))
    return [
        "  ".join([name.ljust(first), *map(str.rjust, cells, others)]) for name, *cells in lines
    ]


def _cell(seconds: Sequence[float], epoch: float) -> str:
    share = f" [{100 * mean(seconds) / epoch:.3g}]" if seconds and epoch > 0 else ""
    return spread(seconds) + share


def _how(rows: Sequence[Row]) -> str:
    """What was extrapolated from what."""
    epochs: dict[tuple[int, int, int], list[str]] = {}
    for row in rows:
        if row.job["part"] == "epoch":
            key = (row.result["epoch_steps_measured"], row.result["epoch_steps"], row.job["batch"])
            if network_title(row.job) not in epochs.setdefault(key, []):
                epochs[key].append(network_title(row.job))
    said = [
        f"Epochs of {', '.join(names) if len(epochs) > 1 else 'all'}: {measured} of {total} "
        f"steps of {batch} images measured."
        for (measured, total, batch), names in epochs.items()
    ]
    if any(row.job["part"] == "box" for row in rows):
        said.append(f"Neuron by neuron: one sweep measured, times {SWEEPS}.")
    return "\n".join(["The images lie on the device: no loading slows the epochs down.", *said])


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:timing and sec:app_timing say of the cost, of the algorithm box as it is written:
    neuron by neuron.
    """
    return [_epoch_claim(rows), _linear_claim(rows), _solver_claim(rows)]


def _epoch_claim(rows: Sequence[Row]) -> Claim:
    seconds = {part: seconds_of(rows, part) for part in PARTS}
    ratios = {
        network: {
            part: mean(seconds[part][network]) / mean(seconds["epoch"][network])
            for part in PARTS
            if network in seconds[part]
        }
        for network in IN_PAPER
        if all(network in seconds[part] for part in PARTS)
    }
    text = (
        "Rescaling costs at most about a training epoch: 22 % of it (CIFAR-NV) to 103 % (MLP, 3 "
        "hidden layers) (sec:timing), typically half of it to one (sec:bcd_nb)"
    )
    if len(ratios) < len(IN_PAPER):
        return Claim.not_run(text)
    box, sweeps, exact, whole = (
        {network: by_part[part] for network, by_part in ratios.items()}
        for part in ("box", "paper", "exact", "whole")
    )
    return Claim.judge(
        text,
        max(box.values()) <= MOST_OF_AN_EPOCH,
        f"{_by_network(box)} of an epoch.",
        f"Neuron by neuron, as the box is written; {_extrapolated(rows, ratios)}. The same ten "
        f"sweeps layer by layer, captured before: {_by_network(sweeps)}. The exact path kernel, "
        f"captured before: {_by_network(exact)}.",
        bound=f"it takes at most {MOST_OF_AN_EPOCH:.0%} of an epoch for all three",
        ours=f"{_by_network(whole)} for the exact path kernel with its captures.",
    )


def _by_network(shares: dict[str, float]) -> str:
    return ", ".join(f"{_percent(share)} ({network})" for network, share in shares.items())


def _linear_claim(rows: Sequence[Row]) -> Claim:
    paper = (
        "Rescaling time scales linearly with the number of parameters, MLPs of 1 to 8 hidden "
        "layers (fig:timing_mlp)"
    )
    wide = [row for row in rows if row.job.get("width") == 500]
    sizes, seconds = over_size(wide, "box")
    if len(sizes) < 3:
        return Claim.not_run(paper)
    times = [mean(found) for found in seconds]
    line = Line.through(sizes, times)
    growth, more = times[-1] / times[0], sizes[-1] / sizes[0]
    exponent = _exponent(sizes, times)
    exact_sizes, exact = over_size(wide, "exact")
    ours = ""
    if len(exact_sizes) == len(sizes):
        of_exact = [mean(found) for found in exact]
        ours = (
            f"{of_exact[-1] / of_exact[0]:.2f} times the time for the exact path kernel (exponent "
            f"{_exponent(exact_sizes, of_exact):.1f})."
        )
    return Claim.judge(
        paper,
        max(exponent, math.log(growth) / math.log(more)) <= MOST_LINEAR,
        f"{more:.2f} times the parameters take {growth:.2f} times the time: exponent "
        f"{exponent:.1f}.",
        "The exponent is that of a least-squares fit over all depths. Neuron by neuron, as the box "
        f"is written in our code, one sweep times {SWEEPS}, measured "
        f"{_often(min(map(len, seconds)))}; it grows with the number of hidden neurons, of which "
        "8 layers have 8 times as many as one. A line has "
        f"{line.slope * 1e6:.3g} s per million parameters and {line.intercept:.3g} s, R² "
        f"{line.r2:.3f}.",
        bound=f"the exponent is at most {MOST_LINEAR}, fitted and from the smallest network to the "
        "largest",
        ours=ours,
    )


def _exponent(sizes: Sequence[int], times: Sequence[float]) -> float:
    """The power of the size that times grow with, by least squares over all of them.

    >>> round(_exponent([1, 2, 4], [3.0, 12.0, 48.0]), 6)
    2.0
    """
    return Line.through([math.log(size) for size in sizes], [math.log(t) for t in times]).slope


def _solver_claim(rows: Sequence[Row]) -> Claim:
    box, ours, exact = (
        {
            network: shares["solve"]
            for network in IN_PAPER
            if (shares := shares_of(rows, part, network))
        }
        for part in ("box", "paper", "exact")
    )
    quicker = [
        mean(seconds_of(rows, "box")[network]) / mean(seconds_of(rows, "paper")[network])
        for network in box
        if network in ours
    ]
    text = (
        "Block coordinate descent accounts for roughly 98 % of the rescaling time (sec:app_timing)"
    )
    if len(box) < len(IN_PAPER):
        return Claim.not_run(text)
    quick = f"{min(quicker):.0f} to {max(quicker):.0f}" if quicker else ""
    return Claim.judge(
        text,
        min(box.values()) >= MOST_OF_THE_TIME,
        f"{_by_network(box)}, neuron by neuron.",
        f"One sweep times {SWEEPS}. Layer by layer it is {quick} times quicker, and takes "
        f"{_by_network(ours)} of the time."
        if quicker
        else f"One sweep times {SWEEPS}.",
        bound=f"it is at least {MOST_OF_THE_TIME:.0%}",
        ours=f"{_by_network(exact)} for the exact solver." if exact else "",
    )


def _percent(share: float) -> str:
    return f"{100 * share:,.0f} %" if share >= 1 else f"{100 * share:.3g} %"


def _extrapolated(rows: Sequence[Row], networks: Collection[str]) -> str:
    """How often and from what the epochs of some networks, and their conditioning with captures,
    were measured.
    """
    epochs = [
        row for row in rows if row.job["part"] == "epoch" and network_title(row.job) in networks
    ]
    steps = dict.fromkeys(
        f"{row.result['epoch_steps_measured']} of {row.result['epoch_steps']} steps"
        for row in epochs
    )
    times = {
        part: min(len(seconds_of(rows, part)[network]) for network in networks)
        for part in ("epoch", "whole")
    }
    return (
        f"epochs measured {_often(times['epoch'])} from {' or '.join(steps)} on images that lie "
        "on the device, "
        f"captures {_often(times['whole'])}"
    )


def _often(times: int) -> str:
    return f"{times} times" if times != 1 else "once"
