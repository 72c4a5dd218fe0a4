"""The hand-written tiny program with an engine chosen, on simulated ranks or real processes."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from autopar.emit.module import ParallelModule
from autopar.emit.params import Place, initialise
from autopar.ir.mesh import Mesh
from autopar.passes.base import Context
from autopar.passes.recompute import Recompute
from autopar.passes.zero import Zero
from autopar.runtime.simulate import device_mesh, run_ranks
from tests.emit.tiny import TinyCompiler, TinyVariant, tiny


@dataclass
class Staged(TinyCompiler):
    """The tiny program behind the passes ``zero`` and ``recompute``."""

    zero: Zero = field(default_factory=Zero)
    recompute: str = "none"

    def variant(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, train: bool, loss_only: bool, grad: bool
    ) -> TinyVariant:
        if loss_only not in self.made:
            made = super().variant(args, kwargs, train=train, loss_only=loss_only, grad=grad)
            made.program = Recompute(self.recompute).rewrite(self.zero.rewrite(made.program, Context()), Context())
        return self.made[loss_only]


def sharded(place: Place, zero: Zero, model: nn.Module | None = None, recompute: str = "none") -> ParallelModule:
    """``Tiny`` on the mesh with this engine."""
    compiler = Staged(place, zero=zero, recompute=recompute)
    first = compiler.variant((), {}, train=True, loss_only=False, grad=True).program
    tensors = initialise(model or tiny(), first.params, place)
    return ParallelModule(compiler, first, place, tensors, place.axes)


def on_ranks(text: str, zero: Zero, body: Callable[[ParallelModule, Place], Any], recompute: str = "none") -> list[Any]:
    """``body`` on every rank of a mesh; ``tp=4/2`` has tp in two sub-axes."""
    mesh, model = Mesh.parse(text.removesuffix("/2")), tiny()
    mesh = mesh.split("tp", 2) if text.endswith("/2") else mesh

    def rank(_: int) -> Any:
        place = Place.of(mesh, device_mesh(mesh))
        return body(sharded(place, zero, model, recompute), place)

    return run_ranks(mesh, rank, timeout=90.0)
