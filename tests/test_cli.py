"""The command line: tables, JSON, exit codes."""

import importlib.metadata
import json
import math
import os
import random
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from pathcond.cli.commands import app
from pathcond.cli.targets import load_target
from pathcond_paper import FIGURES

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

def sized(width, depth=2):
    return mlp()

def failing():
    return helper(0)

def helper(width):
    return 1 / width

def inside_torch():
    return torch.zeros(2, 3) @ torch.zeros(2, 3)

def exiting():
    raise SystemExit("usage: train.py")

def broken():
    model, inputs = with_inputs()
    model[0].weight.data[0, 0] = float("nan")
    return model, inputs

model = mlp()
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
    assert "Rescaling by paths will do" in out
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
    code, out, _ = run(
        "torchvision:resnet18", "--input", "2x3x64x64", "--normalization", "gain", "--json"
    )
    assert code == 0
    assert json.loads(out)["normalization"] == "gain"
    assert json.loads(out)["num_units"] == 2880


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("resnet18", "is no target"),
        ("torchvision:resnet19", "Did you mean 'resnet1"),
        ("timm:resnet_fifty", "timm has no model"),
        ("no.such.module:build", "cannot be imported"),
        ("missing.py:build", "There is no file"),
    ],
)
def test_wrong_targets(target: str, message: str) -> None:
    code, out, err = run(target)
    assert (code, out) == (2, "")
    assert message in err


def test_wrong_factories(file: str) -> None:
    for name, message in (
        ("mpl", "Did you mean 'mlp'?"),
        ("number", "returned int"),
        ("mlp", "--input"),
    ):
        code, _, err = run(f"{file}:{name}")
        assert code == 2
        assert message in err
    assert run(f"{file}:mlp", "--input", "5y3")[0] == 2


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("failing", ("ZeroDivisionError: division by zero", "factories.py:", "`return 1 / width`")),
        (
            "inside_torch",
            ("RuntimeError", "factories.py:", "`return torch.zeros(2, 3) @ torch.zeros(2, 3)`"),
        ),
        ("exiting", ("SystemExit: usage: train.py", "factories.py:")),
        ("sized", ("needs arguments (width)",)),
        ("model", ("is a model, not a function",)),
        ("nn", ("is a Python module, not a function",)),
    ],
)
def test_errors_in_a_factory_are_shown_in_one_line(
    file: str, name: str, parts: tuple[str, ...]
) -> None:
    code, out, err = run(f"{file}:{name}")
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("x = 1\ndef make(:\n    pass\n", ("SyntaxError", ":2 `def make(:`")),
        (
            "import json\nimport no_such_package\n",
            ("ModuleNotFoundError", "no_such_package", ":2 `import no_such_package`"),
        ),
        ("\nraise OSError('no data')\n", ("OSError: no data", ":2 `raise")),
    ],
)
def test_errors_in_a_file_are_shown_in_one_line(
    text: str, parts: tuple[str, ...], tmp_path: Path
) -> None:
    path = tmp_path / "theirs.py"
    path.write_text(text)
    code, out, err = run(f"{path}:make")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    for part in (str(path), *parts):
        assert part in err


def test_errors_in_an_installed_module_are_shown_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "their_package.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    code, out, err = run("their_package:make")
    assert (code, out) == (2, "")
    assert "ModuleNotFoundError: No module named 'no_such_dependency'" in err
    assert "their_package.py:1 `import no_such_dependency`" in err


def test_a_file_does_not_hide_a_module_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "random.py").write_text(FACTORIES)
    assert run(f"{tmp_path}/random.py:with_inputs")[0] == 0
    assert sys.modules["random"] is random


def test_a_target_imports_what_lies_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file what is in its folder, a module what is in the current one."""
    for folder in ("of_a_file", "of_a_module"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"parts_{folder}.py").write_text(FACTORIES)
        (tmp_path / folder / f"target_{folder}.py").write_text(
            f"from parts_{folder} import with_inputs"
        )
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run(f"{tmp_path}/of_a_file/target_of_a_file.py:with_inputs")[0] == 0
    monkeypatch.chdir(tmp_path / "of_a_module")
    assert run("target_of_a_module:with_inputs")[0] == 0


def test_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert result.exit_code == 0
    assert result.stdout == f"pathcond {importlib.metadata.version('pathcond')}\n"


def test_weights_that_are_not_finite_are_named(file: str) -> None:
    code, out, _ = run(f"{file}:broken")
    assert code == 0
    assert "0.weight (4, 3) has NaN or infinite values" in out
    assert json.loads(run(f"{file}:broken", "--json")[1])["unusable_weights"][0].startswith(
        "0.weight (4, 3) has NaN"
    )
    assert json.loads(run(f"{file}:with_inputs", "--json")[1])["unusable_weights"] == []
    code, out, _ = run(f"{file}:broken", "--paths")
    assert code == 0
    assert "0.weight (4, 3) has NaN or infinite values" in out


def test_a_model_that_cannot_be_analysed(file: str) -> None:
    code, out, err = run(f"{file}:branching")
    assert (code, out) == (3, "")
    assert "control flow" in err


def test_reproduce(tmp_path: Path) -> None:
    """In processes of its own; the second time from the rows that are kept."""
    command = ["reproduce", "table1", "--preset", "smoke", "--out", str(tmp_path)]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.stderr
    assert re.search(r"MLP 3×500 +2,042,510 +2,042,510", result.stdout)
    rows = json.loads(CliRunner().invoke(app, [*command, "--json"]).stdout)
    assert {row["job"]["figure"] for row in rows} == {"table1"}
    assert 2_042_510 in [row["result"]["parameters"] for row in rows]


def test_reproduce_lists_what_there_is() -> None:
    result = CliRunner().invoke(app, ["reproduce", "--list"])
    assert (result.exit_code, [line.split()[0] for line in result.stdout.splitlines()]) == (
        0,
        list(FIGURES),
    )
    for arguments, message in (
        (["figure99"], "no 'figure99'"),
        ([], "Say what to reproduce"),
        (["mlp"], "mean 'mlp-depth'?"),
    ):
        result = CliRunner().invoke(app, ["reproduce", *arguments])
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert "table1" in result.stderr


class TestCondition:
    """``pathcond condition``: a checkpoint in, a checkpoint out."""

    TARGETS = """
import torch
from torch import nn

def net():
    torch.manual_seed(0)
    layers = [nn.Linear(3, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)]
    return nn.Sequential(*layers), torch.randn(16, 3)

class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(self.b(self.a(x).relu()).relu())

def tied():
    return Tied(), torch.randn(5, 4)

def smooth():
    return nn.Sequential(nn.Linear(3, 4), nn.GELU(), nn.Linear(4, 2)), torch.randn(5, 3)
"""

    @pytest.fixture
    def target(self, tmp_path: Path) -> str:
        path = tmp_path / "targets.py"
        path.write_text(self.TARGETS)
        return str(path)

    @staticmethod
    def run(*arguments: object) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["condition", *map(str, arguments)])
        assert result.exception is None or isinstance(result.exception, SystemExit), (
            result.exception
        )
        return result.exit_code, result.stdout, result.stderr

    @staticmethod
    def checkpoint(
        path: Path, target: str, factory: str = "net", dtype: torch.dtype = torch.float32
    ) -> torch.nn.Module:
        model = load_target(f"{target}:{factory}")[0].to(dtype)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter))
        save_file(
            {k: v.clone() for k, v in model.state_dict().items()}, path, metadata={"epoch": "7"}
        )
        return model

    def test_the_function_of_the_checkpoint_is_kept(self, target: str, tmp_path: Path) -> None:
        before, out = (
            self.checkpoint(tmp_path / "in.safetensors", target).eval(),
            tmp_path / "out.safetensors",
        )
        page = tmp_path / "report.html"
        code, text, err = self.run(
            f"{target}:net",
            "--checkpoint",
            tmp_path / "in.safetensors",
            "--out",
            out,
            "--report",
            page,
        )
        assert code == 0, err
        assert "conditioned" in text
        assert "conditioned" in page.read_text(encoding="utf-8")
        after = load_target(f"{target}:net")[0].eval()
        after.load_state_dict(load_file(out))
        x = torch.randn(32, 3)
        torch.testing.assert_close(after(x), before(x))
        assert not torch.equal(after[0].weight, before[0].weight)
        with safe_open(out, "pt") as file:
            assert file.metadata()["epoch"] == "7"
        assert sorted(p.name for p in tmp_path.iterdir() if "safetensors" in p.name) == [
            "in.safetensors",
            "out.safetensors",
        ]

    def test_criteria_and_pace(self, target: str, tmp_path: Path) -> None:
        for name, criterion in (
            ("curvature", "Curvature"),
            ("norms", "BalancedNorms"),
            ("layers", "BalancedLayers"),
            ("paths", "PathKernel"),
        ):
            code, text, err = self.run(
                f"{target}:net",
                "--criterion",
                name,
                "--out",
                tmp_path / f"{name}.safetensors",
                "--json",
            )
            assert code == 0, err
            assert json.loads(text)["criterion"].startswith(criterion)
        code, text, err = self.run(
            f"{target}:net", "--pace", "keep", "--out", tmp_path / "kept.safetensors", "--json"
        )
        assert code == 0, err
        assert "sum of its energies" in json.loads(text)["message"]
        code, _, err = self.run(
            f"{target}:net",
            "--pace",
            "keep",
            "--criterion",
            "norms",
            "--out",
            tmp_path / "no.safetensors",
        )
        assert code == 2
        assert "no energy whose sum could be kept" in err
        assert not (tmp_path / "no.safetensors").exists()

    def test_types_and_tied_names_of_the_file_are_kept(self, target: str, tmp_path: Path) -> None:
        self.checkpoint(tmp_path / "in.safetensors", target, "tied", torch.float64)
        code, _, err = self.run(
            f"{target}:tied",
            "--checkpoint",
            tmp_path / "in.safetensors",
            "--out",
            tmp_path / "o.safetensors",
        )
        assert code == 0, err
        kept, written = (
            load_file(tmp_path / "in.safetensors"),
            load_file(tmp_path / "o.safetensors"),
        )
        assert kept.keys() == written.keys()
        assert {v.dtype for v in written.values()} == {torch.float64}
        assert torch.equal(written["a.weight"], written["b.weight"])

    @pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
    def test_statistics_of_a_file_of_another_type_are_loaded(
        self, target: str, tmp_path: Path, dtype: torch.dtype
    ) -> None:
        """Converting a model replaces its buffers: values must go to the new ones."""
        model = load_target(f"{target}:net")[0].to(dtype)
        model[1].running_mean.copy_(torch.arange(8.0))
        model[1].running_var.copy_(torch.arange(8.0) + 2)
        save_file(
            {k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "in.safetensors"
        )
        code, _, err = self.run(
            f"{target}:net",
            "--checkpoint",
            tmp_path / "in.safetensors",
            "--out",
            tmp_path / "o.safetensors",
        )
        assert code == 0, err
        after = load_target(f"{target}:net")[0].to(dtype)
        after.load_state_dict(load_file(tmp_path / "o.safetensors"))
        x = torch.randn(32, 3, dtype=dtype)
        scale = 1e-2 if dtype == torch.float16 else 1e-9
        torch.testing.assert_close(after.eval()(x), model.eval()(x), rtol=scale, atol=scale)

    def test_without_a_checkpoint_the_targets_own_weights_are_conditioned(
        self, target: str, tmp_path: Path
    ) -> None:
        code, text, err = self.run(
            f"{target}:net", "--out", tmp_path / "o.safetensors", "--json", "--solver", "paper"
        )
        assert code == 0, err
        assert json.loads(text)["solver"].startswith("CoordinateDescent")
        assert "0.weight" in load_file(tmp_path / "o.safetensors")

    def test_nothing_is_overwritten(self, target: str, tmp_path: Path) -> None:
        out = tmp_path / "o.safetensors"
        out.write_bytes(b"precious")
        code, _, err = self.run(f"{target}:net", "--out", out)
        assert (code, out.read_bytes()) == (2, b"precious")
        assert "--force" in err
        assert self.run(f"{target}:net", "--out", out, "--force")[0] == 0
        assert out.read_bytes() != b"precious"
        page = tmp_path / "page.html"
        page.write_text("precious")
        assert (
            self.run(f"{target}:net", "--out", tmp_path / "new.safetensors", "--report", page)[0]
            == 2
        )
        assert not (tmp_path / "new.safetensors").exists()

    def test_names_of_another_format_are_refused(self, target: str, tmp_path: Path) -> None:
        code, _, err = self.run(f"{target}:net", "--out", tmp_path / "new.pt")
        assert code == 2
        assert "new.safetensors" in err
        assert not (tmp_path / "new.pt").exists()

    @pytest.mark.parametrize("linked", [False, True])
    def test_only_regular_files_are_replaced(
        self, target: str, tmp_path: Path, linked: bool
    ) -> None:
        pipe = tmp_path / "pipe"
        os.mkfifo(pipe)
        path = tmp_path / "link" if linked else pipe
        if linked:
            path.symlink_to(pipe)
        new = tmp_path / "new.safetensors"
        for options in (("--out", path), ("--out", new, "--report", path), ("--out", os.devnull)):
            code, _, err = self.run(f"{target}:net", *options, "--force")
            assert code == 2
            assert "a pipe" in err
        for command in ("demo", "report"):
            arguments = [
                command,
                *([str(tmp_path)] if command == "report" else []),
                "--out",
                str(path),
            ]
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 2
            assert "a pipe" in result.stderr
        assert pipe.is_fifo()
        assert not new.exists()
        assert Path(os.devnull).is_char_device()

    def test_a_failed_write_leaves_what_was_there(
        self, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full_disk(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        out = tmp_path / "o.safetensors"
        out.write_bytes(b"precious")
        monkeypatch.setattr("safetensors.torch.save_file", full_disk)
        code, _, err = self.run(f"{target}:net", "--out", out, "--force")
        assert code == 2
        assert "No space left" in err
        assert out.read_bytes() == b"precious"
        assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []

    def test_files_that_do_not_fit(self, target: str, tmp_path: Path) -> None:
        wrong, torn = tmp_path / "wrong.safetensors", tmp_path / "torn.safetensors"
        save_file({"0.weight": torch.zeros(8, 4), "extra": torch.zeros(1)}, wrong)
        torn.write_bytes(b"\x10\x00")
        misfits = ("(8, 4) in the file", "extra is in the file", "1.bias is in the model")
        unreadable = ("cannot be read",)
        for file, parts in (
            (wrong, misfits),
            (torn, unreadable),
            (tmp_path / "missing", unreadable),
        ):
            code, _, err = self.run(
                f"{target}:net", "--checkpoint", file, "--out", tmp_path / "o.safetensors"
            )
            assert code == 2
            for part in parts:
                assert part in err
        assert not (tmp_path / "o.safetensors").exists()

    def test_tied_tensors_that_differ_in_the_file(self, target: str, tmp_path: Path) -> None:
        values = {k: v.clone() for k, v in load_target(f"{target}:tied")[0].state_dict().items()}
        values["b.weight"] += 1
        save_file(values, tmp_path / "in.safetensors")
        code, _, err = self.run(
            f"{target}:tied",
            "--checkpoint",
            tmp_path / "in.safetensors",
            "--out",
            tmp_path / "o.safetensors",
        )
        assert code == 2
        assert "one tensor in the model" in err

    def test_nothing_to_rescale_and_weights_that_are_not_finite(
        self, target: str, tmp_path: Path
    ) -> None:
        code, _, err = self.run(f"{target}:smooth", "--out", tmp_path / "o.safetensors")
        assert code == 1
        assert "was not written" in err
        model = self.checkpoint(tmp_path / "in.safetensors", target)
        model[0].weight.data[0, 0] = math.nan
        save_file(
            {k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "nan.safetensors"
        )
        code, _, err = self.run(
            f"{target}:net",
            "--checkpoint",
            tmp_path / "nan.safetensors",
            "--out",
            tmp_path / "o.safetensors",
        )
        assert code in (3, 4)
        assert not (tmp_path / "o.safetensors").exists()

    def test_settings_and_names_that_collide(self, target: str, tmp_path: Path) -> None:
        out = tmp_path / "o.safetensors"
        assert self.run(f"{target}:net", "--out", out, "--max-log-scale", 0)[0] == 2
        code, _, err = self.run(f"{target}:net", "--out", out, "--report", out)
        assert code == 2
        assert "same file" in err
        assert self.run(f"{target}:net", "--out", out, "--device", "meta")[0] == 2
        assert self.run(f"{target}:net", "--out", tmp_path / ("x" * 300))[0] == 2
        assert not out.exists()

    def test_a_link_is_written_through(self, target: str, tmp_path: Path) -> None:
        real, link = tmp_path / "real.safetensors", tmp_path / "link.safetensors"
        link.symlink_to(real)
        # a link that leads nowhere is there all the same
        assert self.run(f"{target}:net", "--out", link)[0] == 2
        assert self.run(f"{target}:net", "--out", link, "--force")[0] == 0
        assert link.is_symlink()
        assert "0.weight" in load_file(real)

    def test_what_modules_keep_besides_tensors(self, target: str, tmp_path: Path) -> None:
        Path(target).write_text(
            self.TARGETS
            + """
class Extra(nn.Linear):
    def get_extra_state(self):
        return {"note": 1}
    def set_extra_state(self, state):
        pass

class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(3, 8), nn.Linear(8, 2)
        self.register_buffer("shift", torch.zeros(8), persistent=False)
    def forward(self, x):
        return self.b(torch.relu(self.a(x)) * (1 + self.shift))

def extra():
    return nn.Sequential(Extra(3, 8), nn.ReLU(), nn.Linear(8, 2)), torch.randn(16, 3)

def half():
    return Half(), torch.randn(16, 3)
"""
        )
        assert self.run(f"{target}:extra", "--out", tmp_path / "e.safetensors")[0] == 0
        model = load_target(f"{target}:half")[0].half()
        save_file(
            {k: v.clone() for k, v in model.state_dict().items()}, tmp_path / "in.safetensors"
        )
        code, _, err = self.run(
            f"{target}:half",
            "--checkpoint",
            tmp_path / "in.safetensors",
            "--out",
            tmp_path / "h.safetensors",
        )
        assert code == 0, err
        assert load_file(tmp_path / "h.safetensors")["a.weight"].dtype == torch.float16

    def test_wrong_devices_and_folders(self, target: str, tmp_path: Path) -> None:
        assert self.run(f"{target}:net", "--out", tmp_path / "no" / "o.safetensors")[0] == 2
        assert self.run(f"{target}:net", "--out", tmp_path)[0] == 2
        code, _, err = self.run(
            f"{target}:net", "--out", tmp_path / "o.safetensors", "--device", "nowhere"
        )
        assert code == 2
        assert "nowhere" in err
