"""Pass ``localize``: from global shapes to what one rank computes."""

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.ir.layout import Layout, local_shape
from autopar.ir.mesh import TIME
from autopar.ir.program import Form, Program, Spec, specs, tensor_args
from autopar.passes.base import Context, Pass
from autopar.rules.local import localize_node
from autopar.rules.place import Place
from autopar.solve.annotate import layout_of, layouts
from autopar.solve.flow import is_op


@dataclass(frozen=True)
class Localize(Pass):
    """Local sizes, counts and offsets, and runtime collectives.

    Does:
        Replaces conversions by runtime collectives, literal sizes by local ones, means over shards by sums over the
        global
        count, lookups and losses over a sharded vocabulary by their runtime forms; gives random ops the axes that share
        their value out. Axis handles become arguments of each graph that uses them.
    Requires:
        RESHARDED, and the coordinates of a rank (default: the first).
    Ensures:
        LOCAL for those coordinates; ``spec`` is local, ``global`` keeps the global one.
    Communication:
        None of its own.
    Limits:
        Each rank lowers for its own coordinates; programs differ only where shards are uneven or offsets matter.
    Sources:
        autopar's design, section 6.
    """

    name: ClassVar[str] = "localize"
    requires: ClassVar[Form] = Form.RESHARDED
    produces: ClassVar[Form] = Form.LOCAL

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        program.at = dict(context.at) or dict.fromkeys(program.mesh.names, 0)
        if program.mesh.microbatches > 1:
            program.at[TIME] = 0
        handles = {name: _Graph(program, block.graph).run() for name, block in program.blocks.items()}
        outer = _Graph(program, program.graph)
        outer.run()
        for call in list(program.calls()):
            call.args = (*call.args, *(outer.handle(h) for h in handles[str(call.target)]))
        program.form = Form.LOCAL
        return program


class _Graph:
    """Lowers one graph; remembers the handles that it takes."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self.program, self.graph = program, graph
        self.handles: dict[str, fx.Node] = {}

    def handle(self, name: str) -> fx.Node:
        """The placeholder of an axis (or of ``rng``)."""
        if name not in self.handles:
            last = [n for n in self.graph.nodes if n.op == "placeholder"]
            place = (
                self.graph.inserting_after(last[-1])
                if last
                else self.graph.inserting_before(next(iter(self.graph.nodes)))
            )
            with place:
                self.handles[name] = self.graph.placeholder(name)
            self.handles[name].meta["handle"] = name
        return self.handles[name]

    def run(self) -> list[str]:
        """Lower every node; the names of the handles in order."""
        mesh, at = self.program.mesh, self.program.at
        made: dict[tuple[Spec, Layout], Spec] = {}

        def local_of(spec: Spec, layout: Layout) -> Spec:
            if (spec, layout) not in made:
                made[spec, layout] = Spec(local_shape(spec.shape, layout, mesh, at), spec.dtype)
            return made[spec, layout]

        for node in list(self.graph.nodes):
            if is_op(node):
                inputs = tuple(layout_of(a) for a in tensor_args(node))
                localize_node(node, Place(mesh, at, inputs, layouts(node), self.handle))
        for node in self.graph.nodes:
            if "spec" in node.meta:
                node.meta["global"] = node.meta["spec"]
                pairs = zip(specs(node), layouts(node))
                local = tuple(local_of(s, lay) if isinstance(s, Spec) else s for s, lay in pairs)
                node.meta["spec"] = local if isinstance(node.meta["spec"], tuple) else local[0]
        return list(self.handles)
