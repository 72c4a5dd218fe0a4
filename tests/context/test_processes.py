"""Contexts beside pipelines and experts, trained on gloo processes; compiled rings; what crosses the wire."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from tests.context.models import HEADS, Attend, D, rows
from tests.experts.models import deepseek, gpt_oss
from tests.llama import llama
from tests.pipeline import play
from tests.ranks import Ranks

RANKS, LENGTH = 4, 16


def tokens(seed: int = 1) -> dict[str, Tensor]:
    """Rows of uneven lengths, padded on the right and on the left; some labels do not count."""
    ids = torch.randint(3, 64, (4, LENGTH), generator=torch.Generator().manual_seed(seed))
    kept = torch.ones_like(ids)
    kept[1, LENGTH - 5 :], kept[2, :3] = 0, 0
    labels = ids.masked_fill(kept == 0, -100)
    labels[0, :5] = -100
    return {"input_ids": ids, "attention_mask": kept, "labels": labels}


MODELS: dict[str, Callable[[], Any]] = {"llama": llama, "deepseek": deepseek, "gpt-oss": gpt_oss}


def trained(name: str, mesh: str, strategy: str, compiled: bool = False) -> dict[str, float]:
    """The largest differences from the unsharded model over two steps: losses, gradients, parameters."""
    alone = MODELS[name]().double().eval()
    if name != "llama":
        alone.set_experts_implementation("eager")  # the other one knows no double precision
    pm = autopar.parallelize(copy.deepcopy(alone), mesh, kwargs=play.rows(tokens(), mesh), strategy=strategy)
    if compiled:
        pm.compile(backend="aot_eager")
    found = {"loss": 0.0, "grad": 0.0, "param": 0.0}
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (alone, pm)]
    for step in range(2):
        want = alone(**tokens(step + 1), use_cache=False).loss
        want.backward()
        got = pm.train_step(**play.rows(tokens(step + 1), mesh))
        found["loss"] = max(found["loss"], abs(float(got - want.detach())) / abs(float(want.detach())))
        found["grad"] = max(found["grad"], apart(pm.full_gradients(), {n: p.grad for n, p in alone.named_parameters()}))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    found["param"] = apart(pm.full_parameters(), dict(alone.named_parameters()))
    return found


def apart(got: dict[str, Any], want: dict[str, Any]) -> float:
    """The largest difference of a tensor over its largest element."""
    assert list(got) == list(want)
    zero = [(g, w) for g, w in zip(got.values(), want.values()) if w is None or not w.any()]
    assert all(g is None or not g.any() for g, _ in zero) and len(zero) < len(want)
    pairs = [(got[n], w) for n, w in want.items() if w is not None and w.any()]
    return max(float((g - w).abs().max() / w.abs().max()) for g, w in pairs)


def close(errors: dict[str, float], single: bool = False) -> None:
    """To nine digits; the losses, and where a router is in single precision the rest, to its last one."""
    assert errors["loss"] < 5e-7, errors
    assert max(errors["grad"], errors["param"]) < (1e-6 if single else 1e-9), errors


@pytest.mark.parametrize("kind", ["ring", "ulysses"])
@pytest.mark.parametrize(
    ("name", "mesh", "more"),
    [
        ("llama", "pp=2,cp=2", ",microbatches=2"),
        ("llama", "pp=2,cp=2", ",microbatches=4,schedule=zbv,zero=2"),
        ("deepseek", "ep=2,cp=2", ""),
        ("gpt-oss", "ep=2,cp=2", ",zero=3"),
    ],
)
def test_beside_pipelines_and_experts(ranks: Ranks, name: str, mesh: str, more: str, kind: str) -> None:
    for errors in ranks.run(RANKS, trained, name, mesh, f"context_parallel={kind}{more}", timeout=180.0):
        close(errors, name == "deepseek")


@pytest.mark.parametrize(("mesh", "kind"), [("cp=2", "ring"), ("cp=2", "ulysses"), ("cp=4", "ring:2+ulysses:2")])
def test_compiled(ranks: Ranks, mesh: str, kind: str) -> None:
    world = int(mesh[-1])
    for errors in ranks.run(world, trained, "llama", mesh, f"context_parallel={kind}", True, timeout=180.0):
        close(errors)


class Wire(TorchDispatchMode):
    """What this rank sends to others in all-to-all: bytes of each message."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops._c10d_functional.all_to_all_single.default:
            x, _, send, group = args
            mine = send[dist.get_rank(dist.distributed_c10d._resolve_process_group(group))]
            self.sent.append((len(x) - mine) * x[:1].numel() * x.itemsize)
        return func(*args, **(kwargs or {}))


def sent(heads: int, groups: int, kind: str) -> tuple[list[int], list[int]]:
    """Bytes of each message of an attention, forward and backward."""
    torch.manual_seed(0)
    x = rows(LENGTH * 2)
    pm = autopar.parallelize(Attend(heads, groups), f"cp={dist.get_world_size()}", args=(x,), strategy=kind)
    with Wire() as forward:
        out = pm(x)
    with Wire() as backward:
        out.square().sum().backward()
    return forward.sent, backward.sent


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("ways", [2, 4])
def test_bytes_of_a_ring(ranks: Ranks, ways: int, heads: int, groups: int) -> None:
    """2b(N-1)/N forward, b those of all keys; as many backward for keys and values, and for their gradients."""
    b = 2 * LENGTH * 2 * groups * (D // HEADS) * 4
    for forward, backward in ranks.run(ways, sent, heads, groups, "context_parallel=ring"):
        assert forward == [2 * b // ways] * (ways - 1)
        assert sum(forward) == 2 * b * (ways - 1) // ways and sum(backward) == 2 * sum(forward)


@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (8, 4)])
@pytest.mark.parametrize("ways", [2, 4])
def test_bytes_of_ulysses(ranks: Ranks, ways: int, heads: int, groups: int) -> None:
    """Four all-to-alls each way: of queries, keys, values and the result, (N-1)/N² of the bytes of each."""
    b = 2 * LENGTH * 2 * (D // HEADS) * 4
    each = sorted(n * b * (ways - 1) // ways**2 for n in (heads, groups, groups, heads))
    for forward, backward in ranks.run(ways, sent, heads, groups, "context_parallel=ulysses"):
        assert sorted(forward) == sorted(backward) == each


def test_bytes_of_both(ranks: Ranks) -> None:
    """Inside its two ranks Ulysses moves what they hold; the ring then moves half of the key heads."""
    whole = 2 * LENGTH * 2 * HEADS * (D // HEADS) * 4
    for forward, backward in ranks.run(RANKS, sent, HEADS, HEADS, "context_parallel=ring:2+ulysses:2"):
        assert sorted(forward) == [*[whole // 8] * 4, 2 * whole // 4]
        assert sum(backward) == sum(forward) + 2 * whole // 4
