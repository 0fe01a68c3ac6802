"""Mixtures of experts: which parameters are read depends on the data, and every expert has scales of its own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.lifting import capture_sample
from pathcond.outputs import output_change
from pathcond.reference import count_symmetries

from .cases import Calls
from .zoo import outputs

EXPERTS, WIDTH, HIDDEN, OUT = 3, 3, 4, 2


def stacked(forward: Callable[..., Any], up: int = HIDDEN, **more: Any) -> tuple[nn.Module, Tensor]:
    """A router and two stacks, (experts, out, in); the batch reaches every expert."""
    model = Calls(
        forward,
        router=nn.Linear(WIDTH, EXPERTS, bias=False),
        w1=nn.Parameter(torch.randn(EXPERTS, up, WIDTH)),
        w2=nn.Parameter(torch.randn(EXPERTS, OUT, HIDDEN)),
        **more,
    ).double()
    return model.eval(), torch.randn(12, WIDTH).double()


def times(matrices: Tensor, rows: Tensor) -> Tensor:
    return torch.bmm(matrices, rows.unsqueeze(-1)).squeeze(-1)


def one_expert(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).softmax(-1).argmax(-1)
    return times(self.w2[chosen], F.relu(times(self.w1[chosen], x)))


def two_experts(self: Any, x: Tensor) -> Tensor:
    share, chosen = self.router(x).softmax(-1).topk(2, -1)
    rows, flat = x.repeat_interleave(2, 0), chosen.reshape(-1)
    out = times(self.w2[flat], F.relu(times(self.w1[flat], rows))) * share.reshape(-1, 1)
    return out.view(len(x), 2, -1).sum(1)


def gated(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).softmax(-1).argmax(-1)
    gate, up = times(self.w1[chosen], x).chunk(2, -1)
    return times(self.w2[chosen], F.relu(gate) * up)


def with_biases(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).softmax(-1).argmax(-1)
    hidden = times(self.w1[chosen], x)
    hidden.add_(self.b1[chosen].squeeze(-1))
    return times(self.w2[chosen], F.relu(hidden)) + self.b2[chosen].flatten(1)


def by_einsum(self: Any, x: Tensor) -> Tensor:
    share, chosen = self.router(x).softmax(-1).topk(2, -1)
    hidden = F.relu(torch.einsum("nkoi,ni->nko", self.w1[chosen], x))
    return torch.einsum("nkoi,nki->nko", self.w2[chosen], hidden * share.unsqueeze(-1)).sum(1)


def by_index_select(self: Any, x: Tensor) -> Tensor:
    chosen = self.router(x).softmax(-1).argmax(-1)
    hidden = x.unsqueeze(1) @ self.w1.index_select(0, chosen).transpose(1, 2)
    return (F.relu(hidden) @ self.w2.index_select(0, chosen.clone()).mT).squeeze(1)


STACKED: dict[str, tuple[Callable[[], tuple[nn.Module, Tensor]], int]] = {
    # {name: (network, its units by hand)}: one per expert and hidden unit, two where a gate has a scale of its own
    "one expert": (lambda: stacked(one_expert), 12),
    "two experts": (lambda: stacked(two_experts), 12),
    "gated": (lambda: stacked(gated, up=2 * HIDDEN), 24),
    "biases": (
        # The numerical rank knows lines of parameters: with an axis of size 1, each element is one.
        lambda: stacked(
            with_biases, b1=nn.Parameter(torch.randn(EXPERTS, HIDDEN, 1)), b2=nn.Parameter(torch.randn(EXPERTS, OUT, 1))
        ),
        12,
    ),
    "einsum": (lambda: stacked(by_einsum), 12),
    "index_select": (lambda: stacked(by_index_select), 12),
}


def changes(model: nn.Module, x: Tensor, symmetry: pathcond.Symmetry, batches: list[Any]) -> list[float]:
    """Relative change of the outputs of each batch, in both modes, under random log-scales in [-2, 2]."""
    modes = [(batch, training) for batch in [x, *batches] for training in (False, True)]
    before = [outputs(model, batch, training=training) for batch, training in modes]
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2, verify=False)
    after = [outputs(model, batch, training=training) for batch, training in modes]
    return [output_change(b, a) for b, a in zip(before, after, strict=True)]


def other_batches() -> list[Tensor]:
    return [torch.randn(12, WIDTH).double(), torch.randn(5, WIDTH).double(), torch.randn(1, WIDTH).double()]


@pytest.mark.parametrize("name", STACKED)
def test_every_expert_of_a_stack_has_units_of_its_own(name: str) -> None:
    build, units = STACKED[name]
    model, x = build()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == units == count_symmetries(model, x)
    assert max(changes(model, x, symmetry, other_batches())) < 1e-10


@pytest.mark.parametrize("calibrate", [True, False])
@pytest.mark.parametrize("name", STACKED)
def test_the_diagonal_of_a_stack_follows_the_scales(name: str, calibrate: bool) -> None:
    model, x = STACKED[name][0]()
    symmetry, sample = pathcond.find_symmetry(model, x), capture_sample(model, x)
    log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
    before = pathcond.diag_g(model, sample, calibrate=calibrate)
    assert all(bool((before[stack] > 0).any()) for stack in ("w1", "w2"))
    factors = symmetry.factors(log_scales)
    pathcond.rescale_(model, symmetry, log_scales)
    after = pathcond.diag_g(model, sample, calibrate=calibrate)
    for parameter, g in before.items():
        torch.testing.assert_close(after[parameter] * factors[parameter] ** 2, g, rtol=1e-9, atol=0)
    pathcond.condition_(model, x, calibrate=calibrate)
    assert bool(pathcond.condition_(model, x, calibrate=calibrate).log_scales.abs().max() < 1e-6)


def test_the_diagonal_of_a_stack_is_that_of_the_experts_that_the_batch_reaches() -> None:
    model, x = stacked(one_expert)
    g = pathcond.diag_g(model, x)
    chosen = model.router(x).argmax(-1)
    for expert in range(EXPERTS):
        share = float((chosen == expert).double().mean())
        # Paths of one sample: every input, one hidden unit, every output.
        expected = share * model.w2[expert].square().sum(0)
        torch.testing.assert_close(g["w1"][expert], expected.unsqueeze(1).expand(HIDDEN, WIDTH))


def test_experts_of_a_grouped_product_have_units_of_their_own() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen, order = self.router(x).softmax(-1).argmax(-1).sort()
        ends = torch.histc(chosen.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        hidden = F.relu(torch._grouped_mm(x[order], self.w1, offs=ends))
        out = torch._grouped_mm(hidden, self.w2.transpose(1, 2), offs=ends)
        return out[order.argsort()]

    model = Calls(
        forward, router=nn.Linear(8, EXPERTS), w1=nn.Parameter(torch.randn(EXPERTS, 8, 16)),
        w2=nn.Parameter(torch.randn(EXPERTS, 8, 16)),
    ).bfloat16()  # fmt: skip
    x = torch.randn(24, 8).bfloat16()
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == EXPERTS * 16
    batches = [x, torch.randn(24, 8).bfloat16(), torch.randn(7, 8).bfloat16()]
    before = [model(batch) for batch in batches]
    octaves = torch.randint(-2, 3, (symmetry.num_units,)).double()
    pathcond.rescale_(model, symmetry, octaves * torch.tensor(2.0).double().log(), verify=False)
    # Powers of two are exact in any precision.
    assert all(torch.equal(model(batch), out) for batch, out in zip(batches, before, strict=True))
    pathcond.condition_(model, x)
    assert not pathcond.condition_(model, x).log_scales.any()


def test_a_grouped_product_whose_groups_differ_from_those_before_equates_the_experts() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        ends = torch.histc(self.router(x).softmax(-1).argmax(-1).float(), EXPERTS, 0, EXPERTS - 1).cumsum(0).int()
        hidden = F.relu(torch._grouped_mm(x, self.w1, offs=ends))
        return torch._grouped_mm(hidden, self.w2, offs=(ends - 1).clamp(min=0))

    model = Calls(
        forward, router=nn.Linear(8, EXPERTS), w1=nn.Parameter(torch.randn(EXPERTS, 8, 16)),
        w2=nn.Parameter(torch.randn(EXPERTS, 16, 8)),
    ).bfloat16()  # fmt: skip
    assert pathcond.find_symmetry(model, torch.randn(24, 8).bfloat16()).num_units == 16


# Programs in which what the second look-up reads is not what the first one made for the same expert.
HOSTILE: dict[str, Callable[..., Any]] = {
    "tokens turned round": lambda self, x, i, h: times(self.w2[i], h.flip(0)),
    "tokens moved on": lambda self, x, i, h: times(self.w2[i], h.roll(1, 0)),
    "tokens shifted by a slice": lambda self, x, i, h: times(self.w2[i][1:], h[:-1]),
    "tokens in another order": lambda self, x, i, h: times(self.w2[i], h[torch.arange(len(x) - 1, -1, -1)]),
    "tokens sorted": lambda self, x, i, h: times(self.w2[i], h[x[:, 0].argsort()]),
    "experts sorted": lambda self, x, i, h: times(self.w2[i.sort()[0]], h),
    "the next expert": lambda self, x, i, h: times(self.w2[(i + 1) % EXPERTS], h),
    "another index": lambda self, x, i, h: times(self.w2[x.argmin(-1)], h),
    "the index of another token": lambda self, x, i, h: times(self.w2[i[:1].expand(len(x))], h),
    "one expert for all tokens": lambda self, x, i, h: h @ self.w2[i[0]].t(),
    "a mean over tokens": lambda self, x, i, h: times(self.w2[i], h.mean(0, keepdim=True).expand_as(h)),
    "a running sum over tokens": lambda self, x, i, h: times(self.w2[i], h.cumsum(0)),
    "attention between tokens": lambda self, x, i, h: times(self.w2[i], (x @ x.t()).softmax(-1) @ h),
    "a residual of another expert": lambda self, x, i, h: times(self.w2[i], h + h.flip(0)),
    "a sum with what has no scale": lambda self, x, i, h: times(self.w2[i], h + x.sum(-1, keepdim=True)),
    "a product with another expert's": lambda self, x, i, h: times(self.w2[i], h * h.flip(0)),
    "one matrix for all experts": lambda self, x, i, h: F.relu(h) @ self.w2[0].t(),
    "tokens as features": lambda self, x, i, h: times(self.w2[i[:4]], h[:4].t()),
    "tokens and features mixed by a reshape": lambda self, x, i, h: times(self.w2[i], h.t().reshape(h.shape)),
    "a factor that depends on the expert": lambda self, x, i, h: times(self.w2[i], h * (1 + i.unsqueeze(-1))),
    "a norm over features": lambda self, x, i, h: times(self.w2[i], h / (1 + h.norm(dim=-1, keepdim=True))),
    "compared with the next": lambda self, x, i, h: times(self.w2[i], torch.maximum(h, h.roll(1, 0))),
    "written into a table": lambda self, x, i, h: times(self.w2[i], torch.zeros_like(h).index_put((i,), h)),
    "read twice": lambda self, x, i, h: times(self.w2[i], h) + times(self.w2[i.flip(0)], h),
    "the stack itself is read": lambda self, x, i, h: times(self.w2[i], h) + self.w1.sum(),
    "the last of the stack": lambda self, x, i, h: times(self.w2[i - 1], h),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_mixes_tokens_or_experts_keeps_the_function(name: str) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = self.router(x).softmax(-1).argmax(-1)
        hidden = F.relu(times(self.w1[chosen], x))
        return HOSTILE[name](self, x, chosen, hidden)

    model, x = stacked(forward)
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units <= count_symmetries(model, x)
    assert max(changes(model, x, symmetry, other_batches()[:1])) < 1e-10


def written_in_place(i: Tensor) -> Tensor:
    return i.add_(1).remainder_(EXPERTS)


def copied_before_it_is_written(i: Tensor) -> Tensor:
    copy = i.clone()
    i.zero_()
    return copy.add_(1).remainder_(EXPERTS)


def copied_after_it_was_written(i: Tensor) -> Tensor:
    view = i.view(-1, 1)
    view.add_(1).remainder_(EXPERTS)
    return i.clone()


@pytest.mark.parametrize("change", [written_in_place, copied_before_it_is_written, copied_after_it_was_written])
def test_an_index_that_is_written_between_look_ups_is_another_index(change: Callable[[Tensor], Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        chosen = self.router(x).softmax(-1).argmax(-1)
        hidden = F.relu(times(self.w1[chosen], x))
        return times(self.w2[change(chosen)], hidden)

    model, x = stacked(forward)
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == HIDDEN
    assert max(changes(model, x, symmetry, other_batches())) < 1e-10
