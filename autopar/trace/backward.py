"""Gradients that a model defines by hand, which a graph of its forward does not show: compared, or refused."""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError, tell
from autopar.ir.modules import named

LARGEST = 1 << 20  # elements up to which a custom backward is tried on random numbers
CLOSE = 1e-3  # relative; hand-written formulas and derivatives differ by rounding only
SIZES = ((2.0, 1.0), (1e-3, 1.0), (30.0, 1.0), (1e4, 1.0), (2.0, 1e-3), (2.0, 1e4))  # of arguments, of gradients
NOISE = (
    1e-4  # of the gradient that comes in: below it a derivative at unusual sizes is rounding, as where one saturates
)


@contextmanager
def watched(model: nn.Module) -> Iterator[None]:
    """While the context lasts, hooks on gradients are refused and custom backward functions are compared.

    Raises AutoparError ``custom-backward``; warns of a function too large to try.
    """
    _refuse_hooks(model)
    seen: dict[Any, tuple[type, list[Any]]] = {}
    apply, hook = torch.autograd.Function.__dict__["apply"], Tensor.register_hook

    def applied(cls: type, *args: Any, **kwargs: Any) -> Any:
        if not cls.__qualname__.startswith("GeneratedBackwardFor_"):  # an op with its own rule
            looks = [_look(a) for a in args]
            seen.setdefault((cls, *map(_key, looks)), (cls, looks))
        return apply.__func__(cls, *args, **kwargs)

    def register_hook(self: Tensor, function: Callable[..., Any]) -> Any:
        name = getattr(function, "__qualname__", str(function))
        raise AutoparError(
            "custom-backward", f"register_hook({name}) changes a gradient", "scale in the forward instead"
        )

    try:
        torch.autograd.Function.apply = classmethod(applied)  # type: ignore[assignment,method-assign]
        Tensor.register_hook = register_hook  # type: ignore[method-assign]
        yield
    finally:
        torch.autograd.Function.apply = apply  # type: ignore[method-assign]
        Tensor.register_hook = hook  # type: ignore[method-assign]
    for cls, looks in seen.values():
        _compare(cls, looks)


def _refuse_hooks(model: nn.Module) -> None:
    hooked = sorted(n or "the model" for n, m in named(model).items() if m._backward_hooks or m._backward_pre_hooks)
    hooked += sorted(
        n for n, p in model.named_parameters() if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)
    )
    if hooked:
        raise AutoparError(
            "custom-backward",
            f"{', '.join(hooked)}: a backward hook, which does not run in the parallel model",
            "remove it; change gradients between backward and optimizer.step(), or scale in the forward",
        )


def _look(value: Any) -> Any:
    return (tuple(map(int, value.shape)), value.dtype) if isinstance(value, Tensor) else value


def _key(value: Any) -> Any:
    """What tells arguments apart: numbers, strings and their nests by what they are, anything else by identity."""
    if isinstance(value, (tuple, list)):
        return (type(value), *map(_key, value))
    plain = value is None or isinstance(value, (bool, int, float, complex, str, torch.dtype))
    return (type(value), repr(value) if plain else id(value))


def _forward_of(function: Any) -> Callable[..., Any]:
    """The forward as plain operations, which is what a trace sees."""
    apart = function.setup_context is not torch.autograd.Function.setup_context
    return function.forward if apart else functools.partial(function.forward, _Context())


def _compare(function: Any, args: list[Any]) -> None:
    """The function's own backward against the derivative of its forward, on random numbers."""
    name = f"{function.__module__}.{function.__qualname__}"
    sizes = [math.prod(a[0]) for a in args if _is_tensor(a)]
    try:
        if max(sizes, default=0) > LARGEST:
            raise ValueError("too large")
        same = all(_agree(function, args, *size) for size in SIZES)
    except Exception as error:
        text = f"{name}: its backward is replaced by the derivative of its forward, and could not be compared ({error})"
        tell([text])
        return
    if not same:
        raise AutoparError(
            "custom-backward",
            f"{name}: its backward is not the derivative of its forward, which is all that a trace sees",
            "write a forward whose derivative is that gradient: x + (f(x) - x).detach() passes straight through",
        )


def _agree(function: Any, looks: list[Any], size: float, incoming: float) -> bool:
    """Whether the backward and the derivative are as good as equal where both are finite."""
    mine, theirs = (_gradients(run, looks, size, incoming) for run in (function.apply, _forward_of(function)))
    floor = 0.0 if (size, incoming) == SIZES[0] else NOISE * incoming
    for a, b in zip(mine, theirs):
        a, b = (torch.zeros(()) if g is None else g for g in (a, b))
        a, b = (torch.where(a.isfinite() & b.isfinite(), g, 0.0) for g in (a, b))
        close = max(CLOSE, 8 * torch.finfo(a.dtype).eps)
        if (a - b).abs().max() > max(close * float(max(a.abs().max(), b.abs().max())), floor):
            return False
    return True


class _Context:
    """Takes the place of the autograd context while a forward runs as plain operations."""

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        pass

    def set_materialize_grads(self, value: bool) -> None:
        pass


def _is_tensor(value: Any) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and isinstance(value[1], torch.dtype)


def _gradients(run: Callable[..., Any], looks: list[Any], size: float, incoming: float) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(0)
    args = [_random(a, size, generator) if _is_tensor(a) else a for a in looks]
    leaves = [a for a in args if isinstance(a, Tensor) and a.requires_grad]
    with torch.enable_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        out = run(*args)
        floats = [o for o in (out if isinstance(out, tuple) else (out,)) if isinstance(o, Tensor) and o.requires_grad]
        if not floats:
            return [None] * len(leaves)
        weights = [(torch.randn(o.shape, generator=generator) * incoming).to(o.dtype) for o in floats]
        return list(torch.autograd.grad(floats, leaves, weights, allow_unused=True))


def _random(look: tuple[tuple[int, ...], torch.dtype], size: float, generator: torch.Generator) -> Tensor:
    shape, dtype = look
    if dtype.is_floating_point:
        return (torch.randn(shape, generator=generator) * size).to(dtype).requires_grad_()
    return torch.randint(0, 2, shape, generator=generator).to(dtype)
