"""A model as a function of flat tensors, and what one run of it finds out."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.ir.modules import named
from autopar.trace.carried import State, kept_tensors, value_at
from autopar.trace.memories import Change, Memories
from autopar.trace.state import Carried, Place, Snapshot, tensors_in, watched_attributes
from autopar.trace.structure import Node, Structure, scan
from autopar.trace.watch import Watch, no_draws

WRAPPED = "m"  # the name of the user's model in the wrapper; stripped from every path


@dataclass
class Seen:
    """What the forward found out; kept apart because export undoes assignments to a module."""

    loss: bool = False
    dropped: set[str] = field(default_factory=set)
    changed: list[Place] = field(default_factory=list)
    after: Snapshot | None = None  # what the forward left, where that is not what it met
    carried: Carried = field(default_factory=Carried)
    moved: list[Place] = field(default_factory=list)  # what a second call changed once more
    kept: list[Tensor] = field(default_factory=list)  # the tensors of the places to keep, which are results, too
    left: State | None = None  # these places; where none are given those that changed and hold no tensors
    lost: list[Place] = field(default_factory=list)  # those of them that cannot be copied
    outside: list[Change] = field(default_factory=list)  # globals and attributes of classes that the forward changed


class Flat(nn.Module):
    """The model as a function of a flat list of tensors that returns a flat list of tensors."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        loss: Callable[[Any], Tensor] | None,
        whole: bool = True,
        twice: list[Place] | None = None,
        start: State | None = None,
        keep: list[Place] | None = None,
    ) -> None:
        super().__init__()
        setattr(self, WRAPPED, model)
        self.structure = structure
        self.loss = [loss]  # in a list, so that a loss that is a module is not registered
        self.seen = Seen()
        self.running: list[bool] = []  # not empty while the forward runs
        self.whole = whole  # a layer alone has no loss
        self.twice = twice  # attributes to watch in a second call, which sees what the first one left
        self.parts = [named(model)]  # in a list, as above
        self.start = start  # what earlier calls left; its tensors are further inputs
        self.keep = keep  # places whose tensors are further results

    def forward(self, *flat: Tensor) -> list[Tensor]:
        """The model's tensors, its loss where it has one, and those to keep."""
        self.running.append(True)
        try:
            return self._run(list(flat))
        finally:
            self.running.clear()

    def _run(self, flat: list[Tensor]) -> list[Tensor]:
        further = len(flat) - len(self.start.stands) if self.start else len(flat)
        args, kwargs = self.structure.unflatten(flat[:further])
        memories, before = Memories.of(self.parts[0].values()), Snapshot.of(self.parts[0])
        met = before
        try:
            if self.start:
                self.start.install(self.parts[0], flat[further:])
                met = Snapshot.of(self.parts[0])
            out = self._call(args, kwargs)
            met.keep_tensors()
            found: list[Tensor] = []
            self.structure.output = scan(out, found, self._drop)
            loss = loss_of(self.loss[0], out, self.structure.output, found) if self.whole else None
            self.seen.changed, self.seen.outside = met.changed(), memories.changes()
            if self.seen.changed or self.keep:
                self._keep(met, Snapshot.of(self.parts[0]))
        finally:
            before.restore()
            memories.restore()
        self.seen.loss = loss is not None
        return [*found, *([loss] if loss is not None else []), *self.seen.kept]

    def _keep(self, met: Snapshot, after: Snapshot) -> None:
        self.seen.after = after
        keep = self.keep
        if keep is None:
            keep = [p for p in self.seen.changed if not tensors_in(value_at(after, p))]
        self.seen.kept = kept_tensors(after, keep)
        self.seen.left = State.of(after, keep, self.seen.kept) if keep else None
        self.seen.lost = [p for p in keep if self.seen.left is None or p not in self.seen.left.values]
        if self.seen.left:
            self.seen.left.hooks = {p: h for p, h in after.hooks.items() if h.keys() != met.hooks.get(p, {}).keys()}

    def _call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        model = getattr(self, WRAPPED)
        with no_draws(model), Watch(model):
            out = model(*args, **kwargs)
            if self.twice is not None:
                first = Snapshot.of(self.parts[0])
                with watched_attributes(model, self.parts[0], self.twice) as self.seen.carried:
                    out = model(*args, **kwargs)
                self.seen.moved = first.changed()
        return out

    def _drop(self, value: Any) -> None:
        self.seen.dropped.add(type(value).__name__)


def loss_of(given: Callable[[Any], Tensor] | None, out: Any, node: Node, found: list[Tensor]) -> Tensor | None:
    """The loss: ``given(out)``, else the output's ``loss``, else the output where it is one float; None without any.

    ``node`` and ``found``: how the output nests, and its tensors. Raises AutoparError ``loss-not-scalar``.
    """
    loss = given(out) if given else out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
    if loss is None and node.kind == "tensor" and found[0].ndim == 0 and found[0].is_floating_point():
        return found[0]
    if isinstance(loss, Tensor) and loss.numel() == 1 and loss.is_floating_point():
        return loss.reshape(())
    if given is None or loss is None:
        return None
    what = f"{tuple(loss.shape)} {loss.dtype}" if isinstance(loss, Tensor) else type(loss).__name__
    raise AutoparError(
        "loss-not-scalar", f"loss: got {what}, not one float", "let loss(output) return a scalar float tensor"
    )
