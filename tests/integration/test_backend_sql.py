"""The SQL backend on SQLite: the shared cases, life spans, processes, threads, torch's handler."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
)

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.backends.sql import SqlBackend, SqlOptions, sqlite
from rdzv.conformance.store_kit import Background, in_threads
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.ports import Entry, Question
from rdzv.stores.memory import MemoryStore
from rdzv.stores.sql import SqlStore, create_backend

from .operations import run_apart
from .sqlite_space import TABLES, SqliteTarget, rows

SWARM = Path(__file__).with_name("sqlite_swarm.py")
SHORT_LIFE = SqlOptions(outage_timeout_seconds=0.3, closed_grace_seconds=0.1)


@pytest.fixture
def space(tmp_path: Path) -> Iterator[SqliteTarget]:
    space = SqliteTarget(tmp_path / "rdzv.db")
    yield space
    space.close()


# ------------------------------------------------------------------------------------ life spans


def test_a_beat_writes_no_row_that_others_share(space: SqliteTarget) -> None:
    backend = space.connect()
    backend.set_state(b"document")
    backend.announce(Entry("node", b""), 60.0, Question())
    shared = {table: rows(space.path, table) for table in TABLES if table != "roster"}
    for _ in range(10):
        backend.beat("node", 60.0, Question())
    assert {table: rows(space.path, table) for table in TABLES if table != "roster"} == shared


def test_a_run_that_is_over_leaves_nothing(space: SqliteTarget) -> None:
    over = space.connect("over", SHORT_LIFE)
    over.set_state(b"document")
    over.announce(Entry("node", b""), 0.1, Question())
    over.withdraw("other", 0.1)
    store = SqlStore(str(space.path), "over", lifetime_seconds=SHORT_LIFE.lifetime_seconds)
    store.multi_set([f"key{number}" for number in range(1200)], ["x"] * 1200)
    store.queue_push("queue", "x")
    store.close()
    newcomer = space.connect("new")
    [key] = [row[0] for row in rows(space.path, "runs") if row[1] == b"over"]

    def is_swept() -> bool:
        before = len(rows(space.path, "store"))
        newcomer.announce(Entry(f"node{time.monotonic_ns()}", b""), 60.0, Question())
        # In small steps, so that nobody waits long for the lock.
        assert before - len(rows(space.path, "store")) <= 500
        return not any(row[0] == key for table in TABLES for row in rows(space.path, table))

    space.until(is_swept)
    assert over.get_state() is None
    # It may begin anew.
    assert over.set_state(b"again")[2]


def test_beats_keep_a_run_for_longer_than_its_life(space: SqliteTarget) -> None:
    # Long enough for a machine that stalls between two beats.
    options = SqlOptions(outage_timeout_seconds=1.9, closed_grace_seconds=0.1)
    backend, newcomer = space.connect("kept", options), space.connect("new")
    found = backend.set_state(b"document")[:2]
    store = SqlStore(str(space.path), "kept", lifetime_seconds=options.lifetime_seconds)
    store.set("key", "value")
    backend.announce(Entry("node", b""), 60.0, Question())
    end = time.monotonic() + 2 * options.lifetime_seconds
    while time.monotonic() < end:
        assert backend.beat("node", 60.0, Question()).present
        newcomer.announce(Entry(f"node{time.monotonic_ns()}", b""), 0.1, Question())
        space.let_pass(0.02)
    assert backend.get_state() == found
    assert store.get("key") == b"value"
    store.close()
    space.until(lambda: _announce_and_count(newcomer, space, "states") == 0)


def test_expired_entries_and_tombstones_are_swept(space: SqliteTarget) -> None:
    backend = space.connect()
    for number in range(20):
        backend.announce(Entry(f"node{number}", b""), 0.05, Question())
        backend.withdraw(f"other{number}", 0.05)
    space.until(lambda: backend.entries() == [])
    assert _announce_and_count(backend, space, "roster") <= 1


def _announce_and_count(backend: SqlBackend, space: SqliteTarget, table: str) -> int:
    backend.announce(Entry("newcomer", b""), 0.001, Question())
    return len(rows(space.path, table))


# ------------------------------------------------------------------------- processes and threads


def swarm(*arguments: object) -> str:
    done = subprocess.run(
        [sys.executable, str(SWARM), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("each", [100, pytest.param(500, marks=pytest.mark.full)])
def test_eight_processes_count_exactly(space: SqliteTarget, each: int) -> None:
    """They also make the file and its tables, all at once."""
    swarm("count", space.path, 8, each)
    check_counts(space, 8 * each)
    assert len(space.connect().entries()) == 8


@pytest.mark.full
def test_eight_processes_count_exactly_without_a_log(space: SqliteTarget) -> None:
    """With a rollback journal who reads keeps out who writes, and the other way round."""
    allowed = SqlOptions(allow_network_filesystem=True)
    first = SqlBackend(str(space.path), "job", allowed, filesystem_type=lambda _: "nfs4")
    first.open()
    first.close()
    swarm("count", space.path, 8, 40)
    check_counts(space, 8 * 40)
    assert not Path(f"{space.path}-wal").exists()


def test_a_turn_that_is_not_given_back_costs_a_moment(space: SqliteTarget) -> None:
    """A signal handler may raise an error between any two steps."""
    backend = space.connect()
    backend.set_state(b"x")
    sqlite._turns[Path(backend.endpoint)].acquire()
    for number in range(5):
        backend.announce(Entry("node", b"", str(number)), 60.0, Question())
    started = time.monotonic()
    backend.beat("node", 60.0, Question())
    assert time.monotonic() - started < sqlite.TURN_SECONDS_MAX


def test_forked_processes_count_exactly(space: SqliteTarget) -> None:
    swarm("inherit", space.path, 4, 40)
    check_counts(space, 1 + 5 * 40)


def test_a_fork_in_the_middle_of_a_call_harms_nobody(space: SqliteTarget) -> None:
    swarm("busy", space.path)


FORKED_AFTER_A_WAIT = """
import os, sys
from rdzv.backends.sql import SqlBackend

backend, other = (SqlBackend(sys.argv[1], "job") for _ in range(2))
_, token, _ = backend.set_state(b"1")
assert backend.wait_for_change(token, 0.01) is None
child = os.fork()
if not child:
    assert other.set_state(b"2", token)[2]
    assert backend.wait_for_change(token, 1.0)[0] == b"2"
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""


def test_a_forked_child_looks_for_itself(space: SqliteTarget) -> None:
    run_apart(FORKED_AFTER_A_WAIT, str(space.path))


def check_counts(space: SqliteTarget, expected: int) -> None:
    found = space.connect().get_state()
    assert found is not None
    assert int(found[0]) == expected
    store = SqlStore(str(space.path), "job")
    assert store.add("counter", 0) == expected
    assert store.queue_len("queue") == expected
    store.close()


def test_waiting_threads_silence_nobody(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    store = SqlStore(str(space.path), "job", timedelta(seconds=60))
    waiting = [Background(lambda: backend.wait_for_change(token, 60.0)) for _ in range(80)]
    waiting += [Background(lambda: store.wait(["key"])) for _ in range(80)]
    backend.announce(Entry("node", b""), 60.0, Question())
    for _ in range(5):
        started = time.monotonic()
        assert backend.beat("node", 60.0, Question()).present
        assert time.monotonic() - started < 5
    found = backend.set_state(b"y", token)[:2]
    store.set("key", "value")
    assert [each.result() for each in waiting] == [found] * 80 + [None] * 80
    store.close()


def test_connections_are_few(space: SqliteTarget) -> None:
    backend = space.connect()
    backend.set_state(b"x")
    in_threads(40, lambda index: [backend.get_state() for _ in range(20)])
    backend.wait_for_change(None, 0.0)
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    opened = [link for link in links if _target(link) == str(space.path)]
    # SQLite keeps the descriptors of closed connections for the next ones.
    assert 1 <= len(opened) <= 20
    backend.close()
    assert not [link for link in links if _target(link) == str(space.path)]


def _target(link: str) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


def test_closing_ends_a_wait_and_not_the_object(space: SqliteTarget) -> None:
    backend = space.connect()
    _, token, _ = backend.set_state(b"x")
    waiting = Background(lambda: backend.wait_for_change(token, 60.0)).still_blocked()
    backend.close()
    with pytest.raises(RendezvousConnectionError, match="closed while waiting"):
        waiting.result()
    assert backend.get_state() == (b"x", token)


def test_a_call_inside_a_call_of_the_same_thread_is_refused(space: SqliteTarget) -> None:
    """That is what a signal handler does; it would wait for itself."""
    backend = space.connect()
    backend.set_state(b"x")
    started = time.monotonic()

    def interrupted(connection: sa.Connection) -> None:
        with pytest.raises(RendezvousConnectionError, match="signal handler"):
            backend.withdraw("node", 1.0)

    backend._database.write(interrupted)
    assert time.monotonic() - started < 5
    backend.withdraw("node", 1.0)


def test_cost_of_a_beat_does_not_depend_on_the_number_of_nodes(space: SqliteTarget) -> None:
    backend = space.connect()
    costs = []
    for nodes in (2, 128):
        for number in range(nodes):
            backend.announce(Entry(f"node{number}", b"x" * 200), 60.0, Question())
        [idle] = backend._database._pool._idle
        statements: list[str] = []
        idle.connection.driver_connection.set_trace_callback(statements.append)
        backend.beat("node0", 60.0, Question("node1", "round"))
        idle.connection.driver_connection.set_trace_callback(None)
        costs.append([each.split(None, 1)[0] for each in statements])
    assert costs[0] == costs[1]
    assert costs[0] == ["PRAGMA", "BEGIN", "PRAGMA", "UPDATE", "COMMIT", "SELECT"]


def test_counting_reads_an_index_alone(space: SqliteTarget) -> None:
    backend = space.connect()
    backend.open()
    statement = backend._roster._pulse.compile(dialect=sa.dialects.sqlite.dialect())
    plan: list[str] = []

    def explain(connection: sa.Connection) -> None:
        values = dict.fromkeys(statement.params, "")
        text = f"EXPLAIN QUERY PLAN {statement}"
        ordered = tuple(values[name] for name in statement.positiontup or [])
        plan.extend(row[-1] for row in connection.exec_driver_sql(text, ordered))

    backend._database.read(explain)
    assert not [line for line in plan if line.startswith("SCAN")], plan
    assert [line for line in plan if "USING COVERING INDEX rdzv_roster_live" in line], plan


# ------------------------------------------------------------------------------- torch's own ways


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_torchs_own_handler_runs_on_it(kind: str, space: SqliteTarget) -> None:
    shared = MemorySpace()
    stores: list[dist.Store] = [
        SqlStore(str(space.path), "job") if kind == "sqlite" else MemoryStore()
    ]

    def join(index: int) -> tuple[int, int, bytes]:
        backend: RendezvousBackend = (
            space.connect() if kind == "sqlite" else MemoryBackend(shared, "job")
        )
        handler = DynamicRendezvousHandler.from_backend(
            "job", stores[0], backend, 2, 2, local_addr="127.0.0.1"
        )
        try:
            info = handler.next_rendezvous()
            info.store.set(f"from{info.rank}", f"hello from {info.rank}")
            return info.rank, info.world_size, info.store.get(f"from{1 - info.rank}")
        finally:
            handler._keep_alive_timer and handler._stop_heartbeats()

    joined = sorted(in_threads(2, join))
    assert joined == [(0, 2, b"hello from 1"), (1, 2, b"hello from 0")]
    stores[0].close()  # type: ignore[attr-defined]


def parameters(endpoint: str, **options: Any) -> RendezvousParameters:
    return RendezvousParameters("sqlite", endpoint, "job", 1, 2, timeout=900, **options)


def test_create_backend_gives_a_pair(space: SqliteTarget) -> None:
    backend, store = create_backend(
        parameters(f"sqlite:///{space.path}", read_timeout="1.5", table_prefix="mine_")
    )
    assert backend.name == "sqlite"
    assert backend.endpoint == str(space.path)
    assert backend.route() is None
    assert backend.set_state(b"x")[2]
    store.set("key", "value")
    assert store.timeout == timedelta(seconds=1.5)  # type: ignore[attr-defined]
    again = SqlStore(str(space.path), "job", options=SqlOptions(table_prefix="mine_"))
    assert again.get("key") == b"value"
    assert space.connect().get_state() is None
    backend.close()
    store.close()  # type: ignore[attr-defined]
    again.close()


@pytest.mark.parametrize(
    "options",
    [
        {"read_timeout": "0"},
        {"read_timeout": "-1"},
        {"read_timeout": "soon"},
        {"outage_timeout": "nan"},
        {"closed_grace": "inf"},
        {"table_prefix": "a b"},
        {"table_prefix": "1"},
        {"allow_network_filesystem": "maybe"},
        {"schema": "public"},
        {"create_tables": "false"},
    ],
    ids=str,
)
def test_an_option_that_cannot_work_is_named(space: SqliteTarget, options: dict[str, str]) -> None:
    [(name, value)] = options.items()
    with pytest.raises(RendezvousSettingsError, match=name) as caught:
        create_backend(parameters(str(space.path), **options))
    assert value in str(caught.value)


def test_a_run_id_must_be_given(space: SqliteTarget) -> None:
    with pytest.raises(RendezvousSettingsError, match="rdzv-id"):
        SqlBackend(str(space.path), "")


def test_threads_of_one_object_make_its_tables_once(space: SqliteTarget) -> None:
    backend = space.connect()
    gate = threading.Barrier(8)

    def first_call(index: int) -> object:
        gate.wait()
        return backend.get_state()

    assert in_threads(8, first_call) == [None] * 8
