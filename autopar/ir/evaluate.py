"""What a program means on whole tensors: run as it stands, differentiably."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.program import Program


def evaluate(program: Program, params: Mapping[str, Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The outputs of a program whose shapes are global, in the order of ``Program.outputs``.

    Args:
        params: each parameter, buffer and constant by name, whole.
        inputs: the global batch, in the order of ``Program.inputs``.
    """
    feed = []
    for node in program.graph.find_nodes(op="placeholder"):
        feed.append(params[node.meta["param"]] if "param" in node.meta else inputs[node.meta["input"]])
    device = feed[0].device if feed else torch.device("cpu")
    with torch.device(device):
        return list(run_graph(program, program.graph, feed, params))


def run_graph(program: Program, graph: fx.Graph, feed: list[Any], params: Mapping[str, Any]) -> tuple[Any, ...]:
    """The result of one graph of the program for the values of its placeholders; values go when nobody needs them.

    Args:
        params: what calls read by their paths, by name.
    """
    env: dict[fx.Node, Any] = {}
    values = iter(feed)
    left = {n: len(n.users) for n in graph.nodes}
    for node in graph.nodes:
        if node.op == "placeholder":
            env[node] = next(values)
            continue
        args = fx.node.map_arg(node.args, lambda n: env[n])
        if node.op == "output":
            return tuple(args[0])
        if node.op == "call_module":
            inner = {head: params[name] for head, name in program.own(node)}
            inner |= {head: env[value] for head, value in program.given(node)}
            block = program.blocks[str(node.target)].graph
            env[node] = run_graph(program, block, [inner[h] for h in block.find_nodes(op="placeholder")], params)
        else:
            env[node] = node.target(*args, **fx.node.map_arg(node.kwargs, lambda n: env[n]))
        for used in node.all_input_nodes:
            left[used] -= 1
            if not left[used]:
                del env[used]
    raise AssertionError("a graph without output")
