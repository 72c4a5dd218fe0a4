"""A STAGED program's engine holds every parameter once, gathers it where it is read, and is the only reducer."""

from collections import Counter
from collections.abc import Iterator, Mapping, Set

from autopar.errors import AutoparError
from autopar.ir.layout import R
from autopar.ir.program import Engine, Group, Param, Program
from autopar.ir.units import can_manage, paths_of, users_of

FIX = "this is a fault of a pass, please report it"


def check_engine(program: Program, after: str = "") -> None:
    """Raises AutoparError ``engine-units`` or ``double-reduction``."""
    assert program.engine is not None
    where = f", after pass {after}" if after else ""
    for why in _faults(program, program.engine):
        raise AutoparError("engine-units", why + where, FIX)
    engine = {n: g.axes for g in program.engine.groups for n in g.names}
    for param in program.params.values():
        for axis in engine.get(param.name, param.summed_over(program.mesh)):
            if param.kind == "parameter" and param.trainable and param.layout and param.layout.get(axis) != R:
                why = f"{param.name}: {param.layout.get(axis)} on {axis}, where the engine sums its gradient"
                raise AutoparError("double-reduction", why + where, FIX)


def _faults(program: Program, engine: Engine) -> Iterator[str]:
    held = Counter(name for group in engine.groups for name in group.names)
    mesh, ways = program.mesh, {n: g.ways for g in engine.groups for n in g.names}
    for name, param in program.params.items():
        summed = param.summed_over(mesh)
        model = [a for a, n in mesh.axes if n > 1 and a not in summed and mesh.base(a) != "pp"]
        must = bool(summed) and (engine.stage > 0 or len(model) <= 2)
        wanted = 1 if must and can_manage(param) else 0
        if held[name] != wanted and (wanted or held[name]):
            yield f"{name}: in {held[name]} groups of the engine, expected {wanted}"
        if (param.chunk is not None) != (ways.get(name, 1) > 1):
            yield f"{name}: {'shared out' if param.chunk else 'not shared out'} over {ways.get(name, 1)} data ranks"
    paths, users = paths_of(program), users_of(program)
    for group in engine.groups:
        yield from _group_faults(program, group, paths, users)


def _group_faults(program: Program, group: Group, paths: list[str], users: Mapping[str, Set[str]]) -> Iterator[str]:
    if group.unit and group.unit not in paths:
        yield f"group of {group.unit}: no block is called there"
    for name in group.names:
        param: Param | None = program.params.get(name)
        if param is None or param.spec.dtype != group.dtype:
            yield f"{name}: not a parameter of {group.dtype}"
        elif group.unit and not users.get(name, set()) <= {group.unit}:
            yield f"{name}: gathered for {group.unit}, read by {', '.join(sorted(users[name])) or 'the outer function'}"
