"""The rule table: one op, one line. Each line is proved by execution in tests/rules.

A line says which factors of the op's dims are the same (``autopar.rules.notation``), in which inputs the op is
linear, and how its arguments change when it runs on shards (``autopar.rules.local``).
"""

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.ir import ops
from autopar.rules import builders as b
from autopar.rules.attention import attention, ring_attention
from autopar.rules.builders import Builder, along, permuted, pointwise, reduction, rule
from autopar.rules.convolution import convolution
from autopar.rules.counting import histogram
from autopar.rules.experts import experts, stacked
from autopar.rules.matrices import matrices, searched
from autopar.rules.relation import Labels, Opaque, Relation

aten = torch.ops.aten

TABLE: dict[Any, Builder] = {
    # matrix products
    aten.linear.default: rule("b.. i, o i, [+o] -> b.. o", {0, 2}, {1, 2}, {0}, {1}),
    aten.addmm.default: b.addmm,
    aten.mm.default: rule("b i, i o -> b o", {0}, {1}),
    aten.bmm.default: rule("n b i, n i o -> n b o", {0}, {1}),
    aten.baddbmm.default: rule("+n b o, n b i, n i o -> n b o", {0, 1}, {0, 2}),
    aten.mv.default: rule("b i, i -> b", {0}, {1}),
    aten.dot.default: rule("i, i -> ", {0}, {1}),
    aten.vdot.default: rule("i, i -> ", {0}, {1}),
    aten.matmul.default: b.matmul,
    aten.convolution.default: convolution,
    aten.conv1d.default: convolution,
    aten.conv2d.default: convolution,
    aten.conv3d.default: convolution,
    aten._cdist_forward.default: rule("b.. p !m, b.. r !m -> b.. p r"),
    # matrices one by one
    aten.linalg_inv_ex.default: matrices,
    aten._linalg_det.default: matrices,
    aten._linalg_slogdet.default: matrices,
    aten._linalg_solve_ex.default: matrices,
    aten.linalg_solve_triangular.default: matrices,
    aten.linalg_cholesky_ex.default: matrices,
    aten.linalg_qr.default: matrices,
    aten._linalg_svd.default: matrices,
    aten._linalg_eigh.default: matrices,
    aten.linalg_matrix_exp.default: matrices,
    aten.linalg_pinv.atol_rtol_tensor: matrices,
    # lookups and losses
    aten.embedding.default: b.embedding,
    ops.token_loss: rule("n.. v, n.. -> n.."),
    ops.attention: attention,
    ops.experts: experts,
    ops.stacked: stacked,
    ops.ring_attention: ring_attention,
    # sums
    aten.sum.default: reduction(True),
    aten.sum.dim_IntList: reduction(True),
    aten.mean.default: reduction(True),
    aten.mean.dim: reduction(True),
    # reductions that are no sums
    aten.amax.default: reduction(False),
    aten.amin.default: reduction(False),
    aten.max.default: reduction(False),
    aten.min.default: reduction(False),
    aten.max.dim: reduction(False),
    aten.min.dim: reduction(False),
    aten.argmax.default: reduction(False),
    aten.argmin.default: reduction(False),
    aten.any.default: reduction(False),
    aten.any.dim: reduction(False),
    aten.all.default: reduction(False),
    aten.all.dim: reduction(False),
    aten.prod.default: reduction(False),
    aten.prod.dim_int: reduction(False),
    aten.logsumexp.default: reduction(False),
    aten.linalg_vector_norm.default: reduction(False),
    aten.histc.default: histogram,
    # along one dim
    aten.softmax.int: along(),
    aten._softmax.default: along(),
    aten.log_softmax.int: along(),
    aten._log_softmax.default: along(),
    aten.cumsum.default: along(linear=True),
    aten.cumprod.default: along(),
    aten.sort.default: along(),
    aten.sort.stable: along(),
    aten.argsort.default: along(),
    aten.topk.default: along(),
    aten.logcumsumexp.default: along(),
    aten.cummax.default: along(),
    aten.cummin.default: along(),
    aten.median.dim: reduction(False),
    aten.nanmedian.dim: reduction(False),
    aten.mode.default: reduction(False),
    aten.kthvalue.default: reduction(False),
    aten.linalg_cross.default: along(),
    aten.triu.default: along(last=2, linear=True),
    aten.tril.default: along(last=2, linear=True),
    aten.gather.default: b.gather,
    aten.scatter.src: b.scatter,
    aten.scatter.value: b.scatter,
    aten.scatter_add.default: b.scatter,
    aten.scatter_reduce.two: b.scatter,
    aten.index_put.default: b.index_put,
    aten.slice_scatter.default: b.put_slice,
    aten.index_add.default: b.index_add,
    aten.index_copy.default: b.index_add,
    aten.index_fill.int_Scalar: b.index_fill,
    aten.index.Tensor: b.index,
    aten.index_select.default: b.index_select,
    # norms
    aten.layer_norm.default: b.normalized,
    aten.rms_norm.default: b.normalized,
    # pooling, resampling, transforms
    aten.avg_pool1d.default: b.spatial(1),
    aten.avg_pool2d.default: b.spatial(2),
    aten.avg_pool3d.default: b.spatial(3),
    aten.max_pool2d_with_indices.default: b.spatial(2),
    aten.max_pool3d_with_indices.default: b.spatial(3),
    aten._adaptive_avg_pool2d.default: b.spatial(2),
    aten._adaptive_avg_pool3d.default: b.spatial(3),
    aten.adaptive_max_pool2d.default: b.spatial(2),
    aten.adaptive_max_pool3d.default: b.spatial(3),
    aten.max_unpool2d.default: rule("n.. !h !w, n.. !h !w -> n.. !y !x"),
    aten.max_unpool3d.default: rule("n.. !d !h !w, n.. !d !h !w -> n.. !z !y !x"),
    aten.upsample_nearest1d.default: b.spatial(1),
    aten.upsample_nearest2d.default: b.spatial(2),
    aten.upsample_nearest3d.default: b.spatial(3),
    aten._upsample_nearest_exact1d.default: b.spatial(1),
    aten._upsample_nearest_exact2d.default: b.spatial(2),
    aten._upsample_nearest_exact3d.default: b.spatial(3),
    aten.upsample_linear1d.default: b.spatial(1),
    aten.upsample_bilinear2d.default: b.spatial(2),
    aten.upsample_trilinear3d.default: b.spatial(3),
    aten.upsample_bicubic2d.default: b.spatial(2),
    aten._upsample_bilinear2d_aa.default: b.spatial(2),
    aten._upsample_bicubic2d_aa.default: b.spatial(2),
    aten.reflection_pad1d.default: b.spatial(1),
    aten.reflection_pad2d.default: b.spatial(2),
    aten.reflection_pad3d.default: b.spatial(3),
    aten.replication_pad1d.default: b.spatial(1),
    aten.replication_pad2d.default: b.spatial(2),
    aten.replication_pad3d.default: b.spatial(3),
    aten.im2col.default: rule("n !c !h !w -> n !k !l", {0}),
    aten.col2im.default: rule("n !k !l -> n !c !h !w", {0}),
    aten.grid_sampler_2d.default: rule("n c !h !w, n !y !x !z -> n c !y !x", {0}),
    aten.grid_sampler_3d.default: rule("n c !d !h !w, n !z !y !x !k -> n c !z !y !x", {0}),
    aten._fft_r2c.default: b.transform,
    aten._fft_c2r.default: b.transform,
    aten._fft_c2c.default: b.transform,
    # shapes
    aten.reshape.default: b.reshape,
    aten.view.default: b.reshape,
    aten.unsqueeze.default: b.reshape,
    aten.squeeze.dim: b.reshape,
    aten.squeeze.dims: b.reshape,
    aten.squeeze.default: b.reshape,
    aten.flatten.using_ints: b.reshape,
    aten.transpose.int: permuted(b.swap),
    aten.t.default: permuted(lambda node, rank: list(range(rank))[::-1]),
    aten.permute.default: permuted(b.order),
    aten.expand.default: b.expand,
    aten.repeat.default: b.repeat,
    aten.split_with_sizes.default: b.split,
    aten.cat.default: b.cat,
    aten.stack.default: b.stack,
    aten.unfold.default: b.unfold,
    aten.diagonal.default: b.diagonal,
    aten.slice.Tensor: b.cut,
    aten.select.int: b.select,
    aten.pad.default: b.window,
    aten.constant_pad_nd.default: b.window,
    aten.flip.default: b.window,
    aten.roll.default: b.window,
    aten.view_as_complex.default: rule("b.. !c -> b..", {0}),
    aten.view_as_real.default: rule("b.. -> b.. !c", {0}),
    # constants
    aten.full.default: b.creation,
    aten.zeros.default: b.creation,
    aten.ones.default: b.creation,
    aten.new_zeros.default: b.creation,
    aten.new_ones.default: b.creation,
    aten.new_full.default: b.creation,
    aten.zeros_like.default: pointwise(),
    aten.ones_like.default: pointwise(),
    aten.full_like.default: pointwise(),
    aten.arange.default: rule("-> !s"),
    aten.arange.start: rule("-> !s"),
    aten.arange.start_step: rule("-> !s"),
    aten.scalar_tensor.default: rule("->"),
    # element by element, where a sum passes through
    aten.add.Tensor: pointwise({0, 1}),
    aten.sub.Tensor: pointwise({0, 1}),
    aten.mul.Tensor: pointwise({0}, {1}),
    aten.div.Tensor: pointwise({0}),
    aten.mul.Scalar: pointwise({0}),
    aten.div.Scalar: pointwise({0}),
    aten.neg.default: pointwise({0}),
    aten._to_copy.default: b.cast,
    aten.to.dtype: b.cast,
    aten.clone.default: pointwise({0}),
    aten.detach.default: pointwise({0}),
    aten.alias.default: pointwise({0}),
    aten.where.self: pointwise({1, 2}),
    aten.complex.default: pointwise({0, 1}),
    # element by element, without the tag
    aten.where.ScalarOther: pointwise(),
    aten.where.ScalarSelf: pointwise(),
    aten.where.Scalar: pointwise(),
    aten.__and__.Tensor: pointwise(),
    aten.__or__.Tensor: pointwise(),
    aten.__xor__.Tensor: pointwise(),
    aten.__and__.Scalar: pointwise(),
    aten.__or__.Scalar: pointwise(),
    aten.floor_divide.default: pointwise(),
    aten.polar.default: pointwise(),
    aten.log_sigmoid.default: pointwise(),
    aten.log_sigmoid_forward.default: pointwise(),
    aten.hardswish.default: pointwise(),
    aten._prelu_kernel.default: pointwise(),
    aten.prelu.default: b.prelu,
    aten.bucketize.Tensor: rule("b.., !n -> b.."),
    aten.searchsorted.Tensor: searched,
    ops.dropout: pointwise(),
    ops.draw: pointwise(),
}

INTERNAL = {ops.token_loss: frozenset({"v"})}
SPREAD = frozenset(
    {
        aten.amax.default, aten.amin.default, aten.max.dim, aten.min.dim, aten.logsumexp.default, aten.softmax.int,
        aten.log_softmax.int,
    }
)  # fmt: skip
"""Ops that, along the dims that block others of their kind, communicate by themselves (``rules.along``)."""


def has_rule(target: Any) -> bool:
    """Whether the op has a line in the table or is element by element by its own tag."""
    return target in TABLE or torch.Tag.pointwise in getattr(target, "tags", ())


def relation(node: fx.Node) -> Relation:
    """The relation of the node's dims; Opaque for an op without a rule."""
    target = node.target
    if target in TABLE:
        found = TABLE[target](node)
    elif torch.Tag.pointwise in getattr(target, "tags", ()):
        found = pointwise()(node)
    else:
        return Opaque()
    if target in INTERNAL and isinstance(found, Labels):
        return replace(found, internal=INTERNAL[target])
    if target in SPREAD and isinstance(found, Labels):
        return replace(found, blocked=frozenset(), internal=found.blocked)
    return found
