"""A model's modules by path."""

from collections.abc import Iterator

from torch import nn


def walk(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As ``model.named_modules(remove_duplicate=False)``, whose generators in generators take long where it is deep."""
    todo: list[tuple[str, nn.Module]] = [("", model)]
    while todo:
        path, module = todo.pop()
        yield path, module
        if module._modules:
            dot = path + "." if path else ""
            todo += [(dot + name, m) for name, m in reversed(module._modules.items()) if m is not None]


def named(model: nn.Module) -> dict[str, nn.Module]:
    """As ``dict(model.named_modules())``: each once, by its first path."""
    first: dict[int, str] = {}
    return {path: m for path, m in walk(model) if first.setdefault(id(m), path) == path}


def once(model: nn.Module) -> list[nn.Module]:
    """As ``model.modules()``: each once, in the order of their first paths."""
    return list(named(model).values())
