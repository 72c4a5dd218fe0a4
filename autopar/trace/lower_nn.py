"""Normal forms of attention, embeddings and losses."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from autopar.errors import AutoparError
from autopar.ir import ops
from autopar.ir.program import Spec
from autopar.trace.affine import affine
from autopar.trace.builder import Builder, aten, dtype, lowering, positive, shape


@lowering(aten.embedding.default)
def _embedding(
    b: Builder, w: fx.Node, ids: fx.Node, padding: int = -1, by_freq: bool = False, sparse: bool = False
) -> Any:
    if by_freq or sparse:
        where = b.like.meta["module"] if b.like is not None else ""
        raise AutoparError("unsupported-op", f"{where}: embedding with scale_grad_by_freq or sparse", "switch both off")
    return b.emit(aten.embedding.default, w, ids, padding) if padding >= 0 else b.emit(aten.embedding.default, w, ids)


BAGS = ("sum", "mean", "max")


def _bags(rows: Tensor, ids: Tensor, weights: Tensor | None, mode: str, padding: int) -> Tensor:
    """[bags, per bag, D] to [bags, D]; entries of the row ``padding`` do not count, and a bag without others is 0."""
    if weights is not None:
        rows = rows * weights.unsqueeze(-1)
    if mode == "max":
        if padding < 0:
            return rows.max(1).values
        seen = (ids != padding).unsqueeze(-1)
        best = torch.where(seen, rows, float("-inf")).max(1).values
        return torch.where(seen.any(1), best, 0.0)
    counts: Any = ids.shape[1]
    if padding >= 0:
        seen = (ids != padding).unsqueeze(-1).to(rows.dtype)
        rows, counts = rows * seen, seen.sum(1).clamp_min(1)
    return rows.sum(1) / counts if mode == "mean" else rows.sum(1)


@lowering(aten.embedding_bag.padding_idx)
def _padded_bag(b: Builder, w: fx.Node, *args: Any) -> Any:
    """Here -1 is the last row, and None none."""
    padding = -1 if args[-1] is None else args[-1] % shape(w)[0]
    given = [*args[:-1], padding]
    return _embedding_bag(b, w, *given)


@lowering(aten.embedding_bag.default, aten._embedding_bag.default)
def _embedding_bag(
    b: Builder, w: fx.Node, ids: fx.Node, offsets: fx.Node, by_freq: bool = False, mode: int = 0, sparse: bool = False,
    weights: Any = None, last: bool = False, padding: int = -1,
) -> tuple[Any, None, None, None]:  # fmt: skip
    """Bags of one size, as a 2-d input has them: a lookup and a reduction."""
    line, count = affine(offsets), shape(offsets)[0]
    size = shape(ids)[0] // max(count, 1)
    even = line is not None and line.const == 0 and (line.without((count,)).terms == ((-1, size),) or count == 1)
    if by_freq or sparse or last or len(shape(ids)) != 1 or not even or count * size != shape(ids)[0]:
        where = b.like.meta.get("module") if b.like is not None else None
        raise AutoparError(
            "unsupported-op",
            f"{where or 'the model'}: EmbeddingBag with offsets, scale_grad_by_freq or sparse",
            "give it a 2-d input (bags of one size, padded with padding_idx), and switch the others off",
        )
    bags = b.reshape(ids, (count, size))
    rows = _embedding(b, w, bags, padding)
    weights = b.reshape(weights, (count, size)) if weights is not None else None
    return b.inline(_bags, rows, bags, weights, BAGS[mode], padding), None, None, None


@lowering(aten.scaled_dot_product_attention.default)
def attention(
    b: Builder,
    q: fx.Node,
    k: fx.Node,
    v: fx.Node,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> fx.Node:
    """One canonical op; K and V that were repeated for groups of queries are taken before the repetition."""
    grouped = None if enable_gqa else _unrepeated(b, k, v)
    if grouped is not None:
        (k, v), enable_gqa = grouped, True
    enable_gqa = enable_gqa and shape(q)[-3] != shape(k)[-3]
    key = b.key() if dropout_p > 0 else 0
    spec = Spec((*shape(q)[:-1], shape(v)[-1]), dtype(q))
    return b.emit(
        ops.attention, q, k, v, attn_mask, float(dropout_p), bool(is_causal), scale, enable_gqa, key, spec=spec
    )


def _unrepeated(b: Builder, k: fx.Node, v: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """K and V before each head was repeated, if both were, equally often."""
    found = [_repeated(x) for x in (k, v)]
    if found[0] is None or found[1] is None or found[0][1] != found[1][1]:
        return None
    (k0, _), (v0, _) = found[0], found[1]
    return b.reshape(k0, _without_repeat(k0)), b.reshape(v0, _without_repeat(v0))


def _without_repeat(x: fx.Node) -> tuple[int, ...]:
    return (*shape(x)[:-3], *shape(x)[-2:])


def _repeated(x: fx.Node) -> tuple[fx.Node, int] | None:
    """([..., H, 1, S, D], r) where ``x`` is reshape(expand(that, [..., H, r, S, D]), [..., H r, S, D])."""
    if x.target is not aten.reshape.default:
        return None
    wide = x.args[0]
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    narrow = wide.args[0]
    assert isinstance(narrow, fx.Node)
    before, after = shape(narrow), shape(wide)
    if len(before) != len(after) or len(after) != len(shape(x)) + 1 or len(after) < 4:
        return None
    repeats = after[-3]
    ok = before == (*after[:-3], 1, *after[-2:]) and shape(x) == (*after[:-4], after[-4] * repeats, *after[-2:])
    return (narrow, repeats) if ok and repeats > 1 else None


def _classes_last(b: Builder, x: fx.Node) -> fx.Node:
    """[C], [N, C] or [N, C, ...] with the classes as the last dim."""
    n = len(shape(x))
    return b.permute(x, [0, *range(2, n), 1]) if n > 2 else x


def _reduced(b: Builder, loss: fx.Node, target: fx.Node, reduction: int, ignore_index: int) -> fx.Node:
    """The mean over the targets that count, the sum, or the losses as they are. Half precision adds up in float32."""
    if reduction == 0:
        return loss
    every = list(range(len(shape(loss))))
    kind = dtype(loss)
    wide = b.cast(loss, torch.promote_types(kind, torch.float32))
    added = b.emit(aten.sum.dim_IntList, wide, every, False) if every else wide
    if reduction == 1:
        counts = b.cast(b.emit(aten.ne.Scalar, target, ignore_index), dtype(wide))
        count = b.emit(aten.sum.dim_IntList, counts, every, False) if every else counts
        added = b.emit(aten.div.Tensor, added, count)
    return b.cast(added, kind)


@lowering(aten.cross_entropy_loss.default)
def cross_entropy(
    b: Builder,
    x: fx.Node,
    target: fx.Node,
    weight: Any = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    """Class indices: ``token_loss`` and its reduction. Weights, smoothing, probabilities: as torch composes them."""
    if target.meta["spec"].is_float and shape(target) == shape(x):
        return b.inline(_soft_targets, x, target, weight, reduction, label_smoothing)
    if weight is not None or label_smoothing:
        return b.inline(_weighted, x, target, weight, reduction, ignore_index, label_smoothing)
    loss = b.emit(ops.token_loss, _classes_last(b, x), target, ignore_index, spec=Spec(shape(target), dtype(x)))
    return _reduced(b, loss, target, reduction, ignore_index)


def _soft_targets(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, smoothing: float) -> Tensor:
    """``cross_entropy_loss_prob_target`` of ATen/native/LossNLL.cpp."""
    dim = 0 if x.ndim == 1 else 1
    classes = x.shape[dim]
    if smoothing:
        target = target * (1 - smoothing) + smoothing / classes
    scores = F.log_softmax(x, dim) * target
    if weight is not None:
        scores = scores * weight.reshape([-1 if d == dim else 1 for d in range(x.ndim)])
    loss = -scores.sum(dim)
    n = x.numel() // classes
    return loss if reduction == 0 else loss.sum() / n if reduction == 1 else loss.sum()


def _weighted(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int, smoothing: float
) -> Tensor:
    """``cross_entropy_loss_label_smoothing`` of ATen/native/LossNLL.cpp."""
    x = x.movedim(1, -1) if x.ndim > 2 else x
    logp = F.log_softmax(x, -1)
    seen = target != ignore_index
    index = torch.where(seen, target, 0)
    picked = logp.gather(-1, index.unsqueeze(-1)).squeeze(-1)
    w = torch.where(seen, weight[index] if weight is not None else 1.0, 0.0).to(x.dtype)
    nll = -picked * w
    total = w.sum()
    nll = nll if reduction == 0 else nll.sum() if reduction == 2 else nll.sum() / total
    if not smoothing:
        return nll
    scores = logp if weight is None else logp * weight
    smooth = torch.where(seen, -scores.sum(-1), 0.0)
    smooth = smooth if reduction == 0 else smooth.sum() if reduction == 2 else smooth.sum() / total
    return (1 - smoothing) * nll + smooth * (smoothing / x.shape[-1])


@lowering(aten.nll_loss_nd.default, aten.nll_loss.default, aten.nll_loss2d.default)
def nll_loss(
    b: Builder, x: fx.Node, target: fx.Node, weight: Any = None, reduction: int = 1, ignore_index: int = -100
) -> Any:
    """Of a log_softmax: cross entropy of its input. Of other log-probabilities: a gather."""
    dim = positive(1, len(shape(x))) if len(shape(x)) > 1 else 0
    if x.target is aten.log_softmax.int and x.args[1] == dim:
        inner: Any = x.args[0]
        return cross_entropy(b, inner, target, weight, reduction, ignore_index)
    return b.inline(_nll, x, target, weight, reduction, ignore_index)


@lowering(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def _nll_loss_forward(b: Builder, x: fx.Node, target: fx.Node, weight: Any, reduction: int, ignore_index: int) -> Any:
    return nll_loss(b, x, target, weight, reduction, ignore_index), None


def _nll(logp: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Tensor:
    logp = logp.movedim(1, -1) if logp.ndim > 2 else logp
    seen = target != ignore_index
    index = torch.where(seen, target, 0)
    w = torch.where(seen, weight[index] if weight is not None else 1.0, 0.0).to(logp.dtype)
    loss = -logp.gather(-1, index.unsqueeze(-1)).squeeze(-1) * w
    return loss if reduction == 0 else loss.sum() if reduction == 2 else loss.sum() / w.sum()


def _finish(loss: Tensor, reduction: int) -> Tensor:
    return loss if reduction == 0 else loss.mean() if reduction == 1 else loss.sum()


def _mse(x: Tensor, y: Tensor, reduction: int) -> Tensor:
    return _finish((x - y).pow(2), reduction)


def _l1(x: Tensor, y: Tensor, reduction: int) -> Tensor:
    return _finish((x - y).abs(), reduction)


def _smooth_l1(x: Tensor, y: Tensor, reduction: int, beta: float) -> Tensor:
    if beta == 0:
        return _l1(x, y, reduction)
    d = (x - y).abs()
    return _finish(torch.where(d < beta, 0.5 * d.pow(2) / beta, d - 0.5 * beta), reduction)


def _huber(x: Tensor, y: Tensor, reduction: int, delta: float) -> Tensor:
    d = (x - y).abs()
    return _finish(torch.where(d <= delta, 0.5 * d.pow(2), delta * (d - 0.5 * delta)), reduction)


def _bce(x: Tensor, y: Tensor, weight: Tensor | None, reduction: int) -> Tensor:
    """``binary_cross_entropy`` of ATen/native/Loss.cpp: its derivative by x is finite where x is 0 or 1."""
    seen = x.detach()
    slope = (seen - y.detach()) / ((1 - seen) * seen).clamp_min(1e-12)
    loss = (y - 1) * torch.log1p(-seen).clamp_min(-100) - y * torch.log(seen).clamp_min(-100) + (x - seen) * slope
    return _finish(loss if weight is None else loss * weight, reduction)


def _bce_logits(x: Tensor, y: Tensor, weight: Tensor | None, positive: Tensor | None, reduction: int) -> Tensor:
    soft = F.softplus(-x)
    loss = (1 - y) * x + (soft if positive is None else (1 + (positive - 1) * y) * soft)
    return _finish(loss if weight is None else loss * weight, reduction)


def _cosine(x: Tensor, y: Tensor, dim: int, eps: float) -> Tensor:
    """``cosine_similarity`` of ATen/native/Distance.cpp: norms are bounded below, their gradients are not."""
    x, y = torch.broadcast_tensors(x, y)
    norms = [torch.linalg.vector_norm(t, 2, dim, keepdim=True) for t in (x, y)]
    a, b = (n + (n.clamp_min(eps) - n).detach() for n in norms)
    total: Tensor = (x / a * (y / b)).sum(dim)
    return total


@lowering(aten.cosine_similarity.default)
def _cosine_similarity(b: Builder, x: fx.Node, y: fx.Node, dim: int = 1, eps: float = 1e-8) -> Any:
    return b.inline(_cosine, x, y, dim, eps)


@lowering(aten.mse_loss.default)
def _mse_loss(b: Builder, x: fx.Node, y: fx.Node, reduction: int = 1) -> Any:
    return b.inline(_mse, x, y, reduction)


@lowering(aten.l1_loss.default)
def _l1_loss(b: Builder, x: fx.Node, y: fx.Node, reduction: int = 1) -> Any:
    return b.inline(_l1, x, y, reduction)


@lowering(aten.smooth_l1_loss.default)
def _smooth_l1_loss(b: Builder, x: fx.Node, y: fx.Node, reduction: int = 1, beta: float = 1.0) -> Any:
    return b.inline(_smooth_l1, x, y, reduction, beta)


@lowering(aten.huber_loss.default)
def _huber_loss(b: Builder, x: fx.Node, y: fx.Node, reduction: int = 1, delta: float = 1.0) -> Any:
    return b.inline(_huber, x, y, reduction, delta)


@lowering(aten.binary_cross_entropy.default)
def _bce_loss(b: Builder, x: fx.Node, y: fx.Node, weight: Any = None, reduction: int = 1) -> Any:
    return b.inline(_bce, x, y, weight, reduction)


@lowering(aten.binary_cross_entropy_with_logits.default)
def _bce_logits_loss(
    b: Builder, x: fx.Node, y: fx.Node, weight: Any = None, positive: Any = None, reduction: int = 1
) -> Any:
    return b.inline(_bce_logits, x, y, weight, positive, reduction)
