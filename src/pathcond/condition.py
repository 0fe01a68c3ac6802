"""``condition_``: find the symmetries, measure the diagonal of G, solve for the best rescaling,
write it, prove it harmless.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from .advice import warn_of_what_may_hurt, warn_where_nothing_is_gained
from .capture.models import Inputs, as_call
from .capture.outputs import first_samples
from .capture.usable import refuse_unusable_weights, require_usable
from .criteria.criterion import PATH_KERNEL, Criterion, Measurement
from .criteria.problem import NoEnergyError, Problem, any_positive, select_counted
from .distributed.ranks import Ranks, is_ambiguous
from .errors import RescalingError, TrainChangeError
from .lifting.lifting import capture_sample, path_energy
from .lifting.reads import measure_both, measure_reads
from .lifting.sample import Prepared, Sample
from .measured.layers import BalancedLayers
from .report import DiagonalSample, Report, diagonal_sample, take_entries
from .rescaling.optimizer_state import Optimizers
from .rescaling.rescale import (
    Rescaling,
    is_low_precision,
    list_copies,
    refuse_tolerances,
    rescale_,
)
from .solvers import DEFAULT, CoordinateDescent, Exact, Pace, Solution, Solver
from .solvers.boxes import Boxes
from .solvers.pace import keep_pace, unconstrained_at_zero
from .solvers.rounding import to_powers_of_two
from .solvers.solver import check_combination
from .symmetry.symmetry import (
    SAFE_EPSILON_SHARE,
    FrozenPolicy,
    Normalization,
    Symmetry,
    find_symmetry,
    require_fitting,
)
from .wrappers import unwrap

logger = logging.getLogger("pathcond")

MAX_SAMPLES = 256

# What scales in front of a norm may change the share of ε in it by: the first at which train
# outputs keep to their tolerance.
EPSILON_SHARES = (1e-2, 1e-3, 1e-4, 1e-5, 0.0)
# a gradient per parameter at which a model is at its optimum but for the rounding of its weights
ARRIVED = 1e-7
RUNAWAY = 50.0  # |log λ| beyond which only a solver that has arrived is believed


class ConditionOptions(TypedDict, total=False):
    """Options of ``condition_`` that ``teleport`` passes on."""

    other_inputs: Inputs
    frozen: FrozenPolicy
    exclude: str | Iterable[str]
    calibrate: bool
    max_log_scale: float | None
    round_to_power_of_two: bool | None
    approximate: bool
    optimizer_state: str
    copies: Iterable[nn.Module | Mapping[str, Tensor]]
    verify: bool
    tolerance: float | None
    train_tolerance: float
    group: Any
    describe: bool
    max_samples: int | None
    progress: Callable[[str], object]


def prepare(
    model: nn.Module,
    example_inputs: Inputs | Prepared,
    *,
    other_inputs: Inputs | None = None,
    normalization: Normalization = "batch",
    approximate: bool = False,
    frozen: FrozenPolicy = "keep",
    exclude: str | Iterable[str] = (),
    max_samples: int | None = MAX_SAMPLES,
    criterion: Criterion | None = None,
) -> Prepared:
    """Capture a model once, to condition it as often as its weights change.

    ``condition_`` and ``teleport`` take the result in place of the example inputs.

    Args:
        model, example_inputs, other_inputs, normalization, approximate, frozen, exclude: As in
            ``find_symmetry``.
        max_samples: Of a larger batch only the first samples are kept, as many as this, as far as
            the model treats samples one by one in eval mode; None for all.
        criterion: What will be balanced. One that has a loss, whose labels belong to all samples,
            has the whole batch kept for it; everything else uses the first samples.
    """
    if isinstance(example_inputs, Prepared):
        require_fitting(unwrap(model), example_inputs.symmetry)
        _refuse_other_settings(example_inputs.symmetry, normalization, approximate, frozen)
        if other_inputs is not None or exclude:
            raise ValueError(
                "The model was prepared already: pass other_inputs and exclude to prepare"
            )
        return example_inputs
    # Copies, whatever the user does to the inputs later.
    cut = _cut(model, example_inputs, max_samples)
    example = _copy(cut)
    needs_more = criterion is not None and criterion.needs_whole_batch and cut is not example_inputs
    other_inputs = None if other_inputs is None else _copy(other_inputs)
    symmetry = find_symmetry(
        model,
        example,
        other_inputs=other_inputs,
        normalization=normalization,
        approximate=approximate,
        frozen=frozen,
        exclude=exclude,
    )
    return Prepared(
        symmetry=symmetry,
        sample=capture_sample(model, example),
        whole_batch=_copy(example_inputs) if needs_more else None,
    )


def _refuse_other_settings(
    given: Symmetry, normalization: str, approximate: bool, frozen: str
) -> None:
    asked = {"normalization": normalization, "approximate": approximate, "frozen": frozen}
    for name, value in asked.items():
        if getattr(given, name) != value:
            raise ValueError(
                f"The model was prepared with {name}={getattr(given, name)!r}, not {value!r}: "
                "pass the same value to both calls"
            )


def _cut(model: nn.Module, example_inputs: Inputs, max_samples: int | None) -> Any:
    if max_samples is None:
        return example_inputs
    if max_samples < 2:
        raise ValueError(f"max_samples must be at least 2, or None for all, not {max_samples}")
    require_usable(*as_call(example_inputs))
    return first_samples(unwrap(model), example_inputs, max_samples)


def _copy(inputs: Inputs) -> Any:
    kept = dict(inputs) if isinstance(inputs, Mapping) else inputs
    return tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, kept)


def condition_(
    model: nn.Module,
    example_inputs: Inputs | Prepared,
    *,
    criterion: Criterion | None = None,
    pace: Pace = None,
    solver: Solver = DEFAULT,
    other_inputs: Inputs | None = None,
    normalization: Normalization = "batch",
    frozen: FrozenPolicy = "keep",
    exclude: str | Iterable[str] = (),
    calibrate: bool = True,
    max_log_scale: float | None = None,
    round_to_power_of_two: bool | None = None,
    approximate: bool = False,
    optimizer: Optimizers | None = None,
    optimizer_state: str = "transport",
    copies: Iterable[nn.Module | Mapping[str, Tensor]] = (),
    verify: bool = True,
    tolerance: float | None = None,
    train_tolerance: float = 1e-2,
    group: Any = None,
    describe: bool = True,
    max_samples: int | None = MAX_SAMPLES,
    progress: Callable[[str], object] = lambda stage: None,
) -> Report:
    """Move the weights, in place, to where a criterion is least; the function stays what it was.

    Args:
        model: Any module. Wrappers such as DistributedDataParallel and torch.compile are looked
            through; of several processes that train one model together all must call.
        example_inputs: One batch: a Tensor, a tuple of positional inputs or a dict of keyword
            inputs; or what ``prepare`` made.
        criterion: What is balanced: ``BalancedLayers()``, ``BalancedNorms()``, ``Curvature()``,
            ``PathKernel()`` (the paper's) or one of your own. Default: ``BalancedLayers()``; with
            ``CoordinateDescent()`` or ``pace="keep"``, ``PathKernel()``.
        pace: "keep" takes the best of the rescalings that leave the sum of the criterion's energies
            as it was, so that the learning rate can stay; None takes the best of all.
        solver: ``Exact()``, ``CoordinateDescent()`` (the paper's ten sweeps) or ``ENorm()``, which
            has a criterion of its own.
        normalization: Which side of a normalization layer carries a scale: "absorb" (in front,
            where running statistics follow), "gain" (behind), "full" (both), "batch" (both where it
            has running statistics, as BatchNorm, else neither), "paper" (one scale through it;
            keeps eval mode only).
        other_inputs, frozen, exclude: Further examples, and what stays as it is; see
            ``find_symmetry``.
        calibrate: Measure statistics of fresh normalization layers and gates on the batch, for
            diag(G); False is the paper's computation. What weights read, for ``BalancedLayers()``,
            is always measured. Under "paper", what is measured of BatchNorms that have tracked no
            batch does not follow the rescaling, and a second call moves the weights again.
        max_log_scale: Bound on |log λ| of this call; ``math.inf`` for none. Default: weights stay
            within a factor of 12 of balance (``balance_bounds``), which holds however often it is
            called; there is no bound under "paper" and for what is a balance itself (``ENorm``,
            ``BalancedNorms``, ``BalancedLayers``); with ``approximate`` it is 2.5, as in the paper.
        round_to_power_of_two: Make the rescaling bitwise exact. Default: only for models that have
            float16 or bfloat16 weights, or compute in these types.
        approximate: Treat smooth activations (GELU, SiLU) as ReLU and free the fronts of norms
            without running statistics. The output then changes a little; the report says by how
            much.
        optimizer: If given, its state moves to the new coordinates; several as a list.
        optimizer_state: "transport", "reset" or "keep".
        copies: Averages of the model (AveragedModel, EMA) and float32 masters, to be scaled along;
            see ``rescale_``.
        verify: Run the batch through the rescaled weights before the first write.
        tolerance: Largest relative change of an eval output; default √eps of the least precise type
            that parameters have or outputs pass through, none with ``approximate``.
        train_tolerance: The same in train mode, where ε of normalization layers enters; not for
            "paper" and ``approximate``.
        group: The processes that hold copies of a model that is not wrapped; by default those of
            its wrapper.
        describe: Sample diag(G) before and after for the report; False saves that work.
        max_samples: How many samples of the batch are used, to measure and to verify; None for all.
            A criterion that has a loss measures on all of them. See ``prepare``, which has cut the
            batch already if it was called before.
        progress: Called with the name of each stage as it begins.

    Returns:
        What was done: a table in the terminal, a page by ``to_html``, plain data by ``to_dict``.

    Raises:
        UnsupportedModelError: The model cannot be captured.
        EnergyRangeError: Path energies that the criterion needs leave the range of float64, or the
            curvature is not finite.
        RescalingError: The rescaling cannot be written, or would change the function, or the
            criterion has no minimum. The model is bit for bit what it was.

    >>> import torch, pathcond
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
    ... ).double()
    >>> x = torch.randn(16, 8).double()
    >>> before = model(x)
    >>> report = pathcond.condition_(model, x)
    >>> torch.allclose(model(x), before), report.objective_after <= report.objective_before
    (True, True)
    >>> bool(
    ...     pathcond.condition_(model, x).log_scales.abs().max() < 1e-6
    ... )  # conditioning twice does nothing
    True
    """
    check_combination(solver, criterion, pace)
    refuse_tolerances(tolerance, train_tolerance)
    criterion = _choose_criterion(criterion, solver, pace)
    copies = list_copies(copies)
    ranks = Ranks.of(model, group)
    stages = _Stages(progress)
    _warn_where_each_has_its_own(model, group)
    with ranks.together(), stages("symmetry"):
        prepared = prepare(
            model,
            example_inputs,
            other_inputs=other_inputs,
            normalization=normalization,
            approximate=approximate,
            frozen=frozen,
            exclude=exclude,
            max_samples=max_samples,
            criterion=criterion,
        )
        symmetry = prepared.symmetry
        refuse_unusable_weights(unwrap(model))
        if round_to_power_of_two is None:
            round_to_power_of_two = is_low_precision(unwrap(model), symmetry, copies)

    with ranks.together(), stages("energy"):
        entries: Mapping[str, Tensor] = {}
        posed = None
        if ranks.computes:
            needed = criterion.measures if solver.needs_energy else None
            entries, measured = _measure(
                model, prepared.sample, needed, calibrate, approximate, describe=describe
            )
            posed = _pose(prepared, measured, solver, criterion, model)

    parameters = dict(unwrap(model).named_parameters())
    boxes = Boxes(symmetry, model, ranks, solver, criterion, max_log_scale)

    def solve(share: float) -> _Solved:
        bounds = boxes.at(share)
        rounded = bool(round_to_power_of_two)
        solution = _solution(posed, solver, pace, symmetry.num_units, bounds, rounded)
        solution = solution.without_rounding(_precision(parameters.values()))
        if isinstance(solver, Exact):
            _refuse_runaway(solution, symmetry)
        return _Solved(
            solution=solution,
            diagonal=diagonal_sample(symmetry, parameters, entries, solution.log_scales),
            at_bound=boxes.count_at_bound(share, solution.log_scales)
            if isinstance(posed, Problem)
            else {},
        )

    def write(solution: Solution) -> Rescaling:
        return rescale_(
            model,
            symmetry,
            solution.log_scales,
            optimizer=optimizer,
            optimizer_state=optimizer_state,
            copies=copies,
            verify=verify,
            round_to_power_of_two=round_to_power_of_two,
            group=group,
            tolerance=math.inf if approximate and tolerance is None else tolerance,
            train_tolerance=None if approximate or normalization == "paper" else train_tolerance,
        )

    shares: tuple[float, ...] = (SAFE_EPSILON_SHARE,)
    if verify:
        shares = ranks.agree_on(lambda: _shares(posed, solver, pace, boxes))
    solved, rescaling = _first_harmless(shares, solve, write, ranks, stages)
    report = _report(symmetry, solved, solver, criterion, rescaling, stages.seconds)
    warn_of_what_may_hurt(report, criterion)
    warn_where_nothing_is_gained(report, unwrap(model), prepared.sample)
    return report


@dataclass(frozen=True, kw_only=True)
class _Solved:
    """What is to be written, with diag(G) before and after, and the units at a bound."""

    solution: Solution
    diagonal: tuple[DiagonalSample, ...]
    at_bound: dict[str, int]


def _choose_criterion(criterion: Criterion | None, solver: Solver, pace: Pace) -> Criterion:
    """What is minimised: the criterion given, else the default for this solver and pace."""
    if criterion is not None:
        return criterion
    # The paper's solver is for the paper's criterion, and only energies have a sum to keep.
    if pace or isinstance(solver, CoordinateDescent):
        return PATH_KERNEL
    return BalancedLayers()


def _warn_where_each_has_its_own(model: nn.Module, group: Any) -> None:
    if is_ambiguous(model, group):
        logger.warning(
            "Each process conditions a model of its own. Wrap it afterwards in "
            "DistributedDataParallel, which copies the first one's weights to all, or pass "
            "group=torch.distributed.group.WORLD."
        )


def _first_harmless(
    shares: Sequence[float],
    solve: Callable[[float], _Solved],
    write: Callable[[Solution], Rescaling],
    ranks: Ranks,
    stages: _Stages,
) -> tuple[_Solved, Rescaling]:
    """Solve and write, with the first share of ε at which train outputs keep to their tolerance.

    Args:
        shares: By which scales may change the share of ε in a norm, the largest first.
        solve: What to write for a share.
        write: Refuses, with the model untouched, what changes train outputs too much.
        ranks: All of them must come to the same.
        stages: Whose seconds are counted.
    """
    for share in shares:
        with stages("solve"):
            solved = ranks.agree_on(partial(solve, share))
        try:
            with stages("rescale"):
                return solved, write(solved.solution)
        except TrainChangeError:
            if share == EPSILON_SHARES[-1]:
                raise
    raise AssertionError("the last share either holds or raises")


def _refuse_runaway(solution: Solution, symmetry: Symmetry) -> None:
    """Refuse scales that still grew when the solver gave up: there is no minimum in that
    direction.
    """
    sizes = solution.log_scales.abs()
    if solution.converged or not bool((sizes > RUNAWAY).any()):
        return
    unit = int(sizes.argmax())
    where = next(group.name for group in symmetry.groups if unit in group.units)
    raise RescalingError(
        f"The model was not changed, because the criterion has no minimum: it still falls where "
        f"units of {where} have a log-scale of {float(solution.log_scales[unit]):.0f}. Pass "
        "max_log_scale, or leave those weights out by exclude=..."
    )


def _measure(
    model: nn.Module,
    sample: Sample,
    needed: Measurement,
    calibrate: bool,
    approximate: bool,
    *,
    describe: bool,
) -> tuple[Mapping[str, Tensor], Mapping[str, Any]]:
    """Entries of diag(G) for the report, and what the criterion is given."""
    if needed == "reads" and describe and calibrate:
        entries, reads = measure_both(model, sample, approximate=approximate, keep=take_entries)
        return _in_range(entries), reads
    measure = partial(path_energy, model, sample, calibrate=calibrate, approximate=approximate)
    if needed == "diagonal":
        g = measure().diagonal
        return {name: take_entries(values) for name, values in g.items()} if describe else {}, g
    entries = {}
    if describe:  # a criterion that does not need diag(G) is not refused for its range
        entries = _in_range(measure(refuse_out_of_range=False, keep=take_entries).diagonal)
    if needed == "reads":
        return entries, measure_reads(model, sample, approximate=approximate)
    return entries, {}


def _in_range(entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """What was sampled of diag(G), or nothing where that leaves the range of float64."""
    if not entries:
        return entries
    taken = torch.cat(list(entries.values()))
    least = torch.where(taken == 0, torch.inf, taken).min()
    if bool(taken.isfinite().all()) and float(least) >= torch.finfo(torch.float64).tiny:
        return entries
    logger.info("diag(G) leaves the range of float64: the report does not show it.")
    return {}


def _pose(
    prepared: Prepared,
    measured: Mapping[str, Any],
    solver: Solver,
    criterion: Criterion,
    model: nn.Module,
) -> Problem | str:
    """The problem on all rescalings, or why there is none to solve."""
    symmetry = prepared.symmetry
    if not symmetry.num_units:
        return "nothing can be rescaled"
    if not solver.needs_energy:
        return solver.problem(symmetry, {}, model, None)
    diagonal = criterion.measures == "diagonal"
    if diagonal and not any_positive(select_counted(symmetry, measured)):
        return "no trainable parameter lies on a path (diag G is zero): nothing to condition"
    if criterion.needs_whole_batch:
        symmetry = prepared.symmetry_of_whole_batch
    try:
        return solver.problem(symmetry, measured, model, None, criterion)
    except NoEnergyError:
        return f"no parameter has an energy by {criterion!r}: nothing to condition"


def _solution(
    posed: Problem | str | None,
    solver: Solver,
    pace: Pace,
    num_units: int,
    bounds: tuple[Tensor, Tensor],
    rounded: bool,
) -> Solution:
    """What to apply: the solver's answer, in powers of two if asked for, or nothing where there is
    nothing to solve.
    """
    assert posed is not None
    if isinstance(posed, str):
        return Solution.nothing(num_units, posed)
    problem = posed.within(bounds)
    if pace:
        problem, solution = keep_pace(problem, solver)
    else:
        solution = solver.solve(problem)
    return to_powers_of_two(solution, solver, problem, bounds) if rounded else solution


def _precision(parameters: Iterable[Tensor]) -> float:
    """The relative distance between neighbouring numbers of the finest type."""
    types = {parameter.dtype for parameter in parameters if parameter.is_floating_point()}
    return min((torch.finfo(dtype).eps for dtype in types), default=0.0)


def _shares(
    posed: Problem | str | None, solver: Solver, pace: Pace, boxes: Boxes
) -> tuple[float, ...]:
    """The shares of ε to try, the largest first.

    A call that found larger shares to change train outputs too much leaves a model at the optimum
    of a smaller box. Compared with that model the larger ones may seem harmless, so a model that is
    at the optimum of a box already stays in it: in the largest one of which that is so.
    """
    if not (
        solver.needs_energy and isinstance(posed, Problem) and len(boxes.epsilon_shares.classes)
    ):
        return EPSILON_SHARES
    reached = [share for share in EPSILON_SHARES[:-1] if boxes.is_reached(share)]
    if not reached:
        return EPSILON_SHARES
    for i, share in enumerate(EPSILON_SHARES[:-1]):
        # A smaller box with nothing at its bounds may leave no unit free, which is no optimum.
        if i > 0 and share not in reached:
            continue
        problem = posed.within(boxes.at(share))
        if pace:
            problem = unconstrained_at_zero(problem)
        if problem.at(problem.zero()).residual <= ARRIVED:
            return EPSILON_SHARES[i:]
    return EPSILON_SHARES


def _report(
    symmetry: Symmetry,
    solved: _Solved,
    solver: Solver,
    criterion: Criterion,
    rescaling: Rescaling,
    seconds: dict[str, float],
) -> Report:
    return Report(
        model_name=symmetry.model_name,
        normalization=symmetry.normalization,
        approximate=symmetry.approximate,
        solver=repr(solver),
        criterion=repr(criterion if solver.needs_energy else solver),
        solution=solved.solution,
        groups=symmetry.groups,
        pinned=symmetry.pinned,
        diagonal=solved.diagonal,
        output_change_eval=rescaling.output_change_eval,
        output_change_train=rescaling.output_change_train,
        rounded=rescaling.rounded,
        seconds=seconds,
        at_bound=solved.at_bound,
    )


class _Stages:
    """Seconds per stage."""

    def __init__(self, progress: Callable[[str], object]) -> None:
        self.progress = progress
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        self.progress(stage)
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start
