"""Relations of ops whose dims depend on their arguments."""

from collections.abc import Callable, Iterable

from torch import fx, ops

from autopar.ir.program import Spec, specs, tensor_args
from autopar.rules.arguments import arguments, normal_dims, shape_of
from autopar.rules.notation import labels
from autopar.rules.relation import Cut, Dims, Labels, Relation, Reshape, Segments

Builder = Callable[[fx.Node], Relation]
LabelBuilder = Callable[[fx.Node], Labels]


def input_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Global shapes of the tensor inputs."""
    return [a.meta["spec"].shape for a in tensor_args(node)]


def output_shapes(node: fx.Node) -> list[tuple[int, ...]]:
    """Global shapes of the outputs."""
    return [s.shape for s in specs(node) if isinstance(s, Spec)]


def numbered(rank: int) -> list[str | None]:
    """Labels d0, d1, ... of a tensor of ``rank`` dims."""
    return [f"d{i}" for i in range(rank)]


def rule(text: str, *linear: Iterable[int]) -> Builder:
    """A line of factor notation; ``linear`` are the sets of inputs in which the op is linear."""
    sets = tuple(frozenset(s) for s in linear)
    return lambda node: labels(text, input_shapes(node), output_shapes(node), sets)


def pointwise(*linear: Iterable[int]) -> LabelBuilder:
    """Element by element, with broadcasting. A set of ``linear`` inputs counts only where all of them are tensors."""
    sets = tuple(frozenset(s) for s in linear)

    def build(node: fx.Node) -> Labels:
        ins, outs = input_shapes(node), output_shapes(node)
        rank = max((len(s) for s in (*ins, *outs)), default=0)

        def bind(shape: tuple[int, ...]) -> Dims:
            return tuple(f"d{rank - len(shape) + i}" if n != 1 else None for i, n in enumerate(shape))

        ports = {i: port for port, i in enumerate(i for i, a in enumerate(node.args) if isinstance(a, fx.Node))}
        whole = tuple(frozenset(ports[i] for i in s) for s in sets if all(i in ports for i in s))
        return Labels(tuple(map(bind, ins)), tuple(map(bind, outs)), linear=whole)

    return build


def cast(node: fx.Node) -> Labels:
    """A change of dtype: linear unless it rounds to integers."""
    spec = node.meta["spec"]
    return pointwise({0})(node) if spec.is_float else pointwise()(node)


def reduction(summing: bool) -> Builder:
    """Over ``dim``: a sum (or a mean) leaves a partial result where a reduced dim is sharded; others are blocked."""

    def build(node: fx.Node) -> Labels:
        known = arguments(node)
        shape = shape_of(node.args[0])
        dims = normal_dims(known.get("dim"), len(shape))
        names: list[str | None] = [f"d{i}" if n != 1 else None for i, n in enumerate(shape)]
        keep = bool(known.get("keepdim", False))
        kept = [None if i in dims else n for i, n in enumerate(names) if keep or i not in dims]
        blocked = frozenset() if summing else frozenset(f"d{i}" for i in dims)
        linear = (frozenset({0}),) if summing else ()
        return Labels((tuple(names),), (tuple(kept),) * len(output_shapes(node)), blocked, linear=linear)

    return build


def along(name: str = "dim", *, linear: bool = False, last: int = 0) -> Builder:
    """An op that runs along ``dim``, or the ``last`` n dims: any other dim may be sharded."""

    def build(node: fx.Node) -> Labels:
        ins, outs = input_shapes(node), output_shapes(node)
        rank = len(ins[0])
        dims = range(rank - last, rank) if last else normal_dims(arguments(node)[name], rank)
        blocked = frozenset(f"d{d}" for d in dims)
        names = tuple(numbered(rank))
        aligned = [
            tuple(n if s[i] == ins[0][i] else f"own{k}{i}" for i, n in enumerate(names)) for k, s in enumerate(ins[1:])
        ]
        alone = frozenset(n for a in aligned for n in a if n and n.startswith("own"))
        results = [tuple(n if s[i] == ins[0][i] else n for i, n in enumerate(names)) for s in outs]
        sets = (frozenset({0}),) if linear and len(ins) == 1 else ()
        return Labels((names, *aligned), tuple(results), blocked | alone, linear=sets)

    return build


def window(node: fx.Node) -> Labels:
    """slice, pad, roll, flip: dims whose size or order changes are blocked, the others pass."""
    source, target = input_shapes(node)[0], output_shapes(node)[0]
    known = arguments(node)
    dims = set(normal_dims(known["dim"], len(source))) if "dim" in known else set()
    dims |= set(normal_dims(known["dims"], len(source))) if "dims" in known else set()
    dims |= {len(source) - 1 - i // 2 for i, n in enumerate(known.get("pad", ())) if n}
    moved = {f"d{i}" for i, (a, b) in enumerate(zip(source, target)) if a != b or i in dims}
    names = tuple(numbered(len(source)))
    return Labels((names,), (names,), frozenset(moved), linear=(frozenset({0}),) if "value" not in known else ())


def cut(node: fx.Node) -> Cut | Labels:
    """slice with step 1: shards of the sliced dim lose what lies outside; with another step it is blocked."""
    known, others = arguments(node), window(node)
    source, target = input_shapes(node)[0], output_shapes(node)[0]
    if known["step"] != 1:
        return others
    dim = normal_dims(known["dim"], len(source))[0]
    start = known["start"] or 0
    start = min(max(start + source[dim] if start < 0 else start, 0), source[dim])
    return Cut(start, start + target[dim], dim, others)


def spatial(count: int) -> Builder:
    """Pooling, resampling: the last ``count`` dims are blocked in the input and the outputs, the others pass."""

    def build(node: fx.Node) -> Labels:
        ins, outs = input_shapes(node)[:1], output_shapes(node)
        ahead = tuple(numbered(len(ins[0]) - count))
        before, after = (tuple(f"{kind}{i}" for i in range(count)) for kind in "xy")
        linear = () if len(outs) > 1 else (frozenset({0}),)
        return Labels(
            ((*ahead, *before),), ((*ahead, *after),) * len(outs), frozenset({*before, *after}), linear=linear
        )

    return build


def transform(node: fx.Node) -> Labels:
    """Fourier transforms: the transformed dims are blocked."""
    rank = len(input_shapes(node)[0])
    names = tuple(numbered(rank))
    blocked = frozenset(f"d{d}" for d in normal_dims(arguments(node)["dim"], rank))
    return Labels((names,), (names,), blocked, linear=(frozenset({0}),))


def unfold(node: fx.Node) -> Labels:
    """Windows of one dim; their entries are a new last dim."""
    rank = len(input_shapes(node)[0])
    names = tuple(numbered(rank))
    blocked = {f"d{d}" for d in normal_dims(arguments(node)["dimension"], rank)} | {"new"}
    return Labels((names,), ((*names, "new"),), frozenset(blocked), linear=(frozenset({0}),))


def diagonal(node: fx.Node) -> Labels:
    """Two dims become their diagonal, the last dim of the result."""
    rank = len(input_shapes(node)[0])
    known = arguments(node)
    taken = {known["dim1"] % rank, known["dim2"] % rank}
    names = tuple(numbered(rank))
    kept = tuple(n for i, n in enumerate(names) if i not in taken)
    blocked = {f"d{i}" for i in taken} | {"new"}
    return Labels((names,), ((*kept, "new"),), frozenset(blocked), linear=(frozenset({0}),))


def index_add(node: fx.Node) -> Labels:
    """index_add, index_copy: rows of ``dim`` by a 1-D index; the other dims agree. Of some rows the sum is a term."""
    rank, adds = len(input_shapes(node)[0]), node.target is ops.aten.index_add.default
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    names = tuple(numbered(rank))
    rows = tuple("own" if i == dim else n for i, n in enumerate(names))
    blocked, added = frozenset({f"d{dim}", *(() if adds else ("own",))}), frozenset({0} if adds else ())
    return Labels((names, ("own",), rows), (names,), blocked, added, (frozenset({0, 2}),))


def index_fill(node: fx.Node) -> Labels:
    """Rows of ``dim`` by a 1-D index, set to a number."""
    rank = len(input_shapes(node)[0])
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    names = tuple(numbered(rank))
    return Labels((names, ("own",)), (names,), frozenset({f"d{dim}", "own"}))


def select(node: fx.Node) -> Labels:
    """One index of ``dim``: where that is sharded, one rank has it and the others a zero."""
    rank = len(input_shapes(node)[0])
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    names = numbered(rank)
    kept = tuple(n for i, n in enumerate(names) if i != dim)
    blocked = frozenset() if node.meta["spec"].is_float else frozenset({f"d{dim}"})
    return Labels((tuple(names),), (kept,), blocked, linear=(frozenset({0}),))


def permuted(order: Callable[[fx.Node, int], list[int]]) -> Builder:
    """Dims in another order."""

    def build(node: fx.Node) -> Labels:
        rank = len(input_shapes(node)[0])
        names = numbered(rank)
        return Labels((tuple(names),), (tuple(names[d] for d in order(node, rank)),), linear=(frozenset({0}),))

    return build


def swap(node: fx.Node, rank: int) -> list[int]:
    """Order of ``transpose``."""
    order = list(range(rank))
    known = arguments(node)
    a, b = known["dim0"] % rank, known["dim1"] % rank
    order[a], order[b] = order[b], order[a]
    return order


def order(node: fx.Node, rank: int) -> list[int]:
    """Order of ``permute``."""
    return [d % rank for d in arguments(node)["dims"]]


def expand(node: fx.Node) -> Labels:
    """Dims of size 1 become longer; new dims come first."""
    source, target = input_shapes(node)[0], output_shapes(node)[0]
    ahead = len(target) - len(source)
    names = tuple(f"d{ahead + i}" if n != 1 else None for i, n in enumerate(source))
    out = tuple(f"d{i}" if n != 1 else None for i, n in enumerate(target))
    return Labels((names,), (out,), linear=(frozenset({0}),))


def creation(node: fx.Node) -> Labels:
    """A tensor of constants: any dim may be sharded; a tensor input only lends its dtype."""
    ins = tuple((None,) * len(s) for s in input_shapes(node))
    return Labels(ins, tuple(tuple(numbered(len(s))) for s in output_shapes(node)))


def reshape(node: fx.Node) -> Reshape:
    """view, reshape, unsqueeze, squeeze, flatten."""
    return Reshape(input_shapes(node)[0], output_shapes(node)[0])


def split(node: fx.Node) -> Segments:
    """split_with_sizes."""
    shape = input_shapes(node)[0]
    dim = normal_dims(arguments(node)["dim"], len(shape))[0]
    return Segments(tuple(s[dim] for s in output_shapes(node)), dim, True, len(shape))


def cat(node: fx.Node) -> Segments:
    """cat."""
    ins = input_shapes(node)
    dim = normal_dims(arguments(node)["dim"], len(ins[0]))[0]
    return Segments(tuple(s[dim] for s in ins), dim, False, len(ins[0]))


def stack(node: fx.Node) -> Labels:
    """A new dim of one entry for each input."""
    ins = input_shapes(node)
    names = numbered(len(ins[0]))
    dim = arguments(node)["dim"] % (len(names) + 1)
    out = (*names[:dim], "new", *names[dim:])
    return Labels((tuple(names),) * len(ins), (out,), frozenset({"new"}), linear=(frozenset(range(len(ins))),))


def matmul(node: fx.Node) -> Labels:
    """[.., m, k] @ [.., k, n], with broadcast leading dims and vectors."""
    a, b = input_shapes(node)
    left: list[str | None] = ["k"] if len(a) == 1 else ["m", "k"]
    right: list[str | None] = ["k"] if len(b) == 1 else ["k", "n"]
    rank = max(len(a), len(b))

    def lead(shape: tuple[int, ...], own: int) -> list[str | None]:
        return [f"d{rank - len(shape) + i}" if n != 1 else None for i, n in enumerate(shape[: len(shape) - own])]

    la, lb = lead(a, len(left)), lead(b, len(right))
    longest = la if len(la) >= len(lb) else lb
    merged = [x or y for x, y in zip([None] * (len(longest) - len(la)) + la, [None] * (len(longest) - len(lb)) + lb)]
    out = merged + [n for n in (*left, *right) if n != "k"]
    return Labels((tuple(la + left), tuple(lb + right)), (tuple(out),), linear=(frozenset({0}), frozenset({1})))


def addmm(node: fx.Node) -> Labels:
    """bias + a b; the bias is [o], [b o] or broadcasts."""
    bias = "+b o" if len(input_shapes(node)[0]) == 2 else "+o"
    return labels(
        f"{bias}, b i, i o -> b o", input_shapes(node), output_shapes(node), (frozenset({0, 1}), frozenset({0, 2}))
    )


def embedding(node: fx.Node) -> Relation:
    """Rows of a table; where gradients are scaled by how often a row is read, lookups must not be sharded."""
    text = "!v h, !t.. -> t.. h" if arguments(node)["scale_grad_by_freq"] else "v h, t.. -> t.. h"
    return rule(text, {0})(node)


def prelu(node: fx.Node) -> Labels:
    """x [n, c, ..] with one slope for all, or one for each c."""
    x, slope = input_shapes(node)
    names = tuple(numbered(len(x)))
    return Labels((names, tuple("d1" if n != 1 else None for n in slope)), (names,))


def normalized(node: fx.Node) -> Labels:
    """layer_norm, rms_norm: the normalized dims are blocked."""
    ins = input_shapes(node)
    over = len(arguments(node)["normalized_shape"])
    rank = len(ins[0])
    names = tuple(numbered(rank))
    tail = names[rank - over :]
    return Labels((names, *((tail,) * (len(ins) - 1))), (names,), frozenset(n for n in tail if n))


def gather(node: fx.Node) -> Labels:
    """One element of ``dim`` for each index: where that is sharded, a rank gives those that it has, others a zero."""
    (x, index), dim = input_shapes(node), normal_dims(arguments(node)["dim"], len(input_shapes(node)[0]))[0]
    names, chosen = numbered(len(x)), numbered(len(x))
    chosen[dim] = "chosen"
    bad = {f"d{i}" for i in range(len(x)) if i != dim and x[i] != index[i]}
    bad |= set() if node.meta["spec"].is_float else {f"d{dim}"}
    return Labels((tuple(names), tuple(chosen)), (tuple(chosen),), frozenset(bad), linear=(frozenset({0}),))


def scatter(node: fx.Node) -> Labels:
    """scatter: along ``dim`` blocked; the other dims must agree in all operands."""
    ins, out = input_shapes(node), output_shapes(node)[0]
    rank = len(ins[0])
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    bad = {f"d{i}" for i in range(rank) if i == dim or len({s[i] for s in (*ins, out)}) > 1}
    names = tuple(numbered(rank))
    return Labels((names,) * len(ins), (names,), frozenset(bad))


def index(node: fx.Node) -> Labels:
    """x[.., i, j, ..]: indexed dims are blocked; the indices' own dims, and dims not indexed, pass."""
    source, *chosen = input_shapes(node)
    places = [i for i, a in enumerate(arguments(node)["indices"]) if a is not None]
    width = max(len(s) for s in chosen)
    shared = [f"i{k}" for k in range(width)]
    binds = [tuple(shared[width - len(s) + k] if n != 1 else None for k, n in enumerate(s)) for s in chosen]
    bools = any(a.meta["spec"].dtype.itemsize == 1 for a in tensor_args(node)[1:])
    names = numbered(len(source))
    rest = [n for i, n in enumerate(names) if i not in places]
    together = places == list(range(places[0], places[-1] + 1))
    before = places[0] if together else 0
    out = tuple(rest[:before] + list(shared) + rest[before:])
    blocked = frozenset([f"d{i}" for i in places] + ([n for n in (*names, *shared) if n] if bools else []))
    return Labels((tuple(names), *binds), (out,), blocked)


def index_put(node: fx.Node) -> Labels:
    """x[.., i, j, ..] = values: indexed dims and the indices' own are blocked; dims not indexed pass."""
    source, *chosen, values = input_shapes(node)
    places = [i for i, a in enumerate(arguments(node)["indices"]) if a is not None]
    width = max(len(s) for s in chosen)
    shared = [f"i{k}" for k in range(width)]
    binds = [tuple(shared[width - len(s) + k] if n != 1 else None for k, n in enumerate(s)) for s in chosen]
    names = numbered(len(source))
    rest = [n for i, n in enumerate(names) if i not in places]
    before = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    target = [*rest[:before], *shared, *rest[before:]]
    written = tuple(n if size != 1 else None for n, size in zip(target[len(target) - len(values) :], values))
    bools = any(a.meta["spec"].dtype.itemsize == 1 for a in tensor_args(node)[1:-1])
    blocked = frozenset(n for n in (*(names if bools else (names[i] for i in places)), *shared) if n)
    return Labels((tuple(names), *binds, written), (tuple(names),), blocked)


def put_slice(node: fx.Node) -> Labels:
    """x[.., start:end:step, ..] = values: the sliced dim is blocked, the others pass."""
    rank = len(input_shapes(node)[0])
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    names = numbered(rank)
    written = tuple("s" if k == dim else n for k, n in enumerate(names))
    return Labels((tuple(names), written), (tuple(names),), frozenset({f"d{dim}", "s"}), linear=(frozenset({0, 1}),))


def index_select(node: fx.Node) -> Labels:
    """Rows of ``dim`` by a 1-D index."""
    rank = len(input_shapes(node)[0])
    dim = normal_dims(arguments(node)["dim"], rank)[0]
    names = numbered(rank)
    out = tuple("i" if k == dim else n for k, n in enumerate(names))
    return Labels((tuple(names), ("i",)), (out,), frozenset({f"d{dim}"}))


def repeat(node: fx.Node) -> Labels:
    """Dims repeated more than once are blocked."""
    source, target = input_shapes(node)[0], output_shapes(node)[0]
    ahead = len(target) - len(source)
    names = tuple(f"d{ahead + i}" for i in range(len(source)))
    same = {ahead + i for i, n in enumerate(source) if target[ahead + i] == n}
    out = tuple(f"d{i}" if i in same else f"new{i}" for i in range(len(target)))
    blocked = {f"d{i}" for i in range(len(target)) if i not in same}
    fresh = {f"new{i}" for i in range(len(target)) if i >= ahead and source[i - ahead] > 1}
    return Labels((names,), (out,), frozenset(blocked | fresh), linear=(frozenset({0}),))
