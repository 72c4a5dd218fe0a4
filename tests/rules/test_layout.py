"""Layouts as keys."""

import pickle

from autopar.ir.layout import I, Layout, R, plain_shard


def test_a_hash_is_kept_but_not_sent_to_another_process() -> None:
    layout = Layout.of({"dp": R, "tp": plain_shard(0, 4, 2)})
    same = Layout.of({"dp": R, "tp": plain_shard(0, 4, 2)})
    assert hash(layout) == hash(same) == hash(layout) and {layout: 1}[same] == 1
    assert "_hash" in vars(layout)
    sent = pickle.loads(pickle.dumps(layout))
    assert "_hash" not in vars(sent) and sent == layout and hash(sent) == hash(layout)
    assert hash(layout.having("tp", I)) != hash(layout)
