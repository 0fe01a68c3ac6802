"""The oracles against hand-made cases and against the paper's own statements, cited by their
labels.
"""
# ruff: noqa: N803  the paper's capitals for matrices

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from scipy.optimize import linprog, minimize_scalar
from torch import Tensor, nn
from torch.nn import functional as F

import pathcond
from pathcond import reference
from pathcond.reference import (
    FROBENIUS,
    LOGDET,
    VON_NEUMANN,
    Paths,
    enumerate_paths,
    parameter_vector,
)

from .cases import Calls
from .strategies import MOST_PATHS, examples, path_networks
from .zoo import randomise

DIVERGENCES = (LOGDET, FROBENIUS, VON_NEUMANN)


def mlp(*widths: int, bias: bool = True) -> nn.Sequential:
    layers = [
        part
        for a, b in itertools.pairwise(widths)
        for part in (nn.Linear(a, b, bias=bias), nn.ReLU())
    ]
    return nn.Sequential(*layers[:-1])


def skip(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    h = h + F.relu(self.b(h))
    out = self.c(h)
    out += h
    return self.d(out)


def concat(self: Any, x: Tensor) -> Tensor:
    h = F.relu(self.a(x))
    return self.c(torch.cat([h, F.relu(self.b(h))], 1))


def spellings(self: Any, x: Tensor) -> Tensor:
    left, right = (x @ self.w + self.b).clamp(min=0).chunk(2, 1)
    h = (
        torch.cat([right[:, [1, 0]], 2.5 * left, F.pad(right, (1, -1))], 1)
        .view(-1, 2, 3)
        .transpose(1, 2)
        .flatten(1)
    )
    written = h.clone()
    written[:, 1:3] = (h[:, 3:5] * self.scale).abs()
    last = torch.sub(-h[:, 5:], written[:, 4:].mean(1, keepdim=True) / 3, alpha=2)
    # What is overwritten is read once more: a unit that no output depends on keeps its scale.
    return torch.cat([written, last, h[:, 1:2]], 1) @ self.v.t()


def twice(self: Any, x: Tensor) -> Tensor:
    return self.out(F.relu(self.w(F.relu(self.w(x)))))


def bare(**shapes: tuple[int, ...]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


def convolutions(*layers: nn.Module) -> tuple[nn.Module, Tensor]:
    """Layers on an image of as many channels as the first one wants."""
    return nn.Sequential(*layers), torch.randn(1, layers[0].in_channels, 4, 3)


NETWORKS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "mlp": lambda: (mlp(2, 3, 3, 2), torch.randn(1, 2)),
    "mlp_without_bias": lambda: (mlp(2, 3, 3, 2, bias=False), torch.randn(1, 2)),
    "skip": lambda: (
        Calls(skip, a=nn.Linear(2, 3), b=nn.Linear(3, 3), c=nn.Linear(3, 3), d=nn.Linear(3, 2)),
        torch.randn(1, 2),
    ),
    "concat": lambda: (
        Calls(concat, a=nn.Linear(2, 3), b=nn.Linear(3, 2), c=nn.Linear(5, 2)),
        torch.randn(1, 2),
    ),
    "spellings": lambda: (
        Calls(spellings, **bare(w=(2, 4), b=(4,), scale=(2,), v=(3, 8))),
        torch.randn(1, 2),
    ),
    "used_twice": lambda: (
        Calls(twice, w=nn.Linear(2, 2, bias=False), out=nn.Linear(2, 2)),
        torch.randn(1, 2),
    ),
    "conv_1d": lambda: (
        nn.Sequential(nn.Conv1d(2, 3, 2), nn.ReLU(), nn.MaxPool1d(2), nn.Conv1d(3, 2, 1)),
        torch.randn(1, 2, 5),
    ),
    "max_pool": lambda: convolutions(
        nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1), nn.Conv2d(2, 2, 2)
    ),
    "max_pool_dilated": lambda: convolutions(
        nn.Conv2d(1, 2, 2, padding=1),
        nn.MaxPool2d(2, 3, 1, dilation=2, ceil_mode=True),
        nn.Conv2d(2, 1, 1),
    ),
    "strided": lambda: convolutions(
        nn.Conv2d(1, 2, (3, 2), (2, 1), (1, 0), dilation=(1, 2)),
        nn.LeakyReLU(0.3),
        nn.Conv2d(2, 2, 2, padding="same"),
    ),
    "average_pool": lambda: convolutions(
        nn.Conv2d(2, 2, 2),
        nn.ReLU(),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True),
        nn.AdaptiveAvgPool2d((3, 2)),
        nn.Conv2d(2, 2, 2),
    ),
    "average_uncounted": lambda: convolutions(
        nn.Conv2d(1, 2, 2),
        nn.ReLU(),
        nn.AvgPool2d(2, 2, 1, True, False),
        nn.Flatten(2),
        nn.AvgPool1d(2),
        nn.Conv1d(2, 2, 1),
    ),
    "grouped": lambda: convolutions(
        nn.Conv2d(2, 4, 2, groups=2),
        nn.ReLU(),
        nn.Conv2d(4, 4, 2, groups=4),
        nn.ReLU(),
        nn.Conv2d(4, 1, 1),
    ),
    "transposed": lambda: convolutions(
        nn.Conv2d(2, 2, 2, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(2, 2, 3, 2, 1, 1, groups=2),
        nn.Conv2d(2, 1, 1),
    ),
    "batch_norm": lambda: convolutions(
        nn.Conv2d(1, 2, 2),
        nn.BatchNorm2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 2),
        nn.BatchNorm1d(2),
    ),
}
PLAIN = [name for name in NETWORKS if name != "batch_norm"]


def built(name: str, *, mean: bool = False) -> tuple[nn.Module, Tensor]:
    """A network in float64 eval mode with nothing at zero but, unless asked for, the running
    means.
    """
    model, x = NETWORKS[name]()
    model = model.double().eval()
    randomise(model)
    for buffer_name, buffer in model.named_buffers():
        if buffer_name.endswith("running_mean") and not mean:
            buffer.zero_()
    return model, x.double()


def forward_of(model: nn.Module, x: Tensor) -> Callable[[Tensor], Tensor]:
    """θ ↦ the flat output at x."""

    def forward(theta: Tensor) -> Tensor:
        parameters = dict(model.named_parameters())
        parts = theta.split([p.numel() for p in parameters.values()])
        values = {
            name: part.view(p.shape)
            for (name, p), part in zip(parameters.items(), parts, strict=True)
        }
        return torch.func.functional_call(model, values, (x,)).flatten()

    return forward


def features(paths: Paths, model: nn.Module, x: Tensor) -> Tensor:
    """Z(x, θ): the rows A_out(θ, x) (x; 1), (outputs, q)."""
    return paths.activations(model, x) @ torch.cat([x.flatten(), x.new_ones(1)])


def generators(model: nn.Module, x: Tensor, normalization: Any = "gain") -> Tensor:
    """K: log of the factors of all parameters for each unit's log-scale 1, (p, H)."""
    symmetry = pathcond.find_symmetry(model, x.expand(2, *x.shape[1:]), normalization=normalization)
    names = [name for name, _ in model.named_parameters()]
    columns = [
        symmetry.factors(unit) for unit in torch.eye(symmetry.num_units, dtype=torch.float64)
    ]
    flat = [torch.cat([column[name].log().flatten() for name in names]) for column in columns]
    K = (
        torch.stack(flat, 1)
        if flat
        else torch.zeros(len(parameter_vector(model)), 0, dtype=torch.float64)
    )
    torch.testing.assert_close(K, K.round())
    return K.round()


def rank(matrix: Tensor) -> int:
    return int(torch.linalg.matrix_rank(matrix.double(), rtol=1e-9)) if matrix.numel() else 0


# 1  By hand (def. path_lifting)


def test_toy_example_lifts_to_uv_and_uw() -> None:
    """fig. toy_example: u·relu(v x + w) has Φ = (uv, uw)."""
    model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False))
    paths = enumerate_paths(model, torch.ones(1, 1))
    v, w, u = theta = parameter_vector(model)
    assert torch.equal(paths.lift(theta), torch.stack([u * v, u * w]))
    expected = torch.stack([torch.stack([u, 0 * u, v]), torch.stack([0 * u, u, w])])
    assert torch.equal(paths.jacobian(theta), expected)
    torch.testing.assert_close(torch.func.jacrev(paths.lift)(theta), expected)


def test_two_layers_by_hand() -> None:
    """2-2-1: θ = (w00, w01, w10, w11, b0, b1, v0, v1, c) at positions 0 … 8."""
    paths = enumerate_paths(mlp(2, 2, 1), torch.zeros(1, 2))
    found = {(path.parameters, path.input, path.output, len(path.gates)) for path in paths}
    assert len(paths) == len(found)
    assert found == {
        ((0, 6), 0, 0, 1),
        ((1, 6), 1, 0, 1),
        ((4, 6), None, 0, 1),
        ((2, 7), 0, 0, 1),
        ((3, 7), 1, 0, 1),
        ((5, 7), None, 0, 1),
        ((8,), None, 0, 0),
    }


def test_max_pool_has_one_path_per_entry_of_the_window_and_average_pool_its_share() -> None:
    x = torch.randn(1, 1, 3, 3)
    overlapping = enumerate_paths(nn.MaxPool2d(3, 2, padding=1), x)
    assert len(overlapping) == 16  # four windows of 2 × 2 entries inside the image
    assert all(path.coefficient == 1 and len(path.gates) == 1 for path in overlapping)
    assert [path.coefficient for path in enumerate_paths(nn.AvgPool2d(3, 2, padding=1), x)] == [
        1 / 9
    ] * 16
    uncounted = enumerate_paths(nn.AvgPool2d(3, 2, padding=1, count_include_pad=False), x)
    assert [path.coefficient for path in uncounted] == [1 / 4] * 16


def test_batch_norm_gives_gamma_over_sigma_and_its_mean_starts_no_path() -> None:
    norm = nn.BatchNorm1d(1).double().eval()
    norm.running_mean.fill_(3.0)
    norm.running_var.fill_(4.0 - norm.eps)
    through, start = enumerate_paths(norm, torch.zeros(1, 1).double())
    assert (through.parameters, through.coefficient, through.input) == ((0,), 0.5, 0)
    assert (start.parameters, start.coefficient, start.input) == ((1,), 1.0, None)


def test_writing_into_a_constant_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        z = torch.zeros(1, 4, dtype=x.dtype)
        z[:, :2] = self.a(x)
        return self.b(z)

    with pytest.raises(NotImplementedError, match="writes into a constant"):
        enumerate_paths(Calls(forward, a=nn.Linear(3, 2), b=nn.Linear(4, 2)), torch.ones(1, 3))


def test_what_has_no_paths_is_refused_by_name() -> None:
    x = torch.randn(1, 2)
    for name, forward in {
        "sigmoid": torch.sigmoid,
        "a product of two activations": lambda h: h * h,
        "adds a constant": lambda h: h + 1.0,
        "bounds 1": lambda h: h.clamp(min=1),
        "pad with mode": lambda h: F.pad(h, (1, 1), value=2.0),
    }.items():
        with pytest.raises(NotImplementedError, match=name):
            enumerate_paths(Calls(lambda self, x, f=forward: f(self.a(x)), a=nn.Linear(2, 2)), x)
    with pytest.raises(ValueError, match=r"shape \(2, 2\)"):
        enumerate_paths(mlp(2, 2), torch.randn(2, 2))
    with pytest.raises(ValueError, match=r"x has shape|input has shape"):
        enumerate_paths(mlp(2, 2), x).activations(mlp(2, 2), torch.randn(3, 2))
    with pytest.raises(ValueError, match="limit=5"):
        enumerate_paths(mlp(2, 2), x, limit=5)
    assert len(enumerate_paths(mlp(2, 2), x, limit=6)) == 6


# 2, 3  The factorisations


@pytest.mark.parametrize("name", NETWORKS)
def test_output_and_ntk_factorise(name: str) -> None:
    """eq. output_factorization and eq. NTK_decouples: v(x) = Z Φ and K(x, x') = Z(x) P Z(x')ᵀ."""
    model, x = built(name)
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    y = torch.randn_like(x)
    Z, Z_y = features(paths, model, x), features(paths, model, y)
    torch.testing.assert_close(Z @ paths.lift(theta), model(x).flatten())
    torch.testing.assert_close(Z_y @ paths.lift(theta), model(y).flatten())
    J, J_y = (torch.func.jacrev(forward_of(model, sample))(theta) for sample in (x, y))
    torch.testing.assert_close(Z @ paths.jacobian(theta), J)
    torch.testing.assert_close(Z @ paths.path_kernel(theta) @ Z_y.T, J @ J_y.T)


@examples(25)
@given(path_networks())
def test_random_networks_factorise_and_keep_their_lift(network: tuple[nn.Module, Tensor]) -> None:
    """eq. output_factorization without running means, and Φ^-1(1)+ ⊇ the library's symmetries
    (lemma dcal_characterization).
    """
    model, x = network
    paths = enumerate_paths(model, x, limit=MOST_PATHS)
    K = generators(model, x)
    assert not (paths.exponents().double() @ K).any()
    for name, buffer in model.named_buffers():
        if name.endswith("running_mean"):
            buffer.zero_()
    torch.testing.assert_close(
        features(paths, model, x) @ paths.lift(parameter_vector(model)), model(x).flatten()
    )


# 4, 5  The symmetry group


@pytest.mark.parametrize("name", NETWORKS)
def test_lift_is_invariant_and_its_jacobian_follows(name: str) -> None:
    """lemma path_properties and eq. path_lifting_invariance: Φ(Dθ) = Φ(θ), ∂Φ(Dθ) = ∂Φ(θ) D⁻¹."""
    model, x = built(name, mean=True)
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    K = generators(model, x)
    assert K.shape[1] > 0
    d = (K @ torch.randn(K.shape[1], dtype=torch.float64)).exp()
    torch.testing.assert_close(paths.lift(d * theta), paths.lift(theta))
    torch.testing.assert_close(paths.jacobian(d * theta), paths.jacobian(theta) / d)


@pytest.mark.parametrize("normalization", ["absorb", "gain", "full", "paper"])
def test_lift_is_invariant_when_statistics_move_too(normalization: Any) -> None:
    model, x = built("batch_norm", mean=True)
    before = enumerate_paths(model, x).lift(parameter_vector(model))
    symmetry = pathcond.find_symmetry(model, x.expand(2, -1, -1, -1), normalization=normalization)
    pathcond.rescale_(model, symmetry, torch.randn(symmetry.num_units).double(), verify=False)
    torch.testing.assert_close(enumerate_paths(model, x).lift(parameter_vector(model)), before)


@pytest.mark.parametrize("name", PLAIN)
def test_the_group_is_what_keeps_the_lift(name: str) -> None:
    """lemma dcal_characterization: exponents · log d = 0 has the library's units as its basis, with
    hidden biases or without.
    """
    model, x = built(name)
    exponents, K = enumerate_paths(model, x).exponents(), generators(model, x)
    # a tap that only ever meets padding, or what is overwritten later, is on no path
    used = exponents.any(0)
    assert not (exponents.double() @ K).any()
    assert rank(K) == K.shape[1]
    assert rank(K[used]) == int(used.sum()) - rank(exponents[:, used]) > 0


def test_shared_weights_without_bias_may_have_more_symmetries_than_channels() -> None:
    """lemma dcal_characterization is about graphs without weight sharing. One pixel in, a kernel of
    two with padding 1:

    each tap of the kernel then serves one pixel only, and each pixel is a neuron with a scale of
    its own. A bias, which both pixels share, ties the two scales.
    """
    for bias, dimension in ((False, 2), (True, 1)):
        model = nn.Sequential(
            nn.Conv1d(1, 1, 2, padding=1, bias=bias), nn.ReLU(), nn.Conv1d(1, 1, 2, bias=bias)
        ).double()
        x = torch.randn(1, 1, 1).double()
        exponents = enumerate_paths(model, x).exponents()
        assert exponents.shape[1] - rank(exponents) == dimension
        assert pathcond.find_symmetry(model, x).num_units == 1


def test_batch_norm_lets_weights_and_gain_trade_in_the_lift_only() -> None:
    """Φ does not see the running mean, so w·λ, γ/λ keeps Φ, while it changes the function: Φ^-1(1)+
    is larger than any group.
    """
    model, x = built("batch_norm", mean=True)
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    exponents = paths.exponents()
    nullity = exponents.shape[1] - rank(exponents)
    # front and behind of two channels, and weights against gain of two outputs
    assert nullity == 2 + 2 + 2
    d = torch.ones_like(theta)
    sizes = [p.numel() for p in model.parameters()]  # conv weight, bias, gamma, …
    d[: sizes[0] + sizes[1]], d[sizes[0] + sizes[1] :][: sizes[2]] = 2.0, 0.5
    torch.testing.assert_close(paths.lift(d * theta), paths.lift(theta))
    assert (forward_of(model, x)(d * theta) - forward_of(model, x)(theta)).abs().max() > 1e-3


# 6  Divergences (sec. breg_div)


@pytest.mark.parametrize("kind", DIVERGENCES, ids=lambda kind: kind.name)
def test_transpose_does_not_matter_for_the_divergence_over_nonzero_eigenvalues(
    kind: reference.Divergence,
) -> None:
    """lemma reverse_transpose, with A of rank 3."""
    A = (torch.randn(7, 3) @ torch.randn(3, 5)).double()
    left = reference.divergence_plus(A @ A.T, torch.eye(7), kind)
    assert left == pytest.approx(reference.divergence_plus(A.T @ A, torch.eye(5), kind), rel=1e-9)
    assert left == pytest.approx(
        reference.divergence_plus(A @ A.T, torch.eye(7), kind, rank=3), rel=1e-12
    )


def test_transpose_does_matter_for_the_whole_divergence() -> None:
    """Only d₊ has the property that the main text claims for every spectral divergence: Frobenius
    differs by q − p.
    """
    A = torch.randn(7, 5).double()
    whole = [reference.divergence(M, torch.eye(len(M)), FROBENIUS) for M in (A @ A.T, A.T @ A)]
    assert whole[0] - whole[1] == pytest.approx(7 - 5)


def test_divergences_have_their_closed_forms() -> None:
    """eq. bregman_div_matric for the Frobenius norm, the logdet and the von Neumann divergence;
    lemma totheloss.
    """
    X, Y = (M @ M.T for M in torch.randn(2, 4, 4).double())
    assert reference.divergence(X, Y, FROBENIUS) == pytest.approx(float((X - Y).square().sum()))
    quotient = X @ torch.linalg.inv(Y)
    logdet = float(quotient.trace() - torch.linalg.slogdet(quotient).logabsdet - 4)
    assert reference.divergence(X, Y) == pytest.approx(logdet, rel=1e-8)
    assert reference.divergence_plus(X, Y) == pytest.approx(logdet, rel=1e-8)
    log_x, log_y = (V @ values.log().diag() @ V.T for values, V in map(torch.linalg.eigh, (X, Y)))
    von_neumann = float((X @ log_x - X @ log_y - X + Y).trace())
    assert reference.divergence(X, Y, VON_NEUMANN) == pytest.approx(von_neumann, rel=1e-8)
    A = (torch.randn(6, 2) @ torch.randn(2, 5)).double()
    sigma = torch.linalg.svdvals(A)[:2]
    total = float(A.square().sum() - 2 * sigma.log().sum() - 2)
    assert reference.divergence_plus(A @ A.T, torch.eye(6)) == pytest.approx(total, rel=1e-9)


# 7, 8, 9  The criterion (sec. pathcondopt, sec. G_matrix)


@pytest.fixture
def problem() -> tuple[Paths, Tensor, Tensor, Tensor]:
    """MLP 2-3-3-2 with biases: its paths, θ (29,), K (29, 6) and J = ∂Φ(θ)."""
    model, x = built("mlp")
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    return paths, theta, generators(model, x), paths.jacobian(theta)


Problem = tuple[Paths, Tensor, Tensor, Tensor]


def objective(K: Tensor, g: Tensor, u: Tensor) -> float:
    """F(u) of eq. optim_with_bz_2, with B = −K."""
    return float(len(g) * (g.log() - K @ u).logsumexp(0) + (K @ u).sum())


def test_first_formula_and_the_best_alpha(problem: Problem) -> None:
    """eq. FirstFormula, both sides through P, G and the compact SVD; eq. MinAlphaOnly against a
    search over α.
    """
    paths, theta, K, J = problem
    g = J.square().sum(0)
    for _ in range(3):
        d = (K @ torch.randn(6).double() / 2).exp()
        alpha = float(torch.rand(()) + 0.1)
        formula = reference.plus_logdet_of_rescaling(J, d, alpha)
        G, P = paths.metric(d * theta), paths.path_kernel(d * theta)
        assert reference.divergence_plus(alpha * G, torch.eye(29), rank=23) == pytest.approx(
            formula, rel=1e-9
        )
        assert reference.divergence_plus(alpha * P, torch.eye(len(P)), rank=23) == pytest.approx(
            formula, rel=1e-9
        )
        best = minimize_scalar(
            lambda a, d=d: reference.plus_logdet_of_rescaling(J, d, math.exp(a)), bracket=(-5, 0)
        )
        total = float((g / d.square()).sum())
        closed = (
            -23 * math.log(23)
            + 23 * math.log(total)
            - float(torch.linalg.eigvalsh(G)[-23:].log().sum())
        )
        assert math.exp(best.x) == pytest.approx(23 / total, rel=1e-5)
        assert best.fun == pytest.approx(closed, rel=1e-9)


def test_rank_is_below_p_by_the_number_of_units_and_the_criterion_follows(problem: Problem) -> None:
    """rank ∂Φ = p − H, so that r = p of prop. equiv_convex_problem never happens, and D₊(u)."""
    _, theta, K, J = problem
    assert (J.shape[1], K.shape[1], rank(J)) == (29, 6, 23)
    # the kernel of ∂Φ
    torch.testing.assert_close(J @ (theta[:, None] * K), torch.zeros(len(J), 6).double())
    g = J.square().sum(0)
    gaps = []
    for u in (torch.zeros(6), torch.randn(6), 3 * torch.randn(6)):
        d = (K @ u.double() / 2).exp()
        alpha = 23 / float((g / d.square()).sum())
        gaps.append(
            reference.plus_logdet_of_rescaling(J, d, alpha)
            - reference.rescaled_divergence(K, theta, g, u)
        )
        direct = reference.divergence_plus(alpha * (J / d).T @ (J / d), torch.eye(29), rank=23)
        assert direct == pytest.approx(reference.plus_logdet_of_rescaling(J, d, alpha), abs=1e-7)
    assert max(gaps) - min(gaps) < 1e-9


def test_b_generates_the_group_and_does_not_span_one(problem: Problem) -> None:
    """lemma rewriting: D = diag(exp(Bu)), B by the definition of in_h and out_h; lemma notinB: 1 is
    not in span(B).
    """
    K = problem[2]
    shapes = [(3, 2), (3,), (3, 3), (3,), (2, 3), (2,)]  # hidden units 0 … 2 and 3 … 5
    made, read = (
        [range(3), range(3), range(3, 6), range(3, 6), None, None],
        [None, None, range(3), None, range(3, 6), None],
    )
    rows = []
    for shape, outs, ins in zip(shapes, made, read, strict=True):
        for index in np.ndindex(*shape):
            row = np.zeros(6)
            if outs is not None:
                row[outs[index[0]]] = -1
            if ins is not None:
                row[ins[index[-1]]] = 1
            rows.append(row)
    assert sorted(map(tuple, np.array(rows).T)) == sorted(map(tuple, -K.T.numpy()))
    residual = np.linalg.lstsq(K.numpy(), np.ones(29), rcond=None)[1]
    assert residual[0] > 1


def test_f_grows_at_least_linearly(problem: Problem) -> None:
    """lemma coercive_property: F(u) ≥ p·c + β‖u‖ with β > 0, the least β from linear programs over
    the faces of a cube.
    """
    K, g = problem[2], problem[3].square().sum(0)
    B, (p, H) = -K.numpy(), K.shape
    # α(u) = Σ_i (m − (Bu)_i), m ≥ (Bu)_k for all k, over the faces u_h = ±1 of the cube |u| ≤ 1;
    # ‖u‖₂ ≤ √H ‖u‖_∞
    on_face = [
        [(s, s) if j == h else (-1, 1) for j in range(H)] + [(None, None)]
        for h in range(H)
        for s in (-1, 1)
    ]
    cost, above = np.append(-B.sum(0), p), np.hstack([B, -np.ones((p, 1))])
    beta = min(
        linprog(cost, above, np.zeros(p), bounds=bounds).fun for bounds in on_face
    ) / math.sqrt(H)
    c = float(g.log().min())
    assert beta > 0.1
    for u in torch.randn(20, H).double():
        values = [objective(K, g, scale * u) for scale in (0, 1, 10, 100, 1000)]
        assert all(
            value >= p * c + beta * scale * float(u.norm())
            for value, scale in zip(values, (0, 1, 10, 100, 1000), strict=True)
        )
        assert values[4] > values[3] > values[2]


def test_coercivity_needs_more_than_the_paper_asks() -> None:
    """lemma coercive_property misses the case Bu = 0: this B ≠ 0 does not span 1, and F is constant
    along (1, −1).

    A network's own B is injective, by the inputs that reach each of its neurons: the group test
    above checks that.
    """
    B, g = torch.tensor([[1.0, 1.0], [-1.0, -1.0]]).double(), torch.ones(2).double()
    direction = torch.tensor([1.0, -1.0]).double()
    assert objective(-B, g, 1000 * direction) == objective(-B, g, 0 * direction)


def test_positive_root_minimises_one_coordinate(problem: Problem) -> None:
    """lemma calculate_degree_pol: B(A + p) X² + A D X + C(A − p) = 0 at X = e^(u_h)."""
    K, g = problem[2], problem[3].square().sum(0)
    B, p = -K, len(K)
    u = torch.randn(6).double()
    for h in range(6):
        rho = (B @ u - B[:, h] * u[h]).exp() * g
        a = float((B[:, h] < 0).sum() - (B[:, h] > 0).sum())
        b, c, d = (float(rho[where].sum()) for where in (B[:, h] > 0, B[:, h] < 0, B[:, h] == 0))
        roots = np.roots([b * (a + p), a * d, c * (a - p)])
        positive = [float(root.real) for root in roots if root.real > 0]
        assert len(positive) == 1

        def along(value: float, h: int = h) -> float:
            return objective(K, g, torch.where(torch.arange(6) == h, value, u))

        assert math.log(positive[0]) == pytest.approx(
            minimize_scalar(along, bracket=(-3, 3), tol=1e-10).x, abs=1e-5
        )


@pytest.mark.parametrize("name", NETWORKS)
def test_diagonal_of_g_is_the_gradient_of_the_squared_path_norm(name: str) -> None:
    """eq. diag_g: ∇_{θ²} ‖Φ‖². A parameter that is m times on a path counts m² there in G and m in
    the gradient.
    """
    model, x = built(name)
    paths, theta = enumerate_paths(model, x), parameter_vector(model)
    squares = torch.tensor([path.coefficient**2 for path in paths]).double()
    exponents = paths.exponents().double()

    def squared_norm(omega: Tensor) -> Tensor:
        return (squares * omega.expand(exponents.shape).pow(exponents).prod(1)).sum()

    gradient = torch.func.grad(squared_norm)(theta.square())
    diagonal = paths.metric(theta).diag()
    if name == "used_twice":
        excess = (
            exponents * (exponents - 1) * (paths.lift(theta).square()[:, None] / theta.square())
        ).sum(0)
        assert excess.max() > 0.01
        torch.testing.assert_close(diagonal, gradient + excess)
    else:
        torch.testing.assert_close(diagonal, gradient)


# 10  Flows (sec. GDPhiSpace)


def test_ideal_flow_of_a_quadratic_is_exponential() -> None:
    M = torch.randn(3, 3).double()
    A, target = M @ M.T + torch.eye(3), torch.randn(3).double()
    z0 = torch.randn(3).double()
    path = reference.ideal_flow(
        lambda z: (z - target) @ A @ (z - target) / 2, z0, time=1.0, steps=200
    )
    torch.testing.assert_close(
        path[-1], target + torch.linalg.matrix_exp(-A) @ (z0 - target), rtol=1e-7, atol=1e-9
    )
    torch.testing.assert_close(
        path[100], target + torch.linalg.matrix_exp(-A / 2) @ (z0 - target), rtol=1e-7, atol=1e-9
    )


def test_runge_kutta_has_order_four() -> None:
    ends = [
        reference.gradient_flow(lambda x: x.square().sum() / 2, torch.ones(1), time=1.0, steps=n)[
            -1
        ]
        for n in (10, 20)
    ]
    errors = [abs(float(end) - math.exp(-1)) for end in ends]
    assert 14 < errors[0] / errors[1] < 18


def velocities(trajectory: Tensor, h: float) -> Tensor:
    """z' at every second point, by central differences of order 4."""
    return (trajectory[:-4] - 8 * trajectory[1:-3] + 8 * trajectory[3:-1] - trajectory[4:]) / (
        12 * h
    )


@pytest.mark.parametrize("widths", [(1, 1, 1), (2, 2, 2)])
def test_lifted_velocity_is_p_and_q_times_the_ideal_one(widths: tuple[int, ...]) -> None:
    """eq. path_dyn: z' = −P ∇ℓ under gradient flow; eq. phi_noneuclidean_gradient_flow: z' = −Q ∇ℓ
    under its natural one.
    """
    model = mlp(*widths).double()
    randomise(model)
    paths, theta0 = (
        enumerate_paths(model, torch.ones(1, widths[0]).double()),
        parameter_vector(model),
    )
    target = torch.randn(len(paths)).double()

    def lifted_loss(z: Tensor) -> Tensor:
        return (z - target).square().sum() / 2

    def loss(theta: Tensor) -> Tensor:
        return lifted_loss(paths.lift(theta))

    h, steps = 0.0005, 20
    plain = reference.gradient_flow(loss, theta0, time=h * steps, steps=steps)
    natural = reference.natural_gradient_flow(loss, paths.lift, theta0, time=h * steps, steps=steps)
    for trajectory, matrix in (
        (plain, lambda J: J @ J.T),
        (natural, lambda J: J @ torch.linalg.pinv(J)),
    ):
        z = torch.stack([paths.lift(theta) for theta in trajectory])
        expected = torch.stack(
            [
                -matrix(paths.jacobian(theta)) @ (paths.lift(theta) - target)
                for theta in trajectory[2:-2]
            ]
        )
        torch.testing.assert_close(velocities(z, h), expected, rtol=1e-5, atol=1e-5)
    J = paths.jacobian(theta0)
    assert (rank(J) == len(J)) == (widths == (1, 1, 1))


def test_natural_flow_is_the_ideal_one_where_the_jacobian_has_full_row_rank() -> None:
    """sec. GDPhiSpace: Q = I for u·relu(v x + w), whose ∂Φ has rank q = 2; plain gradient flow ends
    elsewhere.
    """
    paths = enumerate_paths(
        nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)), torch.ones(1, 1)
    )
    target, theta0 = torch.tensor([1.0, 0.0]).double(), torch.tensor([0.3, -0.5, 2.0]).double()

    def lifted_loss(z: Tensor) -> Tensor:
        return (z - target).square().sum() / 2

    ideal = reference.ideal_flow(lifted_loss, paths.lift(theta0), time=1.0, steps=100)
    natural = reference.natural_gradient_flow(
        lambda t: lifted_loss(paths.lift(t)), paths.lift, theta0, time=1.0, steps=100
    )
    plain = reference.gradient_flow(
        lambda t: lifted_loss(paths.lift(t)), theta0, time=1.0, steps=100
    )
    torch.testing.assert_close(
        torch.stack([paths.lift(theta) for theta in natural]), ideal, rtol=1e-7, atol=1e-8
    )
    assert (paths.lift(plain[-1]) - ideal[-1]).abs().max() > 0.1
