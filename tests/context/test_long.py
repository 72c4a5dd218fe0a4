"""A million tokens: nothing of the size of tokens squared is ever made."""

import math

from autopar.cli.models import load
from autopar.compile import lower
from autopar.cost.hardware import load as hardware
from autopar.cost.program import price
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program, Spec, specs

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
