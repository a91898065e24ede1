"""What a wait on PostgreSQL asks the server: nothing that it has been told."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend
from rdzv.backends.sql.postgresql import Connection
from rdzv.backends.sql.shortage import Limits
from rdzv.backends.sql.statements import CROWD
from rdzv.conformance.store_kit import Background
from rdzv.ports import Entry, Question

from .operations import TTL_SECONDS, until
from .sql_targets import empty_server, listens


@contextlib.contextmanager
def messages_of(backend: SqlBackend) -> Iterator[list[int]]:
    """How many statements each message has, of those that are sent from now on."""
    sent: list[int] = []
    dialect: Any = backend.database.dialect
    send = dialect.send

    def counted(connection: Any, written: Any, read: Any, *arguments: Any) -> Any:
        sent.append(len(written) + len(read))
        return send(connection, written, read, *arguments)

    dialect.send = counted
    try:
        yield sent
    finally:
        dialect.send = send


def announced(backend: SqlBackend, label: str = "") -> Any:
    return backend.announce(Entry("node", b"data", label), TTL_SECONDS, Question())


def test_who_was_told_of_nothing_does_not_look(postgresql: Any, opened: Any) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    _, token, _ = backend.set_state(b"1")
    announced(backend)
    with messages_of(backend) as sent:
        assert backend.wait_for_change(token, 0.1) is None
        assert sent == [], "the announcement has found what is known"
        waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS)).still_blocked()
        assert sent == []
        found = other.set_state(b"2", token)[:2]
        assert waiting.result() == found
        assert sent == [1], "it looks once when it is told"
        assert backend.wait_for_change(found[1], 0.1) is None
        assert sent == [1]


def test_what_was_told_between_two_waits_is_looked_for(postgresql: Any, opened: Any) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    _, token, _ = backend.set_state(b"1")
    announced(backend)
    assert backend.wait_for_change(token, 0.1) is None
    found = other.set_state(b"2", token)[:2]
    assert backend.wait_for_change(token, TTL_SECONDS) == found


def test_an_announcement_brings_the_document(postgresql: Any, opened: Any) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    assert backend.get_state() is None
    found = other.set_state(b"1")[:2]
    pulse = announced(backend)
    assert pulse.token == found[1]
    assert listens(backend)
    with messages_of(backend) as sent:
        assert backend.wait_for_change(None, TTL_SECONDS) == found
        assert sent == []


def test_what_an_announcement_brought_is_not_returned_when_it_is_old(
    postgresql: Any, opened: Any
) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    first = other.set_state(b"1")
    announced(backend)
    second = other.set_state(b"2", first[1])[:2]
    # Whoever knows the second one must not be given the first.
    assert backend.wait_for_change(second[1], 0.5) is None


def test_a_first_announcement_makes_the_run_in_one_message(postgresql: Any, opened: Any) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.open()
    with messages_of(backend) as sent:
        assert announced(backend).live == 1
        assert len(sent) == 1


def test_the_first_look_goes_along_with_listening(
    postgresql: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    first = other.set_state(b"1")[:2]
    backend.open()
    exchanges: list[object] = []
    wait = Connection.wait

    def counted(connection: Connection, *arguments: Any, **options: Any) -> Any:
        exchanges.append(connection)
        return wait(connection, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Connection, "wait", counted)
        assert backend.look_and_watch() == first
        assert len(exchanges) == 1
        assert backend.wait_for_change(first[1], 0.1) is None
        assert len(exchanges) == 1, "what was found is known, and nothing was told since"
    assert listens(backend)
    second = other.set_state(b"2", first[1])[:2]
    assert backend.wait_for_change(first[1], TTL_SECONDS) == second
    assert backend.look_and_watch() == second, "it listens already"


def test_what_is_told_while_the_first_look_is_answered_is_not_missed(
    postgresql: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The notification comes with that answer, or with the one to what is asked next."""
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    first = other.set_state(b"1")[:2]
    backend.open()
    second: list[Any] = []

    def are_short(limits: Limits, driver: Any, processes: int) -> bool:
        second.append(other.set_state(b"2", first[1])[:2])
        driver.execute("SELECT 1")
        return False

    with monkeypatch.context() as patch:
        patch.setattr(Limits, "are_short", are_short)
        assert backend.look_and_watch() == first
    assert backend.wait_for_change(first[1], 0.2) == second[0]


def test_a_first_look_that_is_repeated_tells_what_is_there_then(
    postgresql: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    first = other.set_state(b"1")[:2]
    backend.open()
    second: list[Any] = []

    def are_short(limits: Limits, driver: Any, processes: int) -> bool:
        second.append(other.set_state(b"2", first[1])[:2])
        # As another thread leaves it that has found the server crowded.
        backend.database._signal._polls_until = time.monotonic() + TTL_SECONDS
        driver.close()
        raise psycopg.OperationalError("the connection is lost")

    with monkeypatch.context() as patch:
        patch.setattr(Limits, "are_short", are_short)
        assert backend.look_and_watch() == second[0]


def test_the_first_look_is_made_where_nobody_tells(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    for endpoint in (empty_server(request, "mysql").endpoint(), _crowded(request)):
        backend, other = (opened(SqlBackend(endpoint, "run")) for _ in range(2))
        assert backend.look_and_watch() is None
        first = other.set_state(b"1")[:2]
        assert backend.look_and_watch() == first
        assert getattr(backend.database._signal, "_line", None) is None
        second = other.set_state(b"2", first[1])[:2]
        assert backend.wait_for_change(first[1], TTL_SECONDS) == second


def _crowded(request: pytest.FixtureRequest) -> str:
    """PostgreSQL where half of the connections that the role may have are in use."""
    endpoint = str(empty_server(request, "postgresql").endpoint())
    engine = sa.create_engine(endpoint, poolclass=sa.NullPool)
    name = sa.make_url(endpoint).username
    with engine.begin() as connection:
        connection.exec_driver_sql(f"ALTER ROLE {name} CONNECTION LIMIT 1")

    def restore() -> None:
        with engine.begin() as connection:
            connection.exec_driver_sql(f"ALTER ROLE {name} CONNECTION LIMIT -1")

    request.addfinalizer(restore)
    return endpoint


def test_of_a_crowd_only_the_last_confirmation_wakes(postgresql: Any, opened: Any) -> None:
    """Whoever forms the round waits for it; each other one would wake all processes for nothing."""
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.open()
    told: list[str] = []
    with psycopg.connect(
        host="127.0.0.1", **_credentials(postgresql), autocommit=True
    ) as listening:
        listening.add_notify_handler(lambda notify: told.append(notify.channel))
        listening.execute(f"LISTEN {backend._run.topic('roster')}")

        def heard(count: int) -> bool:
            listening.execute("SELECT 1")
            return len(told) >= count

        nodes = [f"node{number}" for number in range(CROWD + 4)]
        for node in nodes:
            backend.announce(Entry(node, b""), TTL_SECONDS, Question())
        for node in nodes:
            question = Question("", "round")
            pulse = backend.announce(Entry(node, b"", "round"), TTL_SECONDS, question)
        assert pulse.confirmed == len(nodes)
        until(lambda: heard(CROWD + 2))
        backend.beat("node0", TTL_SECONDS, Question("", "round"))
        backend.withdraw("node0", TTL_SECONDS)
        until(lambda: heard(CROWD + 3))
    assert len(told) == CROWD + 3, "the first arrivals, the last confirmation, and who leaves"


def _credentials(server: Any) -> dict[str, Any]:
    url = sa.make_url(server.endpoint())
    names = {"port": url.port, "dbname": url.database}
    return {**names, "user": url.username, "password": url.password}
