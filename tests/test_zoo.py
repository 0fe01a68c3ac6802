"""Models of all families keep their function under every normalization value; the whole collection
is marked ``zoo``.
"""

import pytest
import torch

import pathcond

from .zoo import DEFAULT, NORMALIZATIONS, Entry, entries, examine, failures, randomise

QUICK = """
torchvision:mobilenet_v3_small torchvision:shufflenet_v2_x0_5
timm:test_resnet timm:test_vit timm:test_efficientnet timm:test_byobnet
timm:test_convnext timm:test_nfnet timm:test_mambaout
""".split()


def is_quick(entry: Entry) -> bool:
    return entry.name in QUICK or entry.name.startswith("transformers:")


def parameters() -> list:
    return [
        pytest.param(e, id=e.name, marks=[] if is_quick(e) else pytest.mark.zoo) for e in entries()
    ]


@pytest.mark.parametrize("entry", parameters())
def test_the_function_is_kept(entry: Entry) -> None:
    """Those that run every time are conditioned twice by default only."""
    result = examine(entry, again=(DEFAULT,) if is_quick(entry) else (*NORMALIZATIONS, DEFAULT))
    assert not failures(result)
    assert max(result.units.values()) > 0


def test_enough_models_run_every_time() -> None:
    assert sum(is_quick(entry) for entry in entries()) >= 20
    assert sum(entry.name.startswith("timm:") for entry in entries()) >= 150


@pytest.mark.parametrize("normalization", ["absorb", "full"])
def test_train_only_heads_keep_their_outputs_within_the_bounds(normalization: str) -> None:
    """GoogLeNet's norms have ε = 1e-3: unbounded scales in front of them change the train output by
    a third.
    """
    entry = next(entry for entry in entries() if entry.name == "torchvision:googlenet")
    model, inputs = entry.build()[0].double(), torch.randn(8, 3, 96, 96, dtype=torch.float64)
    randomise(model)
    symmetry = pathcond.find_symmetry(model, inputs, normalization=normalization)
    lower, upper = symmetry.log_scale_bounds(model)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    report = pathcond.rescale_(model, symmetry, log_scales.clamp(lower, upper))
    assert report.output_change_eval < 1e-9
    assert report.output_change_train < 1e-2
