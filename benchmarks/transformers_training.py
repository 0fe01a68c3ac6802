"""Does conditioning hurt? Small transformers, 100 steps of SGD and AdamW, as they are and
conditioned.

    python -m benchmarks.transformers_training [--only vit] [--steps 100] [--rate 1e-3] [--out FILE]

Each model is built from its configuration (hidden size 32, 2 layers) with the weights that it
starts from, so that tokens and positions that start at zero do. The loss is the mean square of all
outputs against fixed random targets, in eval mode (no dropout), on one batch. Everything is trained
at one learning rate. ``ratio`` is the last loss over that of the model as it is; ``again`` is the
greatest |log λ| of a second call, which must do nothing.
"""

from __future__ import annotations

import argparse
import copy
import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from tests import torchvision_operators  # noqa: F401  before anything imports torchvision
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from pathcond import BalancedLayers, PathKernel, condition_

from .measuring import write

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}
TEXT = SMALL | {"vocab_size": 50}
IMAGES = SMALL | {"image_size": 32, "patch_size": 8}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adamw": torch.optim.AdamW,
}
WAYS: dict[str, dict[str, Any]] = {
    "paths": {"criterion": PathKernel()},
    "paths, full": {"criterion": PathKernel(), "normalization": "full"},
    "layers": {"criterion": BalancedLayers()},
    "layers, full": {"normalization": "full", "criterion": BalancedLayers()},
}


def tokens() -> dict[str, Any]:
    return {"input_ids": torch.randint(3, 50, (4, 7))}


def generated() -> dict[str, Any]:
    return tokens() | {"use_cache": False}


def pixels() -> dict[str, Any]:
    return {"pixel_values": torch.randn(4, 3, 32, 32)}


# {name: (configuration, model, options, inputs)}
MODELS: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "ffn_dim": 64,
            "num_attention_heads": 4,
            "vocab_size": 50,
            "word_embed_proj_dim": 32,
            "max_position_embeddings": 32,
        },
        generated,
    ),
    "t5": (
        "T5Config",
        "T5ForConditionalGeneration",
        {
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 50,
            "decoder_start_token_id": 0,
        },
        lambda: generated() | {"decoder_input_ids": torch.randint(3, 50, (4, 7))},
    ),
    "bert": ("BertConfig", "BertModel", TEXT, tokens),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 4,
            "vocab_size": 50,
            "n_positions": 32,
            "bos_token_id": 0,
            "eos_token_id": 0,
        },
        generated,
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", TEXT | {"num_key_value_heads": 2}, generated),
    "vit": ("ViTConfig", "ViTForImageClassification", IMAGES, pixels),
    "distilbert": (
        "DistilBertConfig",
        "DistilBertModel",
        {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50},
        tokens,
    ),
    "mistral": (
        "MistralConfig",
        "MistralForCausalLM",
        TEXT | {"num_key_value_heads": 2, "head_dim": 8},
        generated,
    ),
    "qwen3": (
        "Qwen3Config",
        "Qwen3ForCausalLM",
        TEXT | {"num_key_value_heads": 2, "head_dim": 8},
        generated,
    ),
    "yolos": (
        "YolosConfig",
        "YolosForObjectDetection",
        SMALL | {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 4},
        pixels,
    ),
    "rwkv": (
        "RwkvConfig",
        "RwkvForCausalLM",
        {
            "vocab_size": 50,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "attention_hidden_size": 32,
            "intermediate_size": 64,
            "context_length": 16,
        },
        generated,
    ),
    "ast": (
        "ASTConfig",
        "ASTForAudioClassification",
        SMALL
        | {
            "patch_size": 4,
            "frequency_stride": 4,
            "time_stride": 4,
            "max_length": 16,
            "num_mel_bins": 8,
        },
        lambda: {"input_values": torch.randn(4, 16, 8)},
    ),
    "clip": ("CLIPVisionConfig", "CLIPVisionModel", IMAGES, pixels),
    "blip": ("BlipVisionConfig", "BlipVisionModel", IMAGES, pixels),
    "vitmae": (
        "ViTMAEConfig",
        "ViTMAEModel",
        IMAGES | {"mask_ratio": 0.0},
        lambda: pixels() | {"noise": torch.rand(4, 16)},
    ),
    "timesformer": (
        "TimesformerConfig",
        "TimesformerModel",
        IMAGES | {"num_frames": 2},
        lambda: {"pixel_values": torch.randn(4, 2, 3, 32, 32)},
    ),
    "deit": ("DeiTConfig", "DeiTForImageClassification", IMAGES, pixels),
    "sam": (
        "SamVisionConfig",
        "SamVisionModel",
        {
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "mlp_dim": 64,
            "image_size": 32,
            "patch_size": 8,
            "output_channels": 16,
            "window_size": 2,
            "global_attn_indexes": [1],
        },
        pixels,
    ),
}


def build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """A model of the list in eval mode, and a batch."""
    import transformers

    configuration, model, options, inputs = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, model)(getattr(transformers, configuration)(**options)).eval()
    torch.manual_seed(1)
    return made, inputs()


def outputs(model: nn.Module, inputs: dict[str, Any]) -> list[Tensor]:
    """All outputs that depend on the weights."""
    found = model(**inputs)
    leaves = tree_leaves(found.to_tuple() if hasattr(found, "to_tuple") else found)
    return [x for x in leaves if isinstance(x, Tensor) and x.requires_grad]


def losses(
    model: nn.Module, inputs: dict[str, Any], optimizer: str, rate: float = 1e-3, steps: int = 100
) -> list[float]:
    """The loss before every step and after the last one; it ends early where it is no longer
    finite.
    """
    generator = torch.Generator().manual_seed(7)
    targets = [torch.randn(x.shape, generator=generator) for x in outputs(model, inputs)]
    stepper = OPTIMIZERS[optimizer](model.parameters(), lr=rate)
    found: list[float] = []
    for _ in range(steps + 1):
        loss = torch.stack(
            [(x - y).square().mean() for x, y in zip(outputs(model, inputs), targets, strict=True)]
        ).sum()
        found.append(float(loss))
        if not math.isfinite(found[-1]):
            break
        stepper.zero_grad()
        loss.backward()
        stepper.step()
    return found


def measure(name: str, rate: float, steps: int) -> dict[str, Any]:
    """One row: the model as it is, and conditioned in each of the ways."""
    try:
        model, inputs = build(name)
    except Exception as error:
        return {"name": name, "not built": f"{type(error).__name__}: {error}"}
    plain = {o: losses(copy.deepcopy(model), inputs, o, rate, steps) for o in OPTIMIZERS}
    row: dict[str, Any] = {
        "name": name,
        "as is": {o: {"first": found[0], "last": found[-1]} for o, found in plain.items()},
    }
    for way, options in WAYS.items():
        moved = copy.deepcopy(model)
        try:
            report = condition_(moved, inputs, **options)
            again = condition_(copy.deepcopy(moved), inputs, **options)
        except Exception as error:
            row[way] = {"refused": f"{type(error).__name__}: {error}"}
            continue
        before, after = report.spread()
        row[way] = {
            "units": report.num_units,
            "largest": largest(report.log_scales),
            "again": largest(again.log_scales),
            "decades before": before,
            "decades after": after,
            "pace": report.pace,
        }
        for o in OPTIMIZERS:
            last = losses(copy.deepcopy(moved), inputs, o, rate, steps)[-1]
            row[way][o] = {"last": last, "ratio": last / plain[o][-1]}
    return row


def largest(log_scales: Tensor) -> float:
    return float(log_scales.abs().max()) if len(log_scales) else 0.0


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        f"{'model':12} {'':12} {'units':>5} {'|log λ|':>8} {'again':>8} {'decades':>14} "
        f"{'pace':>6} {'SGD':>8} {'AdamW':>8}"
    ]
    for row in rows:
        if "not built" in row:
            lines.append(f"{row['name']:12} could not be built: {row['not built']}")
            continue
        for way in WAYS:
            found = row[way]
            head = f"{row['name']:12} {way:12}"
            if "refused" in found:
                lines.append(f"{head} refused: {found['refused']}")
                continue
            decades = f"{found['decades before']:.1f} → {found['decades after']:.1f}"
            ratios = " ".join(f"{'×':>2} {found[o]['ratio']:5.3g}" for o in OPTIMIZERS)
            scales = f"{found['units']:5} {found['largest']:8.2f} {found['again']:8.1e}"
            lines.append(f"{head} {scales} {decades:>14} {found['pace']:6.2g} {ratios}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="part of a model's name")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--out", default="benchmarks/transformers_training.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for name in MODELS:
        if options.only in name:
            rows.append(measure(name, options.rate, options.steps))
            print(table(rows[-1:]).partition("\n")[2], flush=True)
    print(table(rows))
    write(options.out, rows, rate=options.rate, steps=options.steps)


if __name__ == "__main__":
    main()
