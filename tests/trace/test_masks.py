"""Which attention masks are recognized, on every way in which they are written, and that near misses are not."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.ir import ops
from autopar.ir.evaluate import evaluate
from autopar.ir.mesh import Mesh
from autopar.ir.program import Program
from autopar.trace import trace

S, W = 6, 3
LOW = torch.finfo(torch.float32).min


def rows(n: int = S) -> Tensor:
    return torch.arange(n)[:, None]


def columns(n: int = S) -> Tensor:
    return torch.arange(n)[None, :]


CAUSAL: dict[str, Callable[[], Tensor]] = {
    "le": lambda: columns() <= rows(),
    "ge": lambda: rows() >= columns(),
    "lt": lambda: columns() < rows() + 1,
    "gt": lambda: ~(columns() > rows()),
    "difference": lambda: (rows() - columns()) >= 0,
    "scaled": lambda: (columns() * 2 + 3) <= (rows() * 2 + 3),
    "tril": lambda: torch.ones(S, S, dtype=torch.bool).tril(),
    "wide": lambda: ((columns() <= rows()) & torch.ones((), dtype=torch.bool))[None, None].expand(2, 1, S, S),
    "window": lambda: (columns() <= rows()) & (columns() > rows() - S),
    "triu_inf": lambda: torch.full((S, S), -math.inf).triu(1),
    "masked_fill": lambda: torch.zeros(S, S).masked_fill(columns() > rows(), -math.inf),
    "where": lambda: torch.where(columns() <= rows(), 0.0, LOW),
    "where_not": lambda: torch.where(columns() > rows(), LOW, torch.zeros(())),
    "packed": lambda: (columns() <= rows()) & (steps()[:, None] == steps()[None, :]),
}
FULL: dict[str, Callable[[], Tensor]] = {
    "true": lambda: torch.ones(S, S, dtype=torch.bool),
    "zero": lambda: torch.zeros(1, 1, S, S),
    "always": lambda: columns() <= rows() + S,
}
OTHER: dict[str, Callable[[], Tensor]] = {
    "strict": lambda: (columns() < rows()) | (columns() == 0),
    "shifted": lambda: columns() <= rows() + 1,
    "window": lambda: (columns() <= rows()) & (columns() > rows() - W),
    "chunks": lambda: (columns() <= rows()) & (columns() // W == rows() // W),
    "transposed": lambda: columns() >= rows(),
    "bias": lambda: (columns() - rows()).float() * 0.5,
    "half_masked": lambda: torch.where(columns() <= rows(), 0.0, -1.0),
    "offset": lambda: torch.where(columns() <= rows(), 1.0, -math.inf),
    "stretched": lambda: columns() <= rows() * 2,
    "one_row": lambda: (columns() <= rows())[:1],
    "one_index": lambda: (columns() <= rows()) & (torch.arange(1) + 1 > torch.arange(S)),
    "wraps": lambda: (columns() + 253).to(torch.uint8) <= (rows() + 253).to(torch.uint8),
    "wraps_after": lambda: rows().to(torch.uint8) - columns().to(torch.uint8) >= 0,
    "number_wraps": lambda: (columns() <= rows()) & (columns().to(torch.uint8) < 258),
}


def steps() -> Tensor:
    """Zero everywhere, computed as one numbers packed sequences."""
    at = torch.arange(S)
    return (torch.diff(at, prepend=at[:1] - 1) != 1).cumsum(-1)


class Attends(nn.Module):
    def __init__(self, mask: Callable[[], Tensor]) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(x, x, x.sin(), attn_mask=self.mask())


def attention_of(mask: Callable[[], Tensor], length: int = S) -> tuple[Program, object, bool]:
    torch.manual_seed(0)
    x = torch.randn(2, 1, length, 4)
    model = Attends(mask)
    program = trace(model, (x,), {}, mesh=Mesh.parse("tp=1")).program
    torch.testing.assert_close(evaluate(program, {}, [x])[0], model(x))
    (node,) = program.graph.find_nodes(op="call_function", target=ops.attention)
    return program, node.args[3], node.args[5]


@pytest.mark.parametrize("name", CAUSAL)
def test_causal(name: str) -> None:
    program, mask, causal = attention_of(CAUSAL[name])
    assert mask is None and causal is True
    assert len([n for n in program.graph.nodes if n.op == "call_function"]) == 2  # sin, attention


@pytest.mark.parametrize("name", FULL)
def test_full(name: str) -> None:
    _, mask, causal = attention_of(FULL[name])
    assert mask is None and causal is False


@pytest.mark.parametrize("name", OTHER)
def test_others_stay(name: str) -> None:
    _, mask, causal = attention_of(OTHER[name])
    assert mask is not None and causal is False


def test_nothing_of_the_size_of_the_mask_is_built() -> None:
    n = 1 << 20
    x = torch.empty(1, 1, n, 8, device="meta")
    mask = lambda: (columns(n) <= rows(n)) & (columns(n) > rows(n) - n)  # noqa: E731
    with torch.device("meta"):
        program = trace(Attends(mask), (x,), {}, mesh=Mesh.parse("tp=1")).program
    (node,) = program.graph.find_nodes(op="call_function", target=ops.attention)
    assert node.args[3] is None and node.args[5] is True


def test_a_mask_from_an_input_stays() -> None:
    class Padded(nn.Module):
        def forward(self, x: Tensor, seen: Tensor) -> Tensor:
            index = torch.arange(2)[:, None, None, None], torch.arange(S)[None, None, None, :]
            mask = (columns() <= rows()) & seen[index]
            return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)

    x, seen = torch.randn(2, 1, S, 4), torch.tensor([[True] * S, [True] * 4 + [False] * 2])
    program = trace(Padded(), (x, seen), {}, mesh=Mesh.parse("tp=1")).program
    torch.testing.assert_close(evaluate(program, {}, [x, seen])[0], Padded()(x, seen))
    found = [n.target for n in program.graph.nodes if n.op == "call_function"]
    assert torch.ops.aten.index.Tensor not in found and torch.ops.aten.bitwise_and.Tensor in found
