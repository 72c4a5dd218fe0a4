"""Where the sequence is: the shards of it that a context axis may take, and what keeps an op from running on them."""

from collections.abc import Iterator

from torch import fx

from autopar.cost.compute import node_cost
from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.layout import Layout, Piece, Shard, plain_shard, zigzag_shard
from autopar.ir.mesh import Mesh
from autopar.ir.program import tensor_args
from autopar.rules.arguments import arguments, shape_of
from autopar.rules.relation import Relation
from autopar.rules.table import aten
from autopar.solve.annotate import layout_of
from autopar.solve.candidates import spread
from autopar.solve.flow import Flow
from autopar.solve.problem import Solution
from autopar.solve.sources import PRODUCTS, sequence_seeds

NOTABLE = 0.02  # of the flops of products: what is worth a message where every rank repeats it


def attentions(flow: Flow) -> list[fx.Node]:
    """The attention ops of the program, those in a ring included."""
    return [node for node, _ in flow.ops if node.target in ops.ATTENTION]


def context_shard(dim: int, length: int, mesh: Mesh, axis: str, zigzag: bool) -> Shard | None:
    """How ``axis`` shards positions; a sub-axis shards each run that the sub-axes before it leave. None: too short."""
    major = 1
    for part in mesh.parts(mesh.base(axis)):
        if part == axis:
            break
        major *= mesh.size(part)
    ways = mesh.size(axis)
    if major == 1:
        return (zigzag_shard(dim, length, ways) if zigzag else None) or plain_shard(dim, length, ways)
    runs = major * (2 if zigzag else 1)
    return Shard(dim, (Piece(length, ways, length // (runs * ways)),)) if length % (runs * ways) == 0 else None


def context_seeds(
    flow: Flow, batch: dict[int, set[int]], mesh: Mesh, axis: str, zigzag: bool
) -> Iterator[tuple[int, Shard]]:
    """The positions of every attention's queries and keys; of what products and norms take where there is none.

    Raises AutoparError ``short-sequence``, ``indivisible-sequence``.
    """
    nodes = attentions(flow)
    for node in nodes:
        known = arguments(node)
        for name in ("q", "k", "v"):
            shape = shape_of(known[name])
            shard = context_shard(len(shape) - 2, shape[-2], mesh, axis, zigzag)
            if shard is None:
                raise _short(node, shape[-2], mesh, axis, zigzag)
            yield flow.of(known[name]), shard
    if not nodes:
        yield from sequence_seeds(flow, batch, mesh, axis)


def positions(flow: Flow, relations: dict[fx.Node, Relation], mesh: Mesh) -> dict[int, list[Shard]]:
    """How cp may share out each value: along the positions of every attention. Nothing where the mesh has no cp."""
    ways = mesh.size("cp")
    if ways == 1:
        return {}
    taken = [arguments(node)[name] for node in attentions(flow) for name in ("q", "k", "v")]
    cuts = [(x, plain_shard(len(shape_of(x)) - 2, shape_of(x)[-2], ways)) for x in taken]
    found = spread(flow, relations, [(flow.of(x), cut) for x, cut in cuts if cut is not None])
    return {v: list(shards) for v, shards in found.shards.items()}


def _short(node: fx.Node, length: int, mesh: Mesh, axis: str, zigzag: bool) -> AutoparError:
    ways = mesh.size("cp")
    many = ways * (2 if zigzag and len(mesh.parts("cp")) > 1 else 1)
    above = -(-length // many) * many
    where = node.meta.get("module") or "attention"
    if length < ways:
        return AutoparError(
            "short-sequence", f"{where}: a sequence of {length} cannot be shared out over cp={ways}",
            f"use sequences of at least {ways}, or a smaller cp",
        )  # fmt: skip
    return AutoparError(
        "indivisible-sequence", f"{where}: a sequence of {length} does not divide over cp={ways} in {many} runs",
        f"pad to {above}, or use context_parallel=ring or ulysses alone, which take any length from {ways} on",
    )  # fmt: skip


def heads_shard(node: fx.Node, mesh: Mesh, axis: str) -> Shard:
    """Query heads over ``axis``, within what other axes leave of them. Raises AutoparError ``ulysses-heads``."""
    q = arguments(node)["q"]
    shape, ways = shape_of(q), mesh.size(axis)
    taken = head_ranks(node, mesh)
    heads = shape[-3] if len(shape) > 2 else 1
    if heads % (taken * ways):
        sizes = [n for n in range(1, heads // taken + 1) if heads % (taken * n) == 0]
        raise AutoparError(
            "ulysses-heads",
            f"{node.meta.get('module') or 'attention'}: {heads // taken} heads a rank do not divide over {axis}={ways}",
            f"ulysses in {', '.join(map(str, sizes))}; or context_parallel=ring",
        )
    return Shard(len(shape) - 3, (Piece(heads, ways, heads // (taken * ways)),))


def head_ranks(node: fx.Node, mesh: Mesh) -> int:
    """Over how many ranks the axes decided so far share out the query heads."""
    q = arguments(node)["q"]
    taken = 1
    for axis, _ in wanted_of(node, q).shards(len(shape_of(q)) - 3):
        taken *= mesh.size(axis)
    return taken


def wanted_of(node: fx.Node, value: fx.Node) -> Layout:
    """The layout in which ``node`` wants an argument."""
    wanted = node.meta.get("requires")
    return wanted[tensor_args(node).index(value)] if wanted else layout_of(value)


def check_sequence(flow: Flow, solution: Solution, axis: str) -> list[str]:
    """Refuse what would need the whole sequence of an activation; messages for products that every rank repeats.

    Raises AutoparError ``whole-sequence``, ``sequence-scan``.
    """
    for group in flow.groups:
        for read in group.reads:
            if read.kind == "op":
                _check_read(flow, solution, axis, group.value, read.node, read.port)
    _check_scan(flow, solution, axis)
    return list(_repeated(flow, solution, axis))


def _check_read(flow: Flow, solution: Solution, axis: str, v: int, node: fx.Node, port: int) -> None:
    value, have, want = flow.values[v], solution.types[v], solution.assignments[node].inputs[port]
    if not value.diff or not isinstance(have, Shard) or have == want:
        return
    if node.target in ops.ATTENTION and port >= 3 and value.spec.shape[-2] == 1:
        return  # a bias of keys alone: every rank's queries read all of it
    if not isinstance(want, Shard) or want.dim == have.dim:
        raise _refused(node, value.spec.shape, have, axis)


def _refused(node: fx.Node, shape: tuple[int, ...], shard: Shard, axis: str) -> AutoparError:
    where = node.meta.get("module") or "the model"
    source = f" ({node.meta['source']})" if node.meta.get("source") else ""
    name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
    hint = ""
    if node.target in (aten.matmul.default, aten.bmm.default):
        hint = ": attention in a form that is not recognized"
    return AutoparError(
        "whole-sequence",
        f"{where}{source}: {name} needs the whole sequence (dim {shard.dim} of {list(shape)}), which {axis} shares out"
        + hint,
        "use tp or dp for these ranks, or write it with scaled_dot_product_attention where it is attention",
    )


def _check_scan(flow: Flow, solution: Solution, axis: str) -> None:
    """A value whose every position is taken out one by one is a recurrence: each step would wait for all ranks."""
    taken: dict[int, list[fx.Node]] = {}
    for node, _ in flow.ops:
        if node.target is aten.select.int and isinstance(solution.assignments[node].inputs[0], Shard):
            taken.setdefault(flow.inputs(node)[0], []).append(node)
    for v, nodes in taken.items():
        shape = flow.values[v].spec.shape
        dim = arguments(nodes[0])["dim"] % len(shape)
        if len({arguments(n)["index"] for n in nodes}) > max(4, shape[dim] // 2):
            where = nodes[0].meta.get("module") or "the model"
            raise AutoparError(
                "sequence-scan",
                f"{where} ({nodes[0].meta.get('source')}): a recurrence over the sequence of {shape[dim]}, which "
                f"{axis} shares out",
                "use tp or dp for these ranks",
            )


def _repeated(flow: Flow, solution: Solution, axis: str) -> Iterator[str]:
    """Products of activations that every rank of the axis computes whole, each with its flops forward."""
    work = {n: weight * node_cost(n).flops for n, weight in flow.ops if n.target in PRODUCTS and n.meta.get("diff")}
    least = NOTABLE * sum(work.values())
    for node, flops in work.items():
        a = solution.assignments[node]
        if flops > least and not any(isinstance(t, Shard) for t in (*a.inputs, *a.outputs)):
            name = getattr(node.target, "__name__", str(node.target)).split(".")[0]
            where = node.meta.get("module") or "the model"
            yield f"{where}: {name} has no sequence to share out; every rank of {axis} computes it ({flops} flops)"
