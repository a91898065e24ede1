"""What a rendezvous costs PostgreSQL and MariaDB, whatever the number of nodes: as a client counts
its statements, and as the server counts what it is asked."""

from __future__ import annotations

import contextlib
import itertools
import ssl
import threading
import time
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa
from torch.distributed.elastic.rendezvous import RendezvousParameters

from rdzv.backends.sql import SqlBackend, SqlOptions
from rdzv.backends.sql.base import Polling
from rdzv.conformance.servers.base import DATABASE
from rdzv.conformance.store_kit import Background
from rdzv.ports import Entry, Question
from rdzv.stores.sql import create_backend

from .operations import TTL_SECONDS, crowd, meet, until
from .sql_targets import administrator, empty_server, listens, ours

NODES = (8, 128)
GROWTH_MAX = 1.2
"""How many times more a node may cost among 128 than among 8: what grows with the number of nodes
would cost 16 times as much."""
JOIN_MORE = 20
"""Of a join besides. It is slower among many on one machine, so connections are opened again that
had been idle; a node that heard of every arrival would cost 120 more."""
INTERVAL_SECONDS = 5.0
IDLE_SECONDS = 20.0


@pytest.fixture(params=["postgresql", "mysql"])
def server(request: pytest.FixtureRequest) -> Any:
    return empty_server(request, request.param)


def test_statements_do_not_grow_with_the_nodes(server: Any) -> None:
    few, many = (statements_of(server, nodes) for nodes in NODES)
    assert few == many
    assert few[1] == 2, "a beat moves its entry, and asks"


def statements_of(server: Any, nodes: int) -> tuple[int, float]:
    """Of an announcement among so many nodes, and of a beat."""
    with (
        contextlib.closing(SqlBackend(server.endpoint(), f"{nodes} nodes")) as crowd,
        contextlib.closing(SqlBackend(server.endpoint(), f"{nodes} nodes")) as backend,
    ):
        crowd.set_state(b"document")
        for number in range(nodes):
            crowd.announce(Entry(f"node{number}", b"", "round"), TTL_SECONDS, Question())
        backend.open()
        pool = backend._database._pool
        assert pool is not None
        made: list[str] = []

        def count(*arguments: Any) -> None:
            made.append(arguments[2])

        dialect: Any = backend._database.dialect
        send = dialect.send

        def counted_send(connection: Any, written: Any, read: Any, *arguments: Any) -> Any:
            made.extend(map(str, (*written, *read)))
            return send(connection, written, read, *arguments)

        sa.event.listen(pool.engine, "before_cursor_execute", count)
        dialect.send = counted_send
        try:
            backend.announce(Entry("me", b"", "round"), TTL_SECONDS, Question("node0", "round"))
            of_an_announcement = len(made)
            made.clear()
            for _ in range(4):
                backend.beat("me", TTL_SECONDS, Question("node0", "round"))
            return of_an_announcement, len(made) / 4
        finally:
            sa.event.remove(pool.engine, "before_cursor_execute", count)


# ---------------------------------------------------------------------------- as the server counts


class Meter:
    """What a server has been asked, by its own count: transactions of PostgreSQL, each statement
    outside one included; statements of MySQL and MariaDB. What the meter asks is left out."""

    def __init__(self, server: Any) -> None:
        self._is_postgresql = server.backend == "postgresql"
        url = sa.make_url(server.endpoint())
        if self._is_postgresql:
            # Another database, whose transactions are counted apart.
            url = url.set(database="postgres")
        self._engine = sa.create_engine(url, poolclass=sa.NullPool, isolation_level="AUTOCOMMIT")
        self._connection = self._engine.connect()
        self._asked = 0

    def close(self) -> None:
        self._connection.close()
        self._engine.dispose()

    def count(self) -> int:
        """At a moment when no node is connected, since PostgreSQL may count what a connection has
        done only when it ends."""
        until(lambda: self._connections() == 0, 120.0)
        if self._is_postgresql:
            return self._value(
                "SELECT xact_commit + xact_rollback FROM pg_stat_database "
                f"WHERE datname = '{DATABASE}'"
            )
        return self._value("SHOW GLOBAL STATUS LIKE 'Questions'") - self._asked

    def _connections(self) -> int:
        if self._is_postgresql:
            return self._value(
                f"SELECT count(*) FROM pg_stat_activity WHERE datname = '{DATABASE}' "
                "AND backend_type = 'client backend'"
            )
        return self._value("SHOW GLOBAL STATUS LIKE 'Threads_connected'") - 1

    def _value(self, question: str) -> int:
        self._asked += 1
        return int(self._connection.execute(sa.text(question)).one()[-1])


@dataclass(frozen=True)
class Costs:
    """Of one node, in what a :class:`Meter` counts."""

    join: float
    """Without looking again and again, which a slower join does more often."""
    idle_minute: float


def costs(server: Any, meter: Meter, count: int, monkeypatch: pytest.MonkeyPatch) -> Costs:
    """What each of ``count`` nodes makes the server do."""
    polls, sleep = itertools.count(), Polling.sleep

    def counted(*arguments: Any) -> None:
        sleep(*arguments)
        next(polls)

    nodes = partial(crowd, server.backend, server.endpoint())
    with (
        monkeypatch.context() as during_the_join,
        nodes(f"{count} join", count, keep_alive_interval=60.0) as handlers,
    ):
        before = meter.count()
        during_the_join.setattr(Polling, "sleep", counted)
        meet(handlers)
        joined = meter.count() - before - next(polls)
    with nodes(f"{count} idle", count, keep_alive_interval=INTERVAL_SECONDS) as handlers:
        meet(handlers)
        before, started = meter.count(), time.monotonic()
        threading.Event().wait(IDLE_SECONDS)
        idle = meter.count() - before
        minutes = (time.monotonic() - started) / 60
    return Costs(joined / count, idle / count / minutes)


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_server_is_asked_as_much_by_a_node_among_8_and_among_128(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.closing(Meter(server)) as meter:
        few, many = (costs(server, meter, count, monkeypatch) for count in NODES)
    told = f"{NODES[0]} nodes: {few}, {NODES[1]} nodes: {many}"
    assert few.join > 5, f"nodes that join are counted: {told}"
    assert many.join <= GROWTH_MAX * few.join + JOIN_MORE, told
    assert few.idle_minute > 0.75 * 60 / INTERVAL_SECONDS, f"every beat is counted: {told}"
    assert many.idle_minute <= GROWTH_MAX * few.idle_minute, told


# ------------------------------------------------------------------------------------ in one node


def test_calls_that_are_slow_share_a_connection(server: Any, opened: Any) -> None:
    """Else a crowd that is slow connects for each call, and becomes slower."""
    backend = opened(SqlBackend(server.endpoint(), "run"))
    backend.open()
    nap = "pg_sleep(1.2)" if server.backend == "postgresql" else "sleep(1.2)"
    who = "pg_backend_pid()" if server.backend == "postgresql" else "connection_id()"
    question = sa.text(f"SELECT {who}, {nap}")
    pool: Any = backend._database._pool
    pool._kept_until = float("-inf")
    connections = []
    for _ in range(3):
        connections.append(backend._database.read(lambda c: c.execute(question).one()[0]))
        pool._last_used -= 3.0  # what comes between two calls is slow too
        assert not pool.close_idle()
    assert len(set(connections)) == 1


def test_what_was_opened_is_kept_until_its_agent_may_be_ready(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    looker, backend = (
        opened(SqlBackend(empty_server(request, "postgresql").endpoint(), "run")) for _ in range(2)
    )
    looker.open()
    backend.get_ready()
    looking, pool = looker._database._pool, backend._database._pool
    looking._last_used -= 3.0
    assert looking.close_idle()
    pool._last_used -= 3.0
    assert not pool.close_idle()
    assert pool.has_idle
    pool._kept_until = float("-inf")
    assert pool.close_idle()
    assert not pool.has_idle


def test_what_a_beat_has_opened_is_not_kept(server: Any, opened: Any) -> None:
    backend = opened(SqlBackend(server.endpoint(), "run"))
    backend.beat("node", TTL_SECONDS, Question())
    pool: Any = backend._database._pool
    pool._last_used -= 3.0
    assert pool.close_idle()
    assert not pool.has_idle


def test_where_others_lack_connections_none_is_kept(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    server = empty_server(request, "postgresql")
    endpoint = sa.make_url(server.endpoint()).set(username="few", password="secret")
    rendered = endpoint.render_as_string(hide_password=False)
    with administrator(server) as connection:
        connection.exec_driver_sql("CREATE ROLE few LOGIN PASSWORD 'secret' CONNECTION LIMIT 1")
        connection.exec_driver_sql("GRANT ALL ON SCHEMA public TO few")
    try:
        options = SqlOptions(read_timeout_seconds=4.0)
        for _ in range(3):
            opened(SqlBackend(rendered, "run", options)).open()
    finally:
        while opened:
            opened.pop().close()
        with administrator(server) as connection:
            connection.exec_driver_sql("DROP OWNED BY few")
            connection.exec_driver_sql("DROP USER few")


def test_who_waits_on_does_not_look_as_often_as_at_first(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    """MySQL tells nobody, and a node waits in slices of a keep-alive interval."""
    backend = opened(SqlBackend(empty_server(request, "mysql").endpoint(), "run"))
    _, token, _ = backend.set_state(b"0")
    looks = itertools.count()
    send = backend._database.send

    def counted(*arguments: Any) -> Any:
        next(looks)
        return send(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend._database, "send", counted)
        backend.wait_for_change(token, 1.0)
        at_first = next(looks)
        backend.wait_for_change(token, 1.0)
        later = next(looks) - at_first - 1
        assert 0 < later <= 10
        backend.set_state(b"1", token)
        assert backend.wait_for_change(token, 1.0) is not None
        before = next(looks)
        assert backend.wait_for_change(backend.get_state()[1], 1.0) is None
        assert next(looks) - before > later, "for something else it looks often again"


def test_certificates_of_the_machine_are_not_read_for_each_connection(
    request: pytest.FixtureRequest, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them takes many times as long as all else, and none of them is asked for."""
    backend = opened(SqlBackend(empty_server(request, "mysql").endpoint(), "run"))
    backend.open()
    read = itertools.count()
    load = ssl.SSLContext.load_default_certs

    def counted(*arguments: Any) -> None:
        next(read)
        load(*arguments)

    monkeypatch.setattr(ssl.SSLContext, "load_default_certs", counted)
    for _ in range(3):
        backend.close()
        backend.get_state()
    assert next(read) == 0


def test_a_backend_and_its_store_share_a_connection(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    server = empty_server(request, "postgresql")
    parameters = RendezvousParameters(server.backend, server.endpoint(), "run", 1, 1)
    backend, store = map(opened, create_backend(parameters))
    backend.set_state(b"0")
    waiting = Background(lambda: store.get("key"))
    until(lambda: listens(backend) and ours(server) == 1)
    backend.set_state(b"1", backend.get_state()[1])
    store.set("key", "value")
    assert waiting.result() == b"value"
    assert ours(server) <= 2, "one that listens, and one for who asked meanwhile"
    store.close()
    assert backend.get_state() is not None
    backend.close()
    assert store.get("key") == b"value", "it opens anew"
    store.close()
    until(lambda: ours(server) == 0)
