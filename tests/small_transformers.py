"""All architectures of transformers that can be made small: two layers, widths of 32.

Of every family only a few models are in the collection at their own size, and what a size decides
(a sliding window, a padding, which expert runs) differs from one family to the next.

    python -m tests.zoo --small [--only causal:mi]
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

# task:architecture, without those that need other sizes to run at all, or compute in float32 inside
MODELS = (Path(__file__).parent / "transformers_models.txt").read_text().split()
CLASSES = {
    "causal": "AutoModelForCausalLM",
    "masked": "AutoModelForMaskedLM",
    "image": "AutoModelForImageClassification",
}
VOCABULARY = 50
WIDTHS = {
    **dict.fromkeys("hidden_size d_model dim n_embd word_embed_proj_dim lm_head_dim".split(), 32),
    **dict.fromkeys("intermediate_size n_inner hidden_dim d_ff ffn_dim".split(), 48),
    **dict.fromkeys("encoder_ffn_dim decoder_ffn_dim".split(), 48),
    **dict.fromkeys("moe_intermediate_size shared_expert_intermediate_size".split(), 24),
    **dict.fromkeys("embedding_size q_lora_rank kv_lora_rank mamba_d_head".split(), 16),
    **dict.fromkeys("head_dim d_kv rotary_dim qk_rope_head_dim qk_nope_head_dim".split(), 8),
    **dict.fromkeys("v_head_dim state_size mamba_d_state".split(), 8),
}
COUNTS = {
    **dict.fromkeys("num_hidden_layers n_layer n_layers num_layers".split(), 2),
    **dict.fromkeys("encoder_layers decoder_layers".split(), 2),
    **dict.fromkeys("num_attention_heads n_head n_heads num_heads mamba_n_heads".split(), 4),
    **dict.fromkeys("encoder_attention_heads decoder_attention_heads".split(), 4),
    **dict.fromkeys("num_experts num_local_experts n_routed_experts".split(), 4),
    **dict.fromkeys("num_key_value_heads num_experts_per_tok type_vocab_size".split(), 2),
    **dict.fromkeys("mamba_expand expand".split(), 2),
    **dict.fromkeys("n_shared_experts n_group topk_group first_k_dense_replace".split(), 1),
    **dict.fromkeys("mamba_n_groups bos_token_id".split(), 1),
}
LENGTHS = {
    **dict.fromkeys("max_position_embeddings n_positions n_ctx".split(), 64),
    **dict.fromkeys("max_source_positions max_target_positions".split(), 64),
    **dict.fromkeys("attention_window num_buckets block_size mamba_chunk_size".split(), 4),
    **dict.fromkeys("conv_kernel time_step_rank".split(), 4),
    "sliding_window": 6,
}
IMAGES = {"image_size": 32, "patch_size": 8, "num_channels": 3, "num_labels": 5}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 2}
SMALL = {**WIDTHS, **COUNTS, **LENGTHS, **IMAGES, **TOKENS}
# where an architecture leaves them open, it derives them from sizes that are other ones here
DERIVED = ("num_key_value_heads", "intermediate_size", "n_inner")


def shrink(architecture: str) -> Any:
    """The configuration of an architecture with all that is a size made small."""
    import transformers

    kind = transformers.CONFIG_MAPPING[architecture]
    usual = kind()
    sizes: dict[str, Any] = {
        key: size
        for key, size in SMALL.items()
        if type(value := getattr(usual, key, "")) in (int, float)
        or (value is None and key in DERIVED)
    }
    types = getattr(usual, "layer_types", None)
    if isinstance(types, list):  # one layer of each, two at most
        sizes["layer_types"] = (2 * list(dict.fromkeys(types)))[:2]
    try:
        small = kind(**sizes)
    except Exception:  # whatever an architecture raises on layers that do not fit its other sizes
        sizes.pop("layer_types", None)
        small = kind(**sizes)
    small.use_cache = False
    if hasattr(small, "_experts_implementation"):
        small._experts_implementation = "eager"
    return small


def build(name: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model of ``MODELS``, and a batch of two."""
    import transformers

    task, architecture = name.split(":")
    config = shrink(architecture)
    model = getattr(transformers, CLASSES[task]).from_config(config)
    if task == "image":
        size = config.image_size if isinstance(getattr(config, "image_size", None), int) else 32
        channels = getattr(config, "num_channels", 3)
        return model, {"pixel_values": torch.randn(2, channels, size, size)}
    inputs = {"input_ids": torch.randint(3, VOCABULARY, (2, 7))}
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = torch.randint(3, VOCABULARY, (2, 6))
    return model, inputs
