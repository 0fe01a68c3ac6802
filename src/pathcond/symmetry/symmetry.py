"""Graph -> Symmetry: the free log-scales of a model, and what is pinned and why.

>>> import torch, pathcond
>>> model = torch.nn.Sequential(
...     torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2)
... )
>>> symmetry = pathcond.find_symmetry(model, torch.randn(5, 3))
>>> symmetry.num_units
4
>>> factors = symmetry.factors(torch.tensor([2.0, 2.0, 1.0, 4.0]).log())
>>> (
...     [round(f, 4) for f in factors["0.bias"].tolist()],
...     [round(f, 4) for f in factors["2.weight"][0].tolist()],
... )
([2.0, 2.0, 1.0, 4.0], [0.5, 0.5, 1.0, 0.25])
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..capture.aliasing import list_written_leaves
from ..capture.models import Inputs, arguments_not_given, canonical_names
from ..capture.nodes import Graph, Node
from ..capture.precision import types_behind
from ..distributed.sharding import original_class
from ..errors import MismatchError, RescalingError
from ..memory import find_overlaps
from ..numerics import exp
from ..rules.equations import Cause, Equations, SolvedScales
from ..rules.factors import UNSET, Factors
from ..rules.families.normalization import WITH_STATISTICS
from ..rules.labels import FIXED
from ..rules.scales import Scales
from ..rules.values import Scaling
from ..text import count_of
from ..wrappers import unwrap
from .bounds import EpsilonShares
from .captures import Captured, capture_all, list_frozen_by_routing, list_parameters_read
from .dropped import Call, find_used_anywhere, hold_cut_off, hold_dropped, list_dropped
from .held import list_excluded, list_frozen
from .propagation import Propagation
from .sizes import Example
from .text import symmetry_table
from .units import ClassMatrix, Pinned, UnitGroup
from .unread import find_levels, settle_unread_entries

Normalization = Literal["absorb", "gain", "full", "batch", "paper"]
FrozenPolicy = Literal["keep", "move"]
FROZEN = 'does not require a gradient (frozen="move" rescales it all the same)'
OTHER_WAY = "not taken on the example: give an input that takes it by other_inputs="
# options of modules that no symmetry depends on
CHANGEABLE = re.compile(r"\b(p|drop_prob|momentum|inplace)=[^,)]+")
SAFE_EPSILON_SHARE = 1 / 4000  # by which scales in front of a norm may change the share of ε in it


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """All rescalings that leave a model's function unchanged: θ_i → θ_i · exp(Σ_h K_ih t_h).

    Attributes:
        num_units: Number of free log-scales t.
        groups: The units by layer, in forward order.
        pinned: What cannot be rescaled, by which operation, at which module and line.
        normalization: Which side of a normalization carries a scale.
        approximate: Whether smooth activations and the fronts of norms without statistics take
            part.
        model_name: Class of the model.
        uncounted: Parameters that the criterion leaves out: under "paper", those of BatchNorms.
        frozen: What becomes of parameters with ``requires_grad=False``.
        examples: The inputs on which a rescaling is verified, those that the user gave first.
        not_given: Arguments of ``forward`` that no example gives. What the model does with them was
            not looked at.
        computed_in: Floating-point types that values take between a rescaled parameter and an
            output.
    """

    num_units: int
    groups: tuple[UnitGroup, ...]
    pinned: tuple[Pinned, ...]
    normalization: str
    approximate: bool
    model_name: str
    uncounted: frozenset[str] = field(repr=False)
    frozen: str
    examples: tuple[Example, ...] = field(repr=False)
    fingerprint: str = field(repr=False)
    # labels are positions in the classes of `class_matrix`
    scalings: dict[str, Scaling] = field(repr=False)
    class_matrix: ClassMatrix = field(repr=False)
    shapes: dict[str, tuple[int, ...]] = field(repr=False)
    variances: dict[str, Tensor] = field(repr=False)
    computed_in: frozenset[torch.dtype] = field(repr=False, default=frozenset())
    not_given: tuple[str, ...] = ()

    @property
    def example_inputs(self) -> Any:
        """The example that the user gave."""
        return self.examples[0].inputs

    def class_log_scales(self, log_scales: Tensor) -> Tensor:
        """t of every class of equal log-scales, (num_classes,) float64, from the units'
        (num_units,).
        """
        return self.class_matrix @ self._check_shape(log_scales)

    def factors(self, log_scales: Tensor) -> dict[str, Tensor]:
        """The factor of every parameter and floating-point buffer, by name, in its own shape
        (float64).

        A running variance follows λ²(var + ε) − ε, so its factor depends on its value; it is given
        for the variance that the model had when this Symmetry was found.

        Args:
            log_scales: log λ per unit, (num_units,).
        """
        t = self.class_log_scales(log_scales)
        out = {}
        for name, shape in self.shapes.items():
            scaling = self.scalings.get(name)
            if scaling is None:
                factor = torch.ones((), dtype=torch.float64)
            elif scaling.epsilon is None:
                factor = exp(t[scaling.plus.long()] - t[scaling.minus.long()])
            else:
                var = self.variances[name]
                factor = scale_variance(var, t[scaling.plus.long()], scaling.epsilon) / var
            out[name] = factor.expand(shape)
        return out

    def log_scale_bounds(
        self, model: nn.Module, share: float = SAFE_EPSILON_SHARE
    ) -> tuple[Tensor, Tensor]:
        """Box of log-scales, each (num_units,), in which ε of a BatchNorm stays harmless in train
        mode.

        A scale λ in front of a norm changes the share of ε in its normaliser, ε/var on the example
        batch, to ε/(λ²·var). Inside the box that share is at most ``share``; where it is larger
        already, the scale stays as it is. A model that was rescaled within its box has the same
        box. The default is small enough that GoogLeNet, with 59 norms and ε = 10⁻³, keeps its train
        outputs to 1 % with every scale at its bound: λ²·var ≥ 4000 ε. λ = 1 is always inside.
        """
        return self.epsilon_shares(model).box(share)

    def epsilon_shares(self, model: nn.Module) -> EpsilonShares:
        """What ε weighs in the model's norms on the example batch, in train mode."""
        return EpsilonShares.of(model, self.example_inputs, self.scalings, self.class_matrix)

    def _check_shape(self, log_scales: Tensor) -> Tensor:
        log_scales = torch.as_tensor(log_scales).detach().to("cpu", torch.float64)
        if log_scales.shape != (self.num_units,):
            raise RescalingError(
                f"log_scales has shape {tuple(log_scales.shape)}, but this Symmetry of "
                f"{self.model_name} has "
                f"{self.num_units} units: pass a tensor of shape ({self.num_units},) holding log "
                "λ of each unit."
            )
        return log_scales

    def to_dict(self) -> dict[str, Any]:
        """What a person or a script wants to know, as plain data."""
        return {
            "model": self.model_name,
            "num_units": self.num_units,
            "normalization": self.normalization,
            "approximate": self.approximate,
            "groups": [
                {
                    "name": g.name,
                    "units": len(g.units),
                    "multiplied": list(g.multiplied),
                    "divided": list(g.divided),
                }
                for g in self.groups
            ],
            "pinned": [
                {
                    "name": p.name,
                    "units": p.units,
                    "operation": p.operation,
                    "module": p.module,
                    "line": p.line,
                    "reason": p.reason,
                }
                for p in self.pinned
            ],
            "not_given": list(self.not_given),
        }

    def __str__(self) -> str:
        approximate = ", approximate" if self.approximate else ""
        head = (
            f"Symmetry of {self.model_name}: {count_of(self.num_units, 'unit')} in "
            f"{count_of(len(self.groups), 'group')}, "
            f'normalization="{self.normalization}"{approximate}'
        )
        return symmetry_table(head, self.groups, self.pinned, self.not_given)


def find_symmetry(
    model: nn.Module,
    example_inputs: Inputs,
    *,
    other_inputs: Inputs | None = None,
    normalization: Normalization = "batch",
    approximate: bool = False,
    frozen: FrozenPolicy = "keep",
    exclude: str | Iterable[str] = (),
) -> Symmetry:
    """Find every rescaling symmetry of a model; nothing of the model changes.

    A symmetry keeps the function for every input that the model accepts. The sizes that an example
    has by chance (batch, length, resolution) are told from those that the model needs by running it
    on the example at other sizes.

    Args:
        model: Any module, on any device (the meta device too). Wrappers such as
            DistributedDataParallel are removed.
        example_inputs: One batch: a Tensor, a tuple of positional inputs or a dict of keyword
            inputs.
        other_inputs: A second example that reaches what the first one does not (an optional input,
            a longer sequence); several as a list.
        normalization: Which side of a normalization layer carries a scale: "absorb" (in front,
            where running statistics follow), "gain" (behind), "full" (both), "batch" (both where it
            has running statistics, as BatchNorm, else neither), "paper" (one scale through it;
            keeps eval mode only).
        approximate: Treat smooth activations as ReLU, and let scales in front of norms without
            running statistics vary; the function is then kept only approximately.
        frozen: What becomes of parameters with ``requires_grad=False``: "keep" leaves them as they
            are, "move" scales them like any other.
        exclude: Parameters to leave as they are: names of parameters or modules, or patterns such
            as ``"*.bias"``.

    Raises:
        UnsupportedModelError: The model cannot be captured; it says why.
    """
    _check_choice(Normalization, normalization=normalization)
    _check_choice(FrozenPolicy, frozen=frozen)
    model = unwrap(model)
    excluded = list_excluded(model, exclude)
    captured = capture_all(model, example_inputs, other_inputs)
    return symmetry_of(
        model,
        captured,
        normalization=normalization,
        approximate=approximate,
        frozen=frozen,
        excluded=excluded,
    )


def symmetry_of(
    model: nn.Module,
    captured: Sequence[Captured],
    *,
    normalization: Normalization,
    approximate: bool = False,
    frozen: FrozenPolicy = "keep",
    excluded: Mapping[str, str] = MappingProxyType({}),
) -> Symmetry:
    """The Symmetry that satisfies all captures of one model.

    Args:
        model: The model, not wrapped.
        captured: From ``capture_all``; the first one is the user's example.
        normalization, approximate, frozen: As in ``find_symmetry``.
        excluded: From ``list_excluded``.
    """
    graphs = [graph for capture in captured for graph in capture.graphs]
    read = list_parameters_read(captured)
    stays = list_frozen_by_routing(captured)
    unread = [
        name for name, _ in model.named_parameters() if name not in read and name not in stays
    ]
    held = {name: Cause(None, reason) for name, reason in [*stays.items(), *excluded.items()]}
    if frozen == "keep":
        held |= {name: Cause(None, FROZEN) for name in sorted(list_frozen(model))}
    frozen_and_held = held | _untouchable(model, graphs)
    rewritten = frozenset(
        leaf.name
        for graph in graphs
        for leaf, _ in list_written_leaves(graph)
        if leaf.op == "buffer" and not leaf.dtype.is_floating_point
    )
    unfollowed = {
        level: f"the other way at {place} ({OTHER_WAY})"
        for level, place in captured[0].unfollowed.items()
    }

    def walk(dropped: Sequence[str]) -> _Walked:
        scales = Scales(
            normalization=normalization,
            approximate=approximate,
            rewritten=rewritten,
            factors=Factors(Equations(), frozen=dict(frozen_and_held)),
            precision=max((torch.finfo(p.dtype).eps for p in model.parameters()), default=1.0),
        )
        levels = unfollowed | find_levels(unread, dropped, graphs)
        return _Walked.over(captured, scales, levels)

    called = set().union(*(graph.called for graph in graphs))
    dropped = [name for name in unread if name in called]
    walked = walk(dropped)
    also_dropped = list_dropped(walked.scales, walked.used)
    if also_dropped:
        walked = walk([*dropped, *also_dropped])
    scales = walked.scales
    scales.factors.settle_zero_reads()
    hold_dropped(scales, walked.used)
    hold_cut_off(scales, walked.cuts)
    settle_unread_entries(scales, walked.reads)
    examples = tuple(capture.example for capture in captured)
    symmetry = _assemble(model, examples, frozen, scales, scales.equations.solve())
    rescaled = [name for name, scaling in symmetry.scalings.items() if scaling.changes]
    return replace(
        symmetry,
        computed_in=types_behind(graphs, rescaled),
        not_given=arguments_not_given(model, [e.inputs for e in examples if e.given]),
    )


@dataclass(frozen=True)
class _Walked:
    """What is known after all captures were walked over.

    Attributes:
        scales: All equations.
        reads: Per example, which entries of a parameter were read.
        used: Which labels an output depends on.
        cuts: Per graph, what calls that cut a tensor leave nothing but zeros of.
    """

    scales: Scales
    reads: list[dict[str, Tensor]]
    used: Tensor
    cuts: list[dict[Call, Tensor | None]]

    @classmethod
    def over(
        cls, captured: Sequence[Captured], scales: Scales, levels: Mapping[str, str]
    ) -> _Walked:
        reads: list[dict[str, Tensor]] = []
        used: list[Tensor] = []
        cuts: list[dict[Call, Tensor | None]] = []
        for capture in captured:
            entries: dict[str, Tensor] = {}
            for graph in capture.graphs:
                propagation = Propagation(graph, scales, levels)
                used.append(propagation.run())
                cuts.append(propagation.find_cut_off())
                for name, mask in scales.factors.reads.items():
                    entries[name] = entries[name] | mask if name in entries else mask
            reads.append(entries)
        return cls(scales, reads, find_used_anywhere(scales, used), cuts)


def _check_choice(choices: Any, **given: str) -> None:
    for name, value in given.items():
        if value not in get_args(choices):
            raise ValueError(
                f"{name}={value!r}; choose one of {', '.join(map(repr, get_args(choices)))}"
            )


def scale_variance(variance: Tensor, log_scale: Tensor, epsilon: float | Tensor) -> Tensor:
    """λ²(var + ε) − ε: the running variance after scaling what feeds its norm by λ. All
    (channels,), float64; ε may be one number.
    """
    square = (2 * log_scale).exp()
    return square * variance.double() + torch.expm1(2 * log_scale) * epsilon


def fingerprint(model: nn.Module) -> str:
    """Changes with the structure of a model (modules, options, shapes, ties), not with its
    weights.
    """
    description = []
    first: dict[int, str] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if first.setdefault(id(module), name) == name:
            options = CHANGEABLE.sub("", module.extra_repr())
            description.append(f"{name} {original_class(module).__name__}({options})")
        else:
            description.append(f"{name} is {first[id(module)]}")
        for kind in (module._parameters, module._buffers):
            for key, t in kind.items():
                if t is not None:
                    tied = first.setdefault(id(t), f"{name}.{key}")
                    description.append(f"{key} {tuple(t.shape)} {t.dtype} {tied}")
    return hashlib.sha256("\n".join(description).encode()).hexdigest()


def require_fitting(model: nn.Module, symmetry: Symmetry) -> None:
    """Refuse a model whose structure is not that of the one whose Symmetry this is."""
    if fingerprint(model) != symmetry.fingerprint:
        raise MismatchError(
            f"{type(model).__name__} has changed since its Symmetry was found (modules, shapes, "
            "dtypes or tied weights differ): find it again (find_symmetry, prepare or teleport)."
        )


def _untouchable(model: nn.Module, graphs: Iterable[Graph]) -> dict[str, Cause]:
    """Tensors that no rule may rescale: parametrized ones, statistics that are not saved with the
    model, and tensors that overlap in memory.

    A weight norm is the one parametrization that has a rule.
    """
    names = canonical_names(model)
    frozen: dict[str, Cause] = {}
    for prefix, module in model.named_modules():
        if not parametrize.is_parametrized(module):
            continue
        for tensor, steps in module.parametrizations.items():  # type: ignore[operator, union-attr]
            if [type(step).__name__ for step in steps] == ["_WeightNorm"]:
                continue
            for name, _ in steps.named_parameters():
                full = f"{prefix}.parametrizations.{tensor}.{name}".lstrip(".")
                frozen[names[full]] = Cause(None, "is under torch.nn.utils.parametrize")
    unsaved = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        for name in module._non_persistent_buffers_set
    }
    frozen |= {
        name: Cause(None, "is not saved with the model (persistent=False)")
        for name in _statistics(graphs) & unsaved
    }
    constants = {
        n.name: n.value
        for graph in graphs
        for n in graph.nodes
        if n.op == "constant" and n.value is not None
    }
    for one, other in find_overlaps(
        [*model.named_parameters(), *model.named_buffers(), *constants.items()]
    ):
        for name in (one, other):
            own = (
                "has elements that share memory"
                if one == other
                else "shares memory with another parameter or buffer"
            )
            frozen.setdefault(name, Cause(None, own))
    return frozen


def _statistics(graphs: Iterable[Graph]) -> set[str]:
    """Names of the buffers by which norms normalise."""
    given = [
        node.bound.get(name)
        for graph in graphs
        for node in graph.nodes
        if node.op in WITH_STATISTICS
        for name in ("running_mean", "running_var")
    ]
    return {node.name for node in given if isinstance(node, Node)}


def _assemble(
    model: nn.Module,
    examples: tuple[Example, ...],
    frozen: str,
    scales: Scales,
    solved: SolvedScales,
) -> Symmetry:
    scalings, classes = _classes(scales, solved)
    free, class_matrix = _combinations(solved, classes)
    floating = {
        name: tensor
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]
        if tensor.dtype.is_floating_point
    }
    return Symmetry(
        num_units=class_matrix.num_units,
        groups=_groups(scales.equations, free, scalings, class_matrix),
        pinned=_list_pinned(scales, solved),
        normalization=scales.normalization,
        approximate=scales.approximate,
        model_name=type(model).__name__,
        uncounted=frozenset(scales.uncounted),
        frozen=frozen,
        examples=examples,
        fingerprint=fingerprint(model),
        scalings=scalings,
        class_matrix=class_matrix,
        shapes={name: tuple(tensor.shape) for name, tensor in floating.items()},
        variances={
            name: floating[name].detach().to("cpu", torch.float64, copy=True)
            for name, scaling in scalings.items()
            if scaling.epsilon is not None and not floating[name].is_meta
        },
    )


def _combinations(solved: SolvedScales, classes: Tensor) -> tuple[Tensor, ClassMatrix]:
    """The labels that are free, (num_units,), and every class as a combination of them.

    Args:
        solved: All equations.
        classes: Labels that stand for them, (num_classes,); the first one is fixed.
    """
    # Nearly every class is a unit by itself.
    of_others = torch.tensor(sorted(solved.forms), dtype=classes.dtype)
    combined = torch.isin(classes, of_others)
    alone = (~combined & (classes != FIXED)).nonzero().flatten()
    entries = [
        (row, label, coefficient)
        for row in combined.nonzero().flatten().tolist()
        for label, coefficient in solved.form_of_class(int(classes[row])).items()
    ]
    more = torch.tensor(entries, dtype=torch.long).view(-1, 3)
    rows = torch.cat([alone, more[:, 0]])
    labels = torch.cat([classes[alone].long(), more[:, 1]])
    coefficients = torch.cat([torch.ones(len(alone)), more[:, 2]]).double()
    free, units = torch.unique(labels, return_inverse=True)
    order = rows.argsort(stable=True)
    matrix = ClassMatrix(rows[order], units[order], coefficients[order], len(classes), len(free))
    return free, matrix


def _classes(scales: Scales, solved: SolvedScales) -> tuple[dict[str, Scaling], Tensor]:
    """Scalings with labels renumbered to the classes in use, and the labels of these,
    (num_classes,); class 0 is the fixed one.
    """
    fixed = torch.zeros(len(solved.root), dtype=torch.bool)
    fixed[list(solved.causes)] = True
    root = torch.where(fixed[solved.root.long()], FIXED, solved.root)
    rooted = {}
    in_use = torch.zeros(len(root), dtype=torch.bool)
    in_use[FIXED] = True
    for name, scaling in scales.factors.scalings.items():
        plus, minus = (
            root[ids.masked_fill(ids == UNSET, FIXED).long()]
            for ids in (scaling.plus, scaling.minus)
        )
        if name not in scales.factors.frozen and (plus.any() or minus.any()):
            rooted[name] = Scaling(scaling.shape, plus, minus, scaling.epsilon)
            in_use[plus.long()] = in_use[minus.long()] = True
    number = in_use.cumsum(0, dtype=torch.int32) - 1
    renumbered = {
        name: Scaling(s.shape, number[s.plus.long()], number[s.minus.long()], s.epsilon)
        for name, s in rooted.items()
    }
    return renumbered, in_use.nonzero().flatten()


def _groups(
    equations: Equations, free: Tensor, scalings: dict[str, Scaling], class_matrix: ClassMatrix
) -> tuple[UnitGroup, ...]:
    """Units whose labels, (num_units,), were made by the same call belong together."""
    starts = torch.tensor([start for start, _, _ in equations.origins] or [0])
    origin_of_unit = torch.searchsorted(starts, free, right=True) - 1
    origins, group_of_unit = torch.unique(origin_of_unit, return_inverse=True)
    multiplied: list[list[str]] = [[] for _ in origins]
    divided: list[list[str]] = [[] for _ in origins]
    kinds, members = _kinds_of_classes(class_matrix, group_of_unit)
    for name, scaling in scalings.items():
        for ids, (up, down) in (
            (scaling.plus, (multiplied, divided)),
            (scaling.minus, (divided, multiplied)),
        ):
            for kind in torch.unique(kinds[ids]).tolist():
                for group, falls in members[kind]:
                    (down if falls else up)[group].append(name)
    order = torch.argsort(group_of_unit, stable=True)
    units = order.split(torch.bincount(group_of_unit, minlength=len(origins)).tolist())
    return tuple(
        UnitGroup(
            name=_group_name(equations.origins[origin][2]),
            units=tuple(indices.tolist()),
            multiplied=tuple(dict.fromkeys(up)),
            divided=tuple(dict.fromkeys(down)),
        )
        for origin, indices, up, down in zip(
            origins.tolist(), units, multiplied, divided, strict=True
        )
    )


def _kinds_of_classes(
    class_matrix: ClassMatrix, group_of_unit: Tensor
) -> tuple[Tensor, list[list[tuple[int, bool]]]]:
    """Classes of one kind rise and fall with the same groups of units.

    Returns:
        (num_classes,) the kind of every class; and for every kind its groups, with whether the
        class falls where their log-scales rise.
    """
    kinds = torch.zeros(class_matrix.num_classes, dtype=torch.long)
    members: list[list[tuple[int, bool]]] = [[]]  # of the first kind are those that keep still
    if not len(class_matrix.classes):
        return kinds, members
    keys = 2 * group_of_unit[class_matrix.units] + (class_matrix.coefficients < 0)
    base = int(keys.max()) + 1
    pairs = torch.unique(base * class_matrix.classes + keys)
    keys = pairs % base
    classes, counts = torch.unique_consecutive(pairs // base, return_counts=True)
    alone = counts == 1
    first = counts.cumsum(0) - counts
    found, kind = torch.unique(keys[first[alone]], return_inverse=True)
    members += [[(key // 2, bool(key % 2))] for key in found.tolist()]
    kinds[classes[alone]] = 1 + kind
    known: dict[tuple[int, ...], int] = {}
    each = keys.split(counts.tolist()) if not alone.all() else ()
    several = [tuple(own.tolist()) for own in each if len(own) > 1]
    for own in several:
        if own not in known:
            known[own] = len(members)
            members.append([(key // 2, bool(key % 2)) for key in own])
    kinds[classes[~alone]] = torch.tensor([known[own] for own in several], dtype=torch.long)
    return kinds, members


def _group_name(origin: Node | None) -> str:
    return (origin.module or origin.name) if origin is not None else "(product)"


def _list_pinned(scales: Scales, solved: SolvedScales) -> tuple[Pinned, ...]:
    found: dict[tuple[str, int], tuple[int, Cause]] = {}
    for start, stop, origin in scales.equations.origins:
        if origin is None:
            continue
        roots = solved.root[start:stop]
        counts: dict[int, tuple[int, Cause]] = {}
        for root, count in zip(
            *(x.tolist() for x in torch.unique(roots, return_counts=True)), strict=True
        ):
            cause = solved.causes.get(root)
            if cause is not None:
                counts[id(cause)] = (counts.get(id(cause), (0, cause))[0] + count, cause)
        for key, (count, cause) in counts.items():
            known = found.get((_group_name(origin), key), (0, cause))
            found[(_group_name(origin), key)] = (max(count, known[0]), cause)
    pins = [_pin(name, count, cause) for (name, _), (count, cause) in found.items()]
    pins += [_pin(name, 0, cause) for name, cause in scales.factors.frozen.items()]
    return tuple(dict.fromkeys(pins))


def _pin(name: str, units: int, cause: Cause) -> Pinned:
    node: Node | None = cause.by
    return Pinned(
        name=name,
        units=units,
        operation=node.op if node is not None else "parameter",
        module=node.module if node is not None else "",
        line=node.line if node is not None else "",
        reason=cause.reason,
    )
