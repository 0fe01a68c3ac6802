"""What one call before training does, on handwritten digits: at tuned learning rates, then four
ways side by side at small ones.

The digits (1,797 images of 8×8) come with scikit-learn. All runs start from the same weights and
see the same batches.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..condition import condition_
from ..criteria.criterion import PathKernel
from ..networks import mlp
from ..rates import RateComparison
from ..report import Report
from ..solvers import CoordinateDescent, ENorm
from ..teleporting import teleport
from . import demo_rates

if TYPE_CHECKING:
    from rich.progress import Progress

BATCH = 64
TARGET = 0.99
TUNED_SHARE = 0.75  # of the epochs, for the autoencoder
LEARNING_RATES = {1e-2: 0.3, 1e-3: 1.0}  # and the share of the epochs of each


@dataclass
class Run:
    """One network in training.

    Attributes:
        name: How it was prepared.
        model: The network.
        report: What ``condition_`` did, if it was called.
        every_epoch: Options of the teleport that the method makes after every epoch; None if it
            makes none.
        accuracy, loss: On the training set, after every epoch.
    """

    name: str
    model: nn.Module
    report: Report | None = None
    every_epoch: dict[str, Any] | None = None
    accuracy: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)

    @property
    def epochs_to_target(self) -> int | None:
        return next(
            (epoch for epoch, accuracy in enumerate(self.accuracy, start=1) if accuracy >= TARGET),
            None,
        )


def digits() -> tuple[Tensor, Tensor]:
    """Images as (1797, 64) standardised pixels, and labels."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(
            'The demo needs the "demo" extra: pip install "pathcond[demo]"'
        ) from error
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32)
    return (x - x.mean()) / x.std(), torch.tensor(labels)


def network() -> nn.Sequential:
    """64-256-256-256-10 with BatchNorm, the same weights every time."""
    torch.manual_seed(0)
    return mlp((256, 256, 256), inputs=64, batch_norm=True)


def runs(batch: Tensor) -> list[Run]:
    """The four ways: as it comes, ENorm after every epoch, conditioned as in the paper, and at the
    true optimum of the paper's criterion, which is the one for small rates.
    """
    balancing = {"solver": ENorm(), "normalization": "paper", "verify": False}
    baseline = Run("baseline", network())
    enorm = Run("ENorm every epoch", network(), every_epoch=balancing)
    paper, exact = network(), network()
    as_in_paper = condition_(
        paper, batch, solver=CoordinateDescent(), normalization="paper", calibrate=False
    )
    at_optimum = condition_(exact, batch, criterion=PathKernel(), normalization="absorb")
    return [
        baseline,
        enorm,
        Run("PathCond as in the paper", paper, as_in_paper),
        Run("PathCond, exact", exact, at_optimum),
    ]


def train(
    runs: list[Run], x: Tensor, y: Tensor, *, learning_rate: float, epochs: int
) -> Iterator[int]:
    """SGD on all of them, the same batches for each; yields after every epoch."""
    optimizers = [torch.optim.SGD(run.model.parameters(), lr=learning_rate) for run in runs]
    teleports = [
        teleport(optimizer, run.model, x[:BATCH], every="epoch", **run.every_epoch)
        if run.every_epoch is not None
        else None
        for run, optimizer in zip(runs, optimizers, strict=True)
    ]
    order = torch.Generator().manual_seed(0)
    for epoch in range(1, epochs + 1):
        # all of one size
        batches = torch.randperm(len(x), generator=order)[: len(x) // BATCH * BATCH].split(BATCH)
        for run, optimizer, handle in zip(runs, optimizers, teleports, strict=True):
            run.model.train()
            for rows in batches:
                optimizer.zero_grad()
                F.cross_entropy(run.model(x[rows]), y[rows]).backward()
                optimizer.step()
            if handle is not None:
                handle.end_epoch()
            run.model.eval()
            with torch.no_grad():
                logits = run.model(x)
            run.accuracy.append(float((logits.argmax(1) == y).float().mean()))
            run.loss.append(float(F.cross_entropy(logits, y)))
        yield epoch


def run(out: Path, epochs: int = 40) -> None:
    """Train with live progress, print the table, write the page."""
    from rich.console import Console

    console = Console()
    start = time.perf_counter()
    x, y = digits()
    results: dict[float, list[Run]] = {}
    with _for_small_matrices():
        console.print(
            f"{len(x):,} handwritten digits, autoencoder {demo_rates.WIDTHS}, SGD, "
            f"batches of {BATCH}, cosine schedule"
        )
        tuned_epochs = max(1, round(TUNED_SHARE * epochs))
        with _bars(console) as progress:
            bar = progress.add_task("all runs at once", total=tuned_epochs, accuracy="")
            tuned = demo_rates.compare(
                x,
                batch=BATCH,
                epochs=tuned_epochs,
                on_epoch=lambda epoch: progress.update(bar, completed=epoch),
            )
        console.print(f"\n{tuned}\n", highlight=False, markup=False, soft_wrap=True)
        console.print(
            f"The same digits, MLP 64-256-256-256-10 with BatchNorm, SGD, batches of {BATCH}"
        )
        for rate, share in LEARNING_RATES.items():
            results[rate] = runs(x[:256])
            with _bars(console) as progress:
                _train_live(progress, results[rate], x, y, rate, max(1, round(share * epochs)))
    report = results[1e-3][-1].report
    assert report is not None
    console.print(_table(results))
    console.print(
        f"\nConditioning changed the outputs by {report.output_change_eval:.1e} in eval "
        "mode, "
        f"{report.output_change_train:.1e} in train mode, in "
        f"{sum(report.seconds.values()):.2f} s."
    )
    out.write_text(page(results, report, tuned, tuned_epochs), encoding="utf-8")
    console.print(f"Page with the curves: {out} ({time.perf_counter() - start:.0f} s in all)")


@contextmanager
def _for_small_matrices() -> Iterator[None]:
    """One core, which is quicker for them than two, and torch's own kernels: oneDNN prepares every
    call for large ones.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        # TF32 stays as it is: torch warns where it is set without an Intel GPU.
        with torch.backends.mkldnn.flags(enabled=False, allow_tf32=None):
            yield
    finally:
        torch.set_num_threads(threads)


def _train_live(
    progress: Progress, runs: list[Run], x: Tensor, y: Tensor, rate: float, epochs: int
) -> None:
    bars = [
        progress.add_task(f"lr {rate:g}  {run.name}", total=epochs, accuracy="") for run in runs
    ]
    for epoch in train(runs, x, y, learning_rate=rate, epochs=epochs):
        for bar, run in zip(bars, runs, strict=True):
            progress.update(
                bar,
                completed=epoch,
                accuracy=f"{run.accuracy[-1]:.1%}{_target_epoch(run, ' · 99 % at epoch ')}",
            )


def _bars(console: object) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (
        "{task.description:<36}",
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
    )
    return Progress(*columns, console=console)  # type: ignore[arg-type]


def _target_epoch(run: Run, before: str) -> str:
    return f"{before}{run.epochs_to_target}" if run.epochs_to_target else ""


def _table(results: dict[float, list[Run]]) -> object:
    from rich.table import Table

    table = Table(
        "", *(f"lr {rate:g}" for rate in results), title=f"Epochs to {TARGET:.0%} training accuracy"
    )
    for row in _rows(results):
        table.add_row(row["name"], *row["epochs"])
    return table


def _rows(results: dict[float, list[Run]]) -> list[dict]:
    """One per method: its name and, per learning rate, the epochs it took."""
    return [
        {
            "name": same[0].name,
            "epochs": [
                str(run.epochs_to_target) if run.epochs_to_target else f"> {len(run.accuracy)}"
                for run in same
            ],
        }
        for same in zip(*results.values(), strict=True)
    ]


def page(
    results: dict[float, list[Run]], report: Report, tuned: RateComparison, tuned_epochs: int
) -> str:
    """Curves and the report of the last method, in one file."""
    from markupsafe import Markup

    from ..rates.page import comparing
    from ..report.charts import Series, lines
    from ..report.page import conditioning, render

    curves = []
    for rate, runs in results.items():
        accuracy = [Series(run.name, [100 * a for a in run.accuracy]) for run in runs]
        loss = [
            Series(run.name, [math.log10(max(value, 1e-12)) for value in run.loss]) for run in runs
        ]
        curves.append(
            {
                "rate": f"{rate:g}",
                "accuracy": Markup(
                    lines(accuracy, x_label="epoch", y_label="training accuracy, %", first=1)
                ),
                "loss": Markup(
                    lines(loss, x_label="epoch", y_label="log10 of the training loss", first=1)
                ),
            }
        )
    rates = [f"{rate:g}" for rate in results]
    values = conditioning(report) | comparing(tuned)
    return render(
        "demo.html.jinja",
        title="PathCond on handwritten digits",
        curves=curves,
        rates=rates,
        rows=_rows(results),
        target=f"{TARGET:.0%}",
        widths=demo_rates.WIDTHS,
        tuned_epochs=tuned_epochs,
        **values,
    )
