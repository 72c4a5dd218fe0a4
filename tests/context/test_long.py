"""A million tokens: nothing of the size of tokens squared is ever made."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from autopar.compile import lower
from autopar.cost.hardware import load as hardware
from autopar.cost.program import price
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Spec, specs
from autopar.models import load
from tests.context.models import Attend, Biased, D, Documents, Window

TOKENS = 2**20


def largest(program: Program) -> int:
    """Elements of the largest value of the program."""
    values = (s for _, graph in program.graphs() for n in graph.nodes for s in specs(n))
    return max(math.prod(s.shape) for s in values if isinstance(s, Spec))


def test_a_million_tokens_lower_without_a_square() -> None:
    loaded = load("hf:llama3-8b")
    seen: dict[str, Program] = {}
    kwargs = loaded.kwargs(1, TOKENS)
    local = lower(
        loaded.model, (), kwargs, Mesh.parse("cp=64,tp=8"), "context_parallel=ring", loss_only=True,
        on_pass=lambda name, program: seen.__setitem__(name, program.clone()),
    )  # fmt: skip
    widest = TOKENS * 128256  # logits: tokens times vocabulary
    assert largest(seen["reshard"]) <= widest < TOKENS**2
    assert largest(local) <= widest // 64
    assert price(seen["reshard"], hardware("h100")).memory["activations"] > 0


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


HIDDEN = meta(2, TOKENS, D)
KEEP, NUMBERS = meta(2, TOKENS, dtype=torch.bool), meta(2, TOKENS, dtype=torch.int64)


@pytest.mark.parametrize("kind", ["ring", "ulysses", "ring:2+ulysses:2"])
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (Documents, (HIDDEN, NUMBERS)),
        (lambda: Window(4096), (HIDDEN, KEEP, NUMBERS)),
        (lambda: Window(4096, False), (HIDDEN, KEEP, NUMBERS)),
        (Attend, (HIDDEN, meta(2, 1, 1, TOKENS, dtype=torch.bool))),
    ],
    ids=["documents", "window", "near", "padding"],
)
def test_no_mask_of_queries_and_keys_is_held(make: Any, given: tuple[torch.Tensor, ...], kind: str) -> None:
    mesh, strategy = Mesh.parse("cp=4"), f"context_parallel={kind}"
    seen: dict[str, Program] = {}
    with torch.device("meta"):
        model: nn.Module = make()
    local = lower(
        model, given, {}, mesh, strategy, loss=lambda out: out.sum(), loss_only=True,
        on_pass=lambda name, program: seen.__setitem__(name, program.clone()),
    )  # fmt: skip
    assert largest(local) <= 2 * TOKENS * D and max(map(largest, seen.values())) <= 2 * TOKENS * D


def test_the_search_for_the_largest_sees_a_bias() -> None:
    with torch.device("meta"):
        model = Biased()
    program = lower(model, (HIDDEN,), {}, Mesh.parse("cp=4"), "context_parallel=ring", loss=lambda out: out.sum())
    assert largest(program) >= TOKENS**2 // 4
