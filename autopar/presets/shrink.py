"""The rule that derives a tiny model of the same architecture from any configuration."""

from collections.abc import Mapping
from math import gcd
from typing import Any

VOCABULARY = 96
LAYERS = ("num_hidden_layers", "n_layer", "num_layers", "num_decoder_layers")
WIDTHS = ("hidden_size", "n_embd", "d_model", "word_embed_proj_dim")
INNER = ("intermediate_size", "n_inner", "d_ff", "ffn_dim", "ffn_hidden_size")
HEADS = ("num_attention_heads", "n_head", "num_heads")
HEAD_SIZES = ("head_dim", "d_kv", "query_pre_attn_scalar")
POSITIONS = ("max_position_embeddings", "n_positions", "original_max_position_embeddings")
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ROPE = {"factor": 4.0, "original_max_position_embeddings": 16}
FIXED = {
    "vocab_size": VOCABULARY,
    "sliding_window": 8,
    "image_size": 16,
    "patch_size": 4,
    "num_labels": 8,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
}


def _first(config: Mapping[str, Any], keys: tuple[str, ...]) -> int:
    return int(next(config[k] for k in keys if k in config))


def _heads(config: Mapping[str, Any]) -> tuple[int, int]:
    """(query heads, key heads) with the original ratio of the two."""
    heads = _first(config, HEADS)
    shared = config.get("num_key_value_heads", heads)
    ratio = heads // gcd(heads, shared)
    if ratio == 1:
        return 4, 4
    keys = 2 if ratio <= 8 else 1
    return keys * ratio, keys


def tiny(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same architecture with 2 layers, width 32 or 64, 96 words and the original ratio of query to key heads.

    Models whose first layers are of another kind get one layer of it and two of the rest. Heads, ranks and experts
    shrink; a sliding window becomes 8, so that a sequence of 16 notices it.
    """
    heads, keys = _heads(config)
    width = 32 if heads == 4 else 64
    layers = 3 if "first_k_dense_replace" in config else 2
    sizes: dict[str, Any] = {
        **dict.fromkeys(LAYERS, layers),
        **dict.fromkeys(WIDTHS, width),
        **dict.fromkeys(INNER, 2 * width),
        **dict.fromkeys(HEADS, heads),
        **dict.fromkeys(HEAD_SIZES, width // heads),
        **dict.fromkeys(POSITIONS, 64),
        **FIXED,
        "num_key_value_heads": keys,
    }
    out: dict[str, Any] = {k: sizes.get(k, v) if v is not None else None for k, v in config.items()}
    if isinstance(out.get("layer_types"), list):
        out["layer_types"] = out["layer_types"][:layers]
    if isinstance(out.get("rope_scaling"), dict):
        out["rope_scaling"] = {k: ROPE.get(k, v) for k, v in out["rope_scaling"].items()}
    return {**out, **{k: v if config.get(k, VOCABULARY) >= VOCABULARY else config[k] for k, v in TOKENS.items()}}
