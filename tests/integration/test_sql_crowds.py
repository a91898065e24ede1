"""SQL servers under crowds, of many that arrive or are too many; and several servers."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from rdzv.backends.sql import SqlBackend, SqlOptions, names
from rdzv.backends.sql.shortage import COUNT, LIMITS, Limits
from rdzv.conformance.proxy import Proxy
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.technologies import MySQL, PostgreSQL
from rdzv.conformance.store_kit import Background, in_threads
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.sql import SqlStore

from .operations import TTL_SECONDS, reach, until
from .sql_targets import administrator, asked, empty_server, ours


class SmallPostgreSQL(PostgreSQL):
    """One with the number of connections that PostgreSQL has unless told."""

    def command(self, *arguments: Any) -> list[str]:
        return [*super().command(*arguments), "-c", "max_connections=100"]


class SmallMySQL(MySQL):
    """One with as many."""

    def command(self, *arguments: Any) -> list[str]:
        return [*super().command(*arguments), "--max-connections=100"]


def threads_of(server: Any) -> int:
    """Connections to a MySQL or MariaDB server, but for the one that asks."""
    with administrator(server) as connection:
        question = sa.text("SHOW GLOBAL STATUS LIKE 'Threads_connected'")
        return int(connection.execute(question).one()[1]) - 1


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("technology", "connections"),
    [(SmallPostgreSQL(), ours), (SmallMySQL(), threads_of)],
    ids=["postgresql", "mysql"],
)
def test_two_hundred_nodes_share_a_hundred_connections(
    technology: Any, connections: Callable[[Any], int]
) -> None:
    program = technology.find()
    if program is None:
        pytest.skip(f"there is no {technology.name} on this machine: {technology.how}")
    server = LocalServer(technology, program)
    nodes = 200
    backends = [SqlBackend(server.endpoint(), "run", SqlOptions()) for _ in range(nodes)]
    waiting_now, all_wait = threading.Semaphore(0), threading.Event()

    patiently = partial(reach, seconds=240.0)

    def node(index: int) -> object:
        backend, entry = backends[index], Entry(f"node{index}", b"")
        patiently(backend.get_ready)
        patiently(lambda: backend.announce(entry, 300.0, Question()))
        waiting_now.release()
        if index == 0:
            all_wait.wait(300)
            return patiently(lambda: backend.set_state(b"go"))[:2]
        while True:
            found = patiently(lambda: backend.wait_for_change(None, 5.0))
            if found is not None:
                return found

    try:
        joining = Background(lambda: in_threads(nodes, node))
        for _ in range(nodes):
            assert waiting_now.acquire(timeout=300)
        count = partial(asked, server, "SELECT count(*) FROM rdzv_roster")
        assert patiently(count, unanswered=sa.exc.OperationalError) == nodes
        all_wait.set()
        results = joining.result()
        assert len(set(results)) == 1
        for backend in backends:
            backend.close()
        until(lambda: connections(server) == 0)
    finally:
        server.close()


@pytest.mark.full
def test_the_next_server_of_the_url_takes_over() -> None:
    technology = PostgreSQL()
    program = technology.find()
    if program is None:
        pytest.skip(f"there is no PostgreSQL on this machine: {technology.how}")
    with (
        contextlib.closing(LocalServer(technology, program)) as first,
        contextlib.closing(LocalServer(technology, program)) as second,
    ):
        hosts = "&".join(f"host={host}:{port}" for host, port in (first.address, second.address))
        url = f"postgresql://rdzv:rdzv@/rdzv?{hosts}&target_session_attrs=read-write"
        with contextlib.closing(SqlBackend(url, "run")) as backend:
            a_server_is_lost_and_another_turns_read_only(backend, first, second)


@pytest.mark.full
def test_a_host_that_is_silent_is_passed_by(request: pytest.FixtureRequest) -> None:
    """A machine that is gone refuses nothing: it does not answer."""
    server = empty_server(request, "postgresql")
    with Proxy(server.address) as silent:
        hosts = "&".join(f"host={host}:{port}" for host, port in (silent.address, server.address))
        url = f"postgresql://rdzv:rdzv@/rdzv?{hosts}"
        options = SqlOptions(keep_alive_interval_seconds=2.0)
        silent.black_hole()
        with (
            contextlib.closing(SqlBackend(url, "run", options)) as backend,
            contextlib.closing(
                SqlStore(url, "run", timedelta(seconds=60), options=options)
            ) as store,
        ):

            def answers() -> bool:
                try:
                    return backend.get_state() is None
                except RendezvousConnectionError:
                    return False

            until(answers, 60.0)
            store.set("key", "value")
            assert store.get("key") == b"value"


def a_server_is_lost_and_another_turns_read_only(
    backend: SqlBackend, first: LocalServer, second: LocalServer
) -> None:
    _, token, _ = backend.set_state(b"0")
    waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS))
    first.kill()

    def works() -> bool:
        try:
            return backend.get_state() is None
        except RendezvousConnectionError:
            return False

    until(works, 30.0)
    with contextlib.suppress(RendezvousConnectionError):
        assert waiting.result() is None
    _, token, made = backend.set_state(b"put back")
    assert made
    assert asked(second, "SELECT count(*) FROM rdzv_states") == 1
    # One that takes no writes any more is left for one that does.
    with administrator(second) as connection:
        connection.execute(sa.text("ALTER DATABASE rdzv SET default_transaction_read_only = on"))
    first.restart(keep_data=True)
    backend.close()
    assert backend.get_state() is not None
    assert asked(first, "SELECT count(*) FROM rdzv_states") == 1


def test_a_name_whose_look_up_hangs_costs_a_request_and_no_more(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    server = empty_server(request, "postgresql")
    host, port = server.address
    answered = threading.Event()

    def hang(name: str) -> tuple[str, ...]:
        answered.wait(60.0)
        return (host,)

    monkeypatch.setattr(names, "resolve", hang)
    options = SqlOptions(keep_alive_interval_seconds=1.0)
    url = f"postgresql://rdzv:rdzv@server.example:{port}/rdzv"
    with contextlib.closing(SqlBackend(url, "run", options)) as backend:
        started = time.monotonic()
        with pytest.raises(RendezvousConnectionError, match=r"server\.example.*not looked up"):
            backend.get_state()
        assert time.monotonic() - started < 20
        answered.set()
        assert reach(backend.get_state) is None, "by the address that the name leads to"


def test_of_several_names_those_are_tried_that_lead_somewhere(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    server = empty_server(request, "postgresql")
    host, port = server.address

    def resolve(name: str) -> tuple[str, ...]:
        if name == "gone.example":
            raise OSError("Name or service not known")
        return ("127.0.0.254", host)

    monkeypatch.setattr(names, "resolve", resolve)
    hosts = f"host=gone.example:{port}&host=server.example:{port}"
    with contextlib.closing(SqlBackend(f"postgresql://rdzv:rdzv@/rdzv?{hosts}", "run")) as backend:
        assert reach(backend.get_state) is None


def test_a_repeated_announcement_keeps_the_run_alive(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    """It writes nothing but the entry's time, so the run's has to be told besides."""
    postgresql = empty_server(request, "postgresql")
    backend = opened(SqlBackend(postgresql.endpoint(), "run"))
    entry = Entry("node", b"data")
    backend.announce(entry, TTL_SECONDS, Question())
    question = "SELECT alive_until FROM rdzv_runs"
    before = asked(postgresql, question)
    backend._run._touched_at = float("-inf")
    assert backend.announce(entry, TTL_SECONDS, Question()).present
    assert asked(postgresql, question) > before


def test_of_those_who_arrive_at_once_one_finds_that_it_is_alone(
    request: pytest.FixtureRequest, opened: Any
) -> None:
    """It writes the run's first document, for which all others wait up to a second."""
    postgresql = empty_server(request, "postgresql")
    for turn in range(4):
        backends = [
            opened(SqlBackend(postgresql.endpoint(), f"run{turn}", SqlOptions())) for _ in range(6)
        ]
        for each in backends:
            assert each.get_state() is None  # so it is connected
        gate = threading.Barrier(len(backends))

        def arrive(index: int, each: Any, gate: threading.Barrier) -> int:
            gate.wait(TTL_SECONDS)
            return int(each.announce(Entry(f"n{index}", b""), TTL_SECONDS, Question()).live)

        with ThreadPoolExecutor(len(backends)) as threads:
            gates = [gate] * len(backends)
            counts = list(threads.map(arrive, range(len(backends)), backends, gates))
        assert min(counts) == 1, counts


def limits_of(connection: psycopg.Connection[Any]) -> Limits:
    return Limits.of(connection, connection.execute(LIMITS).fetchone())


def are_short(limits: Limits, connection: psycopg.Connection[Any]) -> bool:
    return limits.are_short(connection, connection.execute(COUNT).fetchone()[1])


def test_connections_of_others_count_where_a_common_role_looks(
    request: pytest.FixtureRequest,
) -> None:
    """It does not see of which type they are."""
    postgresql = empty_server(request, "postgresql")
    host, port = postgresql.address
    endpoint = f"host={host} port={port} dbname=rdzv user=stranger password=secret"
    with administrator(postgresql) as connection:
        connection.execute(sa.text("CREATE ROLE stranger LOGIN PASSWORD 'secret'"))
        connection.execute(sa.text("ALTER DATABASE rdzv CONNECTION LIMIT 3"))
    try:
        with psycopg.connect(endpoint, autocommit=True) as stranger:
            # What was just closed is counted for a moment more.
            limits = limits_of(stranger)
            until(lambda: not are_short(limits, stranger))  # one of three
            with administrator(postgresql):
                assert are_short(limits, stranger), "two of three"
        with administrator(postgresql) as connection:
            connection.execute(sa.text("ALTER DATABASE rdzv CONNECTION LIMIT -1"))
            connection.execute(sa.text("ALTER ROLE stranger CONNECTION LIMIT 2"))
        with psycopg.connect(endpoint, autocommit=True) as stranger, administrator(postgresql):
            limits = limits_of(stranger)
            until(lambda: not are_short(limits, stranger))  # one of its own two
    finally:
        with administrator(postgresql) as connection:
            connection.execute(sa.text("ALTER DATABASE rdzv CONNECTION LIMIT -1"))
            connection.execute(sa.text("DROP ROLE stranger"))
