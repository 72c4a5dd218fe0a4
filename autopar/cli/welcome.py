"""The first screen: what there is, and what to type next."""

import argparse
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table

GROUPS: Mapping[str, Sequence[str]] = {
    "look": ("dump", "verify"),
    "plan": ("plan", "compare", "cost", "predict", "calibrate"),
    "run": ("train",),
}
EXAMPLES = (
    ("autopar dump hf:llama-tiny --mesh dp=2,tp=2 --block 0", "read what one layer becomes"),
    ("autopar verify hf:gpt2-tiny --mesh dp=2,tp=2", "prove that it is equal, on this machine"),
    ("autopar plan hf:llama3-70b h100x1024 --html plan.html", "the fastest strategies, with charts"),
    ("autopar compare hf:llama3-8b --cluster h100x64 fsdp megatron auto", "presets and plans side by side"),
    ("torchrun --nproc-per-node 2 -m autopar train hf:llama-tiny book.txt --out run --mesh dp=2", "train on a text"),
)
MODELS = (
    ("hf:NAME", "a preset: llama3-8b, qwen3-8b, gpt2, ...; NAME-tiny is the same with two layers"),
    ("hf:PATH", "a Hugging Face config.json, or the folder that holds it; no weights are read"),
    ("module:callable", "returns (model, kwargs), or (model, function of batch and sequence)"),
)


def welcome(console: Console, parser: argparse.ArgumentParser) -> None:
    """Print it. ``parser``: whose commands are listed, by their help."""
    known = {a.dest: a.help or "" for a in parser._subparsers._group_actions[0]._choices_actions}  # type: ignore[union-attr]
    console.print("\n[bold]autopar[/]  an unmodified PyTorch model on a device mesh, equal to the original")
    console.print("[dim]usage: autopar COMMAND ...    autopar COMMAND --help says all of one[/]\n")
    for group, names in GROUPS.items():
        _grid(console, group, [(name, known[name]) for name in names], "bold cyan")
    _grid(console, "MODEL is one of", MODELS, "cyan")
    _grid(console, "to begin with", EXAMPLES, "green")


def _grid(console: Console, title: str, rows: Sequence[tuple[str, str]], style: str) -> None:
    console.print(f"[bold]{title}[/]")
    table = Table.grid(padding=(0, 3))
    table.add_column(style=style, no_wrap=True)
    table.add_column()
    for row in rows:
        table.add_row(*row)
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
