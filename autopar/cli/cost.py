"""``autopar cost``: what a step of a model costs on a mesh, as numbers or in closed form."""

import argparse
from typing import Any

from autopar.cli import _lower
from autopar.cli.arguments import add_mesh, add_model, fields
from autopar.cli.models import load
from autopar.cli.screen import Screen


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
    with screen.working(f"pricing {args.model}"):
        loaded = load(args.model)
        loaded.model.train()
        kwargs = loaded.kwargs(args.batch, args.seq or loaded.sequence)
        given = fields(args.strategy)
        if args.symbolic:
            for table in _lower.closed_forms(loaded.model, kwargs, bool(given.get("sequence_parallel"))):
                screen.out.print(table)
            return 0
        priced = _lower.price(loaded.model, kwargs, args.mesh, given, args.hardware)
    screen.say(f"{loaded.description}; {args.batch} rows of each data rank; {args.hardware}")
    screen.out.print(_lower.traffic(priced))
    screen.out.print(_lower.comparison([(args.strategy or "default", priced)], "table"))
    return 0
