"""Tracing layers of one kind once gives the program of the full trace, and is refused where it would not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar import verify
from autopar.errors import AutoparWarning
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.trace import Traced, trace
from autopar.trace.layers import kind_of, recording, repeated
from tests.trace.models import CASES, Checkpointed, causal_lm, squares
from tests.trace.texts import text

MESH = Mesh.parse("dp=2,tp=2")
DEEP: dict[str, Callable[[], Any]] = {
    "llama": lambda: causal_lm("Llama", padded=True, intermediate_size=64, num_key_value_heads=2, num_hidden_layers=5),
    "gemma2": CASES["gemma2"],
    "gpt2": lambda: causal_lm("GPT2", n_embd=32, n_head=4, num_hidden_layers=4, n_positions=32),
    "gpt2_inverse": lambda: causal_lm(
        "GPT2", n_embd=32, n_head=4, num_hidden_layers=4, n_positions=32, scale_attn_by_inverse_layer_idx=True
    ),
    "encoder": CASES["encoder_layer"],
    "checkpointed": CASES["checkpointed"],
    "shared": CASES["shared"],
}


def traced(case: Any, once: bool, train: bool = True) -> Traced:
    model, args, kwargs, loss = case
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AutoparWarning)
        return trace(model, args, kwargs, mesh=MESH, loss=loss, train=train, once=once)


def calls_counted(case: Any, path: str) -> tuple[Traced, list[str]]:
    """The trace, and the elements of the list at ``path`` whose forward really ran."""
    model = case[0]
    ran: list[str] = []
    kind = type(model.get_submodule(path)[0])
    original = kind.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        ran.append(next(n for n, m in model.named_modules() if m is self))
        return original(self, *args, **kwargs)

    kind.forward = forward
    try:
        return traced(case, True), ran
    finally:
        kind.forward = original


@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", DEEP)
def test_same_program_as_full_trace(name: str, train: bool) -> None:
    assert text(traced(DEEP[name](), True, train).program) == text(traced(DEEP[name](), False, train).program)


def test_layers_run_once() -> None:
    case = DEEP["llama"]()
    _, ran = calls_counted(case, "model.layers")
    assert len(ran) == 2, ran  # the first in place, and one by itself


def test_numbers_that_are_read_keep_layers_apart() -> None:
    blocks = traced(DEEP["gpt2_inverse"](), True).program.blocks
    assert len(blocks) == 4
    assert len(traced(DEEP["gpt2"](), True).program.blocks) == 1


class Part(nn.Linear):
    """A layer that reads its number, which is another one in each."""

    def __init__(self, number: int) -> None:
        super().__init__(8, 8)
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / (1 + self.number)


def test_layers_that_read_their_numbers_are_traced_by_themselves_once() -> None:
    case = (nn.Sequential(*map(Part, range(4))), (torch.randn(4, 8),), {}, squares)
    made, ran = calls_counted(case, "")
    assert len(ran) == 4 and len(made.program.blocks) == 4, ran


class Turn(nn.Linear):
    """A layer."""


class Tabled(nn.Module):
    """As many layers as labels, which could be a list of experts beside a router."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Turn(8, 8) for _ in range(12))
        self.head = nn.Linear(8, 12)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "inside"])
def test_layers_that_are_no_experts_run_once(inside: bool) -> None:
    model = nn.Sequential(Tabled(), nn.Tanh()) if inside else Tabled()
    case = (model, (torch.randn(4, 8),), {}, squares)
    _, ran = calls_counted(case, "0.layers" if inside else "layers")
    assert len(ran) == 12 + 2, ran  # all to see whether they are experts; the first in place, and one by itself
    assert text(traced(case, True).program) == text(traced(case, False).program)


class Odd(nn.Module):
    """A model that treats layers by index, in ways that a trace of a few layers would miss."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for i, layer in enumerate(self.layers):
            skips.append(x)
            if self.way == "index":
                x = layer(x) * (2.0 if i == 4 else 1.0)
            elif self.way == "skips":
                x = layer(x) + (skips[len(self.layers) - 1 - i] if i >= 3 else 0)
            elif self.way == "weights":
                x = layer(x) + sum(p.pow(2).sum() for p in layer.parameters())
            elif self.way == "norm":
                x = layer(x) + sum(p.pow(2).sum() for p in self.parameters())
            elif self.way == "twice":
                x = layer(layer(x))
            elif self.way == "inplace":
                x = layer(x)
                x += i
        return x


@pytest.mark.parametrize("way", ["index", "skips", "weights", "norm", "twice", "inplace"])
def test_what_happens_around_layers_is_seen(way: str) -> None:
    torch.manual_seed(0)
    model, x = Odd(way), torch.randn(4, 8)
    full, once = (traced((model, (x,), {}, squares), o) for o in (False, True))
    assert text(once.program) == text(full.program)
    values = dict(model.named_parameters())
    got = evaluate(once.program, values, [x.repeat(2, 1)])
    torch.testing.assert_close(got[0], model(x.repeat(2, 1)))


class InPlace(nn.Module):
    """A layer that writes into its input, or into a buffer, or returns what it was given."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way, self.lin = way, nn.Linear(8, 8)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, state: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        if self.way == "input":
            state["s"].add_(1.0)
        if self.way == "buffer":
            self.count += 1
        return self.lin(x) + state["s"] + self.count, state


class Threaded(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(InPlace(way) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        state = {"s": torch.zeros(8)}
        for layer in self.layers:
            x, state = layer(x, state)
        return x * state["s"].cos()


@pytest.mark.parametrize("way", ["input", "buffer", "returned"])
def test_layers_with_side_effects(way: str) -> None:
    torch.manual_seed(0)
    model, x = Threaded(way), torch.randn(4, 8)
    got = traced((model, (x,), {}, squares), True)
    values = {**{k: v.clone() for k, v in model.named_buffers()}, **dict(model.named_parameters())}
    torch.testing.assert_close(evaluate(got.program, values, [x.repeat(2, 1)])[0], model(x.repeat(2, 1)))


def test_model_is_left_as_it_was_after_a_failure() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = Checkpointed().layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            if x.sum() > 0:
                return x
            return -x

    model = Branch().eval()
    model.layers[1].train()
    before = [(n, m.training, sorted(m.__dict__), list(m._parameters)) for n, m in model.named_modules()]
    with pytest.raises(Exception, match="data-dependent-control-flow"):
        traced((model, (torch.randn(4, 16),), {}, squares), True, train=True)
    assert before == [(n, m.training, sorted(m.__dict__), list(m._parameters)) for n, m in model.named_modules()]


class Numbered(nn.Module):
    def __init__(self, index: int, name: str = "n") -> None:
        super().__init__()
        self.index, self.label, self.inner = index, name, nn.Dropout(0.1)


def test_kinds() -> None:
    assert kind_of(Numbered(1)) == kind_of(Numbered(2))
    assert kind_of(Numbered(1)) != kind_of(Numbered(1, "m"))
    assert kind_of(Numbered(1)) != kind_of(Numbered(1).eval())
    assert kind_of(nn.Linear(2, 3)) != kind_of(nn.Linear(2, 3, bias=False))
    hooked = Numbered(1)
    hooked.inner.register_forward_hook(lambda *a: None)
    assert kind_of(hooked) != kind_of(Numbered(1))
    assert not repeated(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
    assert len(repeated(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)), nn.ReLU()))) == 3


def test_recording_sees_a_look_and_restores() -> None:
    module = Numbered(7)
    with recording(module, {("", "index"), ("inner", "p")}) as read:
        assert not read
        assert module.index == 7
        assert read == {("", "index")}
        assert hasattr(module.inner, "p") and ("inner", "p") in read
    assert module.__dict__["index"] == 7 and module.inner.p == 0.1


class TiedBesideConv(nn.Module):
    """Tied weights, and a convolution with as many channels as its matrix has rows: no stack of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.conv = nn.Embedding(24, 8), nn.Conv1d(8, 8, 3, padding=1)
        self.mix, self.head = nn.Linear(8, 8), nn.Linear(8, 24)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.mix(x) + self.conv(x.transpose(1, 2)).transpose(1, 2))  # type: ignore[no-any-return]


def test_tied_weights_beside_a_stack() -> None:
    report = verify(TiedBesideConv(), "tp=2", (torch.randint(0, 24, (4, 6)),), loss=squares)
    assert report.ok, report.failed
