"""Which address of this machine a node tells its peers.

Theory. The address is where peers reach rank 0's store server and workers, so it must belong to
this machine and be reachable from theirs. The first alone can be tested here: by binding to it.
The second is judged by what the user says, or by the route to the backend, which every peer uses
too:

1. ``--local-addr``, if given: wins, but must resolve to an address of this machine.
2. Else the local end of the route to the backend. No packet is sent to find it.
3. Else, where the backend is on this machine or is no network service, the machine's own name, if
   it leads to an address that is not loopback (Debian lets it lead to 127.0.1.1).
4. Else loopback, if the backend can only be reached from this machine; a log line says what that
   means.

Name resolution can hang for minutes, so all of this happens in a daemon thread with a deadline.
"""

from __future__ import annotations

import errno
import functools
import ipaddress
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

from rdzv.errors import RendezvousSettingsError, mask_secrets

logger = logging.getLogger(__name__)

OWN_NAME_TIMEOUT_SECONDS = 5.0
"""For each of the machine's own names: they are tried where there is something else to fall to."""
PORT_MAX = 65535
_ANYWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))
"""Addresses reserved for documentation: the route to them is the route to the world at large."""

_Answer = TypeVar("_Answer")


def resolve(host: str) -> tuple[str, ...]:
    """The addresses of a host, in the system's order of preference. Raises ``OSError``."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, "not a host name") from error
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_own(address: str) -> bool:
    """Whether an address belongs to this machine: whether a socket can be bound to it."""
    for family, kind, protocol, _, where in _look_up(address, 0, socket.SOCK_STREAM):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.bind(where)
        except OSError:
            continue
        return True
    return False


def route_source(address: str, port: int) -> str:
    """This end of the route to an address; sends no packet. Raises ``OSError``."""
    family, kind, protocol, _, where = _look_up(address, port, socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(where)
        source = probe.getsockname()
    zone = f"%{socket.if_indextoname(source[3])}" if len(source) > 3 and source[3] else ""
    return f"{source[0].partition('%')[0]}{zone}"


@dataclass(frozen=True, slots=True)
class Network:
    """What the choice asks of the operating system; tests give their own answers."""

    resolve: Callable[[str], tuple[str, ...]] = resolve
    is_own: Callable[[str], bool] = is_own
    route_source: Callable[[str, int], str] = route_source
    own_names: tuple[Callable[[], str], ...] = (socket.getfqdn, socket.gethostname)


SYSTEM = Network()


def choose_address(
    local_addr: str | None,
    route: tuple[str, int] | None,
    timeout_seconds: float,
    network: Network = SYSTEM,
) -> str:
    """The address or host name that this node tells its peers, without brackets.

    ``route`` is the backend's host and port; None where it is no network service.

    Raises ``RendezvousSettingsError``, whose text names ``--local-addr``, for what cannot work,
    and when the answer takes longer than ``timeout_seconds``.
    """
    deadline = time.monotonic() + timeout_seconds
    if local_addr is not None and local_addr.strip():
        given = local_addr.strip()
        return _within(deadline, f"--local-addr={given}", lambda: _checked(given, network))
    if route is None or is_loopback(route[0]):
        # Without a service to reach, all nodes are on this machine and nothing is missing.
        level = logging.INFO if route is None else logging.WARNING
        return _named(deadline, network) or _loopback(network, level)
    host, port = unbracketed(route[0]), route[1]
    subject = f"the backend's host {host}"
    source = _within(deadline, subject, lambda: _source([(host, port)], network))
    if source is not None and not is_loopback(source):
        return source
    # Nodes elsewhere can reach the backend, so loopback is the worst guess: a host name that leads
    # to 127.0.1.1 here leads to another address there.
    chosen = _named(deadline, network) or _source(_ANYWHERE, network)
    if chosen is not None and not is_loopback(chosen):
        return chosen
    if source is None:
        raise RendezvousSettingsError(
            f"No address of this machine can be found: it has no route to the backend at "
            f"{join_host_port(host, port)}, and its own name leads nowhere. Give an address of "
            "this machine that the other nodes can reach with --local-addr."
        )
    return _loopback(network, logging.WARNING)


def _named(deadline: float, network: Network) -> str | None:
    """The first of the machine's own names that leads to it from elsewhere too."""
    for own_name in network.own_names:
        ask = functools.partial(_reachable_name, own_name, network)
        limit = min(deadline, time.monotonic() + OWN_NAME_TIMEOUT_SECONDS)
        try:
            named = _within(limit, "this machine's name", ask)
        except RendezvousSettingsError as error:
            logger.warning("%s", error)
            continue
        if named is not None:
            return named
    return None


def _loopback(network: Network, level: int) -> str:
    chosen = "127.0.0.1" if network.is_own("127.0.0.1") else "::1"
    logger.log(
        level,
        "This node tells its peers the address %s: only nodes on this machine can join it. For "
        "nodes on other machines, give an address that they can reach with --local-addr.",
        chosen,
    )
    return chosen


def _checked(given: str, network: Network) -> str:
    host = unbracketed(given)
    try:
        addresses = network.resolve(host)
    except OSError as error:
        hint = ""
        if re.fullmatch(r"\[.*\]:\d+|[^:]+:\d+", given):
            hint = " Leave out the port: every round draws a free one."
        raise RendezvousSettingsError(
            f"--local-addr={given} does not resolve ({error.strerror or error}). Give an address "
            f"or host name of this machine.{hint}"
        ) from error
    usable = [address for address in addresses if _is_usable(address)]
    if not any(network.is_own(address) for address in usable):
        found = "" if addresses == (host,) else f" leads to {', '.join(addresses)}, which"
        raise RendezvousSettingsError(
            f"--local-addr={given}{found} is no address of this machine that peers can connect to. "
            "Give one of its own (`ip address` lists them) or a host name that leads to one, or "
            "leave --local-addr out."
        )
    return canonical(host)


def _source(targets: Iterable[tuple[str, int]], network: Network) -> str | None:
    """This end of the first route that does not begin at loopback; else loopback, if any does;
    None where no target has a route."""
    loopback = None
    for host, port in targets:
        try:
            addresses = network.resolve(host)
        except OSError:
            continue
        for address in addresses:
            try:
                source = canonical(network.route_source(address, port))
            except OSError:
                continue
            if not is_loopback(source):
                return source
            loopback = loopback or source
    return loopback


def _reachable_name(own_name: Callable[[], str], network: Network) -> str | None:
    """The name if it leads only to this machine, and not to loopback; if it leads elsewhere too,
    the address of this machine that it leads to; else None."""
    try:
        name = own_name()
        addresses = network.resolve(name)
    except OSError:
        return None
    own = [
        address
        for address in addresses
        if _is_usable(address) and not is_loopback(address) and network.is_own(address)
    ]
    if not own:
        return None
    return name if len(own) == len(addresses) else canonical(own[0])


def _within(deadline: float, subject: str, ask: Callable[[], _Answer]) -> _Answer:
    answers: list[_Answer] = []
    errors: list[Exception] = []

    def run() -> None:
        try:
            answers.append(ask())
        except Exception as error:
            errors.append(error)

    began = time.monotonic()
    thread = threading.Thread(target=run, name="rdzv-address", daemon=True)
    thread.start()
    thread.join(max(0.0, deadline - began))
    if errors:
        raise errors[0]
    if not answers:
        raise RendezvousSettingsError(
            f"Looking up {subject} took longer than {max(0.0, deadline - began):.3g} s. Look at "
            "the machine's name resolution, or give an IP address of it with --local-addr."
        )
    return answers[0]


def _look_up(address: str, port: int, kind: socket.SocketKind) -> list[Any]:
    return socket.getaddrinfo(address, port, type=kind, flags=socket.AI_NUMERICHOST)


def _parsed(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def _is_usable(address: str) -> bool:
    parsed = _parsed(address)
    return parsed is not None and not (
        parsed.is_unspecified or parsed.is_multicast or str(parsed) == "255.255.255.255"
    )


def is_loopback(host: str) -> bool:
    """Whether a host means "this machine" wherever it is said.

    >>> is_loopback("127.0.1.1"), is_loopback("[::1]"), is_loopback("localhost")
    (True, True, True)
    >>> is_loopback("10.0.0.1"), is_loopback("node7")
    (False, False)
    """
    bare = unbracketed(host)
    parsed = _parsed(bare)
    if parsed is not None:
        return parsed.is_loopback
    name = bare.lower().rstrip(".")
    return name in _LOOPBACK_NAMES or name.endswith(".localhost")


def canonical(host: str) -> str:
    """An address in its shortest usual spelling; any other host as it is.

    >>> canonical("[2001:DB8:0::1]"), canonical("::ffff:10.0.0.1"), canonical("Node7")
    ('2001:db8::1', '10.0.0.1', 'Node7')
    """
    bare = unbracketed(host)
    parsed = _parsed(bare)
    return bare if parsed is None else str(parsed)


def unbracketed(host: str) -> str:
    """The host without blanks around it and without the brackets of an IPv6 address."""
    bare = host.strip()
    return bare[1:-1].strip() if bare.startswith("[") and bare.endswith("]") else bare


def bracketed(host: str) -> str:
    """The host as it stands before a port: an IPv6 address in brackets.

    >>> bracketed("::1"), bracketed("[::1]"), bracketed("10.0.0.1"), bracketed("node7")
    ('[::1]', '[::1]', '10.0.0.1', 'node7')
    """
    bare = unbracketed(host)
    return f"[{bare}]" if ":" in bare else bare


def join_host_port(host: str, port: int) -> str:
    """Host and port as one text.

    >>> join_host_port("::1", 80)
    '[::1]:80'
    """
    return f"{bracketed(host)}:{port}"


def split_host_port(text: str, default_port: int | None = None) -> tuple[str, int]:
    """Host, without brackets, and port. A bare IPv6 address has no port.

    Raises ``RendezvousSettingsError`` for text without a host, with a port that is none, and,
    unless there is a ``default_port``, without a port.

    >>> split_host_port("[::1]:80"), split_host_port("node7", 29400), split_host_port("::1", 1)
    (('::1', 80), ('node7', 29400), ('::1', 1))
    """
    match = _HOST_PORT.fullmatch(text.strip())
    if match is None:
        raise RendezvousSettingsError(
            f"{mask_secrets(text)!r} is no host and port. Give host:port or [IPv6]:port."
        )
    host = match["host"] or match["v6"] or match["bare"]
    if match["host"] is None and not isinstance(_parsed(host), ipaddress.IPv6Address):
        raise RendezvousSettingsError(f"{text!r}: {host!r} is no IPv6 address.")
    port = default_port if match["port"] is None else int(match["port"])
    if port is None:
        raise RendezvousSettingsError(f"{text!r} has no port. Give {bracketed(host)}:PORT.")
    if not 0 <= port <= PORT_MAX:
        raise RendezvousSettingsError(f"{text!r}: the port must be from 0 to {PORT_MAX}.")
    return host, port


_LOOPBACK_NAMES = frozenset(
    {"localhost", "localhost.localdomain", "localhost4", "localhost6", "ip6-localhost"}
    | {"ip6-loopback", "localhost4.localdomain4", "localhost6.localdomain6"}
)
_HOST_PORT = re.compile(
    r"(?:\[(?P<v6>[^\[\]\s]+)\]|(?P<bare>[0-9A-Fa-f]*:[0-9A-Fa-f]*:[^\[\]\s/]*)|(?P<host>[^\[\]\s:/@]+))"
    r"(?::(?P<port>\d{1,5}))?"
)
