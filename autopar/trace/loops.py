"""Layers that loop over their experts in their own forward: lists of equal modules, or stacked parameters.

The forward runs for choices of experts that we make (``trace.witness``). Where its result is then a sum over tokens'
choices of what equal experts compute, whatever the choices, the layer is replayed in a trace as its own routing, one op
for the experts, and what it does with their result. Names of parameters stay as they are.
"""

import functools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from autopar.ir import modules
from autopar.ir.program import Spec
from autopar.trace import places
from autopar.trace.layers import SINGLE, kind_of, numbers, watching
from autopar.trace.questions import Choice, Questions, behind
from autopar.trace.record import Unrecognized, aside
from autopar.trace.routed import Layer, Routed, digests
from autopar.trace.state import Place, Snapshot
from autopar.trace.witness import Listing, Scores, Witness

LISTS = (nn.ModuleList, nn.ParameterList, nn.ModuleDict, nn.ParameterDict, nn.Sequential)
SMALL = 4096  # elements up to which a parameter or buffer outside of the experts gets numbers
TENSOR = object()  # stands for a tensor among the leaves of a result
NODES = 2**19  # ops that all records of a layer may have


@torch.library.custom_op("autopar::stacked", mutates_args=())
def traced_stack(params: list[Tensor]) -> Tensor:
    """Parameters of experts, one above the other. In exported graphs only."""
    raise NotImplementedError("autopar::stacked is a node of a trace and computes nothing")


@traced_stack.register_fake
def _(params: list[Tensor]) -> Tensor:
    return params[0].new_empty((len(params), *params[0].shape))


@dataclass(frozen=True)
class Families:
    """Experts' parameters in a module.

    Args:
        count: of experts.
        specs: by template: a name with ``{}`` for the expert's number, or that of a stacked parameter; stacked specs.
        places: (template, expert) of each parameter by name; expert -1 for a stacked one.
    """

    count: int
    specs: dict[str, Spec]
    places: dict[str, tuple[str, int]]


def families_of(module: nn.Module) -> Families | None:
    """The parameters of a module that could be those of experts; None where there are none.

    Elements of one list (or of several as long) whose parameters look alike, beside something else of that size, as a
    router has; or parameters with such a first dim.
    """
    counts = _counts(module)
    named = {n: p for n, p in module.named_parameters() if p.is_floating_point()} if counts else {}
    for count in counts:
        specs, places = _listed(module, named, count)
        if not specs:
            specs = {n: Spec(tuple(p.shape), p.dtype) for n, p in named.items() if p.ndim >= 3 and p.shape[0] == count}
            if specs:
                also = {n: p for n, p in named.items() if p.ndim == 2 and p.shape[0] == count and _beside(n, specs)}
                specs |= {n: Spec(tuple(p.shape), p.dtype) for n, p in also.items()}
            places = {n: (n, -1) for n in specs}
        if specs and any(p.ndim > 1 and count in p.shape for n, p in named.items() if n not in places):
            return Families(count, specs, places)
    return None


def _counts(module: nn.Module) -> list[int]:
    """Numbers of experts that the module may have: lengths of its lists, first dims of its own stacked parameters."""
    found = [len(m) for m in modules.once(module) if isinstance(m, LISTS) and len(m) > 1]
    stacked = [p.shape[0] for m in (module, *module.children()) for p in m._parameters.values()
               if p is not None and p.ndim >= 3 and p.shape[0] > 1]  # fmt: skip
    return sorted(dict.fromkeys([*found, *stacked]), reverse=True)


def _beside(name: str, specs: dict[str, Spec]) -> bool:
    """Whether a matrix stands beside stacked parameters and is named as one of them: a stacked bias, not a router."""
    return any(name != n and name.startswith(n) for n in specs) or any(
        name.replace("bias", "weight") == n or name.replace("_bias", "") == n for n in specs
    )


def _listed(
    module: nn.Module, named: dict[str, nn.Parameter], count: int
) -> tuple[dict[str, Spec], dict[str, tuple[str, int]]]:
    lists = {path: _keys(m) for path, m in modules.named(module).items() if isinstance(m, LISTS) and len(m) == count}
    groups: dict[str, dict[int, str]] = {}
    for name in named:
        parts = name.split(".")
        for at in range(len(parts)):
            number = lists.get(".".join(parts[:at]), {}).get(parts[at])
            if number is not None:
                template = ".".join((*parts[:at], "{}", *parts[at + 1 :]))
                groups.setdefault(template, {})[number] = name
    specs: dict[str, Spec] = {}
    places: dict[str, tuple[str, int]] = {}
    for template, names in groups.items():
        looks = {(tuple(named[n].shape), named[n].dtype, named[n].requires_grad) for n in names.values()}
        shape, dtype, _ = looks.pop()
        if len(names) == count and not looks and shape:
            specs[template] = Spec((count, *shape), dtype)
            places |= {name: (template, i) for i, name in names.items()}
    return specs, places


def _keys(holder: Any) -> dict[str, int]:
    """The names of a container's elements, with their numbers."""
    named = holder.keys() if isinstance(holder, (nn.ModuleDict, nn.ParameterDict)) else map(str, range(len(holder)))
    return {key: i for i, key in enumerate(named)}


@dataclass
class Record:
    """What a call of a layer was seen to compute.

    ``outputs`` are the nodes of the result's tensors, then of buffers' and attributes' new values.
    """

    layer: Layer
    nodes: list[fx.Node]
    result: TreeSpec
    plain: list[Any]
    buffers: list[str]
    attributes: list[Place]
    asked: list[tuple[fx.Node, tuple[Any, ...]]]

    @functools.cached_property
    def text(self) -> tuple[str, str, str]:
        """Equal for records that compute the same."""
        return self.layer.text(), str(self.result), str(self.plain)


def understood(module: Any, kind: type, found: Families, args: Any, kwargs: Any) -> "Record | str":
    """The layer as routing and one op; or why it cannot be said so."""
    with aside(), torch.random.fork_rng(devices=[]):
        try:
            return Records(functools.partial(_recorded, module, kind, found, args, kwargs), found.count).all()
        except Unrecognized as error:
            return str(error)


class Records:
    """Calls of one layer for different choices of experts, which must all compute the same."""

    def __init__(self, make: Callable[[Scores], Record], experts: int) -> None:
        self.make, self.experts = make, experts
        self.one: Record | None = None
        self.nodes = 0  # of all records
        self.questions = Questions()

    def add(self, scores: Scores) -> set[int]:
        """One more record: the experts that were chosen in it."""
        if self.nodes > NODES:
            raise Unrecognized(f"{self.experts} experts take too many calls to be seen")
        record = self.make(scores)
        self.one, self.nodes = self.one or record, self.nodes + len(record.layer.nodes)
        if not record.layer.routed:
            raise Unrecognized("the result is no sum over experts")
        if record.text != self.one.text:
            raise Unrecognized("what is computed depends on which experts are chosen")
        layer = record.layer
        names = digests(layer.nodes, behind(n for n, _ in record.asked), {})
        about = [r.index for r in layer.routed.values() if r.index is not None]
        self.questions.add(layer.nodes, record.asked, names, about)
        return layer.hit

    def all(self) -> Record:
        """The first of as many records as are needed."""
        everyone = frozenset(range(self.experts))
        unseen, always = everyone, everyone
        while unseen:
            hit = self.add(Scores(min(unseen)))
            if min(unseen) not in hit:
                raise Unrecognized(f"expert {min(unseen)} is not chosen where it scores highest")
            unseen, always = unseen - hit, always & hit
        for kind in ("biased", "alike"):
            always &= self.add(Scores(0, kind))
        before = everyone
        while always and always < before:
            before, always = always, always & self.add(Scores(max(always) + 1, "alike"))
        if always or self.questions.open():
            self.add(Scores(0, "without"))
        for first in range(1, self.experts):
            for scores in (Scores(first, "alike"), Scores(first)):
                if self.questions.open():
                    self.add(scores)
        if self.questions.open():
            raise Unrecognized("Python asks what has more answers than can be seen")
        assert self.one is not None
        return self.one


def _recorded(module: Any, kind: type, found: Families, args: Any, kwargs: Any, like: Scores) -> Record:
    seen, tensors = Witness(found.count, like), dict[str, Tensor]()
    for name, x in [*module.named_parameters(), *module.named_buffers()]:
        template, expert = found.places.get(name, ("", 0))
        tensors[name] = _stand_in(seen, x, bool(template))
        node = seen.track(tensors[name], name, frozenset({expert}) if template else frozenset())
        node.meta.update({"family": template} if template else {})
    flat, spec = tree_flatten((args, kwargs))
    given = [_given(seen, x, found.count) if isinstance(x, Tensor) else x for x in flat]
    for i, x in enumerate(given):
        if isinstance(x, Tensor):
            seen.track(x, f"#{i}", choice=Choice(found.count, -1) if _chooses(x, found.count) else None)
    parts, before = modules.named(module), Snapshot.of(modules.named(module))
    call_args, call_kwargs = tree_unflatten(given, spec)
    own = type(module)
    try:
        module.__class__ = kind
        with _reparametrize_module(module, tensors, tie_weights=True), Listing(seen), seen:
            out = _run(module, kind, call_args, call_kwargs)
            tensors |= {n: b for n, b in module.named_buffers() if b is not tensors[n]}
        changed = [(path, name) for path, name in before.changed() if not path or name not in parts[path]._buffers]
        values = [getattr(parts[path], name) for path, name in changed]
    finally:
        before.restore()
        module.__class__ = own
    return _kept(seen, found, tensors, module, out, changed, values)


def _run(module: Any, kind: Any, args: Any, kwargs: Any) -> Any:
    """The module's forward. Raises Unrecognized, with its line, for whatever it raises itself."""
    try:
        return kind.forward(module, *args, **kwargs)
    except Exception as error:
        what = str(error) if isinstance(error, Unrecognized) else f"it raises {type(error).__name__}"
        raise Unrecognized(f"{places.line_of(error, module)}: {what}") from error


def _kept(
    seen: Witness, found: Families, tensors: dict[str, Tensor], module: Any, out: Any, changed: list[Place], values: Any
) -> Record:
    leaves, result = tree_flatten(out)
    plain = [TENSOR if isinstance(x, Tensor) else x for x in leaves]
    if not all(isinstance(v, Tensor) for v in values):
        raise Unrecognized("an attribute that is no tensor changes")
    nodes = [seen.node_of(x) for x in leaves if isinstance(x, Tensor)]
    inputs = {n.meta["name"]: n for n in seen.graph.find_nodes(op="placeholder") if "name" in n.meta}
    moved = {n: seen.node_of(x) for n, x in tensors.items() if seen.node_of(x) is not inputs[n]}
    if any(n in found.places or n in dict(module.named_parameters()) for n in moved):
        raise Unrecognized("a parameter is written to")
    nodes += [*moved.values(), *(seen.node_of(v) for v in values)]
    layer = Layer(list(seen.graph.nodes), nodes, found.specs, found.count, [n for n, _ in seen.asked])
    layer.understand()
    return Record(layer, nodes, result, plain, list(moved), changed, seen.asked)


def _stand_in(seen: Witness, x: Tensor, expert: bool) -> Tensor:
    """A parameter or buffer of the record."""
    shape = tuple(map(int, x.shape))
    if not expert and x.numel() <= SMALL and (x.ndim < 2 or not x.is_floating_point()):
        return seen.stand_in(shape, x.dtype)
    return torch.empty(shape, dtype=x.dtype, device="meta")


def _chooses(x: Tensor, experts: int) -> bool:
    """Whether an argument may be choices of experts [..., k]."""
    whole = not x.is_floating_point() and x.dtype != torch.bool
    return whole and x.ndim > 0 and x.shape[-1] <= experts


def _given(seen: Witness, x: Tensor, experts: int) -> Tensor:
    """An argument of the record: scores and choices of experts have numbers."""
    shape = tuple(map(int, x.shape))
    like = torch.empty(shape, dtype=x.dtype, device="meta")
    if x.is_floating_point():
        return seen.scores(like) if shape and shape[-1] == experts else like
    if x.dtype == torch.bool:
        return torch.rand(shape, generator=seen.random) < 0.5
    if not _chooses(x, experts):
        return torch.randint(0, 2, shape, generator=seen.random).to(x.dtype)
    scores = seen.scores(torch.empty((*shape[:-1], experts), device="meta"))
    return scores.topk(shape[-1], -1).indices.to(x.dtype)


def replay(record: Record, module: Any, args: Any, kwargs: Any) -> Any:
    """The layer's result, its experts one op; new values go into its buffers and attributes."""
    flat = tree_flatten((args, kwargs))[0]
    device = next(x.device for x in flat if isinstance(x, Tensor))
    env: dict[fx.Node, Any] = {}
    for node in record.layer.nodes:
        if node in record.layer.needed:
            plain = node.meta["grad"] or not torch.is_grad_enabled()  # export cuts its graph at each switch
            with nullcontext() if plain else torch.no_grad():
                env[node] = _value(record, module, node, env, flat, device)
    made = iter([env[n] for n in record.nodes])
    leaves = [next(made) if p is TENSOR else p for p in record.plain]
    for name in record.buffers:
        with torch.no_grad():
            _attribute(module, name).copy_(next(made))
    for path, name in record.attributes:
        setattr(module.get_submodule(path), name, next(made))
    return tree_unflatten(leaves, record.result)


def _value(record: Record, module: Any, node: fx.Node, env: Any, flat: list[Any], device: Any) -> Any:
    if node in record.layer.routed:
        return _experts(record.layer.routed[node], module, env)
    if node.op == "placeholder":
        if "constant" in node.meta:
            return node.meta["constant"].to(device)
        name = node.meta["name"]
        return flat[int(name[1:])] if name.startswith("#") else _attribute(module, name)
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), lambda n: env[n])
    if kwargs.get("device") is not None:
        kwargs = {**kwargs, "device": device}
    target: Any = node.target
    return target(*args, **kwargs)


def _experts(routed: Routed, module: Any, env: Any) -> Tensor:
    val, x = routed.out.meta["val"], env[routed.hidden]
    count = x.numel() // x.shape[-1]
    params = [_stacked(module, template) for template in routed.params]
    total = params[0].shape[0]
    if routed.index is None:
        index = torch.arange(total, device=x.device).expand(count, total)
    else:
        index = env[routed.index].reshape(count, routed.choices)
    weights = x.new_ones((count, routed.choices))
    for i, w in enumerate(routed.weights):
        one = _weights(w.kind, [env[n] for n in w.nodes], index, routed.index is None, count, total)
        one = functools.reduce(Tensor.to, w.casts, one)
        weights = one if i == 0 else weights * one
    rows = x.reshape(count, x.shape[-1])
    out: Tensor = torch.ops.autopar.experts(rows, index, weights, params, repr(routed.body), val.shape[-1], val.dtype)
    out = out.view(val.shape)
    return out if routed.base is None else env[routed.base].reshape(val.shape) + out


def _weights(kind: str, given: list[Tensor], index: Tensor, everywhere: bool, count: int, total: int) -> Tensor:
    """Weights [T, k]."""
    if kind == "choices":
        return given[0].reshape(index.shape)
    if kind == "tokens":
        return given[0].reshape(count, 1).expand(index.shape)
    by_expert = torch.stack([g.reshape(count) for g in given], 1) if kind == "apart" else given[0]
    by_expert = by_expert.reshape(total, count).t() if kind == "turned" else by_expert.reshape(count, total)
    return by_expert if everywhere else by_expert.gather(1, index)


def _stacked(module: Any, template: str) -> Tensor:
    if "{}" not in template:
        return _attribute(module, template)
    prefix, rest = template.split("{}", 1)
    holder = module.get_submodule(prefix.removesuffix("."))
    out: Tensor = torch.ops.autopar.stacked([_attribute(module, f"{prefix}{key}{rest}") for key in _keys(holder)])
    return out


def _attribute(module: Any, name: str) -> Any:
    return functools.reduce(getattr, name.split("."), module)


def substitute(
    kind: type, known: dict[Any, Record | str], dense: bool, otherwise: Callable[[Any, str], None]
) -> Callable[..., Any]:
    """A forward for ``kind`` in which experts are one op where that can be said.

    Args:
        dense: also where every token goes to every expert.
        otherwise: is called before the forward runs as it stands, with the module and why it does.
    """

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not hasattr(type(self), SINGLE):
            return type(self).forward(self, *args, **kwargs)
        record = _look_up(known, self, kind, args, kwargs)
        if isinstance(record, Record) and (dense or any(r.index is not None for r in record.layer.routed.values())):
            return replay(record, self, args, kwargs)
        otherwise(self, record if isinstance(record, str) else "every token goes to every expert")
        return type(self).forward(self, *args, **kwargs)

    return forward


def _look_up(known: dict[Any, Record | str], module: Any, kind: type, args: Any, kwargs: Any) -> Record | str:
    found = families_of(module)
    assert found is not None
    flat, spec = tree_flatten((args, kwargs))
    looks = tuple((tuple(map(int, x.shape)), x.dtype) if isinstance(x, Tensor) else repr(x) for x in flat)
    same = (kind, kind_of(module), tuple(numbers(module).items()), watching(module))
    key = (*same, str(spec), looks, torch.is_grad_enabled())
    if key not in known:
        known[key] = understood(module, kind, found, args, kwargs)
    return known[key]
