"""Tiny models with experts, written in the ways that users write them."""

from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

VOCABULARY, EXPERTS, WIDTH, INNER = 64, 4, 16, 24
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 4,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64, "use_cache": False,
}  # fmt: skip


def sharpened(model: nn.Module) -> nn.Module:
    """Larger matrices: the usual deviation of 0.02 makes routing and attention almost uniform."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.mul_(6.0)
    return model


def deepseek(**changed: Any) -> nn.Module:
    """One dense layer and one with shared experts and group-limited routing."""
    torch.manual_seed(0)
    fields = {
        **COMMON, "intermediate_size": 64, "moe_intermediate_size": 16, "n_routed_experts": EXPERTS,
        "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16,
        "kv_lora_rank": 16, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8, **changed,
    }  # fmt: skip
    return sharpened(transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**fields)))


def qwen(**changed: Any) -> nn.Module:
    """Qwen3-MoE with the load-balance loss of all layers."""
    torch.manual_seed(0)
    fields = {
        **COMMON, "intermediate_size": 64, "moe_intermediate_size": 16, "num_experts": EXPERTS, "head_dim": 8,
        "output_router_logits": True, "router_aux_loss_coef": 0.5, **changed,
    }  # fmt: skip
    return sharpened(transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**fields)))


def gpt_oss() -> nn.Module:
    """Biases, clamps, and gates that are every second feature."""
    torch.manual_seed(0)
    fields = {**COMMON, "intermediate_size": 24, "num_local_experts": EXPERTS, "head_dim": 8, "sliding_window": 8}
    return sharpened(transformers.GptOssForCausalLM(transformers.GptOssConfig(**fields)))


def batch(rows: int = 4, length: int = 12, seed: int = 1) -> dict[str, Tensor]:
    """Token ids and labels, a few of which do not count."""
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    labels[0, :5] = -100
    return {"input_ids": ids, "labels": labels}


class Experts(nn.Module):
    """Stacked weights and a loop over the experts that were chosen."""

    def __init__(self, count: int = EXPERTS) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up = nn.Parameter(torch.randn(count, WIDTH, INNER, generator=generator) * 0.3)
        self.scale = nn.Parameter(torch.randn(count, INNER, generator=generator) + 1.0)
        self.down = nn.Parameter(torch.randn(count, INNER, WIDTH, generator=generator) * 0.3)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in chosen.unique().tolist():
            token, place = torch.where(chosen == e)
            out[token] += self.one(x[token], e) * weights[token, place, None]
        return out

    def one(self, x: Tensor, e: int) -> Tensor:
        """What expert ``e`` computes."""
        return (F.gelu(x @ self.up[e]) * self.scale[e]) @ self.down[e]


class PassThrough(Experts):
    """The last expert is none: it hands its tokens on."""

    def one(self, x: Tensor, e: int) -> Tensor:
        return x if e == EXPERTS - 1 else super().one(x, e)


class Centred(Experts):
    """An expert's rows are not computed one by one."""

    def one(self, x: Tensor, e: int) -> Tensor:
        return super().one(x - x.mean(0, keepdim=True), e)


class Moe(nn.Module):
    """Sigmoid scores, a bias for balance that is updated without gradients, and experts.

    ``bias`` moves towards the experts with fewer tokens than the mean, as in DeepSeek-V3.
    """

    def __init__(self, experts: nn.Module | None = None, k: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = experts or Experts()
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.k = k
        self.register_buffer("bias", torch.tensor([0.5, 0.0, -0.2, 0.1])[:EXPERTS])

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts of each token and their weights."""
        scores = torch.sigmoid(self.router(x))
        chosen = (scores + self.bias).topk(self.k, -1).indices
        weights = scores.gather(1, chosen)
        if self.training:
            with torch.no_grad():
                load = F.one_hot(chosen, EXPERTS).sum((0, 1)).float()
                self.bias += 0.01 * torch.sign(load.mean() - load)
        return chosen, weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(0, 1)
        chosen, weights = self.route(t)
        return (x.flatten(0, 1) + self.shared(t) + self.experts(t, chosen, weights)).view_as(x)


class Loop(Moe):
    """The loop stands in the layer itself: no structure gives it away."""

    def forward(self, x: Tensor) -> Tensor:
        t = x.flatten(0, 1)
        chosen, weights = self.route(t)
        out = torch.zeros_like(t)
        for e in range(EXPERTS):
            token, place = torch.where(chosen == e)
            if token.numel():
                out.index_add_(0, token, self.experts.one(t[token], e) * weights[token, place, None])
        return (t + self.shared(t) + out).view_as(x)


def adapted(self: Loop, x: Tensor) -> Tensor:
    """What stands in for the forward of a Loop."""
    import autopar

    t = x.flatten(0, 1)
    chosen, weights = self.route(t)
    own = self.experts
    out = autopar.experts(
        t, chosen, weights, own.up, own.scale, own.down,
        expert=lambda rows, up, scale, down: (F.gelu(rows @ up) * scale) @ down,
    )  # fmt: skip
    return (t + self.shared(t) + out).view_as(x)


def collapsed(experts: tuple[int, ...] = (0, 1)) -> Moe:
    """Every token chooses the same experts."""
    moe = Moe(k=len(experts))
    with torch.no_grad():
        moe.bias.copy_(torch.tensor([10.0 if e in experts else 0.0 for e in range(EXPERTS)]))
    return moe.eval()


def states(rows: int = 4, seed: int = 1) -> Tensor:
    """Hidden states [rows, 6, WIDTH]."""
    return torch.randn(rows, 6, WIDTH, generator=torch.Generator().manual_seed(seed))


def squared(out: Tensor) -> Tensor:
    """A loss in which rows weigh differently."""
    return (out**2 * torch.linspace(0.5, 1.5, WIDTH)).mean() * 10
