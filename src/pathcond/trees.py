"""Nested lists, tuples and dicts, as the arguments of ATen calls are; what ``torch.utils._pytree``
does for any type, quicker.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def tree_map(function: Callable[[Any], Any], tree: Any) -> Any:
    """The same nesting with every leaf replaced; named tuples become tuples."""
    if isinstance(tree, dict):
        return {key: tree_map(function, value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [tree_map(function, value) for value in tree]
    if isinstance(tree, tuple):
        return tuple(tree_map(function, value) for value in tree)
    return function(tree)


def tree_leaves(tree: Any) -> list[Any]:
    """All leaves in order.

    >>> tree_leaves({"a": [1, (2, None)], "b": "c"})
    [1, 2, None, 'c']
    """
    if isinstance(tree, dict):
        tree = tree.values()
    elif not isinstance(tree, (list, tuple)):
        return [tree]
    return [leaf for part in tree for leaf in tree_leaves(part)]
