"""One op as a node, and an assignment of types executed on shards against the op on whole tensors, with gradients."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir import ops
from autopar.ir.layout import I, Layout, P, R, Shard, Type
from autopar.ir.mesh import Mesh
from autopar.ir.program import Spec, copy_graph
from autopar.rules.local import localize_node
from autopar.rules.place import Place
from autopar.rules.relation import Assignment
from autopar.rules.strategies import strategies
from autopar.runtime import along
from autopar.runtime.axis import Axis
from autopar.runtime.dispatch import dispatched_experts
from autopar.runtime.load import Loads
from autopar.runtime.loss import token_loss
from autopar.runtime.random import Rng
from autopar.runtime.ring import ring_attention
from autopar.runtime.simulate import run_ranks
from autopar.trace.gradients import mark_differentiable
from tests.rules.shards import cut, shards, whole
from tests.runtime.table import axis_of

DUAL: dict[Type, Type] = {I: I, R: P, P: R}
ALONG = (along.extreme, along.extreme_at, along.logsumexp, along.softmax, along.log_softmax)
TOLERANCE = {"rtol": 1e-9, "atol": 1e-9, "equal_nan": True}


@dataclass
class Op:
    """A node and the whole tensors that it takes, in ``tensor_args`` order.

    ``asked`` is the same node where a tensor given twice is one input: what the rules are asked about.
    """

    node: fx.Node
    asked: fx.Node
    tensors: list[Tensor]
    results: list[Tensor]
    grads: list[Tensor]
    wanted: list[Tensor | None] = field(default_factory=list)

    @staticmethod
    def of(target: Any, args: Sequence[Any], kwargs: dict[str, Any], seed: int = 0) -> "Op":
        """The node of a call, with specs and ``diff`` as the trace writes them; floats take gradients."""
        node, tensors = _node(target, args, kwargs, shared=False)
        found = _outputs(_call(node, tensors, {}))
        asked, _ = _node(target, args, kwargs, shared=True)
        for n in (node, asked):
            n.meta["spec"] = tuple(map(_spec, found)) if len(found) > 1 else _spec(found[0])
            n.graph.output((n,))
            mark_differentiable(n.graph, {})
        generator = torch.Generator().manual_seed(seed)
        op = Op(
            node, asked, tensors, found, [torch.randn(r.shape, generator=generator, dtype=_float(r)) for r in found]
        )
        op.wanted = _backward(node, tensors, {}, op.grads)[1]
        return op

    def candidates(self, ways: int, family: Callable[..., Any] = shards) -> list[list[Shard]]:
        """Shards to try on each port."""
        shapes = [t.shape for t in (*self.tensors, *self.results)]
        return [[s for d, n in enumerate(shape) for s in family(d, n, ways)] for shape in shapes]

    def assignments(self, ways: int) -> list[Assignment]:
        """What the rules allow for the candidates."""
        return strategies(self.asked, self.candidates(ways))


def _node(target: Any, args: Sequence[Any], kwargs: dict[str, Any], shared: bool) -> tuple[fx.Node, list[Tensor]]:
    graph, tensors = fx.Graph(), []
    made: dict[int, fx.Node] = {}

    def take(arg: Any) -> Any:
        if isinstance(arg, Tensor):
            tensors.append(arg.detach().clone())
            if not shared or id(arg) not in made:
                made[id(arg)] = graph.placeholder(f"a{len(tensors)}")
            made[id(arg)].meta |= {"spec": _spec(arg), "diff": _is_float(arg)}
            return made[id(arg)]
        return type(arg)(take(x) for x in arg) if isinstance(arg, (list, tuple)) else arg

    node = graph.call_function(target, tuple(take(x) for x in args), {k: take(v) for k, v in kwargs.items()})
    return node, tensors


def check(op: Op, a: Assignment, ways: int, seed: int = 0) -> None:
    """Run ``a`` on shards; every output and gradient must stand for that of the op on whole tensors."""
    generator = torch.Generator().manual_seed(seed)
    inputs = [cut(t, kind, ways, generator) for t, kind in zip(op.tensors, a.inputs, strict=True)]
    grads = [cut(g, _dual(kind), ways, generator) for g, kind in zip(op.grads, a.outputs, strict=True)]

    def rank(c: int) -> tuple[list[Tensor], list[Tensor | None]]:
        node = localized(op, a, ways, c)
        axis = axis_of(ways) if _talks(node) else Axis("tp", ways, c, "none")
        values = {"tp": axis, "rng": Rng(torch.tensor(seed)), "load": Loads().at("")}
        return _backward(node, [i[c] for i in inputs], values, [g[c] for g in grads])

    inside = any(isinstance(t, Shard) for t in a.inputs) and all(t == I for t in a.outputs)
    together = inside or op.node.target is ops.ring_attention or _talks(localized(op, a, ways, 0))
    made = run_ranks(ways, rank) if together else [rank(c) for c in range(ways)]
    for i, (kind, want) in enumerate(zip(a.outputs, op.results)):
        have = whole([outs[i] for outs, _ in made], kind, want.shape)
        torch.testing.assert_close(have, want, **TOLERANCE)
    for i, (kind, want, tensor) in enumerate(zip(a.inputs, op.wanted, op.tensors)):
        parts = [gs[i] if gs[i] is not None else torch.zeros_like(inputs[i][c]) for c, (_, gs) in enumerate(made)]
        if _is_float(tensor):
            have = whole(parts, _dual(kind), tensor.shape)
            torch.testing.assert_close(have, torch.zeros_like(tensor) if want is None else want, **TOLERANCE)


def _talks(node: fx.Node) -> bool:
    """Whether the op communicates by itself."""
    return node.target in (token_loss, ring_attention, dispatched_experts, *ALONG)


def localized(op: Op, a: Assignment, ways: int, coordinate: int) -> fx.Node:
    """The op's node as the rank at ``coordinate`` of the axis tp computes it."""
    graph = copy_graph(op.node.graph)
    node = next(n for n in graph.nodes if n.op == "call_function")
    handles: dict[str, fx.Node] = {}

    def handle(name: str) -> fx.Node:
        if name not in handles:
            with graph.inserting_before(node):
                handles[name] = graph.placeholder(name)
            handles[name].meta["handle"] = name
        return handles[name]

    def of(kind: Type) -> Layout:
        return Layout.of({"tp": kind})

    mesh = Mesh.of({"tp": ways})
    place = Place(mesh, {"tp": coordinate}, tuple(map(of, a.inputs)), tuple(map(of, a.outputs)), handle)
    localize_node(node, place)
    return node


def _backward(
    node: fx.Node, tensors: list[Tensor], handles: dict[str, Any], grads: list[Tensor]
) -> tuple[list[Tensor], list[Tensor | None]]:
    with torch.enable_grad():
        leaves = [t.detach().clone().requires_grad_(_is_float(t)) for t in tensors]
        outs = _outputs(_call(node, leaves, handles))
        pairs = [(o, g) for o, g in zip(outs, grads) if o.requires_grad]
        for o, g in pairs:
            assert o.shape == g.shape, (node.target, o.shape, g.shape)
        if pairs:
            torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return [o.detach() for o in outs], [t.grad for t in leaves]


def _call(node: fx.Node, tensors: list[Tensor], handles: dict[str, Any]) -> Any:
    values: dict[fx.Node, Any] = {}
    queue = iter(tensors)
    for n in node.graph.nodes:
        if n.op == "placeholder":
            values[n] = handles[n.meta["handle"]] if "handle" in n.meta else next(queue)
    args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: values[n])
    return node.target(*args, **kwargs)


def _outputs(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, (list, tuple)) else [made]


def _spec(t: Tensor) -> Spec:
    return Spec(tuple(t.shape), t.dtype)


def _is_float(t: Tensor) -> bool:
    return t.is_floating_point() or t.is_complex()


def _float(t: Tensor) -> torch.dtype:
    return t.dtype if _is_float(t) else torch.float64


def _dual(kind: Type) -> Type:
    return kind if isinstance(kind, Shard) else DUAL[kind]
