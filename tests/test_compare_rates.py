"""Comparing at tuned learning rates: known optima, runs that diverge or raise, interruption, the
table and the page.
"""

import copy
import json
import math
import random
import re
import shutil
import subprocess
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond import RateComparison, compare_rates
from pathcond.rates.curves import Curve, Difference
from pathcond.rates.progress import Progress
from pathcond.rates.runs import digest

from .pages import wide

ROOT = Path(__file__).parent.parent
BATCH = torch.ones(1, 1)
EVIL = '<script>alert("x")</script>'
CHROMIUM = shutil.which("chromium")


def build(seed: int) -> nn.Module:
    """One weight, drawn from the seeded generator."""
    return nn.Linear(1, 1, bias=False)


def train(model: nn.Module, rate: float) -> float:
    """1 + w² after five steps of gradient descent on w²/2: w shrinks by 1 - rate each, so that rate
    1 is best and > 2 diverges.
    """
    weight = model.weight.item()
    for _ in range(5):
        weight -= rate * weight
    return 1 + weight**2 if rate < 3 else math.inf


def halved(model: nn.Module, inputs: Tensor) -> None:
    with torch.no_grad():
        model.weight.mul_(0.5)


METHODS: dict[str, Any] = {"as is": None, "halved": halved}


def test_the_best_rate_of_a_quadratic() -> None:
    result = compare_rates(build, train, BATCH, rates=[4, 2, 0.5, 1], methods=METHODS)
    assert result.rates == (0.5, 1, 2, 4)
    curve = result["as is"]
    assert (curve.best_rate, curve.mean, curve.deviation, curve.at_edge) == (1.0, 1.0, 0.0, None)
    assert curve.means[3] == math.inf
    assert result["halved"].mean == 1.0
    assert "“halved” and “as is” reach the same" in str(result)


def test_a_method_that_is_better_and_one_that_is_not() -> None:
    """At one rate the final figure of a halved weight is known: 1 + w²(1 - rate)¹⁰/4."""
    methods = {
        "plain": None,
        "halved": halved,
        "doubled": lambda model, inputs: model.weight.data.mul_(2),
    }
    result = compare_rates(build, train, BATCH, rates=[0.1], methods=methods, seeds=[5])
    torch.manual_seed(5)
    excess = build(5).weight.item() ** 2 * 0.9**10
    for name, factor in (("plain", 1), ("halved", 0.25), ("doubled", 4)):
        assert result[name].mean == pytest.approx(1 + factor * excess, rel=1e-6)
    rows = {row["name"]: row for row in result.to_dict()["methods"]}
    assert result.baseline == "plain"
    assert rows["halved"]["relative_gain"] == pytest.approx(0.75 * excess / (1 + excess), rel=1e-5)
    assert rows["doubled"]["relative_gain"] < 0
    assert rows["plain"]["relative_gain"] is None
    assert "“halved” was run at one rate, 0.1" in str(result)
    assert "“doubled” comes" in str(result)
    assert "above “plain”" in str(result)
    assert "one seed does not show how much of that is noise" in str(result)


@pytest.mark.parametrize(
    ("rates", "edge", "side"),
    [([0.1, 0.2, 0.4], "greatest", "larger"), ([1.5, 1.7, 1.9], "least", "smaller")],
)
def test_the_best_at_the_edge(rates: list[float], edge: str, side: str) -> None:
    result = compare_rates(build, train, BATCH, rates=rates, methods={"as is": None})
    assert result["as is"].at_edge == edge
    assert (
        f"is the {edge} that was run: a better one may lie beyond. Widen the grid to {side} rates."
        in str(result)
    )
    assert "(edge)" in str(result)


def test_rates_within_one_percent() -> None:
    """The width counts neighbours without a gap, in decades."""
    curve = Curve(
        name="",
        how="",
        rates=(0.1, 1.0, 10.0, 100.0, 1000.0),
        figures=((1.0,), (1.2,), (1.005,), (1.0,), (1.01,)),
    )
    assert curve.best_rate == 0.1
    assert curve.decades == 0
    assert Curve(
        name="", how="", rates=curve.rates[1:], figures=curve.figures[1:]
    ).decades == pytest.approx(2)


def test_the_noise_of_the_seeds() -> None:
    """Student's t, as scipy has it."""
    from scipy.stats import ttest_1samp

    generator = random.Random(0)
    for count in (2, 3, 5, 20, 40):
        for shift in (0.2, 0.5, 1.0, 3.0):
            paired = tuple(generator.gauss(shift, 1.0) for _ in range(count))
            p = float(ttest_1samp(paired, 0.0).pvalue)
            if abs(p - 0.05) > 2e-3:
                assert Difference(paired=paired, relative=0.1).is_clear == (p < 0.05)


def test_what_the_sentences_say_of_noise() -> None:
    def switched(model: nn.Module, inputs: Tensor) -> None:
        model.eval()

    def lower(model: nn.Module, rate: float) -> float:
        return 10 + 0.1 * model.weight.item() - (not model.training)

    def elsewhere(model: nn.Module, rate: float) -> float:
        return 10 + (0 if model.training else model.weight.item())

    grid: dict[str, Any] = {"rates": [1], "methods": {"as is": None, "switched": switched}}
    better = compare_rates(build, lower, BATCH, **grid)
    assert "“switched” comes 10 % below “as is”" in str(better)
    assert "is more than the noise of the seeds." in str(better)
    noise = compare_rates(build, elsewhere, BATCH, **grid)
    assert "is within the noise of the seeds, so none is shown." in str(noise)
    assert [
        row["beyond_noise"]
        for row in (better.to_dict()["methods"][1], noise.to_dict()["methods"][1])
    ] == [True, False]


def test_runs_that_diverge_are_points_at_infinity() -> None:
    def diverging(model: nn.Module, rate: float) -> Tensor:
        return torch.tensor(math.nan if rate > 1 else rate)

    result = compare_rates(
        build, diverging, BATCH, rates=[0.5, 1, 2], methods={"as is": None}, seeds=2
    )
    assert result["as is"].means == (0.5, 1.0, math.inf)
    everywhere = compare_rates(
        build,
        lambda model, rate: -math.inf,
        BATCH,
        methods={"as is": None, "halved": halved},
        seeds=1,
    )
    assert "“halved” diverged at every rate, from one seed or more: try smaller ones." in str(
        everywhere
    )
    assert "cannot be compared" in str(everywhere)
    plain = json.loads(json.dumps(everywhere.to_dict(), allow_nan=False))
    assert plain["methods"][0]["best_rate"] is None
    assert {run["outcome"] for run in plain["runs"]} == {"diverged"}


def test_figures_too_large_to_reckon_with_have_diverged(tmp_path: Path) -> None:
    def train(model: nn.Module, rate: float) -> float:
        return {1: 9e307, 2: -9e307, 3: 1e149}.get(rate, rate)

    path = tmp_path / "rows.jsonl"
    for _ in range(2):  # the second reads the rows of the first
        result = compare_rates(
            build, train, BATCH, rates=[0.5, 1, 2, 3], methods=METHODS, rows=path
        )
        assert result["as is"].means == (0.5, math.inf, math.inf, 1e149)
        result.to_html(tmp_path / "rates.html")
        # as rows of earlier versions have them
        path.write_text(path.read_text().replace("Infinity", "9e307"))


def test_runs_that_raise_are_reported_and_the_others_go_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def train(model: nn.Module, rate: float) -> float:
        if rate == 2:
            raise ValueError("no luck\nat two")
        return abs(rate - 1) + 1

    def refused(model: nn.Module, inputs: Tensor) -> None:
        raise RuntimeError

    result = compare_rates(
        build, train, BATCH, rates=[0.5, 1, 2], methods={**METHODS, "refused": refused}, seeds=2
    )
    assert len(result.runs) == 18
    assert [len(runs) for runs in result.failures.values()] == [6, 4]
    first, second = result.failures
    said = [record.getMessage() for record in caplog.records]
    assert [error in message for error in (first, second) for message in said].count(True) == 2
    assert len(said) == 2  # each error when it comes up first
    assert second.startswith("ValueError: no luck at two (test_compare_rates.py:")
    assert first.startswith("RuntimeError (test_compare_rates.py:")
    assert first.endswith("in refused)")
    # A rate that raised does not count as run: who knows whether it would have been the best.
    assert result["as is"].at_edge == "greatest"
    text = str(result)
    assert "6 runs raised RuntimeError" in text
    assert "“refused” has no rate at which every seed finished" in text
    assert {run["outcome"] for run in result.to_dict()["runs"]} == {"finished", "raised"}


def test_errors_inside_torch_name_the_line_that_called_it() -> None:
    def train(model: nn.Module, rate: float) -> Tensor:
        return model(torch.ones(3, 3)).mean()

    (error,) = compare_rates(
        build, train, BATCH, rates=[1], methods={"as is": None}, seeds=1
    ).failures
    assert "(test_compare_rates.py:" in error


def test_errors_name_a_line_of_the_user_or_of_this_package() -> None:
    """Never one of the standard library, which lies between them and the error."""

    def small(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(1, 2), nn.ReLU(), nn.Linear(2, 1))

    def reads_json(model: nn.Module, inputs: Tensor) -> None:
        json.loads("{")

    methods: dict[str, Any] = {"c": {"max_samples": 1}, "json": reads_json}
    result = compare_rates(small, lambda model, rate: 1.0, BATCH, rates=[1], methods=methods)
    conditioned, parsed = result.failures
    assert re.search(r"\(condition\.py:\d+, in _cut\)$", conditioned)
    assert re.search(r"\(test_compare_rates\.py:\d+, in reads_json\)$", parsed)


class Stopped:
    """Counts the runs it trains, and is interrupted at one of them."""

    def __init__(self, at: int | None = None) -> None:
        self.at = at
        self.seen: list[tuple[float, float]] = []

    def __call__(self, model: nn.Module, rate: float) -> float:
        if len(self.seen) == self.at:
            raise KeyboardInterrupt
        self.seen.append((rate, model.weight.item()))
        return train(model, rate)


@pytest.mark.parametrize("at", range(12))
def test_resuming_after_an_interrupt_at_every_run(at: int, tmp_path: Path) -> None:
    rows = tmp_path / "rates.jsonl"
    first, second = Stopped(at), Stopped()
    grid: dict[str, Any] = {"rates": [0.5, 1, 4], "methods": METHODS, "seeds": 2}
    with pytest.raises(KeyboardInterrupt):
        compare_rates(build, first, BATCH, rows=rows, **grid)
    resumed = compare_rates(build, second, BATCH, rows=rows, **grid)
    assert len(first.seen) == at
    assert len(second.seen) == 12 - at
    assert len(set(first.seen + second.seen)) == 12
    whole = compare_rates(build, train, BATCH, **grid)
    assert resumed.curves == whole.curves
    assert len(rows.read_text().splitlines()) == 13
    third = Stopped(0)
    assert compare_rates(build, third, BATCH, rows=str(rows), **grid).curves == whole.curves


def test_a_line_that_a_killed_process_left_is_run_again(tmp_path: Path) -> None:
    rows = tmp_path / "rates.jsonl"
    compare_rates(build, train, BATCH, rates=[0.5, 1], methods=METHODS, seeds=1, rows=rows)
    rows.write_bytes(rows.read_bytes()[:-20])
    again = Stopped()
    compare_rates(build, again, BATCH, rates=[0.5, 1], methods=METHODS, seeds=1, rows=rows)
    assert len(again.seen) == 1


def test_runs_that_raised_are_made_again(tmp_path: Path) -> None:
    rows = tmp_path / "rates.jsonl"

    def broken(model: nn.Module, rate: float) -> float:
        if rate == 1:
            raise OSError("disk")
        return train(model, rate)

    assert compare_rates(
        build, broken, BATCH, rates=[0.5, 1], seeds=1, methods=METHODS, rows=rows
    ).failures
    mended = Stopped()
    assert not compare_rates(
        build, mended, BATCH, rates=[0.5, 1], seeds=1, methods=METHODS, rows=rows
    ).failures
    assert [rate for rate, _ in mended.seen] == [1, 1]


def test_a_wider_grid_costs_only_what_is_new(tmp_path: Path) -> None:
    rows = tmp_path / "rates.jsonl"
    compare_rates(build, train, BATCH, rates=[0.5, 1], methods=METHODS, seeds=1, rows=rows)
    wider = Stopped()
    result = compare_rates(
        build, wider, BATCH, rates=[1, 2], methods={"as is": None}, seeds=2, rows=rows
    )
    assert len(wider.seen) == 3
    assert "holds 3 runs of other rates, methods or seeds too, which are left out here." in str(
        result
    )


def test_rows_of_other_settings_are_refused(tmp_path: Path) -> None:
    rows = tmp_path / "rates.jsonl"
    grid: dict[str, Any] = {"rates": [1], "seeds": 1, "rows": rows}
    compare_rates(build, train, BATCH, methods={"full": {"normalization": "full"}}, **grid)
    with pytest.raises(
        ValueError,
        match=r"it was condition_\(normalization='full'\), now it is condition_\(\)\. Name one",
    ):
        compare_rates(build, train, BATCH, methods={"full": {}}, **grid)
    with pytest.raises(
        TypeError,
        match=r"build\(0\) made other initial weights than those of the runs in .*rates\.jsonl",
    ):
        compare_rates(
            lambda seed: nn.Linear(2, 1),
            train,
            BATCH,
            methods={"full": {"normalization": "full"}},
            **grid,
        )
    rows.write_text('{"format": 1}\n{"job": {"depth": 3}, "result": {}, "origin": {}}\n')
    with pytest.raises(ValueError, match="holds rows that are none of compare_rates"):
        compare_rates(build, train, BATCH, **grid)
    with pytest.raises(ValueError, match="is a folder: name a file"):
        compare_rates(build, train, BATCH, rows=tmp_path)


def test_the_same_weights_and_random_states_for_all() -> None:
    weights: dict[float, set] = {}
    drawn: dict[float, set] = {}

    def network(seed: int) -> nn.Module:
        model = nn.Linear(2, 2)
        model.register_buffer("noise", torch.tensor([random.random(), numpy.random.rand()]))
        return model

    def drawing(model: nn.Module, inputs: Tensor) -> None:
        torch.randn(7)
        random.random()
        numpy.random.rand()
        assert inputs.shape == (1, 2)

    def train(model: nn.Module, rate: float) -> float:
        seed = float(model.noise[0])
        weights.setdefault(seed, set()).add(digest(model))
        drawn.setdefault(seed, set()).add(
            (torch.rand(()).item(), random.random(), numpy.random.rand())
        )
        return 1.0

    states = random.getstate(), torch.get_rng_state(), numpy.random.get_state()[1].tolist()
    compare_rates(
        network,
        train,
        lambda seed: torch.randn(1, 2),
        rates=[1, 2],
        methods={"as is": None, "drawing": drawing, "nothing": None},
    )
    assert [len(found) for found in weights.values()] == [1, 1, 1]
    assert [len(found) for found in drawn.values()] == [1, 1, 1]
    assert states[0] == random.getstate()
    assert torch.equal(states[1], torch.get_rng_state())
    assert states[2] == numpy.random.get_state()[1].tolist()


def test_a_run_can_be_made_by_hand() -> None:
    def train(model: nn.Module, rate: float) -> float:
        return 1 + rate * float(model(torch.randn(4, 3)).square().mean().detach())

    def network(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2))

    batch = torch.randn(8, 3)
    result = compare_rates(network, train, batch, rates=[0.3], seeds=[7])
    torch.manual_seed(7)
    model = network(7)
    pathcond.condition_(model, batch)
    assert result["conditioned"].mean == train(model, 0.3)


def test_every_rate_begins_from_the_conditioned_weights() -> None:
    """They are computed once per seed: the running statistics too, and training at one rate does
    not touch them.
    """
    begun: dict[float, list[str]] = {}

    def network(seed: int) -> nn.Module:
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 2))

    def train(model: nn.Module, rate: float) -> float:
        begun.setdefault(rate, []).append(digest(model))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(rate)
        return 1.0

    batch = torch.randn(8, 3)
    compare_rates(network, train, batch, rates=[1, 2, 3], seeds=[7, 8])
    expected = []
    for seed in (7, 8):
        torch.manual_seed(seed)
        model = network(seed)
        expected.append(digest(model))
        pathcond.condition_(model, batch)
        expected.append(digest(model))
    assert begun == {1: expected, 2: expected, 3: expected}


def test_random_states_come_back_after_an_error() -> None:
    state = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        compare_rates(build, Stopped(1), BATCH)
    assert torch.equal(state, torch.get_rng_state())


def test_a_build_that_does_not_depend_on_its_seed_alone() -> None:
    generator = torch.Generator().manual_seed(0)

    def drifting(seed: int) -> nn.Module:
        model = nn.Linear(1, 1)
        nn.init.normal_(model.weight, generator=generator)
        return model

    with pytest.raises(
        TypeError,
        match=r"build\(0\) made other initial weights than before, in this call: runs",
    ):
        compare_rates(drifting, train, BATCH)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"rates": []}, "rates is empty: name at least one"),
        ({"rates": [0.1, -0.1]}, "rate -0.1 is not a positive number"),
        (
            {"rates": [0.0, math.nan, math.inf]},
            "rate 0.0 is not a positive number; rate nan is not a positive number; rate inf is",
        ),
        ({"rates": [0.1, "0.2", None]}, "rate '0.2' is not a positive number; rate None is not"),
        ({"rates": "0.1"}, "rates is a string"),
        ({"rates": 0.1}, "rates is an object of type float, not a list"),
        ({"rates": [0.1, 0.1]}, "rates has 0.1 more than once"),
        ({"seeds": []}, "seeds is empty"),
        ({"seeds": 0}, "seeds is empty"),
        ({"seeds": [1.5]}, "seed 1.5 is not a whole number"),
        ({"seeds": None}, "seeds is None"),
        ({"seeds": [1, 1]}, "seeds has 1 more than once"),
        ({"methods": {}}, "methods is empty"),
        ({"methods": ["as is"]}, "methods is an object of type list, not a mapping"),
        (
            {"methods": {"as is": "nothing"}},
            "method 'as is' is an object of type str: it can be None, a function",
        ),
        (
            {"methods": {"full": {"normalisation": "full"}}},
            "options that condition_ does not know: normalisation",
        ),
        ({"methods": {"": None, 3: None}}, "'' is no name of a method; 3 is no name"),
        (
            {"rates": [-1], "seeds": [], "methods": {}},
            "rate -1 is not a positive number; seeds is empty: name at least one; methods",
        ),
    ],
)
def test_arguments_that_make_no_sense(arguments: dict[str, Any], sentence: str) -> None:
    def untouched(*_: object) -> Any:
        raise AssertionError("nothing is run")

    with pytest.raises(ValueError, match="compare_rates") as error:
        compare_rates(untouched, untouched, BATCH, **arguments)
    assert sentence in str(error.value)


@pytest.mark.parametrize(
    ("returned", "sentence"),
    [
        (None, "train returned None: it must return one number"),
        ("0.3", "train returned '0.3'"),
        ((0.3, 0.9), r"train returned \(0.3, 0.9\)"),
        (torch.ones(2), r"train returned a tensor of shape \(2,\)"),
        (True, "train returned True"),
        (1j, "train returned 1j"),
        (torch.tensor(1j), r"train returned a tensor of shape \(\)"),
        (numpy.ones(3), "train returned array"),
    ],
)
def test_a_train_that_returns_no_number(returned: object, sentence: str) -> None:
    with pytest.raises(TypeError, match=sentence):
        compare_rates(build, lambda model, rate: returned, BATCH)


def test_a_method_that_returns_another_model() -> None:
    """A copy would be conditioned, and the model as it was trained."""
    methods = {"copied": lambda model, batch: copy.deepcopy(model)}
    with pytest.raises(TypeError, match="method 'copied' returned another model"):
        compare_rates(build, lambda model, rate: 1.0, BATCH, methods=methods)
    same = {"itself": lambda model, batch: model}
    result = compare_rates(build, lambda model, rate: 1.0, BATCH, methods=same, rates=[1], seeds=1)
    assert result["itself"].mean == 1


def test_a_label_that_cannot_be_printed() -> None:
    trained: list[float] = []
    with pytest.raises(TypeError, match="label is None, not a string"):
        compare_rates(build, lambda model, rate: trained.append(rate), BATCH, label=None)  # type: ignore[arg-type]
    assert not trained


@pytest.mark.parametrize(
    "returned",
    [2, torch.tensor(2.0, requires_grad=True), numpy.float32(2), numpy.array(2), torch.tensor(2)],
)
def test_a_train_that_returns_a_number(returned: object) -> None:
    assert (
        compare_rates(build, lambda model, rate: returned, BATCH, rates=[1], seeds=1)["as is"].mean
        == 2.0
    )


@pytest.mark.parametrize("built", [None, nn.Linear, torch.ones(3)])
def test_a_build_that_returns_no_module(built: object) -> None:
    with pytest.raises(TypeError, match=r"build\(0\) returned .*, not a torch\.nn\.Module"):
        compare_rates(lambda seed: built, train, BATCH)


def test_what_is_no_function() -> None:
    with pytest.raises(
        TypeError,
        match="build is an object of type Linear: pass a function that makes a model from a seed",
    ):
        compare_rates(nn.Linear(1, 1), train, BATCH)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="train is None: pass a function that trains a model at a rate"
    ):
        compare_rates(build, None, BATCH)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="train cannot be called with 2 arguments: pass a function"):
        compare_rates(lambda seed: nn.Linear(1, 1), lambda model: 0.0, torch.ones(1, 1))
    with pytest.raises(TypeError, match="build cannot be called with one argument: pass a"):
        compare_rates(lambda: nn.Linear(1, 1), lambda model, rate: 0.0, torch.ones(1, 1))


def test_the_digest_of_weights() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.LazyConv1d(2, 1))
    before = digest(model)
    assert digest(model) == before
    model[1].running_mean[2] += 1e-7
    assert digest(model) != before
    model.register_buffer("empty", torch.empty(0, dtype=torch.bfloat16))
    assert len(digest(model)) == len(before)


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_on_a_terminal_and_nowhere_else(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, progress, is_shown in (
        (Terminal(), True, True),
        (Terminal(), False, False),
        (StringIO(), True, False),
    ):
        monkeypatch.setattr("sys.stderr", stream)
        compare_rates(
            build, train, BATCH, rates=[0.5, 1], methods=METHODS, seeds=1, progress=progress
        )
        assert ("2 of 4 runs, 0 s left: as is at rate 1, seed 0" in stream.getvalue()) == is_shown
        assert bool(stream.getvalue()) == is_shown
    monkeypatch.setattr("sys.stderr", None)
    compare_rates(build, train, BATCH, rates=[0.5], methods=METHODS, seeds=1)


def test_progress_says_where_it_was_stopped() -> None:
    stream = Terminal()
    shown = Progress(8, 3, stream)
    shown.begin("as is")
    shown.end()
    shown.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None)
    assert stream.getvalue().endswith("stopped after 4 of 8 runs\x1b[K\n")


def test_no_method_of_that_name() -> None:
    result = compare_rates(build, train, BATCH, rates=[1], seeds=1)
    with pytest.raises(KeyError, match="there are 'as is', 'conditioned'"):
        result["condition"]


class Elements(HTMLParser):
    """All elements with their attributes, and the cells of each table; refuses tags that do not
    close.
    """

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(page)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in ("meta", "link", "br", "input", "img"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def of(self, tag: str, kind: str = "") -> list[dict[str, str | None]]:
        return [
            attrs
            for name, attrs in self.found
            if name == tag and kind in [*(attrs.get("class") or "").split(), ""]
        ]


@pytest.fixture
def result() -> RateComparison:
    def train(model: nn.Module, rate: float) -> float:
        if rate == 8 and not model.training:
            raise ValueError(EVIL)
        return (
            math.inf
            if rate == 4
            else 1e9
            if rate == 8
            else 1 + (math.log2(rate) - model.training) ** 2 + model.weight.item() ** 2
        )

    def switched(model: nn.Module, inputs: Tensor) -> None:
        model.eval()

    methods = {"as is": None, EVIL: switched}
    return compare_rates(
        build, train, BATCH, rates=[0.25, 0.5, 1, 2, 4, 8], methods=methods, label="test loss <b>"
    )


def test_the_page(result: RateComparison, tmp_path: Path) -> None:
    path = result.to_html(tmp_path / "rates.html")
    page = path.read_text(encoding="utf-8")
    elements = Elements(wide(page))
    assert not elements.of("script")
    assert not [
        attrs
        for _, attrs in elements.found
        if any("http" in (value or "") for value in attrs.values())
    ]
    assert len(elements.of("polyline", "line")) == 2
    assert len(elements.of("circle", "best")) == 2
    assert len(elements.of("circle", "dot")) == 6
    assert len(elements.of("polygon", "band")) == 2
    # As is diverges at 4 and is off the scale at 8; the other diverges at 4 and raises at 8, which
    # is a gap.
    assert len(elements.of("polygon", "off")) == 3
    assert "∞" in elements.text
    assert elements.of("svg")[0]["role"] == "img"
    assert elements.of("svg")[0]["aria-label"] == "test loss <b> over learning rate"
    assert len(elements.of("table")) == 3
    assert all("scope" in attrs for attrs in elements.of("th"))
    assert "prefers-color-scheme: dark" in page
    text = " ".join(elements.text)
    assert "3 of 3 diverged" in text
    assert "3 of 3 raised" in text
    assert EVIL in text
    assert "it is not drawn" not in text


def test_the_page_says_where_a_band_is_not_drawn(tmp_path: Path) -> None:
    def train(model: nn.Module, rate: float) -> float:
        return rate if rate < 4 else rate * 1000 ** abs(model.weight.item())

    for rates, said in (([1, 2, 4], True), ([1, 2], False)):
        result = compare_rates(build, train, BATCH, rates=rates, methods=METHODS, seeds=2)
        page = result.to_html(tmp_path / "rates.html").read_text(encoding="utf-8")
        assert ("; where a band would leave the scale it is not drawn." in page) == said
        assert len(Elements(wide(page)).of("polygon", "band")) == 2


def test_the_best_point_stands_where_the_axes_say(result: RateComparison) -> None:
    """The least of the curve is the lowest point of the drawing, and at the middle of its
    neighbours, as rates are logarithmic.
    """
    from pathcond.rates.page import comparing

    elements = Elements(wide(str(comparing(result)["rates_chart"])))
    circles = sorted(
        (float(c["cx"]), float(c["cy"]), c["class"])
        for c in elements.of("circle")
        if c["class"].endswith("s0")
    )
    heights = [y for _, y, _ in circles]
    best = heights.index(max(heights))
    assert circles[best][2] == "best s0"
    assert circles[best][0] - circles[best - 1][0] == pytest.approx(
        circles[1][0] - circles[0][0], abs=0.2
    )


@pytest.mark.parametrize(
    "figures",
    [
        [-3.0, -1.0, 0.0],
        [0.0, 0.0, 0.0],
        [1.0, 1.0, 1.0],
        [math.inf] * 3,
        [math.nan] * 3,
        [1e-300, 1.0, 1e300],
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_pages_of_all_kinds_of_figures(figures: list[float], count: int, tmp_path: Path) -> None:
    def train(model: nn.Module, rate: float) -> float:
        return figures[round(rate) - 1]

    result = compare_rates(build, train, BATCH, rates=[1, 2, 3][:count], methods=METHODS)
    drawn = Elements(result.to_html(tmp_path / "rates.html").read_text(encoding="utf-8"))
    places = [float(c[key]) for c in drawn.of("circle") for key in ("cx", "cy")]
    assert all(map(math.isfinite, places))
    str(result)


def test_many_methods_share_the_colours(tmp_path: Path) -> None:
    result = compare_rates(
        build,
        train,
        BATCH,
        rates=[0.5, 1],
        methods={f"method {i}": None for i in range(8)},
        seeds=1,
    )
    drawn = Elements(result.to_html(tmp_path / "rates.html").read_text(encoding="utf-8"))
    assert {c["class"] for c in drawn.of("polyline")} == {f"line s{i}" for i in range(6)}


def test_the_page_inside_a_notebook(
    result: RateComparison, monkeypatch: pytest.MonkeyPatch
) -> None:
    elements = Elements(result._repr_html_() or "")
    (frame,) = elements.of("iframe")
    assert frame["srcdoc"].startswith("<!doctype html>")
    assert len(Elements(wide(frame["srcdoc"])).of("circle", "best")) == 2
    monkeypatch.setitem(__import__("sys").modules, "jinja2", None)
    assert result._repr_html_() is None
    with pytest.raises(ImportError, match=r"pathcond\[report\]"):
        result.to_html("never.html")


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_in_a_browser(width: int, result: RateComparison, tmp_path: Path) -> None:
    page = result.to_html(tmp_path / "rates.html")
    image = tmp_path / "rates.png"
    options = (
        f"--headless --no-sandbox --disable-gpu --window-size={width},1200 --screenshot={image}"
    )
    command = [
        str(CHROMIUM),
        *options.split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        page.as_uri(),
    ]
    subprocess.run(command, capture_output=True, timeout=120, check=True)
    assert image.stat().st_size > 10_000


@pytest.mark.slow  # the example of the documentation is the same at half the length
def test_the_notebook(capsys: pytest.CaptureFixture) -> None:
    book = json.loads((ROOT / "examples" / "compare_rates.ipynb").read_text(encoding="utf-8"))
    code = ["".join(cell["source"]) for cell in book["cells"] if cell["cell_type"] == "code"]
    shown = [
        text
        for cell in book["cells"]
        for output in cell.get("outputs", [])
        for text in output["text"]
    ]
    scope: dict[str, Any] = {}
    threads = torch.get_num_threads()
    try:
        exec("\n".join(code), scope)
    finally:
        torch.set_num_threads(threads)
    assert not scope["result"].failures
    assert scope["result"]["as is"].at_edge is None
    assert without_figures(capsys.readouterr().out) == without_figures("".join(shown))


def test_the_example_of_the_documentation(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "docs" / "comparing-rates.md").read_text(encoding="utf-8")
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)[:2]
    exec(code, {})
    assert without_figures(capsys.readouterr().out) == without_figures(shown)


def without_figures(text: str) -> str:
    """Words only: figures vary with the machine."""
    return " ".join(re.sub(r"[-+]?\d[\d.]*(e[-+]\d+)?", "#", text).split())
