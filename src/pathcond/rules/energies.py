"""The words in which rules speak of path energy: summands, factors, what is measured on the example
batch.

The energy of an element is Σ over the paths that end in it of Π |θ|^p along the path; model inputs
have energy 1. A value in flight is of one of five kinds:

    PathSum     depends on the inputs through paths
    Edges     a parameter or a view of one, |θ|^p
    Frozen    depends on the inputs, but not through paths (gates, statistics, indices): the mean of
              |value|^p over the
              example batch, or 1 without calibration
    Known     depends on neither inputs nor parameters
    Alternatives    one of the first two for each sample, or for each member of a stack that an
                    index picks from

As a summand an element starts new paths (a bias, a constant); as a factor it lengthens the paths of
the other operand (a weight, a gate). Energies of path counts outgrow float64, so a ``PathSum``
carries a power of two.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from ..capture.nodes import START, Node
from ..trees import tree_leaves, tree_map
from .picking import same_order
from .samples import Samples
from .values import Known


@dataclass(frozen=True)
class PathSum:
    """Energy of a tensor that paths lead to: ``power`` · 2^``exponent``, float64 of the tensor's
    shape.
    """

    power: Tensor
    exponent: int = 0


@dataclass(frozen=True)
class Edges:
    """|θ|^p of a parameter or of a view of one, float64."""

    power: Tensor


@dataclass(frozen=True)
class Frozen:
    """A tensor that depends on the data, but that no path leads through.

    Attributes:
        node: Where it is computed.
        ends: Energies of the paths that end where it is computed.
    """

    node: Node
    ends: tuple[PathSum, ...] = ()


@dataclass(frozen=True)
class Alternatives:
    """What depends on the members that an unknown index picks: experts. Energies of experts are
    averaged behind them.

    The average of W₁[chosen] times the average of W₂[chosen] would change if an expert's scale
    moved from one to the other; the average of their product does not.

    Attributes:
        parts: One per sample of the example batch; uncalibrated one per member.
        index: Uncalibrated, the node that computes the index.
    """

    parts: tuple[PathSum | Edges, ...]
    index: Node | None = None

    def join(self) -> PathSum:
        """The average over the samples; uncalibrated one path per member."""
        exponents = [part.exponent if isinstance(part, PathSum) else 0 for part in self.parts]
        total = torch.zeros_like(self.parts[0].power)
        for part, exponent in zip(self.parts, exponents, strict=True):
            shift = exponent - max(exponents)
            total = total + (part.power * 2.0**shift if shift else part.power)
        return PathSum(total if self.index is not None else total / len(self.parts), max(exponents))


@dataclass(frozen=True)
class Apart:
    """What an energy rule returns for ``Alternatives``: the energy of each."""

    powers: list[Tensor]
    index: Node | None
    edges: bool

    def average(self) -> Tensor:
        total = self.powers[0]
        for power in self.powers[1:]:
            total = total + power
        return total / len(self.powers)


class _Freeze:
    """What an energy rule returns for a result that no path leads through."""


FREEZE = _Freeze()

# What a rule is given for an argument of its op, and what it may return.
Carried: TypeAlias = PathSum | Edges | Frozen | Known | bool | int | float | None
Energy: TypeAlias = Tensor | Apart | _Freeze | Sequence[Tensor | _Freeze]

AT_A_TIME = 2**22  # entries of several samples that are raised to a power together


class Batch(Protocol):
    """The values of a graph's nodes on the example batch."""

    def of(self, node: Node) -> Any:
        """``Samples``, or one value where the node does not depend on the data."""

    def statistics(self, node: Node) -> tuple[Tensor, Tensor]:
        """(mean, variance) per channel by which a BatchNorm normalises, ε to be added."""


@dataclass
class Energies:
    """One walk over a graph, as the rules see it.

    Attributes:
        batch: What is measured on the example batch.
        p: Exponent of the path norm; 0 counts paths.
        approximate: Whether smooth activations pass energy as ReLU does.
        calibrate: Whether data-dependent factors are measured; 1 otherwise.
        node: The node at work.
        exponent: Power of two that the energy of this node's result is divided by; that of its
            operands unless they multiply.
        operands: The node's arguments by name, nodes replaced by what is in flight.
        alternative: Which of several ``Alternatives`` is at work.
        cuts: Where paths end without reaching an output: (node, operand through which they came),
            and why.
    """

    batch: Batch
    p: float
    approximate: bool = False
    calibrate: bool = True
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    node: Node = START
    exponent: int = 0
    operands: dict[str, Any] = field(default_factory=dict)
    alternative: int | None = None
    cuts: dict[tuple[Node, Node], str] = field(default_factory=dict)

    def power(self, value: Tensor | float) -> Tensor:
        """|value|^p of a constant, in float64."""
        return power_of(value, self.p, self.device)

    def factor(self, x: Carried) -> Tensor:
        """The energy of an operand that multiplies; it is the only one with paths."""
        if isinstance(x, (PathSum, Edges)):
            return x.power
        if isinstance(x, Frozen):
            return self.frozen_power(x.node)
        assert x is not None
        return self.power(x.value if isinstance(x, Known) else x)

    def product(self, multiply: Callable[..., Tensor], *names: str) -> Tensor:
        """The energy of a product of operands. To be asked for before any summand.

        Where several operands have paths, each in turn is multiplied by the others, frozen at their
        value on the example batch; uncalibrated all their energies multiply, and their exponents
        add.

        Args:
            multiply: The product itself, of energies and constant factors.
            names: The operands, by their names in the ATen schema; a list stands for its members.
        """
        given = [node for name in names for node in tree_leaves(self.node.bound[name])]
        operands = [operand for name in names for operand in tree_leaves(self.operands[name])]
        reached = [i for i, operand in enumerate(operands) if isinstance(operand, PathSum)]
        if len(reached) < 2 or not self.calibrate:
            self.exponent = sum(operands[i].exponent for i in reached)
            return multiply(*[self.factor(operand) for operand in operands])
        frozen = {i: self.frozen_power(given[i]) for i in reached}
        terms = [
            [
                frozen[i] if i in frozen and i != at else self.factor(o)
                for i, o in enumerate(operands)
            ]
            for at in reached
        ]
        total = multiply(*terms[0])
        for term in terms[1:]:
            total = total + multiply(*term)
        return total

    def summand(self, x: Carried) -> Tensor:
        """The energy of an operand that is added, or selected: unless paths lead to it, it starts
        some.
        """
        if isinstance(x, (PathSum, Edges)):
            power = x.power
        elif isinstance(x, Frozen):
            power = self.frozen_power(x.node, added=True)
        else:
            power = self.power(
                _selectable(
                    torch.as_tensor(x.value if isinstance(x, Known) else x, dtype=torch.float64)
                )
            )
        shift = (x.exponent if isinstance(x, PathSum) else 0) - self.exponent
        return power * 2.0**shift if shift else power

    def plus(self, product: Tensor, x: Carried, times: float = 1) -> Tensor:
        """A ``product`` plus another operand times a constant, at the larger of the two
        exponents.
        """
        exponent = x.exponent if isinstance(x, PathSum) else 0
        if exponent > self.exponent:
            product = product * 2.0 ** (self.exponent - exponent)
            self.exponent = exponent
        return product + self.summand(x) * self.power(times)

    def measured(self, function: Callable[..., Tensor], *names: str) -> Tensor:
        """Mean of |function(operands)|^p over the example batch, for a factor that depends on the
        data; 1 uncalibrated.

        Args:
            function: Of the operands' values on one sample.
            names: The operands, by their names in the ATen schema.
        """
        if not self.calibrate and any(
            isinstance(self.operands.get(name), (PathSum, Edges, Frozen)) for name in names
        ):
            return torch.ones((), dtype=torch.float64, device=self.device)
        operands = [self._real(name) for name in names]
        samples = max((o.count for o in operands if isinstance(o, Samples)), default=1)
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i in range(samples):
            value = function(*[o.values[i] if isinstance(o, Samples) else o for o in operands])
            total = total + self.power(value) / samples
        return total

    def averaged(self, function: Callable[..., Tensor], *names: str) -> Tensor:
        """Mean of function(operands) over the example batch, for operands that select.

        Such an operand is an index, a list of them, or a condition.
        """
        operands = [self._real(name) for name in names]
        samples = [leaf for leaf in tree_leaves(operands) if isinstance(leaf, Samples)]
        if not samples:
            return function(*operands)
        count = samples[0].count
        total = function(*_of_sample(operands, 0))
        for i in range(1, count):
            total = total + function(*_of_sample(operands, i))
        return total / count

    def picked(
        self, function: Callable[[Any], Tensor], name: str, members: int, *, edges: bool
    ) -> Any:
        """The energy of what an index picks, apart for each sample; uncalibrated for each member of
        the stack.

        Args:
            function: Of the index on one sample; uncalibrated of the number of a member.
            name: The index, by its name in the ATen schema; in a list, the first of it.
            members: How many the stack has.
            edges: Whether what is picked are parameters.
        """
        given = self.node.bound[name]
        index = given[0] if isinstance(given, (list, tuple)) else given
        if not self.calibrate:
            if self.alternative is not None:
                return function(self.alternative)
            return Apart(
                [function(member) for member in range(members)], same_order(index)[-1], edges
            )
        real = self.real_of(index)
        if not isinstance(real, Samples):
            return function(real)
        return Apart([function(value) for value in real.values], None, edges)

    def reciprocal_power(self, x: Carried) -> Tensor:
        """The energy of an operand that divides."""
        if isinstance(x, (PathSum, Frozen)):
            return self.measured(lambda v: 1 / v, "other")
        return 1 / self.factor(x).detach()

    def at(self, x: Tensor, **others: Any) -> Tensor:
        """The node's own op at another value of its first operand."""
        return call(self.node, {next(iter(self.node.bound)): x, **others}, self.device)

    def itself(self, replaced: Mapping[str, Any] | None = None) -> Any:
        """The node's own op on energies: for sums, shape ops and selections. Known integers and
        masks stay as they are.

        Args:
            replaced: Other values for some arguments.
        """

        def operand(a: Any) -> Any:
            if isinstance(a, Known) and not a.value.dtype.is_floating_point:
                return a.value.to(self.device)
            return self.summand(a) if isinstance(a, (PathSum, Edges, Frozen, Known)) else a

        own = {name: a for name, a in self.operands.items() if name not in (replaced or {})}
        arguments = {
            name: tree_map(operand, own[name]) if name in own else (replaced or {})[name]
            for name in self.operands
        }
        return call(self.node, arguments, self.device)

    def end(self, name: str, reason: str) -> None:
        """Note that paths which reach this operand of the node at work end here, although others
        pass.
        """
        given = self.node.bound.get(name)
        if isinstance(given, Node):
            self.cuts[self.node, given] = reason

    def real_of(self, node: Node) -> Any:
        """The values of a node on the example batch: ``Samples``, or one value where it does not
        depend on the data, or where one of several ``Alternatives`` is at work.
        """
        real = self.batch.of(node)
        if self.alternative is not None and self.calibrate and isinstance(real, Samples):
            return real.values[self.alternative]
        return real

    def statistics(self) -> tuple[Tensor, Tensor]:
        """(mean, variance) per channel by which the BatchNorm at work normalises, ε to be added."""
        return self.batch.statistics(self.node)

    def _real(self, name: str) -> Any:
        given = self.node.bound[name]
        return tree_map(lambda a: self.real_of(a) if isinstance(a, Node) else a, given)

    def frozen_power(self, node: Node, added: bool = False) -> Tensor:
        """The mean of |value|^p over the example batch, 1 uncalibrated.

        Args:
            node: Whose value.
            added: Whether it starts paths, as a summand does.
        """
        if not self.calibrate:
            return torch.ones(node.shape, dtype=torch.float64, device=self.device)
        real = self.real_of(node)
        total = torch.zeros(node.shape, dtype=torch.float64, device=self.device)
        if isinstance(real, Samples) and real.joined is not None:
            # several at a time, but not all: powers of a large batch would take as much memory
            size = max(1, AT_A_TIME // max(total.numel(), 1))
            for values in real.stack().split(size):
                total += self.power(_selectable(values) if added else values).sum(0)
            return total / real.count
        values = real.values if isinstance(real, Samples) else [real]
        for value in values:
            total += self.power(_selectable(value) if added else value)
        return total / len(values)


def power_of(value: Tensor | float, p: float, device: torch.device) -> Tensor:
    """|value|^p of a number or a tensor, in float64; 0⁰ is 0: what is not there has no path."""
    tensor = (
        value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
    )
    power = tensor.to(device, torch.float64, copy=True)
    if p == 0:
        return power.ne_(0)
    return power.square_() if p == 2 else power.abs_().pow_(p)


def _of_sample(operand: Any, i: int) -> Any:
    """What an operand, or each member of a list of them, is on one sample."""
    return tree_map(lambda a: a.values[i] if isinstance(a, Samples) else a, operand)


def _selectable(value: Tensor) -> Tensor:
    """-inf before a maximum or a softmax is never selected: it is as good as absent."""
    return value.masked_fill(value.isinf(), 0.0) if value.dtype.is_floating_point else value


# On CUDA torch computes these with float32 constants even in float64.
PRECISE: dict[str, Callable[[Tensor], Tensor]] = {
    "hardsigmoid": lambda x: (x + 3).clamp(0, 6) / 6,
    "hardswish": lambda x: x * ((x + 3).clamp(0, 6) / 6),
}


def grouped_product(x: Tensor, stack: Tensor, offsets: Tensor) -> Tensor:
    """(rows, in) with (members, in, out): rows offsets[m - 1] to offsets[m] times matrix m; rows
    behind the last are zero.
    """
    ends = offsets.tolist()
    runs = [
        x[start:end] @ matrix for start, end, matrix in zip([0, *ends], ends, stack, strict=False)
    ]
    rest = x.new_zeros(len(x) - ends[-1], stack.shape[2])
    return torch.cat([*runs, rest])


def call(node: Node, arguments: dict[str, Any], device: torch.device) -> Any:
    """Run a node's op in float64 on the given device, whatever types and devices the graph was
    captured with.
    """

    def adapt(a: Any) -> Any:
        if isinstance(a, torch.dtype):
            return torch.float64 if a.is_floating_point else a
        return device if isinstance(a, torch.device) else a

    if not isinstance(node.target, torch._ops.OpOverload):
        return node.target(*arguments.values())
    if node.op in PRECISE:
        x = next(iter(arguments.values()))
        return x.copy_(PRECISE[node.op](x)) if node.writes else PRECISE[node.op](x)
    if node.op == "_grouped_mm" and arguments["self"].dim() == 2 and arguments["mat2"].dim() == 3:
        # torch has it in low precision alone
        return grouped_product(arguments["self"], arguments["mat2"], arguments["offs"])
    # fp8, fp16, bf16 and fp32 are all float64 here; a device that was left out means the one at
    # hand.
    made = {name: tree_map(adapt, a) for name, a in arguments.items()}
    if made.get("device", 0) is None and not any(isinstance(a, Tensor) for a in made.values()):
        made["device"] = device
    return node.target(**made)
