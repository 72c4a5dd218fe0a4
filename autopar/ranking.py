"""Families to plans, ranked or of given strategies: what needs no model, and so neither torch nor a trace."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost import hardware as profiles
from autopar.cost.candidates import ORDER, SCHEDULES, Candidates
from autopar.cost.forms import POLICIES, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.regime import Regime
from autopar.cost.schedule import check_legal, default_schedule, default_stages, most_microbatches
from autopar.cost.search import Found, Question, search
from autopar.cost.space import Space
from autopar.cost.table import size
from autopar.errors import AutoparError
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.plans import Plan, Plans, closer, rehearsed
from autopar.strategy import Strategy

USABLE = 0.92  # of a device's memory: what is left by its context, the allocator and libraries
FIELDS = (
    "sequence_parallel", "zero", "zero_shard_size", "microbatches", "schedule", "virtual_stages", "recompute",
    "offload", "context_parallel",
)  # fmt: skip


LOWERED = 3  # of the ranked plans, where a trace is there
SPARE = 24  # plans behind, which take the place of those that cannot be lowered


def cluster_of(text: str) -> Hardware:
    """Hardware and devices, as ``h100x64``. Raises AutoparError ``bad-cluster``, ``unknown-hardware``."""
    machine = profiles.load(text)
    if not machine.ranks:
        raise AutoparError("bad-cluster", f"cluster {text!r} has no number of devices", "write NAMExN, as h100x64")
    return machine


def space_of(
    machine: Hardware, batch: int | None, positions: int, axes: tuple[str, ...] = KNOWN_AXES,
    fixed: tuple[tuple[str, int], ...] = (), given: tuple[tuple[str, Any], ...] = (),
) -> Space:  # fmt: skip
    """What is asked of a cluster. ``batch``: rows of the global batch; by default four for each device."""
    unknown = [a for a in axes if a not in KNOWN_AXES]
    if unknown:
        raise AutoparError("bad-mesh", f"axes: unknown axis {unknown[0]!r}", f"axes among {', '.join(KNOWN_AXES)}")
    if batch is not None and batch < 1:
        raise AutoparError("indivisible-batch", f"a batch of {batch} rows", "one row or more")
    offload = dict(given).get("offload") == "cpu"
    return Space(machine.ranks, machine.node, batch or 4 * machine.ranks, positions, axes, offload, fixed, given)


def planned(forms: list[Forms], machine: Hardware, space: Space, regime: Regime, count: int) -> Plans:
    """Search the families and make plans of what is found."""
    limit = USABLE * machine.memory_bytes
    found = search(forms, machine, space, regime, limit)
    tokens = space.batch * space.positions

    def wrap(options: list[Any]) -> tuple[Plan, ...]:
        return tuple(Plan(o, machine, tokens, found) for o in options)

    best, notes = list(found.ranked[:count]), _notes(forms, space)
    hint = "" if best else "\n".join((_hint(found, forms, machine, space, regime), *notes))
    return Plans(wrap(best), wrap(list(found.front)), found, hint, notes)


def priced_on(plan: Plan, program: Forms) -> Plan:
    """The plan with the price of its own program: its rehearsal, or a search's sums where that has too many actions."""
    question, searched = plan.found.question, plan.option
    alone = replace(plan, program=program, searched=searched)
    near = rehearsed(alone)
    if near is not None:
        return closer(alone, near)
    table = searched.candidates(question.space.positions)
    return replace(alone, option=question.options(program, table, np.zeros(1, int))[0])


def lowered(plans: Plans, lower: Callable[[Plan], Plan], number: int, count: int) -> Plans:
    """The list with its first ``number`` plans lowered, and ranked by the price of their programs, before the others.

    A plan whose program cannot be lowered, or does not fit, falls out, and the next one takes its place; of as many as
    there are in the list. Ties as in a search, then by its order.

    Args:
        lower: gives the plan with the price of its program, or raises AutoparError. count: plans to return.
    """
    done: list[Plan] = []
    dropped: list[str] = []
    tried = 0
    for tried, plan in enumerate(plans, 1):
        if len(done) == number:
            tried -= 1
            break
        try:
            near = lower(plan)
        except AutoparError as error:
            dropped.append(f"{plan.words}: {error.message} [{error.slug}]")
            continue
        if near.fits:
            done.append(near)
        else:
            over = plan.found.question.over(near.option)
            dropped.append(f"{plan.words}: its program does not fit: {over} [over-memory]")
    done.sort(key=lambda p: p.option.rank)
    left = [*done, *plans[tried:]][:count]
    hint = "\n".join(("no plan that fits can be lowered:", *dropped)) if plans and not left else plans.hint
    return replace(plans, plans=tuple(left), hint=hint, dropped=tuple(dropped))


def _notes(forms: list[Forms], space: Space) -> tuple[str, ...]:
    """Axes of the space that no plan of the model has, and why."""
    if "pp" not in space.axes or any(f.family.order for f in forms):
        return ()
    return ("no plan has stages (pp): they begin with layers that repeat, and the model has none",)


def _hint(found: Found, forms: list[Forms], machine: Hardware, space: Space, regime: Regime) -> str:
    """What is over by how much, and the first of a few changes that fits."""
    least = found.least
    if not least:
        own = ", ".join(f"{k}={v}" for k, v in (*space.fixed, *space.given))
        return (
            f"no mesh of {space.ranks} devices{own and f' with {own}'} divides the model and a batch of {space.batch}; "
            f"change the batch{own and ', or leave out a part of that'}"
        )
    text = f"nothing fits: {_smallest(found)}: {least[0].words}"
    for words, changed in _relaxed(space):
        if search(forms, machine, changed, regime, found.limit).ranked:
            return f"{text}\nfits with {words}"
    return f"{text}\nneither 16 times the devices nor a sixteenth of the sequence fits"


def _smallest(found: Found) -> str:
    """What the option that is nearest to fitting needs, on its device or in host memory."""
    option, question = found.least[0], found.question
    if option.peak <= question.limit:
        need = f"{size(option.host)} of host memory a device"
        return f"the smallest needs {need}, {question.over(option)}, where {size(question.host_limit)} are its share"
    kind = max(option.memory, key=lambda k: option.memory[k])
    over = option.peak - question.limit
    return (
        f"the smallest needs {size(option.peak)} a device, {size(over)} over {size(question.limit)} "
        f"({kind} {size(option.memory[kind])})"
    )


def _relaxed(space: Space) -> list[tuple[str, Space]]:
    """Changes from small to large: shorter rows, more devices."""
    out = []
    for factor in (2, 4, 8, 16):
        if space.positions % factor == 0 and space.positions // factor > 1:
            out.append((f"sequence {space.positions // factor}", replace(space, positions=space.positions // factor)))
        more = replace(space, ranks=space.ranks * factor, batch=max(space.batch, space.ranks * factor))
        out.append((f"{space.ranks * factor} devices", more))
    return out


def presets(cluster: Hardware) -> dict[str, str]:
    """Strategies by name for a cluster: what people usually start from."""
    n, node = cluster.ranks, min(cluster.node, cluster.ranks)
    outside = f"dp={n // node}," if n > node else ""
    return {
        "ddp": f"dp={n}",
        "zero1": f"dp={n},zero=1",
        "fsdp": f"dp={n},zero=3",
        "hsdp": f"dp={n},zero=3,zero_shard_size={node}",
        "tp": f"{outside}tp={node}",
        "megatron": f"{outside}tp={node},sequence_parallel=true,zero=1",
    }


def priced(
    forms: list[Forms], machine: Hardware, strategies: Sequence[tuple[str, str, Mapping[str, Any]]], batch: int,
    positions: int, regime: Regime,
) -> list[tuple[str, Plan]]:  # fmt: skip
    """The price of (name, mesh, fields of Strategy) each, in the order given; mesh ``auto``: what a search chooses.

    Positions that do not divide over context ranks are priced as the next more that do, ``space.positions`` of a plan's
    question; tokens are those that there are.

    Raises AutoparError where a strategy does not divide the model or the batch, or nothing fits.
    """
    limit, out = USABLE * machine.memory_bytes, []
    space = Space(machine.ranks, machine.node, batch, positions)
    for name, mesh, fields in strategies:
        if mesh == "auto":
            plans = planned(forms, machine, space, regime, 1)
            if not plans:
                raise AutoparError("nothing-fits", plans.hint)
            out.append((name, plans[0]))
            continue
        sizes = Mesh.parse(mesh)
        near = replace(space, positions=rounded(positions, sizes.size("cp"), forms[0]))
        question = Question(tuple(forms), machine, near, regime, limit)
        options = [question.options(f, c, np.zeros(1, int))[0] for f, c in _meant(sizes, fields, forms, near)]
        option = min(options, key=lambda o: o.seconds)
        out.append((name, Plan(option, machine, batch * positions, Found(question))))
    return out


def rounded(positions: int, cp: int, forms: Forms) -> int:
    """The least positions, from ``positions`` on, that context ranks share evenly, in two runs each."""
    runs = 2 * cp if cp > 1 and forms.family.length else 1
    return -(-positions // runs) * runs


def _meant(
    mesh: Mesh, fields: Mapping[str, Any], forms: list[Forms], space: Space
) -> Iterator[tuple[Forms, Candidates]]:  # fmt: skip
    """What a strategy may stand for: where it leaves the kind of context parallelism open, each that can be."""
    sequential = bool(fields.get("sequence_parallel"))
    own = next((f for f in forms if f.family.sequence == sequential or mesh.size("tp") == 1), None)
    if own is None:
        raise AutoparError("bad-strategy", "sequence_parallel: rows of the model have no positions", "leave it out")
    open_ = fields.get("context_parallel") in (None, "auto") and mesh.size("cp") > 1
    able = own.family.allows("tp", mesh.size("tp") * mesh.size("cp"))
    for kind in (("ring", "ulysses") if able else ("ring",)) if open_ else (fields.get("context_parallel"),):
        yield own, candidate(mesh, {**fields, "context_parallel": kind}, own, space.batch, space.positions)


def candidate(mesh: Mesh, fields: Mapping[str, Any], forms: Forms, batch: int, positions: int) -> Candidates:
    """One strategy as a candidate of its family, what it leaves open as a run would choose it.

    Raises AutoparError ``bad-strategy``, ``indivisible-dim``, ``indivisible-batch``, ``schedule``.
    """
    wrong = [k for k in fields if k not in FIELDS]
    if wrong:
        raise AutoparError("bad-strategy", f"{wrong[0]} has no price", f"fields: {', '.join(FIELDS)}")
    asked, sizes = Strategy(**fields), {a: mesh.size(a) for a in ORDER}
    positions = rounded(positions, sizes["cp"], forms)
    _check_divides(sizes, forms, positions, asked.context_parallel)
    _check_engine(sizes, asked)
    own, rest = divmod(batch, sizes["dp"] * sizes["ep"])
    name = asked.schedule or ("interleaved" if (asked.virtual_stages or 1) > 1 else "")
    parts = asked.microbatches or 1
    if not asked.microbatches and sizes["pp"] > 1 and own:
        parts, _ = most_microbatches(name, sizes["pp"], asked.virtual_stages or 0, own)
    rows, left = divmod(own, parts)
    if rest or left or not rows:
        what = f"a batch of {batch} over {sizes['dp'] * sizes['ep']} data ranks and {parts} microbatches"
        raise AutoparError("indivisible-batch", what, "give --batch a multiple of both")
    schedule = name or default_schedule(sizes["pp"], parts)[0]
    virtual = asked.virtual_stages or (default_stages(schedule) if sizes["pp"] > 1 else 1)
    if sizes["pp"] > 1:
        _check_stages(schedule, sizes["pp"], virtual, parts, len(forms.family.order))
    values = {
        "rows": rows, "microbatches": parts, "zero": asked.zero, "shard": asked.zero_shard_size or 0,
        "recompute": POLICIES.index(asked.recompute), "schedule": SCHEDULES.index(schedule), "virtual": virtual,
        "offload": asked.offload == "cpu", "ulysses": asked.context_parallel == "ulysses",
    }  # fmt: skip
    missing = tuple(a for a in ORDER if a not in mesh.names)
    return Candidates(
        {a: np.array([float(n)]) for a, n in sizes.items()}, **{n: np.array([float(v)]) for n, v in values.items()},
        positions=float(positions), order=(*missing, *mesh.names),
    )  # fmt: skip


def _check_divides(sizes: Mapping[str, int], forms: Forms, positions: int, kind: str | None) -> None:
    for axis in ("tp", "ep"):
        if not forms.family.allows(axis, sizes[axis]):
            fix = f"{axis} among {[n for n in range(1, sizes[axis]) if forms.family.allows(axis, n)]}"
            raise AutoparError("indivisible-dim", f"{axis}={sizes[axis]} does not divide the model's dims", fix)
    cp, ways = sizes["cp"], sizes["cp"] * sizes["tp"]
    if kind not in (None, "ring", "ulysses"):
        raise AutoparError("bad-strategy", f"context_parallel={kind} has no price", "ring or ulysses")
    if cp > 1 and kind == "ulysses" and not forms.family.allows("tp", ways):
        raise AutoparError("indivisible-dim", f"heads do not divide over tp times cp={ways}", "context_parallel=ring")
    whole = (2 * ways if cp > 1 else ways) if forms.family.length and forms.family.sequence else 1
    if positions % whole:
        why = f"sequence_parallel with {positions} positions that {whole} does not divide has no price: tp then shards"
        fix = f"a --seq that {whole} divides, as {-(-positions // whole) * whole}, or no sequence_parallel"
        raise AutoparError("indivisible-dim", f"{why} positions in some ops alone, which closed forms do not tell", fix)


def _check_engine(sizes: Mapping[str, int], asked: Strategy) -> None:
    """ZeRO's fields fit each other and the data ranks."""
    data, shard = sizes["dp"] * sizes["ep"] * sizes["cp"], asked.zero_shard_size or 0
    for name in ("zero_shard_size", "offload"):
        if getattr(asked, name) not in (None, 0, "none") and not asked.zero:
            raise AutoparError("bad-strategy", f"{name} without a ZeRO stage", "add zero=1, 2 or 3")
    if shard and data % shard:
        raise AutoparError(
            "bad-strategy", f"zero_shard_size={shard} does not divide {data} data ranks", "a divisor of them"
        )


def _check_stages(schedule: str, ranks: int, virtual: int, parts: int, blocks: int) -> None:
    """What stands before and behind the blocks can be a stage of its own."""
    if schedule not in SCHEDULES:
        raise AutoparError("bad-strategy", f"schedule={schedule} has no price", f"one of {', '.join(SCHEDULES)}")
    check_legal(schedule, ranks, virtual, parts)
    most = blocks + 2 if blocks else 1
    if ranks * virtual > most:
        why = f"{ranks * virtual} stages of a model of {blocks} layers that repeat"
        raise AutoparError("bad-mesh", why, f"pp times virtual_stages at most {most}")
