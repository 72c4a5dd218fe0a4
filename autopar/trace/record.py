"""Running a module aside from the trace that is under way, to see what it computes."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch._C import _len_torch_function_stack
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from autopar.trace.layers import lookup


class Unrecognized(Exception):
    """The module is no layer of experts that can be written as one op."""


CALL = nn.Module.__call__


@contextmanager
def aside() -> Iterator[None]:
    """While the context lasts, modules run outside of the trace that is under way, which learns nothing of it."""
    traced = nn.Module.__call__, nn.Module.__getattr__
    modes = [_pop_mode() for _ in range(_len_torch_function_stack())]
    try:
        nn.Module.__call__, nn.Module.__getattr__ = CALL, lookup()  # type: ignore[method-assign]
        with _disable_current_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_mode(mode)
        nn.Module.__call__, nn.Module.__getattr__ = traced  # type: ignore[method-assign]
