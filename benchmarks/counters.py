"""What a server counted while nodes met: requests, commands and bytes.

A technology adds itself with a subclass of :class:`ServerCounters` and an entry in
``COUNTERS``; what it cannot tell stays None and is shown as "-".
"""

from __future__ import annotations

import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

Number = TypeVar("Number", int, float)

TIMEOUT_SECONDS = 30.0
"""A server that serves a thousand nodes at once answers late."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Totals since the server's start, or the difference between two of them."""

    requests: int | None = None
    """What clients sent, each a round trip."""
    commands: Mapping[str, int] = field(default_factory=dict)
    """What the server executed, by name; commands inside a script count too."""
    bytes_in: int | None = None
    bytes_out: int | None = None
    cpu_seconds: float | None = None

    def since(self, before: Counts) -> Counts:
        """What was added after ``before``."""
        names = sorted(self.commands)
        grown = {name: self.commands[name] - before.commands.get(name, 0) for name in names}
        return Counts(
            requests=_difference(self.requests, before.requests),
            commands={name: count for name, count in grown.items() if count},
            bytes_in=_difference(self.bytes_in, before.bytes_in),
            bytes_out=_difference(self.bytes_out, before.bytes_out),
            cpu_seconds=_difference(self.cpu_seconds, before.cpu_seconds),
        )


class ServerCounters(ABC):
    """One server's own counters. What asking costs is left out of what it answers."""

    @abstractmethod
    def read(self) -> Counts:
        """The totals now."""

    @abstractmethod
    def close(self) -> None:
        """Give up the connection."""


class RedisCounters(ServerCounters):
    """``INFO`` of one Redis or Valkey server: ``commandstats`` and ``stats``.

    A request is a read of a socket (``total_reads_processed``): several commands that a client
    sends at once, as redis-py does when it connects, are one round trip.
    """

    def __init__(self, endpoint: str) -> None:
        import redis

        url = endpoint if "://" in endpoint else f"redis://{endpoint}"
        self._redis: Any = redis.Redis.from_url(url, socket_timeout=TIMEOUT_SECONDS)
        self._redis.ping()
        self._own = 0

    def read(self) -> Counts:
        stats, rows = self._redis.info("stats"), self._redis.info("commandstats")
        cpu = self._redis.info("cpu")
        own_before, self._own = self._own, self._own + 3
        commands = {
            name.removeprefix("cmdstat_"): int(row["calls"])
            for name, row in rows.items()
            if name != "cmdstat_info"
        }
        return Counts(
            requests=int(stats["total_reads_processed"]) - own_before,
            commands=commands,
            bytes_in=int(stats["total_net_input_bytes"]),
            bytes_out=int(stats["total_net_output_bytes"]),
            cpu_seconds=float(cpu["used_cpu_user"]) + float(cpu["used_cpu_sys"]),
        )

    def close(self) -> None:
        self._redis.close()


class EtcdCounters(ServerCounters):
    """The metrics of the first member of an endpoint ``host:port[;host:port]``, over HTTP.

    A stream, as a watch is, counts as one request."""

    def __init__(self, endpoint: str) -> None:
        self._url = f"http://{endpoint.partition(';')[0]}/metrics"

    def read(self) -> Counts:
        with urllib.request.urlopen(self._url, timeout=TIMEOUT_SECONDS) as answer:
            lines = answer.read().decode().splitlines()
        totals: dict[str, float] = {}
        calls: dict[str, int] = {}
        for line in lines:
            if line.startswith("#"):
                continue
            name, _, labels = line.rpartition(" ")[0].partition("{")
            value = float(line.rpartition(" ")[2])
            totals[name] = totals.get(name, 0.0) + value
            if name == "grpc_server_started_total":
                method = labels.partition('grpc_method="')[2].partition('"')[0]
                calls[method] = calls.get(method, 0) + int(value)
        return Counts(
            requests=sum(calls.values()),
            commands=calls,
            bytes_in=int(totals["etcd_network_client_grpc_received_bytes_total"]),
            bytes_out=int(totals["etcd_network_client_grpc_sent_bytes_total"]),
            cpu_seconds=totals["process_cpu_seconds_total"],
        )

    def close(self) -> None:
        """There is no connection between two readings."""


COUNTERS: dict[str, Callable[[str], ServerCounters]] = {
    "redis": RedisCounters,
    "etcd-v3": EtcdCounters,
}
"""By the name of the backend; called with its endpoint."""


def _difference(after: Number | None, before: Number | None) -> Number | None:
    return None if after is None or before is None else after - before
