"""Rows that travel in chunks while experts compute: equal in value, and in the order that all ranks keep."""

from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import AutoparError, Placement
from autopar.compile import lower
from autopar.emit.overlap import overlapped
from autopar.ir.mesh import Mesh
from autopar.runtime.dispatch import dispatched_experts, finish, start
from tests.experts.models import Moe, batch, collapsed, deepseek, squared, states
from tests.experts.test_processes import RANKS, rows, trained
from tests.experts.test_wire import TOKENS, WIDTH, Wire, even
from tests.ranks import Ranks

LAYER = "model.layers.1.mlp.experts"
COPIED = Placement(((3, 0), (1, 2)), ((1,), (0, 3)))


@pytest.mark.parametrize("chunks", [1, 2, 5])
@pytest.mark.parametrize("mesh", ["ep=2", "dp=2,ep=2", "ep=2,tp=2"])
def test_equal(mesh: str, chunks: int) -> None:
    report = autopar.verify(deepseek(), mesh, (), batch(), strategy=f"expert_chunks={chunks}")
    assert report.ok, report


@pytest.mark.parametrize(
    "strategy", ["zero=3", "recompute=full", "recompute=selective", "microbatches=2", "expert_capacity=4.0"]
)
def test_beside_other_techniques(strategy: str) -> None:
    given = f"{strategy},expert_chunks=2"
    report = autopar.verify(deepseek(), "ep=2", (), batch(), strategy=given, placement={LAYER: COPIED})
    assert report.ok, report


@pytest.mark.parametrize("chosen", [None, (0,)], ids=["spread", "one"])
def test_more_chunks_than_tokens(chosen: tuple[int, ...] | None) -> None:
    model = collapsed(chosen) if chosen else Moe().train()
    report = autopar.verify(model, "ep=4", (states(3),), loss=squared, strategy="expert_chunks=9")
    assert report.ok, report


def test_chunks_are_a_positive_number() -> None:
    with pytest.raises(AutoparError, match="bad-strategy"):
        autopar.verify(Moe().eval(), "ep=2", (states(),), loss=squared, strategy="expert_chunks=0")


def block(model: Any, strategy: str) -> fx.Graph:
    """The graph in which rows are dispatched."""
    given = {k: v[:2] for k, v in batch().items()}
    program = lower(model, (), given, Mesh.parse("ep=2"), strategy)
    return next(g for _, g in program.graphs() if any(n.target is dispatched_experts for n in g.nodes))


def between(graph: fx.Graph) -> list[str]:
    """The modules of the ops between start and finish."""
    nodes = list(graph.nodes)
    at = [i for i, n in enumerate(nodes) if n.target in (start, finish)]
    assert len(at) == 2
    return [str(n.meta.get("module")) for n in nodes[at[0] + 1 : at[1]]]


def shared_first() -> Any:
    """A layer that computes its shared expert before it routes."""

    class First(Moe):
        def forward(self, x: Tensor) -> Tensor:
            t = x.flatten(0, 1)
            shared = self.shared(t)
            chosen, weights = self.route(t)
            return (t + self.experts(t, chosen, weights) + shared).view_as(x)

    return First().eval()


def test_shared_experts_run_meanwhile() -> None:
    found = between(overlapped(block(deepseek(), "expert_chunks=1")))
    assert sum("shared_experts" in m for m in found) >= 5
    program = lower(shared_first(), (states(2),), {}, Mesh.parse("ep=2"), "expert_chunks=1", loss=squared)
    assert "shared" in between(overlapped(program.graph))


def test_nothing_is_split_without_chunks() -> None:
    graph = block(deepseek(), "")
    assert overlapped(graph) is graph


class Order(TorchDispatchMode):
    """When rows set out, when they are waited for, and the products between."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        out = func(*args, **(kwargs or {}))
        if name == "all_to_all_single" and args[0].is_floating_point():
            self.seen.append(f"send {out.data_ptr()}" if out.numel() else "send nothing")
        elif name == "wait_tensor" and f"send {args[0].data_ptr()}" in self.seen:
            self.seen.append(f"wait {args[0].data_ptr()}")
        elif name.startswith("expert_grouped_mm"):
            self.seen.append("product")
        return out


def flights() -> tuple[int, int, dict[str, int]]:
    """How many sends have products before their wait, of how many; and what is sent."""
    moe, x = even(2)
    pm = autopar.parallelize(moe, "ep=4", args=(rows(x),), loss=squared, strategy="expert_chunks=2")
    with Order() as order:
        pm.train_step(rows(x))
    with Wire() as wire:
        pm.train_step(rows(x))
    sends = [i for i, s in enumerate(order.seen) if s.startswith("send")]
    waits = [order.seen.index(order.seen[i].replace("send", "wait"), i) for i in sends]
    hidden = sum("product" in order.seen[a:b] for a, b in zip(sends, waits))
    assert dist.get_world_size() == RANKS
    return hidden, len(sends), dict(wire.sent)


def test_products_run_while_rows_travel(ranks: Ranks) -> None:
    once = TOKENS * 2 * WIDTH * 4 * (RANKS - 1) // RANKS
    for hidden, sends, sent in ranks.run(RANKS, flights):
        assert sends == 8 and hidden == 4  # of two chunks, there and back, forward and backward
        assert sent == {"all_to_all_single": 4 * once}  # the same bytes


@pytest.mark.parametrize(
    ("mesh", "ways", "strategy"), [("ep=4", 4, "expert_chunks=3"), ("dp=2,ep=2", 4, "zero=3,expert_chunks=2")]
)
def test_training(ranks: Ranks, mesh: str, ways: int, strategy: str) -> None:
    for errors in ranks.run(RANKS, trained, mesh, ways, strategy, timeout=180.0):
        assert max(errors.values()) < 1e-5, max(errors.items(), key=lambda x: x[1])


def compiled() -> float:
    """The largest difference of a gradient in compiled code."""
    alone, x = Moe().eval(), states()
    squared(alone(x)).backward()
    pm = autopar.parallelize(alone, "ep=4", args=(rows(x),), loss=squared, strategy="expert_capacity=4,expert_chunks=2")
    pm.compile(backend="aot_eager")
    pm.train_step(rows(x))
    want = {n: p.grad for n, p in alone.named_parameters()}
    return max(float((g - want[n]).abs().max()) for n, g in pm.full_gradients().items())  # type: ignore[operator]


def test_compiled_with_static_shapes(ranks: Ranks) -> None:
    assert max(ranks.run(RANKS, compiled, timeout=120.0)) < 1e-5
