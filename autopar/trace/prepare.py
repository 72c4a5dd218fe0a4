"""The state a model is put into while it is traced, and out of again."""

import io
import logging
import math
import sys
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import torch.utils.checkpoint as checkpointing
from torch import Tensor, nn
from torch.distributions import Distribution
from torch.nn.modules.batchnorm import _BatchNorm

from autopar.ir.modules import once
from autopar.trace.branches import both_branches
from autopar.trace.experts import Candidates, single_nodes
from autopar.trace.watch import plain_modes


@contextmanager
def prepared(
    model: nn.Module, train: bool, notes: list[str], checkpoints: list[str], dense: bool = False
) -> Iterator[Candidates]:
    """Trace-time state: mode, no caches, no checkpointing, no fused eval paths. Everything is restored on leaving.

    Appends to ``notes`` what was switched off, and to ``checkpoints`` the functions found under checkpointing. Yields
    the modules that may be layers of experts.
    """
    with ExitStack() as stack:
        stack.enter_context(_mode(model, train))
        stack.enter_context(_no_cache(model, notes))
        stack.enter_context(_no_checkpoint(checkpoints))
        stack.enter_context(_no_fastpath())
        stack.enter_context(plain_modes())
        stack.enter_context(both_branches(model))
        stack.enter_context(_cumulative_norms(model))
        stack.enter_context(_unchecked_distributions())
        stack.enter_context(_unchecked_losses())
        yield stack.enter_context(single_nodes(model, dense))


@contextmanager
def quiet() -> Iterator[None]:
    """Holds back what export prints of a failure, which the error says better; what a model prints is let out."""
    logger = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    level, text = logger.level, io.StringIO()
    try:
        logger.setLevel(logging.CRITICAL)
        with redirect_stderr(text):
            yield
    finally:
        logger.setLevel(level)
    sys.stderr.write(text.getvalue())


@contextmanager
def _mode(model: nn.Module, train: bool) -> Iterator[None]:
    """Train or eval mode. A tree that is already in the wanted mode keeps what its user set apart (a frozen norm)."""
    flags = [(m, m.training) for m in once(model)]
    try:
        if model.training != train:
            model.train(train)
        yield
    finally:
        for module, flag in flags:
            module.training = flag


@contextmanager
def _no_cache(model: nn.Module, notes: list[str]) -> Iterator[None]:
    """``use_cache`` off in every config of the tree: a cache is no tensor and of no use to a forward in training."""
    configs = {id(c): c for m in once(model) if (c := getattr(m, "config", None)) is not None}
    changed = [c for c in configs.values() if getattr(c, "use_cache", None)]
    try:
        for config in changed:
            config.use_cache = False
        if changed:
            notes.append("use_cache was on and is off in the parallel model")
        yield
    finally:
        for config in changed:
            config.use_cache = True


@contextmanager
def _no_checkpoint(found: list[str]) -> Iterator[None]:
    """Checkpointed functions run plainly: export drops the recomputation, and the reentrant kind even the gradients."""

    def say(function: Callable[..., Any]) -> None:
        owner = getattr(function, "__self__", function)
        found.append(type(owner).__name__ if isinstance(owner, nn.Module) else getattr(owner, "__name__", str(owner)))

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            say(function)
            return function(*args)

    def generator(function: Callable[..., Any], *_args: Any, **_kwargs: Any) -> Generator[None, None, None]:
        say(function)
        yield

    names = {"CheckpointFunction": Reentrant, "_checkpoint_without_reentrant_generator": generator}
    saved = {name: getattr(checkpointing, name) for name in names}
    try:
        for name, value in names.items():
            setattr(checkpointing, name, value)
        yield
    finally:
        for name, value in saved.items():
            setattr(checkpointing, name, value)


@contextmanager
def _no_fastpath() -> Iterator[None]:
    """The fused eval kernels of ``nn.TransformerEncoderLayer`` off: the written-out path has rules."""
    saved = torch.backends.mha.get_fastpath_enabled()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(saved)


@contextmanager
def _unchecked_distributions() -> Iterator[None]:
    """``torch.distributions`` that do not look at the values of their arguments, which a trace does not have."""
    saved = Distribution._validate_args
    try:
        Distribution.set_default_validate_args(False)
        yield
    finally:
        Distribution.set_default_validate_args(saved)


@contextmanager
def _unchecked_losses() -> Iterator[None]:
    """The Gaussian loss without its look at the signs of variances, which a trace does not have."""
    saved = F.gaussian_nll_loss
    try:
        F.gaussian_nll_loss = partial(_gaussian, saved)
        yield
    finally:
        F.gaussian_nll_loss = saved


def _gaussian(
    checked: Callable[..., Tensor],
    input: Tensor,
    target: Tensor,
    var: Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> Tensor:
    """``checked`` as if no variance were negative; gradients pass where one is raised to ``eps``."""
    if not isinstance(var, Tensor):
        return checked(input, target, var, full, eps, reduction)
    shape = (*var.shape, 1) if input.shape[:-1] == var.shape and var.shape != input.shape else var.shape
    if len(shape) != input.ndim or sum(a != b for a, b in zip(shape, input.shape)) > 1:
        raise ValueError("var is of incorrect size")
    if reduction not in ("none", "mean", "sum"):
        raise ValueError(f"{reduction} is not valid")
    var = var.view(shape) + (var.detach().clamp(min=eps) - var.detach()).view(shape)
    loss = 0.5 * (torch.log(var) + (input - target) ** 2 / var)
    loss = loss + 0.5 * math.log(2 * math.pi) if full else loss
    return loss if reduction == "none" else loss.mean() if reduction == "mean" else loss.sum()


@contextmanager
def _cumulative_norms(model: nn.Module) -> Iterator[None]:
    """Batch norms that average over all steps (``momentum=None``) without a Python number of the steps so far."""
    norms = [m for m in once(model) if isinstance(m, _BatchNorm) and m.momentum is None and m.training]
    norms = [m for m in norms if m.num_batches_tracked is not None and "forward" not in m.__dict__]
    try:
        for norm in norms:
            norm.forward = partial(_cumulative_norm, norm)  # type: ignore[method-assign]
        yield
    finally:
        for norm in norms:
            del norm.__dict__["forward"]


def _cumulative_norm(norm: _BatchNorm, x: Tensor) -> Tensor:
    norm._check_input_dim(x)
    assert norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None
    norm.num_batches_tracked.add_(1)
    mean, var = norm.running_mean.clone(), norm.running_var.clone()
    out = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        for running, batch in ((norm.running_mean, mean), (norm.running_var, var)):
            running.add_((batch - running) / norm.num_batches_tracked)
    return out
