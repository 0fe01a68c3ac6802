"""Networks as each method wants them before the first step."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from pathcond.condition import condition_, prepare
from pathcond.lifting.sample import Prepared
from pathcond.rescaling.rescale import rescale_
from pathcond.symmetry.symmetry import Symmetry

from .lsuv import lsuv_
from .methods import Method
from .recipe import Recipe


@dataclass(kw_only=True)
class Start:
    """A network before its first step.

    Attributes:
        model: The network.
        log_scales: What it was rescaled by, group by group of its units.
        rate_factors: What the learning rates of its parameters are multiplied by, if anything.
    """

    model: nn.Module
    log_scales: list[Tensor] = field(default_factory=list)
    rate_factors: dict[str, Tensor] | None = None

    def describe_scales(self) -> dict[str, Any]:
        """Greatest and mean log-scales, for the curves."""
        return {
            "max_log_scale": max((float(s.abs().max()) for s in self.log_scales), default=0.0),
            "layer_scales": [float(s.mean()) for s in self.log_scales],
        }


class Starts:
    """The networks of one recipe, by method and seed: conditioned once for all learning rates, and
    captured once for all seeds.

    Args:
        recipe: What to build, and the methods.
        example: One batch.
    """

    def __init__(self, recipe: Recipe, example: Tensor) -> None:
        self.recipe = recipe
        self.example = example
        self._prepared: dict[str, Prepared] = {}
        self._started: dict[tuple[str, int], Start] = {}

    def of(self, method: str, seed: int) -> Start:
        """The network of a run; not to be changed."""
        if (method, seed) not in self._started:
            self._started[method, seed] = self._make(self.recipe.methods[method], seed)
        return self._started[method, seed]

    def prepare_for(self, method: Method) -> Prepared:
        """The captured architecture, as the method rescales it."""
        normalization: Any = method.normalization or "absorb"
        if normalization not in self._prepared:
            self._prepared[normalization] = prepare(
                self._build(0),
                self.example,
                normalization=normalization,
                approximate=self.recipe.approximate,
            )
        return self._prepared[normalization]

    def _build(self, seed: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.recipe.build().to(self.example.device)

    def _make(self, method: Method, seed: int) -> Start:
        model = self._build(seed)
        as_built = copy.deepcopy(model) if method.as_rates else model
        if method.data_dependent:
            lsuv_(model, self.example, seed=seed)
        if method.normalization is None or method.starts_as_is:
            return Start(model=model)
        symmetry = self.prepare_for(method).symmetry
        log_scales = self._rescale(model, method)
        by_group = [log_scales[list(group.units)] for group in symmetry.groups]
        if not method.as_rates:
            return Start(model=model, log_scales=by_group)
        factors = _rate_factors(as_built, symmetry, log_scales)
        return Start(model=as_built, log_scales=by_group, rate_factors=factors)

    def _rescale(self, model: nn.Module, method: Method) -> Tensor:
        """Rescale a model as a method does; returns the log-scales, (num_units,), on the CPU."""
        prepared = self.prepare_for(method)
        symmetry = prepared.symmetry
        if method.condition is not None:
            approximate = self.recipe.approximate
            report = condition_(model, prepared, approximate=approximate, **method.condition)
            return report.log_scales.cpu()
        log_scales = torch.zeros(symmetry.num_units, dtype=torch.float64)
        if method.rescaling is not None:
            log_scales = method.rescaling(model, prepared)
        for group, scale in zip(symmetry.groups, method.layer_scales or (), strict=False):
            log_scales[list(group.units)] = scale
        rescale_(model, symmetry, log_scales, verify=False)
        return log_scales


def _rate_factors(model: nn.Module, symmetry: Symmetry, log_scales: Tensor) -> dict[str, Tensor]:
    """d⁻² of every parameter: a step on dθ with the rate η is one on θ with η d⁻²."""
    factors = symmetry.factors(log_scales)
    return {
        name: factors[name].to(parameter).pow(-2).expand_as(parameter)
        if name in factors
        else torch.ones_like(parameter)
        for name, parameter in model.named_parameters()
    }
