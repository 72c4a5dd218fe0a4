"""Bytes that a process holds in tensors, counted as ops make and free them."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Bytes of all storages that ops read or made and that are still alive, and their peak.

    Engines free and make storages again by resizing them, which no op shows: while the mode is on it follows
    ``UntypedStorage.resize_`` too. What a kernel takes and frees inside of itself is not seen.

    Args:
        held: tensors that are there already.
    """

    def __init__(self, held: Iterable[Tensor]) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}
        for x in held:
            self.see(x)
        self.peak = self.total()

    def see(self, x: Tensor) -> None:
        """Follow a tensor's storage; a DTensor's is its local tensor's."""
        local = x._local_tensor if isinstance(x, DTensor) else x
        if type(local) in (Tensor, nn.Parameter) and not local.is_meta:
            storage = local.untyped_storage()
            self.storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())

    def __enter__(self) -> "Live":
        plain = self.resize = torch.UntypedStorage.resize_

        def resize(storage: Any, size: int) -> Any:
            out = plain(storage, size)
            if storage._cdata in self.storages:
                self.storages[storage._cdata] = (self.storages[storage._cdata][0], size)
                self.peak = max(self.peak, self.total())
            return out

        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self.resize  # type: ignore[method-assign]
        super().__exit__(*error)

    def total(self) -> int:
        """Bytes alive now."""
        self.storages = {k: v for k, v in self.storages.items() if not v[0].expired()}
        return sum(size for _, size in self.storages.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor):
                self.see(x)
        self.peak = max(self.peak, self.total())
        return out


def held(tensors: Iterable[Tensor | None]) -> int:
    """Bytes of the tensors' storages, each once."""
    found = {}
    for x in tensors:
        if x is not None:
            storage = (x._local_tensor if isinstance(x, DTensor) else x).untyped_storage()
            found[storage._cdata] = storage.nbytes()
    return sum(found.values())
