"""E[diag G]: the closed forms against path enumeration and Monte Carlo, by a test that can fail.
The regime of a model.
"""

import dataclasses
import itertools
import re
from math import prod
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import nn

import pathcond
from pathcond.theory import (
    AT_TUNED_RATES,
    ExpectedDiagonal,
    expected_asymptote,
    expected_diag_g,
    expected_from_gains,
    regime,
)
from pathcond.widths import weight_layers

UNEVEN = (4, 3, 5, 2, 3)


# The definition, by enumeration of paths and by products of matrices.


def paths_through(widths: tuple[int, ...], bias: bool) -> ExpectedDiagonal:
    """How many paths hold the edge between the first neurons of layers k and k+1, and the first
    bias of layer k.
    """
    depth = len(widths) - 1
    edges, biases = np.zeros(depth), np.zeros(depth - 1)
    # at layer 0: an input; at a later one: the bias of a neuron there
    for start in range(depth) if bias else [0]:
        for path in itertools.product(*(range(n) for n in widths[start:])):
            edges[start:] += [here == there == 0 for here, there in itertools.pairwise(path)]
            if start:
                biases[start - 1] += path[0] == 0
    return ExpectedDiagonal(tuple(edges), tuple(biases) if bias else ())


def sampled_g(widths, variances, *, bias: bool, uniform: bool, samples: int = 40_000) -> np.ndarray:
    """Mean of g over each layer's edges, then over each layer's biases, of random networks:
    (samples, classes).
    """
    random = np.random.default_rng(0)

    def squares(layer: int, *shape: int) -> np.ndarray:
        draw = (
            random.uniform(-np.sqrt(3), np.sqrt(3), (samples, *shape))
            if uniform
            else random.normal(size=(samples, *shape))
        )
        return variances[layer] * draw**2

    depth = len(widths) - 1
    weights = [squares(k, widths[k + 1], widths[k]) for k in range(depth)]
    into, onward = [np.ones((samples, widths[0]))], [np.ones((samples, widths[-1]))]
    for k in range(depth - 1):
        into.append(
            np.einsum("soi,si->so", weights[k], into[k])
            + (squares(k, widths[k + 1]) if bias else 0)
        )
        onward.insert(0, np.einsum("soi,so->si", weights[depth - 1 - k], onward[0]))
    edges = [after.mean(1) * before.mean(1) for before, after in zip(into, onward, strict=True)]
    return np.stack(edges + [after.mean(1) for after in onward[:-1]] * bias, 1)


def z_scores(samples: np.ndarray, expected: ExpectedDiagonal) -> np.ndarray:
    """How many standard errors the sample means lie from the expected ones; 0 where g is not random
    and right.
    """
    ratio = samples / np.array([*expected.edges, *expected.biases])
    error, spread = ratio.mean(0) - 1, ratio.std(0, ddof=1) / np.sqrt(len(ratio))
    return np.where(
        spread > 1e-12, error / np.maximum(spread, 1e-12), np.where(abs(error) < 1e-9, 0, np.inf)
    )


# The paper's formulas, letter by letter, for k = 0, ..., L-1 (edges) and k = 0, ..., L-2 (biases).


def eq_expected_general(n, s) -> ExpectedDiagonal:
    L = len(n) - 1
    return ExpectedDiagonal(
        tuple(
            prod(n[j] for j in range(L + 1) if j not in (k, k + 1))
            * prod(s[m] for m in range(L) if m != k)
            + sum(
                prod(n[m] for m in range(j + 1, L + 1) if m not in (k, k + 1))
                * prod(s[m] for m in range(j, L) if m != k)
                for j in range(k)
            )
            for k in range(L)
        ),
        tuple(prod(n[k + 2 :]) * prod(s[k + 1 :]) for k in range(L - 1)),
    )


def eq_expected_ak(n, s, *, corrected: bool) -> ExpectedDiagonal:
    """With n_L σ_L² read as 1, which the paper leaves open; ``corrected`` skips m = k+1 in the
    second product too.
    """
    L = len(n) - 1
    a, s = [n[k] * s[k] for k in range(L)], [*s, 1 / n[L]]
    return ExpectedDiagonal(
        tuple(
            n[L] * s[k + 1] * prod(a[j] for j in range(L) if j not in (k, k + 1))
            + n[L]
            * s[k + 1]
            * sum(
                s[j]
                * prod(a[m] for m in range(j + 1, L) if m != k and not (corrected and m == k + 1))
                for j in range(k)
            )
            for k in range(L)
        ),
        tuple(n[L] * s[k + 1] * prod(a[k + 2 :]) for k in range(L - 1)),
    )


def eq_expected_kaiming(n, a) -> ExpectedDiagonal:
    L = len(n) - 1
    return ExpectedDiagonal(
        tuple(
            n[L] / n[k + 1] * a ** (L - 1)
            + n[L] / n[k + 1] * sum(a ** (L - 1 - j) / n[j] for j in range(k))
            for k in range(L)
        ),
        tuple(n[L] / n[k + 1] * a ** (L - 1 - k) for k in range(L - 1)),
    )


def eq_expected_constant_width(n, depth, a) -> tuple[float, ...]:
    return tuple(
        a ** (depth - 1) + sum(a ** (depth - j) for j in range(1, k + 1)) / n for k in range(depth)
    )


def eq_expected_a1(n, depth) -> tuple[float, ...]:
    return tuple(1 + k / n for k in range(depth))


def eq_expected_aneq1(n, depth, a) -> tuple[float, ...]:
    return tuple(
        a ** (depth - 1) + a ** (depth - 1) / n * (1 - (1 / a) ** k) / (1 - 1 / a)
        for k in range(depth)
    )


def eq_expected_large_a(n, depth, a) -> tuple[float, ...]:
    return tuple(a ** (depth - 1) * (1 if k == 0 else 1 + 1 / n) for k in range(depth))


def eq_expected_small_a(n, depth, a) -> tuple[float, ...]:
    return tuple(
        (1, 1 + 1 / n)[k] * a ** (depth - 1) if k < 2 else a ** (depth - k) / n
        for k in range(depth)
    )


def close(ours: ExpectedDiagonal, other: ExpectedDiagonal, tolerance: float = 1e-12) -> bool:
    return ours.edges == pytest.approx(other.edges, rel=tolerance) and ours.biases == pytest.approx(
        other.biases, rel=tolerance
    )


WIDTHS = [(2, 3), (1, 1, 1), (2, 3, 1), (3, 2, 1, 3, 2), UNEVEN, (3, 3, 3, 3, 3, 3)]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_unit_variances_count_paths(widths: tuple[int, ...], bias: bool) -> None:
    assert expected_diag_g(widths, [1.0] * (len(widths) - 1), bias) == paths_through(widths, bias)


@pytest.mark.parametrize("widths", WIDTHS)
def test_the_general_formula_and_the_one_in_gains(widths: tuple[int, ...]) -> None:
    variances = np.random.default_rng(1).uniform(0.2, 2, len(widths) - 1).tolist()
    ours = expected_diag_g(widths, variances)
    assert close(ours, eq_expected_general(widths, variances))
    assert close(ours, eq_expected_ak(widths, variances, corrected=True))
    gains = [n * variance for n, variance in zip(widths, variances, strict=False)]
    for bias in (True, False):
        assert close(
            expected_from_gains(widths, gains, bias), expected_diag_g(widths, variances, bias)
        )


def test_the_papers_formula_in_gains_is_wrong_between_the_first_and_the_last_layer() -> None:
    variances = [0.5, 0.8, 0.3, 0.6]
    wrong, right = (
        eq_expected_ak(UNEVEN, variances, corrected=False),
        expected_diag_g(UNEVEN, variances),
    )
    assert wrong.biases == pytest.approx(right.biases)
    assert [w == pytest.approx(r) for w, r in zip(wrong.edges, right.edges, strict=True)] == [
        True,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("a", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("widths", WIDTHS)
def test_standard_initialisation(widths: tuple[int, ...], a: float) -> None:
    assert close(expected_from_gains(widths, a), eq_expected_kaiming(widths, a))


@pytest.mark.parametrize("depth", [1, 2, 3, 5])
def test_constant_width(depth: int) -> None:
    n, widths = 4, (4,) * (depth + 1)
    for a in (0.3, 1.0, 2.5):
        assert expected_from_gains(widths, a).edges == pytest.approx(
            eq_expected_constant_width(n, depth, a)
        )
        if a != 1:
            assert expected_from_gains(widths, a).edges == pytest.approx(
                eq_expected_aneq1(n, depth, a)
            )
    assert expected_from_gains(widths, 1).edges == pytest.approx(eq_expected_a1(n, depth))
    for limit, formula, a in (
        ("large", eq_expected_large_a, 7.0),
        ("small", eq_expected_small_a, 0.1),
    ):
        assert expected_asymptote(widths, a, limit).edges == pytest.approx(formula(n, depth, a))


def test_constant_width_needs_as_many_outputs() -> None:
    """The paper's set-up has n_k = n for k < L only; with n_L ≠ n its formula holds in the last
    layer alone.
    """
    ratio = np.array(expected_from_gains((4, 4, 4, 2), 0.7).edges) / eq_expected_constant_width(
        4, 3, 0.7
    )
    assert ratio == pytest.approx([0.5, 0.5, 1])


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("widths", WIDTHS)
def test_asymptotes(widths: tuple[int, ...], bias: bool) -> None:
    for limit, a in (("large", 1e9), ("small", 1e-9)):
        assert close(
            expected_asymptote(widths, a, limit, bias),
            expected_from_gains(widths, a, bias),
            tolerance=1e-7,
        )


# Monte Carlo. All classes of parameters of all cases are tested together at 1 in 1,000
# (Bonferroni).

CASES = {
    "general": (UNEVEN, (0.5, 0.1, 0.9, 0.3), expected_diag_g(UNEVEN, (0.5, 0.1, 0.9, 0.3))),
    "general, no biases": (
        UNEVEN,
        (0.5, 0.1, 0.9, 0.3),
        expected_diag_g(UNEVEN, (0.5, 0.1, 0.9, 0.3), bias=False),
    ),
    "depth 5": (
        (2, 6, 3, 1, 4, 5),
        (1.5, 0.2, 0.4, 1.0, 0.3),
        expected_diag_g((2, 6, 3, 1, 4, 5), (1.5, 0.2, 0.4, 1.0, 0.3)),
    ),
    "gains": (UNEVEN, (0.5, 0.1, 0.9, 0.3), expected_from_gains(UNEVEN, (2.0, 0.3, 4.5, 0.6))),
    "standard": (UNEVEN, [0.6 / n for n in UNEVEN[:-1]], expected_from_gains(UNEVEN, 0.6)),
    "constant width, a = 1": (
        (5,) * 5,
        [0.2] * 4,
        ExpectedDiagonal(eq_expected_a1(5, 4), (1.0,) * 3),
    ),
    "constant width, a ≠ 1": (
        (5,) * 5,
        [0.3] * 4,
        ExpectedDiagonal(eq_expected_aneq1(5, 4, 1.5), (1.5**3, 1.5**2, 1.5)),
    ),
    "large a": (UNEVEN, [1e4 / n for n in UNEVEN[:-1]], expected_asymptote(UNEVEN, 1e4, "large")),
    "small a": (UNEVEN, [1e-5 / n for n in UNEVEN[:-1]], expected_asymptote(UNEVEN, 1e-5, "small")),
}
COMPARISONS = 2 * sum(
    len(expected.edges) + len(expected.biases) for _, _, expected in CASES.values()
)
CRITICAL = NormalDist().inv_cdf(1 - 1e-3 / (2 * COMPARISONS))


@pytest.mark.parametrize("uniform", [False, True], ids=["gaussian", "uniform"])
@pytest.mark.parametrize("case", CASES)
def test_random_networks_have_the_expected_mean(case: str, uniform: bool) -> None:
    widths, variances, expected = CASES[case]
    z = z_scores(
        sampled_g(widths, variances, bias=bool(expected.biases), uniform=uniform), expected
    )
    assert abs(z).max() < CRITICAL


@pytest.mark.parametrize("uniform", [False, True], ids=["gaussian", "uniform"])
def test_the_same_test_rejects_what_is_wrong_in_the_paper(uniform: bool) -> None:
    variances = (0.5, 0.1, 0.9, 0.3)
    z = z_scores(
        sampled_g(UNEVEN, variances, bias=True, uniform=uniform),
        eq_expected_ak(UNEVEN, variances, corrected=False),
    )
    assert (abs(z) > CRITICAL).tolist() == [False, True, True, False] + [False] * 3
    large, small = ([a / n for n in UNEVEN[:-1]] for a in (1e4, 1e-5))
    without_biases = expected_asymptote(UNEVEN, 1e4, "large", bias=False)
    z = z_scores(sampled_g(UNEVEN, large, bias=True, uniform=uniform)[:, :4], without_biases)
    assert (abs(z) > CRITICAL).tolist() == [False, True, True, True]
    from_k_2_on = tuple(3 / UNEVEN[k + 1] * 1e-5 ** (4 - k) / UNEVEN[k - 1] for k in range(4))
    z = z_scores(
        sampled_g(UNEVEN, small, bias=True, uniform=uniform)[:, 1:4],
        ExpectedDiagonal(from_k_2_on[1:], ()),
    )
    assert (abs(z) > CRITICAL).tolist() == [True, False, False]


def test_wrong_arguments_are_named_all_at_once() -> None:
    with pytest.raises(
        ValueError,
        match=r"widths holds \[0\].*variances has 1 entries; 3 widths make 2 layers"
        r".*holds \[-1.0\]",
    ):
        expected_diag_g((3, 0, 2), (-1.0,))
    with pytest.raises(ValueError, match="at least an input and an output"):
        expected_diag_g((3,), ())
    with pytest.raises(ValueError, match=r"gains holds \[nan\]"):
        expected_from_gains((3, 2), float("nan"))
    with pytest.raises(ValueError, match='choose "large" or "small"'):
        expected_asymptote((3, 2), 1.0, "huge")  # type: ignore[arg-type]


# The regime of a model.


def network(
    *widths: int, a: float | None = None, batch_norm: bool = False, bias: bool = True
) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in itertools.pairwise(widths):
        layers.append(nn.Linear(fan_in, fan_out, bias=bias))
        if a is not None:
            for parameter in layers[-1].parameters():
                nn.init.normal_(parameter, std=(a / fan_in) ** 0.5)
        layers += [nn.BatchNorm1d(fan_out)] * batch_norm + [nn.ReLU()]
    return nn.Sequential(*layers[: -2 if batch_norm else -1])


def minimum(model: nn.Sequential) -> tuple[np.ndarray, float, float]:
    """u of every neuron by the paper's coordinate descent on the explicit K, then rms of Ku/2 and
    (F(0) - F(u)) / p.
    """
    linear = [m for m in model if isinstance(m, nn.Linear)]
    square = [
        (m.weight.detach().double().numpy() ** 2, m.bias.detach().double().numpy() ** 2)
        for m in linear
    ]
    into, onward = [np.ones(linear[0].in_features)], [np.ones(linear[-1].out_features)]
    for (weight, bias), (later, _) in zip(square[:-1], square[:0:-1], strict=True):
        into.append(weight @ into[-1] + bias)
        onward.insert(0, onward[0] @ later)
    starts = np.cumsum([0] + [m.out_features for m in linear[:-1]])
    units = [
        range(-m.in_features, 0) if k == 0 else range(starts[k - 1], starts[k])
        for k, m in enumerate(linear)
    ]
    rows, g = [], []
    for k, layer in enumerate(linear):
        last = k == len(linear) - 1
        for out in range(layer.out_features):
            for source in [*range(layer.in_features), None]:
                row = np.zeros(starts[-1])
                if not last:
                    row[starts[k] + out] += 1
                if source is not None and k:
                    row[units[k][source]] -= 1
                rows.append(row)
                g.append(onward[k][out] * (1 if source is None else into[k][source]))
    K, g, u, p = np.array(rows), np.array(g), np.zeros(starts[-1]), len(g)
    for _ in range(1000):
        for h in range(len(u)):
            u[h] = 0
            now = g * np.exp(-K @ u)
            A, B, C, D = (
                K[:, h].sum(),
                now[K[:, h] < 0].sum(),
                now[K[:, h] > 0].sum(),
                now[K[:, h] == 0].sum(),
            )
            u[h] = np.log(max(np.roots([B * (A + p), A * D, C * (A - p)])))
    movement = np.sqrt(np.mean((K @ u / 2) ** 2))
    return u, movement, np.log(g.sum()) - np.log((g * np.exp(-K @ u)).sum()) - np.mean(K @ u)


@pytest.mark.parametrize("widths", [(4, 3, 5, 2), (2, 6, 1, 3, 3)])
def test_the_regime_is_that_of_the_optimum(widths: tuple[int, ...]) -> None:
    model, batch = network(*widths, a=1.0).double(), torch.randn(8, widths[0], dtype=torch.float64)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    u, movement, decrease = minimum(model)
    found = regime(model, batch)
    assert found.movement == pytest.approx(movement, rel=1e-2)
    assert found.decrease == pytest.approx(decrease, rel=1e-3)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    pathcond.rescale_(model, pathcond.find_symmetry(model, batch), torch.from_numpy(u / 2))
    rescaled = regime(model, batch)
    assert rescaled.verdict == "nothing"
    assert rescaled.decrease == pytest.approx(0, abs=1e-9)
    assert "at their best scale already" in str(rescaled)


@pytest.mark.parametrize(
    ("widths", "a", "verdict", "reason"),
    [
        (
            (64,) * 6,
            1.0,
            "little",
            "because widths hardly vary (64) and the weights' scale a is not small (",
        ),
        ((64,) * 6, 2.0, "little", "because widths hardly vary (64) and"),
        (
            (64,) * 6,
            None,
            "little",
            "because widths hardly vary (64) and the weights' scale a is not small (0.3",
        ),
        ((64,) * 6, 0.03, "much", "because the weights' scale a is small (0.0"),
        ((784, 784, 784, 784, 784), None, "little", "because widths hardly vary (784)"),
        ((784, 392, 196, 392, 784), None, "some", "because widths vary (196 to 784)"),
        ((784, 112, 16, 112, 784), None, "much", "because widths vary (16 to 784)"),
        (
            (64, 8, 64, 8, 64),
            0.03,
            "much",
            "because widths vary (8 to 64) and the weights' scale a is small (",
        ),
    ],
)
def test_the_regimes_of_the_paper(
    widths: tuple[int, ...], a: float | None, verdict: str, reason: str
) -> None:
    found = regime(network(*widths, a=a), torch.randn(4, widths[0]))
    assert found.verdict == verdict
    assert reason in str(found)
    assert str(found).count("\n") == 0
    assert re.match("Rescaling by paths will do [a-z]+ for Sequential at small fixed", str(found))
    assert str(found).endswith(AT_TUNED_RATES)


def test_of_a_funnel_it_says_that_tuned_rates_gain_nothing() -> None:
    found = regime(network(400, 120, 40, 12, 10, a=None), torch.randn(4, 400))
    assert found.verdict == "much"
    sentence, tuned = str(found).split(". At tuned rates ")
    assert "at small fixed learning rates, because widths vary (10 to 400)" in sentence
    for part in (
        "nothing about this model",
        "autoencoders",
        "17 to 29 %",
        "less than 1 % on MLPs that only narrow",
        "choosing",
    ):
        assert part in tuned


def test_batch_norm_moves_most_where_training_gained_most() -> None:
    model, batch = network(768, 100, 100, 100, 10, batch_norm=True), torch.randn(128, 768)
    moved = {
        side: regime(model, batch, normalization=side).movement
        for side in ("absorb", "full", "gain")
    }
    assert moved["absorb"] > moved["full"] > moved["gain"]
    assert regime(model, batch, normalization="absorb").verdict == "much"


def test_constant_g_leaves_nothing_to_do() -> None:
    model = network(5, 5, 5, 5, bias=False)
    for parameter in model.parameters():
        nn.init.constant_(parameter, -0.3)
    found = regime(model, torch.randn(2, 5))
    assert (found.verdict, found.spread, found.decrease) == (
        "nothing",
        pytest.approx(0),
        pytest.approx(0),
    )


def test_nothing_can_be_rescaled() -> None:
    found = regime(nn.Sequential(nn.Linear(4, 9), nn.GELU(), nn.Linear(9, 2)), torch.randn(2, 4))
    assert found.verdict == "nothing"
    assert (
        str(found)
        == "Rescaling by paths will do nothing for Sequential: none of its units can be rescaled."
    )


def test_parameters_on_no_path_are_reported() -> None:
    model = network(4, 8, 2)
    nn.init.zeros_(model[2].weight)
    found = regime(model, torch.randn(2, 4))
    assert found.zero_share == pytest.approx(40 / 58)
    assert "for 31.0% of the parameters of Sequential (the others have g = 0)" in str(found)
    some = dataclasses.replace(found, zero_share=0.4)
    assert str(some).endswith(f"; g is zero for 40% of its parameters. {AT_TUNED_RATES}")
    model[2].requires_grad_(False)
    assert (
        str(regime(model, torch.randn(2, 4)))
        == "Rescaling by paths will do nothing for Sequential: none of its units can be rescaled."
    )


def test_widths_of_tables_and_gates() -> None:
    layers = [nn.Embedding(300, 4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5)]
    found = regime(nn.Sequential(*layers), torch.randint(0, 300, (2, 3)))
    assert (found.narrowest, found.widest) == (4, 6)
    widths = {n for inputs, outputs, _ in weight_layers(nn.GRU(3, 8)) for n in (inputs, outputs)}
    assert widths == {3, 8}
    projected = {outputs for _, outputs, _ in weight_layers(nn.LSTM(3, 8, proj_size=2))}
    assert projected == {8, 2}


def test_widths_and_gains_of_convolutions() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 3),
        nn.ReLU(),
        nn.Conv2d(6, 6, 3, groups=6),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2),
    )
    for parameter in model.parameters():
        nn.init.constant_(parameter, 0.5)
    found = regime(model, torch.randn(2, 3, 8, 8))
    assert (found.narrowest, found.widest, found.num_units) == (3, 6, 12)
    assert (found.smallest_gain, found.largest_gain) == (0.25 * 9, 0.25 * 27)
