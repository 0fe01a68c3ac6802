"""Properties that hold for every network."""

import copy

import torch
from hypothesis import given
from hypothesis import strategies as st

import pathcond
from pathcond.capture.outputs import output_change
from pathcond.reference import count_symmetries

from .strategies import INPUT_CHANNELS, RandomNet, examples, networks
from .zoo import WITH_BATCH, outputs, randomise


def prepared(net: RandomNet, seed: int) -> tuple[RandomNet, torch.Tensor]:
    net = net.double().eval()
    randomise(net, seed)
    return net, torch.randn(4, INPUT_CHANNELS, 3, 3, dtype=torch.float64)


@examples(60)
@given(networks(), st.sampled_from(WITH_BATCH), st.integers(0, 5))
def test_function_kept_factors_consistent_inverse_restores(
    net: RandomNet, normalization: str, seed: int
) -> None:
    net, x = prepared(net, seed)
    symmetry = pathcond.find_symmetry(net, x, normalization=normalization)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    state = copy.deepcopy(net.state_dict())
    before = [outputs(net, x, training=training) for training in (False, True)]
    pathcond.rescale_(net, symmetry, log_scales, verify=False)
    assert output_change(before[0], outputs(net, x, training=False)) < 1e-10
    if normalization == "gain":
        assert output_change(before[1], outputs(net, x, training=True)) < 1e-10
    factors = symmetry.factors(log_scales)
    for name, tensor in net.state_dict().items():
        if name in factors:
            torch.testing.assert_close(tensor, state[name] * factors[name], rtol=1e-11, atol=1e-14)
        else:
            assert torch.equal(tensor, state[name])
    pathcond.rescale_(net, symmetry, -log_scales, verify=False)
    for name, tensor in net.state_dict().items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-11, atol=1e-13)


@examples(40)
@given(networks(), st.sampled_from(WITH_BATCH))
def test_as_many_symmetries_as_there_are(net: RandomNet, normalization: str) -> None:
    net, x = prepared(net, 0)
    symmetry = pathcond.find_symmetry(net, x, normalization=normalization)
    assert symmetry.num_units == count_symmetries(net, x, normalization=normalization)
