"""Whole attention and its parts: random shapes, masks and orders, cut over ranks."""

import math
from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.ir.layout import Layout, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.runs import Run, runs_of
from autopar.ir.scores import Masks, capped, with_sink
from autopar.runtime.axis import Axis
from autopar.runtime.ring import ring_attention

KINDS = (
    "none", "causal", "bool", "added", "padding", "documents", "lowest", "large", "hidden", "written",
    "lowest-written", "window", "numbers", "capped", "sink", "biased",
)  # fmt: skip
LOWEST = torch.finfo(torch.float64).min


def runs(length: int, ways: int, zigzag: bool) -> tuple[tuple[Run, ...], ...]:
    """The runs of every coordinate."""
    shard = (zigzag_shard if zigzag else plain_shard)(0, length, ways)
    assert shard is not None
    mesh = Mesh.of({"cp": ways})
    return tuple(runs_of(Layout.of({"cp": shard}), 0, length, mesh, {"cp": c}) for c in range(ways))


def take(x: Tensor, held: tuple[Run, ...], dim: int) -> Tensor:
    """What the runs hold; all of a dim of length 1."""
    return x if x.shape[dim] == 1 else torch.cat([x.narrow(dim, s, n) for s, n in held], dim)


def own(x: Tensor) -> Tensor:
    """A leaf of the same values, which takes a gradient if ``x`` does."""
    return x.detach().clone().requires_grad_(x.requires_grad)


@dataclass
class Case:
    """One attention in double precision, its masks, and the order in which ``ways`` ranks hold the sequence.

    ``beside``: what else is by query: mask, bias and sink.
    """

    ways: int
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    queries: tuple[tuple[Run, ...], ...]
    keys: tuple[tuple[Run, ...], ...]
    beside: dict[str, Tensor] = field(default_factory=dict)
    causal: bool = False
    fill: float | None = None
    cap: float | None = None
    band: tuple[int | None, int | None] | None = None
    ids: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def random(seed: int) -> "Case":
        """Shapes, mask kind and order by the seed."""
        pick, made = Random(seed), torch.Generator().manual_seed(seed)
        kind = KINDS[seed % len(KINDS)]
        ways, groups, batch = pick.choice([1, 2, 3, 4]), pick.choice([1, 2, 3]), pick.choice([1, 2])
        heads, length = groups * pick.choice([1, 2, 3]), pick.randint(2 * ways, 40)
        square = kind in ("causal", "large") or pick.random() < 0.5
        keys = length if square else pick.randint(2 * ways, 40)
        width, wide = pick.choice([4, 8]), pick.choice([None, None, 3])
        zigzag = pick.random() < 0.5

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=made, dtype=torch.float64)

        q, k = normal(batch, heads, length, width), normal(batch, groups, keys, width)
        v, grad = normal(batch, groups, keys, wide or width), normal(batch, heads, length, wide or width)
        case = Case(ways, q, k, v, grad, runs(length, ways, zigzag), runs(keys, ways, zigzag))
        case.hide(kind, pick, made)
        case.shift(kind, pick, made)
        return case

    def hide(self, kind: str, pick: Random, made: torch.Generator) -> None:
        """Give the case what hides keys from queries."""
        batch, heads, s = self.q.shape[:3]
        t = self.k.shape[2]
        self.causal = kind in ("causal", "large") or (kind in ("capped", "sink", "biased") and pick.random() < 0.3)
        if kind == "large":
            self.q, self.k = self.q * 10, self.k * 3
        some = torch.rand(pick.choice([1, batch]), pick.choice([1, heads]), s, t, generator=made) > 0.5
        if kind in ("hidden", "written", "biased"):
            some[:, :, s // 2 :] = False
        if kind in ("bool", "hidden", "written", "biased") or (kind in ("capped", "sink") and pick.random() < 0.5):
            self.beside["mask"] = some
        if kind == "written" or ("mask" in self.beside and kind in ("capped", "sink", "biased") and not self.causal):
            self.fill = pick.choice([LOWEST, -1e4, -3.0])
        if kind == "padding":
            ends = torch.tensor([t] * (batch - 1) + [t // 2]).view(-1, 1, 1, 1)
            self.beside["mask"] = torch.arange(t).view(1, 1, 1, t) < ends
        if kind in ("documents", "numbers"):
            a, b = (torch.randint(0, 3, (batch, n), generator=made).sort(-1).values for n in (s, t))
            if kind == "numbers":
                self.ids = (a, b)
            else:
                self.beside["mask"] = a[:, None, :, None] == b[:, None, None, :]
        if kind == "window" or (kind == "numbers" and pick.random() < 0.5):
            low = pick.choice([None, -3, 0, 2])
            self.band = (
                low,
                None if pick.random() < 0.3 and low is not None else max(low or 0, 0) + pick.randint(0, 9),
            )

    def shift(self, kind: str, pick: Random, made: torch.Generator) -> None:
        """Give the case what is added to scores, or bounds them, or stands beside them."""
        batch, heads, s = self.q.shape[:3]
        t = self.k.shape[2]
        shape = pick.choice([1, batch]), pick.choice([1, heads]), pick.choice([1, s]), t
        if kind in ("added", "biased"):
            values = torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_()
            self.beside["mask" if kind == "added" else "bias"] = values
        if kind in ("lowest", "lowest-written"):  # whole rows of the lowest number: a log-sum-exp cannot tell how many
            hidden = torch.rand(batch, 1, s, t, generator=made) > 0.5
            self.beside["mask"] = torch.zeros(batch, 1, s, t, dtype=torch.float64).masked_fill(hidden, LOWEST)
            self.beside["mask"][:, :, : s // 2] = LOWEST
            self.fill = 0.0 if kind == "lowest-written" else None
        if kind == "capped" or (kind == "sink" and pick.random() < 0.3):
            self.cap = pick.choice([0.5, 3.0, 30.0])
        if kind == "sink":
            values = torch.randn(1, pick.choice([1, heads]), 1, 1, generator=made, dtype=torch.float64)
            self.beside["sink"] = values.requires_grad_()

    def whole(self) -> list[Tensor]:
        """Output and gradients of q, k, v (and of what is beside them) of the unsharded attention.

        What a model asks of PyTorch's kernel with a mask of numbers is what that gives; all else is step by step.
        """
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        beside = {n: own(x) for n, x in self.beside.items()}
        mask = beside.get("mask")
        if mask is not None and mask.dtype != torch.bool and self.fill is None:
            out = F.scaled_dot_product_attention(*leaves, mask, enable_gqa=True)
        else:
            out = self._steps(*leaves, beside)
        out.backward(self.grad)
        return self._results(out, leaves, beside)

    def _steps(self, q: Tensor, k: Tensor, v: Tensor, beside: dict[str, Tensor]) -> Tensor:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        scores = capped(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5, self.cap)
        masks = Masks(beside.get("mask"), self.causal, self.fill, beside.get("bias"), self.band, *(self.ids or ()))
        scores = masks.hide(scores)
        if "sink" in beside:
            return with_sink(scores, beside["sink"]) @ v
        return torch.ops.aten._safe_softmax(scores, -1) @ v

    def part(self, axis: Axis) -> list[Tensor]:
        """The same of one rank's part."""
        c = axis.coordinate
        leaves = [take(self.q, self.queries[c], 2), *(take(x, self.keys[c], 2) for x in (self.k, self.v))]
        leaves = [x.clone().requires_grad_() for x in leaves]
        beside = {
            n: take(x.detach(), self.queries[c], -2).clone().requires_grad_(x.requires_grad)
            for n, x in self.beside.items()
        }
        ids: Any = None if self.ids is None else (take(self.ids[0], self.queries[c], 1), self.ids[1])
        out = ring_attention(
            *leaves, beside.get("mask"), self.causal, None, self.fill, self.queries[c], self.keys, axis,
            beside.get("bias"), beside.get("sink"), self.cap, self.band, *(ids or ()),
        )  # fmt: skip
        out.backward(take(self.grad, self.queries[c], 2))
        return self._results(out, leaves, beside)

    @staticmethod
    def _results(out: Tensor, leaves: list[Tensor], beside: dict[str, Tensor]) -> list[Tensor]:
        grads = [x.grad for x in (*leaves, *beside.values()) if x.requires_grad]
        assert all(g is not None for g in grads)
        return [out.detach(), *grads]  # type: ignore[list-item]

    def joined(self, parts: list[list[Tensor]]) -> list[Tensor]:
        """The whole tensors that the ranks' parts stand for."""
        out = []
        beside = [x for x in self.beside.values() if x.requires_grad]
        for i, like in enumerate([self.grad, self.q, self.k, self.v, *beside]):
            whole = torch.zeros_like(like).detach()
            for c, part in enumerate(parts):
                if i > 3 and whole.shape[-2] == 1:
                    whole += part[i]
                    continue
                at = 0
                for start, n in (self.keys if i in (2, 3) else self.queries)[c]:
                    whole.narrow(2, start, n).copy_(part[i].narrow(2, at, n))
                    at += n
            out.append(whole)
        return out

    def error(self, parts: list[list[Tensor]]) -> float:
        """max|Δ| over the largest value, of the output and of all gradients together."""
        got, want = self.joined(parts), self.whole()
        output = float((got[0] - want[0]).abs().max() / want[0].abs().max().clamp_min(1e-300))
        largest = max(float(w.abs().max()) for w in want[1:])
        error = max(output, *(float((g - w).abs().max()) / largest for g, w in zip(got[1:], want[1:], strict=True)))
        return error if math.isfinite(error) else math.inf
