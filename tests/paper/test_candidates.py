"""Criteria that were tried: what weights read, against a written-out computation, and its law; the
moments of a block's eigenvalues against dense matrices.
"""

import itertools
import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from pathcond import condition_, find_symmetry, rescale_
from pathcond.condition import prepare
from pathcond.networks import cifar_nv, mlp
from pathcond_paper.training.candidates import Moments, NormsByOutputs, activations
from pathcond_paper.training.networks import LanguageModel, VisionTransformer, resnet20
from pathcond_paper.training.reads import mean_squares

IMAGES = (2, 3, 32, 32)
NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "mlp": partial(mlp, (9, 4, 7)),
    "mlp_with_norms": partial(mlp, (9, 4, 7), batch_norm=True),
    "cifar_nv": partial(cifar_nv, width=8),
    "resnet20": partial(resnet20, width=4),
    "vision_transformer": partial(VisionTransformer, width=12, depth=1),
    "language_model": partial(LanguageModel, width=12, depth=1),
}


def test_a_linear_layer_reads_its_inputs_and_a_convolution_its_patches() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(2, 3, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5)
    ).double()
    x = torch.randn(6, 2, 4, 4).double()
    found = mean_squares(model, x)
    squares, inside = (F.unfold(v, 3, padding=1).mean((0, 2)) for v in (x**2, torch.ones_like(x)))
    torch.testing.assert_close(
        found["0.weight"], (squares / inside).view(2, 3, 3).expand(3, 2, 3, 3)
    )
    hidden = model[:3](x).detach()
    torch.testing.assert_close(found["3.weight"], hidden.square().mean(0).expand(5, 48))


@pytest.mark.parametrize("name", NETWORKS)
def test_what_a_weight_reads_follows_the_scales_in_front_of_it(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().double()
    x = torch.randint(0, 128, (2, 64)) if name == "language_model" else torch.randn(IMAGES).double()
    symmetry = find_symmetry(model, x, normalization="full")
    before = mean_squares(model, x)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) - 0.5
    rescale_(model, symmetry, log_scales)
    after = mean_squares(model, x)
    moved = symmetry.class_matrix @ log_scales
    read = [w for w, squares in before.items() if squares.dim() > 1 and w in symmetry.scalings]
    assert read
    for weight in read:
        factor = moved[symmetry.scalings[weight].minus.long()].mul(2).exp()
        # ε of norms
        torch.testing.assert_close(after[weight], before[weight] * factor, rtol=1e-3, atol=1e-12)


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_all_weights_read_activations_of_one_size(power: float) -> None:
    torch.manual_seed(0)
    model, x = mlp((9, 4, 7), inputs=12, outputs=3).double(), torch.randn(20, 12).double()
    prepared = prepare(model, x)
    log_scales = activations(power, by_unit=False)(model, prepared)
    rescale_(model, prepared.symmetry, log_scales)
    sizes = [
        float(squares.mean()) * squares.shape[1] ** power
        for squares in mean_squares(model, x).values()
        if squares.dim() > 1
    ]
    assert max(sizes) < 1.001 * min(sizes)


def test_moments_are_those_of_the_dense_matrices() -> None:
    torch.manual_seed(0)
    model, x = mlp((4,), inputs=3, outputs=2).double(), torch.randn(5, 3).double()
    symmetry = find_symmetry(model, x)
    ones = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    names = ["1.weight", "3.weight"]
    criterion = Moments(directions=4000)
    traces, sharpest = (
        f(symmetry, model, names, ones) for f in (criterion.traces, criterion.sharpest)
    )
    for name in names:
        J = torch.autograd.functional.jacobian(
            lambda value, name=name: torch.func.functional_call(model, {name: value}, (x,)),
            model.get_parameter(name).detach(),
        ).reshape(10, -1)
        H = J.T @ J
        assert traces[name] == pytest.approx(float(H.trace()), rel=0.1)
        assert sharpest[name] == pytest.approx(float(H.square().sum() / H.trace()), rel=0.15)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_norms_that_count_by_outputs_are_in_balance(batch_norm: bool) -> None:
    torch.manual_seed(0)
    model = mlp((9, 4, 7), inputs=12, outputs=3, batch_norm=batch_norm).double()
    x = torch.randn(20, 12).double()
    options = {"normalization": "full", "criterion": NormsByOutputs(), "max_log_scale": math.inf}
    condition_(model, x, **options)
    weights = [p.detach() for p in model.parameters() if p.dim() > 1]
    if batch_norm:
        # in front of a BatchNorm every unit has norm one
        for weight in weights[:-1]:
            torch.testing.assert_close(
                weight.norm(dim=1), torch.ones(len(weight)).double(), rtol=0.05, atol=0
            )
    else:
        for into, out in itertools.pairwise(weights):
            torch.testing.assert_close(
                len(into) * into.square().sum(1), len(out) * out.square().sum(0), rtol=1e-4, atol=0
            )
    assert float(condition_(model, x, **options).log_scales.abs().max()) < 1e-6
