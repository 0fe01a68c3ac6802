"""The paper's networks and tables."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond.networks import autoencoder, cifar_nv, mlp, resnet, resnet18_c, vgg16
from pathcond.rows import Rows
from pathcond_paper import FIGURES, load, style
from pathcond_paper.figure import Place, Row
from pathcond_paper.figures import table1

from ..strategies import DRAWS_ALL

IMAGES = torch.zeros(2, 3, 32, 32)


# Architectures.


@pytest.mark.parametrize(
    ("build", "name"),
    [
        (partial(resnet, 18), "resnet18"),
        (partial(resnet, 34), "resnet34"),
        (partial(resnet, 50), "resnet50"),
        (vgg16, "vgg16"),
    ],
)
def test_same_parameters_in_the_same_order_as_torchvision(
    build: Callable[[], nn.Module], name: str
) -> None:
    models = pytest.importorskip("torchvision").models
    with torch.device("meta"):
        ours, theirs = build().state_dict(), models.get_model(name).state_dict()
    assert [tensor.shape for tensor in ours.values()] == [
        tensor.shape for tensor in theirs.values()
    ]
    assert [key.rpartition(".")[2] for key in ours] == [key.rpartition(".")[2] for key in theirs]


def test_same_function_as_torchvision() -> None:
    models = pytest.importorskip("torchvision").models
    for depth, name in ((18, "resnet18"), (50, "resnet50")):
        ours, theirs = resnet(depth).eval(), models.get_model(name).eval()
        ours.load_state_dict(
            dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True))
        )
        images = torch.randn(1, 3, 64, 64)
        with torch.no_grad():
            torch.testing.assert_close(ours(images), theirs(images))


@pytest.mark.parametrize(
    ("build", "units"),
    [(mlp, 1_500), (partial(mlp, batch_norm=True), 1_500), (cifar_nv, 1_792), (resnet18_c, 3_904)],
)
def test_channels_that_can_be_rescaled(build: Callable[[], nn.Module], units: int) -> None:
    assert pathcond.find_symmetry(build(), IMAGES, normalization="paper").num_units == units


def test_widths() -> None:
    assert [m.out_features for m in autoencoder(7) if isinstance(m, nn.Linear)] == [
        112,
        16,
        112,
        784,
    ]
    assert [m.out_features for m in mlp((7, 5), outputs=3) if isinstance(m, nn.Linear)] == [7, 5, 3]
    with pytest.raises(ValueError, match="depth=19; choose one of 18, 34, 50"):
        resnet(19)


# Table 1.


@pytest.fixture(scope="module")
def rows() -> dict[str, Row]:
    found = (
        row
        for group in table1.together(table1.jobs("paper"))
        for row in table1.run(group, Place(), lambda share, what: None)
    )
    return {job["network"]: Row(job, result, {}) for job, result in found}


def test_table_1_as_printed(rows: dict[str, Row]) -> None:
    results = {name: row.result for name, row in rows.items()}
    assert {
        name: (r["parameters"], r["hidden_units"], table1.format_paths(r["paths"]))
        for name, r in results.items()
    } == {
        "MLP 3×500": (2_042_510, 1_500, "3.84e12"),
        "CIFAR-NV": (2_616_576, 1_792, "4.13e26"),
        "ResNet-18": (11_689_512, 4_800, "2.24e53"),
        "ResNet-34": (21_797_672, 8_512, "1.19e100"),
        "ResNet-50": (25_557_032, 26_560, "2.64e136"),
        "VGG-16": (138_357_544, 12_416, "5.89e54"),
    }
    assert all(table1.agreement(row) == (True, True, True) for row in rows.values())
    text = table1.table(list(rows.values()))
    assert "no cells differ" in text
    assert "✗" not in text.split("✗ not")[0]
    assert table1.plot(list(rows.values())) == {}


def test_claims_of_table_1(rows: dict[str, Row]) -> None:
    printed, definition = table1.claims(list(rows.values()))
    assert (printed.verdict, definition.verdict) == ("reproduced", "not reproduced")
    assert "18 of 18 cells" in printed.decides
    # it has no pooling
    assert [name for name in rows if f"{name} by" not in definition.decides] == ["MLP 3×500"]
    assert {claim.verdict for claim in table1.claims(list(rows.values())[:5])} == {"not run"}


class SumPool(nn.Module):
    """One path per entry of the window."""

    def __init__(self, pool: nn.MaxPool2d) -> None:
        super().__init__()
        self.sum = nn.AvgPool2d(pool.kernel_size, pool.stride, pool.padding, divisor_override=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(x)


class AddOne(nn.Module):
    """BatchNorm as paths see it: on through γ, and a new one from β."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1


class SumAll(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.sum((2, 3), keepdim=True)


def counting(model: nn.Module) -> nn.Module:
    """The same network with modules whose outputs, in an all-ones network, are numbers of paths."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.MaxPool2d):
                setattr(parent, name, SumPool(child))
            elif isinstance(child, nn.BatchNorm2d):
                setattr(parent, name, AddOne())
            elif isinstance(child, nn.AdaptiveAvgPool2d) and child.output_size == 1:
                setattr(parent, name, SumAll())
    return model  # VGG's 7×7 pooling copies its 1×1 input: one path each


def test_true_paths_are_those_of_the_definition(rows: dict[str, Row]) -> None:
    ones = torch.ones(table1.IMAGE, dtype=torch.float64)
    for name, (build, _) in table1.NETWORKS.items():
        with torch.no_grad():
            paths = counting(table1.all_ones(build))(ones).sum()
        assert rows[name].result["log10_true_paths"] == pytest.approx(
            paths.log10().item(), rel=1e-12
        )
        assert paths.item() >= rows[name].result["paths"] * (1 - 1e-12)


@pytest.mark.parametrize(("name", "paths"), [("ResNet-18", "2.23e53"), ("ResNet-50", "2.62e136")])
def test_the_paper_counts_a_path_from_every_batch_norm_bias(name: str, paths: str) -> None:
    model = table1.all_ones(table1.NETWORKS[name][0])
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.bias.zero_()
        assert (
            table1.format_paths(model(torch.ones(table1.IMAGE, dtype=torch.float64)).sum().item())
            == paths
        )


def test_a_cell_that_differs_is_marked(rows: dict[str, Row]) -> None:
    row = rows["MLP 3×500"]
    wrong = Row(row.job, row.result | {"paths": 3.85e12}, {})
    assert table1.agreement(wrong) == (True, True, False)
    text = table1.table([wrong])
    assert "3.85e12  3.84e12  ✗" in text
    assert "1 cell differs" in text
    others = [other for name, other in rows.items() if name != "MLP 3×500"]
    assert table1.claims([wrong, *others])[0].verdict == "not reproduced"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_runs_that_diverged_from_the_start_can_be_drawn_on_a_logarithmic_axis(
    value: float, tmp_path: Path
) -> None:
    with style.in_style():
        drawing, (axes,) = style.panels(1, 1)
        style.band(axes, range(3), [[value] * 3], label="diverged", color="black")
        axes.set(yscale="log")
        style.legend_below(drawing, [axes])
        drawing.savefig(tmp_path / "drawing.png")
    assert [text.get_text() for text in drawing.legends[0].texts] == ["diverged"]


def test_every_figure_can_be_loaded() -> None:
    for name in FIGURES:
        figure = load(name)
        assert set(figure.DATASETS) == {"smoke", "cpu", "paper"}
        assert all(
            callable(getattr(figure, verb))
            for verb in ("jobs", "together", "run", "plot", "table", "claims")
        )
    with pytest.raises(KeyError):
        load("figure99")


# Python runs this at the start of every process, so also in those that a sweep starts.
WITHOUT_EXTRAS = """
import sys
from importlib.machinery import ModuleSpec

EXTRAS = set(
    "typer click rich jinja2 markupsafe matplotlib sklearn scipy safetensors "
    "tensorboard ray".split()
)


class Refuse:
    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.partition(".")[0] in EXTRAS else None

    def create_module(self, spec):
        raise ImportError(f"{spec.name} is not here")

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Refuse())
"""


TRAINING = {"cifar-nv": "learning_rate=0.001"}
if DRAWS_ALL:
    TRAINING |= {"mlp-depth": "depth=2", "autoencoder": "compression=4", "smooth": "depth=2"}
# ``python -m pathcond_paper`` for one figure after the other: each process imports torch anew.
ONE_AFTER_THE_OTHER = """
import json, runpy, sys

if __name__ == "__main__":
    for arguments in json.loads(sys.argv[1]):
        sys.argv[1:] = arguments
        try:
            runpy.run_module("pathcond_paper", run_name="__main__")
        except SystemExit as end:
            print(end.code, *arguments)
"""


def test_training_figures_run_with_torch_and_numpy_alone(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(WITHOUT_EXTRAS)
    (tmp_path / "figures.py").write_text(ONE_AFTER_THE_OTHER)
    source = Path(pathcond.__file__).parents[1]
    paths = os.pathsep.join((str(tmp_path), str(source)))
    only = {name: ["--only", part, "--only", "method=paper"] for name, part in TRAINING.items()}
    begin = [["reproduce", name, "--preset", "smoke", *only[name]] for name in TRAINING]
    options = [[*these, "--out", str(tmp_path), "--workers", "1"] for these in begin]
    done = subprocess.run(
        [sys.executable, tmp_path / "figures.py", json.dumps(options)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.stderr.count(f"pathcond report {tmp_path}") == len(TRAINING), done.stderr
    for (name, part), arguments in zip(TRAINING.items(), options, strict=True):
        assert " ".join(["0", *arguments]) in done.stdout, done.stderr
        rows = list(Rows(tmp_path / f"{name}.jsonl"))
        assert rows
        command = f"python -m pathcond_paper reproduce {name} --preset smoke --device cpu"
        assert {row.origin["command"] for row in rows} == {
            f"{command} --only {part} --only method=paper --workers 1"
        }
