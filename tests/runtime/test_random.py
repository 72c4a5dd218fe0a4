import pytest
import torch
import torch.nn.functional as F

from autopar.errors import AutoparError
from autopar.runtime.axis import Axis
from autopar.runtime.random import Rng, Streams, attention_with_dropout, dropout

RNG = Streams(7).at("layers.0.drop")


def place(**coordinates: int) -> tuple[Axis, ...]:
    return tuple(Axis(name, 4, at, "") for name, at in coordinates.items())


def mask(rng: Rng = RNG, key: str | int = "a", shares: tuple[Axis, ...] = ()) -> list[bool]:
    return dropout(torch.ones(256), 0.5, key, shares, rng).ne(0).tolist()


def test_same_place_draws_the_same() -> None:
    state = torch.get_rng_state()
    assert mask() == mask()
    assert mask(shares=place(tp=2)) == mask(shares=place(tp=2))
    assert mask(shares=(Axis("dp", 1, 0, ""), *place(tp=2))) == mask(shares=place(tp=2))
    assert torch.equal(torch.get_rng_state(), state)


def test_everything_that_differs_draws_another() -> None:
    stepped = Streams(7)
    stepped.advance()
    masks = [
        mask(),
        mask(key="b"),
        mask(Streams(8).at("layers.0.drop")),
        mask(stepped.at("layers.0.drop")),
        mask(Streams(7).at("layers.1.drop")),
        *(mask(shares=place(tp=at)) for at in range(4)),
        mask(shares=place(dp=1)),
        mask(shares=place(dp=0, tp=1)),
        mask(shares=place(dp=1, tp=0)),
    ]
    assert len({tuple(m) for m in masks}) == len(masks)


def test_mean_and_scale() -> None:
    out = dropout(torch.ones(100_000), 0.25, "a", (), RNG)
    assert set(out.tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
    assert abs(out.mean().item() - 1) < 0.01


def test_backward_uses_the_mask() -> None:
    x = torch.randn(64, dtype=torch.float64, requires_grad=True)
    out = dropout(x, 0.5, "a", place(tp=1), RNG)
    out.sum().backward()
    assert torch.equal(out, x * x.grad)
    assert 0 < x.grad.ne(0).sum() < 64


def test_certain_probabilities() -> None:
    x = torch.ones(4, requires_grad=True)
    assert dropout(x, 0.0, "a", (), RNG) is x
    out = dropout(x, 1.0, "a", (), RNG)
    out.sum().backward()
    assert out.tolist() == x.grad.tolist() == [0.0] * 4
    with pytest.raises(AutoparError) as error:
        dropout(x, 1.5, "a", (), RNG)
    assert error.value.slug == "bad-dropout"


def test_streams_continue_from_their_state() -> None:
    first = Streams(3)
    first.advance()
    other = Streams(0)
    other.load_state_dict(first.state_dict())
    assert mask(other.at("m")) == mask(first.at("m"))


@pytest.mark.parametrize("masking", ["none", "causal", "bool", "float"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_without_its_dropout_is_attention(
    monkeypatch: pytest.MonkeyPatch, masking: str, kv_heads: int
) -> None:
    q = torch.randn(2, 4, 5, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, kv_heads, 6, 8, dtype=torch.float64, requires_grad=True) for _ in "kv")
    attend = torch.rand(2, 1, 5, 6) > 0.4
    attend[0, 0, 2] = False
    extra = {"bool": attend, "float": torch.randn(5, 6, dtype=torch.float64)}.get(masking)
    gqa, causal = kv_heads != 4, masking == "causal"
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=extra, is_causal=causal, scale=0.3, enable_gqa=gqa)
    monkeypatch.setattr("autopar.runtime.random.dropout", lambda x, *_: x)
    out = attention_with_dropout(q, k, v, extra, 0.5, causal, 0.3, gqa, "a", (), RNG)
    torch.testing.assert_close(out, expected)
    grad = torch.randn_like(out)
    for mine, theirs in zip(
        torch.autograd.grad(out, (q, k, v), grad), torch.autograd.grad(expected, (q, k, v), grad), strict=True
    ):
        torch.testing.assert_close(mine, theirs)


def test_attention_drops_probabilities() -> None:
    q = k = torch.zeros(1, 2, 3, 4)
    v = torch.eye(4).expand(1, 2, 4, 4)[..., :3, :]
    out = attention_with_dropout(q, k, v, None, 0.5, False, None, False, "a", place(tp=1), RNG)
    kept = dropout(torch.ones(1, 2, 3, 3), 0.5, "a", place(tp=1), RNG)
    torch.testing.assert_close(out[..., :3], kept / 3)
    assert torch.equal(
        attention_with_dropout(q, k, v, None, 0.0, False, None, False, "a", (), RNG),
        F.scaled_dot_product_attention(q, k, v),
    )
