"""``autopar cost``: what a step of a model costs on a mesh, as numbers or in closed form."""

import argparse
from typing import Any

from autopar.cli.arguments import add_mesh, add_model, fields
from autopar.cli.screen import Screen
from autopar.cost.hardware import load as profile
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.learned import Named


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "cost",
        help="what a step costs, as numbers or in closed form",
        description="Price MODEL on a mesh, without weights and devices.",
    )
    add_model(parser)
    add_mesh(parser)
    parser.add_argument("--hardware", metavar="NAME", default="h100", help="profile that prices it (default h100)")
    parser.add_argument(
        "--symbolic", action="store_true", help="closed forms in rows b, positions s and axis sizes, per block"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the cost; exit status 0."""
    if args.symbolic:
        return _symbolic(args, screen)
    from autopar.cli import _lower
    from autopar.models import load

    with screen.working(f"pricing {args.model}"):
        loaded = load(args.model)
        loaded.model.train()
        kwargs = loaded.kwargs(args.batch, args.seq or loaded.sequence)
        given = fields(args.strategy)
        priced = _lower.price(loaded.model, kwargs, args.mesh, given, args.hardware)
    screen.say(f"{loaded.description}; {args.batch} rows of each data rank; {args.hardware}")
    screen.out.print(_lower.traffic(priced))
    screen.out.print(_lower.comparison([(args.strategy or "default", priced)], "table"))
    return 0


def _symbolic(args: argparse.Namespace, screen: Screen) -> int:
    """Closed forms by unit, of the layouts that the profile's prices choose, and their values on the mesh."""
    from autopar.cost.formulas import formulas

    mesh, sequence = Mesh.parse(args.mesh), bool(fields(args.strategy).get("sequence_parallel"))
    with screen.working(f"pricing {args.model}"):
        known = Named(args.model, "bf16", args.seq, say=screen.say).known(profile(args.hardware))
    positions = known.positions if args.seq or known.sequential else 1
    sizes = {axis: mesh.size(axis) for axis in KNOWN_AXES}
    screen.say(f"{args.model}: {known.title}; {args.batch} rows × {positions} positions of each data rank; {mesh}")
    family = next((f for f in known.families if f.sequence == sequence), known.families[0])
    for table in formulas(family, {**sizes, "b": args.batch, "s": positions / sizes["cp"]}):
        screen.out.print(table)
    return 0
