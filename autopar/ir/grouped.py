"""Experts on rows that are sorted by expert: what one expert computes, written once and run for all of them.

A body is a nested tuple of plain values, so that it can stand in a node's arguments, be compared, printed and emitted:
a step is (op, arguments, keyword arguments), ``("%", i)`` stands for value i. Value 0 is the rows [M, H], values 1 to P
are the stacked parameters [E, ...], each step makes the next one; the last value is the result.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.fx
from torch import Tensor

Body = tuple[tuple[str, tuple[Any, ...], tuple[tuple[str, Any], ...]], ...]


@torch.library.custom_op("autopar::expert_grouped_mm", mutates_args=())
def grouped_mm(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows [M, i] times the matrix of their expert [E, i, o] -> [M, o]; expert e has rows offsets[e-1] to offsets[e].

    Rows behind the last offset are 0.
    """
    if _has_kernel(x, weight):
        known = torch.arange(len(x), device=x.device)[:, None] < offsets[-1]
        return torch._grouped_mm(x, weight, offs=offsets.to(torch.int32)).where(known, x.new_zeros(()))
    out = x.new_zeros(x.shape[0], weight.shape[2])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end], weight[expert], out=out[start:end])
        start = end
    return out


@grouped_mm.register_fake
def _(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[2])


@torch.library.custom_op("autopar::expert_grouped_mm_weight", mutates_args=())
def grouped_outer(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    """xᵀ grad of each expert's rows: [M, i], [M, o] -> [E, i, o]; 0 for an expert without rows."""
    out = x.new_zeros(offsets.shape[0], x.shape[1], grad.shape[1])
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        if end > start:
            torch.mm(x[start:end].t(), grad[start:end], out=out[expert])
        start = end
    return out


@grouped_outer.register_fake
def _(x: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    return x.new_empty(offsets.shape[0], x.shape[1], grad.shape[1])


def _has_kernel(x: Tensor, weight: Tensor) -> bool:
    """Whether the device multiplies all groups at once; its kernel takes bfloat16 in rows of 16 bytes."""
    aligned = x.shape[1] % 8 == 0 and weight.shape[2] % 8 == 0
    return x.is_cuda and x.dtype == weight.dtype == torch.bfloat16 and aligned


def _save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
    x, weight, offsets = ctx.saved_tensors
    grad = grad.contiguous()
    of_x = grouped_mm(grad, weight.transpose(1, 2), offsets) if ctx.needs_input_grad[0] else None
    if not ctx.needs_input_grad[1]:
        return of_x, None, None
    # In the order of the parameter, of which the weight may be a transposed view: else it would be copied once more.
    if weight.is_contiguous() or not weight.transpose(1, 2).is_contiguous():
        return of_x, grouped_outer(x, grad, offsets), None
    return of_x, grouped_outer(grad, x, offsets).transpose(1, 2), None


grouped_mm.register_autograd(_backward, setup_context=_save)


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """Stands in a body for the product of rows [M, i] with weights [E, o, i] of their experts."""
    return x.new_empty(x.shape[0], weight.shape[1])


def matmul(x: Tensor, weight: Tensor) -> Tensor:
    """Stands in a body for the product of rows [M, i] with weights [E, i, o] of their experts."""
    return x.new_empty(x.shape[0], weight.shape[2])


def each(vector: Tensor, rows: int) -> Tensor:
    """Stands in a body for the vector [E, o] of each row's expert: [rows, o]."""
    return vector.new_empty(rows, vector.shape[1])


STAND_INS: dict[str, Callable[..., Any]] = {"linear": linear, "matmul": matmul, "each": each}


@lru_cache(maxsize=None)
def target_of(name: str) -> Callable[..., Any]:
    """The op that a step names: ``aten.silu.default``, ``getitem``, or a stand-in."""
    if name in STAND_INS:
        return STAND_INS[name]
    if name == "getitem":
        return operator.getitem
    namespace, op, overload = name.split(".")
    found: Callable[..., Any] = getattr(getattr(getattr(torch.ops, namespace), op), overload)
    return found


def body_text(body: Body) -> str:
    """The ops of a body in order, for people: ``linear-silu-mul-linear``."""
    names = (name.split(".")[1] if "." in name else name for name, _, _ in body)
    return "-".join(n for n in names if n != "getitem")


def resolve(value: Any, values: Sequence[Any]) -> Any:
    """An argument of a step with values in place of what stands for them."""
    if isinstance(value, (tuple, list)):
        if len(value) == 2 and value[0] == "%":
            return values[value[1]]
        return [resolve(v, values) for v in value]
    return value


def written(value: Any, at: Mapping[Any, int]) -> Any:
    """The reverse of ``resolve``: values by their numbers, lists as tuples."""
    if isinstance(value, (tuple, list)):
        return tuple(written(v, at) for v in value)
    return ("%", at[value]) if isinstance(value, torch.fx.Node) else value


def run_body(body: Body, x: Tensor, params: Sequence[Tensor], offsets: Tensor) -> Tensor:
    """The body's result [M, o] for rows [M, H] sorted by expert; expert e's end at ``offsets[e]``."""
    values: list[Any] = [x, *params]
    owner: Tensor | None = None
    for name, args, kwargs in body:
        given = [resolve(a, values) for a in args]
        if name == "linear":
            made: Any = grouped_mm(given[0], given[1].transpose(1, 2), offsets)
        elif name == "matmul":
            made = grouped_mm(given[0], given[1], offsets)
        elif name == "each":
            owner = _owners(offsets, x.shape[0]) if owner is None else owner
            made = given[0].index_select(0, owner)
        else:
            made = target_of(name)(*given, **{k: resolve(v, values) for k, v in kwargs})
        values.append(made)
    result: Tensor = values[-1]
    return result


def _owners(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row; of rows behind the last offset the last expert."""
    found = torch.searchsorted(offsets, torch.arange(rows, device=offsets.device), right=True)
    return found.clamp(max=offsets.shape[0] - 1)


def arrange(index: Tensor, count: int, first: int = 0) -> tuple[Tensor, Tensor]:
    """How to sort the choices [T, k] by expert.

    Returns:
        The order: places in the flattened choices, those of experts ``first`` to ``first + count`` before all others;
        and where the rows of each of these experts end.
    """
    ids = index.reshape(-1) - first
    key = torch.where((ids >= 0) & (ids < count), ids, count)
    ordered, order = torch.sort(key, stable=True)
    ends = torch.searchsorted(ordered, torch.arange(count, device=ids.device), right=True)
    return order, ends


def combine(y: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Each token's results [T·k, o], in the order of the choices, weighted by [T, k] and added up: [T, o].

    The sum is in the wider dtype of the weighted rows and of the result.
    """
    rows = y.reshape(*weights.shape, y.shape[-1]) * weights.unsqueeze(-1)
    return rows.sum(1, dtype=torch.promote_types(rows.dtype, dtype)).to(dtype)


def restored(rows: Tensor, order: Tensor) -> Tensor:
    """Rows of the first of ``order``'s places, at those places; 0 at the others."""
    if len(rows) == len(order):
        return rows.index_select(0, inverse_of(order))
    return rows.new_zeros(len(order), rows.shape[1]).index_copy(0, order[: len(rows)], rows)


def inverse_of(order: Tensor) -> Tensor:
    """The permutation that undoes ``order``."""
    return torch.empty_like(order).index_copy(0, order, torch.arange(len(order), device=order.device))


def experts(
    hidden: Tensor,
    index: Tensor,
    weights: Tensor,
    params: Sequence[Tensor],
    body: Body,
    dtype: torch.dtype,
    first: int | None = None,
    capacity: float | None = None,
    chunks: int | None = None,
) -> Tensor:
    """out[t] = Σ_j weights[t, j] · body(hidden[t]; params[index[t, j]]).

    Args:
        hidden: [T, H]. index: [T, k], int. weights: [T, k].
        params: stacked parameters [E, ...]: of experts ``first`` to ``first + E``; of all of them where None. Other
            experts contribute nothing.
        body: what one expert computes.
        dtype: of the result.
        capacity, chunks: where rows travel to other ranks, each rank sends at most ``capacity`` times its mean to an
            expert; they travel in ``chunks`` parts while others are computed, as one where None.
    """
    count, k = params[0].shape[0], index.shape[1]
    order, ends = arrange(index, count, first or 0)
    some = first is not None and not ends.is_meta and not torch.compiler.is_compiling()
    mine = order[: int(ends[-1])] if some else order
    y = run_body(body, hidden.index_select(0, mine // k), params, ends)
    known = (torch.arange(y.shape[0], device=y.device) < ends[-1]).unsqueeze(-1)
    return combine(restored(torch.where(known, y, y.new_zeros(())), order), weights, dtype)
