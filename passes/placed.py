"""Where a placement puts the experts of a LOCAL program: the order of their parameters' first dim."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.errors import AutoparError
from autopar.ir.placement import Placement
from autopar.ir.program import Program, tensor_args
from autopar.runtime.dispatch import LAYER, PARAMS, dispatched_experts
from autopar.runtime.load import layer_at

AXIS = "ep"


@dataclass(frozen=True)
class _Layer:
    """A layer whose rows travel.

    Args:
        path: as ``expert_load`` has it.
        stacked: names of the parameters that hold its experts one above the other, and which nothing else in their
            graph reads; None for one that is made of others.
        count: its experts.
    """

    path: str
    stacked: tuple[str | None, ...]
    count: int


def placed(program: Program, placement: Mapping[str, Placement] | None) -> Program:
    """The program with its experts where ``placement`` says, by path of the layer.

    Raises:
        AutoparError: ``bad-placement`` where a layer is none whose experts are shared out over ep, has other numbers of
            experts or ranks, or experts that cannot move: modules of their own, or parameters that more is made of.
    """
    if not placement:
        return program
    layers = {layer.path: layer for layer in _layers(program)}
    reads = Counter(n for layer in layers.values() for n in layer.stacked)
    users = Counter(name for _, names in program.readers() for name in names)
    params = dict(program.params)
    for path, own in placement.items():
        if path not in layers:
            why = f"no experts are shared out over {AXIS} at {path!r}"
            raise AutoparError("bad-placement", why, f"layers: {', '.join(layers) or 'none'}")
        layer, ways = layers[path], program.mesh.size(AXIS)
        if (len(own.order), len(own.homes)) != (layer.count, ways):
            why = f"{path}: {len(own.order)} experts on {len(own.homes)} ranks, it has {layer.count} on {AXIS}={ways}"
            raise AutoparError("bad-placement", why, "place_experts(pm.expert_load()) of a module on the same mesh")
        if not own.moved:
            continue
        for name in layer.stacked:
            if name is None or reads[name] > 1 or users[name] > 1:
                why = f"{path}: {name or 'its experts'}: only stacked parameters that nothing else reads can move"
                raise AutoparError("bad-placement", why, "place_experts(..., move=False), which makes copies alone")
            params[name] = replace(params[name], order=own.order)
    return replace(program, params=params)


def _layers(program: Program) -> Iterator[_Layer]:
    for node in program.graph.nodes:
        if node.target is dispatched_experts:
            outer = program.graph.find_nodes(op="placeholder")
            yield _layer(program, node, "", {n: str(n.meta["param"]) for n in outer if "param" in n.meta})
    for call in program.calls():
        graph = program.blocks[str(call.target)].graph
        passed = ((head, arg.meta.get("param")) for head, arg in program.given(call))
        given = {head: str(name) for head, name in (*passed, *program.own(call)) if name is not None}
        for node in graph.nodes:
            if node.target is dispatched_experts:
                yield _layer(program, node, str(call.meta.get("path", "")), given)


def _layer(program: Program, node: fx.Node, path: str, given: Mapping[fx.Node, str]) -> _Layer:
    """Args: given: the parameter that each placeholder of the node's graph stands for."""
    params: list[fx.Node] = node.args[PARAMS]  # type: ignore[assignment]
    names = []
    for source in params:
        while len(source.users) == 1 and source.op == "call_function" and len(tensor_args(source)) == 1:
            source = tensor_args(source)[0]
        names.append(given.get(source) if source.op == "placeholder" and len(source.users) == 1 else None)
    count = params[0].meta["spec"].shape[0] * program.mesh.size(AXIS)
    return _Layer(layer_at(path, str(node.args[LAYER])), tuple(names), count)
