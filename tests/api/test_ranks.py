"""The processes that the other tests run on see hangs and deaths."""

import os
import time

import pytest
import torch.distributed as dist

from tests.ranks import Ranks


def stuck() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def dead() -> None:
    if dist.get_rank() == 1:
        os._exit(1)


def alive() -> int:
    return dist.get_rank()


def test_a_rank_that_hangs_or_dies_is_named_and_replaced(ranks: Ranks) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"stuck: rank \[1\] gave no answer"):
        ranks.run(2, stuck, timeout=3)
    assert ranks.run(2, alive) == [0, 1]
    with pytest.raises(pytest.fail.Exception, match=r"dead: rank \[1\] died"):
        ranks.run(2, dead)
    assert ranks.run(4, alive) == [0, 1, 2, 3]
