"""The one place where the command line calls the compiler."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from rich.table import Table
from torch import nn

from autopar.cli.arguments import fields as fields_of
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program

if TYPE_CHECKING:
    from autopar.cost.hardware import Hardware
    from autopar.cost.price import Price
    from autopar.emit.module import ParallelModule
    from autopar.strategy import Strategy

OnPass = Callable[[str, Program], None]


class Report(Protocol):
    """What ``autopar.verify`` gives: a text, and whether all is equal."""

    @property
    def ok(self) -> bool:
        """Whether all is equal."""


def data_size(mesh: str) -> int:
    """Number of ranks that hold different rows. Raises AutoparError ``bad-mesh``."""
    return Mesh.parse(mesh).data_size


def strategy_of(fields: dict[str, Any], passes: str | None) -> "Strategy":
    """A Strategy from the fields that the user gave, None for a default. Raises AutoparError ``bad-strategy``."""
    from autopar.strategy import Strategy

    known = Strategy.__dataclass_fields__
    wrong = [k for k in fields if k not in known]
    if wrong:
        raise AutoparError("bad-strategy", f"Strategy has no field {wrong[0]!r}", f"fields: {', '.join(known)}")
    given = {k: known[k].default if v is None else v for k, v in fields.items()}
    return Strategy(**({**given, "passes": passes} if passes else given))


@dataclass(frozen=True)
class Settled:
    """Mesh, fields of Strategy and rows of the global batch of a command; ``summary``: what ``auto`` chose."""

    mesh: str
    fields: dict[str, Any]
    rows: int
    summary: str = ""

    @property
    def own(self) -> int:
        """Rows of each data rank."""
        return self.rows // data_size(self.mesh)


def settled(
    model: nn.Module, kwargs: dict[str, Any], mesh: str, strategy: str, batch: int, *, devices: int | None = None,
    passes: str | None = None,
) -> Settled:  # fmt: skip
    """What the user gives, or what ``auto`` chooses for it, without devices.

    Args:
        mesh: axes, or with ``auto`` a number of devices. batch: rows of each data rank; of each device where ``auto``
            chooses the mesh. devices: with ``auto``, where ``mesh`` has some of the axes.

    Raises AutoparError ``bad-mesh``, ``bad-strategy``, and what planning raises.
    """
    from autopar.auto import decide, wants
    from autopar.strategy import Strategy

    if not wants(strategy):
        if devices is not None:
            raise AutoparError("bad-mesh", "--devices without --strategy auto", "write all axes in --mesh")
        return Settled(mesh, fields_of(strategy), batch * data_size(mesh))
    if passes:
        raise AutoparError("bad-strategy", "--passes with --strategy auto", "leave out one of them")
    known = {} if mesh.isdigit() else dict(Mesh.parse(mesh).axes)
    ranks = devices or (int(mesh) if mesh.isdigit() else Mesh.of(known).world)
    if mesh.isdigit() and int(mesh) != ranks:
        raise AutoparError("bad-mesh", f"--mesh {mesh} with --devices {devices}", "write the number once")
    whole = bool(known) and Mesh.of(known).world == ranks
    rows = batch * (Mesh.of(known).data_size if whole else ranks)
    found = decide(model, ranks, (), kwargs, strategy, mesh=known, rows=rows, hardware=Strategy.hardware)
    return Settled(found.mesh, fields_of(found.strategy), rows, found.summary)


def lower(
    model: nn.Module,
    kwargs: dict[str, Any],
    mesh: str,
    fields: dict[str, Any],
    *,
    passes: str | None = None,
    after: str | None = None,
    rank: int | None = None,
    loss_only: bool = False,
    on_pass: OnPass | None = None,
) -> Program:
    """The program of ``rank`` (rank 0 where None) after the pass ``after`` (all where None).

    ``kwargs`` are one data rank's rows. ``on_pass`` receives each pass's name and result.
    """
    from autopar import compile
    from autopar.passes.pipeline import parse

    strategy, parsed = strategy_of(fields, passes), Mesh.parse(mesh)
    names = ["trace", *(p.name for p in parse(strategy.pipeline_on(parsed.size("pp") > 1)))]
    if after is not None and after not in names:
        raise AutoparError("unknown-pass", f"the pipeline has no pass {after!r}", f"one of {', '.join(names)}")
    if rank is not None and not 0 <= rank < parsed.world:
        raise AutoparError("unknown-rank", f"rank {rank} of mesh {mesh}", f"ranks are 0 to {parsed.world - 1}")
    return compile.lower(
        model, (), kwargs, parsed, strategy, after=after, rank=rank or 0, loss_only=loss_only, on_pass=on_pass
    )


def verify(
    model: nn.Module,
    kwargs: dict[str, Any],
    mesh: str,
    fields: dict[str, Any],
    *,
    passes: str | None = None,
    fp64: bool = True,
) -> Report:
    """Every rank in one process against the model; ``kwargs`` are the global batch."""
    import autopar

    return autopar.verify(model, mesh, (), kwargs, strategy=strategy_of(fields, passes), fp64=fp64)


def price(model: nn.Module, kwargs: dict[str, Any], mesh: str, fields: dict[str, Any], hardware: str) -> "Price":
    """The predicted cost of a step of the resharded program on a hardware profile or a cluster, which prices it too."""
    from autopar.cost.hardware import load
    from autopar.cost.program import price
    from autopar.cost.zero import Stage
    from autopar.ir.units import managed

    profile, strategy = load(hardware), strategy_of({"hardware": hardware, **fields}, None)
    for name in ("recompute", "offload"):
        if fields.get(name) not in (None, "none"):
            what = f"{name}={fields[name]}: the cost model does not count it yet"
            raise AutoparError("unpriced-strategy", what, f"compare without {name}")
    if Mesh.parse(mesh).size("pp") > 1:
        what = f"mesh {mesh}: the cost model does not count pipelines yet"
        raise AutoparError("unpriced-strategy", what, "compare meshes without pp; autopar dump prints the stages")
    program = lower(model, kwargs, mesh, {"hardware": hardware, **fields}, after="reshard")
    low = 2 if strategy.precision == "bf16" else None
    stage = Stage(strategy.zero, strategy.zero_shard_size, strategy.microbatches or 1, low, managed(program))
    return price(program, profile, zero=stage)


def parallelize(
    model: nn.Module, mesh: str, kwargs: dict[str, Any], strategy: "Strategy", seed: int
) -> "ParallelModule":
    """The parallel module, from this rank's rows."""
    import autopar

    return autopar.parallelize(model, mesh, kwargs=kwargs, strategy=strategy, seed=seed)


def profile(name: str | None) -> "Hardware | None":
    """A hardware profile by name, or this device's; None where that is not known."""
    from autopar.cost.hardware import load, of_device

    found = name or (of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None)
    return load(found) if found else None


def model_flops(model: nn.Module, kwargs: dict[str, Any], hardware: "Hardware") -> float:
    """Flops of forward and backward of the unsharded model, each counted once. No recomputation counts."""
    from autopar.cost.program import price

    program = lower(model, kwargs, "dp=1", {}, after="trace", loss_only=True)
    return float(price(program, hardware).model_flops)


def comparison(rows: "list[tuple[str, Price]]", format: str) -> Table | str:
    """A line for each strategy, as ``table``, ``json`` or ``csv``."""
    from autopar.cost import table

    if format == "table":
        return table.comparison(rows)
    return table.to_csv(rows) if format == "csv" else table.to_json(rows) + "\n"


def traffic(price: "Price") -> Table:
    """Every collective of one strategy."""
    from autopar.cost.table import traffic_table

    return traffic_table(price)
