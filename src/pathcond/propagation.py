"""Graph -> equations: follow the labels of all activations through one graph, rule by rule.

Values in flight are of three kinds:

    Labels    a tensor that depends on the inputs, or on parameters through shape ops
    Weight    a parameter, or a view of one, that no op has consumed yet
    Known     a tensor that depends on neither; it is computed for real

A parameter's factor is exp(t[plus] − t[minus]). Its first use decides ``plus`` and ``minus``; every further use
must ask for the same factor, which becomes an equation.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from . import labels as lb
from .equations import Cause, Equations
from .graph import Graph, Node
from .labels import ANY, Labels
from .rules import RULES
from .rules.normalization import find_handwritten, handwritten_epsilon, handwritten_gain
from .rules.table import Rule

logger = logging.getLogger("pathcond")

UNSET = -2
FORM_ERRORS = (RuntimeError, IndexError, KeyError, ValueError, TypeError)
NORMS_WITH_STATISTICS = ("batch_norm", "cudnn_batch_norm", "instance_norm")
STATISTICS = ("running_mean", "running_var")
COMPACT_FROM = 1 << 12  # label tensors of this size are worth simplifying
MAX_ELEMENTWISE = 1 << 20  # parameters larger than this get no label per element

HANDWRITTEN_EPSILON = Rule(handwritten_epsilon, "", ("x",))
HANDWRITTEN_GAIN = Rule(handwritten_gain, "", ("x", "other"))
SEE_THROUGH_RANDOM = torch.Tag.nondeterministic_seeded


@dataclass(frozen=True)
class Weight:
    """A parameter or a view of one.

    Attributes:
        name: The parameter's qualified name.
        shape: Shape of the view.
        index: Position in the flattened parameter of every element of the view; None for the parameter itself.
    """

    name: str
    shape: tuple[int, ...]
    index: Tensor | None = None


@dataclass(frozen=True)
class Known:
    """A tensor whose value depends on neither inputs nor parameters.

    Attributes:
        value: The value, on CPU (possibly a meta tensor).
        buffer: Name, if it is a buffer itself.
        lasting: False for what comes from buffers and attributes of modules: a zero there may not stay one.
    """

    value: Tensor
    buffer: str | None = None
    lasting: bool = True

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.value.shape)


class UnknownNumber:
    """A Python number that depends on data (``.item()``); it carries no scale."""


@dataclass
class Scaling:
    """How one parameter or buffer is rescaled: by exp(t[plus] − t[minus]).

    Attributes:
        shape: Shape of the parameter.
        plus, minus: int32 labels that broadcast to ``shape``.
        epsilon: For a running variance, which follows λ²(var + ε) − ε with log λ = t[plus]; else None.
    """

    shape: tuple[int, ...]
    plus: Tensor
    minus: Tensor
    epsilon: float | None = None


@dataclass
class Propagation:
    """One walk over one graph. Rules read and write it under the name ``scales``.

    Attributes:
        normalization, approximate: The user's choices.
        equations: All equations so far; shared by the walks over the eval and the train graph.
        scalings: Per parameter and buffer, how it is rescaled; shared likewise.
        frozen: Parameters that may not be rescaled, and why.
        read_buffers: Buffers that are read as plain tensors somewhere.
        precision: Machine epsilon of the least precise parameter; what is rounded more coarsely than that is fixed.
        training: Mode of the graph at work.
        node: The node at work.
    """

    normalization: str
    approximate: bool
    equations: Equations = field(default_factory=Equations)
    scalings: dict[str, Scaling] = field(default_factory=dict)
    frozen: dict[str, Cause] = field(default_factory=dict)
    read_buffers: set[str] = field(default_factory=set)
    precision: float = 0.0
    training: bool = False
    node: Node = None  # type: ignore[assignment]

    # -- the walk ---------------------------------------------------------------------------------

    def run(self, graph: Graph) -> None:
        """Walk the graph in order; outputs are fixed at the end."""
        self._env: dict[Node, Any] = {}
        self._aliases: dict[Node, set[Node]] = {}
        self._parameter_shapes = {node.name: node.shape for node in graph.nodes if node.op == "parameter"}
        self.training = graph.training
        handwritten = find_handwritten(graph)
        for node in graph.nodes:
            self.node = node
            if node.target is None:
                self._env[node] = self._leaf(node)
                continue
            if node in handwritten.epsilon_sums:
                rule: Rule | None = HANDWRITTEN_EPSILON
            elif node in handwritten.gains:
                rule = HANDWRITTEN_GAIN
            else:
                rule = RULES.get(node.op)
            result = self._compact(self._checked(node, self._execute(node, rule)))
            self._env[node] = result
            self._record_aliases(node)
            self._record_mutation(node, result)
        self.node = Node(name="output", op="output")
        for output in tree_leaves(graph.outputs):
            if isinstance(output, Node):
                self.pin(self._env[output], "is an output of the model")
                self.read_buffers.update({output.name} if output.op == "buffer" else ())
        for name in self.read_buffers & self.scalings.keys():
            self._freeze(name, "is read as a plain tensor too")

    def _leaf(self, node: Node) -> Any:
        if node.op == "parameter":
            return Weight(node.name, node.shape)
        if node.op == "input":
            return lb.constant(node.shape) if isinstance(node.shape, tuple) else None
        assert node.value is not None
        value = node.value.detach()
        value = value if value.is_meta else value.cpu().clone()
        if node.op == "buffer":
            return Known(value, buffer=node.name, lasting=False)
        return Known(value, lasting=node.name.startswith("lifted_tensor"))  # a literal, or an attribute of a module

    def _execute(self, node: Node, rule: Rule | None) -> Any:
        arguments = tree_map(lambda a: self._env[a] if isinstance(a, Node) else a, node.bound)
        if node.op == "getitem":
            return arguments["0"][arguments["1"]]
        self._note_buffers(node, arguments)
        operands = [a for a in tree_leaves(arguments) if isinstance(a, (Labels, Weight, Known))]
        known = [a for a in operands if isinstance(a, Known)]
        if len(known) == len(operands):
            return self._compute(node, arguments, known)
        if node.op in ("mul", "div") and self._times_constant(node, arguments, known, operands):
            return arguments["self"]
        reads_input = any(isinstance(a, Labels) for a in operands)
        shape_rule = rule is not None and rule.family.startswith(("Shape", "Look-ups"))
        if rule is None or not (reads_input or shape_rule):
            for operand in operands:
                reason = f"is computed from parameters by {node.op}" if rule else f"reaches {node.op}, which has no rule"
                self.pin(operand, reason)
            return self._unscaled(node)
        try:
            return rule(self, arguments)
        except FORM_ERRORS as error:  # an argument that the rule does not foresee: as if there were no rule
            logger.info("The rule for %s failed at %s: %s", node.op, node.where, error)
            for operand in operands:
                self.pin(operand, f"reaches {node.op} in a form that its rule does not cover")
            return self._unscaled(node)

    def _times_constant(self, node: Node, arguments: dict[str, Any], known: list, operands: list) -> bool:
        """A parameter times a constant (a mask, an equalised learning rate) scales as the parameter does."""
        weight = arguments["self"]
        alone = isinstance(weight, Weight) and len(known) + 1 == len(operands)
        return alone and node.shape == weight.shape and arguments.get("rounding_mode") is None

    def _note_buffers(self, node: Node, arguments: dict[str, Any]) -> None:
        """Remember buffers that are read as plain tensors: those cannot follow a scale."""
        statistics = STATISTICS if node.op in NORMS_WITH_STATISTICS else ()
        plain = {name: value for name, value in arguments.items() if name not in statistics}
        self.read_buffers.update(a.buffer for a in tree_leaves(plain) if isinstance(a, Known) and a.buffer is not None)

    def _checked(self, node: Node, result: Any) -> Any:
        """Labels must fit the result's shape, and its type must be able to carry a scale."""
        if isinstance(result, (list, tuple)):
            shapes, dtypes = node.shape, node.dtype
            return [self._fitting(r, s, d) for r, s, d in zip(result, shapes, dtypes, strict=True)]
        return self._fitting(result, node.shape, node.dtype)

    def _fitting(self, result: Any, shape: Any, dtype: Any) -> Any:
        if not isinstance(result, (Labels, Weight)):
            return result
        if tuple(result.shape) != shape:
            self.pin(result, f"passes through {self.node.op} in a form that its rule does not cover")
            return lb.constant(shape)
        rounded = not dtype.is_floating_point or torch.finfo(dtype).eps > self.precision
        return self.pin(result, f"is rounded to {dtype}") if rounded else result

    def _compact(self, result: Any) -> Any:
        """Spelled-out labels shrink again where equations have made them equal since."""
        if not isinstance(result, Labels) or result.ids.numel() < COMPACT_FROM:
            return result
        ids = self.equations.simplified(result.ids)
        for axis in range(ids.dim()):
            if ids.shape[axis] > 1 and bool((ids == ids.narrow(axis, 0, 1)).all()):
                ids = ids.narrow(axis, 0, 1)
        return Labels(ids, result.shape)

    def _compute(self, node: Node, arguments: dict[str, Any], operands: Sequence[Known]) -> Any:
        """Execute an op on known values; where that is impossible its result is an unknown without scale."""
        tags = getattr(node.target, "tags", ())
        if SEE_THROUGH_RANDOM in tags or node.op.startswith(("empty", "new_empty", "_assert")) or node.shape is None:
            return self._unscaled(node)
        if any(a.value.is_meta for a in operands):
            return self._unscaled(node)
        values = tree_map(lambda a: a.value if isinstance(a, Known) else a, arguments)
        if values.get("device") is not None:
            values["device"] = torch.device("cpu")
        try:
            result = node.target(**values) if isinstance(node.target, torch._ops.OpOverload) else node.target(*values.values())
        except Exception:  # an op that this build cannot run on CPU: no value, no scale
            return self._unscaled(node)
        lasting = all(a.lasting for a in operands)
        return tree_map(lambda r: Known(r, lasting=lasting) if isinstance(r, Tensor) else r, result)

    def _unscaled(self, node: Node) -> Any:
        if isinstance(node.shape, list):
            return [lb.constant(shape) if isinstance(shape, tuple) else None for shape in node.shape]
        return lb.constant(node.shape) if isinstance(node.shape, tuple) else UnknownNumber()

    # -- values -----------------------------------------------------------------------------------

    def shape(self, value: Any) -> tuple[int, ...]:
        return value.shape

    def is_weight(self, value: Any) -> bool:
        return isinstance(value, Weight)

    def is_buffer(self, value: Any) -> bool:
        return isinstance(value, Known) and value.buffer is not None

    def value(self, value: Any) -> Tensor | None:
        """The value of a known tensor, None for anything else."""
        return value.value if isinstance(value, Known) and not value.value.is_meta else None

    def simplified(self, value: Any) -> Any:
        """A frozen parameter is a constant."""
        if isinstance(value, Weight) and value.name in self.frozen:
            return lb.constant(value.shape)
        return value

    def labels(self, value: Any) -> Labels:
        """The labels of any operand; a number is a constant, a parameter gets one label per element."""
        if isinstance(value, Labels):
            return value
        if isinstance(value, Known):
            return lb.of_value(value.value) if value.lasting else lb.constant(value.shape)
        if isinstance(value, Weight):
            return self._weight_labels(value)
        return lb.of_value(torch.as_tensor(float(value) if isinstance(value, (bool, int, float)) else 1.0))

    def _weight_labels(self, weight: Weight) -> Labels:
        if weight.name in self.frozen:
            return lb.constant(weight.shape)
        if self._current(weight) is None:
            full = self._parameter_shapes[weight.name]
            count = torch.Size(full).numel()
            if count > MAX_ELEMENTWISE:
                self.pin(weight, "is used elementwise and is too large to trace")
                return lb.constant(weight.shape)
            fresh = self.equations.fresh(count, origin=self.node).view(full)
            self._assign_unset(Weight(weight.name, full), fresh, torch.zeros_like(fresh))
        current = self._current(weight)
        assert current is not None
        plus, minus = current
        if not minus.any():
            return Labels(plus, weight.shape)
        return Labels(self.equations.combine([(1, plus), (-1, minus)], by=self.node), weight.shape)

    def broadcast(self, labels: Labels, shape: Sequence[int]) -> Labels:
        """The same labels seen as a tensor of the given shape (leading axes added)."""
        missing = len(shape) - labels.ids.dim()
        return Labels(labels.ids.reshape([1] * missing + list(labels.ids.shape)) if missing else labels.ids, tuple(shape))

    # -- views ------------------------------------------------------------------------------------

    def through_view(self, x: Any) -> Any:
        """Apply the node's own op, which returns views, to labels or to a parameter's index."""
        arguments = self.node.bound
        first = next(iter(arguments))

        def apply(tensor: Tensor) -> Any:
            rest = tree_map(lambda a: self._stand_in(a) if isinstance(a, Node) else a, arguments)
            return self.node.target(**(rest | {first: tensor}))

        if isinstance(x, Weight):
            return tree_map(lambda i: replace(x, index=i, shape=tuple(i.shape)), apply(self._index(x)))
        return tree_map(lb.compress, apply(self.labels(x).full))

    def _stand_in(self, node: Node) -> Any:
        """For ``expand_as`` and the like: only the shape of the other tensor matters."""
        value = self._env[node]
        return torch.empty(value.shape, device="meta") if isinstance(value, (Labels, Weight, Known)) else value

    def through_reshape(self, x: Any) -> Any:
        return self.reshaped(x, self.node.shape)

    def reshaped(self, x: Any, shape: Sequence[int]) -> Any:
        """A reshape of labels, of a parameter or of a known tensor."""
        shape = tuple(torch.empty(self.shape(x), device="meta").reshape(tuple(shape)).shape)  # resolves -1
        if isinstance(x, Known):
            return Known(x.value.reshape(shape), lasting=x.lasting)
        if isinstance(x, Weight):
            return replace(x, shape=shape, index=None if x.index is None else x.index.reshape(shape))
        return lb.reshape(x, shape)

    def _index(self, weight: Weight) -> Tensor:
        if weight.index is not None:
            return weight.index
        return torch.arange(torch.Size(weight.shape).numel(), dtype=torch.int32).view(weight.shape)

    # -- equations --------------------------------------------------------------------------------

    def pin(self, value: Any, reason: str) -> Any:
        """Fix every element of an operand; returns its labels."""
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        if isinstance(value, Weight):
            self._freeze(value.name, reason)
            return lb.constant(value.shape)
        if isinstance(value, Labels):
            self.equations.pin(value.ids, by=self.node, reason=reason)
            return lb.constant(value.shape)
        if isinstance(value, (list, tuple)):
            return [self.pin(item, reason) for item in value]
        return value

    def merge(self, *values: Any, reason: str) -> Labels:
        """Equate operands elementwise (broadcast); returns the common labels.

        A parameter that nothing has used before takes the labels of what it is added to.
        """
        operands = [self.simplified(value) for value in values]
        unused = [value for value in operands if self._unused(value)]
        if len(unused) == len(operands):
            unused = unused[1:]
        traced = [self.labels(value) for value in operands if not any(value is weight for weight in unused)]
        result = traced[0]
        for other in traced[1:]:
            result = self._merge_two(result, other, reason)
        for weight in unused:
            labels = self._adopt(weight, result) if self._unused(weight) else self.labels(weight)
            result = self._merge_two(result, labels, reason)
        return result

    def _merge_two(self, a: Labels, b: Labels, reason: str) -> Labels:
        shape = tuple(torch.broadcast_shapes(a.shape, b.shape))
        self.equations.equate(a.ids, b.ids, by=self.node, reason=reason)
        left, right = torch.broadcast_tensors(a.ids, b.ids)
        joint = torch.where(left == ANY, right, left)
        # Keep the compact form where the second operand brings nothing new.
        ids = a.ids if a.ids.dim() == joint.dim() and bool((joint == a.ids).all()) else joint
        return self.broadcast(Labels(ids, shape), shape)

    def _adopt(self, weight: Weight, labels: Labels) -> Labels:
        """Label an unused parameter by what it is added to, once per element of its own shape."""
        wide = self.broadcast(labels, labels.shape)
        missing = len(wide.shape) - len(weight.shape)
        if missing < 0 or (wide.ids == ANY).any():
            return self._weight_labels(weight)
        repeated = [i for i in range(len(wide.shape)) if i < missing or weight.shape[i - missing] == 1]
        ids = self.agree(wide, repeated).ids
        ids = ids.reshape(ids.shape[missing:])
        self._assign(weight, ids, torch.zeros([1] * ids.dim(), dtype=torch.int32))
        return Labels(ids, weight.shape)

    def combine(self, *terms: tuple[Any, Any]) -> Labels:
        """Labels of a product Π operand^power, elementwise (broadcast)."""
        labels = [(power, self.labels(operand)) for power, operand in terms]
        shape = tuple(torch.broadcast_shapes(*[operand.shape for _, operand in labels]))
        ids = self.combine_ids(*[(power, operand.ids) for power, operand in labels])
        return self.broadcast(Labels(ids, shape), shape)

    def combine_ids(self, *terms: tuple[Any, Tensor]) -> Tensor:
        return self.equations.combine(terms, by=self.node)

    def agree(self, labels: Labels, axes: Iterable[int]) -> Labels:
        """Equate labels along the given axes; the result has size 1 there and the same nominal shape."""
        rank = len(labels.shape)
        varying = sorted({axis % rank for axis in axes if labels.ids.shape[axis] > 1})
        if not varying:
            return labels
        common = labels.ids.amax(varying, keepdim=True)  # ANY is the smallest label
        self.equations.equate(common, labels.ids, by=self.node, reason="is summed with something that has no scale")
        return Labels(common, labels.shape)

    # -- parameters and buffers -------------------------------------------------------------------

    def scale_weight(self, weight: Weight, read: Tensor, fresh_shape: Sequence[int]) -> Tensor:
        """Let a weight read log-scales and give fresh ones: factor exp(t[given] − t[read]).

        Args:
            weight: The parameter, not frozen.
            read: Labels that broadcast to the weight's shape.
            fresh_shape: Shape of the labels it gives, size 1 along the axes that it sums over.

        Returns:
            The labels given, of shape ``fresh_shape``.
        """
        current = self._current(weight)
        if current is not None:
            plus = _narrowed(current[0], fresh_shape)
            if plus is not None and self.equations.same(current[1], read):
                return plus  # a further use with the same input scales gives the same output scales
        given = self.equations.fresh(torch.Size(fresh_shape).numel(), origin=self.node).view(tuple(fresh_shape))
        self._assign(weight, given, read)
        return given

    def follow(self, buffer: Known, ids: Tensor, *, epsilon: float | None = None) -> None:
        """Let a running statistic follow the labels ids, (channels,)."""
        name = buffer.buffer
        assert name is not None
        if name in self.frozen:
            self.equations.pin(ids, by=self.node, reason=f"feeds a normalization whose {name} {self.frozen[name].reason}")
            return
        current = self.scalings.setdefault(name, Scaling(buffer.shape, ids, torch.zeros(1, dtype=torch.int32), epsilon))
        self.equations.equate(current.plus, ids, by=self.node)
        if current.epsilon != epsilon:
            self.equations.pin(ids, by=self.node, reason=f"feeds two normalizations that share {name} but not its use")

    def _freeze(self, name: str, reason: str) -> None:
        """The parameter keeps its values; what its uses so far asked for must come to a factor of 1."""
        self.frozen.setdefault(name, Cause(self.node, reason))
        scaling = self.scalings.get(name)
        if scaling is not None:
            minus = torch.where(scaling.plus == UNSET, UNSET, scaling.minus)
            self.equations.equate(scaling.plus, minus, by=self.node, reason=reason)

    def _unused(self, value: Any) -> bool:
        return isinstance(value, Weight) and value.name not in self.frozen and self._current(value) is None

    def _current(self, weight: Weight) -> tuple[Tensor, Tensor] | None:
        """(plus, minus) of a view of a parameter; None if (part of) it has not been used."""
        scaling = self.scalings.get(weight.name)
        if scaling is None:
            return None
        plus, minus = Labels(scaling.plus, scaling.shape), Labels(scaling.minus, scaling.shape)
        if weight.index is None:
            views = lb.reshape(plus, weight.shape).ids, lb.reshape(minus, weight.shape).ids
        else:
            at = weight.index.long()
            views = plus.full.reshape(-1)[at], minus.full.reshape(-1)[at]
        return None if (views[0] == UNSET).any() else views

    def _assign(self, weight: Weight, plus: Tensor, minus: Tensor) -> None:
        """One use of a parameter asks for the factor exp(t[plus] − t[minus]); the first use gets it, others must agree."""
        full = self._parameter_shapes[weight.name]
        if weight.index is None and weight.name not in self.scalings:
            plus, minus = (lb.reshape(Labels(ids, weight.shape), full).ids for ids in (plus, minus))
            self.scalings[weight.name] = Scaling(full, plus, minus)
            return
        current = self._current(weight)
        if current is None:
            self._assign_unset(weight, plus, minus)
            current = self._current(weight)
        assert current is not None
        self._require_equal(*current, plus, minus)

    def _assign_unset(self, weight: Weight, plus: Tensor, minus: Tensor) -> None:
        """Fill in, element by element, what no use of the parameter has asked for yet."""
        full = self._parameter_shapes[weight.name]
        unset = torch.full([1] * len(full), UNSET, dtype=torch.int32)
        old = self.scalings.get(weight.name, Scaling(full, unset, unset))
        dense_plus, dense_minus = (ids.expand(full).reshape(-1).clone() for ids in (old.plus, old.minus))
        at = self._index(weight).reshape(-1).long()
        free = dense_plus[at] == UNSET
        dense_plus[at[free]] = plus.expand(weight.shape).reshape(-1)[free]
        dense_minus[at[free]] = minus.expand(weight.shape).reshape(-1)[free]
        self.scalings[weight.name] = Scaling(full, dense_plus.view(full), dense_minus.view(full))

    def _require_equal(self, plus: Tensor, minus: Tensor, plus2: Tensor, minus2: Tensor) -> None:
        """t[plus] − t[minus] = t[plus2] − t[minus2] elementwise."""
        if self.equations.same(minus, minus2):
            self.equations.equate(plus, plus2, by=self.node)
            return
        terms = [(1, plus), (-1, minus), (-1, plus2), (1, minus2)]
        rank = max(ids.dim() for _, ids in terms)
        if all(sum(size > 1 for size in ids.shape) <= 1 for _, ids in terms) and rank > 1:
            # A sum of functions of one axis each vanishes everywhere if it does along each axis.
            for axis in range(rank):
                lines = [(c, _line(ids, axis)) for c, ids in terms]
                self.equations.require(lines, by=self.node)
        else:
            self.equations.require(terms, by=self.node)

    # -- aliasing and in-place ops ----------------------------------------------------------------

    def _record_aliases(self, node: Node) -> None:
        """Views, and ops that may return their input, share its memory."""
        if not isinstance(node.target, torch._ops.OpOverload):
            sources = [a for a in node.args if isinstance(a, Node)] if node.op == "getitem" else []
        else:
            schema = node.target._schema
            names = {a.name for a in schema.arguments if a.alias_info is not None}
            bound = node.bound
            may_return_input = "dropout" in node.op
            sources = [leaf for n in names for leaf in tree_leaves(bound.get(n)) if isinstance(leaf, Node)]
            sources += [node.args[0]] if may_return_input and isinstance(node.args[0], Node) else []
        group = {node}
        for source in sources:
            group |= self._aliases.get(source, {source})
        for member in group:
            self._aliases[member] = group

    def _record_mutation(self, node: Node, result: Any) -> None:
        """After an in-place op its target, and everything that shares memory with it, has changed."""
        if not isinstance(node.target, torch._ops.OpOverload) or not node.target._schema.is_mutable:
            return
        written = [a.name for a in node.target._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        targets = [leaf for name in written for leaf in tree_leaves(node.bound.get(name)) if isinstance(leaf, Node)]
        for target in targets:
            old = self._env[target]
            if isinstance(old, Known) and isinstance(result, Known):
                if not result.lasting:  # computed for real, on shared memory
                    self._forget_zeros(target)
                continue
            same_shape = isinstance(old, Labels) and isinstance(result, Labels) and old.shape == result.shape
            if same_shape and bool((old.ids == result.ids).all()):
                continue
            others = self._aliases[target] - {target, node}
            leaf = target.target is None
            if not others and not leaf and isinstance(result, Labels):
                self._env[target] = result
                continue
            for member in self._aliases[target]:
                self._env[member] = tree_map(self._overwritten, self._env[member])

    def _overwritten(self, value: Any) -> Any:
        if isinstance(value, Known):
            return lb.constant(value.shape)
        return self.pin(value, f"is written in place by {self.node.op} into memory that is read elsewhere")

    def _forget_zeros(self, target: Node) -> None:
        """What was written from a buffer may change later: its zeros are not for ever."""
        for member in self._aliases[target]:
            self._env[member] = tree_map(lambda v: replace(v, lasting=False) if isinstance(v, Known) else v, self._env[member])


def _line(ids: Tensor, axis: int) -> Tensor:
    """The labels along one axis at the origin of the others."""
    for other in range(ids.dim()):
        if other != axis:
            ids = ids.narrow(other, 0, 1)
    return ids.flatten()


def _narrowed(ids: Tensor, shape: Sequence[int]) -> Tensor | None:
    """ids in the given shape if they do not vary along the axes of size 1, else None."""
    for axis, size in enumerate(shape):
        if size == 1 and ids.shape[axis] > 1:
            return None
    return ids.expand(tuple(shape))
