"""Calls of the ops on matrices and on grids of three dims."""

from collections.abc import Callable
from typing import Any

import torch

aten = torch.ops.aten
F64 = torch.float64


def a(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, kwargs


def _definite(r: Any) -> torch.Tensor:
    x = r(12, 3, 3)
    return x @ x.mT + torch.eye(3, dtype=F64)


def _spots(*size: int) -> torch.Tensor:
    """Where a pooling of 16 elements by 4 found its maxima."""
    return torch.arange(0, 16, 4).view(size).expand(6, 4, *size)


MAKE: dict[Any, Callable[[Any], list[Any]]] = {
    aten._cdist_forward.default: lambda r: [a(r(6, 4, 3), r(6, 12, 3), 2.0, None), a(r(12, 3), r(4, 3), 1.0, None),
        a(r(1, 6, 3), r(4, 6, 3), 2.0, None)],
    aten.linalg_inv_ex.default: lambda r: [a(r(12, 3, 3)), a(r(6, 4, 3, 3))],
    aten._linalg_det.default: lambda r: [a(r(12, 3, 3))],
    aten._linalg_slogdet.default: lambda r: [a(r(12, 3, 3))],
    aten._linalg_solve_ex.default: lambda r: [a(r(12, 3, 3), r(12, 3, 4)), a(r(12, 3, 3), r(12, 3)),
        a(r(12, 3, 3), r(3, 4))],
    aten.linalg_solve_triangular.default: lambda r: [a(r(12, 3, 3).tril(), r(12, 3, 4), upper=False)],
    aten.linalg_cholesky_ex.default: lambda r: [a(_definite(r))],
    aten.linalg_qr.default: lambda r: [a(r(12, 4, 3))],
    aten._linalg_svd.default: lambda r: [a(r(12, 4, 3), False)],
    aten._linalg_eigh.default: lambda r: [a(_definite(r))],
    aten.linalg_matrix_exp.default: lambda r: [a(r(12, 3, 3))],
    aten.linalg_pinv.atol_rtol_tensor: lambda r: [a(r(12, 4, 3))],
    aten.linalg_cross.default: lambda r: [a(r(6, 12, 3), r(6, 12, 3)), a(r(6, 3, 4), r(1, 3, 4), dim=1)],
    aten.nanmedian.dim: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), 1, True)],
    aten.mode.default: lambda r: [a(r(6, 12), 0), a(r(6, 4, 12), 1, True)],
    aten.searchsorted.Tensor: lambda r: [a(torch.linspace(-1, 1, 4, dtype=F64), r(6, 12)),
        a(r(6, 4).sort().values, r(6, 12)), a(r(4), r(12), sorter=torch.tensor([1, 0, 3, 2]))],
    aten.adaptive_max_pool3d.default: lambda r: [a(r(6, 4, 4, 4, 4), [2, 2, 1])],
    aten.max_unpool2d.default: lambda r: [a(r(6, 4, 2, 2), _spots(2, 2), [4, 4])],
    aten.max_unpool3d.default: lambda r: [a(r(6, 4, 1, 2, 2), _spots(1, 2, 2),
        [2, 2, 4], [1, 1, 1], [0, 0, 0])],
    aten.upsample_nearest3d.default: lambda r: [a(r(6, 4, 2, 3, 2), [4, 3, 5])],
    aten._upsample_nearest_exact1d.default: lambda r: [a(r(6, 4, 6), [9])],
    aten._upsample_nearest_exact2d.default: lambda r: [a(r(6, 4, 6, 6), [12, 9])],
    aten._upsample_nearest_exact3d.default: lambda r: [a(r(6, 4, 2, 3, 2), [4, 3, 5])],
    aten.upsample_trilinear3d.default: lambda r: [a(r(6, 4, 2, 3, 2), [4, 3, 5], False)],
    aten.reflection_pad3d.default: lambda r: [a(r(6, 4, 3, 3, 3), [1, 2, 0, 1, 1, 0])],
    aten.replication_pad3d.default: lambda r: [a(r(6, 4, 3, 3, 3), [1, 2, 0, 1, 1, 0])],
    aten.grid_sampler_3d.default: lambda r: [a(r(6, 4, 3, 3, 3), r(6, 2, 3, 4, 3) / 3, 0, 0, False)],
    aten.hardswish.default: lambda r: [a(r(6, 4, 12) * 4), a(r())],
    aten._prelu_kernel.default: lambda r: [a(r(6, 4, 12), r(1, 4, 1)), a(r(6, 12), r(1, 1))],
}  # fmt: skip
