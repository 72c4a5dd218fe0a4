"""A tiny Llama, and one rank of a world whose other ranks are c10d's fake process group."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import LlamaForCausalLM

from tests.llama import llama as small


def llama(layers: int = 2) -> LlamaForCausalLM:
    return small(layers, vocab_size=256, num_key_value_heads=8)


def batch() -> dict[str, Tensor]:
    ids = torch.arange(32).view(2, 16)
    return {"input_ids": ids, "labels": ids.clone()}


@contextmanager
def world(size: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
