"""What a layer computes for choices that we make: routing has real numbers, everything as wide as a token has none.

Scores of experts are numbers of ours, so that Python's control flow, and whatever it asks of indices, masks and counts,
runs as it does for real. Tokens, weights and results of experts lie on the meta device and cost nothing. Unlike
``trace.record`` every op is kept, the routing included, which becomes part of the traced graph.
"""

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy
import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from autopar.trace.questions import CHOSEN, MADE_UP, PLAIN, Choice, choice_of
from autopar.trace.record import Unrecognized

aten = torch.ops.aten
FILLED = {  # ops that make a tensor of one number: the place of the number among the arguments, or the number
    aten.zeros.default: 0, aten.zeros_like.default: 0, aten.new_zeros.default: 0, aten.ones.default: 1,
    aten.ones_like.default: 1, aten.new_ones.default: 1, aten.empty.memory_format: 0, aten.empty_like.default: 0,
    aten.new_empty.default: 0,
}  # fmt: skip
GIVEN = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
ZEROS = (aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default)
UNSET = (aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default)
VIEWS = {aten.select.int: aten.select_scatter.default, aten.slice.Tensor: aten.slice_scatter.default}
PRODUCTS = (aten.mm.default, aten.addmm.default)
FAVOUR = (8.0, 6.0)  # what the experts score that a token shall choose; others score less
STEP = 4.0  # by how much an expert scores above the next one where all tokens rank them alike
COUNTED = {aten.index.Tensor: 1, aten.masked_select.default: 1}  # which argument says how large the result is; else 0


@dataclass(frozen=True)
class Scores:
    """What experts score in a record.

    ``kind``: "spread": of token t the expert ``(t + first) % experts`` scores highest, then the next one; "alike": all
    tokens rank the experts ``first``, ``first + 1``, ...; "biased": spread, and vectors of that length rank them so;
    "without": spread over all experts but ``first``, which scores lowest.
    """

    first: int = 0
    kind: Literal["spread", "alike", "biased", "without"] = "spread"


class Witness(TorchDispatchMode):
    """Records every op as a functional graph.

    Nodes have ``meta``: ``val``, what the op returned; ``level``, what its numbers follow from; ``number``, its value
    where that is nothing but choices of experts; ``choice``, where it is one; ``expert``, numbers of the experts whose
    parameters it depends on (-1: of some); ``grad``, whether gradients were on; ``name`` of what was given by
    ``track``. ``asked`` are values that Python looked at, with their numbers.

    Args:
        experts: how many there are; floats as wide as that get numbers.
        like: what these are.
    """

    def __init__(self, experts: int, like: Scores) -> None:
        super().__init__()
        self.experts, self.like = experts, like
        self.asked: list[tuple[fx.Node, tuple[Any, ...]]] = []
        self.random = torch.Generator().manual_seed(like.first)
        self.graph = fx.Graph()
        self.nodes: dict[int, fx.Node] = {}
        self.views: dict[int, tuple[Tensor, Any, tuple[Any, ...]]] = {}
        self.shared: dict[int, set[int]] = {}  # storage: tensors in it
        self.stale: set[int] = set()
        self.void: set[int] = set()  # real tensors whose numbers mean nothing
        self.outside: set[int] = set()  # storages of tensors that were there before
        self.kept: list[Tensor] = []

    def track(
        self, x: Tensor, name: str, expert: frozenset[int] = frozenset(), choice: Choice | None = None
    ) -> fx.Node:
        """Make ``x`` an input of the graph; its numbers are made up, unless it is a choice of experts."""
        node = self.graph.placeholder(f"in_{len(self.kept)}")
        node.meta.update(name=name, expert=expert, grad=True, level=MADE_UP)
        node.meta.update({"choice": choice, "level": CHOSEN} if choice else {})
        self._follow(x, node)
        return node

    def node_of(self, x: Tensor) -> fx.Node:
        """The node of a tensor; one that was not seen before is a constant of the graph."""
        if id(x) in self.stale:
            raise Unrecognized("a view of memory that was written to")
        if id(x) not in self.nodes:
            if x.is_meta or type(x) is not Tensor:
                raise Unrecognized("a tensor whose origin was not seen")
            node = self.graph.placeholder(f"constant_{len(self.kept)}")
            node.meta.update(constant=x.clone(), expert=frozenset(), grad=True, level=PLAIN)
            self._follow(x, node)
            self.outside.add(x.untyped_storage()._cdata)
        return self.nodes[id(x)]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if func is aten._local_scalar_dense.default:
            self.look(read[0])
            return func(read[0])
        given = tree_map_only(Tensor, self.node_of, (args, kwargs))
        self._sized(func, args)
        if func is aten.lift_fresh.default:
            self.outside.discard(read[0].untyped_storage()._cdata)
        expert = frozenset[int]().union(*(self.node_of(t).meta["expert"] for t in read))
        if -1 in expert and (one := chosen(given[0][0], func, given[0])) is not None:
            expert = frozenset({one})
        if func._schema.is_mutable:
            return self._write(func, args, kwargs, given, expert)
        ran = self._run(func, args, kwargs)
        out = self._valued(func, ran, expert)
        if func is aten.detach.default and (given[0][0].target in FILLED or given[0][0].target in GIVEN):
            self._follow(out, given[0][0])  # how a factory's own kernel ends
            return out
        node = self._add(func, given, expert)
        if out is not ran:
            node.meta["level"] = MADE_UP
        if torch.Tag.data_dependent_output in func.tags:
            self._ask(node, (out,))
        if isinstance(out, Tensor):
            self._follow(out, node)
            if func in VIEWS:
                self.views[id(out)] = (args[0], VIEWS[func], tuple(args[1:]))
            return out
        node.meta["val"] = out
        for i, part in enumerate(out if isinstance(out, (tuple, list)) else ()):
            if isinstance(part, Tensor):
                self._follow(part, self._add(operator.getitem, ((node, i), {}), expert))
        return out

    def look(self, x: Tensor) -> Any:
        """All numbers of a tensor, nested as it is, for which Python asks."""
        node = self.node_of(x)
        if x.is_meta or id(x) in self.void:
            raise Unrecognized("Python asks for a number that depends on what experts compute")
        with torch._C.DisableTorchFunction():
            numbers = x.tolist()
        self._ask(node, tuple(tree_leaves(numbers)))
        return numbers

    def _ask(self, node: fx.Node, answers: tuple[Any, ...]) -> None:
        if node.meta["level"] == MADE_UP:
            raise Unrecognized("Python asks for a number that follows from more than which experts are chosen")
        if node.meta["level"] == CHOSEN:
            self.asked.append((node, answers))

    def _sized(self, func: Any, args: tuple[Any, ...]) -> None:
        """Raises Unrecognized where the size of a result follows from more than which experts are chosen."""
        if torch.Tag.dynamic_output_shape not in func.tags:
            return
        for x in tree_leaves(args[COUNTED.get(func, 0)]):
            static = func is aten.index.Tensor and isinstance(x, Tensor) and x.dtype not in (torch.bool, torch.uint8)
            if isinstance(x, Tensor) and not static and ("number" not in self.node_of(x).meta):
                raise Unrecognized("how many rows there are follows from more than which experts are chosen")

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """The op's result: real where all that it reads is, or where it is a small tensor of one number."""
        args, kwargs = tree_map_only(Tensor, lambda t: t.to("meta") if id(t) in self.void else t, (args, dict(kwargs)))
        read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        makes = not read or func in FILLED or func in GIVEN
        if "device" in kwargs and not makes and not any(t.is_meta for t in read):
            kwargs = {**kwargs, "device": None}
        if makes and (kwargs.get("device") is not None or any(t.is_meta for t in read)):
            return self._made(func, args, dict(kwargs))
        try:
            return func(*args, **kwargs)
        except RuntimeError:
            moved_args, moved_kwargs = tree_map_only(Tensor, lambda t: t.to("meta"), (args, kwargs))
            return func(*moved_args, **moved_kwargs)

    def _made(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out = func(*args, **{**kwargs, "device": "meta"})
        if not isinstance(out, Tensor) or (out.is_floating_point() and out.ndim > 1 and out.shape[-1] != self.experts):
            return out
        if func in FILLED:
            return torch.full(out.shape, FILLED[func], dtype=out.dtype)
        if func in GIVEN:
            return torch.full(out.shape, args[GIVEN[func]], dtype=out.dtype)
        return func(*args, **{**kwargs, "device": "cpu"})

    def _valued(self, func: Any, out: Any, expert: frozenset[int]) -> Any:
        """Scores of experts get numbers: values as wide as there are experts, and products as high."""
        if not isinstance(out, Tensor) or expert or not out.is_meta or not out.is_floating_point():
            return out
        if out.ndim and out.shape[-1] == self.experts:
            return self.scores(out)
        turned = func in PRODUCTS and out.ndim == 2 and out.shape[0] == self.experts
        return self.scores(out.t()).t() if turned else out

    def scores(self, like: Tensor) -> Tensor:
        """Numbers for scores [..., experts]."""
        rows = like.numel() // self.experts
        out = torch.randn(rows, self.experts, generator=self.random).clamp(max=FAVOUR[-1] - 1)
        if self.like.kind == "alike":
            out = out * 0.01 + self._ranks(self.like.first)
        else:
            left_out = int(self.like.kind == "without")
            for i, more in enumerate(FAVOUR[: self.experts]):
                at = left_out + (torch.arange(rows) + i) % (self.experts - left_out)
                out[torch.arange(rows), (at + self.like.first) % self.experts] = more
            if left_out:
                out[:, self.like.first] = -FAVOUR[0]
        return out.to(like.dtype).view(like.shape)

    def _ranks(self, first: int) -> Tensor:
        """Scores [experts] by which ``first`` is best, then the next one."""
        return FAVOUR[0] - STEP * ((torch.arange(self.experts) - first) % self.experts)

    def stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Numbers of a small parameter or buffer."""
        if not dtype.is_floating_point:
            return torch.zeros(shape, dtype=dtype)
        if shape == (self.experts,) and self.like.kind == "biased":
            return (10 * self._ranks(self.like.first + self.experts // 2)).to(dtype)
        some = torch.rand(shape, generator=self.random)
        return (1 + 0.01 * some if shape == (self.experts,) else some).to(dtype)

    def _add(self, func: Any, given: Any, expert: frozenset[int]) -> fx.Node:
        node = self.graph.call_function(func, *given)
        node.meta.update(expert=expert, grad=torch.is_grad_enabled(), level=_level(func, node))
        choice = choice_of(func, *given) if node.meta["level"] == MADE_UP else None
        node.meta.update({"choice": choice, "level": CHOSEN} if choice else {})
        return node

    def _write(self, func: Any, args: Any, kwargs: Any, given: Any, expert: frozenset[int]) -> Any:
        """An op in place as its functional form; other views of the memory may not be read any more."""
        target = args[0]
        name = func._schema.name.split("::")[1]
        twin = getattr(getattr(aten, name.removesuffix("_"), None), func._overloadname, None)
        if twin is None or not name.endswith("_") or not isinstance(target, Tensor):
            raise Unrecognized(f"{func} has no functional form here")
        self.node_of(target)
        if target.untyped_storage()._cdata in self.outside:
            raise Unrecognized("a tensor is written to that is no buffer")
        for other in self.shared.get(target.untyped_storage()._cdata, ()):
            meta = self.nodes[other].meta
            meta.update({"number": meta["number"].clone()} if "number" in meta else {})
        real = not target.is_meta and not any(t.is_meta or id(t) in self.void for t in tree_leaves((args, kwargs))
                                              if isinstance(t, Tensor))  # fmt: skip
        if real:
            func(*args, **kwargs)
        elif not target.is_meta:
            self.void.add(id(target))
        self._replace(target, self._add(twin, given, expert))
        return target

    def _replace(self, target: Tensor, node: fx.Node) -> None:
        """From now on ``target`` is ``node``; so is what of its base it shows."""
        self._set(target, node)
        alive = {id(target)}
        base = self.views.get(id(target))
        while base is not None:
            x, scatter, where = base
            node = self._add(scatter, ((self.nodes[id(x)], node, *where), {}), node.meta["expert"])
            if id(target) in self.void and not x.is_meta:
                self.void.add(id(x))
            self._set(x, node)
            alive.add(id(x))
            target, base = x, self.views.get(id(x))
        self.stale |= self.shared[target.untyped_storage()._cdata] - alive

    def _set(self, x: Tensor, node: fx.Node) -> None:
        node.meta["val"] = x
        if not x.is_meta and id(x) not in self.void and node.meta["level"] != MADE_UP:
            node.meta["number"] = x
        self.nodes[id(x)] = node

    def _follow(self, x: Tensor, node: fx.Node) -> None:
        self.kept.append(x)
        self._set(x, node)
        self.shared.setdefault(x.untyped_storage()._cdata, set()).add(id(x))


def _level(func: Any, node: fx.Node) -> int:
    """What an op's numbers follow from."""
    if func in FILLED or func in GIVEN:
        return PLAIN
    if torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()):
        return MADE_UP
    return max((n.meta["level"] for n in node.all_input_nodes), default=PLAIN)


class Listing(TorchFunctionMode):
    """While it is on, the witness sees Python look at whole tensors, which are no ops."""

    def __init__(self, witness: Witness) -> None:
        super().__init__()
        self.witness = witness

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at one call."""
        if func is Tensor.tolist:
            return self.witness.look(args[0])
        if func in (Tensor.numpy, Tensor.__array__):
            return numpy.array(self.witness.look(args[0]), dtype=str(args[0].dtype).removeprefix("torch."))
        return func(*args, **(kwargs or {}))


def chosen(source: Any, target: Any, args: Any) -> int | None:
    """The one expert whose parameter is taken from a stacked input; None where something else is done."""
    if not isinstance(source, fx.Node) or "name" not in source.meta or -1 not in source.meta["expert"]:
        return None
    found: Any = None
    if target is aten.select.int and args[1] == 0:
        found = args[2]
    elif target is aten.index.Tensor and len(args[1]) == 1 and args[1][0] is not None:
        found = args[1][0].meta.get("number")
        found = found if found is not None and found.numel() == 1 and found.ndim == 0 else None
    return None if found is None else int(found) % source.meta["val"].shape[0]
