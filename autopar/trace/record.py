"""Running a module aside from the trace that is under way, to see what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils._python_dispatch import _disable_current_modes


class Unrecognized(Exception):
    """The module is no layer of experts that can be written as one op."""


OWN = {name: getattr(nn.Module, name) for name in ("__call__", "__getattr__")}


@contextmanager
def aside() -> Iterator[None]:
    """While the context lasts, modules run outside of the trace that is under way, which learns nothing of it."""
    traced = {name: getattr(nn.Module, name) for name in OWN}
    try:
        _set(OWN)
        with _disable_current_modes():
            yield
    finally:
        _set(traced)


def _set(methods: dict[str, Any]) -> None:
    for name, method in methods.items():
        setattr(nn.Module, name, method)
