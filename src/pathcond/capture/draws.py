"""Random numbers that decide which layers run (LayerDrop): made to come out as wanted.

Python's and NumPy's generators hold 624 words that they hand out in order. Setting those words sets
the draws, however the model has imported the functions. Single draws of torch are replaced where
they are asked for.
"""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

WORDS = 624
SET_WORDS = 400  # the others stay random, so that a generator which rejects draws ends all the same
LOW = 2.0**-20
HIGH = 1 - 2.0**-20
BETWEEN = (0.2, 0.4, 0.6, 0.8)  # where a number chooses one of several
ALL_COMBINATIONS = 4
BOTH_WAYS = 16
DRAWN = ("rand", "uniform_", "bernoulli", "bernoulli_", "randint")


@dataclass(frozen=True)
class Plan:
    """How draws come out: all alike but for a few.

    Attributes:
        base: What a draw is, between 0 and 1.
        others: Positions of draws, as (source, number), that come out at the other end.
    """

    base: float = HIGH
    others: frozenset[tuple[str, int]] = frozenset()

    def draw(self, source: str, number: int) -> float:
        other = LOW if self.base > 0.5 else HIGH
        return other if (source, number) in self.others else self.base


def plans(draws: list[tuple[str, int]]) -> Iterator[Plan]:
    """The plans by which a model that draws is captured, beside the one where all draws are high:
    all draws alike, at several heights. Then, with low and high ones:

    Few draws: all combinations. More: with all layers, with none, with each one alone, and with
    each one left out. That is enough where a layer that is left out leaves a value of the same
    scale behind, as residual layers do: then every layer sees the same scales whichever others run.
    Where it does not, leaving out one layer and running one alone equate the scales in front of and
    behind it.
    """
    yield from (Plan(base=base) for base in (LOW, *BETWEEN))
    if len(draws) <= ALL_COMBINATIONS:
        for size in range(1, len(draws)):
            for chosen in itertools.combinations(draws, size):
                yield Plan(others=frozenset(chosen))
        return
    for draw in draws:
        yield Plan(others=frozenset([draw]))
    if len(draws) <= BOTH_WAYS:
        for draw in draws:
            yield Plan(base=LOW, others=frozenset([draw]))


class ScalarDraws(TorchFunctionMode):
    """Counts draws of a single number, and makes them constants if asked to."""

    def __init__(self, plan: Plan, *, replace: bool) -> None:
        super().__init__()
        self.plan = plan
        self.replace = replace
        self.count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        drawn = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name not in DRAWN or not isinstance(drawn, Tensor) or drawn.numel() != 1:
            return drawn
        value = self.plan.draw("torch", self.count)
        self.count += 1
        if not self.replace:
            return drawn
        if name in ("bernoulli", "bernoulli_"):
            value = float(value > 0.5)
        elif name == "uniform_":
            low, high = (
                (*args[1:], *(kwargs or {}).values(), 0.0, 1.0)[:2] if len(args) > 2 else (0.0, 1.0)
            )
            value = low + value * (high - low)
        elif name == "randint":
            bounds = [a for a in args if isinstance(a, int)]
            low, high = (bounds if len(bounds) > 1 else [0, *bounds, 2])[:2]
            value = int(low + value * (high - low))
        literal: Any = value
        for _ in drawn.shape:
            literal = [literal]
        constant = torch.tensor(literal, dtype=drawn.dtype)
        if drawn.device.type != "cpu":
            constant = constant.to(drawn.device)
        return args[0].copy_(constant) if name.endswith("_") else constant


class GlobalDraws:
    """Sets the global generators of Python and NumPy, and tells how many numbers were drawn."""

    def __init__(self, plan: Plan) -> None:
        self._python = _words(plan, "python")
        random.setstate((3, (*self._python, 0), None))
        numpy = sys.modules.get("numpy")
        self._numpy = (
            numpy if numpy is not None and numpy.random.get_state()[0] == "MT19937" else None
        )
        self._numpy_words = _words(plan, "numpy")
        if self._numpy is not None:
            words = self._numpy.array(self._numpy_words, dtype="uint32")
            self._numpy.random.set_state(("MT19937", words, 0))

    def list_draws(self) -> list[tuple[str, int]]:
        """Positions of the draws so far that a plan can set."""
        *words, position = random.getstate()[1]
        found = [("python", i) for i in range(_count(tuple(words), self._python, position))]
        if self._numpy is not None:
            state = self._numpy.random.get_state()
            used = _count(tuple(state[1].tolist()), self._numpy_words, state[2])
            found += [("numpy", i) for i in range(used)]
        return found


def _count(words: tuple[int, ...], before: tuple[int, ...], position: int) -> int:
    used = SET_WORDS if words != before else min(position, SET_WORDS)
    return (used + 1) // 2


@lru_cache(maxsize=16)
def _words(plan: Plan, source: str) -> tuple[int, ...]:
    """624 words such that the first 200 numbers between 0 and 1 are as planned; two words make
    one.
    """
    generator = random.Random(0)
    words: list[int] = []
    for number in range(SET_WORDS // 2):
        high = int(plan.draw(source, number) * 2**32)
        words += [_untemper(high), _untemper(high)]
    return (*words, *(generator.getrandbits(32) for _ in range(WORDS - SET_WORDS)))


def _untemper(output: int) -> int:
    """The word of a Mersenne Twister that comes out as ``output``."""
    word = output ^ (output >> 18)
    word ^= (word << 15) & 0xEFC60000
    part = word
    for _ in range(5):
        part = word ^ ((part << 7) & 0x9D2C5680)
    word = part & 0xFFFFFFFF
    return word ^ (word >> 11) ^ (word >> 22)
