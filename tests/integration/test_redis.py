"""The Redis backend and store: permissions, what stays behind, endpoints, costs, errors."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import redis
import torch.distributed as dist

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import RedisConnections, RedisOptions
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.store_kit import Background
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
)
from rdzv.ports import Entry, Question
from rdzv.stores.redis import RedisStore

DOCS = Path(__file__).resolve().parents[2] / "docs" / "redis.md"
SHORT_LIFE = RedisOptions(outage_timeout_seconds=0.4, closed_grace_seconds=0.1)
TTL_SECONDS = 60.0
MERELY_USEFUL = ("info", "hello", "select", "srem", "subscribe")
"""Without these a warning, a protocol, a database, tidiness or a waking is missing: no error."""


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "redis")


@pytest.fixture
def raw(server: Any) -> Iterator[Any]:
    """A client of somebody else's, on an empty server."""
    host, port = server.address
    with redis.Redis(host, port, socket_timeout=5.0) as client:
        client.flushall()
        yield client


@pytest.fixture
def opened() -> Iterator[Any]:
    """Closes at the end what it is called with."""
    made: list[Any] = []

    def remember(what: Any) -> Any:
        made.append(what)
        return what

    yield remember
    for each in made:
        each.close()


def use_all(backend: RedisBackend, store: Any, timeout_seconds: float = 10.0) -> None:
    """Every operation of both."""
    backend.open()
    _, token, _ = backend.set_state(b"1")
    backend.set_state(b"2", token)
    backend.announce(Entry("node", b"data", "round"), TTL_SECONDS, Question("node", "round"))
    backend.announce(Entry("node", b"data", "later"), TTL_SECONDS, Question("node", "later"))
    assert backend.beat("node", TTL_SECONDS, Question("node", "later")).confirmed == 1
    revision = backend.beat("node", TTL_SECONDS, Question()).revision
    assert backend.wait_for_change(backend.get_state()[1], 0.01, revision) is None
    backend.withdraw("node", TTL_SECONDS)
    assert len(backend.entries()) == 1
    store.set_timeout(timedelta(seconds=timeout_seconds))
    store.multi_set(["a", "b"], ["1", "2"])
    assert store.add("n", 2) == 2
    assert store.compare_set("c", "", "x") == b"x"
    store.append("a", "1")
    assert store.multi_get(["a", "b"]) == [b"11", b"2"]
    waiting = Background(lambda: store.get("later"))
    waiting.still_blocked()
    store.set("later", "1")
    waiting.result()
    store.queue_push("q", "1")
    assert store.queue_len("q") == 1
    assert store.check(["a", "q"])
    assert store.queue_pop("q") == b"1"
    assert store.num_keys() == len(store.list_keys()) == 5
    assert store.delete_key("a")


def fails(backend: RedisBackend, store: Any) -> bool:
    try:
        use_all(backend, store, 0.3)
    except (RendezvousConnectionError, dist.DistNetworkError):
        return True
    return False


def test_the_documented_rights_are_enough_and_no_more(server: Any, raw: Any, opened: Any) -> None:
    (line,) = re.findall(r"<!-- test: least privilege -->\n```\n(.*?)\n```", DOCS.read_text())
    raw.execute_command(*shlex.split(line))
    host, port = server.address
    try:
        endpoint = f"redis://rdzv:secret@{host}:{port}"
        backend = opened(RedisBackend(endpoint, "run"))
        use_all(backend, opened(RedisStore(endpoint, "run")))
        # One right less, whichever, and something does not work.
        for right in re.findall(r"\+(\w+)", line):
            if right in MERELY_USEFUL:
                continue
            raw.execute_command("ACL", "SETUSER", "rdzv", f"-{right}")
            raw.flushdb()
            raw.script_flush()
            less = opened(RedisBackend(endpoint, f"without {right}"))
            store = opened(RedisStore(endpoint, f"without {right}"))
            assert fails(less, store), f"+{right} is not needed"
            raw.execute_command("ACL", "SETUSER", "rdzv", f"+{right}")
        # Nothing outside its keys.
        elsewhere = opened(RedisBackend(endpoint, "run", RedisOptions(key_prefix="other")))
        with pytest.raises(RendezvousConnectionError, match="ACL lacks a right"):
            elsewhere.set_state(b"x")
    finally:
        raw.execute_command("ACL", "DELUSER", "rdzv")


def test_every_key_has_its_time_and_is_gone_after_it(server: Any, raw: Any, opened: Any) -> None:
    runs = [f"run {number}" for number in range(200)]
    for run in runs:
        backend = RedisBackend(server.endpoint(), run, SHORT_LIFE)
        store = RedisStore(server.endpoint(), run, options=SHORT_LIFE)
        backend.set_state(b"1")
        backend.announce(Entry("node", b"", "round"), TTL_SECONDS, Question())
        store.set("key", "value")
        store.queue_push("queue", "value")
        backend.close()
        store.close()
    keys = list(raw.scan_iter(count=1000))
    assert len(keys) > len(runs)
    pipeline = raw.pipeline()
    for key in keys:
        pipeline.pttl(key)
    times = dict(zip(keys, pipeline.execute(), strict=True))
    assert [key for key, time_ms in times.items() if time_ms == -1] == []
    # What is remembered of operations lives longer than such a short-lived run.
    lasting = {key for key, time_ms in times.items() if time_ms > 2000}
    assert all(b":operation:" in key for key in lasting)


def test_a_beat_keeps_the_keys_of_the_store(server: Any, raw: Any, opened: Any) -> None:
    options = RedisOptions(outage_timeout_seconds=30.0, closed_grace_seconds=0.1)
    backend = opened(RedisBackend(server.endpoint(), "run", options))
    store = opened(RedisStore(server.endpoint(), "run", options=options))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    store.set("key", "value")
    store.queue_push("queue", "value")
    kept = [key for key in raw.scan_iter() if b":operation:" not in key]
    for key in kept:
        raw.pexpire(key, 5000)
    backend.beat("node", TTL_SECONDS, Question())
    assert min(raw.pttl(key) for key in kept) > 20_000


def test_a_server_that_may_evict_is_warned_of(
    server: Any, raw: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    backend = opened(RedisBackend(server.endpoint(), "run"))
    backend.open()
    assert caplog.text == ""
    raw.config_set("maxmemory", "100mb")
    raw.config_set("maxmemory-policy", "volatile-lru")
    try:
        backend.open()
        assert "maxmemory-policy volatile-lru" in caplog.text
    finally:
        raw.config_set("maxmemory-policy", "noeviction")
        raw.config_set("maxmemory", "0")


def test_errors_say_where_and_what_to_do(server: Any, raw: Any, opened: Any) -> None:
    host, port = server.address
    refused = opened(RedisBackend(f"redis://u:hunter22@{host}:{port}", "run"))
    with pytest.raises(RendezvousConnectionError) as caught:
        refused.open()
    assert "hunter22" not in str(caught.value)
    assert f"{host}:{port}" in str(caught.value)
    assert "password_file" in str(caught.value)
    nobody = opened(RedisBackend("127.0.0.1:1", "run"))
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1"):
        nobody.get_state()
    mine = opened(RedisBackend(server.endpoint(), "run"))
    raw.set(RedisConnections(server.endpoint(), "run", RedisOptions()).base + b"state", "x")
    with pytest.raises(RendezvousStateError, match="WRONGTYPE"):
        mine.get_state()
    with pytest.raises(RendezvousStateError):
        mine.set_state(b"x")
    raw.flushall()
    base = RedisConnections(server.endpoint(), "run", RedisOptions()).base
    mine.announce(Entry("node", b""), TTL_SECONDS, Question())
    raw.hset(base + b"entries", "node", "garbage")
    with pytest.raises(RendezvousStateError, match="has not written"):
        mine.entries()


def test_options_in_the_url_cannot_break_us(
    server: Any, raw: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    host, port = server.address
    odd = "decode_responses=true&socket_timeout=0.0001&retry_on_timeout=true&max_connections=1"
    backend = opened(RedisBackend(f"redis://{host}:{port}/1?{odd}&client_name=me", "run"))
    store = opened(RedisStore(f"redis://{host}:{port}/1?{odd}", "run"))
    use_all(backend, store)
    assert "decode_responses, max_connections, retry_on_timeout, socket_timeout" in caplog.text
    assert raw.dbsize() == 0, "the database number counts"


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "no endpoint"),
        ("http://host", "no endpoint"),
        ("host:port", "port"),
        ("redis://host:99999999", "port"),
        ("redis+sentinel://host:26379", "name of a master"),
        ("redis+sentinel://host:x/mymaster", "no host and port"),
        ("redis+cluster://", "host is missing"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(endpoint: str, says: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=says):
        RedisBackend(endpoint, "run")


def test_the_cost_of_a_beat_does_not_grow_with_the_nodes(
    server: Any, raw: Any, opened: Any
) -> None:
    costs = []
    for nodes in (8, 128):
        backend = opened(RedisBackend(server.endpoint(), f"{nodes} nodes"))
        backend.set_state(b"document")
        for number in range(nodes):
            backend.announce(Entry(f"node{number}", b"", "round"), TTL_SECONDS, Question())
        raw.config_resetstat()
        for number in range(8):
            backend.beat(f"node{number}", TTL_SECONDS, Question("node0", "round"))
        stats = raw.info("commandstats")
        costs.append({name: one["calls"] for name, one in stats.items() if "evalsha" in name})
        total = sum(one["calls"] for name, one in stats.items() if "config" not in name)
        costs[-1]["all"] = total
    assert costs[0] == costs[1]
    assert costs[0]["cmdstat_evalsha"] == 8


def test_closing_ends_a_wait(server: Any, opened: Any) -> None:
    backend = opened(RedisBackend(server.endpoint(), "run to be closed"))
    waiting = Background(lambda: backend.wait_for_change(None, TTL_SECONDS)).still_blocked()
    backend.close()
    with pytest.raises(RendezvousConnectionError):
        waiting.result()
    assert backend.get_state() is None, "it opens anew"


def test_nothing_is_logged_of_a_server_that_is_well(
    caplog: pytest.LogCaptureFixture, server: Any, opened: Any
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rdzv"):
        backend = opened(RedisBackend(server.endpoint(), "quiet"))
        backend.open()
        backend.get_state()
    assert caplog.records == []


@pytest.mark.parametrize(
    ("endpoint", "route"),
    [
        ("host", ("host", 6379)),
        ("host:7", ("host", 7)),
        ("redis://host/2", ("host", 6379)),
        ("rediss://u:p@host:8", ("host", 8)),
        ("unix:///run/redis.sock?db=1", None),
        ("redis+sentinel://a:1,b:2/mymaster/0", ("a", 1)),
        ("redis+cluster://a,b:2", ("a", 6379)),
    ],
)
def test_every_documented_kind_of_endpoint_is_taken(endpoint: str, route: object) -> None:
    assert RedisBackend(endpoint, "run").route() == route


@pytest.mark.parametrize(
    "endpoint",
    [
        "redis://user:hunter22/x@host:6379",
        "redis+sentinel://user:hunter22/x@host:1/m",
        "redis+cluster://user:hunter22/x@h:26379",
        "redis://user:hunter22\u2100@host",
        "redis://:hunter22[a]@host",
    ],
)
def test_a_refusal_shows_no_password(endpoint: str) -> None:
    said, cause = shown_of(endpoint)
    assert "hunter22" not in said
    assert cause is None
    assert "hunter22" not in repr(RedisOptions(password="hunter22"))


def shown_of(endpoint: str) -> tuple[str, BaseException | None]:
    """What is said of an endpoint: in the refusal and its cause, or where it is shown later."""
    try:
        return RedisBackend(endpoint, "run").endpoint, None
    except RendezvousSettingsError as error:
        return str(error), error.__cause__


def test_a_cluster_that_is_away_is_a_connection_error(opened: Any) -> None:
    for endpoint in ("redis+cluster://127.0.0.1:1", "redis+cluster://127.0.0.1:1,127.0.0.1:2"):
        with pytest.raises(RendezvousConnectionError):
            opened(RedisBackend(endpoint, "run")).get_state()


def test_an_entry_that_was_evicted_is_lost_and_no_damage(
    server: Any, raw: Any, opened: Any
) -> None:
    backend = opened(RedisBackend(server.endpoint(), "run"))
    for name in "abc":
        backend.announce(Entry(name, b""), TTL_SECONDS, Question())
    raw.delete(RedisConnections(server.endpoint(), "run", RedisOptions()).base + b"entries")
    backend.announce(Entry("b", b""), TTL_SECONDS, Question())
    assert [row.entry.node_id for row in backend.entries()] == ["b"]


def test_want_of_memory_is_no_wrong_number(server: Any, raw: Any, opened: Any) -> None:
    store = opened(RedisStore(server.endpoint(), "run"))
    store.set_timeout(timedelta(seconds=0.3))
    raw.config_set("maxmemory", "1")
    try:
        with pytest.raises(dist.DistNetworkError, match="maxmemory"):
            store.add("key", 1)
    finally:
        raw.config_set("maxmemory", "0")
    assert store.add("key", 1) == 1


def test_a_write_without_the_right_to_wake_is_an_error(server: Any, raw: Any, opened: Any) -> None:
    raw.execute_command(*["ACL", "SETUSER", "few", "on", ">secret", "~*", "&*", "+@all", "-xadd"])
    host, port = server.address
    try:
        backend = opened(RedisBackend(f"redis://few:secret@{host}:{port}", "run"))
        with pytest.raises(RendezvousConnectionError, match="ACL lacks a right"):
            backend.set_state(b"x")
        assert backend.get_state() is None
    finally:
        raw.execute_command("ACL", "DELUSER", "few")
