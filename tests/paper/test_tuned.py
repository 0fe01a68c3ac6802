"""Figure tuned: its protocol, the search, the starts of methods, and the control."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pathcond.criteria.criterion import PathKernel
from pathcond.lifting.lifting import diag_g
from pathcond.networks import mlp
from pathcond.rows import Row
from pathcond_paper.data import load
from pathcond_paper.figure import Place
from pathcond_paper.figures import tuned
from pathcond_paper.sweep.sweep import Sweep
from pathcond_paper.training.candidates import bound, log_factors
from pathcond_paper.training.lsuv import lsuv_
from pathcond_paper.training.methods import Method
from pathcond_paper.training.networks import LanguageModel, VisionTransformer
from pathcond_paper.training.recipe import Recipe, Run
from pathcond_paper.training.searching import search
from pathcond_paper.training.starting import Starts
from pathcond_paper.training.training import Curves, Data, train
from pathcond_paper.tuning import best, comparison
from pathcond_paper.tuning.settings import METHODS, SEARCHED, SMOKE

BUILD = partial(mlp, (12, 3, 12), inputs=64, outputs=64)
SCALES = (0.7, -0.4, 1.1)


@pytest.fixture(scope="module")
def digits() -> Data:
    return Data.of(load("digits"), "cpu", train=320, test=100)


def recipe(**methods: Method) -> Recipe:
    return Recipe(build=BUILD, epochs=2, batch=32, task="reconstruct", methods=methods)


def row(setting: str, method: str, seed: int, losses: dict[float, float]) -> Row:
    job = {"setting": setting, "method": method, "seed": seed}
    return Row(
        job=job, result={"learning_rate": [*losses], "test_loss": [*losses.values()]}, origin={}
    )


def test_rates_of_parameters_make_the_steps_of_a_rescaled_network(digits: Data) -> None:
    """The control: for plain SGD it does not matter whether weights are moved or rates are."""
    methods = {
        "moved": Method(title="", layer_scales=SCALES),
        "rates": Method(title="", layer_scales=SCALES, as_rates=True),
        "as-is": Method(title=""),
    }
    double = replace(recipe(**methods), build=lambda: BUILD().double())
    data = Data(
        x=digits.x.double(), y=digits.y, test_x=digits.test_x.double(), test_y=digits.test_y
    )
    runs = [Run(method=method, learning_rate=0.3, seed=1) for method in methods]
    moved, rates, as_is = train(runs, double, data)
    assert moved.test_loss == pytest.approx(rates.test_loss, rel=1e-9)
    assert moved.test_loss[-1] != pytest.approx(as_is.test_loss[-1], rel=1e-3)
    assert moved.layer_scales == pytest.approx(SCALES)


def test_every_start_but_lsuv_is_the_same_function(digits: Data) -> None:
    starts = Starts(recipe(**METHODS), digits.x[:32])
    before = starts.of("as-is", 3).model(digits.test_x)
    for method in set(METHODS) - {"lsuv", *SEARCHED}:
        start = starts.of(method, 3)
        torch.testing.assert_close(start.model(digits.test_x), before, rtol=1e-4, atol=1e-4)
        unmoved = method == "as-is" or METHODS[method].starts_as_is
        assert unmoved or start.describe_scales()["max_log_scale"] > 0.1
        assert starts.of(method, 3) is start  # conditioned once for all rates
    assert not torch.allclose(starts.of("lsuv", 3).model(digits.test_x), before, atol=0.1)


def test_lsuv_gives_every_layer_variance_one(digits: Data) -> None:
    torch.manual_seed(0)
    model = mlp((20, 10), inputs=64, batch_norm=True)
    seen: list[float] = []
    lsuv_(model, digits.x[:64])
    assert torch.equal(model[2].running_mean, torch.zeros(20))
    for layer in model:
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(
                lambda module, args, out: seen.append(float(out.detach().std()))
            )
    model.train()(digits.x[:64])
    assert seen == pytest.approx([1.0] * 3, rel=1e-3)


def test_the_search_is_no_worse_than_leaving_the_network_as_it_is(digits: Data) -> None:
    plain = recipe(**{"as-is": Method(title="")})
    rates = (0.05, 0.1, 0.2)
    found = search(plain, digits, rates, candidates=12)
    methods = {"found": Method(title="", layer_scales=found.log_scales), **plain.methods}
    runs = [Run(method="as-is", learning_rate=rate, seed=0) for rate in rates]
    runs.append(Run(method="found", learning_rate=found.learning_rate, seed=0))
    *as_is, best = (curves.test_loss[-1] for curves in train(runs, recipe(**methods), digits))
    assert best < min(as_is)


def test_the_grid_grows_until_the_best_rate_is_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    setting = replace(SMOKE["smoke-digits-ae-sgd"], rates=(0.01, 0.02), candidates=0)
    monkeypatch.setitem(SMOKE, "smoke-digits-ae-sgd", setting)
    jobs = [
        {"setting": "smoke-digits-ae-sgd", "method": "as-is", "seed": seed} for seed in (0, 1, 2)
    ]
    results = {
        job["seed"]: result for job, result in tuned.run(jobs, Place(), lambda share, what: None)
    }
    rates = results[0]["learning_rate"]
    assert rates == sorted(rates)
    assert max(rates) == 0.02 * 2**comparison.EXTENSIONS  # slower than any good rate to begin with
    best = min(rates, key=lambda rate: results[0]["test_loss"][rates.index(rate)])
    fresh = results[1]["learning_rate"]
    assert fresh == results[2]["learning_rate"]
    assert {best / 2, best, 2 * best} <= set(fresh)
    # theirs grow likewise
    assert fresh == sorted(fresh)
    assert not tuned.unsettled([Row(job, results[job["seed"]], {}) for job in jobs])


@pytest.mark.parametrize("method", ["as-is", "searched"])
def test_what_was_chosen_in_an_earlier_sweep_is_not_trained_again(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "smoke-digits-ae-sgd"
    monkeypatch.setitem(SMOKE, name, replace(SMOKE[name], rates=(0.25, 0.5, 1.0)))
    jobs = [{"setting": name, "method": method, "seed": seed} for seed in (0, 1)]
    whole = list(tuned.run(jobs, Place(), lambda share, what: None))
    first = Row(whole[0][0], whole[0][1], {})
    trained: list[Run] = []
    train = comparison.train
    monkeypatch.setattr(
        comparison, "train", lambda runs, *rest: trained.extend(runs) or train(runs, *rest)
    )
    ((job, result),) = tuned.run(jobs[1:], Place(rows=[first]), lambda share, what: None)
    assert job == jobs[1]
    assert {run.seed for run in trained} == {1}
    assert result["learning_rate"] == whole[1][1]["learning_rate"]
    # scales of a search are rounded in its row
    assert result["test_loss"] == pytest.approx(whole[1][1]["test_loss"], rel=1e-3)


def test_fresh_seeds_whose_best_rate_is_at_an_end_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """With what they have; rates that are inside are content."""
    name = "smoke-digits-ae-sgd"
    jobs = [{"setting": name, "method": "as-is", "seed": seed} for seed in (0, 1, 2)]
    losses = {0.25: 0.9, 0.5: 0.8, 1.0: 0.7}
    rows = [
        Row(
            job,
            row(name, "as-is", job["seed"], {0.5: 0.0} if not job["seed"] else losses).result,
            {},
        )
        for job in jobs
    ]
    assert tuned.unsettled(rows) == jobs[1:]
    inside = [row(name, "as-is", seed, losses | {1.0: 0.85}) for seed in (1, 2)]
    assert tuned.unsettled(inside) == []
    trained: list[float] = []

    def train(runs: Sequence[Run], *rest: object) -> list[Curves]:
        trained.extend(run.learning_rate for run in runs)
        return [Curves(test_loss=[0.6 if run.learning_rate == 2 else 0.65]) for run in runs]

    monkeypatch.setattr(comparison, "train", train)
    found = list(tuned.run(jobs[1:], Place(rows=rows), lambda share, what: None))
    assert trained == [2.0, 2.0, 4.0, 4.0]
    for _, result in found:
        assert result["learning_rate"] == [0.25, 0.5, 1.0, 2.0, 4.0]
        assert result["test_loss"] == [0.9, 0.8, 0.7, 0.6, 0.65]


def test_a_sweep_computes_what_is_not_settled_and_takes_the_new_row(tmp_path: Path) -> None:
    sweep = Sweep(
        name="tuned",
        figure=tuned,
        preset="smoke",
        out=tmp_path,
        only={"setting": ["smoke-digits-ae-sgd"], "method": ["as-is"]},
    )
    losses = {0.25: 0.9, 0.5: 0.8, 1.0: 0.7}
    for job in sweep.chosen:
        sweep.file.append(job, row("", "", 0, losses).result, {})
    assert (sweep.missing, sweep.unsettled) == ([], sweep.chosen[1:])
    settled = row("", "", 0, losses | {2.0: 0.8}).result
    for job in sweep.unsettled:
        sweep.file.append(job, settled, {})
    assert (sweep.missing, sweep.unsettled) == ([], [])
    assert [found.result for found in sweep.rows][1:] == [settled] * (len(sweep.chosen) - 1)


def test_a_network_that_is_conditioned_later_trains_an_epoch_as_it_is(digits: Data) -> None:
    methods = {name: METHODS[name] for name in ("as-is", "default-later", "default-teleport")}
    steps = len(digits.x) // 32
    plan = replace(recipe(**methods), teleport_every=steps, teleport_times=1)
    runs = [Run(method=name, learning_rate=0.5, seed=0) for name in methods]
    as_is, later, before = (curves.train_loss for curves in train(runs, plan, digits))
    assert later[0] == pytest.approx(as_is[0], rel=1e-5)
    assert abs(later[1] - as_is[1]) > 1e-3
    assert abs(before[0] - as_is[0]) > 1e-3


def test_only_the_default_leaves_its_criterion_open() -> None:
    """Else a method would become another when the library's default changes."""
    open_ones = {
        name
        for name, method in METHODS.items()
        if method.condition is not None and "criterion" not in method.condition
    }
    assert open_ones == {name for name in METHODS if name.startswith("default")}


def test_methods_are_told_at_the_best_of_three_rates() -> None:
    rows = [
        row("ae-sgd", "as-is", 0, {1.0: 0.5, 2.0: 0.4, 4.0: 0.404, 8.0: math.inf}),
        row("ae-sgd", "as-is", 1, {1.0: 0.52, 2.0: 0.45, 4.0: math.inf}),
        row("ae-sgd", "as-is", 2, {1.0: 0.54, 2.0: 0.43, 4.0: 0.3}),
        row("ae-sgd", "norms", 0, {1.0: 0.3, 2.0: 0.4}),
        row("ae-sgd", "norms", 1, {1.0: 0.36}),
        row("ae-sgd", "searched", 0, {1.0: 0.3}),
        row("ae-sgd", "searched", 1, {1.0: 0.34}),
    ]
    found = best.find_tuned(rows, "ae-sgd", "as-is")
    assert found is not None
    assert (found.rate, found.losses) == (2.0, [0.45, 0.43])
    assert found.width == (pytest.approx(math.log10(2)), None)  # 0.404 is within 1 % of 0.4
    assert not found.at_edge
    assert best.share(rows, "ae-sgd", "norms") == pytest.approx((0.44 - 0.36) / (0.44 - 0.34))
    assert best.share(rows, "ae-sgd", "lsuv") is None
    assert "80%" in tuned.table(rows)
    assert tuned.plot(rows)["tuned"].axes


@pytest.mark.parametrize("methods", [["keep"], ["norms"], ["norms", "lsuv"], ["as-is"]])
def test_a_comparison_of_some_methods_is_told_and_drawn(methods: list[str]) -> None:
    """``--only method=…``: without the network as it is, or with nothing that is drawn."""
    rows = [
        row("ae-sgd", method, seed, {0.1: math.inf, 0.2: 0.3, 0.4: 0.2})
        for method in methods
        for seed in (0, 1)
    ]

    assert METHODS[methods[0]].title in tuned.table(rows)
    assert [*tuned.plot(rows)] == ["tuned"]
    assert all(claim.verdict == "not run" for claim in tuned.claims(rows))


def test_shares_of_settings_that_were_held_out_are_told_apart() -> None:
    losses = {"as-is": 1.0, "layers": 0.6, "searched": 0.5}
    held = losses | {"layers": 0.9}
    rows = [
        row(setting, method, seed, {0.1: loss, 0.2: 2.0})
        for setting, each in (("ae-sgd", losses), ("funnel-momentum", held))
        for method, loss in each.items()
        for seed in (0, 1)
    ]

    told = tuned.claims(rows)[0].decides
    assert told == "50%, mean over 2 settings (80% where choices were made, 20% held out)."


def test_the_bound_is_least_where_it_says(digits: Data) -> None:
    starts = Starts(recipe(bound=Method(title="", rescaling=bound(PathKernel()))), digits.x[:32])
    model = starts.of("bound", 0).model
    symmetry = starts.prepare_for(starts.recipe.methods["bound"]).symmetry
    g = {name: values.double() for name, values in diag_g(model, digits.x[:32]).items()}
    squares = {name: p.detach().double().square() for name, p in model.named_parameters()}

    def value(t: Tensor) -> float:
        s = log_factors(symmetry, t)
        sharp = sum(float((e * torch.exp(-2 * s(name, e))).sum()) for name, e in g.items())
        far = sum(float((q * torch.exp(2 * s(name, q))).sum()) for name, q in squares.items())
        return math.log(sharp) + math.log(far)

    here = value(torch.zeros(symmetry.num_units, dtype=torch.float64))
    for _ in range(10):
        assert value(0.1 * torch.randn(symmetry.num_units, dtype=torch.float64)) > here


@pytest.mark.parametrize("build", [VisionTransformer, LanguageModel])
def test_stacked_transformers_are_those_by_themselves(build: type[nn.Module]) -> None:
    torch.manual_seed(0)
    small = partial(build, width=12, depth=1, heads=2)
    x = torch.randn(4, 3, 32, 32) if build is VisionTransformer else torch.randint(128, (4, 64))
    y = torch.randint(10, (4,)) if build is VisionTransformer else torch.randint(128, (4, 64))
    data = Data(x=x, y=y, test_x=x, test_y=y)
    together = Recipe(build=small, epochs=1, batch=4, methods={"as-is": Method(title="")})
    runs = [Run(method="as-is", learning_rate=0.0, seed=seed) for seed in (0, 1)]
    for run, curves in zip(runs, train(runs, together, data), strict=True):
        torch.manual_seed(run.seed)
        outputs = small()(x)
        loss = nn.functional.cross_entropy(outputs.flatten(0, -2), y.flatten())
        assert curves.test_loss[-1] == pytest.approx(loss.item(), rel=1e-4)
