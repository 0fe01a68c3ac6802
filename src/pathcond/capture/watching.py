"""What a model decides by the sizes of its inputs: a run in which sizes remember that they are
sizes, as a rule the one that captures it.

``if x.shape[1] > 10`` takes one way on the example and another on longer inputs. A captured graph
shows only the way that was taken. Here the model runs while ``shape``, ``size()``, ``numel()``
and ``len()`` return numbers that report what becomes of them: every test that they decide, and
every call of torch that they enter as zero (``h + n % 2``, a padding of no rows). Empty slices
(``h[:, 10:]`` of a short input) are noted as well. Torch itself only meets plain numbers. After the
run, what the model may have kept of these numbers behaves as plain numbers do.

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
import operator
import os
import re
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from .. import trees
from .called import CallSequence
from .decisions import calling_module, frames, is_check, is_library

# What returns sizes of a tensor.
SIZES = frozenset((Tensor.shape.__get__, Tensor.size, Tensor.numel, Tensor.nelement))  # type: ignore[attr-defined]
# Among the sources of a number: it is the size of a tensor that is as long as some values say.
BY_VALUES = -1
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
TESTING_CALL = re.compile(r"\b(bool|any|all|min|max|sort|sorted|bisect\w*)\s*\(")
# A test that is inverted in a loop may never end it.
MAX_INVERTED = 1000
_OWN_CODE = (os.path.dirname(os.path.abspath(__file__)) + os.sep, trees.__file__)
_plain_len = builtins.len


@dataclass(frozen=True)
class Place:
    """Where code uses a size.

    Attributes:
        file, line: Of the code.
        instruction: Which of the line's tests or calls.
        part: Which number of a call; 0 for its result, -1 for a test.
        form: How the number, or both sides of the test, were computed from sizes and plain numbers:
            one line may use several in a loop.
    """

    file: str
    line: int
    instruction: int
    part: int = -1
    form: int = 0

    def __str__(self) -> str:
        code = linecache.getline(self.file, self.line).strip()
        return f"{os.path.basename(self.file)}:{self.line}" + (f" `{code}`" if code else "")


@dataclass(frozen=True)
class Decision:
    """A test of a size, a number made of sizes that enters a call of torch, or a slice that may be
    empty.

    Attributes:
        place: In the code.
        module: Qualified name of the module that runs it.
        operands: What is compared; of a number in a call, that number and zero; of a slice, one or
            zero, and zero.
        sources: The sizes of tensors that the operands were computed from; ``BY_VALUES`` among
            them if one of these depends on values.
        outcome: Of the test; of a number or a slice, whether it differs from zero.
        inverted: The places at which the run was made to take the other way.
        alike: Whether both operands were computed from the same sizes, and are equal.
        forcible: Whether the other outcome can be put in its place. In ``max(0, n - 8)`` it cannot.
    """

    place: Place
    module: str
    operands: tuple[float, float]
    sources: frozenset[int]
    outcome: bool
    inverted: frozenset[Place] = frozenset()
    alike: bool = False
    forcible: bool = True


class Watch(TorchFunctionMode):
    """Notes the decisions of a model by sizes while it is entered; one at a time in a thread.

    Args:
        model: Its modules give decisions their place.
        invert: Places at which tests come out the other way, and zeros are ones.

    Attributes:
        decisions: All that were made, in order, each once.
        met: The places among ``invert`` that were come by.
        calls: The calls of torch that the model made; only those of ``call``.
        last: The last test that was inverted, if nothing was computed since.
    """

    def __init__(self, model: nn.Module, invert: frozenset[Place] = frozenset()) -> None:
        super().__init__()
        self.invert = invert
        self.met: set[Place] = set()
        self.last: Place | None = None
        self.calls = CallSequence(model)
        self._modules = {id(module): name for name, module in model.named_modules()}
        self._noted: dict[Decision, None] = {}
        self._sized_by_values = WeakTensorKeyDictionary()
        self._inversions = 0

    @property
    def decisions(self) -> list[Decision]:
        return list(self._noted)

    def call(self, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Run the model, watched."""
        self.calls.start((args, kwargs))
        with self:
            outputs = model(*args, **kwargs)
        self.calls.finish(outputs)
        return outputs

    def __enter__(self) -> Watch:
        super().__enter__()
        _running.watch = self
        builtins.len = _watched_len  # type: ignore[assignment]
        return self

    def __exit__(self, *exception: Any) -> None:
        builtins.len = _plain_len
        _running.watch = None
        super().__exit__(*exception)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SIZES:
            plain_args, plain_kwargs = _plain(args), _plain(kwargs)
            axis = [*plain_args[1:], *plain_kwargs.values()]
            return self.sizes_of(args[0], func(*plain_args, **plain_kwargs), *axis)
        entered: list[Any] = []
        plain_args, plain_kwargs = (
            self._plain_arguments(func, args, kwargs, entered)
            if _has_watched((args, kwargs))
            else (args, kwargs)
        )
        self.last = None
        result = func(*plain_args, **plain_kwargs)
        if func is Tensor.__getitem__:
            self._note_cut(args[0], result)
        if self._is_sized_by_values(func, plain_args, plain_kwargs):
            self._sized_by_values.update(
                (leaf, True) for leaf in tree_leaves(result) if isinstance(leaf, Tensor)
            )
        numbers = iter(entered if not _pads_with_zeros(func, args, kwargs) else [1] * len(entered))
        signed_args, signed_kwargs = _replace((args, kwargs), lambda _: _sign(next(numbers)))
        self.calls.add(func, signed_args, signed_kwargs, result)
        return result

    def sizes_of(self, tensor: Tensor, found: Any, axis: int | None = None) -> Any:
        """Sizes of a tensor along all axes or one, as numbers that remember it."""
        whose = self.calls.input_of(tensor)
        sources = frozenset([BY_VALUES]) if tensor in self._sized_by_values else frozenset()
        if isinstance(found, torch.Size):
            return torch.Size([_as_size(size, (whose, i), sources) for i, size in enumerate(found)])
        if axis is not None:
            with torch._C.DisableTorchFunction():
                axis %= tensor.dim()
        return _as_size(found, (whose, axis), sources)

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
            value = _bare(number)
            if frame is not None:
                place = Place(
                    frame.f_code.co_filename,
                    frame.f_lineno,
                    frame.f_lasti,
                    len(entered) + 1,
                    number.form,
                )
                differs = self._note(place, (value, 0), number.sources, value != 0, numeric=True)
                value = value if differs == (value != 0) else 1
            entered.append(value)
            return value

        return _replace((args, kwargs), plain)  # type: ignore[no-any-return]

    def _note_cut(self, whole: Tensor, part: Any) -> None:
        """Note whether a slice is empty, as ``h[:, 10:]`` of an input that is not longer than
        that.
        """
        frame = _calling_frame()
        if frame is None or not isinstance(part, Tensor) or part.dim() != whole.dim():
            return
        with torch._C.DisableTorchFunction():
            empty = [
                before
                for before, after in zip(whole.shape, part.shape, strict=True)
                if before and not after
            ]
            sources = frozenset(empty or whole.shape)
        place = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, 0)
        self._note(place, (float(not empty), 0), sources, not empty, forcible=False)

    def note_test(self, operands: tuple[Any, Any], outcome: bool) -> bool:
        """Note a test of sizes, and say how it comes out."""
        frame = next(iter(frames()), None)
        kind = _kind_of_test(frame) if frame is not None else None
        if frame is None or kind is None:
            return outcome
        sources = [number.sources for number in operands if _is_watched(number)]
        form = hash(tuple(map(_form, operands)))
        place = Place(frame.f_code.co_filename, frame.f_lineno, frame.f_lasti, form=form)
        bare = (_bare(operands[0]), _bare(operands[1]))
        alike = len(sources) == 2 and sources[0] == sources[1] and bare[0] == bare[1]
        return self._note(
            place, bare, frozenset().union(*sources), outcome, alike=alike, forcible=kind == "test"
        )

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
    ) -> bool:
        if place in self.invert and not (numeric and outcome):
            self.met.add(place)
            self.last = None if numeric else place
            self._inversions += 1
            if self._inversions > MAX_INVERTED:
                self.last = None
                raise RecursionError(f"{place} does not end when its test is inverted")
            outcome = not outcome
        module = calling_module(self._modules)
        self._noted[
            Decision(
                place, module, operands, sources, outcome, frozenset(self.met), alike, forcible
            )
        ] = None
        return outcome


class _Running(threading.local):
    """The watch of this thread, if there is one."""

    watch: Watch | None = None


_running = _Running()


# -- tests -----------------------------------------------------------------------------------------


def _is_own(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_OWN_CODE)


def _pads_with_zeros(func: Any, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a call pads with zeros, which fit every scale: it does not matter how many there
    are.
    """
    if getattr(func, "__name__", "") != "pad":
        return False
    given = dict(zip(("input", "pad", "mode", "value"), args, strict=False)) | kwargs
    return given.get("mode", "constant") == "constant" and not given.get("value")


def _calling_frame() -> FrameType | None:
    """The line of the user's code that calls torch."""
    return next(
        (f for f in frames() if not is_library(f.f_code.co_filename) and not _is_own(f)), None
    )


def _kind_of_test(frame: FrameType) -> str | None:
    """ "test", or "choice" (of the larger of two numbers, say); None where nothing depends on the
    outcome but an exception or a look-up.
    """
    if _is_own(frame) or is_library(frame.f_code.co_filename) or is_check(frame):
        return None
    instruction = _instruction(frame.f_code, frame.f_lasti)
    if instruction.startswith(TESTS):
        return "test"
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals)
    if not line and instruction.startswith("CALL"):  # without its source it may be any function
        return "choice"
    found = TESTING_CALL.search(line)
    return None if found is None else "test" if found[1] in ("bool", "any", "all") else "choice"


@functools.lru_cache(maxsize=4096)
def _instruction(code: CodeType, at: int) -> str:
    return dis.opname[code.co_code[at]]


# -- numbers that are sizes ------------------------------------------------------------------------


class WatchedInt(int):
    """A whole number that was computed from sizes; without a running watch it is a number as any
    other.

    Attributes:
        sources: The sizes of tensors that it was computed from.
        form: How it was computed: equal for numbers that come of the same axes by the same steps.
    """

    sources: frozenset[int]
    form: int

    def __reduce__(self) -> Any:
        return int, (int(self),)

    def __deepcopy__(self, memo: Any) -> int:
        return int(self)

    __hash__ = int.__hash__


class WatchedFloat(float):
    """A number that was computed from sizes by a division or a root; see ``WatchedInt``."""

    sources: frozenset[int]
    form: int

    def __reduce__(self) -> Any:
        return float, (float(self),)

    def __deepcopy__(self, memo: Any) -> float:
        return float(self)

    __hash__ = float.__hash__


def _is_watched(value: Any) -> bool:
    return type(value) in (WatchedInt, WatchedFloat)


def _bare(value: Any) -> Any:
    """The number without its sources."""
    return (
        int(value)
        if type(value) is WatchedInt
        else float(value)
        if type(value) is WatchedFloat
        else value
    )


def _form(value: Any) -> Any:
    return value.form if _is_watched(value) else repr(value)  # -1 and -2 have one hash


def _sign(value: Any) -> str:
    """What stands for a size where only the way through a model counts."""
    return "a size" if value else "a size of zero"


def _watched(value: Any, sources: frozenset[int], form: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(_watched(part, sources, (i, form)) for i, part in enumerate(value))
    if type(value) not in (int, float):
        return value
    watched: Any = WatchedInt(value) if type(value) is int else WatchedFloat(value)
    watched.sources = sources
    watched.form = hash(form)
    return watched


def _as_size(size: int, form: Any, sources: frozenset[int] = frozenset()) -> Any:
    """A size as a number that remembers it, and further sources."""
    return _watched(size, sources | {size}, form) if type(size) is int else size


def _watched_len(values: Any, /) -> int:
    """``len`` of a tensor or of a list of tensors is a size as well."""
    length = _plain_len(values)
    if (
        _running.watch is None
        or not (
            isinstance(values, Tensor) or (type(values) in (list, tuple) and _holds_tensors(values))
        )
        or _is_own(sys._getframe(1))  # the capture around it counts tensors too
    ):
        return length
    if isinstance(values, Tensor):
        return _running.watch.sizes_of(values, length, 0)  # type: ignore[no-any-return]
    return _as_size(length, "tensors")  # type: ignore[no-any-return]


def _holds_tensors(values: Any) -> bool:
    return _plain_len(values) > 0 and isinstance(values[0], Tensor)


def _arithmetic(compute: Callable[..., Any], *, reflected: bool = False) -> Callable[..., Any]:
    """A method that computes with the plain number, and lets the result remember where it came
    from.
    """

    def method(self: Any, *others: Any) -> Any:
        if not all(isinstance(other, (int, float)) for other in others):
            return NotImplemented
        operands = [_bare(other) for other in ((*others, self) if reflected else (self, *others))]
        result = compute(*operands)
        if _running.watch is None:
            return result
        return _watched(
            result,
            frozenset().union(*(n.sources for n in (self, *others) if _is_watched(n))),
            (compute, reflected, *map(_form, (self, *others))),
        )

    return method


def _comparison(compare: Callable[[Any, Any], bool]) -> Callable[[Any, Any], Any]:
    """A method that reports its outcome."""

    def method(self: Any, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        outcome = compare(_bare(self), _bare(other))
        return (
            outcome if _running.watch is None else _running.watch.note_test((self, other), outcome)
        )

    return method


def _truth(self: Any) -> bool:
    outcome = bool(_bare(self))
    return outcome if _running.watch is None else _running.watch.note_test((self, 0), outcome)


BINARY = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
BITWISE = ("and_", "or_", "xor", "lshift", "rshift")
UNARY: dict[str, Callable[..., Any]] = {
    "neg": operator.neg,
    "pos": operator.pos,
    "abs": abs,
    "round": round,
    "ceil": lambda x: x.__ceil__(),
    "floor": lambda x: x.__floor__(),
    "trunc": lambda x: x.__trunc__(),
}
for _type in (WatchedInt, WatchedFloat):
    for _name in (*BINARY, *(BITWISE if _type is WatchedInt else ())):
        _compute = getattr(operator, _name)
        setattr(_type, f"__{_name.rstrip('_')}__", _arithmetic(_compute))
        setattr(_type, f"__r{_name.rstrip('_')}__", _arithmetic(_compute, reflected=True))
    for _name, _compute in (UNARY | {"divmod": divmod}).items():
        setattr(_type, f"__{_name}__", _arithmetic(_compute))
    for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
        setattr(_type, f"__{_name}__", _comparison(getattr(operator, _name)))
    setattr(_type, "__bool__", _truth)  # noqa: B010


# -- arguments of calls ----------------------------------------------------------------------------


def _has_watched(tree: Any) -> bool:
    if isinstance(tree, (tuple, list)):
        return any(map(_has_watched, tree))
    if isinstance(tree, dict):
        return any(map(_has_watched, tree.values()))
    if isinstance(tree, slice):
        return any(map(_has_watched, (tree.start, tree.stop, tree.step)))
    return _is_watched(tree)


def _replace(tree: Any, replace: Callable[[Any], Any]) -> Any:
    """A tree of arguments with the numbers that are sizes replaced; parts without such are the same
    objects.
    """
    if not _has_watched(tree):
        return tree
    if isinstance(tree, (tuple, list)):
        parts = [_replace(part, replace) for part in tree]
        if isinstance(tree, torch.Size) and all(isinstance(part, int) for part in parts):
            return torch.Size(parts)
        return parts if isinstance(tree, list) else tuple(parts)
    if isinstance(tree, dict):
        return {key: _replace(value, replace) for key, value in tree.items()}
    if isinstance(tree, slice):
        return slice(*(_replace(bound, replace) for bound in (tree.start, tree.stop, tree.step)))
    return replace(tree)


def _plain(tree: Any) -> Any:
    return _replace(tree, _bare)
