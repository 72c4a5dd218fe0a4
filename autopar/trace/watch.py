"""What a forward does that a graph of it does not show: refused with its line, or said by ops that do show."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import inference_mode
from torch.nn.modules import transformer
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.errors import AutoparError
from autopar.trace import places

GRADIENTS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
DATA: Any = Tensor.data
CAUSAL = "_detect_is_causal_mask"
BINCOUNT = {torch.bincount, Tensor.bincount, torch.ops.aten.bincount.default}
SWITCHES = {Tensor.requires_grad_, Tensor.requires_grad.__set__}  # type: ignore[attr-defined]


class Watch(TorchFunctionMode):
    """While it is on, what would be lost in the graph is refused, or said by other ops: ``.data``, ``bincount``.

    Raises AutoparError ``input-mutation`` for assignments of ``.data``, ``custom-backward`` for gradients that the
    forward takes and parameters that it freezes.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call."""
        if func == DATA.__get__:
            return args[0].detach()
        if func == DATA.__set__:
            fix = "compute the new value as a tensor and use that, or change the parameter between steps"
            raise self._error("input-mutation", "assigns the .data of a tensor", fix)
        if func in GRADIENTS:
            fix = "write the derivative as ops of the forward, or take this gradient outside of the model"
            raise self._error("custom-backward", "takes a gradient inside the forward", fix)
        if func in BINCOUNT and (made := _counts(*args, **(kwargs or {}))) is not None:
            return made
        if func in SWITCHES:
            self._switch(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        lost = not torch.is_grad_enabled() and any(map(torch.is_autocast_enabled, ("cpu", "cuda")))
        return _detached(out, (args, kwargs)) if lost else out

    def _switch(self, tensor: Tensor, requires_grad: bool = True) -> None:
        name = next((n for n, p in self.model.named_parameters() if p is tensor), None)
        if name is not None and tensor.requires_grad != requires_grad:
            what = f"sets requires_grad of {name} to {requires_grad} inside the forward"
            raise self._error("custom-backward", what, "set it before parallelize, or use weight.detach()")

    def _error(self, slug: str, what: str, fix: str) -> AutoparError:
        return AutoparError(slug, f"{places.here(self.model)}: {what}", fix)


def _counts(x: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor | None:
    """``bincount`` of ``minlength`` numbers, by an op that refuses any other one; None where no length is given."""
    if not minlength:
        return None
    if weights is None:
        weights = torch.ones_like(x, dtype=torch.long)
    elif weights.dtype != torch.float32:
        weights = weights.double()
    return weights.new_zeros(minlength).index_add(0, x.long(), weights)


def _detached(out: Any, given: Any) -> Any:
    """What an op under ``no_grad`` made, said by ``detach``: export forgets the region where it is under autocast."""
    known = {id(v) for v in tree_leaves(given)}
    return tree_map_only(Tensor, lambda v: v if id(v) in known else v.detach(), out)


@contextmanager
def _no_idle_autocast() -> Iterator[None]:
    """An autocast that is off where none is on is nothing; export would forget what it holds of ``no_grad``."""
    enter, leave = torch.autocast.__enter__, torch.autocast.__exit__

    def entered(self: Any) -> Any:
        self._idle = not self._enabled and not torch.is_autocast_enabled(self.device)
        return None if self._idle else enter(self)

    def left(self: Any, *error: Any) -> Any:
        return None if self._idle else leave(self, *error)

    try:
        torch.autocast.__enter__, torch.autocast.__exit__ = entered, left  # type: ignore[method-assign]
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = enter, leave  # type: ignore[method-assign]


@contextmanager
def plain_modes() -> Iterator[None]:
    """``inference_mode`` as ``no_grad``, which a graph can say, and no look at a mask's values to see it causal.

    Neither changes what a step computes.
    """
    saved = inference_mode.__enter__, inference_mode.__exit__
    detect = getattr(transformer, CAUSAL)

    def enter(self: Any) -> None:
        self._outer = torch.is_grad_enabled()
        torch.set_grad_enabled(self._outer and not self.mode)

    def leave(self: Any, *_: Any) -> None:
        torch.set_grad_enabled(self._outer)

    def causal(_mask: Tensor | None, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return bool(is_causal)

    names = "__enter__", "__exit__"
    try:
        for name, function in zip(names, (enter, leave)):
            setattr(inference_mode, name, function)
        setattr(transformer, CAUSAL, causal)
        with _no_idle_autocast():
            yield
    finally:
        setattr(transformer, CAUSAL, detect)
        for name, method in zip(names, saved):
            setattr(inference_mode, name, method)


@contextmanager
def no_draws(model: nn.Module) -> Iterator[None]:
    """Refuses a forward that draws from Python's or numpy's generator, and gives their states back.

    Raises AutoparError ``random-op``.
    """
    states: list[tuple[str, Callable[[], Any], Callable[[Any], Any]]] = [("random", random.getstate, random.setstate)]
    if numpy := sys.modules.get("numpy"):
        states.append(("numpy.random", numpy.random.get_state, numpy.random.set_state))
    before = [(get(), str(get())) for _, get, _ in states]
    yield
    for (name, get, put), (state, text) in zip(states, before):
        if str(get()) != text:
            put(state)
            raise AutoparError(
                "random-op",
                f"{type(model).__name__}: its forward draws from {name}; every step would repeat the draw of the trace",
                "draw outside and pass the number as an input, or set the rate to 0 where that skips the draw",
            )
