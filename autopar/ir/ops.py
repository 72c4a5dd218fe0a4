"""Operations of the IR that aten lacks: plain functions whose meaning on whole tensors is written here.

A Program calls them with ``call_function``. Passes replace them by runtime functions; on the way down they can be
executed as they stand, which is what the verifier compares with.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.ir.grouped import experts as experts


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
) -> Tensor:
    """softmax(q kᵀ · scale + mask) v over the last two dims.

    Args:
        q: [..., H, S, D]. k: [..., Hkv, T, D]. v: [..., Hkv, T, Dv]. Hkv divides H where ``enable_gqa``, else H = Hkv.
        mask: bool (True: seen) or float (added), broadcastable to [..., H, S, T].
        dropout: probability at which an entry of the softmax is zeroed; ``key`` tells the graph's draws apart.
        is_causal: query i sees keys j <= i.
        scale: 1/sqrt(D) where None.
        fill: of attention that was written out: the score of what a bool mask hides, so that a query that sees nothing
            gets an average of values as it was written; None leaves such queries 0, as PyTorch's kernels do.
    """
    if fill is not None:
        return written_attention(q, k, v, mask, dropout, is_causal, scale, fill)
    return F.scaled_dot_product_attention(
        q, k, v, mask, dropout_p=dropout, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
    )


def written_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    dropout: float,
    is_causal: bool,
    scale: float | None,
    fill: float,
) -> Tensor:
    """Attention step by step, with every score in memory; arguments as in ``attention``.

    A mask that is wider than q widens scores and softmax; the probabilities are cast to v's dtype.
    """
    scores = hidden_scores(q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale), mask, fill)
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1), -math.inf)
    return F.dropout(scores.softmax(-1), dropout).to(v.dtype) @ v


def hidden_scores(scores: Tensor, mask: Tensor | None, fill: float | None) -> Tensor:
    """Scores with a mask: bool (False: ``fill``, or minus infinity where None) or added."""
    if mask is None:
        return scores
    if mask.dtype != torch.bool:
        return scores + mask
    return scores.masked_fill(~mask, -math.inf if fill is None else _within(fill, scores.dtype))


def _within(value: float, dtype: torch.dtype) -> float:
    """The nearest number that ``dtype`` has: a score may have been written in a wider one."""
    most = torch.finfo(dtype).max
    return min(max(value, -most), most) if math.isfinite(value) else value


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
    axis: str = "",
) -> Tensor:
    """``attention`` whose queries and keys may be sharded on ``axis`` along the sequence: keys and values go around."""
    return attention(q, k, v, mask, dropout, is_causal, scale, enable_gqa, key, fill)


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
