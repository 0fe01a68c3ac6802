"""The names of a model's tensors, how it is called, and what it returns."""

from __future__ import annotations

import copy
import enum
import functools
import inspect
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.utils.rnn import PackedSequence
from torch.utils._pytree import tree_leaves, tree_map

from ..distributed.sharding import is_sharded
from ..errors import UnsupportedModelError

PLAIN = (
    *(bool, int, float, complex, str, bytes, range, slice),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
# Types of C whose contents can be seen. Types that are written in Python are on the heap and can
# be changed.
KNOWN_CONTAINERS = {object, list, tuple, dict, set, frozenset, deque, OrderedDict, defaultdict}
HEAP, IMMUTABLE = 1 << 9, 1 << 8


class HiddenOutputError(UnsupportedModelError):
    """The model returns something that nobody can look into."""


# What a model is called with: one tensor, positional arguments, or keyword arguments by name.
Inputs: TypeAlias = Tensor | Sequence[Any] | Mapping[str, Any]


def as_call(example_inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """Example inputs (a tensor, packed sequence, tuple, list or dict) as positional and keyword
    arguments of one forward call.
    """
    if example_inputs is None:
        raise UnsupportedModelError(
            "No example inputs were given. The model's operations are found by following one "
            "batch through it: "
            "pass a Tensor, a tuple of positional inputs or a dict of keyword inputs, e.g. "
            "torch.randn(2, 3, 224, 224)."
        )
    if any(is_cache(leaf) for leaf in tree_leaves(example_inputs)):
        raise UnsupportedModelError(
            "The example inputs hold a cache, into which the model writes: leave past_key_values "
            "out."
        )
    if isinstance(example_inputs, (Tensor, PackedSequence)):  # the latter is a tuple, too
        return (example_inputs,), {}
    if isinstance(example_inputs, (tuple, list)):
        return tuple(tree_map(_own_object, tuple(example_inputs))), {}
    if isinstance(example_inputs, Mapping):
        return (), tree_map(_own_object, dict(example_inputs))
    raise UnsupportedModelError(
        f"Example inputs have type {type(example_inputs).__name__}; "
        "pass a Tensor, a tuple of positional inputs or a dict of keyword inputs."
    )


def _own_object(leaf: Any) -> Any:
    """A copy of an object among the inputs: what trial runs write into it would stay there."""
    if isinstance(leaf, (Tensor, nn.Module, type, *PLAIN)) or callable(leaf):
        return leaf
    try:
        return copy.deepcopy(leaf)
    except Exception:  # whatever an object raises that is not made to be copied
        return leaf


def arguments_not_given(model: nn.Module, examples: Iterable[Inputs]) -> tuple[str, ...]:
    """Arguments of ``forward`` that no example gives, by name.

    >>> arguments_not_given(nn.RNN(3, 4), [torch.randn(5, 2, 3)])
    ('hx',)
    """
    try:
        signature = inspect.signature(model.forward)
        given: set[str] = set()
        for example in examples:
            args, kwargs = as_call(example)
            given.update(signature.bind_partial(*args, **kwargs).arguments)
    except (TypeError, ValueError):  # no signature that says so
        return ()
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return tuple(
        name
        for name, parameter in signature.parameters.items()
        if name not in given and parameter.kind not in several
    )


def fresh_call(model: nn.Module, example_inputs: Inputs) -> tuple[tuple, dict[str, Any]]:
    """``as_call`` with copies of the tensors, for ops that write into them, where the model's
    parameters are.
    """
    device = next((parameter.device for parameter in model.parameters()), None)

    def clone(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return x.clone() if device is None or device.type == "meta" else x.to(device, copy=True)

    return tree_map(clone, as_call(example_inputs))  # type: ignore[no-any-return]


def returned_leaves(outputs: Any, *, caches: bool = True) -> list[Any]:
    """All tensors and plain values that a model returns, also those inside mappings, distributions
    and other objects.

    Args:
        outputs: What a call returned.
        caches: Whether to look into the caches of Hugging Face's models, which hold what the next
            call of the same model will read.

    Raises:
        HiddenOutputError: An object of a type that nobody can look into.
    """
    return _leaves(outputs, caches, [])


def _leaves(value: Any, caches: bool, seen: list[Any]) -> list[Any]:
    # Numbers may be sizes that a capture watches.
    if value is None or type(value) in PLAIN or isinstance(value, (int, float, enum.Enum)):
        return [value]
    if isinstance(value, Tensor):
        if value.layout != torch.strided:
            raise HiddenOutputError("the model returns a sparse tensor: return it as a dense one")
        return [
            value,
            *(leaf for part in _attached(value) for leaf in _leaves(part, caches, seen)),
        ]
    if any(value is known for known in seen) or (not caches and is_cache(value)):
        return []
    if type(value) not in (list, tuple, dict):
        # The object itself is kept: the id of one that is gone may be given again.
        seen.append(value)
    return [leaf for part in _parts(value) for leaf in _leaves(part, caches, seen)]


def _attached(tensor: Tensor) -> list[Any]:
    """What the model has put on a tensor; torch itself does so on tensors without values."""
    torchs = _attributes_without_values() if isinstance(tensor, FakeTensor) else ()
    return [part for name, part in vars(tensor).items() if name not in torchs]


@functools.cache
def _attributes_without_values() -> frozenset[str]:
    with FakeTensorMode():
        return frozenset(vars(torch.empty(())))


def is_cache(value: Any) -> bool:
    """Whether an object is a cache of keys and values of Hugging Face's."""
    return any(
        kind.__name__ == "Cache" and kind.__module__.startswith("transformers.")
        for kind in type(value).__mro__
    )


def _parts(value: Any) -> list[Any]:
    """What an object holds: what it has as a container, and its attributes."""
    if isinstance(value, type):
        return [part for part in vars(value).values() if isinstance(part, Tensor)]
    if isinstance(value, weakref.ref):
        return [value()]
    kinds = type(value).__mro__
    of_c = {kind for kind in kinds if not kind.__flags__ & HEAP or kind.__flags__ & IMMUTABLE}
    slots = any(getattr(kind, "__slots__", ()) for kind in kinds if kind not in of_c)
    # Functions see more than their attributes.
    hides = callable(value) and not isinstance(value, torch.distributions.Transform)
    if isinstance(value, tuple) and type(value).__module__ == "torch.return_types":
        return list(value)
    if hides or slots or not of_c <= KNOWN_CONTAINERS:
        raise HiddenOutputError(
            f"the model returns an object of type {type(value).__name__}, whose tensors "
            "cannot be seen: return tensors, or an object that has them as attributes"
        )
    if callable(getattr(value, "keys", None)) and callable(getattr(value, "values", None)):
        # keys may be tensors
        held = [*(key for key in value.keys() if isinstance(key, Tensor)), *value.values()]  # noqa: SIM118
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held = list(value)
    else:
        held = []
    attributes = getattr(value, "__dict__", {}).values()
    # Hugging Face's outputs hold everything twice.
    return held + [part for part in attributes if not any(part is known for known in held)]


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every name of every parameter and buffer -> its first name; tied tensors are the same
    object.
    """
    first: dict[int, str] = {}
    names = {}
    for name, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        names[name] = first.setdefault(id(tensor), name)
    return names


def require_supported(model: nn.Module, *, sharded: bool = False) -> None:
    """Refuse what cannot be captured at all: lazy, quantised or sharded parameters. All findings in
    one error.

    Args:
        model: Any module.
        sharded: Whether parameters may be sharded, because the model was captured before.
    """
    found = []
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            found.append(
                f"parameter {name} of a lazy module has no shape yet: run the model "
                "once on a batch first"
            )
        elif is_sharded(parameter) and not sharded:
            found.append(
                f"parameter {name} is sharded: call pathcond.prepare(model, batch) before "
                "fully_shard (on the meta device if the "
                "whole model fits nowhere), and pass what it returns in place of the batch"
            )
        elif parameter.dtype.is_complex:
            found.append(
                f"parameter {name} has dtype {parameter.dtype}: complex numbers are not "
                "supported; store the real and imaginary "
                "parts as real parameters"
            )
        elif not parameter.dtype.is_floating_point:
            found.append(
                f"parameter {name} has dtype {parameter.dtype}: quantised or integer "
                "weights have no scale"
            )
    for name, buffer in model.named_buffers():
        if buffer is not None and buffer.is_quantized:
            found.append(f"buffer {name} is quantised: rescale the model before quantising it")
    compiled: list[str] = []
    for name, module in model.named_modules():
        inside = any(not outer or name.startswith(f"{outer}.") for outer in compiled)
        if isinstance(module, torch.jit.ScriptModule) and not inside:
            compiled.append(name)
            found.append(
                f"module {name or '(the model itself)'} was compiled by torch.jit, and what it "
                "computes cannot be seen: "
                "pass the Python module that it was made from"
            )
        if type(module).__name__ == "FullyShardedDataParallel":
            found.append(
                f"module {name!r} is FullyShardedDataParallel, whose flat parameters "
                "mix layers: use fully_shard"
            )
        if type(module).__module__.startswith(
            ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
        ):
            found.append(
                f"module {name} ({type(module).__name__}) is quantised: rescale the "
                "model before quantising it"
            )
    if found:
        more = f"\n  ... and {len(found) - 10} more" if len(found) > 10 else ""
        raise UnsupportedModelError(
            "This model cannot be rescaled:\n  - " + "\n  - ".join(found[:10]) + more
        )
