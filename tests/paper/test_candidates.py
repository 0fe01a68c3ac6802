"""Criteria that were tried: activations of one size, and the moments of a block's eigenvalues
against dense matrices.
"""

import pytest
import torch

from pathcond import find_symmetry, measure_reads, rescale_
from pathcond.condition import prepare
from pathcond.networks import mlp
from pathcond_paper.training.candidates import Moments, activations


@pytest.mark.parametrize("power", [0.0, 1.0])
def test_all_weights_read_activations_of_one_size(power: float) -> None:
    torch.manual_seed(0)
    model, x = mlp((9, 4, 7), inputs=12, outputs=3).double(), torch.randn(20, 12).double()
    prepared = prepare(model, x)
    log_scales = activations(power, by_unit=False)(model, prepared)
    rescale_(model, prepared.symmetry, log_scales)
    sizes = [
        float(reads.squares.mean()) * reads.inputs**power
        for reads in measure_reads(model, x).values()
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
