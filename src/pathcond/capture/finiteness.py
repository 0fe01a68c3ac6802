"""Tests of whether values are finite: for which tensors they come out the same on all usual
inputs.
"""

from __future__ import annotations

from collections.abc import Collection

from .nodes import Node

TESTS = ("isinf", "isnan", "isfinite")
LOGIC = frozenset(
    "any all logical_not logical_or logical_and bitwise_not bitwise_or bitwise_and".split()
)
# What makes infinite values, or none at all, of finite ones, as 0 / 0 does.
DIVIDING = frozenset(
    "div true_divide floor_divide remainder fmod reciprocal log log2 log10 rsqrt sqrt pow acos "
    "asin atanh acosh".split()
)
LEAVES = ("parameter", "input")


def tells_finite(node: Node, finite: Collection[Node]) -> bool:
    """Whether a truth value only says that something which was computed is finite, and it will be
    so on other inputs.

    A test of the inputs themselves asks for missing values, and what is divided by a sum of
    activations may be 0 / 0.

    Args:
        node: The truth value.
        finite: The tests on which all values were finite.
    """
    if node.op in TESTS:
        return node in finite and _stays_finite(node)
    operands = node.operands
    return node.op in LOGIC and bool(operands) and all(tells_finite(n, finite) for n in operands)


def _stays_finite(test: Node) -> bool:
    computed = _behind(test)
    weighed = any(node.op == "parameter" for node in computed)
    return weighed and not any(map(_may_leave_numbers, computed))


def _may_leave_numbers(node: Node) -> bool:
    """Whether an operation may have no finite result on finite operands; ε inside a root and a
    constant divisor prevent that.
    """
    if not (node.op in DIVIDING or node.op.startswith("linalg_")):
        return False
    risky = node.operands[-1:] if node.op in ("rsqrt", "sqrt") else node.operands[1:]
    if node.op in ("div", "true_divide", "floor_divide", "remainder", "fmod"):
        return any(_is_computed(operand) for operand in risky)
    if node.op in ("rsqrt", "sqrt"):
        return not all(operand.op == "add" for operand in risky)
    exponent = node.args[1] if node.op == "pow" and len(node.args) > 1 else -1
    return not (isinstance(exponent, int) and exponent >= 0)


def _is_computed(node: Node) -> bool:
    return any(part.op in LEAVES for part in _behind(node))


def _behind(node: Node) -> set[Node]:
    """A node and all that it is computed from."""
    found = {node}
    waiting = [node]
    while waiting:
        new = [operand for operand in waiting.pop().operands if operand not in found]
        found.update(new)
        waiting += new
    return found
