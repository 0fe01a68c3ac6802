"""The model collection: which models the library is tested on, and what is tested of each.

python -m tests.zoo --write docs/zoo.md [--jobs 2] [--only resnet]
python -m tests.zoo --names some.txt --rows rows.jsonl    # these, in the order of the file
python -m tests.zoo --small    # nearly all architectures of transformers, two layers of each
"""

from __future__ import annotations

import argparse
import json
import math
import os
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pathcond
from pathcond.capture.indices import as_on_cpu
from pathcond.capture.isolation import isolated
from pathcond.capture.models import as_call
from pathcond.capture.outputs import example_outputs, output_change
from pathcond.criteria.problem import Problem
from pathcond.lifting.lifting import capture_sample, off_path, path_energy
from pathcond.lifting.sample import Prepared, Sample
from pathcond.symmetry.captures import capture_all
from pathcond.symmetry.symmetry import Symmetry, symmetry_of
from pathcond_paper.origin import commit, is_as_at

from . import (
    small_transformers,
    torchvision_operators,  # noqa: F401  before anything imports torchvision
)

# Parts of the library that no examination runs.
NOT_EXAMINED = "advice.py cli integrations rates reference report teleporting.py theory.py".split()
NOT_EXAMINED_ON_CPU = ["capture/indices.py"]  # looks at calls before a GPU comes to them
# "batch" is "full" for networks whose norms have running statistics, and "absorb" for the others.
DEFAULT = "the default"  # of ``condition_``, beside the values of ``normalization``
NORMALIZATIONS = ("absorb", "gain", "full", "paper")
WITH_BATCH = (*NORMALIZATIONS, "batch")
TIMM_MODELS = (Path(__file__).parent / "timm_models.txt").read_text().split()

IMPORTED_ONCE = ["tests.torchvision_operators", "timm", "transformers", "torch.export", "pathcond"]

# Convolutional nets of timm also run on small images, which keeps the collection quick; these do
# not.
NEEDS_NATIVE_SIZE = (
    "halonet",
    "botnext",
    "bat_",
    "lambda",
    "inception",
    "nasnet",
    "hrnet",
    "xception",
    "coat",
    "maxvit",
)
LARGEST_CHANGE = 1e-9
LARGEST_RESIDUAL = 1e-8
LARGEST_MOVE = 1e-6
LAYERS = 2
TRAIN_ONLY_HEADS = ("googlenet", "inception_v3")


@dataclass(frozen=True)
class Entry:
    """A model of the collection: its name and how to build it with a batch of two."""

    name: str
    build: Callable[[], tuple[nn.Module, Any]]


@dataclass
class Result:
    """What was measured; changes are relative, in float64."""

    name: str
    parameters: int = 0
    units: dict[str, int] = field(default_factory=dict)
    eval_change: dict[str, float] = field(default_factory=dict)
    train_change: dict[str, float] = field(default_factory=dict)
    other_sizes: int = 0  # calls of another batch size, length or resolution that the model takes
    other_change: dict[str, float] = field(default_factory=dict)  # of eval outputs on them
    rounding_floor: float = 0.0
    energy_floor: float = 0.0
    residual: dict[str, float] = field(default_factory=dict)
    held: int = 0
    # greatest |log λ| of a second condition_, with the path kernel and by default
    moved_again: dict[str, float] = field(default_factory=dict)
    seconds_solve: float = 0.0
    # of g·d², which a rescaling by d must keep
    energy_change: dict[str, float] = field(default_factory=dict)
    energy_problem: str = ""
    # parameters outside the path lifting, and why
    off_path: dict[str, str] = field(default_factory=dict)
    zeros: int = 0  # elements of g that are zero in other parameters
    log10_paths: float = 0.0
    seconds_energy: float = 0.0
    seconds_capture: float = 0.0  # both modes
    seconds_search: float = 0.0
    environment: str = ""
    commit: str | None = None
    error: str = ""


def entries(*, size: int | None = None, layers: int = LAYERS) -> Iterator[Entry]:
    """All models; ``size`` is that of timm's images in place of each model's own, ``layers`` counts
    those of transformers.
    """
    yield from torchvision_entries()
    yield from timm_entries(size)
    yield from transformers_entries(layers)


def torchvision_entries() -> Iterator[Entry]:
    import torchvision

    def build(name: str) -> tuple[nn.Module, Tensor]:
        options = {"init_weights": False} if name in TRAIN_ONLY_HEADS else {}
        size = 224 if any(k in name for k in ("vit", "swin")) else 64
        size = 96 if name in ("alexnet", "googlenet") or name.startswith("squeezenet") else size
        size = 299 if name == "inception_v3" else size
        return torchvision.models.get_model(name, weights=None, **options), torch.randn(
            2, 3, size, size
        )

    for name in torchvision.models.list_models(module=torchvision.models):
        yield Entry(f"torchvision:{name}", lambda name=name: build(name))


def timm_entries(size: int | None = None) -> Iterator[Entry]:
    def build(name: str) -> tuple[nn.Module, Tensor]:
        import timm

        # positions are parameters there
        sized = {"img_size": size} if size is not None and "vit" in name else {}
        model = timm.create_model(name, pretrained=False, **sized)
        config = model.pretrained_cfg
        channels, height, width = config["input_size"]
        attention = any("attn" in module_name for module_name, _ in model.named_modules())
        if not (
            config.get("fixed_input_size")
            or attention
            or any(part in name for part in NEEDS_NATIVE_SIZE)
            or "s16" in name
        ):
            height = width = 96
        if size is not None:
            height = width = size
        return model, torch.randn(2, channels, height, width)

    for name in TIMM_MODELS:
        yield Entry(f"timm:{name}", lambda name=name: build(name))


def transformers_entries(layers: int = LAYERS) -> Iterator[Entry]:
    small = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "vocab_size": 50,
    }
    images = {
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "image_size": 32,
    }
    tokens = lambda: torch.randint(3, 50, (2, 7))  # noqa: E731
    pixels = lambda: torch.randn(2, 3, 32, 32)  # noqa: E731
    specs: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
        "opt": (
            "OPTConfig",
            "OPTForCausalLM",
            {
                "hidden_size": 32,
                "num_hidden_layers": layers,
                "ffn_dim": 64,
                "num_attention_heads": 4,
                "vocab_size": 50,
                "word_embed_proj_dim": 32,
                "max_position_embeddings": 32,
            },
            lambda: {"input_ids": tokens(), "use_cache": False},
        ),
        "t5": (
            "T5Config",
            "T5ForConditionalGeneration",
            {
                "d_model": 32,
                "d_kv": 8,
                "d_ff": 64,
                "num_layers": layers,
                "num_heads": 4,
                "vocab_size": 50,
                "decoder_start_token_id": 0,
            },
            lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(), "use_cache": False},
        ),
        "bert": ("BertConfig", "BertModel", small, lambda: {"input_ids": tokens()}),
        "gpt2": (
            "GPT2Config",
            "GPT2LMHeadModel",
            {"n_embd": 32, "n_layer": layers, "n_head": 4, "vocab_size": 50, "n_positions": 32},
            lambda: {"input_ids": tokens(), "use_cache": False},
        ),
        "llama": (
            "LlamaConfig",
            "LlamaForCausalLM",
            small | {"num_key_value_heads": 2},
            lambda: {"input_ids": tokens(), "use_cache": False},
        ),
        "vit": (
            "ViTConfig",
            "ViTForImageClassification",
            images | {"patch_size": 8},
            lambda: {"pixel_values": pixels()},
        ),
        "convnext": (
            "ConvNextConfig",
            "ConvNextForImageClassification",
            {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1]},
            lambda: {"pixel_values": pixels()},
        ),
        "resnet": (
            "ResNetConfig",
            "ResNetForImageClassification",
            {
                "embedding_size": 8,
                "hidden_sizes": [16, 32],
                "depths": [2, 2],
                "layer_type": "bottleneck",
            },
            lambda: {"pixel_values": pixels()},
        ),
        "distilbert": (
            "DistilBertConfig",
            "DistilBertModel",
            {"dim": 32, "n_layers": layers, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50},
            lambda: {"input_ids": tokens()},
        ),
        "mistral": (
            "MistralConfig",
            "MistralForCausalLM",
            small | {"num_key_value_heads": 2, "head_dim": 8},
            lambda: {"input_ids": tokens(), "use_cache": False},
        ),
        "qwen3": (
            "Qwen3Config",
            "Qwen3ForCausalLM",
            small | {"num_key_value_heads": 2, "head_dim": 8},
            lambda: {"input_ids": tokens(), "use_cache": False},
        ),
    }

    def build(
        config_name: str, model_name: str, options: dict[str, Any], inputs: Callable[[], dict]
    ) -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, config_name)(**options)
        return getattr(transformers, model_name)(config), inputs()

    for name, spec in specs.items():
        yield Entry(f"transformers:{name}", lambda spec=spec: build(*spec))


def small_entries() -> Iterator[Entry]:
    """A second collection, of small models."""
    for name in small_transformers.MODELS:
        yield Entry(f"small:{name}", partial(small_transformers.build, name))


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Statistics, gains and biases as after training, and nothing left at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(
                parameter.dtype
            )
            if parameter.dim() <= 1:
                parameter.copy_(
                    noise * 0.2 + (1.0 if "bias" not in name.rsplit(".", 1)[-1] else 0.1)
                )
            elif bool((parameter == 0).any()):
                parameter.add_(noise * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
            if name.endswith("num_batches_tracked"):
                buffer.fill_(1)


def settle(model: nn.Module, inputs: Any) -> None:
    """Statistics near those of the batch, so that activations and gates have the sizes of a trained
    model.
    """
    norms = [
        m
        for m in model.modules()
        if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_var is not None
    ]
    momenta = [norm.momentum for norm in norms]
    args, kwargs = as_call(inputs)
    with torch.no_grad(), isolated(model, training=True):
        for norm in norms:
            norm.momentum = 1.0
        model(*args, **kwargs)
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
            norm.running_mean += 0.3 * torch.randn_like(norm.running_mean) * norm.running_var.sqrt()
            norm.running_var.mul_(torch.rand_like(norm.running_var) + 0.5).clamp_(min=0.5)


def outputs(model: nn.Module, inputs: Any, *, training: bool) -> list[Tensor]:
    """Floating-point outputs; random draws repeat, statistics are left as they are."""
    torch.manual_seed(0)
    return example_outputs(model, inputs, {}, training=training)


def other_sizes(model: nn.Module, inputs: Any) -> list[Any]:
    """The same call at another batch size and, where the model takes it, another length or
    resolution.

    Sizes are others than those at which the library captures a model.
    """
    leaves, structure = torch.utils._pytree.tree_flatten(inputs)
    batch = max(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim())
    found = []
    # the first that the model takes of each: batch size, length, resolution
    for changes in (
        [lambda at, n: 5 if at == 0 and n == batch else n],
        [lambda at, n: 2 * n if at == 1 and n > 3 else n],
        [
            lambda at, n: n + n // 4 if at >= 2 and n > 3 else n,
            lambda at, n: 2 * n if at >= 1 and n > 3 else n,
        ],
    ):
        for change in changes:
            resized = [resize(x, change) if isinstance(x, Tensor) else x for x in leaves]
            if all(a is b for a, b in zip(leaves, resized, strict=True)):
                continue
            other = torch.utils._pytree.tree_unflatten(resized, structure)
            try:
                with as_on_cpu(model):
                    outputs(model, other, training=False)
            except Exception:  # whatever a model raises on sizes that it does not take
                continue
            found.append(other)
            break
    return found


def resize(tensor: Tensor, change: Callable[[int, int], int]) -> Tensor:
    """The tensor with every axis cut or repeated to a new size; the tensor itself if none
    changes.
    """
    for axis, size in enumerate(tensor.shape):
        new = change(axis, size)
        if new != size:
            tensor = tensor.index_select(axis, torch.arange(new, device=tensor.device) % size)
    return tensor


def as_double(inputs: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs
    )


def examine(
    entry: Entry, device: str = "cpu", again: Sequence[str] = (*NORMALIZATIONS, DEFAULT)
) -> Result:
    """Rescale a model by random log-scales in [-2, 2] under every normalization, and measure the
    outputs.

    Args:
        entry: The model.
        device: Where to.
        again: Under which values to condition it twice as users do.
    """
    result = Result(entry.name, environment=f"torch {torch.__version__}, {device}", commit=commit())
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = entry.build()
    model, inputs = model.double().eval(), as_double(inputs)
    randomise(model)
    model = model.to(device)
    inputs = torch.utils._pytree.tree_map(
        lambda x: x.to(device) if isinstance(x, Tensor) else x, inputs
    )
    settle(model, inputs)
    result.parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    captured = capture_all(model, inputs)
    result.seconds_capture = time.perf_counter() - start
    state = on_disk(model.state_dict())
    before = outputs(model, inputs, training=False)
    before_train = outputs(model, inputs, training=True)
    others = other_sizes(model, inputs)
    result.other_sizes = len(others)
    before_others = [outputs(model, other, training=False) for other in others]
    sample = capture_sample(model, inputs)
    diagonal = on_disk(examine_energy(model, sample, result))
    for normalization in NORMALIZATIONS:
        start = time.perf_counter()
        symmetry = symmetry_of(model, captured, normalization=normalization)
        result.seconds_search = max(result.seconds_search, time.perf_counter() - start)
        result.units[normalization] = symmetry.num_units
        log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
        pathcond.rescale_(model, symmetry, log_scales, verify=False)
        result.eval_change[normalization] = output_change(
            before, outputs(model, inputs, training=False)
        )
        pairs = zip(before_others, others, strict=True)
        changes = [
            output_change(expected, outputs(model, other, training=False))
            for expected, other in pairs
        ]
        result.other_change[normalization] = max(changes, default=math.nan)
        if normalization == "gain" or entry.name.endswith(TRAIN_ONLY_HEADS):
            result.train_change[normalization] = output_change(
                before_train, outputs(model, inputs, training=True)
            )
        rescaled = path_energy(model, sample).diagonal
        factors = symmetry.factors(log_scales)
        result.energy_change[normalization] = max(
            energy_change(diagonal[name].to(g), g, factors[name].to(g))
            for name, g in rescaled.items()
        )
        restore(model, state)
        condition_twice(model, symmetry, sample, diagonal, normalization, result)
        result.eval_change[f"{normalization}, conditioned"] = output_change(
            before, outputs(model, inputs, training=False)
        )
        restore(model, state)
        if normalization in again:
            result.moved_again[normalization] = moved_again(
                model,
                Prepared(symmetry=symmetry, sample=sample),
                criterion=pathcond.PathKernel(),
                normalization=normalization,
            )
            restore(model, state)
    if DEFAULT in again:
        symmetry = symmetry_of(model, captured, normalization="batch")
        prepared = Prepared(symmetry=symmetry, sample=sample)
        result.moved_again[DEFAULT] = moved_again(model, prepared)
        restore(model, state)
    changes = [
        *result.eval_change.values(),
        *result.other_change.values(),
        *result.energy_change.values(),
    ]
    if max(changes) > LARGEST_CHANGE:
        disturb(model)
        floors = [
            output_change(b, outputs(model, x, training=False))
            for b, x in zip([before, *before_others], [inputs, *others], strict=True)
        ]
        result.rounding_floor = max(floors)
        disturbed = path_energy(model, sample).diagonal
        result.energy_floor = max(
            energy_change(diagonal[name].to(g), g, torch.ones_like(g))
            for name, g in disturbed.items()
        )
    return result


def on_disk(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies that are read as they are asked for, on the CPU: those of a large model would not fit
    into memory beside it.
    """
    with tempfile.NamedTemporaryFile() as file:
        torch.save({name: tensor.detach().cpu() for name, tensor in tensors.items()}, file.name)
        # the file is gone when the last of them is
        copies: dict[str, Tensor] = torch.load(file.name, mmap=True)
    return copies


def restore(model: nn.Module, state: dict[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(state[name])


def condition_twice(
    model: nn.Module,
    symmetry: Symmetry,
    sample: Sample,
    g: dict[str, Tensor],
    normalization: str,
    result: Result,
) -> None:
    """Move the model to the optimum, and measure the gradient of F there afresh: conditioning twice
    must do nothing.

    Statistics are frozen. The only bound is that no running variance may become negative; units at
    it may not go on.
    """
    if not symmetry.num_units:
        return
    bounds = symmetry.log_scale_bounds(model, share=0.9)
    start = time.perf_counter()
    solution = pathcond.solve(
        symmetry, {name: values.cpu() for name, values in g.items()}, bounds=bounds
    )
    result.seconds_solve = max(result.seconds_solve, time.perf_counter() - start)
    pathcond.rescale_(model, symmetry, solution.log_scales, verify=False)
    moved = path_energy(model, sample).diagonal
    result.residual[normalization], held = residual_in_box(
        symmetry, moved, bounds, solution.log_scales
    )
    result.held = max(result.held, held)


def moved_again(model: nn.Module, prepared: Prepared, **options: Any) -> float:
    """The greatest |log λ| of a second ``condition_`` as users call it: bounded, with train outputs
    compared.
    """
    for _ in range(2):
        report = pathcond.condition_(model, prepared, describe=False, **options)
    moves = prepared.symmetry.class_matrix @ report.log_scales.cpu()
    return float(moves.abs().max()) if report.num_units else 0.0


def residual_in_box(
    symmetry: Symmetry, g: dict[str, Tensor], bounds: tuple[Tensor, Tensor], log_scales: Tensor
) -> tuple[float, int]:
    """The gradient of F per parameter, at 0, of a model that was moved by ``log_scales``, and how
    many units its box holds.

    Args:
        symmetry: Of the model.
        g: Of the moved model.
        bounds: The box before the move.
        log_scales: (num_units,).
    """
    room = [bound - log_scales.cpu() for bound in bounds]
    room = [torch.where(left.abs() < 1e-9, 0.0, left) for left in room]
    problem = Problem.of(symmetry, g, (room[0], room[1]))
    return problem.at(problem.zero()).residual, int(sum((left == 0).sum() for left in room))


def examine_energy(model: nn.Module, sample: Sample, result: Result) -> dict[str, Tensor]:
    """The diagonal of the model's path energy: finite, not negative, and zero only in parameters of
    which the reason is known.
    """
    start = time.perf_counter()
    diagonal = path_energy(model, sample).diagonal
    result.seconds_energy = time.perf_counter() - start
    result.off_path = off_path(model, sample)
    result.log10_paths = pathcond.log10_paths(model, sample)
    for name, g in diagonal.items():
        if not bool(g.isfinite().all()) or bool((g < 0).any()):
            result.energy_problem = f"g of {name} is negative or not finite"
        if name not in result.off_path:
            result.zeros += int((g == 0).sum())
            if not bool(g.any()):
                result.energy_problem = f"g of {name} is zero for no reason"
    return diagonal


def energy_change(g: Tensor, rescaled: Tensor, factor: Tensor) -> float:
    """Largest relative change of g·d², element by element; infinite where a zero comes or goes."""
    kept = rescaled * factor.square()
    if bool(((g == 0) != (kept == 0)).any()):
        return math.inf
    return (
        float(((kept - g).abs() / g.clamp(min=torch.finfo(g.dtype).tiny)).max())
        if g.numel()
        else 0.0
    )


def disturb(model: nn.Module) -> None:
    """Change the last bit of every weight: what that does to an output or an energy no exact
    rescaling can beat.
    """
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(
                1 + torch.finfo(parameter.dtype).eps * torch.randint_like(parameter, -1, 2)
            )


def failures(result: Result) -> list[str]:
    """Everything about a result that is not as it must be."""
    found = [result.error] if result.error else []
    if not result.other_sizes:
        found.append("runs at no other size")
    for normalization, change in [*result.eval_change.items(), *result.other_change.items()]:
        if not change <= max(LARGEST_CHANGE, 4 * result.rounding_floor):
            found.append(f"{normalization}: eval output changed by {change:.2g}")
    for normalization, change in result.energy_change.items():
        if not change <= max(LARGEST_CHANGE, 4 * result.energy_floor):
            found.append(f"{normalization}: path energy changed by {change:.2g}")
    for normalization, residual in result.residual.items():
        if not residual <= LARGEST_RESIDUAL:
            found.append(
                f"{normalization}: conditioning twice leaves a gradient of "
                f"{residual:.2g} per parameter"
            )
    found += [
        f"{how}: a second condition_ moves a log-scale by {move:.2g}"
        for how, move in result.moved_again.items()
        if not move <= LARGEST_MOVE
    ]
    found += [result.energy_problem] if result.energy_problem else []
    if not result.train_change.get("gain", 0.0) <= LARGEST_CHANGE:
        found.append(f"gain: train output changed by {result.train_change['gain']:.2g}")
    return found


def _examine_safely(name: str, device: str, threads: int) -> Result:
    torch.set_num_threads(threads)
    try:
        if name.startswith("small:"):
            entry = next(e for e in small_entries() if e.name == name)
            return examine(entry, device, again=(DEFAULT,))
        return examine(next(e for e in entries() if e.name == name), device)
    except Exception as error:
        return Result(
            name, error=f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}"
        )


def _made_with(result: Result) -> str:
    """The software that a model was examined with."""
    return f"{result.environment}, commit {(result.commit or 'not recorded')[:12]}"


def table(results: list[Result], left_out: Sequence[str] = ()) -> str:
    """The page docs/zoo.md.

    Args:
        results: Of the models that were run.
        left_out: Names of those that were not.
    """
    within = sum(max(r.eval_change.values(), default=math.nan) <= LARGEST_CHANGE for r in results)
    energy_within = sum(
        max(r.energy_change.values(), default=math.nan) <= LARGEST_CHANGE for r in results
    )
    sized = sum(max(r.other_change.values(), default=math.nan) <= LARGEST_CHANGE for r in results)
    twice = sum(max(r.residual.values(), default=0.0) <= LARGEST_RESIDUAL for r in results)
    where = "; ".join(
        f"{environment}: {count}"
        for environment, count in sorted(Counter(map(_made_with, results)).items())
    )
    lines = [
        "# Models that were tested",
        "",
        f"Written by `make zoo` (models of this table: {where}).",
        "Every model is rescaled by random log-scales in [-2, 2] in float64,",
        "with random BatchNorm statistics, gains and biases, once under each value of "
        "`normalization`. The change is the largest",
        "one of an eval output, relative to the largest output. Units are the free log-scales.",
        "",
        f"Of {len(results)} models {within} keep their eval outputs to 1e-9 under every value, "
        "and their train-mode outputs",
        "under `gain` (those with train-only heads too).",
        *([f"Not run, for want of memory or time: {', '.join(left_out)}."] if left_out else []),
        "",
        f"Other sizes: {sized} models also keep to 1e-9 on another batch size and, where they "
        "run on it, on another length or",
        "resolution than those at which they were captured.",
        "",
        "Path energy: g·d² is compared before and after each of these rescalings, element by "
        "element of diag(G), calibrated;",
        f"the largest relative change is in the table. {energy_within} models keep it to 1e-9. "
        "Parameters off path (gates' own",
        "branches, queries and keys, weights computed from other parameters) are those that "
        "`pathcond.lifting.off_path` lists.",
        "",
        "Conditioning twice: the gradient of the criterion, measured afresh at the optimum with "
        "frozen statistics, is at most",
        f"1e-8 per parameter under every value on {twice} models; the largest is in the table. "
        "`held` counts units that a running",
        "variance keeps from going on (it may not become negative). `again` is the greatest |log "
        "λ| of a second `condition_`, as",
        "users call it: with the path kernel under every value, within its bounds and with "
        "statistics as they are; and by",
        f"default, of {sum(DEFAULT in r.moved_again for r in results)} models.",
        "",
        "What exceeds 1e-9 is marked with *: such a model amplifies rounding. Disturbing the "
        "last bit of its weights alone does",
        "what is in brackets, and a rescaling at most four times that.",
        "",
        "| model | parameters | units absorb | gain | full | paper | largest change | at other "
        "sizes | log10 paths | off path "
        "| energy change | gradient at the optimum | held | again | capture s | search s | "
        "energy s | solve s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        change = max(r.eval_change.values(), default=math.nan)
        units = " | ".join(f"{r.units.get(n, 0):,}" for n in NORMALIZATIONS)
        note = f" **{failures(r)[0].splitlines()[0][:100]}**" if failures(r) else ""
        paths = f"{r.log10_paths:.1f} | {len(r.off_path):,}"
        shown = _beside_floor(change, r.rounding_floor)
        sizes = _beside_floor(max(r.other_change.values(), default=math.nan), r.rounding_floor)
        energy = _beside_floor(max(r.energy_change.values(), default=math.nan), r.energy_floor)
        seconds = (
            f"{r.seconds_capture:.1f} | {r.seconds_search:.1f} | {r.seconds_energy:.1f} | "
            f"{r.seconds_solve:.1f}"
        )
        again = max(r.moved_again.values(), default=0.0)
        optimum = f"{max(r.residual.values(), default=0.0):.0e} | {r.held:,} | {again:.0e}"
        lines.append(
            f"| {r.name}{note} | {r.parameters:,} | {units} | {shown} | {sizes} | {paths} | "
            f"{energy} | {optimum} | {seconds} |"
        )
    return "\n".join(lines) + "\n"


def _beside_floor(change: float, floor: float) -> str:
    return f"{change:.0e}" if change <= LARGEST_CHANGE else f"{change:.0e} * ({floor:.0e})"


def read_rows(path: Path) -> dict[str, Result]:
    """The last row of every model."""
    with path.open() as file:
        return {row["name"]: Result(**row) for row in map(json.loads, file)}


def is_current(result: Result) -> bool:
    """Whether the library does what it did then, as far as a model's examination shows."""
    but = (*NOT_EXAMINED,)
    if result.environment.endswith(", cpu"):
        but = (*but, *NOT_EXAMINED_ON_CPU)
    return _is_as_at(result.commit, but)


@cache
def _is_as_at(commit: str | None, but: tuple[str, ...]) -> bool:
    return is_as_at(commit, Path(pathcond.__file__).parent, but=but)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", help="Markdown file for the table")
    parser.add_argument(
        "--rows",
        help="JSON-lines file; models that are in it are not run again while the library is what "
        "it was then",
    )
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--names", help="file with the names of models to run, in this order")
    parser.add_argument("--small", action="store_true", help="the collection of small models")
    parser.add_argument(
        "--without", nargs="*", default=[], help="models to leave out; the page names them"
    )
    options = parser.parse_args()
    done: dict[str, Result] = {}
    if options.rows and os.path.exists(options.rows):
        done = read_rows(Path(options.rows))
    names = [
        entry.name
        for entry in (small_entries() if options.small else entries())
        if options.only in entry.name and entry.name not in options.without
    ]
    if options.names:
        names = [name for name in Path(options.names).read_text().split() if name in names]
    todo = [name for name in names if name not in done or not is_current(done[name])]
    # A worker that the system kills for its memory ends the run with an error; a Pool would wait.
    # Workers that take more than one task each may wait for each other (gh-115634 of Python).
    jobs = max(1, min(options.jobs, len(todo)))
    threads = max(1, len(os.sched_getaffinity(0)) // jobs)
    # forked from a process that has imported all that takes long, and has run nothing
    context = get_context("forkserver")
    context.set_forkserver_preload(IMPORTED_ONCE)
    with ProcessPoolExecutor(jobs, mp_context=context, max_tasks_per_child=1) as pool:
        runs = [pool.submit(_examine_safely, name, options.device, threads) for name in todo]
        for run in as_completed(runs):
            result = run.result()
            done[result.name] = result
            change = max(result.eval_change.values(), default=math.nan)
            energy = max(result.energy_change.values(), default=math.nan)
            twice = max(result.residual.values(), default=0.0)
            outside = f"{twice:.1e} {len(result.off_path)} off path, {result.zeros} zeros"
            print(
                f"{result.name}: {result.units} {change:.1e} {energy:.1e} {outside} "
                f"{'; '.join(failures(result))}",
                flush=True,
            )
            if options.rows:
                with open(options.rows, "a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    results = [done[name] for name in names]
    if options.write:
        with open(options.write, "w") as file:
            file.write(table(results, options.without))
    bad = [result.name for result in results if failures(result)]
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
