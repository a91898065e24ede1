"""The etcd backend and store: endpoints, errors, costs, what stays behind, clients of users."""

from __future__ import annotations

import contextlib
import logging
import math
import random
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pyetcd  # type: ignore[import-untyped]
import pytest
import torch.distributed as dist

from rdzv import codec
from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions, base_of, lease_of
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.store_kit import Background
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
)
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .operations import TTL_SECONDS, run_apart, until, use_all

SHORT_LIFE = EtcdOptions(outage_timeout_seconds=2.0, closed_grace_seconds=0.4)
"""A lease of four seconds: a machine that stalls for less loses nothing."""
EXPIRY_SECONDS_MAX = 20.0


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "etcd")


@pytest.fixture
def raw(server: Any) -> Iterator[Any]:
    """A client of somebody else's, on an empty server."""
    host, port = server.address
    with contextlib.closing(pyetcd.client(host, port, timeout=5.0)) as client:
        client.delete_prefix("rdzv/")
        yield client


def keys_of(raw: Any) -> dict[bytes, int]:
    """All keys of all runs with their leases."""
    return {meta.key: meta.lease_id for _, meta in raw.get_prefix("rdzv/")}


@pytest.mark.full
def test_every_key_has_a_lease_and_is_gone_after_it(server: Any, raw: Any, opened: Any) -> None:
    backend = EtcdRendezvousBackend(server.endpoint(), "run", SHORT_LIFE)
    store = EtcdStore(server.endpoint(), "run", options=SHORT_LIFE)
    use_all(backend, store)
    backend.announce(Entry("node", b"", "round"), 1.0, Question())
    store.queue_push("queue", "value")
    leases = keys_of(raw)
    assert len(leases) > 8
    assert all(leases.values()), leases
    backend.close()
    store.close()
    # The tombstone of use_all() was taken back, so all are short-lived.
    until(lambda: not keys_of(raw))


def test_beats_keep_the_keys_of_the_store_and_write_nothing(
    server: Any, raw: Any, opened: Any
) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "run", SHORT_LIFE))
    store = opened(EtcdStore(server.endpoint(), "run", options=SHORT_LIFE))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    store.set("key", "value")
    store.queue_push("queue", "value")
    before = keys_of(raw)
    revision = raw.get_response("x").header.revision
    granted = raw.get_lease_info(lease_of(base_of("run", SHORT_LIFE))).grantedTTL
    end = time.monotonic() + 2 * granted
    while time.monotonic() < end:
        backend.beat("node", TTL_SECONDS, Question())
        threading.Event().wait(0.1)
    assert keys_of(raw) == before
    assert raw.get_response("x").header.revision == revision


@pytest.mark.full
def test_a_lease_that_another_node_made_is_kept_by_its_own_time(
    server: Any, raw: Any, opened: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hasty = EtcdRendezvousBackend(server.endpoint(), "run", SHORT_LIFE)
    hasty.announce(Entry("hasty", b""), TTL_SECONDS, Question())
    hasty.close()
    patient = opened(EtcdRendezvousBackend(server.endpoint(), "run"))
    _, token, _ = patient.set_state(b"1")
    assert "the same outage_timeout" in caplog.text
    end = time.monotonic() + 2 * SHORT_LIFE.lease_seconds
    while time.monotonic() < end:
        assert patient.beat("patient", TTL_SECONDS, Question()).token == token
        threading.Event().wait(0.1)


@pytest.mark.full
def test_a_forked_process_makes_connections_of_its_own(server: Any, opened: Any) -> None:
    program = (
        "import os, sys\n"
        "from rdzv.backends.etcd import EtcdRendezvousBackend\n"
        "backend = EtcdRendezvousBackend(sys.argv[1], 'forked')\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    backend.set_state(b'by the child')\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert backend.get_state()[0] == b'by the child'\n"
    )
    run_apart(program, server.endpoint())


def test_a_state_of_4096_nodes_fits_the_default_limit(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "large"))
    state = random.Random(1).randbytes(codec.STATE_BYTES_MAX)
    token = backend.set_state(state)[1]
    assert backend.get_state() == (state, token)


def test_what_is_too_large_says_so_at_once(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "too large"))
    with pytest.raises(RendezvousConnectionError, match="max-request-bytes"):
        backend.set_state(b"x" * 2_000_000)
    store = opened(EtcdStore(server.endpoint(), "too large"))
    with pytest.raises(ValueError, match="value_bytes_max"):
        store.set("k", b"x" * 2_000_000)


def test_many_keys_and_much_data_are_set_and_read_in_parts(server: Any, opened: Any) -> None:
    store = opened(EtcdStore(server.endpoint(), "many", timedelta(seconds=60)))
    keys = [f"key{number}" for number in range(1000)]
    store.multi_set(keys, keys)
    assert store.multi_get(keys) == [key.encode() for key in keys]
    assert store.check(keys)
    large = {f"large{number}": random.Random(number).randbytes(900_000) for number in range(8)}
    store.multi_set(list(large), list(large.values()))
    assert store.multi_get(list(large)) == list(large.values())
    assert store.num_keys() == 1008


def test_counting_together_is_exact(server: Any, opened: Any) -> None:
    stores = [opened(EtcdStore(server.endpoint(), "sum", timedelta(seconds=60))) for _ in range(8)]
    totals: list[int] = []

    def count(store: Any) -> None:
        totals.extend(store.add("n", 1) for _ in range(25))

    threads = [threading.Thread(target=count, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(totals) == list(range(1, 201))


def test_a_forced_compaction_disturbs_nobody(server: Any, raw: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "compacted"))
    store = opened(EtcdStore(server.endpoint(), "compacted", timedelta(seconds=30)))
    _, token, _ = backend.set_state(b"1")
    revision = backend.announce(Entry("a", b""), TTL_SECONDS, Question()).revision
    waits = [
        Background(lambda: backend.wait_for_change(token, TTL_SECONDS)),
        Background(lambda: backend.wait_for_change(token, TTL_SECONDS, revision)),
        Background(lambda: store.get("k")),
    ]
    for wait in waits:
        wait.still_blocked()
    for number in range(20):
        raw.put("somebody else's", str(number))
    raw.compact(raw.get_response("x").header.revision)
    found = backend.set_state(b"2", token)[:2]
    store.set("k", "v")
    assert [wait.result() for wait in waits] == [found, found, b"v"]
    # A watch from a revision that is compacted away ends, and the next look finds what is there.
    assert [
        event
        for event in backend._etcd.watch(b"rdzv/", b"rdzv0", 1, 5.0, puts=False)
        if not isinstance(event, int)
    ] == []
    assert backend.wait_for_change(token, TTL_SECONDS) == found


def test_errors_say_where_and_what_to_do(server: Any, raw: Any, opened: Any) -> None:
    nobody = opened(EtcdRendezvousBackend("127.0.0.1:1", "run"))
    with pytest.raises(RendezvousConnectionError, match=r"127\.0\.0\.1:1.*server runs"):
        nobody.get_state()
    base = base_of("run", EtcdOptions())
    mine = opened(EtcdRendezvousBackend(server.endpoint(), "run"))
    raw.put(base + b"s", "x")
    with pytest.raises(RendezvousStateError, match="has not written"):
        mine.get_state()
    with pytest.raises(RendezvousStateError):
        mine.set_state(b"x")
    raw.delete_prefix("rdzv/")
    raw.put(base + b"n/node", "garbage")
    with pytest.raises(RendezvousStateError, match="has not written"):
        mine.entries()
    with pytest.raises(RendezvousStateError, match="has not written"):
        mine.beat("node", TTL_SECONDS, Question())


def test_closing_ends_waits_and_leaves_no_thread(server: Any, opened: Any) -> None:
    threads = set(threading.enumerate())
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "run to be closed"))
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    backend.set_state(b"1")
    backend.beat("node", TTL_SECONDS, Question())
    token = backend.get_state()[1]
    waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS)).still_blocked()
    backend.close()
    with pytest.raises(RendezvousConnectionError, match="close"):
        waiting.result()
    until(lambda: set(threading.enumerate()) <= threads)
    assert backend.get_state() == (b"1", token), "it opens anew"


def test_closing_at_any_moment_gives_documented_errors_only(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "closed again and again"))
    store = opened(EtcdStore(server.endpoint(), "closed again and again", timedelta(seconds=5)))
    backend.set_state(b"1")
    end, faults = time.monotonic() + 3.0, []

    def ask(number: int) -> None:
        while time.monotonic() < end:
            try:
                backend.announce(Entry(f"node{number}", b""), TTL_SECONDS, Question())
                backend.beat(f"node{number}", TTL_SECONDS, Question())
                backend.wait_for_change(backend.get_state()[1], 0.02)
                store.add("n", 1)
            except (RendezvousConnectionError, dist.DistNetworkError):
                continue
            except BaseException as error:
                faults.append(error)
                return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    while time.monotonic() < end:
        backend.close()
        store._client.close()
        threading.Event().wait(random.uniform(0.0, 0.05))
    for thread in threads:
        thread.join()
    assert faults == []


def test_nothing_is_logged_of_a_server_that_is_well(
    caplog: pytest.LogCaptureFixture, server: Any, opened: Any
) -> None:
    with caplog.at_level(logging.DEBUG, logger="rdzv"):
        backend = opened(EtcdRendezvousBackend(server.endpoint(), "quiet"))
        backend.open()
        backend.get_state()
    assert caplog.records == []


def test_a_client_that_the_user_brings_is_used_and_left_open(server: Any, raw: Any) -> None:
    backend = EtcdRendezvousBackend("shown.example:1", "brought", client=raw)
    store = EtcdStore("shown.example:1", "brought", client=raw)
    use_all(backend, store)
    backend.close()
    store.close()
    assert raw.get("rdzv/")[0] is None, "it was closed"


@pytest.mark.parametrize(
    ("endpoint", "route"),
    [
        ("host", ("host", 2379)),
        ("host:7", ("host", 7)),
        ("a:1;b:2", ("a", 1)),
        ("a:1,b:2", ("a", 1)),
        ("etcd://host", ("host", 2379)),
        ("http://a:1;http://b:2", ("a", 1)),
        ("etcd://u:p%2C@a:1,b:2", ("a", 1)),
        ("etcd://u:p%3Fx%40@a:1", ("a", 1)),
        ("etcds://a:1?server_name=x@y", ("a", 1)),
        ("etcds://host:8?server_name=x", ("host", 8)),
        ("[::1]:5", ("::1", 5)),
    ],
)
def test_every_documented_kind_of_endpoint_is_taken(endpoint: str, route: object) -> None:
    assert EtcdRendezvousBackend(endpoint, "run").route() == route


@pytest.mark.parametrize(
    ("endpoint", "says"),
    [
        ("", "there is none"),
        (" ", "there is none"),
        ("etcd://u:hunter22?x@host:1", "%3F"),
        ("etcd://u:22?hunter22@host:1", "%3F"),
        ("etcd://u:22?hunter22=y@host:1", "%3F"),
        ("etcd://u:a@b?hunter22@host:1", "%3F"),
        ("host:1?port", "port is no option"),
        ("redis://host", "scheme"),
        ("etcd://a;etcds://b", "scheme"),
        ("host:port", "no host and port"),
        ("host:99999", "no host and port"),
        ("a:1;;b:2", "no host and port"),
        ("etcd://u@host", "belong together"),
        ("etcd://host?ca_cert=/ca", "etcds"),
        ("etcds://host?cert=/c", "belong together"),
        ("etcds://host?ca_cert=/no/such/file", "cannot be read"),
        ("etcds://host?password=x", "no option"),
        ("etcd://u:hunter22@ho st", "no host and port"),
    ],
)
def test_endpoints_that_cannot_work_are_refused(endpoint: str, says: str) -> None:
    with pytest.raises(RendezvousSettingsError, match=says) as caught:
        EtcdRendezvousBackend(endpoint, "run")
    assert "hunter22" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_names_of_torchs_options_are_taken() -> None:
    settings: Any = type("Settings", (), {"password": None, "key_prefix": "rdzv"})()
    for name in ("read_timeout", "keep_alive_interval", "outage_timeout", "closed_grace"):
        setattr(settings, f"{name}_seconds", 1.0)
    for names in (("cacert", "cert", "key"), ("ca_cert", "ssl_cert", "ssl_cert_key")):
        config = dict(zip(names, ("/ca", "/cert", "/key"), strict=True))
        options = EtcdOptions.from_settings(settings, {**config, "protocol": "https"})
        assert (options.ca_cert, options.cert, options.key) == ("/ca", "/cert", "/key")
        assert options.protocol == "https"
    assert math.ceil(options.lifetime_seconds) < options.lease_seconds
