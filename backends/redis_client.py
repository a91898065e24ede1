"""The one place that talks to redis-py: connections, scripts and errors.

Rules:

* The client never repeats a command by itself: an answer that was lost is found out by whoever
  asked. So every time-out is set here and every retry of redis-py is off, whatever the URL says.
* A request ends within ``request_seconds``. One whose caller has less time left ends earlier: it
  goes over a pool with a shorter time-out, of which there are few. A wait holds a connection of a
  pool whose time-out is longer than any wait.
* All keys of a run begin with ``<key_prefix>:{<digest of the run id>}:``. The braces hold a hash
  tag: a cluster keeps such keys on one node, so one script may touch all of them.
* A script is sent by its digest, and whole where the server does not know it yet.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
import threading
from collections.abc import Callable
from functools import cache
from typing import Any, NoReturn, TypeVar

import redis
import redis.sentinel

from rdzv.backends.redis_endpoint import (
    REQUEST_SECONDS_MIN,
    RedisOptions,
    checked_key_prefix,
    client_factory,
)
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
    secrets_in,
)

__all__ = ["WAIT_SLICE_SECONDS_MAX", "RedisConnections", "RedisOptions", "logger", "raw"]

logger = logging.getLogger(__name__)

T = TypeVar("T")

WAIT_SLICE_SECONDS_MAX = 5.0
"""A longer wait looks in between: a server that lost its data has nobody to wake us."""
HURRIED_SECONDS = (REQUEST_SECONDS_MIN, 1.0, 2.0)
"""The time-outs of requests whose callers cannot wait for longer."""
RUN_DIGEST_CHARACTERS = 32
ACL_ADVICE = ". The user's ACL lacks a right: docs/redis.md lists what is needed"


class RedisConnections:
    """Connections to one server, Sentinel group or cluster, made when they are needed.

    Raises ``RendezvousSettingsError`` for an endpoint that cannot be one.
    """

    def __init__(self, endpoint: str, run_id: str, options: RedisOptions) -> None:
        if not run_id:
            raise RendezvousSettingsError("the run id is empty: give one with --rdzv-id")
        digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
        prefix = checked_key_prefix(options.key_prefix)
        self.base = b"%s:{%s}:" % (prefix, digest[:RUN_DIGEST_CHARACTERS].encode())
        self.options = options
        self.lifetime_ms = round(options.lifetime_seconds * 1000)
        self._secrets = (*secrets_in(endpoint), options.password)
        self.endpoint = mask_secrets(endpoint, *self._secrets)
        self._make, self._route = client_factory(endpoint, options, self.base + b"state")
        hurried = {s for s in HURRIED_SECONDS if s < options.request_seconds}
        self._request_seconds = sorted(hurried | {options.request_seconds})
        # Who waits beats in between: what hangs is noticed before its entry has expired.
        patience = max(1.0, options.keep_alive_interval_seconds)
        self.wait_slice_seconds = min(WAIT_SLICE_SECONDS_MAX, patience)
        self._wait_seconds = self.wait_slice_seconds + options.request_seconds
        self._lock = threading.Lock()
        self._clients: dict[float, Any] = {}
        self._disconnections = 0

    def route(self) -> tuple[str, int] | None:
        """Host and port of one server, None for a Unix socket."""
        return self._route

    def run(self, script: str, *arguments: object, within_seconds: float | None = None) -> Any:
        """What a script answers. Raises as :meth:`ask`."""

        def ask(client: Any) -> Any:
            text, digest = script_text(script)
            try:
                return client.evalsha(digest, 1, self.base, *arguments)
            except redis.exceptions.NoScriptError:
                return client.eval(text, 1, self.base, *arguments)

        return self.ask(ask, within_seconds)

    def ask(self, request: Callable[[Any], T], within_seconds: float | None = None) -> T:
        """Make a request of a caller who has so long, or half a second if that is longer.

        Raises ``RendezvousConnectionError`` or ``RendezvousStateError``.
        """
        return self._with(self._fitting(within_seconds), request)

    def wait(self, request: Callable[[Any], T]) -> T:
        """The same on a connection that may wait for ``wait_slice_seconds``."""
        return self._with(self._wait_seconds, request)

    def listen(self, request: Callable[[Any], T], within_seconds: float) -> T:
        """The same for a subscription, which has a time-out of its own for each message."""
        return self._with(self._fitting(within_seconds), request)

    def close(self) -> None:
        """Give up all connections, also those that somebody waits on. Never raises."""
        with self._lock:
            clients = list(self._clients.values())
        for client in clients:
            self._give_up(client)

    def refused(self, commands: list[str]) -> RendezvousConnectionError:
        """The error of a user who may not run some commands."""
        return RendezvousConnectionError(
            f"Redis at {self.endpoint}: the user may not run {', '.join(commands)}{ACL_ADVICE}"
        )

    def explained(self, error: BaseException) -> str:
        """What happened, where, and what to do; without secrets."""
        text = mask_secrets(f"{type(error).__name__}: {error}", *self._secrets)
        advice = _advice(error)
        return f"Redis at {self.endpoint}: {text.rstrip('.') if advice else text}{advice}"

    def _fitting(self, within_seconds: float | None) -> float:
        possible = self._request_seconds
        if within_seconds is None:
            return possible[-1]
        return max((s for s in possible if s <= within_seconds), default=possible[0])

    def _with(self, timeout_seconds: float, request: Callable[[Any], T]) -> T:
        with self._lock:
            client = self._clients.get(timeout_seconds)
            if client is None:
                client = self._clients[timeout_seconds] = self._make(timeout_seconds)
            before = self._disconnections
        try:
            return request(client)
        except (
            redis.exceptions.ReadOnlyError,
            redis.exceptions.MovedError,
            redis.exceptions.ClusterDownError,
        ) as error:
            # A failover: what is connected leads to the former master. Nothing was done.
            self._give_up(client)
            self._raise(error)
        except (redis.exceptions.RedisError, OSError, ValueError) as error:
            self._raise(error)
        except Exception as error:
            # redis-py whose connection another thread takes away, by close() for instance,
            # stumbles over what is no longer there: a TypeError, an AttributeError, ...
            if self._disconnections == before:
                raise
            self._raise(error)

    def _give_up(self, client: Any) -> None:
        with self._lock:
            self._disconnections += 1
        try:
            _disconnect(client)
        except Exception:
            logger.debug("closing connections to %s failed", self.endpoint, exc_info=True)

    def _raise(self, error: Exception) -> NoReturn:
        if isinstance(error, redis.exceptions.ResponseError) and _is_foreign(str(error)):
            raise RendezvousStateError(
                f"{self.explained(error)}. What is stored below {self.base.decode()} rdzv has not "
                "written: see who else writes there, or use another key_prefix"
            ) from error
        raise RendezvousConnectionError(self.explained(error)) from error


def raw(text: str) -> bytes:
    """A text of any characters as Redis keeps it."""
    return text.encode("utf-8", "surrogatepass")


@cache
def script_text(name: str) -> tuple[str, str]:
    """A script with what belongs before it, and its digest."""
    parts = ["common"]
    if name.startswith("store_") and name not in ("store_missing", "store_keys"):
        parts.append("store")
    folder = importlib.resources.files("rdzv.backends").joinpath("lua")
    text = "".join(
        folder.joinpath(f"{part}.lua").read_text(encoding="utf-8") for part in (*parts, name)
    )
    return text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()


def _disconnect(client: Any) -> None:
    client.connection_pool.disconnect(inuse_connections=True)


def _is_foreign(text: str) -> bool:
    """Whether a script or a command stumbled over data that no script of ours leaves."""
    return "WRONGTYPE" in text or "attempt to " in text or "hash value is not an integer" in text


def _advice(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, redis.sentinel.MasterNotFoundError):
        return (
            ". Look whether the Sentinels can be reached from here and know the name. If they ask "
            "for a password of their own, give sentinel_password=… (and sentinel_username=…) in "
            "the URL's query"
        )
    if isinstance(error, redis.exceptions.AuthenticationError) or "NOAUTH" in text:
        return ". Give user and password in the URL, or password_file=…"
    if (
        isinstance(error, redis.exceptions.NoPermissionError)
        or "executing the script can't" in text
    ):
        return ACL_ADVICE
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
        return ". The server is out of memory: raise its maxmemory or free some"
    if isinstance(error, redis.exceptions.ReadOnlyError):
        return (
            ". It is a replica, or has become one: give the master's endpoint, or Sentinel's "
            "(redis+sentinel://)"
        )
    if isinstance(error, redis.exceptions.TimeoutError):
        return ". Look whether the server runs and can be reached from here"
    if type(error) is redis.exceptions.ConnectionError and "max number" not in text:
        return (
            ". Look whether the server runs and can be reached from here, and whether it wants TLS "
            "(rediss://)"
        )
    return ""
