"""Ways through a model that its examples do not take, because none of them has the size for it.

``if x.shape[1] > 10: h = h.tanh()`` shows nothing of tanh to an example of length 8. Each example
is captured under a watch, which notes what is decided by sizes (see ``watching``). A decision that
depends on the input's size and came out alike on all examples is *open*. For each of them another
example is looked for, in this order:

1. One of another size on which it comes out the other way: a little longer or shorter, a single
   sample, or where a straight line through two examples says that the two sides of the test meet.
2. The same example, with the outcome put in its place: the test is inverted, the zero is a one.
   Such a run gives equations alone; its results mean nothing.

A run that makes the same calls on the same values as one before takes no other way, though a test
came out differently: nothing more is captured for it. A way that raises at once is a check of the
inputs, and closed. What is left is not followed: all that it might touch must stay.
"""

from __future__ import annotations

import dis
import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from ..capture.called import CallSequence
from ..capture.watching import BY_VALUES, SEVERAL, Decision, Place, Watch
from ..errors import UnsupportedModelError
from .sizes import Axes, Example, OtherSizes, run_lightly

# Examples that are captured beside the usual ones, and trial runs to find them.
MAX_WAYS = 6
MAX_TRIALS = 16
# Numbers in the inputs of a run that only looks whether sizes vary.
LARGE = 2**16
# The largest sizes to try, unless twice the example's is more.
LONGEST = 64
LONGEST_ALONE = 1024  # where nothing but a real size shows the other outcome
LARGEST_BATCH = 16


class UnwatchableError(UnsupportedModelError):
    """The model does not run while sizes remember that they are sizes."""


@dataclass(frozen=True)
class Run:
    """What a model decides by sizes on one example.

    Attributes:
        example: The inputs.
        watches: In eval mode and in train mode; in eval mode alone where it fails, or where train
            mode is known to go the same way.
        error: What it raises in eval mode.
        elsewhere: Under random draws that lead elsewhere.
    """

    example: Example
    watches: tuple[Watch, ...]
    error: Exception | None = None
    elsewhere: tuple[Watch, ...] = ()

    @functools.cached_property
    def decisions(self) -> list[Decision]:
        watches = (*self.watches, *self.elsewhere)
        return list(dict.fromkeys(d for watch in watches for d in watch.decisions))

    @functools.cached_property
    def calls(self) -> tuple[CallSequence, ...]:
        return tuple(watch.calls for watch in self.watches)

    @property
    def met(self) -> frozenset[Place]:
        """Where an outcome was put in place: one of them may lead around others."""
        return frozenset().union(*(watch.met for watch in self.watches))

    def goes_as(self, other: Run) -> bool:
        """Whether train mode goes the way of eval mode here, as it does on another example: there
        the modes decide alike, and eval mode goes one way on both.
        """
        if len(other.watches) < 2 or not _decide_alike(*other.watches):
            return False
        here, there = self.watches[0], other.watches[0]
        return here.calls == there.calls and _outcomes(here) == _outcomes(there)


@dataclass(frozen=True, kw_only=True)
class Way:
    """An example that takes another way through the model.

    Attributes:
        example: The inputs.
        invert: Where tests come out the other way than the inputs say, and zeros are ones; empty
            for a real way.
        shows: The open decisions that come out the other way on it.
    """

    example: Example
    invert: frozenset[Place] = frozenset()
    shows: tuple[Decision, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OtherWays:
    """What the usual examples do not show.

    Attributes:
        ways: Further examples.
        unfollowed: Decisions whose other outcome no example shows.
    """

    ways: tuple[Way, ...] = ()
    unfollowed: tuple[Decision, ...] = ()


def find_other_ways(
    model: nn.Module,
    runs: Sequence[Run],
    sizes: OtherSizes,
    *,
    opaque: Sequence[nn.Module] = (),
) -> OtherWays:
    """Find the ways through a model that no example takes, in eval or in train mode; usually there
    are none. The modes may agree on all examples, and one of them go its own way elsewhere.

    Args:
        model: Any module, not wrapped; it is not changed.
        runs: On all examples that it is captured on.
        sizes: Which sizes of the first one can vary.
        opaque: Modules that cannot be followed: no outcome can be put in place inside of them.
    """
    search = _Search(model, sizes, list(runs))
    search.probe()
    search.try_sizes()
    inside = {module for outer in opaque for module in outer.modules()}
    search.try_forcing({name for name, module in model.named_modules() if module in inside})
    return OtherWays(ways=tuple(search.ways), unfollowed=tuple(search.open(windows=False)))


def watch_run(model: nn.Module, example: Example, modes: Sequence[bool] = (False, True)) -> Run:
    """Run a model in both modes or in eval mode alone, to see what it decides by sizes.

    Raises:
        UnwatchableError: It does not run under the watch.
        UnsupportedModelError: It does not run at all.
    """
    run = _run(model, example, modes=modes)
    if run.error is None:
        return run
    _refuse_failing(model, example)
    raise UnwatchableError(
        "What the model decides by the sizes of its inputs cannot be watched "
        f"({type(run.error).__name__}: {run.error}), so that it may compute something else at "
        "sizes which the example does not have. Pass examples of the sizes that it will "
        "meet as other_inputs: pathcond then takes these for the only ones."
    ) from run.error


def _run(
    model: nn.Module,
    example: Example,
    invert: frozenset[Place] = frozenset(),
    modes: Sequence[bool] = (False, True),
) -> Run:
    """Run a model in eval mode and, unless it fails, in train mode, if it does not fail there."""
    watches: list[Watch] = []
    for training in modes:
        watch = Watch(model, invert)
        try:
            run_lightly(model, example, training=training, call=watch.call)
        # Whatever a model raises on sizes, or on a way, that it was not made for.
        except Exception as error:
            if not training:
                return Run(example, (watch,), error)
        else:
            watches.append(watch)
    return Run(example, tuple(watches))


def _refuse_failing(model: nn.Module, example: Example) -> None:
    """Raise what the model raises by itself, if it does."""
    try:
        run_lightly(model, example)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} fails on the example batch: {type(error).__name__}: {error}. "
            "Check the values, shapes, types and device of the inputs."
        ) from error


@dataclass
class _Search:
    """The runs so far and what they leave open."""

    model: nn.Module
    sizes: OtherSizes
    runs: list[Run]
    ways: list[Way] = field(default_factory=list)
    # Places where the other way raises at once.
    checks: set[Place] = field(default_factory=set)
    trials: int = 0

    def _try(self, example: Example, invert: frozenset[Place] = frozenset()) -> bool:
        """Whether a run shows the other outcome of an open decision. If so it is kept."""
        run = _run(self.model, example, invert)
        if run.error is not None:
            last = run.watches[0].last
            if last is not None and _is_raised_on_purpose(run.error):
                self.checks.add(last)
            return False
        shown = self._shown(run)
        if shown:
            self._keep(run, run.met, shown=shown)
        return bool(shown)

    def _keep(
        self,
        run: Run,
        invert: frozenset[Place] = frozenset(),
        *,
        shown: tuple[Decision, ...],
    ) -> None:
        """Keep a run, and the way that it takes, if no other run took that."""
        if run.calls not in [other.calls for other in self.runs]:
            example = run.example
            # What a run with other outcomes returns means nothing.
            example = Example(example.inputs, given=False, runnable=False) if invert else example
            self.ways.append(Way(example=example, invert=invert, shows=shown))
        # Kept with the example itself: what differs between two runs on it does not differ by size.
        self.runs.append(run)

    def open(self, *, windows: bool = True) -> list[Decision]:
        """Decisions that depend on the input's size and have come out alike so far, one for each
        place and module.

        Args:
            windows: Whether loops of a single turn, and cuts into a single piece, on all examples
                are among them though what decides is the same: longer inputs may have more windows.
        """
        several = len({id(run.example) for run in self.runs}) > 1
        found = [
            decisions
            for decisions in self._by_place().values()
            if not any(decision.place in self.checks for _, decision in decisions)
            and (several or _is_by_values(decisions))
            and (
                (_is_one_sided(decisions) and not self._is_identity(decisions))
                or (windows and _is_alone(decisions))
            )
        ]
        first = {d.place for decisions in found for _, d in decisions if d.repeats is None}
        return [
            decisions[0][1]
            for decisions in found
            # Where the same is asked again, it comes out as it did first.
            if any(d.repeats is None or d.repeats in first for _, d in decisions)
        ]

    def _is_identity(self, decisions: Sequence[tuple[Example, Decision]]) -> bool:
        """Whether a test compares a size with itself, as lengths of queries and keys are compared
        in self-attention.

        Two axes of the inputs that have one size by chance are no identity.
        """
        by_chance = any(len(axes.places) > 1 and not axes.batch for axes in self.sizes.axes)
        return not by_chance and all(d.alike for _, d in decisions)

    def _by_place(self) -> dict[tuple[Place, str], list[tuple[Example, Decision]]]:
        """All decisions by what identifies them; by their line, where nothing else does."""
        made = [(run.example, decision) for run in self.runs for decision in run.decisions]
        key = _keys(self.runs)
        keys = {key(decision) for _, decision in made}
        found: dict[tuple[Place, str], list[tuple[Example, Decision]]] = {}
        for example, decision in made:
            for known in {key(decision), decision.line} & keys:
                found.setdefault(known, []).append((example, decision))
        return found

    def _example_of(self, decision: Decision) -> Example:
        return next(run.example for run in self.runs if decision in run.decisions)

    def _shown(self, run: Run, *, every: bool = False) -> tuple[Decision, ...]:
        """The decisions that come out the other way in a run: those that are open, or all."""
        key = _keys([*self.runs, run])
        outcomes = {(known, d.outcome) for d in run.decisions for known in (key(d), d.line)}
        known = [d for other in self.runs for d in other.decisions] if every else self.open()
        return tuple(d for d in known if (key(d), not d.outcome) in outcomes)

    # -- real sizes --------------------------------------------------------------------------------

    def probe(self) -> None:
        """Where sizes that decide are the same on all examples, look at small and at large ones:
        it may be by chance, as the last four rows of 8 and of 5 are four.
        """
        if not any(map(self._may_be_by_chance, self._by_place().values())):
            return
        example = self.runs[0].example
        # One input alone may have a single sample, or row, for all of another's.
        shared = [axes for axes in self.sizes.axes if len({at for at, _ in axes.places}) > 1]
        alone = [replace(axes, places=(place,)) for axes in shared for place in axes.places]
        longer = [(axes, 2 * axes.size + 1) for axes in self.sizes.axes if not axes.batch]
        for axes, size in [*((axes, 1) for axes in (*self.sizes.axes, *alone)), *longer]:
            large = size * example.numel() > axes.size * LARGE
            if size == axes.size or large or len(self.ways) >= MAX_WAYS:
                continue
            run = _run(self.model, self.sizes.resize(example, axes, size))
            if run.error is None:
                self._keep(run, shown=self._shown(run, every=True))

    def _may_be_by_chance(self, decisions: Sequence[tuple[Example, Decision]]) -> bool:
        """Whether a decision came out alike because what decides is the same on all examples."""
        outcomes = {decision.outcome for _, decision in decisions}
        first = decisions[0][1]
        return (
            len(outcomes) == 1
            and not (first.place.part >= 0 and first.outcome)
            and (not _is_one_sided(decisions) or self._is_identity(decisions))
        )

    def try_sizes(self) -> None:
        """Look for sizes at which open decisions come out the other way."""
        tried: set[tuple[int, Axes, int]] = set()
        progress = True
        while progress:
            progress = False
            for decision in self.open():
                for example, axes, size in self._candidates(decision):
                    key = (id(example), axes, size)
                    if self.trials >= MAX_TRIALS or len(self.ways) >= MAX_WAYS:
                        return
                    if key in tried:
                        continue
                    tried.add(key)
                    self.trials += 1
                    if self._try(self.sizes.resize(example, axes, size)):
                        progress = True
                        break
                if progress:
                    break

    def _candidates(self, decision: Decision) -> Iterator[tuple[Example, Axes, int]]:
        """Sizes at which a decision may come out the other way, the likeliest first."""
        example = self._example_of(decision)
        if decision.inverted or not self.sizes.apply_to(example):
            return
        if BY_VALUES in decision.sources:  # no size of the inputs decides
            return
        sizes = {axes: axes.size_in(example) for axes in self.sizes.axes}
        concerned = [axes for axes, size in sizes.items() if size in decision.sources] or list(
            sizes
        )
        if decision.alike:
            # Inputs that are as long as each other by chance, or as high as wide.
            for axes in concerned:
                for place in axes.places if len(axes.places) > 1 else ():
                    yield example, replace(axes, places=(place,)), sizes[axes] + 1
        concerned.sort(key=lambda axes: axes.batch)  # few models decide by the number of samples
        for axes in concerned:
            for crossing in self._crossings(decision, axes):
                for step in (0, 1, -1):
                    size = crossing + step
                    small = size * example.numel() <= sizes[axes] * LARGE
                    if _is_worth_trying(
                        axes, sizes[axes], size, alone=not decision.forcible and small
                    ):
                        yield example, axes, size
        for axes in concerned:
            size = sizes[axes]
            others = [size + 1, size - 1, 1, 2, size + 2, 2 * size + 1]
            if decision.place.part == SEVERAL:
                # Of windows of a fixed length, the second one begins somewhere further on.
                largest = 0 if axes.batch else min(LONGEST_ALONE, size * LARGE // example.numel())
                others = [2 * size + 1]
                while 2 * others[-1] < largest:
                    others.append(2 * others[-1] + 1)
            for other in dict.fromkeys(others):
                if _is_worth_trying(axes, size, other, alone=decision.place.part == SEVERAL):
                    yield example, axes, other

    def _crossings(self, decision: Decision, axes: Axes) -> list[int]:
        """Sizes at which the two sides of a test meet, if their difference is a straight line over
        the size.
        """
        same_place = self._by_place()[_keys(self.runs)(decision)]
        points: dict[int, float] = {}
        for example, other in same_place:
            if self.sizes.apply_to(example):
                points.setdefault(axes.size_in(example), other.operands[0] - other.operands[1])
        if len(points) < 2:
            return []
        (one, left), *others = points.items()
        differing = [(size, gap) for size, gap in others if gap != left]
        if not differing:
            return []
        two, right = differing[0]
        crossing = one - left * (two - one) / (right - left)
        return (
            list(dict.fromkeys((math.floor(crossing), math.ceil(crossing))))
            if abs(crossing) < 1e9
            else []
        )

    # -- outcomes put in place ---------------------------------------------------------------------

    def try_forcing(self, left_out: Collection[str]) -> None:
        """Put the other outcome of open decisions in its place: all at once, then one by one; not
        in modules of these names.
        """
        failed: set[Place] = set()
        while len(self.ways) < MAX_WAYS:
            todo = [
                d
                for d in self.open()
                if d.forcible and d.place not in failed and d.module not in left_out
            ]
            if not todo:
                return
            example = self._example_of(todo[0])
            together = [d for d in todo if self._example_of(d) is example]
            checks = len(self.checks)
            if self._force(example, together) or len(self.checks) > checks:
                continue
            for decision in together:
                if len(together) > 1 and decision in self.open() and len(self.ways) < MAX_WAYS:
                    self._force(example, [decision])
            failed |= {decision.place for decision in together}

    def _force(self, example: Example, decisions: Iterable[Decision]) -> bool:
        """Whether a run with these decisions inverted shows an outcome that is not known yet."""
        return self._try(example, frozenset().union(*({d.place} | d.inverted for d in decisions)))


def _is_raised_on_purpose(error: Exception) -> bool:
    """Whether an error comes of a ``raise`` or ``assert``, not of a call that cannot be made."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    return dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]] == "RAISE_VARARGS"


def _is_worth_trying(axes: Axes, size: int, other: int, *, alone: bool = False) -> bool:
    """Whether a size is small enough to be tried; where no outcome can be put in place, so that
    it alone may show the other one, a larger one is.
    """
    longest = max(LARGEST_BATCH if axes.batch else LONGEST, 2 * size + 1, LONGEST_ALONE * alone)
    return 0 < other <= longest and other != size


def _keys(runs: Sequence[Run]) -> Callable[[Decision], tuple[Place, str]]:
    """What identifies a decision across runs: its place and module. A form that some run does not
    have was made with a number that depends on sizes itself, the counter of a loop say, and
    identifies nothing.
    """
    forms: dict[tuple[Place, str], set[int]] = {}
    for run in runs:
        here: dict[tuple[Place, str], set[int]] = {}
        for d in run.decisions:
            here.setdefault(d.line, set()).add(d.place.form)
        for line, found in here.items():
            forms[line] = forms[line] & found if line in forms else found

    def key(d: Decision) -> tuple[Place, str]:
        return (d.place, d.module) if d.place.form in forms[d.line] else d.line

    return key


def _decide_alike(one: Watch, other: Watch) -> bool:
    return set(one.decisions) == set(other.decisions)


def _outcomes(watch: Watch) -> set[tuple[Place, str, bool]]:
    return {(d.place, d.module, d.outcome) for d in watch.decisions}


def _is_by_values(decisions: Sequence[tuple[Example, Decision]]) -> bool:
    """Whether a decision is by the size of a tensor that is as long as some values say."""
    return any(BY_VALUES in decision.sources for _, decision in decisions)


def _is_alone(decisions: Sequence[tuple[Example, Decision]]) -> bool:
    """Whether a loop has one turn on all examples, or a cut one piece."""
    return decisions[0][1].place.part == SEVERAL and not any(d.outcome for _, d in decisions)


def _is_one_sided(decisions: Sequence[tuple[Example, Decision]]) -> bool:
    """Whether a decision has one outcome on all examples, though what decides differs between
    them, or may on other values.
    """
    if len({decision.outcome for _, decision in decisions}) > 1:
        return False
    # A number that is never zero shows what it does, and so does a slice that is never empty.
    if decisions[0][1].place.part >= 0 and decisions[0][1].outcome:
        return False
    if _is_by_values(decisions):
        return True
    seen: dict[int, set[tuple[tuple[float, float], frozenset[int]]]] = {}
    for example, decision in decisions:
        seen.setdefault(id(example), set()).add((decision.operands, decision.sources))
    values = list(seen.values())
    return len(values) < 2 or any(other != values[0] for other in values[1:])
