"""Shards of parameters: every kind of layout, there and back."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from autopar.emit.params import Place, gather_of, held_of, local_of, rows, shard_of, wrap
from autopar.emit.segmented import SegmentedDTensor
from autopar.emit.units import Slot, locals_of
from autopar.errors import AutoparError
from autopar.ir.layout import I, Layout, Piece, Shard, Type, local_shape, piece, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Param, Spec
from autopar.runtime.simulate import device_mesh, run_ranks

TP2, SUB = Mesh.parse("dp=1,tp=2"), Mesh.parse("tp=4").split("tp", 2)


def fused(*lengths: int) -> tuple[Piece, ...]:
    """A piece for each segment, each cut in two runs as ``torch.chunk`` does."""
    return tuple(piece(n, n, 1, 2, (-(-n // 2), n // 2)) for n in lengths)


# name: mesh, shape, types, whether DTensor's placements can say the rows
CASES: dict[str, tuple[Mesh, tuple[int, ...], dict[str, Type], bool]] = {
    "whole": (TP2, (6, 4), {"tp": I}, True),
    "scalar": (TP2, (), {"tp": I}, True),
    "rows": (TP2, (6, 4), {"tp": plain_shard(0, 6, 2)}, True),  # type: ignore[dict-item]
    "uneven": (TP2, (5, 4), {"tp": plain_shard(0, 5, 2)}, True),  # type: ignore[dict-item]
    "columns": (TP2, (3, 5), {"tp": plain_shard(1, 5, 2)}, True),  # type: ignore[dict-item]
    "heads": (TP2, (10, 2), {"tp": Shard(0, (piece(10, 5, 2, 2, (3, 2)),))}, False),
    "interleaved": (TP2, (12, 2), {"tp": Shard(0, (piece(12, 2, 3, 2),))}, False),
    "gate_up": (TP2, (8, 3), {"tp": Shard(0, fused(4, 4))}, False),
    "qkv": (TP2, (8,), {"tp": Shard(0, fused(4, 2, 2))}, False),
    "uneven qkv": (TP2, (3, 11), {"tp": Shard(1, fused(5, 3, 3))}, False),
    "two axes": (SUB, (8, 3), {"tp0": Shard(0, (piece(8, 2, 4, 2),)), "tp1": Shard(0, (piece(8, 2, 2, 2),))}, False),
    "two nested": (SUB, (8, 3), {"tp0": Shard(0, (Piece(8, 2, 4),)), "tp1": Shard(0, (Piece(8, 2, 2),))}, True),
    "minor first": (SUB, (8, 3), {"tp0": Shard(0, (Piece(8, 2, 2),)), "tp1": Shard(0, (Piece(8, 2, 4),))}, False),
    "two dims": (SUB, (6, 4), {"tp0": plain_shard(0, 6, 2), "tp1": plain_shard(1, 4, 2)}, True),  # type: ignore[dict-item]
    "kv heads": (SUB, (6, 4), {"tp0": plain_shard(0, 6, 2), "tp1": I}, True),  # type: ignore[dict-item]
}
CASES["two axes"] = CASES.pop("two axes")[:3] + (True,)


def param(case: str, dtype: torch.dtype = torch.float64) -> tuple[Param, Mesh, Tensor]:
    mesh, shape, types, _ = CASES[case]
    layout = Layout.of({a: types.get(a, I) for a in mesh.names})
    whole = torch.arange(math.prod(shape), dtype=dtype).reshape(shape) + 1
    return Param("w", Spec(shape, dtype), "parameter", layout=layout), mesh, whole


def on_ranks(case: str, body: Any) -> list[Any]:
    mesh = CASES[case][0]
    return run_ranks(mesh, lambda _: body(Place.of(mesh, device_mesh(mesh))), timeout=60.0)


@pytest.mark.parametrize("case", CASES)
def test_local_shapes_and_rows(case: str) -> None:
    p, mesh, whole = param(case)
    seen = torch.zeros_like(whole)
    for at in mesh:
        local = local_of(whole, p, mesh, at)
        assert tuple(local.shape) == local_shape(p.spec.shape, held_of(p, mesh).layout, mesh, at)
        assert [sum(n for _, n in r) for r in rows(held_of(p, mesh).layout, p.spec, mesh, at)] == list(local.shape)
        seen += torch.isin(whole, local)
    held = math.prod(mesh.size(a) for a in held_of(p, mesh).shards)
    assert (seen == mesh.world // held).all()


def test_rows_of_a_fused_weight() -> None:
    p, mesh, whole = param("uneven qkv")
    got = [local_of(whole, p, mesh, at)[0].tolist() for at in mesh]
    assert got == [[1, 2, 3, 6, 7, 9, 10], [4, 5, 8, 11]]
    with pytest.raises(AutoparError, match="param-shape"):
        local_of(whole[:, 1:], p, mesh, {"dp": 0, "tp": 0})


@pytest.mark.parametrize("case", CASES)
def test_whole_tensors_come_back(case: str) -> None:
    p, mesh, whole = param(case)

    def body(place: Place) -> tuple[Tensor, Tensor, type]:
        x = wrap(local_of(whole, p, mesh, place.at), p, place)
        assert isinstance(x, nn.Parameter) and isinstance(x, DTensor) and x.shape == whole.shape
        return x.full_tensor().detach(), gather_of(x, p, place), type(x)

    for full, gathered, kind in on_ranks(case, body):
        torch.testing.assert_close(full, whole)
        torch.testing.assert_close(gathered, whole)
        assert kind is (DTensor if CASES[case][3] else SegmentedDTensor)


@pytest.mark.parametrize("case", ["rows", "uneven qkv", "interleaved", "minor first"])
@pytest.mark.parametrize("how", [{"foreach": False}, {"foreach": True}, {"fused": True}])
def test_optimizer_states_keep_the_rows(case: str, how: dict[str, bool]) -> None:
    p, mesh, whole = param(case)
    ref = nn.Parameter(whole.clone())
    ref.grad = whole.sin()
    opt = torch.optim.AdamW([ref], lr=0.1, **how)
    opt.step()

    def body(place: Place) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        x = wrap(local_of(whole, p, mesh, place.at), p, place)
        for _ in range(2):
            (local,) = locals_of((Slot({"w": x}, "w"),))
            (-local.cos() / 2).sum().backward()
            assert type(x.grad) is type(x)
        opt = torch.optim.AdamW([x], lr=0.1, **how)
        opt.step()
        state = opt.state[x]["exp_avg"]
        assert type(state) is type(x)
        norm = torch.nn.utils.clip_grad_norm_([x], 0.1).full_tensor()
        return x.full_tensor().detach(), state.full_tensor(), norm, x.grad.full_tensor()

    want = torch.nn.utils.clip_grad_norm_([ref], 0.1)
    for new, state, norm, grad in on_ranks(case, body):
        torch.testing.assert_close(new, ref.detach())
        torch.testing.assert_close(state, opt.state[ref]["exp_avg"])
        torch.testing.assert_close(norm, want)
        torch.testing.assert_close(grad, ref.grad)


def test_full_tensor_is_differentiable() -> None:
    p, mesh, whole = param("gate_up")

    def body(place: Place) -> Tensor:
        x = wrap(local_of(whole, p, mesh, place.at), p, place)
        (x.full_tensor() ** 2).sum().backward()
        return x.grad.full_tensor()  # type: ignore[union-attr]

    for grad in on_ranks("gate_up", body):
        torch.testing.assert_close(grad, 2 * whole)


def test_what_depends_on_the_order_of_rows_is_refused() -> None:
    p, mesh, whole = param("gate_up")

    def body(place: Place) -> None:
        x = wrap(local_of(whole, p, mesh, place.at), p, place).detach()
        other = DTensor.from_local(shard_of(x), x.device_mesh, x.placements)  # type: ignore[attr-defined]
        for op in (lambda: x[0], lambda: x @ x.T, lambda: x.sum(0), lambda: x + other, lambda: x.norm(dim=1)):
            with pytest.raises(AutoparError, match="segmented-op"):
                op()
        with pytest.raises(AutoparError, match="segmented-op"):
            x.redistribute(placements=[])  # type: ignore[attr-defined]
        with pytest.raises(AutoparError, match="^w: permute .* fused, .* same dim") as raised:
            x @ x.T
        assert "full_state_dict" in str(raised.value.fix) and "zero=0" in str(raised.value.fix)
        with pytest.raises(AutoparError, match="segmented-op"):
            torch._foreach_add_([other, x], [other, other])
        torch._foreach_add_([other, x], [other, x])

    on_ranks("gate_up", body)


@pytest.mark.parametrize("source", ["gate_up", "uneven qkv", "two axes", "rows"])
def test_checkpoints_hold_boxes_of_the_whole(source: str) -> None:
    """What planners ask of a parameter: boxes that tile the whole tensor, each with its own values."""
    p, mesh, whole = param(source)

    def body(place: Place) -> list[tuple[Any, Any, Tensor]]:
        x: Any = wrap(local_of(whole, p, mesh, place.at), p, place)
        chunks = x.__create_chunk_list__()
        items = x.__create_write_items__("w", x)
        assert [i.tensor_data.chunk for i in items] == chunks
        assert all(i.tensor_data.size == whole.shape for i in items)
        return [(i.index, i.tensor_data.chunk, x.__get_tensor_shard__(i.index)) for i in items]

    count = torch.zeros_like(whole)
    for index, chunk, values in (item for part in on_ranks(source, body) for item in part):
        where = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes))
        torch.testing.assert_close(whole[where], values.detach())
        count[where] += 1
        assert index.offset == chunk.offsets
    assert (count == 1).all()
