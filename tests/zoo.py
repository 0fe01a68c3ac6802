"""The model collection: which models the library is tested on, and what is tested of each.

python -m tests.zoo --write docs/zoo.md [--jobs 2] [--only resnet]
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import pathcond
from pathcond.graph import capture
from pathcond.rescale import output_change
from pathcond.symmetry import symmetry_of

from . import torchvision_operators  # noqa: F401  before anything imports torchvision

NORMALIZATIONS = ("absorb", "gain", "full", "paper")
TIMM_MODELS = ["adv_inception_v3", "bat_resnext26ts", "beit_base_patch16_224", "caformer_s18", "cait_xxs24_224", "cait_xxs36_224", "coat_lite_tiny", "coat_tiny", "coatnet_pico_rw_224", "convformer_s18", "convit_small", "convit_tiny", "convmixer_1024_20_ks9_p14", "convmixer_768_32", "convnext_atto", "convnextv2_atto", "cpubone_nano", "cpubone_t0", "crossvit_9_240", "crossvit_tiny_240", "cs3darknet_focus_m", "cs3darknet_focus_s", "davit_small", "davit_tiny", "deit_tiny_distilled_patch16_224", "deit_tiny_patch16_224", "densenet121", "densenet169", "dla46_c", "dla46x_c", "dpn48b", "dpn68", "eca_botnext26ts_256", "ecaresnet26t", "edgenext_x_small", "edgenext_xx_small", "efficientformer_l1", "efficientformer_l3", "efficientformerv2_s0", "efficientformerv2_s1", "efficientnet_b0", "efficientvim_m1", "efficientvim_m1_dist", "efficientvit_b0", "efficientvit_b1", "efficientvit_m0", "efficientvit_m1", "ens_adv_inception_resnet_v2", "ese_vovnet19b_slim", "ese_vovnet19b_slim_dw", "eva02_tiny_patch14_224", "fasternet_t0", "fasternet_t1", "fastvit_t12", "fastvit_t8", "focalnet_small_srf", "focalnet_tiny_srf", "gcvit_xtiny", "gcvit_xxtiny", "ghostnet_050", "ghostnetv3_050", "gmixer_12_224", "gmlp_s16_224", "gmlp_ti16_224", "halonet_h1", "hardcorenas_a", "hardcorenas_b", "hgnetv2_b0", "hgnetv2_b1", "hiera_small_abswin_256", "hiera_tiny_224", "hieradet_small", "hrnet_w18_small", "hrnet_w18_small_v2", "hrnet_w18_ssld", "iformer_s", "iformer_t", "inception_next_atto", "inception_next_tiny", "inception_v4", "jx_nest_small", "jx_nest_tiny", "lambda_resnet26t", "lcnet_035", "lcnetv2_base", "lcnetv2_small", "legacy_seresnet18", "legacy_seresnext26_32x4d", "legacy_xception", "levit_128", "levit_128s", "lowformer_b0", "lowformer_b1", "mambaout_femto", "maxvit_pico_rw_256", "mixer_s32_224", "mnasnet_050", "mobilenetv2_035", "mobilenetv3_large_075", "mobilenetv3_small_050", "mobilenetv5_base", "mobileone_s1", "mobilevit_xxs", "mobilevitv2_050", "mvitv2_small", "mvitv2_tiny", "naflexvit_base_patch16_parfac_gap", "nasnetalarge", "nest_tiny", "nextvit_base", "nextvit_small", "nf_regnet_b0", "pit_ti_224", "pit_ti_distilled_224", "pnasnet5large", "poolformer_s12", "poolformerv2_s12", "poolformerv2_s24", "pvt_v2_b0", "pvt_v2_b1", "rdnet_tiny", "regnetx_002", "regnety_002", "repghostnet_050", "repghostnet_058", "repvgg_a0", "repvit_m1", "repvit_m1_0", "res2net50_14w_8s", "res2next50", "resmlp_12_224", "resnest14d", "resnest26d", "resnet10t", "resnet18", "resnet50", "resnetblur50", "resnetv2_18", "resnetv2_34", "resnetv2_50", "resnext50_32x4d", "rexnet_100", "rexnetr_100", "samvit_base_patch16_224", "selecsls42", "selecsls60", "sequencer2d_m", "sequencer2d_s", "seresnet50", "shvit_s1", "shvit_s2", "skresnet18", "skresnet34", "starnet_s050", "starnet_s100", "swiftformer_s", "swiftformer_xs", "swin_small_patch4_window7_224", "swin_tiny_patch4_window7_224", "swinv2_cr_small_224", "swinv2_cr_tiny_224", "swinv2_small_window16_256", "swinv2_tiny_window16_256", "test_byobnet", "test_convnext", "test_convnext3", "test_efficientnet", "test_mambaout", "test_nfnet", "test_resnet", "test_vit", "test_vit2", "tf_efficientnet_lite0", "tiny_vit_11m_224", "tiny_vit_5m_224", "tnt_s_legacy_patch16_224", "tresnet_m", "tresnet_v2_l", "twins_pcpvt_base", "twins_svt_small", "vgg11", "vgg11_bn", "visformer_small", "visformer_tiny", "vit_relpos_medium_patch16_rpn_224", "vit_small_patch16_dinov3", "vit_small_patch16_rope_224", "vit_srelpos_small_patch16_224", "vit_tiny_patch16_224", "vit_tiny_patch16_dinov3_qkvb", "vit_tiny_r_s16_p8_224", "vit_tiny_r_s16_p8_224_in21k", "vitamin_small_224", "volo_d1_224", "xception41p", "xception65p", "xcit_nano_12_p8_224", "xcit_tiny_12_p16_224"]

# Convolutional nets of timm also run on small images, which keeps the collection quick; these do not.
NEEDS_NATIVE_SIZE = ("halonet", "botnext", "bat_", "lambda", "inception", "nasnet", "hrnet", "xception", "coat", "maxvit")
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
    seconds_capture: float = 0.0
    seconds_search: float = 0.0
    error: str = ""


def entries() -> Iterator[Entry]:
    yield from torchvision_entries()
    yield from timm_entries()
    yield from transformers_entries()


def torchvision_entries() -> Iterator[Entry]:
    import torchvision

    def build(name: str) -> tuple[nn.Module, Tensor]:
        options = {"init_weights": False} if name in TRAIN_ONLY_HEADS else {}
        size = 224 if any(k in name for k in ("vit", "swin")) else 64
        size = 96 if name in ("alexnet", "inception_v3", "googlenet") or name.startswith("squeezenet") else size
        return torchvision.models.get_model(name, weights=None, **options), torch.randn(2, 3, size, size)

    for name in torchvision.models.list_models(module=torchvision.models):
        yield Entry(f"torchvision:{name}", lambda name=name: build(name))


def timm_entries() -> Iterator[Entry]:
    def build(name: str) -> tuple[nn.Module, Tensor]:
        import timm

        model = timm.create_model(name, pretrained=False)
        config = model.pretrained_cfg
        channels, height, width = config["input_size"]
        attention = any("attn" in module_name for module_name, _ in model.named_modules())
        if not (config.get("fixed_input_size") or attention or name.startswith(NEEDS_NATIVE_SIZE) or "s16" in name):
            height = width = 96
        return model, torch.randn(2, channels, height, width)

    for name in TIMM_MODELS:
        yield Entry(f"timm:{name}", lambda name=name: build(name))


def transformers_entries() -> Iterator[Entry]:
    small = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 50}
    images = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "image_size": 32}
    tokens = lambda: torch.randint(3, 50, (2, 7))  # noqa: E731
    pixels = lambda: torch.randn(2, 3, 32, 32)  # noqa: E731
    specs: dict[str, tuple[str, str, dict[str, Any], Callable[[], dict[str, Any]]]] = {
        "opt": ("OPTConfig", "OPTForCausalLM", {
            "hidden_size": 32, "num_hidden_layers": 2, "ffn_dim": 64, "num_attention_heads": 4, "vocab_size": 50,
            "word_embed_proj_dim": 32, "max_position_embeddings": 32}, lambda: {"input_ids": tokens(), "use_cache": False}),
        "t5": ("T5Config", "T5ForConditionalGeneration", {
            "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "vocab_size": 50,
            "decoder_start_token_id": 0},
            lambda: {"input_ids": tokens(), "decoder_input_ids": tokens(), "use_cache": False}),
        "bert": ("BertConfig", "BertModel", small, lambda: {"input_ids": tokens()}),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 50, "n_positions": 32},
                 lambda: {"input_ids": tokens(), "use_cache": False}),
        "llama": ("LlamaConfig", "LlamaForCausalLM", small | {"num_key_value_heads": 2},
                  lambda: {"input_ids": tokens(), "use_cache": False}),
        "vit": ("ViTConfig", "ViTForImageClassification", images | {"patch_size": 8}, lambda: {"pixel_values": pixels()}),
        "convnext": ("ConvNextConfig", "ConvNextForImageClassification", {"hidden_sizes": [8, 16, 32, 64], "depths": [1, 1, 2, 1]},
                     lambda: {"pixel_values": pixels()}),
        "resnet": ("ResNetConfig", "ResNetForImageClassification", {
            "embedding_size": 8, "hidden_sizes": [16, 32], "depths": [2, 2], "layer_type": "bottleneck"},
            lambda: {"pixel_values": pixels()}),
        "distilbert": ("DistilBertConfig", "DistilBertModel", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 50},
                       lambda: {"input_ids": tokens()}),
        "mistral": ("MistralConfig", "MistralForCausalLM", small | {"num_key_value_heads": 2, "head_dim": 8},
                    lambda: {"input_ids": tokens(), "use_cache": False}),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", small | {"num_key_value_heads": 2, "head_dim": 8},
                  lambda: {"input_ids": tokens(), "use_cache": False}),
    }  # fmt: skip

    def build(config_name: str, model_name: str, options: dict[str, Any], inputs: Callable[[], dict]) -> tuple[nn.Module, Any]:
        import transformers

        config = getattr(transformers, config_name)(**options)
        return getattr(transformers, model_name)(config), inputs()

    for name, spec in specs.items():
        yield Entry(f"transformers:{name}", lambda spec=spec: build(*spec))


def randomise(model: nn.Module, seed: int = 0) -> None:
    """Statistics, gains and biases as after training, and nothing left at zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter.dtype)
            if parameter.dim() <= 1:
                parameter.copy_(noise * 0.2 + (1.0 if "bias" not in name.rsplit(".", 1)[-1] else 0.1))
            elif bool((parameter == 0).any()):
                parameter.add_(noise * 0.05)
        for name, buffer in model.named_buffers():
            if name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.3)
            if name.endswith("running_var"):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)


def outputs(model: nn.Module, inputs: Any, *, training: bool) -> list[Tensor]:
    """Floating-point outputs; random draws repeat, statistics are left as they are."""
    from pathcond.rescale import _outputs

    torch.manual_seed(0)
    return _outputs(model, inputs, {}, training)


def as_double(inputs: Any) -> Any:
    return torch.utils._pytree.tree_map(lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x, inputs)


def examine(entry: Entry) -> Result:
    """Rescale a model by random log-scales in [-2, 2] under every normalization, and measure the outputs."""
    result = Result(entry.name)
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, inputs = entry.build()
    model, inputs = model.double().eval(), as_double(inputs)
    randomise(model)
    result.parameters = sum(p.numel() for p in model.parameters())
    start = time.perf_counter()
    graphs = [capture(model, inputs, training=training) for training in (False, True)]
    result.seconds_capture = time.perf_counter() - start
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    before = outputs(model, inputs, training=False)
    before_train = outputs(model, inputs, training=True)
    for normalization in NORMALIZATIONS:
        start = time.perf_counter()
        symmetry = symmetry_of(model, inputs, graphs, normalization=normalization)
        result.seconds_search = max(result.seconds_search, time.perf_counter() - start)
        result.units[normalization] = symmetry.num_units
        log_scales = torch.rand(symmetry.num_units, dtype=torch.float64) * 4 - 2
        pathcond.rescale_(model, symmetry, log_scales, verify=False)
        result.eval_change[normalization] = output_change(before, outputs(model, inputs, training=False))
        result.train_change[normalization] = output_change(before_train, outputs(model, inputs, training=True))
        model.load_state_dict(state)
    return result


def failures(result: Result) -> list[str]:
    """Everything about a result that is not as it must be."""
    found = [result.error] if result.error else []
    for normalization, change in result.eval_change.items():
        if not change <= 1e-9:
            found.append(f"{normalization}: eval output changed by {change:.2g}")
    if not result.train_change.get("gain", 0.0) <= 1e-9:
        found.append(f"gain: train output changed by {result.train_change['gain']:.2g}")
    return found


def _examine_safely(name: str) -> Result:
    torch.set_num_threads(1)
    entry = next(e for e in entries() if e.name == name)
    try:
        return examine(entry)
    except Exception as error:
        return Result(name, error=f"{type(error).__name__}: {error}\n{traceback.format_exc(limit=-3)}")
    finally:
        gc.collect()


def table(results: list[Result]) -> str:
    """The page docs/zoo.md."""
    good = sum(not failures(result) for result in results)
    lines = [
        "# Models that were tested",
        "",
        "Written by `make zoo`. Every model is rescaled by random log-scales in [-2, 2] in float64, with random BatchNorm",
        "statistics, gains and biases; the change is the largest one of an eval output relative to the largest output,",
        f"over all four values of `normalization`. {good} of {len(results)} models pass (change at most 1e-9).",
        "",
        "| model | parameters | units absorb | gain | full | paper | largest change | capture s | search s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for r in results:
        change = max(r.eval_change.values(), default=math.nan)
        units = " | ".join(f"{r.units.get(n, 0):,}" for n in NORMALIZATIONS)
        note = f" **{failures(r)[0].splitlines()[0][:100]}**" if failures(r) else ""
        lines.append(
            f"| {r.name}{note} | {r.parameters:,} | {units} | {change:.0e} | {r.seconds_capture:.1f} | {r.seconds_search:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", help="Markdown file for the table")
    parser.add_argument("--rows", help="JSON-lines file; models that are in it already are not run again")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--only", default="", help="part of a model's name")
    options = parser.parse_args()
    done: dict[str, Result] = {}
    if options.rows and os.path.exists(options.rows):
        with open(options.rows) as file:
            done = {row["name"]: Result(**row) for row in map(json.loads, file)}
    names = [entry.name for entry in entries() if options.only in entry.name]
    todo = [name for name in names if name not in done]
    with ProcessPoolExecutor(options.jobs, max_tasks_per_child=8, mp_context=torch.multiprocessing.get_context("spawn")) as pool:
        for result in pool.map(_examine_safely, todo):
            done[result.name] = result
            change = max(result.eval_change.values(), default=math.nan)
            print(f"{result.name}: {result.units} {change:.1e} {'; '.join(failures(result))}", flush=True)
            if options.rows:
                with open(options.rows, "a") as file:
                    file.write(json.dumps(asdict(result)) + "\n")
    results = [done[name] for name in names]
    if options.write:
        with open(options.write, "w") as file:
            file.write(table(results))
    bad = [result.name for result in results if failures(result)]
    print(f"{len(results) - len(bad)} passed, {len(bad)} failed")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
