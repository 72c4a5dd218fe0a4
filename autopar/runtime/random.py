"""Random numbers that follow the mesh: the same where ranks hold the same value, different where they hold shards.

They are drawn by its own generator, seeded by a hash of the seed, the step, the module's path, the op's key and the
coordinates of the axes that shard the value. So it depends on no global generator, on no order of execution, and a
recomputed forward draws them again.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.errors import AutoparError
from autopar.ir.scores import Masks, capped, with_sink
from autopar.runtime.axis import Axis


@dataclass(frozen=True)
class Rng:
    """Random state of one module in one step: a 0-d int64 CPU tensor, so that compiled code does not depend on it."""

    seed: Tensor


@dataclass
class Streams:
    """The random state of a model: equal on all ranks, saved with it.

    Args:
        seed: chosen by the user.
        step: counts forwards; ``advance`` before each.
    """

    seed: int
    step: int = 0

    def advance(self) -> None:
        """Go to the next forward's masks."""
        self.step += 1

    def at(self, path: str) -> Rng:
        """The state of the module at ``path`` in this step."""
        return Rng(torch.tensor(_mix(self.seed, self.step, path), dtype=torch.int64))

    def state_dict(self) -> dict[str, int]:
        """Seed and step."""
        return {"seed": self.seed, "step": self.step}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from a saved seed and step."""
        self.seed, self.step = state["seed"], state["step"]


def _mix(*parts: object) -> int:
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


@torch.library.custom_op("autopar::keep_mask", mutates_args=())
def keep_mask(
    seed: Tensor, key: str, place: Sequence[int], shape: Sequence[int], probability: float, device: torch.device
) -> Tensor:
    """A bool mask of ``shape``, true with ``probability``, drawn for (seed, key, place)."""
    generator = torch.Generator(device).manual_seed(_mix(int(seed), key, tuple(place)))
    return torch.empty(shape, dtype=torch.bool, device=device).bernoulli_(probability, generator=generator)


@keep_mask.register_fake
def _(
    seed: Tensor, key: str, place: Sequence[int], shape: Sequence[int], probability: float, device: torch.device
) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device=device)


def dropout(x: Tensor, p: float, key: str | int, shares: tuple[Axis, ...], rng: Rng) -> Tensor:
    """Zero each element with probability ``p`` and scale the rest by 1/(1-p).

    Args:
        key: distinguishes the op within its module.
        shares: the axes whose coordinates hold different parts of ``x``; ranks that differ on others draw the same.

    Raises:
        AutoparError: ``bad-dropout`` where ``p`` is no probability.
    """
    if not 0.0 <= p <= 1.0:
        raise AutoparError("bad-dropout", f"dropout {key}: p is {p}", "give a probability from 0 to 1")
    if p == 0.0:
        return x
    if p == 1.0:
        return x * 0.0
    place = [a.coordinate for a in shares if a.size > 1]
    names = ",".join(a.name for a in shares if a.size > 1)
    keep = keep_mask(rng.seed, f"{key}/{names}", place, x.shape, 1.0 - p, x.device)
    return x * keep * (1.0 / (1.0 - p))


@torch.library.custom_op("autopar::numbers", mutates_args=())
def numbers(like: Tensor, seed: Tensor, key: str, place: Sequence[int], kind: str) -> Tensor:
    """Numbers of ``kind``, of the shape and dtype of ``like``, drawn for (seed, key, place)."""
    generator = torch.Generator(like.device).manual_seed(_mix(int(seed), key, tuple(place)))
    out = torch.empty_like(like, memory_format=torch.contiguous_format)
    return out.uniform_(generator=generator) if kind == "uniform" else out.normal_(generator=generator)


@numbers.register_fake
def _(like: Tensor, seed: Tensor, key: str, place: Sequence[int], kind: str) -> Tensor:
    return torch.empty_like(like, memory_format=torch.contiguous_format)


def draw(x: Tensor, kind: str, key: str | int, shares: tuple[Axis, ...], rng: Rng) -> Tensor:
    """Numbers of x's shape and dtype, "uniform" from 0 to 1 or "normal"; ``key`` and ``shares`` as in ``dropout``."""
    place = [a.coordinate for a in shares if a.size > 1]
    names = ",".join(a.name for a in shares if a.size > 1)
    return numbers(x, rng.seed, f"{key}/{names}", place, kind)


def attention_with_dropout(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
    key: str | int,
    shares: tuple[Axis, ...],
    rng: Rng,
    fill: float | None = None,
    bias: Tensor | None = None,
    sink: Tensor | None = None,
    cap: float | None = None,
    band: tuple[int | None, int | None] | None = None,
    query_ids: Tensor | None = None,
    key_ids: Tensor | None = None,
) -> Tensor:
    """``scaled_dot_product_attention`` with the dropout of its probabilities drawn as ``dropout`` draws it.

    Args:
        q, k, v: [..., heads, length, width]; with ``enable_gqa`` k and v may have fewer heads.
        mask: bool (true: attend) or added to the scores; a query that attends to nothing gets 0.
        scale: of the scores; None is 1/sqrt(width).
        fill: the score of what a bool mask hides; None is minus infinity.
        bias, sink, cap, band, query_ids, key_ids: as in ``autopar.ir.ops.attention``.

    Returns:
        [..., heads, length, width of v] in q's dtype; half precision is computed in float32.
    """
    masks = Masks(mask, is_causal, fill, bias, band, query_ids, key_ids)
    written = fill is not None or sink is not None or cap is not None
    if p == 0.0 and not written and not masks.several:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa and k.shape[-3] != q.shape[-3]:
        k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
        v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
    wide = torch.float32 if q.dtype in (torch.float16, torch.bfloat16) else q.dtype
    scores = q.to(wide) @ k.to(wide).transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
    scores = masks.hide(capped(scores, cap))
    probabilities = with_sink(scores, sink, fill is None)
    return (dropout(probabilities, p, key, shares, rng) @ v.to(wide)).to(q.dtype)
