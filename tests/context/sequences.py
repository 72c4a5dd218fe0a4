"""Whole attention and its parts: random shapes, masks and orders, cut over ranks."""

import math
from dataclasses import dataclass, field
from random import Random

import torch
from torch import Tensor

from autopar.ir.layout import Layout, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.runs import Run, runs_of
from autopar.runtime.axis import Axis
from autopar.runtime.ring import ring_attention

KINDS = ("none", "causal", "bool", "added", "padding", "documents", "lowest", "large", "hidden", "written")


def runs(length: int, ways: int, zigzag: bool) -> tuple[tuple[Run, ...], ...]:
    """The runs of every coordinate."""
    shard = (zigzag_shard if zigzag else plain_shard)(0, length, ways)
    assert shard is not None
    mesh = Mesh.of({"cp": ways})
    return tuple(runs_of(Layout.of({"cp": shard}), 0, length, mesh, {"cp": c}) for c in range(ways))


def take(x: Tensor, held: tuple[Run, ...], dim: int) -> Tensor:
    """What the runs hold."""
    return torch.cat([x.narrow(dim, s, n) for s, n in held], dim)


@dataclass
class Case:
    """One attention in double precision, its masks, and the order in which ``ways`` ranks hold the sequence."""

    ways: int
    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    queries: tuple[tuple[Run, ...], ...]
    keys: tuple[tuple[Run, ...], ...]
    mask: Tensor | None = None
    causal: bool = False
    fill: float | None = None
    tensors: list[Tensor] = field(default_factory=list)

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

        case = Case(
            ways, normal(batch, heads, length, width), normal(batch, groups, keys, width),
            normal(batch, groups, keys, wide or width), normal(batch, heads, length, wide or width),
            runs(length, ways, zigzag), runs(keys, ways, zigzag),
        )  # fmt: skip
        case.masked(kind, pick, made)
        return case

    def masked(self, kind: str, pick: Random, made: torch.Generator) -> None:
        """Give the case its mask."""
        batch, heads, s = self.q.shape[:3]
        t = self.k.shape[2]

        def some(*shape: int) -> Tensor:
            return torch.rand(shape, generator=made) > 0.5

        self.causal = kind in ("causal", "large")
        if kind == "large":
            self.q, self.k = self.q * 10, self.k * 3
        if kind in ("bool", "hidden", "written"):
            self.mask = some(pick.choice([1, batch]), pick.choice([1, heads]), s, t)
        if kind in ("hidden", "written"):
            assert self.mask is not None
            self.mask[:, :, s // 2 :] = False
        if kind == "written":
            self.fill = pick.choice([torch.finfo(torch.float64).min, -1e4, -3.0])
        if kind == "added":
            shape = pick.choice([1, batch]), pick.choice([1, heads]), pick.choice([1, s]), t
            self.mask = torch.randn(shape, generator=made, dtype=torch.float64).requires_grad_()
        if kind == "padding":
            self.mask = torch.arange(t).view(1, 1, 1, t) < torch.tensor([t] * (batch - 1) + [t // 2]).view(-1, 1, 1, 1)
        if kind == "documents":
            a, b = (torch.randint(0, 3, (batch, n), generator=made).sort(-1).values for n in (s, t))
            self.mask = a[:, None, :, None] == b[:, None, None, :]
        if kind == "lowest":  # whole blocks of the lowest number: a log-sum-exp cannot tell how many
            lowest = torch.finfo(torch.float64).min
            self.mask = torch.zeros(batch, 1, s, t, dtype=torch.float64).masked_fill(some(batch, 1, s, t), lowest)
            self.mask[:, :, : s // 2] = lowest

    def whole(self) -> list[Tensor]:
        """Output and gradients of q, k, v (and of an added mask) of the unsharded attention, step by step."""
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        mask = None if self.mask is None else self.mask.detach().clone().requires_grad_(self.mask.requires_grad)
        q, (k, v) = leaves[0], (x.repeat_interleave(self.q.shape[1] // x.shape[1], 1) for x in leaves[1:])
        scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf if self.fill is None else self.fill)
        elif mask is not None:
            scores = scores + mask
        out = torch.ops.aten._safe_softmax(scores, -1) @ v
        out.backward(self.grad)
        return [
            out.detach(),
            *(x.grad for x in [*leaves, *([mask] if mask is not None and mask.requires_grad else [])]),
        ]

    def part(self, axis: Axis) -> list[Tensor]:
        """The same of one rank's part."""
        c = axis.coordinate
        leaves = [take(self.q, self.queries[c], 2), *(take(x, self.keys[c], 2) for x in (self.k, self.v))]
        leaves = [x.clone().requires_grad_() for x in leaves]
        mask = self.mask
        if mask is not None:
            mask = mask.detach() if mask.shape[-2] == 1 else take(mask.detach(), self.queries[c], -2)
            mask = mask.clone().requires_grad_(self.mask is not None and self.mask.requires_grad)
        out = ring_attention(*leaves, mask, self.causal, None, self.fill, self.queries[c], self.keys, axis)
        out.backward(take(self.grad, self.queries[c], 2))
        return [
            out.detach(),
            *(x.grad for x in [*leaves, *([mask] if mask is not None and mask.requires_grad else [])]),
        ]

    def joined(self, parts: list[list[Tensor]]) -> list[Tensor]:
        """The whole tensors that the ranks' parts stand for."""
        out = []
        for i, like in enumerate([self.grad, self.q, self.k, self.v, self.mask][: len(parts[0])]):
            assert like is not None
            whole = torch.zeros_like(like).detach()
            for c, part in enumerate(parts):
                if i == 4 and whole.shape[-2] == 1:
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
        return max(output, *(float((g - w).abs().max()) / largest for g, w in zip(got[1:], want[1:], strict=True)))
