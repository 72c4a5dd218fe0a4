"""What a case does with a module, the same for the parallel and for the unsharded one."""

import importlib
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

import autopar

SEED = 1234
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """A model on a mesh.

    Args:
        model: a module of ``tests.cases.models``.
        train: training steps with ``optimizer``; 0 leaves the parameters alone.
        calls: how often the first inputs are taken.
        others: arguments of ``make_inputs`` for further inputs.
        held: largest share of the parameters that a rank may hold; by default half of the way from all to its own part.
        flops: largest matmul flops of all ranks together over the unsharded model's.
        warns: parts of the warnings that are due, one each, in order.
    """

    model: str
    mesh: str
    strategy: str = ""
    train: int = 0
    optimizer: str = "sgd"
    clip: float | None = None
    calls: int = 1
    others: tuple[tuple[int, ...], ...] = ()
    held: float | None = None
    flops: float | None = None
    warns: tuple[str, ...] = ()

    def __str__(self) -> str:
        return "-".join(filter(None, (self.model, self.mesh, self.strategy)))

    @property
    def sizes(self) -> dict[str, int]:
        """Axis sizes."""
        return {a: int(n) for a, n in (x.split("=") for x in self.mesh.split(","))}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.sizes.values())

    @property
    def text(self) -> Any:
        """The module of the model."""
        return importlib.import_module(f"tests.cases.models.{self.model}")


@dataclass
class Played:
    """Everything that is compared, whole and on plain tensors."""

    losses: list[float] = field(default_factory=list)
    grads: dict[str, Tensor | None] = field(default_factory=dict)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)
    norm: float = 0.0
    flops: int = 0
    collectives: Counter[str] = field(default_factory=Counter)
    held: int = 0


class Count(TorchDispatchMode):
    """Matmul flops and collectives of this rank's own ops."""

    def __init__(self) -> None:
        super().__init__()
        self.flops, self.calls = 0, Counter[str]()

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any("DTensor" in t.__name__ for t in types):
            return NotImplemented  # comes again as local ops
        out, name = op(*args, **(kwargs or {})), op._overloadpacket
        if not any("Fake" in t.__name__ for t in types):
            self.flops += flop_registry[name](*args, **(kwargs or {}), out_val=out) if name in flop_registry else 0
            if "c10d" in str(name):
                self.calls[name.__name__] += 1
        return out


def leaves(out: Any) -> list[Tensor]:
    """The tensors of an output."""
    if hasattr(out, "__dataclass_fields__"):
        out = [getattr(out, name) for name in out.__dataclass_fields__]
    return [t for t in tree_leaves(out) if isinstance(t, Tensor)]


def default_loss(out: Any) -> Tensor:
    """Every element counts with a weight of its own, scaled so that faulty gradients stand out."""
    total = torch.zeros(())
    for t in leaves(out):
        if t.is_floating_point() and t.ndim:
            weights = torch.cos(torch.arange(t.numel(), dtype=torch.float32)).reshape(t.shape)
            total = total + 100.0 * (t * weights).mean() + 10.0 * t.pow(2).mean()
        elif t.is_floating_point():
            total = total + t
    return total


def whole(t: Tensor) -> Tensor:
    """A copy of a DTensor's or tensor's whole value."""
    full = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full.detach().clone()


def rows_of(call: Any) -> int | None:
    """Rows of the batch: those of the first tensor."""
    return next((x.shape[0] for x in tree_leaves(call) if isinstance(x, Tensor) and x.ndim), None)


def share(call: Call, index: int, count: int) -> Call:
    """A data rank's rows."""
    rows = rows_of(call)

    def cut(x: Any) -> Any:
        if isinstance(x, Tensor) and x.ndim and x.shape[0] == rows:
            return x.tensor_split(count)[index].clone()
        return x.clone() if isinstance(x, Tensor) else x

    return tree_map(cut, call)


def optimizer_of(case: Case, named: Mapping[str, Tensor]) -> torch.optim.Optimizer:
    """The case's optimizer, with the parameter groups that its module asks for."""
    groups: list[Any] = list(named.values())
    if hasattr(case.text, "param_groups"):
        model = case.text.make_model()
        names = {id(p): n for n, p in model.named_parameters()}
        groups = [{**g, "params": [named[names[id(p)]] for p in g["params"]]} for g in case.text.param_groups(model)]
    kind = torch.optim.AdamW if case.optimizer == "adamw" else torch.optim.SGD
    return kind(groups, lr=1e-2, weight_decay=0.0)


def calls_of(case: Case) -> Iterator[Call]:
    """The inputs of each step, of the whole batch."""
    for given in ((),) * max(case.train, case.calls) + case.others:
        yield case.text.make_inputs(*given), getattr(case.text, "make_kwargs", dict)()


def play(
    case: Case, module: nn.Module, step: Callable[..., Tensor], clip: Callable[[float], Tensor], cut: Any
) -> Played:
    """The case's steps, then an output in eval mode."""
    out = Played()
    optimizer = optimizer_of(case, dict(module.named_parameters())) if case.train else None
    for at, call in enumerate(calls_of(case)):
        args, kwargs = cut(call)
        with Count() as count:
            loss = step(*args, **kwargs)
        out.losses.append(float(loss))
        if at == 0:
            out.flops, out.collectives = count.flops, count.calls
        for name, p in module.named_parameters():
            out.grads[f"{name} of call {at}"] = None if p.grad is None else whole(p.grad)
        if case.clip is not None:
            out.norm = float(whole(clip(case.clip)))
        if optimizer is not None:
            optimizer.step()
        module.zero_grad()
    out.buffers = {n: whole(b) for n, b in module.named_buffers()}
    out.params = {n: whole(p) for n, p in module.named_parameters()}
    out.held = sum((p.to_local() if hasattr(p, "to_local") else p).numel() for p in module.parameters())
    module.eval()
    args, kwargs = cut(next(calls_of(case)))
    with torch.no_grad():
        out.outputs = [whole(t) for t in leaves(module(*args, **kwargs))]
    return out


def unsharded(case: Case) -> Played:
    """The case on the model itself."""
    model, loss_of = case.text.make_model(), getattr(case.text, "loss", default_loss)

    def step(*args: Any, **kwargs: Any) -> Tensor:
        loss = loss_of(model(*args, **kwargs))
        loss.backward()
        return loss.detach()

    return play(case, model, step, lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm), lambda call: call)


def data_place(case: Case, coordinate: Mapping[str, int]) -> tuple[int, int]:
    """(this data rank, number of data ranks)."""
    return coordinate.get("dp", 0), case.sizes.get("dp", 1)


def parallel(case: Case) -> tuple[int, Played]:
    """The case on this rank: its place in the data, and what it got."""
    mesh = init_device_mesh("cpu", tuple(case.sizes.values()), mesh_dim_names=tuple(case.sizes))
    index, count = data_place(case, dict(zip(case.sizes, mesh.get_coordinate() or ())))

    def cut(call: Call) -> Call:
        return share(call, index, count)

    args, kwargs = cut(next(calls_of(case)))
    pm = autopar.parallelize(
        case.text.make_model(), mesh, args=args, kwargs=kwargs, strategy=case.strategy or None,
        loss=getattr(case.text, "loss", default_loss),
    )  # fmt: skip
    return index, play(case, pm, pm.train_step, pm.clip_grad_norm_, cut)
