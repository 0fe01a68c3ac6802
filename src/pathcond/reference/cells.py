"""The algebra of path enumeration: the value of one element of a tensor, written out as a sum of
products.

    cell = Σ_terms coefficient · Π θ[parameters] · Π gates · x[input]

Adding two values joins their terms, multiplying them pairs their terms, a ReLU puts a gate on each
term. What is left in the cells of the outputs are the paths of the network (def. path_lifting).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .gates import Gate


class Term(NamedTuple):
    """One product. ``input`` is None where no input has entered it: it starts at a parameter."""

    parameters: tuple[int, ...]
    coefficient: float
    input: int | None
    gates: tuple[Gate, ...]

    @property
    def is_activation(self) -> bool:
        """Whether an input or a gate has entered: two such terms have no product that is a path."""
        return self.input is not None or bool(self.gates)

    @property
    def is_constant(self) -> bool:
        return not self.parameters and not self.is_activation


Cell = list[Term]


def scale(cell: Cell, factor: float) -> Cell:
    """factor · cell; nothing at all for a factor of zero."""
    return [term._replace(coefficient=factor * term.coefficient) for term in cell] if factor else []


def add_gate(cell: Cell, gate: Gate) -> Cell:
    """gate · cell."""
    return [term._replace(gates=(*term.gates, gate)) for term in cell]


def times(left: Cell, right: Cell) -> Cell:
    """left · right, each pair of terms once; the parameters of an activation come first."""
    return [_product(a, b) for a in left for b in right]


def _product(a: Term, b: Term) -> Term:
    if a.is_activation and b.is_activation:
        raise NotImplementedError(
            "a product of two activations: its terms are no paths (two inputs or gates meet)"
        )
    if b.is_activation:
        a, b = b, a
    return Term(a.parameters + b.parameters, a.coefficient * b.coefficient, a.input, a.gates)


def indices(shape: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All positions of a tensor, row by row."""
    return itertools.product(*map(range, shape))


class Memory:
    """Every cell of one run by its address. Tensors hold addresses, so that a view shares its cells
    with its base.

    Args:
        limit: Most terms that one tensor may have.
    """

    def __init__(self, limit: int) -> None:
        self.cells: list[Cell] = []
        self.limit = limit

    def array(self, cells: Iterable[Cell], shape: Sequence[int]) -> Array:
        """New cells, given row by row."""
        start = len(self.cells)
        terms = 0
        for cell in cells:
            self.cells.append(cell)
            terms += len(cell)
            if terms > self.limit:
                raise ValueError(
                    f"A tensor of shape {tuple(shape)} is reached by more than "
                    f"limit={self.limit} paths: full enumeration is for "
                    "tiny networks. Make the network or its input smaller, or raise the limit."
                )
        return Array(torch.arange(start, len(self.cells)).view(tuple(shape)), self)

    def constant(self, value: Tensor | float) -> Array:
        """A tensor that depends on nothing; zeros have no terms."""
        value = torch.as_tensor(value)
        return self.array(
            ([Term((), float(v), None, ())] if v else [] for v in value.flatten().tolist()),
            value.shape,
        )


class Array:
    """A tensor of cells.

    Attributes:
        addresses: Where each element's cell is in the memory; int64, its shape is the tensor's.
    """

    def __init__(self, addresses: Tensor, memory: Memory) -> None:
        self.addresses = addresses
        self.memory = memory

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.addresses.shape)

    def __iter__(self) -> Iterator[Cell]:
        """The cells, row by row."""
        return (self.memory.cells[address] for address in self.addresses.flatten().tolist())

    def table(self) -> Table:
        """The cells by their positions, for loops that read them in any order."""
        return Table(zip(indices(self.shape), self, strict=True))

    def expand(self, shape: Sequence[int]) -> Array:
        """Broadcast to a shape; the same cells."""
        return Array(self.addresses.expand(tuple(shape)), self.memory)

    def write(self, cells: list[Cell]) -> None:
        """New contents, row by row; seen through every view."""
        for address, cell in zip(self.addresses.flatten().tolist(), cells, strict=True):
            self.memory.cells[address] = cell


class Table(dict[tuple[int, ...], Cell]):
    """Cells by position. Outside the tensor everything is zero: zero padding needs no case of its
    own.
    """

    def __missing__(self, position: tuple[int, ...]) -> Cell:
        return []


def per_axis(value: Any, axes: int) -> list[int]:
    """An ATen size argument (a number, or a list of one or ``axes``) as one number per axis."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * axes if len(values) == 1 else values
