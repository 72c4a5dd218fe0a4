"""``autopar verify``: all ranks in one process against the unsharded model."""

import argparse
from typing import Any

import torch

from autopar.cli import _lower
from autopar.cli.arguments import add_mesh, add_model
from autopar.cli.screen import Screen
from autopar.models import load


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "verify",
        help="compare with the unsharded model",
        description="Run every rank of the mesh in this process and compare outputs, loss, gradients and buffers with "
        "the unsharded model on the global batch. Weights are drawn from a seed; dropout is off (eval mode).",
    )
    add_model(parser)
    add_mesh(parser)
    precision = parser.add_mutually_exclusive_group()
    precision.add_argument("--fp64", action="store_true", help="in double precision, to 1e-10 (default)")
    precision.add_argument("--fp32", action="store_true", help="in the model's own precision, to 1e-4")
    parser.add_argument("--seed", type=int, default=0, help="of the weights and inputs (default 0)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Print the report; exit status 0 where equal, 1 where not."""
    with screen.working(f"verifying {args.model} on {args.mesh}"), torch.random.fork_rng(devices=[]):
        torch.manual_seed(args.seed)
        loaded = load(args.model, meta=False, seed=args.seed)
        loaded.model.eval()
        make = loaded.padding if args.padding and loaded.padding else loaded.kwargs
        length = args.seq or loaded.sequence
        asked = _lower.settled(
            loaded.model, make(args.batch, length), args.mesh, args.strategy, args.batch, devices=args.devices,
            passes=args.passes,
        )  # fmt: skip
        kwargs = make(asked.rows, length)
        report = _lower.verify(loaded.model, kwargs, asked.mesh, asked.fields, passes=args.passes, fp64=not args.fp32)
    screen.say(loaded.description)
    if asked.summary:
        screen.say(asked.summary)
    screen.write(f"{report}\n")
    return 0 if report.ok else 1
