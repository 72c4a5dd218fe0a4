"""``autopar compare``: the predicted cost of several strategies, side by side."""

import argparse
import difflib
import math
from pathlib import Path
from typing import Any

from autopar.cli.arguments import add_model, positive, split_axes
from autopar.cli.pictures import add_pictures, draw
from autopar.cli.plans import plans_table, plans_text, text_of
from autopar.cli.screen import Screen
from autopar.cost.forms import Forms
from autopar.cost.hardware import load as profile
from autopar.cost.regime import ours
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.learned import Named
from autopar.plans import closer, rehearsed
from autopar.ranking import presets, priced


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "compare",
        help="predicted, and measured, time and memory of several strategies",
        description="Price MODEL under each STRATEGY, without weights and without devices.",
    )
    add_model(parser)
    parser.add_argument(
        "strategies",
        nargs="+",
        metavar="STRATEGY",
        help="mesh axes and Strategy fields, as tp=8,sequence_parallel=true; with --cluster also ddp, zero1, fsdp, "
        "hsdp, tp, megatron, auto; or two files: MODEL and STRATEGY are dumps or plans whose difference is shown",
    )
    parser.add_argument("--mesh", metavar="AXES", help="as dp=2,tp=4: the mesh of strategies that name no axis")
    parser.add_argument(
        "--batch", type=positive, metavar="N", help="rows of the global batch (default: two for each data rank)"
    )
    parser.add_argument("--cluster", metavar="NAMExN", help="hardware and number of devices, as h100x64")
    parser.add_argument("--hardware", metavar="NAME", default="h100", help="profile that prices it (default h100)")
    _add_more(parser)
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--format", choices=("table", "json", "csv"), default="table", help="default table")
    shape.add_argument("--json", action="store_const", const="json", dest="format", help="the same as --format json")
    shape.add_argument("--csv", action="store_const", const="csv", dest="format", help="the same as --format csv")
    parser.set_defaults(run=run)


def _add_more(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--precision", choices=("bf16", "fp32"), help="default bf16, with --measure fp32")
    parser.add_argument(
        "--measure", action="store_true", help="also run, on this machine's processes, those that fit (with --cluster)"
    )
    parser.add_argument("--steps", type=positive, metavar="N", default=5, help="steps that are timed (default 5)")
    parser.add_argument("--processes", type=positive, metavar="N", help="most ranks to run (default: the cores here)")
    add_pictures(parser)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the table; exit status 0."""
    if all(Path(text).is_file() for text in (args.model, *args.strategies)):
        screen.write(_difference(args.model, *args.strategies))
        return 0
    if args.cluster:
        return _on_cluster(args, screen)
    for name in ("measure", "html", "trace"):
        if getattr(args, name):
            raise AutoparError(
                "bad-cluster", f"--{name} without --cluster", "add --cluster NAMExN, as cpux2 or h100x64"
            )
    return _lowered(args, screen)


def _lowered(args: argparse.Namespace, screen: Screen) -> int:
    """Strategies by the programs that they lower to, on devices without number."""
    from autopar.cli import _lower
    from autopar.models import load

    hardware, devices = _cluster(args)
    meanings = {text: _meaning(text, args.mesh, devices) for text in args.strategies}
    batch = args.batch or 2 * math.lcm(*(Mesh.parse(mesh).data_size for mesh, _ in meanings.values()))
    rows = []
    for text, (mesh, strategy) in meanings.items():
        with screen.working(f"pricing {args.model} under {text}"):
            loaded = load(args.model)
            make = loaded.padding if args.padding and loaded.padding else loaded.kwargs
            kwargs = make(_rows(batch, mesh), args.seq or loaded.sequence)
            rows.append((text, _lower.price(loaded.model, kwargs, mesh, strategy, hardware)))
    length = args.seq or loaded.sequence
    screen.say(f"{loaded.description}; global batch {batch} × {length}; {hardware}")
    table = _lower.comparison(rows, args.format)
    if isinstance(table, str):
        screen.write(table)
    else:
        screen.out.print(table)
    return 0


def _on_cluster(args: argparse.Namespace, screen: Screen) -> int:
    """Strategies, presets and ``auto`` by their closed forms, on a whole cluster."""
    cluster, devices = _cluster(args)
    machine = profile(cluster)
    named = presets(machine)
    chosen = []
    for text in args.strategies:
        mesh, fields = ("auto", {}) if text == "auto" else _meaning(named.get(text, text), args.mesh, devices)
        chosen.append((text, mesh, fields))
    batch = args.batch or 4 * (devices or 1)
    precision = args.precision or ("fp32" if args.measure else "bf16")
    with screen.working(f"pricing {args.model} on {cluster}"):
        known = Named(args.model, precision, args.seq, say=screen.say).known(machine)
        length, positions = known.positions, known.positions if args.seq or known.sequential else 1
        forms = [Forms(f) for f in known.families]
        rows = priced(forms, machine, chosen, batch, positions, ours(known.width, precision))
    rows_of = f"{batch} × {length}" if known.sequential else str(batch)
    screen.say(f"{args.model}: {known.title}; global batch {rows_of}; {cluster}, {precision}")
    for name, plan in rows:
        if (priced_as := plan.found.question.space.positions) != positions:
            screen.say(f"{name}: {positions} positions are shared out unevenly, and priced as {priced_as}")
    found = [(name, plan, rehearsed(plan)) for name, plan in rows]
    steps = [(name, closer(plan, step), step) for name, plan, step in found]
    rows = [(name, plan) for name, plan, _ in steps]
    if not args.measure:
        if args.format == "table":
            screen.out.print(plans_table(rows))
        else:
            screen.write(plans_text(rows, args.format))
        draw(args, screen, steps)
        return 0
    from autopar.cli.measured import measured_table, records, run_all

    pairs = run_all(
        rows, args.model, batch, length, padding=args.padding, precision=precision, steps=args.steps,
        processes=args.processes, screen=screen,
    )  # fmt: skip
    if args.format == "table":
        screen.out.print(measured_table(pairs))
    else:
        screen.write(text_of(records(pairs), args.format))
    draw(args, screen, steps, pairs)
    return 0


def _difference(*paths: str) -> str:
    """Two dumps or plans, line by line, as ``diff -u``. Raises AutoparError ``bad-strategy`` for another number."""
    if len(paths) != 2:
        raise AutoparError("bad-strategy", f"{len(paths)} files to compare", "give two dumps or plans")
    old, new = (Path(p).read_text(encoding="utf-8").splitlines(keepends=True) for p in paths)
    return "".join(difflib.unified_diff(old, new, *paths)) or "equal\n"


def _rows(batch: int, mesh: str) -> int:
    """Rows of each data rank."""
    ranks = Mesh.parse(mesh).data_size
    if batch % ranks:
        fix = f"give --batch a multiple of {ranks}"
        raise AutoparError("indivisible-batch", f"a batch of {batch} does not divide over {ranks} data ranks", fix)
    return batch // ranks


def _cluster(args: argparse.Namespace) -> tuple[str, int | None]:
    """(hardware profile or cluster, number of devices or None)."""
    if not args.cluster:
        return args.hardware, None
    name, _, count = args.cluster.rpartition("x")
    if not name or not count.isdigit():
        raise AutoparError("bad-cluster", f"cluster {args.cluster!r}", "write NAMExN, as h100x64")
    return args.cluster, int(count)


def _meaning(text: str, mesh: str | None, devices: int | None) -> tuple[str, dict[str, Any]]:
    """(mesh text, strategy fields) of one STRATEGY."""
    axes, strategy = split_axes(text)
    chosen = axes or mesh
    if not chosen:
        names = f"; with --cluster also auto, {', '.join(presets(profile('h100x8')))}"
        raise AutoparError("bad-mesh", f"strategy {text!r} names no axis", f"give --mesh, or axes as tp=8{names}")
    world = Mesh.parse(chosen).world
    if devices is not None and world != devices:
        fix = f"choose axes whose product is {devices}"
        raise AutoparError("bad-mesh", f"strategy {text!r} is for {world} devices, the cluster has {devices}", fix)
    return chosen, strategy
