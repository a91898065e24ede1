"""The one place that talks to redis-py: endpoints, connections, scripts and errors.

Rules:

* The client never repeats a command by itself: an answer that was lost is found out by whoever
  asked. So every time-out is set here and every retry of redis-py is off, whatever the URL says.
* Requests share one pool with a short time-out; a wait holds a connection of a second pool, whose
  time-out is longer than any wait.
* All keys of a run begin with ``<key_prefix>:{<digest of the run id>}:``. The braces hold a hash
  tag: a cluster keeps such keys on one node, so one script may touch all of them.
* A script is sent by its digest, and whole where the server does not know it yet.
"""

from __future__ import annotations

import hashlib
import importlib.resources
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import str_if_bytes

from rdzv.backends.redis_cluster import Places, SecureSlotConnection, SlotConnection
from rdzv.errors import (
    RendezvousConnectionError,
    RendezvousSettingsError,
    RendezvousStateError,
    mask_secrets,
    secrets_in,
)

if TYPE_CHECKING:
    from rdzv.settings import Settings

logger = logging.getLogger(__name__)

T = TypeVar("T")

REQUEST_SECONDS_MAX = 5.0
"""A request that is not answered by then has failed: the caller asks again, or the next one."""
WAIT_SLICE_SECONDS_MAX = 5.0
"""A longer wait looks in between: a server that lost its data has nobody to wake us."""
LOOK_SECONDS = 1.0
"""So often a Sentinel is asked, by whoever makes a request, which server is the master now."""
SENTINEL_SECONDS_MAX = 1.0
"""A Sentinel that has not answered by then is passed over: the next one knows as much."""
RUN_DIGEST_CHARACTERS = 32
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
USER_OPTIONS = frozenset(
    {"username", "password", "host", "port", "path", "db", "client_name", "connection_class"}
)
"""What of a URL is taken over, besides ``ssl_…``. Others (``decode_responses``, time-outs, …) would
change what the rest of this package relies on."""


@dataclass(frozen=True, slots=True)
class RedisOptions:
    """What :class:`rdzv.settings.Settings` says to this backend."""

    key_prefix: str = "rdzv"
    read_timeout_seconds: float = 60.0
    keep_alive_interval_seconds: float = 5.0
    outage_timeout_seconds: float = 600.0
    closed_grace_seconds: float = 60.0
    password: str | None = field(default=None, repr=False)

    @property
    def request_seconds(self) -> float:
        """Within so long a request is answered or has failed."""
        patience = max(1.0, self.keep_alive_interval_seconds)
        return min(self.read_timeout_seconds, patience, REQUEST_SECONDS_MAX)

    @property
    def lifetime_seconds(self) -> float:
        """How long a run's keys outlive the last sign of life."""
        return self.outage_timeout_seconds + self.closed_grace_seconds

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisOptions:
        """Those of the settings that matter here."""
        return cls(
            key_prefix=settings.key_prefix,
            read_timeout_seconds=settings.read_timeout_seconds,
            keep_alive_interval_seconds=settings.keep_alive_interval_seconds,
            outage_timeout_seconds=settings.outage_timeout_seconds,
            closed_grace_seconds=settings.closed_grace_seconds,
            password=settings.password,
        )


class RedisConnections:
    """Connections to one server, Sentinel group or cluster, made when they are needed.

    Raises ``RendezvousSettingsError`` for an endpoint that cannot be one.
    """

    def __init__(self, endpoint: str, run_id: str, options: RedisOptions) -> None:
        if not run_id:
            raise RendezvousSettingsError("the run id is empty: give one with --rdzv-id")
        digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
        self.base = f"{options.key_prefix}:{{{digest[:RUN_DIGEST_CHARACTERS]}}}:".encode()
        self.options = options
        self.lifetime_ms = round(options.lifetime_seconds * 1000)
        self._secrets = (*secrets_in(endpoint), options.password)
        self.endpoint = mask_secrets(endpoint, *self._secrets)
        self._make, self._route = _client_factory(endpoint, options, self.base + b"state")
        self._requests: Any = self._make(options.request_seconds)
        self._waits: Any = self._make(WAIT_SLICE_SECONDS_MAX + options.request_seconds)

    def route(self) -> tuple[str, int] | None:
        """Host and port of one server, None for a Unix socket."""
        return self._route

    def run(self, script: str, *arguments: object) -> Any:
        """What a script answers.

        Raises ``RendezvousConnectionError`` or ``RendezvousStateError``.
        """

        def ask(client: Any) -> Any:
            text, digest = script_text(script)
            try:
                return client.evalsha(digest, 1, self.base, *arguments)
            except redis.exceptions.NoScriptError:
                return client.eval(text, 1, self.base, *arguments)

        return self.ask(ask)

    def ask(self, request: Callable[[Any], T]) -> T:
        """Make a request with errors as :mod:`rdzv.ports` wants them."""
        return self._with(self._requests, request)

    def wait(self, request: Callable[[Any], T]) -> T:
        """The same on a connection that may wait for ``WAIT_SLICE_SECONDS_MAX``."""
        return self._with(self._waits, request)

    def close(self) -> None:
        """Give up all connections, also those that somebody waits on. Never raises."""
        for client in (self._requests, self._waits):
            try:
                _disconnect(client)
            except Exception:
                logger.debug("closing connections to %s failed", self.endpoint, exc_info=True)

    def explained(self, error: BaseException) -> str:
        """What happened, where, and what to do; without secrets."""
        text = mask_secrets(f"{type(error).__name__}: {error}", *self._secrets)
        return f"Redis at {self.endpoint}: {text}{_advice(error)}"

    def _with(self, client: Any, request: Callable[[Any], T]) -> T:
        try:
            return request(client)
        except redis.exceptions.RedisError as error:
            if isinstance(error, (redis.exceptions.ReadOnlyError, redis.exceptions.MovedError)):
                # A failover: what is connected leads to the former master. Nothing was done.
                _disconnect(client)
            self._raise(error)
        except (OSError, ValueError) as error:
            # ValueError: redis-py's for a connection that was closed under it by close().
            self._raise(error)

    def _raise(self, error: Exception) -> NoReturn:
        if "WRONGTYPE" in str(error):
            raise RendezvousStateError(self.explained(error)) from error
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


def _client_factory(
    endpoint: str, options: RedisOptions, key: bytes
) -> tuple[Callable[[float], Any], tuple[str, int] | None]:
    """What makes a client with a time-out in seconds, and where it leads.

    ``key`` is one of the run's.
    """
    url = endpoint if "://" in endpoint else f"redis://{endpoint}"
    try:
        parts = urlsplit(url)
    except ValueError:
        # Without the parser's words, which may hold a password.
        raise _refusal(endpoint, "no URL") from None
    scheme, _, kind = parts.scheme.partition("+")
    if kind in ("sentinel", "cluster") and scheme in ("redis", "rediss"):
        if kind == "cluster":
            return _cluster(endpoint, scheme, options, key)
        return _sentinel(endpoint, scheme, options)
    if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.path):
        raise _refusal(endpoint, "no endpoint of Redis")
    keywords = _keywords(url, options)
    keywords.setdefault("port", DEFAULT_PORT)
    route = (keywords["host"], keywords["port"]) if "host" in keywords else None
    if "path" in keywords:
        del keywords["port"]

    def make(timeout_seconds: float) -> Any:
        pool = redis.ConnectionPool(**keywords, **_always(timeout_seconds))
        return redis.Redis(connection_pool=pool)

    return make, route


def _sentinel(
    endpoint: str, scheme: str, options: RedisOptions
) -> tuple[Callable[[float], Any], tuple[str, int]]:
    parts = urlsplit(endpoint)
    hosts = list(_hosts(endpoint, SENTINEL_PORT))
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise _refusal(endpoint, "no name of a master in the path")
    keywords = _keywords(f"{scheme}://{_credentials(parts.netloc)}x/{database}", options)
    for name in ("host", "port"):
        keywords.pop(name, None)
    if scheme == "rediss":
        keywords["ssl"] = True
    keywords.pop("connection_class", None)

    def make(timeout_seconds: float) -> Any:
        always = _always(timeout_seconds)
        asking = _always(min(timeout_seconds, SENTINEL_SECONDS_MAX))
        sentinel = redis.sentinel.Sentinel(hosts, sentinel_kwargs=asking, **always)
        return sentinel.master_for(service, connection_pool_class=_MasterPool, **keywords)

    return make, hosts[0]


class _MasterPool(redis.sentinel.SentinelConnectionPool):
    """Leaves a master that is none any more, also one that does not know it yet.

    redis-py asks for the master when it connects. After a failover on request the former one takes
    writes for ten seconds more, and one that hung does when it goes on: they would be lost.
    """

    _looked_at = 0.0

    def get_connection(self, *arguments: Any, **options: Any) -> Any:
        now = time.monotonic()
        if now - self._looked_at >= LOOK_SECONDS:
            self._looked_at = now
            self._look()
        return super().get_connection(*arguments, **options)

    def disconnect(self, inuse_connections: bool = True) -> None:
        """Where nothing is to be left in use, from the Sentinels too."""
        super().disconnect(inuse_connections)
        if inuse_connections:
            for sentinel in self.sentinel_manager.sentinels:
                sentinel.connection_pool.disconnect()

    def _look(self) -> None:
        if self.master_address is None:
            return
        manager = self.sentinel_manager
        try:
            named = manager.sentinels[0].sentinel_get_master_addr_by_name(self.service_name)
            if named and (str_if_bytes(named[0]), int(named[1])) != self.master_address:
                self.proxy.get_master_address()
        except (redis.exceptions.RedisError, OSError):
            # The master may serve us all the same. Another Sentinel is asked the next time.
            manager.sentinels = [*manager.sentinels[1:], manager.sentinels[0]]


def _cluster(
    endpoint: str, scheme: str, options: RedisOptions, key: bytes
) -> tuple[Callable[[float], Any], tuple[str, int]]:
    parts = urlsplit(endpoint)
    hosts = list(_hosts(endpoint, DEFAULT_PORT))
    keywords = _keywords(f"{scheme}://{_credentials(parts.netloc)}x?{parts.query}", options)
    for name in ("host", "port", "db"):
        keywords.pop(name, None)
    keywords["connection_class"] = SecureSlotConnection if scheme == "rediss" else SlotConnection

    def make(timeout_seconds: float) -> Any:
        places = Places(hosts, key, min(timeout_seconds, REQUEST_SECONDS_MAX))
        always = _always(timeout_seconds)
        return redis.Redis(
            connection_pool=redis.ConnectionPool(places=places, **keywords, **always)
        )

    return make, hosts[0]


def _disconnect(client: Any) -> None:
    client.connection_pool.disconnect(inuse_connections=True)


def _keywords(url: str, options: RedisOptions) -> dict[str, Any]:
    try:
        given = dict(redis.connection.parse_url(url))
    except (ValueError, TypeError) as error:
        # Without the parser's words, which may hold a part of a password.
        what = "port, database or option" if isinstance(error, ValueError) else "option"
        raise _refusal(url, f"a {what} in it cannot be read") from None
    taken = {
        name: value
        for name, value in given.items()
        if name in USER_OPTIONS or name.startswith("ssl_")
    }
    left = sorted(set(given) - set(taken))
    if left:
        logger.warning("of the endpoint's options these are not used: %s", ", ".join(left))
    if options.password is not None:
        taken["password"] = options.password
    return taken


def _always(timeout_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(timeout_seconds, REQUEST_SECONDS_MAX),
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
        "health_check_interval": 0,
    }


def _hosts(endpoint: str, port: int) -> Iterable[tuple[str, int]]:
    places = urlsplit(endpoint).netloc.rpartition("@")[2].split(",")
    for place in places:
        parts = urlsplit(f"//{place}")
        try:
            yield parts.hostname or "", parts.port or port
        except ValueError:
            raise _refusal(endpoint, "a place in it is no host and port") from None
        if not parts.hostname:
            raise _refusal(endpoint, "a host is missing")


def _credentials(netloc: str) -> str:
    credentials, at, _ = netloc.rpartition("@")
    return credentials + at


def _refusal(endpoint: str, why: str) -> RendezvousSettingsError:
    shown = mask_secrets(endpoint, *secrets_in(endpoint))
    return RendezvousSettingsError(
        f"--rdzv-endpoint={shown}: {unquote(why)}. Give host:port, redis://, rediss://, unix://, "
        "redis+sentinel://host:port,host:port/master or redis+cluster://host:port,host:port."
    )


def _advice(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, redis.exceptions.AuthenticationError) or "NOAUTH" in text:
        return ". Give user and password in the URL, or password_file=…"
    if isinstance(error, redis.exceptions.NoPermissionError) or "can't run this command" in text:
        return ". The user's ACL lacks a right: docs/redis.md lists what is needed"
    if isinstance(error, redis.exceptions.OutOfMemoryError) or "OOM" in text:
        return ". The server is out of memory: raise its maxmemory or free some"
    if isinstance(error, redis.exceptions.TimeoutError):
        return ". Look whether the server runs and can be reached from here"
    return ""
