"""Rescale a model in place: parameters, buffers, gradients, optimizer state; verified, all or
nothing.

Everything is computed and checked before the first write. Tensors keep their identity and address:
values are written with in-place ops under ``no_grad``, so optimizers, compiled models and DDP keep
their references.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from ..capture.outputs import default_tolerance, example_outputs, output_change
from ..capture.usable import negative_variances
from ..distributed.ranks import Ranks
from ..distributed.sharding import computes_in, has_unreduced_gradients, is_sharded, local
from ..errors import MismatchError, RescalingError, TrainChangeError, refuse
from ..interrupts import uninterrupted
from ..memory import find_overlaps, is_writable, storage_of, values_of
from ..numerics import ceilings
from ..rules.values import Scaling
from ..symmetry.held import list_frozen
from ..symmetry.sizes import Example
from ..symmetry.symmetry import Symmetry, require_fitting, scale_variance
from ..text import count_are, count_of, first_of
from ..wrappers import unwrap
from .factor import Factor, list_factors
from .moves import Move, Setting, list_problems, make_
from .optimizer_state import (
    Optimizers,
    Transport,
    list_optimizers,
    list_tensors,
    require_own,
    transport,
)

logger = logging.getLogger("pathcond")

TRAIN_CHANGE_WORTH_SAYING = 1e-2
# Optimizers whose state starts anew, as was said: once, however often a training run teleports.
SAID: WeakSet[torch.optim.Optimizer] = WeakSet()


@dataclass(frozen=True, kw_only=True)
class Rescaling:
    """What a rescaling did to the function, measured on the example batch.

    Attributes:
        output_change_eval: Largest change of an output in eval mode relative to the largest output;
            None if not verified.
        output_change_train: The same in train mode, where ε of normalizations enters.
        rounded: Whether factors were rounded to powers of two.
        optimizer_reset: Parameters whose optimizer state could not be moved and starts anew
            (factored moments of Adafactor).
        seconds: Wall-clock time of the call.
    """

    output_change_eval: float | None
    output_change_train: float | None
    rounded: bool
    optimizer_reset: tuple[str, ...]
    seconds: float


def rescale_(
    model: nn.Module,
    symmetry: Symmetry,
    log_scales: Tensor,
    *,
    optimizer: Optimizers | None = None,
    optimizer_state: str = "transport",
    copies: Iterable[nn.Module | Mapping[str, Tensor]] = (),
    round_to_power_of_two: bool | None = None,
    verify: bool = True,
    tolerance: float | None = None,
    train_tolerance: float | None = None,
    group: Any = None,
) -> Rescaling:
    """Multiply every parameter and buffer by its factor; the function stays what it was.

    Args:
        model: The model whose Symmetry was found. Of several processes (DistributedDataParallel,
            fully_shard) all must call.
        symmetry: From ``find_symmetry``.
        log_scales: log λ per unit, (num_units,).
        optimizer: If given, its state moves to the new coordinates; several as a list.
        optimizer_state: "transport", "reset" or "keep".
        copies: Averages of the model (AveragedModel, EMA) and float32 masters of its parameters, to
            be scaled along: modules of the same architecture, or tensors by parameter name.
            Masters' gradients and optimizer state move too.
        round_to_power_of_two: Round every λ to a power of two, which makes the multiplication
            exact. Default: only for models that have float16 or bfloat16 parameters, or compute in
            these types.
        verify: Run the example batch through the rescaled weights before the first write.
        tolerance: Largest relative change of an eval output; default √eps of the least precise type
            that parameters have or outputs pass through.
        train_tolerance: Largest relative change of a train output; by default it is only reported.
        group: The processes that hold copies of a model that is not wrapped; by default those of
            its wrapper.

    Returns:
        The measured change of the outputs in both modes.

    Raises:
        RescalingError: With every reason; the model is bit for bit what it was, in every process.
    """
    refuse_tolerances(tolerance, train_tolerance)
    start = time.perf_counter()
    ranks, model = Ranks.of(model, group), unwrap(model)
    change_eval = change_train = None
    with uninterrupted(), torch.no_grad():
        with ranks.together():
            copies = list_copies(copies)
            rounded = (
                is_low_precision(model, symmetry, copies)
                if round_to_power_of_two is None
                else round_to_power_of_two
            )
            plan = _plan(
                model,
                symmetry,
                _round_to_powers(log_scales) if rounded else log_scales,
                _Along(copies, list_optimizers(optimizer), optimizer_state),
                verify=verify,
            )
        ranks.same("log-scales", {"log_scales": torch.as_tensor(log_scales)})
        ranks.same(
            "parameters",
            {} if ranks.alone else {n: p for n, p in model.named_parameters() if not is_sharded(p)},
        )
        if verify:
            with ranks.together():
                change_eval, change_train = _verify(
                    model, symmetry, plan, ranks, tolerance, train_tolerance
                )
        plan.write()  # from here on no process waits for another
    optimizers = set(list_optimizers(optimizer))
    if (names := plan.transport.reset_names) and not optimizers <= SAID:
        SAID.update(optimizers)
        logger.warning(
            "The optimizer state of %s cannot be rescaled and starts anew: %s",
            count_of(len(names), "parameter"),
            first_of(names),
        )
    return Rescaling(
        output_change_eval=change_eval,
        output_change_train=change_train,
        rounded=rounded,
        optimizer_reset=plan.transport.reset_names,
        seconds=time.perf_counter() - start,
    )


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """Everything that will be written, checked.

    Attributes:
        tensors: Parameters and buffers to scale, or what this process holds of them.
        factors: By name; those that are 1 are left out.
        values: New values of parameters and buffers, if they were computed ahead; running variances
            always are.
        moves: Gradients, optimizer state and copies.
        settings: Running variances of copies.
        transport: The optimizer state among the moves, and what is reset.
    """

    tensors: dict[str, Tensor]
    factors: dict[str, Factor]
    values: dict[str, Tensor]
    moves: list[Move]
    settings: list[Setting]
    transport: Transport

    def values_of_own_copies(self, model: nn.Module) -> dict[str, Tensor]:
        """New values of copies that are tensors of the model itself, by their names there: the
        average of one part of a model may be another part of it.
        """
        named = [*model.named_parameters(), *model.named_buffers()]
        names = {_place(tensor): name for name, tensor in named if storage_of(tensor) is not None}
        moves = {
            names[_place(move.tensor)]: replace(move, tensor=move.tensor.clone())
            for move in self.moves
            if _place(move.tensor) in names
        }
        make_(list(moves.values()))
        return {name: move.tensor for name, move in moves.items()} | {
            names[_place(setting.tensor)]: setting.value
            for setting in self.settings
            if _place(setting.tensor) in names
        }

    @contextmanager
    def on_trial(self) -> Iterator[None]:
        """Run the body with the new values in place of the parameters, then bring the old ones
        back.
        """
        saved = {name: self.tensors[name].clone() for name in self.values}
        try:
            for name, value in self.values.items():
                self.tensors[name].copy_(value)
            yield
        finally:
            try:
                self._put_back(saved)
            # raised into this thread by another one, which no signal mask prevents
            except BaseException:
                self._put_back(saved)
                raise

    def _put_back(self, saved: dict[str, Tensor]) -> None:
        for name, value in saved.items():
            self.tensors[name].copy_(value)

    def write(self) -> None:
        not_ahead = [name for name in self.factors if name not in self.values]
        make_(self.moves, [(self.factors[name], self.tensors[name], 1) for name in not_ahead])
        for name, value in self.values.items():
            self.tensors[name].copy_(value)
        for setting in self.settings:
            setting.tensor.copy_(setting.value)
        for reset in self.transport.resets:
            reset()


def refuse_tolerances(tolerance: Any, train_tolerance: Any) -> None:
    """Raise tolerances that are no numbers, or negative."""
    for name, given in (("tolerance", tolerance), ("train_tolerance", train_tolerance)):
        if given is not None and not (isinstance(given, Real) and float(given) >= 0):
            raise ValueError(
                f"{name}={given!r}: give a number that is not negative, the largest relative "
                "change of an output"
            )


def list_copies(copies: Any) -> list[nn.Module | Mapping[str, Tensor]]:
    """Copies of a model as a list of modules and mappings; anything else is refused."""
    if isinstance(copies, (nn.Module, Mapping)) or not isinstance(copies, Iterable):
        raise TypeError(f"copies is a list: copies=[ema], not {type(copies).__name__}")
    found = list(copies)
    for copy in found:
        if not isinstance(copy, (nn.Module, Mapping)):
            raise TypeError(
                f"copies holds a {type(copy).__name__}: give modules, or mappings "
                "from parameter names to tensors"
            )
    return found


def is_low_precision(
    model: nn.Module, symmetry: Symmetry, copies: Iterable[nn.Module | Mapping[str, Tensor]] = ()
) -> bool:
    """Whether factors are powers of two by default: some weights, or what is computed from them,
    have so few digits that any other factor costs one."""
    types = {tensor.dtype for tensor in [*model.parameters(), *list_tensors(copies)]}
    types |= computes_in(model) | symmetry.computed_in
    return not types.isdisjoint((torch.float16, torch.bfloat16))


def _round_to_powers(log_scales: Tensor) -> Tensor:
    return (torch.as_tensor(log_scales).double() / math.log(2)).round() * math.log(2)


@dataclass(frozen=True)
class _Along:
    """What moves along with a model.

    Attributes:
        copies: Averages and masters of it.
        optimizers: Its optimizers.
        optimizer_state: What becomes of their state.
    """

    copies: list[nn.Module | Mapping[str, Tensor]]
    optimizers: list[torch.optim.Optimizer]
    optimizer_state: str


def _plan(
    model: nn.Module,
    symmetry: Symmetry,
    log_scales: Tensor,
    along: _Along,
    *,
    verify: bool,
) -> _Plan:
    """Compute everything that is to be written, and raise every reason why it cannot be."""
    parameters = {n: t for n, t in model.named_parameters() if n in symmetry.shapes}
    named = parameters | {n: t for n, t in model.named_buffers() if n in symmetry.shapes}
    peaks = _refuse_unusable(model, symmetry, log_scales, parameters, named)
    t = symmetry.class_log_scales(log_scales)
    scaled_here = {name: named[name] for name in symmetry.scalings}
    factors = list_factors(symmetry.scalings, t, scaled_here)
    variances = _move_variances(symmetry.scalings, t, scaled_here)
    tensors = {name: local(named[name]) for name in [*factors, *variances]}
    values = (
        {name: factor.times(tensors[name]) for name, factor in factors.items()} if verify else {}
    )
    _refuse_overflow(factors, variances, tensors, peaks, values if verify else None)
    others = [_tensors_of(copy, named, [*factors, *variances]) for copy in along.copies]
    copied = [
        (name, other[name], factor)
        for other in others
        for name, factor in list_factors(symmetry.scalings, t, other).items()
    ]
    settings = [
        Setting(f"{name} of a copy", other[name].detach(), value)
        for other in others
        for name, value in _move_variances(symmetry.scalings, t, other).items()
    ]
    scaled = [*((name, named[name], factor) for name, factor in factors.items()), *copied]
    _say_what_no_optimizer_holds(require_own(along.optimizers, model, along.copies), scaled)
    known = [*model.parameters(), *model.buffers(), *list_tensors(along.copies)]
    moved = transport(along.optimizers, along.optimizer_state, scaled, known)
    moves = [
        *(
            Move.of(f"the gradient of {name}", tensor.grad, factor, -1)
            for name, tensor, factor in scaled
            if tensor.grad is not None
        ),
        *(Move.of(f"{name} of a copy", tensor, factor, 1) for name, tensor, factor in copied),
        *moved.moves,
    ]
    _refuse_to_move(tensors, moves, settings)
    return _Plan(
        tensors=tensors,
        factors=factors,
        values=values | variances,
        moves=moves,
        settings=settings,
        transport=moved,
    )


def _refuse_to_move(tensors: dict[str, Tensor], moves: list[Move], settings: list[Setting]) -> None:
    """Raise what is wrong with tensors that move along: overflow, negative variances, shared
    memory.
    """
    problems = list_problems(moves)
    problems += [
        f"{setting.what} would become negative"
        for setting in settings
        if not bool((setting.value > 0).all())
    ]
    written = [
        *tensors.items(),
        *((f"{move.what} ({i})", move.tensor) for i, move in enumerate(moves)),
    ]
    problems += [
        f"{one} and {other} share memory: only one of them may be passed"
        for one, other in find_overlaps(written)
    ]
    refuse(problems)


def _say_what_no_optimizer_holds(
    held: dict[int, Tensor], scaled: list[tuple[str, Tensor, Factor]]
) -> None:
    """Frozen parameters, or those of an optimizer that was not passed: their state would not move
    along.
    """
    outside = dict.fromkeys(name for name, _, _ in scaled)
    for name, tensor, _ in scaled:
        if id(tensor) in held:
            outside.pop(name, None)
    if held and outside:
        logger.info(
            "%s in no optimizer: %s",
            count_are(len(outside), "rescaled parameter"),
            first_of([*outside]),
        )


def _tensors_of(
    copy: nn.Module | Mapping[str, Tensor], named: dict[str, Tensor], names: list[str]
) -> dict[str, Tensor]:
    """The tensors of a copy that are to be scaled, by name; those that are the model's own are left
    out.
    """
    if isinstance(copy, nn.Module):
        inner = unwrap(copy)
        held = dict([*inner.named_parameters(), *inner.named_buffers()])
        average = getattr(inner, "module", None)
        # as EMA wrappers have it
        if not held.keys() & set(names) and isinstance(average, nn.Module):
            return _tensors_of(average, named, names)
        missing = [name for name in names if name not in held]
        if missing:
            raise MismatchError(
                "The model was not changed, because a copy of it has no "
                f"{', '.join(missing[:3])}: {type(copy).__name__}"
            )
    else:
        held = dict(copy)
        if not held.keys() & named.keys():
            raise MismatchError(
                "The model was not changed, because a copy of it knows none of its parameters by "
                "name: "
                f"{', '.join(list(held)[:3])} ... instead of {', '.join(list(named)[:3])} ..."
            )
    found = {name: held[name] for name in names if name in held and held[name] is not named[name]}
    for name, tensor in found.items():
        if tensor.shape != named[name].shape:
            raise MismatchError(
                f"The model was not changed, because {name} is {tuple(named[name].shape)} and "
                f"{tuple(tensor.shape)} in a copy of it"
            )
    return found


def _refuse_unusable(
    model: nn.Module,
    symmetry: Symmetry,
    log_scales: Tensor,
    parameters: Iterable[str],
    tensors: dict[str, Tensor],
) -> dict[str, float]:
    """Raise if the model or the log-scales cannot be used.

    Args:
        model, symmetry, log_scales: What is to be done.
        parameters: Names of those among the tensors.
        tensors: Parameters and buffers of the model.

    Returns:
        {name: a number that no absolute value exceeds} of all parameters and of the buffers to
        scale.
    """
    if any(t.is_meta for t in tensors.values()):
        raise RescalingError(
            "The model is on the meta device and has no weights: load them first, then rescale."
        )
    require_fitting(model, symmetry)
    if symmetry.frozen == "keep":
        kept = sorted(list_frozen(model) & symmetry.scalings.keys())
        if kept:
            raise MismatchError(
                f"{first_of(kept)} no longer requires a gradient since the symmetry was "
                "found, and frozen parameters stay as they are. If it is to stay frozen, call "
                "find_symmetry, prepare or teleport again, whichever you called before. If it is "
                "frozen for a while only, as Lightning's toggle_optimizer does for a step, pass "
                'frozen="move" to that call: frozen parameters are then rescaled too.'
            )
    problems = negative_variances(model)
    if has_unreduced_gradients(model):
        problems.append(
            "gradients of fully_shard wait to be summed over the processes: rescale "
            "after the step, or zero_grad()"
        )
    checked = symmetry._check_shape(log_scales)
    for unit in torch.nonzero(~checked.isfinite()).flatten().tolist()[:5]:
        problems.append(
            f"log_scales[{unit}] is {checked[unit].item()}: every log-scale must be finite"
        )
    # Buffers that are not scaled may hold what they like: the −inf of a causal mask, say.
    names = list(dict.fromkeys([*parameters, *symmetry.scalings]))
    peaks = dict(zip(names, ceilings([local(tensors[name]) for name in names]), strict=True))
    for name, peak in peaks.items():
        tensor = tensors[name]
        if tensor.is_inference():
            problems.append(
                f"{name} was made under torch.inference_mode and cannot be written "
                "in place: clone it first"
            )
        if not math.isfinite(peak):
            problems.append(
                f"{name} {tuple(tensor.shape)} has NaN or infinite values: repair or "
                "reload it first"
            )
    gradients = {
        f"the gradient of {name}": values_of(local(t.grad))
        for name, t in tensors.items()
        if name in symmetry.scalings and t.grad is not None
    }
    problems += [
        f"{what} cannot be written in place, because it shares memory, is made of other tensors or "
        "is an inference tensor: clone it, or call zero_grad() before"
        for what, gradient in gradients.items()
        if not is_writable(gradient)
    ]
    written = {*symmetry.scalings, *gradients}
    held = [(name, local(t)) for name, t in tensors.items()]
    for one, other in find_overlaps([*held, *gradients.items()]):
        if one in written or other in written:
            problems.append(
                f"{one} and {other} share memory, of which the Symmetry knows "
                "nothing: call find_symmetry again"
            )
    refuse(problems)
    return peaks


def _move_variances(
    scalings: Mapping[str, Scaling], t: Tensor, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """New values of the running variances among some tensors, in their type and on their device;
    those that stay are left out.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[str]] = {}
    for name, tensor in tensors.items():
        if scalings[name].epsilon is not None:
            alike.setdefault((tensor.device, tensor.dtype), []).append(name)
    found: dict[str, Tensor] = {}
    for (device, dtype), names in alike.items():  # of all at once, as they are small and many
        held = [tensors[name].detach() for name in names]
        lengths = torch.tensor([variance.numel() for variance in held])
        epsilons = torch.tensor([scalings[name].epsilon for name in names], dtype=torch.float64)
        classes = [scalings[name].plus.expand(tensors[name].shape) for name in names]
        t_here = t[torch.cat(classes)]
        moves = torch.segment_reduce(t_here.abs(), "max", lengths=lengths) > 0
        values = scale_variance(
            torch.cat(held).cpu(), t_here, epsilons.repeat_interleave(lengths)
        ).to(device, dtype)
        split = values.split(lengths.tolist())
        found |= {names[i]: split[i] for i in moves.nonzero().flatten().tolist()}
    return found


def _refuse_overflow(
    factors: dict[str, Factor],
    variances: dict[str, Tensor],
    tensors: dict[str, Tensor],
    peaks: dict[str, float],
    values: dict[str, Tensor] | None,
) -> None:
    """Refuse factors that leave the range of a parameter's type, and variances that would become
    negative.
    """
    problems = []
    for name, factor in factors.items():
        tensor = tensors[name]
        range_ = torch.finfo(tensors[name].dtype)
        smallest, greatest = factor.bounds
        # Nothing is lost while factors stay this far inside the type's range.
        if not tensor.numel() or (
            max(peaks[name], 1.0) * greatest <= range_.max and smallest >= 1e-3
        ):
            continue
        moved = values[name] if values is not None else factor.times(tensor)
        lost = ((moved == 0) & (tensor != 0)).any()
        if values is not None and range_.smallest_normal <= float(moved.abs().max()):
            # what is lost is below the rounding of the tensor's largest; verification decides
            lost = torch.zeros_like(lost)
        if not moved.isfinite().all() or lost:
            problems.append(
                f"{name} {tuple(tensor.shape)} would {'underflow' if lost else 'overflow'} "
                f"{tensor.dtype}: its factors lie "
                f"between {smallest:.3g} and {greatest:.3g}; use smaller log-scales or a wider type"
            )
    for name, variance in variances.items():
        if not (variance > 0).all():
            at = int((~(variance > 0)).nonzero()[0])
            problems.append(
                f"{name}[{at}] = {float(tensors[name][at]):.3g} would become "
                f"{float(variance[at]):.3g}: a scale so small in front "
                "of a norm is not absorbed by its ε; keep log-scales within "
                "symmetry.log_scale_bounds(model)"
            )
    refuse(problems)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor lies, which its views of all of it share."""
    memory = storage_of(tensor)
    return (memory, *((tensor.storage_offset(), tensor.shape, tensor.stride()) if memory else ()))


def _verify(
    model: nn.Module,
    symmetry: Symmetry,
    plan: _Plan,
    ranks: Ranks,
    tolerance: float | None,
    train_tolerance: float | None,
) -> tuple[float, float]:
    """Relative change of the outputs in eval and train mode if the plan were written; the largest
    over all examples.
    """
    limit = tolerance if tolerance is not None else default_tolerance(model, symmetry.computed_in)
    own_copies = plan.values_of_own_copies(model)
    values = plan.values | own_copies

    def change(example: Example, *, training: bool) -> float:
        before = example_outputs(model, example.inputs, {}, training=training)
        if ranks.sharded:  # forward gathers the parameters from where they are
            with plan.on_trial():
                after = example_outputs(model, example.inputs, {}, training=training)
        else:
            after = example_outputs(model, example.inputs, values, training=training)
        # At sizes of our own choice a model may have no result: a deviation over too few samples.
        if not example.given and any(bool(output.isnan().any()) for output in before):
            return 0.0
        return output_change(before, after)

    in_eval = _worst(
        change(example, training=False) for example in symmetry.examples if example.runnable
    )
    in_train = _worst(
        change(example, training=True) for example in symmetry.examples if example.given
    )
    if not in_eval <= limit:
        refuse(
            [
                _unrepeatable(model, symmetry, ranks, training=False, limit=limit)
                or f"the eval output would change by {in_eval:.3g} (relative), above the tolerance "
                f"of {limit:.3g}: either rounding "
                "(extreme log-scales, low precision; pass a larger tolerance) or a dependence that "
                "the captured graph does not "
                "show (hooks, global state, a model that draws random numbers in eval mode)"
                + (
                    ", or copies= names a part of the model without its buffers: give all of its "
                    "state_dict()"
                    if own_copies
                    else ""
                )
            ]
        )
    why = _why_train_differs(symmetry)
    if train_tolerance is not None and not in_train <= train_tolerance:
        unrepeatable = _unrepeatable(model, symmetry, ranks, training=True, limit=train_tolerance)
        if unrepeatable:  # no other scales would help
            refuse([unrepeatable])
        raise TrainChangeError(
            f"The model was not changed, because its train output would change by {in_train:.3g} "
            "(relative), above the "
            f"train_tolerance of {train_tolerance:.3g}: {why}"
        )
    if in_train > TRAIN_CHANGE_WORTH_SAYING:
        limit = TRAIN_CHANGE_WORTH_SAYING
        why = _unrepeatable(model, symmetry, ranks, training=True, limit=limit) or why
        logger.warning("The train-mode output changes by %.3g (relative): %s.", in_train, why)
    return in_eval, in_train


def _worst(changes: Iterable[float]) -> float:
    """The largest change; not a number if one of them is none."""
    found = list(changes)
    return math.nan if any(math.isnan(change) for change in found) else max(found)


def _why_train_differs(symmetry: Symmetry) -> str:
    if symmetry.approximate:
        return "approximate=True keeps the function only approximately"
    if symmetry.normalization == "paper":
        return 'normalization="paper" keeps eval mode only'
    return (
        "some scales in front of a norm are small against its ε "
        "(symmetry.log_scale_bounds(model) gives the safe range), or the "
        "model draws random numbers from a generator of its own"
    )


def _unrepeatable(
    model: nn.Module, symmetry: Symmetry, ranks: Ranks, *, training: bool, limit: float
) -> str:
    """A sentence on outputs that change from run to run, whatever the weights; empty if they do
    not.
    """
    # others would wait for this process if it ran the model more often than they do
    if not ranks.alone:
        return ""
    one, other = (
        example_outputs(model, symmetry.example_inputs, {}, training=training) for _ in range(2)
    )
    change = output_change(one, other)
    if not change > max(limit, 0.0):
        return ""
    return (
        f"two runs on the same batch with the same weights differ by {change:.3g} (relative) in "
        f"{'train' if training else 'eval'} "
        "mode: the model draws random numbers from a generator of its own, or keeps state from "
        "call to call, so a rescaling cannot be verified there. Let it draw from torch's own "
        "generator, and compute from its inputs and weights alone"
    )
