"""The criterion in block form is the criterion written out parameter by parameter."""

import math

import pytest
import torch
from torch import Tensor

import pathcond
from pathcond import Symmetry, diag_g, find_symmetry
from pathcond.criteria.problem import Problem, sides_of

from .cases import diagonal, families, make, prepared
from .zoo import NORMALIZATIONS


def written_out(symmetry: Symmetry, g: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """K (p, num_units) and g (p,) of the parameters that count and have g > 0, from the factors of
    one log-scale at a time.
    """
    g = {name: values for name, values in g.items() if name not in symmetry.uncounted}
    units = torch.eye(symmetry.num_units, dtype=torch.float64)
    factors = [symmetry.factors(unit) for unit in units]
    K = [torch.stack([f[name].log().reshape(-1) for f in factors], 1) for name in g]
    flat = torch.cat([values.reshape(-1) for values in g.values()])
    return torch.cat(K)[flat > 0].round(), flat[flat > 0]


def objective(exponents: Tensor, g: Tensor, u: Tensor, weights: Tensor | None = None) -> Tensor:
    """eq. optim_with_bz, with B = −K; or the same with weights other than 1, (p,)."""
    w = torch.ones_like(g) if weights is None else weights
    return w.sum() * torch.logsumexp(g.log() - exponents @ u, 0) + w @ (exponents @ u)


def random_weights(g: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Over three decades, for every entry."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 10 ** (3 * torch.rand(values.shape, generator=generator, dtype=torch.float64) - 1.5)
        for name, values in g.items()
    }


@pytest.mark.parametrize(("name", "normalization"), families(NORMALIZATIONS))
def test_value_gradient_and_hessian(name: str, normalization: str) -> None:
    symmetry = prepared(name, normalization, approximate=True).symmetry
    if not symmetry.num_units:
        assert normalization != "full", "the case would test nothing"
        return
    g = diagonal(name)
    problem, (K, flat) = Problem.of(symmetry, g), written_out(symmetry, g)
    assert problem.weight == len(flat)
    u = torch.randn(symmetry.num_units, dtype=torch.float64, requires_grad=True)
    d = torch.randn(symmetry.num_units, dtype=torch.float64)
    expected = objective(K, flat, u)
    (gradient,) = torch.autograd.grad(expected, u, create_graph=True)
    (curvature,) = torch.autograd.grad(gradient @ d, u)
    point = problem.at(u.detach())
    scale = 1e-12 * len(flat)
    assert point.value == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(point.gradient, gradient.detach(), rtol=1e-10, atol=scale)
    torch.testing.assert_close(point.hessian_product(d), curvature, rtol=1e-9, atol=10 * scale)


@pytest.mark.parametrize(
    "name",
    ["mlp", "resnet", "densenet", "used_twice", "self_edge", "square", "vit", "transposed_grouped"],
)
def test_weights_beside_energies(name: str) -> None:
    symmetry, g = prepared(name, "full").symmetry, diagonal(name)
    weights = random_weights(g, seed=0)
    K, flat = written_out(symmetry, g)
    w = torch.cat(
        [weights[name][values > 0] for name, values in g.items() if name not in symmetry.uncounted]
    )
    u = torch.randn(symmetry.num_units, dtype=torch.float64, requires_grad=True)
    expected = objective(K, flat, u, w)
    (gradient,) = torch.autograd.grad(expected, u)
    point = Problem.of(symmetry, g, weights=weights).at(u.detach())
    assert point.problem.weight == pytest.approx(float(w.sum()))
    assert point.value == pytest.approx(float(expected.detach()), rel=1e-12)
    torch.testing.assert_close(point.gradient, gradient, rtol=1e-9, atol=1e-12 * float(w.sum()))
    alike = Problem.of(symmetry, g, weights=dict.fromkeys(g, 1.0)).at(u.detach())
    assert alike.value == pytest.approx(Problem.of(symmetry, g).at(u.detach()).value, rel=1e-14)


def test_the_gradient_is_that_of_the_rescaled_model_at_zero() -> None:
    """F at u of the model is F at 0 of the model rescaled by t = u/2: signs, squares and factors of
    two all show here.
    """
    model, inputs = make("resnet")
    symmetry = find_symmetry(model, inputs, normalization="paper")
    u = torch.randn(symmetry.num_units, dtype=torch.float64)
    before = Problem.of(symmetry, diag_g(model, inputs)).at(u)
    pathcond.rescale_(model, symmetry, u / 2)
    after = Problem.of(symmetry, diag_g(model, inputs)).at(torch.zeros_like(u))
    torch.testing.assert_close(after.gradient, before.gradient, rtol=1e-9, atol=1e-8)
    assert after.value + float(before.problem.slope @ u) == pytest.approx(before.value, rel=1e-12)


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_impossible_diagonals_are_refused(bad: float) -> None:
    model, inputs = make("mlp")
    symmetry, g = find_symmetry(model, inputs), diag_g(model, inputs)
    g["0.weight"][0, 0] = bad
    with pytest.raises(ValueError, match=r"finite, not negative"):
        Problem.of(symmetry, g)
    with pytest.raises(ValueError, match="positive somewhere"):
        Problem.of(symmetry, {name: torch.zeros_like(values) for name, values in g.items()})


def test_solving_changes_neither_the_diagonal_nor_the_symmetry() -> None:
    model, inputs = make("resnet")
    symmetry, g = find_symmetry(model, inputs, normalization="full"), diag_g(model, inputs)
    kept = {name: values.clone() for name, values in g.items()}
    first = pathcond.solve(symmetry, g)
    assert all(torch.equal(values, kept[name]) for name, values in g.items())
    assert torch.equal(pathcond.solve(symmetry, g).log_scales, first.log_scales)


@pytest.mark.parametrize(("name", "normalization"), families(NORMALIZATIONS))
def test_sides_are_those_of_a_problem(name: str, normalization: str) -> None:
    symmetry, (model, _) = prepared(name, normalization).symmetry, make(name)
    values = {
        name: torch.rand(parameter.shape, dtype=torch.float64) + 0.1
        for name, parameter in model.named_parameters()
        if name in symmetry.scalings
    }
    if not values:
        assert normalization != "full", "the case would test nothing"
        return
    problem = Problem.of(symmetry, values)
    found = sides_of(symmetry, values)
    for side, expected in zip(found, problem.at(problem.zero()).sides, strict=True):
        torch.testing.assert_close(side, expected * math.exp(problem.log_total))
    exponents, flat = written_out(symmetry, values)
    torch.testing.assert_close(found[0] - found[1], exponents.T @ flat)
