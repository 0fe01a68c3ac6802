"""GELU and SiLU in place of ReLU: how much a rescaling then changes the outputs, over depth, and
training (``fig:gelu_silu``, ``fig:cifar10_fc_gelu``, ``sec:gelu``).

Smooth activations are not homogeneous, so rescaling is approximate (``approximate=True``); scales
are bounded by |u| ≤ 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from pathcond.condition import condition_
from pathcond.networks import mlp
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress
from ..published import SINCE
from ..sweep.selection import deviation, match_runs, mean, seeds_of, settings_of, where
from ..training.methods import AT_OTHER_RATES, METHODS, RATE
from ..training.training import group_jobs, train_jobs
from . import mlp_depth

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

ACTIVATIONS = {"gelu": nn.GELU, "silu": nn.SiLU}
SAMPLES = 256  # inputs from N(0, I) on which outputs are compared
CHANGED = SINCE
DATASETS = mlp_depth.DATASETS
DIFFERENCES: dict[Preset, tuple[int, tuple[int, ...], int]] = {  # width, hidden layers, seeds
    "smoke": (32, (1, 3), 2),
    "cpu": (200, (1, 2, 4, 8), 5),
    "paper": (500, (1, 2, 3, 4, 5, 6, 7, 8), 10),
}
TRAINED: dict[Preset, dict[str, Any]] = {  # what differs from the figure with ReLU
    "smoke": {"epochs": 2},
    "cpu": {"epochs": 40},
    "paper": {},
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """Differences of outputs for both activations, then training with GELU."""
    width, depths, repetitions = DIFFERENCES[preset]
    differences = [
        {
            "part": "difference",
            "activation": activation,
            "width": width,
            "depth": depth,
            "method": method,
            "learning_rate": None,
            "seed": seed,
        }
        for activation in ACTIVATIONS
        for depth in depths
        for method in ("paper", "exact")
        for seed in range(seeds or repetitions)
    ]
    settings, width, depths, repetitions = mlp_depth.PRESETS[preset]
    shared = asdict(replace(settings, **TRAINED[preset])) | {
        "part": "training",
        "activation": "gelu",
        "learning_rate": RATE,
    }
    training = [
        shared | {"width": width, "depth": depth, "method": method, "seed": seed}
        for depth in depths
        for methods in (
            AT_OTHER_RATES,
            [method for method in METHODS if method not in AT_OTHER_RATES],
        )
        for method in methods
        for seed in range(seeds or repetitions)
    ]
    return differences + training


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """Differences by depth, training by depth."""
    return group_jobs(jobs)


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """One depth of either part."""
    job = jobs[0]
    if job["part"] == "difference":
        for done, each in enumerate(jobs, start=1):
            yield each, difference(each, place.device)
            progress(done / len(jobs), f"{job['activation']}, {job['depth']} layers")
        return
    build = partial(mlp_depth.network, job, ACTIVATIONS[job["activation"]])
    yield from train_jobs(jobs, build, place, progress, fitted=True, approximate=True)


def difference(job: Job, device: str) -> Result:
    """‖f(x) − f̃(x)‖ / ‖f(x)‖ in eval mode, mean over inputs from N(0, I), as in ``sec:gelu``."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(job["seed"])
        model = mlp(
            (job["width"],) * job["depth"],
            batch_norm=True,
            activation=ACTIVATIONS[job["activation"]],
        )
        x = torch.randn(SAMPLES, 3, 32, 32)
    model, x = model.to(device).eval(), x.to(device)
    options = METHODS[job["method"]].condition or {}
    with torch.no_grad():
        before = model(x)
        # bounds |log λ| by 2.5, which is |u| ≤ 5
        report = condition_(model, x, approximate=True, **options)
        after = model(x)
    relative = (before - after).norm(dim=1) / before.norm(dim=1)
    return {
        "difference": float(relative.mean()),
        "max_log_scale": float(report.log_scales.abs().max()),
    }


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """The activations, the differences over depth, and the training as with ReLU."""
    drawings = {"smooth": _differences(where(rows, part="difference"))}
    training = where(rows, part="training")
    if training:
        drawings["smooth-training"] = mlp_depth.depth_drawing(training, "fig:cifar10_fc_gelu")
    return drawings


def _differences(rows: Sequence[Row]) -> Drawing:
    from ..style import BLACK, CYCLE, STYLES, band, panels

    drawing, (left, right) = panels(1, 2)
    x = torch.linspace(-4, 3, 200)
    left.plot(x, x.relu(), label="ReLU", color=BLACK, linestyle="--")
    for color, (name, activation) in zip(CYCLE, ACTIVATIONS.items(), strict=False):
        left.plot(x, activation()(x), label=activation.__name__, color=color)
        for method, dash in (
            ("paper", STYLES["paper"]["linestyle"]),
            ("exact", STYLES["exact"]["linestyle"]),
        ):
            found = where(rows, activation=name, method=method)
            depths = settings_of(found, "depth")
            runs = zip(
                *(
                    [row.result["difference"] for row in where(found, depth=depth)]
                    for depth in depths
                ),
                strict=False,
            )
            if found:
                label = f"{activation.__name__}, {METHODS[method].title}"
                band(
                    right, depths, list(runs), label=label, color=color, linestyle=dash, marker="o"
                )
    left.set(xlabel="x", ylabel="activation")
    right.set(xlabel="hidden layers", ylabel="relative change of the outputs", yscale="log")
    left.legend(fontsize=8)
    if rows:
        right.legend(fontsize=7)
    drawing.set_label(
        "fig:gelu_silu: the activations (left), and how much rescaling changes the outputs "
        "(right); GELU and SiLU coincide at the exact optimum."
    )
    return drawing


def table(rows: Sequence[Row]) -> str:
    """Differences by activation, depth and method; then epochs to 99 % as with ReLU."""
    found = where(rows, part="difference")
    lines = ["Relative change of the outputs, mean ± deviation over seeds"]
    for activation in settings_of(found, "activation"):
        for method in ("paper", "exact"):
            here = where(found, activation=activation, method=method)
            cells = [
                f"{depth}: {mean(found):.1e} ± {deviation(found):.0e}"
                for depth in settings_of(here, "depth")
                for found in [[row.result["difference"] for row in where(here, depth=depth)]]
            ]
            lines.append(f"  {activation}, {METHODS[method].title:<26}" + "   ".join(cells))
    training = where(rows, part="training")
    return "\n".join([*lines, "", mlp_depth.table(training)] if training else lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """What sec:gelu says."""
    differences = where(rows, part="difference")
    return [_decreases(differences), _closer(differences), _trains(where(rows, part="training"))]


def _decreases(rows: Sequence[Row]) -> Claim:
    text = (
        "For GELU the change of the outputs decreases with depth, from about 1e-1 at L = 2 to 1e-3 "
        "at L = 9 (fig:gelu_silu)"
    )
    gelu = _differences_by_depth(rows, activation="gelu", method="paper")
    if len(gelu) < 2:
        return Claim.not_run(text)
    first, last = min(gelu), max(gelu)
    silu, exact = (
        _differences_by_depth(rows, **settings)
        for settings in (
            {"activation": "silu", "method": "paper"},
            {"activation": "gelu", "method": "exact"},
        )
    )
    return Claim.judge(
        text,
        mean(gelu[last]) + deviation(gelu[last]) < mean(gelu[first]) / 10,
        f"{_ends(gelu)} hidden layers ({len(gelu[last])} seeds).",
        f"SiLU {_ends(silu)}." if silu else "",
        bound="it falls to less than a tenth",
        ours=f"Exact path kernel {_ends(exact)}: BatchNorm undoes the scale in front of it."
        if exact
        else "",
    )


def _closer(rows: Sequence[Row]) -> Claim:
    text = "That it decreases fits with GELU being closer to the identity than SiLU is (sec:gelu)"
    found = [
        _differences_by_depth(rows, activation=name, method="paper") for name in ("gelu", "silu")
    ]
    if any(len(by_depth) < 2 for by_depth in found):
        return Claim.not_run(text)
    gelu, silu = (
        mean(by_depth[min(by_depth)]) / mean(by_depth[max(by_depth)]) for by_depth in found
    )
    return Claim.judge(
        text,
        gelu > silu,
        f"{gelu:.0f} times less change in the deepest network than in the shallowest with GELU, "
        f"{silu:.0f} times with SiLU.",
        bound="it decreases by more with GELU",
    )


def _ends(found: dict[int, list[float]]) -> str:
    """Means at the least and the greatest depth."""
    least, most = min(found), max(found)
    return f"{mean(found[least]):.1e} at {least} to {mean(found[most]):.1e} at {most}"


def _differences_by_depth(rows: Sequence[Row], **settings: str) -> dict[int, list[float]]:
    here = where(rows, **settings)
    return {
        depth: [row.result["difference"] for row in where(here, depth=depth)]
        for depth in settings_of(here, "depth")
    }


def _trains(rows: Sequence[Row]) -> Claim:
    text = (
        "With GELU it still yields the same qualitative speed-up of training as with ReLU "
        "(sec:gelu, fig:cifar10_fc_gelu)"
    )
    paper = mlp_depth.speedups(rows, "paper")
    if not paper:
        return Claim.not_run(text)
    least, most = (best(paper, key=lambda depth: paper[depth].times) for best in (min, max))
    running = mlp_depth.running_speedups(rows)
    seeds = seeds_of(match_runs(rows, "baseline", "paper"))
    return Claim.judge(
        text,
        paper[least].times > 1,
        f"{paper[least]} fewer epochs than the baseline at {least} layers, {paper[most]} at {most}"
        f"{f'; in train mode {_told_least(running)}' if running else ''} ({seeds}).",
        f"By depth: {mlp_depth.tell(paper)}. {mlp_depth.in_train_mode(rows)} "
        f"{mlp_depth.ours_by_depth(rows)}",
        bound="it needs fewer epochs at every depth, by the accuracy in eval mode, as its authors "
        "count",
        ours=mlp_depth.ours(rows),
    )


def _told_least(found: dict[int, mlp_depth.Speedup]) -> str:
    least = min(found, key=lambda depth: found[depth].times)
    return f"{found[least]} at {least}"
