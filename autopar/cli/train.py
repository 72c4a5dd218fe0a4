"""``autopar train``: a language model on a text, on whatever mesh; started by torchrun where it has several ranks.

An example of the API as much as a tool: everything that it does is in ``run``, ``_Run`` and ``autopar.cli.text``.
"""

import argparse
import math
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autopar.auto import everywhere, sizes_of, wants
from autopar.cli import _lower
from autopar.cli.arguments import fields, positive
from autopar.cli.journal import Journal
from autopar.cli.screen import Screen
from autopar.cli.text import BYTES, Rows, read
from autopar.errors import AutoparError
from autopar.ir.mesh import KNOWN_AXES, Mesh
from autopar.models import LoadedModel, load


def add(commands: Any) -> None:
    """Add the command's parser."""
    parser = commands.add_parser(
        "train",
        help="train a language model on a text",
        description="Train MODEL, from new weights, on the text in FILE; on N ranks: torchrun --nproc-per-node N -m "
        "autopar train. The batch is the global one, so that a run goes on, with the same losses, on any mesh.",
    )
    parser.add_argument("model", metavar="MODEL", help="hf:NAME, hf:PATH/config.json, hf:FOLDER: a causal model")
    parser.add_argument("text", metavar="FILE", help="text to learn")
    parser.add_argument("--out", metavar="FOLDER", required=True, help="takes checkpoints and log.jsonl")
    parser.add_argument("--mesh", metavar="AXES", help=f"as dp=2,tp=4 (default dp=1); axes: {', '.join(KNOWN_AXES)}")
    parser.add_argument("--strategy", metavar="K=V,...", default="", help="fields of Strategy, as zero=3; or auto")
    parser.add_argument("--precision", choices=("fp32", "bf16"), help="of the computation; weights stay in fp32")
    parser.add_argument("--tokenizer", metavar="FOLDER", default=BYTES, help="of the text (default: one token a byte)")
    _add_schedule(parser)
    parser.add_argument("--save-every", type=positive, metavar="N", help="steps (default: at the end only)")
    parser.add_argument("--keep", type=positive, default=2, metavar="N", help="newest checkpoints to keep (default 2)")
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint in --out, if any")
    parser.add_argument("--log-every", type=positive, default=1, metavar="N", help="steps of a record (default 1)")
    parser.add_argument("--hardware", metavar="NAME", help="profile whose peak MFU is of (default: this device's)")
    parser.add_argument("--compile", action="store_true", help="run every kind of layer through torch.compile")
    parser.set_defaults(run=run)


def _add_schedule(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=positive, default=1000, metavar="N", help="of the whole run (default 1000)")
    parser.add_argument("--batch", type=positive, default=8, metavar="N", help="rows of the global batch (default 8)")
    parser.add_argument("--seq", type=positive, metavar="N", help="tokens of a row (default: what suits the model)")
    parser.add_argument("--lr", type=float, default=3e-4, metavar="X", help="highest learning rate (default 3e-4)")
    parser.add_argument("--min-lr", type=float, default=0.1, metavar="X", help="last one, as a share (default 0.1)")
    parser.add_argument("--warmup", type=int, default=0, metavar="N", help="steps in which it rises (default 0)")
    parser.add_argument("--weight-decay", type=float, default=0.1, metavar="X", help="of matrices (default 0.1)")
    parser.add_argument("--clip", type=float, default=1.0, metavar="X", help="largest gradient norm (default 1.0)")
    parser.add_argument("--seed", type=int, default=0, help="of weights, order of rows and dropout (default 0)")


def run(args: argparse.Namespace, screen: Screen) -> int:
    """Train; exit status 0."""
    started = "RANK" in os.environ and not dist.is_initialized()
    if started:
        if torch.accelerator.is_available():
            torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group()
    training = _Run(args, screen)
    training.go()
    if started:
        dist.destroy_process_group()
    return 0


class _Run:
    """A model, its optimizer, its text and its folder."""

    def __init__(self, args: argparse.Namespace, screen: Screen) -> None:
        self.rank = int(os.environ.get("RANK", "0"))
        self.args, self.screen, self.folder = args, screen if self.rank == 0 else Screen(quiet=True), Path(args.out)
        tokens, words = read(args.text, args.tokenizer)
        loaded = load(args.model, words=words)
        self.rows = Rows(tokens, args.seq or loaded.sequence, args.seed)
        if set(loaded.kwargs(1, 2)) != {"input_ids", "labels"}:
            raise AutoparError("no-language-model", f"{args.model} is no causal language model", "train one that is")
        self.mesh, given = self._asked(loaded)
        if args.batch % self.mesh.data_size:
            why = f"a batch of {args.batch} does not divide over {self.mesh.data_size} data ranks"
            raise AutoparError("indivisible-batch", why, f"give --batch a multiple of {self.mesh.data_size}")
        example = {name: torch.zeros_like(t) for name, t in self._mine(self.rows.tokens.new_zeros(self._shape)).items()}
        self.strategy = _lower.strategy_of(given, None)
        with self.screen.working(f"compiling {args.model} for {self.mesh}"):
            self.module = _lower.parallelize(loaded.model, str(self.mesh), example, self.strategy, args.seed)
        self.optimizer = _adamw(self.module, args)
        self.step = self._resume()
        self.screen.say(f"{loaded.description}; mesh {self.mesh}, strategy {self.strategy}; from step {self.step}")
        self.model_flops, self.peak = self._flops(loaded) if self.rank == 0 else (None, 0.0)
        if args.compile:
            self.module.compile()

    def _asked(self, loaded: LoadedModel) -> tuple[Mesh, dict[str, Any]]:
        """Mesh and fields of Strategy: those given, or what ``auto`` finds for all processes."""
        args = self.args
        strategy = ",".join(filter(None, (args.strategy, args.precision and f"precision={args.precision}")))
        if not wants(args.strategy):
            return Mesh.parse(args.mesh or "dp=1"), fields(strategy)
        world = int(os.environ.get("WORLD_SIZE", "1"))
        fixed = sizes_of(int(args.mesh) if (args.mesh or "").isdigit() else args.mesh, world)
        with self.screen.working(f"planning {args.model} on {world} devices"):
            found = everywhere(loaded.model, world, ((), loaded.kwargs(*self._shape)), strategy, fixed, args.batch)
        return Mesh.parse(found.mesh), fields(found.strategy)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.args.batch, self.rows.length

    def _mine(self, rows: Tensor) -> dict[str, Tensor]:
        """This data rank's rows of the global batch, as the model's inputs."""
        place = self.mesh.data_rank(self.mesh.coordinates(self.rank))
        device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else torch.device("cpu")
        ids = rows.chunk(self.mesh.data_size)[place].long().to(device)
        return {"input_ids": ids, "labels": ids.clone()}

    def _resume(self) -> int:
        """The step that is done; what was saved then is loaded."""
        found = sorted(self.folder.glob("step-*"))
        if found and not self.args.resume:
            raise AutoparError("folder-exists", f"{self.folder} has {found[0].name}", "go on with --resume, or move it")
        if not found or not self.args.resume:
            return 0
        told = self.module.load(self.folder, self.optimizer)
        extra = told["extra"]
        if (extra["length"], extra["seed"]) != (self.rows.length, self.args.seed):
            why = f"{told['folder']} was saved with --seq {extra['length']} --seed {extra['seed']}"
            raise AutoparError("other-rows", why, "resume with the same, so that no row is seen twice")
        self.rows.position = extra["rows"]
        return int(told["step"])

    def _flops(self, loaded: LoadedModel) -> tuple[float | None, float]:
        """(flops of a step of the unsharded model, flops per second of all devices); None where no peak is known."""
        profile = _lower.profile(self.args.hardware)
        if profile is None:
            return None, 0.0
        low = torch.bfloat16 if self.strategy.precision == "bf16" else torch.float32
        with self.screen.working("counting flops"):
            flops = _lower.model_flops(loaded.model, loaded.kwargs(*self._shape), profile)
        return flops, profile.flops_per_second(low) * self.mesh.world

    def rate(self, step: int) -> float:
        """The learning rate of a step, from 1 on: a linear rise, then a cosine down to ``--min-lr`` of it."""
        args = self.args
        if step <= args.warmup:
            return float(args.lr * step / args.warmup)
        done = (step - args.warmup) / max(1, args.steps - args.warmup)
        return float(args.lr * (args.min_lr + (1 - args.min_lr) * 0.5 * (1 + math.cos(math.pi * done))))

    def go(self) -> None:
        """All steps that are left."""
        args, first = self.args, self.rank == 0
        if self.step >= args.steps:
            self.screen.say(f"nothing to train: step {self.step} is done, and --steps {args.steps} is of the whole run")
            return
        tokens = args.batch * self.rows.length
        journal = None
        if first:
            flops = self.model_flops, self.peak
            journal = Journal(self.screen, self.folder, self.step, args.steps, tokens, *flops)
        try:
            for step in range(self.step + 1, args.steps + 1):
                values = self._train(step)
                if journal is not None:
                    journal.step(step, values, step % args.log_every == 0 or step == args.steps)
                if step == args.steps or (args.save_every and step % args.save_every == 0):
                    self._save(step, last=step == args.steps)
        finally:
            if journal is not None:
                journal.close()

    def _train(self, step: int) -> dict[str, float]:
        rate = self.rate(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.module.train_step(**self._mine(self.rows.take(self.args.batch)))
        norm = self.module.clip_grad_norm_(self.args.clip)
        self.optimizer.step()
        self.optimizer.zero_grad()
        seen = self.rows.position * self.rows.length
        return {"loss": loss.item(), "lr": rate, "grad_norm": norm.item(), "tokens": seen}

    def _save(self, step: int, last: bool) -> None:
        extra = {"rows": self.rows.position, "length": self.rows.length, "seed": self.args.seed}
        folder = self.folder / f"step-{step}"
        self.module.save(folder, self.optimizer, step, extra, asynchronous=not last, keep=self.args.keep)


def _adamw(module: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    """Matrices decay, vectors do not."""
    trained = [p for p in module.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": args.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=args.lr, betas=(0.9, 0.95))
