"""Programs that try to slip a scale past the rules. Each keeps its function under whatever symmetry is found."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.outputs import output_change
from pathcond.reference import count_symmetries

from .cases import Calls
from .zoo import NORMALIZATIONS, as_double, outputs, randomise

HOSTILE: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}


def hostile(build: Callable[[], tuple[nn.Module, Any]]) -> Callable[[], tuple[nn.Module, Any]]:
    HOSTILE[build.__name__] = build
    return build


def between(middle: Callable[[Tensor], Tensor], out: int = 4) -> tuple[nn.Module, Tensor]:
    return Calls(lambda self, x: self.b(middle(F.relu(self.a(x)))), a=nn.Linear(3, 4), b=nn.Linear(out, 2)), torch.randn(6, 3)


@hostile
def mean_of_a_draw() -> Any:
    return between(lambda h: torch.normal(h, 1.0))


@hostile
def deviation_of_a_draw() -> Any:
    return between(lambda h: torch.normal(0.0, h + 1e-3))


@hostile
def probability_of_a_draw() -> Any:
    return between(lambda h: torch.bernoulli(h / (1 + h.sum())))


@hostile
def condition_larger_than_both_values() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(torch.where(x > 0, h.sum(0), h.mean(0)).t())

    return Calls(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 2)), torch.randn(4, 4)


@hostile
def copied_into_integers() -> Any:
    return between(lambda h: torch.zeros_like(h, dtype=torch.long).copy_(h * 3).double())


@hostile
def summed_as_integers() -> Any:
    return between(lambda h: (h * 3).detach().unsqueeze(2).sum(2, dtype=torch.long).double())


@hostile
def rounded_to_single_precision() -> Any:
    return between(lambda h: h.float().double())


@hostile
def statistics_from_a_bias() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        normed = F.instance_norm(x[:, :1].expand(-1, 4, -1), self.a.bias.detach(), self.v, use_input_stats=False)
        return self.b(F.relu(self.a(x))).sum() + normed

    model = Calls(forward, a=nn.Conv1d(3, 4, 1), b=nn.Conv1d(4, 2, 1))
    model.register_buffer("v", torch.ones(4))
    return model, torch.randn(4, 3, 5)


@hostile
def batch_statistics_in_eval_mode() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.batch_norm(self.a(x), self.m, self.v, training=True)))

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    model.register_buffer("m", torch.zeros(4))
    model.register_buffer("v", torch.ones(4))
    return model, torch.randn(6, 3)


@hostile
def two_views_of_one_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return x if self.training else self.b(torch.where(x > 0, self.w, self.w.t()))

    return Calls(forward, w=nn.Parameter(torch.randn(4, 4)), b=nn.Linear(4, 2)), torch.randn(4, 4)


@hostile
def overlapping_slices_of_one_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.linear(x, self.w[:4])) + F.relu(F.linear(x, self.w[2:])))

    return Calls(forward, w=nn.Parameter(torch.randn(6, 3)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def expanded_parameter() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        return self.b(F.relu(F.linear(x, self.w.expand(4, 3)) * self.w.expand(4, 3).sum(1)))

    return Calls(forward, w=nn.Parameter(torch.randn(1, 3)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def written_as_a_list() -> Any:
    def middle(h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        torch._foreach_add_([z], 1.0)
        return h + z

    return between(middle)


@hostile
def attribute_that_shares_memory() -> Any:
    model = Calls(
        lambda self, x: self.o(F.relu(self.c(F.relu(self.a(x))))) + (x @ self.w).sum(),
        a=nn.Linear(4, 4).double(), c=nn.Linear(4, 4).double(), o=nn.Linear(4, 2).double(),
    )  # fmt: skip
    model.w = model.a.weight.detach()
    return model, torch.randn(4, 4)


@hostile
def transposed_in_place() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = x[:, :1, None] * self.w
        h.transpose_(1, 2)
        return self.b(h.mean(1))

    return Calls(forward, w=nn.Parameter(torch.randn(4, 5)), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def zero_channels_into_a_norm() -> Any:
    model = Calls(
        lambda self, x: self.b(F.relu(self.bn(F.pad(self.a(x), (0, 1))))),
        a=nn.Linear(3, 3),
        bn=nn.BatchNorm1d(4),
        b=nn.Linear(4, 2),
    )
    return model, torch.randn(6, 3)


@hostile
def buffers_shared_between_norms() -> Any:
    model = Calls(
        lambda self, x: self.c(F.relu(self.n(self.a(x))) + F.relu(self.m(self.b(x)))),
        a=nn.Linear(3, 4), b=nn.Linear(3, 4), n=nn.BatchNorm1d(4), m=nn.BatchNorm1d(4), c=nn.Linear(4, 2),
    ).double()  # fmt: skip
    model.m.running_mean, model.m.running_var = model.n.running_mean, model.n.running_var
    return model, torch.randn(6, 3)


@hostile
def clamped_by_a_number_from_the_data() -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        return self.b(torch.minimum(h, x.abs().max()))

    return Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2)), torch.randn(6, 3)


@hostile
def zero_to_the_power_of_zero() -> Any:
    return between(lambda h: h + torch.zeros(4, dtype=torch.float64) ** 0)


@hostile
def aliases_through_dropout() -> Any:
    def middle(h: Tensor) -> Tensor:
        same = F.dropout(h, 0.5, training=False)
        same.add_(1.0)
        return h

    return between(middle)


@hostile
def slice_written_into_zeros() -> Any:
    def middle(h: Tensor) -> Tensor:
        z = torch.zeros_like(h)
        z[:, :2] = h[:, 2:]
        return z + h

    return between(middle)


@pytest.mark.parametrize("normalization", NORMALIZATIONS)
@pytest.mark.parametrize("name", HOSTILE)
def test_the_function_is_kept(name: str, normalization: str) -> None:
    model, x = HOSTILE[name]()
    model, x = model.double().eval(), as_double(x)
    shared = name == "attribute_that_shares_memory"
    if not shared:
        randomise(model)
    symmetry = pathcond.find_symmetry(model, x, normalization=normalization)
    before = outputs(model, x, training=False)
    pathcond.rescale_(model, symmetry, torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2, verify=False)
    assert output_change(before, outputs(model, x, training=False)) < 1e-12


def weight_then(use: Callable[[Tensor, Tensor], Tensor]) -> nn.Module:
    return Calls(lambda self, x: self.b(F.relu(use(x, self.w))), w=nn.Parameter(torch.randn(4, 3)), b=nn.Linear(4, 2))


ORDINARY = {
    "equalised learning rate": lambda: weight_then(lambda x, w: F.linear(x, w * 0.1)),
    "einsum with an ellipsis": lambda: weight_then(lambda x, w: torch.einsum("...i,oi", x, w)),
    "cumulative average": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, momentum=None), nn.ReLU(), nn.Linear(4, 2)),
}


@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_spellings_are_not_missed(name: str) -> None:
    model, x = ORDINARY[name]().double(), torch.randn(6, 3).double()
    assert pathcond.find_symmetry(model, x).num_units == count_symmetries(model, x) == 4


def test_causal_masks_of_infinities_do_not_matter() -> None:
    model, x = between(lambda h: h)
    model.register_buffer("mask", torch.full((6, 6), -torch.inf).triu(1))
    model._function = lambda self, x: self.b((x @ x.t() + self.mask).softmax(1) @ F.relu(self.a(x)))
    symmetry = pathcond.find_symmetry(model, x)
    assert symmetry.num_units == 4
    assert pathcond.rescale_(model, symmetry, torch.ones(4)).output_change_eval < 1e-6


def test_a_gradient_that_cannot_be_scaled_in_place_is_refused_before_the_first_write() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, sparse=True), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    tokens = torch.randint(0, 6, (5,))
    model(tokens).sum().backward()
    symmetry = pathcond.find_symmetry(model, tokens)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(pathcond.RescalingError, match=r"gradient of 0\.weight is sparse"):
        pathcond.rescale_(model, symmetry, torch.ones(symmetry.num_units))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
