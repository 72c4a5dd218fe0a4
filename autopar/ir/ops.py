"""Operations of the IR that aten lacks: plain functions whose meaning on whole tensors is written here.

A Program calls them with ``call_function``. Passes replace them by runtime functions; on the way down they can be
executed as they stand, which is what the verifier compares with.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.grouped import experts as experts
from autopar.ir.scores import Masks, capped, with_sink


def convert(x: Tensor, axis: str, src: Any, dst: Any) -> Tensor:
    """A change of layout on the mesh axis ``axis`` from type ``src`` to type ``dst``; the whole value stays."""
    return x


def dropout(x: Tensor, p: float, key: int) -> Tensor:
    """Zero each element with probability ``p`` and scale the rest by 1/(1-p). ``key`` tells the graph's draws apart."""
    return F.dropout(x, p, training=True)


def draw(x: Tensor, kind: str, key: int) -> Tensor:
    """Random numbers of x's shape and dtype: "uniform" from 0 to 1, or "normal". Of x's values it reads none."""
    return torch.rand_like(x) if kind == "uniform" else torch.randn_like(x)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: int = 0,
    fill: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float | None = None,
    band: tuple[int | None, int | None] | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
) -> Tensor:
    """softmax(scores) v over the last two dims, with scores = cap tanh(q kᵀ · scale / cap) + bias, then the masks.

    Args:
        q: [..., H, S, D]. k: [..., Hkv, T, D]. v: [..., Hkv, T, Dv]. Hkv divides H where ``enable_gqa``, else H = Hkv.
        mask: bool (True: seen) or float (added), broadcastable to [..., H, S, T].
        dropout: probability at which an entry of the softmax is zeroed; ``key`` tells the graph's draws apart.
        is_causal: query i sees keys j <= i.
        scale: 1/sqrt(D) where None.
        fill: of attention that was written out: the score of what a bool mask hides, so that a query that sees nothing
            gets an average of values as it was written; None leaves such queries 0, as PyTorch's kernels do.
        bias: float, added before a bool mask hides; broadcastable like the mask.
        sink: float, broadcastable to [..., H, 1, 1]: one more score of every query, of a key whose value is 0.
        cap: bound of the scores; None for none.
        band: query i sees keys j with low <= i - j <= high; None is no bound.
        query_ids, key_ids: int [B or 1, S] and [B or 1, T]: a query sees keys of its own number.
    """
    masks = Masks(mask, is_causal, fill, bias, band, query_ids, key_ids)
    if fill is not None or sink is not None or cap is not None:
        return written_attention(q, k, v, masks, dropout, scale, sink, cap)
    if masks.several:
        mask, is_causal = masks.dense(q, k.shape[-2]), False
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def written_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masks: Masks,
    dropout: float,
    scale: float | None,
    sink: Tensor | None = None,
    cap: float | None = None,
) -> Tensor:
    """Attention step by step, with every score in memory; arguments as in ``attention``.

    A mask that is wider than q widens scores and softmax; the probabilities are cast to v's dtype.
    """
    repeats = q.shape[-3] // k.shape[-3] if q.dim() > 2 else 1
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, -3), v.repeat_interleave(repeats, -3)
    scores = capped(q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale), cap)
    return F.dropout(with_sink(masks.hide(scores), sink, masks.fill is None), dropout).to(v.dtype) @ v


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    key: int = 0,
    fill: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float | None = None,
    band: tuple[int | None, int | None] | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
    axis: str = "",
) -> Tensor:
    """``attention`` whose queries and keys may be sharded on ``axis`` along the sequence: keys and values go around."""
    return attention(
        q, k, v, mask, dropout, is_causal, scale, enable_gqa, key, fill, bias, sink, cap, band, query_ids, key_ids
    )


def token_loss(logits: Tensor, target: Tensor, ignore_index: int) -> Tensor:
    """Negative log-likelihood of each target class: logits [..., V], target [...] int64 -> [...].

    0, and no gradient, where ``target == ignore_index``. As ``F.cross_entropy(reduction="none")``.
    """
    rows = logits.reshape(-1, logits.shape[-1])
    flat = F.cross_entropy(rows, target.flatten(), ignore_index=ignore_index, reduction="none")
    return flat.view(target.shape)


def stacked(*params: Tensor) -> Tensor:
    """Parameters of experts, one above the other: [...] each -> [E, ...]."""
    return torch.stack(params)


FACTORIES = (torch.ops.aten.full.default, torch.ops.aten.arange.start_step)
"""Ops that make a tensor of numbers. They name no device in a Program: whoever runs it says where."""

IR_OPS = (convert, dropout, draw, attention, ring_attention, token_loss, experts, stacked)
ATTENTION = (attention, ring_attention)


def drawn(node: fx.Node) -> bool:
    """Whether the node draws random numbers."""
    if node.target is attention:
        return bool(node.kwargs.get("dropout", node.args[4] if len(node.args) > 4 else 0.0))
    return node.target in (dropout, draw)
