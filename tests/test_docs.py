"""What the documentation shows is what the code does."""

import dataclasses
import math
import pkgutil
import re
import runpy
import tomllib
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import mean

import pytest
from typer.testing import CliRunner

import pathcond
from pathcond.cli.commands import app
from pathcond.rows import Row, Rows
from pathcond.rules import RULES
from pathcond.rules.document import page
from pathcond_paper import FIGURES, document, load
from pathcond_paper.figures import cifar_nv, mlp_depth
from pathcond_paper.sweep.selection import where
from pathcond_paper.training.methods import RATE
from pathcond_paper.tuning import best
from pathcond_paper.tuning.comparison import by_rate
from pathcond_paper.tuning.settings import METHODS, SEARCHED, SETTINGS

from .cases import CASES
from .strategies import DRAWS_ALL
from .zoo import entries, small_entries

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_supported_operations_are_up_to_date() -> None:
    assert (ROOT / "docs" / "supported-operations.md").read_text() == page()


def test_claims_are_decided_in_a_line_and_name_the_paper_by_numbers() -> None:
    from pathcond_paper.citing import LABEL, cite
    from pathcond_paper.page import gather

    claims = [claim for figure in gather(ROOT / "results" / "paper") for claim in figure.claims]
    assert len(claims) > 40
    for claim in claims:
        assert len(claim.decides.split()) <= 25, claim.decides
        assert len(claim.ours.split()) <= 25, claim.ours
        for text in (claim.decides, claim.bound):
            assert bool(text) == (claim.verdict != "not run"), claim.paper
        shown = cite(f"{claim.paper} {claim.decides} {claim.more} {claim.ours}")
        assert not LABEL.search(shown), shown


def test_the_page_of_results_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert Path("docs/reproduction.md").read_text() == document.page(
        Path("results/paper"), Path("docs/reproduction.md")
    )


@pytest.mark.parametrize(("page", "tables"), [("README.md", 1), ("docs/getting-started.md", 3)])
def test_the_quick_start_runs_and_prints_what_it_says(
    page: str, tables: int, capsys: pytest.CaptureFixture
) -> None:
    text = (ROOT / page).read_text()
    blocks = re.findall(r"```python\n(.*?)```", text, re.S)
    shown = re.findall(
        r"```\n((?:Sequential conditioned|Symmetry of|Rescaling by paths will do).*?)```",
        text,
        re.S,
    )
    assert len(shown) == tables
    scope: dict = {}
    exec("\n".join(blocks), scope)
    printed = _without_figures(capsys.readouterr().out)
    for table in shown:
        assert _without_figures(table) in printed
    assert scope["report"].num_units == 400
    if tables > 1:
        assert scope["symmetry"].num_units == 400
        assert scope["result"].output_change_eval < 1e-4
        assert (scope["handle"].steps, scope["handle"].teleports) == (4, 2)


def test_the_factory_of_the_command_line_page_is_a_target(tmp_path: Path) -> None:
    code = re.search(
        r"```python\n(# my_model.py\n.*?)```", (ROOT / "docs" / "command-line.md").read_text(), re.S
    )
    assert code
    (tmp_path / "my_model.py").write_text(code[1])
    result = CliRunner().invoke(app, ["inspect", f"{tmp_path / 'my_model.py'}:build", "--paths"])
    assert result.exit_code == 0, result.output
    assert "16 units" in result.output


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.split()) <= 700
    links = re.findall(r"\]\((?!https?:)([^)#]+)(?:#[^)]*)?\)", README)
    assert len(links) > 10
    assert not [link for link in links if not (ROOT / link).exists()]


def test_the_picture_is_what_its_script_draws() -> None:
    scope = runpy.run_path(str(ROOT / "docs" / "images" / "rescaling.py"))
    assert (ROOT / "docs" / "images" / "rescaling.svg").read_text(encoding="utf-8") == scope[
        "picture"
    ]()
    weights = {"plain": scope["START"], "rescaled": scope["rescaled"](scope["START"])}
    left = {
        name: math.dist(scope["descent"](start)[-1], scope["GOAL"])
        for name, start in weights.items()
    }
    assert left["rescaled"] < 0.1 * left["plain"]


def test_the_paces_of_networks_are_as_printed(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "docs" / "conditioning.md").read_text()
    criterion, code, shown = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)
    exec(criterion, {"__name__": "conditioning"})
    if not DRAWS_ALL:  # the convolutional ones, which come last, take most of the time
        assert "in networks.items():" in code
        code = code.replace("in networks.items():", "in list(networks.items())[:2]:")
    exec(code, {})
    printed, stated = (
        re.findall(r"(.+): × (\S+), by paths × (\S+)", lines)
        for lines in (capsys.readouterr().out, shown)
    )
    assert len(stated) == 5
    assert len(printed) == (5 if DRAWS_ALL else 2)
    for (name, *paces), (stated_name, *stated_paces) in zip(printed, stated, strict=DRAWS_ALL):
        assert name == stated_name
        assert [*map(float, paces)] == pytest.approx([*map(float, stated_paces)], rel=0.1)


def test_epochs_at_fixed_rates_are_those_of_the_rows() -> None:
    """Of the MLP with 5 hidden layers, with the best test accuracy in brackets."""
    rows = list(Rows(ROOT / "results" / "paper" / "mlp-depth.jsonl"))
    page = (ROOT / "docs" / "choosing.md").read_text()
    page = page[page.index("On CIFAR-10, an MLP of 5 hidden layers") :]
    head, _, *lines = (line.strip("|").split("|") for line in re.findall(r"^\|.*", page, re.M)[:6])
    for method, (_, *cells) in zip(("baseline", "paper", "exact", "default"), lines, strict=True):
        for rate, cell in zip(head[1:], cells, strict=True):
            found = where(
                rows, depth=5, method=method, learning_rate=float(rate.removeprefix(" lr "))
            )
            assert len(found) == 3
            epochs = mean(mlp_depth.epochs(found))
            accuracy = 100 * mean(max(row.result["test_accuracy"]) for row in found)
            told = "> 100" if math.isinf(epochs) else f"{epochs:.0f}"
            assert cell.replace("*", "").strip() == f"{told} ({accuracy:.1f} %)", (method, rate)
    small = mlp_depth.gains_by(rows, "learning_rate", "default")
    paper, exact, default = (
        -min(
            gain
            for rate in (0.01, 0.1)
            for gain in mlp_depth.gains_by(
                where(rows, learning_rate=rate), "depth", method
            ).values()
        )
        for method in ("paper", "exact", "default")
    )
    assert (
        f"is {small[0.0001]:.1f} points above the baseline's at 0.0001 and {small[0.001]:.1f} at "
        f"0.001. At 0.01 and 0.1 it is at worst {default:.1f} points below; the paper's method "
        f"loses up to {paper:.1f} points there, the path kernel {exact:.1f}."
    ) in " ".join(page.split())


def test_accuracies_of_cifar_nv_at_a_fixed_rate_are_those_of_the_rows() -> None:
    rows = list(Rows(ROOT / "results" / "paper" / "cifar-nv.jsonl"))

    def accuracy(variant: cifar_nv.Variant, method: str) -> str:
        found = where(variant.select(rows), learning_rate=RATE, method=method)
        assert len(found) == 3
        return f"{mean(cifar_nv.best(found)):.1f} %"

    published, described = (
        {method: accuracy(variant, method) for method in ("baseline", "default", "paper", "exact")}
        for variant in cifar_nv.VARIANTS
    )
    page = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    assert (
        f"{published['default']} instead of {published['baseline']}, with a last BatchNorm "
        f"{described['default']} instead of {described['baseline']}. The paper's own method gains "
        f"there, {published['paper']} and {described['paper']}"
    ) in page
    assert (
        f"then has a best test accuracy of {described['exact']} at the rate 0.001. As it was it "
        f"has {described['baseline']}, conditioned as in the paper {described['paper']}."
    ) in page


def tuned_rows() -> list[Row]:
    return [
        Row(
            {k: v for k, v in row.job.items() if k not in ("figure", "preset")},
            row.result,
            row.origin,
        )
        for row in Rows(ROOT / "results" / "paper" / "tuned.jsonl")
    ]


def test_losses_at_equal_rates_are_those_of_the_rows() -> None:
    """Over what the network as it was has at the same rate."""
    rows = tuned_rows()

    found = {name: best.at_equal_rates(rows, name, best.DEFAULT).values() for name in SETTINGS}
    assert all(found.values())
    above = {name: max(ratios) for name, ratios in found.items() if max(ratios) > 1.01}
    assert above.keys() == {"cifar-nv"}
    slower = [
        f"{100 * (max(best.at_equal_rates(rows, name, method, 1).values()) - 1):.0f} %"
        for name, method in (("resnet20", "layers"), ("cifar-nv", "layers"), ("resnet20", "norms"))
    ]
    page = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    least, greatest = min(map(min, found.values())), max(map(max, found.values()))
    assert (
        f"the default has {least:.1f} to {greatest:.2f} times its loss, and more than it on "
        "CIFAR-NV alone"
    ) in page
    assert (
        f"`BalancedLayers(front=1/3)` has up to {slower[0]} more loss on ResNet-20 and {slower[1]} "
        f"on CIFAR-NV, `BalancedNorms()` up to {slower[2]} on ResNet-20"
    ) in page


def test_seeds_that_go_wrong_at_equal_rates_are_told() -> None:
    rows = tuned_rows()
    page = " ".join((ROOT / "docs" / "choosing.md").read_text().split())

    def by_seed(setting: str, method: str, rate: float, measure: str) -> list[float]:
        return [
            by_rate(row.result, measure)[rate]
            for row in sorted(
                where(rows, setting=setting, method=method), key=lambda row: row.job["seed"]
            )
        ]

    def ratios(setting: str, method: str, rate: float) -> list[float]:
        ours, as_is = (by_seed(setting, name, rate, "test_loss") for name in (method, "as-is"))
        return sorted(a / b for a, b in zip(ours, as_is, strict=True))

    rates = (2**-7, 2**-6)
    wrong = [min(by_seed("cifar-nv", "layers-batch", rate, "test_accuracy")) for rate in rates]
    others = [ratio for rate in rates for ratio in ratios("cifar-nv", "layers-batch", rate)[:3]]
    assert all(ratios("cifar-nv", "layers-batch", rate)[3] > 1.5 for rate in rates)
    assert ratios("cifar-nv", "layers-batch", 2**-5)[3] < 1
    assert (
        f"({100 * wrong[0]:.0f} % and {100 * wrong[1]:.0f} % accuracy), while the other three have "
        f"{100 * (1 - max(others)):.0f} to {100 * (1 - min(others)):.0f} % less loss. At 0.031"
    ) in page


def test_what_becomes_of_the_best_rate_is_that_of_the_rows() -> None:
    rows = tuned_rows()
    ratios: Counter[float] = Counter()
    doubled = set()
    for name in SETTINGS:
        ours, as_is = (
            best.find_tuned(rows, name, method)
            for method in (best.find_default(rows, name), "as-is")
        )
        assert ours is not None
        assert as_is is not None
        ratios[ours.rate / as_is.rate] += 1
        doubled |= {name} if ours.rate == 2 * as_is.rate else set()
    same, half, twice = (ratios.pop(ratio) for ratio in (1.0, 0.5, 2.0))
    assert not ratios
    assert doubled == {"cifar-nv", "cifar-nv-norm", "mlp-bn-sgd"}
    for place, told in (
        (
            "docs/choosing.md",
            f"In these {len(SETTINGS)} settings the best rate was the same in {same}, half of it "
            f"in {half} and twice in {twice} (CIFAR-NV with and without a last BatchNorm, MLP with "
            "BatchNorm).",
        ),
        (
            "README.md",
            f"in all {len(SETTINGS)} measured settings the best rate stayed ({same}), "
            f"halved ({half}) or doubled ({twice}).",
        ),
    ):
        assert told in " ".join((ROOT / place).read_text().split()), place


def test_what_is_not_settled_at_tuned_rates_is_counted() -> None:
    rows = tuned_rows()
    found = [
        one
        for name in SETTINGS
        for method in METHODS
        if (one := best.find_tuned(rows, name, method)) is not None
    ]
    at_edge = sum(one.at_edge for one in found)
    page = " ".join((ROOT / "docs" / "choosing.md").read_text().split())
    assert f"In {at_edge} of {len(found)} comparisons the best rate of the fresh seeds" in page
    shares = [
        one
        for name in SETTINGS
        for method in METHODS
        if method not in SEARCHED and (one := best.share(rows, name, method)) is not None
    ]
    assert f"reach up to {100 * max(shares):.0f} % of its gain" in page


def test_losses_at_tuned_rates_are_those_of_the_rows() -> None:
    rows = tuned_rows()
    by_title = {setting.title: name for name, setting in SETTINGS.items()}

    def stated(page: str, methods: tuple[str, ...]) -> int:
        lines = re.findall(r"^\| ([^|]+, \w+) \| (\d.*) \|$", (ROOT / page).read_text(), re.M)
        told = {
            by_title.get(title) or by_title[f"autoencoder {title}"]: cells.split("|")
            for title, cells in lines
        }
        for setting, cells in told.items():
            kernel = "kernel-absorb" if SETTINGS[setting].normed else "kernel-full"
            names = {"": best.find_default(rows, setting), "kernel": kernel}
            for method, cell in zip(methods, cells, strict=True):
                found = best.find_tuned(rows, setting, names.get(method, method))
                planned = names.get(method, method) in SETTINGS[setting].list_methods()
                absent = "not run" if planned else "–"
                expected = absent if found is None else f"{found.loss:.3f}"
                assert cell.strip(" *") == expected, (page, setting, method)
        return len(told)

    columns = ("as-is", "", "paper", "kernel", "norms", "curvature", "layers", "searched")
    assert stated("docs/choosing.md", columns) == len(SETTINGS)
    assert stated("README.md", ("as-is", "", "searched")) == 4
    for name, setting, method in (
        ("README.md", "cifar-nv", "layers-batch"),
        ("docs/choosing.md", "cifar-nv", "layers-batch"),
        ("docs/choosing.md", "resnet20", "layers"),
        ("docs/choosing.md", "vit", "layers"),
    ):
        found = [best.find_tuned(rows, setting, method), best.find_tuned(rows, setting, "as-is")]
        ours, as_is = (f"{100 * mean(one.accuracies):.1f} %" for one in found if one is not None)
        text = " ".join((ROOT / name).read_text().split()).replace("accuracy ", "")
        assert f"{ours} instead of {as_is}" in text, (name, setting)
    accuracies = {
        f"{100 * mean(one.accuracies):.1f} %"
        for method in ("as-is", "layers-batch")
        if (one := best.find_tuned(rows, "resnet20", method))
    }
    gain = -change(rows, "layers", "as-is", "resnet20")
    assert len(accuracies) == 1
    assert (
        f"ResNet-20 ends where it ended before ({accuracies.pop()}); its loss falls by {gain} %"
    ) in " ".join((ROOT / "docs/choosing.md").read_text().split())


def test_shares_of_the_searched_gain_are_those_of_the_rows() -> None:
    rows = tuned_rows()
    searched = [name for name in SETTINGS if best.find_tuned(rows, name, "searched")]

    def shares(method: str) -> dict[str, float]:
        return {name: best.share(rows, name, method) or 0.0 for name in searched}

    def percent(values: Iterable[float]) -> str:
        return f"{100 * mean([*values]):.0f} %"

    page = " ".join((ROOT / "docs/choosing.md").read_text().split())
    default = shares(best.DEFAULT)
    chosen = [share for name, share in default.items() if not SETTINGS[name].held_out]
    assert len(searched) == len(chosen) + 2 == 9
    held_out_autoencoder, funnel = (
        f"{percent([default[name]])} of a gain of {-change(rows, 'searched', 'as-is', name)} %"
        for name in ("cifar-ae-adam", "funnel-momentum")
    )
    assert (
        f"the default has {percent(default.values())} of the searched gain, the path kernel under "
        f'"full" {percent(shares("kernel-full").values())}. Over the seven by which the default '
        f"was chosen it has {percent(chosen)}. Of the two that were held out, it has "
        f"{held_out_autoencoder} "
        f"on the autoencoder and {funnel} on the funnel."
    ) in page
    autoencoders = [name for name in searched if "ae" in name]
    gains = [-change(rows, "searched", "as-is", name) for name in autoencoders]
    assert (
        f"Over the six autoencoders, where the search gains {min(gains)} to {max(gains)} %, it has "
        f"{percent(default[name] for name in autoencoders)}"
    ) in page
    mlps = [name for name in searched if name not in autoencoders]
    assert {-change(rows, "searched", "as-is", name) for name in mlps} == {1}
    norms, curvature, by_outputs, between, from_outputs = (
        percent(shares(method).values())
        for method in (
            "norms",
            "curvature",
            "norms-by-outputs",
            "norms-activations",
            "outputs-activations",
        )
    )
    assert (
        f"`BalancedNorms()` ({norms} of the searched gain), `Curvature()` ({curvature}), balanced "
        f'norms in which each weight counts by how many outputs its layer has ("by outputs", '
        f"{by_outputs}), a quarter of the way from balanced norms to "
        f"activations of one size ({between}). A quarter of the way from norms balanced by "
        f"outputs to activations of one size has {from_outputs}"
    ) in page
    more = percent(shares("curvature-more").values())
    assert f"on 128 samples instead of 64 has {more}" in page
    full = shares("layers")
    compared = [
        (best.find_tuned(rows, n, "layers"), best.find_tuned(rows, n, "as-is")) for n in SETTINGS
    ]
    assert all(ours.loss <= as_is.loss for ours, as_is in compared if ours and as_is)
    assert f"and it has {percent(full.values())} of the searched gain" in page
    kept = percent(shares("keep").values())
    resnet, nv, nv_norm, vit = (
        change(rows, "keep", "as-is", name)
        for name in ("resnet20", "cifar-nv", "cifar-nv-norm", "vit")
    )
    assert nv == nv_norm
    assert (
        f'by the path kernel, under "full": {kept} of the searched gain. ResNet-20 ends with '
        f"{-resnet} % less loss, CIFAR-NV with {nv} % more, the vision transformer with {vit} % "
        "more."
    ) in page


def change(rows: list[Row], method: str, beside: str, setting: str) -> int:
    """Of the loss by a method, each at its own best rate, in percent of that by another."""
    ours, other = (best.find_tuned(rows, setting, name) for name in (method, beside))
    assert ours is not None, (method, setting)
    assert other is not None, (beside, setting)
    return round(100 * (ours.loss / other.loss - 1))


def test_what_other_ways_give_at_tuned_rates_is_that_of_the_rows() -> None:
    rows = tuned_rows()

    def changes(method: str, beside: str, settings: tuple[str, ...]) -> list[int]:
        return [change(rows, method, beside, name) for name in settings]

    page = " ".join((ROOT / "docs/choosing.md").read_text().split())
    sgd = ("ae-sgd", "deep-ae-sgd", "mlp-sgd")
    again = changes("default-teleport", "layers", sgd) + changes(
        "default-teleport", "layers-batch", ("mlp-bn-sgd",)
    )
    assert f"{-max(again)} to {-min(again)} % less loss than conditioning once" in page
    later, before = (
        [100 * (best.share(rows, name, method) or 0.0) for name in (*sgd, "mlp-bn-sgd")]
        for method in ("default-later", best.DEFAULT)
    )
    assert (
        f"{min(later):.0f} to {max(later):.0f} % of the searched gain in these settings, where "
        f"conditioning before training has {min(before):.0f} to {max(before):.0f} %"
    ) in page
    paper = sorted(
        changes(
            "paper",
            "as-is",
            ("ae-sgd", "ae-adam", "deep-ae-momentum", "deep-ae-adam", "deep-ae-sgd"),
        )
    )
    resnet, without, with_norm = changes(
        "paper", "as-is", ("resnet20", "cifar-nv", "cifar-nv-norm")
    )
    assert resnet == 0
    assert (
        f"{-paper[3]} to {-paper[0]} % less loss on four of the five autoencoders on MNIST, "
        f"{paper[4]} % more on the fifth; as much on ResNet-20, {without} % more on "
        f"CIFAR-NV, {with_norm} % more with a last BatchNorm"
    ) in page
    curvature = best.find_tuned(rows, "resnet20", "curvature")
    assert curvature is not None
    assert f"more on ResNet-20 ({100 * mean(curvature.accuracies):.1f} % accuracy)" in page
    for name in ("cifar-nv", "cifar-nv-norm"):
        ours, as_is = (best.find_tuned(rows, name, method) for method in ("curvature", "as-is"))
        assert ours is not None
        assert as_is is not None
        assert ours.rate == 8 * as_is.rate
    worst = max(changes("curvature", "as-is", ("vit", "language-model")))
    assert f"on transformers it loses up to {worst} %" in page
    better = {name for name in SETTINGS if change(rows, "lsuv", "as-is", name) < 0}
    ahead = {
        name for name in SETTINGS if change(rows, "lsuv", best.find_default(rows, name), name) < 0
    }
    assert ahead == {"resnet20", "language-model"}
    assert better == {*ahead, "cifar-nv-norm"}
    resnet, language, with_norm = changes(
        "lsuv", "as-is", ("resnet20", "language-model", "cifar-nv-norm")
    )
    assert (
        f"on ResNet-20 ({-resnet} % less loss) and the language model ({-language} % less). With a "
        f"last BatchNorm CIFAR-NV gains {-with_norm} % by it, half of what the default gives."
    ) in page


def test_what_the_path_kernel_gives_under_each_normalization_value_is_that_of_the_rows() -> None:
    rows = tuned_rows()

    def changes(setting: str, *values: str) -> list[int]:
        return [change(rows, f"kernel-{value}", "as-is", setting) for value in values]

    page = " ".join((ROOT / "docs/choosing.md").read_text().split())
    full, paper, *others = changes("resnet20", "full", "paper", "absorb", "gain")
    assert paper == 0
    assert (
        f'ResNet-20 gains {-full} % by "full", nothing by "paper" and loses {min(others)} to '
        f"{max(others)} % by the others"
    ) in page
    absorb, full = changes("vit", "absorb", "full")
    assert f'transformer gains {-absorb} % by "absorb" and loses {full} % by "full".' in page
    absorb, *others = changes("cifar-nv-norm", "absorb", "full", "paper", "gain")
    without = changes("cifar-nv", "absorb", "full", "paper", "gain")
    assert (
        f'CIFAR-NV with a last BatchNorm gains {-absorb} % by "absorb" and loses {min(others)} to '
        f"{max(others)} % by the others; without one, all four end within "
        f"{max(map(abs, without))} % of the network as it was"
    ) in page


def test_gains_at_tuned_rates_are_those_of_the_rows() -> None:
    rows = tuned_rows()
    gains = {}
    for name in SETTINGS:
        methods = ("as-is", best.find_default(rows, name))
        as_is, ours = (
            one.loss for method in methods if (one := best.find_tuned(rows, name, method))
        )
        assert ours < as_is
        gains[name] = 100 * (1 - ours / as_is)
    little = (
        "resnet20",
        "mlp-bn-sgd",
        "mlp-sgd",
        "funnel-momentum",
        "vit",
        "language-model",
        "cifar-ae-adam",
    )
    uneven = ("ae-sgd", "ae-adam", "deep-ae-sgd", "deep-ae-momentum", "deep-ae-adam")
    for path, words, names in (
        ("README.md", "falls by {} to {} %", little),
        ("docs/choosing.md", "as in an autoencoder**: the loss falls by {} to {} %", uneven),
        ("docs/measured.md", f"the test loss of {len(gains)} settings by {{}} to {{}} %", gains),
    ):
        least, greatest = (f"{side(gains[name] for name in names):.0f}" for side in (min, max))
        assert words.format(least, greatest) in " ".join((ROOT / path).read_text().split())


def _without_figures(text: str) -> str:
    """Words only: figures, bars and line breaks vary with the machine."""
    return " ".join(
        re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?|[▁▂▃▄▅▆▇█]+", "#", text).replace("# #", "#").split()
    ).replace("# #", "#")


def test_the_table_of_models_covers_the_collection() -> None:
    """All of it, and other pages speak of as many models as are in the table."""
    table = (ROOT / "docs" / "zoo.md").read_text()
    models = [entry.name for entry in entries()]
    assert [model for model in models if f"| {model} |" not in table] == []
    for name, times in (("README.md", 1), ("docs/conditioning.md", 1), ("docs/measured.md", 3)):
        text = " ".join((ROOT / name).read_text().split())
        counts = re.findall(r"(\d+) (?=models(?:\]\(docs/zoo.md\)| keep| under|\.))", text)
        assert counts == [str(len(models))] * times, name
    measured = (ROOT / "docs/measured.md").read_text()
    assert f"on {len(CASES)} small networks of all families" in measured
    small = list(small_entries())
    assert f"on {len(small)} architectures of transformers" in measured


def test_rules_are_real_operations() -> None:
    import torch

    own = [op for op in RULES if "::" not in op]  # others are defined by other libraries
    packets = {
        op: getattr(torch.ops.aten, op, None) or getattr(torch.ops.aten, f"{op}_", None)
        for op in own
    }
    assert not [op for op, packet in packets.items() if packet is None]


def test_public_names_exist() -> None:
    assert all(hasattr(pathcond, name) for name in pathcond.__all__)


def test_names_that_pages_mention_exist() -> None:
    """`Symmetry.factors`, `pathcond.theory.regime`, `rules/labels.py`."""
    pages = {path: path.read_text() for path in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]}
    missing = []
    for path, text in pages.items():
        for owner, name in re.findall(r"`(?:pathcond\.)?([A-Z]\w+)\.(\w+)", text):
            known = getattr(pathcond, owner, None)
            if known is not None and name not in {*dir(known), *_fields(known)}:
                missing.append(f"{path.name}: {owner}.{name}")
        for name in re.findall(r"`(pathcond(?:\.\w+)+)", text):
            try:
                pkgutil.resolve_name(name)
            except (ImportError, AttributeError):
                missing.append(f"{path.name}: {name}")
        for name in re.findall(r"`(?:src/pathcond/)?((?:\w+/)+\w+\.py)`", text):
            if not any((ROOT / root / name).exists() for root in ("", "src/pathcond")):
                missing.append(f"{path.name}: {name}")
    assert not missing


def _fields(kind: object) -> set[str]:
    if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
        return set()
    return {field.name for field in dataclasses.fields(kind)}


@pytest.mark.parametrize("name", FIGURES)
def test_first_lines_of_claims_are_short(name: str) -> None:
    """At most 25 words, of what decides and of what the library does."""
    rows = list(Rows(ROOT / "results" / "paper" / f"{name}.jsonl"))
    for claim in load(name).claims(rows):
        for line in (claim.decides, claim.ours):
            words = re.findall(r"\S*\w\S*", line)
            assert len(words) <= 25, (claim.paper, len(words), line)


# Labels of the paper's definitions, statements, algorithms, figures and tables, from its source.
ITEMS = """
alg:detailed_rescaling alg:ideal alg:rescaling_algorithm def:admissible_rescaling def:dcal
def:neur_resc def:path def:path_lifting def:plusdiv fig:activations fig:bcd_convergence
fig:cifar10_conv fig:cifar10_fc fig:cifar10_fc_gelu fig:conv_speed_all_lrs fig:gelu_silu
fig:gelu_silu_diff fig:generalize_all_lrs fig:mnist_ae fig:regime_analysis fig:regimes_all_lrs
fig:timing fig:timing_mlp fig:toy_example lemma:calculate_degree_pol lemma:calculate_degree_pol_2
lemma:coercive_property lemma:dcal_characterization lemma:existence_solution lemma:notinB
lemma:path_properties lemma:resc_mat lemma:reverse_transpose lemma:rewriting lemma:totheloss
prop:constant-diagonal prop:equiv_convex_problem prop:expected-standard-init
prop:expected-standard-init-main tab:architecture_stats
""".split()


def test_the_tests_and_commands_for_the_papers_items_exist() -> None:
    text = (ROOT / "docs" / "paper-items.md").read_text()
    assert not [label for label in ITEMS if f"`{label}`" not in text]
    named = re.findall(r"`(tests/\S+\.py)::(?:(\w+)::)?(test_\w+)`", text)
    assert len(named) >= 30
    for path, group, test in named:
        source = (ROOT / path).read_text()
        assert re.search(rf"^ *def {test}\(", source, re.M), (path, test)
        assert not group or re.search(rf"^class {group}\b", source, re.M), (path, group)
    figures = set(re.findall(r"`pathcond reproduce (\S+?)[ `]", text))
    assert figures == FIGURES.keys() - {"tuned"}  # which is no figure of the paper


def test_the_api_pages_have_every_public_name() -> None:
    pages = "".join(page.read_text() for page in (ROOT / "docs" / "api").glob("*.md"))
    shown = re.findall(r"^::: ([\w.]+)$", pages, re.MULTILINE)
    missing = [name for name in pathcond.__all__ if f"pathcond.{name}" not in shown]
    assert not missing
    unknown = [name for name in shown if pkgutil.resolve_name(name) is None]
    assert not unknown


def test_extras_that_messages_and_pages_name_exist() -> None:
    projects = {
        tomllib.loads(path.read_text())["project"]["name"]: path
        for path in (ROOT / "pyproject.toml", ROOT / "paper" / "pyproject.toml")
    }
    texts = [*ROOT.glob("src/**/*.py"), *ROOT.glob("paper/**/*.py"), *ROOT.glob("docs/*.md")]
    named = {
        found
        for path in texts
        for found in re.findall(r'"([\w./-]+)\[(\w+)\]"', path.read_text())
        if found[0] in (*projects, ".", "./paper")
    }
    assert ("pathcond", "cli") in named
    for project, extra in named:
        name = {".": "pathcond", "./paper": "pathcond-paper"}.get(project, project)
        known = tomllib.loads(projects[name].read_text())["project"]["optional-dependencies"]
        assert extra in known, f"{project}[{extra}]"
