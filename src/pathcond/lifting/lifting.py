"""Graph -> diag(G), path norms, number of paths.

The path lifting Φ(θ) has one entry per path, the product of the parameters along it (def.
path_lifting). It is never formed: with ω = |θ|^p, Σ_paths Π ω is the output of the network run on ω
from an input of ones, and

    g_i = G_ii = Σ_{paths p ∋ i} Π_{j ∈ p, j ≠ i} θ_j² = ∂‖Φ‖₂² / ∂θ_i²          (eq. diag_g)

is one backward pass through it. A parameter that occurs m times on a path counts m times (not m²).

>>> import torch
>>> from torch import nn
>>> model = nn.Sequential(nn.Linear(1, 1), nn.ReLU(), nn.Linear(1, 1, bias=False)).double()
>>> for parameter, value in zip(
...     model.parameters(), (3.0, 2.0, 5.0)
... ):  # v, w, u of u·relu(v·x + w)
...     _ = nn.init.constant_(parameter, value)
>>> {
...     name: g.item() for name, g in diag_g(model, torch.zeros(1, 1).double()).items()
... }  # u², u², v² + w²
{'0.weight': 25.0, '0.bias': 25.0, '2.weight': 13.0}
>>> (
...     path_norm(model, torch.zeros(1, 1).double(), p=1),
...     count_paths(model, torch.zeros(1, 1).double()),
... )  # |uv| + |uw|
(25.0, 2.0)
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ..capture.aliasing import list_written_leaves
from ..capture.indices import as_on_cpu
from ..capture.isolation import isolated
from ..capture.models import Inputs, as_call, canonical_names
from ..capture.nodes import Graph, Node
from ..capture.outputs import example_outputs, require_fitting_types, split_samples
from ..capture.usable import require_usable, unusable_weights
from ..capture.watching import Decision, Watch, list_by_values
from ..distributed.ranks import Ranks
from ..distributed.sharding import gather, local, shard_like
from ..errors import EnergyRangeError, UnsupportedModelError
from ..interrupts import interruptible, uninterrupted
from ..opaque.around import Around, Child, capture_around, children_on, names_inside, relocate
from ..rules.energies import Energies, PathSum, power_of
from ..wrappers import unwrap
from .batch_values import BatchValues
from .energy_pass import LARGE, EnergyPass, Lifted, MissingValueError
from .sample import Prepared, Sample

READS_A_NUMBER = ("item", "_local_scalar_dense")
TINY = torch.finfo(torch.float64).tiny
TRANSFORMS = ("_add_batch_dim", "_remove_batch_dim")


# Takes the gradient of a parameter, by name.
Deliver = Callable[[str, Tensor], None]
# Where gradients of parameters arrive, by name -> the walk.
MakeWalk = Callable[[dict[str, Tensor]], Callable[..., EnergyPass]]


@dataclass(frozen=True, kw_only=True)
class PathEnergy:
    """The lifting of one model.

    Attributes:
        norm: ‖Φ‖_p^p, the sum over all paths of Π |θ|^p.
        diagonal: ∂ norm / ∂|θ|^p of every trainable parameter, float64 on the model's device;
            diag(G) for p = 2.
    """

    norm: float
    diagonal: dict[str, Tensor]


def diag_g(
    model: nn.Module,
    example_inputs: Inputs | Sample | Prepared,
    *,
    calibrate: bool = True,
    approximate: bool = False,
) -> dict[str, Tensor]:
    """The diagonal of G = ∂Φᵀ∂Φ, eq. diag_g, by one forward and one backward pass on squared
    weights.

    Args:
        model: Any module; it is not changed. Half-precision weights are computed in float64 all the
            same.
        example_inputs: Tensor, tuple of positional inputs or dict of keyword inputs; a batch of
            samples.
        calibrate: Freeze factors that depend on the data (1/σ of normalizations, gates, attention)
            at their value on the example batch. A BatchNorm that has tracked batches uses its
            running statistics. False is the paper's computation: running statistics as they are,
            every other such factor 1.
        approximate: Treat smooth activations (GELU, SiLU) as ReLU; otherwise x·gate(x) passes
            energy times its gate.

    Returns:
        {name: float64 tensor of the parameter's shape} for every trainable parameter; zero outside
        the lifting.

    Raises:
        UnsupportedModelError: The model cannot be captured.
        EnergyRangeError: Energy leaves the range of float64; the message names the layer.
    """
    sample = capture_sample(model, example_inputs)
    return path_energy(model, sample, calibrate=calibrate, approximate=approximate).diagonal


def path_norm(
    model: nn.Module,
    example_inputs: Inputs | Sample | Prepared,
    p: float = 2,
    *,
    calibrate: bool = True,
    approximate: bool = False,
) -> float:
    """‖Φ(θ)‖_p, the norm of the vector of all path products; it does not change under rescaling.

    Args:
        model, example_inputs, calibrate, approximate: As in ``diag_g``.
        p: Positive and finite.
    """
    if not 0 < p < math.inf:
        raise ValueError(
            f"p = {p}: the path norm is computed for positive, finite p (count_paths counts paths)"
        )
    sample = capture_sample(model, example_inputs)
    energy = path_energy(
        model, sample, p=p, calibrate=calibrate, approximate=approximate, diagonal=False
    )
    try:
        return energy.norm ** (1 / p)
    except OverflowError as error:
        raise EnergyRangeError(f"‖Φ‖_{p} overflows float64: choose a larger p.") from error


def count_paths(model: nn.Module, example_inputs: Inputs | Sample | Prepared) -> float:
    """The number of paths: from every input element and every bias to every output element, through
    every window entry of a max-pooling. Zero weights count; zeros of constants (padding, masks) do
    not.

    Raises:
        OverflowError: There are more than a float can hold; ``log10_paths`` has no such limit.
    """
    mantissa, exponent = _count(model, example_inputs)
    try:
        return math.ldexp(mantissa, exponent)
    except OverflowError as error:
        message = (
            f"The model has 10^{_log10(mantissa, exponent):.2f} paths, more than a float can hold: "
            "use log10_paths."
        )
        raise OverflowError(message) from error


def log10_paths(model: nn.Module, example_inputs: Inputs | Sample | Prepared) -> float:
    """log10 of the number of paths (-inf if there are none); ResNet-152 has more than 10^308 of
    them.
    """
    return _log10(*_count(model, example_inputs))


def capture_sample(model: nn.Module, example_inputs: Inputs | Sample | Prepared) -> Sample:
    """Capture the model on one sample of the example batch.

    The result serves as long as the architecture stays, whatever becomes of the weights: every
    function of this module takes it in place of the example inputs.
    """
    if isinstance(example_inputs, Prepared):
        return example_inputs.sample
    if isinstance(example_inputs, Sample):
        return example_inputs
    model = unwrap(model)
    require_usable(*as_call(example_inputs))
    require_fitting_types(model, example_inputs)
    samples = split_samples(model, example_inputs)
    with as_on_cpu(model):
        captured = _capture_typical(model, samples, example_inputs)
    # One sample does not reach all that the batch does.
    children = children_on(model, example_inputs, captured)
    _refuse_written_parameters(captured.graph)
    _refuse_transforms(captured.graph)
    _refuse_generators(captured.graph)
    _refuse_numbers(captured.graph)
    return Sample(
        graph=captured.graph,
        inputs=tuple(tuple(tree_leaves(as_call(sample))) for sample in samples),
        parts=tuple(part for child in children for part in _parts(model, child)),
    )


def _capture_typical(model: nn.Module, samples: Sequence[Inputs], batch: Inputs) -> Around:
    """The model on the first sample; where values of the inputs decide, on the first that goes the
    way of the whole batch. Of sentences with padding, that is one with padding.
    """
    capture = partial(capture_around, model, modes=(False,), inside=False)
    (first,) = capture(samples[0])
    if len(samples) == 1 or (first.watches and not list_by_values(first.watches[0])):
        return first

    def decide(inputs: Inputs) -> set[Decision]:
        watch = Watch(model)
        example_outputs(model, inputs, {}, training=False, call=watch.call)
        return list_by_values(watch)

    whole = decide(batch)
    typical = next((sample for sample in samples if decide(sample) == whole), samples[0])
    return first if typical is samples[0] else capture(typical)[0]


def _parts(model: nn.Module, child: Child) -> list[Sample]:
    """A module that an opaque one calls, once for each way in which it is called; none if it cannot
    be captured.
    """
    names = names_inside(model, child.module)

    def move(sample: Sample) -> Sample:
        parts = tuple(move(part) for part in sample.parts)
        return replace(sample, graph=relocate(sample.graph, child, names), parts=parts)

    try:
        return [move(capture_sample(child.module, inputs)) for inputs in child.inputs]
    except UnsupportedModelError:
        return []


def _refuse_written_parameters(graph: Graph) -> None:
    for leaf, node in list_written_leaves(graph):
        if leaf.op == "parameter":
            raise UnsupportedModelError(
                f"The forward pass writes into its own parameter {leaf.name} ({node.op} at "
                f"{node.where}): its paths have no "
                "fixed weights. Move that write out of forward."
            )


def _refuse_transforms(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op in TRANSFORMS:
            raise UnsupportedModelError(
                f"The model uses torch.vmap at {node.where}: what happens inside of it is seen "
                "for one member at a time, so that "
                "path energy cannot be computed. Write the batched computation out, with "
                "torch.bmm or torch.einsum."
            )


def _refuse_generators(graph: Graph) -> None:
    for node in graph.nodes:
        if node.bound.get("generator") is not None:
            raise UnsupportedModelError(
                f"The model draws random numbers from a generator of its own at {node.where}: "
                "path energy would differ from call "
                "to call. Draw from torch's own generator, in train mode only."
            )


def _refuse_numbers(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op in READS_A_NUMBER:
            raise UnsupportedModelError(
                f"The model makes a Python number of a tensor at {node.where}: what is computed "
                "from it cannot be followed. Leave it a tensor (drop .item())."
            )


def path_energy(
    model: nn.Module,
    sample: Sample,
    *,
    p: float = 2,
    calibrate: bool = True,
    approximate: bool = False,
    diagonal: bool = True,
    refuse_out_of_range: bool = True,
    keep: Callable[[Tensor], Tensor] = lambda g: g,
    walk: MakeWalk = lambda received: EnergyPass,
) -> PathEnergy:
    """‖Φ‖_p^p and its gradient with respect to |θ|^p, by one forward and one backward pass.

    Args:
        model: The model that ``sample`` was captured from, with any weights.
        sample: From ``capture_sample``.
        p, calibrate, approximate: As in ``path_norm``.
        diagonal: Whether to compute the gradient.
        refuse_out_of_range: Whether energies outside the range of float64 are an error. Otherwise
            they are returned as they come: infinite, not a number, or zero. To tell underflow from
            other zeros may take a second pass, which False saves.
        keep: What to keep of the gradient of a parameter; a few entries, where all of them together
            would take more memory than the model. Of several graphs, what is kept is summed up.
        walk: Makes the walk itself, given where gradients arrive; another one than ``EnergyPass``
            may see what passes by, all of whose values are then computed.
    """
    energies = []
    for part in sample.all:
        lifting = Lifting(unwrap(model), part, calibrate=calibrate, approximate=approximate)
        energies.append(_energy_of(lifting, p, diagonal, refuse_out_of_range, keep, walk))
    total: dict[str, Tensor] = {}
    for energy in energies:
        for name, g in energy.diagonal.items():
            total[name] = total[name] + g if name in total else g
    return PathEnergy(norm=sum(energy.norm for energy in energies), diagonal=total)


def _energy_of(
    lifting: Lifting,
    p: float,
    diagonal: bool,
    refuse_out_of_range: bool,
    keep: Callable[[Tensor], Tensor],
    walk: MakeWalk,
) -> PathEnergy:
    """The energy of the paths of one graph."""
    read: dict[str, Tensor] = {}
    kept: dict[str, Tensor] = {}
    missing: dict[str, Tensor] = {}
    walking = True

    def deliver(name: str, g: Tensor) -> None:
        if walking:  # what the walk itself asked for
            read[name] = g
        else:
            missing[name] = local(g) < TINY
            kept[name] = keep(g)

    kind = walk(read)
    lifted = lifting.run(
        p=p,
        deliver=deliver if diagonal else None,
        kind=kind,
        measure_all=kind is not EnergyPass,
    )
    walking = False
    norm = float(lifted.total.detach())
    if refuse_out_of_range:
        lifting.refuse_total_out_of_range(norm, p)
    if not diagonal:
        return PathEnergy(norm=norm, diagonal={})
    if lifted.total.requires_grad:
        lifted.total.backward()
    if refuse_out_of_range:
        lifting.refuse_diagonal_out_of_range(missing)
    for name, parameter in lifting.trainable.items():
        if name not in kept:
            zeros = torch.zeros(parameter.shape, dtype=torch.float64, device=lifting.device)
            kept[name] = keep(shard_like(zeros, parameter))
    return PathEnergy(norm=norm, diagonal={name: kept[name] for name in lifting.trainable})


def off_path(model: nn.Module, example_inputs: Inputs | Sample | Prepared) -> dict[str, str]:
    """Trainable parameters that lie on no path, whatever the weights, and why; diag(G) is zero
    there.

    These are the own branches of gates, queries and keys of an attention, slopes of PReLU, weights
    that are computed from other parameters, and heads that only train mode uses.
    """
    sample = capture_sample(model, example_inputs)
    off: dict[str, str] = {}
    for part in sample.all:
        lifting = Lifting(unwrap(model), part, calibrate=False, approximate=False)
        received: dict[str, Tensor] = {}
        lifted = lifting.run(p=0, deliver=received.__setitem__, count=True, support=True)
        if lifted.total.requires_grad:
            lifted.total.backward()
        on = {name for name, g in received.items() if bool(g.any())}
        # What one graph says of a parameter that another one has on a path does not count.
        seen = {node.name for node in part.graph.nodes if node.op == "parameter"} | (
            lifting.trainable.keys() if part is sample else set()
        )
        off |= {
            name: _reason(name, part.graph, lifted)
            for name in lifting.trainable
            if name in seen and name not in on
        }
        off = {name: reason for name, reason in off.items() if name not in on}
    return off


class _Edge(torch.autograd.Function):
    """|θ|^p as a non-leaf: its gradient is delivered and nothing else is kept, so that squares are
    freed on the way back.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, power: Tensor, deliver: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.deliver = deliver
        return power

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        ctx.deliver(gradients[0])
        return None, None, None


class Lifting:
    """Runs the energy pass of one model under different settings."""

    def __init__(
        self, model: nn.Module, sample: Sample, *, calibrate: bool, approximate: bool
    ) -> None:
        self.model = model
        self.ranks = Ranks.of(model)
        buffers = dict(model.named_buffers())
        if self.ranks.sharded:  # all processes walk together, over the same batch and statistics
            inputs, buffers = self.ranks.from_first((sample.inputs, buffers))
            sample = replace(sample, inputs=inputs)
        self.sample = sample
        self.buffers = buffers
        self.calibrate = calibrate
        self.approximate = approximate
        self.parameters: dict[str, Tensor] = dict(model.named_parameters())
        self.trainable = {
            name: parameter
            for name, parameter in self.parameters.items()
            if parameter.requires_grad
        }
        if any(parameter.is_meta for parameter in self.parameters.values()):
            raise UnsupportedModelError(
                "The model is on the meta device and has no weights: load them first."
            )
        device = next(
            (parameter.device for parameter in self.parameters.values()), torch.device("cpu")
        )
        # which has no float64
        self.device = torch.device("cpu") if device.type == "mps" else device
        self.anchor = torch.zeros((), requires_grad=True)
        self.ranges: dict[str, Tensor] = {}  # (least, greatest) of the last diagonal

    def run(
        self,
        *,
        p: float,
        deliver: Deliver | None = None,
        support: bool = False,
        count: bool = False,
        watch: Callable[[Node, PathSum], None] = lambda node, paths: None,
        kind: Callable[..., EnergyPass] = EnergyPass,
        measure_all: bool = False,
    ) -> Lifted:
        """One walk.

        Args:
            p: Exponent.
            deliver: Takes the gradients on the way back; None for no gradients.
            support: Rescale every energy to maximum 1, to see only which ones are zero.
            count: Every parameter counts as 1, whatever its value.
            watch: Sees every energy.
            kind: The walk itself.
            measure_all: Compute the values of the example batch even where no energy needs them.
        """

        def power(name: str) -> Tensor:
            theta = self.parameters[name]
            return (
                torch.ones(theta.shape, dtype=torch.float64, device=self.device)
                if count
                else power_of(gather(theta), p, self.device)
            )

        def edges(name: str) -> Tensor:
            theta = self.parameters[name]
            edge = power(name)
            if deliver is None:
                return edge
            recomputed.keep(name, edge)
            if not theta.requires_grad:
                return edge
            return _Edge.apply(self.anchor, edge, lambda gradient: arrive(name, gradient))

        def arrive(name: str, gradient: Tensor) -> None:
            assert deliver is not None
            if gradient.numel():
                self.ranges[name] = torch.stack(torch.aminmax(gradient))
            deliver(name, shard_like(_dense(gradient), self.parameters[name]))

        recomputed = _Recomputed(power)
        calibrate = self.calibrate and not count

        def make(measure_all: bool) -> EnergyPass:
            recomputed.names.clear()  # of a walk that was given up, whose memory may be used again
            batch = BatchValues(
                graph=self.sample.graph,
                parameters=self.parameters,
                buffers=self.buffers,
                inputs=self.sample.inputs,
                fresh=_fresh_statistics(self.model),
                calibrate=calibrate,
                measure_all=measure_all,
                device=self.device,
            )
            return kind(
                batch,
                Energies(batch, p, self.approximate, calibrate, self.device),
                edges,
                release=recomputed.forget,
                watch=watch,
                normalise=_to_maximum_one if support else _into_exponent if count else _as_it_is,
            )

        hooks = (
            contextlib.nullcontext()
            if deliver is None
            else torch.autograd.graph.saved_tensors_hooks(recomputed.pack, recomputed.unpack)
        )
        with (
            uninterrupted(),
            isolated(self.model, training=False),
            torch.inference_mode(False),
            torch.set_grad_enabled(deliver is not None),
            hooks,
            interruptible(),
        ):
            try:
                return make(measure_all).run()
            except MissingValueError:
                return make(True).run()

    def refuse_total_out_of_range(self, norm: float, p: float) -> None:
        """Refuse ‖Φ‖_p^p that is not finite, or zero although a path of nonzero weights leads
        through the network.
        """
        if not math.isfinite(norm):
            self.explain_overflow(p)
        assert norm >= 0, "energies are sums of products of powers"
        if norm < TINY and float(self.run(p=0, support=True).total) > 0:
            raise EnergyRangeError(
                f"The path energy of the whole network underflows float64 (it is {norm:.3g}): its "
                "weights are too small. "
                "Initialise them at a usual scale."
            )

    def explain_overflow(self, p: float) -> None:
        """Find the first layer whose energy is not finite."""
        bad = unusable_weights(self.model)
        if bad:
            raise EnergyRangeError("Path energies cannot be computed:\n  - " + "\n  - ".join(bad))

        def watch(node: Node, paths: PathSum) -> None:
            if not bool(paths.power.isfinite().all()):
                kind, cause = (
                    (
                        "is not a number",
                        "the example gives no number there (zero over zero, the deviation of a "
                        "single sample), or weights are too large. Give another batch",
                    )
                    if bool(paths.power.isnan().any())
                    else (
                        "overflows float64",
                        "weights or, with calibrate=True, values of the example batch are too "
                        "large there. Initialise that layer at a usual scale",
                    )
                )
                raise EnergyRangeError(f"Path energy {kind} at {node.op} in {node.where}: {cause}.")

        self.run(p=p, watch=watch)
        raise EnergyRangeError(
            "The path energy of the whole network overflows float64: its weights are too large."
        )

    def refuse_diagonal_out_of_range(self, missing: Mapping[str, Tensor]) -> None:
        """Refuse a diagonal that is not finite, or zero although a path of nonzero weights leads
        through the parameter.

        Args:
            missing: Where it is zero, of what this process holds of each parameter.
        """
        # All at once: every look at a value waits for the device.
        ranges = torch.stack(list(self.ranges.values())).tolist() if self.ranges else []
        small = set()
        for (low, high), name in zip(ranges, self.ranges, strict=True):
            if not math.isfinite(high):
                raise EnergyRangeError(
                    f"The diagonal of G overflows float64 at parameter {name}: the weights in "
                    "front of it or behind it are too "
                    "large. Initialise those layers at a usual scale."
                )
            small |= {name} if low < TINY else set()
        if not small:
            return

        vanished: list[str] = []

        def compare(name: str, support: Tensor) -> None:
            if name in small and bool((missing[name] & (local(support) > 0)).any()):
                vanished.append(name)

        self.run(p=0, deliver=compare, support=True).total.backward()
        if vanished:
            raise EnergyRangeError(
                f"The diagonal of G underflows float64 at parameter {vanished[0]}: the weights "
                "in front of it or behind it are too "
                "small. Initialise those layers at a usual scale."
            )


class _Recomputed:
    """Keeps powers of parameters, which take more memory than the model, out of what autograd
    saves: they are computed anew in the backward pass, from all shards of a sharded parameter.

    A power is recognised by its memory, from the moment it is made until the last node that reads
    it has run.
    """

    def __init__(self, power: Callable[[str], Tensor]) -> None:
        self.power = power
        self.names: dict[int, str] = {}

    def keep(self, name: str, power: Tensor) -> None:
        self.names[power.untyped_storage().data_ptr()] = name

    def forget(self, name: str) -> None:
        self.names = {address: known for address, known in self.names.items() if known != name}

    def pack(self, tensor: Tensor) -> Any:
        name = self.names.get(tensor.untyped_storage().data_ptr())
        return (
            tensor
            if name is None
            else (name, tensor.size(), tensor.stride(), tensor.storage_offset())
        )

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        name, size, stride, offset = packed
        return self.power(name).as_strided(size, stride, offset)


def _dense(gradient: Tensor) -> Tensor:
    """A gradient that may be broadcast, with memory of its own."""
    return gradient.contiguous() if 0 in gradient.stride() else gradient


def _as_it_is(paths: PathSum) -> PathSum:
    return paths


def _to_maximum_one(paths: PathSum) -> PathSum:
    peak = paths.power.detach().max() if paths.power.numel() else torch.zeros(())
    return PathSum(paths.power / peak) if bool(peak > 0) else paths


def _into_exponent(paths: PathSum) -> PathSum:
    peak = float(paths.power.detach().max()) if paths.power.numel() else 0.0
    if peak < LARGE:
        return paths
    shift = math.frexp(peak)[1]
    return PathSum(paths.power * 2.0**-shift, paths.exponent + shift)


def _count(model: nn.Module, example_inputs: Inputs | Sample | Prepared) -> tuple[float, int]:
    """The number of paths as mantissa · 2^exponent."""
    sample = capture_sample(model, example_inputs)
    counts = [
        Lifting(unwrap(model), part, calibrate=False, approximate=False).run(p=0, count=True)
        for part in sample.all
    ]
    exponent = max(count.exponent for count in counts)
    return sum(
        float(count.total) * 2.0 ** (count.exponent - exponent) for count in counts
    ), exponent


def _log10(mantissa: float, exponent: int) -> float:
    return math.log10(mantissa) + exponent * math.log10(2) if mantissa else -math.inf


def _fresh_statistics(model: nn.Module) -> frozenset[str]:
    """Names of the running means of norms that have not seen a batch yet."""
    names = canonical_names(model)
    seen: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        counter, mean, variance = (
            module._buffers.get(name)
            for name in ("num_batches_tracked", "running_mean", "running_var")
        )
        if counter is not None and mean is not None and variance is not None:
            # whose batches torch never counts
            if isinstance(module, nn.modules.instancenorm._InstanceNorm):
                counter = mean.any() | variance.ne(1).any()
            seen[names[f"{prefix}.running_mean" if prefix else "running_mean"]] = counter.long()
    counts = torch.stack(list(seen.values())).tolist() if seen else []
    return frozenset(name for name, count in zip(seen, counts, strict=True) if not count)


def _reason(name: str, graph: Graph, lifted: Lifted) -> str:
    """Why a parameter lies on no path."""
    reached = {node for node in graph.nodes if node.op == "parameter" and node.name == name}
    for node in graph.nodes:
        operands = [operand for operand in node.operands if operand in reached]
        cut = next(
            (lifted.cuts[node, operand] for operand in operands if (node, operand) in lifted.cuts),
            None,
        )
        if cut is not None:
            return f"{cut} at {node.where}"
        if operands:
            reached.add(node)
    return "leads to no output in eval mode"
