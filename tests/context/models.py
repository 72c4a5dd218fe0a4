"""Small models with something along the sequence."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, HEADS = 16, 4


def rows(length: int = 16, batch: int = 2, seed: int = 1) -> Tensor:
    """A batch of sequences of vectors."""
    return torch.randn(batch, length, D, generator=torch.Generator().manual_seed(seed))


class Heads(nn.Module):
    """Queries, keys and values of a self-attention, and what joins its heads."""

    def __init__(self, heads: int = HEADS, groups: int = HEADS) -> None:
        super().__init__()
        self.heads, self.groups, width = heads, groups, D // HEADS
        self.q, self.k = nn.Linear(D, heads * width), nn.Linear(D, groups * width)
        self.v, self.o = nn.Linear(D, groups * width), nn.Linear(heads * width, D)

    def split(self, x: Tensor, memory: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, S, D/H] of each."""
        memory = x if memory is None else memory

        def one(layer: nn.Linear, of: Tensor, heads: int) -> Tensor:
            return layer(of).unflatten(-1, (heads, -1)).transpose(1, 2)

        return one(self.q, x, self.heads), one(self.k, memory, self.groups), one(self.v, memory, self.groups)

    def join(self, y: Tensor) -> Tensor:
        """Back to [B, S, D]."""
        joined: Tensor = self.o(y.transpose(1, 2).flatten(2))
        return joined


class Attend(Heads):
    """A residual attention whose options are those of scaled_dot_product_attention."""

    def __init__(self, heads: int = HEADS, groups: int = HEADS, **options: Any) -> None:
        super().__init__(heads, groups)
        self.options = {"is_causal": True, "enable_gqa": heads != groups, **options}

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if mask is not None:
            y = F.scaled_dot_product_attention(*self.split(x), attn_mask=mask)
        else:
            y = F.scaled_dot_product_attention(*self.split(x), **self.options)
        return x + self.join(y)


class Documents(Heads):
    """Packed sequences: a token sees earlier ones of its own document."""

    def forward(self, x: Tensor, document: Tensor) -> Tensor:
        earlier = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        mask = (document[:, None, :, None] == document[:, None, None, :]) & earlier
        return x + self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=mask))


class Window(Heads):
    """A token sees the last ``width`` of its own document that are no padding, or those that are near both ways."""

    def __init__(self, width: int = 5, causal: bool = True) -> None:
        super().__init__()
        self.width, self.causal = width, causal

    def forward(self, x: Tensor, keep: Tensor, document: Tensor) -> Tensor:
        place = torch.arange(x.shape[1])
        apart = place[:, None] - place[None]
        near = (apart < self.width) & (apart >= 0 if self.causal else apart > -self.width)
        same = document[:, None, :, None] == document[:, None, None, :]
        mask = near & same & keep[:, None, None, :]
        return x + self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=mask))


class Biased(Heads):
    """A learned bias of the scores, one for each distance."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Embedding(64, HEADS)

    def biases(self, length: int) -> Tensor:
        place = torch.arange(length)
        return self.bias((place[:, None] - place[None]).abs()).permute(2, 0, 1)[None]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.join(F.scaled_dot_product_attention(*self.split(x), attn_mask=self.biases(x.shape[1])))


class Written(Heads):
    """Attention by hand: ``hide`` says how a causal mask of numbers is applied; padding may hide whole rows."""

    def __init__(self, hide: str = "where", lowest: float | None = None, cap: float = 0.0) -> None:
        super().__init__()
        self.hide, self.lowest, self.cap = hide, lowest, cap

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        q, k, v = self.split(x)
        scores = q @ k.transpose(-1, -2) / (D // HEADS) ** 0.5
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        lowest = torch.finfo(scores.dtype).min if self.lowest is None else self.lowest
        seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() & keep[:, None, None, :]
        if self.hide == "where":
            scores = torch.where(seen, scores, lowest)
        elif self.hide == "fill":
            scores = scores.masked_fill(~seen, lowest)
        else:
            scores = scores + (~seen).to(scores.dtype) * lowest
        return x + self.join(scores.softmax(-1) @ v)


class Sink(Heads):
    """A learned score of every head beside those of keys; ``shift`` is subtracted from all of a query."""

    def __init__(self, groups: int = HEADS, shift: str = "") -> None:
        super().__init__(HEADS, groups)
        self.shift = shift
        self.sink = nn.Parameter(torch.linspace(-1.0, 2.0, HEADS))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        k, v = (y.repeat_interleave(HEADS // self.groups, 1) for y in (k, v))
        scores = q @ k.transpose(-1, -2)
        scores = scores + torch.full_like(scores, float("-inf")).triu(1)
        sink = self.sink.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], -1)
        if self.shift == "max":
            scores = scores - scores.max(-1, keepdim=True).values
        elif self.shift == "mean":
            scores = scores - scores[..., 1:].clamp(min=-9).mean(-1, keepdim=True)
        return x + self.join(scores.softmax(-1)[..., :-1] @ v)


class Columns(Heads):
    """The softmax runs over queries."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.split(x)
        return self.join((q @ k.transpose(-1, -2)).softmax(-2) @ v)


class Cross(nn.Module):
    """Self-attention, then attention to a memory of another length."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = Attend(), Heads()

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        x = self.own(x)
        return x + self.other.join(F.scaled_dot_product_attention(*self.other.split(x, memory)))


class Pooled(nn.Module):
    """Mean of the tokens, and the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = Attend(is_causal=False), nn.Linear(2 * D, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        return self.head(torch.cat([x.mean(1), x[:, 0]], -1))


class Extremes(nn.Module):
    """Largest and smallest of the tokens that are no padding; tokens are rounded, so that many are equal."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.attend, self.head = form, Attend(), nn.Linear(D, 3)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attend(x)
        x = x.round().detach() + (x - x.detach())
        low, high = x.masked_fill(~keep[..., None], -torch.inf), x.masked_fill(~keep[..., None], torch.inf)
        if self.form == "all":
            return self.head(low.amax(1) + high.amin(1))
        if self.form == "first":
            return self.head(low.max(1).values + high.min(1, keepdim=True).values[:, 0])
        top, where = low.max(1)
        return self.head(top * where)


class Weighed(nn.Module):
    """Tokens are weighed by a softmax over the sequence of scores that no query has."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.attend, self.head = form, Attend(), nn.Linear(D, 3)
        self.score, self.query = nn.Linear(D, 4 if form == "heads" else 1), nn.Parameter(torch.linspace(-1.0, 1.0, D))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        x = self.attend(x)
        if self.form == "column":
            scores = self.score(x).masked_fill(~keep[..., None], -torch.inf)
            return self.head((scores.softmax(1) * x).sum(1))
        if self.form == "heads":
            return self.head(torch.einsum("bsh,bsd->bhd", self.score(x).softmax(1), x))
        scores = x @ self.query if self.form == "query" else self.score(torch.tanh(x)).squeeze(-1)
        scores = scores.masked_fill(~keep, torch.finfo(scores.dtype).min)
        if self.form == "log":
            logs = scores.log_softmax(-1)
            return self.head((logs.exp()[..., None] * x).sum(1)) + (logs * keep).mean(1)[:, None]
        if self.form == "sum":
            return self.head(x.logsumexp(1)) + torch.logsumexp(scores, -1, keepdim=True)
        weights = scores.softmax(-1, dtype=torch.float32).to(x.dtype)
        return self.head((weights.unsqueeze(1) @ x).squeeze(1))


class Convolved(nn.Module):
    """A convolution along the sequence after an attention."""

    def __init__(self, taps: int = 3, **options: int) -> None:
        super().__init__()
        self.attend, self.conv = Attend(), nn.Conv1d(D, D, taps, padding=taps // 2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.attend(x).transpose(1, 2)).transpose(1, 2)


class Recurrent(nn.Module):
    """A linear recurrence along the sequence after an attention."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = Attend()

    def forward(self, x: Tensor) -> Tensor:
        x = self.attend(x)
        state, out = torch.zeros_like(x[:, 0]), []
        for t in range(x.shape[1]):
            state = 0.5 * state + x[:, t]
            out.append(state)
        return torch.stack(out, 1)


class Shifted(nn.Module):
    """Predicts the next token, or the one before: the loss is of a cut of the positions, in one of several forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form, self.attend, self.head = form, Attend(), nn.Linear(D, 7)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        y: Tensor = self.head(self.attend(x))
        if self.form == "next":
            return F.cross_entropy(y[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        if self.form == "before":
            return F.cross_entropy(y[:, 2:].transpose(1, 2), labels[:, :-2], reduction="sum", ignore_index=3)
        if self.form == "both":
            return F.cross_entropy(y.float()[:, 1:-1].reshape(-1, 7), labels[:, 2:].reshape(-1))
        each = F.cross_entropy(y[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="none")
        return (each * torch.arange(len(each))).sum()


class Span(nn.Module):
    """Where an answer starts: positions are the classes of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.attend, self.head = Attend(), nn.Linear(D, 1)

    def forward(self, x: Tensor, start: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.attend(x)).squeeze(-1), start)


class Turned(nn.Module):
    """Positions and features change places in what lies between two attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.mix = Attend(), Attend(), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x + self.mix(x).mT.reshape(x.shape))


class Slopes(Heads):
    """Heads as rows of a batch: one learned temperature, and a bias of each head by distance added in one go."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature, self.slopes = nn.Parameter(torch.tensor(0.3)), nn.Parameter(torch.linspace(-0.5, 0.5, HEADS))

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.reshape(b * HEADS, t, -1) for y in self.split(x))
        place = (keep.cumsum(-1) - 1) * keep
        bias = (self.slopes[:, None, None] * place[:, None, None]).reshape(b * HEADS, 1, t)
        scores = torch.bmm(q, k.mT) * self.temperature.exp() + bias
        seen = torch.ones(t, t, dtype=torch.bool).tril() & keep[:, None, None, :]
        scores = scores.view(b, HEADS, t, t).masked_fill(~seen, torch.finfo(x.dtype).min)
        p = scores.softmax(-1).view(b * HEADS, t, t)
        return x + self.join((p @ v).view(b, HEADS, t, -1))
