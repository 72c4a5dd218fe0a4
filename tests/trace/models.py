"""Small models that the trace is tested on: name -> (model, args, kwargs, loss)."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], Callable[[Any], Tensor] | None]
CASES: dict[str, Callable[[], Case]] = {}


def case(function: Callable[[], Case]) -> Callable[[], Case]:
    CASES[function.__name__] = function
    return function


def squares(out: Any) -> Tensor:
    """A loss that weighs every element differently."""
    if not isinstance(out, Tensor):
        out = out["logits"] if isinstance(out, dict) else out[0]
    return (out * torch.arange(out.numel(), dtype=out.dtype).reshape(out.shape).cos()).pow(2).mean() * 10


def causal_lm(kind: str, padded: bool = False, **config: Any) -> Case:
    import transformers

    torch.manual_seed(0)
    base: dict[str, Any] = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    base["max_position_embeddings"] = 32
    made = getattr(transformers, f"{kind}Config")(**{**base, **config})
    suffix = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    model = getattr(transformers, f"{kind}{suffix}")(made)
    ids = torch.randint(1, 60, (4, 8))
    labels = ids.clone()
    labels[0, :3] = -100
    kwargs = {"input_ids": ids, "labels": labels}
    if padded:
        kwargs["attention_mask"] = torch.ones(4, 8, dtype=torch.long)
        kwargs["attention_mask"][1, 5:] = 0
    return model, (), kwargs, None


@case
def llama() -> Case:
    return causal_lm("Llama", intermediate_size=64, num_key_value_heads=2)


@case
def llama_padded() -> Case:
    return causal_lm("Llama", padded=True, intermediate_size=64, num_key_value_heads=2)


@case
def gpt2() -> Case:
    return causal_lm("GPT2", n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)


@case
def gpt2_inverse_index() -> Case:
    return causal_lm(
        "GPT2", n_embd=32, n_layer=3, n_head=4, n_positions=32, scale_attn_by_inverse_layer_idx=True, resid_pdrop=0,
        embd_pdrop=0, attn_pdrop=0,
    )  # fmt: skip


@case
def gemma2() -> Case:
    return causal_lm(
        "Gemma2", intermediate_size=64, num_key_value_heads=2, head_dim=8, sliding_window=4, num_hidden_layers=4
    )


@case
def qwen3() -> Case:
    return causal_lm("Qwen3", intermediate_size=64, num_key_value_heads=2, head_dim=8)


@case
def phi3() -> Case:
    return causal_lm("Phi3", intermediate_size=64, num_key_value_heads=2, pad_token_id=0)


@case
def falcon() -> Case:
    return causal_lm("Falcon")


@case
def opt() -> Case:
    return causal_lm("OPT", ffn_dim=64, word_embed_proj_dim=32, dropout=0.0)


@case
def bloom() -> Case:
    return causal_lm("Bloom", n_layer=2, n_head=4)


@case
def neox() -> Case:
    return causal_lm("GPTNeoX", intermediate_size=64)


@case
def olmo2() -> Case:
    return causal_lm("Olmo2", intermediate_size=64, num_key_value_heads=2)


@case
def bert() -> Case:
    from transformers import BertConfig, BertForMaskedLM

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    ids = torch.randint(1, 60, (4, 8))
    mask = torch.ones(4, 8, dtype=torch.long)
    mask[2, 6:] = 0
    return BertForMaskedLM(config), (), {"input_ids": ids, "attention_mask": mask, "labels": ids.clone()}, None


@case
def t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(
        vocab_size=64, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.randint(1, 60, (4, 8))
    return T5ForConditionalGeneration(config), (), {"input_ids": ids, "labels": torch.randint(1, 60, (4, 6))}, None


@case
def vit() -> Case:
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    config = ViTConfig(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        num_labels=5, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return (
        ViTForImageClassification(config),
        (),
        {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.arange(4)},
        None,
    )


class Grouped(nn.Module):
    """Grouped queries by repeat_interleave."""

    def __init__(self, dim: int = 32, heads: int = 4, kv: int = 2) -> None:
        super().__init__()
        self.heads, self.kv, self.size = heads, kv, dim // heads
        self.q, self.k, self.v = nn.Linear(dim, dim), nn.Linear(dim, kv * self.size), nn.Linear(dim, kv * self.size)
        self.o = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (m(x).view(b, s, -1, self.size).transpose(1, 2) for m in (self.q, self.k, self.v))
        k, v = (t.repeat_interleave(self.heads // self.kv, 1) for t in (k, v))
        return self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, s, -1))


@case
def grouped() -> Case:
    torch.manual_seed(0)
    return nn.Sequential(Grouped(), Grouped(), nn.LayerNorm(32)), (torch.randn(2, 6, 32),), {}, squares


class HardViews(nn.Module):
    """Sizes written as numbers, einsum, expand."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 64), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = torch.split(self.qkv(x), [32, 16, 16], dim=-1)
        q = q.view(2, 6, 4, 8).permute(0, 2, 1, 3)
        k, v = (t.view(2, 6, 2, 8).permute(0, 2, 1, 3) for t in (k, v))
        k, v = (t[:, :, None].expand(2, 2, 2, 6, 8).reshape(2, 4, 6, 8) for t in (k, v))
        w = torch.einsum("bhqd,bhkd->bhqk", q, k).reshape(8, 6, 6) / math.sqrt(8)
        w = w.softmax(-1).reshape(2, 4, 6, 6)
        return self.out(torch.einsum("bhqk,bhkd->bqhd", w, v).reshape(2, 6, 32))


@case
def hard_views() -> Case:
    torch.manual_seed(0)
    return HardViews(), (torch.randn(2, 6, 32),), {}, squares


class Alibi(nn.Module):
    """Slopes per head in a hidden buffer, a causal bias from iotas."""

    def __init__(self, dim: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(dim, dim) for _ in range(4))
        self.register_buffer("slopes", torch.tensor([2.0 ** -(i + 1) for i in range(heads)]), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, d = x.shape
        q, k, v = (m(x).view(b, s, self.heads, -1).transpose(1, 2) for m in (self.q, self.k, self.v))
        at = torch.arange(s)
        bias = self.slopes[:, None, None] * (at[None, :] - at[:, None])
        bias = bias.masked_fill(at[None, :] > at[:, None], float("-inf"))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None]).transpose(1, 2).reshape(b, s, d))


@case
def alibi() -> Case:
    torch.manual_seed(0)
    return Alibi(), (torch.randn(2, 9, 32),), {}, squares


@case
def encoder_layer() -> Case:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 3), (torch.randn(4, 6, 32),), {}, squares


@case
def attention_module() -> Case:
    torch.manual_seed(0)
    x = torch.randn(4, 6, 32)
    return nn.MultiheadAttention(32, 4, batch_first=True), (x, x.clone(), x.clone()), {"need_weights": True}, squares


class Buffers(nn.Module):
    """Buffers written in place, and a value without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("amax", torch.zeros(32))

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        self.steps += 1
        self.amax.copy_(torch.maximum(self.amax, h.detach().abs().amax(0)))
        return self.b(h / (1 + self.amax)) * self.steps


@case
def buffers() -> Case:
    torch.manual_seed(0)
    return Buffers(), (torch.randn(4, 16),), {}, squares


class Norms(nn.Module):
    """Batch, group, instance and RMS norms, no_grad, padding, in-place writes, moments."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.gn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GroupNorm(2, 8)
        self.rms, self.out, self.inorm = nn.RMSNorm(8), nn.Linear(8, 8), nn.InstanceNorm2d(8, affine=True)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inorm(self.gn(self.bn(self.conv(x)))).flatten(2).transpose(1, 2)
        with torch.no_grad():
            weight = self.out(y).exp()
        y = self.rms(self.out(y)) * weight + y.std(-1, keepdim=True) + y.var(1, keepdim=True, unbiased=False)
        z = torch.zeros_like(y)
        z[..., :4] = y[..., 4:]
        z[..., 4:] = y[..., :4] * 2
        z[:, 0] += 1.0
        return (
            F.pad(z, (1, 2, 0, 1), value=0.5)
            + F.mse_loss(y, z)
            + F.smooth_l1_loss(y, z)
            + torch.tensor([1.0, 2.0]).sum()
        )


@case
def norms() -> Case:
    torch.manual_seed(0)
    return Norms(), (torch.randn(4, 3, 4, 4),), {}, squares


class Nested(nn.Module):
    """Keyword inputs, nested dicts, None and plain values in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(
        self, batch: dict[str, Any], *, scale: Tensor | None = None, return_hidden: bool = False
    ) -> dict[str, Any]:
        h = F.relu(self.a(batch["x"]["feat"]))
        y = self.b(h)
        y = y * scale if scale is not None else y
        return {"logits": y, "hidden": [h] if return_hidden else None, "aux": (batch["y"], 3)}


@case
def nested() -> Case:
    torch.manual_seed(0)
    batch = {"x": {"feat": torch.randn(4, 16)}, "y": torch.arange(4)}
    return Nested(), (batch,), {"scale": torch.tensor(0.5), "return_hidden": True}, squares


@dataclass
class Batch:
    ids: Tensor
    labels: Tensor
    smoothing: float = 0.1


@dataclass
class Result:
    loss: Tensor
    logits: Tensor
    note: str = "kept"


class Tokens(nn.Module):
    """Dataclasses in and out, a tied head, smoothing, class weights, [N, C, T] logits, padding_idx."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.mid = nn.Embedding(17, 12, padding_idx=0), nn.Linear(12, 12)
        self.head = nn.Linear(12, 17, bias=False)
        self.head.weight = self.emb.weight
        self.register_buffer("weights", torch.linspace(0.5, 2.0, 17))

    def forward(self, batch: Batch) -> Result:
        logits = self.head(torch.tanh(self.mid(self.emb(batch.ids))))
        flat, target = logits.flatten(0, 1), batch.labels.flatten()
        loss = F.cross_entropy(flat, target, label_smoothing=batch.smoothing)
        loss = loss + F.cross_entropy(logits.transpose(1, 2), batch.labels, weight=self.weights)
        loss = loss + F.cross_entropy(logits.transpose(1, 2), batch.labels, reduction="none").pow(2).mean()
        loss = loss + F.nll_loss(F.log_softmax(flat, -1), target) + F.cross_entropy(flat, flat.detach().softmax(-1))
        return Result(loss, logits)


@case
def tokens() -> Case:
    torch.manual_seed(0)
    ids = torch.randint(0, 17, (4, 6))
    labels = ids.clone()
    labels[1, 2:] = -100
    return Tokens(), (), {"batch": Batch(ids, labels)}, None


class Checkpointed(nn.Module):
    """Activation checkpointing of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = x + checkpoint(layer, x, use_reentrant=i % 2 == 1)
        return x


@case
def checkpointed() -> Case:
    torch.manual_seed(0)
    return Checkpointed(), (torch.randn(4, 16),), {}, squares


class Shared(nn.Module):
    """A list whose elements share a weight, one module called twice, skips between layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.layers[2].weight = self.layers[0].weight
        self.twice = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        for i, layer in enumerate(self.layers):
            x = torch.tanh(layer(x)) + skip * (i % 2)
            skip = self.twice(x) if i % 2 == 0 else skip
        return x + skip


@case
def shared() -> Case:
    torch.manual_seed(0)
    return Shared(), (torch.randn(4, 8),), {}, squares
