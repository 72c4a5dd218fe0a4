"""A small model of the transformers library, its batch, and the bytes that its engine moves."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM

from autopar.cost.communication import collective_bytes

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


def llama(layers: int = 2, dropout: float = 0.0, **changes: Any) -> LlamaForCausalLM:
    """With random weights from a fixed seed; every dim divides over four ranks."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=16,
        attention_dropout=dropout,
        use_cache=False,
        **changes,
    )
    return LlamaForCausalLM(config)


def ids(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randint(0, 96, (rows, 12), generator=torch.Generator().manual_seed(seed))


class Wire(TorchDispatchMode):
    """Bytes that a rank sends in the collectives of torch's engines, by ring algorithms; integers are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kind = KINDS.get(func.overloadpacket.__name__) if func.namespace == "c10d" else None
        if kind is not None:
            group = next(a for a in args if isinstance(a, torch.ScriptObject))
            tensors = [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]
            if tensors[0].is_floating_point():
                whole = max(t.numel() * t.itemsize for t in tensors)
                ways = torch.distributed.ProcessGroup.unbox(group).size()
                self.bytes[kind] += collective_bytes(kind, whole, ways)  # type: ignore[assignment, arg-type]
                self.calls[kind] += 1
        return func(*args, **(kwargs or {}))
