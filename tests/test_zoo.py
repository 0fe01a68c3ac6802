"""Models of all families keep their function under every normalization value; the whole collection
is marked ``zoo``. Those that run every time have smaller images and a layer less than there.
"""

import copy
import json
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import pathcond
from pathcond.symmetry.captures import Captured, capture_all
from pathcond.symmetry.symmetry import symmetry_of

from . import zoo
from .small_transformers import CLASSES, MODELS, build
from .zoo import (
    DEFAULT,
    Entry,
    Result,
    entries,
    examine,
    failures,
    is_current,
    randomise,
    read_rows,
    small_entries,
)

QUICK = """
timm:test_resnet timm:test_vit timm:test_efficientnet timm:test_byobnet timm:test_convnext3
timm:test_nfnet timm:test_mambaout
""".split()


def is_quick(entry: Entry) -> bool:
    return entry.name in QUICK or entry.name.startswith("transformers:")


def every_time() -> list[Entry]:
    return [entry for entry in entries(size=64, layers=1) if is_quick(entry)]


@pytest.mark.zoo
@pytest.mark.parametrize("entry", list(entries()), ids=lambda entry: entry.name)
def test_the_function_is_kept(entry: Entry) -> None:
    keeps_its_function(examine(entry))


@pytest.mark.zoo
@pytest.mark.parametrize("entry", list(small_entries()), ids=lambda entry: entry.name)
def test_the_function_of_small_models_is_kept(entry: Entry) -> None:
    """Some of them have no unit."""
    assert not failures(examine(entry, again=(DEFAULT,)))


MIXTURES = {"mixtral": (48, 144), "flex_olmo": (32, 80), "gpt_oss": (48, 144)}


@pytest.mark.parametrize("name", MIXTURES)
def test_what_is_around_and_inside_mixtures_of_experts_is_rescaled(name: str) -> None:
    """Their code shares a configuration with all other modules, and is found in many files."""
    entry = next(entry for entry in small_entries() if entry.name == f"small:causal:{name}")
    torch.manual_seed(0)
    model, inputs = entry.build()
    captured = capture_all(model.eval(), inputs)
    units = [
        symmetry_of(model, captured, normalization=each).num_units for each in ("absorb", "gain")
    ]
    assert tuple(units) == MIXTURES[name]


@pytest.mark.parametrize("entry", every_time(), ids=lambda entry: entry.name)
def test_the_function_is_kept_every_time(entry: Entry) -> None:
    """Conditioned twice by default only."""
    keeps_its_function(examine(entry, again=(DEFAULT,)))


def keeps_its_function(result: Result) -> None:
    assert not failures(result)
    assert max(result.units.values()) > 0


def test_small_models_are_of_architectures_that_there_are() -> None:
    import transformers

    tasks, architectures = zip(*(name.split(":") for name in MODELS), strict=True)
    assert set(tasks) == set(CLASSES)
    assert set(architectures) <= set(transformers.CONFIG_MAPPING)
    for name in ("causal:llama", "masked:bert", "image:vit"):
        model, inputs = build(name)
        assert sum(p.numel() for p in model.parameters()) < 100_000
        model(**inputs)


def test_enough_models_run_every_time() -> None:
    assert len(every_time()) >= 18
    assert sum(entry.name.startswith("timm:") for entry in entries()) >= 150


@cache
def googlenet() -> tuple[nn.Module, list[Captured]]:
    entry = next(entry for entry in entries() if entry.name == "torchvision:googlenet")
    model, inputs = entry.build()[0].double(), torch.randn(8, 3, 96, 96, dtype=torch.float64)
    randomise(model)
    return model, capture_all(model, inputs)


@pytest.mark.parametrize("normalization", ["absorb", "full"])
def test_train_only_heads_keep_their_outputs_within_the_bounds(normalization: str) -> None:
    """GoogLeNet's norms have ε = 1e-3: unbounded scales in front of them change the train output by
    a third.
    """
    model, captured = googlenet()
    model = copy.deepcopy(model)
    symmetry = symmetry_of(model, captured, normalization=normalization)
    lower, upper = symmetry.log_scale_bounds(model)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    report = pathcond.rescale_(model, symmetry, log_scales.clamp(lower, upper))
    assert report.output_change_eval < 1e-9
    assert report.output_change_train < 1e-2


def test_the_last_row_of_a_model_counts(tmp_path: Path) -> None:
    rows = [Result("one", commit=None), Result("two"), Result("one", commit="no commit")]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    found = read_rows(path)
    assert list(found) == ["one", "two"]
    assert found["one"].commit == "no commit"
    assert not any(is_current(row) for row in found.values())


def test_what_runs_on_a_gpu_alone_leaves_rows_of_a_cpu_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    left_out = {}

    def as_at(commit: str, package: Path, *, but: Sequence[str]) -> bool:
        left_out[commit] = but
        return True

    monkeypatch.setattr(zoo, "is_as_at", as_at)
    for device in ("cpu", "cuda"):
        assert is_current(Result("one", environment=f"torch 2.13.0, {device}", commit=device))
    assert "capture/indices.py" in left_out["cpu"]
    assert "capture/indices.py" not in left_out["cuda"]
    assert set(left_out["cuda"]) < set(left_out["cpu"])
