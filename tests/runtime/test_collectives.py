import itertools

import pytest
import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.runtime import collectives as c
from autopar.runtime.axis import Axis
from autopar.runtime.segments import Segments
from autopar.runtime.simulate import run_ranks
from tests.runtime.table import DUAL, ROWS, Issued, axis_of, held, meaning, sample, segment_cases

CASES = list(itertools.product(segment_cases(2), (0, 1, 2)))


@pytest.mark.parametrize("ways", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_row_keeps_the_value_and_its_gradient(name: str, ways: int) -> None:
    row, cases = ROWS[name], segment_cases(ways)

    def rank(r: int) -> list[tuple[Tensor, ...]]:
        axis, out = axis_of(ways), []
        for case, dim in CASES:
            owners = held(cases[case], ways)
            x = sample(row.src, r, dim, owners, 1).requires_grad_()
            y = row(x, dim, axis, cases[case])
            grad = sample(DUAL[row.dst], r, dim, owners, 2)
            y.backward(grad)
            out.append((x.detach(), y.detach(), grad, x.grad))
        return out

    results = run_ranks(ways, rank)
    for k, (case, dim) in enumerate(CASES):
        owners = held(cases[case], ways)
        x, y, grad, back = (list(column) for column in zip(*(result[k] for result in results)))
        whole = meaning(row.src, x, dim, owners)
        torch.testing.assert_close(meaning(row.dst, y, dim, owners), whole)
        torch.testing.assert_close(meaning(DUAL[row.src], back, dim, owners), meaning(DUAL[row.dst], grad, dim, owners))


@pytest.mark.parametrize("name", ["invariant_to_partial", "replicated_to_partial"])
def test_partial_of_a_whole_value_is_on_coordinate_zero(name: str) -> None:
    values = run_ranks(3, lambda r: ROWS[name](torch.ones(2), 0, axis_of(3), None).tolist())
    assert values == [[1.0, 1.0], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("name", ROWS)
def test_dual_of_the_dual_is_the_row(name: str) -> None:
    row, owners = ROWS[name], held(None, 2)

    def rank(r: int) -> tuple[Tensor, Tensor]:
        axis = axis_of(2)
        x = sample(row.src, r, 1, owners, 1).requires_grad_()
        grad = sample(DUAL[row.dst], r, 1, owners, 2).requires_grad_()
        v = sample(row.src, r, 1, owners, 3)
        (back,) = torch.autograd.grad(row(x, 1, axis, None), x, grad, create_graph=True)
        (forward,) = torch.autograd.grad(back, grad, v)
        return forward, row(v, 1, axis, None)

    for forward, direct in run_ranks(2, rank):
        torch.testing.assert_close(forward, direct)


@pytest.mark.parametrize("name", ROWS)
def test_row_issues_what_the_table_says(name: str) -> None:
    row = ROWS[name]

    def rank(r: int) -> tuple[list[str], list[str], bool]:
        axis = axis_of(2)
        x = sample(row.src, r, 1, held(None, 2), 1).requires_grad_()
        with Issued() as forward:
            y = row(x, 1, axis, None)
        with Issued() as backward:
            y.sum().backward()  # an expanded gradient
        return forward.names, backward.names, row(x.detach(), 1, axis, None).requires_grad

    assert run_ranks(2, rank) == [(list(row.forward), list(row.backward), False)] * 2


def test_axis_of_size_one_is_the_identity_without_a_group() -> None:
    axis, x = Axis("tp", 1, 0, ""), torch.randn(2, 3)
    assert all(row(x, 1, axis, None) is x for row in ROWS.values())
    assert c.all_to_all(x, 0, 1, axis) is x


@pytest.mark.parametrize("ways", [2, 3])
@pytest.mark.parametrize(("src", "dst"), [(0, 1), (1, 0), (2, 0), (0, 2), (1, 2), (2, 1), (1, 1)])
def test_all_to_all(ways: int, src: int, dst: int) -> None:
    cases = list(itertools.product(segment_cases(ways).values(), repeat=2))
    if src == dst:
        cases = [(None, None), (((1, (2,) * ways, 2),), ((2, (1,) * ways, 2),))]

    def whole(a: list[list[int]], b: list[list[int]], seed: int) -> Tensor:
        shape = [2, 3, 4]
        shape[src], shape[dst] = sum(map(len, a)), sum(map(len, b))
        return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)

    def cut(x: Tensor, dim: int, owned: list[int]) -> Tensor:
        return x.index_select(dim, torch.tensor(owned, dtype=torch.long))

    def rank(r: int) -> None:
        axis = axis_of(ways)
        for a, b in cases:
            src_owners, dst_owners = held(a, ways), held(b, ways)
            value, grad = whole(src_owners, dst_owners, 1), whole(src_owners, dst_owners, 2)
            x = cut(value, src, src_owners[r]).requires_grad_()
            y = c.all_to_all(x, src, dst - 3, axis, a, b)
            torch.testing.assert_close(y, cut(value, dst, dst_owners[r]))
            y.backward(cut(grad, dst, dst_owners[r]).transpose(0, 2).contiguous().transpose(0, 2))
            torch.testing.assert_close(x.grad, cut(grad, src, src_owners[r]))

    run_ranks(ways, rank)


@pytest.mark.parametrize("shape", [(1, 3, 4), (1, 1, 4), (3, 1, 4), (1, 0, 4), (0, 3, 4)])
def test_dims_of_size_one_and_zero(shape: tuple[int, ...]) -> None:
    def rank(r: int) -> None:
        axis = axis_of(2)
        whole = torch.arange(torch.Size(shape).numel()).view(shape)
        mine = whole[..., 2 * r : 2 * r + 2]
        assert torch.equal(c.all_gather(mine, 2, axis), whole)
        assert torch.equal(c.reduce_scatter(whole, 2, axis), 2 * mine)

    run_ranks(2, rank)


def test_even_all_to_all_is_one_collective() -> None:
    def rank(r: int) -> list[str]:
        axis = axis_of(2)
        with Issued() as issued:
            c.all_to_all(torch.ones(2, 4), 0, 1, axis)
        return issued.names

    assert run_ranks(2, rank) == [["all_to_all_single"]] * 2


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.bfloat16, torch.complex64])
def test_other_dtypes(dtype: torch.dtype) -> None:
    def rank(r: int) -> None:
        axis = axis_of(2)
        whole = torch.tensor([[1, 0, 1, 1], [0, 0, 1, 0]]).to(dtype)
        mine = whole[:, 2 * r : 2 * r + 2]
        assert torch.equal(c.all_gather(mine, 1, axis), whole)
        assert torch.equal(c.all_gather(whole[r:], 0, axis, ((1, (2, 1), 1),)), torch.cat([whole, whole[1:]]))
        assert torch.equal(c.slice_invariant(whole, 1, axis), mine)
        assert torch.equal(c.all_to_all(mine, 1, 0, axis), whole[r : r + 1])
        assert torch.equal(c.shard_to_partial(mine, 1, axis)[:, 2 * r : 2 * r + 2], mine)
        if dtype != torch.bool:
            assert torch.equal(c.all_reduce(whole, axis), whole + whole)
            assert torch.equal(c.reduce_scatter(whole, 1, axis), mine + mine)

    run_ranks(2, rank)


@pytest.mark.parametrize(
    ("function", "shape", "segments"),
    [
        (c.slice_invariant, (5, 2), None),
        (c.reduce_scatter, (5, 2), None),
        (c.reduce_scatter, (5, 2), ((1, (3, 3), 1),)),
        (c.all_gather, (5, 2), ((1, (3, 3), 1),)),
        (c.shard_to_partial, (3, 2), ((1, (3,), 1),)),
        (c.slice_replicated, (6, 2), ((1, (2, 2, 2), 1),)),
    ],
)
def test_refuses_a_dim_unlike_its_shares(function, shape: tuple[int, ...], segments: Segments | None) -> None:
    with pytest.raises(AutoparError) as error:
        function(torch.ones(shape), 0, Axis("tp", 2, 0, "none"), segments)
    assert error.value.slug == "bad-segments"
