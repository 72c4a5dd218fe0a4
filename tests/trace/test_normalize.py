"""Normal forms: each function is traced, its ops are checked, and its values and gradients compared."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.trace import trace

aten = torch.ops.aten
MESH = Mesh.parse("tp=1")


class Calls(nn.Module):
    """A function as a model."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Tensor) -> Any:
        return self.function(*args)


def program_of(function: Callable[..., Any], *args: Tensor, train: bool = True) -> Program:
    traced = trace(Calls(function), args, {}, mesh=MESH, train=train)
    assert not traced.constants
    return traced.program


def targets(program: Program) -> list[Any]:
    return [n.target for n in program.graph.nodes if n.op == "call_function"]


def check(function: Callable[..., Any], *args: Tensor) -> Program:
    """The traced function equals the function, gradients included."""
    program = program_of(function, *args)
    mine, theirs = ([a.detach().clone().requires_grad_(a.is_floating_point()) for a in args] for _ in range(2))
    got, want = evaluate(program, {}, mine)[0], function(*theirs)
    torch.testing.assert_close(got, want)
    if want.is_floating_point() and want.requires_grad:
        seed = torch.randn_like(want)
        got.backward(seed)
        want.backward(seed)
        for a, b in zip(mine, theirs):
            if b.grad is not None:
                torch.testing.assert_close(a.grad, b.grad)
    return program


X = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randn(4, 6, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
P = X.sigmoid()

SAME: dict[str, Callable[[Tensor], Any]] = {
    "squeeze": lambda x: x[:, :1].squeeze(1) * 2,
    "flatten": lambda x: x.flatten(1).unflatten(1, (3, -1)).sin(),
    "expand": lambda x: x[:, None].expand(-1, 3, -1, -1).cos(),
    "repeat": lambda x: x.repeat(2, 1, 3).sin(),
    "repeat_interleave": lambda x: x.repeat_interleave(2, dim=-1) * x.repeat_interleave(2, -1).flip(-1),
    "unbind": lambda x: x.unbind(1)[2] * x.unbind(-3)[1][0],
    "chunk": lambda x: torch.cat(x.chunk(4, 1)[::-1], 1),
    "tensor_split": lambda x: x.tensor_split(3, -1)[1].exp(),
    "slices": lambda x: torch.cat([-x[..., 4:], x[..., :4]], -1),
    "strided": lambda x: x[:, ::2] * 2,
    "negative": lambda x: x[:, -3:-1].narrow(-1, 2, 3) * 1.0,
    "stack": lambda x: torch.stack([x, x * 2], -1).flatten(-2),
    "pad": lambda x: F.pad(x, (1, 2, -1, 0), value=0.5) * 2,
    "tril": lambda x: x.tril(1) + x.triu(-2),
    "index_iota": lambda x: x[torch.arange(4)[:, None], torch.arange(1, 5)[None, :]] * 2,
    "index_pick": lambda x: x[torch.arange(4), (x[:, 0] > 0).sum(-1) % 6 - 3] * 2,
    "index_apart": lambda x: x[torch.arange(4), :, (x[:, 0] > 0).sum(-1) % 6] * 2,
    "index_last": lambda x: x[:, [-2]] * x[:, -1, None],
    "gather_iota": lambda x: x.gather(1, torch.arange(2, 5)[None, :, None].expand(4, 3, 8)) * 2,
    "index_select": lambda x: x.index_select(1, torch.arange(2, 5)) * 2,
    "index_real": lambda x: x[:, torch.tensor([3, 0, 3])] * 2 if False else x.roll(1, 1) * 2,
    "movedim": lambda x: x.movedim(0, -1).mT.contiguous().sin(),
    "rsub": lambda x: (1.5 - x) * torch.rsub(2 - x, 3, alpha=2),
    "alpha": lambda x: torch.add(x, x.sin(), alpha=0.5) - torch.sub(x, 2, alpha=3),
    "addcmul": lambda x: torch.addcmul(x, x, x.sin(), value=0.5) + torch.addcdiv(x, x, x.exp(), value=2),
    "baddbmm": lambda x: torch.baddbmm(x[:, :, :6], x, x.mT, beta=0.5, alpha=2.0),
    "baddbmm_zero": lambda x: torch.baddbmm(x[:, :, :6].detach() * float("nan"), x, x.mT, beta=0),
    "einsum": lambda x: torch.einsum("bsd,btd->bst", x, x.sin()),
    "matmul_t": lambda x: x @ x[0].T,
    "lerp": lambda x: torch.lerp(x, x.sin(), 0.3),
    "var": lambda x: x.var(-1) + x.std(-1, correction=0) + x.var((0, 2), keepdim=True).squeeze(2)[:, :6] + x.var(),
    "std_mean": lambda x: sum(torch.std_mean(x, 1)) + sum(torch.var_mean(x, (1,), correction=0)),
    "mean": lambda x: x.mean() + x.mean((0, -1)).sum() + x.sum(-1, dtype=torch.float64).mean(),
    "amax": lambda x: x.amax((0, -1)) + x.amax() + x.max() + x.min(),
    "norm": lambda x: F.normalize(x, dim=-1) + x.norm(dim=1, keepdim=True) + x.norm(),
    "where": lambda x: torch.where(x > 0, x, -1.0) + torch.where(x > 1, 2.0, x) + x.masked_fill(x < -1, -2.0),
    "masked_fill_tensor": lambda x: x.masked_fill(x > 0, x.new_tensor(0.5).sin()),
    "one": lambda x: (x * 1.0 * 1 + 0) * 2,
    "softmax_cast": lambda x: x.softmax(-1, dtype=torch.float64) + F.log_softmax(x, 1),
    "group_norm": lambda x: F.group_norm(x, 3, x[0, :, 0], x[1, :, 0], 1e-3),
    "layer_norm": lambda x: F.layer_norm(x, (8,), x[0, 0], None) + F.rms_norm(x, (8,), x[0, 0]),
    "instance_norm": lambda x: F.instance_norm(x, weight=x[0, :, 0]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, x[0, :, 0], None, training=True, momentum=0.1),
    "inplace": lambda x: x.clone().mul_(2).add_(x)[:, 1:].clone().fill_(3.0) + x[:, 1:],
    "select_write": lambda x: _write(x),
    "detach": lambda x: x * (x.sin().detach() + x.detach().cos()),
    "gelu": lambda x: F.gelu(x, approximate="tanh") + F.silu(x) + F.softplus(x) + F.leaky_relu(x) + F.elu(x),
    "glu": lambda x: F.glu(x, -1) + F.hardtanh(x)[..., :4] + F.relu6(x)[..., 4:],
    "cumsum": lambda x: x.cumsum(1) + x.sort(-1).values + x.topk(8, -1).values,
    "shuffles": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x[None, :, :, :6], 2), 3) + 1,
    "channels": lambda x: F.channel_shuffle(x, 3) * torch.rot90(x, 2, (1, 2)) - x.mT.rot90(1, (1, 2)).roll(1),
    "outer": lambda x: torch.addr(x[0], x[0, :, 0], x[1, 0], beta=0.5, alpha=2) * torch.dist(x, x.sin()),
    "nans": lambda x: torch.where(x > 1, torch.nan, x).nansum(1) + torch.where(x > 1, torch.nan, x).nanmean(1),
    "trace": lambda x: x[:, :, 0].trace() + x.take(torch.arange(3, 100, 9)).sum() + torch.stack(x.aminmax(dim=1)),
    "count": lambda x: x * (x > 0).count_nonzero() + x.relu().count_nonzero(1)[:, None],
    "diagonals": lambda x: x.diag_embed()[:, 1] + torch.block_diag(x[0], x[1])[:4, 2:10, None] + x[0, 0].diag(1)[0, 1],
    "affine_grid": lambda x: F.affine_grid(x[:, :2, :3], (4, 2, 5, 3), align_corners=False),
    "conj": lambda x: torch.view_as_real(torch.complex(x, x.sin()).conj() * torch.complex(x.cos(), x)),
    "clamp": lambda x: x.clamp(-1, 1) + x.clamp(min=0.1) + x.abs().sqrt(),
}  # fmt: skip


def _write(x: Tensor) -> Tensor:
    out = x.new_zeros(x.shape)
    out[:, 1:] = x[:, :-1].clone()
    out[:, 0] = 0.5
    out[..., 2] += x[..., 3]
    return out * 2


SAME.pop("batch_norm")
SAME.pop("index_real")


@pytest.mark.parametrize("name", SAME)
def test_values_and_gradients(name: str) -> None:
    check(SAME[name], X)


def test_a_picked_index_that_is_none_is_refused() -> None:
    """As by torch: it is no element counted from elsewhere."""
    program = program_of(lambda x, i: x[torch.arange(4), i] * 2, X, torch.zeros(4, dtype=torch.int64))
    assert aten.gather.default in targets(program)
    for index in (6, -7):
        with pytest.raises(RuntimeError, match="out of bounds"):
            evaluate(program, {}, [X, torch.full((4,), index)])


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mse": lambda x, y: (
        F.mse_loss(x, y) + F.mse_loss(x, y, reduction="sum") + F.mse_loss(x, y, reduction="none").mean()
    ),
    "l1": lambda x, y: F.l1_loss(x, y) + F.smooth_l1_loss(x, y, beta=0.5) + F.huber_loss(x, y, delta=0.7),
    "bce": lambda x, y: F.binary_cross_entropy(x.sigmoid(), y.sigmoid()),
    "bce_logits": lambda x, y: F.binary_cross_entropy_with_logits(x, y.sigmoid(), pos_weight=y[0, 0].detach().exp()),
    "kl": lambda x, y: F.kl_div(F.log_softmax(x, -1), y.softmax(-1), reduction="batchmean"),
    "cosine": lambda x, y: F.cosine_similarity(x, y, dim=-1).mean(),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses(name: str) -> None:
    check(LOSSES[name], X, Y)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_cross_entropy(reduction: str, weighted: bool, smoothing: float) -> None:
    target = torch.tensor([[0, 3, -1, 2, 5, 1, 1, 0]] * 4)
    weight = torch.linspace(0.5, 2, 6, dtype=torch.float64)

    def loss(x: Tensor, t: Tensor, w: Tensor) -> Tensor:
        given = w.detach() if weighted else None
        return F.cross_entropy(x, t, given, ignore_index=-1, reduction=reduction, label_smoothing=smoothing)

    program = check(loss, X, target, weight)
    assert (ops.token_loss in targets(program)) == (not weighted and smoothing == 0)


def test_cross_entropy_of_nothing_is_nan_as_in_torch() -> None:
    target = torch.full((4, 8), -100)
    check_nan = program_of(lambda x, t: F.cross_entropy(x, t), X, target)
    assert evaluate(check_nan, {}, [X, target])[0].isnan()


def test_nll_of_log_softmax_is_token_loss() -> None:
    program = check(lambda x, t: F.nll_loss(F.log_softmax(x, 1), t), X[:, :, 0], torch.tensor([0, 5, -100, 2]))
    assert ops.token_loss in targets(program)
    program = check(lambda x, t: F.nll_loss(x.sin(), t), X[:, :, 0], torch.tensor([0, 5, -100, 2]))
    assert ops.token_loss not in targets(program)


def test_few_ops_and_explicit_sizes() -> None:
    program = program_of(lambda x: x.view(4, -1).reshape(4, 6, 2, -1).transpose(1, -1)[:, -1:].mT + 1, X)
    names = targets(program)
    assert names == [
        aten.reshape.default,
        aten.permute.default,
        aten.slice.Tensor,
        aten.permute.default,
        aten.add.Tensor,
    ]
    reshape, permute, cut, *_ = (n for n in program.graph.nodes if n.op == "call_function")
    assert reshape.args[1] == [4, 6, 2, 4] and permute.args[1] == [0, 3, 2, 1] and cut.args[1:] == (1, 3, 4)


def test_slices_that_partition_become_one_split() -> None:
    program = program_of(lambda x: x[..., :3].sin() * x[..., 3:6] + x[..., 6:].sum(), X)
    assert targets(program).count(aten.split_with_sizes.default) == 1
    assert aten.slice.Tensor not in targets(program)
    apart = program_of(lambda x: x[..., :3].sin() * x[..., 4:7], X)
    assert targets(apart).count(aten.slice.Tensor) == 2


def test_scattered_slices_become_a_cat() -> None:
    program = program_of(_write, X)
    assert not {aten.slice_scatter.default, aten.select_scatter.default, aten.copy.default} & set(targets(program))


def test_shifted_labels_are_a_cat_of_integers() -> None:
    program = check(lambda t: F.pad(t, (0, 1), value=-100)[..., 1:] * 1, torch.arange(12).reshape(3, 4))
    (cat,) = (n for n in program.graph.nodes if n.target is aten.cat.default)
    assert [p.target for p in cat.args[0]] == [aten.slice.Tensor, aten.full.default]


def test_equal_values_are_computed_once() -> None:
    program = program_of(lambda x: x.sin() * x.sin() + torch.arange(8) * torch.arange(8), X)
    assert targets(program).count(aten.sin.default) == 1
    assert targets(program).count(aten.arange.start_step) == 1


def test_zero_and_minus_zero_are_not_equal() -> None:
    program = check(lambda x: (x * 0.0).sum() + torch.copysign(x, x * 0.0 - 0.0).mean() + x.new_full((), -0.0), X)
    fulls = [n.args[1] for n in program.graph.nodes if n.target is aten.full.default]
    assert [str(v) for v in fulls] == ["-0.0"]


def drawn(program: Program) -> list[fx.Node]:
    return [n for n in program.graph.nodes if n.target in (ops.dropout, ops.attention)]


def test_dropout_has_a_key_of_its_own() -> None:
    program = program_of(
        lambda x: F.dropout(x, 0.2) + F.dropout(x, 0.2) + F.dropout(x, 0.0) + F.dropout(x, 0.5, False), X
    )
    assert [n.args[1] for n in drawn(program)] == [0.2, 0.2]
    assert len({n.args[2] for n in drawn(program)}) == 2


def test_dropout_of_channels_is_a_mask_multiplied_in() -> None:
    program = program_of(lambda x: F.dropout2d(x[..., None], 0.5), X)
    (mask,) = drawn(program)
    assert mask.meta["spec"].shape == (4, 6, 1, 1)
    out = evaluate(program, {}, [X])[0]
    assert ((out == 0).all(-2) | (out == 2 * X[..., None]).all(-2)).all()


def test_attention_dropout() -> None:
    program = program_of(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.3), X[:, None])
    (node,) = drawn(program)
    assert node.args[4] == 0.3 and node.args[8] != 0


@pytest.mark.parametrize("how", ["expand", "interleave", "flag"])
def test_grouped_queries_keep_their_own_heads(how: str) -> None:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if how == "expand":
            k, v = (t[:, :, None].expand(2, 2, 3, 5, 4).reshape(2, 6, 5, 4) for t in (k, v))
        if how == "interleave":
            k, v = (t.repeat_interleave(3, 1) for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, enable_gqa=how == "flag")

    q, kv = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
    program = check(attend, q, kv, kv.sin())
    (node,) = drawn(program)
    assert node.args[7] is True and node.args[1].meta["spec"].shape == (2, 2, 5, 4)


def test_heads_repeated_the_other_way_are_no_groups() -> None:
    q, kv = torch.randn(2, 6, 5, 4), torch.randn(2, 2, 5, 4)
    program = check(lambda q, k: F.scaled_dot_product_attention(q, k.repeat(1, 3, 1, 1), k.repeat(1, 3, 1, 1)), q, kv)
    assert drawn(program)[0].args[7] is False


def test_detach_stops_the_gradient_and_idle_ones_go() -> None:
    program = program_of(lambda x, i: x * x.sin().detach() + i.detach() + (i * 2).detach(), X, torch.arange(8))
    (node,) = (n for n in program.graph.nodes if n.target is aten.detach.default)
    assert node.meta["diff"] is False and node.args[0].meta["diff"] is True


def test_no_grad_region_is_detached() -> None:
    def function(x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = x.sin().exp()
        return x * scale

    check(function, X)


def test_every_node_says_where_it_is_from() -> None:
    program = program_of(lambda x: x.var() + F.mse_loss(x, x.sin()), X)
    for node in program.graph.nodes:
        if node.op == "call_function":
            assert node.meta["source"].startswith("test_normalize.py:") and " in " in node.meta["source"]
            assert {"spec", "module", "diff"} <= node.meta.keys()
