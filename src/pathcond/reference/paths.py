"""Φ by the definition: every path of a tiny network, listed one by one (def. path_lifting).

    Φ_p(θ) = coefficient_p · Π_{i ∈ p} θ_i
    v_out(x) = ⟨Φ(θ), A_out(θ, x) (x; 1)⟩   (eq. output_factorization)

A path starts at an input or at a parameter that is added (a bias) and ends at an output.
Max-pooling has one path per window entry; averages and other constant factors are the path's
coefficient; the gates are in A, not in Φ.

>>> import torch
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(1, 1), torch.nn.ReLU(), torch.nn.Linear(1, 1, bias=False)
... )
>>> paths = enumerate_paths(
...     model, torch.ones(1, 1)
... )  # u · relu(v x + w), with θ = (v, w, u)
>>> [(path.parameters, path.input) for path in paths]
[((0, 2), 0), ((1, 2), None)]
>>> v, w, u = theta = torch.tensor([2.0, 3.0, 5.0], dtype=torch.float64)
>>> paths.lift(theta).tolist()  # (uv, uw)
[10.0, 15.0]
>>> paths.metric(theta).diag().tolist()  # (u², u², v² + w²)
[25.0, 25.0, 13.0]
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..capture.graph import capture
from ..capture.models import Inputs, as_call
from ..capture.nodes import Graph, Node
from ..wrappers import unwrap
from .cells import Array, Cell, Memory, Term
from .gates import Gate, fill_in, gate_values
from .operations import MOVES, OPERANDS, OPERATIONS


@dataclass(frozen=True, kw_only=True)
class Path:
    """One path from an input or a bias to an output.

    Attributes:
        parameters: Positions in the flattened concatenation of ``model.named_parameters()``, from
            start to end; one that the path meets twice is there twice.
        coefficient: The constant factors on the way: 1/k of averages, 1/σ of BatchNorm, literals,
            buffers.
        input: Flat position in the inputs; None if the path starts at a bias.
        output: Flat position in the outputs.
        gates: The ReLU elements and max-pool choices on the way, in order.
    """

    parameters: tuple[int, ...]
    coefficient: float
    input: int | None
    output: int
    gates: tuple[Gate, ...]


@dataclass(frozen=True, kw_only=True)
class Paths:
    """All q paths of a network with p parameters.

    Attributes:
        paths: By output; for each output in the order in which the sums of the network add them.
        num_parameters: p.
        num_inputs: Elements of one sample, d_in.
        num_outputs: Elements of its output.
        graph: The operations that were followed; gates refer to them by name.
    """

    paths: tuple[Path, ...]
    num_parameters: int
    num_inputs: int
    num_outputs: int
    graph: Graph = field(repr=False)

    def __len__(self) -> int:
        return len(self.paths)

    def __iter__(self) -> Iterator[Path]:
        return iter(self.paths)

    @cached_property
    def _positions(self) -> Tensor:
        """(longest path, q) positions in (θ; 1): shorter paths end in ones."""
        longest = max((len(path.parameters) for path in self.paths), default=0)
        rows = [
            path.parameters + (self.num_parameters,) * (longest - len(path.parameters))
            for path in self.paths
        ]
        return torch.tensor(rows, dtype=torch.long).view(len(self.paths), longest).T

    @cached_property
    def _coefficients(self) -> Tensor:
        return torch.tensor([path.coefficient for path in self.paths], dtype=torch.float64)

    def lift(self, theta: Tensor) -> Tensor:
        """Φ(θ), (q,) float64, differentiable; θ is (p,)."""
        extended = torch.cat([theta.double(), theta.new_ones(1, dtype=torch.float64)])
        phi = self._coefficients
        for positions in self._positions:
            phi = phi * extended[positions]
        return phi

    def jacobian(self, theta: Tensor) -> Tensor:
        """∂Φ(θ), (q, p) float64. Forward mode, which costs p passes; reverse mode would cost q."""
        jacobian: Tensor = torch.func.jacfwd(self.lift)(theta.double())
        return jacobian

    def path_kernel(self, theta: Tensor) -> Tensor:
        """P = ∂Φ ∂Φᵀ, (q, q) (eq. path_dyn)."""
        jacobian = self.jacobian(theta)
        return jacobian @ jacobian.T

    def metric(self, theta: Tensor) -> Tensor:
        """G = ∂Φᵀ ∂Φ, (p, p) (sec. pathcondopt)."""
        jacobian = self.jacobian(theta)
        return jacobian.T @ jacobian

    def exponents(self) -> Tensor:
        """How often each parameter is on each path, (q, p) int64: log |Φ(θ)| = exponents · log |θ|
        + log |coefficient|.

        A diagonal D > 0 has Φ(D θ) = Φ(θ) if and only if exponents · log d = 0 (def.
        admissible_rescaling).
        """
        counts = torch.zeros(len(self.paths), self.num_parameters + 1, dtype=torch.long)
        for positions in self._positions:
            counts[torch.arange(len(self.paths)), positions] += 1
        return counts[:, :-1]

    def activations(self, model: nn.Module, x: Any) -> Tensor:
        """A_out(θ, x) of eq. output_factorization for every output, (outputs, q, d_in + 1) float64.

        Zero but for the entry (path, its input, or the constant 1 at the end) in the path's own
        output: there it is the product of the path's gates on a forward pass of the model at x.

        Args:
            model: Gives θ.
            x: One sample of the shape of the example inputs.
        """
        values = {
            name: value.tolist()
            for name, value in gate_values(self.graph, unwrap(model), x).items()
        }
        matrix = torch.zeros(
            self.num_outputs, len(self.paths), self.num_inputs + 1, dtype=torch.float64
        )
        for row, path in enumerate(self.paths):
            product = 1.0
            for gate in path.gates:
                value = values[gate.node][gate.element]
                product *= value if gate.choice is None else float(value == gate.choice)
            matrix[path.output, row, self.num_inputs if path.input is None else path.input] = (
                product
            )
        return matrix


def parameter_vector(model: nn.Module) -> Tensor:
    """θ: all parameters in the order of ``model.named_parameters()``, flat, (p,) float64,
    detached.
    """
    parts = [
        parameter.detach().to("cpu", torch.float64).flatten()
        for parameter in unwrap(model).parameters()
    ]
    return torch.cat([torch.zeros(0, dtype=torch.float64), *parts])


def enumerate_paths(model: nn.Module, example_inputs: Inputs, *, limit: int = 200_000) -> Paths:
    """Every path of a tiny network in eval mode.

    Args:
        model: A network of linear, piecewise linear and shape operations; its parameters may have
            any values.
        example_inputs: One sample: a Tensor, or several, with a first axis of 1.
        limit: Most paths that any tensor of the network may have.

    Raises:
        NotImplementedError: An operation has no definition here; it is named.
        ValueError: More than one sample was given, or there are more paths than the limit.
    """
    model = unwrap(model)
    for tensor in tree_leaves(as_call(example_inputs)):
        if isinstance(tensor, Tensor) and tensor.shape[:1] != (1,):
            raise ValueError(
                f"Paths are those of one sample, but an input has shape {tuple(tensor.shape)}: "
                "pass one with a first axis of 1."
            )
    graph = capture(model, example_inputs, training=False)
    memory = Memory(limit)
    values: dict[Node, Any] = _parameters(model, graph, memory)
    num_inputs = 0
    for node in graph.nodes:
        if node.op == "input":
            start = num_inputs
            num_inputs = num_inputs + torch.Size(node.shape).numel()
            values[node] = memory.array(
                ([Term((), 1.0, i, ())] for i in range(start, num_inputs)), node.shape
            )
        elif node.op in ("buffer", "constant"):
            values[node] = node.value
        elif node.target is not None:
            values[node] = _call(node, values, memory)
    outputs = [
        cell
        for out in graph.returned
        if isinstance(out, Node)
        for cell in _array(values[out], memory)
    ]
    paths = tuple(
        Path(
            parameters=term.parameters,
            coefficient=term.coefficient,
            input=term.input,
            output=position,
            gates=term.gates,
        )
        for position, cell in enumerate(outputs)
        for term in cell
    )
    if len(paths) > limit:
        raise ValueError(f"The network has {len(paths)} paths, more than limit={limit}.")
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    return Paths(
        paths=paths,
        num_parameters=num_parameters,
        num_inputs=num_inputs,
        num_outputs=len(outputs),
        graph=graph,
    )


def _parameters(model: nn.Module, graph: Graph, memory: Memory) -> dict[Node, Any]:
    starts = {}
    total = 0
    for name, parameter in model.named_parameters():
        starts[name] = total
        total += parameter.numel()
    values = {}
    for node in graph.nodes:
        if node.op == "parameter":
            positions = range(starts[node.name], starts[node.name] + torch.Size(node.shape).numel())
            values[node] = memory.array(
                ([Term((i,), 1.0, None, ())] for i in positions), node.shape
            )
    return values


def _array(value: Array | Tensor | float, memory: Memory) -> Array:
    return value if isinstance(value, Array) else memory.constant(value)


def _call(node: Node, values: dict[Node, Any], memory: Memory) -> Any:
    """The result of one operation: an Array, a list of them, or a Tensor if nothing but constants
    went in.
    """
    args, kwargs = fill_in((node.args, node.kwargs), values)
    if not any(isinstance(leaf, Array) for leaf in tree_leaves((args, kwargs))):
        return node.target(*args, **kwargs)
    if node.op in MOVES:
        return _move(node, args, kwargs, memory)
    if node.op not in OPERATIONS:
        raise NotImplementedError(f"{node.op} at {node.where}: its paths are not defined here")
    operands = {
        name: _operand(name, value, memory) for name, value in fill_in(node.bound, values).items()
    }
    made = memory.array(
        (_check(cell, node) for cell in OPERATIONS[node.op](node, operands)), node.shape
    )
    if not node.writes:
        return made
    if not isinstance(args[0], Array):
        raise NotImplementedError(
            f"{node.op} at {node.where} writes into a constant: its other views would not see it"
        )
    args[0].write(list(made))
    return args[0]


def _operand(name: str, value: Any, memory: Memory) -> Any:
    number = isinstance(value, (int, float, Tensor)) and not isinstance(value, bool)
    return memory.constant(value) if name in OPERANDS and number else value


def _check(cell: Cell, node: Node) -> Cell:
    if any(term.is_constant for term in cell):
        raise NotImplementedError(
            f"{node.op} at {node.where} adds a constant: a path starts at "
            "an input or at a parameter"
        )
    return cell


def _move(node: Node, args: Any, kwargs: Any, memory: Memory) -> Any:
    """Run a shape operation on addresses. As in torch, what shares storage with an argument is a
    view of its cells.
    """
    as_arrays = tree_map(
        lambda x: memory.constant(x) if isinstance(x, Tensor) and x.is_floating_point() else x,
        (args, kwargs),
    )
    given = [leaf.addresses for leaf in tree_leaves(as_arrays) if isinstance(leaf, Array)]
    args, kwargs = tree_map(lambda x: x.addresses if isinstance(x, Array) else x, as_arrays)
    storages = {addresses.untyped_storage().data_ptr() for addresses in given}

    def result(addresses: Any) -> Any:
        if not isinstance(addresses, Tensor):
            return addresses
        view = Array(addresses, memory)
        shared = addresses.untyped_storage().data_ptr() in storages
        return view if shared else memory.array([_check(cell, node) for cell in view], view.shape)

    return tree_map(result, node.target(*args, **kwargs))
