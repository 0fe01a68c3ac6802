"""What a comparison is asked to do, checked as a whole before the first run."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from ..condition import condition_

AS_IS = "as is"
ADDRESS = re.compile(r" at 0x[0-9a-f]+")

Prepare = Callable[[nn.Module, Any], object]  # changes a model in place, given example inputs


@dataclass(frozen=True, kw_only=True)
class Method:
    """One way to prepare a model for training.

    Attributes:
        name: As in the table.
        how: The same in a word of code, by which rows of results are recognised.
        prepare: Does it, in place; None leaves the model as it was built.
        only_weights: Whether nothing but parameters and buffers change, so that another model can
            take them over.
    """

    name: str
    how: str
    prepare: Prepare | None
    only_weights: bool = False


@dataclass(frozen=True, kw_only=True)
class Point:
    """One run to be made: a method at a rate from the initial weights of a seed."""

    method: Method
    rate: float
    seed: int


@dataclass(frozen=True, kw_only=True)
class Grid:
    """All runs of a comparison.

    Attributes:
        rates: Learning rates, ascending.
        seeds: Of the initial weights.
        methods: In the order of the table.
    """

    rates: tuple[float, ...]
    seeds: tuple[int, ...]
    methods: tuple[Method, ...]

    @property
    def baseline(self) -> Method:
        """What the others are measured by: the first method that leaves the model as it is, else
        the first.
        """
        return next((method for method in self.methods if method.prepare is None), self.methods[0])

    def __iter__(self) -> Iterator[Point]:
        """Seed by seed, so that an interrupted comparison has whole curves of the first seeds."""
        for seed in self.seeds:
            for rate in self.rates:
                for method in self.methods:
                    yield Point(method=method, rate=rate, seed=seed)

    def __len__(self) -> int:
        return len(self.seeds) * len(self.rates) * len(self.methods)


def check_types(build: object, train: object, label: object) -> None:
    """Say it before the first run, where ``build`` or ``train`` cannot be called as such, or
    ``label`` cannot be printed.

    Raises:
        TypeError: One of them is no function, or takes other arguments; the label is no string.
    """
    if not isinstance(label, str):
        raise TypeError(f"compare_rates: label is {_kind(label)}, not a string")
    for name, function, count, does in (
        ("build", build, 1, "makes a model from a seed"),
        ("train", train, 2, "trains a model at a rate"),
    ):
        if isinstance(function, nn.Module) or not callable(function):
            raise TypeError(
                f"compare_rates: {name} is {_kind(function)}: pass a function that {does}"
            )
        if not _takes(function, count):
            given = "one argument" if count == 1 else f"{count} arguments"
            raise TypeError(
                f"compare_rates: {name} cannot be called with {given}: pass a function that {does}"
            )


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        inspect.signature(function).bind(*range(count))
    except TypeError:
        return False
    except ValueError:  # a function of C that does not tell
        return True
    return True


def grid_of(
    rates: Iterable[float], methods: Mapping[str, Any] | None, seeds: int | Iterable[int]
) -> Grid:
    """The grid that the arguments of ``compare_rates`` span.

    Raises:
        ValueError: Some of them make no sense; the message names all that was found.

    >>> [
    ...     method.how
    ...     for method in grid_of([0.1], {"full": {"normalization": "full"}}, 1).methods
    ... ]
    ["condition_(normalization='full')"]
    >>> grid_of([0.1, -1], {}, 3)
    Traceback (most recent call last):
    ValueError: compare_rates: rate -1 is not a positive number; methods is empty: name at least one
    """
    methods = {AS_IS: None, "conditioned": {}} if methods is None else methods
    problems: list[str] = []
    grid = Grid(
        rates=tuple(sorted(_rates(rates, problems))),
        seeds=tuple(_seeds(seeds, problems)),
        methods=tuple(_methods(methods, problems)),
    )
    if problems:
        raise ValueError(f"compare_rates: {'; '.join(problems)}")
    return grid


def _rates(rates: Iterable[float], problems: list[str]) -> list[float]:
    found = _list_values("rates", rates, problems)
    positive = [rate for rate in found if _is_positive(rate)]
    problems += [
        f"rate {rate!r} is not a positive number" for rate in found if not _is_positive(rate)
    ]
    return _once("rates", [float(rate) for rate in positive], problems)


def _is_positive(rate: object) -> bool:
    try:
        return not isinstance(rate, str | bool) and 0 < float(rate) < math.inf  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False


def _seeds(seeds: int | Iterable[int], problems: list[str]) -> list[int]:
    is_number = isinstance(seeds, int) and not isinstance(seeds, bool)
    found = _list_values("seeds", range(seeds) if is_number else seeds, problems)  # type: ignore[arg-type]
    whole = [seed for seed in found if hasattr(seed, "__index__") and not isinstance(seed, bool)]
    problems += [f"seed {seed!r} is not a whole number" for seed in found if seed not in whole]
    return _once("seeds", [int(seed) for seed in whole], problems)


def _methods(methods: object, problems: list[str]) -> list[Method]:
    if not isinstance(methods, Mapping):
        problems.append(f"methods is {_kind(methods)}, not a mapping of names to methods")
        return []
    if not methods:
        problems.append("methods is empty: name at least one")
    made = (_method(name, value, problems) for name, value in methods.items())
    return [method for method in made if method is not None]


def _method(name: object, value: object, problems: list[str]) -> Method | None:
    if not isinstance(name, str) or not name.strip():
        problems.append(f"{name!r} is no name of a method")
    elif value is None:
        return Method(name=name, how=AS_IS, prepare=None)
    elif isinstance(value, Mapping):
        return _conditioning_method(name, value, problems)
    elif callable(value):
        return Method(name=name, how=_describe(value), prepare=value)
    else:
        problems.append(
            f"method {name!r} is {_kind(value)}: it can be None, a function of model "
            "and example inputs, or a dict of "
            "options of condition_"
        )
    return None


def _conditioning_method(
    name: str, options: Mapping[Any, Any], problems: list[str]
) -> Method | None:
    known = {
        option
        for option in inspect.signature(condition_).parameters
        if option not in ("model", "example_inputs")
    }
    unknown = [str(option) for option in options if option not in known]
    if unknown:
        problems.append(
            f"method {name!r} has options that condition_ does not know: {', '.join(unknown)}"
        )
        return None
    written = ", ".join(f"{option}={value!r}" for option, value in options.items())
    how = ADDRESS.sub("", f"condition_({written})")
    return Method(name=name, how=how, prepare=partial(condition_, **options), only_weights=True)


def _describe(function: Any) -> str:
    """A function by its name: the same in the next process, where its address is another."""
    return ADDRESS.sub("", getattr(function, "__qualname__", None) or repr(function))


def _list_values(name: str, values: Any, problems: list[str]) -> list[Any]:
    if isinstance(values, str):
        problems.append(f"{name} is a string, not a list of numbers")
        return []
    try:
        found = list(values)
    except TypeError:
        problems.append(f"{name} is {_kind(values)}, not a list of numbers")
        return []
    if not found:
        problems.append(f"{name} is empty: name at least one")
    return found


def _once(name: str, values: list[Any], problems: list[str]) -> list[Any]:
    twice = [value for value in dict.fromkeys(values) if values.count(value) > 1]
    problems += [f"{name} has {value:g} more than once" for value in twice]
    return values


def _kind(value: object) -> str:
    """What a value is, in a message.

    >>> _kind(3), _kind(None)
    ('an object of type int', 'None')
    """
    return "None" if value is None else f"an object of type {type(value).__name__}"
