"""What the documentation shows is what the code does."""

import re
from pathlib import Path

import pathcond
from pathcond.rules import RULES
from pathcond.rules.document import page

from .zoo import entries

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def test_supported_operations_are_up_to_date() -> None:
    assert (ROOT / "docs" / "supported-operations.md").read_text() == page()


def test_the_quick_start_runs_and_prints_what_it_says() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, re.S)
    shown = re.search(r"```\n(Symmetry of Sequential.*?)```", README, re.S)
    sentence = re.search(r"```\n(Rescaling will do.*?)```", README, re.S)
    assert shown is not None
    assert sentence is not None
    scope: dict = {}
    exec("\n".join(blocks), scope)
    assert str(scope["symmetry"]) == shown[1].rstrip()
    regime = str(pathcond.theory.regime(scope["model"], scope["batch"]))
    assert _without_figures(regime) == _without_figures(" ".join(sentence[1].split()))
    assert scope["symmetry"].num_units == 400
    assert scope["result"].output_change_eval < 1e-4


def _without_figures(text: str) -> str:
    return re.sub(r"\d+\.\d+", "0.0", text)


def test_the_table_of_models_covers_the_collection() -> None:
    table = (ROOT / "docs" / "zoo.md").read_text()
    missing = [entry.name for entry in entries() if f"| {entry.name} |" not in table]
    assert not missing


def test_rules_are_real_operations() -> None:
    import torch

    packets = {op: getattr(torch.ops.aten, op, None) or getattr(torch.ops.aten, f"{op}_", None) for op in RULES}
    assert not [op for op, packet in packets.items() if packet is None]


def test_public_names_exist() -> None:
    assert all(hasattr(pathcond, name) for name in pathcond.__all__)
