"""What is compared at tuned learning rates: methods, and the networks that they are tried on.

Networks that are marked as held out take no part in any choice, such as that of the default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from pathcond.criteria.criterion import Criterion, PathKernel
from pathcond.criteria.norms import BalancedNorms
from pathcond.measured.curvature import Curvature
from pathcond.measured.layers import BalancedLayers
from pathcond.networks import cifar_nv, mlp

from ..figure import Preset
from ..training.candidates import Moments, activations, between, blend, bound, by_rank, minimise
from ..training.methods import AS_IN_PAPER, Method
from ..training.networks import LanguageModel, VisionTransformer, resnet20
from ..training.optimizers import Schedule
from ..training.recipe import Recipe, Task

SEARCHED = ("searched", "searched-rates")
BY_SIZE = Curvature(weight="size")
BY_OUTPUTS = BalancedLayers(share=0.0, front=1.0)


def _by(criterion: Criterion, normalization: str) -> dict[str, Any]:
    """Arguments of ``condition_``."""
    return {"criterion": criterion, "normalization": normalization}


METHODS: dict[str, Method] = {
    "as-is": Method(title="as is"),
    "paper": Method(title="ten sweeps, as in the paper", condition=AS_IN_PAPER),
    "kernel-paper": Method(title="path kernel, exact, paper", condition=_by(PathKernel(), "paper")),
    "kernel-absorb": Method(
        title="path kernel, exact, absorb", condition=_by(PathKernel(), "absorb")
    ),
    "kernel-gain": Method(title="path kernel, exact, gain", condition=_by(PathKernel(), "gain")),
    "kernel-full": Method(title="path kernel, exact, full", condition=_by(PathKernel(), "full")),
    "keep": Method(
        title="path kernel, full, pace kept",
        condition=_by(PathKernel(), "full") | {"pace": "keep"},
    ),
    "curvature": Method(title="curvature, full", condition=_by(Curvature(), "full")),
    "curvature-more": Method(
        title="curvature of 128 samples, full", condition=_by(Curvature(samples=128), "full")
    ),
    "curvature-by-size": Method(title="curvature by size, full", condition=_by(BY_SIZE, "full")),
    "curvature-by-rank": Method(title="curvature by rank as it stands, full", rescaling=by_rank()),
    "moments": Method(title="curvature by moments, full", condition=_by(Moments(), "full")),
    "frobenius": Method(
        title="curvature by Frobenius norms, full", condition=_by(Moments(root=True), "full")
    ),
    "norms": Method(title="balanced norms, full", condition=_by(BalancedNorms(), "full")),
    "norms-gain": Method(title="balanced norms, gain", condition=_by(BalancedNorms(), "gain")),
    "norms-by-outputs": Method(
        title="balanced norms by outputs, full", condition=_by(BY_OUTPUTS, "full")
    ),
    "activations": Method(
        title="activations of one size, full", rescaling=activations(0, by_unit=False)
    ),
    "norms-activations": Method(
        title="a quarter from norms to activations",
        rescaling=between(minimise(BalancedNorms()), activations(1, by_unit=False), 0.25),
    ),
    "outputs-activations": Method(
        title="a quarter from outputs to activations",
        rescaling=between(minimise(BY_OUTPUTS), activations(0, by_unit=False), 0.25),
    ),
    "layers-batch": Method(
        title="balanced layers, batch", condition=_by(BalancedLayers(), "batch")
    ),
    "layers-absorb": Method(
        title="balanced layers, absorb, fronts at a third",
        condition=_by(BalancedLayers(front=1 / 3), "absorb"),
    ),
    "layers-absorb-front": Method(
        title="balanced layers, absorb, fronts at norm one",
        condition=_by(BalancedLayers(front=1.0), "absorb"),
    ),
    "layers-gain": Method(title="balanced layers, gain", condition=_by(BalancedLayers(), "gain")),
    "layers": Method(
        title="balanced layers, full, fronts at a third",
        condition=_by(BalancedLayers(front=1 / 3), "full"),
    ),
    "layers-front": Method(
        title="balanced layers, full, fronts at norm one",
        condition=_by(BalancedLayers(front=1.0), "full"),
    ),
    "teleport": Method(
        title="balanced norms, again after an epoch",
        condition=_by(BalancedNorms(), "full"),
        teleports=True,
    ),
    "default-teleport": Method(
        title="the default, again after an epoch", condition={}, teleports=True
    ),
    "default-later": Method(
        title="the default after an epoch, not before",
        condition={},
        teleports=True,
        starts_as_is=True,
    ),
    "blend": Method(title="half curvature, half norms, full", rescaling=blend()),
    "bound": Method(title="curvature × squared norm, full", rescaling=bound(BY_SIZE)),
    "bound-kernel": Method(title="path kernel × squared norm, full", rescaling=bound(PathKernel())),
    "lsuv": Method(title="LSUV (another function)", data_dependent=True),
    "searched": Method(title="searched, one scale per layer"),
    "searched-rates": Method(title="the same as rates of parameters", as_rates=True),
}
# Without normalization layers these are "kernel-full", "norms" and "layers".
NEED_A_NORM = (
    "kernel-paper",
    "kernel-absorb",
    "kernel-gain",
    "norms-gain",
    "layers-absorb",
    "layers-absorb-front",
    "layers-gain",
    "layers-front",
    "layers-batch",
)
# Teleports move no state here, and rates of parameters are the same for plain SGD alone.
NEED_PLAIN_SGD = ("teleport", "default-teleport", "default-later", "searched-rates")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A network, what it is trained on, and how.

    Attributes:
        title: For tables.
        build: Makes the network.
        dataset: Its name.
        task, optimizer, schedule, weight_decay, augment, epochs, batch: As in ``Recipe``.
        rates: The grid of learning rates.
        normed: Whether it has normalization layers.
        candidates: Of the search, in each of its rounds; 0 for none.
        held_out: Whether it is kept from every choice.
        train, test: Numbers of samples, None for all.
        at_once: How many runs are trained together; convolutions run one by one.
        bfloat16: As in ``Recipe``.
        methods: Which are tried; None for all that make a difference.
    """

    title: str
    build: Callable[[], nn.Module]
    dataset: str
    task: Task = "classify"
    optimizer: str = "sgd"
    schedule: Schedule = "cosine"
    weight_decay: float = 0.0
    augment: bool = False
    epochs: int = 10
    batch: int = 128
    rates: Sequence[float]
    normed: bool = False
    candidates: int = 0
    held_out: bool = False
    train: int | None = None
    test: int | None = None
    at_once: int = 700
    bfloat16: bool = False
    methods: Sequence[str] | None = None

    def list_methods(self) -> list[str]:
        """The methods that are compared."""
        left_out = set(() if self.normed else NEED_A_NORM)
        left_out |= set() if self.candidates else set(SEARCHED)
        left_out |= set() if self.optimizer == "sgd" else set(NEED_PLAIN_SGD)
        names = METHODS if self.methods is None else self.methods
        return [name for name in names if name not in left_out]

    def recipe(self, methods: Mapping[str, Method]) -> Recipe:
        """How to train."""
        return Recipe(
            build=self.build,
            epochs=self.epochs,
            batch=self.batch,
            task=self.task,
            optimizer=self.optimizer,
            schedule=self.schedule,
            weight_decay=self.weight_decay,
            augment=self.augment,
            bfloat16=self.bfloat16,
            methods=methods,
            teleport_times=1,
        )


def _powers(lowest: int, highest: int) -> tuple[float, ...]:
    """Powers of two.

    >>> _powers(-2, 1)
    (0.25, 0.5, 1.0, 2.0)
    """
    return tuple(2.0**k for k in range(lowest, highest + 1))


SMALL = partial(mlp, (112, 16, 112), inputs=784, outputs=784)
DEEP = partial(mlp, (1000, 500, 250, 30, 250, 500, 1000), inputs=784, outputs=784)
DIGITS = partial(mlp, (9, 2, 9), inputs=64, outputs=64)
TRANSFORMERS = (
    "as-is",
    "kernel-absorb",
    "kernel-full",
    "keep",
    "curvature",
    "norms",
    "norms-by-outputs",
    "norms-activations",
    "outputs-activations",
    "layers-batch",
    "layers-absorb",
    "layers-absorb-front",
    "layers-gain",
    "layers",
    "layers-front",
    "lsuv",
)
# The published conventions have none for attention. Beside LayerNorms "paper" frees what "absorb"
# does, and "gain" what "full" does.
CONVOLUTIONS = (*TRANSFORMERS, "paper", "kernel-paper", "kernel-gain")


def _autoencoder(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return Setting(title=title, build=build, dataset="mnist", task="reconstruct", **options)


def _images(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return Setting(title=title, build=build, dataset="cifar10", augment=True, **options)


def _convolutions(title: str, build: Callable[[], nn.Module], **options: Any) -> Setting:
    return _images(
        title,
        build,
        optimizer="momentum",
        weight_decay=5e-4,
        epochs=6,
        normed=True,
        at_once=1,
        bfloat16=True,
        methods=CONVOLUTIONS,
        **options,
    )


SETTINGS: dict[str, Setting] = {
    "ae-sgd": _autoencoder(
        "autoencoder 784-112-16, SGD", SMALL, rates=_powers(-4, 9), candidates=384
    ),
    "ae-adam": _autoencoder(
        "autoencoder 784-112-16, Adam",
        SMALL,
        optimizer="adamw",
        rates=_powers(-13, -1),
        candidates=384,
    ),
    "deep-ae-sgd": _autoencoder(
        "autoencoder 784-1000-500-250-30, SGD", DEEP, rates=_powers(-4, 9), candidates=256
    ),
    "deep-ae-momentum": _autoencoder(
        "autoencoder 784-1000-500-250-30, momentum",
        DEEP,
        optimizer="momentum",
        rates=_powers(-7, 6),
        candidates=256,
    ),
    "deep-ae-adam": _autoencoder(
        "autoencoder 784-1000-500-250-30, Adam",
        DEEP,
        optimizer="adamw",
        rates=_powers(-15, -3),
        candidates=256,
    ),
    "mlp-bn-sgd": _images(
        "MLP with BatchNorm 3 × 500, SGD",
        partial(mlp, batch_norm=True),
        rates=_powers(-10, 3),
        normed=True,
        candidates=256,
    ),
    "mlp-sgd": _images("MLP 3 × 500, SGD", mlp, rates=_powers(-10, 2), candidates=256),
    "funnel-momentum": _images(
        "MLP 1000-300-100-30, momentum",
        partial(mlp, (1000, 300, 100, 30)),
        optimizer="momentum",
        rates=_powers(-13, -1),
        candidates=256,
        held_out=True,
    ),
    "cifar-ae-adam": Setting(
        title="autoencoder 3072-512-64 on CIFAR-10, Adam",
        build=partial(mlp, (512, 64, 512), outputs=3072),
        dataset="cifar10",
        task="reconstruct",
        optimizer="adamw",
        rates=_powers(-15, -3),
        candidates=256,
        held_out=True,
    ),
    "cifar-nv": _convolutions(
        "CIFAR-NV, momentum", partial(cifar_nv, bias=True), rates=_powers(-13, -2)
    ),
    "cifar-nv-norm": _convolutions(
        "CIFAR-NV with a last BatchNorm, momentum",
        partial(cifar_nv, final_norm=True),
        rates=_powers(-11, 0),
    ),
    "resnet20": _convolutions("ResNet-20, momentum", resnet20, rates=_powers(-9, 2)),
    "vit": _images(
        "vision transformer, AdamW",
        VisionTransformer,
        optimizer="adamw",
        weight_decay=0.05,
        schedule="warm-up and cosine",
        rates=_powers(-13, -4),
        normed=True,
        methods=TRANSFORMERS,
        at_once=40,
    ),
    "language-model": Setting(
        title="language model, AdamW",
        build=LanguageModel,
        dataset="python-help",
        optimizer="adamw",
        weight_decay=0.1,
        schedule="warm-up and cosine",
        batch=32,
        epochs=10,
        rates=_powers(-13, -4),
        normed=True,
        methods=TRANSFORMERS,
        at_once=120,
        held_out=True,
    ),
}
QUICK: dict[str, Setting] = {
    "digits-ae-sgd": Setting(
        title="digits autoencoder 64-9-2, SGD",
        build=DIGITS,
        dataset="digits",
        task="reconstruct",
        epochs=20,
        batch=64,
        rates=_powers(-3, 6),
        candidates=64,
    ),
    "digits-bn-momentum": Setting(
        title="digits MLP with BatchNorm 32-8, momentum",
        build=partial(mlp, (32, 8), inputs=64, batch_norm=True),
        dataset="digits",
        optimizer="momentum",
        epochs=10,
        batch=64,
        rates=_powers(-9, 1),
        normed=True,
    ),
}
SMOKE = {
    f"smoke-{name}": replace(
        setting, epochs=2, rates=setting.rates[4:7], candidates=min(setting.candidates, 8)
    )
    for name, setting in QUICK.items()
}
BY_PRESET: dict[Preset, Mapping[str, Setting]] = {"smoke": SMOKE, "cpu": QUICK, "paper": SETTINGS}


def setting_of(name: str) -> Setting:
    """Of whichever preset it is."""
    return {**SETTINGS, **QUICK, **SMOKE}[name]
