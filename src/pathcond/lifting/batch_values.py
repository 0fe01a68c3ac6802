"""The values of a graph's nodes on the example batch, in float64, as far as energies need them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..capture.calibration import without_epsilon
from ..capture.nodes import Graph, Node
from ..distributed.sharding import gather
from ..errors import UnsupportedModelError
from ..rules import RULES
from ..rules.energies import call
from ..rules.families.normalization import WITH_STATISTICS
from ..rules.samples import Samples, at_once
from ..trees import tree_map
from .plan import Plan


@dataclass
class BatchValues:
    """Computes values node by node, in step with a walk over the graph of one sample.

    Attributes:
        graph: Of one sample.
        parameters, buffers: Tensors by name.
        inputs: Per sample, the values of the graph's inputs in order.
        fresh: Names of running means whose statistics are still the initial ones.
        calibrate: Whether anything that depends on the data is measured.
        measure_all: Compute all values even if no rule says that it measures something.
        device: Where values are computed.
        values: Those that are known and still needed.
    """

    graph: Graph
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    inputs: Sequence[Sequence[Any]]
    fresh: frozenset[str]
    calibrate: bool
    measure_all: bool
    device: torch.device
    values: dict[Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan = Plan.of(self.graph, measures=self._measures)

    def of(self, node: Node) -> Any:
        """``Samples``, or one value where the node does not depend on the data."""
        # Parameters are converted where they are read: all of them at once would double the memory.
        if node.op == "parameter" and node not in self.values:
            return self._parameter(node)
        return self.values[node]

    def start(self, node: Node) -> Any:
        """Take up a leaf; what it is on the first sample, None where it is not needed."""
        if node.op == "parameter":
            if node in self.plan.written and node in self.plan.tracked:
                self.values[node] = self._per_sample(node, self._parameter(node))
            return None
        if node.op == "input":
            if node in self.plan.tracked:
                at = self.plan.input_positions[node]
                written = node in self.plan.written
                given = Samples([sample[at] for sample in self.inputs])
                self.values[node] = (
                    Samples.of_joined(as_double(given.join(), self.device, written), given.count)
                    if given.shape is not None
                    else Samples([as_double(v, self.device, written) for v in given.values])
                )
            return None
        value = self.buffers.get(node.name, node.value) if node.op == "buffer" else node.value
        assert value is not None
        self.values[node] = self._per_sample(node, as_double(value.detach(), self.device))
        return self.first(node)

    def compute(self, node: Node) -> None:
        """Run a call. An in-place call overwrites the values of what shares memory with it."""
        self.values[node] = self._result(node)

    def first(self, node: Node) -> Any:
        """The value on the first sample."""
        real = self.values[node]
        return real.values[0] if isinstance(real, Samples) else real

    def forget(self, node: Node) -> None:
        self.values.pop(node, None)

    def statistics(self, node: Node) -> tuple[Tensor, Tensor]:
        """(mean, variance) per channel by which a BatchNorm normalises, ε to be added.

        A variance of the example batch is made such that their sum follows scales in front of the
        norm.
        """
        if self.uses_running_statistics(node):
            return self.first(node.bound["running_mean"]), self.first(node.bound["running_var"])
        if not self.calibrate:
            one = torch.ones((), dtype=torch.float64, device=self.device)
            return one * 0, one - node.bound["eps"]
        real = self.of(node.bound["input"])
        x = real.join() if isinstance(real, Samples) else real
        if x.numel() == x.shape[1]:
            raise UnsupportedModelError(
                f"The statistics of {node.where} cannot be measured on a single value per "
                "channel: give an example batch "
                "of at least two samples, or calibrate=False."
            )
        variance, mean = torch.var_mean(
            x, [axis for axis in range(x.dim()) if axis != 1], correction=0
        )
        epsilon = node.bound["eps"]
        return mean, without_epsilon(variance, epsilon) - epsilon

    def uses_running_statistics(self, node: Node) -> bool:
        """Whether a norm normalises by running statistics that are worth it."""
        mean = node.bound.get("running_mean")
        own = node.bound.get("training") or node.bound.get("use_input_stats")
        return (
            isinstance(mean, Node) and not own and not (self.calibrate and mean.name in self.fresh)
        )

    def _measures(self, node: Node) -> bool:
        """Whether a node's energy needs values of the example batch."""
        if not self.calibrate or node.op == "getitem":
            return False
        rule = RULES.get(node.op)
        if node.op in WITH_STATISTICS:
            return not self.uses_running_statistics(node)
        return self.measure_all or rule is None or rule.measures

    def _parameter(self, node: Node) -> Tensor:
        return gather(self.parameters[node.name]).to(self.device, torch.float64)

    def _per_sample(self, node: Node, value: Tensor) -> Any:
        """A leaf that some sample's data is written into has one copy per sample."""
        if node in self.plan.per_sample and self.inputs:
            return Samples([value.clone() for _ in self.inputs])
        return value.clone() if node in self.plan.written else value

    def _result(self, node: Node) -> Any:
        bound = dict(node.bound)
        if (
            node.op in WITH_STATISTICS
            and node.bound.get("running_mean") is not None
            and not self.uses_running_statistics(node)
        ):
            mean, variance = self.statistics(node)
            changed = {
                "running_mean": mean,
                "running_var": variance,
                "training": False,
                "use_input_stats": False,
            }
            bound |= {name: value for name, value in changed.items() if name in bound}
        arguments = tree_map(lambda a: self.of(a) if isinstance(a, Node) else a, bound)
        if node not in self.plan.per_sample or not self.inputs:
            return as_double(self._call(node, arguments), self.device)

        together = at_once(
            node, arguments, lambda joined: as_double(self._call(node, joined), self.device)
        )
        if together is not None:
            return together

        def sample(i: int) -> Any:
            own = tree_map(lambda a: a.values[i] if isinstance(a, Samples) else a, arguments)
            return as_double(self._call(node, own), self.device)

        return Samples([sample(i) for i in range(len(self.inputs))])

    def _call(self, node: Node, arguments: dict[str, Any]) -> Any:
        if node.op == "getitem":
            return arguments["0"][arguments["1"]]
        if node.shape is None:  # assertions
            return None
        if node.op == "view" and "size" in arguments and node not in self.plan.written:
            # Attention in float64 may leave other strides than the kernel that was captured did.
            return arguments["self"].reshape(arguments["size"])
        try:
            return call(node, arguments, self.device)
        except Exception as error:
            raise UnsupportedModelError(
                f"{node.op} at {node.where} cannot be computed in float64 on the example batch: "
                f"{error}"
            ) from error


def as_double(value: Any, device: torch.device, copy: bool = False) -> Any:
    """Floating-point tensors, alone or in lists, in float64 on a device."""

    def one(v: Any) -> Any:
        if not isinstance(v, Tensor):
            return v
        return v.detach().to(
            device, torch.float64 if v.dtype.is_floating_point else v.dtype, copy=copy
        )

    return tree_map(one, value)
