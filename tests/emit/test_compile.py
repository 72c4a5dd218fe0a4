"""``pm.compile()``: every kind of block once, whole, collectives included, however many layers there are."""

import warnings

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import autopar
from autopar.ir.mesh import Mesh
from tests.emit.fake import batch, llama, world


@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
def test_layers_share_one_graph(mesh: str) -> None:
    frames = [compiled_frames(mesh, layers) for layers in (2, 6)]
    assert frames == [1 + 2] * 2  # the layer; what is before and after its calls


def compiled_frames(mesh: str, layers: int) -> int:
    """Graphs that were compiled for a training step; the step must equal the one that is not compiled."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    model = llama(layers)
    with world(Mesh.parse(mesh).world), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain, fast = (autopar.parallelize(model, mesh, kwargs=batch()) for _ in range(2))
        fast.compile(backend=counter)
        for _ in range(2):
            torch.testing.assert_close(fast.train_step(**batch()), plain.train_step(**batch()))
        wanted = plain.full_gradients()
        for name, grad in fast.full_gradients().items():
            torch.testing.assert_close(grad, wanted[name])
    return counter.frame_count
