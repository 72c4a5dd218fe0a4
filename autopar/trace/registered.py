"""Layers of experts that the structure does not give away: said by the user, in the user's own terms."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir import grouped
from autopar.ir.grouped import Body
from autopar.ir.program import Spec
from autopar.rules.experts import keeps_rows
from autopar.trace.expert_body import Step, body_of, steps_of
from autopar.trace.record import Unrecognized, aside
from autopar.trace.witness import Listing, Scores, Witness

Adapter = Callable[..., Any]
_ADAPTERS: dict[type, Adapter] = {}
ROWS = (3, 5)


def register_experts(kind: type[nn.Module], adapter: Adapter) -> None:
    """Let ``adapter`` stand in for the forward of modules of a class while a model that has them is traced.

    Args:
        kind: the class; its subclasses are not meant.
        adapter: called as ``adapter(module, *args, **kwargs)``; returns what the forward would, calling
            ``autopar.experts`` where tokens meet their experts.
    """
    _ADAPTERS[kind] = adapter


def adapter_of(kind: type) -> Adapter | None:
    """What stands in for the forward of a class."""
    return _ADAPTERS.get(kind)


def experts(hidden: Tensor, index: Tensor, weights: Tensor, *params: Tensor, expert: Callable[..., Tensor]) -> Tensor:
    """out[t] = Σ_j weights[t, j] · expert(hidden[t], params of expert index[t, j]).

    Args:
        hidden: [T, H]. index: [T, k], int; an expert that is none of 0 to E-1 adds nothing. weights: [T, k].
        params: stacked parameters [E, ...].
        expert: what one expert computes: ``expert(rows [n, H], *its slices) -> [n, O]``, each row by itself; parameters
            as matrices of products, or as vectors added or multiplied.

    Returns:
        [T, O] in the dtype of ``hidden``.

    Raises:
        AutoparError: ``expert-body`` where ``expert`` is no such function.
    """
    if not torch.compiler.is_exporting():
        return _plainly(hidden, index, weights, params, expert)
    body, width = body_of_function(expert, hidden, params)
    out: Tensor = torch.ops.autopar.experts(hidden, index, weights, list(params), repr(body), width, hidden.dtype)
    return out


def _plainly(
    hidden: Tensor, index: Tensor, weights: Tensor, params: tuple[Tensor, ...], expert: Callable[..., Tensor]
) -> Tensor:
    """The same, one expert after the other."""
    order, ends = grouped.arrange(index, params[0].shape[0])
    starts = [0, *ends.tolist()]
    rows = hidden.index_select(0, order // index.shape[1])
    parts = [expert(rows[a:b], *(p[e] for p in params)) for e, (a, b) in enumerate(zip(starts, starts[1:]))]
    scale = weights.reshape(-1).index_select(0, order)[: starts[-1], None]
    made = torch.cat(parts) * scale
    out = made.new_zeros(len(hidden), made.shape[1])
    return out.index_add(0, order[: starts[-1]] // index.shape[1], made).to(hidden.dtype)


def body_of_function(expert: Callable[..., Tensor], hidden: Tensor, params: tuple[Tensor, ...]) -> tuple[Body, int]:
    """The body that a function is, and its width. Raises AutoparError ``expert-body``."""
    width = int(hidden.shape[-1])
    specs = {f"p{i}": Spec(tuple(map(int, p.shape)), p.dtype) for i, p in enumerate(params)}
    try:
        with aside(), torch.no_grad():
            found = {_body(expert, Spec((rows, width), hidden.dtype), specs) for rows in ROWS}
        if len(found) != 1:
            raise Unrecognized("it depends on the number of its rows")
    except Unrecognized as error:
        fix = "use parameters in x @ w, linear(x, w), + b or * b, and treat each row by itself"
        raise AutoparError("expert-body", f"what an expert computes cannot be one op: {error}", fix) from error
    return found.pop()


def _body(expert: Callable[..., Tensor], x: Spec, params: dict[str, Spec]) -> tuple[Body, int]:
    seen, one = Witness(1, Scores()), frozenset({0})
    rows = torch.empty(x.shape, dtype=x.dtype, device="meta")
    slices = [torch.empty(s.shape[1:], dtype=s.dtype, device="meta") for s in params.values()]
    inputs = [seen.track(t, f"v{i}", one) for i, t in enumerate((rows, *slices))]
    with Listing(seen), seen:
        out = expert(rows, *slices)
    if not isinstance(out, Tensor) or out.ndim != 2 or len(out) != len(rows) or id(out) not in seen.nodes:
        raise Unrecognized("the result is not a row for each row")
    steps: tuple[Step, ...] = steps_of(seen.graph.nodes, inputs, seen.nodes[id(out)])
    body = body_of(steps, x, params)
    if not keeps_rows(body, x, tuple(params.values())):
        raise Unrecognized("it mixes its rows")
    return body, int(out.shape[1])
