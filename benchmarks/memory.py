"""Bytes that a rank holds in training: a 50M-parameter Llama with AdamW on four gloo processes, at every ZeRO stage.

    python benchmarks/memory.py

Parameters, gradients and optimizer state are counted at rest, and the peak of a whole step, by a dispatch mode that
follows every storage (resizing included), not by resident memory. They are compared with what the engine's own terms
say, padding listed apart, and the peak with that of torch's ``fully_shard`` (``replicate`` at stage 0) on the Hugging
Face model. Exit status 1 where a term is off by more than 2%, or the peak is above 1.02 times theirs.
"""

import argparse
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.runtime.live import Live, held

RANKS, TOKENS = 4, 64
STAGES = (0, 1, 2, 3)
TERM, PEAK = 0.02, 1.02  # relative error of a term; peak against the hand-written plan
Measured = dict[str, float]


def llama(layers: int) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=16000,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def measure(parameters: list[Tensor], step: Callable[[], Any]) -> Measured:
    """Bytes at rest, and the peak of the second step above them. Gradients stay from one step to the next."""
    optimizer = torch.optim.AdamW(parameters, foreach=False)
    step()
    optimizer.step()
    states = [t for s in optimizer.state.values() for t in s.values() if isinstance(t, Tensor)]
    at_rest = {
        "parameters": held(parameters),
        "gradients": held(p.grad for p in parameters),
        "optimizer": held(states),
    }
    with Live([*parameters, *states, *(p.grad for p in parameters if p.grad is not None)]) as live:
        optimizer.zero_grad()
        step()
        optimizer.step()
    return {**at_rest, "peak": live.peak}


def ours(stage: int, layers: int, batch: dict[str, Tensor]) -> Measured:
    """The emitted module, and what its engine's terms say."""
    strategy = autopar.Strategy(zero=stage)
    pm = autopar.parallelize(llama(layers), f"dp={RANKS}", kwargs=batch, strategy=strategy)
    found = measure(list(pm.parameters()), lambda: pm.train_step(**batch))
    ways = RANKS if stage else 1
    exact = sum(p.numel() * p.element_size() for p in pm.parameters()) / ways
    padded = sum(-(-p.shape[0] // ways) * (p.numel() // p.shape[0]) * p.element_size() for p in pm.parameters())
    return {**found, "exact": exact, "padding": padded - exact}


def theirs(stage: int, layers: int, batch: dict[str, Tensor]) -> Measured:
    """torch's engine on the Hugging Face model, one unit a layer."""
    model, mesh = llama(layers), init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",))
    for unit in [*model.model.layers, model]:
        if stage:
            fully_shard(unit, mesh=mesh, reshard_after_forward=stage == 3)
        else:
            replicate(unit, mesh=mesh)
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
    return measure(list(model.parameters()), lambda: model(**batch).loss.backward())


def worker(rank: int, folder: str, layers: int, results: Any) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(os.path.join(folder, "store"), RANKS)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS, store=store)
    ids = torch.randint(0, 16000, (RANKS, TOKENS), generator=torch.Generator().manual_seed(0))[rank : rank + 1]
    batch = {"input_ids": ids, "labels": ids.clone()}
    for stage in STAGES:
        pair = ours(stage, layers, batch), theirs(stage, layers, batch)
        every: list[Any] = [None] * RANKS
        dist.all_gather_object(every, pair)
        if rank == 0:
            results.put((stage, *({k: max(p[i][k] for p in every) for k in every[0][i]} for i in range(2))))
    dist.barrier()
    dist.destroy_process_group()


def report(rows: list[tuple[int, Measured, Measured]]) -> bool:
    """Print the table of the rank that holds most; whether every figure is as promised."""
    table = Table(title=f"MiB of the rank that holds most, {RANKS} processes, AdamW, fp32")
    columns = ["parameters", "gradients", "optimizer", "peak"]
    for name in ("zero", *columns, "padding", "fully_shard peak", "ratio", "terms off by"):
        table.add_column(name, justify="right")
    good = True
    for stage, mine, other in rows:
        terms = {"parameters": 1, "gradients": 1, "optimizer": 2}
        off = max(abs(mine[k] - n * (mine["exact"] + mine["padding"])) / (n * mine["exact"]) for k, n in terms.items())
        ratio = mine["peak"] / other["peak"]
        good = good and off <= TERM and ratio <= PEAK
        cells = [f"{mine[k] / 2**20:.1f}" for k in (*columns, "padding")]
        table.add_row(str(stage), *cells, f"{other['peak'] / 2**20:.1f}", f"{ratio:.3f}", f"{off:.2%}")
    Console(width=120).print(table)
    return good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12, help="layers (default 12: 52M parameters)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = mp.get_context("spawn").SimpleQueue()
        context = mp.spawn(worker, (folder, options.layers, results), RANKS, join=False)
        rows = []
        while not context.join(timeout=0.2):
            while not results.empty():
                rows.append(results.get())
        while not results.empty():
            rows.append(results.get())
    return 0 if report(sorted(rows, key=lambda r: r[0])) and len(rows) == len(STAGES) else 1


if __name__ == "__main__":
    sys.exit(main())
