"""The errors of the library. Each that is about a model means: it is exactly what it was before the
call.
"""

from __future__ import annotations

from collections.abc import Sequence

MAX_REASONS = 10


class UnsupportedModelError(ValueError):
    """The model cannot be analysed; the message says what was found, where, and what to do.

    Attributes:
        place: The line of the model's code that decides by a value, where that is the reason.
    """

    def __init__(self, message: str = "", *, place: str = "") -> None:
        super().__init__(message)
        self.place = place


class HiddenError(UnsupportedModelError):
    """The model does what torch.export would not show: it must not be asked."""


class RescalingError(ValueError):
    """A rescaling was refused before the first write; the message lists the reasons."""


class MismatchError(RescalingError):
    """Model, Symmetry, optimizer or processes do not belong together: trying again will not
    help.
    """


class DivergedError(MismatchError):
    """Processes that should hold the same model do not; the message names the ranks."""


class EnergyRangeError(ArithmeticError):
    """Path energy leaves the range of float64; the message names the layer."""


class TrainChangeError(RescalingError):
    """Only the train-mode output would change by more than is allowed: milder scales in front of
    norms will do.
    """


class FailedRunsError(RuntimeError):
    """Some runs of an experiment have no result; the message names them, with the error of each."""


def refuse(reasons: Sequence[str]) -> None:
    """Refuse a rescaling for these reasons, of which the first ten are told; nothing happens where
    there are none.
    """
    if not reasons:
        return
    told = [*reasons[:MAX_REASONS]]
    if len(reasons) > MAX_REASONS:
        told.append(f"... and {len(reasons) - MAX_REASONS} more")
    raise RescalingError("The model was not changed, because\n  - " + "\n  - ".join(told))
