"""Parameters that the user wants left as they are: frozen ones, and those excluded by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from torch import nn

from ..capture.models import canonical_names


def list_frozen(model: nn.Module) -> set[str]:
    """First names of the parameters with ``requires_grad=False``, and of the buffers that belong to
    them.

    The statistics of a norm belong to its gain and bias: who saves only what was trained saves
    neither.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    >>> _ = model[1].requires_grad_(False)
    >>> sorted(list_frozen(model))
    ['1.bias', '1.num_batches_tracked', '1.running_mean', '1.running_var', '1.weight']
    """
    found: set[str] = set()
    if all(parameter.requires_grad for parameter in model.parameters()):
        return found
    names = canonical_names(model)
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        kept = [name for name, parameter in own.items() if not parameter.requires_grad]
        if own and len(kept) == len(own):
            kept += [name for name, _ in module.named_buffers(recurse=False)]
        found.update(names[f"{prefix}.{name}" if prefix else name] for name in kept)
    return found


def list_excluded(model: nn.Module, exclude: str | Iterable[str]) -> dict[str, str]:
    """First names of the parameters and buffers that are excluded, with the reason.

    Args:
        model: The model, not wrapped.
        exclude: Names of parameters or modules, or patterns with ``*``, ``?`` and ``[...]``.

    Raises:
        TypeError: ``exclude`` is something else.
        ValueError: Something in ``exclude`` names nothing of the model.

    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    >>> list(list_excluded(model, ["2", "*.bias"]))
    ['2.weight', '2.bias', '0.bias']
    """
    patterns = [exclude] if isinstance(exclude, str) else exclude
    if isinstance(patterns, Mapping) or not isinstance(patterns, Iterable):
        raise TypeError(f"exclude takes names or patterns, as a string or a list, not {exclude!r}")
    patterns = list(patterns)
    if not all(isinstance(pattern, str) for pattern in patterns):
        raise TypeError(f"exclude takes names or patterns, not {exclude!r}")
    names = canonical_names(model)
    found: dict[str, str] = {}
    unmatched = []
    for pattern in patterns:
        matched = [
            first
            for name, first in names.items()
            if fnmatchcase(name, pattern) or name.startswith(pattern + ".")
        ]
        found |= {name: f"is excluded by {pattern!r}" for name in matched if name not in found}
        unmatched += [] if matched else [pattern]
    if unmatched:
        raise ValueError(
            f"exclude names no parameter or module of {type(model).__name__}: "
            f"{', '.join(map(repr, unmatched))}. Names look like {', '.join(list(names)[:3])}."
        )
    return found
