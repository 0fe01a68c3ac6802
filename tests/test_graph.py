"""Capture: clear errors for what cannot be captured, and operations in order for what can."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond.capture.graph import _Capture, capture, capture_both_modes
from pathcond.capture.nodes import Graph
from pathcond.symmetry.captures import is_same_program

from .cases import Calls, make, prepared


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))


def test_no_example_inputs() -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match="No example inputs"):
        pathcond.find_symmetry(mlp(), None)


def test_inputs_of_a_strange_type() -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match="type str"):
        pathcond.find_symmetry(mlp(), "batch")


def test_inputs_that_the_model_rejects() -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match="check their shapes"):
        pathcond.find_symmetry(mlp(), torch.randn(5, 7))


@pytest.mark.parametrize("batch", [{"x": torch.randn(5, 3)}, (torch.randn(5, 3), torch.randn(5))])
def test_how_batches_are_passed_is_said_where_the_model_rejects_them(batch: Any) -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match=r"write \(batch,\) if forward takes"):
        pathcond.find_symmetry(mlp(), batch)


def test_inputs_as_tensor_tuple_and_dict() -> None:
    model = Calls(lambda self, x: self.net(x), net=mlp())
    model.forward = lambda input: model.net(input)  # a keyword to call it by
    x = torch.randn(5, 3)
    assert {
        pathcond.find_symmetry(model, inputs).num_units for inputs in (x, (x,), [x], {"input": x})
    } == {4}


def test_lazy_modules() -> None:
    with pytest.raises(pathcond.UnsupportedModelError, match=r"0\.weight of a lazy module"):
        pathcond.find_symmetry(nn.Sequential(nn.LazyLinear(4)), torch.randn(5, 3))


def test_quantised_weights() -> None:
    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int8), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.float().t()

    with pytest.raises(pathcond.UnsupportedModelError, match=r"weight has dtype torch\.int8"):
        pathcond.find_symmetry(Quantised(), torch.randn(5, 3))


def test_quantised_modules() -> None:
    class Packed(nn.Module):
        # keeps its weights where no parameter shows them
        __module__ = "torch.ao.nn.quantized.modules.linear"

        def forward(self, x: Tensor) -> Tensor:
            return x

    with pytest.raises(pathcond.UnsupportedModelError, match=r"module 0 \(Packed\) is quantised"):
        pathcond.find_symmetry(nn.Sequential(Packed()), torch.randn(5, 3))


def test_control_flow_on_data(capfd: pytest.CaptureFixture) -> None:
    model = Calls(lambda self, x: self.net(x) if x.sum() > 0 else x, net=mlp())
    with pytest.raises(pathcond.UnsupportedModelError, match="control flow"):
        pathcond.find_symmetry(model, torch.randn(5, 3))
    assert capfd.readouterr() == ("", "")


def test_train_mode_with_a_single_sample() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    with pytest.raises(pathcond.UnsupportedModelError, match="at least two samples"):
        pathcond.find_symmetry(model, torch.randn(1, 3))


def test_layer_drop_is_captured() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.a(x))
        if not self.training or torch.rand([]) >= 0.1:
            h = h + F.relu(self.b(h))
        return self.c(h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 2))
    assert pathcond.find_symmetry(model, torch.randn(5, 3)).num_units == 4


def test_blocks_under_no_grad_are_inlined() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        with torch.no_grad():
            table = torch.arange(4.0).cos()
        return self.b(F.relu(self.a(x)) * table)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    graph = capture(model, torch.randn(5, 3), training=True)
    assert [node.op for node in graph.nodes if node.op in ("arange", "cos", "linear")] == [
        "arange",
        "cos",
        "linear",
        "linear",
    ]
    assert pathcond.find_symmetry(model, torch.randn(5, 3)).num_units == 4


def test_ops_carry_their_place() -> None:
    graph = capture(mlp(), torch.randn(5, 3), training=False)
    relu = next(node for node in graph.nodes if node.op == "relu")
    assert relu.module == "1"
    assert relu.shape == (5, 4)


def test_the_line_that_decides_is_named() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = nn.functional.linear(x, self.net[0].weight, self.net[0].bias)
        return h if h.mean() > 0 else -h

    with pytest.raises(pathcond.UnsupportedModelError) as caught:
        pathcond.find_symmetry(Calls(forward, net=mlp()), torch.randn(5, 3))
    message = str(caught.value)
    assert "test_graph.py:" in message
    assert "`return h if h.mean() > 0 else -h`" in message
    assert "parameter net.0.bias" in message
    assert "torch.where" in message
    assert "Guard" not in message
    assert "u0" not in message


def test_the_line_that_decides_is_named_on_the_meta_device() -> None:
    model = Calls(lambda self, x: self.net(x) if self.net(x).mean() > 0 else x, net=mlp()).to(
        "meta"
    )
    with pytest.raises(
        pathcond.UnsupportedModelError, match=r"test_graph\.py:\d+ .*decides by the value"
    ) as caught:
        pathcond.find_symmetry(model, torch.randn(5, 3))
    assert "real device" in str(caught.value)
    assert "Guard" not in str(caught.value)


def test_modules_compiled_by_jit() -> None:
    traced = torch.jit.trace(nn.Linear(4, 2), torch.randn(5, 4))
    with pytest.raises(
        pathcond.UnsupportedModelError, match=r"module 1 was compiled by torch\.jit"
    ):
        pathcond.find_symmetry(nn.Sequential(nn.Linear(3, 4), traced), torch.randn(5, 3))


def test_ensembles_by_vmap() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return torch.vmap(lambda w: F.relu(x @ w))(self.w)

    model = Calls(forward, w=nn.Parameter(torch.randn(4, 3, 2)))
    with pytest.raises(pathcond.UnsupportedModelError, match=r"torch\.vmap"):
        pathcond.condition_(model, torch.randn(5, 3))


def test_an_in_place_write_into_a_reshaped_tensor_that_nobody_else_reads() -> None:
    def forward(self: nn.Module, x: Tensor) -> Tensor:
        h = F.relu(self.a(x)).reshape(-1, 2, 2).transpose(1, 2).reshape(-1, 4)
        h *= 2
        return self.b(h)

    model = Calls(forward, a=nn.Linear(3, 4), b=nn.Linear(4, 2))
    assert pathcond.diag_g(model, torch.randn(5, 3)).keys() == dict(model.named_parameters()).keys()
    pathcond.condition_(model, torch.randn(5, 3))


def test_nothing_is_captured_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both modes on the example, one more size, and one sample for the energy; no more for a count
    of paths, a regime, or another call with what was prepared.
    """
    made: list[tuple[bool, int]] = []
    first = _Capture.first

    def counted(self: _Capture) -> Graph:
        made.append((self.training, len(self.inputs)))
        return first(self)

    monkeypatch.setattr(_Capture, "first", counted)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(6, 3)
    pathcond.theory.regime(model, x)
    assert len(made) == len(set(made)) == 4
    assert {(False, 6), (True, 6), (False, 1)} < set(made)
    made.clear()
    prepared = pathcond.prepare(model, x)
    assert len(made) == 4
    pathcond.condition_(model, prepared)
    pathcond.theory.regime(model, prepared)
    pathcond.path_norm(model, prepared)
    pathcond.log10_paths(model, prepared)
    assert len(made) == 4


@pytest.mark.parametrize("name", ["mlp", "resnet", "llama", "vit", "batched_experts"])
def test_what_is_prepared_can_be_kept_in_a_file(name: str) -> None:
    model, _ = make(name)
    captured = prepared(name, "full")
    again = pickle.loads(pickle.dumps(captured))
    g, h = pathcond.diag_g(model, captured), pathcond.diag_g(model, again)
    assert g.keys() == h.keys()
    assert all(torch.equal(g[key], h[key]) for key in g)
    report = pathcond.condition_(model, again, normalization="full")
    assert report.output_change_eval is not None
    assert report.output_change_eval < 1e-9


def _two_norms(self: Any, x: Tensor) -> Tensor:
    norm = self.norm if self.training else self.other
    return self.last(norm(self.first(x)))


def _two_epsilons(self: Any, x: Tensor) -> Tensor:
    norm, eps = self.norm, 1e-3 if self.training else 1e-5
    x = F.batch_norm(
        self.first(x), norm.running_mean, norm.running_var, training=self.training, eps=eps
    )
    return self.last(x)


def _two_constants(self: Any, x: Tensor) -> Tensor:
    mask = torch.zeros(4) if self.training else torch.ones(4)
    return self.last(self.first(x) * mask)


def _two_outputs(self: Any, x: Tensor) -> Any:
    hidden = self.norm(self.first(x))
    return (self.last(hidden), hidden) if self.training else self.last(hidden)


def _two_orders(self: Any, x: Tensor) -> Tensor:
    hidden = self.first(x)
    return self.last(hidden - x if self.training else x - hidden)


@pytest.mark.parametrize(
    "forward", [_two_norms, _two_epsilons, _two_constants, _two_outputs, _two_orders]
)
def test_modes_that_differ_are_two_programs(forward: Callable[..., Any]) -> None:
    parts = {
        "first": nn.Linear(4, 4),
        "norm": nn.BatchNorm1d(4),
        "other": nn.BatchNorm1d(4),
        "last": nn.Linear(4, 2),
    }
    model = Calls(forward, **parts)
    assert not is_same_program(*capture_both_modes(model, torch.randn(5, 4)))


def test_an_output_of_train_mode_alone_is_kept() -> None:
    model = Calls(_two_outputs, first=nn.Linear(4, 4), norm=nn.BatchNorm1d(4), last=nn.Linear(4, 2))
    assert pathcond.find_symmetry(model, torch.randn(5, 4), normalization="gain").num_units == 0
