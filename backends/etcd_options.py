"""What a user can set for etcd: endpoints, certificates, names and times; and what errors mean."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, unquote

from rdzv.backends.options import BackendOptions, common_options
from rdzv.errors import RendezvousSettingsError, mask_secrets, secrets_in

if TYPE_CHECKING:
    from rdzv.settings import Settings

RUN_DIGEST_CHARACTERS = 32
DEFAULT_PORT = 2379
PLAIN_SCHEMES, SECURE_SCHEMES = ("etcd", "http"), ("etcds", "https")
CERTIFICATE_OPTIONS = {
    "ca_cert": "ca_cert",
    "cacert": "ca_cert",
    "cert": "cert",
    "ssl_cert": "cert",
    "key": "key",
    "ssl_cert_key": "key",
    "server_name": "server_name",
}
"""Their names in a URL and in ``--rdzv-conf``: ours, and those of torch's two etcd backends."""
EXTRA_OPTIONS = frozenset({*CERTIFICATE_OPTIONS, "protocol"})


@dataclass(frozen=True, slots=True)
class EtcdOptions(BackendOptions):
    """What :class:`rdzv.settings.Settings` says to this backend."""

    key_prefix: str = "rdzv"
    protocol: str | None = None
    """``http`` or ``https``, where the endpoint does not say it."""
    ca_cert: str | None = None
    cert: str | None = None
    key: str | None = None
    server_name: str | None = None
    """The name in the server's certificate, where it is not the host of the endpoint."""

    @property
    def lease_seconds(self) -> int:
        """The time to live of the run's lease: whole seconds, as etcd counts, and a quarter more
        than asked for, since not every sign of life is passed on."""
        return math.ceil(self.lifetime_seconds * 1.25) + 1

    @classmethod
    def from_settings(cls, settings: Settings, config: Mapping[str, Any]) -> EtcdOptions:
        """Those of the settings that matter here; ``config`` is what torchrun was given."""
        certificates: dict[str, Any] = {
            name: str(config[given])
            for given, name in CERTIFICATE_OPTIONS.items()
            if config.get(given)
        }
        return cls(
            **common_options(settings),
            key_prefix=settings.key_prefix,
            protocol=str(config["protocol"]) if config.get("protocol") else None,
            **certificates,
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """What an endpoint leads to."""

    members: tuple[tuple[str, int], ...]
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    secure: bool = False
    ca_cert: bytes | None = field(default=None, repr=False)
    cert: bytes | None = field(default=None, repr=False)
    key: bytes | None = field(default=None, repr=False)
    server_name: str | None = None


def cluster_of(endpoint: str, options: EtcdOptions) -> Cluster:
    """Read an endpoint. Raises ``RendezvousSettingsError`` for one that cannot work."""
    if not endpoint.strip():
        raise _refusal(endpoint, "there is none")
    schemes = re.findall(r"(?:^|(?<=[;,]))([A-Za-z0-9+.-]*)://", endpoint)
    if len(set(schemes)) > 1 or not set(schemes) <= {*PLAIN_SCHEMES, *SECURE_SCHEMES}:
        raise _refusal(endpoint, "it has a scheme that is not etcd's, or several")
    rest = re.sub(r"(?:^|(?<=[;,]))[A-Za-z0-9+.-]*://", "", endpoint)
    rest, _, query = rest.partition("?")
    credentials, at, places = rest.rpartition("@")
    user, colon, password = credentials.partition(":")
    given = dict(parse_qsl(query, keep_blank_values=True))
    unknown = sorted(set(given) - set(CERTIFICATE_OPTIONS))
    if unknown and "@" in query:  # it may be a part of a password
        raise _refusal(endpoint, "a ? within its user or password is written %3F")
    if unknown:
        raise _refusal(endpoint, f"{', '.join(unknown)} is no option of it")
    if options.protocol not in (None, "http", "https"):
        raise _refusal(endpoint, "protocol= is http or https")
    files = {name: getattr(options, name) for name in ("ca_cert", "cert", "key", "server_name")}
    files.update({CERTIFICATE_OPTIONS[name]: value for name, value in given.items()})
    scheme = schemes[0] if schemes else options.protocol or PLAIN_SCHEMES[0]
    secure = scheme in SECURE_SCHEMES
    if not secure and any(files.values()):
        raise _refusal(endpoint, "certificates are for etcds://, or protocol=https")
    if bool(files["cert"]) != bool(files["key"]):
        raise _refusal(endpoint, "cert= and key= belong together")
    secret = options.password if options.password is not None else unquote(password)
    if bool(user) != bool(secret):
        raise _refusal(endpoint, "a user and a password (or password_file=) belong together")
    if at and not colon and options.password is None:
        raise _refusal(endpoint, "a user without a password")
    return Cluster(
        members=tuple(_member(endpoint, place) for place in re.split("[;,]", places)),
        user=unquote(user) or None,
        password=secret or None,
        secure=secure,
        ca_cert=_content("ca_cert", files["ca_cert"]),
        cert=_content("cert", files["cert"]),
        key=_content("key", files["key"]),
        server_name=files["server_name"],
    )


def base_of(run_id: str, options: EtcdOptions) -> bytes:
    """What the keys of a run begin with, whatever characters its id has."""
    if not run_id:
        raise RendezvousSettingsError("the run id is empty: give one with --rdzv-id")
    digest = hashlib.sha256(run_id.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{options.key_prefix}/{digest[:RUN_DIGEST_CHARACTERS]}/".encode()


def lease_of(base: bytes) -> int:
    """The lease that the keys of a run hang on: its number is everybody's to compute."""
    number = int.from_bytes(hashlib.sha256(b"lease of " + base).digest()[:8], "big")
    return number % (2**63 - 1) + 1


def advice_for(code: str, details: str) -> str:
    """What to do about an error of etcd."""
    for pattern, advice in _ADVICE:
        if re.search(pattern, f"{code}: {details}"):
            return f". {advice}"
    return ""


NO_LEADER = re.compile("no leader|leader changed")
"""In the words of every etcd that is without a leader."""

_ADVICE = (
    (
        "database space exceeded",
        "etcd's quota is used up: compact and defragment it, disarm the alarm with `etcdctl alarm "
        "disarm`, and raise --quota-backend-bytes (docs/etcd.md)",
    ),
    (
        "request is too large|larger than max|too many operations",
        "The request is over the server's limit: raise --max-request-bytes or --max-txn-ops there",
    ),
    (NO_LEADER.pattern, "The cluster has no leader: see that most of its members run"),
    (
        "permission denied",
        "The user's role lacks a right: docs/etcd.md lists what is needed",
    ),
    (
        "authentication failed|user name is empty|invalid auth token|UNAUTHENTICATED",
        "Give user and password in the endpoint, or password_file=…",
    ),
    (
        "(?i)ssl|certificate|handshake|tls",
        "See that ca_cert, cert and key fit the server, and its certificate the host",
    ),
    (
        "DEADLINE_EXCEEDED|UNAVAILABLE",
        "Look whether the server runs and can be reached from here, and whether it wants TLS "
        "(etcds://)",
    ),
)


def _member(endpoint: str, place: str) -> tuple[str, int]:
    place = place.strip().rstrip("/")
    found = re.fullmatch(
        r"(?P<host>\[[0-9A-Fa-f:.%]+\]|[^:/\[\]\s]+)(?::(?P<port>\d{1,5}))?", place
    )
    port = int(found["port"] or DEFAULT_PORT) if found else 0
    if found is None or not 0 < port < 65536:
        raise _refusal(endpoint, "a place in it is no host and port")
    return found["host"].strip("[]"), port


def _content(name: str, path: str | None) -> bytes | None:
    if not path:
        return None
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise RendezvousSettingsError(f"{name}={path} cannot be read: {error}") from None


def _refusal(endpoint: str, why: str) -> RendezvousSettingsError:
    shown = mask_secrets(endpoint, *secrets_in(endpoint)) or "''"
    return RendezvousSettingsError(
        f"--rdzv-endpoint={shown}: {mask_secrets(why)}. Give host:port[;host:port…], "
        "etcd://user:password@host:port,host:port or "
        "etcds://host:port?ca_cert=FILE&cert=FILE&key=FILE."
    )
