"""What the documentation shows is what the code does."""

import re
from pathlib import Path

import pytest

import pathcond
from pathcond.rules import RULES
from pathcond.rules.document import page
from pathcond_paper import document

from .zoo import entries

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_supported_operations_are_up_to_date() -> None:
    assert (ROOT / "docs" / "supported-operations.md").read_text() == page()


def test_the_page_of_results_is_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert Path("docs/reproduction.md").read_text() == document.page(
        Path("results/paper"), Path("docs/reproduction.md")
    )


def test_the_quick_start_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    shown = re.findall(
        r"```\n((?:Sequential conditioned|Symmetry of|Rescaling will do).*?)```", README, re.S
    )
    assert len(shown) == 3
    scope: dict = {}
    exec("\n".join(blocks), scope)
    printed = _without_figures(capsys.readouterr().out)
    for text in shown:
        assert _without_figures(text) in printed
    assert scope["symmetry"].num_units == 400
    assert scope["result"].output_change_eval < 1e-4


def test_the_paces_of_networks_are_as_printed(capsys: pytest.CaptureFixture) -> None:
    text = (ROOT / "docs" / "conditioning.md").read_text()
    code, shown = re.findall(r"```(?:python)?\n(.*?)```", text, re.S)
    exec(code, {})
    printed, stated = (
        dict(re.findall(r"(.+): × (\S+)", lines)) for lines in (capsys.readouterr().out, shown)
    )
    assert {name: float(pace) for name, pace in printed.items()} == pytest.approx(
        {k: float(v) for k, v in stated.items()}, rel=0.1
    )


def _without_figures(text: str) -> str:
    """Words only: figures, bars and line breaks vary with the machine."""
    return " ".join(
        re.sub(r"[-+]?\d[\d.,]*(e[-+]\d+)?|[▁▂▃▄▅▆▇█]+", "#", text).replace("# #", "#").split()
    ).replace("# #", "#")


def test_the_table_of_models_covers_the_collection() -> None:
    table = (ROOT / "docs" / "zoo.md").read_text()
    missing = [entry.name for entry in entries() if f"| {entry.name} |" not in table]
    assert not missing


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
