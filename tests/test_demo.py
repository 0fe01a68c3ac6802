"""The demo: tuned rates compared, conditioned networks that learn the digits sooner at small rates,
and the page shows it.
"""

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from pathcond.cli.commands import app
from pathcond.cli.demo import digits, runs, train
from pathcond.cli.demo_rates import METHODS

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


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pathcond.cli.demo_rates.SEEDS", 1)
    result = CliRunner().invoke(
        app, ["demo", "--out", str(tmp_path / "demo.html"), "--epochs", "2"]
    )
    assert result.exit_code == 0, result.output
    assert "Epochs to 99%" in result.output
    page = wide((tmp_path / "demo.html").read_text(encoding="utf-8"))
    # Accuracy and loss at two learning rates of four methods, and the methods over the tuned rates.
    assert page.count("<polyline") == 2 * 2 * 4 + len(METHODS)
    assert page.count('class="best ') == len(METHODS)
    assert (
        "Test loss at each method's own best learning rate: 7 rates from 0.1 to 6.4, 1 seed"
        in result.output
    )
    assert "What “PathCond, exact” did to this network" in page
