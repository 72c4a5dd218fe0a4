"""Which unit reads each parameter, and which unit an engine can gather and reduce it with."""

from functools import cache, partial

from autopar.ir.program import Param, Program


def users_of(program: Program) -> dict[str, frozenset[str]]:
    """Which unit reads each parameter: the path of the block's call, or "" for the outer function."""
    users: dict[str, frozenset[str]] = {}
    for node, names in program.readers():
        own = frozenset((str(node.meta.get("path", "")) if node.op == "call_module" else "",))
        for name in names:
            users[name] = users[name] | own if name in users else own
    return users


def paths_of(program: Program) -> list[str]:
    """The paths at which blocks are called."""
    return list(dict.fromkeys(str(c.meta.get("path", "")) for c in program.calls()))


def _home(module: str, units: frozenset[str]) -> str:
    """The innermost unit that the module is, or lies under; "" for none."""
    while module and module not in units:
        module = module.rpartition(".")[0]
    return module


def managed(program: Program) -> dict[str, str]:
    """The unit that gathers and reduces each parameter: its only reader, if its names lie there, else the outer one.

    Scalars are left out: engines cannot cut them.
    """
    users = users_of(program)
    home_of = cache(partial(_home, units=frozenset(paths_of(program))))  # by module

    def unit(param: Param) -> str:
        own, readers = home_of(param.name.rpartition(".")[0]), users.get(param.name)
        if param.tied and any(home_of(n.rpartition(".")[0]) != own for n in param.tied):
            return ""
        return own if not readers or (len(readers) == 1 and own in readers) else ""

    return {n: unit(p) for n, p in program.params.items() if can_manage(p)}


def can_manage(param: Param) -> bool:
    """Whether an engine holds the parameter; the gradients of others are reduced where they are read."""
    return param.kind == "parameter" and param.spec.is_float and bool(param.spec.shape)
