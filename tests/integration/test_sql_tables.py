"""The tables of SQL servers: made once, by whom, with which rights, and swept."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.backends.sql.__main__ import main, statements
from rdzv.backends.sql.mysql import DEADLINE
from rdzv.backends.sql.server import _compiled
from rdzv.conformance.store_kit import in_threads
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError, RendezvousStateError
from rdzv.ports import Entry, Question
from rdzv.stores.sql import SqlStore

from .operations import TTL_SECONDS, until, use_all
from .sql_targets import (
    TABLES,
    administrator,
    as_administrator,
    asked,
    backend_on,
    drop_all,
    empty_server,
)

DOCS = Path(__file__).resolve().parents[2] / "docs" / "sql.md"
SERVERS = ("postgresql", "mysql")
SHORT_LIFE = SqlOptions(outage_timeout_seconds=0.3, closed_grace_seconds=0.1)


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Any:
    return empty_server(request, request.param)


def test_the_documented_rights_are_enough_and_all_needed(server: Any, opened: Any) -> None:
    engine = sa.create_engine(as_administrator(server), poolclass=sa.NullPool)
    host, port = server.address
    endpoint = f"{server.backend}://job:secret@{host}:{port}/rdzv"
    options = SqlOptions(create_tables=False)
    page = DOCS.read_text(encoding="utf-8")
    [block] = re.findall(rf"<!-- test: {server.backend} grants -->\n```sql\n(.*?)```", page, re.S)
    try:
        with engine.begin() as connection:
            for statement in statements(server.backend, "rdzv_", None):
                connection.exec_driver_sql(statement)
            for statement in filter(str.strip, block.split(";")):
                connection.exec_driver_sql(statement)
        use_all(
            opened(SqlBackend(endpoint, "run", options)),
            opened(SqlStore(endpoint, "run", options=options)),
        )
        if server.backend == "mysql":
            return  # There one right is one right on all tables.
        for table in TABLES:
            for right in ("SELECT", "INSERT", "UPDATE", "DELETE"):
                with engine.begin() as connection:
                    connection.exec_driver_sql(f"REVOKE {right} ON rdzv_{table} FROM job")
                fresh = SqlOptions(create_tables=False, table_prefix="rdzv_")
                less = f"{endpoint}?application_name={table}{right}"
                with pytest.raises(RendezvousSettingsError, match=f"rdzv_{table}.*right"):
                    opened(SqlBackend(less, "run", fresh)).open()
                with engine.begin() as connection:
                    connection.exec_driver_sql(f"GRANT {right} ON rdzv_{table} TO job")
    finally:
        with engine.begin() as connection:
            if server.backend == "postgresql":
                connection.exec_driver_sql("DROP OWNED BY job")
            connection.exec_driver_sql("DROP USER IF EXISTS job")
        engine.dispose()


def test_rights_may_be_given_column_by_column(postgresql: Any, opened: Any) -> None:
    endpoint = sa.make_url(postgresql.endpoint())
    made = opened(backend_on(postgresql))
    made.open()
    tables = made.database.tables
    with administrator(postgresql) as connection:
        connection.exec_driver_sql("CREATE ROLE columns LOGIN PASSWORD 'secret'")
        connection.exec_driver_sql("GRANT SELECT ON rdzv_schema TO columns")
        for table in tables.all_of_runs:
            names = ", ".join(column.name for column in table.columns)
            for right in ("SELECT", "INSERT", "UPDATE"):
                connection.exec_driver_sql(f"GRANT {right} ({names}) ON {table.name} TO columns")
            connection.exec_driver_sql(f"GRANT DELETE ON {table.name} TO columns")
    try:
        granted = endpoint.set(username="columns", password="secret")
        rendered = granted.render_as_string(hide_password=False)
        use_all(opened(SqlBackend(rendered, "run")), opened(SqlStore(rendered, "run")))
        with administrator(postgresql) as connection:
            connection.exec_driver_sql("REVOKE INSERT (value) ON rdzv_queues FROM columns")
        with pytest.raises(RendezvousSettingsError, match=r"rdzv_queues.*right"):
            opened(SqlBackend(f"{rendered}?application_name=less", "run")).open()
        with administrator(postgresql) as connection:
            connection.exec_driver_sql("GRANT INSERT (value) ON rdzv_queues TO columns")
            connection.exec_driver_sql("REVOKE UPDATE (data) ON rdzv_roster FROM columns")
        with pytest.raises(RendezvousSettingsError, match=r"rdzv_roster.*right"):
            opened(SqlBackend(f"{rendered}?application_name=other", "run")).get_ready()
    finally:
        with administrator(postgresql) as connection:
            connection.exec_driver_sql("DROP OWNED BY columns")
            connection.exec_driver_sql("DROP USER columns")


def test_missing_tables_are_told_where_none_may_be_made(server: Any, opened: Any) -> None:
    with pytest.raises(RendezvousSettingsError, match=f"schema --dialect {server.backend}"):
        opened(backend_on(server, create_tables=False)).open()


def test_tables_are_made_once_by_many(server: Any, opened: Any) -> None:
    backends = [opened(backend_on(server)) for _ in range(8)]
    gate = threading.Barrier(len(backends))

    def first_call(index: int) -> object:
        gate.wait()
        return backends[index].get_state()

    assert in_threads(len(backends), first_call) == [None] * len(backends)
    assert asked(server, "SELECT count(*) FROM rdzv_schema") == 1


@pytest.mark.parametrize("create_tables", [True, False])
@pytest.mark.parametrize(
    "change",
    [
        "UPDATE rdzv_schema SET version = 2",
        "ALTER TABLE rdzv_roster RENAME COLUMN data TO contents",
        "ALTER TABLE rdzv_queues RENAME TO rdzv_lists",
    ],
    ids=["version", "column", "table"],
)
def test_tables_of_another_release_are_told_as_such(
    server: Any, opened: Any, change: str, create_tables: bool
) -> None:
    opened(backend_on(server)).open()
    with administrator(server) as connection:
        for statement in dict.fromkeys(("UPDATE rdzv_schema SET version = 2", change)):
            connection.exec_driver_sql(statement)
        names = sa.inspect(connection).get_table_names()
    try:
        with pytest.raises(RendezvousStateError, match="have schema version 2"):
            opened(backend_on(server, create_tables=create_tables)).open()
        with administrator(server) as connection:
            assert sa.inspect(connection).get_table_names() == names, "nothing is made among them"
    finally:
        with administrator(server) as connection:
            drop_all(connection)


def test_a_type_of_another_release_is_told_as_such(postgresql: Any, opened: Any) -> None:
    opened(backend_on(postgresql)).open()
    with administrator(postgresql) as connection:
        for statement in (
            "UPDATE rdzv_schema SET version = 2",
            "ALTER TABLE rdzv_roster ALTER COLUMN data TYPE jsonb USING NULL",
        ):
            connection.exec_driver_sql(statement)
    with pytest.raises(RendezvousStateError, match="have schema version 2"):
        opened(backend_on(postgresql)).get_ready()


def test_tables_that_somebody_has_changed_are_told(server: Any, opened: Any) -> None:
    """To a node at its start; to whoever has begun, as often as it asks."""
    backend = opened(backend_on(server))
    backend.open()
    with administrator(server) as connection:
        connection.exec_driver_sql("ALTER TABLE rdzv_roster DROP COLUMN data")
    with pytest.raises(RendezvousSettingsError, match=r"data.*not as this release"):
        opened(backend_on(server)).get_ready()
    for _ in range(2):
        with pytest.raises(RendezvousConnectionError, match=r"data.*not as this release"):
            backend.announce(Entry("node", b""), TTL_SECONDS, Question())


def test_tables_that_are_gone_when_a_node_gets_ready_are_made(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server))
    backend.open()
    with administrator(server) as connection:
        drop_all(connection)
    backend.get_ready()
    assert backend.set_state(b"first")[2]


def test_a_server_that_takes_no_writes_is_told_at_the_start(postgresql: Any, opened: Any) -> None:
    opened(backend_on(postgresql)).open()
    setting = "ALTER DATABASE rdzv {} default_transaction_read_only {}"
    try:
        with administrator(postgresql) as connection:
            connection.exec_driver_sql(setting.format("SET", "= on"))
        with pytest.raises(RendezvousConnectionError, match="takes no writes"):
            opened(backend_on(postgresql)).open()
    finally:
        with administrator(postgresql) as connection:
            connection.exec_driver_sql("SET TRANSACTION READ WRITE")
            connection.exec_driver_sql(setting.format("RESET", ""))
    opened(backend_on(postgresql)).open()


def test_a_database_without_an_encoding_is_as_good(postgresql: Any, opened: Any) -> None:
    root = sa.create_engine(
        as_administrator(postgresql), poolclass=sa.NullPool, isolation_level="AUTOCOMMIT"
    )
    with root.connect() as connection:
        connection.exec_driver_sql("DROP DATABASE IF EXISTS plain")
        connection.exec_driver_sql(
            "CREATE DATABASE plain TEMPLATE template0 ENCODING 'SQL_ASCII' LC_COLLATE 'C' "
            "LC_CTYPE 'C'"
        )
    url = sa.make_url(postgresql.endpoint()).set(database="plain")
    endpoint = url.render_as_string(hide_password=False)
    for run, each in (("é", endpoint), ("è", f"{endpoint}?client_encoding=SQL_ASCII")):
        use_all(opened(SqlBackend(each, run)), opened(SqlStore(each, run)))


def test_making_tables_has_the_time_of_opening(request: pytest.FixtureRequest, opened: Any) -> None:
    backend = opened(backend_on(empty_server(request, "mysql")))
    backend.open()
    dialect: Any = backend.database.dialect
    with backend.database._pool.connection(time.monotonic() + TTL_SECONDS) as connection:
        connection.invalidate()
        with dialect.making(connection, 60.0) as is_alone:
            assert is_alone
            assert connection.info[DEADLINE] - time.monotonic() > 50.0


def test_opening_again_and_again_compiles_nothing_anew(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server))
    backend.open()
    before = len(_compiled)
    backend.close()
    backend.open()
    assert len(_compiled) == before


def test_a_schema_is_made_and_used(postgresql: Any, opened: Any) -> None:
    with administrator(postgresql) as connection:
        connection.execute(sa.text("DROP SCHEMA IF EXISTS jobs CASCADE"))
    options = SqlOptions(schema="jobs", table_prefix="my_")
    use_all(
        opened(SqlBackend(postgresql.endpoint(), "run", options)),
        opened(SqlStore(postgresql.endpoint(), "run", options=options)),
    )
    assert asked(postgresql, "SELECT count(*) FROM jobs.my_states") == 1
    assert opened(backend_on(postgresql)).get_state() is None


def test_the_command_prints_what_makes_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", "--dialect", "postgresql", "--schema", "jobs"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("CREATE SCHEMA IF NOT EXISTS jobs;")
    assert printed.count("CREATE TABLE jobs.rdzv_") == 7
    assert "INSERT INTO jobs.rdzv_schema (version) VALUES (1);" in printed
    with pytest.raises(SystemExit):
        main(["schema", "--dialect", "postgresql", "--schema", "a b"])
    assert "schema" in capsys.readouterr().err


def test_dropped_tables_are_made_anew(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server))
    backend.set_state(b"x")
    with administrator(server) as connection:
        drop_all(connection)
    with pytest.raises(RendezvousConnectionError, match="makes them anew"):
        backend.get_state()
    assert backend.get_state() is None
    assert backend.set_state(b"y")[2]


def test_old_runs_are_swept_in_small_steps(server: Any, opened: Any) -> None:
    over = opened(SqlBackend(server.endpoint(), "over", SHORT_LIFE))
    over.set_state(b"document")
    store = opened(SqlStore(server.endpoint(), "over", lifetime_seconds=0.4))
    store.multi_set([f"key{number}" for number in range(600)], ["x"] * 600)
    newcomer = opened(backend_on(server, "new"))
    seen = [600]

    def is_swept() -> bool:
        newcomer.announce(Entry(f"node{time.monotonic_ns()}", b""), TTL_SECONDS, Question())
        seen.append(asked(server, "SELECT count(*) FROM rdzv_store"))
        assert seen[-2] - seen[-1] <= 500
        return over.get_state() is None

    until(is_swept)
    assert seen[-1] == 0
