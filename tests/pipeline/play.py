"""The same steps on a pipeline and on the unsharded model."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import autopar
from autopar.ir.mesh import Mesh
from tests.pipeline.models import batch, model

STEPS = 2


def rows(given: dict[str, Tensor], mesh: str) -> dict[str, Tensor]:
    """This data rank's part of a batch."""
    sizes = Mesh.parse(mesh)
    index = sizes.data_rank(sizes.coordinates(dist.get_rank() if dist.is_initialized() else 0))
    return {n: t.tensor_split(sizes.data_size)[index].clone() for n, t in given.items()}


def trained(name: str, mesh: str, strategy: str, compiled: bool = False, single: bool = False) -> dict[str, Any]:
    """Losses, first gradients and norm, parameters after two steps, and the loss of a pass without gradients."""
    m = model(name).float() if single else model(name)
    pm = autopar.parallelize(m, mesh, kwargs=rows(batch(name), mesh), strategy=strategy)
    if compiled:
        pm.compile(backend="aot_eager")
    found: dict[str, Any] = {"losses": [], "held": [n for n, _ in pm.named_parameters()]}
    opt = torch.optim.SGD(pm.parameters(), lr=0.1)
    for step in range(STEPS):
        found["losses"].append(float(pm.train_step(**rows(batch(name, step + 1), mesh))))
        if not step:
            found["grads"], found["norm"] = pm.full_gradients(), float(pm.clip_grad_norm_(1e9))
        opt.step()
        opt.zero_grad()
    found["params"] = pm.full_parameters()
    pm.eval()
    out = pm(**rows(batch(name), mesh))
    found["eval"] = float(out if isinstance(out, Tensor) else out["loss"])
    return found


def plain(name: str) -> dict[str, Any]:
    """The same of the unsharded model on the whole batch."""
    m = model(name)
    found: dict[str, Any] = {"losses": []}
    opt = torch.optim.SGD(m.parameters(), lr=0.1)
    for step in range(STEPS):
        out = m(**batch(name, step + 1))
        loss = out if isinstance(out, Tensor) else out["loss"]
        loss.backward()
        found["losses"].append(float(loss.detach()))
        if not step:
            found["grads"] = {n: None if p.grad is None else p.grad.clone() for n, p in m.named_parameters()}
            found["norm"] = float(torch.nn.utils.clip_grad_norm_(m.parameters(), 1e9))
        opt.step()
        opt.zero_grad()
    found["params"] = {n: p.detach().clone() for n, p in m.named_parameters()}
    with torch.no_grad():
        out = m.eval()(**batch(name))
    found["eval"] = float(out if isinstance(out, Tensor) else out["loss"])
    return found


def same(got: dict[str, Any], want: dict[str, Any]) -> None:
    """Equal to twelve digits."""
    close = {"rtol": 1e-9, "atol": 1e-12}
    torch.testing.assert_close(got["losses"], want["losses"], **close)
    torch.testing.assert_close(got["norm"], want["norm"], **close)
    torch.testing.assert_close(got["eval"], want["eval"], **close)
    for what in ("grads", "params"):
        assert list(got[what]) == list(want[what])
        for name, tensor in want[what].items():
            mine = got[what][name]
            if tensor is None or mine is None:
                assert mine is None or not mine.any(), name
                assert tensor is None or not tensor.any(), name
            else:
                error = f"{what} of {name}: {{}}".format
                torch.testing.assert_close(mine, tensor, msg=error, **close)
