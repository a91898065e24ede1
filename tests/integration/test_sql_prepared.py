"""What a connection to PostgreSQL prepares, and what a document's write waits for."""

from __future__ import annotations

from typing import Any

import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend
from rdzv.backends.sql.postgresql import PostgresqlDialect
from rdzv.backends.sql.prepared import Prepared
from rdzv.backends.sql.shortage import Limits
from rdzv.conformance.store_kit import Background
from rdzv.ports import Entry, Question

from .operations import TTL_SECONDS
from .sql_targets import administrator, asked, empty_server

NODES = 6


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is sent from now on in messages of several statements."""
    sent: list[str] = []
    answers = PostgresqlDialect.answers

    def noted(dialect: PostgresqlDialect, driver: Any, message: str) -> Any:
        sent.append(message)
        return answers(dialect, driver, message)

    monkeypatch.setattr(PostgresqlDialect, "answers", noted)
    return sent


def joins(backend: SqlBackend, node: str = "node") -> tuple[bytes, Any]:
    """What a node does that joins a run whose document others write."""
    found = backend.look_and_watch()
    backend.announce(Entry(node, b"data"), TTL_SECONDS, Question())
    if found is None:
        written = backend.set_state(b"first")
        assert written is not None
        found = written[:2]
    backend.announce(Entry(node, b"data", "label"), TTL_SECONDS, Question("", "label"))
    state = backend.get_state()
    assert state is not None
    return state


def prepared_in(backend: SqlBackend) -> list[Any]:
    """The prepared statements of the one connection that the backend has."""
    return backend.database.read(
        lambda connection: list(
            connection.scalars(sa.text("SELECT name FROM pg_prepared_statements ORDER BY name"))
        )
    )


def test_a_join_sends_names_and_values(postgresql: Any, opened: Any, messages: list[str]) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.open()
    assert prepared_in(backend) == [f"rdzv_{number}" for number in range(7)]
    messages.clear()
    joins(backend)
    assert len(messages) == 5
    assert all("EXECUTE rdzv_" in message for message in messages)
    assert not any("SELECT rdzv_" in message for message in messages)


def test_what_the_server_has_forgotten_is_said_in_full(
    postgresql: Any, opened: Any, messages: list[str]
) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.open()
    joins(backend, "first")
    backend.database.read(lambda connection: connection.exec_driver_sql("DEALLOCATE ALL"))
    backend.announce(Entry("second", b""), TTL_SECONDS, Question())
    messages.clear()
    assert joins(backend, "third")[0] == b"first"
    assert not any("EXECUTE" in message for message in messages)
    assert [row.entry.node_id for row in backend.entries()] == ["first", "second", "third"]


def test_a_table_that_was_altered_is_read_as_it_is(postgresql: Any, opened: Any) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.open()
    found = joins(backend)
    with administrator(postgresql) as connection:
        connection.exec_driver_sql("ALTER TABLE rdzv_states ALTER write_id TYPE varchar(64)")
    assert backend.get_state() == found
    assert joins(backend, "other") == found


def test_a_pooler_is_told_by_what_it_promises(
    pooler: Any, opened: Any, messages: list[str]
) -> None:
    backend = opened(SqlBackend(pooler.endpoint(), "poolers"))
    backend.open()
    joins(backend)
    assert not any("PREPARE" in message or "EXECUTE" in message for message in messages)


def test_behind_a_pooler_that_nobody_has_noticed_all_goes_on(
    pooler: Any, opened: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Limits.of

    def as_if_direct(driver: Any, row: Any) -> Limits:
        return of(driver, (driver.pgconn.backend_pid, *row[1:]))

    monkeypatch.setattr(Limits, "of", as_if_direct)
    backends = [opened(SqlBackend(pooler.endpoint(), "unnoticed")) for _ in range(NODES)]
    backends[0].open()
    assert any("PREPARE" in message for message in messages)
    with administrator(pooler) as connection:
        # It has the connection of the pooler's that was used last, and keeps it.
        connection.execute(sa.text("SELECT 1"))
        joins(backends[0], "node0")
    for number, backend in enumerate(backends):
        # Another one has prepared what this one is to prepare.
        backend.open()
        joins(backend, f"node{number}")
    nodes = [row.entry.node_id for row in backends[0].entries()]
    assert nodes == [f"node{number}" for number in range(NODES)]


def test_a_first_document_waits_for_no_crowd(postgresql: Any, opened: Any) -> None:
    """Who holds the run's row is one of those who arrive, and others stand behind it."""
    backend, other = (opened(SqlBackend(postgresql.endpoint(), "run")) for _ in range(2))
    for each, node in ((backend, "node"), (other, "other")):
        each.announce(Entry(node, b""), TTL_SECONDS, Question())
    with administrator(postgresql) as connection:
        connection.execute(sa.text("SELECT run_key FROM rdzv_runs FOR UPDATE"))
        arriving = Background(lambda: other.announce(Entry("third", b""), 60.0, Question()))
        arriving.still_blocked()
        made = Background(lambda: backend.set_state(b"first")).result()
        arriving.still_blocked()
    assert made is not None
    assert made[2]
    assert arriving.result().live == 3


@pytest.mark.parametrize("technology", ["postgresql", "mysql"])
def test_a_document_has_a_run_even_where_that_was_lost(
    request: pytest.FixtureRequest, technology: str, opened: Any
) -> None:
    """Nobody would sweep the records of a run without a row."""
    server = empty_server(request, technology)
    backend = opened(SqlBackend(server.endpoint(), "run"))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    with administrator(server) as connection:
        connection.execute(sa.text("DELETE FROM rdzv_runs"))
    assert backend.set_state(b"first") is not None
    assert asked(server, "SELECT count(*) FROM rdzv_runs") == 1


def test_the_same_value_twice_is_one_parameter() -> None:
    text = "SELECT %(one)s::VARCHAR, %(fixed)s, %(two)s WHERE a = %(one)s::VARCHAR"
    prepared = Prepared.of("name", text, {"fixed": "5"})
    body = "SELECT $1::VARCHAR, 5, $2 WHERE a = $1::VARCHAR"
    assert prepared.definition == f"PREPARE name AS {body}"
    assert prepared.call({"two": "2", "one": "'x'", "three": "3"}) == "EXECUTE name('x', 2)"
