"""What a training run tells: JSON lines, a progress bar, and TensorBoard where it is installed."""

import importlib.util
import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from autopar.cli.screen import Screen

NAME = "log.jsonl"


class Journal:
    """Records of one run, on the first rank.

    Args:
        folder: gets ``log.jsonl``, and TensorBoard's files; records go to stdout too.
        start: step that is resumed from; records of later steps, which are done again, are dropped.
        tokens: of one step of the global batch, each counted once however many ranks there are.
        flops: of one step of the unsharded model; None where no peak is known.
        peak: flops per second of all devices together.
    """

    def __init__(
        self, screen: Screen, folder: Path, start: int, steps: int, tokens: int, flops: float | None, peak: float
    ) -> None:
        self.tokens, self.flops, self.peak, self.done = tokens, flops, peak, start
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / NAME
        kept = [t for t in _lines(path) if json.loads(t)["step"] <= start]
        path.write_text("".join(kept), encoding="utf-8")
        self.file = path.open("a", encoding="utf-8")
        self.board = _board(folder, start)
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
        self.progress = Progress(*columns, console=screen.err)
        self.task = self.progress.add_task("training", total=steps, completed=start)
        self.progress.start()
        self.clock = time.perf_counter()

    def step(self, step: int, values: Mapping[str, float], log: bool) -> None:
        """A finished step; with ``log`` a record of it, whose rate is that of all steps since the last record."""
        self.progress.update(self.task, completed=step, description=f"loss {values['loss']:.4f}")
        if not log:
            return
        seconds = (time.perf_counter() - self.clock) / (step - self.done)
        record: dict[str, Any] = {"step": step, **values, "seconds": seconds}
        record["tokens_per_second"] = self.tokens / seconds
        if self.flops is not None:
            record["mfu"] = self.flops / seconds / self.peak
        for out in (self.file, sys.stdout):
            out.write(json.dumps(record) + "\n")
            out.flush()
        if self.board is not None:
            for name, value in record.items():
                self.board.add_scalar(name, value, step)
        self.clock, self.done = time.perf_counter(), step

    def close(self) -> None:
        """End the bar and the files."""
        self.progress.stop()
        self.file.close()
        if self.board is not None:
            self.board.close()


def _lines(path: Path) -> list[str]:
    """The whole lines; the last one of a killed process may be broken off."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _board(folder: Path, start: int) -> Any:
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder), purge_step=start + 1)
