"""Families as plain data that JSON can hold, and back: numbers, names, and sums of products of powers."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from autopar.cost.closed import Copies, Family, Kernel, Message, Unit
from autopar.cost.polynomials import Expression, Terms, terms_of

Powers = frozenset[tuple[str, int]]


@dataclass
class _Monomials:
    """Products of powers by their place in a list, which all expressions share."""

    places: dict[Powers, int] = field(default_factory=dict)

    def write(self, value: Expression) -> Any:
        """A number as it is; an expression as factor, place, factor, place, ..."""
        terms = terms_of(value)
        if set(terms) <= {frozenset()}:
            return terms.get(frozenset(), 0)
        out: list[float] = []
        for powers, factor in terms.items():
            out += [factor, self.places.setdefault(powers, len(self.places))]
        return out

    def listed(self) -> list[dict[str, int]]:
        """Each as exponents by name, in order."""
        return [dict(sorted(powers)) for powers in self.places]


def to_data(families: Iterable[Family]) -> dict[str, Any]:
    """Families as lists, dicts, text and numbers."""
    known = _Monomials()
    every = [_family(f, known) for f in families]
    return {"families": every, "monomials": known.listed()}


def _family(f: Family, known: _Monomials) -> dict[str, Any]:
    return {
        "sequence": f.sequence, "length": f.length, "parts": f.parts, "order": list(f.order),
        "divisors": {axis: sorted(n) for axis, n in f.divisors.items()}, "tied": known.write(f.tied),
        "units": [_unit(u, known) for u in f.units],
    }  # fmt: skip


def _unit(u: Unit, known: _Monomials) -> dict[str, Any]:
    write = known.write

    def many(values: Mapping[str, Expression]) -> dict[str, Any]:
        return {name: write(value) for name, value in values.items()}

    return {
        "name": u.name, "calls": u.calls, "hidden": write(u.hidden), "heads": [write(h) for h in u.heads],
        "kernels": [[times, k.kind, k.dtype, [*map(write, _numbers(k))]] for times, k in u.kernels],
        "messages": [
            [m.axis, m.collective, m.when, write(m.bytes), m.again, m.calls, m.given] for m in u.messages
        ],
        "parameters": many(u.parameters), "activations": many(u.activations), "dispatches": many(u.dispatches),
        "copies": [[c.axis, c.when, write(c.bytes), write(c.major), c.calls, c.context] for c in u.copies],
    }  # fmt: skip


def _numbers(k: Kernel) -> tuple[Expression, ...]:
    """Without the flops of what memory bounds, which no search reads: they are no sums of products."""
    flops = (0, 0) if k.kind == "memory" else k.flops
    return (*flops, *k.bytes, *(k.dims or ()))


def from_data(data: Mapping[str, Any]) -> tuple[Family, ...]:
    """The families that ``to_data`` wrote. Raises KeyError, TypeError, ValueError or IndexError for anything else."""
    powers: list[Powers] = [frozenset((str(n), int(p)) for n, p in m.items()) for m in data["monomials"]]

    def read(value: Any) -> Expression:
        if isinstance(value, list):
            return Terms(tuple((float(f), powers[at]) for f, at in zip(value[::2], value[1::2], strict=True)))
        return value + 0

    def many(values: Mapping[str, Any]) -> dict[str, Expression]:
        return {name: read(value) for name, value in values.items()}

    def kernel(kind: str, dtype: str, values: list[Any]) -> Kernel:
        a, b, c, d, *dims = map(read, values)
        return Kernel(kind, (a, b), (c, d), (dims[0], dims[1], dims[2]) if dims else None, dtype)

    def unit(u: Mapping[str, Any]) -> Unit:
        sent = tuple(
            Message(a, c, w, read(b), again, calls, given) for a, c, w, b, again, calls, given in u["messages"]
        )
        work = tuple((times, kernel(*rest)) for times, *rest in u["kernels"])
        copied = tuple(Copies(a, w, read(b), read(m), n, c) for a, w, b, m, n, c in u["copies"])
        queries, keys = map(read, u["heads"])
        return Unit(
            u["name"], u["calls"], work, sent, many(u["parameters"]), many(u["activations"]), read(u["hidden"]),
            (queries, keys), many(u["dispatches"]), copied,
        )  # fmt: skip

    return tuple(
        Family(
            f["sequence"], tuple(map(unit, f["units"])), tuple(f["order"]),
            {axis: frozenset(n) for axis, n in f["divisors"].items()}, read(f["tied"]), f["length"], f["parts"],
        )
        for f in data["families"]
    )  # fmt: skip
