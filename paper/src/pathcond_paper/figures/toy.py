"""One neuron, u·relu(vx + w), trained as it is and conditioned (``fig:toy_example``,
``sec:sketch_simple_example``).

Full-batch gradient descent on the square loss, x ~ N(0, 1), y = relu(x), with a small learning
rate. Where u > 0 the loss depends on Φ = (uv, uw) alone, L = ℓ ∘ Φ, and gradient descent moves Φ by
−P ∇ℓ with P = u² I + (v, w)ᵀ(v, w). The ideal flow has P = I. PathCond makes u² = v² + w², whatever
the start.

The paper does not print its three starts. Those here have a small u, so that P is far from a
multiple of I; random ones beside them show what happens elsewhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from pathcond.condition import condition_, prepare
from pathcond.criteria.criterion import PathKernel
from pathcond.reference import ideal_flow
from pathcond.rows import Job, Result, Row

from ..figure import Claim, Place, Preset, Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

DATASETS: Mapping[Preset, Sequence[str]] = {"smoke": (), "cpu": (), "paper": ()}
STARTS = ((0.2, 1.5, 1.5), (0.3, 3.0, -1.0), (0.2, 1.0, -2.0))  # (u, v, w)
RANDOM_STARTS: Mapping[Preset, int] = {"smoke": 10, "cpu": 200, "paper": 200}
STEPS: Mapping[Preset, int] = {"smoke": 1000, "cpu": 4000, "paper": 4000}
LEARNING_RATE = 0.01
SAMPLES = 256
KEPT = 200  # points of a curve that are kept
SHARE = 1e-3  # of its first value, at which a loss has come down


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """The three starts of the figure, and random ones, whose number ``seeds`` replaces."""
    common = {"figure": "toy", "steps": STEPS[preset]}
    random = range(RANDOM_STARTS[preset] if seeds is None else seeds)
    return [common | {"start": list(start)} for start in STARTS] + [
        common | {"seed": seed} for seed in random
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """All at once: they descend side by side."""
    numbers = sorted({job["steps"] for job in jobs})
    return [[job for job in jobs if job["steps"] == steps] for steps in numbers]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Descend from all starts, plain and conditioned."""
    steps = jobs[0]["steps"]
    x = torch.randn(SAMPLES, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor(
        [job["start"] if "start" in job else random_start(job["seed"]) for job in jobs],
        dtype=torch.float64,
    )
    progress(0.0, "conditioning")
    rescaled = condition_starts(starts)
    progress(0.1, "gradient descent")
    plain_path, rescaled_path = descend(torch.cat([starts, rescaled]), x, steps).split(
        len(jobs), dim=1
    )
    progress(0.6, "ideal flow")
    ideal = ideal_paths(lift(starts), x, time=LEARNING_RATE * steps, steps=steps // 5)
    kept = torch.linspace(0, steps, min(KEPT, steps + 1)).long()
    for n, job in enumerate(jobs):
        result: Result = {"theta": starts[n].tolist()}
        for name, path in (("plain", plain_path[:, n]), ("rescaled", rescaled_path[:, n])):
            losses = loss(path, x)
            low = (losses <= SHARE * losses[0]).nonzero()
            result[name] = {
                "mean_loss": float(losses.mean()),
                "steps_to_share": int(low[0]) if len(low) else math.inf,
                "distance": distance(lift(path), ideal[:, n]),
            }
            if "start" in job:
                result[name] |= {
                    "step": kept.tolist(),
                    "loss": losses[kept].tolist(),
                    "path": path[kept].tolist(),
                }
        if "start" in job:
            result["ideal"] = ideal[torch.linspace(0, len(ideal) - 1, KEPT).long(), n].tolist()
        progress(1.0, "done")
        yield job, result


def random_start(seed: int) -> list[float]:
    """u, v > 0 and w, standard normal; v < 0 may kill the neuron, and L = ℓ ∘ Φ needs u > 0."""
    u, v, w = torch.randn(
        3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).tolist()
    return [abs(u), abs(v), w]


def condition_starts(starts: Tensor) -> Tensor:
    """Starts (n, 3) after ``condition_`` of a network that holds them."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
    v, w, u = model.parameters()
    prepared = prepare(model, torch.ones(1, 1, dtype=torch.float64))
    out = []
    for start in starts:
        with torch.no_grad():
            for parameter, value in zip((u, v, w), start, strict=True):
                parameter.fill_(value)
        condition_(model, prepared, criterion=PathKernel())
        out.append([u.item(), v.item(), w.item()])
    return torch.tensor(out, dtype=torch.float64)


def lift(theta: Tensor) -> Tensor:
    """Φ = (uv, uw), (..., 2), of θ = (u, v, w), (..., 3)."""
    return theta[..., :1] * theta[..., 1:]


def loss(theta: Tensor, x: Tensor) -> Tensor:
    """L(θ), the mean over the samples of (u·relu(vx + w) − relu(x))², (...)."""
    u = theta[..., :1]
    v = theta[..., 1:2]
    w = theta[..., 2:]
    out: Tensor = (u * (v * x + w).relu() - x.relu()).square().mean(-1)
    return out


def lifted_loss(z: Tensor, x: Tensor) -> Tensor:
    """ℓ(z), with ℓ(Φ(θ)) = L(θ) where u > 0: that of θ = (1, z), (...)."""
    return loss(torch.cat([torch.ones_like(z[..., :1]), z], dim=-1), x)


def descend(starts: Tensor, x: Tensor, steps: int) -> Tensor:
    """Gradient descent from each start (n, 3): (steps + 1, n, 3)."""
    gradient = torch.func.grad(lambda theta: loss(theta, x).sum())
    path = [starts]
    for _ in range(steps):
        path.append(path[-1] - LEARNING_RATE * gradient(path[-1]))
    return torch.stack(path)


def ideal_paths(starts: Tensor, x: Tensor, *, time: float, steps: int) -> Tensor:
    """The ideal flow from each start (n, 2), all as one vector that it does not mix: (steps + 1, n,
    2).
    """
    path = ideal_flow(
        lambda z: lifted_loss(z.view(-1, 2), x).sum(), starts.flatten(), time=time, steps=steps
    )
    return path.view(steps + 1, -1, 2)


def distance(path: Tensor, other: Tensor, points: int = 200) -> float:
    """Mean distance of two curves (n, 2) at equal shares of their lengths: of their courses, at
    whatever speed.

    >>> straight, bent = (
    ...     torch.tensor([[0.0, 0], [2, 0]]),
    ...     torch.tensor([[0.0, 0], [1, 1], [2, 0]]),
    ... )
    >>> round(distance(straight, bent), 2)
    0.5
    """
    return float((_at_shares(path, points) - _at_shares(other, points)).norm(dim=1).mean())


def _at_shares(path: Tensor, points: int) -> Tensor:
    """The curve at equally spaced shares of its length, (points, 2)."""
    lengths = path.diff(dim=0).norm(dim=1)
    along = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    wanted = torch.linspace(0, 1, points, dtype=path.dtype) * along[-1]
    right = torch.searchsorted(along, wanted).clamp(1, len(path) - 1)
    share = (wanted - along[right - 1]) / (along[right] - along[right - 1]).clamp(min=1e-300)
    return torch.lerp(path[right - 1], path[right], share.clamp(0, 1)[:, None])


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """Loss, lifted trajectories, parameter trajectories; a colour per start."""
    from ..style import BLACK, CYCLE, panels

    drawing, (losses, lifts, parameters) = panels(1, 3, width=3.6, height=3.0)
    optima = torch.linspace(0.25, 3.2, 100)
    parameters.plot(optima, 1 / optima, color="0.7", linewidth=3, label="uv = 1")
    for colour, row in zip(CYCLE, _of_figure(rows), strict=False):
        for name, dash in (("plain", "--"), ("rescaled", "-")):
            curve = row.result[name]
            path = torch.tensor(curve["path"])
            label = f"θ₀ = {_text(row.job['start'])}" if name == "rescaled" else None
            look: dict[str, Any] = {"color": colour, "linestyle": dash, "label": label}
            losses.plot(curve["step"], curve["loss"], **look)
            lifts.plot(*lift(path).T, **look)
            parameters.plot(path[:, 0], path[:, 1], **look)
            parameters.plot(
                path[0, 0],
                path[0, 1],
                marker="o",
                color=colour,
                fillstyle="none" if name == "plain" else "full",
            )
        lifts.plot(*torch.tensor(row.result["ideal"]).T, color=colour, linestyle=":", linewidth=2)
        lifts.plot(*lift(path[0]), marker="o", color=colour)
    lifts.plot(1, 0, marker="*", color=BLACK, markersize=9)
    for dash, name in (("--", "from θ₀"), ("-", "from θ₀ rescaled"), (":", "ideal flow")):
        lifts.plot([], [], color="0.3", linestyle=dash, label=name)
    losses.set(xlabel="step", ylabel="loss L(θ)", yscale="log", ylim=(1e-8, None), title="Loss")
    lifts.set(xlabel="uv", ylabel="uw", title="Lifted space Φ(θ)")
    parameters.set(
        xlabel="u", ylabel="v", xlim=(0, 2), ylim=(0, 3.5), title="Parameter space (u, v)"
    )
    losses.legend(handles=losses.get_lines()[1::2], fontsize=7)
    lifts.legend(handles=lifts.get_lines()[-3:], fontsize=7)
    parameters.legend(handles=parameters.get_lines()[:1], fontsize=7)
    drawing.set_label(
        "fig:toy_example: loss over steps (left), the path of the function (middle) and of the "
        "weights (right) from three starts; open circles as they are, full ones conditioned."
    )
    return {"toy": drawing}


def table(rows: Sequence[Row]) -> str:
    """Mean loss over the steps, steps to a thousandth of the first loss, distance from the ideal
    flow.
    """
    lines = [
        "One neuron (fig:toy_example): gradient descent from θ₀ = (u, v, w), plain → conditioned",
        "",
        f"{'start':<22}{'mean loss':>22}{'steps to loss / 1000':>24}{'distance to ideal flow':>26}",
    ]
    for row in _of_figure(rows):
        plain = row.result["plain"]
        rescaled = row.result["rescaled"]
        cells = [
            f"{plain['mean_loss']:.2e} → {rescaled['mean_loss']:.2e}",
            f"{plain['steps_to_share']:.0f} → {rescaled['steps_to_share']:.0f}",
            f"{plain['distance']:.3f} → {rescaled['distance']:.3f}",
        ]
        lines.append(f"{_text(row.job['start']):<22}{cells[0]:>22}{cells[1]:>24}{cells[2]:>26}")
    return "\n".join(
        [
            *lines,
            "",
            _elsewhere(rows, "mean_loss", "faster"),
            _elsewhere(rows, "distance", "closer to the ideal flow"),
        ]
    )


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Faster, and closer to the ideal flow."""
    return [
        _claim(
            rows,
            "mean_loss",
            "faster",
            "Rescaled initializations lead to faster convergence (sec:sketch_simple_example, "
            "fig:toy_example, left).",
        ),
        _claim(
            rows,
            "distance",
            "closer to the ideal flow",
            "Lifted trajectories from rescaled initializations follow the ideal flow more "
            "closely (fig:toy_example, middle).",
        ),
    ]


def _claim(rows: Sequence[Row], measure: str, word: str, paper: str) -> Claim:
    found = _of_figure(rows)
    if len(found) < len(STARTS):
        return Claim.not_run(paper)
    ratios = [row.result["rescaled"][measure] / row.result["plain"][measure] for row in found]
    what = (
        "mean loss over the steps"
        if measure == "mean_loss"
        else "mean distance at equal shares of the length"
    )
    shares = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    return Claim.judge(
        paper,
        max(ratios) < 1,
        f"The {what} falls to {shares} of what it was, from {len(found)} starts with a small u.",
        _elsewhere(rows, measure, word),
        bound="it is less from every start of the figure",
    )


def _elsewhere(rows: Sequence[Row], measure: str, word: str) -> str:
    """How random starts fare, by the side on which u is."""
    parts = []
    for is_small, name in ((True, "u² < v² + w²"), (False, "u² > v² + w²")):
        found = [
            row.result
            for row in rows
            if "seed" in row.job and is_small == (_excess(row.result["theta"]) < 0)
        ]
        wins = sum(result["rescaled"][measure] < result["plain"][measure] for result in found)
        parts.append(f"{wins} of {len(found)} with {name}")
    return f"Random starts that are {word} conditioned: {', '.join(parts)}."


def _excess(theta: Sequence[float]) -> float:
    u, v, w = theta
    return u * u - v * v - w * w


def _of_figure(rows: Sequence[Row]) -> list[Row]:
    """The rows of the three starts, in their order; of those with most steps, if there are
    several.
    """
    steps = max((row.job["steps"] for row in rows), default=0)
    found = [row for row in rows if "start" in row.job and row.job["steps"] == steps]
    return sorted(found, key=lambda row: STARTS.index(tuple(row.job["start"])))


def _text(start: Sequence[float]) -> str:
    return f"({', '.join(f'{value:g}' for value in start)})"
