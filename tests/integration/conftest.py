"""What the tests of all backends share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.servers.local import LocalServer, free_port

from .sql_targets import PgBouncer, empty_server


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


@pytest.fixture
def postgresql(request: pytest.FixtureRequest) -> Any:
    """A server with no table of ours."""
    return empty_server(request, "postgresql")


@pytest.fixture(scope="module")
def pooler(request: pytest.FixtureRequest) -> Iterator[Any]:
    """One in front of the PostgreSQL server."""
    behind = server_or_not_run(request, "postgresql")
    technology = PgBouncer(behind.address)
    program = technology.find()
    if program is None:
        pytest.skip(f"NOT RUN, since there is no pgbouncer on this machine: {technology.how}")
    pooler = LocalServer(technology, program)
    yield pooler
    pooler.close()
