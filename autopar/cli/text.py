"""A text as rows of tokens, in an order that depends on a seed and a position only."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from autopar.errors import AutoparError

BYTES = "bytes"


def read(path: str, tokenizer: str) -> tuple[Tensor, int]:
    """(tokens [N], how many different ones there may be) of a text file.

    Args:
        tokenizer: "bytes", or a folder that ``transformers.AutoTokenizer`` reads.

    Raises:
        AutoparError: ``unreadable-text``, ``missing-package``.
    """
    try:
        if tokenizer == BYTES:
            return torch.from_numpy(np.fromfile(path, np.uint8)), 256
        from transformers import AutoTokenizer

        words = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True)
        ids = words(Path(path).read_text(encoding="utf-8"), add_special_tokens=False).input_ids
        return torch.tensor(ids, dtype=torch.int32), len(words)
    except ImportError as error:
        raise AutoparError("missing-package", f"{tokenizer} needs transformers", "pip install 'autopar[hf]'") from error
    except (OSError, ValueError) as error:
        fix = f"name a text file in UTF-8, and a folder with a tokenizer, or {BYTES}"
        raise AutoparError("unreadable-text", f"{path} with tokenizer {tokenizer}: {error}", fix) from error


@dataclass
class Rows:
    """Rows of a text; every pass over it has an order of its own.

    Args:
        tokens: [N].
        length: tokens of a row; what is left at the end of the text is not used.
        seed: of the orders.
        position: rows taken so far; saved with a checkpoint, it says all.

    Raises:
        AutoparError: ``short-text`` where there is not one row.
    """

    tokens: Tensor
    length: int
    seed: int
    position: int = 0

    def __post_init__(self) -> None:
        if not self.count:
            why = f"the text has {len(self.tokens)} tokens, a row {self.length}"
            raise AutoparError("short-text", why, "take a longer text or a smaller --seq")

    @property
    def count(self) -> int:
        """Rows of one pass."""
        return len(self.tokens) // self.length

    def take(self, number: int) -> Tensor:
        """The next rows [number, length], int64."""
        places = range(self.position, self.position + number)
        orders = {epoch: self._order(epoch) for epoch in {p // self.count for p in places}}
        self.position += number
        starts = [int(orders[p // self.count][p % self.count]) * self.length for p in places]
        return torch.stack([self.tokens[s : s + self.length] for s in starts]).long()

    def _order(self, epoch: int) -> Tensor:
        return torch.randperm(self.count, generator=torch.Generator().manual_seed(hash((self.seed, epoch))))
