"""Sample calls of the op ``experts``; ``r`` makes seeded tensors (``samples.Random``)."""

from typing import Any

import torch

Call = tuple[tuple[Any, ...], dict[str, Any]]
F64 = torch.float64


def calls(r: Any) -> list[Call]:
    """All of them."""
    return gated(r) + biased(r)


def gated(r: Any) -> list[Call]:
    """Experts with a gate: even choices, all tokens to one expert, and choices that are no expert."""
    body = (
        ("linear", (("%", 0), ("%", 1)), ()),
        ("aten.split_with_sizes.default", (("%", 3), (12, 12), 1), ()),
        ("getitem", (("%", 4), 0), ()),
        ("getitem", (("%", 4), 1), ()),
        ("aten.silu.default", (("%", 5),), ()),
        ("aten.mul.Tensor", (("%", 7), ("%", 6)), ()),
        ("linear", (("%", 8), ("%", 2)), ()),
    )
    even = torch.stack([torch.randperm(12, generator=r.generator)[:2] for _ in range(12)])
    choices = [even, torch.full((12, 1), 7), even - 3]
    return [((r(12, 6), i, r(12, i.shape[1]), [r(12, 24, 6), r(12, 6, 12)], body, F64), {}) for i in choices]


def biased(r: Any) -> list[Call]:
    """Experts with biases and matrices the other way round; the gate is every second feature."""
    body = (
        ("matmul", (("%", 0), ("%", 1)), ()),
        ("each", (("%", 2),), ()),
        ("aten.add.Tensor", (("%", 5), ("%", 6)), ()),
        ("aten.slice.Tensor", (("%", 7), 1, 0, 24, 2), ()),
        ("aten.clamp.default", (("%", 8), None, 0.7), ()),
        ("matmul", (("%", 9), ("%", 3)), ()),
        ("each", (("%", 4),), ()),
        ("aten.add.Tensor", (("%", 10), ("%", 11)), ()),
    )
    params = [r(12, 6, 24), r(12, 24), r(12, 12, 6), r(12, 6)]
    return [((r(12, 6), r.ints(12, 12, 3), r(12, 3), params, body, F64), {})]
