"""The seconds of one network, part by part and step by step: what ``timing`` runs.

What is measured of a network, its *part*, after a warm-up and with the device idle at both ends of
every step:

epoch     plain SGD on random images of CIFAR's size that lie on the device; from a number of steps
whole     the path kernel's optimum by ``condition_``, with the captures of the model
exact     the same on a model that is prepared
paper     the paper's four steps and ten sweeps, prepared; nothing is verified
box       the same as the algorithm box has it, one neuron after the other; from one sweep
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pathcond.condition import condition_, prepare
from pathcond.criteria.criterion import PathKernel
from pathcond.lifting.lifting import diag_g
from pathcond.lifting.sample import Prepared
from pathcond.networks import cifar_nv, mlp, resnet18_c
from pathcond.reference import Connectivity, box_sweeps
from pathcond.rescaling.rescale import rescale_
from pathcond.rows import Job, Result

from ..training.methods import AS_IN_PAPER

SWEEPS = 10
WARM_UPS = 2  # steps of training


class Stopwatch:
    """Seconds by step; it waits for the device between two of them, so that none pays for another.

    >>> watch = Stopwatch(torch.device("cpu"))
    >>> watch("solve")
    >>> sorted(watch.stop())
    ['solve']
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.seconds = dict[str, float]()
        self.step = ""
        self.start = 0.0

    def __call__(self, step: str) -> None:
        """End the step at work and begin the next."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.step:
            self.seconds[self.step] = self.seconds.get(self.step, 0.0) + now - self.start
        self.step = step
        self.start = now

    def stop(self) -> dict[str, float]:
        """End the step at work; the seconds of all."""
        self("")
        return self.seconds


class Network:
    """A network on its device, with images, prepared for both normalizations and warmed up."""

    def __init__(self, job: Job, device: torch.device) -> None:
        torch.manual_seed(0)
        self.job = job
        self.device = device
        self.pixels = torch.randint(
            0, 256, (job["images"], 3, 32, 32), dtype=torch.uint8, device=device
        )
        self.labels = torch.randint(0, 10, (job["images"],), device=device)
        self.batch = _normalise(self.pixels[: job["batch"]])
        self.model = self._fresh(0)
        self.exact = prepare(self.model, self.batch, normalization="absorb")
        self.paper = prepare(self.model, self.batch, normalization="paper")
        self._exact(self.exact)
        self._paper()

    def measure(self, job: Job) -> Result:
        """Seconds by step of one part."""
        self.model.load_state_dict(self._fresh(job["repetition"]).state_dict())
        parts: dict[str, Callable[[], Result]] = {
            "epoch": lambda: self._epoch(job["repetition"]),
            "whole": lambda: self._exact(self.batch),
            "exact": lambda: self._exact(self.exact),
            "paper": self._paper,
            "box": self._box,
        }
        size = {
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "threads": torch.get_num_threads(),
        }
        return size | parts[job["part"]]()

    def _fresh(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        with self.device:
            return network_of(self.job)

    def _epoch(self, seed: int) -> Result:
        """Seconds of a step, times the steps of an epoch."""
        batch = self.job["batch"]
        total = math.ceil(len(self.pixels) / self.job["batch"])
        steps = min(self.job["steps"], total)
        model = self._fresh(seed).train()  # gradients of its own
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        order = torch.randperm(len(self.pixels), device=self.device)
        watch = Stopwatch(self.device)
        for step in range(-min(WARM_UPS, steps), steps):
            if step == 0:
                watch("epoch")
            rows = order[max(step, 0) * batch :][:batch]
            optimizer.zero_grad()
            F.cross_entropy(model(_normalise(self.pixels[rows])), self.labels[rows]).backward()
            optimizer.step()
        seconds = watch.stop()["epoch"] * total / steps
        return {"seconds": {"epoch": seconds}, "epoch_steps": total, "epoch_steps_measured": steps}

    def _exact(self, inputs: Tensor | Prepared) -> Result:
        watch = Stopwatch(self.device)
        watch("symmetry")
        condition_(
            self.model, inputs, criterion=PathKernel(), normalization="absorb", progress=watch
        )
        return {"seconds": watch.stop()}

    def _paper(self) -> Result:
        watch = Stopwatch(self.device)
        options = dict[str, Any](AS_IN_PAPER)
        watch("symmetry")
        condition_(self.model, self.paper, verify=False, describe=False, progress=watch, **options)
        return {"seconds": watch.stop()}

    def _box(self) -> Result:
        """The sweeps cost the same each: one is measured, and counts for all."""
        watch = Stopwatch(self.device)
        symmetry = self.paper.symmetry
        watch("energy")
        g = diag_g(self.model, self.paper.sample, calibrate=False)
        watch("symmetry")
        connectivity = Connectivity.of(symmetry, g)
        watch("solve")
        u = next(box_sweeps(connectivity))
        watch("rescale")
        rescale_(self.model, symmetry, u / 2, verify=False)
        seconds = watch.stop()
        return {
            "seconds": seconds | {"solve": seconds["solve"] * SWEEPS},
            "sweeps": SWEEPS,
            "sweeps_measured": 1,
        }


def network_of(job: Job) -> nn.Module:
    """The network of a job, with random weights."""
    if job["network"] == "mlp":
        return mlp((job["width"],) * job["depth"], batch_norm=True)
    return {"cifar-nv": cifar_nv, "resnet18-c": resnet18_c}[job["network"]]()


def _normalise(pixels: Tensor) -> Tensor:
    return (pixels.float() / 255 - 0.5) / 0.25
