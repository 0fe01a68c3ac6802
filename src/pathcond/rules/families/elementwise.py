"""Elementwise ops: what is positively homogeneous passes scales on, sums equate them, products add
them.
"""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor

from ..energies import FREEZE, Carried, Energies, Energy
from ..labels import ANY, Labels, constant
from ..scales import Scales
from ..table import Family, energy, rule
from ..values import Operand, is_zero

HOMOGENEOUS = Family("Positively homogeneous: the scale passes through")
SUMS = Family("Sums and selections: the scales of all operands are equated")
PRODUCTS = Family("Products and powers: log-scales add up")
NONLINEAR = Family("Nonlinear: what reaches it is fixed")
SMOOTH = Family("Smooth activations: as ReLU with approximate=True, fixed otherwise")
NO_SCALE = Family("Carries no scale", reads_parameters=True)
WRITES = Family(
    "Writes: the target takes the scale of what is written", reads_parameters=True, selects=True
)
PASSING = tuple(
    ("relu leaky_relu rrelu rrelu_with_noise abs neg dropout feature_dropout positive").split()
)


@rule(
    *PASSING,
    family=HOMOGENEOUS,
)
def homogeneous(scales: Scales, x: Operand) -> Labels:
    return scales.labels(x)


@rule("prelu", family=HOMOGENEOUS)
def prelu(scales: Scales, x: Operand, weight: Operand) -> Labels:
    scales.pin(weight, "is the slope of a PReLU, which does not scale with its input")
    return scales.labels(x)


@rule(
    "clamp",
    "clamp_min",
    "clamp_max",
    "hardtanh",
    "relu6",
    "threshold",
    family=Family("Clamps: homogeneous at 0, fixed otherwise"),
)
def clamp(
    scales: Scales,
    x: Operand,
    min: Operand,
    max: Operand,
    min_val: Operand,
    max_val: Operand,
    threshold: Operand,
    value: Operand,
) -> Labels:
    if scales.node.op == "relu6":
        max = 6.0
    bounds = [
        bound for bound in (min, max, min_val, max_val, threshold, value) if bound is not None
    ]
    if scales.node.op == "hardtanh" or not bounds:
        return scales.pin(x, "is clamped at a constant")
    # Every bound must scale with x: 0 and ±inf do under any scale, a tensor may, other numbers do
    # not.
    return scales.merge(x, *bounds, reason="is clamped at a constant")


@rule(
    *"sign sgn signbit isnan isinf isfinite logical_not any all".split(),
    family=HOMOGENEOUS,
)
def sign(scales: Scales) -> Labels:
    """No positive scale changes these."""
    return constant(scales.node.shape)


@rule(
    *"add sub rsub maximum minimum fmax fmin lerp hypot".split(),
    family=SUMS,
)
def total(scales: Scales, x: Operand, other: Operand, end: Operand, weight: Operand) -> Labels:
    if end is not None:
        scales.pin(weight, "is an interpolation weight")
        other = end
    return scales.broadcast(
        scales.merge(x, other, reason="is added to something that has no scale"), scales.node.shape
    )


@rule("addcmul", "addcdiv", family=SUMS)
def add_product(scales: Scales, x: Operand, tensor1: Operand, tensor2: Operand) -> Labels:
    power = 1 if scales.node.op == "addcmul" else -1
    return scales.merge(
        x,
        scales.combine((1, tensor1), (power, tensor2)),
        reason="is added to something of another scale",
    )


@rule("where", family=SUMS)
def where(scales: Scales, condition: Operand, self: Operand, other: Operand) -> Labels:
    scales.pin(condition, "decides a where")
    merged = scales.merge(self, other, reason="is an alternative to something that has no scale")
    return scales.broadcast(merged, scales.node.shape)


@rule("masked_fill", family=SUMS)
def masked_fill(scales: Scales, x: Operand, mask: Operand, value: Operand) -> Labels:
    scales.pin(mask, "decides a masked_fill")
    return scales.broadcast(
        scales.merge(x, value, reason="is filled with a constant"), scales.node.shape
    )


@rule(
    "gt",
    "ge",
    "lt",
    "le",
    "eq",
    "ne",
    family=Family("Comparisons: both sides are equated; the result carries no scale"),
)
def comparison(scales: Scales, x: Operand, other: Operand) -> Labels:
    scales.merge(x, other, reason="is compared with something that has no scale")
    return constant(scales.node.shape)


@rule("mul", "multiply", family=PRODUCTS)
def product(scales: Scales, x: Operand, other: Operand) -> Labels:
    # A number that is zero today, as the weight of a branch that fades in, may be another tomorrow.
    other = 1.0 if is_zero(other) else other
    return scales.combine((1, x), (1, other))


@rule("div", "divide", "true_divide", family=PRODUCTS)
def quotient(scales: Scales, x: Operand, other: Operand, rounding_mode: str | None) -> Labels:
    if rounding_mode is not None:
        scales.pin(other, "is rounded")
        return scales.pin(x, "is rounded")
    return scales.combine((1, x), (-1, other))


@rule("square", "sqrt", "rsqrt", "reciprocal", family=PRODUCTS)
def fixed_power(scales: Scales, x: Operand) -> Labels:
    power = {"square": 2, "sqrt": Fraction(1, 2), "rsqrt": Fraction(-1, 2), "reciprocal": -1}[
        scales.node.op
    ]
    return scales.combine((power, x))


@rule("pow", family=PRODUCTS)
def power(scales: Scales, x: Operand, exponent: Operand) -> Labels:
    if isinstance(exponent, (int, float)) and exponent != 0 and float(2 * exponent).is_integer():
        return scales.combine((Fraction(exponent), x))
    scales.pin(exponent, "is an exponent")
    return scales.pin(x, "is raised to a power that is no multiple of 1/2")


@rule(
    *"gelu silu elu celu selu mish softplus hardswish".split(),
    family=SMOOTH,
)
def smooth(scales: Scales, x: Operand) -> Labels:
    if scales.approximate:
        return scales.labels(x)
    return scales.pin(
        x, f"passes through {scales.node.op}, which is not homogeneous (approximate=True admits it)"
    )


@rule(
    *(
        "sigmoid tanh softmax _softmax log_softmax _log_softmax hardsigmoid exp expm1 log log1p "
        "log_sigmoid sin cos erf round floor ceil logsumexp softshrink hardshrink atan "
        "floor_divide remainder"
    ).split(),
    family=NONLINEAR,
)
def nonlinear(scales: Scales, x: Operand, other: Operand) -> Labels:
    scales.pin(other, f"passes through {scales.node.op}, which is not homogeneous")
    scales.pin(x, f"passes through {scales.node.op}, which is not homogeneous")
    return constant(scales.node.shape)


@rule("glu", family=PRODUCTS)
def gated(scales: Scales, x: Operand, dim: int) -> Labels:
    """a · sigmoid(b): the scale of a passes, b is fixed."""
    labels = scales.labels(x)
    values, gate = labels.along([dim]).chunk(2, dim)
    scales.equations.pin(gate, by=scales.node, reason="makes the gate of a glu")
    return Labels(values, scales.node.shape)


@rule("zeros_like", "new_zeros", family=NO_SCALE)
def zeros(scales: Scales) -> Labels:
    return constant(scales.node.shape, ANY)


@rule("full_like", "new_full", family=NO_SCALE)
def full(scales: Scales, fill_value: Operand) -> Labels:
    neutral = isinstance(fill_value, (int, float)) and (
        fill_value == 0 or abs(fill_value) == float("inf")
    )
    return constant(scales.node.shape, ANY if neutral else 0)


@rule(
    *(
        "ones_like new_ones empty_like new_empty rand_like randn_like randint_like "
        "new_empty_strided uniform exponential random"
    ).split(),
    family=NO_SCALE,
)
def unscaled(scales: Scales) -> Labels:
    return constant(scales.node.shape)


@rule("bernoulli", "normal", "poisson", "multinomial", family=NONLINEAR)
def draw(scales: Scales, x: Operand, p: float | None, mean: Operand, std: Operand) -> Labels:
    for operand in (x, p, mean, std):
        scales.pin(operand, "is a parameter of a random draw")
    return constant(scales.node.shape)


@rule("zero", family=NO_SCALE)
def zero(scales: Scales) -> Labels:
    return constant(scales.node.shape, ANY)


@rule("copy", "fill", family=WRITES)
def write(scales: Scales, src: Operand, value: Operand) -> Labels:
    return scales.broadcast(scales.labels(src if src is not None else value), scales.node.shape)


# -- path energy -----------------------------------------------------------------------------------

NEAR_ZERO = 1e-8  # the gate f(x)/x of an activation at 0 is taken here


@energy(
    *PASSING,
    *"clamp clamp_min clamp_max hardtanh relu6 threshold softshrink hardshrink".split(),
)
def unchanged(energies: Energies, x: Carried) -> Tensor:
    """Homogeneous activations and clamps pass all paths on."""
    return energies.factor(x)


@energy("prelu")
def prelu_energy(energies: Energies, x: Carried) -> Tensor:
    """Passes all paths on; the slope lies on none of them."""
    energies.end("weight", "is the slope of a PReLU")
    return energies.factor(x)


@energy(
    *"gelu silu elu celu selu mish hardswish softplus".split(),
    measures=True,
)
def smooth_energy(energies: Energies, x: Carried) -> Energy:
    """As ReLU with approximate=True; otherwise f(x) = x · gate, with the gate frozen at its value
    on the example batch (paths end at softplus, which does not vanish at 0).
    """
    if energies.node.op == "softplus" and not energies.approximate:
        return FREEZE
    if energies.approximate or not energies.calibrate:
        return energies.factor(x)
    first, *others = energies.node.bound
    settings = {name: energies.node.bound[name] for name in others}
    return energies.factor(x) * energies.measured(
        lambda v: energies.at(_off_zero(v), **settings) / _off_zero(v), first
    )


def _off_zero(x: Tensor) -> Tensor:
    return x.masked_fill(x == 0, NEAR_ZERO)


@energy("glu", measures=True)
def glu_energy(energies: Energies, x: Carried, dim: int) -> Tensor:
    """a · sigmoid(b): the paths of a pass, times the gate frozen at its value on the example
    batch.
    """
    return energies.factor(x).chunk(2, dim)[0] * energies.measured(
        lambda v: v.chunk(2, dim)[1].sigmoid(), "self"
    )


@energy("add", "sub", "rsub")
def sum_energy(energies: Energies, x: Carried, other: Carried, alpha: float) -> Tensor:
    """Energies add."""
    weight = energies.power(1 if alpha is None else alpha)
    a, b = energies.summand(x), energies.summand(other)
    return a * weight + b if energies.node.op == "rsub" else a + b * weight if alpha != 1 else a + b


@energy("maximum", "minimum", "fmax", "fmin")
def choice_energy(energies: Energies, x: Carried, other: Carried) -> Tensor:
    """One path per alternative: energies add."""
    return energies.summand(x) + energies.summand(other)


@energy("addcmul")
def add_product_energy(energies: Energies, x: Carried, value: float) -> Tensor:
    """Energies multiply, then add."""
    return energies.plus(
        energies.product(torch.mul, "tensor1", "tensor2") * energies.power(value), x
    )


@energy("where", measures=True)
def where_energy(energies: Energies, self: Carried, other: Carried) -> Tensor:
    """The share of samples on which an alternative is chosen; one path per alternative
    uncalibrated.
    """
    a, b = energies.summand(self), energies.summand(other)
    return (
        energies.measured(lambda c: c.bool(), "condition") * a
        + energies.measured(lambda c: ~c.bool(), "condition") * b
    )


@energy("masked_fill", measures=True)
def masked_fill_energy(energies: Energies, x: Carried, value: Carried) -> Tensor:
    """The share of samples on which an element is kept."""
    kept, filled = (energies.measured(f, "mask") for f in (lambda m: ~m, lambda m: m))
    return kept * energies.summand(x) + filled * energies.summand(value)


@energy("mul", "multiply")
def product_energy(energies: Energies) -> Tensor:
    """Energies multiply; a gate or a constant c multiplies by the mean of |c|^p."""
    return energies.product(torch.mul, "self", "other")


@energy("div", "divide", "true_divide", measures=True)
def quotient_energy(
    energies: Energies, x: Carried, other: Carried, rounding_mode: str | None
) -> Energy:
    """The divisor is frozen at its value on the example batch."""
    if rounding_mode is not None:
        return FREEZE
    energies.end("other", "is part of a divisor")
    return energies.summand(x) * energies.reciprocal_power(other)


@energy("square", "pow", measures=True)
def power_energy(energies: Energies, x: Carried, exponent: Carried) -> Energy:
    """n factors: each in turn has paths, times xⁿ⁻¹ frozen at its value on the example batch;
    uncalibrated all of them do.
    """
    times = 2 if energies.node.op == "square" else exponent
    if not isinstance(times, (int, float)) or times != int(times) or times < 1:
        return FREEZE
    if energies.calibrate:
        return energies.factor(x) * energies.measured(lambda v: v ** int(times - 1), "self") * times
    energies.exponent *= int(times)
    return energies.factor(x) ** int(times)


@energy("zeros_like", "new_zeros", "zero")
def zeros_energy(energies: Energies) -> Tensor:
    """No paths."""
    return torch.zeros(energies.node.shape, dtype=torch.float64, device=energies.device)


@energy("full_like", "new_full", "ones_like", "new_ones", "fill")
def full_energy(energies: Energies, fill_value: Carried, value: Carried) -> Tensor:
    """A constant starts paths."""
    constant = next((v for v in (fill_value, value) if v is not None), 1.0)
    return energies.summand(constant).expand(energies.node.shape)


@energy("copy")
def copy_energy(energies: Energies, src: Carried) -> Tensor:
    """The target takes the energy of what is written."""
    return energies.summand(src).expand(energies.node.shape)
