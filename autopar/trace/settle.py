"""Whether what a call leaves in plain attributes is for good: then every later call computes the same."""

from collections.abc import Callable
from copy import copy
from typing import TYPE_CHECKING

from autopar.errors import AutoparError
from autopar.trace.carried import State, alike, inline
from autopar.trace.flat import WRAPPED, Flat
from autopar.trace.memories import met
from autopar.trace.once import Unsafe
from autopar.trace.state import Place, reshaped, tensors_in

if TYPE_CHECKING:
    from autopar.trace.export import Exported

Run = Callable[[Flat], "Exported"]


def left_by(wrapper: Flat, run: Run) -> tuple[State | None, list[str]]:
    """What a call leaves for later ones, and notes on attributes that calls only update.

    Args:
        wrapper: that call, traced; it changed attributes.
        run: traces another one.

    Let pass is what the call sets for good, from which every later call computes the same: tables that are made once,
    largest sizes, flags. Raises AutoparError ``python-state`` for any other attribute that later calls read, and
    ``input-mutation`` for a buffer of another shape that they do not read.
    """
    model = getattr(wrapper, WRAPPED)
    twice, plain = wrapper.seen.changed, wrapper.seen.left
    probe = Flat(model, copy(wrapper.structure), None, whole=False, twice=twice, start=wrapper.start)
    try:
        run(probe)
    except (AutoparError, Unsafe):
        if not probe.seen.carried.read:
            raise
        plain = None
    read, state = probe.seen.carried.read, None
    if read:
        again = read.keys() & set(probe.seen.moved)
        state = None if again else _settled(wrapper, run, list(read))
        if state is None:
            (path, name), line = next(iter(read.items()))
            where = f"{path}.{name}" if path else name
            raise AutoparError(
                "python-state",
                f"{where}: the forward leaves it changed for the next call, which reads it:"
                f" {line}; a compiled program would see the first value for ever",
                "keep it as a tensor in a registered buffer, or compute it outside and pass it as an input",
            )
    _check_buffers(wrapper, state)
    names = sorted(f"{path}.{name}" if path else name for path, name in probe.seen.carried.updated)
    rest = plain and plain.without({*probe.seen.moved, *probe.seen.carried.updated, *(state.values if state else ())})
    if rest:  # what calls of another kind may read
        before = state or wrapper.start
        state = rest.over(before) if before else rest
    return state and state.lasting, [
        f"{name}: the forward updates it; in the parallel model it stays as it is" for name in names
    ]


def _check_buffers(wrapper: Flat, state: State | None) -> None:
    after = wrapper.seen.after
    assert after is not None
    for path, name in wrapper.seen.changed:
        new, old = (after.tensors[path, "_buffers"].get(name), wrapper.parts[0][path]._buffers.get(name))
        if new is not None and reshaped(old, new) and (state is None or (path, name) not in state.values):
            raise AutoparError(
                "input-mutation",
                f"{path}.{name}: the forward assigns a buffer of another shape or dtype".lstrip("."),
                "register it with the shape and dtype that it gets",
            )


def _settled(wrapper: Flat, run: Run, read: list[Place]) -> State | None:
    """What a call leaves at the attributes ``read``; None where a call that begins with it is another one."""
    model, loss = getattr(wrapper, WRAPPED), wrapper.loss[0]
    kept = list(dict.fromkeys([*(wrapper.start.values if wrapper.start else ()), *read]))
    first = Flat(model, copy(wrapper.structure), loss, start=wrapper.start, keep=kept)
    one = run(first)
    state = first.seen.left
    if state is None or state.values.keys() != set(kept):
        return None
    second = Flat(model, copy(wrapper.structure), loss, start=state)
    try:
        two = run(second)
    except (AutoparError, Unsafe):
        return None
    number = len(state.stands)
    own = [kind for kind in one.outputs if kind != ("kept", "")]
    inputs = sum("input" in n.meta for n in two.graph.find_nodes(op="placeholder")) - number
    same = own == two.outputs and alike((one.graph, one.constants), (two.graph, two.constants), inputs, number)
    changed = set(second.seen.changed)
    if not same or changed & set(kept) or changed - set(wrapper.seen.changed):
        return None
    if wrapper.start:
        inline(wrapper.start, one)
    return state if state.define(one) else None


def steady(exported: "Exported", run: Callable[[], "Exported"]) -> list[str]:
    """Notes on what the forward changes outside of the model: globals, attributes of classes. They stay so.

    Args:
        run: traces another call, which meets what that of ``exported`` left.

    Raises AutoparError ``python-state`` where that call computes something else.
    """
    changes = {c.where: c for e in (exported, *exported.bodies.values()) for c in e.outside}
    if not changes:
        return []
    with met(list(changes.values())):
        try:
            second: Exported | None = run()
        except (AutoparError, Unsafe):
            second = None
    if second is None or not _equal(exported, second):
        raise AutoparError(
            "python-state",
            f"{', '.join(changes)}: the forward changes it, outside of the model, and the next call computes something"
            " else; a compiled program would see the first value for ever",
            "keep it as a tensor in a registered buffer, or compute it outside and pass it as an input",
        )
    for change in changes.values():
        if not tensors_in(change.after):  # those of a trace are none that anyone could compute with
            change.put(change.after)
    return [f"{where}: the forward changes it, outside of the model; programs do not" for where in changes]


def _equal(one: "Exported", two: "Exported") -> bool:
    """Whether two traces compute the same."""
    graphs = alike((one.graph, one.constants), (two.graph, two.constants), 0, 0)
    same = graphs and one.outputs == two.outputs and one.bodies.keys() == two.bodies.keys()
    return same and all(_equal(body, two.bodies[path]) for path, body in one.bodies.items())
