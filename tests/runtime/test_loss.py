import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.runtime import collectives as c
from autopar.runtime.axis import Axis
from autopar.runtime.loss import token_loss, vocabulary_embedding
from autopar.runtime.simulate import run_ranks
from tests.runtime.table import Issued, axis_of

SHARES = {2: (6, 4), 3: (4, 0, 6)}
CLASSES = 10


def reference(logits: Tensor, target: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    leaf = logits.clone().requires_grad_()
    loss = F.cross_entropy(leaf.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="none")
    loss.backward(grad.flatten())
    return loss.detach().view(target.shape), leaf.grad


def sharded(logits: Tensor, target: Tensor, grad: Tensor, shares: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
    def rank(r: int) -> tuple[Tensor, Tensor]:
        start = sum(shares[:r])
        leaf = logits[..., start : start + shares[r]].clone().requires_grad_()
        loss = token_loss(leaf, target, -100, axis_of(len(shares)), ((start, shares[r]),), CLASSES)
        loss.backward(grad)
        return loss.detach(), leaf.grad

    return run_ranks(len(shares), rank)


def data(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, CLASSES, generator=generator, dtype=torch.float64) * 5).to(dtype)
    target = torch.randint(0, CLASSES, (3, 5), generator=generator)
    target[0, :2] = -100
    return logits, target, torch.randn(3, 5, generator=generator, dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("ways", SHARES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)]
)
def test_equals_cross_entropy(dtype: torch.dtype, tolerance: float, ways: int) -> None:
    logits, target, grad = data(dtype)
    loss, back = reference(logits, target, grad)
    results = sharded(logits, target, grad, SHARES[ways])
    for mine, _ in results:
        assert mine.dtype == dtype
        torch.testing.assert_close(mine, loss, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(torch.cat([g for _, g in results], -1), back, rtol=tolerance, atol=tolerance)


def test_half_precision_accumulates_in_float32() -> None:
    logits, target, grad = data(torch.bfloat16)
    loss, back = reference(logits.double(), target, grad.double())
    results = sharded(logits, target, grad, (6, 4))
    # Within one rounding to bfloat16 of the exact result.
    torch.testing.assert_close(results[0][0].double(), loss, rtol=2**-8, atol=1e-5)
    torch.testing.assert_close(torch.cat([g for _, g in results], -1).double(), back, rtol=2**-8, atol=1e-5)


def test_masked_classes_and_ignored_nan_rows() -> None:
    logits, target, grad = data(torch.float64)
    logits[..., 0:6] = -torch.inf
    logits[0, 0] = -torch.inf
    target[target >= 0] = 7
    loss, back = reference(logits[1:], target[1:], grad[1:])
    results = sharded(logits, target, grad, (6, 4))
    torch.testing.assert_close(results[0][0][1:], loss)
    whole = torch.cat([g for _, g in results], -1)
    torch.testing.assert_close(whole[1:], back)
    assert whole[0, 0].eq(0).all()
    assert results[1][0][0, 0] == 0


def test_all_ignored() -> None:
    logits, target, grad = data(torch.float64)
    for loss, back in sharded(logits, torch.full_like(target, -100), grad, (6, 4)):
        assert loss.eq(0).all()
        assert back.eq(0).all()


def test_only_token_sized_collectives() -> None:
    def rank(r: int) -> list[int]:
        logits, target, grad = data(torch.float64)
        leaf = logits[..., 5 * r : 5 * r + 5].clone().requires_grad_()
        axis = axis_of(2)
        with Issued() as issued:
            token_loss(leaf, target, -100, axis, ((5 * r, 5),), CLASSES).backward(grad)
        return issued.sizes

    assert run_ranks(2, rank) == [[15, 30]] * 2


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_target_that_is_no_class_is_never_a_number(wrong: int) -> None:
    logits, target, grad = data(torch.float64)
    target[1, 1] = wrong
    for loss, _ in sharded(logits, target, grad, (6, 4)):
        assert loss.isnan().nonzero().tolist() == [[1, 1]]
    with pytest.raises(IndexError):
        token_loss(logits, target, -100, None, (), CLASSES)


@pytest.mark.parametrize("axis", [None, Axis("tp", 1, 0, "")])
def test_whole_logits(axis: Axis | None) -> None:
    logits, target, grad = data(torch.float64)
    loss = token_loss(logits, target, -100, axis, ((0, CLASSES),), CLASSES)
    torch.testing.assert_close(loss, reference(logits, target, grad)[0])


@pytest.mark.parametrize("padding", [None, 5, -1])
@pytest.mark.parametrize("ways", SHARES)
def test_vocabulary_embedding(ways: int, padding: int | None) -> None:
    table = torch.randn(CLASSES, 3, dtype=torch.float64)
    ids = torch.tensor([[0, 5, 9, 4], [5, 6, 6, 9]])
    grad = torch.randn(2, 4, 3, dtype=torch.float64)
    whole = table.clone().requires_grad_()
    expected = F.embedding(ids, whole, padding)
    expected.backward(grad)

    def rank(r: int) -> tuple[Tensor, Tensor]:
        start = sum(SHARES[ways][:r])
        leaf = table[start : start + SHARES[ways][r]].clone().requires_grad_()
        out = vocabulary_embedding(leaf, ids, ((start, SHARES[ways][r]),), padding, CLASSES)
        out.backward(grad)
        return c.all_reduce(out.detach(), axis_of(ways)), leaf.grad

    results = run_ranks(ways, rank)
    for out, _ in results:
        torch.testing.assert_close(out, expected.detach())
    torch.testing.assert_close(torch.cat([g for _, g in results]), whole.grad)


@pytest.mark.parametrize("wrong", [-1, CLASSES])
@pytest.mark.parametrize("rows", [0, 4])
def test_vocabulary_embedding_refuses_ids_outside(wrong: int, rows: int) -> None:
    with pytest.raises(IndexError):
        vocabulary_embedding(torch.ones(rows, 2), torch.tensor([1, wrong]), ((6, rows),), None, CLASSES)
