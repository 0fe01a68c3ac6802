"""The dynamics that the paper compares (sec. GDPhiSpace), integrated by the classical Runge-Kutta
method of order 4.

    gradient flow            θ' = −∇L(θ)                    (eq. gradient_flow)
    ideal flow               z' = −∇ℓ(z)                    gradient flow in the lifted space
    natural-gradient flow    θ' = −(∂Φᵀ ∂Φ)⁺ ∇L(θ)          (eq. natural_gradient_flow)

With L = ℓ ∘ Φ and z = Φ(θ), gradient flow moves z by −P ∇ℓ(z), P = ∂Φ ∂Φᵀ (eq. path_dyn), and
natural-gradient flow by −Q ∇ℓ(z), with Q the orthogonal projection onto the range of ∂Φ (eq.
phi_noneuclidean_gradient_flow): the ideal flow, where ∂Φ has full row rank. Everything is float64.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Function = Callable[[Tensor], Tensor]
# singular values of ∂Φ below this share of the largest count as zero in the pseudo-inverse
RELATIVE_ZERO = 1e-9


def gradient_flow(loss: Function, theta0: Tensor, *, time: float, steps: int) -> Tensor:
    """θ' = −∇L(θ) from θ₀ (eq. gradient_flow).

    Args:
        loss: L, from (p,) to a scalar, differentiable by torch.
        theta0: Start, (p,).
        time: End; the start is at 0.
        steps: Number of equal steps.

    Returns:
        θ at 0, time/steps, …, time: (steps + 1, p).

    >>> path = gradient_flow(
    ...     lambda x: x.square().sum() / 2, torch.tensor([1.0, -2.0]), time=1.0, steps=50
    ... )
    >>> torch.allclose(
    ...     path[-1], torch.tensor([1.0, -2.0]).double() * torch.e**-1, rtol=1e-8
    ... )  # θ₀ e^(−t)
    True
    """
    gradient = torch.func.grad(loss)
    return _integrate(lambda theta: -gradient(theta), theta0, time, steps)


def ideal_flow(lifted_loss: Function, z0: Tensor, *, time: float, steps: int) -> Tensor:
    """z' = −∇ℓ(z) from z₀: what gradient descent would do if it had the paths themselves as its
    variables.

    Args:
        lifted_loss: ℓ, from (q,) to a scalar, differentiable by torch.
        z0: Start, (q,).
        time: End; the start is at 0.
        steps: Number of equal steps.

    Returns:
        z at 0, time/steps, …, time: (steps + 1, q).

    >>> target = torch.tensor([1.0, 0.0], dtype=torch.float64)
    >>> path = ideal_flow(
    ...     lambda z: (z - target).square().sum() / 2, torch.zeros(2), time=2.0, steps=50
    ... )
    >>> torch.allclose(
    ...     path[-1], target * (1 - torch.tensor(-2.0).double().exp()), rtol=1e-6
    ... )  # target · (1 − e^(−t))
    True
    """
    return gradient_flow(lifted_loss, z0, time=time, steps=steps)


def natural_gradient_flow(
    loss: Function, lift: Function, theta0: Tensor, *, time: float, steps: int
) -> Tensor:
    """θ' = −(∂Φᵀ ∂Φ)⁺ ∇L(θ) from θ₀ (eq. natural_gradient_flow).

    Args:
        loss: L, from (p,) to a scalar, differentiable by torch.
        lift: Φ, from (p,) to (q,), differentiable by torch; ``Paths.lift`` is one.
        theta0: Start, (p,).
        time: End; the start is at 0.
        steps: Number of equal steps.

    Returns:
        θ at 0, time/steps, …, time: (steps + 1, p).

    >>> path = natural_gradient_flow(
    ...     lambda x: (3 * x).square().sum() / 2,
    ...     lambda x: 3 * x,
    ...     torch.ones(1),
    ...     time=1.0,
    ...     steps=50,
    ... )
    >>> torch.allclose(
    ...     path[-1], torch.ones(1).double() * torch.e**-1, rtol=1e-8
    ... )  # e^(−t): the factor 3 is gone
    True
    """
    gradient = torch.func.grad(loss)
    jacobian = torch.func.jacrev(lift)

    def velocity(theta: Tensor) -> Tensor:
        # (p, q); (∂Φᵀ ∂Φ)⁺ = ∂Φ⁺ (∂Φ⁺)ᵀ
        inverse: Tensor = torch.linalg.pinv(jacobian(theta), rtol=RELATIVE_ZERO)
        direction: Tensor = inverse @ (inverse.T @ gradient(theta))
        return -direction

    return _integrate(velocity, theta0, time, steps)


def _integrate(velocity: Function, start: Tensor, time: float, steps: int) -> Tensor:
    """x' = velocity(x) by the classical Runge-Kutta method: error O(h⁴), h = time / steps."""
    if steps < 1:
        raise ValueError(f"steps={steps}; at least one step is needed")
    h = time / steps
    points = [start.detach().double()]
    for _ in range(steps):
        x = points[-1]
        k1 = velocity(x)
        k2 = velocity(x + h / 2 * k1)
        k3 = velocity(x + h / 2 * k2)
        k4 = velocity(x + h * k3)
        points.append(x + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4))
    return torch.stack(points)
