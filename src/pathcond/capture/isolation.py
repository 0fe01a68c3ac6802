"""Run a model without leaving traces: in its modes, its weights, its buffers and attributes, random
states, or in the process around it.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import numbers
import operator
import random
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import HiddenError
from ..memory import storage_of
from ..trees import tree_leaves
from ..wrappers import compiler_is_loaded
from .contents import OF_THE_PROCESS, PLAIN, behind_proxies, slots_of

# Random states, warning filters, sys.stderr, TF32 and the compiler's stance belong to the whole
# process: one thread at a time may change them, and puts them back before the next one.
LOCK = threading.RLock()

TABLES = ("_parameters", "_buffers", "_modules")
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
# Other modules, code, and what belongs to the whole process: no part of these is looked into.
HOLDING_NOTHING = (nn.Module, type, ModuleType, FunctionType, BuiltinFunctionType, MethodType)
# What recurrent layers make of their parameters in each call.
REBUILT = ("_flat_weights", "_flat_weight_refs")
LEVELS = 5  # of containers and objects in each other
MANY = 10_000  # such things
LARGE = 2**22  # numbers in a tensor that lies inside of something
# A number of calls after which what fades in or out has done so. The second call from it on finds a
# counter at 1,008,000, a multiple of 1000, of 128 and of 63.
LATE = 1_007_999


@contextlib.contextmanager
def isolated(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Run the body with the model in the given mode, as it is written: without autocast and
    compiled code.

    Every module's mode and all random states are restored. Threads take turns.
    """
    with LOCK, same_random_states(), _in_mode(model, training), contextlib.ExitStack() as stack:
        for kind in ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",):
            stack.enter_context(torch.autocast(kind, enabled=False))
        if compiler_is_loaded():
            # Without this, what we try would be compiled for good.
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        yield


@contextlib.contextmanager
def _in_mode(model: nn.Module, training: bool) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules() if module.training != training]
    try:
        # train() may do more than that: LoRA layers merge their weights in it.
        for module, _ in modes:
            module.training = training
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextlib.contextmanager
def same_random_states() -> Iterator[None]:
    """Put the random states of Python, NumPy and torch back behind the body."""
    python_state = random.getstate()
    torch_state = torch.get_rng_state()
    numpy = sys.modules.get("numpy")  # only a program that has imported it can draw from it
    numpy_state = numpy.random.get_state() if numpy is not None else None
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    cuda_states = torch.cuda.get_rng_state_all() if cuda else []
    try:
        yield
    finally:
        random.setstate(python_state)
        torch.set_rng_state(torch_state)
        if numpy is not None:
            numpy.random.set_state(numpy_state)
        if cuda:
            torch.cuda.set_rng_state_all(cuda_states)


@contextlib.contextmanager
def replaced(model: nn.Module, values: Mapping[str, Tensor]) -> Iterator[None]:
    """Run the body with some parameters and buffers replaced, by identity: all names of a tied
    tensor at once.

    To be used inside ``uninterrupted``. torch.func.functional_call is no alternative: of a module
    that is used under two names it leaves the replacement behind.
    """
    places = [
        (f"{prefix}.{name}" if prefix else name, table, name, tensor)
        for prefix, module in model.named_modules(remove_duplicate=False)
        for table in (module._parameters, module._buffers)
        for name, tensor in table.items()
        if tensor is not None
    ]
    replacements = {id(tensor): values[full] for full, _, _, tensor in places if full in values}
    saved = [
        (table, name, tensor) for _, table, name, tensor in places if id(tensor) in replacements
    ]
    try:
        for table, name, tensor in saved:
            table[name] = replacements[id(tensor)]  # type: ignore[index]
        yield
    finally:
        try:
            _put_back(saved)
        # Raised into this thread by another one, which no signal mask prevents.
        except BaseException:
            _put_back(saved)
            raise


def _put_back(saved: Iterable[tuple[dict[str, Any], str, Tensor]]) -> None:
    for table, name, tensor in saved:
        table[name] = tensor


@contextlib.contextmanager
def attributes_kept(model: nn.Module) -> Iterator[Attributes]:
    """Bring back what forward assigns to its modules, and what it writes into containers, objects
    and tensors that are their attributes or lie inside of these: they would keep tensors of copies,
    or of a trial run. Caches of methods are emptied. To be used inside ``uninterrupted``.

    Yields:
        What there was, beside which changes can be told.

    Raises:
        HiddenError: It makes parameters, of which nobody knows yet what they will be.
    """
    before = Attributes(model)
    caches = [(cache, cache.cache_info()) for cache in _list_caches(before.modules)]
    made: list[str] = []
    try:
        yield before
        made = _list_new_parameters(model, before)
    finally:
        before.bring_back()
        for cache, info in caches:
            if cache.cache_info() != info:
                cache.cache_clear()
    if made:
        raise HiddenError(
            f"its first call makes parameters ({', '.join(made[:3])}): call it once on a batch, "
            "then condition it"
        )


class Attributes:
    """The attributes of a model's modules as they were, and what these hold."""

    def __init__(self, model: nn.Module) -> None:
        self.modules = list(model.modules())
        self.own = [(vars(module), dict(vars(module))) for module in self.modules]
        self.tables = [
            (vars(module)[table], dict(vars(module)[table]))
            for module in self.modules
            for table in TABLES
        ]
        in_attributes = [
            value
            for _, before in self.own
            for name, value in before.items()
            if name not in OF_EVERY_MODULE
        ]
        self._held = _Held([*in_attributes, *defaults_of(self.modules)])
        self._marked: dict[tuple[int, Any], int] = {}

    def have_changed(self) -> bool:
        return (
            any(not _holds(*each) for each in self.own)
            or any(_has_others(*each) for each in self.tables)
            or self._held.has_changed()
        )

    def since_now(self) -> Callable[[], bool]:
        """Says later whether something else is held by then than now: torch.export exchanges
        parameters before it calls forward. Values of tensors are not looked at.
        """
        contents = [
            (value, _but_for_rebuilt(value)) for value, _ in (*self.own, *self._held.contents)
        ]
        slotted = [(value, slots_of(value)) for value, _ in self._held.slotted]
        tables = [(table, dict(table)) for table, _ in self.tables]
        return lambda: (
            any(not _holds(_but_for_rebuilt(value), content) for value, content in contents)
            or any(not _holds(slots_of(value), content) for value, content in slotted)
            or any(_has_others(table, content) for table, content in tables)
        )

    def mark(self) -> None:
        """Remember the whole numbers that have changed so far."""
        self._marked = {(id(now), key): now[key] for now, key, _ in self._changed_numbers()}

    def have_counted(self) -> bool:
        """Whether whole numbers that had changed before the mark have changed since: forward counts
        in them.
        """
        return any(
            now[key] != self._marked.get((id(now), key), now[key])
            for now, key, _ in self._changed_numbers()
        )

    def count_on(self, calls: int) -> None:
        """Set what forward counts to where it is after so many calls, of which one was made.

        From ``LATE`` on, what is counted up is set to about that number itself: not every number of
        calls is tried, and this one is a multiple of what models count in.
        """
        for now, key, start in list(self._changed_numbers()):
            by = now[key] - start
            to_number = calls >= LATE and by > 0 and start < LATE
            turns = -((start - calls) // by) if to_number else calls
            now[key] += (turns - 1) * by

    def _changed_numbers(self) -> Iterator[tuple[Any, Any, int]]:
        """Where there are other whole numbers than there were, and those; 0 where nothing was."""
        for now, content in (*self.own, *self._held.contents):
            for key, value in _items(now):
                before = _look_up(content, key)
                start = 0 if before is None else before
                if _is_whole(value) and _is_whole(start) and value != start:
                    yield now, key, start

    def bring_back(self) -> None:
        for now, before in (*self.own, *self.tables):
            _bring_back(now, before)
        self._held.bring_back()


def defaults_of(modules: Iterable[nn.Module]) -> list[Any]:
    """What methods have as the defaults of their arguments, but for plain values: a list there is
    one list for all calls.
    """
    kinds = {kind for module in modules for kind in type(module).__mro__}
    methods = [
        value
        for kind in kinds
        if not kind.__module__.startswith(("torch.", "builtins"))
        for value in vars(kind).values()
        if isinstance(value, FunctionType)
    ]
    defaults = [
        value
        for method in methods
        for value in (*(method.__defaults__ or ()), *(method.__kwdefaults__ or {}).values())
    ]
    return [value for value in defaults if type(value) not in PLAIN]


def _has_others(table: dict[str, Any], before: dict[str, Any]) -> bool:
    """Whether a table of modules or tensors has other names, or something in place of nothing, or
    another module. The tensors themselves are exchanged while a model is tried.
    """
    return table.keys() != before.keys() or any(
        (table[name] is None) != (value is None)
        or (isinstance(value, nn.Module) and table[name] is not value)
        for name, value in before.items()
    )


def _but_for_rebuilt(value: Any) -> Any:
    """A copy of a container, without what recurrent layers make of their parameters in a call."""
    if isinstance(value, dict):
        return {key: part for key, part in value.items() if key not in REBUILT}
    return list(value)


def _is_whole(value: Any) -> bool:
    # by its type: a weak proxy of something gone says nothing of itself
    kind = type(value)
    return issubclass(kind, numbers.Integral) and kind is not bool


def _items(content: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(content, dict):
        return content.items()
    return enumerate(content) if isinstance(content, list) else ()


def _look_up(value: Any, key: Any) -> Any:
    """An entry of a dict or list; None where there is none, or no entries by number."""
    if isinstance(value, dict):
        return value.get(key)
    return value[key] if isinstance(value, list) and key < len(value) else None


class _Held:
    """What attributes hold, a few levels deep: contents of containers, attributes of objects,
    values of tensors and arrays. A dataset that lies deeper than an attribute is not copied.
    """

    def __init__(self, values: Iterable[Any]) -> None:
        self.contents: list[tuple[Any, Any]] = []
        self.slotted: list[tuple[Any, dict[str, Any]]] = []
        self.tensors: list[tuple[Tensor, int, Tensor]] = []
        self.arrays: list[tuple[Any, Any]] = []
        here = [value for value in behind_proxies(values) if type(value) not in PLAIN]
        seen: dict[int, Any] = {}
        for level in range(LEVELS):
            inside: list[Any] = []
            for value in here:
                if id(value) not in seen and len(seen) < MANY:
                    seen[id(value)] = value  # which keeps its id its own
                    inside += self._take(value, LARGE if level else sys.maxsize)
            here = inside

    def _take(self, value: Any, largest: int) -> list[Any]:
        """Note one value, if it has no more numbers than so many, and return what lies in it."""
        if isinstance(value, Tensor):
            known = value.is_meta or value.is_inference() or isinstance(value, nn.Parameter)
            if not known and value.numel() <= largest:
                self.tensors.append((value, value._version, value.detach().clone()))
            return []
        origin = type(value).__module__.partition(".")[0]
        if isinstance(value, HOLDING_NOTHING) or origin in OF_THE_PROCESS:
            return []
        if origin == "numpy":
            if 0 < getattr(value, "size", 0) <= largest and value.flags.writeable:
                self.arrays.append((value, value.copy()))
            return []
        inside: list[Any] = []
        if isinstance(value, dict):
            self.contents.append((value, dict(value)))
            inside += value.values()
        elif isinstance(value, (list, deque, set, tuple)):
            self.contents += [(value, list(value))] if not isinstance(value, tuple) else []
            inside += value
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            self.contents.append((attributes, dict(attributes)))
            inside += attributes.values()
        if in_slots := slots_of(value):
            self.slotted.append((value, in_slots))
            inside += in_slots.values()
        return [part for part in behind_proxies(inside) if type(part) not in PLAIN]

    def has_changed(self) -> bool:
        return (
            any(not _holds(value, content) for value, content in self.contents)
            or any(not _holds(slots_of(value), content) for value, content in self.slotted)
            or any(tensor._version != version for tensor, version, _ in self.tensors)
            or any(bool((array != kept).any()) for array, kept in self.arrays)
        )

    def bring_back(self) -> None:
        for value, content in self.contents:
            _refill(value, content)
        for value, content in self.slotted:
            _refill_slots(value, content)
        for tensor, version, kept in self.tensors:
            if tensor._version != version:
                tensor.detach().copy_(kept)
        for array, kept in self.arrays:
            if (array != kept).any():
                array[...] = kept


def _list_caches(modules: Iterable[nn.Module]) -> list[Any]:
    """The caches of methods (``functools.lru_cache``) of all classes of the user's."""
    kinds = {kind for module in modules for kind in type(module).__mro__}
    return [
        value
        for kind in kinds
        if not kind.__module__.startswith("torch.nn.")
        for value in vars(kind).values()
        if isinstance(value, functools._lru_cache_wrapper)
    ]


def _list_new_parameters(model: nn.Module, before: Attributes) -> list[str]:
    """Names of parameters under which there was nothing before."""
    known = {id(table): content for table, content in before.tables}
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name, parameter in module._parameters.items()
        if parameter is not None and known.get(id(module._parameters), {}).get(name) is None
    ]


def _refill(value: Any, content: Any) -> None:
    """Make a container hold what it held; untouched if it still does."""
    if isinstance(value, dict):
        _bring_back(value, content)
    elif not _holds(value, content):
        value.clear()
        value.update(content) if isinstance(value, set) else value.extend(content)


def _refill_slots(value: Any, content: dict[str, Any]) -> None:
    """The same of attributes in slots, those of frozen classes too."""
    now = slots_of(value)
    for name in now.keys() - content.keys():
        object.__delattr__(value, name)
    for name, kept in content.items():
        if name not in now or now[name] is not kept:
            object.__setattr__(value, name, kept)


@contextlib.contextmanager
def weights_kept(model: nn.Module, others: Iterable[Tensor] = ()) -> Iterator[None]:
    """Bring back what forward writes into its parameters, as ``nn.Embedding(max_norm=1.0)`` does,
    and into other tensors, and the memory that it exchanges by assigning to ``.data``. Only what is
    written is copied.
    """
    tensors = [*model.parameters(), *others]
    memory = [(each, each.data) for each in tensors if type(each) in (Tensor, nn.Parameter)]
    keeping = _Keeping(tensors)
    try:
        with keeping:
            yield
    finally:
        for tensor, data in memory:
            if storage_of(tensor) != storage_of(data):
                tensor.data = data
        keeping.restore()


class _Keeping(TorchDispatchMode):
    """Copies tensors before the first call that writes into their memory."""

    supports_higher_order_operators = True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Else torch imports its compiler, to keep it from compiling this class."""
        return False

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._in_memory: dict[int | None, list[Tensor]] = {}
        for tensor in tensors:
            memory = storage_of(tensor)
            if memory is not None and not tensor.is_meta:
                self._in_memory.setdefault(memory, []).append(tensor)
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if isinstance(func, torch._ops.OpOverload) and func._schema.is_mutable:
            written = [
                args[i] if i < len(args) else kwargs.get(argument.name)
                for i, argument in enumerate(func._schema.arguments)
                if argument.alias_info is not None and argument.alias_info.is_write
            ]
            for tensor in tree_leaves(written):
                memory = storage_of(tensor) if isinstance(tensor, Tensor) else None
                held = self._in_memory.pop(memory, [])
                self._copies += [(each, each.detach().clone()) for each in held]
        return func(*args, **kwargs)

    def restore(self) -> None:
        for tensor, kept in self._copies:
            tensor.detach().copy_(kept)


def _bring_back(table: dict[str, Any], content: dict[str, Any]) -> None:
    """Make a table what it was, in its order; untouched if it still is."""
    if not _holds(table, content):
        table.clear()
        table.update(content)


def _holds(value: Any, content: Any) -> bool:
    """Whether a container holds the very objects that it held, in their order."""
    if not isinstance(value, dict):
        return list(map(id, value)) == list(map(id, content))
    return (
        len(value) == len(content)
        and all(map(operator.is_, value.values(), content.values()))
        and all(map(operator.eq, value, content))
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Drop what this thread warns, logs through torch, or prints to stderr.

    torch.export logs its failures and prints half a graph; ours reach the user as one error. What
    other threads say meanwhile is passed on, but for warnings, whose filters have no threads.
    """
    with LOCK, warnings.catch_warnings(), _quiet_log(), _quiet_stderr():
        warnings.simplefilter("ignore")
        yield


class _OtherThreads(logging.Filter):
    """Passes only what other threads log through torch."""

    def __init__(self) -> None:
        super().__init__()
        self.silent = threading.get_ident()

    def filter(self, record: logging.LogRecord) -> bool:
        own = record.thread in (None, self.silent)
        return not (own and record.name.split(".")[0] == "torch")


@contextlib.contextmanager
def _quiet_log() -> Iterator[None]:
    root = logging.getLogger()
    named = [
        logger
        for name, logger in list(root.manager.loggerDict.items())
        if name.split(".")[0] == "torch"
    ]
    loggers = [root, *(logger for logger in named if isinstance(logger, logging.Logger))]
    found = [logging.lastResort, *(handler for logger in loggers for handler in logger.handlers)]
    handlers = {id(handler): handler for handler in found if handler is not None}.values()
    others = _OtherThreads()
    try:
        for handler in handlers:
            handler.addFilter(others)
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(others)


class _StderrOfOtherThreads:
    """Stands in for sys.stderr: what one thread writes is dropped, all else passes."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self.silent: int | None = threading.get_ident()

    def write(self, text: str) -> int:
        if threading.get_ident() == self.silent or self._stream is None:
            return len(text)
        return self._stream.write(text)  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def _quiet_stderr() -> Iterator[None]:
    stream = sys.stderr
    replacement = _StderrOfOtherThreads(stream)
    sys.stderr = replacement  # type: ignore[assignment]
    try:
        yield
    finally:
        # Another thread may have put its own in place meanwhile, to bring ours back later.
        replacement.silent = None
        if sys.stderr is replacement:
            sys.stderr = stream
