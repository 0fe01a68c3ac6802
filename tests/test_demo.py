"""The demo: tuned rates compared, conditioned networks that learn the digits sooner at small rates,
and the page shows it.
"""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from typer.testing import CliRunner

from pathcond import condition_
from pathcond.cli import demo_rates
from pathcond.cli.commands import app
from pathcond.cli.demo import digits, runs, train

from .pages import wide


def test_conditioning_saves_epochs() -> None:
    """At lr 1e-2: 11 epochs to 99 % for the baseline and ENorm, 3 as in the paper, 2 at the
    optimum."""
    x, y = digits()
    trained = runs(x[:256])
    for _ in train(trained, x, y, learning_rate=1e-2, epochs=4):
        pass
    baseline, enorm, paper, exact = trained
    assert exact.epochs_to_target is not None
    assert baseline.epochs_to_target is None
    assert enorm.epochs_to_target is None
    assert exact.loss[-1] < paper.loss[-1] < 0.5 * min(baseline.loss[-1], enorm.loss[-1])
    assert exact.report is not None
    assert exact.report.output_change_train < 1e-2


def test_the_same_weights_and_batches_for_all() -> None:
    x, _ = digits()
    first, second = runs(x[:64])[:2]
    for a, b in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_run_among_others_is_what_a_plain_loop_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathcond.cli.demo_rates.SEEDS", 2)
    monkeypatch.setattr("pathcond.cli.demo_rates.RATES", (0.1, 0.5))
    x, _ = digits()
    compared = demo_rates.compare(x, batch=64, epochs=2)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    training, test = x[order][:1438], x[order][1438:]
    torch.manual_seed(1)
    model = demo_rates.build(1)
    condition_(model, training[:256])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 2 * 22)
    for epoch in range(2):
        for rows in demo_rates.order(len(training), 1, epoch)[: 22 * 64].split(64):
            optimizer.zero_grad()
            F.mse_loss(model(training[rows]), training[rows]).backward()
            optimizer.step()
            schedule.step()
    (found,) = [
        run for run in compared.runs if (run.method, run.rate, run.seed) == ("conditioned", 0.5, 1)
    ]
    assert found.figure == pytest.approx(F.mse_loss(model(test), test).item(), rel=1e-4)


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathcond.cli.demo_rates.SEEDS", 1)
    result = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path / "demo.html"), "--epochs", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "Epochs to 99%" in result.output
    page = wide((tmp_path / "demo.html").read_text(encoding="utf-8"))
    # Accuracy and loss at two learning rates of four methods, and the methods over the tuned rates.
    assert page.count("<polyline") == 2 * 2 * 4 + 2
    assert page.count('class="best ') == 2
    assert (
        "Test loss at each method's own best learning rate: 6 rates from 0.2 to 6.4, 1 seed"
        in result.output
    )
    assert "What “PathCond, exact” did to this network" in page
