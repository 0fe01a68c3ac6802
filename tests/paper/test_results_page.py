"""A folder of results as a page and as Markdown: all that is in the rows, and nothing that they
could smuggle in.
"""

import random
import re
import shutil
import subprocess
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from pathcond.cli.commands import app
from pathcond.rows import Row, Rows, RowsError
from pathcond_paper import document
from pathcond_paper import page as results
from pathcond_paper.figure import Claim
from pathcond_paper.style import drawings, panels
from pathcond_paper.sweep.selection import describe_jobs

FIGURES = {
    "first": "seconds over seeds (fig:first)",
    "second": "what nobody ran (fig:second, tab:second)",
    "third": "two drawings (fig:third)",
}
EVIL = '<script>alert("x")</script>'
ORIGIN = {
    "command": "pathcond reproduce first --preset smoke --device cpu",
    "device": "a processor",
    "torch": "2.11",
    "pathcond": "0.1",
    "python": "3.11",
    "date": "2025-02-01T10:00:00+00:00",
    "seconds": 30.0,
}
CHROMIUM = shutil.which("chromium")


class Fake(SimpleNamespace):
    """A figure with two claims and the given drawings; its rows hold a value."""

    def jobs(self, preset: str, seeds: int | None = None) -> list[dict]:
        return [{"seed": seed} for seed in range(seeds or 3)]

    def plot(self, rows: Sequence[Row]) -> dict[str, Any]:
        drawings = {}
        for name in self.drawings:
            drawings[name], (axes,) = panels(1, 1)
            axes.plot([row.result["value"] for row in rows])
            drawings[name].set_label(f"What {name} shows")
        return drawings

    def table(self, rows: Sequence[Row]) -> str:
        return "\n".join(
            f"{row.job['seed']}  {row.result['value']}  {row.result.get('note', '')}"
            for row in rows
        )

    def claims(self, rows: Sequence[Row]) -> list[Claim]:
        paper = ("Values are small (sec:small)", "Values | are *few* (sec:few)")
        if not rows:
            return [Claim.not_run(text) for text in paper]
        most = max(row.result["value"] for row in rows)
        note = rows[0].result.get("note", "")
        told = f"at most {most} {note}"
        return [
            Claim.judge(
                paper[0], True, told, f"more {note}", bound=f"below 1 {note}", ours=f"us {note}"
            ),
            Claim.judge(paper[1], False, "", bound="fewer"),
        ]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Results of the first and the third figure."""
    fakes = {
        name: Fake(drawings=[name, f"{name}-more"] if name == "third" else [name])
        for name in FIGURES
    }
    for module in (results, document):
        monkeypatch.setattr(module, "load", fakes.__getitem__)
    monkeypatch.setattr(results, "FIGURES", FIGURES)
    for name, seeds in (("first", 3), ("third", 2)):
        for seed in reversed(range(seeds)):
            add(tmp_path / "results", name, seed, {"value": seed / 7})
    return tmp_path / "results"


def add(folder: Path, name: str, seed: int, result: dict, **origin: Any) -> None:
    Rows(folder / f"{name}.jsonl").append(
        {"figure": name, "preset": "smoke", "seed": seed}, result, ORIGIN | origin
    )


class Elements(HTMLParser):
    """All tags of a page, with their attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_is_loaded_and_all_images_are_inside(folder: Path) -> None:
    page = results.page(folder)
    tags = Elements(page).tags
    images = [attributes for tag, attributes in tags if tag == "img"]
    assert len(images) == 3
    assert all(
        (image["src"] or "").startswith("data:image/svg+xml;base64,") and image["alt"]
        for image in images
    )
    assert not [tag for tag, _ in tags if tag in ("script", "link", "iframe", "object", "svg")]
    assert all(
        value.startswith("#")
        for _, attributes in tags
        for key, value in attributes.items()
        if key == "href" and value
    )
    assert "http:" not in page
    assert "https:" not in page
    assert "url(" not in page
    targets = {attributes["id"] for _, attributes in tags if "id" in attributes}
    # the contents are complete
    assert {(attributes["href"] or "")[1:] for tag, attributes in tags if tag == "a"} == targets


def test_narrow_screens_get_panels_below_each_other(folder: Path) -> None:
    page = Elements(results.page(folder)).tags
    narrow = [attributes for tag, attributes in page if tag == "source"]
    assert len(narrow) == sum(tag == "img" for tag, _ in page)
    assert all(
        (source["srcset"] or "").startswith("data:image/svg+xml;base64,") for source in narrow
    )

    class Wide(Fake):
        def plot(self, rows: Sequence[Row]) -> dict[str, Any]:
            return {"wide": panels(2, 3, width=3, height=2)[0]}

    shapes = {
        stacked: tuple(drawings(Wide(drawings=[]), [], stacked=stacked)["wide"].get_size_inches())
        for stacked in (False, True)
    }
    assert shapes == {False: (9, 4), True: (3, 12)}


def test_the_summary_counts_every_claim(folder: Path) -> None:
    figures = results.gather(folder)
    counts = results.counts([claim for figure in figures for claim in figure.claims])
    assert counts == {"reproduced": 2, "not reproduced": 2, "met": 0, "missed": 0, "not run": 2}
    shown = re.findall(
        r'<div><b>(\d+)</b><span class="badge [\w-]+">([\w ]+)</span>', results.page(folder)
    )
    assert {verdict: int(count) for count, verdict in shown} == counts


def test_figures_that_were_not_run_say_how(folder: Path) -> None:
    command = f"pathcond reproduce second --preset smoke --out {folder}"
    assert command in results.page(folder).split('id="not-run"')[1]
    assert command in document.page(folder, folder.parent / "page.md").split("## Not run")[1]


def test_origins_are_summarised(folder: Path) -> None:
    other = {
        "command": "another command",
        "device": "a GPU",
        "date": "2025-01-31T09:00:00+00:00",
        "seconds": 3600,
    }
    add(folder, "third", 2, {"value": 0.5}, **other)
    first, _, third = results.gather(folder)
    assert first.made is not None
    assert third.made is not None
    assert first.made.commands == (ORIGIN["command"],)
    assert first.made.facts["time of all runs"] == "1 min 30 s"
    assert third.made.commands == (ORIGIN["command"], "another command")
    assert third.made.facts == {
        "device": "a processor, a GPU",
        "versions": "pathcond 0.1; torch 2.11; python 3.11",
        "commit": "not recorded (3 rows)",
        "date": "2025-01-31 to 2025-02-01",
        "time of all runs": "1 min 0 s on a processor, 1 h 0 min on a GPU",
    }


def test_commits_of_rows_are_shown_and_rows_without_one_are_counted(folder: Path) -> None:
    before = results.gather(folder)[2]
    assert before.made is not None
    assert before.made.facts["commit"] == f"not recorded ({len(before.rows)} rows)"
    add(folder, "third", 2, {"value": 0.5}, commit="0123456789abcdef")
    add(folder, "third", 3, {"value": 0.5}, commit="0123456789abcdef+changes")
    add(folder, "third", 4, {"value": 0.5}, commit=None)
    made = results.gather(folder)[2].made
    assert made is not None
    assert set(made.facts["commit"].split(", ")) == {
        f"not recorded ({len(before.rows) + 1} rows)",
        "0123456789ab (1 row)",
        "0123456789ab+changes (1 row)",
    }
    assert made.facts["commit"] in results.page(folder)


def test_runs_that_are_missing_are_counted(folder: Path) -> None:
    first, _, third = results.gather(folder)
    assert first.made is not None
    assert third.made is not None
    assert first.made.runs == "3 runs of the preset smoke, smaller than the paper's"
    assert third.made.runs == "2 of 3 runs of the preset smoke, smaller than the paper's"
    assert (first.made.left, third.made.left) == ("", "seed=2")


@given(
    st.sets(st.tuples(st.integers(0, 2), st.sampled_from("ab"), st.integers(0, 2)), min_size=1),
    st.randoms(),
)
def test_missing_runs_are_described_by_what_selects_them(
    every: set[tuple[int, str, int]], chance: random.Random
) -> None:
    jobs = [
        {"depth": depth, "method": method, "seed": seed, "batch": 128}
        for depth, method, seed in sorted(every)
    ]
    some = chance.sample(jobs, chance.randint(1, len(jobs)))
    said = [
        dict(setting.split("=") for setting in part.split())
        for part in describe_jobs(some, jobs).split("; ")
    ]
    selected = [
        job
        for job in jobs
        if any(all(str(job[key]) in only[key].split(",") for key in only) for only in said)
    ]
    assert selected == [job for job in jobs if job in some]


def test_text_of_rows_is_only_text(folder: Path) -> None:
    """In claims, tables and origins, on the page and in Markdown."""
    add(
        folder,
        "third",
        2,
        {"value": 0.5, "note": EVIL},
        command=EVIL,
        device=EVIL,
        date=EVIL,
        **{EVIL: EVIL},
    )
    page = results.page(folder)
    assert EVIL not in page
    assert not [tag for tag, _ in Elements(page).tags if tag == "script"]
    assert page.count("&lt;script&gt;") >= 5
    text = document.page(folder, folder.parent / "page.md")
    # a block of code
    assert all(line.startswith("    ") for line in text.splitlines() if "<script" in line)
    assert "Values \\| are \\*few\\*" in text


def test_a_file_that_is_damaged_is_named(folder: Path) -> None:
    with (folder / "first.jsonl").open("a") as file:
        file.write("{\n")
    with pytest.raises(RowsError, match=r"first\.jsonl, line 5 is no JSON"):
        results.gather(folder)


@pytest.mark.parametrize(
    "row",
    [
        {"job": {"figure": "third", "preset": "smoke", "seed": 2}, "result": {}},  # no value
        {"job": {"figure": "third", "preset": "smoke", "seed": 2}, "result": {"value": "much"}},
        {"job": {"figure": "third", "preset": "smoke"}, "result": {"value": 1}},  # no seed
        {"job": {"figure": "third", "preset": "cpu", "seed": 2}, "result": {"value": 1}},
        {"job": {"figure": "first", "preset": "smoke", "seed": 2}, "result": {"value": 1}},
        {"job": [], "result": {"value": 1}},
    ],
)
def test_rows_that_the_figure_cannot_read_name_their_file(row: dict, folder: Path) -> None:
    Rows(folder / "third.jsonl").append(row["job"], row["result"], ORIGIN)
    with pytest.raises(RowsError, match=r"third\.jsonl(, line 4 is no row| holds)"):
        results.page(folder)


def test_a_first_row_of_no_preset_and_a_file_of_no_figure(folder: Path) -> None:
    Rows(folder / "second.jsonl").append({"preset": "huge"}, {}, ORIGIN)
    with pytest.raises(RowsError, match=r"second\.jsonl holds a run of the preset 'huge'"):
        results.gather(folder)
    (folder / "second.jsonl").rename(folder / "secnd.jsonl")
    with pytest.raises(RowsError, match=r"secnd\.jsonl: no figure has this name"):
        results.gather(folder)


def test_the_command(folder: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(folder)])
    assert done.exit_code == 0, done.output
    assert (folder / "report.html").read_text(encoding="utf-8") == results.page(folder)
    assert (
        CliRunner()
        .invoke(app, ["report", str(folder), "--out", str(tmp_path / "page.html")])
        .exit_code
        == 0
    )
    assert (tmp_path / "page.html").read_bytes() == (folder / "report.html").read_bytes()


def test_a_folder_of_folders_says_which_have_results(folder: Path) -> None:
    with pytest.raises(RowsError, match=f"there are some in {folder}"):
        results.gather(folder.parent)


def test_a_folder_without_results_says_how_to_get_some(tmp_path: Path) -> None:
    for empty in (tmp_path, tmp_path / "nowhere"):
        done = CliRunner().invoke(app, ["report", str(empty)])
        assert done.exit_code == 2
        assert f"pathcond reproduce all --out {empty}" in " ".join(done.output.split())


def test_the_markdown_is_the_same_every_time_and_its_links_lead_to_drawings(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "docs" / "reproduction.md"
    out.parent.mkdir()
    document.write(folder, out)
    text = out.read_text()
    assert text == document.page(folder, out)
    links = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", text)
    assert links == ["../results/first.png", "../results/third.png", "../results/third-more.png"]
    assert all(
        (out.parent / ".." / "results" / Path(link).name).resolve().exists() for link in links
    )
    rows = [line for line in text.splitlines() if line.startswith("| Values")]
    assert len(rows) == 4
    # no cell breaks out of the table
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 4 for row in rows)


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize("width", [390, 1280])
def test_no_page_is_wider_than_the_window(width: int, folder: Path, tmp_path: Path) -> None:
    """In a real browser, with the drawings at actual size and a line that is long."""
    add(folder, "third", 2, {"value": 0.5, "note": "long" * 200}, command="long" * 100)
    page = results.page(folder).replace('type="checkbox"', 'type="checkbox" checked')
    frame = "<iframe id=f style='border:0;width:{}px;height:900px' srcdoc='{}'></iframe>{}"
    script = (
        "<script>f.onload = () => { const d = f.contentDocument.documentElement;"
        "document.title = ['widths', d.scrollWidth, d.clientWidth].join(' ') }</script>"
    )
    framed = tmp_path / "framed.html"
    framed.write_text(
        frame.format(width, page.replace("&", "&amp;").replace("'", "&#39;"), script),
        encoding="utf-8",
    )
    options = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--virtual-time-budget=5000 --dump-dom"
    )
    command = [
        str(CHROMIUM),
        *options.split(),
        f"--user-data-dir={tmp_path / 'profile'}",
        "--virtual-time-budget=5000",
        "--dump-dom",
    ]
    shown = subprocess.run(
        [*command, framed.as_uri()], capture_output=True, text=True, timeout=120, check=True
    ).stdout
    widths = re.search(r"<title>widths (\d+) (\d+)</title>", shown)
    assert widths, shown[-500:]
    assert int(widths[1]) == int(widths[2]) <= width
