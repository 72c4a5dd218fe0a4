"""autopar.verify: exact for real models, and able to see faults."""

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.cli.main import main
from autopar.models import load
from autopar.runtime import collectives
from tests.api.models import WIDTH, Lm, Mlp, batch, features, seeded, squares

FAMILIES = ["llama", "qwen3", "gpt2", "bert", "t5", "vit", "gemma2", "phi3", "falcon", "opt", "bloom", "neox", "olmo2"]
OTHERS = [
    ("llama", "dp=2,tp=2", "sequence_parallel"),
    ("vit", "tp=2", "sequence_parallel"),
    ("qwen3", "tp=4", ""),
    ("gpt2", "tp=4", ""),
]


@pytest.mark.parametrize(
    ("family", "mesh", "strategy"), [*((f, "dp=2,tp=2", "") for f in FAMILIES), *OTHERS], ids=lambda value: value or "-"
)
def test_families_are_exact(family: str, mesh: str, strategy: str) -> None:
    loaded = load(f"hf:{family}-tiny", meta=False)
    model, kwargs = loaded.model.eval(), (loaded.padding or loaded.kwargs)(3, 12)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    report = autopar.verify(model, mesh, kwargs=kwargs, strategy=strategy)
    assert report.ok and report.tolerance == 1e-10, str(report)
    named = {n for n, p in model.named_parameters() if p.requires_grad}
    assert {n.removeprefix("grad.") for n in report.errors if n.startswith("grad.")} == named
    assert {"loss", "output.0", "trace.0"} <= report.errors.keys()


def wrong_replicate(x: Tensor, axis: Any) -> Tensor:
    """As ``to_replicated``, without the sum in its backward."""
    return x.view_as(x)


def doubled(x: Tensor, *args: Any) -> Tensor:
    """As ``all_reduce_invariant``, with every value twice."""
    return 2 * collectives.all_reduce_invariant(x, *args)


def check() -> autopar.Report:
    return autopar.verify(seeded(Mlp), "tp=2", args=(features(4, 6, WIDTH),), loss=squares)


def replace_in_emitted(monkeypatch: pytest.MonkeyPatch, old: Any, new: Any) -> None:
    """Emitted functions call ``new`` for ``old``."""
    from autopar.emit import function

    made = function.function_of

    def changed(graph: fx.Graph, *args: Any) -> Any:
        for node in graph.nodes:
            if node.target is old:
                node.target = new
        return made(graph, *args)

    for module in ("autopar.emit.function", "autopar.emit.emitted"):
        monkeypatch.setattr(f"{module}.function_of", changed)


def test_a_missing_reduction_in_the_backward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert check().ok
    replace_in_emitted(monkeypatch, collectives.to_replicated, wrong_replicate)
    report = check()
    assert not report.ok
    assert {"grad.norm.weight", "grad.norm.bias"} <= report.failed.keys()
    assert not {"loss", "output.0", "grad.up.weight", "grad.down.weight"} & report.failed.keys()
    assert "DIFFERENT" in str(report) and "grad.norm.weight: " in str(report)


def test_a_wrong_forward_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_in_emitted(monkeypatch, collectives.all_reduce_invariant, doubled)
    assert {"loss", "output.0"} <= check().failed.keys()


class Faulty(nn.Module):
    """Computes something else in a trace than it does by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.mlp = Mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * (1.0 if torch.compiler.is_exporting() else 1.01)


def test_a_trace_that_differs_from_the_model_is_seen() -> None:
    report = autopar.verify(seeded(Faulty), "tp=2", args=(features(4, 6, WIDTH),), loss=squares)
    assert "trace.0" in report.failed and all(n.startswith("trace.") for n in report.failed)


class Cut(nn.Module):
    """A target without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            target = self.i(x)
        return ((self.o(x) - target) ** 2).mean()


def test_a_trace_with_another_gradient_than_the_model_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x = features(4, 6, WIDTH)
    assert autopar.verify(seeded(Cut), "dp=1", args=(x,)).ok
    monkeypatch.setattr("autopar.trace.attached._detached", lambda before, value: value)
    report = autopar.verify(seeded(Cut), "dp=1", args=(x,))
    assert report.failed.keys() == {"trace.grad.i.weight", "trace.grad.i.bias"}, str(report)


def test_the_users_model_is_left_alone() -> None:
    model = seeded(Lm)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    report = autopar.verify(model, "dp=2,tp=2", kwargs=batch(5))
    assert report.ok, str(report)
    assert "buffer.calls" in report.errors
    assert all(torch.equal(t, before[n]) and t.dtype == before[n].dtype for n, t in model.state_dict().items())


def test_single_precision_has_its_own_tolerance() -> None:
    report = autopar.verify(seeded(Lm), "dp=2,tp=2", kwargs=batch(), fp64=False)
    assert report.ok and report.tolerance == 1e-4
    assert max(e for n, e in report.errors.items() if not n.startswith("trace")) > 1e-10
    strict = autopar.verify(seeded(Lm), "dp=2,tp=2", kwargs=batch(), fp64=False, tolerance=1e-12)
    assert not strict.ok


def test_ranks_without_rows() -> None:
    assert autopar.verify(seeded(Lm), "dp=4", kwargs=batch(3)).ok


class Interleaved(nn.Module):
    """Features that are written every second, as rotary positions and sines beside cosines are."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        out = torch.empty_like(h)
        out[..., ::2], out[..., 1::2] = h[..., ::2].sin(), h[..., 1::2].cos()
        out[:, ::3] *= 2
        return self.down(out)


@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_what_is_written_by_steps_stays_shared_out(mesh: str) -> None:
    assert autopar.verify(seeded(Interleaved), mesh, args=(features(4, 6, WIDTH),), loss=squares, strategy="strict").ok


def cases() -> tuple[nn.Module, dict[str, Tensor]]:
    """For the command line."""
    return seeded(Lm), batch(4)


def test_command_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{__name__}:cases"
    assert main(["verify", model, "--mesh", "tp=2"]) == 0
    assert "equal" in capsys.readouterr().out
    assert main(["verify", model, "--mesh", "ep=2"]) == 1
    assert "no-experts" in capsys.readouterr().err
    replace_in_emitted(monkeypatch, collectives.to_replicated, wrong_replicate)
    assert main(["verify", model, "--mesh", "tp=2"]) == 1
    assert "DIFFERENT" in capsys.readouterr().out


class Waves(nn.Module):
    """Complex parameters; an input without a batch dim that is as long as a rank's share of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.out = nn.Linear(8, 8)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        first, last = ends
        return self.out(torch.fft.irfft(torch.fft.rfft(x) * self.gain)) * (last - first)


def test_complex_parameters_and_inputs_as_long_as_a_share() -> None:
    given = (features(4, 8), torch.tensor([[1.0], [3.0]]))
    report = autopar.verify(seeded(Waves), "dp=2", args=given, loss=squares)
    assert report.ok and report.errors["grad.gain"] < 1e-10, str(report)
