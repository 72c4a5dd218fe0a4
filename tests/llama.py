"""A tiny Llama of the transformers library."""

from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def llama(layers: int = 2, seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """With random weights; every dim divides over four ranks. ``changes`` are of the configuration."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {
        "vocab_size": 96,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": layers,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "max_position_embeddings": 16,
        "use_cache": False,
    }
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **changes}))
