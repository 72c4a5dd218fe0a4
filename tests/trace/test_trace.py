"""What a trace refuses, what it says, and what it makes of batches, modes and names."""

import warnings
from collections import OrderedDict, namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir import edit, ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.program import Form, Spec
from autopar.solve.flow import flow_of
from autopar.trace import Structure, trace
from tests.trace.models import CASES, Checkpointed, Nested, Tokens, causal_lm, squares

TP = Mesh.parse("tp=2")
X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


class Body(nn.Module):
    """A linear layer and then a function of the module and its result."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.function, self.lin, self.drop, self.bn = function, nn.Linear(8, 8), nn.Dropout(0.5), nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.lin(x))


def slug_of(function: Callable[[nn.Module, Tensor], Any], **kwargs: Any) -> AutoparError:
    with pytest.raises(AutoparError) as caught:
        trace(nn.Sequential(nn.Linear(8, 8), Body(function)), (X,), {}, mesh=TP, **kwargs)
    return caught.value


def test_data_dependent_branch_names_module_and_line(capfd: pytest.CaptureFixture[str]) -> None:
    def branch(module: nn.Module, x: Tensor) -> Tensor:
        return x if x.mean() > 0 else -x

    class Gate(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.mean() > 0:
                return x
            return -x

    with pytest.raises(AutoparError) as caught:
        trace(nn.Sequential(nn.Linear(8, 8), Gate()), (X,), {}, mesh=TP)
    assert caught.value.slug == "data-dependent-control-flow"
    assert "1 / Gate.forward: test_trace.py:" in caught.value.message and "if x.mean() > 0:" in caught.value.message
    assert "torch.cond" in str(caught.value.fix)
    assert slug_of(branch).slug == "data-dependent-control-flow"
    assert capfd.readouterr() == ("", "")


def test_a_place_without_a_line_is_the_module_alone() -> None:
    """torch keeps the lines of functions that are called ``forward``."""

    def chosen(_module: nn.Module, x: Tensor) -> Tensor:
        return x[x > 0]

    class Patched(nn.Module):
        forward = chosen

    with pytest.raises(AutoparError) as caught:
        trace(Patched(), (X,), {}, mesh=TP)
    assert caught.value.message.startswith("the model: how many elements aten.")


@pytest.mark.parametrize(
    ("function", "slug"),
    [
        (lambda m, x: x * x.sum().item(), "data-dependent-control-flow"),
        (lambda m, x: x[x > 0], "data-dependent-control-flow"),
        (lambda m, x: torch.nn.functional.rrelu(x, training=True), "random-op"),
        (lambda m, x: torch.linalg.nothing(x), "trace-failed"),
        (lambda m, x: _hooked(x), "custom-backward"),
        (lambda m, x: Straight.apply(x), "custom-backward"),
        (lambda m, x: Slowed.apply(Slowed.apply(x, 1.0), 0.5), "custom-backward"),
        (lambda m, x: Clipped.apply(x), "custom-backward"),
    ],
)
def test_refusals(function: Any, slug: str) -> None:
    assert slug_of(function).slug == slug


def test_writing_into_an_input_is_refused() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(1.0) * 2

    with pytest.raises(AutoparError, match="input-mutation"):
        trace(Writes(), (X,), {}, mesh=TP)


def _hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda g: g * 2)
    return x * 2


class Straight(torch.autograd.Function):
    """Rounds, and passes the gradient straight through."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g


class Slowed(torch.autograd.Function):
    """The identity, with part of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, part: float) -> Tensor:
        ctx.part = part
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        return g * ctx.part, None


class Clipped(torch.autograd.Function):
    """The identity, where gradients are small."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.clamp(-5, 5)


class Honest(torch.autograd.Function):
    """A square with the derivative that it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * g


def test_custom_function_with_its_own_derivative_is_taken() -> None:
    model = Body(lambda m, x: Honest.apply(x))
    program = trace(model, (X,), {}, mesh=TP).program
    assert torch.ops.aten.mul.Tensor in [n.target for n in program.graph.nodes]
    with torch.no_grad():
        torch.testing.assert_close(evaluate(program, model.state_dict(), [X])[0], model(X))


@pytest.mark.parametrize("of", ["module", "parameter", "gradient"])
def test_backward_hooks_are_refused(of: str) -> None:
    model = Body(lambda m, x: x)
    if of == "module":
        model.lin.register_full_backward_hook(lambda *a: None)
    elif of == "gradient":
        model.lin.weight.register_post_accumulate_grad_hook(lambda p: None)
    else:
        model.lin.weight.register_hook(lambda g: g * 2)
    with pytest.raises(AutoparError, match="lin.*: a backward hook") as caught:
        trace(model, (X,), {}, mesh=TP)
    assert caught.value.slug == "custom-backward"


def test_loss_must_be_a_scalar() -> None:
    assert slug_of(lambda m, x: x, loss=lambda out: out.sum(0)).slug == "loss-not-scalar"
    program = trace(Body(lambda m, x: x), (X,), {}, mesh=TP, loss=lambda out: None).program
    assert [o.kind for o in program.outputs] == ["user"]


@pytest.mark.parametrize("name", ["llama", "tokens", "nested"])
def test_loss_is_an_output_of_its_own(name: str) -> None:
    model, args, kwargs, loss = CASES[name]()
    program = trace(model, args, kwargs, mesh=TP, loss=loss).program
    assert program.form is Form.TRACED
    kinds = [o.kind for o in program.outputs]
    assert kinds.count("loss") == 1 and kinds == sorted(kinds, key=["user", "loss", "buffer"].index)


def test_checkpointing_is_said() -> None:
    traced = trace(Checkpointed(), (torch.randn(4, 16),), {}, mesh=TP)
    said = [n for n in traced.notes if "checkpointing" in n]
    assert len(said) == 1 and "Sequential" in said[0] and "recompute" in said[0]


def test_use_cache_is_off_and_put_back() -> None:
    model, args, kwargs, _ = causal_lm("Llama", intermediate_size=64, num_key_value_heads=2)
    assert model.config.use_cache
    traced = trace(model, args, kwargs, mesh=TP)
    assert model.config.use_cache and any("use_cache" in n for n in traced.notes)


def test_batch_is_global() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor, table: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return x @ table, y.sum(), table * 2

    args = (torch.randn(2, 4), torch.randn(4, 3), torch.randn(2, 5))
    program = trace(Mixed(), args, {}, mesh=Mesh.parse("dp=3,tp=2")).program
    assert program.rows == (2, 2, 2)
    assert [(i.name, i.spec.shape, i.batch_dim) for i in program.inputs] == [
        ("x", (6, 4), 0), ("table", (4, 3), None), ("y", (6, 5), 0),
    ]  # fmt: skip
    assert [o.batch_dim for o in program.outputs] == [0, None, None]
    uneven = trace(Mixed(), args, {}, mesh=Mesh.parse("dp=3"), rows=(2, 0, 1)).program
    assert uneven.inputs[0].spec.shape == (3, 4)
    named = trace(Mixed(), args, {}, mesh=Mesh.parse("dp=3"), batch_dims={"y": None}).program
    assert [i.batch_dim for i in named.inputs] == [0, None, None]
    listed = trace(Mixed(), args, {}, mesh=Mesh.parse("dp=3"), batch_dims=(0, None, 0)).program
    assert listed.inputs == program.inputs


@pytest.mark.parametrize(
    "given",
    [{"rows": (1, 2)}, {"batch_dims": {"z": 0}}, {"batch_dims": (0, 0)}, {"batch_dims": (3,)}],
)
def test_bad_batch(given: dict[str, Any]) -> None:
    with pytest.raises(AutoparError) as caught:
        trace(Body(lambda m, x: x), (X,), {}, mesh=Mesh.parse("dp=3"), **given)
    assert caught.value.slug == "batch-dims"


def has(program: Any, target: Any) -> bool:
    return any(n.target is target for _, g in program.graphs() for n in g.nodes)


def test_train_and_eval_are_different_graphs() -> None:
    model = Body(lambda m, x: m.bn(m.drop(x))).eval()
    trained, evaluated = (trace(model, (X,), {}, mesh=TP, train=t).program for t in (True, False))
    assert has(trained, ops.dropout) and not has(evaluated, ops.dropout)
    assert len(trained.outputs) > len(evaluated.outputs)
    assert not model.training and not model.drop.training


def test_a_frozen_norm_stays_frozen() -> None:
    model = Body(lambda m, x: m.bn(m.drop(x))).train()
    model.bn.eval()
    program = trace(model, (X,), {}, mesh=TP, train=True).program
    assert has(program, ops.dropout) and [o.kind for o in program.outputs] == ["user"]


def test_parameters_by_original_names() -> None:
    model = Tokens()
    batch = CASES["tokens"]()[2]
    params = trace(model, (), batch, mesh=TP).program.params
    assert params["emb.weight"].tied == ("head.weight",) and "head.weight" not in params
    assert params["weights"].kind == "buffer" and params["weights"].persistent
    model.mid.weight.requires_grad_(False)
    assert not trace(model, (), batch, mesh=TP).program.params["mid.weight"].trainable


def test_inputs_are_never_merged() -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            return a - b

    program = trace(Two(), (X, X), {}, mesh=TP).program
    assert evaluate(program, {}, [X, X * 0])[0].equal(X)


Pair = namedtuple("Pair", ["a", "b"])


def test_structures_come_back() -> None:
    class Echo(nn.Module):
        def forward(self, x: Any, *, flag: Any = None) -> Any:
            return x, flag

    value = OrderedDict(p=Pair(X, [None, 3, "s"]), q=(X * 2, {"n": torch.float32}))
    traced = trace(Echo(), (value,), {"flag": True}, mesh=TP)
    out = traced.structure.rebuild(evaluate(traced.program, {}, traced.structure.flatten((value,), {"flag": True})))
    assert isinstance(out[0], OrderedDict) and isinstance(out[0]["p"], Pair) and out[1] is True
    assert out[0]["p"].b == [None, 3, "s"] and out[0]["q"][1] == {"n": torch.float32}
    assert out[0]["q"][0].equal(X * 2)
    assert [i.name for i in traced.program.inputs] == ["x.p.0", "x.q.0"]


def test_structure_tells_calls_apart() -> None:
    model = Nested()
    batch = {"x": {"feat": X}, "y": X}
    one, _ = Structure.of(model, (batch,), {"scale": X})
    same, _ = Structure.of(model, (batch,), {"scale": X * 2})
    other, _ = Structure.of(model, (batch,), {"scale": None})
    assert one.key == same.key != other.key and hash(one.key) == hash(same.key)
    for args, kwargs in [
        ((batch,), {}),
        ((), {"batch": batch}),
        (({"x": X},), {"scale": X}),
        ((batch,), {"scale": None}),
    ]:
        with pytest.raises(AutoparError, match="input-structure"):
            one.flatten(args, kwargs)


def test_blocks() -> None:
    case = causal_lm("Gemma2", intermediate_size=64, num_key_value_heads=2, head_dim=8, num_hidden_layers=4)
    program = trace(*case[:3], mesh=TP).program
    (block,) = program.blocks.values()
    calls = program.calls_of(block.name)
    assert block.name == "model.layers.*" and [c.meta["path"] for c in calls] == [f"model.layers.{i}" for i in range(4)]
    holders = [n for n in block.graph.nodes if n.op == "placeholder"]
    for call in calls:
        own, given = program.own(call), program.given(call)
        assert [h for h in holders if h not in dict(own)] == [h for h, _ in given]
        assert all(holder.meta["spec"] == program.params[name].spec for holder, name in own)
        assert all(holder.meta["spec"] == arg.meta["spec"] for holder, arg in given)
        assert all(name == f"{call.meta['path']}.{holder.meta['param']}" for holder, name in own)
    kinds = ["param" in h.meta for h in holders]
    assert kinds == sorted(kinds)


class ReadTwice(nn.Module):
    """Layers whose first one's weight the model reads too, and whose last one is called again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.layers, self.layers[2]):
            x = layer(x).relu()
        return x @ self.layers[0].weight


def test_calls_read_their_own_parameters() -> None:
    torch.manual_seed(0)
    model, x = ReadTwice(), torch.randn(4, 4)
    program = trace(model, (x,), {}, mesh=Mesh.of({"dp": 2})).program
    heads = [n.meta["param"] for n in program.graph.find_nodes(op="placeholder") if "param" in n.meta]
    assert heads == ["layers.0.weight"]  # what is read outside; the rest goes by the paths of calls
    calls = list(program.calls())
    assert [[name for _, name in program.own(c)] for c in calls] == [
        [f"layers.{i}.weight", f"layers.{i}.bias"] for i in (0, 1, 2, 2)
    ]
    assert all(len(c.args) == 1 for c in calls)
    (weight,) = {flow_of(program).of(n) for n, name in program.held() if name.endswith("weight")}
    assert flow_of(program).values[weight].param == "layers.0.weight"
    both = torch.cat([x, x])
    (got,) = evaluate(program, dict(model.named_parameters()), [both])
    torch.testing.assert_close(got, model(both))


def test_random_draws_of_a_layer_called_twice_differ() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers[1](self.layers[0](self.layers[0](x)))

    program = trace(Twice(), (X,), {}, mesh=TP).program
    first, again = (c for c in program.calls() if c.meta["path"] == "layers.0")
    assert first.target != again.target


def test_edit_keeps_what_a_node_says() -> None:
    program = trace(Body(lambda m, x: F.relu(x)), (X,), {}, mesh=TP).program.clone()
    (relu,) = program.graph.find_nodes(op="call_function", target=torch.ops.aten.relu.default)
    with program.graph.inserting_before(relu):
        new = edit.call(program.graph, torch.ops.aten.gelu.default, (relu.args[0],), like=relu)
    assert new.meta["spec"] == Spec((4, 8), torch.float32) and new.meta["source"] == relu.meta["source"]
    edit.replace(relu, new)
    assert edit.drop_dead(program.graph) == 0
    with pytest.raises(AssertionError), program.graph.inserting_before(new):
        edit.replace(new, edit.call(program.graph, torch.ops.aten.sum.default, (new.args[0],)))


def test_no_warning_of_its_own() -> None:
    model, args, kwargs, loss = CASES["encoder_layer"]()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trace(model, args, kwargs, mesh=TP, loss=squares)
