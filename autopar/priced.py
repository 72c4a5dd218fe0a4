"""Given strategies priced without lowering each: one candidate of a family for each of them."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import nn

from autopar.cost import hardware as profiles
from autopar.cost.candidates import ORDER, SCHEDULES, Candidates
from autopar.cost.forms import POLICIES, Forms
from autopar.cost.hardware import Hardware
from autopar.cost.search import Found, Question
from autopar.cost.space import Space
from autopar.errors import AutoparError
from autopar.families import Example, families
from autopar.ir.mesh import Mesh
from autopar.planner import regime_of
from autopar.plans import Plan
from autopar.ranking import USABLE, planned

FIELDS = (
    "sequence_parallel", "zero", "zero_shard_size", "microbatches", "schedule", "virtual_stages", "recompute",
    "offload", "context_parallel",
)  # fmt: skip


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


def compare(
    model: nn.Module,
    cluster: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    strategies: Sequence[tuple[str, str, Mapping[str, Any]]],
    *,
    batch: int,
    sequence: int | None = None,
    precision: str = "bf16",
) -> list[tuple[str, Plan]]:
    """The price of (name, mesh, fields of Strategy) each, in the order given; mesh ``auto``: what ``plan`` chooses.

    Raises AutoparError where a strategy does not divide the model or the batch.
    """
    machine = profiles.load(cluster)
    regime = regime_of(model, precision)
    made = [Forms(f) for f in families(model, args, kwargs, hardware=machine, precision=precision).values()]
    positions = sequence or Example.of(args, kwargs).positions or 1
    limit, out = USABLE * machine.memory_bytes, []
    for name, mesh, fields in strategies:
        if mesh == "auto":
            space = Space(machine.ranks, machine.node, batch, positions)
            plans = planned(made, machine, space, regime, 1)
            if not plans:
                raise AutoparError("nothing-fits", plans.hint)
            out.append((name, plans[0]))
            continue
        sequential = bool(fields.get("sequence_parallel"))
        forms = next((f for f in made if f.family.sequence == sequential), made[0])
        table = candidate(Mesh.parse(mesh), fields, forms, batch, positions)
        question = Question(tuple(made), machine, Space(machine.ranks, machine.node, batch, positions), regime, limit)
        option = question.options(forms, table, np.zeros(1, int))[0]
        out.append((name, Plan(option, machine, batch * positions, Found(question))))
    return out


def candidate(mesh: Mesh, fields: Mapping[str, Any], forms: Forms, batch: int, positions: int) -> Candidates:
    """One strategy as a candidate of its family.

    Raises AutoparError ``bad-strategy``, ``indivisible-dim`` or ``indivisible-batch``.
    """
    wrong = [k for k in fields if k not in FIELDS]
    if wrong:
        raise AutoparError("bad-strategy", f"{wrong[0]} has no price", f"fields: {', '.join(FIELDS)}")
    sizes = {a: mesh.size(a) for a in ORDER}
    for axis in ("tp", "ep"):
        if not forms.family.allows(axis, sizes[axis]):
            fix = f"{axis} among {[n for n in range(1, sizes[axis]) if forms.family.allows(axis, n)]}"
            raise AutoparError("indivisible-dim", f"{axis}={sizes[axis]} does not divide the model's dims", fix)
    parts = int(fields.get("microbatches") or 1)
    rows, rest = divmod(batch, sizes["dp"] * sizes["ep"] * parts)
    if rest or not rows:
        what = f"a batch of {batch} over {sizes['dp'] * sizes['ep']} data ranks and {parts} microbatches"
        raise AutoparError("indivisible-batch", what, "give --batch a multiple of both")
    schedule = str(fields.get("schedule") or ("1f1b" if parts >= sizes["pp"] else "gpipe"))
    policy = str(fields.get("recompute") or "none")
    if schedule not in SCHEDULES or policy not in POLICIES:
        known = f"schedule: {', '.join(SCHEDULES)}; recompute: {', '.join(POLICIES)}"
        raise AutoparError("bad-strategy", f"schedule={schedule}, recompute={policy}", known)
    values = {
        "rows": rows, "microbatches": parts, "zero": int(fields.get("zero") or 0),
        "shard": int(fields.get("zero_shard_size") or 0), "recompute": POLICIES.index(policy),
        "schedule": SCHEDULES.index(schedule), "virtual": int(fields.get("virtual_stages") or 1),
        "offload": int(bool(fields.get("offload"))), "ulysses": int(fields.get("context_parallel") == "ulysses"),
    }  # fmt: skip
    missing = tuple(a for a in ORDER if a not in mesh.names)
    return Candidates(
        {a: np.array([float(n)]) for a, n in sizes.items()}, **{n: np.array([float(v)]) for n, v in values.items()},
        positions=float(positions), order=(*missing, *mesh.names),
    )  # fmt: skip
