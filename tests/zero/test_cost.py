"""What the cost model says of ZeRO stages: the closed forms, and what torch's engine was seen to send."""

import pytest
import sympy

from autopar.cost import Price, load, price
from autopar.cost.memory import States
from autopar.cost.zero import Stage
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.ir.units import managed
from autopar.passes.pipeline import run
from autopar.trace import trace
from tests.llama import llama
from tests.passes.models import traced
from tests.zero.models import ids

RANKS = 4
SHARE = (RANKS - 1) / RANKS
MODEL = 4 * sum(p.numel() for p in llama().parameters())
OUTER = 4 * sum(p.numel() for n, p in llama().named_parameters() if "layers" not in n)


def program() -> Program:
    x = ids(2)
    made = trace(llama(), (), {"input_ids": x, "labels": x.clone()}, mesh=Mesh.parse(f"dp={RANKS}")).program
    return run(made, "data-parallel,tensor-parallel,reshard")


def priced(stage: int, m: int = 1, shard: int | None = None, low: int | None = None) -> Price:
    made = program()
    return price(made, load("h100"), zero=Stage(stage, shard, m, low, managed(made)))


@pytest.mark.parametrize("m", [1, 2, 3])
def test_bytes_are_those_on_the_wire(m: int) -> None:
    """The figures of ``test_processes.test_bytes_on_the_wire``."""
    wanted = {0: 2 * MODEL, 1: 2 * MODEL, 2: (m + 1) * MODEL, 3: m * (3 * MODEL - OUTER)}
    for stage, whole in wanted.items():
        got = priced(stage, m)
        moved = sum(t.bytes for t in got.traffic if t.collective != "all_reduce" or t.when == "gradient")
        assert moved == whole * SHARE, stage


def test_copies_send_as_measured() -> None:
    traffic = {(t.collective, t.when): t.bytes for t in priced(2, shard=2).traffic}
    assert traffic["all_gather", "forward"] == traffic["reduce_scatter", "gradient"] == MODEL / 2
    assert traffic["all_reduce", "gradient"] == MODEL / 2


def test_states_are_shared_out_at_every_stage() -> None:
    whole = priced(0).memory
    for stage in (1, 2, 3):
        memory = priced(stage).memory
        for kind in ("gradients", "optimizer"):
            assert memory[kind] == whole[kind] / RANKS
        assert memory["gathered"] <= MODEL
    layers = MODEL - OUTER
    assert priced(1).memory["gathered"] == MODEL and priced(3).memory["gathered"] == OUTER + layers
    assert priced(3, low=2).memory["gathered"] == MODEL / 2


def test_one_rank_sends_nothing_and_the_volume_of_stage_three_is_one_and_a_half() -> None:
    psi, n = sympy.symbols("psi n", positive=True)
    stage3 = sum(whole for _, _, whole, _ in Stage(3).sent(psi, 0, 4))
    stage1 = sum(whole for _, _, whole, _ in Stage(1).sent(psi, 0, 4))
    assert sympy.simplify(stage3 / stage1) == sympy.Rational(3, 2)
    assert Stage(2).held(States(psi, psi, 2 * psi), n).total == 4 * psi / n
    made = run(traced("mlp", "dp=1"), "data-parallel,tensor-parallel,reshard")
    assert price(made, load("h100"), zero=Stage(3)).wire_bytes() == 0
