"""A results file survives whatever happens to the processes that write it."""

import json
import multiprocessing
import os
from pathlib import Path

import pytest

from pathcond.rows import Rows, RowsError

ORIGIN = {"device": "cpu"}


def job(seed: int, method: str = "baseline") -> dict:
    return {"figure": "mlp-depth", "seed": seed, "method": method}


def test_what_is_appended_is_read_and_not_run_again(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "new" / "rows.jsonl")
    assert list(rows) == []
    rows.append(job(0), {"epochs": 3, "loss": float("inf")}, ORIGIN)
    rows.append(job(1), {"epochs": None}, ORIGIN)
    assert [row.job["seed"] for row in rows] == [0, 1]
    assert next(iter(rows)).result["loss"] == float("inf")
    other_order = dict(reversed(job(1).items()))
    assert rows.missing([job(0), other_order, job(1, "enorm"), job(2)]) == [job(1, "enorm"), job(2)]


def test_of_a_run_that_was_computed_again_the_last_row_counts(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    for seed, value in ((0, 1.0), (1, 2.0), (0, 3.0)):
        rows.append(job(seed), {"value": value}, ORIGIN)
    assert [(row.job["seed"], row.result["value"]) for row in rows] == [(0, 3.0), (1, 2.0)]


@pytest.mark.parametrize("cut", range(2, 60, 7))
def test_a_line_that_was_not_finished_does_not_count(cut: int, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append(job(0), {"epochs": 3}, ORIGIN)
    rows.append(job(1), {"epochs": 4}, ORIGIN)
    rows.path.write_bytes(rows.path.read_bytes()[:-cut])
    assert rows.missing([job(0), job(1)]) == [job(1)]
    rows.append(job(1), {"epochs": 5}, ORIGIN)
    assert [row.result["epochs"] for row in rows] == [3, 5]
    assert all(json.loads(line) for line in rows.path.read_text().splitlines())


def append_many(path: Path, first: int) -> None:
    for seed in range(first, first + 25):
        Rows(path).append(job(seed), {"text": "x" * 5000}, ORIGIN)


def test_processes_that_append_at_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=append_many, args=(tmp_path / "rows.jsonl", first))
        for first in (0, 100)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert sorted(row.job["seed"] for row in Rows(tmp_path / "rows.jsonl")) == [
        *range(25),
        *range(100, 125),
    ]


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ('{"format": 0}\n{"job": {}, "result": {}, "origin": {}}\n', "another version"),
        ("[1, 2]\n", "another version"),
        ("no json\n", "line 1 is no JSON"),
        ('{"format": 1}\n{"job": {}}\n', "line 2 is no row"),
    ],
)
def test_files_that_are_none(content: str, why: str, tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.path.write_text(content)
    with pytest.raises(RowsError, match=why):
        list(rows)
    with pytest.raises(RowsError, match=why):
        rows.append(job(0), {}, ORIGIN)
    assert rows.path.read_text() == content


def test_a_full_disk_leaves_whole_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append(job(0), {"epochs": 3}, ORIGIN)

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RowsError, match="disk is full"):
        rows.append(job(1), {"epochs": 3}, ORIGIN)
    assert [row.job["seed"] for row in rows] == [0]


def test_files_may_be_put_together(tmp_path: Path) -> None:
    one, two = Rows(tmp_path / "one.jsonl"), Rows(tmp_path / "two.jsonl")
    one.append(job(0), {"epochs": 3}, ORIGIN)
    one.append(job(1), {"epochs": 4}, ORIGIN)
    two.append(job(1), {"epochs": 9}, ORIGIN)
    two.append(job(2), {"epochs": 5}, ORIGIN)
    one.path.write_bytes(one.path.read_bytes() + two.path.read_bytes())
    assert [row.result["epochs"] for row in one] == [3, 9, 5]  # the last of a run counts


def test_a_newline_that_an_editor_took(tmp_path: Path) -> None:
    rows = Rows(tmp_path / "rows.jsonl")
    rows.append(job(0), {"epochs": 3}, ORIGIN)
    rows.path.write_bytes(rows.path.read_bytes()[:-1])
    assert [row.job["seed"] for row in rows] == [0]
    rows.append(job(1), {"epochs": 4}, ORIGIN)
    assert [row.job["seed"] for row in rows] == [0, 1]


@pytest.mark.parametrize(
    "content",
    ['{"my": "precious data"}', "precious data", '{"job": 1, "result": {}, "origin": {}}'],
)
def test_what_is_no_results_file_stays(content: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(content)
    with pytest.raises(RowsError, match=r"rows\.jsonl"):
        Rows(tmp_path / "rows.jsonl").append(job(0), {}, ORIGIN)
    assert (tmp_path / "rows.jsonl").read_text().startswith(content)
