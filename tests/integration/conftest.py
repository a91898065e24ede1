"""What the tests of all backends share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rdzv.conformance.servers.local import free_port


class Opened(list[Any]):
    """What is to be closed at the end, last first: what it is called with, or what is added."""

    def __call__(self, what: Any) -> Any:
        self.append(what)
        return what


@pytest.fixture
def opened() -> Iterator[Opened]:
    """Closes at the end what it holds."""
    opened = Opened()
    yield opened
    while opened:
        opened.pop().close()


@pytest.fixture
def port() -> int:
    """One of this machine's that nobody had a moment ago."""
    return free_port()
