"""What a node of the etcd backend asks for, and what it hears without asking."""

from __future__ import annotations

import contextlib
import threading
import time
import uuid
from functools import partial
from typing import Any

import pyetcd  # type: ignore[import-untyped]
import pytest

from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question

from .etcd_servers import metric
from .operations import TTL_SECONDS, until

LONG_TTL_SECONDS = 600.0
"""A sixteenth of it is longer than a machine stalls."""


def by_itself(number: int) -> EtcdOptions:
    """What lets a node share nothing with others of this process, as if it were in one of its
    own."""
    return EtcdOptions(read_timeout_seconds=60.0 + number)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "etcd")


def test_the_cost_of_joining_and_of_a_beat_does_not_grow_with_the_nodes(
    server: Any, opened: Any
) -> None:
    joins, confirmations, beats = [], [], []
    question = Question("node0", "round")
    for nodes in (8, 128):
        run_id = f"{nodes} nodes {uuid.uuid4().hex}"
        backend = opened(EtcdRendezvousBackend(server.endpoint(), run_id))
        backend.set_state(b"document")
        for number in range(nodes - 8):
            backend.announce(Entry(f"node{number}", b"", "round"), TTL_SECONDS, Question())
        newcomers = {
            f"new{number}": opened(
                EtcdRendezvousBackend(server.endpoint(), run_id, by_itself(1 + number))
            )
            for number in range(8)
        }
        before = handled(server)
        for name, node in newcomers.items():
            node.announce(Entry(name, b""), LONG_TTL_SECONDS, question)
        joined = handled(server)
        for name, node in newcomers.items():
            node.announce(Entry(name, b"confirms", "round"), LONG_TTL_SECONDS, question)
        ages = [node._follower.ages for node in newcomers.values()]
        until(partial(_all_heard, ages))
        confirmed = handled(server)
        for name, node in newcomers.items():
            node._fresh.clear()  # as if a sixteenth of the time had passed
            node.beat(name, LONG_TTL_SECONDS, question)
        joins.append(difference(before, joined))
        confirmations.append(difference(joined, confirmed))
        beats.append(difference(confirmed, handled(server)))
    # Eight nodes each: the run's lease, the document's, one of their own, and an entry.
    once = {"LeaseKeepAlive": 8, "LeaseTimeToLive": 8, "LeaseGrant": 8, "Txn": 8}
    assert joins == [once, once]
    # A lease that is that young is not kept alive. Who runs begins to watch, and looks once then.
    assert confirmations == [{"Txn": 16, "Watch": 8}] * 2
    assert beats == [{"LeaseKeepAlive": 8, "Txn": 8}] * 2


def test_a_lease_that_was_kept_alive_just_now_is_not_kept_alive_again_unless_it_is_another(
    server: Any, opened: Any
) -> None:
    node = opened(EtcdRendezvousBackend(server.endpoint(), "fresh"))
    other = opened(EtcdRendezvousBackend(server.endpoint(), "fresh"))
    entry = Entry("node", b"")
    node.announce(entry, LONG_TTL_SECONDS, Question())
    before = handled(server)
    node.beat("node", LONG_TTL_SECONDS, Question())
    assert difference(before, handled(server)).get("LeaseKeepAlive", 0) == 0
    before = handled(server)
    node.beat("node", 2 * LONG_TTL_SECONDS, Question())
    asked = difference(before, handled(server))
    assert (asked["LeaseKeepAlive"], asked["LeaseGrant"]) == (1, 1), "it lives for another time"
    other.withdraw("node", LONG_TTL_SECONDS)
    assert not node.beat("node", 2 * LONG_TTL_SECONDS, Question()).present
    assert node.announce(entry, 2 * LONG_TTL_SECONDS, Question()).live == 1
    assert [listed.withdrawn for listed in node.entries()] == [False]


def test_who_waits_again_and_again_asks_for_nothing(server: Any, opened: Any) -> None:
    writer = opened(EtcdRendezvousBackend(server.endpoint(), "waiting"))
    node = opened(EtcdRendezvousBackend(server.endpoint(), "waiting"))
    _, token, _ = writer.set_state(b"0")
    before = handled(server)
    for number in range(1, 5):
        waiting = Background(partial(node.wait_for_change, token, TTL_SECONDS)).still_blocked()
        found = writer.set_state(str(number).encode(), token)[:2]
        assert waiting.result() == found
        token = found[1]
    asked = difference(before, handled(server))
    assert asked == {"Watch": 1, "Txn": 1 + 4}, "one watch, one look, and what was written"


def test_who_looks_and_then_waits_asks_for_a_watch_and_one_look(server: Any, opened: Any) -> None:
    writer = opened(EtcdRendezvousBackend(server.endpoint(), "looking"))
    node = opened(EtcdRendezvousBackend(server.endpoint(), "looking"))
    before = handled(server)
    assert node.look_and_watch() is None
    assert node.wait_for_change(None, 0.01) is None
    assert difference(before, handled(server)) == {"Watch": 1, "Txn": 2}, "at the end of a wait"
    before = handled(server)
    waiting = Background(partial(node.wait_for_change, None, TTL_SECONDS)).still_blocked()
    assert difference(before, handled(server)) == {}
    token = writer.set_state(b"0")[1]
    assert waiting.result() == (b"0", token)
    for number in range(20):
        token = writer.set_state(str(number).encode(), token)[1]
        assert node.look_and_watch() == (str(number).encode(), token), "of before the question"
    # What is there already when a watch begins.
    stranger = opened(EtcdRendezvousBackend(server.endpoint(), "looking", by_itself(1)))
    before = handled(server)
    assert stranger.look_and_watch() == (b"19", token)
    pulse = stranger.announce(Entry("node", b""), TTL_SECONDS, Question(ageless=token))
    assert (pulse.token, pulse.state_age_seconds) == (token, None)
    asked = difference(before, handled(server))
    assert asked == {"Watch": 1, "LeaseKeepAlive": 1, "LeaseGrant": 1, "Txn": 2}
    assert stranger.beat("node", TTL_SECONDS, Question(ageless="other")).state_age_seconds >= 0.0


def test_a_look_is_not_of_before_a_watch_was_renewed(server: Any, opened: Any) -> None:
    """What was written between the two, the old one has not told and the new one not yet seen."""
    node = opened(EtcdRendezvousBackend(server.endpoint(), "renewing"))
    assert node.look_and_watch() is None
    watch = node._follower._watch(None)
    with watch._changed:
        looking = Background(lambda: watch.look(lambda: False)).still_blocked()
        watch._asked_at = time.monotonic()
    assert looking.result() is None, "whoever looks has to ask"


def test_who_waits_for_the_roster_is_told_and_does_not_look_again(server: Any, opened: Any) -> None:
    node = opened(EtcdRendezvousBackend(server.endpoint(), "roster"))
    other = opened(EtcdRendezvousBackend(server.endpoint(), "roster"))
    _, token, _ = node.set_state(b"0")
    other.announce(Entry("other", b""), LONG_TTL_SECONDS, Question())
    revision = node.announce(Entry("node", b""), TTL_SECONDS, Question()).revision
    before = handled(server)
    waiting = Background(partial(node.wait_for_change, token, TTL_SECONDS, revision))
    waiting.still_blocked()
    assert difference(before, handled(server)) == {"Watch": 1, "Txn": 1}
    before = handled(server)
    other.announce(Entry("other", b"changed"), LONG_TTL_SECONDS, Question())
    assert waiting.result() is None
    assert difference(before, handled(server)) == {"Txn": 1}, "what was written"


def test_nodes_of_one_process_share_a_connection_and_a_watch(server: Any, opened: Any) -> None:
    threads = set(threading.enumerate())
    nodes = [opened(EtcdRendezvousBackend(server.endpoint(), "shared")) for _ in range(4)]
    _, token, _ = nodes[0].set_state(b"0")
    assert [node.get_state() for node in nodes] == [(b"0", token)] * 4
    assert len({id(node._etcd._links) for node in nodes}) == 1
    before = handled(server)
    waits = [Background(partial(node.wait_for_change, token, TTL_SECONDS)) for node in nodes]
    for wait in waits:
        wait.still_blocked()
    assert difference(before, handled(server)) == {"Watch": 1, "Txn": 1}
    nodes[0].close()
    with pytest.raises(RendezvousConnectionError, match="close"):
        waits[0].result()
    found = nodes[1].set_state(b"1", token)[:2]
    assert [wait.result() for wait in waits[1:]] == [found] * 3, "one that was closed ended others"
    again = Background(partial(nodes[0].wait_for_change, found[1], TTL_SECONDS)).still_blocked()
    last = nodes[1].set_state(b"2", found[1])[:2]
    assert again.result() == last, "it opens anew"
    for node in nodes:
        node.close()
    until(lambda: set(threading.enumerate()) <= threads)


def handled(server: Any) -> dict[str, float]:
    """How many calls of each method the server has been asked for."""
    found: dict[str, float] = {}
    for labels, value in metric(server.endpoint(), "grpc_server_started_total").items():
        method = labels.partition('grpc_method="')[2].partition('"')[0]
        found[method] = found.get(method, 0) + value
    return found


def difference(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    return {name: n - before.get(name, 0) for name, n in after.items() if n != before.get(name, 0)}


def test_ages_agree_between_nodes_that_beat(server: Any, opened: Any) -> None:
    nodes = [
        opened(EtcdRendezvousBackend(server.endpoint(), "ages", by_itself(number)))
        for number in range(4)
    ]
    for number, node in enumerate(nodes):
        node.announce(Entry(f"node{number}", b""), TTL_SECONDS, Question())
        node.beat(f"node{number}", TTL_SECONDS, Question())
    token, spreads = None, []
    for _ in range(9):
        until(lambda: _all_heard([node._follower.ages for node in nodes]))
        token = nodes[0].set_state(b"x", token)[1]
        written_at = []
        for number, node in enumerate(nodes):
            pulse = node.beat(f"node{number}", TTL_SECONDS, Question())
            assert pulse.token == token
            written_at.append(time.monotonic() - pulse.state_age_seconds)
        spreads.append(max(written_at) - min(written_at))
    # A machine that is stalled may miss it once in a while, not mostly.
    assert sorted(spreads)[len(spreads) // 2] < 0.05, spreads


def test_a_node_that_has_not_heard_knows_the_age_by_the_lease(server: Any, opened: Any) -> None:
    writer = opened(EtcdRendezvousBackend(server.endpoint(), "old document"))
    writer.set_state(b"x")
    threading.Event().wait(2.2)
    stranger = opened(EtcdRendezvousBackend(server.endpoint(), "old document", by_itself(1)))
    age = stranger.beat("nobody", TTL_SECONDS, Question()).state_age_seconds
    assert 1.0 <= age <= 10.0


def _all_heard(ages: list[Any]) -> bool:
    return all(each._since_revision for each in ages)


def test_leases_that_are_over_are_forgotten(server: Any, opened: Any) -> None:
    backend = opened(EtcdRendezvousBackend(server.endpoint(), uuid.uuid4().hex))
    host, port = server.address
    with contextlib.closing(pyetcd.client(host, port, timeout=5.0)) as client:
        for number in range(3):
            backend.announce(Entry("node", b""), 60.0, Question())
            client.revoke_lease(backend._rows["node"].lease)
            backend.announce(Entry("node", str(number).encode()), 8.0, Question())
            backend.withdraw("node", 60.0)
    assert backend._fresh == {}
    backend.announce(Entry("node", b""), 60.0, Question())
    assert [lease for lease, *_ in backend._fresh.values()] == [backend._rows["node"].lease]
