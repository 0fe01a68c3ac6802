"""What a model decides by the sizes of its inputs: a run in which sizes remember that they are
sizes, as a rule the one that captures it.

``if x.shape[1] > 10`` takes one way on the example and another on longer inputs. A captured graph
shows only the way that was taken. Here the model runs while ``shape``, ``size()``, ``numel()`` and
``len()`` return numbers that report what becomes of them: every test that they decide, every call
of torch that they enter as zero (``h + n % 2``, a padding of no rows), every ``range`` without a
turn. Empty slices (``h[:, 10:]`` of a short input) are noted as well, and so are tests of tensors
that depend on inputs of whole numbers and truth values alone (``if mask.all()``). Torch itself only
meets plain numbers. After the run, what the model may have kept of these numbers behaves as plain
numbers do.

>>> model = torch.nn.Linear(3, 4)
>>> with Watch(model) as watch:
...     taken = "long" if torch.randn(2, 5).shape[1] > 10 else "short"
>>> [(decision.operands, decision.outcome) for decision in watch.decisions]
[((5, 10), False)]
"""

from __future__ import annotations

import builtins
import dis
import functools
import linecache
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .called import CallSequence
from .decisions import calling_module, frames, is_check, is_library, is_own
from .size_numbers import (
    EQUALITY,
    WatchedRange,
    as_size,
    bare,
    form_of,
    has_watched,
    is_watched,
    plain,
    plain_len,
    plain_range,
    replace_watched,
    running,
    watched_len,
)
from .source import line_of

# What returns sizes of a tensor.
SIZES = frozenset(
    (
        *(Tensor.shape.__get__, Tensor.size, Tensor.__len__),  # type: ignore[attr-defined]
        *(Tensor.numel, Tensor.nelement, torch.numel, Tensor.nbytes.__get__),  # type: ignore[attr-defined]
    )
)
INDEXING = ("__getitem__", "__setitem__")
# What returns pieces of a tensor, some of which may be empty.
CUTTING = frozenset(
    ("split", "split_with_sizes", "tensor_split", "chunk", "narrow", "hsplit", "vsplit", "dsplit")
)
# What makes as many pieces as an axis is long, or has room for; its arguments behind the tensor.
COUNT_OF_PIECES = {
    "split": ("split_size", "dim"),
    "chunk": ("chunks", "dim"),
    "unbind": ("dim",),
}
# Among the sources of a number: it is the size of a tensor that is as long as some values say, or
# such a value itself.
BY_VALUES = -1
# What makes tensors of no others, and draws nothing.
MAKING = frozenset(("arange", "zeros", "ones", "full", "eye", "tensor", "as_tensor", "linspace"))
# What writes into its first operand, beside functions whose names end in an underscore.
WRITING = frozenset(
    ("__setitem__", *(f"__i{name}__" for name in ("add", "sub", "mul", "and", "or", "xor")))
)
# What returns such tensors, and what passes them on.
SIZED_BY_VALUES = frozenset(
    (
        "nonzero",
        "argwhere",
        "unique",
        "unique_consecutive",
        "_return_output",
        "_return_inverse",
        "_return_counts",
        "masked_select",
        "bincount",
    )
)
MASKS = (torch.bool, torch.uint8)
PASSING_ON = frozenset(
    ("__getitem__", "squeeze", "unsqueeze", "flatten", "view", "reshape", "unbind", "t", "to")
)
# Instructions that test a value; all others that compare (a look-up in a dict, say) decide nothing.
TESTS = ("COMPARE_OP", "CONTAINS_OP", "POP_JUMP", "JUMP_IF", "UNARY_NOT", "TO_BOOL")
TESTING_CALL = re.compile(r"\b(bool|any|all|min|max|eq|ne)\s*\(")
# Among the parts of a place: whether a loop has several turns there, or a tensor several pieces.
SEVERAL = 1 << 20
PREPARING = 4  # bytes between PRECALL and CALL
# A test that is inverted in a loop may never end it.
MAX_INVERTED = 1000


@dataclass(frozen=True)
class Place:
    """Where code uses a size.

    Attributes:
        file, line: Of the code.
        instruction: Which of the line's tests or calls.
        part: Which number of a call, or which of its results; -1 for a test.
        caller: Stands for the calls that led there, and for the code itself: lambdas may share a
            line, and one function may be called for several reasons.
        form: How the number, or both sides of the test, were computed from sizes and plain numbers:
            one line may use several in a loop.
    """

    file: str
    line: int
    instruction: int
    part: int = -1
    caller: int = 0
    form: int = 0

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{os.path.basename(self.file)}:{self.line}" + (f" `{code}`" if code else "")


@dataclass(frozen=True)
class Decision:
    """A test of a size, or of a tensor that depends on inputs of whole numbers alone; a number made
    of sizes that enters a call of torch, a loop over so many turns, or a slice that may be empty.

    Attributes:
        place: In the code.
        module: Qualified name of the module that runs it.
        operands: What is compared; of a number in a call or of turns, that number and zero; of a
            slice or a tensor, one or zero, and zero.
        sources: The sizes of tensors that the operands were computed from; ``BY_VALUES`` among
            them if one of these depends on values.
        outcome: Of the test; of all else, whether it differs from zero.
        inverted: The places at which the run was made to take the other way.
        alike: Whether both operands were computed from the same sizes, and are equal.
        forcible: Whether the other outcome can be put in its place. In ``max(0, n - 8)`` it cannot.
        repeats: Where the same was asked of the same number first: both come out alike.
    """

    place: Place
    module: str
    operands: tuple[float, float]
    sources: frozenset[int]
    outcome: bool
    inverted: frozenset[Place] = frozenset()
    alike: bool = False
    forcible: bool = True
    repeats: Place | None = None

    @cached_property
    def line(self) -> tuple[Place, str]:
        """The place, whatever numbers are compared there, and the module."""
        return replace(self.place, form=0), self.module


@dataclass(frozen=True)
class _Answer:
    """How a test came out and where, with the numbers, which must not make room for others."""

    outcome: bool
    place: Place
    operands: tuple[Any, Any]


class Watch(TorchFunctionMode):
    """Notes the decisions of a model by sizes, and by inputs of whole numbers, while it is entered;
    one at a time in a thread.

    Args:
        model: Its modules give decisions their place.
        invert: Places at which tests come out the other way, and zeros are ones.
        follow_values: Whether tests of whole numbers among the inputs are decisions.

    Attributes:
        decisions: All that were made, in order, each once.
        met: The places among ``invert`` that were come by.
        calls: The calls of torch that the model made; only those of ``call``.
        last: The last test that was inverted, if nothing was computed since.
        follows_value: Whether a tensor is being tested of which both outcomes will be followed.
    """

    def __init__(
        self,
        model: nn.Module,
        invert: frozenset[Place] = frozenset(),
        *,
        follow_values: bool = True,
    ) -> None:
        super().__init__()
        self.invert = invert
        self._follow_values = follow_values
        self.met: set[Place] = set()
        self.last: Place | None = None
        self.follows_value = False
        self.calls = CallSequence(model)
        self._model = model
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._noted: dict[Decision, None] = {}
        self._sized_by_values = WeakTensorKeyDictionary()
        self._may_be_empty = WeakTensorKeyDictionary()
        # True for tensors that depend on inputs of whole numbers and on nothing else, False for
        # those that depend on nothing at all
        self._from_integers = WeakTensorKeyDictionary()
        self._given_integers = False
        self._inversions = 0
        self._answers: dict[tuple[Any, ...], _Answer] = {}

    @property
    def decisions(self) -> list[Decision]:
        return list(self._noted)

    def call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the model, watched."""
        self.calls.start((args, kwargs))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        whole = [t for t in given if not (t.dtype.is_floating_point or t.dtype.is_complex)]
        whole = whole if self._follow_values else []
        self._from_integers.update((tensor, True) for tensor in whole)
        self._given_integers = bool(whole)
        with self:
            outputs = model(*args, **kwargs)
        self.calls.finish(outputs)
        return outputs

    def __enter__(self) -> Watch:
        super().__enter__()
        running.watch = self
        builtins.len = watched_len  # type: ignore[assignment]
        builtins.range = WatchedRange  # type: ignore[assignment, misc]
        return self

    def __exit__(self, *exception: Any) -> None:
        builtins.len, builtins.range = plain_len, plain_range  # type: ignore[misc]
        running.watch = None
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SIZES:
            plain_args, plain_kwargs = plain(args), plain(kwargs)
            axis = [*plain_args[1:], *plain_kwargs.values()]
            return self.sizes_of(args[0], func(*plain_args, **plain_kwargs), *axis)
        if func in (Tensor.__bool__, Tensor.item) and self._from_integers.get(args[0]):
            return self._read_value(func, args[0])
        entered: list[Any] = []
        plain_args, plain_kwargs = (
            self._plain_arguments(func, args, kwargs, entered)
            if has_watched((args, kwargs))
            else (args, kwargs)
        )
        self.last = None
        result = func(*plain_args, **plain_kwargs)
        pieces = self._note_pieces(func, plain_args, plain_kwargs, result)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        if self._is_sized_by_values(func, plain_args, plain_kwargs):
            self._sized_by_values.update((tensor, True) for tensor in made)
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if pieces or any(t in self._may_be_empty or t in self._sized_by_values for t in given):
            self._may_be_empty.update((tensor, True) for tensor in made)
        if self._given_integers:
            self._follow_integers(func, given, made)
        numbers = iter(entered if not _pads_with_zeros(func, args, kwargs) else [1] * len(entered))
        signed_args, signed_kwargs = replace_watched((args, kwargs), lambda _: _sign(next(numbers)))
        self.calls.add(func, signed_args, {**signed_kwargs, "pieces": pieces}, result)
        return result

    def sizes_of(self, tensor: Tensor, found: Any, axis: int | None = None) -> Any:
        """Sizes of a tensor along all axes or one, as numbers that remember it."""
        sources = frozenset([BY_VALUES]) if tensor in self._sized_by_values else frozenset()
        positive = not sources and tensor not in self._may_be_empty
        if isinstance(found, torch.Size):
            return torch.Size(
                [as_size(size, i, sources, positive=positive) for i, size in enumerate(found)]
            )
        if axis is not None:
            with torch._C.DisableTorchFunction():
                axis %= tensor.dim()
        return as_size(found, axis, sources, positive=positive)

    def _follow_integers(self, func: Any, given: list[Tensor], made: list[Tensor]) -> None:
        """Note whether results depend on inputs of whole numbers alone."""
        name = getattr(func, "__name__", "")
        if name in WRITING or (name.endswith("_") and not name.endswith("__")):
            made = [*made, *given[:1]]
        known = [self._from_integers.get(tensor) for tensor in given]
        if None in known or not (known or name in MAKING):
            for tensor in made:
                self._from_integers.pop(tensor, None)
        else:
            self._from_integers.update((tensor, True in known) for tensor in made)

    def _read_value(self, func: Any, tensor: Tensor) -> Any:
        """Note a test of a tensor that depends on inputs of whole numbers alone, or that its truth
        value is read, and say how it comes out.
        """
        frame = next(iter(frames()), None)
        if frame is None or not _is_followed(func, tensor, frame):
            return func(tensor)
        self.follows_value = True
        try:
            outcome = func(tensor)
        finally:
            self.follows_value = False
        return self._note(self._place(frame), (int(outcome), 0), frozenset([BY_VALUES]), outcome)

    def _is_sized_by_values(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call returns tensors that are as long as some values say."""
        name = getattr(func, "__name__", "")
        given = [*args, *kwargs.values()]
        if name in PASSING_ON and any(
            isinstance(value, Tensor) and value in self._sized_by_values for value in given
        ):
            return True
        if name == "__getitem__":
            indices = args[1] if isinstance(args[1], tuple) else args[1:2]
            return any(isinstance(i, Tensor) and i.dtype in MASKS for i in indices)
        if name == "where":
            return len(given) == 1
        if name == "one_hot":
            return len(given) == 1 or given[1] == -1
        if name == "repeat_interleave":
            return any(isinstance(value, Tensor) for value in given[1:]) or len(given) == 1
        return name in SIZED_BY_VALUES

    def _plain_arguments(
        self, func: Any, args: tuple, kwargs: dict[str, Any], entered: list[Any]
    ) -> tuple[tuple, dict[str, Any]]:
        """The arguments of a call with plain numbers; those that were made of sizes are noted, and
        join a list.
        """
        frame = _calling_frame() if not _pads_with_zeros(func, args, kwargs) else None

        def plain(number: Any) -> Any:
            value = bare(number)
            if frame is not None and number.ends != (0, 0):
                place = self._place(frame, part=len(entered) + 1, form=number.form)
                differs = self._note(place, (value, 0), number.sources, value != 0, numeric=True)
                value = value if differs == (value != 0) else 1
            entered.append(value)
            return value

        return replace_watched((args, kwargs), plain)  # type: ignore[no-any-return]

    def _note_pieces(
        self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any
    ) -> tuple[bool, ...]:
        """Note which pieces of a tensor are not empty, as ``h[:, 10:]`` is of a short input, and
        whether there are several; or which axes have one element, where those are dropped.
        """
        name = getattr(func, "__name__", "")
        if name not in (*CUTTING, *INDEXING, "squeeze", "unbind"):
            return ()
        whole, *others = [*args, *(kwargs[key] for key in ("input", "dim") if key in kwargs)]
        with torch._C.DisableTorchFunction():
            sizes = tuple(whole.shape)
            parts = [p.numel() for p in tree_leaves(result) if isinstance(p, Tensor)]
        found: list[tuple[tuple[int, int], frozenset[int], bool]] = []
        if name == "squeeze":
            dims = tree_leaves(others) or range(plain_len(sizes))
            dropped = [sizes[dim] for dim in dims] if sizes else []
            found = [((size, 1), frozenset([size]), size == 1) for size in dropped]
        elif name != "unbind":
            cuts = (
                _lengths_cut(sizes, args[1])
                if name in INDEXING
                else [(n, frozenset(sizes)) for n in parts]
            )
            found = [((int(n > 0), 0), of, n > 0) for n, of in cuts if 0 not in sizes]
        several = _several_pieces(name, sizes, args, kwargs)
        frame = _calling_frame() if found or several else None
        if frame is not None and several is not None:
            place = self._place(frame, form=hash((name, "pieces")))
            self._note_several(place, several, frozenset(several[:1]))
        if frame is not None:
            for i, (operands, sources, outcome) in enumerate(found):
                part = i if name != "squeeze" else -1
                place = self._place(frame, part=part, form=hash((name, i)))
                self._note(place, operands, sources, outcome, forcible=False)
        return tuple(outcome for _, _, outcome in found)

    def note_loop(self, bounds: tuple[Any, ...], turns: range, frame: FrameType) -> range:
        """Note whether a loop has any turns, and more than one, and say which it has: what one
        turn leaves behind the next may read.
        """
        if is_library(frame.f_code.co_filename) or is_own(frame):
            return turns
        form = hash(tuple(map(form_of, bounds)))
        place = self._place(frame, part=1, form=form)
        sources = frozenset().union(*(b.sources for b in bounds if is_watched(b)))
        again = (turns.stop - turns.start, turns.step)
        operands = again if turns.step > 0 else (-again[0], -again[1])
        self._note_several(place, operands, sources)
        entered = plain_len(turns) != 0
        if self._note(place, (plain_len(turns), 0), sources, entered, numeric=True) == entered:
            return turns
        return plain_range(turns.start, turns.start + turns.step, turns.step)

    def _note_several(
        self, place: Place, operands: tuple[float, float], sources: frozenset[int]
    ) -> None:
        """Note whether one number is above another, so that there are several turns or pieces. A
        second one cannot be put in place: nobody knows what it would hold.
        """
        several = operands[0] > operands[1]
        place = replace(place, part=SEVERAL)
        self._note(place, operands, sources, several, numeric=True, forcible=False)

    def note_lookup(self, number: Any, frame: FrameType) -> None:
        """Note the comparisons of a size with the numbers in a set."""
        if is_library(frame.f_code.co_filename) or is_own(frame) or is_check(frame):
            return
        for member in _set_looked_into(frame):
            if type(member) in (int, float):
                place = self._place(frame, form=hash((form_of(number), repr(member))))
                operands = (bare(number), member)
                self._note(place, operands, number.sources, operands[0] == member, forcible=False)

    def note_test(
        self, operands: tuple[Any, Any], outcome: bool, compare: Callable[[Any, Any], bool]
    ) -> bool:
        """Note a test of sizes, and say how it comes out: as before, if the very same numbers were
        compared before.

        Args:
            operands: What is compared.
            outcome: How.
            compare: By what.
        """
        frame = next(iter(frames()), None)
        kind = _kind_of_test(frame, compare not in EQUALITY) if frame is not None else None
        if frame is None or kind is None:
            self.last = None
            return outcome
        sources = [number.sources for number in operands if is_watched(number)]
        form = hash(tuple(map(form_of, operands)))
        place = self._place(frame, form=form)
        values = (bare(operands[0]), bare(operands[1]))
        asked = (compare, *(id(n) if is_watched(n) else (type(n), n) for n in operands))
        before = self._answers.get(asked)
        note = functools.partial(
            self._note,
            place,
            values,
            frozenset().union(*sources),
            alike=len(sources) == 2 and sources[0] == sources[1] and values[0] == values[1],
        )
        if before is not None:
            return note(before.outcome, forcible=False, repeats=before.place)
        answer = note(outcome, forcible=kind == "test")
        if kind == "test":
            self._answers[asked] = _Answer(answer, place, operands)
        return answer

    def _place(self, frame: FrameType, *, part: int = -1, form: int = 0) -> Place:
        calls = []
        outer: FrameType | None = frame
        while outer is not None and not self._calls_model(outer):
            if not (is_library(outer.f_code.co_filename) or is_own(outer)):
                calls.append((outer.f_code, _at(outer)))
            outer = outer.f_back
        caller = hash(tuple(calls))
        return Place(frame.f_code.co_filename, frame.f_lineno, _at(frame), part, caller, form)

    def _calls_model(self, frame: FrameType) -> bool:
        called = frame.f_code is nn.Module._call_impl.__code__
        return called and frame.f_locals.get("self") is self._model

    def _note(
        self,
        place: Place,
        operands: tuple[float, float],
        sources: frozenset[int],
        outcome: bool,
        *,
        numeric: bool = False,
        alike: bool = False,
        forcible: bool = True,
        repeats: Place | None = None,
    ) -> bool:
        if repeats in self.met:
            self._count_inversion(place)
        elif repeats is None and place in self.invert and not (numeric and outcome):
            self.met.add(place)
            self.last = None if numeric else place
            self._count_inversion(place)
            outcome = not outcome
        decision = Decision(
            place=place,
            module=calling_module(self._modules),
            operands=operands,
            sources=sources,
            outcome=outcome,
            inverted=frozenset(self.met),
            alike=alike,
            forcible=forcible,
            repeats=repeats,
        )
        self._noted[decision] = None
        return outcome

    def _count_inversion(self, place: Place) -> None:
        self._inversions += 1
        if self._inversions > MAX_INVERTED:
            self.last = None
            raise RecursionError(f"{place} does not end when its test is inverted")


def list_by_values(watch: Watch) -> set[Decision]:
    """Tests of values of the inputs that a watch has seen, with their outcomes."""
    return {d for d in watch.decisions if BY_VALUES in d.sources and d.place.part < 0}


def _several_pieces(
    name: str, sizes: Sequence[int], args: tuple, kwargs: dict[str, Any]
) -> tuple[int, int] | None:
    """The size of an axis and the length of its pieces, where the size says how many there are."""
    if name not in COUNT_OF_PIECES or not sizes:
        return None
    given = dict(zip(COUNT_OF_PIECES[name], args[1:], strict=False)) | kwargs
    count = next((given[key] for key in COUNT_OF_PIECES[name][:-1] if key in given), 1)
    if type(count) is not int or (name == "chunk" and count < 2):
        return None
    return sizes[given.get("dim", 0)], count if name == "split" else 1


def _lengths_cut(sizes: tuple[int, ...], index: Any) -> list[tuple[int, frozenset[int]]]:
    """How many elements are left along each axis that is cut by a slice, and of how many."""
    indices = index if isinstance(index, tuple) else (index,)
    taken = [_axes_taken(i) for i in indices]
    found, axis = [], 0
    for i, axes in zip(indices, taken, strict=True):
        if isinstance(i, slice) and _is_plain_cut(i):
            left = plain_len(plain_range(*i.indices(sizes[axis])))
            found.append((left, frozenset([sizes[axis]])))
        axis += axes if i is not Ellipsis else plain_len(sizes) - sum(taken)
    return found


def _is_plain_cut(part: slice) -> bool:
    """Whether a slice cuts by plain numbers. Bounds that were read from values may not be asked."""
    bounds = [bound for bound in (part.start, part.stop, part.step) if bound is not None]
    return bool(bounds) and all(type(bound) is int for bound in bounds)


def _axes_taken(index: Any) -> int:
    """How many axes of a tensor one of its indices is for; a mask stands for all of its own."""
    if index is None or index is Ellipsis or isinstance(index, bool):
        return 0
    return index.dim() if isinstance(index, Tensor) and index.dtype in MASKS else 1


def _pads_with_zeros(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call pads with zeros, which fit every scale: it does not matter how many there
    are.
    """
    if getattr(func, "__name__", "") != "pad":
        return False
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    return given.get("mode", "constant") == "constant" and not given.get("value")


def _calling_frame() -> FrameType | None:
    """The line of the user's code that calls torch; None where torch calls itself."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and is_own(frame):
        frame = frame.f_back
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame if frame is not None and not is_own(frame) else None


def _kind_of_test(frame: FrameType, orders: bool) -> str | None:
    """ "test", or "choice" (of the larger of two numbers, say); None where nothing depends on the
    outcome but an exception or a look-up.
    """
    if is_library(frame.f_code.co_filename) or is_check(frame):
        return None
    instruction = _instruction(frame.f_code, _at(frame))
    if instruction.startswith(TESTS):
        return "test"
    line = line_of(frame)
    found = TESTING_CALL.search(line)
    if found is not None and found[1] in ("bool", "any", "all"):
        return "test"
    # Look-ups ask for equality alone. Without its source a call may be any.
    return "choice" if orders or found or (not line and instruction.startswith("CALL")) else None


def _is_followed(func: Any, tensor: Tensor, frame: FrameType) -> bool:
    """Whether nothing is read of a tensor but which of two ways to take."""
    if func is Tensor.__bool__:
        return _kind_of_test(frame, orders=False) == "test"
    library = is_library(frame.f_code.co_filename)
    return tensor.dtype == torch.bool and not library and not is_check(frame)


def _set_looked_into(frame: FrameType) -> Iterable[Any]:
    """What is in the set behind ``in``, if that is written there: a literal, a global name, or an
    attribute of ``self``.
    """
    steps = _steps(frame.f_code)
    at = next((i for i, step in enumerate(steps) if step.offset == _at(frame)), 0)
    if at < 2 or steps[at].opname != "CONTAINS_OP":
        return ()
    before, last = steps[at - 2 : at]
    found: Any = None
    if last.opname == "LOAD_CONST":
        found = last.argval
    elif last.opname == "LOAD_GLOBAL":
        found = frame.f_globals.get(last.argval)
    elif last.opname == "LOAD_ATTR" and before.argval == "self":
        found = getattr(frame.f_locals.get("self"), last.argval, None)
    return found if isinstance(found, (set, frozenset)) else ()


@functools.lru_cache(maxsize=1024)
def _steps(code: CodeType) -> list[dis.Instruction]:
    return list(dis.get_instructions(code))


def _at(frame: FrameType) -> int:
    """Where a frame is. Python 3.11 prepares calls by an instruction of its own, and makes some of
    them there once it has seen them often enough.
    """
    at = frame.f_lasti
    return at + PREPARING if _instruction(frame.f_code, at) == "PRECALL" else at


@functools.lru_cache(maxsize=4096)
def _instruction(code: CodeType, at: int) -> str:
    return dis.opname[code.co_code[at]]


def _sign(value: Any) -> str:
    """What stands for a size where only the way through a model counts."""
    return "a size" if value else "a size of zero"
