"""An exported graph to normal form: functional, few ops, explicit sizes, dims counted from the front.

The lowerings are in ``lower_shape`` (views, cuts), ``lower_make`` (constants, indexing), ``lower_math`` (reductions,
norms, arithmetic), ``lower_nn`` (attention, losses), ``lower_random`` (dropout, noise) and ``lower_einsum``. An op
without a lowering stays as it is, or is written in smaller ones where torch itself composes it.
"""

import operator
from typing import Any

import torch
from torch import fx
from torch._decomp import decomposition_table
from torch.utils._pytree import tree_map_only

from autopar.errors import AutoparError
from autopar.ir import edit
from autopar.ir.program import Spec
from autopar.trace import lower_einsum, lower_make, lower_math, lower_nn, lower_random, lower_shape, places
from autopar.trace.builder import LOWERINGS, Builder
from autopar.trace.export import Exported
from autopar.trace.splice import LAYER, Layers

aten = torch.ops.aten
# imported for what they register
assert lower_einsum and lower_make and lower_math and lower_nn and lower_random and lower_shape

KEPT = {  # composed by torch, but whole in the IR because a rule or a kernel knows them whole
    aten.linear.default,
    aten.matmul.default,
    aten.layer_norm.default,
    aten.rms_norm.default,
    aten.softmax.int,
    aten.log_softmax.int,
    aten.conv1d.default,
    aten.conv2d.default,
    aten.conv3d.default,
}
WRITTEN = {  # one kernel in torch, which also has them in ops that rules know: views, sums, sizes of the batch in none
    aten.pixel_shuffle.default,
    aten.pixel_unshuffle.default,
    aten.channel_shuffle.default,
    aten.rot90.default,
    aten.addr.default,
    aten.dist.default,
    aten.nansum.default,
    aten.trace.default,
    aten.take.default,
    aten.count_nonzero.default,
    aten.count_nonzero.dim_IntList,
    aten.diag_embed.default,
    aten.block_diag.default,
    aten.affine_grid_generator.default,
}
IGNORED = {"_assert_tensor_metadata", "_guards_fn", "_assert_async", "_assert_scalar", "sym_constrain_range"}
DEVICE_KWARGS = ("device", "layout", "pin_memory", "memory_format", "non_blocking")


def normalize(exported: Exported) -> fx.Graph:
    """The normal form of an exported graph. Placeholders keep ``meta["param"]`` and ``meta["input"]``."""
    build = Builder(fx.Graph())
    layers = Layers(build, exported)
    env: dict[fx.Node, Any] = {}
    for param in exported.params.values():
        if param.kind != "constant":
            build.params[param.name] = build.placeholder(param.name, param.spec, param=param.name)
    for node in exported.graph.nodes:
        build.like = _carry(node)
        if node.op == "placeholder":
            env[node] = _placeholder(build, node, exported)
        elif node.op == "call_function":
            env[node] = layers.splice(node, env) if node.target is LAYER else _call(build, node, env)
        elif node.op == "output":
            build.graph.output(tuple(env[n] for n in node.args[0]))
        else:
            what = f"{places.module_of(node)}: {node.op} {node.target}"
            raise AutoparError("unsupported-op", what, "pass tensors, and keep modules in the model")
    edit.drop_dead(build.graph)
    return build.graph


def _carry(node: fx.Node) -> fx.Node:
    node.meta.setdefault("module", places.module_of(node))
    node.meta.setdefault("call", places.call_of(node))
    node.meta.setdefault("source", places.source_of(node))
    return node


def _placeholder(build: Builder, node: fx.Node, exported: Exported) -> fx.Node:
    """A parameter's placeholder, an input's, or a constant: equal ones are one, and single numbers are ``full``."""
    name = node.meta.get("param")
    spec = edit.spec_of(node.meta["val"])
    if name is None:
        names = dict(enumerate(exported.structure.names))
        return build.placeholder(names.get(node.meta["input"], node.name), spec, input=node.meta["input"])
    value = exported.constants.get(name)
    if value is None:
        return build.params[name]
    if value.numel() == 1 and not value.is_meta:
        return build.full(value.shape, value.item(), value.dtype)
    known = build.constant(value)
    if known is None:
        known = build.placeholder(name, spec, param=name)
        build.constants.append((value, known))
    return known


def _call(build: Builder, node: fx.Node, env: dict[fx.Node, Any]) -> Any:
    _refuse_symbolic(node)
    is_node = lambda v: isinstance(v, fx.Node)  # noqa: E731
    args, kwargs = tree_map_only(fx.Node, lambda n: env[n], (tuple(node.args), dict(node.kwargs)), is_leaf=is_node)
    result = lower(build, node.target, args, kwargs)
    if isinstance(result, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor):
        want = edit.spec_of(node.meta["val"])
        assert result.meta["spec"] == want, f"{node.format_node()}: {result.meta['spec']} is not {want}"
    return result


def lower(build: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The normal form of one call."""
    kwargs = {k: v for k, v in kwargs.items() if k not in DEVICE_KWARGS}
    if target is operator.getitem:
        source, index = args
        if isinstance(source, (list, tuple)):
            return source[index]
        return build.emit(target, source, index, spec=source.meta["spec"][index])
    if not isinstance(target, torch._ops.OpOverload):
        what = f"{_place(build)}: {getattr(target, '__name__', target)}"
        raise AutoparError("unsupported-op", what, "write it with plain tensor ops")
    if target._schema.name.split("::")[1] in IGNORED:
        return None
    if target in LOWERINGS:
        return LOWERINGS[target](build, *args, **kwargs)
    if target in WRITTEN:
        return _compose(build, decomposition_table[target], args, kwargs)
    if target not in KEPT and _is_composed(target):
        return _compose(build, target, args, kwargs)
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise AutoparError(
            "random-op",
            f"{_place(build)}: {target} draws random numbers whose ranks would disagree",
            "use torch.rand, randn, randint or dropout without a generator, or pass the random tensor as an input",
        )
    if target._schema.is_mutable:
        raise AutoparError("unsupported-op", f"{_place(build)}: {target} writes in place", "use its functional form")
    return build.emit(target, *_positive_dims(target, args), **kwargs)


def _is_composed(target: Any) -> bool:
    """Whether torch itself writes the op in other ops."""
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd"))


def _compose(build: Builder, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An op that torch composes of others, as those others."""
    flat, spec = torch.utils._pytree.tree_flatten((args, kwargs), is_leaf=lambda v: isinstance(v, fx.Node))

    def function(*leaves: Any) -> Any:
        a, k = torch.utils._pytree.tree_unflatten(list(leaves), spec)
        return target(*a, **k)

    return build.inline(function, *flat)


def _positive_dims(target: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments named dim or dims, counted from the front."""
    if not args or not isinstance(args[0], fx.Node) or not isinstance(args[0].meta["spec"], Spec):
        return args
    ndim = len(args[0].meta["spec"].shape)
    out = list(args)
    for i, argument in enumerate(target._schema.arguments[: len(args)]):
        if argument.name not in ("dim", "dims"):
            continue
        if isinstance(out[i], int) and not isinstance(out[i], bool):
            out[i] %= max(ndim, 1)
        elif isinstance(out[i], (list, tuple)):
            out[i] = [d % max(ndim, 1) for d in out[i]]
    return tuple(out)


def _refuse_symbolic(node: fx.Node) -> None:
    val = node.meta.get("val")
    sizes = [
        n for v in (val if isinstance(val, (list, tuple)) else (val,)) if isinstance(v, torch.Tensor) for n in v.shape
    ]
    if any(isinstance(s, torch.SymInt) and not s.node.is_constant() for s in sizes):
        raise AutoparError(
            "data-dependent-control-flow",
            f"{places.said(node.meta)}: how many elements {node.target} gives depends on tensor values",
            "keep every row and weigh it: torch.where(mask, y, 0), (loss * mask).sum() / mask.sum(), ignore_index;"
            " or pass the rows' numbers as an input; a layer of experts can be said by autopar.register_experts",
        )
    if isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        raise AutoparError(
            "data-dependent-control-flow",
            f"{places.said(node.meta)}: {node.target} gives a number that depends on tensor values",
            "keep it a tensor (torch.where, torch.cond), or compute it outside and pass it as a Python value;"
            " a layer of experts can be said by autopar.register_experts",
        )


def _place(build: Builder) -> str:
    return places.said(build.like.meta if build.like is not None else {})
