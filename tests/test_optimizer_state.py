"""State that moves along is the state that the moved gradients would have built up: replayed, bit
for bit.
"""

import collections
import copy
import dataclasses
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond import condition_
from pathcond.errors import MismatchError
from pathcond.networks import mlp
from pathcond.rescaling import optimizer_state


class Lion(torch.optim.Optimizer):
    """Sign of a momentum, as published."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.add_((0.9 * average + 0.1 * p.grad).sign(), alpha=-group["lr"])
                average.mul_(0.99).add_(p.grad, alpha=0.01)


class SignMomentum(torch.optim.Optimizer):
    """Lion-like: one average of gradients, under a class that no table knows."""

    def __init__(self, params: Iterable[Tensor], lr: float = 1e-4) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: object = None) -> None:
        for p in self.param_groups[0]["params"]:
            average = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
            p.add_(average.mul_(0.9).add_(p.grad).sign(), alpha=-self.param_groups[0]["lr"])


SMALL = 1e-30  # in place of ε, which does not scale: nothing is left of it after an addition
OPTIMIZERS: dict[str, Callable[[list[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.0, momentum=0.9),
    "SGD nesterov": lambda p: torch.optim.SGD(p, 0.0, momentum=0.9, nesterov=True),
    "SGD dampening": lambda p: torch.optim.SGD(p, 0.0, momentum=0.9, dampening=0.3),
    "SGD without momentum": lambda p: torch.optim.SGD(p, 0.0),
    "Adam": lambda p: torch.optim.Adam(p, 0.0),
    "Adam fused": lambda p: torch.optim.Adam(p, 0.0, fused=True),
    "AdamW amsgrad": lambda p: torch.optim.AdamW(p, 0.0, weight_decay=0.0, amsgrad=True),
    "NAdam": lambda p: torch.optim.NAdam(p, 0.0),
    "RAdam": lambda p: torch.optim.RAdam(p, 0.0),
    "Adamax": lambda p: torch.optim.Adamax(p, 0.0, eps=SMALL),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.0, momentum=0.5, eps=SMALL),
    "RMSprop centered": lambda p: torch.optim.RMSprop(
        p, 0.0, momentum=0.5, centered=True, eps=SMALL
    ),
    "Adagrad": lambda p: torch.optim.Adagrad(p, 0.0),
    "Adadelta": lambda p: torch.optim.Adadelta(p, 0.0, eps=SMALL),
    "Rprop": lambda p: torch.optim.Rprop(p, 0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, 0.0, lambd=0.0),
    "Lion": lambda p: Lion(p, 0.0),
    "Lion-like": lambda p: SignMomentum(p, 0.0),
    "Muon": lambda p: torch.optim.Muon(p, 0.0, weight_decay=0.0),
}
POWERS_OF_TWO, ANY = True, False


def network(dtype: torch.dtype, bias: bool = True) -> nn.Sequential:
    layers = [
        nn.Linear(4, 6, bias=bias),
        nn.ReLU(),
        nn.Linear(6, 5, bias=bias),
        nn.ReLU(),
        nn.Linear(5, 3, bias=bias),
    ]
    return nn.Sequential(*layers).to(dtype)


def moved_and_replayed(name: str, dtype: torch.dtype, rounded: bool) -> list[tuple[Tensor, Tensor]]:
    """State after three steps and a rescaling, beside state after three steps with the gradients of
    the rescaled network.
    """
    model = network(dtype, bias=name != "Muon")  # which takes matrices only
    twin, inputs = copy.deepcopy(model), torch.randn(7, 4, dtype=dtype)
    symmetry = pathcond.find_symmetry(model, inputs)
    log_scales = torch.randn(symmetry.num_units, dtype=torch.float64)
    if rounded:
        log_scales = (
            torch.randint(-3, 4, (symmetry.num_units,)).double()
            * torch.tensor(2.0, dtype=torch.float64).log()
        )
    pathcond.rescale_(twin, symmetry, log_scales)
    factors = symmetry.factors(log_scales)
    first, second = (OPTIMIZERS[name](list(m.parameters())) for m in (model, twin))
    for _ in range(3):
        for key, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            twin.get_parameter(key).grad = (parameter.grad / factors[key]).to(dtype)
        first.step()
        second.step()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=first)
    pairs = []
    for key, parameter in model.named_parameters():
        other = twin.get_parameter(key)
        assert first.state[parameter].keys() == second.state[other].keys()
        pairs += [
            (v, second.state[other][k])
            for k, v in first.state[parameter].items()
            if isinstance(v, Tensor)
        ]
        assert parameter.grad is not None
        pairs.append((parameter.grad, other.grad))  # what accumulates on the way to the next step
    return pairs


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moved_state_is_the_replayed_state_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    pairs = moved_and_replayed(name, dtype, POWERS_OF_TWO)
    assert len(pairs) >= 3
    for moved, replayed in pairs:
        assert torch.equal(moved, replayed)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_moved_state_is_the_replayed_state_to_rounding(name: str) -> None:
    for moved, replayed in moved_and_replayed(name, torch.float64, ANY):
        torch.testing.assert_close(moved, replayed, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("name", "state"),
    [(n, s) for n in OPTIMIZERS for s in optimizer_state.POWERS.get(n.split()[0], ())],
)
def test_a_wrong_power_is_noticed(name: str, state: str, monkeypatch: pytest.MonkeyPatch) -> None:
    powers = optimizer_state.POWERS[name.split()[0]]
    kept = optimizer_state._state_names(_with_state(name))
    monkeypatch.setitem(powers, state, powers[state] + 1)
    different = any(
        not torch.equal(moved, replayed)
        for moved, replayed in moved_and_replayed(name, torch.float64, POWERS_OF_TWO)
    )
    assert different == (state in kept)


def _with_state(name: str) -> torch.optim.Optimizer:
    weight = torch.randn(4, 3, requires_grad=True)
    weight.grad = torch.randn_like(weight)
    optimizer = OPTIMIZERS[name]([weight])
    optimizer.step()
    return optimizer


def trained(
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> tuple[nn.Module, torch.optim.Optimizer, pathcond.Symmetry]:
    model = network(torch.float32)
    symmetry = pathcond.find_symmetry(model, torch.randn(7, 4))
    optimizer = optimizer_class(model.parameters())
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return model, optimizer, symmetry


def test_factored_moments_of_adafactor_start_anew_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, optimizer, symmetry = trained(torch.optim.Adafactor)
    bias = model[0].bias
    before = optimizer.state[bias]["variance"].clone()
    log_scales = torch.full((symmetry.num_units,), 2.0).double().log()
    for _ in range(2):
        result = pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        assert result.optimizer_reset == ("0.weight", "2.weight", "4.weight")
        assert not optimizer.state[model[0].weight]
        assert torch.equal(optimizer.state[bias]["variance"], before / 4)
        optimizer.step()  # from nothing
        before = optimizer.state[bias]["variance"].clone()
    assert [record.getMessage() for record in caplog.records] == [
        "The optimizer state of 3 parameters cannot be rescaled and starts anew: 0.weight, "
        "2.weight, 4.weight"
    ]


def test_state_of_unknown_meaning_is_refused_with_two_ways_out() -> None:
    for make in (
        lambda p: torch.optim.LBFGS(p, max_iter=2),
        lambda p: type("Unheard", (torch.optim.Adam,), {})(p),
    ):
        model = network(torch.float32)
        symmetry = pathcond.find_symmetry(model, torch.randn(7, 4))
        optimizer = make(model.parameters())

        def closure(model: nn.Module = model) -> Tensor:
            model.zero_grad()
            loss = model(torch.ones(7, 4)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)
        weight = model[0].weight
        if not isinstance(optimizer, torch.optim.LBFGS):
            # which no look at tensors alone would see
            optimizer.state[weight]["nested"] = [torch.ones_like(weight)]
        before = copy.deepcopy(model.state_dict())
        log_scales = torch.ones(symmetry.num_units)
        with pytest.raises(MismatchError, match=r'"reset"(.|\n)*"keep"'):
            pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        kept = copy.deepcopy(optimizer.state_dict()["state"])
        pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer, optimizer_state="keep")
        assert str(optimizer.state_dict()["state"]) == str(kept)
        pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer, optimizer_state="reset")
        assert not optimizer.state[weight]


class Lookahead(torch.optim.Optimizer):
    """Keeps slow weights in a list, as many do."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.optimizer = inner
        self.param_groups, self.state = inner.param_groups, inner.state
        self.defaults = inner.defaults
        self.slow_weights = [[p.detach().clone() for p in g["params"]] for g in self.param_groups]


def test_weights_that_an_optimizer_keeps_aside_are_refused() -> None:
    model, x = mlp((9,), inputs=6, outputs=4), torch.randn(8, 6)
    for make, name in (
        (Lookahead, "slow_weights"),
        (lambda inner: inner.param_groups[0].update(copies=[torch.zeros(9, 6)]) or inner, "copies"),
        (lambda inner: inner.state.update(all={"w": torch.zeros(9, 6)}) or inner, "all"),
        *((keeping_aside(way), "aside") for way in WAYS_TO_KEEP),
    ):
        optimizer = make(torch.optim.SGD(model.parameters(), lr=0.1))
        before = copy.deepcopy(model.state_dict())
        for choice in optimizer_state.CHOICES:
            with pytest.raises(
                MismatchError,
                match=f"keeps '{name}' beside its state(.|\n)*make the optimizer after",
            ) as refused:
                condition_(model, x, optimizer=optimizer, optimizer_state=choice)
            assert "POWERS" not in str(refused.value)
        assert all(torch.equal(before[n], tensor) for n, tensor in model.state_dict().items())


def averaged(tensors: list[Tensor]) -> nn.Module:
    average = mlp((9,), inputs=6, outputs=4)
    nn.utils.vector_to_parameters(torch.cat([t.flatten() for t in tensors]), average.parameters())
    return average


@dataclasses.dataclass(slots=True)
class Slow:
    weights: list[Tensor]


WAYS_TO_KEEP: tuple[Callable[[list[Tensor]], object], ...] = (
    collections.deque,
    set,
    tuple,
    lambda tensors: {"nested": [{"deeper": tensors}]},
    lambda tensors: SimpleNamespace(inner=SimpleNamespace(weights=tensors)),
    Slow,
    averaged,
    lambda tensors: [averaged(tensors)],
    lambda tensors: torch.cat([t.flatten() for t in tensors]),
)


def keeping_aside(
    way: Callable[[list[Tensor]], object],
) -> Callable[[torch.optim.Optimizer], torch.optim.Optimizer]:
    def make(inner: torch.optim.Optimizer) -> torch.optim.Optimizer:
        parameters = inner.param_groups[0]["params"]
        inner.aside = way([p.detach().clone() for p in parameters])  # type: ignore[attr-defined]
        return inner

    return make


def test_what_an_optimizer_may_hold_besides() -> None:
    """The model, gradients, state, views of all these, and what moves along by name."""
    model = nn.Sequential(nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 4))
    x = torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(x).square().sum().backward()
    optimizer.step()
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.held = {  # type: ignore[attr-defined]
        "model": model,
        "views": [p.detach() for p in model.parameters()],
        "gradients": [p.grad for p in model.parameters()],
        "state": [state["momentum_buffer"] for state in optimizer.state.values()],
        "small": [torch.zeros(3, 3), torch.zeros(()), torch.zeros(9, 6, dtype=torch.long)],
        "slow": slow,
    }
    with pytest.raises(MismatchError, match="keeps 'held' beside"):
        condition_(model, x, optimizer=optimizer)
    condition_(model, x, optimizer=optimizer, copies=[slow])
    for name, parameter in model.named_parameters():
        assert torch.equal(slow[name], parameter)


class Container(torch.optim.Optimizer):
    """Holds several, as torchtitan's does."""

    def __init__(self, held: object, parameters: Iterable[Tensor]) -> None:
        self.held = held
        super().__init__(parameters, {})
        self.itself = self

    def step(self, closure: object = None) -> None: ...


@pytest.mark.parametrize(
    "nest",
    [
        list,
        tuple,
        lambda both: {"matrices": both[0], "others": [both[1]]},
        lambda both: SimpleNamespace(inner={"a": SimpleNamespace(both=both)}),
        lambda both: Container([both[0]], [both[1].param_groups[0]["params"][0]]).held + both[1:],
    ],
)
def test_optimizers_inside_of_another_are_found_however_nested(nest: Callable[..., object]) -> None:
    model, x = mlp((9,), inputs=6, outputs=4), torch.randn(8, 6)
    matrices = torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1])
    vectors = torch.optim.SGD([p for p in model.parameters() if p.dim() < 2], 0.1, momentum=0.9)
    model(x).square().sum().backward()
    matrices.step()
    vectors.step()
    optimizer = Container(nest([matrices, vectors]), list(model.parameters()))
    symmetry = pathcond.find_symmetry(model, x)
    second = matrices.state[model[1].weight]["exp_avg_sq"].clone()
    momentum = vectors.state[model[1].bias]["momentum_buffer"].clone()
    log_scales = torch.full((symmetry.num_units,), 2.0).double().log()
    # also where one that is inside is given too
    pathcond.rescale_(model, symmetry, log_scales, optimizer=[optimizer, matrices])
    assert torch.equal(matrices.state[model[1].weight]["exp_avg_sq"], second / 4)
    assert torch.equal(vectors.state[model[1].bias]["momentum_buffer"], momentum / 2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_adagrad_keeps_what_its_sums_begin_with(dtype: torch.dtype) -> None:
    model = network(dtype)
    symmetry = pathcond.find_symmetry(model, torch.randn(7, 4, dtype=dtype))
    first, *others = model.parameters()
    # torch begins with 0.7 in both groups
    groups = [{"params": [first], "initial_accumulator_value": 0.3}, {"params": others}]
    optimizer = torch.optim.Adagrad(groups, lr_decay=0.1, initial_accumulator_value=0.7)
    fresh = copy.deepcopy(optimizer.state_dict()["state"])
    octaves = torch.randint(-3, 4, (symmetry.num_units,)).double()
    log_scales = octaves * torch.tensor(2.0, dtype=torch.float64).log()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
    for key, state in optimizer.state_dict()["state"].items():
        assert torch.equal(state["sum"], fresh[key]["sum"])
    factors = symmetry.factors(log_scales)
    replayed = {}
    gradients = {name: torch.randn_like(p) for name, p in model.named_parameters()}
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
        replayed[name] = 0.7 + (gradients[name].double() / factors[name]).square()
    optimizer.step()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        assert state["step"] == 1
        rounding = 200 * torch.finfo(dtype).eps  # of the sum, before it was divided by d² >= 1/64
        torch.testing.assert_close(
            state["sum"].double(), replayed[name], rtol=rounding, atol=rounding
        )


class Words(nn.Module):
    """A hidden embedding with sparse gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 10, sparse=True)
        self.head = nn.Linear(10, 4)

    def forward(self, at: Tensor) -> Tensor:
        return self.head(torch.relu(self.words(at)))


@pytest.mark.filterwarnings("ignore:Sparse invariant checks")
@pytest.mark.parametrize("coalesced", [True, False])
@pytest.mark.parametrize(
    "make",
    [
        torch.optim.SparseAdam,
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.5),
        lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5),
    ],
)
def test_sparse_gradients_move_where_they_are(
    make: Callable[..., torch.optim.Optimizer], coalesced: bool
) -> None:
    model, at = Words(), torch.randint(0, 20, (12,))
    symmetry = pathcond.find_symmetry(model, at)
    optimizer = make(model.words.parameters())
    words = model.words.weight
    model(at).square().mean().backward()
    if coalesced:
        words.grad = words.grad.coalesce()
    optimizer.step()
    before = words.grad.to_dense()
    values, states = words.grad._values(), dense(optimizer.state[words])
    octaves = torch.randint(-3, 4, (symmetry.num_units,)).double()
    log_scales = octaves * torch.tensor(2.0, dtype=torch.float64).log()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer)
    factor = symmetry.factors(log_scales)["words.weight"].float()
    assert (factor != 1).any()
    assert words.grad._values().data_ptr() == values.data_ptr()
    assert words.grad.is_coalesced() == coalesced
    assert torch.equal(words.grad.to_dense(), before / factor)
    for key, state in dense(optimizer.state[words]).items():
        start = 0.5 if key == "sum" else 0.0
        power = 1 if key in ("exp_avg", "momentum_buffer") else 2
        torch.testing.assert_close(state - start, (states[key] - start) / factor**power)


def dense(state: dict[str, Any]) -> dict[str, Tensor]:
    """The entries of a state that may scale, whole."""
    tensors = {key: value for key, value in state.items() if key != "step"}
    return {
        key: value.to_dense() if value.is_sparse else value.clone()
        for key, value in tensors.items()
        if isinstance(value, Tensor)
    }


def test_state_of_no_parameter_is_left_as_it_is() -> None:
    """A counter, as MADGRAD keeps one."""
    model, x = mlp((9,), inputs=6, outputs=4), torch.randn(8, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    optimizer.state["k"] = torch.tensor([3])
    model(x).sum().backward()
    optimizer.step()
    for choice in ("transport", "keep", "reset"):
        condition_(model, x, optimizer=optimizer, optimizer_state=choice)
        assert optimizer.state["k"] == 3


def test_state_that_would_overflow_is_refused() -> None:
    model, optimizer, symmetry = trained(lambda p: torch.optim.SGD(p, 0.1, momentum=0.9))
    optimizer.state[model[0].weight]["momentum_buffer"].fill_(1e38)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(
        pathcond.RescalingError, match=r"momentum_buffer.* of 0\.weight .* would overflow"
    ):
        pathcond.rescale_(
            model, symmetry, torch.full((symmetry.num_units,), -3.0), optimizer=optimizer
        )
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_several_optimizers_move_together() -> None:
    model = network(torch.float32)
    symmetry = pathcond.find_symmetry(model, torch.randn(7, 4))
    matrices = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], 0.01)
    vectors = torch.optim.Adam([p for p in model.parameters() if p.dim() == 1])
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    matrices.step()
    vectors.step()
    momentum, second = (
        matrices.state[model[0].weight]["momentum_buffer"].clone(),
        vectors.state[model[0].bias]["exp_avg_sq"].clone(),
    )
    log_scales = torch.full((symmetry.num_units,), 2.0).double().log()
    pathcond.rescale_(model, symmetry, log_scales, optimizer=[matrices, vectors])
    assert torch.equal(matrices.state[model[0].weight]["momentum_buffer"], momentum / 2)
    assert torch.equal(vectors.state[model[0].bias]["exp_avg_sq"], second / 4)
