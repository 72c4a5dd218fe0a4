"""A configuration from the numbers that publications give of a model: layers, widths, heads, vocabulary."""

import math
import re
from collections.abc import Mapping
from typing import Any

from autopar.errors import AutoparError
from autopar.presets.table import configuration, names

NEEDED = ("n_layers", "hidden", "heads", "vocab")
LONGEST = 131072
DEPTHS = ("num_hidden_layers", "n_layer", "num_layers")


def number(row: Mapping[str, str], name: str, default: float) -> float:
    """A column, or its default where it is empty. Raises AutoparError ``bad-number`` for what is no finite number."""
    text = (row.get(name) or "").strip()
    try:
        value = float(text) if text else default
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise AutoparError("bad-number", f"{name} is {text!r}", "a number, or nothing")
    return value


def count(row: Mapping[str, str], name: str, default: float) -> float:
    """A column that counts something, at least one. Raises AutoparError ``bad-number``."""
    value = number(row, name, default)
    if value < 1 or (row.get(name) and value != int(value)):
        raise AutoparError("bad-number", f"{name} is {value:g}", "a whole number of at least 1, or nothing")
    return value


def numbers(row: Mapping[str, str]) -> dict[str, Any]:
    """A Hugging Face configuration of a decoder: gated and rotary where ``arch`` says llama or keys are grouped.

    Others have a GELU of one kernel, as MPT's and Megatron's do, not GPT-2's own of eight.

    A mixture of experts, or a row without numbers, is the preset that its ``model`` names, with the row's layers.
    Raises AutoparError ``missing-architecture``, or ``unknown-architecture`` for experts that no preset has.
    """
    missing, arch = [n for n in NEEDED if not row.get(n)], row.get("arch", "")
    if (missing or "moe" in arch) and (known := named(row)):
        return known
    if missing:
        raise AutoparError("missing-architecture", f"the row has no {', '.join(missing)}", f"fill {', '.join(NEEDED)}")
    if "moe" in arch:
        raise AutoparError("unknown-architecture", f"{arch}: experts have no numbers here", "a preset's name as model")
    layers, hidden, heads, vocab = (int(count(row, n, 0)) for n in NEEDED)
    inner, keys = int(count(row, "ffn_hidden", 4 * hidden)), int(count(row, "kv_heads", heads))
    if hidden % heads or heads % keys:
        raise AutoparError("indivisible-heads", f"hidden {hidden}, {heads} heads, {keys} of keys", "sizes that divide")
    if "llama" in arch or keys != heads:
        return {
            "model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": keys, "vocab_size": vocab,
            "max_position_embeddings": LONGEST, "tie_word_embeddings": tied(row, layers, hidden, inner, keys / heads),
        }  # fmt: skip
    dropped = 0.1 if "megatron" in row.get("framework", "").lower() else 0.0  # its default (arguments.py)
    return {
        "model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_inner": inner, "n_head": heads,
        "vocab_size": vocab, "n_positions": LONGEST, "activation_function": "gelu",
        "embd_pdrop": dropped, "attn_pdrop": dropped, "resid_pdrop": dropped,
    }  # fmt: skip


def named(row: Mapping[str, str]) -> dict[str, Any] | None:
    """The preset that ``model`` names, as "DeepSeek-V3(4 layers, 1 dense)" does; None where it names none."""
    name, _, cut = row.get("model", "").lower().partition("(")
    if name.strip() not in names():
        return None
    config = configuration(name.strip())
    config.pop("architectures", None)
    said = {key: re.search(rf"(\d+) {key}", cut) for key in ("layers", "dense")}
    layers = int(count(row, "n_layers", float(said["layers"][1] if said["layers"] else 0) or config_layers(config)))
    for key in DEPTHS:
        if key in config:
            config[key] = layers
    if said["dense"] and "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = int(said["dense"][1])
    return config


def config_layers(config: Mapping[str, Any]) -> int:
    """How many layers a configuration has."""
    return next(int(config[key]) for key in DEPTHS if key in config)


def tied(row: Mapping[str, str], layers: int, hidden: int, inner: int, keys: float) -> bool:
    """Whether the row's number of parameters is that with one table for embedding and head."""
    known, table = number(row, "params_b", 0.0) * 1e9, number(row, "vocab", 0.0) * hidden
    blocks = layers * hidden * (2 * hidden + 2 * hidden * keys + 3 * inner)
    return known > 0 and abs(known - blocks - table) < abs(known - blocks - 2 * table)
