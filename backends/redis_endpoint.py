"""What a Redis endpoint says: where the servers are, who asks, over TLS or not, which database.

Whatever cannot work is refused here, before anything is opened. redis-py reads a URL leniently: it
takes database 0 for ``/abc``, database 12 for ``/1/2`` and this machine for a missing host. So it
is given only what has been checked.
"""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, parse_qs, urlencode, urlsplit

import redis
import redis.sentinel
from redis.backoff import NoBackoff
from redis.retry import Retry
from redis.utils import str_if_bytes

from rdzv.backends.options import REQUEST_SECONDS_MAX, BackendOptions, common_options
from rdzv.backends.redis_cluster import Places, SecureSlotConnection, SlotConnection
from rdzv.errors import RendezvousSettingsError, mask_secrets, secrets_in
from rdzv.settings import KEY_PREFIX_CHARACTERS_MAX

if TYPE_CHECKING:
    from rdzv.settings import Settings

__all__ = ["RedisOptions", "checked_key_prefix", "client_factory"]

logger = logging.getLogger(__name__)

Factory = Callable[[float], Any]
"""Makes a client whose requests have so many seconds; opens nothing."""
Address = tuple[str, int]

REQUEST_SECONDS_MIN = 0.5
"""A caller may be in a greater hurry; a shorter time says little about a server."""
DEFAULT_PORT = 6379
SENTINEL_PORT = 26379
LOOK_SECONDS = 1.0
"""So often a Sentinel is asked, by whoever makes a request, which server is the master now."""
SENTINEL_SECONDS_MAX = 1.0
"""A Sentinel that has not answered by then is passed over: the next one knows as much."""
USER_OPTIONS = frozenset({"username", "password", "db", "client_name"})
"""What of a query is taken over, besides ``ssl_…``. Others (``decode_responses``, time-outs, …)
would change what the rest of this package relies on."""
SENTINEL_OPTIONS = frozenset({"sentinel_username", "sentinel_password", "sentinel_ssl"})


@dataclass(frozen=True, slots=True)
class RedisOptions(BackendOptions):
    """What :class:`rdzv.settings.Settings` says to this backend."""

    key_prefix: str = "rdzv"

    @classmethod
    def from_settings(cls, settings: Settings) -> RedisOptions:
        """Those of the settings that matter here."""
        return cls(key_prefix=settings.key_prefix, **common_options(settings))


def checked_key_prefix(prefix: str) -> bytes:
    """The prefix as Redis keeps it.

    Raises ``RendezvousSettingsError`` for one that no key should begin with. Braces would move the
    hash tag of a cluster, and blanks would end a pattern of an ACL.
    """
    wrong = not 1 <= len(prefix) <= KEY_PREFIX_CHARACTERS_MAX or any(
        character in "{}" or character.isspace() or not character.isprintable()
        for character in prefix
    )
    if wrong:
        shown = ascii(prefix[:KEY_PREFIX_CHARACTERS_MAX])
        raise RendezvousSettingsError(
            f"key_prefix={shown} cannot work: give 1 to {KEY_PREFIX_CHARACTERS_MAX} printable "
            "characters without blanks and braces."
        )
    return prefix.encode()


def client_factory(
    endpoint: str, options: RedisOptions, key: bytes
) -> tuple[Factory, Address | None]:
    """What makes clients for an endpoint, and host and port of one server, None for a socket.

    ``key`` is one of the run's.

    Raises ``RendezvousSettingsError``, without secrets, for an endpoint that cannot work.
    """
    url = endpoint if "://" in endpoint else f"redis://{endpoint}"
    try:
        parts = urlsplit(url)
    except ValueError:
        # Without the parser's words, which may hold a password.
        raise _refusal(endpoint, "it is no URL") from None
    scheme, _, kind = parts.scheme.partition("+")
    makers: dict[str, Callable[..., tuple[Factory, Address | None]]] = {
        "": _server,
        "sentinel": _sentinel,
        "cluster": partial(_cluster, key=key),
    }
    if not endpoint:
        raise _refusal(endpoint, "no endpoint was given")
    if kind not in makers or scheme not in ("redis", "rediss", "unix"):
        raise _refusal(endpoint, "it is no endpoint of Redis")
    if scheme == "unix":
        if kind or not parts.path:
            raise _refusal(endpoint, "it is no endpoint of Redis")
        makers = {"": _socket}
    try:
        make, route = makers[kind](endpoint, parts, options)
        make(REQUEST_SECONDS_MAX)
    except (TypeError, redis.exceptions.RedisError):
        raise _refusal(endpoint, "an option in it is unknown or has no such value") from None
    return make, route


def _server(
    endpoint: str, parts: SplitResult, options: RedisOptions
) -> tuple[Factory, Address | None]:
    hosts = list(_hosts(endpoint, parts, DEFAULT_PORT))
    if len(hosts) > 1:
        raise _refusal(endpoint, "it names several hosts and is neither Sentinel nor cluster")
    keywords = _keywords(endpoint, parts, options, database=parts.path.strip("/"))
    kind = redis.SSLConnection if parts.scheme == "rediss" else redis.Connection
    host, port = hosts[0]
    return _pooled(kind, {**keywords, "host": host, "port": port}), hosts[0]


def _socket(
    endpoint: str, parts: SplitResult, options: RedisOptions
) -> tuple[Factory, Address | None]:
    keywords = _keywords(endpoint, parts, options, database="")
    path = redis.connection.parse_url(f"unix://{parts.path}")["path"]
    return _pooled(redis.UnixDomainSocketConnection, {**keywords, "path": path}), None


def _pooled(kind: Any, keywords: dict[str, Any]) -> Factory:
    kind(**keywords)  # which opens nothing, and knows which options there are

    def make(timeout_seconds: float) -> Any:
        pool = redis.ConnectionPool(
            connection_class=kind, **keywords, **_always(timeout_seconds, timeout_seconds)
        )
        return redis.Redis(connection_pool=pool)

    return make


def _sentinel(
    endpoint: str, parts: SplitResult, options: RedisOptions
) -> tuple[Factory, Address | None]:
    hosts = list(_hosts(endpoint, parts, SENTINEL_PORT))
    service, _, database = parts.path.strip("/").partition("/")
    if not service:
        raise _refusal(endpoint, "no name of a master in the path")
    tls = parts.scheme.startswith("rediss")
    keywords = _keywords(endpoint, parts, options, database=database)
    own = _query(parts, SENTINEL_OPTIONS)
    sentinel_tls = own.pop("sentinel_ssl", "true" if tls else "false").lower()
    if sentinel_tls not in ("true", "false") or (sentinel_tls == "true" and not tls):
        raise _refusal(endpoint, "sentinel_ssl is true or false, and true only with rediss://")
    of_sentinels: dict[str, Any] = {
        name.removeprefix("sentinel_"): value for name, value in own.items()
    }
    if sentinel_tls == "true":
        of_sentinels |= {name: keywords[name] for name in keywords if name.startswith("ssl_")}
        of_sentinels["ssl"] = True
    (redis.SSLConnection if tls else redis.Connection)(**keywords)

    def make(timeout_seconds: float) -> Any:
        always = _always(timeout_seconds, timeout_seconds)
        asking_seconds = min(timeout_seconds, SENTINEL_SECONDS_MAX)
        asking = _always(asking_seconds, asking_seconds)
        sentinel = redis.sentinel.Sentinel(
            hosts, sentinel_kwargs={**asking, **of_sentinels}, **always
        )
        return sentinel.master_for(service, connection_pool_class=_MasterPool, ssl=tls, **keywords)

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
    endpoint: str, parts: SplitResult, options: RedisOptions, *, key: bytes
) -> tuple[Factory, Address | None]:
    hosts = list(_hosts(endpoint, parts, DEFAULT_PORT))
    keywords = _keywords(endpoint, parts, options, database=parts.path.strip("/"))
    if keywords.pop("db", 0):
        raise _refusal(endpoint, "a cluster has database 0 only")
    kind = SecureSlotConnection if parts.scheme.startswith("rediss") else SlotConnection
    kind(places=Places(hosts, key, REQUEST_SECONDS_MAX), **keywords)

    def make(timeout_seconds: float) -> Any:
        places = Places(hosts, key, min(timeout_seconds, REQUEST_SECONDS_MAX))
        always = _always(timeout_seconds, timeout_seconds)
        pool = redis.ConnectionPool(connection_class=kind, places=places, **keywords, **always)
        return redis.Redis(connection_pool=pool)

    return make, hosts[0]


def _always(timeout_seconds: float, connect_seconds: float) -> dict[str, Any]:
    return {
        "socket_timeout": timeout_seconds,
        "socket_connect_timeout": min(connect_seconds, REQUEST_SECONDS_MAX),
        "retry": Retry(NoBackoff(), 0),
        "retry_on_error": [],
        "decode_responses": False,
        "health_check_interval": 0,
        **_without_introduction(),
    }


@cache
def _without_introduction() -> dict[str, None]:
    """Arguments that keep redis-py from telling its own name and version in two more round trips
    for each connection: half the cost of one."""
    accepted = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    if "driver_info" in accepted:
        return {"driver_info": None}
    return {name: None for name in ("lib_name", "lib_version") if name in accepted}


def _keywords(
    endpoint: str, parts: SplitResult, options: RedisOptions, *, database: str
) -> dict[str, Any]:
    """User, password, database and TLS, for a connection of redis-py."""
    scheme, _, kind = parts.scheme.partition("+")
    names = USER_OPTIONS | (SENTINEL_OPTIONS if kind == "sentinel" else frozenset())
    given = _query(parts, names, "ssl_")
    left = sorted(set(parse_qs(parts.query, keep_blank_values=True)) - set(given))
    if left:
        logger.warning("of the endpoint's options these are not used: %s", ", ".join(left))
    given = {name: value for name, value in given.items() if name not in SENTINEL_OPTIONS}
    if scheme != "rediss" and any(name.startswith("ssl_") for name in given):
        raise _refusal(endpoint, "ssl_… is for rediss:// only")
    numbers = {number for number in (database, given.pop("db", "")) if number}
    if len(numbers) > 1 or not all(n.isascii() and n.isdigit() for n in numbers):
        raise _refusal(endpoint, "the database is a whole number from 0 on, given once")
    credentials = parts.netloc.rpartition("@")[0]
    try:
        taken = dict(redis.connection.parse_url(f"redis://{credentials}@host?{urlencode(given)}"))
    except (ValueError, TypeError):
        # Without the parser's words, which may hold a part of a password.
        raise _refusal(endpoint, "an option in it cannot be read") from None
    del taken["host"]
    if numbers:
        taken["db"] = int(*numbers)
    if options.password is not None:
        taken["password"] = options.password
    if scheme == "rediss" and given.get("ssl_cert_reqs", "").lower() != "none":
        taken.setdefault("ssl_check_hostname", True)  # what older releases of redis-py leave off
    return taken


def _query(
    parts: SplitResult, names: frozenset[str], beginning: str | None = None
) -> dict[str, str]:
    return {
        name: values[0]
        for name, values in parse_qs(parts.query, keep_blank_values=True).items()
        if name in names or (beginning is not None and name.startswith(beginning))
    }


def _hosts(endpoint: str, parts: SplitResult, default_port: int) -> Iterable[Address]:
    for place in parts.netloc.rpartition("@")[2].split(","):
        try:
            one = urlsplit(f"//{place}")
            host, port = one.hostname, one.port
        except ValueError:
            raise _refusal(endpoint, "a place in it is no host and port") from None
        if not host:
            raise _refusal(endpoint, "a host is missing")
        if port == 0:
            raise _refusal(endpoint, "a port is from 1 to 65535")
        yield host, default_port if port is None else port


def _refusal(endpoint: str, why: str) -> RendezvousSettingsError:
    shown = mask_secrets(endpoint, *secrets_in(endpoint))
    return RendezvousSettingsError(
        f"--rdzv-endpoint={shown}: {why}. Give host:port, redis://host:port/database, rediss://, "
        "unix:///path, redis+sentinel://host:port,host:port/master or "
        "redis+cluster://host:port,host:port."
    )
