"""Calls of every op of the rule table on small whole tensors."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.ir import ops
from tests.rules import attention_samples, expert_samples, matrix_samples

aten = torch.ops.aten
Call = tuple[tuple[Any, ...], dict[str, Any]]
F64, I64 = torch.float64, torch.int64


class Random:
    """Seeded tensors."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=F64)

    def positive(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, dtype=F64) * 0.8 + 0.1

    def ints(self, high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=self.generator)

    def bools(self, *shape: int) -> Tensor:
        return self.ints(2, *shape).bool()

    def complex(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator, dtype=torch.complex128)


Make = Callable[[Random], list[Call]]


def a(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def _reduce(r: Random, source: Callable[..., Tensor] | None = None) -> list[Call]:
    f = source or r
    return [a(f(6, 12), d) for d in (0, -1)] + [a(f(6, 4, 12), 1, True)]


def _many(r: Random, dims: tuple[Any, ...] = ([0], [1, -1], [0, 2])) -> list[Call]:
    return [a(r(6, 4, 12), list(d)) for d in dims] + [a(r(6, 4, 12), [-1], True), a(r(1, 6), [0]), a(r(6), None)]


def _tied(r: Random) -> list[Call]:
    """Equal elements; rows with NaN, with infinities, and with nothing else."""
    x = r.ints(3, 12, 6).to(F64)
    x[5, 0], x[7, 0], x[2, 1], x[9, 2] = torch.nan, torch.nan, torch.inf, -torch.inf
    x[:, 3], x[:6, 4] = -torch.inf, -torch.inf
    return [a(x, 0), a(x.t().contiguous(), 1, True), a(r.ints(4, 6, 12), 1)]


def _soft(r: Random) -> list[Call]:
    return [a(r(6, 12), 0), a(r(6, 4, 12), -1), a(r(6, 12, 1), 1), a(_tied(r)[0][0][0], 0)]


def _full(r: Random) -> list[Call]:
    return [a(r(6, 12)), a(r())]


def _window(r: Random) -> list[Call]:
    return [a(r(6, 12), [0]), a(r(6, 4), [0, 1])]


def _shape(name: str) -> Make:
    targets: dict[str, list[tuple[tuple[int, ...], list[int]]]] = {
        "reshape": [
            ((4, 6, 12), [24, 12]), ((24, 12), [4, 6, 12]), ((6, 24), [6, 2, 12]), ((6, 12), [6, 1, 12]), ((12,), [12]),
            ((6, 2, 2, 3), [6, 12]), ((6, 1, 4), [24]), ((12, 6), [8, 9]), ((24,), [2, 3, 4]), ((1, 6), [6]),
        ],
    }  # fmt: skip
    return lambda r: [a(r(*s), t) for s, t in targets[name]] + [a(r(4, 6, 12), [-1, 12])]


def _conv(dims: int) -> Make:
    def make(r: Random) -> list[Call]:
        tail, taps = (5,) * dims, (2,) * dims
        unbatched = [a(r(4, *tail), r(6, 4, *taps), r(6))]
        points, ones = (6,) * dims, (1,) * dims
        each = [a(r(2, 4, *points), r(6, 4, *ones), r(6)), a(r(4, *points), r(4, 1, *ones), groups=4)]
        each += [a(r(2, 4, *points), r(6, 4, *ones[1:], 2), r(6), padding=[0] * (dims - 1) + [1])]
        deep = [a(r(2, 12, *tail), r(12, 1, *taps), r(12), groups=12), a(r(12, *tail), r(24, 1, *taps), groups=12)]
        return [a(r(4, 4, *tail), r(6, 4, *taps), r(6)), a(r(6, 4, *tail), r(12, 4, *taps)), *unbatched, *deep, *each]

    return make


def _convolution(r: Random) -> list[Call]:
    plain, no = ([1, 1], [0, 0], [1, 1]), [0, 0]
    return [
        a(r(4, 4, 5, 5), r(6, 4, 2, 2), r(6), *plain, False, no, 1),
        a(r(4, 4, 5, 5), r(6, 4, 2, 2), None, *plain, False, no, 1),
        a(r(4, 4, 3, 3), r(4, 6, 2, 2), r(6), *plain, True, no, 1),
        a(r(4, 4, 5, 5), r(4, 2, 2, 2), r(4), *plain, False, no, 2),
        a(r(4, 4, 3, 3), r(4, 3, 2, 2), r(6), *plain, True, no, 2),
        a(r(4, 6, 5), r(4, 6, 2), r(4), [1], [0], [1], False, [0], 1),
        a(r(4, 6, 12), r(4, 6, 1), r(4), [1], [0], [1], False, [0], 1),
        a(r(2, 6, 12), r(6, 4, 1), r(4), [1], [0], [1], True, [0], 1),
        a(r(2, 6, 6, 6), r(6, 4, 1, 2), r(8), [1], [0, 1], [1, 1], True, [0, 0], 2),
        a(r(2, 6, 6, 5), r(6, 4, 1, 1), None, [1, 2], [0, 2], [1, 1], True, [0, 0], 1),
        a(r(4, 24, 5), r(12, 2, 2), r(12), [1], [0], [1], False, [0], 12),
        a(r(2, 24, 3), r(24, 2, 2), r(24), [1], [0], [1], True, [0], 12),
    ]


def _matmul(r: Random) -> list[Call]:
    pairs = [((6, 4), (4, 12)), ((4,), (4, 6)), ((6, 4), (4,)), ((4,), (4,)), ((6, 2, 4), (6, 4, 2)), ((6, 2, 4),
        (4, 6)),
             ((2, 4), (6, 4, 3)), ((4,), (6, 4, 3)), ((6, 3, 4), (4,)), ((4, 1, 2, 6), (6, 6, 4)), ((1, 2, 6),
                 (4, 6, 3))]  # fmt: skip
    return [a(r(*x), r(*y)) for x, y in pairs]


def _gather(r: Random) -> list[Call]:
    return [a(r(6, 12), 1, r.ints(12, 6, 4)), a(r(6, 12), 0, r.ints(6, 4, 12)), a(r(6, 12), 1, r.ints(12, 6, 12))]


def _scatter(r: Random) -> list[Call]:
    spots = torch.stack([torch.randperm(12, generator=r.generator)[:4] for _ in range(6)])
    return [
        a(r(6, 12), 1, spots, r(6, 4)),
        a(r(12, 6), 0, spots.t().contiguous(), r(4, 6)),
        a(r(6, 12), -1, spots[:4], r(4, 4)),
    ]


def _index(r: Random) -> list[Call]:
    i = r.ints
    return [
        a(r(6, 12), [i(6, 4)]), a(r(6, 12), [None, i(12, 4)]), a(r(6, 4, 12), [i(6, 3), i(4, 3)]), a(r(6, 4),
            [i(6, 4, 6)]),
        a(r(6, 4, 12), [i(6, 4), None, i(12, 4)]), a(r(6, 4), [i(6, 4, 1), i(4, 1, 6)]), a(r(4, 6, 12),
            [None, i(6, 4, 1), i(12, 6)]),
        a(r(6, 4), [torch.tensor([True, False, True, True, False, True])]), a(r(6, 12), [i(6, 12), i(12, 1)]),
    ]  # fmt: skip


def _loss(r: Random) -> list[Call]:
    target = r.ints(12, 6)
    target[2] = -100
    return [a(r(6, 12), target, -100), a(r(4, 3, 24), r.ints(24, 4, 3), -100), a(r(4, 7), r.ints(7, 4), 0)]


def _embedding(r: Random) -> list[Call]:
    repeated = torch.tensor([[1, 1, 2, 0], [2, 1, 5, 5]])
    return [
        a(r(12, 6), r.ints(12, 4, 6)), a(r(12, 6), r.ints(12, 6), 3), a(r(7, 4), r.ints(7, 4)), a(r(24, 4),
            r.ints(24, 6)),
        a(r(6, 4), repeated, -1, True),
    ]  # fmt: skip


def _split(r: Random) -> list[Call]:
    return [
        a(r(12, 6), [6, 6]),
        a(r(6, 24), [12, 6, 6], -1),
        a(r(6, 4, 10), [4, 6], 2),
        a(r(6, 12), [3, 3], 0),
        a(r(6, 36), [24, 12], 1),
    ]


def _cat(r: Random) -> list[Call]:
    return [a([r(6, 4), r(6, 4)]), a([r(6, 12), r(6, 6), r(6, 6)], -1), a([r(4, 5)], 1), a([r(6, 8), r(6, 4)], 1)]


def _norm(r: Random) -> list[Call]:
    return [a(r(6, 4, 12), [12], r(12), r(12)), a(r(6, 4, 12), [12]), a(r(6, 4, 12), [4, 12], r(4, 12), r(4, 12))]


def _rms(r: Random) -> list[Call]:
    return [a(r(6, 4, 12), [12], r(12)), a(r(6, 4, 12), [12]), a(r(6, 4), [4], r(4), 1e-5)]


def _pair(r: Random) -> list[Call]:
    x = r(6, 4, 12)
    return [
        a(x, r(6, 4, 12)), a(r(6, 4, 12), r(12)), a(r(4, 1), r(6, 1, 12)), a(r(6, 12), r()), a(r(6, 12), 3.0), a(x, x),
    ]  # fmt: skip


def _one(r: Random) -> list[Call]:
    return [a(r(6, 4, 12)), a(r())]


def _logic(r: Random) -> list[Call]:
    return [
        a(r.bools(6, 12), r.bools(6, 12)),
        a(r.ints(8, 6, 12), r.ints(8, 12)),
        a(r.bools(4, 1, 6), r.bools(4, 6, 1)),
    ]


MAKE: dict[Any, Make] = {
    aten.linear.default: lambda r: [
        a(r(6, 4, 12), r(8, 12), r(8)), a(r(4, 12), r(6, 12)), a(r(12), r(6, 12), r(6)), a(r(2, 6, 2, 4),
            r(12, 4)), a(r(6, 1), r(4, 1), r(4)),
    ],
    aten.addmm.default: lambda r: [
        a(r(12), r(6, 4), r(4, 12)), a(r(6, 12), r(6, 4), r(4, 12)), a(r(1, 12), r(6, 4), r(4, 12)), a(r(6, 1),
            r(6, 4), r(4, 12)),
        a(r(1), r(6, 4), r(4, 6)), a(r(12), r(6, 4), r(4, 12), beta=2, alpha=3),
    ],
    aten.mm.default: lambda r: [a(r(6, 4), r(4, 12))],
    aten.bmm.default: lambda r: [a(r(6, 3, 4), r(6, 4, 12))],
    aten.baddbmm.default: lambda r: [a(r(6, 3, 12), r(6, 3, 4), r(6, 4, 12)), a(r(1, 1, 12), r(6, 3, 4),
        r(6, 4, 12), beta=2)],
    aten.mv.default: lambda r: [a(r(6, 4), r(4))],
    aten.dot.default: lambda r: [a(r(12), r(12))],
    aten.vdot.default: lambda r: [a(r(12), r(12)), a(r.complex(12), r.complex(12))],
    aten.matmul.default: _matmul,
    aten.convolution.default: _convolution,
    aten.conv1d.default: _conv(1),
    aten.conv2d.default: _conv(2),
    aten.conv3d.default: _conv(3),
    aten.embedding.default: _embedding,
    ops.token_loss: _loss,
    ops.attention: lambda r: [*attention_samples.plain(r), *attention_samples.hidden(r)],
    ops.ring_attention: lambda r: [
        (args, {**kwargs, "axis": "tp"})
        for make in (attention_samples.plain, attention_samples.rings, attention_samples.hidden)
        for args, kwargs in make(r)
    ],
    aten.sum.default: lambda r: [*_full(r), a(r.ints(5, 6, 12)), a(r.bools(6))],
    aten.sum.dim_IntList: _many,
    aten.mean.default: _full,
    aten.mean.dim: _many,
    aten.amax.default: lambda r: [*_many(r)[:-1], *_tied(r), a(r.bools(6, 12), [1])],
    aten.amin.default: lambda r: [*_many(r)[:-1], *_tied(r), a(r.bools(6, 12), [1])],
    aten.max.default: _full,
    aten.min.default: _full,
    aten.max.dim: lambda r: [*_reduce(r), *_tied(r), a(r.bools(6, 12), 1)],
    aten.min.dim: lambda r: [*_reduce(r), *_tied(r), a(r.bools(6, 12), 1)],
    aten.argmax.default: lambda r: [*_reduce(r), a(r(6, 4))],
    aten.argmin.default: lambda r: [*_reduce(r), a(r(6, 4))],
    aten.histc.default: lambda r: [a(r.ints(6, 4, 12).to(F64), 6, 0, 5), a(r(12), 3, -1.0, 1.0), a(r(12), 5)],
    aten.any.default: lambda r: [a(r.bools(6, 4))],
    aten.any.dim: lambda r: _reduce(r, r.bools),
    aten.all.default: lambda r: [a(r.bools(6, 4))],
    aten.all.dim: lambda r: _reduce(r, r.bools),
    aten.prod.default: _full,
    aten.prod.dim_int: _reduce,
    aten.logsumexp.default: lambda r: [a(r(6, 12), [0]), a(r(6, 4, 12), [1, 2], True), _tied(r)[0]],
    aten.linalg_vector_norm.default: lambda r: [a(r(6, 12)), a(r(6, 4, 12), 2, [1], True), a(r(6, 12), 3, [0])],
    aten.softmax.int: _soft,
    aten._softmax.default: lambda r: [a(r(6, 12), 1, False)],
    aten.log_softmax.int: _soft,
    aten._log_softmax.default: lambda r: [a(r(6, 12), 1, False)],
    aten.cumsum.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), -2)],
    aten.cumprod.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), -2)],
    aten.sort.default: lambda r: [a(r(6, 12)), a(r(6, 12), 0, True)],
    aten.sort.stable: lambda r: [a(r(6, 12), stable=True, dim=1)],
    aten.argsort.default: lambda r: [a(r(6, 12), 0)],
    aten.topk.default: lambda r: [a(r(6, 12), 2), a(r(6, 12), 3, 0), a(r(6, 4), 4)],
    aten.logcumsumexp.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), -2)],
    aten.cummax.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), -2)],
    aten.cummin.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), -2)],
    aten.median.dim: _reduce,
    aten.kthvalue.default: lambda r: [a(r(6, 12), 2, 0), a(r(6, 4, 12), 3, 1, True)],
    aten.triu.default: lambda r: [a(r(6, 4, 6)), a(r(6, 6), 1)],
    aten.tril.default: lambda r: [a(r(6, 4, 6)), a(r(6, 6), -1)],
    aten.gather.default: _gather,
    aten.scatter.src: _scatter,
    aten.scatter.value: lambda r: [a(*args[:3], 2.0) for args, _ in _scatter(r)],
    aten.scatter_add.default: lambda r: [*_scatter(r), a(r(6, 12), 1, r.ints(12, 6, 24), r(6, 24))],
    aten.scatter_reduce.two: lambda r: [a(*args, reduce) for args, _ in _scatter(r) for reduce in ("sum", "amax")],
    aten.index_put.default: lambda r: [
        a(r(6, 12), [None, r.ints(12, 4)], r(6, 4), True), a(r(6, 4, 12), [r.ints(6, 3), r.ints(4, 3)], r(3, 12),
            True), a(r(4, 6, 12), [None, r.ints(6, 3)], r()),
        a(r(6, 12, 4), [None, r.ints(12, 2, 3), r.ints(4, 3)], r(6, 1, 3), True), a(r(4, 6, 12), [r.ints(4, 3),
            None, r.ints(12, 3)], r(3, 6), True),
        a(r(6, 4), [torch.tensor([True, False, True, True, False, True])], r(4, 4)),
    ],
    aten.index_add.default: lambda r: [a(r(6, 12), 1, r.ints(12, 4), r(6, 4)), a(r(4, 6, 12), 0, r.ints(4, 6),
        r(6, 6, 12), alpha=2)],
    aten.index_copy.default: lambda r: [a(r(6, 12), 1, torch.tensor([3, 0, 7, 5]), r(6, 4)), a(r(4, 6),
        0, torch.tensor([2]), r(1, 6))],
    aten.index_fill.int_Scalar: lambda r: [a(r(6, 12), 1, r.ints(12, 4), 2.0)],
    aten.index.Tensor: _index,
    aten.index_select.default: lambda r: [a(r(6, 12), 0, r.ints(6, 4)), a(r(6, 4, 12), -1, r.ints(12, 6))],
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _rms,
    aten.avg_pool1d.default: lambda r: [a(r(6, 4, 6), [2])],
    aten.avg_pool2d.default: lambda r: [a(r(6, 4, 6, 6), [3, 3], [2, 2], [1, 1])],
    aten.avg_pool3d.default: lambda r: [a(r(6, 4, 4, 4, 4), [2, 2, 2])],
    aten.max_pool2d_with_indices.default: lambda r: [a(r(6, 4, 6, 6), [2, 2]), a(r(4, 6, 6), [2, 2])],
    aten.max_pool3d_with_indices.default: lambda r: [a(r(6, 4, 4, 4, 4), [2, 2, 2])],
    aten._adaptive_avg_pool2d.default: lambda r: [a(r(6, 4, 6, 6), [2, 3])],
    aten._adaptive_avg_pool3d.default: lambda r: [a(r(6, 4, 4, 4, 4), [2, 2, 1])],
    aten.adaptive_max_pool2d.default: lambda r: [a(r(6, 4, 6, 6), [2, 3])],
    aten.upsample_nearest1d.default: lambda r: [a(r(6, 4, 6), [12])],
    aten.upsample_nearest2d.default: lambda r: [a(r(6, 4, 6, 6), [12, 9])],
    aten.upsample_linear1d.default: lambda r: [a(r(6, 4, 6), [12], False)],
    aten.upsample_bilinear2d.default: lambda r: [a(r(6, 4, 6, 6), [12, 9], True)],
    aten.upsample_bicubic2d.default: lambda r: [a(r(6, 4, 6, 6), [12, 9], True)],
    aten._upsample_bilinear2d_aa.default: lambda r: [a(r(6, 4, 6, 6), [3, 4], False)],
    aten._upsample_bicubic2d_aa.default: lambda r: [a(r(6, 4, 6, 6), [3, 4], False)],
    aten.reflection_pad1d.default: lambda r: [a(r(6, 4, 6), [1, 2])],
    aten.reflection_pad2d.default: lambda r: [a(r(6, 4, 6, 6), [1, 2, 0, 1])],
    aten.replication_pad1d.default: lambda r: [a(r(6, 4, 6), [1, 2])],
    aten.replication_pad2d.default: lambda r: [a(r(6, 4, 6, 6), [1, 2, 0, 1])],
    aten.im2col.default: lambda r: [a(r(6, 4, 4, 4), [2, 2], [1, 1], [0, 0], [2, 2])],
    aten.col2im.default: lambda r: [a(r(6, 16, 4), [4, 4], [2, 2], [1, 1], [0, 0], [2, 2])],
    aten.grid_sampler_2d.default: lambda r: [a(r(6, 4, 6, 6), r(6, 3, 4, 2) / 3, 0, 0, False)],
    aten._fft_r2c.default: lambda r: [a(r(6, 4, 12), [2], 0, True), a(r(6, 4, 12), [1], 1, False)],
    aten._fft_c2r.default: lambda r: [a(r.complex(6, 4, 7), [2], 2, 12)],
    aten._fft_c2c.default: lambda r: [a(r.complex(6, 4, 12), [0, 2], 0, True), a(r.complex(6, 12), [1], 2, False)],
    aten.reshape.default: _shape("reshape"),
    aten.view.default: _shape("reshape"),
    aten.unsqueeze.default: lambda r: [a(r(6, 12), d) for d in (0, 1, -1)],
    aten.squeeze.dim: lambda r: [a(r(6, 1, 12), 1), a(r(2, 4, 3), 0), a(r(1, 6), -2)],
    aten.squeeze.dims: lambda r: [a(r(6, 1, 12, 1), [1, 3]), a(r(2, 1, 4), [0, 1])],
    aten.squeeze.default: lambda r: [a(r(6, 1, 12)), a(r(2, 1, 3))],
    aten.flatten.using_ints: lambda r: [a(r(6, 4, 12)), a(r(6, 4, 12), 1), a(r(6, 4, 12), 0, 1)],
    aten.transpose.int: lambda r: [a(r(6, 4, 12), 1, 2), a(r(6, 4, 12), 0, -1)],
    aten.t.default: lambda r: [a(r(6, 12)), a(r(6))],
    aten.permute.default: lambda r: [a(r(6, 4, 12), [2, 0, 1]), a(r(6, 4, 12), [0, -1, -2])],
    aten.expand.default: lambda r: [a(r(6, 1, 12), [6, 4, 12]), a(r(12), [6, -1]), a(r(6, 1), [4, -1, 12])],
    aten.repeat.default: lambda r: [a(r(6, 4), [1, 1]), a(r(6, 4), [4, 1, 2]), a(r(6, 1), [1, 12]), a(r(6), [6, 1])],
    aten.split_with_sizes.default: _split,
    aten.cat.default: _cat,
    aten.stack.default: lambda r: [a([r(6, 4), r(6, 4)]), a([r(6, 12)] * 3, -1), a([r(6, 12), r(6, 12)], 1)],
    aten.unfold.default: lambda r: [a(r(6, 12), 1, 3, 2), a(r(6, 4, 12), -3, 2, 1)],
    aten.diagonal.default: lambda r: [a(r(6, 4, 4), 0, -2, -1), a(r(4, 6, 6), 1, 0, 1), a(r(6, 6))],
    aten.slice_scatter.default: lambda r: [a(r(6, 12), r(6, 6), 1, 0, 12, 2), a(r(12, 6, 4), r(3, 6, 4), 0, 1, 12, 4)],
    aten.slice.Tensor: lambda r: [a(r(6, 12), 1, 2, 8), a(r(6, 12), 0, 0, 9223372036854775807), a(r(6, 12),
        -1, -4), a(r(6, 12), 1, 0, 12, 2)],
    aten.select.int: lambda r: [a(r(6, 12), 0, 2), a(r(6, 4, 12), -1, -1)],
    aten.pad.default: lambda r: [a(r(6, 12), [1, 2]), a(r(6, 12), [0, 0, 1, 0]), a(r(6, 12), [1, 1], "constant", 2.0)],
    aten.constant_pad_nd.default: lambda r: [a(r(6, 12), [1, 2]), a(r(6, 12), [-1, 1]), a(r(6, 12), [0, 0, 1, 0], 1.0)],
    aten.flip.default: _window,
    aten.roll.default: lambda r: [a(r(6, 12), [1], [0]), a(r(6, 12), [5]), a(r(6, 4, 12), [1, 2], [0, -1])],
    aten.complex.default: lambda r: [a(r(6, 12), r(6, 12)), a(r(6, 12), r(12))],
    aten.polar.default: lambda r: [a(r(6, 12), r(6, 12))],
    aten.view_as_complex.default: lambda r: [a(r(6, 12, 2))],
    aten.view_as_real.default: lambda r: [a(r.complex(6, 12))],
    aten.full.default: lambda r: [a([6, 12], 2.0, dtype=F64)],
    aten.zeros.default: lambda r: [a([6, 12], dtype=F64)],
    aten.ones.default: lambda r: [a([6, 12], dtype=F64)],
    aten.new_zeros.default: lambda r: [a(r(3), [6, 12])],
    aten.new_ones.default: lambda r: [a(r(3, 2), [6, 12])],
    aten.new_full.default: lambda r: [a(r(), [6, 12], 3.0)],
    aten.zeros_like.default: _one,
    aten.ones_like.default: _one,
    aten.full_like.default: lambda r: [a(r(6, 12), 2.0)],
    aten.arange.default: lambda r: [a(6)],
    aten.arange.start: lambda r: [a(2, 8)],
    aten.arange.start_step: lambda r: [a(0, 12, 2)],
    aten.scalar_tensor.default: lambda r: [a(2.0, dtype=F64)],
    aten.add.Tensor: lambda r: [*_pair(r), a(r(6, 12), r(6, 12), alpha=2), a(r.ints(5, 6), r.ints(5, 6))],
    aten.sub.Tensor: _pair,
    aten.mul.Tensor: _pair,
    aten.div.Tensor: lambda r: [a(x, y.abs() + 1 if isinstance(y, Tensor) and y is not x else y) for (x, y),
        _ in _pair(r)],
    aten.mul.Scalar: lambda r: [a(r(6, 12), 3.0)],
    aten.div.Scalar: lambda r: [a(r(6, 12), 3.0)],
    aten.neg.default: _one,
    aten._to_copy.default: lambda r: [a(r(6, 12), dtype=F64), a(r.ints(5, 6), dtype=F64), a(r(6, 12), dtype=I64),
        a(r.bools(6), dtype=I64)],
    aten.to.dtype: lambda r: [a(r.ints(5, 6, 4), F64), a(r(6, 4), I64), a(r.ints(5, 6), torch.bool)],
    aten.clone.default: lambda r: [*_one(r), a(r.bools(6))],
    aten.detach.default: _one,
    aten.alias.default: _one,
    aten.where.self: lambda r: [
        a(r.bools(6, 12), r(6, 12), r(6, 12)), a(r.bools(6, 1), r(12), r(6, 12)), a(r.bools(6, 4), r(6, 4), r()),
        a(r.bools(6, 4), *[r(6, 4)] * 2),
    ],
    aten.where.ScalarOther: lambda r: [a(r.bools(6, 1), r(6, 12), 0.0)],
    aten.where.ScalarSelf: lambda r: [a(r.bools(6, 12), 1.0, r(6, 12))],
    aten.where.Scalar: lambda r: [a(r.bools(6, 12), 1.0, 0.0)],
    aten.__and__.Tensor: _logic,
    aten.__or__.Tensor: _logic,
    aten.__xor__.Tensor: _logic,
    aten.__and__.Scalar: lambda r: [a(r.ints(8, 6, 12), 3)],
    aten.__or__.Scalar: lambda r: [a(r.ints(8, 6, 12), 3)],
    aten.floor_divide.default: lambda r: [a(r.ints(9, 6, 12), 2), a(r.ints(9, 6, 12), r.ints(3, 12) + 1)],
    aten.log_sigmoid.default: _one,
    aten.log_sigmoid_forward.default: lambda r: [a(r(6, 12))],
    aten.bucketize.Tensor: lambda r: [a(r(6, 12), torch.linspace(-1, 1, 4, dtype=F64))],
    aten.prelu.default: lambda r: [a(r(6, 4, 12), r(4)), a(r(6, 12), r(1)), a(r(6, 4, 12), r(1))],
}  # fmt: skip
MAKE |= {ops.experts: expert_samples.calls, **matrix_samples.MAKE}
MAKE[ops.stacked] = lambda r: [(tuple(r(12, 24) for _ in range(12)), {}), (tuple(r(12) for _ in range(12)), {})]


def calls(target: Any, seed: int = 0) -> list[Call]:
    """The sample calls of an op of the table."""
    return MAKE[target](Random(seed))
