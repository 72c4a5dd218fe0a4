"""Optimizer state by original parameter names, so that it goes from any mesh to any other."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import Optimizer

from autopar.checkpoint.live import Live
from autopar.checkpoint.pieces import Stored, stored, stored_as_placed
from autopar.emit.params import held_of
from autopar.errors import AutoparError

PREFIX = "optimizer/"
_NO_OPTION = ("params", "param_names")


def key_of(name: str, key: str) -> str:
    """The name under which a checkpoint holds the optimizer's ``key`` of parameter ``name``."""
    return f"{PREFIX}{name}/{key}"


@dataclass
class Collected:
    """An optimizer's state.

    Args:
        tensors: by ``key_of``.
        groups: for each parameter group the names of its parameters and its options.
        keys: for each parameter, which of its state are tensors.
        values: for each parameter, the state that is none.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    keys: dict[str, list[str]] = field(default_factory=dict)
    values: dict[str, dict[str, Any]] = field(default_factory=dict)

    def rest(self) -> dict[str, Any]:
        """Everything but the tensors."""
        return {"groups": self.groups, "keys": self.keys, "values": self.values}


def collect(optimizer: Optimizer, live: Live) -> Collected:
    """The optimizer's state.

    Raises:
        AutoparError: ``bad-optimizer`` where it is none, or several, ``foreign-parameter`` where it has a parameter
            that is none of the module, ``optimizer-state`` where its state is nested, so that nobody can tell which
            ranks hold what.
    """
    out = Collected()
    for names, group in _groups(optimizer, live):
        options = {k: _plain(v) for k, v in group.items() if k not in _NO_OPTION}
        out.groups.append({"names": names, "options": options})
        for name, p in zip(names, group["params"]):
            state = optimizer.state.get(p, {})
            out.keys[name] = [k for k, v in state.items() if isinstance(v, Tensor)]
            out.values[name] = {k: v for k, v in state.items() if not isinstance(v, Tensor)}
            nested = [k for k, v in out.values[name].items() if isinstance(v, (list, tuple, dict))]
            if nested:
                why = f"{name}: {type(optimizer).__name__} keeps {nested[0]} as a {type(state[nested[0]]).__name__}"
                raise AutoparError("optimizer-state", why, "use an optimizer that keeps tensors for each parameter")
            for key in out.keys[name]:
                out.tensors[key_of(name, key)] = _stored(state[key], p, name, key, live)
    return out


def _plain(option: Any) -> Any:
    return option.detach().to("cpu", copy=True) if isinstance(option, Tensor) else option


def _groups(optimizer: Optimizer, live: Live) -> list[tuple[list[str], dict[str, Any]]]:
    """(names, group) of each parameter group. Raises AutoparError ``bad-optimizer``, ``foreign-parameter``."""
    if not hasattr(optimizer, "param_groups"):
        why = f"optimizer is a {type(optimizer).__name__}: a folder holds the state of one optimizer"
        fix = (
            "save and load each optimizer with a folder of its own (which has the parameters too), or make one "
            "optimizer of several groups"
        )
        raise AutoparError("bad-optimizer", why, fix)
    names = {id(x): n for n, found in live.tensors.items() for x in found}
    out = []
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if id(p) not in names]
        if foreign:
            why = f"the optimizer has a parameter of shape {list(foreign[0].shape)} that the module does not have"
            raise AutoparError("foreign-parameter", why, "make the optimizer from parameters() of the parallel module")
        out.append(([names[id(p)] for p in group["params"]], group))
    return out


def _like(p: Tensor, shape: tuple[int, ...], key: str) -> bool:
    """Whether a state tensor has an element for each of the parameter's; a count of steps never has."""
    return tuple(p.shape) == shape and key != "step"


def _stored(value: Tensor, p: Tensor, name: str, key: str, live: Live) -> Stored:
    full = key_of(name, key)
    if _like(p, tuple(value.shape), key) and isinstance(value, DTensor) == isinstance(p, DTensor):
        return stored(value, held_of(live.params[name], live.place.mesh), live.place, full, live.holders(name))
    return stored_as_placed(value, live.place, full, live.holders(name))


@dataclass
class Prepared:
    """Tensors for a saved state to be read into, and what makes it the optimizer's."""

    tensors: dict[str, Stored]
    commit: Callable[[], None]


def names_of(optimizer: Optimizer, live: Live) -> list[list[str]]:
    """The names of each group's parameters on this rank."""
    return [names for names, _ in _groups(optimizer, live)]


def joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """``Collected.rest`` of several ranks, each with its own parameters, as that of all.

    Raises AutoparError ``optimizer-mismatch`` where ranks have other numbers of groups.
    """
    groups = together([[g["names"] for g in part["groups"]] for part in parts])
    out: dict[str, Any] = {"groups": [], "keys": {}, "values": {}}
    for i, names in enumerate(groups):
        out["groups"].append({"names": names, "options": parts[0]["groups"][i]["options"]})
    for part in parts:
        out["keys"] |= part["keys"]
        out["values"] |= part["values"]
    return out


def together(parts: list[list[list[str]]]) -> list[list[str]]:
    """The names of each group over all ranks. Raises AutoparError ``optimizer-mismatch``."""
    counts = sorted({len(part) for part in parts})
    if len(counts) > 1:
        why = f"the optimizers of the ranks have {' and '.join(map(str, counts))} groups"
        raise AutoparError("optimizer-mismatch", why, "make as many groups on every rank, empty ones too")
    return [list(dict.fromkeys(n for part in parts for n in part[i])) for i in range(counts[0])]


def prepare(
    optimizer: Optimizer,
    live: Live,
    rest: Mapping[str, Any],
    saved: Mapping[str, tuple[tuple[int, ...], torch.dtype]],
    everywhere: list[list[str]],
) -> Prepared:
    """Match the optimizer with a saved state. Nothing of it changes before ``commit``, but values of its tensors.

    Args:
        rest: as ``Collected.rest``.
        everywhere: the names of each group over all ranks.
        saved: shape and dtype of the saved tensors by ``key_of``.

    Raises:
        AutoparError: ``optimizer-mismatch`` where the groups hold other parameters.
    """
    pairs = _matched(_groups(optimizer, live), everywhere, rest["groups"])
    tensors: dict[str, Stored] = {}
    states: list[tuple[Tensor, dict[str, Any]]] = []
    for names, group, options in pairs:
        for name, p in zip(names, group["params"]):
            state = dict(rest["values"].get(name, {}))
            for key in rest["keys"].get(name, ()):
                full = key_of(name, key)
                state[key] = _target(optimizer.state.get(p, {}).get(key), p, key, *saved[full], options)
                tensors[full] = _stored(state[key], p, name, key, live)
            states.append((p, state))

    def commit() -> None:
        for p, state in states:
            optimizer.state.pop(p, None)
            if state:
                optimizer.state[p] = state
        for _, group, options in pairs:
            for option, value in options.items():
                _set(group, option, value)

    return Prepared(tensors, commit)


def _set(group: dict[str, Any], option: str, value: Any) -> None:
    old = group.get(option)
    if isinstance(old, Tensor) and isinstance(value, (Tensor, int, float)):
        old.copy_(torch.as_tensor(value))
    else:
        group[option] = value


def _matched(
    groups: list[tuple[list[str], dict[str, Any]]], everywhere: list[list[str]], saved: list[dict[str, Any]]
) -> list[tuple[list[str], dict[str, Any], dict[str, Any]]]:
    """(names, group, saved options): the groups of equal sets of names, in whatever order."""
    by_names = {frozenset(s["names"]): s["options"] for s in saved}
    wanted = {frozenset(names) for names in everywhere}
    if wanted != set(by_names):
        mine, theirs = set().union(*wanted), set().union(*by_names)
        parts = [f"groups of the optimizer: {len(everywhere)}, of the checkpoint's: {len(saved)}"]
        parts += [f"the checkpoint's lacks {_some(mine - theirs)}"] if mine - theirs else []
        parts += [f"the checkpoint's alone has {_some(theirs - mine)}"] if theirs - mine else []
        parts += ["they hold the same parameters, otherwise grouped"] if mine == theirs else []
        fix = "make the optimizer with the parameters and groups that the saved one had"
        raise AutoparError("optimizer-mismatch", "; ".join(parts), fix)
    return [(names, group, by_names[frozenset(every)]) for (names, group), every in zip(groups, everywhere)]


def _some(names: set[str], most: int = 4) -> str:
    """The first of the names, and how many more there are."""
    shown = ", ".join(sorted(names)[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")


def _target(
    old: object, p: Tensor, key: str, shape: tuple[int, ...], dtype: torch.dtype, options: Mapping[str, Any]
) -> Tensor:
    """A tensor for a saved one: the optimizer's own where it fits, else one spread as the parameter."""
    if isinstance(old, Tensor) and tuple(old.shape) == shape and old.dtype == dtype:
        return old
    if _like(p, shape, key):
        return torch.empty_like(p.detach(), dtype=dtype)
    on_device = key != "step" or options.get("capturable") or options.get("fused")
    plain = torch.empty(shape, dtype=dtype, device=p.device if on_device else "cpu")
    if isinstance(p, DTensor) and shape:
        return DTensor.from_local(plain, p.device_mesh, [Replicate()] * p.device_mesh.ndim, run_check=False)
    return plain
