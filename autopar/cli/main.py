"""The command line. Programs and tables go to stdout, everything else to stderr.

Exit status: 0 done, 1 refused or not equal, 2 wrong usage.
"""

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from autopar.cli import calibrate, compare, cost, dump, plan, predict, train, verify
from autopar.cli.screen import Screen
from autopar.errors import AutoparError

COMMANDS = (dump, verify, plan, compare, cost, predict, calibrate, train)
EPILOG = """\
MODEL is one of
  hf:NAME              a preset: llama3-8b, qwen3-8b, gpt2, ...; NAME-tiny is the same architecture with two layers
  hf:PATH/config.json  a Hugging Face configuration (or the folder that holds it); no weights are read
  module:callable      a callable that returns (model, kwargs), or (model, function of batch and sequence)

examples
  autopar dump hf:llama3-8b --mesh dp=2,tp=4 --block 0
  autopar verify hf:gpt2-tiny --mesh dp=2,tp=2
  autopar plan hf:llama3-70b h100x1024
  autopar compare hf:llama3-8b --cluster h100x64 fsdp megatron auto
  autopar compare hf:llama3-8b tp=8 tp=8,sequence_parallel=true dp=8 --hardware h100
  torchrun --nproc-per-node 4 -m autopar train hf:llama-tiny book.txt --out run --mesh dp=2,tp=2
"""


def build() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = argparse.ArgumentParser(
        prog="autopar",
        description="Make an unmodified PyTorch model run on a device mesh, equal to the original.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for module in COMMANDS:
        module.add(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; its exit status. Wrong usage raises SystemExit(2), as argparse does."""
    args = build().parse_args(argv)
    screen = Screen()
    run: Callable[[argparse.Namespace, Screen], int] = args.run
    try:
        return run(args, screen)
    except AutoparError as error:
        screen.refuse(error)
        return 1


def entry() -> None:
    """The ``autopar`` script."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe has had enough: autopar dump ... | head
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 0
    sys.exit(status)
