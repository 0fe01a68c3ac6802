"""Samples that go through an op together give what they give one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from pathcond.lifting.lifting import capture_sample
from pathcond.lifting.reads import measure_both
from pathcond.rules.samples import Samples

from .cases import CASES, Calls, make


def in_place_after_dropout(self: Any, x: Tensor) -> Tensor:
    h = F.dropout(self.a(x), 0.5, self.training)
    h.relu_()
    return self.b(h.sigmoid() * self.c(x))


def constants_with_rows(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    return self.b(
        (h + torch.arange(4.0, dtype=x.dtype)).relu()
        * (h[:, None] + torch.ones(1, 3, 4, dtype=x.dtype)).sigmoid().sum(1)
    )


def features_first(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).unsqueeze(0).transpose(0, 1)  # (N, 1, C), then a sum over positions
    return self.b(F.gelu(h).sum(1))


def weights_of_each_sample(self: Any, x: Tensor) -> Tensor:
    return torch.stack(
        [
            self.b(F.silu(F.linear(h, h)).sum(1))
            for h in [self.a(row.view(3, 1).expand(3, 3)).T for row in x]
        ]
    )


def kernels_of_each_sample(self: Any, x: Tensor) -> Tensor:
    maps = [self.a(row.view(3, 1).expand(3, 3))[None, None] for row in x]
    return torch.stack([F.gelu(F.conv2d(h, h)).flatten() for h in maps])


def constants_of_more_axes(self: Any, x: Tensor) -> Tensor:
    rows = [self.a(row.view(1, 3).expand(2, 3)) for row in x]
    return torch.stack(
        [self.b(F.silu(h + torch.ones(1, 1, 4, dtype=x.dtype))).sum((0, 1)) for h in rows]
    )


def in_place_through_other_axes(self: Any, x: Tensor) -> Tensor:
    h = self.a(x)
    h.view(-1, 2, 2)[:, 0].mul_(self.c(x).view(-1, 2, 2)[:, 1])
    h.unflatten(1, (2, 2)).flatten(1).relu_()
    return self.b(F.silu(h))


def rows_of_other_samples(self: Any, x: Tensor) -> Tensor:
    h = self.a(x).T.reshape(-1, 4)  # no row stays what it was
    return self.b(F.silu(h).reshape(4, -1).T)


PROGRAMS = {
    "in_place_through_other_axes": in_place_through_other_axes,
    "rows_of_other_samples": rows_of_other_samples,
    "weights_of_each_sample": weights_of_each_sample,
    "kernels_of_each_sample": kernels_of_each_sample,
    "constants_of_more_axes": constants_of_more_axes,
    "in_place_after_dropout": in_place_after_dropout,
    "constants_with_rows": constants_with_rows,
    "features_first": features_first,
}


def built(name: str) -> tuple[nn.Module, Any]:
    if name in CASES:
        return make(name)
    torch.manual_seed(0)
    model = (
        Calls(PROGRAMS[name], a=nn.Linear(3, 4), b=nn.Linear(4, 2), c=nn.Linear(3, 4))
        .double()
        .eval()
    )
    return model, torch.randn(5, 3, dtype=torch.float64)


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", [*sorted(CASES), *PROGRAMS])
def test_together_as_one_by_one(name: str, fresh: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = built(name)
    inputs = tree_map(
        lambda x: torch.cat([x, x.flip(0)]) if isinstance(x, Tensor) and x.dim() else x, inputs
    )
    if fresh:  # statistics are then measured on the batch
        for buffer_name, buffer in model.named_buffers():
            if buffer_name.endswith("num_batches_tracked"):
                buffer.zero_()
    sample = capture_sample(model, inputs)
    together, read_together = measure_both(model, sample)
    monkeypatch.setattr(Samples, "shape", property(lambda self: None))  # then none are joined
    apart, read_apart = measure_both(model, sample)
    for parameter, g in apart.items():
        torch.testing.assert_close(together[parameter], g, rtol=1e-11, atol=0)
    assert read_together.keys() == read_apart.keys()
    for parameter, read in read_apart.items():
        torch.testing.assert_close(
            read_together[parameter].squares, read.squares, rtol=1e-11, atol=0
        )


@pytest.mark.parametrize(
    "build",
    [
        lambda: torch.randn(2, 5, 4),
        lambda: torch.randn(2, 5, 3, 4).transpose(1, 2),
        lambda: torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 4, 5).permute(0, 3, 1, 2),
    ],
)
def test_joined_samples_lie_in_memory_as_they_did(build: Callable[[], Tensor]) -> None:
    """What is computed next, such as a view, may rely on that."""
    apart = [build() for _ in range(3)]
    together = Samples.of_joined(Samples(apart).join(), 3).values
    for one, same in zip(apart, together, strict=True):
        assert torch.equal(one, same)
        assert one.stride() == same.stride()
