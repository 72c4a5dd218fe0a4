"""Step time of a 4-layer Llama on two gloo processes: the emitted module against what one writes by hand with torch.

    python benchmarks/step.py

Both compute the loss and every gradient; they take turns in one run, and who goes first alternates. By hand, tp=2 is
``parallelize_module``: columns, rows, sequence parallelism, loss parallel; dp=2 with ZeRO 3 is ``fully_shard`` on every
layer and the model, with its defaults. Then one rank: the emitted module against the eager model. On a busy machine
look at the CPU seconds of the process, which waiting does not count in. Losses and gradients are compared first; exit
status 1 where they differ.
"""

import argparse
import copy
import os
import statistics
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry
from transformers import LlamaConfig, LlamaForCausalLM

import autopar

WAYS = 2
HIDDEN, TOKENS, LAYERS, VOCABULARY = 512, 512, 4, 4096
RESAMPLES = 2000
WARM = 3  # steps before any is counted
TOLERANCE = 1e-4  # of each tensor's largest value, in float32
Step = Callable[[], Tensor]


def llama(layers: int = LAYERS) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=1408,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=TOKENS,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


def batch(row: int = 0, rows: int = 1) -> dict[str, Tensor]:
    """``rows`` rows from ``row`` on; those of one data rank, or of all."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (WAYS, TOKENS), generator=generator)[row : row + rows]
    return {"input_ids": ids, "labels": ids.clone()}


def by_hand(model: LlamaForCausalLM, mesh: DeviceMesh) -> Step:
    """The plan that one writes with torch: sequence parallel between products, loss parallel at the end."""
    whole, positions = Replicate(), Shard(1)
    plan: dict[str, ParallelStyle] = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=positions),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False),
    }
    for i in range(len(model.model.layers)):
        at = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            plan[f"{at}.{norm}"] = SequenceParallel()
        plan[f"{at}.self_attn"] = PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": positions}, desired_input_kwarg_layouts={"hidden_states": whole}
        )
        plan[f"{at}.mlp"] = PrepareModuleInput(input_layouts=(positions,), desired_input_layouts=(whole,))
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"):
            plan[f"{at}.{name}"] = ColwiseParallel()
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            plan[f"{at}.{name}"] = RowwiseParallel(output_layouts=positions)
    parallelize_module(model, mesh, plan)
    # The model would count positions from the sharded embeddings.
    given = {**batch(), "position_ids": torch.arange(TOKENS)[None]}

    def step() -> Tensor:
        with loss_parallel():
            loss: Tensor = model(**given).loss
            loss.backward()
        return loss.detach()

    return step


def sharded_by_hand(model: LlamaForCausalLM, mesh: DeviceMesh) -> Step:
    """ZeRO 3 as one writes it: one unit a layer, the rest with the model. Gradients are averaged over the ranks."""
    for unit in [*model.model.layers, model]:
        fully_shard(unit, mesh=mesh)
    return eager(model, batch(mesh.get_local_rank()))


def emitted(module: autopar.ParallelModule, given: dict[str, Tensor]) -> Step:
    return lambda: module.train_step(**given)


def eager(model: LlamaForCausalLM, given: dict[str, Tensor]) -> Step:
    def step() -> Tensor:
        loss: Tensor = model(**given).loss
        loss.backward()
        return loss.detach()

    return step


class Counts(TorchDispatchMode):
    """Collectives, bytes that a rank sends (ring algorithms) and flops, as the rank's own tensors are computed."""

    FACTORS: Mapping[str, float] = {  # of the input, for each other rank
        "all_reduce": 2 / WAYS,
        "all_gather_into_tensor": 1.0,
        "reduce_scatter_tensor": 1 / WAYS,
        "all_to_all_single": 1 / WAYS,
    }

    def __init__(self) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.bytes, self.flops = 0.0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # DTensor's own dispatch comes first; this mode then sees what it runs
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "_c10d_functional" and name in self.FACTORS:
            self.collectives[name] += 1
            self.bytes += args[0].numel() * args[0].itemsize * self.FACTORS[name] * (WAYS - 1)
        elif func.namespace == "_c10d_functional" and "wait" not in name and "wrap" not in name:
            raise NotImplementedError(f"bytes of {name}")
        elif func.overloadpacket in flop_registry:
            self.flops += flop_registry[func.overloadpacket](*args, **(kwargs or {}), out_val=out)
        return out


def counted(step: Step) -> Counts:
    with Counts() as counts:
        step()
    return counts


Cost = tuple[float, float]  # seconds on the clock; CPU seconds of this process


def pairs(first: Step, second: Step, modules: tuple[nn.Module, nn.Module], times: int) -> list[tuple[Cost, Cost]]:
    """Costs of both steps, ``times`` over; a barrier before and after each where there are several ranks."""

    def timed(step: Step, module: nn.Module) -> Cost:
        module.zero_grad()
        meet()
        clock, cpu = time.perf_counter(), time.process_time()
        step()
        used = time.process_time() - cpu
        meet()
        return time.perf_counter() - clock, used

    found = []
    for i in range(times + WARM):
        if i % 2:
            b, a = timed(second, modules[1]), timed(first, modules[0])
        else:
            a, b = timed(first, modules[0]), timed(second, modules[1])
        found.append((a, b))
    return found[WARM:]


def ratios(found: list[tuple[Cost, Cost]]) -> list[str]:
    """Of the clock and of CPU seconds: median ratio of a pair with its 95 % interval."""
    return ["{:.3f} [{:.3f}, {:.3f}]".format(*interval([a[k] / b[k] for a, b in found])) for k in range(2)]


def milliseconds(costs: list[Cost]) -> str:
    return f"{statistics.median(clock for clock, _ in costs) * 1e3:.1f} ms"


def meet() -> None:
    if dist.is_initialized():
        dist.barrier()


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the bounds of its 95 % bootstrap interval."""
    generator = torch.Generator().manual_seed(0)
    given = torch.tensor(values)
    picks = torch.randint(0, len(values), (RESAMPLES, len(values)), generator=generator)
    medians = given[picks].median(dim=1).values.sort().values
    low, high = (float(medians[int(q * (RESAMPLES - 1))]) for q in (0.025, 0.975))
    return statistics.median(values), low, high


def gradients(module: nn.Module) -> dict[str, Tensor]:
    """Whole gradients by name. Collective."""
    if isinstance(module, autopar.ParallelModule):
        return {n: g for n, g in module.full_gradients().items() if g is not None}
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    return {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}


def check(name: str, step: Step, module: nn.Module, reference: LlamaForCausalLM, rows: int = 1) -> None:
    """Exits where loss or gradients are not the reference's on ``rows`` rows, one for each data rank."""
    module.zero_grad()
    reference.zero_grad()
    loss, wanted = step(), eager(reference, batch(rows=rows))()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    if rows > 1 and not isinstance(module, autopar.ParallelModule):  # the loss of this rank's row
        dist.all_reduce(loss)
        loss /= rows
    errors = {"loss": float((loss - wanted).abs() / wanted.abs())}
    found = gradients(module)
    for key, grad in gradients(reference).items():
        errors[key] = float((found[key] - grad).abs().max() / grad.abs().max())
    worst = max(errors, key=lambda k: errors[k])
    if errors[worst] > TOLERANCE:
        raise SystemExit(f"{name}: {worst} differs by {errors[worst]:.1e}")


def worker(rank: int, store: str, times: int, only: str | None) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", rank=rank, world_size=WAYS, init_method=f"file://{store}")
    for table in (tensor_parallel(times) if only != "zero" else None, zero(times) if only != "tp" else None):
        if rank == 0 and table is not None:
            Console(width=180).print(table)
    dist.barrier()
    dist.destroy_process_group()


def tensor_parallel(times: int) -> Table:
    mesh = init_device_mesh("cpu", (WAYS,), mesh_dim_names=("tp",))
    reference = llama()
    hand = copy.deepcopy(reference)
    steps: dict[str, tuple[Step, nn.Module]] = {"by hand": (by_hand(hand, mesh), hand)}
    for name, sequence in (("emitted", False), ("emitted, sequence", True)):
        strategy = autopar.Strategy(sequence_parallel=sequence)
        module = autopar.parallelize(reference, mesh, kwargs=batch(), strategy=strategy)
        steps[name] = (emitted(module, batch()), module)
    for name, (step, module) in steps.items():
        check(name, step, module, reference)
    titles = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
    table = Table("tp=2", "step", *titles, "MiB sent", "GFLOP", "of by hand: clock", "CPU")
    for name, (step, module) in steps.items():
        counts = counted(step)
        row = [str(counts.collectives[c]) for c in Counts.FACTORS]
        row += [f"{counts.bytes / 2**20:.2f}", f"{counts.flops / 1e9:.2f}"]
        if name == "by hand":
            table.add_row(name, milliseconds([a for a, _ in pairs(step, step, (module, module), 5)]), *row)
            continue
        found = pairs(step, steps["by hand"][0], (module, hand), times)
        table.add_row(name, milliseconds([a for a, _ in found]), *row, *ratios(found))
    return table


def zero(times: int) -> Table:
    mesh = init_device_mesh("cpu", (WAYS,), mesh_dim_names=("dp",))
    reference, mine = llama(), batch(mesh.get_local_rank())
    hand = copy.deepcopy(reference)
    step = sharded_by_hand(hand, mesh)
    module = autopar.parallelize(reference, mesh, kwargs=mine, strategy=autopar.Strategy(zero=3))
    ours = emitted(module, mine)
    check("fully_shard", step, hand, reference, WAYS)
    check("zero=3", ours, module, reference, WAYS)
    found = pairs(ours, step, (module, hand), times)
    table = Table("dp=2, zero=3", "step", "GFLOP", "of by hand: clock", "CPU")
    table.add_row("fully_shard", milliseconds([b for _, b in found]), f"{counted(step).flops / 1e9:.2f}")
    table.add_row("emitted", milliseconds([a for a, _ in found]), f"{counted(ours).flops / 1e9:.2f}", *ratios(found))
    return table


def one_rank(times: int) -> None:
    model = llama()
    module = autopar.parallelize(copy.deepcopy(model), "tp=1", kwargs=batch())
    step = emitted(module, batch())
    check("one rank", step, module, model)
    found = pairs(step, eager(model, batch()), (module, model), times)
    table = Table("one rank", "step", "GFLOP", "of eager: clock", "CPU")
    table.add_row("eager", milliseconds([b for _, b in found]), f"{counted(eager(model, batch())).flops / 1e9:.2f}")
    table.add_row("emitted", milliseconds([a for a, _ in found]), f"{counted(step).flops / 1e9:.2f}", *ratios(found))
    Console(width=180).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description="step time, emitted against hand-written")
    parser.add_argument("--pairs", type=int, default=40, help="alternating pairs of steps (default 40)")
    parser.add_argument("--only", choices=("tp", "zero", "one"), help="one of the three tables")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.only != "one":
        with tempfile.TemporaryDirectory() as folder:
            mp.spawn(worker, args=(os.path.join(folder, "store"), options.pairs, options.only), nprocs=WAYS)
    if options.only in (None, "one"):
        one_rank(options.pairs)


if __name__ == "__main__":
    main()
