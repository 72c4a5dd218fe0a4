"""Where a derivative is special (a zero, a tie, a saturated probability), the traced program has the model's own."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.evaluate import evaluate
from autopar.trace import trace
from tests.trace.test_normalize import MESH, Calls

F64 = torch.float64
ANY = torch.randn(3, 4, dtype=F64, generator=torch.Generator().manual_seed(0))
FLAT = torch.cat([ANY[:1], torch.zeros(1, 4, dtype=F64), ANY[2:]])  # a row without spread or length
TIES = torch.tensor([[1, 1, 2, 2], [3, 3, 3, 3], [0, 0, 0, 0]], dtype=F64)
SURE = torch.tensor([[0, 1, 0.5, 0], [1, 0, 0, 1], [0.2, 1, 0, 0.3]], dtype=F64)  # probabilities, 0 and 1 among them
BITS = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [0, 1, 1, 0]], dtype=F64)
CLASS = torch.tensor([0, -100, 3])

IDS = torch.tensor([[0, 1, 0], [2, 2, 2], [2, 0, 1]])


def _mixture(x: Tensor) -> Tensor:
    chosen = torch.distributions.Categorical(logits=x)
    parts = torch.distributions.Normal(x, x.exp())
    return torch.distributions.MixtureSameFamily(chosen, parts).log_prob(x[:, 0])


EDGES: dict[str, tuple[Callable[[Tensor], Any], Tensor]] = {
    "std": (lambda x: x.std(-1) + x.std(-1, correction=0), FLAT),
    "std_of_all": (lambda x: x.std(), torch.zeros(3, 4, dtype=F64)),
    "std_mean": (lambda x: sum(torch.std_mean(x, -1)), FLAT),
    "norm_by_std": (lambda x: (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + 1e-2), FLAT),
    "var": (lambda x: x.var(-1), FLAT),
    "bce": (lambda x: F.binary_cross_entropy(x, BITS), SURE),
    "bce_weighted": (lambda x: F.binary_cross_entropy(x, BITS, weight=ANY.abs(), reduction="sum"), SURE),
    "bce_of_targets": (lambda x: F.binary_cross_entropy(BITS.clamp(0.1, 0.9), x, reduction="none"), SURE),
    "bce_saturated": (lambda x: F.binary_cross_entropy(torch.sigmoid(x * 50), BITS), ANY),
    "bce_logits": (lambda x: F.binary_cross_entropy_with_logits(x * 50, BITS), ANY),
    "cosine": (lambda x: F.cosine_similarity(x, BITS, dim=-1), FLAT),
    "normalize": (lambda x: F.normalize(x, dim=-1), FLAT),
    "norms": (lambda x: x.norm(dim=-1) + x.norm(p=1, dim=-1) + x.norm(p=float("inf"), dim=-1), FLAT),
    "layer_norm": (lambda x: F.layer_norm(x, (4,)) + F.rms_norm(x, (4,)), FLAT),
    "largest": (lambda x: x.max() + x.amax(-1) + x.max(-1).values + x.min(0).values[:3], TIES),
    "pairs": (lambda x: torch.maximum(x, x.flip(-1)) + torch.minimum(x, x.flip(0)), TIES),
    "clamp": (lambda x: x.clamp(0, 2) + F.relu(x) + F.hardtanh(x) + x.abs(), TIES),
    "order": (lambda x: x.sort(-1)[0] + x.topk(4, -1)[0] + x.cummax(-1).values, TIES),
    "median": (lambda x: x.median(-1).values, TIES),
    "product": (lambda x: x.prod(-1) + x.cumprod(-1)[:, 2], SURE),
    "smooth": (lambda x: F.smooth_l1_loss(x, BITS) + F.l1_loss(x, BITS) + F.huber_loss(x, BITS), TIES),
    "smooth_zero": (lambda x: F.smooth_l1_loss(x, BITS, beta=0.0), TIES),
    "power": (lambda x: x.pow(0) + torch.pow(x, BITS), FLAT),
    "entropy": (lambda x: torch.xlogy(x, x.clamp_min(1e-9)).sum(-1), SURE),
    "counts": (lambda x: torch.bincount(CLASS[::2], minlength=5) * x.sum(), ANY),
    "counts_weighted": (lambda x: IDS.flatten().bincount(x.detach()[:, :3].flatten(), 4) * x.sum(), ANY),
    "distance": (lambda x: torch.cdist(x, x) + F.pairwise_distance(x, BITS), TIES),
    "triplet": (lambda x: F.triplet_margin_loss(x, ANY, ANY.flip(0), swap=True), FLAT),
    "softmax": (lambda x: x.masked_fill(BITS.bool(), -torch.inf).softmax(-1), ANY),
    "classes": (lambda x: F.cross_entropy(x * 50, CLASS), ANY),
    "hidden_class": (lambda x: F.cross_entropy(x.masked_fill(torch.arange(4) == 2, -torch.inf), CLASS), ANY),
    "one_row": (lambda x: F.cross_entropy(x[0], torch.tensor(2)) + F.nll_loss(x[1], torch.tensor(3)), ANY),
    "mixture": (lambda x: _mixture(x), ANY),
    "pool": (lambda x: F.max_pool1d(x[None], 2) + F.adaptive_max_pool1d(x[None], 2), TIES),
    "scatter": (lambda x: x.new_zeros(3, 4).scatter_reduce(1, torch.tensor([[0, 0, 1, 2]] * 3), x, "amax"), TIES),
}  # fmt: skip


@pytest.mark.parametrize("name", EDGES)
def test_gradients_where_they_are_special(name: str) -> None:
    compare(*EDGES[name])


def compare(function: Callable[[Tensor], Any], x: Tensor) -> None:
    """Values and gradients of the trace are the function's own."""
    traced = trace(Calls(function), (x,), {}, mesh=MESH)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    got, want = evaluate(traced.program, traced.constants, [mine])[0], function(theirs)
    torch.testing.assert_close(got, want)
    weights = torch.cos(torch.arange(want.numel(), dtype=F64)).reshape(want.shape)
    (got * weights).sum().backward()
    (want * weights).sum().backward()
    torch.testing.assert_close(mine.grad, theirs.grad)


@pytest.mark.parametrize("padding", [None, 2, -1])
@pytest.mark.parametrize("mode", ["sum", "mean", "max", "weighted"])
def test_bags_of_one_size(mode: str, padding: int | None) -> None:
    def bags(x: Tensor) -> Any:
        weights = {"per_sample_weights": IDS * 0.5 + 1.0} if mode == "weighted" else {}
        given = {k: v.to(F64) for k, v in weights.items()}
        return F.embedding_bag(IDS, x, mode="sum" if weights else mode, padding_idx=padding, **given)

    compare(bags, ANY)


def test_bags_by_offsets_are_refused() -> None:
    with pytest.raises(AutoparError, match="2-d input"):
        compare(lambda x: F.embedding_bag(IDS.flatten(), x, torch.tensor([0, 2, 5])), ANY)


def test_a_count_of_a_number_beyond_the_length_is_an_error() -> None:
    with pytest.raises((IndexError, RuntimeError), match="out of range|out of bounds"):
        compare(lambda x: torch.bincount(CLASS[::2], minlength=3) * x.sum(), ANY)
