"""What an emitted module sends is what the cost model says, counted as it runs."""

import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from torch import fx
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar.cost import Price, load, price
from autopar.cost.communication import collective_bytes
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.rules.arguments import arguments
from autopar.runtime.loss import token_loss
from tests.emit.fake import batch, llama, world

COLLECTIVES = {
    "all_reduce": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "all_to_all_single": "all_to_all",
}


class Sent(TorchDispatchMode):
    """Bytes that a rank sends in each kind of functional collective, ring algorithms."""

    def __init__(self, ways: int) -> None:
        super().__init__()
        self.ways, self.bytes = ways, Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = COLLECTIVES.get(func.overloadpacket.__name__)
        if func.namespace == "_c10d_functional" and name:
            whole = args[0].numel() * args[0].itemsize * (self.ways if name in ("all_gather", "all_to_all") else 1)
            self.bytes[name] += collective_bytes(name, whole, self.ways)  # type: ignore[arg-type]
        return out


@dataclass
class Measured:
    forward: Counter[str] = field(default_factory=Counter)
    backward: Counter[str] = field(default_factory=Counter)
    bytes: tuple[Counter[str], Counter[str]] = (Counter(), Counter())
    price: Price | None = None
    loss_bytes: tuple[int, ...] = ()  # inside the loss, forward: a maximum of each token, and two sums of each


def counted(mode: CommDebugMode) -> Counter[str]:
    """Functional collectives; c10d's own are the engine's and the exchange of shapes."""
    found: Counter[str] = Counter()
    for op, times in mode.get_comm_counts().items():
        if "functional" in str(op):
            found[COLLECTIVES[str(op).rpartition(".")[2]]] += times
    return found


def inside_loss(program: Program) -> Iterator[int]:
    """Bytes of the values that a vocabulary-parallel loss reduces; the cost model prices conversions only."""
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.target is token_loss and isinstance(arguments(node)["axis"], fx.Node):
                tokens = node.meta["spec"].bytes
                yield from (tokens, 2 * tokens)


@cache
def measured(mesh: str, layers: int = 2, sequence: bool = False) -> Measured:
    """One forward and backward of rank 0, the others being c10d's fake process group."""
    sizes = Mesh.parse(mesh)
    out = Measured()
    with world(sizes.world), warnings.catch_warnings():
        warnings.simplefilter("ignore", autopar.AutoparWarning)
        warnings.filterwarnings("ignore", "(For backward hooks|Full backward hook)")  # CommDebugMode hooks every module
        strategy = autopar.Strategy(sequence_parallel=sequence)
        module = autopar.parallelize(llama(layers), mesh, kwargs=batch(), strategy=strategy)
        with CommDebugMode() as forward, Sent(sizes.size("tp")) as sent:
            loss = module(**batch()).loss
        with CommDebugMode() as backward, Sent(sizes.size("tp")) as sent_back:
            loss.backward()
        (variant,) = (v for v, _ in module._emitted.values())
        out.price = price(variant.plans[-1], load("h100"))  # type: ignore[attr-defined]
        out.loss_bytes = tuple(inside_loss(variant.program))
    out.forward, out.backward, out.bytes = counted(forward), counted(backward), (sent.bytes, sent_back.bytes)
    return out


@pytest.mark.parametrize("sequence", [False, True], ids=["", "sequence"])
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2", "tp=8"])
def test_counts_are_the_closed_form(mesh: str, sequence: bool) -> None:
    got = measured(mesh, 2, sequence)
    assert got.price is not None
    axes = [a for a in Mesh.parse(mesh).names if Mesh.parse(mesh).size(a) > 1]
    for when, found in (("forward", got.forward), ("backward", got.backward)):
        for collective in COLLECTIVES.values():
            priced = sum(got.price.calls(axis, when, collective) for axis in axes)
            inside = len(got.loss_bytes) if (when, collective) == ("forward", "all_reduce") else 0
            assert found[collective] == priced + inside, (when, collective, dict(found))


def test_two_all_reduces_a_layer_each_way() -> None:
    small, large = measured("tp=8", 2), measured("tp=8", 4)
    assert small.loss_bytes  # the loss is vocabulary-parallel
    assert large.forward - small.forward == Counter(all_reduce=2 * 2)
    assert large.backward - small.backward == Counter(all_reduce=2 * 2)


def test_sequence_parallel_sends_as_many_bytes() -> None:
    plain = [measured("tp=8", n) for n in (2, 4)]
    sharded = [measured("tp=8", n, True) for n in (2, 4)]
    for i in range(2):
        reduced = (plain[1].bytes[i] - plain[0].bytes[i]).total()
        moved = sharded[1].bytes[i] - sharded[0].bytes[i]
        assert moved["all_gather"] == moved["reduce_scatter"]
        assert moved["all_gather"] + moved["reduce_scatter"] == reduced
        assert set(+moved) <= {"all_gather", "reduce_scatter", "all_reduce"}
    norms = 2 * 2 * collective_bytes("all_reduce", 64 * 4, 8)  # gradients of the norms' weights: 2 layers, 2 norms
    assert (sharded[1].bytes[1] - sharded[0].bytes[1])["all_reduce"] == norms


def test_bytes_are_the_closed_form() -> None:
    for sequence in (False, True):
        got = measured("tp=8", 2, sequence)
        assert got.price is not None
        for when, found in (("forward", got.bytes[0]), ("backward", got.bytes[1])):
            inside = sum(collective_bytes("all_reduce", b, 8) for b in got.loss_bytes) if when == "forward" else 0
            assert found.total() == got.price.wire_bytes("tp", when) + inside
