"""Write a solution's types into the program, and read back what earlier axes decided."""

from torch import fx

from autopar.ir.layout import I, Layout, Shard, Type, overlap
from autopar.ir.program import Program, specs, tensor_args
from autopar.rules.relation import Assignment
from autopar.solve.flow import Flow, is_op, origin
from autopar.solve.problem import Solution

_UNKNOWN = Layout()


def layouts(node: fx.Node) -> tuple[Layout, ...]:
    """The layouts of what the node returns."""
    found = node.meta.get("layout", _UNKNOWN)
    if isinstance(found, tuple):
        return found
    spec = node.meta.get("spec")
    return (found,) * max(1, len(spec)) if isinstance(spec, tuple) else (found,)


def layout_of(node: fx.Node) -> Layout:
    """The layout of the single value that ``node`` stands for."""
    owner, index = origin(node)
    found = owner.meta.get("layout", _UNKNOWN)
    return found[index] if isinstance(found, tuple) else layouts(owner)[index]


def write(program: Program, flow: Flow, axis: str, found: Solution) -> None:
    """Add ``axis`` to every layout and requirement of the program."""
    takes = {name: [found.types[flow.of(h)] for h in block.taken()] for name, block in program.blocks.items()}
    for _, graph in program.graphs():
        for node in graph.nodes:
            if node.op == "output":
                if graph is program.graph:
                    _require(node, axis, found.outputs)
                continue
            if "handle" in node.meta:
                continue
            kinds = [found.types.get(flow.at.get((node, i), -1), I) for i in range(len(specs(node)))]
            if is_op(node):
                _require(node, axis, list(found.assignments[node].inputs))
            elif node.op == "call_module":
                _require(node, axis, takes[str(node.target)])
            elif node.op == "call_function":  # getitem
                kinds = [found.types[flow.of(node)]] if origin(node) in flow.at else [I]
            _extend(node, axis, kinds)
    made: dict[fx.Node, tuple[Layout | None, Layout]] = {}  # of the last of equal layers: had, and has now
    for node, name in program.held():
        p = program.params[name]
        last = made.get(node)
        if last is None or last[0] is not p.layout:
            last = made[node] = (p.layout, (p.layout or _UNKNOWN).having(axis, found.types[flow.of(node)]))
        program.params[name] = p.with_layout(last[1])


def _extend(node: fx.Node, axis: str, kinds: list[Type]) -> None:
    made = tuple(old.having(axis, kind) for old, kind in zip(layouts(node), kinds, strict=True))
    node.meta["layout"] = made if isinstance(node.meta.get("spec"), tuple) else made[0]


def _require(node: fx.Node, axis: str, kinds: list[Type]) -> None:
    old = node.meta.get("requires") or (Layout(),) * len(kinds)
    node.meta["requires"] = tuple(o.having(axis, k) for o, k in zip(old, kinds, strict=True))


def clashes(node: fx.Node, a: Assignment) -> bool:
    """Whether the assignment wants a digit that an earlier axis already shards, at any port."""
    wanted = node.meta.get("requires", (Layout(),) * len(a.inputs))
    ports = list(zip(a.inputs, wanted, strict=True))
    ports += list(zip(a.outputs, layouts(node)))
    return any(clash(kind, layout) for kind, layout in ports)


def clash(kind: Type, layout: Layout) -> bool:
    """Whether a type on a new axis collides with the shards that the layout has."""
    return isinstance(kind, Shard) and any(overlap(kind, other) for _, other in layout.shards(kind.dim))


def shares(flow: Flow, mesh_size: dict[str, int]) -> dict[int, float]:
    """The part of each value that a rank holds on the axes decided so far."""
    out: dict[int, float] = {}
    for (node, index), value in flow.at.items():
        if value in out:  # in another of several equal layers
            continue
        part = 1.0
        for axis, _ in layouts(node)[index].shards() if index < len(layouts(node)) else ():
            part /= mesh_size[axis]
        out[value] = part
    return out


__all__ = ["clash", "clashes", "layout_of", "layouts", "shares", "tensor_args", "write"]
