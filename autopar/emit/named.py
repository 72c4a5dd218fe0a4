"""What a parallel module's tree shows of the model's: its lists can be walked, its settings cannot be changed."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from autopar.errors import AutoparError

_FRESH = vars(nn.Module())
OWN = frozenset(_FRESH)  # what every module has
_SHARED = {n: v for n, v in _FRESH.items() if not isinstance(v, (dict, set))}
_TABLES = [(n, type(v)) for n, v in _FRESH.items() if n not in _SHARED]


class Named(nn.Module):
    """A place in the tree of the model's names."""

    _compiled: frozenset[str] = frozenset()  # names of the model's own attributes here, which programs have read

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._compiled:
            why = f"{name}: the programs are compiled from the model's own, and would not see another value"
            raise AutoparError("fixed-module", why, "set it on the model and parallelize that, or pass it as an input")
        super().__setattr__(name, value)

    def __getitem__(self, key: int | str | slice) -> Any:
        if isinstance(key, str):
            return self._modules[key]
        children = self._numbered()
        return nn.ModuleList(children[key]) if isinstance(key, slice) else children[key]

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._numbered())

    def __len__(self) -> int:
        return len(self._numbered())

    def __bool__(self) -> bool:
        return True

    def _numbered(self) -> list[nn.Module]:
        """The children of a list, in order."""
        names = sorted(self._modules, key=lambda n: (len(n), n))
        if names != [str(i) for i in range(len(names))]:
            raise TypeError(f"only a module that stands for a list can be indexed or walked, not one of {names}")
        return [m for n in names if (m := self._modules[n]) is not None]


class Root(Named):
    """What the user holds."""

    def __getattr__(self, name: str) -> Any:
        """``plan`` is None where nothing was planned, and the model has nothing of that name."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "plan":
                return None
            raise


def part_called() -> AutoparError:
    """For a user's own call of a layer."""
    why = "a layer of a parallel module is called by itself, but its programs are those of the whole model"
    return AutoparError("part-called", why, "call the module, or parallelize that layer of the model")


class Container(Named):
    """A place below the root; it is never called."""

    def __init__(self) -> None:
        # What nn.Module's own sets, attribute by attribute through checks: deep models have thousands of places.
        own = self.__dict__
        own.update(_SHARED)
        for name, kind in _TABLES:
            own[name] = kind()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raises AutoparError ``part-called``."""
        raise part_called()


def _hookless(name: str) -> Callable[..., Any]:
    plain = getattr(nn.Module, name)

    @functools.wraps(plain)
    def register(self: Container, *args: Any, **kwargs: Any) -> Any:
        hook = args[0] if args else kwargs.get("hook")
        of_torch = str(getattr(hook, "__module__", "")).split(".")[0] == "torch"  # its engines' and debugging modes'
        if "_compiled" not in vars(self) or of_torch:
            return plain(self, *args, **kwargs)
        why = f"{name}: programs do not call the model's modules, so that a hook would never run"
        raise AutoparError("fixed-module", why, "return what the hook is for from the model's forward")

    return register


for _name in (
    "register_forward_hook", "register_forward_pre_hook", "register_backward_hook", "register_full_backward_hook",
    "register_full_backward_pre_hook",
):  # fmt: skip
    setattr(Container, _name, _hookless(_name))


def settings_of(module: nn.Module, classes: dict[type, frozenset[str]] | None = None) -> frozenset[str]:
    """The names of what a module computes with besides its tensors: its attributes and children, and its class's.

    Args:
        classes: those of classes, found once for many modules.
    """
    classes, kind = {} if classes is None else classes, type(module)
    if kind not in classes:
        above = kind.__mro__[: kind.__mro__.index(nn.Module)]
        classes[kind] = frozenset(n for cls in above for n, value in vars(cls).items() if not callable(value))
    own = ({*vars(module), *module._modules} - OWN) | classes[kind]
    return frozenset(n for n in own if not n.startswith("__"))
