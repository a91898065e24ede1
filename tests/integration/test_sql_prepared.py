"""What a connection to PostgreSQL prepares, and what a document's write waits for."""

from __future__ import annotations

import re
from typing import Any

import pytest
import sqlalchemy as sa
from torch.distributed.elastic.rendezvous import RendezvousParameters

import rdzv.backends.sql.postgresql
from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.backends.sql.listen import StaleConnection
from rdzv.backends.sql.postgresql import PostgresqlDialect
from rdzv.backends.sql.prepared import Prepared
from rdzv.backends.sql.shortage import Limits
from rdzv.conformance.store_kit import Background, in_threads
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.registry import create, open_backend
from rdzv.stores.sql import SqlStore

from .operations import TTL_SECONDS
from .sql_targets import administrator, asked, empty_server

REFUSES = """
CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'not here' USING ERRCODE = '0A000'; END $$;
CREATE TRIGGER refuse BEFORE INSERT ON rdzv_states FOR EACH ROW EXECUTE FUNCTION refuse()
"""


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


def executed(messages: list[str]) -> set[str]:
    """The names of the statements that were called by them, and not planned."""
    calls = re.compile(r"(?:^|; )EXECUTE (\w+)")
    return {name for message in messages for name in calls.findall(message)}


def test_a_join_sends_names_and_values(postgresql: Any, opened: Any, messages: list[str]) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    prepared = prepared_in(backend)
    assert len(prepared) == 6
    messages.clear()
    _, token = joins(backend)
    assert backend.set_state(b"second", token) is not None
    assert executed(messages) == set(prepared)
    # Only whether something is to be removed is asked in full.
    in_full = [message for message in messages if "rdzv_roster" in message]
    assert len(in_full) == 1
    assert "INSERT" not in in_full[0]


def test_only_who_will_join_has_anything_prepared(
    postgresql: Any, opened: Any, messages: list[str]
) -> None:
    """A crowd of fresh processes that have a store, or look, would keep the server busy for it."""
    endpoint = postgresql.endpoint()
    params = RendezvousParameters("postgresql", endpoint, "run", 1, 1, local_addr="127.0.0.1")
    opened.extend(open_backend(params))
    opened(SqlStore(endpoint, "run"))
    assert not any("EXPLAIN" in message for message in messages)
    handler = create(params)
    assert sum("PREPARE" in message for message in messages) == 1
    assert handler.shutdown()


def test_what_is_prepared_reads_by_an_index_though_tables_were_empty(
    postgresql: Any, opened: Any, messages: list[str]
) -> None:
    opened(SqlBackend(postgresql.endpoint(), "run")).get_ready()
    engine = sa.create_engine(postgresql.endpoint(), isolation_level="AUTOCOMMIT")
    with engine.connect() as connection:
        connection.exec_driver_sql("VACUUM ANALYZE")
    engine.dispose()
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    messages.clear()
    backend.get_ready()
    [planning] = [message for message in messages if "PREPARE" in message]
    calls = re.findall(r"EXPLAIN (EXECUTE [^;]*)", planning)
    assert len(calls) == 6

    def plans(connection: sa.Connection) -> str:
        return "\n".join(
            line for call in calls for line in connection.scalars(sa.text(f"EXPLAIN {call}"))
        )

    found = backend.database.read(plans)
    assert "Index" in found
    assert "Seq Scan" not in found


def test_who_finds_no_version_prepares_once(postgresql: Any, opened: Any) -> None:
    opened(SqlBackend(postgresql.endpoint(), "run")).get_ready()
    with administrator(postgresql) as connection:
        connection.exec_driver_sql("DELETE FROM rdzv_schema")
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    assert len(prepared_in(backend)) == 6
    assert backend.database.failed_count == 0


def test_getting_ready_again_changes_nothing(postgresql: Any, opened: Any) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    in_threads(4, lambda _: backend.get_ready())
    found = joins(backend)
    backend.get_ready()
    assert len(prepared_in(backend)) == 6
    assert backend.get_state() == found
    assert [row.entry.node_id for row in backend.entries()] == ["node"]
    assert backend.database.failed_count == 0


def test_a_node_whose_connections_were_ended_gets_ready_anew(postgresql: Any, opened: Any) -> None:
    """It will join once more, with all the others who have lost theirs."""
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    end = sa.text("SELECT pg_terminate_backend(pg_backend_pid())")
    with pytest.raises(RendezvousConnectionError, match="terminating connection"):
        backend.database.write(lambda connection: connection.scalar(end))
    assert len(prepared_in(backend)) == 6


def test_where_connections_are_short_nothing_is_prepared(
    postgresql: Any, opened: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection, and with it what it has prepared, would be gone before the join."""
    monkeypatch.setattr(Limits, "are_short", lambda *_: True)
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    joins(backend)
    assert not any("PREPARE" in message or "EXECUTE" in message for message in messages)


def test_what_the_server_cannot_do_at_all_is_said_after_one_repeat(
    postgresql: Any, opened: Any, messages: list[str]
) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    with administrator(postgresql) as connection:
        connection.exec_driver_sql(REFUSES)
    messages.clear()
    with pytest.raises(RendezvousConnectionError, match="not here"):
        backend.set_state(b"first")
    assert len(messages) == 2


def test_what_the_server_has_forgotten_is_said_in_full(
    postgresql: Any, opened: Any, messages: list[str]
) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    joins(backend, "first")
    backend.database.read(lambda connection: connection.exec_driver_sql("DEALLOCATE ALL"))
    backend.announce(Entry("second", b""), TTL_SECONDS, Question())
    messages.clear()
    assert joins(backend, "third")[0] == b"first"
    assert not any("EXECUTE" in message for message in messages)
    assert [row.entry.node_id for row in backend.entries()] == ["first", "second", "third"]


def test_a_server_that_prepares_nothing_is_told_in_full(
    postgresql: Any, opened: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rdzv.backends.sql.postgresql, "PLAN_ONCE", "SET no_such_thing = on")
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    messages.clear()
    joins(backend)
    assert len(messages) == 5
    assert not executed(messages)


def test_a_table_that_was_altered_is_read_as_it_is(postgresql: Any, opened: Any) -> None:
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    backend.get_ready()
    found = joins(backend)
    with administrator(postgresql) as connection:
        connection.exec_driver_sql("ALTER TABLE rdzv_states ALTER write_id TYPE varchar(64)")
    assert backend.get_state() == found
    assert joins(backend, "other") == found


def test_a_pooler_is_told_by_what_it_promises(
    pooler: Any, opened: Any, messages: list[str]
) -> None:
    backend = opened(SqlBackend(pooler.endpoint(), "poolers"))
    backend.get_ready()
    joins(backend)
    assert not any("PREPARE" in message or "EXECUTE" in message for message in messages)


def test_behind_a_pooler_that_nobody_has_noticed_all_goes_on(
    pooler: Any, opened: Any, messages: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    of = Limits.of

    def as_if_direct(driver: Any, row: Any) -> Limits:
        return of(driver, (driver.pgconn.backend_pid, *row[1:]))

    monkeypatch.setattr(Limits, "of", as_if_direct)
    refused: list[str] = []
    answers = PostgresqlDialect.answers

    def noted(dialect: PostgresqlDialect, driver: Any, message: str) -> Any:
        try:
            return answers(dialect, driver, message)
        except StaleConnection as error:
            refused.append(str(error))
            raise

    monkeypatch.setattr(PostgresqlDialect, "answers", noted)
    # What is prepared under a name must be the same on every connection of the pooler's.
    backends = [
        opened(SqlBackend(pooler.endpoint(), "run", SqlOptions(table_prefix=f"rdzv_{letter}_")))
        for letter in "abab"
    ]
    backends[0].get_ready()
    assert any("PREPARE" in message for message in messages)
    with administrator(pooler) as connection:
        # It has the connection of the pooler's that was used last, and keeps it.
        connection.execute(sa.text("SELECT 1"))
        backends[1].get_ready()
        joins(backends[0], "node0")
    for number, backend in enumerate(backends):
        backend.get_ready()
        joins(backend, f"node{number}")
    for first, backend in enumerate(backends[:2]):
        found = [row.entry.node_id for row in backend.entries()]
        assert found == [f"node{number}" for number in (first, first + 2)]
    assert {text.rpartition(" ")[2] for text in refused} == {"exist", "exists"}


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


LOSSES = {"lost": "DELETE FROM rdzv_runs", "overdue": "UPDATE rdzv_runs SET alive_until = 1"}
"""What an administrator does, or an older state of the server's or another time of its clock."""


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@pytest.mark.parametrize("technology", ["postgresql", "mysql"])
def test_a_first_document_has_a_run_and_stays(
    request: pytest.FixtureRequest, technology: str, loss: str, opened: Any
) -> None:
    """Nobody would sweep the records of a run without a row, and its own writer those of one
    whose time is over."""
    server = empty_server(request, technology)
    backend = opened(SqlBackend(server.endpoint(), "run"))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    with administrator(server) as connection:
        connection.execute(sa.text(loss))
    written = backend.set_state(b"first")
    assert written is not None
    assert backend.get_state() == written[:2]
    assert asked(server, "SELECT count(*) FROM rdzv_runs") == 1


def test_the_same_value_twice_is_one_parameter() -> None:
    text = "SELECT %(one)s::VARCHAR, %(fixed)s, %(two)s WHERE a = %(one)s::VARCHAR"
    prepared = Prepared.of(text, {"fixed": "5"})
    body = "SELECT $1::VARCHAR, 5, $2 WHERE a = $1::VARCHAR"
    assert prepared.definition == f"PREPARE {prepared.name} AS {body}"
    literals = {"two": "2", "one": "'x'", "three": "3"}
    assert prepared.call(literals) == f"EXECUTE {prepared.name}('x', 2)"
    assert Prepared.of(text, {"fixed": "6"}).name != prepared.name
