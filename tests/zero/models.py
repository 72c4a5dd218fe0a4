"""The batch of a tiny model, and the bytes that its engine moves."""

from collections import Counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.communication import collective_bytes

KINDS = {
    "_allgather_base_": "all_gather",
    "_reduce_scatter_base_": "reduce_scatter",
    "allreduce_": "all_reduce",
}


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
