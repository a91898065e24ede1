"""Channels to the members of an etcd cluster, and the calls on one of them.

All of a process that name a cluster by the same words and options share its channels: a node's
store and its watch, and other nodes. All streaming methods are called with one request, which
needs no thread here.
"""

from __future__ import annotations

import os
import queue
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, Protocol, TypeVar

import grpc  # type: ignore[import-untyped]
import grpc.experimental  # type: ignore[import-untyped]

from rdzv.backends.etcd_options import Cluster, EtcdOptions

PING_SECONDS, PING_ANSWER_SECONDS = 7.0, 3.0
"""etcd ends connections that ping it more often than every five seconds."""
CALLS_MAX = 16
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
        # Not a semaphore, which is Python's: hundreds of threads would spend more on it than on
        # calls.
        self.places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(CALLS_MAX):
            self.places.put(None)


_gate = _Gate()


class Link:
    """A channel to one member, and the calls on it. ``links`` are those that it belongs to: None
    where it is a user's."""

    def __init__(
        self, channel: Any, messages: Any, number: int, links: Links | None = None
    ) -> None:
        self.channel, self.number, self.links = channel, number, links
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
        """Raises ``grpc.RpcError``, and ``ValueError`` where the channel was closed before.

        Waits for its turn first: a thread that waits for an answer in gRPC takes Python's lock
        five times a second, so hundreds of nodes in one process would do little else. Calls to a
        server that hangs keep nobody long.
        """
        call, places, started, is_ours = object(), _gate.places, time.monotonic(), False
        self.running.add(call)
        try:
            with suppress(queue.Empty):
                places.get(timeout=min(seconds / 2, TURN_SECONDS_MAX))
                is_ours = True
            left = max(seconds - (time.monotonic() - started), 0.001)
            return self._calls[method](request, timeout=left, metadata=metadata)
        finally:
            if is_ours:
                places.put(None)
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
        if self.links is not None:
            self.channel.close()


class Links:
    """The channels to a cluster, the member that is asked now, and the token of whoever asks.

    After a call that nothing answered, its channel is left, for its connection may be dead without
    knowing it. It is closed once nobody else waits on it: one who is in a hurry must not end the
    calls of those who are not.
    """

    def __init__(self, cluster: Cluster, options: EtcdOptions, messages: Any) -> None:
        self._cluster, self._options, self._messages = cluster, options, messages
        self._lock = threading.Lock()
        self.links: dict[int, Link] = {}
        self.silent: list[Link] = []
        """Those on which a call was not answered, kept for others that still wait on them."""
        self.current = 0
        self.token: str | None = None
        self.users = 0

    def link(self) -> Link:
        """To the member that is asked now."""
        with self._lock:
            if self.silent:
                self._close_unused()
            link = self.links.get(self.current)
            if link is None:
                channel = channel_to(self._cluster, self.current, self._options)
                link = self.links[self.current] = Link(channel, self._messages, self.current, self)
            return link

    def failed(self, link: Link, *, is_silent: bool) -> None:
        """Ask the next member from now on; and leave a connection on which nothing is heard."""
        with self._lock:
            is_current = self.links.get(link.number) is link
            if is_current and self.current == link.number:
                self.current = (self.current + 1) % len(self._cluster.members)
            if is_current and is_silent:
                self.silent.append(self.links.pop(link.number))

    def close(self) -> None:
        """Never raises."""
        with self._lock:
            links, self.links = [*self.links.values(), *self.silent], {}
            self.silent = []
        for link in links:
            with suppress(Exception):
                link.close()

    def _close_unused(self) -> None:
        unused = [link for link in self.silent if not link.running]
        # Not by another look: a call that ended since would leave a channel open and forgotten.
        self.silent = [link for link in self.silent if link not in unused]
        for link in unused:
            link.close()


class Shareable(Protocol):
    """What several may have at once; the last to give it back closes it."""

    users: int

    def close(self) -> None: ...


T = TypeVar("T", bound=Shareable)


class Pool(Generic[T]):
    """What is shared in this process. What nobody holds any more, though nobody has given it back,
    is forgotten."""

    def __init__(self) -> None:
        self.renew()
        os.register_at_fork(after_in_child=self.renew)  # threads and sockets are the parent's

    def renew(self) -> None:
        self._lock = threading.Lock()
        self._shared: weakref.WeakValueDictionary[Any, T] = weakref.WeakValueDictionary()

    def borrow(self, key: object, make: Callable[[], T]) -> T:
        """What goes by that key, until it is given back."""
        with self._lock:
            thing = self._shared.get(key)
            if thing is None:
                thing = self._shared[key] = make()
            thing.users += 1
            return thing

    def give_back(self, thing: T) -> None:
        """Closes it if nobody else has it."""
        with self._lock:
            thing.users -= 1
            if thing.users:
                return
            for key in [key for key, each in self._shared.items() if each is thing]:
                del self._shared[key]
        thing.close()


links_pool: Pool[Links] = Pool()


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
