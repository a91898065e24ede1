"""etcd: requests that come late, members that lag behind, processes that fork, what stays open."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pyetcd  # type: ignore[import-untyped]
import pytest

from rdzv.backends import etcd_follow
from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_channel import CALLS_MAX
from rdzv.backends.etcd_client import within
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .etcd_servers import EtcdProcess
from .operations import TTL_SECONDS, run_apart, until

NO_LEASE = 12345


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "etcd")


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        (lambda store: store.delete_key("k"), False),
        (lambda store: store.compare_set("k", "mine", "lost"), b"mine"),
    ],
    ids=["delete_key", "compare_set"],
)
def test_a_request_that_comes_after_its_repeat_changes_nothing(
    server: Any, opened: Any, change: Callable[[Any], object], answer: object
) -> None:
    store = opened(EtcdStore(server.endpoint(), "late", timedelta(seconds=30)))
    other = opened(EtcdStore(server.endpoint(), "late", timedelta(seconds=30)))
    other.set("k", "mine")
    etcd = store._client._etcd
    write, held = etcd.write, []

    def withhold(*request: Any) -> Any:
        """The server gets this one only later; meanwhile there is nothing to do."""
        held.append(request)
        etcd.write = write
        assert other.delete_key("k")
        raise RendezvousConnectionError("the answer was lost")

    etcd.write = withhold
    assert change(store) == answer
    other.set("k", "mine")
    (late,) = held
    assert not write(*late).succeeded
    assert other.get("k") == b"mine"


def test_a_forked_process_has_slots_of_its_own(server: Any) -> None:
    program = (
        "import os, sys\n"
        "from rdzv.stores.etcd import EtcdStore\n"
        "store = EtcdStore(sys.argv[1], 'forked store')\n"
        "store.add('n', 1)\n"
        "slots = store._client._slots\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    same = store.add('n', 1) != 2 or store._client._slots == slots\n"
        "    os._exit(int(same))\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert store.add('n', 1) == 3\n"
        "assert store._client._slots == slots\n"
    )
    run_apart(program, server.endpoint())


def test_a_forked_process_that_closes_ends_nothing_of_its_parents(server: Any) -> None:
    program = (
        "import os, sys, threading\n"
        "from rdzv.backends.etcd import EtcdRendezvousBackend\n"
        "backend = EtcdRendezvousBackend(sys.argv[1], 'forked and closed')\n"
        "token, found = backend.set_state(b'1')[1], []\n"
        "def wait():\n"
        "    found.append(backend.wait_for_change(token, 60.0))\n"
        "waiting = threading.Thread(target=wait)\n"
        "waiting.start()\n"
        "while not backend._follower.ages._since_revision:\n"
        "    threading.Event().wait(0.02)\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    backend.close()\n"
        "    os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert waiting.is_alive()\n"
        "written = backend.set_state(b'2', token)\n"
        "waiting.join()\n"
        "assert found == [written[:2]]\n"
        "backend.close()\n"
    )
    run_apart(program, server.endpoint())


def test_a_fork_while_another_thread_asks_leaves_no_lock_behind(server: Any) -> None:
    program = (
        "import os, signal, sys\n"
        "from rdzv.backends.etcd import EtcdRendezvousBackend\n"
        "from rdzv.stores.etcd import EtcdStore\n"
        "run = 'forked while locked'\n"
        "backend = EtcdRendezvousBackend(sys.argv[1], run)\n"
        "store = EtcdStore(sys.argv[1], run, beside=backend)\n"
        "backend.set_state(b'1')\n"
        "store.add('n', 1)\n"
        "with backend._etcd._lock, backend._follower._lock, store._client._lock:\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        signal.alarm(30)\n"
        "        store.set('k', b'1')\n"
        "        assert store.add('n', 1) == 2\n"
        "        assert backend.set_state(b'2', backend.get_state()[1])[2]\n"
        "        backend.close()\n"
        "        os._exit(0)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
        "assert backend.get_state()[0] == b'2'\n"
        "backend.close()\n"
    )
    run_apart(program, server.endpoint())


def test_a_node_that_is_closed_sends_no_other_to_the_next_member(server: Any, opened: Any) -> None:
    endpoint = f"{server.endpoint()};127.0.0.1:1"
    leaves, stays = (opened(EtcdRendezvousBackend(endpoint, "closed beside")) for _ in range(2))
    _, token, _ = leaves.set_state(b"1")
    revision = leaves.announce(Entry("node", b""), TTL_SECONDS, Question()).revision
    stays.get_state()
    links = stays._etcd._links
    wait = partial(leaves.wait_for_change, token, TTL_SECONDS, revision)
    waiting = Background(wait).still_blocked()
    until(lambda: leaves._etcd._streams)
    leaves.close()
    with pytest.raises(RendezvousConnectionError, match="close"):
        waiting.result()
    assert links is stays._etcd._links
    assert links.current == 0, "what was ended here was taken for a failure of the member"


def test_a_watch_that_was_closed_lets_nobody_wait_for_it(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "closed watch"))
    backend.beat("node", TTL_SECONDS, Question())
    watch = backend._follower._watch(None)
    backend.close()
    until(lambda: watch._thread is None)
    late = Background(partial(watch.wait, None, 0, 2 * TTL_SECONDS, lambda: False))
    assert late.result() is None


def test_a_watch_whose_thread_could_not_be_started_is_started_later(
    server: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    first, second = (opened(EtcdRendezvousBackend(server.endpoint(), "full")) for _ in range(2))
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            first.beat("first", TTL_SECONDS, Question())
    second.beat("second", TTL_SECONDS, Question())
    until(lambda: second._follower.ages._since_revision)


def test_a_watch_that_looks_while_it_is_closed_keeps_no_channel(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "closed while it looks"))
    watch = backend._follower._watch(None)
    read, looks, is_closed = watch._etcd.read, threading.Event(), threading.Event()

    def read_late(*operations: Any) -> Any:
        looks.set()
        is_closed.wait()
        return read(*operations)

    watch._etcd.read = read_late
    backend.beat("node", TTL_SECONDS, Question())
    looks.wait()
    backend.close()
    is_closed.set()
    until(lambda: watch._thread is None and watch._etcd._links is None)


def test_a_call_that_ends_while_silent_channels_are_looked_through_leaves_none_open(
    server: Any, opened: Any
) -> None:
    class EndsAtTheSecondLook(set[object]):
        looks = 0

        def __bool__(self) -> bool:
            self.looks += 1
            return self.looks == 1

    backend = opened(EtcdRendezvousBackend(server.endpoint(), "ends meanwhile"))
    backend.get_state()
    links = backend._etcd._links
    link = links.link()
    link.running = EndsAtTheSecondLook()
    links.failed(link, is_silent=True)
    links.link()
    assert links.silent == [link], "it was forgotten, and is open"
    links.link()
    assert links.silent == []
    with pytest.raises(ValueError, match="closed"):
        link.call("Range", backend._etcd.messages.RangeRequest(key=b"k"), 1.0, ())


def test_a_write_for_which_a_channel_was_closed_too_early_is_made(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "channel closed by another"))
    _, token, _ = backend.set_state(b"1")
    etcd, link_to = backend._etcd, backend._etcd._link
    closed: list[Any] = []

    def link_of_which_another_hears_nothing() -> Any:
        link = link_to()
        if not closed:
            closed.append(link)
            etcd._links.failed(link, is_silent=True)
            etcd._links.link()
        return link

    etcd._link = link_of_which_another_hears_nothing
    assert backend.set_state(b"2", token)[2]
    assert closed[0] is not link_to()


def test_a_member_that_lags_behind_tells_no_document_of_before(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "lagging"))
    _, first, _ = backend.set_state(b"1")
    _, token, _ = backend.set_state(b"2", first)
    connections = backend._follower._watch(None)._etcd
    lagging_at, watch = int(first.partition(":")[0]), connections.watch

    def watch_of_one_that_lags(key: bytes, end: Any, _: int, *rest: Any, **more: Any) -> Any:
        return watch(key, end, lagging_at, *rest, **more)

    connections.watch = watch_of_one_that_lags
    assert backend.wait_for_change(token, 1.0) is None
    waiting = Background(lambda: backend.wait_for_change(token, TTL_SECONDS)).still_blocked()
    found = backend.set_state(b"3", token)[:2]
    assert waiting.result() == found


def test_closing_ends_the_watch_on_a_channel_of_the_users(server: Any) -> None:
    host, port = server.address
    with contextlib.closing(pyetcd.client(host, port, timeout=5.0)) as client:
        backend = EtcdRendezvousBackend("shown.example:1", "brought and closed", client=client)
        backend.get_state()
        threads = set(threading.enumerate())
        backend.announce(Entry("node", b""), TTL_SECONDS, Question())
        backend.beat("node", TTL_SECONDS, Question())
        until(lambda: backend._follower.ages._since_revision)
        backend.close()
        until(lambda: set(threading.enumerate()) <= threads)


def test_a_watch_that_ends_by_its_deadline_is_no_failure(server: Any, opened: Any) -> None:
    etcd = opened(EtcdRendezvousBackend(f"{server.endpoint()};127.0.0.1:1", "over"))._etcd
    for _ in range(8):  # it is the server or the client that ends it
        list(etcd.watch(b"rdzv/", None, 0, 0.5, puts=True))
    assert etcd._links is not None
    assert etcd._links.current == 0, "the next member was asked"


def test_a_watch_that_ends_by_its_deadline_is_renewed_without_a_pause(
    server: Any, opened: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(etcd_follow, "WATCH_SECONDS_MAX", 1.0)
    monkeypatch.setattr(etcd_follow, "PAUSE_SECONDS_FIRST", 1000.0)
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "renewed"))
    connections = backend._follower._watch(None)._etcd
    watch, begun = connections.watch, []

    def counted(*arguments: Any, **more: Any) -> Any:
        begun.append(arguments)
        return watch(*arguments, **more)

    connections.watch = counted
    backend.beat("node", TTL_SECONDS, Question())
    until(lambda: len(begun) >= 3)


def test_a_client_that_its_user_has_closed_is_asked_once(server: Any) -> None:
    host, port = server.address
    client = pyetcd.client(host, port, timeout=5.0)
    client.close()
    backend: Any = EtcdRendezvousBackend("shown.example:1", "closed by its user", client=client)
    link, links = backend._etcd._link, []

    def counted(*arguments: Any) -> Any:
        links.append(link(*arguments))
        return links[-1]

    backend._etcd._link = counted
    with pytest.raises(RendezvousConnectionError, match="closed"):
        backend.get_state()
    assert len(links) == 1


def test_a_start_that_took_longer_than_its_lease_is_a_documented_error(
    server: Any, opened: Any
) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "stopped at the start"))
    backend._etcd.put = partial(backend._etcd.put, lease=NO_LEASE)
    with pytest.raises(RendezvousConnectionError, match="lease not found"):
        backend.open()


def test_a_token_that_cannot_be_etcds_loses(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), "strange tokens"))
    _, token, _ = backend.set_state(b"1")
    mark = token.partition(":")[2]
    for revision in ("0", "9" * 19, "\u0661", ""):
        assert backend.set_state(b"2", f"{revision}:{mark}") == (b"1", token, False)


def test_one_who_is_in_a_hurry_ends_nobody_elses_call(tmp_path: Path, opened: Any) -> None:
    with contextlib.closing(EtcdProcess(tmp_path)) as process:
        backend = opened(EtcdRendezvousBackend(process.endpoint(), "run"))
        _, token, _ = backend.set_state(b"1")
        etcd = backend._etcd
        process.pause()
        patient = Background(partial(backend.set_state, b"2", token))
        (link,) = etcd._links.links.values()
        until(lambda: link.running)
        with within(0.0), pytest.raises(RendezvousConnectionError, match="DEADLINE_EXCEEDED"):
            etcd.read(etcd.get(b"x"))
        process.resume()
        assert patient.result()[2], "a write of somebody else was given up"
        assert etcd._links.links == {}, "a new call would ask where nothing was heard"
        backend.get_state()
        assert etcd._links.silent == []


def test_calls_that_hang_do_not_keep_those_to_another_server(
    tmp_path: Path, server: Any, opened: Any
) -> None:
    with contextlib.closing(EtcdProcess(tmp_path)) as process:
        hanging = opened(EtcdRendezvousBackend(process.endpoint(), "run"))
        hanging.set_state(b"1")
        other = opened(EtcdRendezvousBackend(server.endpoint(), "run"))
        other.set_state(b"1")
        (link,) = hanging._etcd._links.links.values()
        process.pause()
        for _ in range(2 * CALLS_MAX):
            Background(hanging.get_state)
        until(lambda: len(link.running) >= CALLS_MAX)
        started = time.monotonic()
        assert other.get_state()[0] == b"1"
        assert time.monotonic() - started < hanging._etcd.options.request_seconds - 1.0
