"""Modules by path, those with several names under each."""

from torch import nn

from autopar.ir.modules import walk


def test_as_torch_names_them() -> None:
    shared = nn.Linear(2, 2)
    model = nn.Sequential(shared, nn.ModuleDict({"a": nn.ReLU(), "b": nn.ModuleList([shared, nn.Sequential()])}))
    model.register_module("gone", None)
    assert list(walk(model)) == list(model.named_modules(remove_duplicate=False))
