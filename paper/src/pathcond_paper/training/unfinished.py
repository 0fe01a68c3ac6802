"""Trainings that were stopped: what they had come to, so that the same command goes on from there.

A state is used only by the code that wrote it: the same runs, commit, versions and device. Any
other training begins anew, and so does one of a checkout with changes, of which nobody knows
whether they are the same.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pathcond.rows import Job

from ..figure import Place
from ..origin import CHANGED, origin

INTERVAL = 60.0  # seconds between two states of a training

State = dict[str, Any]


class Unfinished:
    """The last state of one training, in a file.

    Args:
        jobs: The runs that are trained together.
        place: Where; without a folder for states nothing is kept.
    """

    def __init__(self, jobs: Sequence[Job], place: Place) -> None:
        made_by = {key: value for key, value in origin(place.device).items() if key != "date"}
        self.path: Path | None = None
        if place.unfinished and not str(made_by["commit"]).endswith(CHANGED):
            belongs_to = json.dumps([list(jobs), made_by], sort_keys=True)
            name = hashlib.sha256(belongs_to.encode()).hexdigest()
            self.path = place.unfinished / f"{name[:32]}.pt"
        self._since = time.monotonic()

    def load(self) -> State | None:
        """The state that was kept last; None to begin anew."""
        if self.path is None or not self.path.exists():
            return None
        try:
            state: State = torch.load(self.path, map_location="cpu", weights_only=True)
        except Exception:  # damaged, in whatever way: it only costs time
            return None
        return state

    def keep(self, state: Callable[[], State]) -> None:
        """Write the state if the last one is old enough. A stop meanwhile leaves the last one, and
        so does a full disk, which is no reason to stop.
        """
        if self.path is None or time.monotonic() - self._since < INTERVAL:
            return
        self._since = time.monotonic()
        begun = self.path.with_suffix(".part")
        try:
            begun.parent.mkdir(parents=True, exist_ok=True)
            torch.save(state(), begun)
            begun.replace(self.path)
        except (OSError, RuntimeError):  # the latter is what torch makes of a full disk
            begun.unlink(missing_ok=True)

    def remove(self) -> None:
        """Once the results are there."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path.with_suffix(".part").unlink(missing_ok=True)
