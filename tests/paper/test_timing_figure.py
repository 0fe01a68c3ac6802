"""The figure of timings: what it derives from seconds is right, whatever the seconds are."""

import time
from collections.abc import Iterator
from itertools import count

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pathcond.rows import Row
from pathcond_paper.figure import Place
from pathcond_paper.figures import timing
from pathcond_paper.figures.costs import Stopwatch

MLP = {"network": "mlp", "depth": 3, "width": 500}
STEPS = {"symmetry": 0.0, "energy": 0.0, "solve": 0.0, "rescale": 0.0}
POSITIVE = st.floats(1e-6, 1e6)


def row(
    network: dict, part: str, seconds: dict[str, float], repetition: int = 0, parameters: int = 1000
) -> Row:
    epoch = {"epoch_steps": 391, "epoch_steps_measured": 60} if part == "epoch" else {}
    job = network | {
        "batch": 128,
        "steps": 60,
        "images": 50_000,
        "part": part,
        "repetition": repetition,
    }
    return Row(
        job=job,
        result={"seconds": seconds, "parameters": parameters, "threads": 1} | epoch,
        origin={},
    )


def networks(whole: dict[str, float], solve: float = 0.98) -> list[Row]:
    """The networks of fig:timing, an epoch of a second each, and so many seconds of
    conditioning.
    """
    jobs = {
        "MLP 3×500": MLP,
        "CIFAR-NV": {"network": "cifar-nv"},
        "ResNet-18-C": {"network": "resnet18-c"},
    }
    rows = []
    for name, job in jobs.items():
        rows.append(row(job, "epoch", {"epoch": 1.0}))
        for part in ("whole", "exact", "paper", "box"):
            rows.append(
                row(
                    job,
                    part,
                    STEPS | {"solve": solve * whole[name], "energy": (1 - solve) * whole[name]},
                )
            )
    return rows


def depths(seconds: list[float]) -> list[Row]:
    return [
        row(MLP | {"depth": depth}, part, STEPS | {"solve": value}, parameters=10**6 * depth)
        for depth, value in enumerate(seconds, start=1)
        for part in ("box", "exact")
    ]


@pytest.fixture(scope="module")
def measured() -> list[Row]:
    """The smoke preset."""
    stamp = {"figure": "timing", "preset": "smoke"}
    (task,) = timing.together([stamp | job for job in timing.jobs("smoke")])
    return [
        Row(job, result, {}) for job, result in timing.run(task, Place(), lambda share, text: None)
    ]


def test_every_run_is_measured_with_all_its_steps(measured: list[Row]) -> None:
    assert len(measured) == len(timing.jobs("smoke"))
    for found in measured:
        seconds = found.result["seconds"]
        assert set(seconds) == ({"epoch"} if found.job["part"] == "epoch" else set(timing.STEPS))
        assert min(seconds.values()) > 0
    assert {
        found.result["epoch_steps_measured"] for found in measured if found.job["part"] == "epoch"
    } == {4}
    assert {found.result["epoch_steps"] for found in measured if found.job["part"] == "epoch"} == {
        512 // 32
    }


def test_parts_and_networks_of_the_paper() -> None:
    jobs = timing.jobs("paper")
    assert len(timing.together(jobs)) == 1  # side by side they would disturb each other
    titles = [timing.network_title(job) for job in jobs]
    assert set(titles) == {
        *(f"MLP {depth}×500" for depth in range(1, 9)),
        "CIFAR-NV",
        "ResNet-18-C",
    }
    assert sum(job["part"] == "epoch" for job in jobs) == 10 * 10
    assert sum(job["part"] == "box" for job in jobs) == len(set(titles))
    assert sum(job["part"] == "exact" for job in timing.jobs("paper", seeds=2)) == 10 * 2


def test_all_that_is_shown_of_measured_rows(measured: list[Row]) -> None:
    text = timing.table(measured)
    assert "4 of 16 steps of 32 images measured" in text
    assert "MLP 3×16" in text
    assert list(timing.plot(measured)) == ["timing"]
    # of other networks than the paper's
    assert {claim.verdict for claim in timing.claims(measured)} == {"not run"}


@pytest.mark.parametrize("keep", [0, 1, 5, 11])
def test_whatever_rows_there_are(measured: list[Row], keep: int) -> None:
    for rows in (measured[:keep], networks(timing.IN_PAPER)[:keep], depths([1.0, 2.0])[:keep]):
        timing.plot(rows)["timing"].canvas.draw()
        assert timing.table(rows)
        assert len(timing.claims(rows)) == 3


@given(st.lists(st.fixed_dictionaries(dict.fromkeys(STEPS, POSITIVE)), min_size=1, max_size=5))
def test_shares_sum_to_the_whole(seconds: list[dict[str, float]]) -> None:
    rows = [row(MLP, "exact", found, repetition) for repetition, found in enumerate(seconds)]
    shares, total = (
        timing.shares_of(rows, "exact", "MLP 3×500"),
        sum(timing.seconds_of(rows, "exact")["MLP 3×500"]),
    )
    assert sum(shares.values()) == pytest.approx(1)
    for step, share in shares.items():
        assert share * total == pytest.approx(sum(found[step] for found in seconds))


@given(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=12))
def test_the_seconds_of_the_steps_are_those_that_passed(steps: list[str]) -> None:
    """A step that returns adds up; nothing is counted twice or lost."""
    ticks: Iterator[int] = count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "perf_counter", lambda: next(ticks) ** 2)
        watch = Stopwatch(torch.device("cpu"))
        for step in steps:
            watch(step)
        seconds = watch.stop()
    assert sum(seconds.values()) == len(steps) ** 2
    assert set(seconds) == set(steps)


@given(
    st.floats(-10, 10),
    st.floats(-10, 10).filter(lambda slope: abs(slope) > 1e-3),
    st.lists(st.integers(-99, 99), min_size=3, unique=True),
)
def test_the_line_through_a_line(intercept: float, slope: float, x: list[int]) -> None:
    line = timing.Line.through(x, [intercept + slope * value for value in x])
    assert line.slope == pytest.approx(slope)
    assert line.intercept == pytest.approx(intercept, abs=1e-6)
    assert line.r2 == pytest.approx(1)


@given(st.lists(st.floats(-100, 100), min_size=3, max_size=9))
def test_no_line_is_closer(y: list[float]) -> None:
    x = list(range(len(y)))
    line = timing.Line.through(x, y)
    error = lambda a, b: sum((value - a - b * at) ** 2 for at, value in zip(x, y, strict=True))  # noqa: E731
    best = error(line.intercept, line.slope)
    for a, b in ((0.1, 0), (-0.1, 0), (0, 0.1), (0, -0.1)):
        assert best <= error(line.intercept + a, line.slope + b) + 1e-6
    assert -1e-6 <= line.r2 <= 1


@pytest.mark.parametrize(
    ("whole", "verdict"),
    [
        ({"MLP 3×500": 1.0, "CIFAR-NV": 0.2, "ResNet-18-C": 0.5}, "reproduced"),
        ({"MLP 3×500": 1.0, "CIFAR-NV": 0.5, "ResNet-18-C": 0.5}, "reproduced"),
        ({"MLP 3×500": 2.0, "CIFAR-NV": 0.1, "ResNet-18-C": 0.1}, "not reproduced"),
    ],
)
def test_the_claim_about_epochs(whole: dict[str, float], verdict: str) -> None:
    claim = timing.claims(networks(whole))[0]
    assert claim.verdict == verdict
    assert all(
        f"{100 * share:.3g} % ({name})" in text
        for name, share in whole.items()
        for text in (claim.decides, claim.ours)
    )


@pytest.mark.parametrize(
    ("seconds", "verdict"),
    [
        ([1.0, 2.0, 3.0, 4.0], "reproduced"),
        ([5.0, 6.1, 6.9, 8.0], "reproduced"),
        ([1.0, 1.4, 0.7, 1.1], "reproduced"),  # hardly grows
        ([1.0, 2.0, 4.0, 7.0], "not reproduced"),  # on a line with an R² of 0.96
        ([1.0, 9.0, 0.5, 9.0], "not reproduced"),
        ([1.0, 2.0], "not run"),
    ],
)
def test_the_claim_about_growth(seconds: list[float], verdict: str) -> None:
    assert timing.claims(depths(seconds))[1].verdict == verdict


@pytest.mark.parametrize(("share", "verdict"), [(0.98, "reproduced"), (0.5, "not reproduced")])
def test_the_claim_about_the_solver(share: float, verdict: str) -> None:
    rows = networks(timing.IN_PAPER, solve=share)
    assert timing.claims(rows)[2].verdict == verdict
    assert (
        timing.claims([found for found in rows if found.job["part"] != "box"])[2].verdict
        == "not run"
    )


def test_no_rows_no_verdicts() -> None:
    assert [claim.verdict for claim in timing.claims([])] == ["not run"] * 3
