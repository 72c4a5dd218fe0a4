"""Layers that hold their experts as modules and loop over them, in the ways that users write such loops."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.experts.models import EXPERTS, INNER, WIDTH


class Expert(nn.Module):
    """A gated expert with biases."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = nn.Linear(WIDTH, INNER), nn.Linear(WIDTH, INNER), nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Listed(nn.Module):
    """A router and a list of experts; subclasses say how tokens meet experts."""

    def __init__(self, k: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.k = k
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList([Expert() for _ in range(EXPERTS)])

    def route(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and experts of each token."""
        weights, chosen = self.router(t).softmax(-1).topk(self.k, -1)
        return weights / weights.sum(-1, keepdim=True), chosen

    def forward(self, x: Tensor) -> Tensor:
        t = x.reshape(-1, WIDTH)
        return self.dispatch(t, *self.route(t)).view_as(x)

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        """What the layer adds up for its tokens [T, WIDTH]."""
        raise NotImplementedError


class Where(Listed):
    """Masks, ``where`` and ``index_add_``, as in older Mixtrals."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out, mask = torch.zeros_like(t), F.one_hot(i, EXPERTS).permute(2, 1, 0)
        for e in range(EXPERTS):
            slot, token = torch.where(mask[e])
            out.index_add_(0, token, self.experts[e](t[None, token].reshape(-1, WIDTH)) * w[token, slot, None])
        return out


class Hit(Listed):
    """Only experts that were hit; their rows are added to what a shared expert gives."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = t * 0.5
        for e, expert in enumerate(self.experts):
            token, slot = (i == e).nonzero(as_tuple=True)
            if token.numel() == 0:
                continue
            out[token] += w[token, slot].unsqueeze(-1) * expert(t[token])
        return out


class Sorted(Listed):
    """Rows sorted by expert and cut by counts that Python reads, as in DeepSeek's inference; a bias that is moved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.zeros(EXPERTS))

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        count = i.new_zeros((len(i), EXPERTS)).scatter_(1, i, 1).sum(0)
        if self.training:
            with torch.no_grad():
                self.bias += 0.01 * torch.sign(count.float().mean() - count.float())
        order = i.view(-1).argsort(stable=True)
        rows, parts, start = t[order // self.k], [], 0
        for e, n in enumerate(self.counted(count)):
            if n:
                parts.append(self.experts[e](rows[start : start + n]))
            start += n
        made = torch.cat(parts)
        back = torch.empty_like(made)
        back[order] = made
        return (back.view(*i.shape, -1) * w.unsqueeze(-1)).sum(1)

    def counted(self, count: Tensor) -> Any:
        """The counts as Python reads them."""
        return count.tolist()


class Arrayed(Sorted):
    """The same with the counts in an array."""

    def counted(self, count: Tensor) -> Any:
        """The counts as numpy reads them."""
        return count.cpu().numpy()


class Counted(Where):
    """Counts its choices, in a buffer and for a balance loss."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(EXPERTS))

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        counts = torch.bincount(i.flatten(), minlength=EXPERTS)
        self.load += counts
        return super().dispatch(t, w, i) * (1 + counts.float() @ w.new_ones(EXPERTS) / counts.max())


class Repeated(Listed):
    """Every token as often as it has choices, and rows assigned by masks."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        rows, flat = t.repeat_interleave(self.k, dim=0), i.view(-1)
        out = torch.empty_like(rows)
        for e, expert in enumerate(self.experts):
            out[flat == e] = expert(rows[flat == e])
        return (out.view(*i.shape, -1) * w.unsqueeze(-1)).sum(1)


class NormedExpert(Expert):
    """Rows meet no parameter first, and then a norm with a scale and a shift of the expert's own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        with torch.no_grad():
            self.norm.weight.normal_()
            self.norm.bias.normal_()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.norm(torch.tanh(x) + x.abs()))


class Normed(Where):
    """Experts that begin with a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([NormedExpert() for _ in range(EXPERTS)])


class Dense(Listed):
    """Every expert on every token, weighted by gates that are 0 for most."""

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        gates = t.new_zeros(len(t), EXPERTS).scatter(1, i, w)
        return sum(gates[:, e : e + 1] * expert(t) for e, expert in enumerate(self.experts))  # type: ignore[return-value]


class Dropping(Listed):
    """Tokens beyond an expert's capacity are dropped: no sum over all choices."""

    def __init__(self) -> None:
        super().__init__(k=1)

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out = torch.zeros_like(t)
        for e, expert in enumerate(self.experts):
            token = (i[:, 0] == e).nonzero().squeeze(-1)[: len(t) // EXPERTS]
            out[token] = expert(t[token]) * w[token]
        return out


class Unequal(Where):
    """The last expert computes something else."""

    def __init__(self) -> None:
        super().__init__()
        self.experts[-1].forward = lambda x: self.experts[-1].down(F.relu(self.experts[-1].up(x)))  # type: ignore[method-assign]


class Cast(Listed):
    """Experts without biases; ``where`` says what is cast to bfloat16: weights, rows, results, products."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where
        self.experts = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(EXPERTS)])

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        low, out = torch.bfloat16, torch.zeros_like(t, dtype=torch.float32)
        for e, expert in enumerate(self.experts):
            token, slot = (i == e).nonzero(as_tuple=True)
            weight, rows = w[token, slot].unsqueeze(-1), t[token]
            if self.where == "rows":
                rows = rows.to(low).to(t.dtype)
            y = expert(rows)
            if self.where == "results":
                y = y.to(low)
            elif self.where == "weights":
                weight = weight.to(low)
            elif self.where == "wide-results":
                y = y.float()
            y = y * weight
            if self.where == "products":
                y = y.to(low)
            out.index_add_(0, token, y.float())
        return out


class Dropout(Listed):
    """A loop over hit experts, or over all, in which what an expert gives is dropped now and then."""

    def __init__(self, dense: bool) -> None:
        super().__init__()
        self.dense = dense

    def dispatch(self, t: Tensor, w: Tensor, i: Tensor) -> Tensor:
        out, gates = torch.zeros_like(t), t.new_zeros(len(t), EXPERTS).scatter(1, i, w)
        for e, expert in enumerate(self.experts):
            if self.dense:
                out = out + gates[:, e : e + 1] * F.dropout(expert(t), 0.1, self.training)
                continue
            token, slot = (i == e).nonzero(as_tuple=True)
            out[token] += F.dropout(expert(t[token]), 0.1, self.training) * w[token, slot].unsqueeze(-1)
        return out


class Balanced(Where):
    """A loss for balance from counts of choices by ``histc``."""

    def forward(self, x: Tensor) -> Tensor:
        t = x.reshape(-1, WIDTH)
        w, i = self.route(t)
        load = torch.histc(i.float(), EXPERTS, 0, EXPERTS - 1)
        balance = (self.router(t).softmax(-1).mean(0) * load / load.sum()).sum()
        return self.dispatch(t, w, i).view_as(x) + balance
