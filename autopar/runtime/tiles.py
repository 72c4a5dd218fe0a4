"""Attention over tiles of queries and keys, each with a running maximum and sum, and which tiles a mask leaves.

A tile's part of the softmax is (numerator, maximum, sum), and parts are merged by rescaling to the larger maximum
(Milakov and Gimelshein 2018; Dao et al. 2022, section 3.1). The maximum and the sum are kept apart: a log-sum-exp would
lose the sum where an additive mask makes every score as low as the dtype goes.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Run = tuple[int, int]  # first global position, length

TILE = 1024  # rows and columns computed at once where a mask or no kernel fits: 4 MiB of float32 scores a head

_aten = torch.ops.aten


@dataclass(frozen=True)
class Band:
    """Which keys a query may see by position alone: low <= query - key <= high; None is no bound."""

    low: int | None = None
    high: int | None = None

    @staticmethod
    def of(causal: bool, window: int | None = None) -> "Band":
        """Keys up to the query's own position, the last ``window`` of them, or both."""
        return Band(0 if causal else None, None if window is None else window - 1)

    def covers(self, query: Run, key: Run) -> bool | None:
        """True where all of the tile is seen, False where none of it is, None where it is cut."""
        least, most = query[0] - (key[0] + key[1] - 1), query[0] + query[1] - 1 - key[0]
        if (self.low is not None and most < self.low) or (self.high is not None and least > self.high):
            return False
        inside = (self.low is None or least >= self.low) and (self.high is None or most <= self.high)
        return True if inside else None

    def mask(self, query: Run, key: Run, device: torch.device) -> Tensor:
        """The tile's entries that are seen, bool [query length, key length]."""
        rows = torch.arange(query[0], query[0] + query[1], device=device).unsqueeze(-1)
        apart = rows - torch.arange(key[0], key[0] + key[1], device=device)
        seen = torch.ones(apart.shape, dtype=torch.bool, device=device)
        if self.low is not None:
            seen = seen & (apart >= self.low)
        return seen & (apart <= self.high) if self.high is not None else seen


@dataclass(frozen=True)
class Tile:
    """Queries ``rows`` against keys ``columns`` (slices of the local tensors), at their global positions."""

    rows: slice
    columns: slice
    query: Run
    key: Run
    cut: bool  # the band hides some of it
    diagonal: bool  # what is left is the lower triangle of a square


def tiles(queries: tuple[Run, ...], keys: tuple[Run, ...], band: Band, size: int | None = None) -> Iterator[Tile]:
    """The tiles of two local sequences that the band does not hide, at most ``size`` long each way where given.

    A run against a run is one tile where nothing of it, or exactly its upper triangle, is hidden; else it is cut up.
    """
    at = 0
    for query in queries:
        to = 0
        for key in keys:
            yield from _of_pair(query, at, key, to, band, size)
            to += key[1]
        at += query[1]


def _of_pair(query: Run, at: int, key: Run, to: int, band: Band, size: int | None) -> Iterator[Tile]:
    seen = band.covers(query, key)
    diagonal = seen is None and query == key and band.low == 0 and (band.high is None or band.high >= query[1] - 1)
    limit = size if size is not None else None if seen or diagonal else TILE
    if seen is False:
        return
    if limit is None or (query[1] <= limit and key[1] <= limit):
        rows, columns = slice(at, at + query[1]), slice(to, to + key[1])
        yield Tile(rows, columns, query, key, seen is None, diagonal)
        return
    for q in _cut(query, limit):
        for k in _cut(key, limit):
            yield from _of_pair(q, at + q[0] - query[0], k, to + k[0] - key[0], band, limit)


def _cut(run: Run, limit: int) -> Iterator[Run]:
    for start in range(0, run[1], limit):
        yield run[0] + start, min(limit, run[1] - start)


@dataclass
class State:
    """Softmax of some rows so far: ``acc`` [B, H, S, E] over exp(top), ``top`` and ``total`` [B, H, S, 1], all wide."""

    acc: Tensor
    top: Tensor
    total: Tensor

    @staticmethod
    def empty(q: Tensor, width: int, dtype: torch.dtype) -> "State":
        """Of rows that have seen nothing."""
        shape = q.shape[:-1]
        return State(
            q.new_zeros((*shape, width), dtype=dtype),
            q.new_full((*shape, 1), -math.inf, dtype=dtype),
            q.new_zeros((*shape, 1), dtype=dtype),
        )

    def begin(self, sink: Tensor) -> None:
        """Count one more score of every row, [1, H or 1, 1, 1], whose value is 0."""
        self.top.copy_(sink.to(self.top.dtype).expand_as(self.top))
        self.total.fill_(1.0)

    def merge(self, rows: slice, acc: Tensor, top: Tensor, total: Tensor) -> None:
        """Add a tile's part to the rows."""
        old = self.top[..., rows, :]
        new = torch.maximum(old, top)
        base = finite(new)
        mine, theirs = (old - base).exp(), (top - base).exp()
        self.acc[..., rows, :] = self.acc[..., rows, :] * mine + acc * theirs
        self.total[..., rows, :] = self.total[..., rows, :] * mine + total * theirs
        self.top[..., rows, :] = new

    def result(self) -> Tensor:
        """The attention of the rows; 0 where one has seen nothing."""
        return torch.where(self.total > 0, self.acc / self.total, 0.0)


def finite(top: Tensor) -> Tensor:
    """A maximum to subtract: 0 where nothing is seen, since -inf - -inf is no number."""
    return torch.where(top == -math.inf, 0.0, top)


def wide_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype of accumulation: at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


@dataclass(frozen=True)
class Scores:
    """How a tile's scores are made: scale, cap, bias, what a mask, numbers and the band hide.

    Args:
        mask: bool (True: seen), bias: float (added), each [B or 1, H or 1, S or 1, T of all keys]; None for none.
        fill: the score of what the mask hides; minus infinity where None.
        cap: scores are cap tanh(scores / cap), before the bias.
        ids: numbers of queries [B or 1, S] and of all keys [B or 1, T]: a query sees keys of its own number.
        by_sum: gradients are those of PyTorch's kernels, which know a row by its log-sum-exp alone.
    """

    scale: float
    band: Band
    mask: Tensor | None = None
    bias: Tensor | None = None
    fill: float | None = None
    cap: float | None = None
    ids: tuple[Tensor, Tensor] | None = None
    by_sum: bool = False

    @property
    def by_kernel(self) -> bool:
        """Whether a fused kernel computes the same: a bias needs maximum and sum apart."""
        return self.bias is None and self.fill is None and self.cap is None

    def dense(self) -> bool:
        """Whether a tile has entries of its own in memory."""
        return self.mask is not None or self.bias is not None or self.ids is not None

    def seen(self, tile: Tile, device: torch.device) -> Tensor | None:
        """The bool entries that are seen, band, numbers and mask together; None where all are."""
        part, last = _part(self.mask, tile), self.last(tile, device)
        return last if part is None else part if last is None else part & last

    def last(self, tile: Tile, device: torch.device) -> Tensor | None:
        """What band and numbers leave, bool; None where all is."""
        band = self.band.mask(tile.query, tile.key, device) if tile.cut else None
        if self.ids is None:
            return band
        keys = self.ids[1][:, tile.key[0] : tile.key[0] + tile.key[1]]
        same = (self.ids[0][:, tile.rows].unsqueeze(-1) == keys.unsqueeze(-2)).unsqueeze(1)
        return same if band is None else same & band

    def empty(self, tile: Tile, device: torch.device) -> bool:
        """Whether nothing of the tile is seen; False where only a value would tell and the code is being compiled."""
        if not self.dense() or self.fill is not None or torch.compiler.is_compiling():
            return False
        seen = self.seen(tile, device)
        return seen is not None and not bool(seen.any())

    def of(self, q: Tensor, k: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """Scores [B, G, r, s, t] of q [B, H, s, D] and k [B, G, t, D], H = G r, and their slope under the cap."""
        groups, slope = k.shape[1], None
        scores = grouped(q, groups) @ k.unsqueeze(2).transpose(-2, -1) * self.scale
        if self.cap is not None:
            bounded = torch.tanh(scores / self.cap)
            scores, slope = bounded * self.cap, 1 - bounded.square()
        bias, mask, last = _part(self.bias, tile), _part(self.mask, tile), self.last(tile, q.device)
        if bias is not None:
            scores = scores + grouped(bias, groups).to(scores.dtype)
        if mask is not None:
            scores = scores.masked_fill(~grouped(mask, groups), -math.inf if self.fill is None else self.fill)
        if last is not None:
            scores = scores.masked_fill(~grouped(last, groups), -math.inf)
        return scores, slope

    def constant(self, tile: Tile, groups: int) -> Tensor | None:
        """The scores that a finite ``fill`` replaced: no gradient flows through them."""
        part = None if self.fill is None else _part(self.mask, tile)
        return None if part is None else ~grouped(part, groups)


def _part(mask: Tensor | None, tile: Tile) -> Tensor | None:
    """The mask's entries of a tile: its keys lie at their global places."""
    if mask is None:
        return None
    columns = slice(tile.key[0], tile.key[0] + tile.key[1]) if mask.shape[-1] != 1 else slice(0, 1)
    return mask[..., tile.rows if mask.shape[-2] != 1 else slice(0, 1), columns]


def grouped(x: Tensor, groups: int) -> Tensor:
    """[B, H, S, D] as [B, G, r, S, D]; a mask's head dim of 1 (or none) broadcasts over groups."""
    if x.dim() < 4 or x.shape[-3] == 1:
        return x.unsqueeze(-3) if x.dim() >= 3 else x
    return x.unflatten(-3, (groups, x.shape[-3] // groups))


def forward_tile(state: State, q: Tensor, k: Tensor, v: Tensor, tile: Tile, scores: Scores) -> None:
    """Merge one tile's attention into ``state``: q [B, H, S, D], k [B, G, T, D], v [B, G, T, E], all wide."""
    if scores.empty(tile, q.device):
        return
    q, k, v = q[..., tile.rows, :], k[..., tile.columns, :], v[..., tile.columns, :]
    if scores.by_kernel and fused(q, v):
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, tile.diagonal and not scores.dense(), attn_mask=_added(q, tile, scores), scale=scores.scale
        )
        seen = scores.seen(tile, q.device) if not tile.diagonal or scores.dense() else None
        lse = lse.unsqueeze(-1)
        if seen is not None:  # the kernel returns 0 for rows that see nothing
            some = seen.any(-1, keepdim=True)
            out, lse = out.masked_fill(~some, 0.0), lse.masked_fill(~some, -math.inf)
        state.merge(tile.rows, out, lse, torch.where(lse == -math.inf, 0.0, 1.0))
        return
    s, _ = scores.of(q, k, tile)
    top = s.amax(-1, keepdim=True)
    p = (s - finite(top)).exp()
    acc = p @ v.unsqueeze(2)
    state.merge(tile.rows, acc.flatten(1, 2), top.flatten(1, 2), p.sum(-1, keepdim=True).flatten(1, 2))


def fused(q: Tensor, v: Tensor) -> bool:
    """Whether torch's flash attention for CPU, which returns the log-sum-exp, takes such queries and values."""
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1]


def _added(q: Tensor, tile: Tile, scores: Scores) -> Tensor | None:
    """What the kernel adds to the scores, or None; of a diagonal tile it knows the triangle itself."""
    if tile.diagonal and not scores.dense():
        return None
    seen, bias = scores.seen(tile, q.device), _part(scores.bias, tile)
    if seen is None:
        return None if bias is None else bias.to(q.dtype)
    base = torch.zeros(seen.shape, dtype=q.dtype, device=q.device) if bias is None else bias.to(q.dtype)
    return torch.where(seen, base, -math.inf)


@dataclass
class Saved:
    """What the backward of some rows needs, all wide: their queries, result, its gradient, maximum and sum."""

    q: Tensor
    out: Tensor
    grad: Tensor
    top: Tensor
    total: Tensor

    def of_sink(self, sink: Tensor) -> Tensor:
        """The gradient of the score that every row has beside those of keys."""
        p = (sink.to(self.top.dtype) - finite(self.top)).exp() / self.total
        delta = (self.grad * self.out).sum(-1, keepdim=True)
        return -(p * delta).sum_to_size(sink.shape).to(sink.dtype)


Grads = tuple[Tensor, Tensor, Tensor]


def backward_tile(
    saved: Saved, k: Tensor, v: Tensor, tile: Tile, scores: Scores, grads: Grads, bias_grad: Tensor | None
) -> None:
    """Add one tile's gradients to ``grads`` (of q, k and v) and to the bias's."""
    if scores.empty(tile, saved.q.device):
        return
    rows, columns = tile.rows, tile.columns
    q, out, grad = saved.q[..., rows, :], saved.out[..., rows, :], saved.grad[..., rows, :]
    k, v = k[..., columns, :], v[..., columns, :]
    top, total = saved.top[..., rows, :], saved.total[..., rows, :]
    if (scores.by_kernel or scores.by_sum) and fused(q, v):
        lse = finite(top + total.log()).squeeze(-1)
        causal = tile.diagonal and not scores.dense()
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, causal, attn_mask=_added(q, tile, scores), scale=scores.scale
        )
    else:
        dq, dk, dv, ds = _backward_plain(saved, k, v, tile, scores)
        part = _part(bias_grad, tile)
        if part is not None:
            part += ds.flatten(1, 2).sum_to_size(part.shape)
    grads[0][..., rows, :] += dq
    grads[1][..., columns, :] += dk
    grads[2][..., columns, :] += dv


def _backward_plain(
    saved: Saved, k: Tensor, v: Tensor, tile: Tile, scores: Scores
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v and of the bias."""
    q, out, grad, top, total = (x[..., tile.rows, :] for x in (saved.q, saved.out, saved.grad, saved.top, saved.total))
    groups = k.shape[1]
    weight = torch.where(total > 0, 1.0 / total, 0.0)
    values, slope = scores.of(q, k, tile)
    p = (values - grouped(finite(top), groups)).exp() * grouped(weight, groups)
    g = grouped(grad, groups)
    dv = (p.transpose(-2, -1) @ g).sum(2)
    dp = g @ v.unsqueeze(2).transpose(-2, -1)
    ds = p * (dp - grouped((grad * out).sum(-1, keepdim=True), groups))
    constant = scores.constant(tile, groups)
    if constant is not None:
        ds = ds.masked_fill(constant, 0.0)
    raw = (ds if slope is None else ds * slope) * scores.scale
    dq = (raw @ k.unsqueeze(2)).flatten(1, 2)
    dk = (raw.transpose(-2, -1) @ grouped(q, groups)).sum(2)
    return dq, dk, dv, ds
