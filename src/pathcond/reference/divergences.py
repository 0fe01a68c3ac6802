"""Spectral Bregman divergences of matrices by their double sum over eigenpairs (sec. breg_div), and
the criterion of PathCond.

    d(X‖Y) = Σ_ij (u_iᵀ v_j)² (ψ(λ_i) − ψ(μ_j) − (λ_i − μ_j) ψ'(μ_j)),
    X = Σ λ_i u_i u_iᵀ,  Y = Σ μ_j v_j v_jᵀ
    d₊(X‖Y): the same over the nonzero eigenvalues only (def. plusdiv)

Symbols: J = ∂Φ(θ), G = JᵀJ, g = diag G, D = diag(d) a rescaling, K the integer matrix of the
symmetry (K = −B of eq. def_B), u = 2t twice the log-scales: θ' = θ ⊙ exp(Ku/2), g' = g ⊙ exp(−Ku).
"""

# ruff: noqa: N803  the paper's capitals for matrices
from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

# eigenvalues below this share of the largest count as zero; their singular values, below its root
RELATIVE_ZERO = 1e-11


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """A spectral divergence: ζ(X) = Σ_i ψ(λ_i(X)).

    Attributes:
        name: For messages.
        psi: ψ on a tensor of eigenvalues, elementwise; strictly convex.
        derivative: ψ', likewise.
    """

    name: str
    psi: Callable[[Tensor], Tensor]
    derivative: Callable[[Tensor], Tensor]


LOGDET = Divergence(name="logdet", psi=lambda x: -x.log(), derivative=lambda x: -1 / x)
FROBENIUS = Divergence(name="Frobenius", psi=torch.square, derivative=lambda x: 2 * x)
VON_NEUMANN = Divergence(
    name="von Neumann", psi=lambda x: torch.xlogy(x, x) - x, derivative=torch.log
)


def divergence(X: Tensor, Y: Tensor, kind: Divergence = LOGDET) -> float:
    """d(X‖Y) of two symmetric (n, n) matrices (eq. bregman_div_matric); positive definite ones for
    LOGDET.

    >>> X = torch.diag(torch.tensor([2.0, 3.0], dtype=torch.float64))
    >>> divergence(X, torch.eye(2), FROBENIUS)  # ‖X − I‖²
    5.0
    >>> abs(divergence(X, torch.eye(2)) - (5 - math.log(6) - 2)) < 1e-14  # tr X − log det X − n
    True
    """
    (x, U), (y, V) = torch.linalg.eigh(X.double()), torch.linalg.eigh(Y.double())
    return _double_sum(x, U, y, V, kind)


def divergence_plus(
    X: Tensor, Y: Tensor, kind: Divergence = LOGDET, rank: int | None = None
) -> float:
    """d₊(X‖Y) of two symmetric positive semi-definite (n, n) matrices, over their nonzero
    eigenvalues (eq. divplusdivergence).

    Args:
        X: Of any rank.
        Y: Of any rank.
        kind: Which ψ.
        rank: Rank of X, if known: its so many largest eigenvalues count. Else those above
            RELATIVE_ZERO of the largest, as for Y.

    >>> divergence_plus(torch.diag(torch.tensor([1.0, 0.0, 0.0])), torch.eye(3))
    0.0
    """
    (x, U), (y, V) = _nonzero(X.double(), rank), _nonzero(Y.double(), None)
    return _double_sum(x, U, y, V, kind)


def _nonzero(X: Tensor, rank: int | None) -> tuple[Tensor, Tensor]:
    values, vectors = torch.linalg.eigh(X)
    if rank is None:
        rank = int((values > RELATIVE_ZERO * values[-1].clamp(min=0)).sum())
    first = len(values) - rank  # in ascending order
    return values[first:], vectors[:, first:]


def _double_sum(x: Tensor, U: Tensor, y: Tensor, V: Tensor, kind: Divergence) -> float:
    x, y = x[:, None], y[None, :]
    bregman = kind.psi(x) - kind.psi(y) - (x - y) * kind.derivative(y)
    return float(((U.T @ V).square() * bregman).sum())


def plus_logdet_of_rescaling(jacobian: Tensor, d: Tensor, alpha: float) -> float:
    """Right-hand side of eq. FirstFormula: d₊(α P_{Dθ} ‖ I_q) without the (q, q) matrix, from J = U
    Σ Vᵀ of rank r.

        α Σ_i d_i⁻² G_ii − r log α − log det Σ² − log det(Vᵀ D⁻² V) − r

    Args:
        jacobian: J = ∂Φ(θ), (q, p).
        d: Diagonal of D, (p,), positive.
        alpha: α > 0.

    >>> J = torch.tensor([[1.0, 0.0], [0.0, 2.0]], dtype=torch.float64)
    >>> plus_logdet_of_rescaling(
    ...     J, torch.tensor([1.0, 2.0], dtype=torch.float64), 1.0
    ... )  # J D⁻¹ is the identity
    0.0
    """
    _, sigma, Vt = torch.linalg.svd(jacobian.double(), full_matrices=False)
    r = int((sigma > math.sqrt(RELATIVE_ZERO) * sigma[0]).sum())
    sigma, V = sigma[:r], Vt[:r].T
    g = jacobian.double().square().sum(0)
    inner = torch.linalg.slogdet(V.T @ (d.double().square().reciprocal()[:, None] * V)).logabsdet
    return float(
        alpha * (g / d.square()).sum() - r * math.log(alpha) - 2 * sigma.log().sum() - inner - r
    )


def rescaled_divergence(K: Tensor, theta: Tensor, g: Tensor, u: Tensor) -> float:
    """D₊(u): min over α of d₊(α G_θ' ‖ I) for θ' = θ ⊙ exp(Ku/2), up to a constant, where rank ∂Φ =
    p − H.

        D₊(u) = (p − H) log Σ_i g_i e^(−(Ku)_i) + Σ_i (Ku)_i − log det(Kᵀ diag(θ² e^(Ku)) K)

    The kernel of ∂Φ(θ) is the range of diag(θ)·K, which brings in the determinant. The paper's F
    (eq. optim_with_bz) has p in place of p − H and no determinant.

    Args:
        K: (p, H) integers.
        theta: (p,), without zeros.
        g: Diagonal of G at theta, (p,).
        u: (H,).

    >>> K, theta = torch.tensor([[1.0], [-1.0]]), torch.tensor([1.0, 1.0])  # f(x) = θ₂ θ₁ x
    >>> rescaled_divergence(K, theta, torch.ones(2), torch.zeros(1))  # log 2 − log 2
    0.0
    """
    K, theta, g, u = (tensor.double() for tensor in (K, theta, g, u))
    p, H = K.shape
    Ku = K @ u
    gram = K.T @ ((theta.square() * Ku.exp())[:, None] * K)
    return float(
        (p - H) * (g.log() - Ku).logsumexp(0) + Ku.sum() - torch.linalg.slogdet(gram).logabsdet
    )
