"""Redis: nothing twice, nothing left behind, documented errors only, no longer than asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import torch.distributed as dist

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import RedisConnections, RedisOptions
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.proxy import Proxy
from rdzv.conformance.servers.technologies import Redis
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Entry, Question
from rdzv.stores.base import Unanswered, current_deadline
from rdzv.stores.redis import RedisClient, RedisStore
from rdzv.torch_store import Deadline

from .redis_topologies import Topologies, wait_until

TTL_SECONDS = 60.0
CLIENTS = 4


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "redis")


@pytest.fixture(scope="module")
def topologies() -> Iterator[Topologies]:
    with closing(Topologies()) as topologies:
        yield topologies


@pytest.fixture
def cluster(request: pytest.FixtureRequest, topologies: Topologies) -> Any:
    return topologies.get(request, "redis-cluster")


@pytest.fixture
def raw(server: Any) -> Iterator[Any]:
    """A client of somebody else's, on an empty server."""
    host, port = server.address
    with redis.Redis(host, port, socket_timeout=5.0) as client:
        client.flushall()
        yield client
        client.flushall()


@pytest.fixture
def client(server: Any) -> Iterator[RedisClient]:
    made = RedisClient(server.endpoint(), "run")
    yield made
    made.close()


@pytest.fixture
def store(server: Any) -> Iterator[Any]:
    made = RedisStore(server.endpoint(), "run")
    yield made
    made.close()


def proxy_endpoint(proxy: Proxy) -> str:
    host, port = proxy.address
    return f"{host}:{port}"


def key_of(server: Any, name: str) -> bytes:
    return RedisConnections(server.endpoint(), "run", RedisOptions()).base + name.encode()


# --------------------------------------------------------------------------- nothing left behind


def test_popped_values_and_answered_operations_do_not_stay(
    server: Any, raw: Any, store: Any
) -> None:
    done, until = key_of(server, "done"), key_of(server, "done-until")
    for number in range(300):
        store.queue_push("queue", b"x" * 10_000)
        assert len(store.queue_pop("queue")) == 10_000
        store.set(f"key{number % 3}", "value")
        store.add("counter", 1)
        store.append("text", "x")
        store.compare_set("compared", "", "value")
        store.delete_key("compared")
    assert raw.hlen(done) == raw.zcard(until) == 1, "the last one, which may have been lost"
    assert raw.hlen(key_of(server, "queued")) == raw.hlen(key_of(server, "queues")) == 0
    assert sum(raw.memory_usage(key) for key in raw.scan_iter()) < 10_000


def test_a_client_that_is_gone_leaves_its_last_operation_until_its_time_is_over(
    server: Any, raw: Any, store: Any
) -> None:
    done, until = key_of(server, "done"), key_of(server, "done-until")
    for number in range(10):
        gone = RedisClient(server.endpoint(), "run")
        gone.queue_push("queue", b"value", f"push {number}".replace(" ", "-"))
        gone.close()
    assert raw.hlen(done) == raw.zcard(until) == 10
    for name in raw.zrange(until, 0, -1):
        raw.zadd(until, {name: 1})
    backend = RedisBackend(server.endpoint(), "run")
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    backend.beat("node", TTL_SECONDS, Question())
    backend.close()
    assert raw.exists(done, until) == 0


def test_an_operation_that_fails_leaves_nothing_without_a_time(
    server: Any, raw: Any, store: Any
) -> None:
    store.set("counter", str(2**63 - 1))
    # As if all that was remembered had been over.
    raw.delete(key_of(server, "done"), key_of(server, "done-until"))
    with pytest.raises(ValueError, match="64 bits"):
        store.add("counter", 1)
    assert raw.exists(key_of(server, "done-until"))
    assert [key for key in raw.scan_iter() if raw.pttl(key) < 0] == []


# --------------------------------------------------------------------------- a server that refuses


def test_nodes_stay_alive_on_a_server_that_is_full(server: Any, raw: Any, store: Any) -> None:
    store.set_timeout(timedelta(seconds=0.5))
    with closing(RedisBackend(server.endpoint(), "run")) as backend:
        backend.set_state(b"x")
        backend.announce(Entry("node", b"", "round"), 5.0, Question())
        raw.config_set("maxmemory", "1")
        try:
            pulse = backend.beat("node", TTL_SECONDS, Question("", "round"))
            assert (pulse.present, pulse.confirmed) == (True, 1)
            assert raw.zscore(key_of(server, "roster"), "node") / 1000 > raw.time()[0] + 50
            with pytest.raises(RendezvousConnectionError, match="raise its maxmemory"):
                backend.set_state(b"y", pulse.token)
            with pytest.raises(dist.DistNetworkError, match="raise its maxmemory"):
                store.set("key", "value")
        finally:
            raw.config_set("maxmemory", "0")
        assert backend.set_state(b"y", pulse.token) is not None


def test_a_replica_is_told_as_one(server: Any, raw: Any) -> None:
    raw.execute_command("REPLICAOF", "127.0.0.1", "1")
    with closing(RedisBackend(server.endpoint(), "run")) as backend:
        try:
            with pytest.raises(RendezvousConnectionError, match="It is a replica"):
                backend.set_state(b"x")
        finally:
            raw.execute_command("REPLICAOF", "NO", "ONE")


# --------------------------------------------------------------------------- nothing twice


def each_mutation(client: RedisClient, mark: str) -> list[Callable[[], Any]]:
    """Calls whose repeats have the same answer, and an effect that would show."""
    return [
        lambda: client.add("counter", 5, f"{mark}-add"),
        lambda: client.append("text", b"x", f"{mark}-append"),
        lambda: client.queue_push("pushed", b"x", f"{mark}-push"),
        lambda: client.queue_pop("popped", f"{mark}-pop"),
        lambda: client.compare_set("compared", b"", b"x", f"{mark}-compare_set"),
        lambda: client.delete("deleted", f"{mark}-delete"),
        lambda: client.set_many([("set", b"x")], f"{mark}-set"),
    ]


def test_a_repeat_has_no_second_effect_and_the_first_answer(
    server: Any, raw: Any, client: RedisClient
) -> None:
    other, bystander = (RedisClient(server.endpoint(), "run") for _ in range(2))
    for number in range(3):
        client.queue_push("popped", str(number).encode(), f"feed-{number}")
    client.set_many([("deleted", b"x")], "feed-deleted")
    for first, repeat in zip(
        each_mutation(client, "once"), each_mutation(other, "once"), strict=True
    ):
        answer = first()
        # What others have done meanwhile changes nothing.
        bystander.add("other", 1, "another")
        bystander.add("other", 1, "yet another")
        assert repeat() == answer
    assert client.get_many(["counter", "text"]) == [b"5", b"x"]
    assert (client.queue_len("pushed"), client.queue_len("popped")) == (1, 2)
    other.close()
    bystander.close()


def test_what_was_sent_first_and_arrives_last_has_no_effect(server: Any, raw: Any) -> None:
    """A route that lost packets delivers them after the repeat, and after what followed it."""
    other = RedisClient(server.endpoint(), "run")
    with Proxy(server.address) as proxy, closing(RedisClient(proxy_endpoint(proxy), "run")) as mine:
        for number in range(3):
            other.queue_push("popped", str(number).encode(), f"feed-{number}")
        other.set_many([("deleted", b"x")], "feed-deleted")
        repeats, lates = each_mutation(mine, "sent"), each_mutation(other, "sent")
        for repeat, late in zip(repeats, lates, strict=True):
            mine.get_many(["counter"])
            proxy.drop_answers(1)
            with pytest.raises(Unanswered):
                repeat()
            answer = repeat()
            for number in range(3):
                mine.add("after", 1, f"after-{answer!r}-{number}".replace(" ", ""))
            assert late() == answer
        assert other.get_many(["counter", "text"]) == [b"5", b"x"]
        assert (other.queue_len("pushed"), other.queue_len("popped")) == (1, 2)
    other.close()


def test_operations_that_were_repeated_are_forgotten_when_their_time_is_over(
    server: Any, raw: Any
) -> None:
    done, until = key_of(server, "done"), key_of(server, "done-until")
    with Proxy(server.address) as proxy, closing(RedisClient(proxy_endpoint(proxy), "run")) as mine:
        for number in range(10):
            mine.get_many(["counter"])
            proxy.drop_answers(1)
            with pytest.raises(Unanswered):
                mine.add("counter", 1, f"add-{number}")
            mine.add("counter", 1, f"add-{number}")
            for name in raw.zrange(until, 0, -1):
                raw.zadd(until, {name: 1})
        assert mine.get_many(["counter"]) == [b"10"]
    assert raw.hlen(done) <= 2
    assert raw.zcard(until) <= 2


@pytest.mark.parametrize("timeout_seconds", [0.001, 300.0, 1800.0, 2147483.647])
def test_an_operation_is_remembered_for_longer_than_its_caller_repeats_it(
    server: Any, raw: Any, store: Any, timeout_seconds: float
) -> None:
    store.set_timeout(timedelta(seconds=timeout_seconds))
    before = raw.time()[0]
    store.add("counter", 1)
    ((_, until_ms),) = raw.zrange(key_of(server, "done-until"), 0, -1, withscores=True)
    assert until_ms / 1000 - before >= store.timeout.total_seconds() + 60


def test_a_process_that_was_stopped_for_long_repeats_nothing(raw: Any, client: RedisClient) -> None:
    deadline = Deadline(0.5)
    deadline._end -= 100.0
    token = current_deadline.set(deadline)
    try:
        with pytest.raises(dist.DistNetworkError, match="stopped meanwhile"):
            client.add("counter", 1, "late")
    finally:
        current_deadline.reset(token)
    assert client.get_many(["counter"]) == [None]


def test_an_operation_without_the_right_to_remember_it_is_not_applied(
    server: Any, raw: Any, store: Any
) -> None:
    raw.execute_command(*["ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all", "-zadd"])
    host, port = server.address
    few = RedisClient(f"redis://few:secret@{host}:{port}", "run")
    try:
        for mutation in each_mutation(few, "refused"):
            store.queue_push("popped", "x")
            store.set("deleted", "x")
            with pytest.raises(Unanswered, match="ACL lacks a right"):
                mutation()
        assert store.num_keys() == 1
        assert (store.queue_len("pushed"), store.queue_len("popped")) == (0, 7)
    finally:
        few.close()
        raw.execute_command("ACL", "DELUSER", "few")


# --------------------------------------------------------------------------- documented errors


@pytest.mark.parametrize(
    ("name", "field", "text"),
    [("state", "written", "x"), ("entries", "node", "x"), ("queues", "queue", "x")],
)
def test_data_of_somebody_else_are_told_at_once_as_such(
    server: Any, raw: Any, client: RedisClient, name: str, field: str, text: str
) -> None:
    backend = RedisBackend(server.endpoint(), "run")
    backend.set_state(b"x")
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    raw.hset(key_of(server, name), field, text)
    with closing(backend):
        if name == "queues":
            with pytest.raises(dist.DistStoreError, match="has not written"):
                client.queue_pop("queue", "pop")
            with pytest.raises(dist.DistStoreError, match="has not written"):
                client.queue_push("queue", b"x", "push")
            return
        with pytest.raises(RendezvousStateError, match="has not written"):
            backend.beat("node", TTL_SECONDS, Question())
        with pytest.raises(RendezvousStateError, match="key_prefix"):
            backend.announce(Entry("node", b"x"), TTL_SECONDS, Question())


def test_a_counter_of_somebody_else_is_told_as_such(server: Any, raw: Any) -> None:
    raw.hset(key_of(server, "marks"), "arrivals", "x")
    backend = RedisBackend(server.endpoint(), "run")
    with closing(backend), pytest.raises(RendezvousStateError, match="has not written"):
        backend.announce(Entry("node", b""), TTL_SECONDS, Question())


@pytest.mark.parametrize("where", ["server", pytest.param("cluster", marks=pytest.mark.full)])
def test_closing_lets_out_documented_errors_only(
    request: pytest.FixtureRequest, where: str
) -> None:
    endpoint = request.getfixturevalue(where).endpoint()
    # What is torn in the midst of being opened waits for an answer for so long.
    options = RedisOptions(read_timeout_seconds=1.0)
    backend = RedisBackend(endpoint, "run", options)
    client = RedisClient(endpoint, "run", options)
    client.set_many([("there", b"1")], "first")
    calls: list[Callable[[], Any]] = [
        backend.get_state,
        lambda: backend.announce(Entry("node", b""), TTL_SECONDS, Question()),
        lambda: backend.wait_for_change(None, 0.01),
        lambda: client.get_many(["there"]),
        lambda: client.wait_for_keys(["absent"], 0.01),
        lambda: client.add("counter", 1, "an operation"),
    ]
    over, wrong = threading.Event(), []

    def keep_calling(call: Callable[[], Any]) -> None:
        while not over.is_set():
            try:
                call()
            except (RendezvousConnectionError, Unanswered):
                pass
            except BaseException as error:
                wrong.append(repr(error))

    threads = [threading.Thread(target=keep_calling, args=(call,)) for call in calls * CLIENTS]
    for thread in threads:
        thread.start()
    end = time.monotonic() + 1.5
    while time.monotonic() < end and not wrong:
        backend.close()
        client.close()
        over.wait(0.001)
    over.set()
    for thread in threads:
        thread.join(30.0)
    backend.close()
    client.close()
    assert wrong == []


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[str, int]]:
    """A Sentinel with a user and a password of its own, of a server with another password."""
    program = Redis().installed() or Redis().from_wheel()
    if program is None:
        pytest.skip(f"no server of Redis: {Redis.how}")
    server = ProcessServer(
        [str(program.path), "--port", "{port}", "--requirepass", "of the server", "--save", ""],
        tmp_path / "server",
        technology="redis",
    )
    host, port = server.address
    configuration = tmp_path / "sentinel.conf"
    configuration.write_text(
        f"sentinel monitor mymaster {host} {port} 1\n"
        'sentinel auth-pass mymaster "of the server"\n'
        "user default off\nuser watcher on >of:the:sentinel ~* &* +@all\n"
    )
    sentinel = ProcessServer(
        [str(program.path), str(configuration), "--port", "{port}", "--sentinel"],
        tmp_path / "sentinel",
        technology="redis",
    )
    yield sentinel.address
    sentinel.close()
    server.close()


def test_sentinels_may_have_a_password_of_their_own(guarded: tuple[str, int]) -> None:
    host, port = guarded
    endpoint = f"redis+sentinel://{host}:{port}/mymaster/3"
    options = RedisOptions(password="of the server")
    right = "sentinel_username=watcher&sentinel_password=of%3Athe%3Asentinel"
    for query in ("", "sentinel_password=nonsense", f"{right}x"):
        backend = RedisBackend(f"{endpoint}?{query}", "run", options)
        with pytest.raises(RendezvousConnectionError, match="sentinel_password") as caught:
            backend.open()
        assert "of:the:sentinel" not in str(caught.value)
    backend = RedisBackend(f"{endpoint}?{right}", "run", options)
    backend.open()
    assert backend.set_state(b"x") is not None
    backend.close()


def is_whole(node: Any) -> bool:
    state = node.cluster("info")["cluster_state"]
    return state in ("ok", b"ok")


def test_a_node_that_the_cluster_has_left_behind_is_passed_over(tmp_path: Path) -> None:
    """One alone, cut off or replaced, says ``CLUSTERDOWN`` for as long as it runs."""
    program = Redis().installed() or Redis().from_wheel()
    if program is None:
        pytest.skip(f"no server of Redis: {Redis.how}")
    options = ["--port", "{port}", "--dir", "{data}", "--cluster-enabled", "yes", "--save", ""]
    # Without, it is 10,000 above the other: among those that outgoing connections are given.
    options += ["--cluster-port", "{port_2}"]
    started = [
        ProcessServer([str(program.path), *options], tmp_path / name, technology="redis")
        for name in ("alone", "whole")
    ]
    (host, left), (_, right) = (one.address for one in started)
    backend = RedisBackend(f"redis+cluster://{host}:{left},{host}:{right}", "run")
    try:
        with redis.Redis(host, left) as first, redis.Redis(host, right) as second:
            second.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_until("the second is whole", lambda: is_whole(second))
            assert backend.get_state() is None
            second.execute_command("CLUSTER", "FLUSHSLOTS")
            first.execute_command("CLUSTER", "ADDSLOTS", *range(16384))
            wait_until("the first is whole", lambda: is_whole(first))
            # By the connection that there is; nothing was done.
            with pytest.raises(RendezvousConnectionError, match="ClusterDown"):
                backend.set_state(b"x")
            assert backend.set_state(b"x") is not None
    finally:
        backend.close()
        for one in started:
            one.close()


# --------------------------------------------------------------------------- no longer than asked


@pytest.mark.parametrize("timeout_seconds", [0.3, 1.5])
def test_a_stopped_server_does_not_hold_a_caller_beyond_his_timeout(
    server: Any, raw: Any, store: Any, timeout_seconds: float
) -> None:
    calls: dict[str, Callable[[], Any]] = {
        "get": lambda: store.get("there"),
        "set": lambda: store.set("key", "value"),
        "add": lambda: store.add("counter", 1),
        "check": lambda: store.check(["there"]),
        "wait": lambda: store.wait(["absent"]),
        "queue_pop": lambda: store.queue_pop("queue"),
        "queue_len": lambda: store.queue_len("queue"),
        "num_keys": store.num_keys,
    }
    store.set("there", "1")
    store.set_timeout(timedelta(seconds=timeout_seconds))
    held: dict[str, float] = {}

    def measure(name: str) -> None:
        begun = time.monotonic()
        with pytest.raises((dist.DistNetworkError, dist.DistStoreError)):
            calls[name]()
        held[name] = time.monotonic() - begun

    server.pause()
    try:
        threads = [threading.Thread(target=measure, args=(name,)) for name in calls]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30.0)
    finally:
        server.resume()
    assert set(held) == set(calls)
    # A second, and another for a machine that is slow.
    assert max(held.values()) < timeout_seconds + 2.0, held


def test_a_wait_that_hears_nothing_ends_before_the_entry_has_expired(server: Any, raw: Any) -> None:
    options = RedisOptions(keep_alive_interval_seconds=1.0)
    window_seconds = 4.0
    with Proxy(server.address) as proxy:
        backend = RedisBackend(proxy_endpoint(proxy), "run", options)
        with closing(backend):
            backend.open()
            hole = threading.Timer(0.3, proxy.black_hole)
            begun = time.monotonic()
            hole.start()
            with pytest.raises(RendezvousConnectionError, match="Timeout"):
                backend.wait_for_change(None, TTL_SECONDS)
            assert time.monotonic() - begun < window_seconds
            hole.join()
