"""What conversions copy on a rank besides what travels: collectives take and give chunks of the leading dim.

A gather along another dim is followed by a copy that puts its chunks in their places, a scatter preceded by one, and a
slice of another dim is copied, so that it does not keep the whole alive (``runtime.collectives``).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from torch import fx

from autopar.cost.compute import Value, bound, differentiable
from autopar.cost.hardware import Hardware
from autopar.cost.price import BACKWARD, FORWARD
from autopar.cost.shares import layouts
from autopar.cost.symbols import Number, is_symbolic, product, ratio, several
from autopar.ir.layout import I, Invariant, Layout, Partial, Replicated, Shard, Type

WHOLE = Layout()
GATHER, SCATTER, SLICE, PLACE, KEEP = "gather", "scatter", "slice", "place", ""
STEPS: Mapping[tuple[type, type], tuple[str, str]] = {
    (Shard, Replicated): (GATHER, SCATTER),
    (Shard, Invariant): (GATHER, SLICE),
    (Shard, Partial): (PLACE, SLICE),
    (Invariant, Shard): (SLICE, GATHER),
    (Replicated, Shard): (SLICE, PLACE),
    (Partial, Shard): (SCATTER, GATHER),
}
"""What is done with a shard, forward and backward, by the types of a conversion."""


@dataclass(frozen=True)
class Copy:
    """One pass over memory.

    Args:
        bytes: read and written. major: elements of all dims before the one that is shared out, with one of which chunks
            lie where they should and nothing is copied; 0 where something is in any case.
    """

    bytes: Number
    major: Number


def copies(
    src: Type, dst: Type, whole: Value, ways: Number, others: Layout = WHOLE
) -> tuple[tuple[Copy, ...], tuple[Copy, ...]]:
    """The copies of the conversion ``src`` → ``dst``, forward and backward.

    Args:
        whole: the value as a rank has it that holds all of it along the conversion's axis, of ``ways`` ranks.
        others: its layout on the other axes, which may leave of repeats of a share one alone.
    """
    if src == dst:
        return (), ()
    src, dst = _local(src, others), _local(dst, others)
    if isinstance(src, Shard) and isinstance(dst, Shard):
        if src.dim == dst.dim:
            both = (*_of(GATHER, src, whole, ways), *_of(SLICE, dst, whole, ways))
            return both, (*_of(GATHER, dst, whole, ways), *_of(SLICE, src, whole, ways))
        both = tuple(_exchange(src, dst, whole, ways))
        return both, tuple(_exchange(dst, src, whole, ways))
    shard = src if isinstance(src, Shard) else dst
    steps = STEPS.get((type(src), type(dst)), (KEEP, KEEP))
    forward, backward = (_of(step, shard, whole, ways) if isinstance(shard, Shard) else () for step in steps)
    return forward, backward


def of_node(
    node: fx.Node, whole: Value, ways: Number, see: Callable[[Type], Type] = lambda kind: kind
) -> Iterator[tuple[str, Copy]]:
    """(part of the step, copy) of the conversion at ``node``, whose ends are as ``see`` sees them."""
    args = bound(node)
    others = layouts(node)[0].having(args["axis"], I)
    for when, made in zip((FORWARD, BACKWARD), copies(see(args["src"]), see(args["dst"]), whole, ways, others)):
        if when == FORWARD or differentiable(node):
            yield from ((when, copy) for copy in made)


def seconds(copy: Copy, ways: Number, hardware: Hardware) -> Number:
    """Seconds of a copy; none along an axis of one rank."""
    done = several(copy.major) if is_symbolic(copy.major) else int(copy.major != 1)
    return several(ways) * done * copy.bytes / (hardware.memory_bandwidth * hardware.memory_efficiency)


def _local(kind: Type, others: Layout) -> Type:
    """A shard as a rank sees it whose other axes share out what its factor repeats over."""
    if not isinstance(kind, Shard) or len(kind.pieces) > 1:
        return kind
    own, left = kind.pieces[0], kind.pieces[0].outer
    for _, shard in others.shards():
        for p in shard.pieces if shard.dim == kind.dim else ():
            if p.inner >= own.count * own.inner:
                left //= p.count // (2 if p.zigzag else 1)
    return Shard(kind.dim, (own.over(max(1, left) * own.count * own.inner, own.inner),))


def _of(step: str, shard: Shard, whole: Value, ways: Number) -> tuple[Copy, ...]:
    share = ratio(2 * whole.bytes, ways)
    if step in (GATHER, SCATTER):
        return (Copy(2 * whole.bytes * _passes(step, shard), _major(shard, whole)),)
    if step == SLICE:
        return (Copy(share, _major(shard, whole)),)
    return (Copy(whole.bytes + share, 0),) if step == PLACE else ()  # zeros, and the share among them


def _exchange(src: Shard, dst: Shard, whole: Value, ways: Number) -> Iterator[Copy]:
    """What stands before and behind an all-to-all. Shares that are no runs are put into one row and taken out again."""
    moved, rows = ratio(2 * whole.bytes, ways), not (_run(src) and _run(dst))
    yield Copy(moved, _major(dst, _cut(whole, src, ways)))
    if rows:
        yield Copy(moved, 0)
    yield Copy(moved * _passes(GATHER, src), 0 if rows else _major(src, _cut(whole, dst, ways)))


def _passes(step: str, shard: Shard) -> int:
    """How often a collective's value is copied: shares that are no runs are put together first, segments again."""
    return 2 if len(shard.pieces) > 1 or (step == SCATTER and not _run(shard)) else 1


def _major(shard: Shard, value: Value) -> Number:
    """Elements of the dims before the shard's; 0 where a rank's share is no run as long as all others."""
    return product(value.shape[: shard.dim]) if _run(shard) else 0


def _run(shard: Shard) -> bool:
    return shard.plain and shard.even


def _cut(value: Value, shard: Shard, ways: Number) -> Value:
    shape = (*value.shape[: shard.dim], ratio(value.shape[shard.dim], ways), *value.shape[shard.dim + 1 :])
    return Value(shape, value.dtype)
