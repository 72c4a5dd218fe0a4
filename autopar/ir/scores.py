"""The scores of an attention on whole tensors: what is added to them, what hides them, and their softmax."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masks:
    """What hides or shifts scores; the arguments of that name of ``autopar.ir.ops.attention``."""

    mask: Tensor | None = None
    is_causal: bool = False
    fill: float | None = None
    bias: Tensor | None = None
    band: tuple[int | None, int | None] | None = None
    query_ids: Tensor | None = None
    key_ids: Tensor | None = None

    @property
    def several(self) -> bool:
        """Whether one mask or ``is_causal`` alone does not say it."""
        both = self.is_causal and self.mask is not None
        return both or not (self.bias is None and self.band is None and self.query_ids is None)

    def hide(self, scores: Tensor) -> Tensor:
        """The masked scores."""
        if self.bias is not None:
            scores = scores + self.bias
        if self.mask is not None and self.mask.dtype != torch.bool:
            scores = scores + self.mask
        elif self.mask is not None:
            fill = -math.inf if self.fill is None else within(self.fill, scores.dtype)
            scores = scores.masked_fill(~self.mask, fill)
        seen = self.by_place(scores.shape[-2], scores.shape[-1], scores.device)
        return scores if seen is None else scores.masked_fill(~seen, -math.inf)

    def by_place(self, queries: int, keys: int, device: torch.device) -> Tensor | None:
        """What is seen by positions and by numbers, bool [..., S, T]; None where all is."""
        low, high = self.band or (None, None)
        if self.is_causal:
            low = max(0, low or 0)
        apart = torch.arange(queries, device=device).unsqueeze(-1) - torch.arange(keys, device=device)
        seen = None if low is None else apart >= low
        if high is not None:
            seen = apart <= high if seen is None else seen & (apart <= high)
        if self.query_ids is None or self.key_ids is None:
            return seen
        same = (self.query_ids.unsqueeze(-1) == self.key_ids.unsqueeze(-2)).unsqueeze(1)
        return same if seen is None else same & seen

    def dense(self, q: Tensor, keys: int) -> Tensor:
        """One mask of queries ``q`` and so many keys that says all: bool, or float where something is added."""
        seen = self.by_place(q.shape[-2], keys, q.device)
        added = self.bias
        if self.mask is not None and self.mask.dtype == torch.bool:
            seen = self.mask if seen is None else seen & self.mask
        elif self.mask is not None:
            added = self.mask if added is None else added + self.mask
        if added is None:
            assert seen is not None
            return seen
        return added if seen is None else torch.where(seen, added, -math.inf).to(q.dtype)


def capped(scores: Tensor, cap: float | None) -> Tensor:
    """Scores within (-cap, cap)."""
    return scores if cap is None else torch.tanh(scores / cap) * cap


def with_sink(scores: Tensor, sink: Tensor | None, safe: bool = False) -> Tensor:
    """The softmax of scores [..., H, S, T] beside one more score, whose probability is left out.

    ``safe``: a query that sees nothing gets 0.
    """
    if sink is None:
        made: Tensor = torch.ops.aten._safe_softmax(scores, -1) if safe else scores.softmax(-1)
        return made
    beside = sink.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.cat([scores, beside], -1).softmax(-1)[..., :-1]


def within(value: float, dtype: torch.dtype) -> float:
    """The nearest number that ``dtype`` has: a score may have been written in a wider one."""
    most = torch.finfo(dtype).max
    return min(max(value, -most), most) if math.isfinite(value) else value
