"""Plans of whole models: the same on every run, and the published one at published sizes."""

import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from torch import fx

from autopar.compile import plan_text
from autopar.cost.hardware import load as profile
from autopar.ir import ops
from autopar.ir.layout import I, P, R, Shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.models import load
from autopar.passes.base import Context
from autopar.passes.pipeline import run
from autopar.trace import trace
from tests.passes.models import traced

ROOT = Path(__file__).parents[2]
PIPELINES = ("data-parallel,tensor-parallel,reshard", "data-parallel,tensor-parallel{sequence},reshard")


def plans() -> str:
    """Plans of two small models under both pipelines, as text."""
    programs = {name: traced(name, "dp=2,tp=4") for name in ("fused-grouped", "tied")}
    return "\n".join(
        f"{name} {p}\n{plan_text(run(program, p))}" for name, program in programs.items() for p in PIPELINES
    )


def test_plans_do_not_depend_on_the_process() -> None:
    code = "import torch; torch.set_num_threads(1); from tests.solve.test_plans import plans; print(plans())"
    started = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
        started.append(
            subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
        )
    found = [process.communicate(timeout=300)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0]
    assert found[0] == found[1] and len(found[0].splitlines()) > 100


@cache
def published(rows: int, tokens: int) -> Program:
    """Llama-3-8B traced on the meta device."""
    loaded = load("hf:llama3-8b")
    return trace(loaded.model, (), loaded.kwargs(rows, tokens), mesh=Mesh.parse("dp=1,tp=8")).program


def moved(graph: fx.Graph) -> tuple[list[str], list[str]]:
    """What the graph's conversions on tp issue forward and backward."""
    forward, backward = [], []
    for node in graph.nodes:
        if node.target is ops.convert and node.args[1] == "tp":
            row = "".join("S" if isinstance(t, Shard) else str(t) for t in node.args[2:])
            forward += [ISSUES[row]] if row in ISSUES else []
            backward += (
                [ISSUES[row[::-1].translate(DUAL)]] if node.meta["diff"] and row[::-1].translate(DUAL) in ISSUES else []
            )
    return forward, backward


ISSUES = {"PI": "all_reduce", "PR": "all_reduce", "SR": "gather", "SI": "gather", "PS": "scatter", "SS": "exchange"}
DUAL = str.maketrans("RP", "PR")


def placed(program: Program) -> dict[str, str]:
    """The type on tp of each weight of layer 5."""
    found = {n.removeprefix("model.layers.5."): p.layout for n, p in program.params.items() if ".layers.5." in n}
    return {n: str(lay["tp"]) for n, lay in found.items() if lay is not None}


@pytest.mark.parametrize("tokens", (128, 4096))
def test_llama_3_8b_on_eight_ranks_is_column_then_row(tokens: int) -> None:
    """Shoeybi et al. 2019: two all-reduces of the hidden state forward and two backward a layer, no more."""
    program = run(published(1, tokens), "data-parallel,tensor-parallel,reshard")
    kinds = placed(program)
    columns = {n for n, k in kinds.items() if k == "S(0)"}
    rows = {n for n, k in kinds.items() if k == "S(1)"}
    assert columns == {
        f"{n}.weight"
        for n in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    }
    assert rows == {"self_attn.o_proj.weight", "mlp.down_proj.weight"}
    assert all(k == "I" for n, k in kinds.items() if n not in columns | rows)
    (block,) = program.blocks.values()
    assert moved(block.graph) == (["all_reduce"] * 2, ["all_reduce"] * 2)
    hidden = [
        n.meta["spec"].shape for n in block.graph.nodes if n.target is ops.convert and n.args[1] == "tp" and P in n.args
    ]
    assert hidden == [(1, tokens, 4096)] * 2


def test_the_residual_stream_keeps_its_features_where_memory_is_slow() -> None:
    """Where sums of whole features take so long that parts of them, gathered for each product, would pay."""
    program = run(published(1, 4096), "data-parallel,tensor-parallel,reshard", Context(profile("cpu")))
    (block,) = program.blocks.values()
    assert {kind for way in moved(block.graph) for kind in way} == {"all_reduce"}
    assert {n: k for n, k in placed(program).items() if k == "S(1)"}.keys() == {
        "self_attn.o_proj.weight", "mlp.down_proj.weight",
    }  # fmt: skip


def test_llama_3_8b_with_sequence_parallelism_gathers_and_scatters() -> None:
    """Korthikanti et al. 2022: the same weights; norms and residuals on their share of the positions; no all-reduce."""
    program = run(published(1, 4096), "data-parallel,tensor-parallel{sequence},reshard")
    (block,) = program.blocks.values()
    forward, backward = moved(block.graph)
    assert sorted(set(forward)) == ["gather", "scatter"] and len(forward) == 4
    assert forward.count("scatter") == 2
    norms = [n for n in block.graph.nodes if "rms_norm" in str(n.target) or "rsqrt" in str(n.target)]
    assert norms and all(isinstance(n.meta["layout"]["tp"], Shard) for n in norms)


def test_the_whole_plan_types_every_value() -> None:
    program = run(published(1, 128), "data-parallel,tensor-parallel,reshard")
    for _, graph in program.graphs():
        for node in graph.nodes:
            for layout in [] if node.op == "output" else [node.meta["layout"]]:
                kinds = layout if isinstance(layout, tuple) else (layout,)
                assert all({a for a, _ in k.types} == {"tp"} for k in kinds)
                assert all(t in (I, R, P) or isinstance(t, Shard) for k in kinds for _, t in k.types)
