"""Predictions for rows of published or planned runs: architecture numbers, layout and machine to time and memory.

Each architecture is built as a Hugging Face configuration, traced once on the meta device and lowered to families; a
row is one candidate of its family. No formula of a transformer enters.
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.cost.candidates import SCHEDULES, Candidates
from autopar.cost.forms import POLICIES, Forms
from autopar.cost.hardware import Hardware, load, names
from autopar.cost.regime import COMPOSER, FSDP, MEGATRON, NANOTRON, Regime, Widths
from autopar.cost.step import Steps, steps
from autopar.errors import AutoparError
from autopar.families import Families, families
from autopar.presets.numbers import count, number, numbers

Row = Mapping[str, str]
COLUMNS = (
    "pred_iter_time_s", "pred_tokens_per_s_per_gpu", "pred_model_tflops_per_gpu", "pred_mfu_pct",
    "pred_hw_tflops_per_gpu", "pred_peak_mem_gb", "pred_bubble_rate", "pred_error",
)  # fmt: skip
UNSCALED = 8.0
"""Bytes of a pass over fp32 gradients that takes a loss scale out and finds overflows (Megatron-LM, optimizer.py)."""
VARIANTS = {("a100-80g", 40): (1.555e12, 1.0), ("h100", 96): (2.4e12, 0.886)}
"""Bytes per second of a profile's variant with so many GB, and what its products reach of the profile's efficiency.

NVIDIA's A100 datasheet; the H100 with HBM2e and 500 W of arXiv:2410.06511, whose peak a row of its table 1 tells.
"""


def model_of(row: Row) -> nn.Module:
    """The model of a row's architecture numbers, on the meta device. Raises AutoparError ``missing-architecture``."""
    import transformers

    fields = numbers(row)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config).train()


def machine_of(row: Row) -> Hardware:
    """The profile of a row's ``gpu``, with the memory that its name says. Raises AutoparError ``unknown-hardware``."""
    text = row.get("gpu", "").lower()
    said = re.split(r"[^a-z0-9]+", text)
    alike = [n for n in names() if re.search(rf"(?<![a-wyz0-9]){n.split('-')[0]}(?!\d)", text)]  # a100: a100-80g
    whole = [n for n in alike if all(part in said for part in n.split("-")[1:])]
    found = max(whole, key=len, default=min(alike, key=len, default=None))
    if found is None or "pcie" in said:
        fix = f"one of {', '.join(names())}"
        raise AutoparError("unknown-hardware", f"no profile for gpu {row.get('gpu')!r}", fix)
    known = load(found)
    sizes = [float(word.rstrip("gib")) * 1e9 for word in said if re.fullmatch(r"\d+gi?b", word)]
    other = next((n for n in sizes if abs(n - known.memory_bytes) > 0.15 * known.memory_bytes), known.memory_bytes)
    rate, share = VARIANTS.get((found, round(other / 1e9)), (known.memory_bandwidth, 1.0))
    node = int(count(row, "gpus_per_node", known.node))
    forward, backward = known.attention_efficiency
    return replace(
        known, memory_bytes=other, memory_bandwidth=rate, node=node, matmul_efficiency=share * known.matmul_efficiency,
        attention_efficiency=(share * forward, share * backward),
    )  # fmt: skip


def regime_of(row: Row) -> Regime:
    """How a row's framework holds states and runs kernels: Megatron's where it is not known."""
    framework, precision = row.get("framework", "").lower(), row.get("precision", "").lower()
    if "nanotron" in framework:
        return NANOTRON
    if "fsdp" in framework or "torchtitan" in framework:
        known = COMPOSER if "composer" in framework else FSDP
        known = replace(known, fused=row.get("compile", "").lower() in ("1", "true", "yes"))
        pure = "pure" in precision
        return replace(known, widths=Widths(2, 2, 4), reduce_width=2, update=14.0) if pure else known
    return replace(MEGATRON, update=MEGATRON.update + UNSCALED) if "fp16" in precision else MEGATRON


def as_run(machine: Hardware, regime: Regime) -> Hardware:
    """A profile at what a framework's kernels make of it."""
    forward, backward = (share * regime.attention for share in machine.attention_efficiency)
    efficiency = machine.memory_efficiency / regime.moved
    return replace(machine, attention_efficiency=(forward, backward), memory_efficiency=efficiency)


@dataclass
class Predictor:
    """Families by architecture, made when a row first needs them."""

    known: dict[tuple[Any, ...], Families] = field(default_factory=dict)

    def forms(self, row: Row, regime: Regime) -> Forms:
        """The closed forms of a row's model under its regime, and of the layouts of its ``tp`` and ``sp``."""
        style = (regime.fused, regime.regather)
        key = (json.dumps(numbers(row), sort_keys=True), style)
        if key not in self.known:
            ids = torch.zeros(2, 4096, dtype=torch.int64, device="meta")
            kwargs = {"input_ids": ids, "labels": torch.zeros_like(ids)}
            self.known[key] = families(model_of(row), (), kwargs, styles=[style], alone=True)
        found, alone = self.known[key], number(row, "tp", 1) == 1
        sequence = number(row, "sp", 1) == 1 and (True, style) in found
        return Forms(found[None if alone else sequence, style])

    def price(self, row: Row) -> tuple[Steps, Candidates, Hardware]:
        """A row's step.

        Empty columns: tp with sequence parallelism, no interleaving, ZeRO 3 with FSDP, else 1 where dp has several
        ranks, the fastest microbatch that fits.
        """
        if "fp8" in row.get("precision", "").lower():
            raise AutoparError("unpriced-precision", "matmuls in fp8 have no profile", "predict bf16 or fp16 runs")
        regime = regime_of(row)
        machine = as_run(machine_of(row), regime)
        forms = self.forms(row, regime)
        table = _candidates(row, regime, forms)
        found = steps(forms, machine, table, regime)
        fits = found.peak <= machine.memory_bytes
        at = int(np.argmin(np.where(fits, found.seconds, np.inf))) if fits.any() else int(np.argmin(found.peak))
        chosen = table.take(np.array([at]))
        return steps(forms, machine, chosen, regime), chosen, machine

    def predict(self, row: Row) -> dict[str, str]:
        """The ``pred_`` columns of a row; ``pred_error`` alone where it cannot be priced."""
        row = {str(k): v.strip() for k, v in row.items() if isinstance(v, str)}
        try:
            found, table, machine = self.price(row)
        except AutoparError as error:
            return _refused(error)
        except Exception as error:  # of whatever numbers a file has; the other rows are to be priced
            fix = "this is a fault of autopar, please report it with the row"
            return _refused(AutoparError("unpriced-row", f"{type(error).__name__}: {error}", fix))
        seconds = float(found.seconds[0])
        ranks = float(np.prod([v[0] for v in table.sizes.values()]))
        tokens = table.positions * float((table.rows * table.microbatches * table.sizes["dp"] * table.sizes["ep"])[0])
        rate = [float(f[0]) / seconds / ranks / 1e12 for f in (found.flops, found.hardware_flops)]
        peak = machine.flops_per_second(torch.bfloat16) / 1e12
        unit = 1e9 if "1e9" in row.get("mem_unit", "") else 2.0**30
        values = (
            seconds, tokens / seconds / ranks, rate[0], 100 * rate[0] / peak, rate[1], float(found.peak[0]) / unit,
            float(found.bubble[0]) / seconds,
        )  # fmt: skip
        return {**{c: f"{v:.6g}" for c, v in zip(COLUMNS, values)}, "pred_error": ""}


def _refused(error: AutoparError) -> dict[str, str]:
    return {**dict.fromkeys(COLUMNS, ""), "pred_error": " ".join(str(error).split())}


def _sizes(row: Row, forms: Forms) -> dict[str, float]:
    """Ranks along each axis. ``dp`` counts ranks that share out experts, unless only their product makes ``n_gpus``."""
    sizes = {a: count(row, a, 1) for a in ("pp", "ep", "cp", "tp")}
    model, every = sizes["pp"] * sizes["cp"] * sizes["tp"], number(row, "n_gpus", 0)
    sizes["dp"] = count(row, "dp", max(every, 1) / model)
    apart = sizes["dp"] * model * sizes["ep"] == every and sizes["ep"] > 1
    if not apart:
        sizes["dp"] = sizes["dp"] / sizes["ep"]
    world = math.prod(sizes.values())
    if every and world != every and sizes["dp"] == int(sizes["dp"]):
        raise AutoparError("world-size", f"the axes make {world:g} ranks, n_gpus {every:g}")
    if sizes["ep"] > 1 and not any(u.dispatches for u in forms.family.units):
        raise AutoparError("no-experts", f"ep={sizes['ep']:g} of a model without experts")
    stages, blocks = sizes["pp"] * count(row, "vp", 1), len(forms.family.order)
    if stages > max(1, blocks):
        raise AutoparError("too-many-stages", f"{stages:g} stages of {blocks} layers")
    return sizes


def _candidates(row: Row, regime: Regime, forms: Forms) -> Candidates:
    """The row's candidate, or one for each microbatch that divides the batch where it names none."""
    sizes = _sizes(row, forms)
    data = sizes["dp"] * sizes["ep"]
    own = count(row, "gbs", data) / data
    if own != int(own) or sizes["dp"] != int(sizes["dp"]):
        raise AutoparError("indivisible-batch", f"a batch of {row.get('gbs')} over {data:g} data ranks")
    for axis in ("tp", "ep"):
        if not forms.family.allows(axis, int(sizes[axis])):
            raise AutoparError("indivisible-dim", f"{axis}={sizes[axis]:g} does not divide the model")
    rows = [count(row, "mbs", 1)] if row.get("mbs") else [n for n in (1, 2, 4, 8, 16) if own % n == 0]
    if own % rows[0]:
        raise AutoparError("indivisible-batch", f"{own:g} rows of a data rank in microbatches of {rows[0]:g}")
    virtual = count(row, "vp", 1)
    schedule = "interleaved" if virtual > 1 else "1f1b"
    policy = next((p for p in POLICIES if (row.get("recompute") or "none").lower().startswith(p)), None)
    zero = number(row, "zero_stage", 3 if regime.engine else float(data > 1))
    if policy is None or zero not in (0, 1, 2, 3):
        said = f"recompute {row.get('recompute')!r}" if policy is None else f"zero_stage {zero:g}"
        raise AutoparError("unpriced-strategy", f"{said} has no price", f"one of {', '.join(POLICIES)}; stages 0 to 3")
    constant: dict[str, Any] = {
        "zero": zero, "shard": 0, "recompute": POLICIES.index(policy), "schedule": SCHEDULES.index(schedule),
        "virtual": virtual, "offload": 0, "ulysses": 0,
    }  # fmt: skip
    shape = len(rows)
    columns: Any = {n: np.full(shape, float(v)) for n, v in constant.items()}
    return Candidates(
        sizes={a: np.full(shape, float(n)) for a, n in sizes.items()},
        rows=np.array(rows, float),
        microbatches=np.ceil(own / np.array(rows, float)),
        positions=count(row, "seq_len", 4096),
        **columns,
    )
