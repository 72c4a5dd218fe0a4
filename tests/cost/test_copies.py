"""What conversions copy, priced as what the runtime does on a rank: every pass over memory counted."""

import math
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar.cost.compute import Value
from autopar.cost.copies import Copy, copies, seconds
from autopar.cost.hardware import load
from autopar.cost.symbols import axis_size, evaluate
from autopar.ir.layout import I, P, Piece, R, Shard, Type, plain_shard
from autopar.rules.local import ROWS
from autopar.runtime import collectives
from autopar.runtime.axis import Axis
from autopar.runtime.segments import Segments
from autopar.runtime.simulate import run_ranks
from tests.runtime.table import axis_of

WAYS = 2
BEHIND: Segments = ((2, (1, 1), 2),)  # two repeats of two runs of two
KINDS: dict[str, Type] = {"I": I, "R": R, "P": P, "S1": plain_shard(1, 8, 2), "S2": plain_shard(2, 4, 2)}  # type: ignore[dict-item]
KINDS |= {"S0": plain_shard(0, 4, 2), "X1": Shard(1, (Piece(8, 2, 2),))}  # type: ignore[dict-item]


class Copied(TorchDispatchMode):
    """Bytes that this thread's ops write into new memory, once for zeros and twice for what they read."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.name().split("::")[1].split(".")[0]
        if name in ("cat", "clone", "copy_", "new_zeros", "zeros_like"):
            self.bytes += out.nbytes * (1 if "zeros" in name else 2)
        return out


def convert(x: Tensor, src: str, dst: str, axis: Axis) -> Tensor:
    """The conversion as a local program calls it."""
    segments = {"X1": BEHIND}
    if src[0] in "SX" and dst[0] in "SX":
        return collectives.all_to_all(x, int(src[1]), int(dst[1]), axis, segments.get(src), segments.get(dst))
    shard = src if src[0] in "SX" else dst
    letters = (src[0] + dst[0]).replace("X", "S")
    return ROWS[letters](x, int(shard[1]), axis, segments.get(shard)) if "S" in letters else ROWS[letters](x, axis)


def shape_of(kind: str, rows: int) -> tuple[int, ...]:
    whole = [rows, 8, 4]
    if kind[0] in "SX":
        whole[int(kind[1])] //= WAYS
    return tuple(whole)


def counted(made: tuple[Copy, ...]) -> float:
    return math.fsum(float(c.bytes) for c in made if c.major != 1)


@pytest.mark.parametrize("rows", [4, 1])
def test_a_conversion_copies_what_the_runtime_does(rows: int) -> None:
    """Nothing where nothing is major to the dim, as of one row; a dim that two shards share is gathered and cut."""
    names = [n for n in KINDS if rows > 1 or n != "S0"]
    kinds = {**KINDS, "S0": plain_shard(0, rows, WAYS) if rows > 1 else I}
    cases = [(a, b) for a, b in permutations(names, 2) if {a, b} != {"S1", "X1"}]

    def rank(r: int) -> list[tuple[int, int]]:
        axis, out = axis_of(WAYS), []
        for src, dst in cases:
            x = torch.ones(shape_of(src, rows), requires_grad=True)
            with Copied() as forward:
                y = convert(x, src, dst, axis)
            with Copied() as backward:
                torch.autograd.grad(y, x, torch.ones(shape_of(dst, rows)))
            out.append((forward.bytes, backward.bytes))
        return out

    found = run_ranks(WAYS, rank)[0]  # the rank that keeps what others make zero
    for (src, dst), real in zip(cases, found):
        priced = copies(kinds[src], kinds[dst], Value((rows, 8, 4), torch.float32), WAYS)
        assert tuple(map(counted, priced)) == real, (src, dst)
    assert rows == 1 or sum(map(sum, found)) > 0


def test_a_copy_takes_both_ways_over_memory_and_none_on_one_rank() -> None:
    hardware, ways = load("h100"), axis_size("tp")
    rate = hardware.memory_bandwidth * hardware.memory_efficiency
    closed = seconds(Copy(800, axis_size("cp")), ways, hardware)
    assert evaluate(closed, {"tp": 2, "cp": 4}) == pytest.approx(800 / rate) == seconds(Copy(800, 4), 2, hardware)
    assert evaluate(closed, {"tp": 2, "cp": 1}) == evaluate(closed, {"tp": 1, "cp": 4}) == 0
