"""Real gloo processes, and compiled code: what simulation by threads cannot show."""

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.mesh import Mesh
from autopar.runtime import collectives as c
from autopar.runtime.axis import Axis, axes_of, device_mesh_of
from autopar.runtime.loss import token_loss, vocabulary_embedding
from autopar.runtime.random import Rng, Streams, attention_with_dropout, dropout
from autopar.runtime.simulate import run_ranks
from tests.runtime import test_along as along
from tests.runtime.table import DUAL, ROWS, held, meaning, sample, segment_cases

WORLD = 2
CHOSEN = ("plain", "uneven", "fused-uneven", "nothing")


def rows(axis: Axis) -> dict[str, list[Tensor]]:
    """Input, output, gradients of every row, case and dim."""
    out = {}
    for name, row in ROWS.items():
        for case in CHOSEN:
            for dim in (0, 2):
                segments = segment_cases(WORLD)[case]
                owners = held(segments, WORLD)
                x = sample(row.src, axis.coordinate, dim, owners, 1).requires_grad_()
                y = row(x, dim, axis, segments)
                grad = sample(DUAL[row.dst], axis.coordinate, dim, owners, 2)
                y.backward(grad)
                out[f"{name} {case} {dim}"] = [x.detach(), y.detach(), grad, x.grad]
    return out


def functions(axis: Axis) -> dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]:
    """Every public function with arguments, for the compiler."""
    uneven, even = ((2, (1, 3), 1),), ((2, (1, 1), 2),)
    x, wide = torch.randn(8, 8, dtype=torch.float64), torch.randn(1, 2, 4, 4, dtype=torch.float64)
    target = torch.tensor([0, 9, -100, 15, 3, 3, 12, 8])
    out: dict[str, tuple[Callable[..., Tensor], tuple[Any, ...]]] = {}
    for name, row in ROWS.items():
        out[name] = (row.function, (x, 1, axis) if row.takes_dim else (x, axis))
        if row.takes_dim:
            out[f"{name} segments"] = (
                row.function,
                (x if row.src != "S" else x[: 2 + 4 * axis.coordinate], 0, axis, uneven),
            )
    out["all_to_all"] = (c.all_to_all, (x, 0, 1, axis))
    out["all_to_all segments"] = (c.all_to_all, (x[: 2 + 4 * axis.coordinate], 0, 1, axis, uneven, even))
    mine = ((8 * axis.coordinate, 8),)
    out["token_loss"] = (token_loss, (x, target, -100, axis, mine, 16))
    out["vocabulary_embedding"] = (vocabulary_embedding, (x, target.abs() % 16, mine, 3, 16))
    for name, part in along.parts((axis,), axis.coordinate).items():
        out[name] = (part, (x[:, : sum(n for _, n in along.RUNS[axis.coordinate])],))
    rng = Streams(1).at("a")
    out["dropout"] = (dropout, (x, 0.5, "k", (axis,), rng))
    out["attention"] = (
        attention_with_dropout,
        (wide, wide[:, :1], wide[:, :1], None, 0.5, True, None, True, "k", (axis,), rng),
    )
    return out


def differentiated(function: Callable[..., Tensor], args: tuple[Any, ...]) -> list[Tensor]:
    x = args[0].clone().requires_grad_()
    y = function(x, *args[1:])
    y.sin().sum().backward()
    return [y.detach(), x.grad]


def compiled(axis: Axis) -> None:
    for name, (function, args) in functions(axis).items():
        torch._dynamo.reset()
        whole = torch.compile(function, fullgraph=True, backend="aot_eager")
        for mine, eager in zip(differentiated(whole, args), differentiated(function, args), strict=True):
            torch.testing.assert_close(mine, eager, msg=lambda text, name=name: f"{name}: {text}")


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    mesh = Mesh.of({"tp": WORLD})
    axis = axes_of(mesh, device_mesh_of(mesh, "cpu"))["tp"]
    torch.save(rows(axis), f"{folder}/{rank}.pt")
    along.same(axis)
    compiled(axis)
    # A simulation inside leaves the real group as it was.
    assert run_ranks(3, lambda r: dist.get_world_size()) == [3] * 3
    assert c.all_gather(torch.tensor([rank]), 0, axis).tolist() == [0, 1]
    dist.barrier()
    dist.destroy_process_group()


def test_gloo_processes_and_compiled_functions(tmp_path: pathlib.Path) -> None:
    mp.spawn(worker, (str(tmp_path),), nprocs=WORLD)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in range(WORLD))
    for key in first:
        name, case, dim = key.split()
        row, owners = ROWS[name], held(segment_cases(WORLD)[case], WORLD)
        x, y, grad, back = (list(pair) for pair in zip(first[key], second[key], strict=True))
        at = int(dim)
        torch.testing.assert_close(meaning(row.dst, y, at, owners), meaning(row.src, x, at, owners))
        expected = meaning(DUAL[row.dst], grad, at, owners)
        torch.testing.assert_close(meaning(DUAL[row.src], back, at, owners), expected)


@pytest.fixture
def fake_axis() -> Any:
    dist.init_process_group("fake", rank=1, world_size=WORLD, store=FakeStore())
    mesh = Mesh.of({"tp": WORLD})
    yield axes_of(mesh, device_mesh_of(mesh, "cpu"))["tp"]
    dist.destroy_process_group()


# What Dynamo itself does with autograd functions.
@pytest.mark.filterwarnings("ignore:.*Function'> should not be instantiated.*:DeprecationWarning")
def test_new_seeds_and_equal_handles_do_not_recompile(fake_axis: Axis) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    stream = Streams(1)

    @torch.compile(fullgraph=True, backend=counter)
    def block(x: Tensor, tp: Axis, rng: Rng) -> Tensor:
        return dropout(c.all_gather(c.slice_invariant(x, 0, tp), 0, tp), 0.5, "k", (tp,), rng)

    outs = []
    for layer in range(3):
        stream.advance()
        axis = Axis(fake_axis.name, fake_axis.size, fake_axis.coordinate, fake_axis.group)
        outs.append(block(torch.ones(64, requires_grad=True), axis, stream.at(f"layers.{layer}")).ne(0).tolist())
    assert counter.frame_count == 1
    assert outs[0] != outs[1] != outs[2]


def test_shapes_under_fake_tensors_need_no_group() -> None:
    axis = Axis("tp", 4, 2, "no such group")
    with FakeTensorMode():
        x = torch.empty(4, 8)
        assert c.all_gather(x, 0, axis, ((1, (1, 2, 4, 0), 1),)).shape == (7, 8)
        assert c.reduce_scatter(x, 1, axis).shape == (4, 2)
        assert c.all_to_all(x, 0, 1, axis).shape == (16, 2)
        assert token_loss(x, torch.empty(4, dtype=torch.long), -100, axis, ((16, 8),), 32).shape == (4,)
