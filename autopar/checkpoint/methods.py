"""What a parallel module offers for checkpoints."""

import os
from typing import Any, NoReturn, Self

from torch import Tensor
from torch.optim import Optimizer

from autopar.checkpoint.live import Live
from autopar.checkpoint.load import load
from autopar.checkpoint.safetensors import export
from autopar.checkpoint.save import Saving, save
from autopar.checkpoint.whole import full_state_dict
from autopar.errors import AutoparError
from autopar.runtime.heartbeat import Heart, guarded

Folder = str | os.PathLike[str]


class _Whole:
    """What a module holds first of all, so that ``pickle`` meets it before anything else; it is copied as itself."""

    def __copy__(self) -> "_Whole":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Whole":
        return self

    def __reduce__(self) -> NoReturn:
        why = "a parallel module cannot be pickled: it holds this process's programs and its part of every parameter"
        raise AutoparError("pickled-module", why, "use pm.save(folder) and pm.load(folder), or pm.full_state_dict()")


class Checkpoints:
    """Saving and loading from any mesh and strategy to any other. Every method is collective."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A module whose first attribute says how to save it instead of pickling it."""
        made = super().__new__(cls)
        made.__dict__["_whole"] = _Whole()
        return made

    _saving: Saving | None = None
    _heart: Heart | None = None  # tells of ranks that die

    def _live(self) -> Live:
        """What of the module is saved."""
        raise NotImplementedError

    def _config(self) -> dict[str, Any] | None:
        """The model's configuration."""
        raise NotImplementedError

    def _settle(self) -> None:
        """Wait for an asynchronous save."""
        before, self._saving = self._saving, None
        if before is not None:
            before.wait()

    @guarded
    def save(
        self,
        folder: Folder,
        optimizer: Optimizer | None = None,
        step: int | None = None,
        extra: Any = None,
        asynchronous: bool = False,
        keep: int | None = None,
    ) -> Saving:
        """Save parameters, persistent buffers, the random stream and the optimizer's state. Collective.

        The folder appears when it is complete. It can also be read by ``torch.distributed.checkpoint`` under the
        original names; tied names share their bytes. All ranks must see the same file system.

        Args:
            folder: is replaced where it exists. ``step_folder(parent, step)`` names one of a series.
            optimizer: one; a second one is saved with a folder of its own.
            step: given back by ``load``.
            extra: of rank 0, given back by ``load``: numbers, text, tensors, and lists, tuples and dicts of them, such
                as the data's position or a scheduler's state.
            asynchronous: write in a thread what the values are now. The next save or load waits for it.
            keep: in a series, how many of the newest complete checkpoints stay.

        Returns:
            A handle; ``wait()`` returns the folder once it is complete, and raises what went wrong.

        Raises:
            AutoparError: ``rank-mismatch`` where other ranks do something else, ``save-failed``, ``save-timeout``,
                ``bad-extra``, ``bad-optimizer``, ``foreign-parameter``, ``optimizer-state``.
        """
        self._settle()
        saving = save(self._live(), folder, optimizer, step, extra, asynchronous, keep)
        if asynchronous:
            self._saving = saving
        else:
            saving.wait()
        return saving

    @guarded
    def load(self, folder: Folder, optimizer: Optimizer | None = None, cast: bool = False) -> dict[str, Any]:
        """Load what ``save`` wrote, on whatever mesh. Collective.

        Args:
            folder: a checkpoint, or a folder of ``step-N``, of which the newest complete one is taken.
            optimizer: gets state and options by parameter names; its groups must hold the parameters of the saved ones.
            cast: whether dtypes may differ.

        Returns:
            ``step`` and ``extra`` as saved, and the ``folder`` that was read.

        Raises:
            AutoparError: ``incomplete-checkpoint``, ``bad-optimizer``; ``state-dict-mismatch`` and
                ``optimizer-mismatch`` before anything is written, with every name and both shapes.
        """
        self._settle()
        return load(self._live(), folder, optimizer, cast)

    @guarded
    def full_state_dict(self) -> dict[str, Tensor]:
        """The unsharded model's state dict on the CPU of rank 0, tied names included; empty elsewhere. Collective.

        Tensors are gathered one by one: beside the result a rank holds one of them.
        """
        return full_state_dict(self._live())

    @guarded
    def export_safetensors(self, folder: Folder, max_shard_bytes: int = 5 * 10**9) -> None:
        """Write the model as a Hugging Face folder, which ``from_pretrained`` reads. Collective.

        ``model.safetensors``, or shards of at most ``max_shard_bytes`` (a larger tensor is a shard of its own) with
        their index; tied tensors once, by their first name; ``config.json`` where the model has a ``config``.

        Raises:
            AutoparError: ``folder-exists`` where the folder is not empty, ``missing-package``.
        """
        export(self._live(), folder, max_shard_bytes, self._config())
