"""SqlStore on SQLite: the store cases, many processes, lost answers, and files that come and go."""

from __future__ import annotations

import gc
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.backends.sql import SqlOptions
from rdzv.conformance.store_kit import Background, in_threads, times_out
from rdzv.errors import RendezvousSettingsError
from rdzv.ports import Entry, Question
from rdzv.stores.base import Unanswered
from rdzv.stores.sql import SqlClient, SqlStore

from .sqlite_space import SqliteTarget, raw, rows

SHORT = timedelta(seconds=0.3)
LONG = timedelta(seconds=60)


class Stores:
    """Stores on one file, closed when the test is over."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.made: list[SqlStore] = []

    def connect(self, run_id: str = "job", timeout: timedelta = LONG) -> SqlStore:
        store = SqlStore(str(self.path), run_id, timeout)
        self.made.append(store)
        return store


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[Stores]:
    stores = Stores(tmp_path / "rdzv.db")
    yield stores
    for store in stores.made:
        store.close()


def test_runs_and_namespaces_do_not_meet(stores: Stores) -> None:
    made: dict[str, Any] = {run: stores.connect(run) for run in ("job", "job.1", "JOB", "job\0")}
    made["job/a"] = made["job"].namespace("a")
    made["job/a/b"] = made["job"].namespace("a").namespace("b")
    made["job/A"] = made["job"].namespace("A")
    made["job/a%"] = made["job"].namespace("a%")
    for name, store in made.items():
        store.set("key", name)
        store.queue_push("queue", name)
    for name, store in made.items():
        assert store.get("key") == name.encode()
        assert store.queue_len("queue") == 1
    assert made["job"].num_keys() == 5
    assert made["job"].list_keys() == ["A/key", "a%/key", "a/b/key", "a/key", "key"]
    assert made["job/a"].list_keys() == ["b/key", "key"]
    assert made["JOB"].num_keys() == 1


def test_many_keys_take_one_transaction(stores: Stores) -> None:
    store = stores.connect()
    keys = [f"key{number}" for number in range(1500)]
    store.multi_set(keys, [key.upper() for key in keys])
    assert stores.connect().multi_get(list(reversed(keys)))[0] == b"KEY1499"
    assert store.check(keys)
    assert not store.check([*keys, "missing"])
    store.wait(keys, LONG)


def test_a_value_may_have_eight_mebibytes(stores: Stores) -> None:
    value = bytes(range(256)) * 32768
    stores.connect().set("big", value)
    assert stores.connect().get("big") == value


def test_it_pins_itself_behind_cplusplus(stores: Stores) -> None:
    prefix = dist.PrefixStore("near", SqlStore(str(stores.path), "pinned", LONG))
    prefix = dist.PrefixStore("far", prefix)
    gc.collect()
    prefix.set("key", "value")
    assert prefix.get("key") == b"value"
    assert prefix.add("n", 2) == 2
    assert stores.connect("pinned").get("near/far/key") == b"value"
    underlying = prefix._underlying_non_prefix_store  # type: ignore[attr-defined]
    assert isinstance(underlying, SqlStore)
    underlying.close()


def test_a_signal_handler_ends_a_wait(stores: Stores) -> None:
    class Enough(Exception):
        pass

    def stop(*arguments: object) -> None:
        raise Enough

    store = stores.connect()
    before = signal.signal(signal.SIGALRM, stop)
    # The test's own time limit is a signal too.
    remaining = signal.setitimer(signal.ITIMER_REAL, 0.1)
    started = time.monotonic()
    try:
        with pytest.raises(Enough):
            store.get("never")
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.setitimer(signal.ITIMER_REAL, *remaining)
    assert time.monotonic() - started < 5
    store.set("never", "mind")
    assert store.get("never") == b"mind"


def test_a_wait_of_another_process_length_does_not_overflow(stores: Stores) -> None:
    store, other = stores.connect(), stores.connect()
    forever = timedelta(milliseconds=2**31 - 1)
    waiting = Background(lambda: store.wait(["key"], forever)).still_blocked()
    other.set("key", "value")
    waiting.result()


# ---------------------------------------------------------------------------------- lost answers


def lose_answers(client: SqlClient, applied: bool, times: int = 1) -> None:
    """The next commits are made, or not, and then their answers are lost."""
    database = client._database
    engine = database._pool.engine
    assert engine is not None
    dialect: Any = engine.dialect
    commit, left = dialect.do_commit, [times]

    def do_commit(connection: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            dialect.do_commit = commit
        if applied:
            commit(connection)
        raise connection.driver_connection.OperationalError("disk I/O error")

    dialect.do_commit = do_commit


MUTATIONS: dict[str, Callable[[SqlStore], object]] = {
    "set": lambda store: store.set("key", "new"),
    "multi_set": lambda store: store.multi_set(["key", "other"], ["new", "new"]),
    "add": lambda store: store.add("counter", 5),
    "compare_set": lambda store: store.compare_set("key", "old", "new"),
    "append": lambda store: store.append("key", "er"),
    "delete_key": lambda store: store.delete_key("key"),
    "queue_push": lambda store: store.queue_push("queue", "last"),
    "queue_pop": lambda store: store.queue_pop("queue"),
}


@pytest.mark.parametrize("applied", [True, False], ids=["made", "not made"])
@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mutation_is_applied_once(stores: Stores, name: str, applied: bool) -> None:
    plain, faulty = stores.connect("plain"), stores.connect("faulty")
    for store in (plain, faulty):
        store.set("key", "old")
        store.add("counter", 1)
        store.queue_push("queue", "first")
        store.queue_push("queue", "second")
    expected = MUTATIONS[name](plain)
    lose_answers(client_of(faulty), applied)
    assert MUTATIONS[name](faulty) == expected
    assert everything(stores.path, faulty) == everything(stores.path, plain)


def test_an_answer_that_stays_lost_is_found_by_the_repeat(stores: Stores) -> None:
    """The commit is made, nobody can look for it, others write meanwhile, then all is well."""
    store, other = stores.connect(), stores.connect()
    store.add("counter", 1)
    client = client_of(store)
    dialect: Any = client._database.dialect
    begin, begun = dialect.begin, []

    def begin_once(connection: Any, write: bool, *arguments: Any) -> None:
        begun.append(connection)
        if len(begun) > 1:
            raise OSError("the cable was pulled")
        begin(connection, write, *arguments)

    lose_answers(client, applied=True)
    dialect.begin = begin_once
    with pytest.raises(Unanswered):
        client.add("counter", 10, "operation")
    assert len(begun) == 2
    with pytest.raises(Unanswered):
        client.add("counter", 10, "operation")
    assert other.add("counter", 100) == 111
    dialect.begin = begin
    assert client.add("counter", 10, "operation") == 11
    assert other.add("counter", 0) == 111


def client_of(store: SqlStore) -> SqlClient:
    client = store._client
    assert isinstance(client, SqlClient)
    return client


def everything(path: Path, store: SqlStore) -> list[object]:
    key = client_of(store)._run.key
    return [
        sorted(str(row[1:]) for row in rows(path, table) if row[0] == key)
        for table in ("store", "queues")
    ]


# -------------------------------------------------------------------------- files that come and go


def test_a_locked_file_is_waited_for(stores: Stores) -> None:
    store = stores.connect()
    impatient = stores.connect(timeout=SHORT)
    with raw(stores.path) as holder:
        holder.execute("BEGIN IMMEDIATE")
        started = time.monotonic()
        with pytest.raises(dist.DistNetworkError, match="locked"):
            impatient.set("key", "impatient")
        assert time.monotonic() - started < 10
        writing = Background(lambda: store.set("key", "patient")).still_blocked()
        holder.execute("COMMIT")
    writing.result()
    assert store.get("key") == b"patient"


@pytest.mark.parametrize("lose_file", [False, True], ids=["rows", "file"])
def test_it_goes_on_after_a_loss(stores: Stores, lose_file: bool) -> None:
    store, other = stores.connect(), stores.connect()
    store.set("key", "old")
    waiting = Background(lambda: store.get("later")).still_blocked()
    SqliteTarget(stores.path, lose_file).wipe()
    # No error reaches torch, which could not bear it.
    assert not other.check(["key"])
    other.set("later", "value")
    assert waiting.result() == b"value"
    assert store.add("counter", 1) == 1
    assert other.add("counter", 1) == 2


def test_keys_are_swept_only_with_their_run(stores: Stores) -> None:
    brief = SqlStore(str(stores.path), "brief", LONG, lifetime_seconds=0.2)
    stores.made.append(brief)
    keeper = stores.connect("keeper")
    brief.set("key", "value")
    keeper.set("key", "value")
    space = SqliteTarget(stores.path)
    newcomer = space.connect("new")

    def is_gone() -> bool:
        newcomer.announce(Entry(f"node{time.monotonic_ns()}", b""), 60.0, Question())
        return brief.num_keys() == 0

    space.until(is_gone)
    assert keeper.get("key") == b"value"
    space.close()


def test_an_unusable_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(RendezvousSettingsError, match="create it"):
        SqlStore(str(tmp_path / "none" / "x.db"), "job")
    path = tmp_path / "locked.db"
    with raw(path) as holder:
        holder.execute("CREATE TABLE theirs (x)")
        holder.execute("BEGIN EXCLUSIVE")
        with pytest.raises(dist.DistNetworkError, match="locked"):
            SqlStore(str(path), "job", options=SqlOptions(read_timeout_seconds=0.2))
    SqlStore(str(path), "job").close()
    with raw(path) as connection:
        connection.execute("UPDATE rdzv_schema SET version = 99")
    with pytest.raises(dist.DistStoreError, match="same release"):
        SqlStore(str(path), "job")


def test_a_value_of_another_kind_is_an_error(stores: Stores) -> None:
    store = stores.connect()
    store.set("key", "value")
    with raw(stores.path) as connection:
        connection.execute("UPDATE rdzv_store SET value = 5")
    with pytest.raises(dist.DistStoreError, match="has not written"):
        store.get("key")


# --------------------------------------------------------------------------------- many at a time


def test_threads_count_exactly_through_one_store(stores: Stores) -> None:
    store = stores.connect()

    def work(index: int) -> None:
        view = dist.PrefixStore("p", store)
        for _ in range(25):
            view.add("counter", 1)
            store.append("log", str(index))
            store.queue_push("queue", str(index))

    in_threads(8, work)
    assert store.get("p/counter") == b"200"
    assert len(store.get("log")) == 200
    popped = in_threads(8, lambda index: [store.queue_pop("queue") for _ in range(25)])
    assert sorted(value for each in popped for value in each) == sorted(
        str(index).encode() for index in range(8) for _ in range(25)
    )
    # As many writers as ever worked at once, not one for each operation.
    assert len(rows(stores.path, "writers")) <= 8


def test_no_wake_up_is_lost(stores: Stores) -> None:
    writer, waiter = stores.connect(), stores.connect()
    gate = threading.Barrier(2)

    def write() -> None:
        for number in range(200):
            gate.wait()
            writer.set(f"key{number}", "x")

    writing = Background(write)
    for number in range(200):
        gate.wait()
        waiter.wait([f"key{number}"], timedelta(seconds=20))
    writing.result()


def test_many_wait_while_others_work(stores: Stores) -> None:
    store = stores.connect()
    waiting = [Background(lambda: store.get("late")) for _ in range(60)]
    assert store.add("counter", 1) == 1
    with times_out(SHORT):
        store.wait(["never"], SHORT)
    store.set("late", "come")
    assert [each.result() for each in waiting] == [b"come"] * 60
