"""``torch.cond`` in a graph without branches: both are computed, and a number chooses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from autopar.errors import AutoparError
from autopar.trace import places


@contextmanager
def both_branches(model: nn.Module) -> Iterator[None]:
    """While the context lasts, ``torch.cond`` runs both branches and takes each tensor from the chosen one.

    Operands get no gradient from the other branch, also where it computes infinities of them. Parameters that it reads
    besides get zero times its derivatives, which must be finite.
    Raises AutoparError ``data-dependent-control-flow`` where a branch writes into a buffer or an attribute of a
    module, or the branches give results of different kinds.
    """
    saved = torch.cond

    def refuse(what: str) -> NoReturn:
        fix = "give both branches' values as tensors of one shape and dtype, and write them behind torch.cond"
        raise AutoparError("data-dependent-control-flow", f"{places.here(model)}: torch.cond: {what}", fix)

    def state() -> list[Any]:
        modules = list(model.modules())
        held = [(k, id(v)) for m in modules for k, v in m.__dict__.items() if k not in ("_parameters", "_buffers")]
        return [*held, *((id(b), b._version) for b in model.buffers())]

    def cond(
        pred: Any, true_fn: Callable[..., Any], false_fn: Callable[..., Any], operands: tuple[Any, ...] = ()
    ) -> Any:
        if not isinstance(pred, Tensor):
            return (true_fn if pred else false_fn)(*operands)
        before, number = state(), pred.reshape(())

        def given(chosen: bool) -> Any:
            """The operands, whose gradients are those of one branch where it is the chosen one, else zero."""

            def own(x: Any) -> Any:
                if not isinstance(x, Tensor) or not x.requires_grad:
                    return x
                return torch.where(number, x, x.detach()) if chosen else torch.where(number, x.detach(), x)

            return tree_map(own, operands)

        (yes, one), (no, other) = tree_flatten(true_fn(*given(True))), tree_flatten(false_fn(*given(False)))
        if state() != before:
            refuse("a branch writes into a buffer or an attribute")
        if one != other or [_look(v) for v in yes] != [_look(v) for v in no]:
            refuse(f"the branches give {[_look(v) for v in yes]} and {[_look(v) for v in no]}")
        pairs = zip(yes, no, strict=True)
        chosen = [torch.where(number, a, b) if isinstance(a, Tensor) else a for a, b in pairs]
        return tree_unflatten(chosen, one)

    try:
        torch.cond = cond  # type: ignore[assignment]
        yield
    finally:
        torch.cond = saved


def _look(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value
