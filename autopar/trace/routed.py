"""From what a layer was seen to compute to its routing, one op for its experts, and what it does with their result."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, fx

from autopar.ir.grouped import Body
from autopar.ir.program import Spec
from autopar.rules.experts import keeps_rows
from autopar.trace.expert_body import Step, body_of
from autopar.trace.questions import behind
from autopar.trace.record import Unrecognized
from autopar.trace.selections import CASTS, VIEWS, Casts, by_mask, dtype_of, leading, selected, selectors
from autopar.trace.terms import DYNAMIC, Reader, Segment, Terms, Weight
from autopar.trace.witness import aten, chosen

ROWS = (3, 5)


@dataclass(frozen=True)
class Weighing:
    """A factor of the weights [T, k], as a value and how its elements lie.

    ``kind``: "choices" [T, k], "experts" [T, E], "turned" [E, T], "tokens" [T], or "apart": [T] for each expert.
    ``casts``: the dtypes that it is cast to, one after the other.
    """

    kind: str
    nodes: tuple[fx.Node, ...]
    casts: Casts


@dataclass(frozen=True)
class Routed:
    """One op for the experts: T tokens, k choices of each.

    Args:
        out: the value that it gives, [.., O] with T rows. base: what is added to that.
        hidden: [.., H] with T rows. index: T·k choices; None where every token goes to every expert.
        params: templates of the parameters' names, in the order of the body.
    """

    out: fx.Node
    base: fx.Node | None
    hidden: fx.Node
    index: fx.Node | None
    choices: int
    weights: tuple[Weighing, ...]
    params: tuple[str, ...]
    body: Body

    @property
    def reads(self) -> Iterator[fx.Node]:
        """The values that it needs."""
        yield from (n for n in (self.base, self.hidden, self.index) if n is not None)
        yield from (n for w in self.weights for n in w.nodes)


@dataclass
class Chain:
    """What an expert was seen to compute: its number, its rows of ``hidden``, what chose these, and the steps."""

    expert: int
    hidden: fx.Node
    tokens: Tensor
    selected_by: frozenset[fx.Node]
    steps: tuple[Step, ...]
    width: int
    dtype: torch.dtype


@dataclass
class Layer:
    """A recorded call of a layer.

    Args:
        nodes: everything that it computed, in order.
        outputs: what is kept of that.
        families: templates of experts' parameters: names with ``{}`` for the number of the expert, or of stacked ones.
        experts: how many there are.
        asked: values that Python looked at.
    """

    nodes: list[fx.Node]
    outputs: list[fx.Node]
    families: Mapping[str, Spec]
    experts: int
    asked: list[fx.Node] = field(default_factory=list)
    read: Reader = field(default_factory=Reader)
    routed: dict[fx.Node, Routed] = field(default_factory=dict)
    needed: set[fx.Node] = field(default_factory=set)
    owners: dict[fx.Node, set[int]] = field(default_factory=dict)  # of each op: the experts that have tokens

    def __post_init__(self) -> None:
        self.dynamic: set[fx.Node] = set()
        for node in self.nodes:
            if _by_size(node) or any(n in self.dynamic for n in node.all_input_nodes) or by_mask(node):
                self.dynamic.add(node)

    def understand(self) -> None:
        """Find the experts' ops that the outputs need. Raises Unrecognized where values depend on values in others."""
        todo = list(self.outputs)
        while todo:
            node = todo.pop()
            if node in self.needed:
                continue
            self.needed.add(node)
            found = self._routed(node) if node.meta["expert"] else None
            if found is not None:
                self.routed[node] = found
                todo += found.reads
                continue
            if _by_size(node) or by_mask(node) or (node.op == "placeholder" and node.meta["expert"]):
                raise Unrecognized("what is computed of experts is no sum over choices of tokens")
            todo += node.all_input_nodes

    def text(self) -> str:
        """What is left, said by a hash: equal for layers that compute the same."""
        known = digests(self.nodes, self.needed, self.routed)
        return " ".join(known[n] for n in self.outputs)

    @property
    def hit(self) -> set[int]:
        """The experts that every op has tokens for."""
        return set.intersection(*(self.owners[n] for n in self.routed))

    def _routed(self, node: fx.Node) -> Routed | None:
        terms = self.read.terms(node)
        if terms is None or not terms.segments or node.meta["val"].ndim < 2:
            return None
        casts = {s.casts for s in terms.segments}
        chains = {s.source: self._chain(s.source, s.casts) for s in terms.segments}
        if len(casts) != 1 or any(c is None for c in chains.values()):
            return None
        return self._op(node, terms, {s: c for s, c in chains.items() if c is not None})

    def _op(self, node: fx.Node, terms: Terms, chains: Mapping[fx.Node, Chain]) -> Routed | None:
        alike = {(c.steps, c.width, c.dtype) for c in chains.values()}
        hidden = {c.hidden for c in chains.values()}
        base = self._base(terms)
        if len(alike) != 1 or len(hidden) != 1 or base is False:
            return None
        source, count = hidden.pop(), terms.count
        segments = [s for s in terms.segments if len(s.rows)]
        if count == 0 or not segments or torch.Size(leading(source)).numel() != count:
            return None
        rows = torch.cat([s.rows for s in segments])
        tokens = torch.cat([chains[s.source].tokens[s.at] for s in segments])
        owners = torch.cat([torch.full((len(s.rows),), chains[s.source].expert) for s in segments])
        each = torch.bincount(rows, minlength=count)
        k = int(each[0])
        if not torch.equal(rows, tokens) or bool((each != k).any()) or source in self.dynamic:
            return None
        index = self._index({n for c in chains.values() for n in c.selected_by}, rows, owners, count, k)
        if index is None and k != self.experts:
            return None
        weights = self._weights(segments, chains, rows, owners, index, count, k)
        steps, _, dtype = alike.pop()
        if weights is None:
            return None
        self.owners[node] = set(owners.tolist())
        params, body = self._body(steps, source)
        base = base if isinstance(base, fx.Node) else None
        return Routed(node, base, source, index, k, weights, params, body)

    def _base(self, terms: Terms) -> fx.Node | None | bool:
        """What is added to all rows; None where nothing is, False where it is something else than a whole value."""
        if terms.carried is None or not bool((terms.carried >= 0).any()):
            return None
        whole = terms.base is not None and torch.equal(terms.carried, torch.arange(terms.count))
        return terms.base if whole and terms.base not in self.dynamic else False

    def _index(self, by: set[fx.Node], rows: Tensor, owners: Tensor, count: int, k: int) -> fx.Node | None:
        """The integers, k for each row, that say which experts it goes to.

        The last choice behind the rows' selection, or else the last value there, that has these numbers.
        """
        order = torch.argsort(rows * self.experts + owners)
        want = owners[order].view(count, k)
        if k > 1 and bool((want[:, 1:] == want[:, :-1]).any()):
            return None
        candidates = behind([*by, *self.asked])
        last = reversed([n for n in self.nodes if n in candidates])
        for node in sorted(last, key=lambda n: "choice" not in n.meta):
            value = node.meta.get("number")
            if value is None or value.dtype != torch.long or value.numel() != count * k or node in self.dynamic:
                continue
            if not node.meta["expert"] and torch.equal(value.reshape(count, k).sort(1).values, want):
                return node
        return None

    def _weights(
        self,
        segments: list[Segment],
        chains: Mapping[fx.Node, Chain],
        rows: Tensor,
        owners: Tensor,
        index: fx.Node | None,
        count: int,
        k: int,
    ) -> tuple[Weighing, ...] | None:
        """Every factor of the weights; None where one is not understood."""
        if len({len(s.weights) for s in segments}) != 1:
            return None
        slots = owners if index is None else self._slots(rows, owners, index, count, k)
        found = []
        for level in range(len(segments[0].weights)):
            parts = [(s.weights[level], chains[s.source].expert) for s in segments]
            made = self._weighing(parts, rows, owners, slots, count, k)
            if made is None or any(n in self.dynamic for n in made.nodes):
                return None
            found.append(made)
        return tuple(found)

    def _slots(self, rows: Tensor, owners: Tensor, index: fx.Node, count: int, k: int) -> Tensor:
        """Which of a row's choices each term is."""
        chosen_ = index.meta["number"].reshape(count, k)
        return (chosen_[rows] == owners[:, None]).int().argmax(1)

    def _weighing(
        self, parts: list[tuple[Weight, int]], rows: Tensor, owners: Tensor, slots: Tensor, count: int, k: int
    ) -> Weighing | None:
        nodes, places = [w for (w, _, _), _ in parts], torch.cat([p for (_, p, _), _ in parts])
        size, (casts, *others) = nodes[0].meta["val"].numel(), {c for (_, _, c), _ in parts}
        if others:
            return None
        if len(set(nodes)) == 1:
            ways = {
                "choices": (count * k, rows * k + slots),
                "experts": (count * self.experts, rows * self.experts + owners),
                "turned": (count * self.experts, owners * count + rows),
                "tokens": (count, rows),
            }
            for kind, (many, at) in ways.items():
                if size == many and torch.equal(places, at):
                    return Weighing(kind, (nodes[0],), casts)
            return None
        own = {expert: node for (node, _, _), expert in parts}
        same = len(own) == self.experts and all(n.meta["val"].numel() == count for n in nodes)
        if same and all(own[e] is n for (n, _, _), e in parts) and torch.equal(places, rows):
            return Weighing("apart", tuple(own[e] for e in range(self.experts)), casts)
        return None

    def _chain(self, y: fx.Node, casts: Casts) -> Chain | None:
        """What the expert computes that ends in ``y``, cast: of rows of one value, with its own parameters."""
        if len(y.meta["expert"]) != 1 or -1 in y.meta["expert"]:
            return None
        (expert,) = y.meta["expert"]
        inside, leaves, todo = {y}, dict[fx.Node, str](), [y]
        while todo:
            for n in todo.pop().all_input_nodes:
                if n in inside or n in leaves:
                    continue
                template = self._template(n)
                if template is not None:
                    leaves[n] = template
                elif not n.meta["expert"] and self._is_selection(n):
                    leaves[n] = ""
                else:
                    inside.add(n)
                    todo.append(n)
        inputs = [n for n, name in leaves.items() if not name]
        if len(inputs) != 1 or y.meta["val"].ndim < 2:
            return None
        hidden, tokens, before = selected(inputs[0])
        if torch.Size(leading(y)).numel() != len(tokens):
            return None
        steps = self._steps([n for n in self.nodes if n in inside], leaves, before, casts)
        dtype = casts[-1] if casts else dtype_of(y)
        by = selectors(inputs[0], hidden)
        return Chain(expert, hidden, tokens, by, steps, int(y.meta["val"].shape[-1]), dtype) if steps else None

    def _is_selection(self, node: fx.Node) -> bool:
        """Whether a value is taken from one that does not depend on choices: not computed of rows so taken."""
        return isinstance(node.meta["val"], Tensor) and selected(node)[0] not in self.dynamic

    def _template(self, node: fx.Node) -> str | None:
        """The family of an expert's own parameter."""
        name = node.meta.get("family")
        if name is not None and -1 not in node.meta["expert"]:
            return str(name)
        source = node.args[0] if node.args else None
        one = chosen(source, node.target, node.args)
        return str(source.meta["family"]) if one is not None and isinstance(source, fx.Node) else None

    def _steps(
        self,
        nodes: list[fx.Node],
        leaves: Mapping[fx.Node, str],
        before: Casts,
        after: Casts,
    ) -> tuple[Step, ...]:
        """The ops as steps on rows [n, H], cast ``before``, and parameters, said by their templates; cast ``after``."""
        made: list[Step] = [(CASTS[0], (("%", i),), (("dtype", dtype),)) for i, dtype in enumerate(before)]
        at: dict[fx.Node, Any] = {n: ("$", name) if name else ("%", len(made)) for n, name in leaves.items()}
        for node in nodes:
            views = node.target in VIEWS and len(node.meta["val"].shape) > 1
            if views and _flat(node):
                at[node] = at[node.args[0]]  # type: ignore[index]
                continue
            args, kwargs = _mapped((node.args, tuple(node.kwargs.items())), lambda n: at[n])
            made.append((node.target, args, kwargs))
            at[node] = ("%", len(made))
        made += [(CASTS[0], (("%", len(made) + i),), (("dtype", dtype),)) for i, dtype in enumerate(after)]
        return tuple(made)

    def _body(self, steps: tuple[Step, ...], hidden: fx.Node) -> tuple[tuple[str, ...], Body]:
        used = {name for _, args, kwargs in steps for name in _names((args, kwargs))}
        params = tuple(name for name in self.families if name in used)
        shift = {name: ("%", 1 + i) for i, name in enumerate(params)}

        def renamed(value: Any) -> Any:
            if isinstance(value, tuple) and len(value) == 2 and value[0] in ("$", "%"):
                if value[0] == "$":
                    return shift[value[1]]
                return value if value[1] == 0 else ("%", value[1] + len(params))
            return tuple(map(renamed, value)) if isinstance(value, tuple) else value

        final = [(target, renamed(args), tuple((k, renamed(v)) for k, v in kwargs)) for target, args, kwargs in steps]
        specs = {n: self.families[n] for n in params}
        val, bodies = hidden.meta["val"], set()
        for rows in ROWS:
            x = Spec((rows, int(val.shape[-1])), val.dtype)
            body = body_of(final, x, specs)
            if not keeps_rows(body, x, tuple(specs.values())):
                raise Unrecognized("an expert mixes its rows")
            bodies.add(body)
        if len(bodies) != 1:
            raise Unrecognized("an expert that depends on the number of its rows")
        return params, bodies.pop()


def digests(nodes: list[fx.Node], needed: set[fx.Node], routed: Mapping[fx.Node, Routed]) -> dict[fx.Node, str]:
    """Hashes of those nodes that are ``needed``, equal for what is computed alike."""
    known: dict[fx.Node, str] = {}
    for node in nodes:
        if node not in needed:
            continue
        if node in routed:
            r = routed[node]
            index = None if r.index is None else known[r.index]
            weights = [(w.kind, [known[n] for n in w.nodes], w.casts) for w in r.weights]
            base = None if r.base is None else known[r.base]
            parts = repr((known[r.hidden], index, r.choices, weights, base, r.params, r.body))
        elif node.op == "placeholder":
            value = node.meta.get("constant")
            parts = node.meta["name"] if value is None else repr((value.dtype, value.tolist()))
        else:
            parts = repr((str(node.target), *_mapped((node.args, dict(node.kwargs)), lambda n: _Named(known[n]))))
        known[node] = sha256(parts.encode()).hexdigest()
    return known


@dataclass(frozen=True)
class _Named:
    """A value in a text, by its hash."""

    hash: str


def _mapped(value: Any, make: Callable[[fx.Node], Any]) -> Any:
    """Nested arguments as tuples, with ``make`` of the nodes in them."""
    if isinstance(value, fx.Node):
        return make(value)
    if isinstance(value, dict):
        return tuple((k, _mapped(v, make)) for k, v in value.items())
    return tuple(_mapped(v, make) for v in value) if isinstance(value, (list, tuple)) else value


def _names(value: Any) -> Iterator[str]:
    if isinstance(value, tuple):
        if len(value) == 2 and value[0] == "$":
            yield value[1]
        else:
            for v in value:
                yield from _names(v)


def _flat(node: fx.Node) -> bool:
    """Whether a view moves leading dims only, which are rows."""
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape  # type: ignore[union-attr]
    return bool(before[-1:] == after[-1:]) and before.numel() == after.numel()


def _by_size(node: fx.Node) -> bool:
    """Whether the size of a result depends on values; that of a ``bincount`` does not where its length is given."""
    if node.target is aten.bincount.default and len(node.args) > 2:
        return bool(node.meta["val"].numel() != node.args[2])
    return node.target in DYNAMIC
