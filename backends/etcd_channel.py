"""Channels to the members of an etcd cluster, and the calls on one of them.

All streaming methods are called with one request, which needs no thread here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
import grpc.experimental  # type: ignore[import-untyped]

from rdzv.backends.etcd_options import Cluster, EtcdOptions

PING_SECONDS, PING_ANSWER_SECONDS = 7.0, 3.0
"""etcd ends connections that ping it more often than every five seconds."""
CALLS_MAX = 8
TURN_SECONDS_MAX = 1.0
METHODS = {
    "Range": ("KV", "RangeRequest", "RangeResponse"),
    "Txn": ("KV", "TxnRequest", "TxnResponse"),
    "LeaseGrant": ("Lease", "LeaseGrantRequest", "LeaseGrantResponse"),
    "LeaseKeepAlive": ("Lease", "LeaseKeepAliveRequest", "LeaseKeepAliveResponse"),
    "LeaseTimeToLive": ("Lease", "LeaseTimeToLiveRequest", "LeaseTimeToLiveResponse"),
    "Authenticate": ("Auth", "AuthenticateRequest", "AuthenticateResponse"),
    "Watch": ("Watch", "WatchRequest", "WatchResponse"),
}


class _Gate:
    """How many calls wait for answers at once, in this process."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(
            after_in_child=self.renew
        )  # places may be taken by threads that are gone

    def renew(self) -> None:
        self.places = threading.BoundedSemaphore(CALLS_MAX)


_gate = _Gate()


@contextmanager
def _turn(seconds: float) -> Iterator[float]:
    """One's turn to call, and how many of these seconds are left for it.

    A thread that waits for an answer in gRPC takes Python's lock five times a second, so hundreds
    of nodes in one process would do little else. Calls to a server that hangs keep nobody long."""
    places, started = _gate.places, time.monotonic()
    is_ours = places.acquire(timeout=min(seconds / 2, TURN_SECONDS_MAX))
    try:
        yield max(seconds - (time.monotonic() - started), 0.001)
    finally:
        if is_ours:
            places.release()


class Link:
    """A channel to one member, and the calls on it."""

    def __init__(self, channel: Any, messages: Any, number: int, *, is_ours: bool = True) -> None:
        self.channel, self.number, self._is_ours = channel, number, is_ours
        self.running: set[object] = set()
        """Calls and streams that have not ended. No lock: a garbage collection may end a watch."""
        self._calls = {}
        for method, (service, request, response) in METHODS.items():
            kind = channel.unary_stream if method == "Watch" else channel.unary_unary
            self._calls[method] = kind(
                f"/etcdserverpb.{service}/{method}",
                request_serializer=getattr(messages, request).SerializeToString,
                response_deserializer=getattr(messages, response).FromString,
            )

    def call(self, method: str, request: Any, seconds: float, metadata: Any) -> Any:
        """Raises ``grpc.RpcError``, and ``ValueError`` where the channel was closed before."""
        call = object()
        self.running.add(call)
        try:
            with _turn(seconds) as left:
                return self._calls[method](request, timeout=left, metadata=metadata)
        finally:
            self.running.discard(call)

    def stream(self, method: str, request: Any, seconds: float, metadata: Any) -> Any:
        """The stream, which belongs to ``running`` until :meth:`ended`. Raises ``ValueError``."""
        stream = self._calls[method](request, timeout=seconds, metadata=metadata)
        self.running.add(stream)
        return stream

    def ended(self, stream: Any) -> None:
        """Nobody listens to this stream any more."""
        self.running.discard(stream)
        stream.cancel()

    def close(self) -> None:
        if self._is_ours:
            self.channel.close()


def channel_to(cluster: Cluster, number: int, options: EtcdOptions) -> Any:
    host, port = cluster.members[number]
    place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    settings: list[tuple[str, Any]] = [
        ("grpc.keepalive_time_ms", round(PING_SECONDS * 1000)),
        ("grpc.keepalive_timeout_ms", round(PING_ANSWER_SECONDS * 1000)),
        # Without this one a black hole is not noticed.
        ("grpc.http2.ping_timeout_ms", round(PING_ANSWER_SECONDS * 1000)),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", round(options.request_seconds * 1000)),
        ("grpc.max_reconnect_backoff_ms", 1000),
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        # Connections of our own: gRPC would share them, broken ones too.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_retries", 0),
        # Whoever reads a watch waits for it itself: else there is a thread for each channel.
        (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
    ]
    if not cluster.secure:
        return grpc.insecure_channel(place, options=settings)
    if cluster.server_name:
        settings.append(("grpc.ssl_target_name_override", cluster.server_name))
    credentials = grpc.ssl_channel_credentials(cluster.ca_cert, cluster.key, cluster.cert)
    return grpc.secure_channel(place, credentials, options=settings)
