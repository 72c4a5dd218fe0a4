"""A parallel module that is compiled at its first call."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from autopar.emit.module import ParallelModule
from autopar.errors import AutoparError
from autopar.runtime.random import Streams


class Deferred(ParallelModule):
    """Becomes what ``build(args, kwargs)`` makes when it is first called; has no parameters until then.

    Args:
        training: its mode until then.
        settings: names of the model's own attributes, which cannot be set here.
    """

    def __init__(
        self,
        build: Callable[[tuple[Any, ...], dict[str, Any]], ParallelModule],
        training: bool,
        settings: frozenset[str],
    ) -> None:
        super(ParallelModule, self).__init__()
        self.__dict__.update(_build=build, training=training, _compiled=settings)

    def _become(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        made = self.__dict__["_build"](args, kwargs)
        if made.training != self.training:
            made.train(self.training)
        self.__dict__.clear()
        self.__dict__.update(made.__dict__)
        self.__class__ = ParallelModule  # type: ignore[assignment]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compile for these inputs, then run."""
        self._become(args, kwargs)
        return self.forward(*args, **kwargs)

    def train_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Compile for these inputs, then run."""
        self._become(args, kwargs)
        return self.train_step(*args, **kwargs)

    def train(self, mode: bool = True) -> "Deferred":
        """Remember the mode for the first call."""
        self.__dict__["training"] = mode
        return self

    @property
    def streams(self) -> Streams:
        """Raises AutoparError ``not-compiled``."""
        raise _not_compiled("streams")


def _refusing(name: str) -> Callable[..., Any]:
    def refuse(self: Deferred, *args: Any, **kwargs: Any) -> Any:
        raise _not_compiled(name)

    return refuse


def _not_compiled(name: str) -> AutoparError:
    return AutoparError(
        "not-compiled",
        f"{name}: the model has no example inputs and was not called yet",
        "pass args= or kwargs= to parallelize, or call the module once before",
    )


for _name in (
    "parameters", "named_parameters", "buffers", "named_buffers", "state_dict", "load_state_dict", "full_parameters",
    "full_gradients", "clip_grad_norm_", "expert_load", "compile", "dump", "to_python", "zero_grad", "no_sync",
    "save", "load", "full_state_dict", "export_safetensors", "__getitem__", "__iter__", "__len__",
):  # fmt: skip
    setattr(Deferred, _name, _refusing(_name))
