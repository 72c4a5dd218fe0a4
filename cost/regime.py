"""How a training system holds its states and runs its kernels: ours, and those whose measurements were published."""

import math
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Widths:
    """Bytes an element of parameter, gradient and optimizer state."""

    parameter: int
    gradient: int
    optimizer: int


@dataclass(frozen=True)
class Regime:
    """What the model's program leaves open.

    Args:
        widths: bytes an element of parameters, gradients and optimizer state.
        fused: pointwise chains are one kernel each. regather: gathered activations are gathered again in the backward.
        engine: every ZeRO stage stores 1/N, and computes from gathered copies, as ``fully_shard`` does; else the stages
            of arXiv:1910.02054, table 1, with the gathered copy counted as the parameter.
        compute_width: bytes an element of what is gathered. reduce_width: of gradients on the wire.
        overlap: share of compute behind which the data axes' traffic may hide. hidden: share of the tensor axis's
            traffic that hides behind the matmul beside it, and no more than a rank computes.
        behind: share of the tensor axis's traffic of a backward that hides behind the products that follow.
        cuts: how stages are cut (``Forms.stages``).
        host: seconds of host work for each kernel; a rank takes the longer of host and device.
        wait: seconds that a collective of the tensor axis keeps the host for each of its ranks, where stages lie on
            several nodes.
        bucket: bytes of gradients or parameters in one collective of the data axes.
        update: bytes moved for each parameter that a rank updates. checked: for each gradient that it has made, before
            and behind that. averaged: the same where several ranks made it.
        core: whether selective recomputation repeats attention, and all else is kept (arXiv:2205.05198, section 5).
        workspace: bytes an element of the last unit's widest result (logits) at its peak, beyond what is kept.
        inputs: bytes an element of the gradients in a product's backward.
        copies: bytes an element of a rank's matrices, kept for gradients: once of each size.
        rows: how often a forward has the rows that go to experts or come back, besides those that it keeps; where 0,
            they are counted once, beside the fullest moment. results: how often a layer's result beside them.
        grouped: bytes that grouped products keep. summed: bytes that they move for each element of an expert's
            gradient, which they add to.
        ring: queries that attention keeps once more on several context ranks, as a multiple of their bytes.
        retries: seconds that the allocator takes in each microbatch to find memory where there is less than it wants.
        early: whether recomputation of a block stops before its last product, whose result nothing needs.
        attention: share of the profile's efficiency that its attention kernels reach. moved: bytes that its other
            kernels move, as a multiple of those that the model's program tells of.
        recorded: share of the gathered activations that are not reused in time where the host runs ahead of the device.
        released: whether a stage lets go of a result that it has sent (arXiv:2205.05198, appendix B).
        reserve: bytes outside the allocator's count or in its fragments.
        moments: whether what a backward holds for a moment counts as ``cost.rehearsal`` counts it, and at stage 3 what
            a rank gathers: all that stands before and behind the blocks, and two of those.
    """

    widths: Widths = Widths(4, 4, 8)
    fused: bool = False
    regather: bool = False
    engine: bool = True
    compute_width: int = 2
    reduce_width: int = 4
    overlap: float = 1.0
    hidden: float = 0.0
    behind: float = 0.0
    cuts: str = "best"
    host: float = 0.0
    wait: float = 0.0
    bucket: float = math.inf
    update: float = 30.0
    checked: float = 0.0
    averaged: float = 0.0
    core: bool = False
    workspace: float = 0.0
    inputs: float = 0.0
    ring: float = 0.0
    copies: float = 0.0
    rows: float = 0.0
    results: float = 0.0
    grouped: float = 0.0
    summed: float = 0.0
    retries: float = 0.0
    early: bool = False
    attention: float = 1.0
    moved: float = 1.0
    recorded: float = 0.0
    released: bool = False
    reserve: float = 0.0
    moments: bool = False


def ours(width: int, precision: str) -> Regime:
    """The engine's, which holds parameters, gradients and both moments of AdamW in ``width`` bytes an element."""
    low = 2 if precision == "bf16" else width
    widths = Widths(width, width, 2 * width)
    return Regime(widths, compute_width=low, reduce_width=width, update=7.0 * width, moments=True)


MEGATRON = Regime(
    widths=Widths(2, 4, 12), fused=True, regather=True, engine=False, overlap=0.0, cuts="even",
    behind=0.5, inputs=2.0, copies=2.0, rows=4.0, results=2.0, grouped=128 * 2.0**20, summed=8.0, ring=1.0,
    released=True, reserve=96 * 2.0**20, update=46.0, checked=8.0, averaged=8.0, core=True,
)  # fmt: skip
"""Megatron-LM with Transformer Engine: bf16 weights, fp32 gradients and optimizer, fused kernels.

What is alive for a moment is what their sources allocate. Logits' gradients take their place (TE ``cross_entropy.py``).
A weight's gradient is added to the fp32 one by the product itself, yet one bf16 tensor of each weight's shape is handed
to autograd and kept, the head's as well (TE ``module/base.py``, ``get_dummy_wgrad``). The backward of a column-
parallel product has its input gathered again, the input's whole gradient, and its shard (Megatron-LM
``tensor_parallel/layers.py``). A layer of experts holds rows as they were sorted and as they came, results as they are
sent and as they come back, under names of its own (``moe/moe_layer.py``, ``custom_forward`` and ``combine``), with the
shared expert's result and the sum. cuBLAS has 32 MiB for torch and for TE each, grouped products four times as much
(``get_multi_stream_cublas_workspace``); the last 32 MiB and the ring's second tensor of queries' size are what B200
rows of SimuMax show (benchmarks/data).

A step sets gradients to 0, looks for NaN in them and divides them by the data ranks (``distributed/
param_and_grad_buffer.py``), takes their norm and clips them (``optimizer/clip_grads.py``), updates (Adam reads four
fp32 numbers and writes three), and copies parameters to bf16: 4, 4, 8, 4, 8, 28 and 6 bytes.

Grouped products read and write the fp32 gradients that they add to, besides their flops: so SimuMax measured them on
B200 (``configs/system/b200_bf16_ceperm.json``, stage ``bwd_grad_w``).

In a backward gathers and scatters run beside products (arXiv:2205.05198, section 4.2.2), which they slow: half of them
counts. All of them would suit A100 rows better, none B200 ones."""

NANOTRON = Regime(
    widths=Widths(2, 6, 12), fused=False, regather=True, engine=False, overlap=0.0, hidden=0.51, behind=0.51,
    cuts="filled", host=34e-6, wait=0.17e-3, bucket=2.0**27, retries=1.1, recorded=1.0, workspace=8.0,
    reserve=0.3 * 2.0**30,
)  # fmt: skip
"""nanotron: eager kernels, asynchronous gathers over tp, bf16 gradients beside the fp32 ones that they are added to.

Its loss over shards of the vocabulary makes two more fp32 tensors of the logits' size (``sharded_cross_entropy``).
``hidden``, ``behind``, ``host``, ``wait``, ``bucket``, ``retries`` and ``reserve`` are fitted to the playbook's rows
(benchmarks/data), and ``recorded`` and ``cuts`` are what they show: with
those of one of the two models alone, the other's median error is the same. Why hosts wait for collectives of tp where
stages lie on several nodes, 0.17 ms for each rank of the group whatever the message, is not known."""

FSDP = Regime(widths=Widths(4, 4, 8), overlap=0.8, update=28.0, early=True)
"""``fully_shard`` around eager kernels, fp32 states, bf16 compute; checkpoints stop early (torch.utils.checkpoint)."""

COMPOSER = replace(FSDP, attention=0.68, moved=1.3)
"""Composer's FSDP around MPT, with the first FlashAttention's kernels; both numbers are fitted to llm-foundry's rows
(benchmarks/data): those of half of its models serve the other half as well."""

REGIMES = {"megatron": MEGATRON, "nanotron": NANOTRON, "fsdp": FSDP}
