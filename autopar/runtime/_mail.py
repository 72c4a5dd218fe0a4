"""Messages between the ranks that are threads of one process: c10d's threaded process group has none."""

import threading
from collections import defaultdict, deque
from typing import Any

from torch import Tensor
from torch.testing._internal.distributed import multi_threaded_pg as threaded

Key = tuple[str, int, int, int]  # group, source, target, tag


class _Mail:
    """What was sent and not received yet."""

    def __init__(self) -> None:
        self.boxes: dict[Key, deque[Tensor]] = defaultdict(deque)
        self.arrived = threading.Condition()

    def put(self, key: Key, value: Tensor) -> None:
        with self.arrived:
            self.boxes[key].append(value)
            self.arrived.notify_all()

    def take(self, key: Key) -> Tensor:
        """The next message; ends the thread where another rank has failed."""
        with self.arrived:
            while not self.boxes[key]:
                if threaded.ProcessLocalGroup._terminate.is_set():
                    raise SystemExit("a rank failed")
                self.arrived.wait(0.05)
            return self.boxes[key].popleft()


class _Sent:
    def wait(self) -> bool:
        return True


class _Received:
    def __init__(self, target: Tensor, key: Key) -> None:
        self.target, self.key = target, key

    def wait(self) -> bool:
        self.target.copy_(_mail.take(self.key))
        return True


_mail = _Mail()


def _send(self: Any, tensors: list[Tensor], target: int, tag: int) -> _Sent:
    _mail.put((self.pg_name, self._rank, target, tag), tensors[0].detach().clone())
    return _Sent()


def _recv(self: Any, tensors: list[Tensor], source: int, tag: int) -> _Received:
    return _Received(tensors[0], (self.pg_name, source, self._rank, tag))


def install() -> None:
    """Give the threaded group sends and receives, with nothing on the way."""
    _mail.boxes.clear()
    group: Any = threaded.ProcessLocalGroup
    group.send, group.recv = _send, _recv
