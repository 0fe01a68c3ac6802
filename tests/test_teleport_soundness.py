"""Ways in which a teleport could silently go wrong: each is handled, or refused with its reason."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pathcond
from pathcond.errors import MismatchError

from .test_teleport import Nothing, adam, assert_same, data, example, loss_of, network, train


class Wrapping(torch.optim.Optimizer):
    """Keeps another optimizer inside, as Lookahead and ZeroRedundancyOptimizer do; its own state
    stays empty.
    """

    def __init__(self, inside: torch.optim.Optimizer) -> None:
        super().__init__(inside.param_groups, {})
        self.inside = inside

    def step(self, closure: Any = None) -> None:
        self.inside.step(closure)


class OwnStep(torch.optim.SGD):
    """Gives SGD's momentum another meaning."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                trust = p.norm() / p.grad.norm()  # as LARS does
                buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                p.sub_(buffer.mul_(0.9).add_(p.grad * trust), alpha=group["lr"])


class ParameterShapedMu(torch.optim.Optimizer):
    """A momentum under a name that elsewhere is a number."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(
                self.state[p].setdefault("mu", torch.zeros_like(p)).mul_(0.9).add_(p.grad),
                alpha=0.1,
            )


def plain() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.mark.parametrize("build", [lambda p: OwnStep(p, 0.1), ParameterShapedMu])
def test_state_whose_meaning_only_looks_known_is_refused(build: Any) -> None:
    model = plain()
    optimizer = build(model.parameters())
    pathcond.teleport(optimizer, model, example(), every=2)
    with pytest.raises(MismatchError, match="of unknown meaning"):
        train(model, optimizer, data(2))


def test_state_of_an_inner_optimizer_moves() -> None:
    results = []
    for wrap in (lambda o: o, Wrapping):
        model = plain()
        inside = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        optimizer = wrap(inside)
        handle = pathcond.teleport(optimizer, model, example(), every=3)
        train(model, optimizer, data(7))
        assert (handle.steps, handle.teleports) == (7, 2)
        results.append((model.state_dict(), inside.state_dict()["state"]))
    assert_same(*results)


def test_a_step_inside_a_step_is_one() -> None:
    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            before = [p.detach().clone() for p in self.param_groups[0]["params"]]
            super().step(closure)
            with torch.no_grad():  # goes on from where it was
                for p, old in zip(self.param_groups[0]["params"], before, strict=True):
                    p.lerp_(old, 0.5)

    # torch wraps a class's step when the first of it is made
    torch.optim.SGD(plain().parameters(), 0.1)
    model = plain()
    optimizer = Outer(model.parameters(), 0.0)
    handle = pathcond.teleport(optimizer, model, example(), every=2)
    before = model(example())
    train(model, optimizer, data(4))
    assert (handle.steps, handle.teleports) == (4, 2)
    torch.testing.assert_close(model(example()), before, rtol=1e-4, atol=1e-5)


def test_a_step_inside_backward_is_refused() -> None:
    model = plain()
    optimizers = [torch.optim.SGD([p], 0.1) for p in model.parameters()]
    for parameter, optimizer in zip(model.parameters(), optimizers, strict=True):
        parameter.register_post_accumulate_grad_hook(lambda p, o=optimizer: o.step())
    handle = pathcond.teleport(optimizers, model, example(), every=1)
    with pytest.raises(MismatchError, match=r"inside backward\(\)"):
        loss_of(model, example()).backward()
    handle.remove()
    assert handle.now() is not None


def test_half_precision_state_survives_factors_that_cancel() -> None:
    """2.weight is multiplied and divided by 2⁸: nothing happens to it, and its second moments must
    not pass through 2¹⁶.
    """
    for sign in (1, -1):
        model = plain().half()
        symmetry = pathcond.find_symmetry(model, example().half())
        optimizer = torch.optim.Adam(model.parameters(), 0.0)
        model[2].weight.grad = torch.ones_like(model[2].weight)
        optimizer.step()
        before = copy.deepcopy(optimizer.state[model[2].weight])
        log_scales = sign * torch.full((symmetry.num_units,), 256.0).double().log()
        # inside float16's range, before and after
        model[0].weight.data.mul_(0.01 if sign > 0 else 1)
        model[0].bias.data.mul_(0.01 if sign > 0 else 1)
        model[4].weight.data.mul_(1 if sign > 0 else 0.01)
        pathcond.rescale_(model, symmetry, log_scales, optimizer=optimizer, tolerance=1.0)
        assert_same(optimizer.state[model[2].weight], before)


def test_modules_whose_mode_changes_their_weights() -> None:
    class LowRank(nn.Linear):
        """Merges its correction into the weight in eval mode, as LoRA layers do."""

        def __init__(self) -> None:
            super().__init__(6, 8)
            self.a, self.b, self.merged = (
                nn.Parameter(torch.randn(2, 6)),
                nn.Parameter(torch.randn(8, 2)),
                False,
            )

        def train(self, mode: bool = True) -> "LowRank":
            if mode == self.merged:
                self.weight.data += (self.b @ self.a) * (-1 if self.merged else 1)
                self.merged = not mode
            return super().train(mode)

        def forward(self, x: Tensor) -> Tensor:
            return (
                super().forward(x)
                if self.merged
                else super().forward(x) + x @ self.a.t() @ self.b.t()
            )

    model = nn.Sequential(LowRank(), nn.ReLU(), nn.Linear(8, 3)).train()
    before = copy.deepcopy(model.state_dict())
    pathcond.find_symmetry(model, example())
    assert not model[0].merged
    assert_same(model.state_dict(), before)
    assert pathcond.condition_(model, example()).output_change_train < 1e-5
    assert not model[0].merged


def test_copies_are_never_silently_left_behind(caplog: pytest.LogCaptureFixture) -> None:
    model = plain()
    ema = copy.deepcopy(model)
    optimizer = adam(model)
    handle = pathcond.teleport(
        optimizer, model, example(), every=1, copies=(copy for copy in [ema])
    )
    train(model, optimizer, data(2))
    assert handle.teleports == 2
    assert not torch.equal(ema[0].weight, plain()[0].weight)
    with pytest.raises(MismatchError, match="knows none of its parameters"):
        pathcond.condition_(
            model, example(), copies=[{f"module.{name}": p for name, p in ema.named_parameters()}]
        )
    for wrong in (ema, {"0.weight": ema[0].weight}, [None], [ema[0].weight]):
        with pytest.raises(TypeError, match="copies"):
            pathcond.condition_(model, example(), copies=wrong)
    low = copy.deepcopy(model).bfloat16()
    # or the copy would drift, rounding by rounding
    assert pathcond.condition_(model, example(), copies=[low]).rounded
    second = nn.Linear(5, 2)
    with caplog.at_level(logging.WARNING, "pathcond"):
        pathcond.teleport(
            torch.optim.SGD([*model.parameters(), *second.parameters()], 0.1), model, example()
        )
    assert "2 parameters outside of the model" in caplog.text


def test_what_may_change_while_training_goes_on() -> None:
    """Dropout, momentum, the example batch, sparse gradients of other layers: none of them ends the
    teleports.
    """

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.body = nn.Embedding(10, 6, sparse=True), network()

        def forward(self, x: Tensor) -> Tensor:
            return self.body(self.words(torch.zeros(len(x), dtype=torch.long)).tanh() + x)

    model, batch = Words(), example()
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    handle = pathcond.teleport(optimizer, model, batch, every=1)
    batch.fill_(float("nan"))
    model.body[1].momentum, model.body[3].p = 0.2, 0.5
    train(model, optimizer, data(3))
    assert (handle.teleports, handle.left_out) == (3, 0)


def test_optimizers_and_inputs_that_are_none() -> None:
    model = plain()
    for wrong in ({}, torch.optim.lr_scheduler.StepLR(adam(model), 1), (o for o in ())):
        with pytest.raises(TypeError, match="optimizer"):
            pathcond.teleport(wrong, model, example())
    with pytest.raises(pathcond.UnsupportedModelError, match="dtype"):
        pathcond.teleport(adam(model.double()), model, example())


def test_lbfgs_is_reset_as_a_whole() -> None:
    model = plain()
    # its state lies with the first
    ordered = [model[4].bias, *(p for p in model.parameters() if p is not model[4].bias)]
    optimizer = torch.optim.LBFGS(ordered, max_iter=2)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, example())
        loss.backward()
        return loss

    optimizer.step(closure)
    assert optimizer.state[model[4].bias]
    pathcond.condition_(model, example(), optimizer=optimizer, optimizer_state="reset")
    assert not optimizer.state[model[4].bias]
    optimizer.step(closure)


def test_sparse_gradients_leave_out_no_teleport() -> None:
    torch.manual_seed(1)
    layers = [nn.Embedding(20, 10, sparse=True), nn.ReLU(), nn.Linear(10, 30), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(30, 4))
    sparse = torch.optim.SparseAdam(model[0].parameters())
    dense = torch.optim.Adam([p for p in model.parameters() if p is not model[0].weight])
    words = torch.randint(0, 20, (3, 8))
    handle = pathcond.teleport([sparse, dense], model, words[0], every=1)
    for batch in words:
        sparse.zero_grad()
        dense.zero_grad()
        model(batch).square().mean().backward()
        sparse.step()
        dense.step()
    assert (handle.teleports, handle.left_out) == (3, 0)


def test_accelerates_optimizer() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = plain()
    model, optimizer = accelerator.prepare(model, adam(model))
    handle = pathcond.teleport(optimizer, model, example(), every=2)
    train(model, optimizer, data(4))
    assert (handle.steps, handle.teleports) == (4, 2)


def test_a_solver_that_does_nothing_is_no_reason_to_look_at_state() -> None:
    model = plain()
    optimizer = ParameterShapedMu(model.parameters())
    pathcond.teleport(
        optimizer, model, example(), every=1, solver=Nothing(), optimizer_state="keep"
    )
    train(model, optimizer, data(2))
