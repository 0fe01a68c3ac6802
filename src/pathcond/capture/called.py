"""The calls that a run makes: two runs that make the same calls on the same values take the same
way through a model.

Shapes play no part in it, but for empty tensors, so runs on inputs of different sizes can be
compared. Numbers that are sizes must have been replaced.

>>> model = torch.nn.Linear(3, 4)
>>> def made(x):
...     calls = CallSequence(model)
...     calls.start((x,))
...     calls.add(torch.relu, (x,), {}, x.relu())
...     return calls
>>> made(torch.randn(2, 3)) == made(torch.randn(5, 3))
True
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from ..errors import UnsupportedModelError
from .models import Inputs, returned_leaves

# Arguments that move no scale, whatever their value.
NEUTRAL = ("is_causal",)
# Calls whose result holds the values of their operand and nothing else.
REPEATING = ("expand", "expand_as", "contiguous")


class CallSequence:
    """Calls of torch in order: the function, where its tensors come from, and all else that it is
    given.

    A tensor comes from an input, a parameter or buffer, or an earlier call.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._tokens: list[Any] = []
        self._known = WeakTensorKeyDictionary()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallSequence) and self._tokens == other._tokens

    __hash__ = None  # type: ignore[assignment]

    def start(self, inputs: Inputs) -> None:
        """Begin a run on these inputs, with the tensors that the model holds now."""
        held = [*self._model.named_parameters(), *self._model.named_buffers()]
        self._know(inputs, "input")
        for name, tensor in held:
            self._known[tensor] = name
        self._tokens.append("start")

    def add(self, func: Any, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Note one call."""
        if getattr(func, "__name__", "") in REPEATING and args[0] in self._known:
            self._known[result] = self._known[args[0]]
            return
        given = {name: value for name, value in kwargs.items() if name not in NEUTRAL}
        self._tokens.append((func, self._token(args), self._token(given)))
        self._know(result, len(self._tokens))

    def finish(self, outputs: Any) -> None:
        """Note what the run returns."""
        try:
            self._tokens.append(self._token(returned_leaves(outputs)))
        except UnsupportedModelError:
            # Of such outputs nothing is known: they equal no others.
            self._tokens.append(object())

    def _know(self, values: Any, origin: Any) -> None:
        for position, leaf in enumerate(tree_leaves(values)):
            # What a call returns unchanged, or wrote into, is known by that call from now on.
            if isinstance(leaf, Tensor):
                self._known[leaf] = (origin, position)

    def _token(self, value: Any) -> Any:
        """What stands for an argument."""
        if isinstance(value, Tensor):
            return (self._known.get(value, ("other", id(value))), value.numel() == 0)
        if isinstance(value, (tuple, list)):
            return [self._token(part) for part in value]
        if isinstance(value, dict):
            return {key: self._token(part) for key, part in value.items()}
        if isinstance(value, slice):
            return [self._token(part) for part in (value.start, value.stop, value.step)]
        return (
            value
            if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device))
            else type(value)
        )
