"""PostgreSQL and MariaDB: connections, errors, and what the server does to us."""

from __future__ import annotations

import gc
import threading
import time
from datetime import timedelta
from typing import Any

import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.backends.sql.pool import Reaper
from rdzv.conformance.proxy import Proxy
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.ports import Entry, Question
from rdzv.stores.sql import SqlStore

from .operations import TTL_SECONDS, until, use_all
from .sql_targets import (
    administrator,
    as_administrator,
    asked,
    backend_on,
    empty_server,
    listens,
    ours,
)

SERVERS = ("postgresql", "mysql")


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest) -> Any:
    return empty_server(request, request.param)


# ------------------------------------------------------------------------------------- connections


def test_an_idle_node_holds_no_connection(postgresql: Any, opened: Any) -> None:
    backend = opened(backend_on(postgresql))
    store = opened(SqlStore(postgresql.endpoint(), "run", timedelta(seconds=60)))
    use_all(backend, store)
    assert backend.wait_for_change(backend.get_state()[1], 0.01) is None
    assert ours(postgresql, "AND state LIKE 'idle in transaction%'") == 0
    until(lambda: ours(postgresql) == 0)
    backend.beat("node", TTL_SECONDS, Question())
    assert ours(postgresql) == 0, "a beat leaves none behind"


def test_who_waits_listens_on_one_connection(postgresql: Any, opened: Any) -> None:
    backend, other = opened(backend_on(postgresql)), opened(backend_on(postgresql))
    _, token, _ = backend.set_state(b"0")
    waiting = [Background(lambda: backend.wait_for_change(token, TTL_SECONDS)) for _ in range(12)]
    until(lambda: listens(backend) and ours(postgresql) == 1)
    started = time.monotonic()
    found = other.set_state(b"1", token)[:2]
    assert [each.result() for each in waiting] == [found] * len(waiting)
    assert time.monotonic() - started < 4, "they were told, and did not merely look again"
    until(lambda: ours(postgresql) == 0)


def test_terminated_connections_are_replaced(postgresql: Any, opened: Any) -> None:
    backend, other = opened(backend_on(postgresql)), opened(backend_on(postgresql))
    _, token, _ = backend.set_state(b"0")

    told: list[str] = []

    def wait() -> object:
        while True:
            try:
                return backend.wait_for_change(token, TTL_SECONDS)
            except RendezvousConnectionError as error:
                told.append(str(error))

    waiting = Background(wait)
    until(lambda: listens(backend))
    terminate(postgresql)
    until(lambda: told and listens(backend))
    backend.get_state()
    terminate(postgresql)
    assert backend.get_state() == (b"0", token), "a read is asked again"
    other.get_state()
    terminate(postgresql)
    found = other.set_state(b"1", token)
    assert found[2], "a write that had not begun, too"
    assert waiting.result() == found[:2]
    assert 1 <= len(told) <= 4
    assert all("terminating" in each or "closed" in each for each in told), told


def test_who_waits_lets_go_for_who_wants_to_listen_too(postgresql: Any, opened: Any) -> None:
    backend = opened(backend_on(postgresql))
    _, token, _ = backend.set_state(b"0")
    listener = backend._database._signal
    waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS))
    until(lambda: listener._reader is not None)
    pool = backend._database._pool
    assert listener.mark(["another"], pool, time.monotonic() + TTL_SECONDS) is not None
    until(lambda: listener._reader is not None)
    asked(postgresql, "SELECT count(pg_notify('another', '')) FROM (SELECT 1) AS one")
    until(lambda: listener._counts["another"] == 1)
    found = backend.set_state(b"1", token)[:2]
    assert waiting.result() == found


def test_nobody_is_told_of_less_than_it_has_written(postgresql: Any, opened: Any) -> None:
    """Another thread reads what the server tells, and may not have come to it yet."""
    backend = opened(backend_on(postgresql))
    _, token, _ = backend.set_state(b"0")
    store = opened(SqlStore(postgresql.endpoint(), "run", beside=backend))
    reading = Background(lambda: store.get("key"))
    for number in range(60):
        until(lambda: backend._database._signal._reader is not None)
        _, token, _ = backend.set_state(b"earlier", token)
        backend.announce(Entry("node", str(number).encode()), TTL_SECONDS, Question())
        _, token, _ = backend.set_state(b"later", token)
        assert backend.wait_for_change(token, 0.001) is None
    store.set("key", "")
    reading.result()


def terminate(server: Any) -> None:
    asked(
        server,
        "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity "
        "WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()",
    )


def test_where_connections_are_short_nobody_listens(
    postgresql: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rdzv.backends.sql.postgresql.LIMITS_SECONDS", 0.0)
    backend, other = opened(backend_on(postgresql)), opened(backend_on(postgresql))
    _, token, _ = backend.set_state(b"0")
    with administrator(postgresql) as connection:
        connection.execute(sa.text("ALTER DATABASE rdzv CONNECTION LIMIT 1"))
    try:
        waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS)).still_blocked()
        found = other.set_state(b"1", token)
        assert waiting.result() == found[:2]
        assert not listens(backend)
        assert not backend._database._pool.has_idle, "others lack what it does not use"
    finally:
        with administrator(postgresql) as connection:
            connection.execute(sa.text("ALTER DATABASE rdzv CONNECTION LIMIT -1"))


def test_a_limit_of_the_account_is_waited_for(request: pytest.FixtureRequest, opened: Any) -> None:
    server = empty_server(request, "mysql")
    host, port = server.address
    endpoint = f"mysql+pymysql://few:secret@{host}:{port}/rdzv"
    root = sa.create_engine(as_administrator(server), poolclass=sa.NullPool)
    opened(backend_on(server)).open()
    options = SqlOptions(read_timeout_seconds=30.0)
    try:
        with root.begin() as connection:
            for statement in (
                "CREATE USER few IDENTIFIED BY 'secret' WITH MAX_USER_CONNECTIONS 1",
                "GRANT ALL ON rdzv.* TO few",
            ):
                connection.exec_driver_sql(statement)
        few = sa.create_engine(endpoint, poolclass=sa.NullPool)
        with few.connect():
            backend = opened(SqlBackend(endpoint, "run", options))
            opening = Background(backend.open).still_blocked()
        opening.result()
    finally:
        with root.begin() as connection:
            connection.exec_driver_sql("DROP USER IF EXISTS few")
        root.dispose()


# ------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize("code", ["40001", "40P01"])
def test_a_refused_transaction_is_repeated(postgresql: Any, opened: Any, code: str) -> None:
    backend = opened(backend_on(postgresql))
    backend.open()
    tries: list[int] = []

    def work(connection: sa.Connection) -> str:
        tries.append(1)
        if len(tries) < 3:
            text = f"DO $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"
            connection.exec_driver_sql(text)
        return "done"

    assert backend._database.write(work) == "done"
    assert len(tries) == 3


SLOW_COMMIT = """
CREATE SEQUENCE commits;
CREATE FUNCTION slow_commit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF nextval('commits') > 1 THEN RETURN NULL; END IF;
    LOOP
        BEGIN
            PERFORM pg_advisory_xact_lock(7);
            RETURN NULL;
        EXCEPTION WHEN query_canceled OR lock_not_available THEN NULL;
        END;
    END LOOP;
END $$;
CREATE CONSTRAINT TRIGGER slow AFTER INSERT OR UPDATE ON rdzv_writers
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION slow_commit()
"""


def test_a_commit_that_is_made_after_it_was_given_up_is_not_repeated(
    postgresql: Any, opened: Any
) -> None:
    """So it is where a server waits for its standby: the answer is late, the commit is made."""
    store = opened(SqlStore(postgresql.endpoint(), "run", timedelta(seconds=60)))
    store.set("other", "value")
    with administrator(postgresql) as connection:
        connection.exec_driver_sql(SLOW_COMMIT)
    try:
        with administrator(postgresql) as connection:
            connection.execute(sa.text("SELECT pg_advisory_xact_lock(7)"))
            adding = Background(lambda: store.add("n", 1))
            until(lambda: ours(postgresql, "AND query = 'COMMIT' AND wait_event_type = 'Lock'"))
            # It has given up, and waits for what it has given up.
            until(lambda: ours(postgresql, "AND query LIKE '%FOR UPDATE%' AND state = 'active'"))
        assert adding.result() == 1
        assert store.get("n") == b"1"
    finally:
        with administrator(postgresql) as connection:
            connection.exec_driver_sql("DROP FUNCTION slow_commit CASCADE; DROP SEQUENCE commits")


def test_a_lock_that_somebody_holds_is_waited_for_in_time(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server, keep_alive_interval_seconds=1.0))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    with administrator(server) as connection:
        connection.execute(sa.text("SELECT run_key FROM rdzv_runs FOR UPDATE"))
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError):
            backend.announce(Entry("other", b""), TTL_SECONDS, Question())
        assert time.monotonic() - started < 6
    backend.announce(Entry("other", b""), TTL_SECONDS, Question())


def test_errors_say_where_and_what_to_do_and_no_secret(server: Any, opened: Any) -> None:
    host, port = server.address
    refused = opened(SqlBackend(f"{server.backend}://u:hunter22@{host}:{port}/rdzv", "run"))
    with pytest.raises(RendezvousConnectionError) as caught:
        refused.open()
    assert "hunter22" not in str(caught.value)
    assert f"{host}:{port}" in str(caught.value)
    assert "password_file" in str(caught.value)
    nobody = opened(SqlBackend(f"{server.backend}://u:hunter22@127.0.0.1:1/rdzv", "run"))
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1") as caught:
        nobody.get_state()
    assert "hunter22" not in str(caught.value)
    assert nobody.route() == ("127.0.0.1", 1)


def test_all_statements_of_a_call_end_by_one_deadline(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server, keep_alive_interval_seconds=1.0))
    backend.open()
    nap = "pg_sleep(0.7)" if server.backend == "postgresql" else "sleep(0.7)"

    def nap_often(connection: sa.Connection) -> None:
        for _ in range(10):
            connection.execute(sa.text(f"SELECT {nap}"))

    for call in (backend._database.read, backend._database.write):
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError):
            call(nap_often)
        assert time.monotonic() - started < 5


@pytest.mark.parametrize("url", ["postgresql+asyncpg", "mysql+aiomysql"])
def test_a_refused_driver_is_told_without_secrets(url: str) -> None:
    with pytest.raises(RendezvousSettingsError, match="write") as caught:
        SqlBackend(f"{url}://u:hunter22@host/db?password=swordfish", "run")
    assert "hunter22" not in str(caught.value)
    assert "swordfish" not in str(caught.value)


def test_connections_are_closed_later_where_no_thread_can_be_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So it is late in the life of a process, when a node withdraws."""
    closed = threading.Event()

    def close_idle() -> bool:
        closed.set()
        return True

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    reaper = Reaper(close_idle, 0.0)
    with monkeypatch.context() as late:
        late.setattr(threading.Thread, "start", refuse)
        reaper.start()
    reaper.start()
    assert closed.wait(10.0)


def test_a_password_can_come_from_a_file(server: Any, opened: Any) -> None:
    url = sa.make_url(server.endpoint())
    bare = url.set(password=None).render_as_string()
    backend = SqlBackend(bare, "run", SqlOptions(password=url.password))
    opened(backend).open()
    assert "password" not in repr(SqlOptions(password=url.password))


def test_closing_ends_a_wait(server: Any, opened: Any) -> None:
    backend = opened(backend_on(server))
    backend.open()
    waiting = Background(lambda: backend.wait_for_change(None, TTL_SECONDS)).still_blocked()
    backend.close()
    with pytest.raises(RendezvousConnectionError, match="closed while waiting"):
        waiting.result()
    assert backend.get_state() is None, "it opens anew"


def test_a_connection_that_is_given_up_is_closed(postgresql: Any, opened: Any) -> None:
    """Even while somebody keeps the error, and before garbage is collected."""
    with Proxy(postgresql.address) as proxy:
        host, port = proxy.address
        options = SqlOptions(read_timeout_seconds=0.5)
        backend = opened(SqlBackend(f"postgresql://rdzv:rdzv@{host}:{port}/rdzv", "run", options))
        proxy.black_hole()
        gc.disable()
        try:
            with pytest.raises(RendezvousConnectionError) as caught:
                backend.get_state()
            proxy.heal()
            until(lambda: not proxy.open_connections)
        finally:
            gc.enable()
        assert caught.value
