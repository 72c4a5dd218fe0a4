"""Which unit reads each parameter, and which unit an engine can gather and reduce it with."""

from collections.abc import Iterable

from autopar.ir.program import Param, Program


def users_of(program: Program) -> dict[str, set[str]]:
    """Which unit reads each parameter: the path of the block's call, or "" for the outer function."""
    users: dict[str, set[str]] = {}
    for node in program.graph.nodes:
        path = str(node.meta.get("path", "")) if node.op == "call_module" else ""
        for name in program.reads(node):
            users.setdefault(name, set()).add(path)
    return users


def paths_of(program: Program) -> list[str]:
    """The paths at which blocks are called."""
    return list(dict.fromkeys(str(c.meta.get("path", "")) for c in program.calls()))


def home(name: str, units: Iterable[str]) -> str:
    """The innermost unit under whose path the name lies; "" for none."""
    known = units if isinstance(units, frozenset) else frozenset(units)
    path = name.rpartition(".")[0]
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path


def managed(program: Program) -> dict[str, str]:
    """The unit that gathers and reduces each parameter: its only reader, if its names lie there, else the outer one.

    Scalars are left out: engines cannot cut them.
    """
    paths, users = frozenset(paths_of(program)), users_of(program)
    return {n: _unit(p, users.get(n, set()), paths) for n, p in program.params.items() if can_manage(p)}


def can_manage(param: Param) -> bool:
    """Whether an engine holds the parameter; the gradients of others are reduced where they are read."""
    return param.kind == "parameter" and param.spec.is_float and bool(param.spec.shape)


def _unit(param: Param, readers: set[str], paths: frozenset[str]) -> str:
    homes = {home(n, paths) for n in (param.name, *param.tied)}
    if len(homes) == 1 and (not readers or readers == homes):
        return homes.pop()
    return ""
