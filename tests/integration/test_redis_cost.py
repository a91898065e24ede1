"""What a rendezvous costs a Redis server, as it counts itself, whatever the number of nodes."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import redis

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import RedisOptions
from rdzv.conformance.handler_kit import wait_until
from rdzv.conformance.plugin import server_or_not_run
from rdzv.conformance.store_kit import Background
from rdzv.ports import Entry, Question
from rdzv.stores.redis import RedisStore

from .operations import crowd, meet

ROUND_TRIPS_MAX = 4
"""Of a node that joins, outside waiting: reads the document, announces itself, confirms, reads the
address of rank 0."""
GROWTH_MAX = 1.2
"""How many times more commands a node may cost among 128 than among 8, besides those below: what
grows with the number of nodes would be 16 times more."""
JOIN_COMMANDS_MORE = 30
"""The coordinator's listings are few, but how few depends on how busy the machine is; and it hears
of each arrival by itself or of several at once."""
JOIN_REQUESTS_MORE = 3
NOTICED_SECONDS_MAX = 0.1
SHORT_LIFE = RedisOptions(outage_timeout_seconds=0.4, closed_grace_seconds=0.1)


@pytest.fixture
def server(request: pytest.FixtureRequest) -> Any:
    return server_or_not_run(request, "redis")


@pytest.fixture
def raw(server: Any) -> Iterator[Any]:
    """A client of somebody else's, on an empty server that knows all scripts."""
    host, port = server.address
    with redis.Redis(host, port, socket_timeout=10.0) as client:
        with crowd("redis", server.endpoint(), "warm-up", 2) as handlers:
            meet(handlers)
        client.flushall()
        yield client


class Requests:
    """What one node asks of the server, waiting apart."""

    def __init__(self, handler: Any) -> None:
        self._asked = self._read = 0
        self.scripts: Counter[str] = Counter()
        backend, connections = handler._backend, handler._backend.connections
        self._count(connections, "ask", self._note_asked)
        self._count(connections, "run", lambda script, *_: self.scripts.update([script]))
        self._count(backend, "get_state", self._note_read)

    @property
    def outside_waiting(self) -> int:
        """Round trips, but for those of a wait for a change."""
        waiting = self.scripts["look"] - self._read
        return self._asked - waiting

    def _note_asked(self, *_: object) -> None:
        self._asked += 1

    def _note_read(self) -> None:
        self._read += 1

    @staticmethod
    def _count(of: Any, name: str, note: Callable[..., None]) -> None:
        method = getattr(of, name)

        def counted(*arguments: object, **options: object) -> Any:
            note(*arguments)
            return method(*arguments, **options)

        setattr(of, name, counted)


def test_a_join_costs_at_most_four_round_trips_outside_waiting(server: Any, raw: Any) -> None:
    with crowd("redis", server.endpoint(), "round trips", 32, keep_alive_interval=30) as handlers:
        nodes = [Requests(handler) for handler in handlers]
        raw.config_resetstat()
        meet(handlers)
        sent = raw.info("commandstats")["cmdstat_evalsha"]["calls"]
        assert sent == sum(node.scripts.total() for node in nodes), "no request is overlooked"
        # Whoever forms the round writes the document; rank 0 writes its address.
        writers = [node for node in nodes if node.scripts["set_state"]]
        others = [node for node in nodes if not node.scripts["set_state"]]
        worst = max(others, key=lambda node: node.outside_waiting)
        assert worst.outside_waiting <= ROUND_TRIPS_MAX, dict(worst.scripts)
        # Nobody else tries to write a key that others write, so nobody has to try again.
        assert len(writers) <= 2
        assert sum(node.scripts["set_state"] for node in writers) <= 4


def commands(raw: Any) -> dict[str, int]:
    """Executed since the counters were set back, ours left out."""
    rows = raw.info("commandstats")
    return {
        name.removeprefix("cmdstat_"): row["calls"]
        for name, row in rows.items()
        if not name.startswith(("cmdstat_config", "cmdstat_info"))
    }


def requests(executed: dict[str, int]) -> int:
    """Those that clients sent; what is left was done inside scripts, hmget at times."""
    return sum(executed.get(name, 0) for name in ("evalsha", "eval", "xread", "subscribe"))


def costs(server: Any, raw: Any, count: int, idle_seconds: float) -> dict[str, float]:
    """What each of ``count`` nodes makes the server do: in a join, and in a minute of running."""
    with crowd(
        "redis", server.endpoint(), f"{count} nodes", count, keep_alive_interval=1
    ) as handlers:
        raw.config_resetstat()
        meet(handlers)
        joined = commands(raw)
        threading.Event().wait(1.0)  # for the beats that follow the join at once
        raw.config_resetstat()
        started = time.monotonic()
        threading.Event().wait(idle_seconds)
        minutes = (time.monotonic() - started) / 60
        idle = commands(raw)
    return {
        "requests of a join": requests(joined) / count,
        "commands of a join": sum(joined.values()) / count,
        "requests a minute": requests(idle) / count / minutes,
        "commands a minute": sum(idle.values()) / count / minutes,
    }


def test_commands_per_node_are_the_same_for_8_and_for_128_nodes(server: Any, raw: Any) -> None:
    few, many = (costs(server, raw, count, idle_seconds=3.0) for count in (8, 128))
    told = f"8 nodes: {few}, 128 nodes: {many}"
    assert many["requests of a join"] <= GROWTH_MAX * few["requests of a join"] + (
        JOIN_REQUESTS_MORE
    ), told
    assert many["commands of a join"] <= GROWTH_MAX * few["commands of a join"] + (
        JOIN_COMMANDS_MORE
    ), told
    # One beat a second, whoever else is there.
    assert few["requests a minute"] > 40, told
    assert many["requests a minute"] <= GROWTH_MAX * few["requests a minute"], told
    assert many["commands a minute"] <= GROWTH_MAX * few["commands a minute"], told


def test_a_change_of_state_is_noticed_elsewhere_in_100_ms(server: Any, raw: Any) -> None:
    with (
        contextlib.closing(RedisBackend(server.endpoint(), "noticed")) as here,
        contextlib.closing(RedisBackend(server.endpoint(), "noticed")) as there,
    ):
        written = here.set_state(b"0")
        assert written is not None
        seconds = []
        for number in range(1, 16):
            token = written[1]
            waiting = Background(
                lambda token=token: (there.wait_for_change(token, 30.0), time.monotonic())  # type: ignore[misc]
            ).still_blocked()
            started = time.monotonic()
            written = here.set_state(str(number).encode(), token)
            found, noticed = waiting.result()
            assert found == written[:2]
            seconds.append(noticed - started)
    assert statistics.median(seconds) < NOTICED_SECONDS_MAX, seconds


def test_two_hundred_runs_leave_no_key_once_their_time_has_passed(server: Any, raw: Any) -> None:
    for number in range(200):
        run = f"run {number}"
        backend = RedisBackend(server.endpoint(), run, SHORT_LIFE)
        store = RedisStore(
            server.endpoint(), run, options=SHORT_LIFE, connections=backend.connections
        )
        backend.set_state(b"1")
        backend.announce(Entry("node", b"", "round"), 0.2, Question("", "round"))
        backend.beat("node", 0.2, Question("", "round"))
        store.set("key", "value")
        store.queue_push("queue", "value")
        backend.withdraw("node", 0.2)
        backend.close()
        store.close()

    wait_until("no key is left", lambda: raw.dbsize() == 0, deadline_seconds=20.0)
