"""Pass ``reshard``: every mismatch between what a value is and what its reader wants becomes an explicit conversion."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from autopar.ir import ops
from autopar.ir.layout import I, Layout, R, Shard, Type
from autopar.ir.program import Form, Program
from autopar.passes.base import Context, Pass
from autopar.solve.annotate import clash, layout_of


@dataclass(frozen=True)
class Reshard(Pass):
    """Conversions where layouts differ.

    Does:
        Inserts ``convert(x, axis, src, dst)`` before the first reader, one for each (value, axis, type), shared by
        all readers in the graph. Steps that make the value smaller come first, unless two axes would share out the
        same elements meanwhile.
    Requires:
        ANNOTATED on every axis of the mesh.
    Ensures:
        RESHARDED: each reader's requirement is its argument's layout; no ``requires`` is left.
    Communication:
        What the table of conversions says, forward and backward.
    Limits:
        None.
    Sources:
        The types are those of the spmd-types package; the conversions are autopar's design, section 4.
    """

    name: ClassVar[str] = "reshard"
    requires: ClassVar[Form] = Form.ANNOTATED
    produces: ClassVar[Form] = Form.RESHARDED

    def rewrite(self, program: Program, context: Context) -> Program:
        """See Pass."""
        for _, graph in program.graphs():
            _Resharder(graph).run()
        program.form = Form.RESHARDED
        return program


class _Resharder:
    """Conversions of one graph, remembered by value and layout."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.made: dict[tuple[fx.Node, Layout], fx.Node] = {}

    def run(self) -> None:
        for node in list(self.graph.nodes):
            wanted = node.meta.pop("requires", None)
            if wanted is None:
                continue
            queue = iter(wanted)

            def take(arg: fx.Node, node: fx.Node = node, queue=queue) -> fx.Node:  # type: ignore[no-untyped-def]
                if isinstance(arg.meta.get("spec"), tuple) or "spec" not in arg.meta:
                    return arg
                return self.bring(arg, next(queue), node)

            if node.op == "output":
                node.args = (tuple(self._output(a, w, node) for a, w in zip(node.args[0], wanted, strict=True)),)
            else:
                node.args = fx.map_arg(node.args, take)
                node.kwargs = fx.map_arg(node.kwargs, take)

    def _output(self, arg, wanted: Layout, node: fx.Node):  # type: ignore[no-untyped-def]
        return self.bring(arg, wanted, node) if isinstance(arg, fx.Node) else arg

    def bring(self, value: fx.Node, wanted: Layout, reader: fx.Node) -> fx.Node:
        """``value`` in the layout that the reader wants."""
        have, owner = layout_of(value), value
        if have == wanted:
            return value
        for axis, src, dst in steps_between(have, wanted, bool(value.meta.get("diff"))):
            have = have.having(axis, dst)
            key = (owner, have)
            if key not in self.made:
                self.made[key] = self._convert(value, axis, src, dst, have, reader)
            value = self.made[key]
        return value

    def _convert(self, value: fx.Node, axis: str, src: Type, dst: Type, layout: Layout, reader: fx.Node) -> fx.Node:
        with self.graph.inserting_before(reader):
            new = self.graph.call_function(ops.convert, (value, axis, src, dst))  # type: ignore[arg-type]
        new.meta = {k: v for k, v in value.meta.items() if k in ("spec", "diff")}
        new.meta["layout"] = layout
        for key in ("module", "source"):
            if key in reader.meta or key in value.meta:
                new.meta[key] = reader.meta.get(key, value.meta.get(key))
        return new


def steps_between(have: Layout, wanted: Layout, diff: bool) -> Iterator[tuple[str, Type, Type]]:
    """(axis, from, to) of each conversion, those first that make the value smaller.

    No two axes share out the same elements on the way: an axis waits until another has let go of what it takes. Where
    each waits for the other, one is made whole first.
    """
    while left := [(a, have.get(a), t) for a, t in wanted.types if not same(have.get(a), t, diff)]:
        left.sort(key=lambda s: _order(s[1], s[2]))
        free = [s for s in left if not clash(s[2], have.having(s[0], I))]
        whole = R if diff else I
        held = [(a, src, whole) for a, src, _ in left if isinstance(src, Shard)]
        axis, src, dst = (*free, *held, *left)[0]
        yield axis, src, dst
        have = have.having(axis, dst)


def same(src: Type, dst: Type, diff: bool) -> bool:
    """Whether no conversion is needed: equal types, or R and I where no gradient flows."""
    return src == dst or (not diff and {src, dst} <= {I, R})


def _order(src: Type, dst: Type) -> int:
    """Smaller values first, so that later steps move less."""
    if isinstance(dst, Shard):
        return 0
    return 2 if isinstance(src, Shard) else 1
