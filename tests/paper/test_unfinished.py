"""A training that was stopped goes on from its last state, and comes to the same bits."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from pathcond.networks import cifar_nv, mlp
from pathcond.rows import Job, Result, Row
from pathcond_paper.figure import Place
from pathcond_paper.figures import tuned
from pathcond_paper.training import training, unfinished
from pathcond_paper.training.methods import METHODS
from pathcond_paper.training.training import Data, Recipe, Run, train, train_jobs
from pathcond_paper.training.unfinished import Unfinished
from pathcond_paper.tuning import comparison
from pathcond_paper.tuning.settings import SMOKE

JOB: Job = {
    "method": "baseline",
    "learning_rate": 0.1,
    "seed": 0,
    "dataset": "digits",
    "epochs": 4,
    "batch": 32,
    "teleport_every": 3,
    "train": 160,
    "test": 50,
}
BUILD = partial(mlp, (12, 12), inputs=64, batch_norm=True)


class StoppedError(Exception):
    """As if somebody had."""


class Progress:
    """Notes the epochs that it hears of, and stops training after one of them."""

    def __init__(self, stop_after: int | None = None) -> None:
        self.stop_after = stop_after
        self.heard: list[str] = []

    def __call__(self, share: float, what: str) -> None:
        self.heard.append(what)
        if len(self.heard) == self.stop_after:
            raise StoppedError


@pytest.fixture(autouse=True)
def at_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a checkout without changes, and with a state after every epoch."""
    monkeypatch.setattr(unfinished, "origin", lambda device: {"commit": "a", "date": "today"})
    monkeypatch.setattr(unfinished, "INTERVAL", 0.0)


def trained(folder: Path | None, progress: Progress, **changes: object) -> Iterator[Result]:
    place = Place(unfinished=folder)
    for _, result in train_jobs([JOB | changes], BUILD, place, progress):
        yield result


def whole(**changes: object) -> Result:
    (result,) = trained(None, Progress(), **changes)
    return result


@pytest.mark.parametrize("method", METHODS)
def test_a_training_that_was_stopped_comes_to_the_same(method: str, tmp_path: Path) -> None:
    """The progress of an epoch is told before its state is kept: three are done, two are kept."""
    with pytest.raises(StoppedError):
        list(trained(tmp_path / "kept", Progress(3), method=method))
    progress = Progress()
    (result,) = trained(tmp_path / "kept", progress, method=method)

    assert progress.heard == ["epoch 3 of 4", "epoch 4 of 4"]
    assert result.pop("stopped_after") == [2]
    assert result == whole(method=method)
    assert not list((tmp_path / "kept").iterdir())


@pytest.mark.parametrize(
    "options", [{"optimizer": "momentum", "augment": True}, {"optimizer": "adamw"}]
)
def test_states_of_optimizers_and_augmentations_are_part_of_it(
    options: dict, tmp_path: Path
) -> None:
    build = partial(cifar_nv, inputs=1, width=4, final_norm=True)
    recipe = Recipe(build=build, epochs=3, batch=16, schedule="cosine", **options)
    images = torch.randn(48, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    classes = torch.arange(48) % 10
    data = Data(x=images, y=classes, test_x=images, test_y=classes)
    runs = [Run(method="baseline", learning_rate=0.01, seed=seed) for seed in (3, 1)]
    jobs = [{"seed": run.seed} for run in runs]

    def go_on(progress: Progress) -> list[training.Curves]:
        kept = Unfinished(jobs, Place(unfinished=tmp_path))
        return train(runs, recipe, data, progress, unfinished=kept)

    with pytest.raises(StoppedError):
        go_on(Progress(2))
    for found, expected in zip(go_on(Progress()), train(runs, recipe, data), strict=True):
        assert found.stopped_after == [1]
        assert found.test_loss == expected.test_loss
        assert found.train_loss == expected.train_loss


@pytest.mark.parametrize("method", ["as-is", "searched"])
@pytest.mark.parametrize("done", [2, 5])
def test_a_comparison_that_was_stopped_goes_on(
    method: str, done: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the first seed chose the rate, or after that, when its row is there."""
    name = "smoke-digits-ae-sgd"
    setting = replace(SMOKE[name], rates=(0.25, 0.5, 1.0, 2.0), at_once=1)
    monkeypatch.setitem(SMOKE, name, setting)
    monkeypatch.setattr(comparison, "EXTENSIONS", 0)
    jobs = [{"setting": name, "method": method, "seed": seed} for seed in (0, 1)]
    trained: list[Run] = []
    searched: list[int] = []
    stop: list[int | None] = [None]

    def train_until_stopped(runs: Sequence[Run], *rest: object) -> list[training.Curves]:
        if len(trained) == stop[0]:
            raise StoppedError
        trained.extend(runs)
        return train(runs, *rest)

    def search(*arguments: object) -> object:
        searched.append(1)
        return found_scales(*arguments)

    found_scales = comparison.search
    expected = [result for _, result in tuned.run(jobs, Place(), Progress())]
    monkeypatch.setattr(comparison, "train", train_until_stopped)
    monkeypatch.setattr(comparison, "search", search)
    rows: list[Row] = []

    def go_on() -> None:
        place = Place(unfinished=tmp_path, rows=tuple(rows))
        for job, result in tuned.run(jobs[len(rows) :], place, Progress()):
            rows.append(Row(job, result, {}))

    stop[0] = done
    with pytest.raises(StoppedError):
        go_on()
    assert len(rows) == (done > 4)
    stop[0] = None
    go_on()
    assert len(trained) == len(set(trained)) == 7
    assert len(searched) == (method == "searched")
    stopped = [row.result.pop("stopped_after", 0) for row in rows]
    assert stopped == [2, 0] if done == 2 else stopped == [0, 1]
    assert [row.result for row in rows] == expected
    assert not list(tmp_path.iterdir())


def test_a_state_is_not_for_other_runs_or_another_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoppedError):
        list(trained(tmp_path, Progress(3)))
    for changes in ({"learning_rate": 0.2}, {"seed": 1}, {"batch": 40}):
        (result,) = trained(tmp_path, Progress(), **changes)
        assert "stopped_after" not in result
    monkeypatch.setattr(unfinished, "origin", lambda device: {"commit": "b", "date": "today"})
    (result,) = trained(tmp_path, Progress())
    assert "stopped_after" not in result
    assert len(list(tmp_path.iterdir())) == 1  # still there for its own commit


def test_a_checkout_with_changes_keeps_no_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unfinished, "origin", lambda device: {"commit": "a+changes", "date": ""})
    with pytest.raises(StoppedError):
        list(trained(tmp_path / "kept", Progress(3)))
    assert not (tmp_path / "kept").exists()


def test_a_damaged_state_costs_only_time(tmp_path: Path) -> None:
    with pytest.raises(StoppedError):
        list(trained(tmp_path, Progress(3)))
    (file,) = tmp_path.iterdir()
    for damaged in (file.read_bytes()[:-100], b"", b"no state at all"):
        file.write_bytes(damaged)
        with pytest.raises(StoppedError):
            list(trained(tmp_path, progress := Progress(2)))
        assert progress.heard == ["epoch 1 of 4", "epoch 2 of 4"]


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("unexpected pos")])
def test_a_full_disk_stops_no_training(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(state: object, path: Path) -> None:
        path.write_bytes(b"the beginning")
        raise error

    monkeypatch.setattr(torch, "save", save)
    (result,) = trained(tmp_path, Progress())
    assert result == whole()
    assert not list(tmp_path.iterdir())


def test_states_are_an_interval_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unfinished, "INTERVAL", 1000.0)
    kept = Unfinished([JOB], Place(unfinished=tmp_path))
    kept.keep(lambda: pytest.fail("too early"))
    assert not list(tmp_path.iterdir())
