"""Initial weights of a model on the meta device: one module at a time, the same on every mesh."""

import copy
import threading
import zlib
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

_STREAM = threading.Lock()  # initialisers draw from the process's generator, which simulated ranks share


def materialise(model: nn.Module, names: set[str], seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, whole tensor on the CPU) for each of ``names``, which lie on the meta device; only one module's at once.

    A module's tensors are made by its own initialiser, then by those of the modules that hold it, innermost first, as
    when the model is built. The model is only read.

    Args:
        names: parameters and buffers; those tied to another name are asked for by one name.
        seed: of the random stream, which also depends on the module's path.

    Raises:
        AutoparError: ``meta-initialiser`` or ``meta-buffer`` where no initialiser fills a tensor.
    """
    for path, module in model.named_modules():
        dot = path + "." if path else ""
        own = [*module._parameters, *module._buffers]
        mine = [n for n in own if dot + n in names]
        if not mine:
            continue
        made = _make(model, path, mine, seed, 0)
        again = made if all(made[n].is_floating_point() for n in mine) else _make(model, path, mine, seed, 1)
        for name in mine:
            if _untouched(made[name], again[name]):
                raise _refusal(module, dot + name, name in module._buffers)
            yield dot + name, made[name]


def _make(model: nn.Module, path: str, names: list[str], seed: int, fill: int) -> dict[str, Tensor]:
    """The module's tensors after every initialiser ran, from memory filled with ``fill``, or NaN where it can be."""
    chain = _chain(model, path)
    copies = [_shallow(m) for m in chain]
    for parent, child, key in zip(copies, copies[1:], path.split(".")):
        parent._modules[key] = child
    inner = copies[-1]
    for name in names:
        table = inner._parameters if name in inner._parameters else inner._buffers
        old = table[name]
        assert old is not None
        value = float("nan") if old.is_floating_point() else fill
        new = torch.full(old.shape, value, dtype=old.dtype, device="cpu")
        table[name] = nn.Parameter(new, old.requires_grad) if name in inner._parameters else new  # type: ignore[assignment]
    with _STREAM, torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed ^ zlib.crc32(path.encode()))
        for depth in reversed(range(len(copies))):
            initialiser = _initialiser(copies[: depth + 1])
            if initialiser is not None:
                initialiser()
    made = {**inner._parameters, **inner._buffers}
    return {n: made[n].detach() for n in names}  # type: ignore[union-attr]


def _chain(model: nn.Module, path: str) -> list[nn.Module]:
    """The model, ..., the module at ``path``."""
    chain = [model]
    for key in filter(None, path.split(".")):
        child = chain[-1]._modules[key]
        assert child is not None
        chain.append(child)
    return chain


def _shallow(module: nn.Module) -> nn.Module:
    """A copy with tables of its own, so that writing to them leaves the module as it was."""
    out = copy.copy(module)
    for table in ("_parameters", "_buffers", "_modules"):
        out.__dict__[table] = dict(module.__dict__[table])
    return out


def _initialiser(chain: list[nn.Module]) -> Callable[[], object] | None:
    """How the last module of the chain is initialised: by the nearest ``_init_weights``, or by itself."""
    module = chain[-1]
    for holder in reversed(chain):
        rule = getattr(holder, "_init_weights", None)
        if callable(rule):
            return partial(rule, module)
    for name in ("reset_parameters", "_reset_parameters"):
        rule = getattr(module, name, None)
        if callable(rule):
            return rule
    return None


def _untouched(made: Tensor, again: Tensor) -> bool:
    """Whether memory shows through: a NaN, or the filling where two fillings gave two results."""
    if made.is_floating_point():
        return bool(made.isnan().any())
    return made.numel() > 0 and bool((made != again).any())


def _refusal(module: nn.Module, name: str, is_buffer: bool) -> AutoparError:
    what = "buffer" if is_buffer else "parameter"
    return AutoparError(
        "meta-buffer" if is_buffer else "meta-initialiser",
        f"{name}: {type(module).__name__} on the meta device has no initialiser that fills this {what}",
        "give the module a reset_parameters() that fills it, load a checkpoint, or build the model on the CPU",
    )
