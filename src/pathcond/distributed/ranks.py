"""Several processes that train one model: what one of them computes all of them apply, and one that
differs is named.

Each rescaling ends with an agreement, after which no process waits for another: all of them write,
or none.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from .. import errors
from ..wrappers import unwrap, walk_wrappers
from .sharding import mesh_group, reshard, sharded_parameters

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """The processes that hold copies of one model, or its shards.

    Attributes:
        group: Their process group; None for a process alone.
        sharded: Whether each holds a part of the parameters.
    """

    group: Any = None
    sharded: bool = False

    @classmethod
    def of(cls, model: nn.Module, group: Any = None) -> Ranks:
        """The processes behind a model: those of its DistributedDataParallel or ``fully_shard``, or
        the group that is given.
        """
        # after a validation pass the root's parameters are still whole, and not the ones that train
        reshard(model)
        sharded = sharded_parameters(model) if several_processes() else {}
        wrapper = next(
            (m for m in walk_wrappers(model) if isinstance(m, nn.parallel.DistributedDataParallel)),
            None,
        )
        if wrapper is not None and getattr(getattr(wrapper, "_join_config", None), "enable", False):
            raise errors.MismatchError(
                "Inside DistributedDataParallel.join() processes take different numbers of steps "
                "and cannot agree on a rescaling."
            )
        if sharded:
            group = mesh_group(sharded)
        elif group is None and wrapper is not None:
            group = wrapper.process_group
        if group is None or (distributed.get_world_size(group) == 1 and not sharded):
            return ALONE
        return cls(group=group, sharded=bool(sharded))

    @property
    def alone(self) -> bool:
        return self.group is None

    @property
    def rank(self) -> int:
        return 0 if self.alone else distributed.get_rank(self.group)

    @property
    def computes(self) -> bool:
        """Whether this process takes part in measuring and solving: of copies only the first
        does.
        """
        return self.sharded or self.rank == 0

    # -- agreement ---------------------------------------------------------------------------------

    @contextmanager
    def together(self) -> Iterator[None]:
        """Run the body; if it raises in one process it raises in all of them, with the rank that it
        came from.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as caught:
            error = caught
        if self.alone:
            if error is not None:
                raise error
            return
        told = self._all_of(None if error is None else (type(error).__name__, str(error)))
        if any(told):
            raise _joint(told) from error

    def agree_on(self, make: Callable[[], T]) -> T:
        """What ``make`` returns in the first process, in all of them. Of a sharded model all of
        them run it.
        """
        if self.alone:
            return make()
        made: list[Any] = [None]
        with self.together():
            made = [make()] if self.computes else [None]
        return self.from_first(made[0])

    def from_first(self, value: T) -> T:
        """The first process's value, in all of them; its tensors are on the CPU there."""
        if self.alone:
            return value
        file = io.BytesIO()
        if self.rank == 0:
            torch.save(value, file)
        box = [file.getvalue()]
        distributed.broadcast_object_list(
            box, src=distributed.get_global_rank(self.group, 0), group=self.group
        )
        return torch.load(io.BytesIO(box[0]), map_location="cpu", weights_only=False)  # type: ignore[no-any-return]

    def same(self, what: str, tensors: Mapping[str, Tensor]) -> None:
        """Refuse, in all processes, if some of these tensors are not bit for bit the same
        everywhere.

        Raises:
            DivergedError: It names the ranks, and where they differ.
        """
        if self.alone:
            return
        sums = self._all_of({name: checksum(tensor) for name, tensor in tensors.items()})
        usual = Counter(tuple(sorted(s.items())) for s in sums).most_common()
        reference = sums[0] if len(usual) > 1 and usual[0][1] == usual[1][1] else dict(usual[0][0])
        found = []
        for rank, own in enumerate(sums):
            names = [
                name
                for name in dict.fromkeys([*reference, *own])
                if own.get(name) != reference.get(name)
            ]
            if names:
                more = f" and {len(names) - 3} more" if len(names) > 3 else ""
                found.append(
                    f"rank {rank} has other {what} than the other ranks: "
                    f"{', '.join(names[:3])}{more}"
                )
        if found:
            raise errors.DivergedError(
                "The model was not changed, because its processes have diverged:\n  - "
                + "\n  - ".join(found)
                + "\nLoad the same checkpoint in all of them, or find what made them differ."
            )

    # -- arithmetic of sharded models --------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Sums over the parts of a sharded model; a whole one has nothing to add."""
        return self._reduce(values, distributed.ReduceOp.SUM) if self.sharded else values

    def maximum(self, values: Tensor) -> Tensor:
        """The greatest over the processes of a sharded model."""
        return self._reduce(values, distributed.ReduceOp.MAX) if self.sharded else values

    def concatenate(self, values: Tensor) -> Tensor:
        """The rows of all parts of a sharded model, first rank first."""
        if not self.sharded:
            return values
        return torch.cat([part.to(values.device) for part in self._all_of(values.cpu())])

    def _reduce(self, values: Tensor, operation: Any) -> Tensor:
        total = values.detach().to(self._device(values)).clone()
        distributed.all_reduce(total, op=operation, group=self.group)
        return total.to(values.device)

    def _device(self, values: Tensor) -> torch.device:
        return (
            torch.device("cuda") if distributed.get_backend(self.group) == "nccl" else values.device
        )

    def _all_of(self, value: Any) -> list[Any]:
        found: list[Any] = [None] * distributed.get_world_size(self.group)
        distributed.all_gather_object(found, value, group=self.group)
        return found


ALONE = Ranks()


def several_processes() -> bool:
    """Whether torch.distributed is running at all."""
    return distributed.is_available() and distributed.is_initialized()


def is_ambiguous(model: nn.Module, group: Any) -> bool:
    """Whether nothing says what the other processes have to do with this model."""
    return (
        group is None
        and several_processes()
        and distributed.get_world_size() > 1
        and Ranks.of(model).alone
    )


def refuse_unclear(model: nn.Module, group: Any) -> None:
    """Refuse a bare model in one of several training processes: are they copies of one model, or
    models of their own?
    """
    if is_ambiguous(model, group):
        raise ValueError(
            f"torch.distributed runs {distributed.get_world_size()} processes, but "
            f"{type(unwrap(model)).__name__} is neither "
            "DistributedDataParallel nor fully_shard. Pass the wrapped model; or "
            "group=torch.distributed.group.WORLD if all "
            "processes train this model; or group=torch.distributed.new_subgroups(1)[0] if each "
            "trains its own."
        )


def checksum(tensor: Tensor) -> tuple[int, int]:
    """Two sums over the bits of a tensor: they change with any one of them, and with their
    order.
    """
    flat = tensor.detach().contiguous().reshape(-1)
    bits = flat.view(
        {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()]
    )
    rows = torch.nn.functional.pad(bits, (0, -len(bits) % 1024)).view(-1, 1024)
    by_row, by_column = (rows.sum(axis, dtype=torch.int64) for axis in (1, 0))
    weighted = [
        (sums * (2 * torch.arange(len(sums), device=sums.device) + 1)).sum()
        for sums in (by_row, by_column)
    ]
    first, second = torch.stack(weighted).tolist()
    return first, second


def _joint(told: list[tuple[str, str] | None]) -> Exception:
    """One error for all processes, of the first one's kind."""
    messages = {rank: t for rank, t in enumerate(told) if t is not None}
    kind, first = next(iter(messages.values()))
    if len(messages) == len(told) and len(set(messages.values())) == 1:
        text = first  # the same everywhere: no rank stands out
    else:
        text = "\n".join(f"rank {rank}: {message}" for rank, (_, message) in messages.items())
    cls = getattr(errors, kind, None) or {"ValueError": ValueError, "TypeError": TypeError}.get(
        kind, errors.RescalingError
    )
    return cls(text)
