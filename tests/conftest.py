import pathlib
from collections.abc import Iterator

import pytest
import torch

from tests.ranks import Ranks

GOLDENS = pathlib.Path(__file__).parent / "goldens"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--update-goldens", action="store_true", help="write what the tests print as the new goldens")


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Nothing is read from, or left in, the user's folder for caches."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AUTOPAR_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


class Golden:
    """Compares text with ``tests/goldens/NAME``; ``--update-goldens`` writes it instead."""

    def __init__(self, update: bool) -> None:
        self.update = update

    def __call__(self, text: str, name: str) -> None:
        path = GOLDENS / name
        if self.update:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        assert path.exists(), f"{path.name} is missing: run pytest --update-goldens and read it"
        assert text == path.read_text(encoding="utf-8")


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Golden:
    return Golden(request.config.getoption("--update-goldens"))


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Four gloo processes that live as long as the tests do."""
    pool = Ranks(4, tmp_path_factory.mktemp("stores"))
    yield pool
    pool.stop()
