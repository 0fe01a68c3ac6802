"""Pages explain what they show: numbers, lines and words; a few outliers leave no chart empty."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import pathcond
from pathcond.cli.commands import app
from pathcond.report import charts

TARGET = """
import torch

def build():
    layers = torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    return torch.nn.Sequential(*layers), torch.randn(5, 3)
"""


@pytest.fixture(scope="module")
def report() -> pathcond.Report:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 2))
    return pathcond.condition_(model, torch.randn(50, 3))


@pytest.fixture(scope="module")
def page(report: pathcond.Report, tmp_path_factory: pytest.TempPathFactory) -> str:
    return report.to_html(
        tmp_path_factory.mktemp("page") / "report.html", name="my encoder"
    ).read_text(encoding="utf-8")


def test_every_number_and_section_has_an_explanation(page: str) -> None:
    assert (
        len(re.findall(r"<div><b>", page))
        == len(re.findall(r"<small>[^<]{20,}</small></div>", page))
        == 5
    )
    sections = re.split(r"<h2>", page)[1:]
    assert len(sections) == 6
    assert all(
        re.match(r'[^<]+</h2>\s*(<p class="faint">[^<]{20,}|<dl class="glossary">)', section)
        for section in sections
    )


def test_the_words_are_explained_at_the_end(page: str) -> None:
    words = re.findall(r"<dt>([^<]+)</dt><dd>[^<]{20,}", page)
    assert {"unit", "λ, log λ", "pinned", "path", "decade", "criterion", "pace"} <= set(words)


def test_the_page_has_the_name_that_it_is_given(page: str) -> None:
    assert "<title>my encoder, conditioned</title>" in page
    assert "<h1>my encoder, conditioned</h1>" in page


def test_the_page_says_where_nothing_was_done(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    flat = pathcond.Curvature(loss=lambda out: out.sum())
    report = pathcond.condition_(model, torch.randn(5, 3), criterion=flat)
    text = report.to_html(tmp_path / "report.html", name="mine").read_text(encoding="utf-8")
    assert "<title>mine, as it was</title>" in text
    assert "<h1>mine, as it was</h1>" in text
    assert "The weights of mine are as they were" in text
    assert "were rescaled" not in text
    assert "4 units in 1 group ·" in text
    assert "by Curvature(" in text  # names keep their letters
    bare = pathcond.condition_(nn.Linear(4, 3), torch.randn(5, 4))
    text = bare.to_html(tmp_path / "bare.html").read_text(encoding="utf-8")
    assert "0 units in 0 groups ·" in text
    assert text.count("Nothing can be rescaled") == 1


def test_the_command_calls_the_model_by_its_target(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TARGET)
    files = ["--out", str(tmp_path / "out.safetensors"), "--report", str(tmp_path / "report.html")]
    result = CliRunner().invoke(app, ["condition", f"{tmp_path / 'mine.py'}:build", *files])
    assert result.exit_code == 0, result.output
    assert "mine.py:build, conditioned</h1>" in (tmp_path / "report.html").read_text(
        encoding="utf-8"
    )


def test_every_chart_is_drawn_for_wide_and_for_narrow_windows(page: str) -> None:
    drawn = re.findall(r'<svg class="chart (\w+)" viewBox="0 0 (\d+) \d+"', page)
    assert [kind for kind, _ in drawn] == ["wide", "narrow"] * 2
    assert all(int(width) <= 358 for kind, width in drawn if kind == "narrow"), (
        "letters are as large as they say at 390 pixels"
    )


@pytest.mark.parametrize("count", [1, 6])
def test_legends_show_lines_as_they_are_drawn(count: int) -> None:
    chart = charts.lines(
        [charts.Series(f"name {i}", [0.0, i]) for i in range(count)],
        x_label="step",
        y_label="value",
    )
    *drawings, legend = re.split(r'(?=<p class="legend">)', chart)
    style = (Path(charts.__file__).parent / "templates" / "base.html.jinja").read_text(
        encoding="utf-8"
    )
    dashes = set()
    for i in range(count):
        assert f'<line class="line s{i}"' in legend
        assert "".join(drawings).count(f'<polyline class="line s{i}"') == 2
        dashes.add(
            next(
                iter(re.findall(rf"\.line\.s{i}\b[^{{]*{{ stroke-dasharray: ([^;]+);", style)),
                "none",
            )
        )
    assert len(dashes) == count, "no two lines have the same dashes"


def test_a_few_outliers_do_not_stretch_the_axis() -> None:
    values = torch.cat(
        [
            torch.linspace(0, 1, 1000, dtype=torch.float64),
            torch.tensor([1e6, -1e6], dtype=torch.float64),
        ]
    )
    chart = charts.histograms([("before", values, torch.ones_like(values))], x_label="log10 g")
    assert "log10 g · 1st to 99th percentile" in chart
    ticks = [float(text) for text in re.findall(r'<text class="tick" [^>]*>([^<]+)<', chart)]
    assert min(ticks) > -1
    assert max(ticks) < 2
