"""Criteria: what each balances, the law that all of them obey, one of one's own, and what is
refused.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev

import pathcond
from pathcond import (
    BalancedLayers,
    BalancedNorms,
    Criterion,
    Curvature,
    EnergyRangeError,
    ENorm,
    Exact,
    PathKernel,
    Symmetry,
    UnsupportedModelError,
    condition_,
    diag_g,
    find_symmetry,
    measure_reads,
)
from pathcond.capture.outputs import output_change
from pathcond.criteria.problem import sides_of
from pathcond.integrations.shared import ConditionedTraining, counts_at
from pathcond.lifting.sample import Sample
from pathcond.measured.differentiable import differentiable
from pathcond.solvers.balance import WIDTH, balance_point

from .cases import CASES, families, make, prepared
from .strategies import further
from .zoo import NORMALIZATIONS, outputs

CRITERIA: dict[str, Criterion] = {
    "paths": PathKernel(),
    "curvature": Curvature(),
    "norms": BalancedNorms(),
    "layers": BalancedLayers(),
}
NO_SECOND_DERIVATIVE = "embedding_bags"


@dataclass(frozen=True)
class Gradients(Criterion):
    """The criterion of docs/conditioning.md: squared gradients of a loss, which fall as weights
    grow; tensors weigh alike.
    """

    loss: Callable[[Any], Tensor]
    needs_whole_batch = True

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Tensor], model: nn.Module | None
    ) -> dict[str, Tensor]:
        assert model is not None
        trained = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        }
        found = torch.autograd.grad(
            self.loss(model(symmetry.example_inputs)), list(trained.values())
        )
        return {name: gradient.double() ** 2 for name, gradient in zip(trained, found, strict=True)}

    def weights(
        self, symmetry: Symmetry, energies: Mapping[str, Tensor], model: nn.Module | None
    ) -> dict[str, float]:
        return {name: 1 / values.numel() for name, values in energies.items()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def unchanged(model: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize(("name", "normalization"), families(NORMALIZATIONS))
def test_balanced_norms_twice_do_nothing(name: str, normalization: str) -> None:
    twice_does_nothing(BalancedNorms(), name, normalization)


@pytest.mark.parametrize(("name", "normalization"), families(["absorb", "full"]))
def test_balanced_layers_twice_do_nothing(name: str, normalization: str) -> None:
    twice_does_nothing(BalancedLayers(), name, normalization)


@pytest.mark.parametrize("normalization", [*further("absorb"), "full"])
@pytest.mark.parametrize("name", sorted(CASES.keys() - {NO_SECOND_DERIVATIVE}))
def test_curvature_twice_does_nothing(name: str, normalization: str) -> None:
    twice_does_nothing(Curvature(), name, normalization)


def twice_does_nothing(criterion: Criterion, name: str, normalization: str) -> None:
    model, inputs = make(name)
    captured = prepared(name, normalization)
    before = outputs(model, inputs, training=False)
    report = condition_(model, captured, normalization=normalization, criterion=criterion)
    assert output_change(before, outputs(model, inputs, training=False)) < 1e-9
    assert report.objective_after <= report.objective_before
    assert bool(report.log_scales.isfinite().all())
    if report.num_units:
        again = condition_(model, captured, normalization=normalization, criterion=criterion)
        assert float((captured.symmetry.class_matrix @ again.log_scales).abs().max()) < 1e-6


@pytest.mark.parametrize("normalization", ["absorb", "full", "paper"])
@pytest.mark.parametrize("name", ["mlp", "resnet", "used_twice", "vit", "batch_norm_mlp"])
@pytest.mark.parametrize("key", sorted(CRITERIA))
def test_energies_follow_the_law(key: str, name: str, normalization: str) -> None:
    """Of the rescaled model they are E exp(−2s), or |θ|^p exp(p s): for scales that differ from
    unit to unit, too. The problem is made of them.
    """
    criterion = CRITERIA[key]
    model, _ = make(name)
    captured = prepared(name, normalization)
    symmetry = captured.symmetry
    g = measure(criterion, model, captured.sample)
    before = criterion.energies(symmetry, g, model)
    problem = criterion.problem(symmetry, g, model)
    for found, side in zip(
        problem.at(problem.zero()).sides, sides_of(symmetry, before), strict=True
    ):
        torch.testing.assert_close(found * math.exp(problem.log_total), side)
    scales = 0.3 * torch.randn(symmetry.num_units, dtype=torch.float64)
    pathcond.rescale_(model, symmetry, scales, train_tolerance=None)
    after = criterion.energies(symmetry, measure(criterion, model, captured.sample), model)
    factors = symmetry.factors(scales)
    for parameter, values in before.items():
        expected = values * factors[parameter] ** -problem.power
        torch.testing.assert_close(
            after[parameter], expected, rtol=1e-6, atol=1e-12 * float(expected.max())
        )


def measure(criterion: Criterion, model: nn.Module, sample: Sample) -> Mapping[str, Any]:
    return (measure_reads if criterion.measures == "reads" else diag_g)(model, sample)


class TestCurvature:
    """λ_max of the Gauss-Newton blocks, against dense matrices."""

    @staticmethod
    def dense(
        model: nn.Module,
        x: Tensor,
        loss: Callable[[Tensor], Tensor] | None,
        of: Callable[[Tensor], Tensor] = torch.max,
    ) -> dict[str, float]:
        """The largest eigenvalue of every block, or another function of its eigenvalues."""
        parameters = {name: p.detach() for name, p in model.named_parameters()}
        jacobians = jacrev(lambda values: functional_call(model, values, (x,)).flatten())(
            parameters
        )
        out = model(x).detach()
        hessian_of_loss = (
            torch.eye(out.numel(), dtype=out.dtype)
            if loss is None
            else hessian(lambda flat: loss(flat.view_as(out)))(out.flatten())
        )
        blocks = {name: jacobian.flatten(1) for name, jacobian in jacobians.items()}
        return {
            name: float(of(torch.linalg.eigvalsh(J.T @ hessian_of_loss @ J)))
            for name, J in blocks.items()
        }

    @pytest.mark.parametrize("with_loss", [False, True])
    def test_is_that_of_dense_matrices(self, with_loss: bool) -> None:
        model, x = make("mlp")
        labels = torch.tensor([0, 1, 1, 0, 1, 0])
        loss = (lambda out: nn.functional.cross_entropy(out, labels)) if with_loss else None
        symmetry = find_symmetry(model, x)
        factors = symmetry.factors(torch.zeros(symmetry.num_units))
        found = Curvature(loss=loss, steps=30).sharpest(
            symmetry, model, list(diag_g(model, x)), factors
        )
        for name, expected in self.dense(model, x, loss).items():
            assert found[name] == pytest.approx(expected, rel=1e-6)

    def test_few_steps_are_enough(self) -> None:
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        factors = symmetry.factors(torch.zeros(symmetry.num_units))
        found = Curvature().sharpest(symmetry, model, list(diag_g(model, x)), factors)
        for name, expected in self.dense(model, x, None).items():
            assert found[name] == pytest.approx(expected, rel=0.02)

    def test_batch_statistics_are_used_and_running_ones_stay(self) -> None:
        model, x = make("batch_norm_mlp")
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.eps = 1e-12
        before, mode = state(model), model.training
        symmetry = find_symmetry(model, x)
        factors = symmetry.factors(torch.zeros(symmetry.num_units))
        found = Curvature(steps=40).sharpest(symmetry, model, list(diag_g(model, x)), factors)
        assert unchanged(model, before)
        assert model.training == mode
        plain = copy.deepcopy(model).train()
        for module in plain.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.track_running_stats, module.running_mean, module.running_var = (
                    False,
                    None,
                    None,
                )
        for name, expected in self.dense(plain, x, None).items():
            if name in ("0.bias", "3.bias"):  # which the statistics take out again
                assert found[name] == 0.0
            else:
                assert found[name] == pytest.approx(expected, rel=1e-5)

    @pytest.mark.parametrize("with_loss", [False, True])
    def test_the_trace_is_the_mean_over_random_directions(
        self, with_loss: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pathcond.measured.curvature, "DIRECTIONS", 4000)
        model, x = make("mlp")
        labels = torch.tensor([0, 1, 1, 0, 1, 0])
        loss = (lambda out: nn.functional.cross_entropy(out, labels)) if with_loss else None
        symmetry = find_symmetry(model, x)
        factors = symmetry.factors(torch.zeros(symmetry.num_units))
        found = Curvature(loss=loss).traces(symmetry, model, list(diag_g(model, x)), factors)
        for name, expected in self.dense(model, x, loss, torch.sum).items():
            assert found[name] == pytest.approx(expected, rel=0.05)

    @pytest.mark.parametrize("weight", ["rank", "size"])
    def test_over_common_scales_of_tensors_it_is_the_block_formula(self, weight: str) -> None:
        """W log Σ_b λ_b exp(−2 s_b) + 2 Σ_b √p_b s_b, with λ_b of the model in balance; stable
        ranks in place of √p_b likewise.
        """
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        pathcond.rescale_(model, symmetry, balance_point(symmetry, model)[0])
        criterion, g = Curvature(steps=40, weight=weight), diag_g(model, x)
        problem = criterion.problem(symmetry, g, model)
        sharpest, sizes = (
            self.dense(model, x, None),
            {name: p.numel() for name, p in model.named_parameters()},
        )
        t = torch.zeros(symmetry.num_units, dtype=torch.float64)
        first, second = (list(group.units) for group in symmetry.groups)
        a, b = 0.4, -0.7
        t[first], t[second] = a, b
        moves = {
            "0.weight": a,
            "0.bias": a,
            "2.weight": b - a,
            "2.bias": b,
            "4.weight": -b,
            "4.bias": 0.0,
        }
        total = sum(sharpest[name] * math.exp(-2 * s) for name, s in moves.items())
        weights = {name: math.sqrt(sizes[name]) for name in moves}
        if weight == "rank":
            factors = symmetry.factors(torch.zeros(symmetry.num_units))
            traces = criterion.traces(symmetry, model, list(g), factors)
            weights = {name: max(traces[name] / sharpest[name], 1.0) for name in moves}
        expected = sum(weights.values()) * math.log(total) + 2 * sum(
            weights[name] * s for name, s in moves.items()
        )
        assert problem.at(2 * t).value == pytest.approx(expected, rel=1e-6)

    def test_samples_bound_the_work(self) -> None:
        torch.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(40, 4)
        seen: list[int] = []
        model[0].register_forward_hook(lambda module, args, out: seen.append(len(args[0])))
        symmetry, g = find_symmetry(model, x), diag_g(model, x)
        seen.clear()
        few = Curvature(samples=10).energies(symmetry, g, model)
        assert seen[-1] == 10
        torch.testing.assert_close(
            few["0.weight"],
            Curvature().energies(find_symmetry(model, x[:10]), g, model)["0.weight"],
        )

    @staticmethod
    def labelled() -> tuple[nn.Module, Tensor, Callable[[Tensor], Tensor]]:
        """A network, more samples than are used by default, and a loss with a label for each."""
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).double()
        x, labels = torch.randn(300, 8).double(), torch.randint(0, 3, (300,))
        return model, x, lambda out: nn.functional.cross_entropy(out, labels)

    @pytest.mark.parametrize("make_criterion", [Curvature, Gradients])
    def test_a_loss_has_all_samples_of_a_large_batch(
        self, make_criterion: Callable[..., Criterion]
    ) -> None:
        model, x, loss = self.labelled()
        criterion = make_criterion(loss=loss)
        expected = condition_(copy.deepcopy(model), x, criterion=criterion, max_samples=None)
        captured = pathcond.prepare(model, x, criterion=criterion)
        assert len(captured.symmetry.example_inputs) == len(captured.sample.inputs) == 256
        for inputs in (x, captured):
            found = condition_(copy.deepcopy(model), inputs, criterion=criterion)
            torch.testing.assert_close(found.log_scales, expected.log_scales)
            assert found.log_scales.any()

    def test_a_loss_has_all_samples_in_teleports_and_callbacks(self) -> None:
        model, x, loss = self.labelled()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        options: dict[str, Any] = {"every": 1, "criterion": Curvature(loss=loss)}
        handle = pathcond.teleport(optimizer, model, x, **options)
        loss(model(x)).backward()
        optimizer.step()
        assert handle.teleports == 1
        handle.remove()
        training = ConditionedTraining(x, **options)
        training.start(model, optimizer, x, fresh=True, counts=counts_at(0, 0), epochs=0)
        optimizer.step()
        assert training.teleportation is not None
        assert training.teleportation.teleports == 1
        training.stop()

    def test_without_a_loss_the_first_samples_are_kept(self) -> None:
        model, x, loss = self.labelled()
        for criterion in (None, Curvature(), PathKernel()):
            captured = pathcond.prepare(model, x, criterion=criterion)
            assert captured.whole_batch is None
            assert captured.symmetry_of_whole_batch is captured.symmetry
        few = pathcond.prepare(model, x[:9], criterion=Curvature(loss=loss))
        assert few.whole_batch is None
        kept = pathcond.prepare(model, x, criterion=Curvature(loss=loss)).whole_batch
        assert torch.equal(kept, x)
        assert kept.data_ptr() != x.data_ptr()

    def test_a_loss_that_fails_says_how_many_samples_it_was_given(self) -> None:
        model, x, loss = self.labelled()
        for inputs, samples, given in (
            (pathcond.prepare(model, x), None, 256),
            (x, 100, 100),
            (x[:200], None, 200),
        ):
            message = rf"fails on the model's output for {given} samples \(shapes \({given}, 3\)\)"
            with pytest.raises(ValueError, match=message):
                condition_(model, inputs, criterion=Curvature(loss=loss, samples=samples))

    def test_layers_without_second_derivatives_are_differentiated_forwards(self) -> None:
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(
                nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 5), nn.Hardsigmoid(), nn.Linear(5, 2)
            ),
            torch.randn(6, 3),
        )
        model, x = model.double(), x.double()
        symmetry = find_symmetry(model, x)
        factors = symmetry.factors(torch.zeros(symmetry.num_units))
        found = Curvature(steps=40).sharpest(symmetry, model, list(diag_g(model, x)), factors)
        for name, expected in self.dense(model, x, None).items():
            assert found[name] == pytest.approx(expected, rel=1e-6)

    def test_what_cannot_be_differentiated_twice_is_said(self) -> None:
        model, inputs = make(NO_SECOND_DERIVATIVE)
        before = state(model)
        with pytest.raises(
            UnsupportedModelError,
            match=r"curvature of max\.weight cannot be .*BalancedNorms",
        ):
            condition_(model, inputs, criterion=Curvature())
        assert unchanged(model, before)

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"mode": "sum"},
            {"padding_idx": 2},
            {"mode": "sum", "padding_idx": -1},
            {"offsets": (0, 2, 2, 7)},
            {"offsets": (0, 2, 2, 7), "mode": "sum", "padding_idx": 0},
            {"offsets": (0, 3, 5, 10), "include_last_offset": True},
            {"mode": "sum", "weights": True},
            {"offsets": (0, 3, 4), "mode": "sum", "weights": True},
            {"mode": "max"},
        ],
        ids=str,
    )
    def test_bags_of_embeddings_are_what_torch_computes(self, options: dict[str, Any]) -> None:
        torch.manual_seed(0)
        offsets = options.pop("offsets", None)
        ids = torch.randint(0, 6, (2, 5) if offsets is None else (10,))
        if options.pop("weights", False):
            options["per_sample_weights"] = torch.rand(ids.shape).double()
        if offsets is not None:
            options["offsets"] = torch.tensor(offsets)
        table = torch.randn(6, 3, dtype=torch.float64)
        with differentiable():
            ours = nn.functional.embedding_bag(ids, table, **options)
        torch.testing.assert_close(ours, nn.functional.embedding_bag(ids, table, **options))

    def test_a_model_with_bags_of_embeddings(self) -> None:
        torch.manual_seed(0)
        layers = [nn.EmbeddingBag(20, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)]
        model = nn.Sequential(*layers).double()
        tokens = torch.randint(0, 20, (12, 3))
        before = model(tokens)
        assert condition_(model, tokens, criterion=Curvature()).solution.converged
        torch.testing.assert_close(model(tokens), before)

    def test_half_precision(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)).bfloat16()
        report = condition_(model, torch.randn(5, 8, dtype=torch.bfloat16), criterion=Curvature())
        assert report.rounded
        assert report.output_change_eval == 0.0


class TestBalancedNorms:
    """Norms around every unit, and what holds the scales that have no other side."""

    @pytest.mark.parametrize("p", [1, 2, 3])
    def test_norms_on_both_sides_are_alike(self, p: float) -> None:
        model, x = make("mlp")
        condition_(model, x, criterion=BalancedNorms(p=p))
        weights = [w for w in model.parameters() if w.dim() > 1]
        for left, right in pairwise(weights):
            torch.testing.assert_close(left.norm(p, 1), right.norm(p, 0), rtol=1e-6, atol=0)

    def test_is_the_optimum_of_enorm_over_all_layers(self) -> None:
        model, x = make("vgg_with_flatten")
        other = copy.deepcopy(model)
        found = condition_(model, x, criterion=BalancedNorms(), max_log_scale=math.inf)
        expected = condition_(other, x, solver=ENorm(cycles=None, balance_last=True))
        torch.testing.assert_close(found.log_scales, expected.log_scales, rtol=0, atol=1e-6)

    def test_in_front_of_a_norm_weights_have_norm_one(self) -> None:
        model, x = make("batch_norm_mlp")
        for normalization in ("absorb", "full"):
            condition_(
                model,
                x,
                criterion=BalancedNorms(),
                normalization=normalization,
                train_tolerance=1.0,
            )
            norms = torch.cat([model[i].weight.square().sum(1) for i in (0, 3)]).detach()
            assert bool(((norms > 0.95) & (norms < 1.3)).all()), normalization

    def test_behind_a_norm_gain_and_shift_are_what_feeds_the_unit(self) -> None:
        model, x = make("batch_norm_mlp")
        condition_(model, x, criterion=BalancedNorms(), normalization="gain")
        for norm, reader in ((model[1], model[3]), (model[4], model[6])):
            fed = norm.weight.square() + norm.bias.square()
            torch.testing.assert_close(fed, reader.weight.square().sum(0), rtol=1e-6, atol=0)

    def test_needs_no_data(self) -> None:
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        solution = pathcond.solve(symmetry, {}, criterion=BalancedNorms(), model=model)
        assert solution.converged
        with pytest.raises(ValueError, match="pass the model"):
            pathcond.solve(symmetry, {}, criterion=BalancedNorms())


class TestOwnCriterion:
    """One small class."""

    @staticmethod
    def squared(out: Tensor) -> Tensor:
        return out.square().mean()

    def test_is_minimised_and_obeys_the_law(self) -> None:
        model, x = make("mlp")
        criterion = Gradients(self.squared)
        report = condition_(model, x, criterion=criterion)
        assert report.objective_after < report.objective_before
        assert report.criterion.startswith("Gradients(")
        assert float(condition_(model, x, criterion=criterion).log_scales.abs().max()) < 1e-6
        # Measured afresh, without bounds, the gradient is zero.
        condition_(model, x, criterion=criterion, max_log_scale=math.inf)
        symmetry = find_symmetry(model, x)
        problem = criterion.problem(symmetry, {}, model)
        assert problem.at(problem.zero()).residual < 1e-8

    @pytest.mark.parametrize(
        "solver", [Exact(), pathcond.CoordinateDescent(sweeps=5000, tolerance=1e-12)]
    )
    def test_every_solver_takes_it(self, solver: pathcond.Exact) -> None:
        model, x = make("mlp")
        symmetry = find_symmetry(model, x)
        solution = pathcond.solve(
            symmetry, {}, criterion=Gradients(self.squared), solver=solver, model=model
        )
        assert solution.gradient_norm < 1e-8

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda values: values * math.nan, "finite, not negative"),
            (lambda values: -values, "finite, not negative"),
            (lambda values: values.flatten()[:1], "have shape"),
        ],
    )
    def test_impossible_energies_are_refused(
        self, change: Callable[[Tensor], Tensor], message: str
    ) -> None:
        class Bad(Criterion):
            def energies(
                self, symmetry: Symmetry, g: Mapping[str, Tensor], model: nn.Module | None
            ) -> dict[str, Tensor]:
                return {
                    name: change(values) if name == "0.weight" else values
                    for name, values in g.items()
                }

        model, x = make("mlp")
        before = state(model)
        with pytest.raises(ValueError, match=message):
            condition_(model, x, criterion=Bad())
        assert unchanged(model, before)

    @pytest.mark.parametrize("weight", [0.0, -1.0, math.nan])
    def test_impossible_weights_are_refused(self, weight: float) -> None:
        class Bad(PathKernel):
            def weights(
                self, symmetry: Symmetry, energies: Mapping[str, Tensor], model: nn.Module | None
            ) -> dict[str, float]:
                return dict.fromkeys(energies, weight)

        model, x = make("mlp")
        with pytest.raises(ValueError, match=r"weights of 0\.weight must be positive"):
            condition_(model, x, criterion=Bad())


class Lopsided(PathKernel):
    """Sees next to no energy in the second layer, and would make it small."""

    def energies(
        self, symmetry: Symmetry, g: Mapping[str, Tensor], model: nn.Module | None
    ) -> dict[str, Tensor]:
        return {
            name: values * (1e-12 if name.startswith("2") else 1.0) for name, values in g.items()
        }


def test_every_criterion_keeps_within_a_factor_of_balance() -> None:
    model, x = make("mlp")
    balance = balance_point(find_symmetry(model, x), model)[0]
    report = condition_(model, x, criterion=Lopsided())
    assert float((report.log_scales - balance).abs().max()) == pytest.approx(WIDTH)
    for criterion in CRITERIA.values():
        model, x = make("mlp")
        scales = condition_(model, x, criterion=criterion).log_scales
        assert float((scales - balance).abs().max()) <= WIDTH


class TestRefusals:
    """A clear sentence, or nothing to do; the model is bit for bit what it was."""

    @staticmethod
    def refused(
        error: type[Exception], message: str, model: nn.Module, inputs: Any, **options: Any
    ) -> None:
        before = state(model)
        with pytest.raises(error, match=message):
            condition_(model, inputs, **options)
        assert unchanged(model, before)

    @pytest.mark.parametrize("criterion", ["curvature", Curvature, Exact()])
    def test_what_is_no_criterion(self, criterion: Any) -> None:
        model, x = make("mlp")
        self.refused(
            TypeError,
            r"criterion must be PathKernel\(\), Curvature\(\)",
            model,
            x,
            criterion=criterion,
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(TypeError, match="criterion must be"):
            pathcond.teleport(optimizer, model, x, criterion=criterion)
        with pytest.raises(TypeError, match="criterion must be"):
            pathcond.solve(find_symmetry(model, x), diag_g(model, x), criterion=criterion)

    def test_enorm_has_a_criterion_of_its_own(self) -> None:
        model, x = make("mlp")
        self.refused(
            ValueError, "criterion of its own", model, x, solver=ENorm(), criterion=Curvature()
        )

    def test_labels_of_another_shape(self) -> None:
        model, x = make("mlp")
        labels = torch.zeros(5, dtype=torch.long)
        loss = Curvature(loss=lambda out: nn.functional.cross_entropy(out, labels))
        self.refused(
            ValueError,
            r"loss of Curvature fails on the model's output for 6 samples \(shapes \(6, 2\)\)",
            model,
            x,
            criterion=loss,
        )

    @pytest.mark.parametrize("loss", [lambda out: out, lambda out: 1.0])
    def test_losses_that_are_no_number(self, loss: Callable[[Tensor], Any]) -> None:
        model, x = make("mlp")
        self.refused(
            ValueError,
            "must return a tensor of a single number",
            model,
            x,
            criterion=Curvature(loss=loss),
        )

    @pytest.mark.parametrize("bad", [math.nan, math.inf])
    def test_losses_that_are_not_finite(self, bad: float) -> None:
        """Though they have no curvature at all."""
        model, x = make("mlp")
        loss = Curvature(loss=lambda out: out.mean() + bad)
        self.refused(
            EnergyRangeError, rf"loss of Curvature is {bad} on the", model, x, criterion=loss
        )

    def test_losses_of_something_else_than_the_output(self) -> None:
        model, x = make("mlp")
        loss = Curvature(loss=lambda out: out.detach().square().mean())
        self.refused(ValueError, "does not depend on the model's output", model, x, criterion=loss)

    def test_outputs_that_are_no_tensors(self) -> None:
        class Wrapped(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.inner = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

            def forward(self, x: Tensor) -> dict[str, Any]:
                return {"logits": self.inner(x), "name": "x", "count": 3}

        torch.manual_seed(0)
        model, x = Wrapped(), torch.randn(6, 3)
        report = condition_(
            model, x, criterion=Curvature(loss=lambda out: out["logits"].square().sum())
        )
        assert report.solution.converged
        assert condition_(model, x, criterion=Curvature()).solution.converged
        self.refused(
            ValueError,
            "loss of Curvature fails",
            model,
            x,
            criterion=Curvature(loss=lambda out: out.sum()),
        )

    def test_a_batch_of_one_in_front_of_a_batch_norm(self) -> None:
        model, x = make("batch_norm_mlp")
        self.refused(
            UnsupportedModelError,
            r"(?s)single value per channel|more than 1 value",
            model,
            x[:1],
            criterion=Curvature(),
        )
        symmetry, g = find_symmetry(model, x), diag_g(model, x)
        with pytest.raises(UnsupportedModelError, match="pass at least two samples"):
            Curvature(samples=1).energies(symmetry, g, model)

    def test_curvature_that_is_not_finite(self) -> None:
        model, x = make("mlp")
        loss = Curvature(loss=lambda out: (0 * out).sqrt().sum())
        self.refused(
            EnergyRangeError, r"curvature of 0\.weight is (nan|inf)", model, x, criterion=loss
        )

    def test_curvature_that_overflows(self) -> None:
        class Large(nn.Sequential):
            def forward(self, x: Tensor) -> Tensor:
                return 1e30 * super().forward(x)

        torch.manual_seed(0)
        model, x = Large(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)), torch.randn(30, 8)
        assert bool(model(x).isfinite().all())
        self.refused(
            EnergyRangeError,
            r"not finite, or so large that their squares overflow torch\.float32 "
            r"\(the largest output is \d\.?\d*e\+(29|30)\)",
            model,
            x,
            criterion=Curvature(),
        )

    @pytest.mark.parametrize("key", sorted(CRITERIA))
    def test_models_without_a_symmetry(self, key: str) -> None:
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        before = state(model)
        report = condition_(model, torch.randn(6, 3), criterion=CRITERIA[key])
        assert report.num_units == 0
        assert "nothing can be rescaled" in report.solution.message
        assert unchanged(model, before)

    def test_a_loss_without_curvature_leaves_nothing_to_do(self) -> None:
        model, x = make("mlp")
        before = state(model)
        report = condition_(model, x, criterion=Curvature(loss=lambda out: out.sum()))
        assert "nothing to condition" in report.solution.message
        assert unchanged(model, before)
        assert str(report).startswith(f"Sequential is as it was: {report.num_units} units")

    @pytest.mark.parametrize("settings", [{"samples": 0}, {"steps": 0}])
    def test_bad_settings_of_curvature(self, settings: dict) -> None:
        with pytest.raises(ValueError, match="Curvature needs"):
            Curvature(**settings)
        with pytest.raises(TypeError, match="loss must be a function"):
            Curvature(loss="mse")  # type: ignore[arg-type]

    @pytest.mark.parametrize("p", [0, -1, math.inf, math.nan])
    def test_bad_settings_of_balanced_norms(self, p: float) -> None:
        with pytest.raises(ValueError, match="BalancedNorms needs"):
            BalancedNorms(p=p)


@pytest.mark.parametrize("key", sorted(CRITERIA))
def test_teleports_take_criteria(key: str) -> None:
    model, x = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    handle = pathcond.teleport(optimizer, model, x, every=1, criterion=CRITERIA[key])
    model(x).square().mean().backward()
    optimizer.step()
    assert handle.teleports == 1
    assert handle.report is not None
    assert handle.report.criterion == repr(CRITERIA[key])


def test_callbacks_pass_criteria_on() -> None:
    model, x = make("mlp")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    training = ConditionedTraining(x, every=1, criterion=Curvature(), pace="keep")
    training.start(model, optimizer, x, fresh=True, counts=counts_at(0, 0), epochs=0)
    assert training.report is not None
    assert "sum of its energies is as it was" in training.report.solution.message
    model(x).square().mean().backward()
    optimizer.step()
    assert training.teleportation is not None
    assert training.teleportation.teleports == 1
    assert training.report.criterion == repr(Curvature())
    training.stop()
