"""Products of scalars, on which criteria for a rescaling have the same minimiser
(``sec:minequivalenceex``).

    first example     θ = (u, v),        Φ = uv         L = ℓ ∘ Φ
    second example    θ = (u_1 … u_L),   Φ = Π u_i

Each criterion is minimised by itself over the orbit θ e^t, Σ t_i = 0; PathCond's own minimiser
comes from ``solve`` on a chain of linear layers. A criterion without a minimiser has None: a
negative trace that falls for ever, or one that is constant on the orbit.

What the paper's sentences need besides: a norm of ∇L that is unchanged when u and v are swapped,
ℓ'' > 0 for the trace, ℓ' ≠ 0 for ‖∇L‖, a regular ∇²L for its condition number, and no u_i = 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from pathcond.condition import prepare
from pathcond.lifting.lifting import diag_g
from pathcond.rows import Job, Result, Row
from pathcond.solvers import Exact, solve

from ..figure import Claim, Place, Preset, Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Function = Callable[[Tensor], Tensor]

DATASETS: Mapping[Preset, Sequence[str]] = {"smoke": (), "cpu": (), "paper": ()}
SEEDS: Mapping[Preset, int] = {"smoke": 3, "cpu": 20, "paper": 20}
LENGTHS = (2, 5)  # of θ, in the first and the second example
TARGET = 1.5
LOSSES: dict[str, Function] = {  # ℓ; the last is not convex: ℓ'' < 0 further than 1 from the target
    "square": lambda z: (z - TARGET).square() / 2,
    "logistic": lambda z: torch.nn.functional.softplus(-TARGET * z),
    "Welsch": lambda z: 1 - (-(z - TARGET).square() / 2).exp(),
}
NORMS: dict[str, Function] = {  # of (..., 2)
    "1": lambda x: x.abs().sum(-1),
    "2": lambda x: x.norm(dim=-1),
    "∞": lambda x: x.abs().amax(-1),
    "s": lambda x: (x.square().sum(-1) + x.sum(-1).square()).sqrt(),  # sees signs
    "w": lambda x: (x[..., 0].square() + 4 * x[..., 1].square()).sqrt(),  # sees the order
}
SYMMETRIC = ("1", "2", "∞", "s")
REACH = 12.0  # a minimiser in |t| ≤ this; e^12 is far more than random starts need
AGREEMENT = 1e-6
NORM_SIGNS = {"1": "₁", "2": "₂", "∞": " ∞", "s": ", sees signs", "w": ", sees order"}
NAMES = {
    "trace": "tr ∇²L",
    "condition": "κ(∇²L)",
    "operator": "‖∇²L‖",
    "inverse": "‖θ⁻¹‖₂",
    "pathcond": "PathCond",
} | {
    f"{kind} {norm}": f"‖{symbol}‖{sign}"
    for kind, symbol in (("gradient", "∇L"), ("norm", "θ"))
    for norm, sign in NORM_SIGNS.items()
}


def jobs(preset: Preset, seeds: int | None = None) -> list[Job]:
    """Both examples with every loss, from random θ."""
    number = SEEDS[preset] if seeds is None else seeds
    return [
        {"figure": "criteria", "length": length, "loss": loss, "seed": seed}
        for length in LENGTHS
        for loss in LOSSES
        for seed in range(number)
    ]


def together(jobs: Sequence[Job]) -> list[list[Job]]:
    """By example and loss: the minimisers of all θ are bracketed at once."""
    groups = (
        [job for job in jobs if (job["length"], job["loss"]) == key]
        for key in product(LENGTHS, LOSSES)
    )
    return [group for group in groups if group]


def run(jobs: Sequence[Job], place: Place, progress: Progress) -> Iterator[tuple[Job, Result]]:
    """Minimise every criterion over the orbits of random θ, all of one length and with one loss."""
    length = jobs[0]["length"]
    loss = LOSSES[jobs[0]["loss"]]
    generators = [torch.Generator().manual_seed(job["seed"]) for job in jobs]
    theta = torch.stack(
        [torch.randn(length, dtype=torch.float64, generator=generator) for generator in generators]
    )
    slope = torch.func.grad(lambda phi: loss(phi).sum())
    b = slope(theta.prod(-1))
    a = torch.func.grad(lambda phi: slope(phi).sum())(theta.prod(-1))
    functions = criteria(a, b, length)
    minimisers = {"pathcond": pathcond_minimisers(theta)}
    for n, (name, criterion) in enumerate(functions.items()):
        progress(n / len(functions), f"{jobs[0]['loss']} loss, {NAMES[name]}")
        minimisers[name] = bisection(criterion, theta) if length == 2 else newton(criterion, theta)
    for n, job in enumerate(jobs):
        found = {
            name: t[n].tolist() if t[n].isfinite().all() else None for name, t in minimisers.items()
        }
        yield job, {"theta": theta[n].tolist(), "curvature": float(a[n]), "minimisers": found}


def derivatives(a: Tensor, b: Tensor, theta: Tensor) -> tuple[Tensor, Tensor]:
    """∇L = b ∇Φ, (n, L), and ∇²L = a ∇Φ ∇Φᵀ + b ∇²Φ, (n, L, L), of θ (n, L); a = ℓ'' and b = ℓ' at
    Φ, (n,).
    """
    phi = theta.prod(-1)
    inverse = theta.reciprocal()
    both = inverse[..., :, None] * inverse[..., None, :]
    off_diagonal = both * (1 - torch.eye(theta.shape[-1]))
    gradient = (b * phi)[..., None] * inverse
    return gradient, (a * phi.square())[..., None, None] * both + (b * phi)[
        ..., None, None
    ] * off_diagonal


def criteria(a: Tensor, b: Tensor, length: int) -> dict[str, Function]:
    """Functions from θ (n, L) to (n,); a and b are the same on the whole orbit.

    The first example has more, because the paper says more about it.
    """

    def gradient(theta: Tensor) -> Tensor:
        return derivatives(a, b, theta)[0]

    def hessian(theta: Tensor) -> Tensor:
        return derivatives(a, b, theta)[1]

    found: dict[str, Function] = {
        "trace": lambda theta: hessian(theta).diagonal(dim1=-2, dim2=-1).sum(-1),
        "inverse": lambda theta: theta.reciprocal().norm(dim=-1),
        "gradient 2": lambda theta: gradient(theta).norm(dim=-1),
        "norm 2": lambda theta: theta.norm(dim=-1),
    }
    if length > 2:
        return found
    found |= {
        "condition": lambda theta: (
            _operator_norm(hessian(theta)).square() / _determinant(hessian(theta)).abs()
        ),
        "operator": lambda theta: _operator_norm(hessian(theta)),
    }
    for name, norm in NORMS.items():
        found[f"gradient {name}"] = partial(_of_gradient, norm, gradient)
        found[f"norm {name}"] = norm
    return found


def _of_gradient(norm: Function, gradient: Function, theta: Tensor) -> Tensor:
    return norm(gradient(theta))


def _operator_norm(hessian: Tensor) -> Tensor:
    """The larger |eigenvalue| of 2 × 2 matrices; in closed form, which differentiates where both
    coincide as well.
    """
    first = hessian[..., 0, 0]
    last = hessian[..., 1, 1]
    off = hessian[..., 0, 1]
    return (first + last).abs() / 2 + torch.hypot((first - last) / 2, off)


def _determinant(hessian: Tensor) -> Tensor:
    """λ₊ λ₋: so that λ₋ keeps its digits where it is much smaller than λ₊."""
    return hessian[..., 0, 0] * hessian[..., 1, 1] - hessian[..., 0, 1].square()


def pathcond_minimisers(theta: Tensor) -> Tensor:
    """t (n, L) with θ e^t the parameters that PathCond makes of a chain of linear layers."""
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in theta[0])).double()
    prepared = prepare(model, torch.ones(1, 1, dtype=torch.float64))
    found = []
    for values in theta:
        with torch.no_grad():
            for parameter, value in zip(model.parameters(), values, strict=True):
                parameter.fill_(value)
        solution = solve(
            prepared.symmetry, diag_g(model, prepared.sample), solver=Exact(tolerance=1e-12)
        )
        factors = prepared.symmetry.factors(solution.log_scales)
        found.append(
            torch.cat([factors[name].flatten().log() for name, _ in model.named_parameters()])
        )
    return torch.stack(found)


def bisection(criterion: Function, theta: Tensor, steps: int = 50) -> Tensor:
    """t = (s, −s), (n, 2), where the criterion of θ e^t, θ (n, 2), turns from falling to rising;
    NaN where it does not.

    A sign of the slope is enough, so kinks as those of ‖·‖_∞ do no harm.
    """
    opposite = torch.tensor([1.0, -1.0], dtype=torch.float64)
    slope = torch.func.grad(lambda s: criterion(theta * (s[:, None] * opposite).exp()).sum())
    right = torch.full((len(theta),), REACH, dtype=torch.float64)
    left = -right
    turns = (slope(left) < 0) & (slope(right) > 0)
    for _ in range(steps):
        middle = (left + right) / 2
        falls = slope(middle) < 0
        left = torch.where(falls, middle, left)
        right = torch.where(falls, right, middle)
    return torch.where(turns, left, torch.nan)[:, None] * opposite


def newton(criterion: Function, theta: Tensor, steps: int = 100) -> Tensor:
    """The same in more dimensions: t (n, L), Σ t_i = 0, by damped Newton steps; NaN where the
    criterion is not positive.

    On the logarithm, which of a sum of exponentials is convex.
    """

    def whole(s: Tensor) -> Tensor:
        return torch.cat([s, -s.sum(-1, keepdim=True)], dim=-1)

    def values(s: Tensor) -> Tensor:
        return criterion(theta * whole(s).exp()).log()

    gradient = torch.func.grad(lambda s: values(s).sum())
    # the orbits do not mix: (L − 1, n, L − 1)
    hessian = torch.func.jacfwd(lambda s: gradient(s).sum(0))
    s = torch.zeros(len(theta), theta.shape[1] - 1, dtype=torch.float64)
    for _ in range(steps):
        slope = gradient(s)
        if not bool((slope.norm(dim=-1) > 1e-13).any()):
            break
        step = torch.linalg.solve(hessian(s).transpose(0, 1), slope)
        s = s - step / step.norm(dim=-1, keepdim=True).clamp(min=1)
    found = (criterion(theta) > 0) & (gradient(s).norm(dim=-1) < 1e-9)
    return torch.where(found[:, None], whole(s), torch.nan)


def apart(result: Result, one: str, other: str) -> float:
    """Largest |t_i| between two minimisers; NaN unless both exist."""
    a = result["minimisers"][one]
    b = result["minimisers"][other]
    return (
        math.nan if a is None or b is None else max(abs(x - y) for x, y in zip(a, b, strict=True))
    )


def plot(rows: Sequence[Row]) -> dict[str, Drawing]:
    """How far each criterion's minimisers lie from those of ‖θ‖₂ (first example) and ‖θ⁻¹‖₂
    (second); a dot per θ.
    """
    from ..style import CYCLE, panels

    drawing, axes = panels(1, 2, width=5.2, height=3.4)
    for panel, length, against, title in zip(
        axes,
        LENGTHS,
        ("norm 2", "inverse"),
        ("First example, θ = (u, v)", f"Second example, L = {LENGTHS[1]}"),
        strict=True,
    ):
        found = [row for row in rows if row.job["length"] == length]
        names = [
            name for name in (found[0].result["minimisers"] if found else ()) if name != against
        ]
        for colour, marker, loss in zip(CYCLE, "o^s", LOSSES, strict=False):
            points = [
                (max(apart(row.result, name, against), 1e-17), place)
                for row in found
                if row.job["loss"] == loss
                for place, name in enumerate(names)
                if not math.isnan(apart(row.result, name, against))
            ]
            x, y = zip(*points, strict=True) if points else ((), ())
            panel.plot(x, y, marker, color=colour, label=loss, fillstyle="none", alpha=0.7)
        panel.axvline(AGREEMENT, color="0.6", linestyle=":")
        panel.set(
            xscale="log",
            xlim=(3e-18, 30),
            title=title,
            xlabel=f"distance from the minimiser of {NAMES[against]}, in log λ",
        )
        panel.set_yticks(range(len(names)), [NAMES[name] for name in names])
        panel.invert_yaxis()
    axes[1].legend(title="loss ℓ", fontsize=7)
    drawing.set_label(
        "Appendix C (no figure of the paper): how far the minimisers of criteria lie from that of "
        "a norm, a mark per random θ; left of the dotted line they agree."
    )
    return {"criteria": drawing}


def table(rows: Sequence[Row]) -> str:
    """Largest distances, by example and criterion."""
    lines = [
        "Minimisers of criteria over rescalings (sec:minequivalenceex): largest distance "
        "from that of the first, in log λ",
        "",
    ]
    for length, against in zip(LENGTHS, ("norm 2", "inverse"), strict=True):
        found = [row.result for row in rows if row.job["length"] == length]
        if found:
            lines.append(f"{NAMES[against]}, θ of length {length}, {len(found)} of them")
            for name in found[0]["minimisers"]:
                if name != against:
                    distances = _distances(found, name, against)
                    without = len(found) - len(distances)
                    note = f"   none in {without}" if without else ""
                    lines.append(
                        f"  {NAMES[name]:<18}{max(distances, default=math.nan):>10.1e}{note}"
                    )
            lines.append("")
    return "\n".join(lines)


def claims(rows: Sequence[Row]) -> list[Claim]:
    """Every equality of sec:minequivalenceex, and PathCond's own minimiser beside them."""
    first = [row.result for row in rows if row.job["length"] == 2]
    second = [row.result for row in rows if row.job["length"] > 2]
    convex, concave = [[r for r in first if (r["curvature"] > 0) == sign] for sign in (True, False)]
    symmetric = [(f"gradient {norm}", f"norm {norm}") for norm in SYMMETRIC]
    weighted = max(_distances(first, "gradient w", "norm w"), default=0.0)
    without = sum(result["minimisers"]["trace"] is None for result in concave)
    return [
        _claim(
            "‖∇L‖ and ‖θ‖ have the same minimiser for any norm (eq:MinGradNormIsMinThetaNorm).",
            first,
            symmetric,
            holds=weighted <= AGREEMENT,
            where=f" for four norms; {weighted:.2f} for (x₁² + 4x₂²)^½",
            details="A swap of u and v leaves the four alone; the last sees the order.",
        ),
        _claim(
            "tr ∇²L and ‖θ‖₂ have the same minimiser (eq:MinHessianTraceIsMinThetaNorm).",
            convex,
            [("trace", "norm 2")],
            where=" where ℓ'' > 0",
            details=f"Where ℓ'' < 0 the trace has none ({without} of {len(concave)} θ).",
        ),
        _claim(
            "κ(∇²L), ‖∇²L‖ and ‖θ‖₂ have the same minimiser, ℓ'' ≥ 0 assumed "
            "(eq:MinCondOrOpNormIsMinThetaNorm).",
            first,
            [("condition", "norm 2"), ("operator", "norm 2")],
            where=f", also for the {len(concave)} with ℓ'' < 0",
        ),
        _claim(
            "Second example: ‖∇L‖, tr ∇²L and ‖θ⁻¹‖₂ have the same minimiser "
            "(eq:MinGradNormOrHessianTraceIsMinThetaInvNorm).",
            [result for result in second if result["curvature"] > 0],
            [("gradient 2", "inverse"), ("trace", "inverse")],
            where=" where ℓ'' > 0",
        ),
        _claim(
            "Natural criteria are equivalent on toy examples (sec:minequivalenceex; PathCond's "
            "own is not among them).",
            [*first, *second],
            [("pathcond", "inverse"), ("pathcond", "norm 2")],
            where=" for PathCond against ‖θ⁻¹‖₂ and ‖θ‖₂, in both examples",
        ),
    ]


def _claim(
    paper: str,
    results: Sequence[Result],
    pairs: Sequence[tuple[str, str]],
    *,
    where: str,
    details: str = "",
    holds: bool = True,
) -> Claim:
    if not results:
        return Claim.not_run(paper)
    distances = [distance for one, other in pairs for distance in _distances(results, one, other)]
    complete = len(distances) == len(results) * len(pairs)
    largest = max(distances, default=math.inf)
    return Claim.judge(
        paper,
        holds and complete and largest <= AGREEMENT,
        f"At most {max(largest, 1e-12):.0e} apart in log λ over {len(results)} random θ{where}.",
        details,
        bound=f"they are at most {AGREEMENT:g} apart in log λ",
    )


def _distances(results: Sequence[Result], one: str, other: str) -> list[float]:
    """Those that exist."""
    return [distance for result in results if not math.isnan(distance := apart(result, one, other))]
