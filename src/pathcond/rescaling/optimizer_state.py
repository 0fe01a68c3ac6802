"""Optimizer state in new coordinates: θ → d ⊙ θ takes gradients to gradients / d.

Each kind of state scales by a power of d, the parameter's own factor, so that it becomes what the
moved gradients would have built up, had the parameter had its new scale from the start:

    −1   gradient-like: momentum, first moments
    −2   second moments
     0   already normalised by second moments
     1   parameter-like copies

The same name means different things in different optimizers, so powers are known by class. A
subclass inherits them unless it has a ``step`` of its own, which may give them another meaning.

>>> POWERS["RMSprop"]["momentum_buffer"], POWERS["SGD"]["momentum_buffer"]
(0, -1)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..distributed.sharding import local
from ..errors import MismatchError
from .factor import Factor
from .holdings import list_aside, with_inner
from .moves import Move

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]

_ADAM = {"exp_avg": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2}

# {class of the optimizer: {state: power of d}}. Entries may be added for optimizers of one's own.
POWERS: dict[str, dict[str, int]] = {
    "SGD": {"momentum_buffer": -1},
    **dict.fromkeys(("Adam", "AdamW", "NAdam", "RAdam", "SparseAdam", "Lamb", "FusedAdam"), _ADAM),
    "Adamax": {"exp_avg": -1, "exp_inf": -1},
    "RMSprop": {"square_avg": -2, "grad_avg": -1, "momentum_buffer": 0},
    "Adagrad": {"sum": -2},
    "Adadelta": {"square_avg": -2, "acc_delta": 0},
    "Rprop": {"prev": -1, "step_size": 0},
    "ASGD": {"ax": 1},
    "Lion": {"exp_avg": -1},
    "Muon": {"momentum_buffer": -1},
    "Adafactor": {"variance": -2, "exp_avg_sq": -2},
}
# Moments that are known only as sums over rows and columns: no factor of the parameter takes them
# to the new ones.
FACTORED = {"Adafactor": ("row_var", "col_var", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg")}
# {(class of the optimizer, state): the setting that its entries start from}, where that is not zero
STARTS = {("Adagrad", "sum"): "initial_accumulator_value"}
# optimizers that follow the sign of an average of gradients, their only state
LION_LIKE = re.compile("lion|sign", re.IGNORECASE)
AVERAGES = {"exp_avg", "momentum_buffer"}
UNSCALED = ("step", "eta", "mu", "mu_product", "RMS")  # single numbers
CHOICES = ("transport", "reset", "keep")


@dataclass(frozen=True, kw_only=True)
class Transport:
    """What becomes of the state of some optimizers; nothing is done before ``moves`` and ``resets``
    are.

    Attributes:
        moves: State to be multiplied.
        resets: Per parameter, what empties its state.
        reset_names: The parameters whose state is emptied because it cannot be moved.
    """

    moves: tuple[Move, ...]
    resets: tuple[Callable[[], Any], ...]
    reset_names: tuple[str, ...]


def transport(
    optimizers: Iterable[torch.optim.Optimizer],
    optimizer_state: str,
    scaled: Iterable[tuple[str, Tensor, Factor]],
    known: Iterable[Tensor] = (),
) -> Transport:
    """Plan the moves of the state of every scaled parameter.

    Args:
        optimizers: One or several.
        optimizer_state: "transport", "reset" or "keep".
        scaled: (name, the tensor that an optimizer may hold, its factor).
        known: Tensors of the model and its copies: an optimizer may hold them too.

    Raises:
        MismatchError: A state of unknown meaning, or tensors kept beside the state; it names them
            and says what to do.
    """
    if optimizer_state not in CHOICES:
        raise ValueError(
            f"optimizer_state={optimizer_state!r}; choose one of {', '.join(map(repr, CHOICES))}"
        )
    optimizers, known, scaled = list(optimizers), list(known), list(scaled)
    aside = [
        f"{type(one).__name__} keeps {name!r} beside its state, with tensors of its parameters' "
        "shapes"
        for outer in optimizers
        for one in with_inner(outer)
        for name in list_aside(one, known)
    ]
    if optimizer_state == "keep":
        _refuse(aside, [])
        return Transport(moves=(), resets=(), reset_names=())
    unknown: list[str] = []
    moves: list[Move] = []
    resets: list[Callable[[], Any]] = []
    unmovable = []
    for optimizer in _keepers(optimizers):
        powers = _powers(optimizer)
        if powers is None and optimizer_state == "transport":
            unknown += [
                f"{type(optimizer).__name__} keeps "
                f"{', '.join(map(repr, sorted(_state_names(optimizer))))}, of unknown meaning"
            ]
            continue
        if powers is None:  # reset, whichever parameter it keeps them with
            resets += [state.clear for state in _by_parameter(optimizer)]
            continue
        for name, parameter, factor in scaled:
            state = optimizer.state.get(parameter, {})
            keys = [key for key, value in state.items() if not _is_plain(key, value)]
            if state and optimizer_state == "reset":
                resets.append(state.clear)
            elif any(key in FACTORED.get(_kind(optimizer), ()) for key in keys):
                resets.append(state.clear)
                unmovable.append(name)
            else:
                for key in keys:
                    if (
                        isinstance(state[key], Tensor)
                        and key in powers
                        and _alike(state[key], parameter)
                    ):
                        if powers[key]:
                            what = f"the state {key!r} of {name}"
                            # torch begins with the optimizer's own, whatever a group says
                            start = optimizer.defaults.get(STARTS.get((_kind(optimizer), key), ""))
                            moves.append(Move.of(what, state[key], factor, powers[key], start))
                    else:
                        shape = (
                            f" {tuple(state[key].shape)}" if isinstance(state[key], Tensor) else ""
                        )
                        unknown.append(
                            f"{type(optimizer).__name__} keeps state {key!r}{shape} "
                            f"for {name}, of unknown meaning"
                        )
    _refuse(aside, unknown)
    return Transport(moves=tuple(moves), resets=tuple(resets), reset_names=tuple(unmovable))


def _refuse(aside: list[str], unknown: list[str]) -> None:
    """Raise what an optimizer holds that cannot be moved along.

    Args:
        aside: What it keeps beside the state of each parameter.
        unknown: State of unknown meaning.
    """
    if not aside and not unknown:
        return
    advice = []
    if aside:
        advice.append(
            "What lies beside the state can be neither moved nor reset, and slow weights left as "
            "they are would change the function once they are written back: condition the model "
            "first and make the optimizer after that. Averages or slow weights that you know by "
            "the names of their parameters can move along: copies=[{name: tensor, ...}]."
        )
    if unknown:
        advice.append(
            'For state of unknown meaning pass optimizer_state="reset" to start it anew, or "keep" '
            "to leave it as it is. If you know how it scales with the gradient, add it to "
            "pathcond.rescaling.optimizer_state.POWERS."
        )
    raise MismatchError(
        "The model was not changed, because its optimizer state cannot be moved along:\n  - "
        + "\n  - ".join([*aside, *unknown][:10])
        + "\n"
        + "\n".join(advice)
    )


def _alike(state: Tensor, parameter: Tensor) -> bool:
    """Whether a state has an element for each of the parameter's, in this process too."""
    same = state.shape == parameter.shape and local(state).shape == local(parameter).shape
    return same and state.dtype.is_floating_point


def list_optimizers(optimizer: Optimizers | None) -> list[torch.optim.Optimizer]:
    """One optimizer, several or none, as a list."""
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    found = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    wrong = [type(item).__name__ for item in found if not isinstance(item, torch.optim.Optimizer)]
    if wrong or not found:
        raise TypeError(
            "optimizer must be a torch.optim.Optimizer or a list of them, not "
            f"{', '.join(wrong) or 'an empty list'}"
        )
    return found


def list_tensors(copies: Iterable[nn.Module | Mapping[str, Tensor]]) -> list[Tensor]:
    """The parameters of copies that are modules, the tensors of copies that are mappings."""
    held = (copy.parameters() if isinstance(copy, nn.Module) else copy.values() for copy in copies)
    return [tensor for tensors in held for tensor in tensors]


def require_own(
    optimizers: Iterable[torch.optim.Optimizer],
    model: nn.Module,
    copies: Iterable[nn.Module | Mapping[str, Tensor]] = (),
) -> dict[int, Tensor]:
    """Refuse optimizers of another model: each must hold a parameter of the model or of a copy of
    it.

    Returns:
        {id: parameter} of all that they hold, the model's or not.

    Raises:
        MismatchError: An optimizer holds none of the model's parameters.
    """
    own = {id(tensor) for tensor in [*model.parameters(), *list_tensors(copies)]}
    held: dict[int, Tensor] = {}
    for optimizer in optimizers:
        groups = [group for one in with_inner(optimizer) for group in one.param_groups]
        its = {id(parameter): parameter for group in groups for parameter in group["params"]}
        if own and own.isdisjoint(its):
            raise MismatchError(
                f"The optimizer {type(optimizer).__name__} holds none of the model's parameters; "
                "nothing was changed. "
                "Pass the one that trains this model; if it trains float32 masters, pass them by "
                "name: "
                "copies=[{name: master, ...}]."
            )
        held |= its
    return held


def _keepers(optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.optim.Optimizer]:
    """Of some optimizers and those inside, each that has state of its own, once; accelerate's shows
    the state of the one inside.
    """
    found = [one for outer in optimizers for one in with_inner(outer)]
    return [
        one
        for i, one in enumerate(found)
        if not any(one.state is other.state for other in found[i + 1 :])
    ]


def _kind(optimizer: torch.optim.Optimizer) -> str:
    """The class whose state an optimizer keeps: its own, or a base that is known and whose ``step``
    it has.
    """
    own: Any = type(optimizer)
    known = next((cls for cls in own.__mro__ if cls.__name__ in POWERS), own)
    same = own.__name__ in POWERS or inspect.unwrap(own.step) is inspect.unwrap(known.step)
    return known.__name__ if same else own.__name__


def _powers(optimizer: torch.optim.Optimizer) -> Mapping[str, int] | None:
    """{state: power} of an optimizer; None if it keeps what is not understood."""
    known = POWERS.get(_kind(optimizer))
    kept = _state_names(optimizer)
    if known is not None or not kept:
        return known or {}
    return (
        dict.fromkeys(kept, -1)
        if LION_LIKE.search(_kind(optimizer)) and len(kept) == 1 and kept <= AVERAGES
        else None
    )


def _state_names(optimizer: torch.optim.Optimizer) -> set[str]:
    """The names of all state that may scale."""
    return {
        key
        for state in _by_parameter(optimizer)
        for key, value in state.items()
        if not _is_plain(key, value)
    }


def _by_parameter(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The state of each parameter."""
    return [state for owner, state in optimizer.state.items() if isinstance(owner, Tensor)]


def _is_plain(key: str, value: Any) -> bool:
    """Counters, settings and what has not been set yet: nothing that scales."""
    single = not isinstance(value, Tensor) or value.dim() == 0
    return (
        (key in UNSCALED and single) or value is None or isinstance(value, (bool, int, float, str))
    )
