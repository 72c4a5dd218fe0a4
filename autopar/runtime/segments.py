"""Shares of a dim: which elements of the whole each coordinate holds.

``segments`` is None for a plain even shard. Otherwise the whole dim is a concatenation of segments
(outer, counts, inner), each of outer * sum(counts) * inner elements, of which coordinate c holds, for each of the
``outer`` repeats, ``counts[c]`` runs of ``inner`` elements. A local dim is the concatenation of its shares.
"""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime.axis import Axis

Segments = tuple[tuple[int, tuple[int, ...], int], ...]


def is_even_run(segments: Segments | None) -> bool:
    """Whether every coordinate holds one contiguous run of the same length."""
    return segments is None or (len(segments) == 1 and segments[0][0] == 1 and len(set(segments[0][1])) == 1)


def local_length(segments: Segments, coordinate: int) -> int:
    """Elements of the dim that the coordinate holds."""
    return sum(outer * counts[coordinate] * inner for outer, counts, inner in segments)


def check_whole(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> None:
    """Raise AutoparError ``bad-segments`` unless dim ``dim`` of ``x`` is as long as the segments are."""
    if segments is None:
        if x.shape[dim] % axis.size:
            _refuse(x, dim, axis, f"a multiple of {axis.size}")
    else:
        length = sum(outer * sum(counts) * inner for outer, counts, inner in segments)
        if x.shape[dim] != length or any(len(counts) != axis.size for _, counts, _ in segments):
            _refuse(x, dim, axis, f"{length} = {segments}")


def check_local(x: Tensor, dim: int, axis: Axis, segments: Segments | None) -> None:
    """Raise AutoparError ``bad-segments`` unless dim ``dim`` of ``x`` is this coordinate's share."""
    if segments is not None:
        if any(len(counts) != axis.size for _, counts, _ in segments):
            _refuse(x, dim, axis, f"a share of {segments}")
        if x.shape[dim] != local_length(segments, axis.coordinate):
            _refuse(x, dim, axis, f"coordinate {axis.coordinate}'s share of {segments}")


def _refuse(x: Tensor, dim: int, axis: Axis, want: str) -> None:
    message = f"{axis.name}={axis.size}: dim {dim} of {tuple(x.shape)} has {x.shape[dim]} elements, not {want}"
    raise AutoparError("bad-segments", message, "give segments that say how the dim is shared out")


def shares(whole: Tensor, dim: int, coordinate: int, ways: int, segments: Segments | None) -> Iterator[Tensor]:
    """Views of ``whole``, one for each segment: [.., outer, count, inner, ..] where outer > 1, else [.., run, ..]."""
    if segments is None:
        run = whole.shape[dim] // ways
        yield whole.narrow(dim, coordinate * run, run)
        return
    at = 0
    for outer, counts, inner in segments:
        total, start, count = sum(counts), sum(counts[:coordinate]), counts[coordinate]
        if outer == 1:
            yield whole.narrow(dim, at + start * inner, count * inner)
        else:
            span = whole.narrow(dim, at, outer * total * inner)
            yield span.unflatten(dim, (outer, total, inner)).narrow(dim + 1, start, count)
        at += outer * total * inner


def take(whole: Tensor, dim: int, coordinate: int, ways: int, segments: Segments | None) -> Tensor:
    """The coordinate's share of ``whole``: a view where it is one run."""
    parts = [
        part if part.dim() == whole.dim() else part.flatten(dim, dim + 2)
        for part in shares(whole, dim, coordinate, ways, segments)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def place(local: Tensor, dim: int, coordinate: int, ways: int, segments: Segments | None) -> Tensor:
    """The whole, holding ``local`` as the coordinate's share and zero elsewhere."""
    if segments is None:
        length = local.shape[dim] * ways
    else:
        length = sum(outer * sum(counts) * inner for outer, counts, inner in segments)
    whole = local.new_zeros((*local.shape[:dim], length, *local.shape[dim + 1 :]))
    at = 0
    for share in shares(whole, dim, coordinate, ways, segments):
        run = share.shape[dim] if share.dim() == local.dim() else math.prod(share.shape[dim : dim + 3])
        share.copy_(local.narrow(dim, at, run).reshape(share.shape))
        at += run
    return whole


def join(parts: list[Tensor], dim: int, segments: Segments) -> Tensor:
    """The whole from every coordinate's local tensor."""
    if len(segments) == 1 and segments[0][0] == 1:
        return torch.cat(parts, dim)
    joined, at = [], [0] * len(parts)
    for outer, counts, inner in segments:
        pieces = []
        for c, part in enumerate(parts):
            run = outer * counts[c] * inner
            pieces.append(part.narrow(dim, at[c], run).unflatten(dim, (outer, counts[c], inner)))
            at[c] += run
        joined.append(torch.cat(pieces, dim + 1).flatten(dim, dim + 2))
    return joined[0] if len(joined) == 1 else torch.cat(joined, dim)


def pad(x: Tensor, dim: int, length: int) -> Tensor:
    """``x`` with zeros after it along ``dim``, up to ``length``."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    return torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)


def lead(x: Tensor, dim: int, ways: int) -> Tensor:
    """The ``ways`` even chunks of ``dim`` one after another on dim 0; a view where nothing is major to ``dim``."""
    if dim == 0:
        return x
    run = x.shape[dim] // ways
    if x.numel() == 0 or math.prod(x.shape[:dim]) == 1:
        return x.reshape((x.shape[0] * ways, *x.shape[1:dim], run, *x.shape[dim + 1 :]))
    return torch.cat(x.split(run, dim))


def unlead(x: Tensor, dim: int, ways: int) -> Tensor:
    """The inverse of ``lead``: chunks of dim 0 concatenated along ``dim``."""
    if dim == 0:
        return x
    rows = x.shape[0] // ways
    if x.numel() == 0 or rows * math.prod(x.shape[1:dim]) == 1:
        return x.reshape((rows, *x.shape[1:dim], x.shape[dim] * ways, *x.shape[dim + 1 :]))
    return torch.cat(x.split(rows), dim)
