"""Small computations that several rooms share."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from pathcond.numerics import ceilings, largest

LARGE = torch.finfo(torch.float32).max


@pytest.mark.parametrize(
    "tensor",
    [
        torch.zeros(5),
        torch.empty(0, 3),
        torch.tensor(-3.0),
        torch.randn(40, 50),
        torch.randn(4, 5).T,
        torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
        torch.full((100_000,), 0.1),
        torch.full((7,), 1e-30),  # whose squares vanish
        torch.tensor([LARGE, -1.0]),  # whose squares overflow
        torch.full((1_000,), 1e17),  # the sum of whose squares does
        torch.tensor([1e300, -1e200], dtype=torch.float64),
        torch.randn(9).bfloat16(),
        torch.tensor([3, -4]),
    ],
)
def test_nothing_in_a_tensor_exceeds_its_ceiling(tensor: Tensor) -> None:
    (ceiling,), (most,) = ceilings([tensor]), largest([tensor])
    exact = float(tensor.double().abs().max()) if tensor.numel() else 0.0
    assert most == pytest.approx(exact, rel=1e-12)
    assert exact <= ceiling < math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_not_finite_has_no_ceiling(bad: float, dtype: torch.dtype) -> None:
    tensors = [torch.ones(3, 4, dtype=dtype) for _ in range(3)]
    tensors[1][1, 2] = bad
    one, other, last = ceilings(tensors)
    assert math.isfinite(one)
    assert math.isfinite(last)
    assert not math.isfinite(other)
    assert not math.isfinite(largest(tensors)[1])
