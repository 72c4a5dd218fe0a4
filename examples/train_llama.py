"""Train a small Hugging Face Llama on a dp=2, tp=2 mesh of four gloo processes, beside the unsharded model.

    python examples/train_llama.py

Prints the program of one layer, then the loss of both at every step. Then a few steps of other strategies on two
processes, and a table of them: predicted from this machine's calibrated profile, and measured. Exit status 1 if any
loss differs from the unsharded model's by more than 1e-5.
"""

import copy
import os
import tempfile
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM

import autopar
from autopar.calibrate import measure as calibrate
from autopar.calibrate import to_toml
from autopar.cli.arguments import split_axes
from autopar.cli.measured import Pair, measured_table
from autopar.measure import Batch, measure
from autopar.planner import compare
from autopar.plans import closer, rehearsed

STRATEGIES = (
    "dp=2", "tp=2", "tp=2,sequence_parallel=true", "dp=2,zero=3", "pp=2,microbatches=4", "cp=2",
)  # fmt: skip
STEPS, ROWS, TOKENS = 20, 8, 64
TOLERANCE = 1e-5
TEXT = Path(__file__).with_name("declaration.txt")


def small_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,  # one token a character
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=TOKENS,
    )
    return LlamaForCausalLM(config)


def batch_at(step: int) -> dict[str, torch.Tensor]:
    """The global batch of a step: ROWS pieces of the text."""
    tokens = torch.tensor(list(TEXT.read_text(encoding="ascii").encode()))
    starts = torch.randint(0, len(tokens) - TOKENS, (ROWS,), generator=torch.Generator().manual_seed(step))
    ids = torch.stack([tokens[s : s + TOKENS] for s in starts])
    return {"input_ids": ids, "labels": ids.clone()}


def worker(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=world, init_method=f"file://{store}")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = small_llama()
    reference = copy.deepcopy(model)
    mine = slice(mesh.get_local_rank("dp") * ROWS // 2, (mesh.get_local_rank("dp") + 1) * ROWS // 2)

    pm = autopar.parallelize(model, mesh, kwargs={k: v[mine] for k, v in batch_at(0).items()})
    optimizer = torch.optim.AdamW(pm.parameters(), lr=1e-3)
    losses = []
    for step in range(STEPS):
        loss = pm.train_step(**{k: v[mine] for k, v in batch_at(step).items()})
        pm.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())

    expected = unsharded(reference) if rank == 0 else losses
    status = report(pm, losses, expected) if rank == 0 else 0
    dist.barrier()
    dist.destroy_process_group()
    raise SystemExit(status)


def unsharded(model: LlamaForCausalLM, steps: int = STEPS, clip: float = 1.0) -> list[float]:
    """The same steps in one process."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(steps):
        loss = model(**batch_at(step)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def report(pm: torch.nn.Module, losses: list[float], expected: list[float]) -> int:
    console = Console(soft_wrap=True, highlight=False)
    console.print("\none layer on each rank of dp=2, tp=2\n", style="bold")
    print(pm.dump(block="model.layers.*"))
    table = Table("step", "parallel", "unsharded", "difference")
    for step, (a, b) in enumerate(zip(losses, expected, strict=True)):
        table.add_row(str(step), f"{a:.7f}", f"{b:.7f}", f"{abs(a - b):.1e}")
    console.print(table)
    worst = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    same = worst <= TOLERANCE
    print(f"{STEPS} steps, loss {losses[0]:.3f} -> {losses[-1]:.3f}; largest difference {worst:.1e}: "
          + ("equal" if same else f"more than {TOLERANCE}"))  # fmt: skip
    return 0 if same else 1


def made() -> tuple[torch.nn.Module, Batch]:
    """The model and its batches, in every process."""
    return small_llama().train(), batch_at


def strategies(folder: str) -> int:
    """Measure each of STRATEGIES beside its prediction; whether a loss differs."""
    console = Console(highlight=False, width=112)
    with console.status("calibrating this machine"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        profile = os.path.join(folder, "here.toml")
        Path(profile).write_text(to_toml(calibrate(2), "measured for this table"), encoding="utf-8")
        model, batch = small_llama().train(), {k: v.to("meta") for k, v in batch_at(0).items()}
        asked = [(text, *split_axes(text)) for text in STRATEGIES]
        plans = compare(model, f"{profile}x2", (), batch, asked, batch=ROWS, sequence=TOKENS, precision="fp32")
    pairs, worst, expected = [], 0.0, list[float]()
    for name, plan in plans:
        with console.status(f"measuring {name}"):
            near = closer(plan, rehearsed(plan))
            found = measure(made, plan.mesh, f"{plan.strategy},hardware={profile}".strip(","))
        pairs.append(Pair(name, near, found))
        expected = expected or unsharded(small_llama(), len(found.losses), float("inf"))
        worst = max(worst, *(abs(a - b) for a, b in zip(found.losses, expected, strict=True)))
    console.print()
    console.print(measured_table(pairs))
    same = worst <= TOLERANCE
    print(f"{len(pairs)} strategies, {len(expected)} steps each; largest difference of a loss {worst:.1e}: "
          + ("equal" if same else f"more than {TOLERANCE}"))  # fmt: skip
    return 0 if same else 1


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.spawn(worker, args=(4, os.path.join(folder, "store")), nprocs=4)
        except mp.ProcessExitedException as failed:
            raise SystemExit(failed.exit_code) from failed
        raise SystemExit(strategies(folder))
