"""What units cost: together the price of the program, split as backwards are."""

from dataclasses import replace
from functools import cache
from itertools import permutations
from typing import Any

import pytest
import torch
from torch import fx

from autopar.cli import _lower
from autopar.cost import load, price
from autopar.cost.compute import node_cost, seconds
from autopar.cost.memory import activations, activations_by_node
from autopar.cost.shares import local_shapes, mesh_sizes
from autopar.cost.units import Piece, pieces, send_seconds, units
from autopar.cost.zero import Stage
from autopar.errors import AutoparError
from autopar.ir.layout import I, Layout, P, R, plain_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Param, Program
from autopar.models import load as load_model
from autopar.passes.base import Context
from autopar.passes.localize import Localize
from tests.cost.build import Builder, Sizes, layers

HW = load("h100")
CASES = [
    ("hf:llama-tiny", "dp=2,tp=2", True),
    ("hf:gpt2-tiny", "tp=2", False),  # trains with dropout, in attention too
    ("hf:t5-base-tiny", "dp=2", False),
]


@cache
def lowered(name: str, mesh: str, sequence: bool) -> Program:
    model, fields = load_model(name), {"sequence_parallel": sequence}
    return _lower.lower(model.model, model.kwargs(2, model.sequence), mesh, fields, after="reshard", loss_only=True)


@pytest.mark.parametrize(("name", "mesh", "sequence"), CASES, ids=[c[0] for c in CASES])
def test_units_add_up_to_the_price_of_a_program_that_is_not_local(name: str, mesh: str, sequence: bool) -> None:
    program = lowered(name, mesh, sequence)
    found, whole = units(program, HW), price(program, HW)
    sent = {when: sum(float(t.seconds) for t in whole.traffic if t.when == when) for when in ("forward", "backward")}
    assert sum(u.forward for u in found) == pytest.approx(float(whole.compute_seconds[0]) + sent["forward"])
    back = sum(u.input + u.weight for u in found)
    assert back == pytest.approx(float(whole.compute_seconds[1]) + sent["backward"])
    assert sum(u.activations for u in found) == pytest.approx(float(whole.memory["activations"]))
    held = [float(whole.memory[k]) for k in ("parameters", "gradients", "optimizer")]
    # A tied table counts in the units at both ends; a buffer that nobody reads in none.
    assert sum(u.states for u in found) >= sum(held) - 16
    with pytest.raises(AutoparError) as refused:
        units(Localize().rewrite(program.clone(), Context()), HW)
    assert refused.value.slug == "unpriced-form"


SHARDS = {"S0": plain_shard(0, 8, 4), "S1": plain_shard(1, 12, 4)}
TYPES: dict[str, Any] = {"I": I, "R": R, "P": P, **SHARDS}


@pytest.mark.parametrize(("src", "dst"), list(permutations(TYPES, 2)))
def test_every_conversion_costs_what_the_price_of_its_program_says(src: str, dst: str) -> None:
    build = Builder()
    x = build.placeholder("x", (8, 12), torch.float32, Layout((("tp", TYPES[src]),)), input=0)
    build.graph.output((build.convert(x, "tp", TYPES[src], TYPES[dst]),))
    program = Program(Mesh.of({"tp": 4}), build.graph, {}, {}, (), (), form=Form.RESHARDED)
    (found,), whole = units(program, HW), price(program, HW)
    for own, copied, when in zip((found.forward, found.input), whole.compute_seconds, ("forward", "backward")):
        assert own == pytest.approx(float(copied) + sum(float(t.seconds) for t in whole.traffic if t.when == when))
    assert found.activations == found.weight == 0


def test_the_chain_of_a_model() -> None:
    program = lowered("hf:t5-base-tiny", "dp=2", False)
    chain = pieces(program)
    paths = [f"{side}.block.{i}" for side in ("encoder", "decoder") for i in (0, 1)]
    assert [p.name for p in chain[1:-1]] == paths
    nodes = [n for n in program.graph.nodes if n.op in ("call_function", "call_module")]
    assert [n for p in chain for n in p.nodes] == nodes
    # What stands between encoder and decoder is the decoder's.
    assert len(chain[3].nodes) > len(chain[2].nodes)


def test_pieces_without_parameters_join_their_neighbours() -> None:
    program = layers(Sizes(), count=2)
    assert [p.name for p in pieces(program)] == ["layers.0", "layers.1"]
    program = lowered("hf:llama-tiny", "dp=2,tp=2", True)
    chain = pieces(program)
    assert [p.name for p in chain] == ["model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"]
    # Positions and their cosines read a buffer only; they stand with the embedding, before the first call.
    assert all(n.op == "call_function" for n in chain[0].nodes) and chain[1].nodes[0].op == "call_module"


def test_a_backward_is_split_between_inputs_and_weights() -> None:
    """Of a layer's products each half; norms, attention and the collectives' backward go to the inputs."""
    z = Sizes()
    program = layers(z)
    (unit,) = units(program, HW)
    shapes = local_shapes(mesh_sizes(program.mesh))
    costs = [node_cost(n, shapes) for n in program.blocks["layers.*"].graph.nodes]
    products = [float(seconds(c, HW, z.dtype)[1]) for c in costs if c.kind == "matmul"]
    assert len(products) == 6 and unit.weight == pytest.approx(sum(products) / 2)
    assert unit.input > unit.weight


def frozen(program: Program) -> Program:
    for _, graph in program.graphs():
        for node in graph.nodes:
            if "param" in node.meta:
                node.meta["diff"] = False
    program.params = {n: replace(p, trainable=False) for n, p in program.params.items()}
    return program


def test_frozen_units_have_no_weights_to_work_on() -> None:
    whole, still = units(layers(Sizes()), HW)[0], units(frozen(layers(Sizes())), HW)[0]
    assert still.weight == 0 and still.forward == whole.forward and 0 < still.input <= whole.input
    assert still.states == still.parameters == whole.parameters == whole.states / 4


def test_states_are_shared_out_by_zero() -> None:
    z = Sizes()
    whole, cut = units(layers(z), HW)[0], units(layers(z), HW, zero=Stage(1))[0]
    assert cut.states == whole.states / z.d and cut.parameters == whole.parameters


def test_units_of_another_chain() -> None:
    """A pass may cut where it likes: the costs are those of the nodes it names."""
    program = layers(Sizes(), count=3)
    chain = pieces(program)
    both = Piece("both", (*chain[0].nodes, *chain[1].nodes))
    single, joined = units(program, HW), units(program, HW, [both, chain[2]])
    assert joined[0].name == "both" and joined[1] == single[2]
    assert joined[0].forward == pytest.approx(single[0].forward * 2)


def test_a_parameter_that_is_read_through_a_cast_is_held_and_worked_on_by_weights() -> None:
    build = Builder()
    w = build.placeholder("w", (16, 16), torch.float32, Layout(), param="w")
    x = build.placeholder("x", (4, 16), torch.bfloat16, Layout(), input=0)
    cast = build.call(torch.ops.aten._to_copy.default, w, dtype=torch.bfloat16, layout=Layout())
    out = build.call(torch.ops.aten.linear.default, x, cast, layout=Layout())
    build.graph.output((out,))
    params = {"w": Param("w", w.meta["spec"], "parameter", layout=Layout())}
    program = Program(Mesh.of({"tp": 1}), build.graph, {}, params, (), (), form=Form.RESHARDED)
    (unit,) = units(program, HW, [Piece("product", (out,))])
    assert unit.parameters == 16 * 16 * 4 and unit.states == 4 * unit.parameters
    assert unit.weight == pytest.approx(unit.input)
    assert units(program, HW, [Piece("cast", (cast,))])[0].input == 0


def test_activations_by_node_count_each_value_once() -> None:
    program = layers(Sizes(), count=4)
    shapes = local_shapes(mesh_sizes(program.mesh))
    by_node = activations_by_node(program, shapes)
    assert sum(by_node.values()) == activations(program, shapes)
    calls: list[fx.Node] = list(program.calls())
    # The first layer's input is the model's, which is held anyway.
    assert len({by_node[c] for c in calls[1:]}) == 1 and by_node[calls[0]] < by_node[calls[1]]


def test_messages_cross_nodes_at_the_network_s_rate() -> None:
    near, far = Mesh.of({"pp": 4, "tp": 2}), Mesh.of({"pp": 4, "tp": 8})
    count = 1e9
    assert send_seconds(count, HW, near) == pytest.approx(count / HW.inner.rate("other"), rel=0.01)
    assert send_seconds(count, HW, far) == pytest.approx(count / HW.outer.rate("other"), rel=0.01)


def test_a_program_without_layouts_is_refused() -> None:
    program = layers(Sizes())
    program.form = Form.TRACED
    with pytest.raises(AutoparError, match="unpriced-form"):
        units(program, HW)
