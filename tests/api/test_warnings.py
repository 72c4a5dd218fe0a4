"""What users are told: at their own line, and by one process of a machine."""

import warnings

import pytest

import autopar
from autopar.errors import tell
from tests.api.models import WIDTH, Odd, features
from tests.emit.fake import world


def heard(local_rank: str, monkeypatch: pytest.MonkeyPatch) -> list[warnings.WarningMessage]:
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    with world(2), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        autopar.parallelize(Odd(), "tp=2", args=(features(4, WIDTH),), heartbeat=None)
    return [w for w in said if w.category is autopar.AutoparWarning]


def test_a_warning_names_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    said = heard("0", monkeypatch)
    assert said and all(w.filename == __file__ for w in said)


def test_the_first_process_of_a_machine_speaks(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not heard("1", monkeypatch)


def test_a_message_is_said_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        tell(["one", "two", "one"])
    assert [str(w.message) for w in said] == ["one", "two"]
