"""Where a node or a failure comes from, in the user's words."""

import linecache
import os
import re
import sys
from collections.abc import Mapping
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import fx, nn

from autopar.errors import AutoparError

FRAME = re.compile(r'File "([^"]+)", line (\d+), in (\S+)\n\s+(.*)')
OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
PYTHON = os.path.dirname(os.path.abspath(os.__file__))
TORCH = os.path.dirname(os.path.abspath(torch.__file__))
DEPENDENT = "data-dependent-control-flow"
UNSEEN = "no experts were recognized"  # how notes begin that say why a layer of experts was traced as it stands


def is_user(path: str) -> bool:
    """Whether a file is the user's or a model library's: neither Python's, torch's nor the compiler's own."""
    own = path.startswith((TORCH + os.sep, OURS + os.sep, "<"))
    return not own and ("site-packages" in path or not path.startswith(PYTHON + os.sep))


def module_of(node: fx.Node) -> str:
    """Path of the innermost module that was running; "" for the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    return str(list(stack.values())[-1][0]).partition(".")[2] if stack else ""


def call_of(node: fx.Node) -> str:
    """Path of the innermost module call: ``module_of`` with ``@n`` after a module that was called n times before."""
    call = inside = ""
    for key, (path, *_) in (node.meta.get("nn_module_stack") or {}).items():
        path = str(path).partition(".")[2]
        if not path:
            continue
        count = key.rpartition("@")[2] if "@" in key else ""
        nested = not inside or path.startswith(inside + ".")
        step = path[len(inside) + 1 :] if inside and nested else path
        call = (f"{call}.{step}" if call and nested else step) + (f"@{count}" if count else "")
        inside = path
    return call


def source_of(node: fx.Node) -> str:
    """``"file.py:41 in forward: code"`` of the innermost line of user code; "" where unknown."""
    frames = FRAME.findall(node.meta.get("stack_trace") or "")
    for path, line, function, code in reversed(frames):
        if is_user(path):
            return f"{os.path.basename(path)}:{line} in {function}: {code.strip()}"
    return ""


def said(meta: Mapping[str, Any]) -> str:
    """Module and line of a node; the module alone where torch kept no line: its forward has another name."""
    return ": ".join(filter(None, (meta.get("module") or "the model", meta.get("source"))))


def explain(error: BaseException, model: nn.Module) -> AutoparError:
    """The refusal that a failure during the trace amounts to, with the module and the user's line."""
    where = line_of(error, model)
    said = [n for e in chain(error) for n in getattr(e, "__notes__", ()) if n.startswith(UNSEEN)]
    return also(_explained(error, where), said)


def also(error: AutoparError, unseen: list[str]) -> AutoparError:
    """A refusal of data-dependent control flow says why no experts were recognized; others stay as they are."""
    if error.slug != DEPENDENT or not unseen:
        return error
    return AutoparError(DEPENDENT, "; ".join([error.message, *dict.fromkeys(unseen)]), error.fix)


def _explained(error: BaseException, where: str) -> AutoparError:
    if _is_data_dependent(error):
        return AutoparError(
            DEPENDENT,
            f"{where}: the path taken depends on a tensor's values",
            "choose with torch.where (torch.cond for whole branches), or compute the flag outside and pass a bool;"
            " a layer of experts can be said by autopar.register_experts",
        )
    text = str(error).strip().splitlines() or [""]
    what = f"{where}: {type(error).__name__}: {text[0]}"
    return AutoparError("trace-failed", what, "make this line traceable by torch.export(strict=False)")


def line_of(error: BaseException, model: nn.Module) -> str:
    """The innermost line of user code that a failure went through, with its module."""
    frame, line = _user_frame(error)
    return _where(frame, line, model) if frame else "the model"


def here(model: nn.Module) -> str:
    """The innermost line of user code that is running, with its module."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_user(frame.f_code.co_filename):
        frame = frame.f_back
    return _where(frame, frame.f_lineno, model) if frame is not None else "the model"


def chain(error: BaseException | None) -> list[BaseException]:
    """The error, and what it was raised from."""
    out: list[BaseException] = []
    while error is not None and error not in out:
        out.append(error)
        error = error.__cause__ or error.__context__
    return out


def _is_data_dependent(error: BaseException) -> bool:
    kinds = ("DataDependent", "GuardOnDataDependentSymNode", "DynamicOutputShape", "PendingUnbackedSymbolNotFound")
    named = any(k in type(e).__name__ for e in chain(error) for k in kinds)
    return named or any("data-dependent" in str(e).lower() for e in chain(error))


def _user_frame(error: BaseException) -> tuple[FrameType | None, int]:
    """The innermost method of user code in the deepest cause that has one, or else the innermost function."""
    function: tuple[FrameType | None, int] = (None, 0)
    for e in reversed(chain(error)):
        method: tuple[FrameType | None, int] = (None, 0)
        trace: TracebackType | None = e.__traceback__
        while trace is not None:
            frame = trace.tb_frame
            if is_user(frame.f_code.co_filename) and _owner(frame) is not None:
                method = (frame, trace.tb_lineno)
            elif is_user(frame.f_code.co_filename):
                function = (frame, trace.tb_lineno)
            trace = trace.tb_next
        if method[0] is not None:
            return method
    return function


def _owner(frame: FrameType) -> Any:
    """The object whose method runs in the frame; a module may call itself something else than self."""
    code = frame.f_code
    first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
    return frame.f_locals.get("self", first if isinstance(first, nn.Module) else None)


def _where(frame: FrameType, line: int, model: nn.Module) -> str:
    owner = _owner(frame)
    path = next((n for n, m in model.named_modules() if m is owner), "")
    file = frame.f_code.co_filename
    code = linecache.getline(file, line).strip().rstrip(":")
    name = frame.f_code.co_name if owner is None else f"{type(owner).__name__}.{frame.f_code.co_name}"
    return f"{path or 'the model'} / {name}: {os.path.basename(file)}:{line}: {code}"
