"""The Redis backend and store: permissions, lifetimes, costs, errors."""

from __future__ import annotations

import logging
import re
import shlex
from collections.abc import Callable, Iterator
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
    RendezvousStateError,
)
from rdzv.ports import Entry, Question
from rdzv.stores.redis import RedisStore

from .operations import TTL_SECONDS, use_all

DOCS = Path(__file__).resolve().parents[2] / "docs" / "redis.md"
SHORT_LIFE = RedisOptions(outage_timeout_seconds=0.4, closed_grace_seconds=0.1)
LONG_LIFE = RedisOptions(outage_timeout_seconds=30.0, closed_grace_seconds=0.1)
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


def fails(backend: RedisBackend, store: Any) -> bool:
    """Whether anything does, once what is done at the start has been left out."""
    try:
        use_all(backend, store, 0.3, start=False)
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
            # Without a waking its writer repeats itself, and finds that it was done.
            assert right == "publish" or fails(less, store), f"+{right} is not needed"
            with pytest.raises(RendezvousConnectionError, match=rf"\b{right}\b.*ACL lacks a right"):
                less.open()
            raw.execute_command("ACL", "SETUSER", "rdzv", f"+{right}")
        # Nothing outside its keys.
        elsewhere = opened(RedisBackend(endpoint, "run", RedisOptions(key_prefix="other")))
        for call in (elsewhere.open, lambda: elsewhere.set_state(b"x")):
            with pytest.raises(RendezvousConnectionError, match="ACL lacks a right"):
                call()
    finally:
        raw.execute_command("ACL", "DELUSER", "rdzv")


def test_every_key_has_its_time(server: Any, raw: Any, opened: Any) -> None:
    """That none is left in the end, ``test_redis_cost.py`` tells of two hundred runs."""
    backend = opened(RedisBackend(server.endpoint(), "run", LONG_LIFE))
    use_all(backend, opened(RedisStore(server.endpoint(), "run", options=LONG_LIFE)))
    times = {key: raw.pttl(key) for key in raw.scan_iter(count=1000)}
    assert len(times) > 8
    # A little is added, so that not every sign of life has to touch every key.
    most_ms = max(LONG_LIFE.lifetime_seconds * 9 / 8, 2 * TTL_SECONDS) * 1000
    assert [key for key, time_ms in times.items() if not 0 < time_ms <= most_ms] == [], times


def test_each_sign_of_life_keeps_all_keys(server: Any, raw: Any, opened: Any) -> None:
    backend = opened(RedisBackend(server.endpoint(), "run", LONG_LIFE))
    store = opened(RedisStore(server.endpoint(), "run", options=LONG_LIFE))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    store.set("key", "value")
    store.queue_push("queue", "value")
    store.queue_push("other queue", "value")
    kept = list(raw.scan_iter())
    signs_of_life: list[Callable[[], Any]] = [
        lambda: backend.beat("node", TTL_SECONDS, Question()),
        lambda: backend.announce(Entry("node", b""), TTL_SECONDS, Question()),
        lambda: backend.set_state(b"1"),
        lambda: store.set("another key", "value"),
        lambda: store.queue_pop("queue"),
    ]
    for sign_of_life in signs_of_life:
        for key in kept:
            raw.pexpire(key, 5000)
        sign_of_life()
        assert min(raw.pttl(key) for key in kept) > 20_000


def test_a_shorter_life_shortens_nobodys(server: Any, raw: Any, opened: Any) -> None:
    for options in (RedisOptions(), SHORT_LIFE):
        store = opened(RedisStore(server.endpoint(), "run", options=options))
        backend = opened(RedisBackend(server.endpoint(), "run", options))
        backend.set_state(b"1")
        backend.announce(Entry("node", b"", "round"), TTL_SECONDS, Question())
        store.set("key", "value")
    # Also what only the one of short life has made.
    store.queue_push("queue", "value")
    backend.announce(Entry("node", b"", "later"), TTL_SECONDS, Question())
    assert min(raw.pttl(key) for key in raw.scan_iter()) > 600_000


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


@pytest.mark.parametrize(("nodes", "queues"), [(128, 0), (8, 1000)])
def test_the_cost_of_a_beat_does_not_grow_with_what_is_stored(
    server: Any, raw: Any, opened: Any, nodes: int, queues: int
) -> None:
    costs = []
    for number_of_nodes, number_of_queues in ((8, 0), (nodes, queues)):
        run = f"{number_of_nodes} nodes and {number_of_queues} queues"
        backend = opened(RedisBackend(server.endpoint(), run))
        store = opened(RedisStore(server.endpoint(), run))
        backend.set_state(b"document")
        for number in range(number_of_nodes):
            backend.announce(Entry(f"node{number}", b"", "round"), TTL_SECONDS, Question())
        for number in range(number_of_queues):
            store.queue_push(f"queue{number}", "value")
        raw.config_resetstat()
        for number in range(8):
            backend.beat(f"node{number}", TTL_SECONDS, Question("node0", "round"))
        stats = raw.info("commandstats")
        costs.append({name: one["calls"] for name, one in stats.items() if "config" not in name})
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
    caplog: pytest.LogCaptureFixture, server: Any, raw: Any, opened: Any
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rdzv"):
        backend = opened(RedisBackend(server.endpoint(), "quiet"))
        backend.open()
        backend.get_state()
    assert caplog.records == []
    assert raw.dbsize() == 0, "what was tried at the start has left something"


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
