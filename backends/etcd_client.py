"""The one place that talks to etcd: deadlines, log-in, failover, leases, watches and errors.

Of a client object of etcd3's family that a user brings, this takes the channel and the token. The
calls are made here, on channels of our own otherwise, because the clients' have no deadline of a
call, mark an endpoint as failed for minutes, never log in again, and start a thread for each watch.

Rules:

* Every call has a deadline, its log-in and its repeats included; :func:`within` shortens it for
  all calls of somebody who has less time. A call is made again only if it reads, or if it was
  certainly not executed: the token was refused, or there was no connection to send it by.
* After a call that nothing answered, its channel is left and the next member is asked
  (:class:`rdzv.backends.etcd_channel.Links`).
* Channels are borrowed at the first use, and anew after a fork and after :meth:`close`.
"""

from __future__ import annotations

import functools
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, Concatenate, NoReturn, ParamSpec, Protocol, TypeVar

import grpc  # type: ignore[import-untyped]

from rdzv.backends.etcd_channel import Link, Links, links_pool
from rdzv.backends.etcd_operations import EtcdOperations, messages_of
from rdzv.backends.etcd_options import (
    NO_LEADER,
    Cluster,
    EtcdOptions,
    advice_for,
    base_of,
    cluster_of,
    lease_of,
)
from rdzv.errors import RendezvousConnectionError, mask_secrets, secrets_in

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.1
REQUEST_SECONDS_MIN = 0.5
"""A call is waited for so long at least: with less, one that is in a hurry would have no chance."""
TRIES_OF_A_MEMBER_MAX = 2
"""Of connecting, in one call: whoever asked has a better idea of how long to try."""
WATCH_SECONDS_MAX = 3600.0
REFRESH_SHARE = 0.2
"""Of the time that a lease lives: so often is it kept alive."""
TOKEN_REFUSED = (
    "invalid auth token",
    "revision of auth store is old",
    "auth: revision in header",
    "user name is empty",  # there is no token: it asked for none when we logged in
)
LEASE_MISSING = "requested lease not found"
NO_AUTHENTICATION = "authentication is not enabled"
COMPACTED = "required revision has been compacted"


class Refused(Exception):
    """etcd did not execute a request; ``reason`` is what it said."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


_ends_at: ContextVar[float | None] = ContextVar("_ends_at", default=None)
"""By ``time.monotonic()``: when whoever calls wants to have the answers to all that it asks."""


class within:
    """Calls that are made inside end within these seconds, or ``REQUEST_SECONDS_MIN`` each."""

    __slots__ = ("_ends_at", "_token")

    def __init__(self, seconds: float) -> None:
        self._ends_at = time.monotonic() + seconds

    def __enter__(self) -> None:
        until = _ends_at.get()
        ends_at = self._ends_at if until is None else min(until, self._ends_at)
        self._token = _ends_at.set(ends_at)

    def __exit__(self, *_: object) -> None:
        _ends_at.reset(self._token)


class Connected(Protocol):
    """Whoever makes its calls by these connections."""

    @property
    def connections(self) -> EtcdConnections: ...


P = ParamSpec("P")
T = TypeVar("T")
C = TypeVar("C", bound=Connected)


def in_time(method: Callable[Concatenate[C, P], T]) -> Callable[Concatenate[C, P], T]:
    """All requests of one call of the method together take no longer than ``read_timeout``."""

    @functools.wraps(method)
    def bounded(self: C, /, *arguments: P.args, **more: P.kwargs) -> T:
        with within(self.connections.options.read_timeout_seconds):
            return method(self, *arguments, **more)

    return bounded


class EtcdConnections(EtcdOperations):
    """Calls to one server or cluster, for one run.

    ``client`` is an object of etcd3's family that a user brings: it is used and not closed, and
    the endpoint is only shown. Raises ``RendezvousSettingsError`` for an endpoint that cannot be
    one.
    """

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: EtcdOptions,
        client: Any = None,
        *,
        cluster: Cluster | None = None,
    ) -> None:
        self.base = base_of(run_id, options)
        super().__init__(lease_of(self.base), messages_of(client))
        self.options = options
        self._secrets = (*secrets_in(endpoint), options.password)
        self.endpoint = mask_secrets(endpoint, *self._secrets)
        self._cluster: Cluster = cluster or cluster_of(endpoint, options)
        self._client = client
        self._given = endpoint, run_id, options, client
        self._when_closed: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._links: Links | None = None
        """None where nothing was asked yet, or since :meth:`close`."""
        self._streams: set[Any] = set()  # without the lock: a garbage collection may end a watch
        self._process = os.getpid()
        self._closings = 0
        self.term = 0
        """Of the last answer: another one means another leader."""
        self._refresh_at = 0.0
        self._has_warned = False

    def route(self) -> tuple[str, int]:
        """Host and port of the first member."""
        return self._cluster.members[0]

    @property
    def key(self) -> object:
        """Equal for two that ask the same server for the same run, of which one can do it for
        both."""
        if self._client is not None:
            return object()
        return self._cluster, self.options, self.base

    def twin(self) -> EtcdConnections:
        """Others on the same channels, to be closed by themselves."""
        # The cluster as it was read: its certificates may have been exchanged since.
        return EtcdConnections(*self._given, cluster=self._cluster)

    def when_closed(self, tell: Callable[[], object]) -> None:
        """Call this after every :meth:`close`."""
        self._when_closed.append(tell)

    @property
    def closings(self) -> int:
        """How often :meth:`close` was called: who waits sees by it that it is to end."""
        return self._closings

    def check_open(self, closings: int | None) -> None:
        """For who waits: raises ``RendezvousConnectionError`` if it was closed since."""
        if closings is not None and self._closings != closings:
            raise RendezvousConnectionError(
                f"etcd at {self.endpoint}: the wait was ended by close()."
            )

    def close(self) -> None:
        """Give up all streams, also those that somebody waits on, and the channels, which others
        may go on with: then a call that still waits for its answer ends in its own time. In a
        forked child, nothing but to forget them. Never raises."""
        self._leave_after_fork()
        with self._lock:
            links, self._links = self._links, None
            self._closings += 1
        for stream in list(self._streams):
            stream.cancel()
        if links is not None:
            links_pool.give_back(links)
        for tell in self._when_closed:
            tell()

    # ------------------------------------------------------------------------- what is asked

    def transact(
        self,
        compare: Sequence[Any],
        success: Sequence[Any],
        failure: Sequence[Any] = (),
        *,
        reads: bool = False,
    ) -> Any:
        """One transaction, which may be made again only where ``reads`` says so.

        Raises :class:`Refused` where a lease does not exist, else ``RendezvousConnectionError``.
        """
        request = self.messages.TxnRequest(compare=compare, success=success, failure=failure)
        return self.call("Txn", request, reads=reads)

    def write(
        self,
        compare: Sequence[Any],
        success: Sequence[Any],
        failure: Sequence[Any] = (),
        *,
        reads: bool = False,
    ) -> Any:
        """A transaction whose keys hang on the run's lease, which is made if it is missing.

        Raises ``RendezvousConnectionError``.
        """
        self.refresh()
        try:
            return self.transact(compare, success, failure, reads=reads)
        except Refused:
            self._make_run_lease()
        try:
            return self.transact(compare, success, failure, reads=reads)
        except Refused as error:  # it is another lease that is gone
            self._raise(error)

    def read(self, *operations: Any) -> Any:
        """Several ranges at one moment."""
        return self.transact((), operations, reads=True)

    def watch(
        self,
        key: bytes,
        range_end: bytes | None,
        revision: int,
        seconds: float,
        *,
        puts: bool,
        closings: int | None = None,
    ) -> Iterator[Any]:
        """The events of a range from a revision on, one by one; ends after so many seconds, and
        where the server ends it: then look again. Raises ``RendezvousConnectionError``.

        The first may be a number: the server's revision, where something, whatever it was, has
        been written since. The server tells of that up to 100 ms later, so a look is faster. With
        revision 0 the watch is from now on, and the number comes always. With ``closings``
        nothing is opened after :meth:`close`.
        """
        closings = self._closings if closings is None else closings
        create = self.messages.WatchCreateRequest(
            key=key, range_end=range_end or b"", start_revision=revision
        )
        if puts:
            create.filters.append(self.messages.WatchCreateRequest.NODELETE)
        link, request = self._link(closings), self.messages.WatchRequest(create_request=create)
        stream: Any = None
        is_there = False
        try:
            login_seconds = min(max(seconds, REQUEST_SECONDS_MIN), self._patience())
            metadata = (*self._metadata(link, login_seconds), ("hasleader", "true"))
            stream = link.stream("Watch", request, min(seconds, WATCH_SECONDS_MAX), metadata)
            self._streams.add(stream)
            self.check_open(closings)
            for response in stream:
                if response.canceled:
                    self._watch_was_refused(link, response.cancel_reason)
                    return
                is_there = True
                if response.created and response.header.revision >= revision:
                    yield int(response.header.revision)
                yield from response.events
        except grpc.RpcError as error:
            self.check_open(closings)  # it was us: others go on asking this member
            # The server knows the deadline, and often says first, by code UNKNOWN, that it is over.
            is_over = "deadline exceeded" in str(error.details()).lower()
            if is_over and (is_there or seconds < self.options.request_seconds):
                return
            self._failed(link, error)
            self._raise(error)
        except ValueError as error:  # the channel was closed by close()
            self._raise(error)
        finally:
            if stream is not None:
                self._streams.discard(stream)
                link.ended(stream)

    def grant(self, seconds: int) -> tuple[int, int]:
        """A new lease: its id and the time to live in seconds that it really has."""
        granted = self.call("LeaseGrant", self.messages.LeaseGrantRequest(TTL=seconds), reads=True)
        return granted.ID, granted.TTL

    def keep_alive(self, lease: int) -> int:
        """Let the lease live for all its time again. Returns that in seconds; 0 if it is gone."""
        request = self.messages.LeaseKeepAliveRequest(ID=lease)
        return max(0, int(self.call("LeaseKeepAlive", request, reads=True).TTL))

    def seconds_left(self, lease: int) -> int:
        """How long the lease has to live, rounded down; -1 if it is gone."""
        request = self.messages.LeaseTimeToLiveRequest(ID=lease)
        return int(self.call("LeaseTimeToLive", request, reads=True).TTL)

    def refresh(self) -> None:
        """A sign of life for the run's keys, if it is time for one."""
        now = time.monotonic()
        if now >= self._refresh_at:
            self._next_refresh(now, self.keep_alive(self.run_lease))

    def _make_run_lease(self) -> None:
        seconds = self.options.lease_seconds
        request = self.messages.LeaseGrantRequest(TTL=seconds, ID=self.run_lease)
        now = time.monotonic()
        try:
            self._next_refresh(now, self.call("LeaseGrant", request, reads=True).TTL)
        except Refused:  # somebody else made it
            self.refresh()

    def _next_refresh(self, now: float, lives_seconds: int) -> None:
        """When the run's lease, which may be another node's, is to be kept alive again."""
        if lives_seconds <= 0:
            return
        self._refresh_at = now + lives_seconds * REFRESH_SHARE
        if lives_seconds < self.options.lease_seconds and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "etcd at %s: another node has given this run's keys only %d s to outlive its nodes "
                "where this one wants %d: give all the same outage_timeout and closed_grace.",
                self.endpoint,
                lives_seconds,
                self.options.lease_seconds,
            )

    # ------------------------------------------------------------------------------- calls

    def call(self, method: str, request: Any, *, reads: bool = False) -> Any:
        """A call of etcd's API. Raises ``RendezvousConnectionError``, :class:`Refused`."""
        deadline, closings = time.monotonic() + self._patience(), self._closings
        logged_in, refusals = False, 0
        while True:
            link, left = self._link(), max(deadline - time.monotonic(), 0.001)
            try:
                metadata = self._metadata(link, left)
                left = max(deadline - time.monotonic(), 0.001)
                answer = link.call(method, request, self._attempt_seconds(left), metadata)
                self.term = answer.header.raft_term
                return answer
            except grpc.RpcError as error:
                details = str(error.details())
                if not logged_in and any(text in details for text in TOKEN_REFUSED):
                    self._forget_token(link)
                    logged_in = True
                    continue
                if LEASE_MISSING in details or "lease already exists" in details:
                    raise Refused(details) from error
                self._failed(link, error)
                was_refused = "failed to connect" in details
                refusals += was_refused
                pause = PAUSE_SECONDS * random.uniform(0.5, 1.5)
                again = (reads or was_refused) and _may_pass(error)
                if (
                    not again
                    or refusals >= TRIES_OF_A_MEMBER_MAX * len(self._cluster.members)
                    or time.monotonic() + pause >= deadline
                ):
                    self._raise(error)
                time.sleep(pause)
            except ValueError as error:
                # The channel was closed before, by us or because another node heard nothing on it:
                # nothing was sent. Ours is made anew.
                is_over = not reads and self._closings != closings
                if is_over or self._client is not None or time.monotonic() >= deadline:
                    self._raise(error)

    def explained(self, error: BaseException) -> str:
        """What happened, where, and what to do; without secrets."""
        code, details = type(error).__name__, str(error)
        if isinstance(error, grpc.RpcError):
            code, details = error.code().name, str(error.details())
        text = mask_secrets(f"{code}: {details}", *self._secrets)
        return f"etcd at {self.endpoint}: {text}{advice_for(code, details)}"

    def _patience(self) -> float:
        """How long a call may take now."""
        ends_at = _ends_at.get()
        if ends_at is None:
            return self.options.request_seconds
        left = max(ends_at - time.monotonic(), REQUEST_SECONDS_MIN)
        return min(self.options.request_seconds, left)

    def _attempt_seconds(self, left: float) -> float:
        """Half of the time for each member but the last, so that another can be asked."""
        return left if len(self._cluster.members) == 1 else max(left / 2, min(left, 0.5))

    def _metadata(self, link: Link, left: float) -> tuple[tuple[str, str], ...]:
        """With a token, for which it logs in first if it has none: within what is left."""
        if self._client is not None:
            return tuple(getattr(self._client, "metadata", None) or ())
        if self._cluster.user is None:
            return ()
        token = None if link.links is None else link.links.token
        if token is None:
            request = self.messages.AuthenticateRequest(
                name=self._cluster.user, password=self._cluster.password
            )
            try:
                seconds = self._attempt_seconds(left)
                token = str(link.call("Authenticate", request, seconds, ()).token)
            except grpc.RpcError as error:
                if NO_AUTHENTICATION not in str(error.details()):
                    raise
                token = ""
            if link.links is not None:
                link.links.token = token
        return (("token", token),) if token else ()

    def _link(self, closings: int | None = None) -> Link:
        self._leave_after_fork()
        with self._lock:
            self.check_open(closings)
            if self._client is not None:
                try:
                    return Link(self._client.channel, self.messages, 0)
                except Exception as error:
                    self._raise(error)
            if self._links is None:
                cluster, options, messages = self._cluster, self.options, self.messages
                self._links = links_pool.borrow(
                    (cluster, options), lambda: Links(cluster, options, messages)
                )
            return self._links.link()

    def _leave_after_fork(self) -> None:
        # Threads and sockets are the parent's, and one of those threads may have held the lock.
        if self._process != os.getpid():
            self._lock, self._links, self._streams = threading.Lock(), None, set()
            self._process = os.getpid()

    def _failed(self, link: Link, error: Any) -> None:
        """Ask another member next, if this one may be the reason."""
        if link.links is not None and _may_pass(error):
            is_silent = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            link.links.failed(link, is_silent=is_silent)

    @staticmethod
    def _forget_token(link: Link) -> None:
        if link.links is not None:
            link.links.token = None

    def _watch_was_refused(self, link: Link, reason: str) -> None:
        if not reason or COMPACTED in reason:
            return
        if any(text in reason for text in TOKEN_REFUSED):
            self._forget_token(link)
            return
        self._raise(Refused(reason))

    def _raise(self, error: BaseException) -> NoReturn:
        raise RendezvousConnectionError(self.explained(error)) from error


def is_passing(error: BaseException | None) -> bool:
    """Whether a server was only too slow, or its cluster was without a leader for a moment."""
    if not isinstance(error, grpc.RpcError):
        return False
    is_slow = error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    return is_slow or NO_LEADER.search(str(error.details())) is not None


def _may_pass(error: Any) -> bool:
    return error.code().name in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "UNKNOWN")
