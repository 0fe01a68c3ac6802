"""How much PathCond rescales a network at initialisation, over uneven widths and variances
(``fig:regime_analysis``).

Eight hidden layers divide 256 neurons by a symmetric Dirichlet(α): very unevenly for α → 0, 32 each
for α → ∞. All weights and biases have one variance σ² = a/32, with a the gain n σ² of a layer of
mean width. Inputs and outputs, whose number the paper leaves open, are 32 as well, so that α alone
makes widths vary.

Plotted is max |log λ|, with λ the factor that a neuron's incoming weights get: log λ = u/2. The
paper's box returns e^u, so its own values may be twice as large.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pathcond.condition import prepare
from pathcond.lifting.lifting import diag_g
from pathcond.networks import mlp
from pathcond.rows import Job, Result, Row
from pathcond.solvers import CoordinateDescent, Exact, Solver, solve

from ..figure import Claim, Place, Preset, Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

DATASETS: Mapping[Preset, Sequence[str]] = {"smoke": (), "cpu": (), "paper": ()}
LAYERS = 8
NEURONS = 256
ENDS = 32
GAINS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # a = 32 σ²
GAINS_LISTED = ", ".join(f"{gain:g}" for gain in GAINS)
ALPHAS: Mapping[Preset, int] = {"smoke": 3, "cpu": 10, "paper": 20}
REPETITIONS: Mapping[Preset, int] = {"smoke": 2, "cpu": 10, "paper": 20}
SOLVERS: dict[str, Solver] = {"exact": Exact(), "paper": CoordinateDescent(sweeps=10)}
TREND = 0.1  # of a rank correlation, from which on it is one


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """A network for every α, from 0.1 to 100, and repetition; all variances inside."""
    alphas = torch.logspace(-1, 2, ALPHAS[preset], dtype=torch.float64).tolist()
    repetitions = range(REPETITIONS[preset] if seeds is None else seeds)
    return [
        {"figure": "regimes", "alpha": round(alpha, 6), "seed": seed}
        for alpha in alphas
        for seed in repetitions
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """By repetition: networks share nothing."""
    seeds = sorted({job["seed"] for job in jobs})
    return [[job for job in jobs if job["seed"] == seed] for seed in seeds]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Solve every network at every variance; it is captured once, and drawn once up to σ."""
    for n, job in enumerate(jobs):
        progress(n / len(jobs), f"α = {job['alpha']:.3g}")
        generator = torch.Generator().manual_seed(job["seed"])
        widths = sample_widths(job["alpha"], generator)
        model = mlp(widths, inputs=ENDS, outputs=ENDS).double()
        prepared = prepare(model, torch.ones(1, ENDS, dtype=torch.float64))
        standard = [
            torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            for parameter in model.parameters()
        ]
        largest: dict[str, list[float]] = {name: [] for name in SOLVERS}
        for gain in GAINS:
            with torch.no_grad():
                for parameter, values in zip(model.parameters(), standard, strict=True):
                    parameter.copy_(values * (gain * LAYERS / NEURONS) ** 0.5)
            g = diag_g(model, prepared.sample)
            for name, solver in SOLVERS.items():
                largest[name].append(
                    float(solve(prepared.symmetry, g, solver=solver).log_scales.abs().max())
                )
        yield job, {"widths": widths, "gains": list(GAINS), "largest": largest}


def sample_widths(alpha: float, generator: torch.Generator) -> list[int]:
    """Widths of the hidden layers: one neuron each, the others by Dirichlet(α) shares and largest
    remainders.

    >>> sum(sample_widths(0.1, torch.Generator().manual_seed(0)))
    256
    """
    return with_largest_remainders(dirichlet(alpha, LAYERS, generator), NEURONS)


def dirichlet(alpha: float, size: int, generator: torch.Generator) -> Tensor:
    """Shares (size,) from a symmetric Dirichlet(α).

    In logarithms: for small α all Gamma(α) variables but one may be below the range of floats.
    Gamma(α) = Gamma(α + 1) · U^(1/α).
    """
    gammas = torch._standard_gamma(
        torch.full((size,), alpha + 1, dtype=torch.float64), generator=generator
    )
    uniforms = torch.rand(size, dtype=torch.float64, generator=generator)
    return (gammas.log() + uniforms.log() / alpha).softmax(0)


def with_largest_remainders(shares: Tensor, total: int) -> list[int]:
    """Whole numbers of at least 1 that add up to ``total``, what is over 1 in proportion to the
    shares.

    >>> with_largest_remainders(torch.tensor([0.5, 0.3, 0.2]), 10)
    [5, 3, 2]
    """
    exact = shares * (total - len(shares))
    whole = exact.floor()
    left = total - len(shares) - int(whole.sum())
    whole[(exact - whole).argsort(descending=True, stable=True)[:left]] += 1
    return [1 + int(width) for width in whole]


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """max |log λ| over α, a line per gain; the exact optimum, then the paper's ten sweeps."""
    from matplotlib import colormaps

    from ..style import band, panels

    drawing, axes = panels(1, 2, width=3.8, height=3.0)
    alphas = sorted({row.job["alpha"] for row in rows})
    titles = ("PathCond, exact", "PathCond, ten sweeps")
    for panel, solver, title in zip(axes, SOLVERS, titles, strict=True):
        for place, gain in enumerate(GAINS):
            columns = [_magnitudes(rows, solver, gain, alpha) for alpha in alphas]
            if columns:
                repetitions = min(map(len, columns))
                runs = list(zip(*(column[:repetitions] for column in columns), strict=True))
                band(
                    panel,
                    alphas,
                    runs,
                    label=f"{gain:g}",
                    color=colormaps["viridis"](place / len(GAINS)),
                )
        panel.set(
            xscale="log",
            xlabel="α: uneven → even widths",
            ylabel="max |log λ|",
            title=title,
            yscale="log",
            ylim=(0.3, 70),
        )
    drawing.legend(
        *axes[0].get_legend_handles_labels(),
        title="a = 32 σ²",
        loc="outside right center",
        fontsize=7,
    )
    drawing.set_label(
        "fig:regime_analysis: greatest log-scale over how even the widths are, a line per variance "
        "of the weights; bands are deviations over networks."
    )
    return {"regimes": drawing}


def table(rows: Sequence[Row]) -> str:
    """Mean max |log λ| by α and gain."""
    lines = [
        "max |log λ| of PathCond (exact | ten sweeps) over α and a = 32 σ² (fig:regime_analysis)",
        "",
    ]
    lines.append(f"{'α':>8}" + "".join(f"{f'a = {gain:g}':>16}" for gain in GAINS))
    for alpha in sorted({row.job["alpha"] for row in rows}):
        means = [
            [statistics.fmean(_magnitudes(rows, solver, gain, alpha)) for solver in SOLVERS]
            for gain in GAINS
        ]
        lines.append(
            f"{alpha:>8.3g}"
            + "".join(f"{f'{exact:.2f} | {sweeps:.2f}':>16}" for exact, sweeps in means)
        )
    return "\n".join(lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Both trends, by rank correlation: of the paper's ten sweeps, and of the exact optimum."""
    uneven = "The rescaling grows as layer widths become more irregular (fig:regime_analysis)."
    variance = "The rescaling grows as the initialization variance decreases (fig:regime_analysis)."
    if len({row.job["alpha"] for row in rows}) < 2:
        return [Claim.not_run(uneven), Claim.not_run(variance)]
    over_alpha, exact_over_alpha = (_over_alpha(rows, solver) for solver in ("paper", "exact"))
    over_gain, exact_over_gain = (_over_gain(rows, solver) for solver in ("paper", "exact"))
    means = [
        statistics.fmean(column)
        for column in zip(*(row.result["largest"]["paper"] for row in rows), strict=True)
    ]
    return [
        Claim.judge(
            uneven,
            max(over_alpha) < -TREND,
            f"{min(over_alpha):.2f} to {max(over_alpha):.2f} is the rank correlation of max "
            f"|log λ| with α, the evenness of widths, over {len(rows)} networks.",
            f"It is {_join(over_alpha)} for a = {GAINS_LISTED}. {_extremes(rows, 1.0)}. "
            f"{_extremes(rows, GAINS[0])}.",
            bound=f"it is below {-TREND} at every variance: a trend, with exceptions",
            ours=f"{min(exact_over_alpha):.2f} to {max(exact_over_alpha):.2f} at the exact "
            "optimum.",
        ),
        Claim.judge(
            variance,
            over_gain < -TREND,
            f"{over_gain:.2f} is the rank correlation of max |log λ| with a ≤ 1, 32 times the "
            f"variance, mean over {len(rows)} networks.",
            f"On average max |log λ| is {_join(means)} for a = {GAINS_LISTED}.",
            bound=f"it is below {-TREND}",
            ours=f"{exact_over_gain:.2f} at the exact optimum.",
        ),
    ]


def _over_alpha(rows: Sequence[Row], solver: str) -> list[float]:
    """Rank correlation of max |log λ| with α, for every gain."""
    alphas = [row.job["alpha"] for row in rows]
    columns = zip(*(row.result["largest"][solver] for row in rows), strict=True)
    return [spearman(alphas, column) for column in columns]


def _over_gain(rows: Sequence[Row], solver: str) -> float:
    """Rank correlation of max |log λ| with gains up to 1, mean over the networks."""
    small = [gain for gain in GAINS if gain <= 1]
    return statistics.fmean(
        spearman(small, row.result["largest"][solver][: len(small)]) for row in rows
    )


def _extremes(rows: Sequence[Row], gain: float) -> str:
    """Means of the ten sweeps at both ends of α, and where in between the mean is largest."""
    alphas = sorted({row.job["alpha"] for row in rows})
    columns = {alpha: _magnitudes(rows, "paper", gain, alpha) for alpha in alphas}
    peak = max(alphas, key=lambda alpha: statistics.fmean(columns[alpha]))
    texts = [
        f"{statistics.fmean(columns[a]):.1f} ± {statistics.pstdev(columns[a]):.1f} at α = {a:.3g}"
        for a in (alphas[0], alphas[-1])
    ]
    return f"At a = {gain:g} it is {' and '.join(texts)}, largest at α = {peak:.3g}"


def _join(values: Sequence[float]) -> str:
    return ", ".join(f"{value:.2f}" for value in values)


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Correlation of ranks; equal values share the mean of theirs.

    >>> round(spearman([1, 2, 3, 3], [10, 20, 40, 30]), 3)
    0.949
    """
    ranks = torch.stack([_ranks(torch.tensor(values, dtype=torch.float64)) for values in (x, y)])
    return float(torch.corrcoef(ranks)[0, 1])


def _ranks(values: Tensor) -> Tensor:
    below = (values[:, None] > values).sum(1)
    alike = (values[:, None] == values).sum(1)
    return below + (alike + 1) / 2


def _magnitudes(rows: Sequence[Row], solver: str, gain: float, alpha: float) -> list[float]:
    place = GAINS.index(gain)
    return [row.result["largest"][solver][place] for row in rows if row.job["alpha"] == alpha]
