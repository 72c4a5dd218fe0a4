"""Which values of an exported graph carry a gradient in eager mode: regions under ``torch.no_grad``, hidden writes.

Export records such regions as calls of subgraphs, which decomposition would forget. What eager does in them is found
by running the graph on fake tensors with autograd, so that an op that gives back its argument keeps its gradient.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._higher_order_ops.wrap import wrap_with_autocast, wrap_with_set_grad_enabled
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.errors import AutoparError
from autopar.trace import places
from autopar.trace.once import layer

aten = torch.ops.aten
AUTOCAST = 4  # arguments of an autocast region before its subgraph


def inline_no_grad(program: ExportedProgram) -> None:
    """Regions under ``torch.no_grad`` become plain nodes; what leaves them is detached unless eager keeps its gradient.

    Raises AutoparError ``custom-backward`` for a write that autograd does not see into a value that carries a gradient.
    """
    module = program.graph_module
    _detach_in_place(module)
    leaves = _leaves(program)
    if _matters(module, leaves):
        run = _Run(module)
        run.graph(module, [v for _, v in leaves], True)
        run.refuse_hidden_writes()
    _inline(module)


def _detach_in_place(module: fx.GraphModule) -> None:
    """``detach_`` as ``detach``: what follows reads the node of the call."""
    for node, _ in _calls(module):
        if node.target is aten.detach_.default:
            node.target = aten.detach.default


def _calls(module: fx.GraphModule) -> Iterator[tuple[fx.Node, fx.GraphModule]]:
    """Every call of the graph and of its regions."""
    for _, part in module.named_modules():
        if isinstance(part, fx.GraphModule):
            yield from ((n, part) for n in part.graph.nodes if n.op == "call_function")


def _leaves(program: ExportedProgram) -> list[tuple[fx.Node, Any]]:
    """Placeholders with fake values that require a gradient as in eager mode; any float input might."""
    out = []
    nodes = [n for n in program.graph.nodes if n.op == "placeholder"]
    for node, spec in zip(nodes, program.graph_signature.input_specs):
        value = node.meta.get("val")
        if isinstance(value, Tensor):
            grad = spec.kind is InputKind.USER_INPUT
            if spec.kind is InputKind.PARAMETER:
                grad = program.state_dict[spec.target].requires_grad
            with _mode(value):
                value = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
            value = value.requires_grad_(grad and _carries(value))
        out.append((node, value))
    return out


def _mode(value: Tensor) -> AbstractContextManager[Any]:
    mode: AbstractContextManager[Any] | None = getattr(value, "fake_mode", None)
    return mode or nullcontext()


def _carries(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _matters(module: fx.GraphModule, leaves: list[tuple[fx.Node, Any]]) -> bool:
    """Whether a value with a gradient reaches a region, or may be written into behind the back of autograd."""
    flows = {n for n, v in leaves if isinstance(v, Tensor) and v.requires_grad}
    for node in module.graph.nodes:
        reached = any(n in flows for n in node.all_input_nodes)
        if reached and _has_regions(node, module):
            return True
        if node.op == "call_function" and (reached or node.target is layer._opoverload):
            flows.add(node)
    targets = {n.target for n, _ in _calls(module)}
    return aten.detach.default in targets and any(_is_write(t) for t in targets)


def _has_regions(node: fx.Node, module: fx.GraphModule) -> bool:
    if node.target is not wrap_with_autocast:
        return node.target is wrap_with_set_grad_enabled
    return any(n.target is wrap_with_set_grad_enabled for n, _ in _calls(_body(node, module)))


def _body(node: fx.Node, module: fx.GraphModule) -> fx.GraphModule:
    """The subgraph that a call of a region runs."""
    target = node.args[1 if node.target is wrap_with_set_grad_enabled else AUTOCAST].target  # type: ignore[union-attr]
    body = getattr(module, str(target))
    assert isinstance(body, fx.GraphModule)
    return body


def _is_write(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


@dataclass
class _Write:
    """A write into a tensor: when, whether autograd saw it, and the nodes that share the storage by carrying."""

    node: fx.Node
    at: int
    tracked: bool
    aliases: list[tuple[fx.Node, bool]]


@dataclass
class _Run:
    """One run of a graph on fake tensors. Sets ``meta["attached"]`` of each node."""

    module: fx.GraphModule
    at: dict[fx.Node, int] = field(default_factory=dict)
    values: dict[fx.Node, Any] = field(default_factory=dict)
    writes: list[_Write] = field(default_factory=list)

    def graph(self, module: fx.GraphModule, inputs: list[Any], enabled: bool) -> Any:
        """The results of a graph or region."""
        given = iter(inputs)
        result: Any = ()
        for node in module.graph.nodes:
            if node.op == "placeholder":
                self.values[node] = next(given)
            elif node.op == "get_attr":
                self.values[node] = getattr(module, node.target)
            elif node.op == "call_function":
                with torch.set_grad_enabled(enabled):
                    self.values[node] = self._call(node, module)
            else:
                result = self._read(node.args[0])
            self.at[node] = len(self.at)
            leaves = tree_leaves(self.values.get(node))
            node.meta["attached"] = any(isinstance(v, Tensor) and v.requires_grad for v in leaves)
        return result

    def _read(self, args: Any) -> Any:
        return tree_map_only(fx.Node, lambda n: self.values[n], args, is_leaf=lambda v: isinstance(v, fx.Node))

    def _call(self, node: fx.Node, module: fx.GraphModule) -> Any:
        args, kwargs = self._read((tuple(node.args), dict(node.kwargs)))
        if node.target is wrap_with_set_grad_enabled:
            return self.graph(args[1], list(args[2:]), args[0])
        if node.target is wrap_with_autocast:
            device, dtype, on, cache = args[:AUTOCAST]
            with torch.autocast(device, dtype, on, cache):
                return self.graph(args[AUTOCAST], list(args[AUTOCAST + 1 :]), torch.is_grad_enabled())
        if not isinstance(node.target, torch._ops.OpOverload) or node.target is layer._opoverload:
            return self._opaque(node, args, kwargs)
        tensor = next((v for v in tree_leaves((args, kwargs)) if isinstance(v, Tensor)), node.meta.get("val"))
        with _mode(tensor) if isinstance(tensor, Tensor) else nullcontext():
            out = node.target(*args, **kwargs)
        if _is_write(node.target):
            self._note(node, args, out)
        return out

    def _opaque(self, node: fx.Node, args: Any, kwargs: Any) -> Any:
        """A layer, which has parameters, or a call of a kind that is not looked into."""
        if not isinstance(node.target, torch._ops.HigherOrderOperator) and node.target is not layer._opoverload:
            return node.target(*args, **kwargs)  # type: ignore[operator]
        has = node.target is layer._opoverload
        grad = has or any(isinstance(v, Tensor) and v.requires_grad for v in tree_leaves((args, kwargs)))
        grad = grad and torch.is_grad_enabled()
        fresh = lambda v: v.detach().clone().requires_grad_(grad and _carries(v))  # noqa: E731
        return tree_map_only(Tensor, fresh, node.meta["val"])

    def _note(self, node: fx.Node, args: Any, out: Any) -> None:
        """Remember which nodes see the write, and whether they carry a gradient now."""
        written = args[0]
        if not isinstance(written, Tensor) or not _carries(written):
            return
        storage = written.untyped_storage()._cdata
        aliases = [
            (n, v.requires_grad)
            for n, v in [*self.values.items(), (node, out)]
            if _carries(v) and v.untyped_storage()._cdata == storage
        ]
        tracked = torch.is_grad_enabled() and written.requires_grad
        self.writes.append(_Write(node, len(self.at), tracked, aliases))

    def refuse_hidden_writes(self) -> None:
        """A gradient that passes by a write, or a write whose gradient a sharer does not get, is no derivative."""
        for write in self.writes:
            read = [a for n, a in write.aliases if any(self.at[u] > write.at for u in n.users)]
            if any(a != write.tracked for a in read):
                where = places.source_of(write.node) or places.module_of(write.node) or "the model"
                raise AutoparError(
                    "custom-backward",
                    f"{where}: writes into a tensor that carries a gradient where autograd does not see it"
                    " (under torch.no_grad, or through detach() or .data)",
                    "x = x + (f(x) - x).detach() gives the new values and lets the gradient pass by",
                )


def _inline(module: fx.GraphModule) -> None:
    """Regions become nodes of the graph."""
    for node in list(module.graph.nodes):
        if node.target is wrap_with_autocast:
            _inline(_body(node, module))
        if node.target is not wrap_with_set_grad_enabled:
            continue
        enabled, inner = node.args[0], _body(node, module)
        _inline(inner)
        args = [_detached(node, a) if enabled else a for a in node.args[2:]]
        results = _copy_before(node, inner.graph, args)
        for user in list(node.users):
            value = results[user.args[1]]
            user.replace_all_uses_with(value if enabled else _detached(node, value))
            module.graph.erase_node(user)
        module.graph.erase_node(node)
    module.recompile()


def _copy_before(node: fx.Node, inner: fx.Graph, args: Any) -> list[fx.Node]:
    env = dict(zip((n for n in inner.nodes if n.op == "placeholder"), args))
    for old in inner.nodes:
        if old.op == "call_function":
            with node.graph.inserting_before(node):
                env[old] = node.graph.node_copy(old, lambda n: env[n])
        elif old.op == "output":
            return [env[n] for n in old.args[0]]
        elif old.op != "placeholder":
            raise AutoparError(
                "unsupported-op", f"{places.module_of(node)}: {old.op} under torch.no_grad", "move it out"
            )
    return []


def _detached(before: fx.Node, value: Any) -> Any:
    """The value without its gradient, unless eager keeps it."""
    if not isinstance(value, fx.Node) or value.meta.get("attached") or not _carries(value.meta.get("val")):
        return value
    with before.graph.inserting_before(before):
        out = before.graph.call_function(aten.detach.default, (value,))
    out.meta = dict(value.meta)
    return out
