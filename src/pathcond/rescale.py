"""Rescale a model in place: parameters, buffers, gradients, optimizer state; verified, all or nothing.

Everything is computed and checked before the first write. Tensors keep their identity and address: values are
written with in-place ops under ``no_grad``, so optimizers, compiled models and DDP keep their references.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .errors import RescalingError, TrainChangeError
from .factor import Factor
from .graph import unwrap
from .memory import is_writable, overlapping
from .optimizer_state import transport
from .outputs import default_tolerance, example_outputs, output_change
from .symmetry import Symmetry, fingerprint, scaled_variance

logger = logging.getLogger("pathcond")

TRAIN_CHANGE_WORTH_SAYING = 1e-2


@dataclass(frozen=True, kw_only=True)
class Rescaling:
    """What a rescaling did to the function, measured on the example batch.

    Attributes:
        output_change_eval: Largest change of an output in eval mode relative to the largest output; None if not verified.
        output_change_train: The same in train mode, where ε of normalizations enters.
        rounded: Whether factors were rounded to powers of two.
        seconds: Wall-clock time of the call.
    """

    output_change_eval: float | None
    output_change_train: float | None
    rounded: bool
    seconds: float


def rescale_(
    model: nn.Module,
    symmetry: Symmetry,
    log_scales: Tensor,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    optimizer_state: str = "transport",
    round_to_power_of_two: bool | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    train_tolerance: float | None = None,
) -> Rescaling:
    """Multiply every parameter and buffer by its factor; the function stays what it was.

    Args:
        model: The model whose Symmetry was found.
        symmetry: From ``find_symmetry``.
        log_scales: log λ per unit, (num_units,).
        optimizer: If given, its state moves to the new coordinates.
        optimizer_state: "transport", "reset" or "keep".
        round_to_power_of_two: Round every λ to a power of two, which makes the multiplication exact. Default:
            only for models with float16 or bfloat16 parameters.
        verify: Run the example batch through the rescaled weights before the first write.
        tolerance: Largest relative change of an eval output; default √eps of the least precise parameter.
        train_tolerance: Largest relative change of a train output; by default it is only reported.

    Returns:
        The measured change of the outputs in both modes.

    Raises:
        RescalingError: With every reason; the model is bit for bit what it was.
    """
    start = time.perf_counter()
    model = unwrap(model)
    tensors = {name: t for name, t in [*model.named_parameters(), *model.named_buffers()] if name in symmetry.shapes}
    peaks = _refuse_unusable(model, symmetry, log_scales, tensors)
    rounded = is_low_precision(model) if round_to_power_of_two is None else round_to_power_of_two
    t = symmetry.class_log_scales(_rounded(log_scales) if rounded else log_scales)
    factors, new_variances = _plan(symmetry, t, tensors)
    with torch.no_grad():
        copies = {name: factor.times(tensors[name].detach()) for name, factor in factors.items()} if verify else None
        _refuse_overflow(factors, new_variances, tensors, peaks, copies)
        moves = transport(optimizer, optimizer_state, model, factors) if optimizer is not None else []
        change_eval = change_train = None
        if copies is not None:
            change_eval, change_train = _verify(model, symmetry, copies | new_variances, tolerance, train_tolerance)
        _write(tensors, factors, copies, new_variances)
        for move in moves:
            move()
    return Rescaling(
        output_change_eval=change_eval,
        output_change_train=change_train,
        rounded=rounded,
        seconds=time.perf_counter() - start,
    )


def is_low_precision(model: nn.Module) -> bool:
    """Whether factors are powers of two by default: some weights have so few digits that any other factor costs one."""
    return any(p.dtype in (torch.float16, torch.bfloat16) for p in model.parameters())


def _rounded(log_scales: Tensor) -> Tensor:
    return (torch.as_tensor(log_scales).double() / math.log(2)).round() * math.log(2)


def _refuse_unusable(model: nn.Module, symmetry: Symmetry, log_scales: Tensor, tensors: dict[str, Tensor]) -> dict[str, float]:
    """Raise if the model or the log-scales cannot be used.

    Returns:
        {name: largest absolute value} of all parameters and of the buffers to scale.
    """
    if any(t.is_meta for t in tensors.values()):
        raise RescalingError("The model is on the meta device and has no weights: load them first, then rescale.")
    if fingerprint(model) != symmetry.fingerprint:
        raise RescalingError(
            f"{type(model).__name__} has changed since its Symmetry was found (modules, shapes, dtypes or tied weights "
            "differ): call find_symmetry again."
        )
    problems = []
    checked = symmetry._checked(log_scales)
    for unit in torch.nonzero(~checked.isfinite()).flatten().tolist()[:5]:
        problems.append(f"log_scales[{unit}] is {checked[unit].item()}: every log-scale must be finite")
    # Buffers that are not scaled may hold what they like: the −inf of a causal mask, say.
    names = list(dict.fromkeys([*(name for name, _ in model.named_parameters() if name in tensors), *symmetry.scalings]))
    peaks = dict(zip(names, _largest([tensors[name] for name in names]), strict=True))
    for name, peak in peaks.items():
        tensor = tensors[name]
        if tensor.is_inference():
            problems.append(f"{name} was made under torch.inference_mode and cannot be written in place: clone it first")
        if tensor.grad is not None and not is_writable(tensor.grad):
            problems.append(f"the gradient of {name} is sparse, shares memory or is an inference tensor: call zero_grad() first")
        if not math.isfinite(peak):
            problems.append(f"{name} {tuple(tensor.shape)} has NaN or infinite values: repair or reload it first")
    gradients = {
        f"the gradient of {name}": t.grad for name, t in tensors.items() if name in symmetry.scalings and t.grad is not None
    }
    written = {*symmetry.scalings, *gradients}
    for one, other in overlapping([*tensors.items(), *gradients.items()]):
        if one in written or other in written:
            problems.append(f"{one} and {other} share memory, of which the Symmetry knows nothing: call find_symmetry again")
    _raise(problems)
    return peaks


def _largest(tensors: list[Tensor]) -> list[float]:
    """The largest absolute value of each tensor; NaN if it holds one."""
    filled = [t.detach() if t.numel() else torch.zeros(1) for t in tensors]
    peaks = [torch.maximum(t.amax(), -t.amin()).double().cpu() for t in filled]
    return torch.stack(peaks).tolist() if peaks else []


def _raise(problems: list[str]) -> None:
    if problems:
        raise RescalingError("The model was not changed, because\n  - " + "\n  - ".join(problems))


def _plan(symmetry: Symmetry, t: Tensor, tensors: dict[str, Tensor]) -> tuple[dict[str, Factor], dict[str, Tensor]]:
    """The factors to apply, and the running variances to set; tensors whose factor is 1 are left out."""
    factors, variances = {}, {}
    grow, shrink, moves = _exp(t), _exp(-t), t != 0
    for name, scaling in symmetry.scalings.items():
        tensor, plus, minus = tensors[name], scaling.plus.long(), scaling.minus.long()
        if scaling.epsilon is not None:
            moved = scaled_variance(tensor.detach().cpu(), t[plus], scaling.epsilon)
            variances[name] = moved.to(tensor.device, tensor.dtype)
            continue
        parts = [scale[ids].to(tensor.device) for scale, ids in ((grow, plus), (shrink, minus)) if bool(moves[ids].any())]
        if parts:
            factors[name] = Factor(tuple(parts))
    return factors, variances


def _exp(log_scales: Tensor) -> Tensor:
    """exp, exactly a power of two where the argument is a whole multiple of log 2."""
    octaves = log_scales / math.log(2)
    whole = octaves.round()
    power = torch.ldexp(torch.ones_like(whole), whole.int())
    return torch.where((octaves - whole).abs() < 1e-12 * whole.abs().clamp(min=1), power, log_scales.exp())


def _refuse_overflow(
    factors: dict[str, Factor],
    variances: dict[str, Tensor],
    tensors: dict[str, Tensor],
    peaks: dict[str, float],
    copies: dict[str, Tensor] | None,
) -> None:
    """Refuse factors that leave the range of a parameter's type, and variances that would become negative."""
    problems = []
    for name, factor in factors.items():
        tensor, range_ = tensors[name].detach(), torch.finfo(tensors[name].dtype)
        smallest, largest = factor.bounds
        if not tensor.numel():
            continue
        # Without a copy to look at: nothing is lost while factors stay this far inside the type's range.
        if copies is None and max(peaks[name], 1.0) * largest <= range_.max and smallest >= 1e-3:
            continue
        moved = copies[name] if copies is not None else factor.times(tensor)
        lost = ((moved == 0) & (tensor != 0)).any()
        if copies is not None and range_.smallest_normal <= float(moved.abs().max()):
            lost = torch.zeros_like(lost)  # what is lost is below the rounding of the tensor's largest; verification decides
        if not moved.isfinite().all() or lost:
            problems.append(
                f"{name} {tuple(tensor.shape)} would {'underflow' if lost else 'overflow'} {tensor.dtype}: its factors lie "
                f"between {smallest:.3g} and {largest:.3g}; use smaller log-scales or a wider type"
            )
    for name, variance in variances.items():
        if not (variance > 0).all():
            at = int((~(variance > 0)).nonzero()[0])
            problems.append(
                f"{name}[{at}] = {float(tensors[name][at]):.3g} would become {float(variance[at]):.3g}: a scale so small in front "
                "of a norm is not absorbed by its ε; keep log-scales within symmetry.log_scale_bounds(model)"
            )
    _raise(problems)


def _verify(
    model: nn.Module, symmetry: Symmetry, copies: dict[str, Tensor], tolerance: float | None, train_tolerance: float | None
) -> tuple[float, float]:
    """Relative change of the outputs in eval and train mode if the copies were written."""
    limit = tolerance if tolerance is not None else default_tolerance(model)
    changes = []
    for training in (False, True):
        before = example_outputs(model, symmetry.example_inputs, {}, training=training)
        after = example_outputs(model, symmetry.example_inputs, copies, training=training)
        changes.append(output_change(before, after))
    in_eval, in_train = changes
    if not in_eval <= limit:
        _raise([
            f"the eval output would change by {in_eval:.3g} (relative), above the tolerance of {limit:.3g}: either rounding "
            "(extreme log-scales, low precision; pass a larger tolerance) or a dependence that the captured graph does not "
            "show (hooks, global state, a model that draws random numbers in eval mode)"
        ])  # fmt: skip
    why = _why_train_differs(symmetry)
    if train_tolerance is not None and not in_train <= train_tolerance:
        raise TrainChangeError(
            f"The model was not changed, because its train output would change by {in_train:.3g} (relative), above the "
            f"train_tolerance of {train_tolerance:.3g}: {why}"
        )
    if in_train > TRAIN_CHANGE_WORTH_SAYING:
        logger.warning("The train-mode output changes by %.3g (relative): %s.", in_train, why)
    return in_eval, in_train


def _why_train_differs(symmetry: Symmetry) -> str:
    if symmetry.approximate:
        return "approximate=True keeps the function only approximately"
    if symmetry.normalization == "paper":
        return 'normalization="paper" keeps eval mode only'
    return "some scales in front of a norm are small against its ε; symmetry.log_scale_bounds(model) gives the safe range"


def _write(
    tensors: dict[str, Tensor], factors: dict[str, Factor], copies: dict[str, Tensor] | None, variances: dict[str, Tensor]
) -> None:
    for name, factor in factors.items():
        tensor = tensors[name]
        if copies is not None:
            tensor.copy_(copies[name])
        else:
            factor.times(tensor.detach(), out=tensor.detach())
        if tensor.grad is not None:
            factor.times(tensor.grad.detach(), power=-1, out=tensor.grad.detach())
    for name, variance in variances.items():
        tensors[name].copy_(variance)
