"""The command line: tables, JSON, exit codes."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pathcond.cli import app

FACTORIES = """
import torch
from torch import nn

def mlp():
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

def with_inputs():
    return mlp(), torch.randn(5, 3)

def smooth():
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)

class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.g, self.b = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * self.g(x).sigmoid())

def gated():
    return Gated(), torch.randn(5, 3)

class Branching(nn.Module):
    def forward(self, x):
        return x if x.sum() > 0 else -x

def branching():
    return Branching(), torch.randn(5, 3)

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


def run(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["inspect", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_a_table_for_people(file: str) -> None:
    code, out, _ = run(f"{file}:with_inputs")
    assert code == 0
    assert "4 units in 1 group" in out
    assert "0.{weight,bias}" in out


def test_paths_on_request(file: str) -> None:
    code, out, _ = run(f"{file}:gated", "--paths")
    assert code == 0
    assert "Paths: 10^1.23, ‖Φ‖₂ = " in out  # (3 + 1)·4 + 1 = 17
    assert "Rescaling will do" in out
    assert "2: reaches sigmoid [g.{weight,bias}]" in out
    code, out, _ = run(f"{file}:gated", "--paths", "--json")
    assert code == 0
    assert set(json.loads(out)["paths"]["off_path"]) == {"g.weight", "g.bias"}


def test_json_for_scripts(file: str) -> None:
    code, out, _ = run(f"{file}:mlp", "--input", "5x3", "--json")
    assert code == 0
    assert json.loads(out)["num_units"] == 4


def test_nothing_to_rescale_and_the_approximate_switch(file: str) -> None:
    code, out, _ = run(f"{file}:smooth")
    assert code == 1
    assert "gelu" in out
    assert run(f"{file}:smooth", "--approximate")[0] == 0


def test_normalization_is_passed_on() -> None:
    code, out, _ = run("torchvision:resnet18", "--input", "2x3x64x64", "--normalization", "gain", "--json")
    assert code == 0
    assert json.loads(out)["normalization"] == "gain"
    assert json.loads(out)["num_units"] == 2880


@pytest.mark.parametrize(("target", "message"), [
    ("resnet18", "is no target"),
    ("torchvision:resnet19", "Did you mean 'resnet1"),
    ("timm:resnet_fifty", "timm has no model"),
    ("no.such.module:build", "cannot be imported"),
    ("missing.py:build", "There is no file"),
])  # fmt: skip
def test_wrong_targets(target: str, message: str) -> None:
    code, out, err = run(target)
    assert (code, out) == (2, "")
    assert message in err


def test_wrong_factories(file: str) -> None:
    for name, message in (("mpl", "Did you mean 'mlp'?"), ("number", "returned int"), ("mlp", "--input")):
        code, _, err = run(f"{file}:{name}")
        assert code == 2
        assert message in err
    assert run(f"{file}:mlp", "--input", "5y3")[0] == 2


def test_a_model_that_cannot_be_analysed(file: str) -> None:
    code, out, err = run(f"{file}:branching")
    assert (code, out) == (3, "")
    assert "control flow" in err


def test_demo() -> None:
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 0
    assert "76 units" in result.stdout
    change = re.search(r"change of an output: eval (\S+),", result.stdout)
    assert change is not None
    assert float(change[1]) < 1e-12


def test_reproduce(monkeypatch: pytest.MonkeyPatch) -> None:
    from pathcond.experiments import table1

    monkeypatch.setattr(table1, "NETWORKS", {"MLP 3×500": table1.NETWORKS["MLP 3×500"]})
    result = CliRunner().invoke(app, ["reproduce", "table1"])
    assert result.exit_code == 0
    assert re.search(r"MLP 3×500 +2,042,510 +2,042,510 +✓ +1,500 +1,500 +✓ +3.84e12 +3.84e12 +✓ +3.84e12", result.stdout)
    (row,) = json.loads(CliRunner().invoke(app, ["reproduce", "table1", "--json"]).stdout)
    assert (row["model"], row["parameters"]) == ("MLP 3×500", 2_042_510)


def test_reproduce_lists_what_there_is() -> None:
    result = CliRunner().invoke(app, ["reproduce", "--list"])
    assert (result.exit_code, result.stdout.split()[0]) == (0, "table1")
    for arguments, message in ((["figure99"], "no 'figure99'"), ([], "Say what to reproduce")):
        result = CliRunner().invoke(app, ["reproduce", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert "table1" in result.stderr
