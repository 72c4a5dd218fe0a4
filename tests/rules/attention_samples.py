"""Sample calls of attention, alone and in a ring; ``r`` makes seeded tensors (``samples.Random``)."""

from typing import Any

from torch import Tensor

Call = tuple[tuple[Any, ...], dict[str, Any]]


def a(*args: Any, **kwargs: Any) -> Call:
    return args, kwargs


def plain(r: Any) -> list[Call]:
    """Grouped heads, masks that are given or causal, other key lengths."""

    def qkv(h: int, g: int, s: int = 3, t: int = 5, b: int = 4) -> tuple[Tensor, ...]:
        return r(b, h, s, 2), r(b, g, t, 2), r(b, g, t, 3)

    square = qkv(4, 4, 4, 4)
    return [
        a(*qkv(4, 4)), a(*qkv(12, 6), enable_gqa=True), a(*qkv(8, 2), enable_gqa=True), a(*qkv(12, 1), enable_gqa=True),
        a(*square, is_causal=True), a(*qkv(8, 4, 4, 4), is_causal=True, enable_gqa=True, scale=0.3),
        a(*qkv(6, 6), r.bools(4, 1, 3, 5)), a(*qkv(6, 6), r(6, 3, 5)), a(*qkv(6, 6), r(3, 5)), a(*qkv(6, 3),
            r(1, 6, 1, 5), enable_gqa=True),
        a(r(6, 4, 2), r(6, 5, 2), r(6, 5, 2)), a(r(4, 2), r(5, 2), r(5, 2)), a(*qkv(4, 4, b=1)),
        a(r(4, 6, 3, 2), r(1, 6, 5, 2), r(1, 6, 5, 2)),
    ]  # fmt: skip


def hidden(r: Any) -> list[Call]:
    """Masks of several parts, caps, sinks; heads in groups, and what broadcasts over rows, heads and queries."""
    q, k, v = r(2, 4, 12, 2), r(2, 2, 12, 2), r(2, 2, 12, 3)
    ids = r.ints(3, 2, 12)
    some, padding = r.bools(2, 1, 12, 12), r.bools(2, 1, 1, 12)
    return [
        a(q, k, v, some, enable_gqa=True, bias=r(1, 4, 12, 12), fill=-2.0),
        a(q, r(2, 4, 12, 2), r(2, 4, 12, 2), some, enable_gqa=False, cap=0.7, fill=-2.0),
        a(q, k, v, None, 0.0, True, enable_gqa=True, bias=r(4, 1, 12), sink=r(1, 4, 1, 1)),
        a(q, k, v, padding, 0.0, True, enable_gqa=True),
        a(q, k, v, enable_gqa=True, band=(-2, 3)),
        a(q, k, v, enable_gqa=True, query_ids=ids, key_ids=ids + 0),
        a(q, k, v, padding, enable_gqa=True, band=(0, 5), query_ids=ids[:1], key_ids=ids),
        a(q, k, v, enable_gqa=True, sink=r(1, 1, 1, 1), cap=2.0, query_ids=ids, key_ids=ids[1:] + 0),
    ]  # fmt: skip


def rings(r: Any) -> list[Call]:
    """Longer sequences, so that every coordinate has two chunks; other key lengths; masks by row and written out."""
    q, k, v = r(2, 4, 12, 2), r(2, 2, 12, 2), r(2, 2, 12, 3)
    return [
        a(q, k, v, is_causal=True, enable_gqa=True), a(q, r(2, 4, 9, 2), r(2, 4, 9, 3), r(2, 1, 12, 9)),
        a(r(2, 2, 12, 2), k, v, r.bools(2, 1, 12, 12), fill=-2.0), a(r(2, 2, 12, 2), k, v, r(12, 12), fill=0.0),
    ]  # fmt: skip
