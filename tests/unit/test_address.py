"""Which address a node tells its peers: see rdzv.address."""

from __future__ import annotations

import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import pytest

from rdzv.address import (
    Network,
    bracketed,
    canonical,
    choose_address,
    is_loopback,
    is_own,
    join_host_port,
    resolve,
    route_source,
    split_host_port,
)
from rdzv.errors import RendezvousSettingsError

LOOPBACK = frozenset({"127.0.0.1", "127.0.1.1", "::1"})


@dataclass
class Machine:
    """A machine with these addresses, names and routes, and no others."""

    own: frozenset[str] = LOOPBACK | {"10.0.0.1"}
    hosts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    routes: Mapping[str, str] = field(default_factory=dict)
    names: tuple[str, ...] = ("node7.example", "node7")

    def resolve(self, host: str) -> tuple[str, ...]:
        if host in self.hosts:
            return self.hosts[host]
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known") from None
        return (host,)

    def route_source(self, address: str, port: int) -> str:
        assert port > 0
        if address not in self.routes:
            raise OSError(101, "Network is unreachable")
        return self.routes[address]

    def choose(
        self,
        local_addr: str | None = None,
        route: tuple[str, int] | None = None,
        timeout_seconds: float = 30.0,
    ) -> str:
        network = Network(
            self.resolve,
            lambda address: address in self.own,
            self.route_source,
            tuple(self._tells(name) for name in self.names),
        )
        return choose_address(local_addr, route, timeout_seconds, network)

    def refuse(self, local_addr: str | None, route: tuple[str, int] | None = None) -> str:
        with pytest.raises(RendezvousSettingsError) as caught:
            self.choose(local_addr, route)
        assert "--local-addr" in str(caught.value)
        return str(caught.value)

    @staticmethod
    def _tells(name: str) -> Callable[[], str]:
        return lambda: name


# --local-addr


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("10.0.0.1", "10.0.0.1"),
        (" 10.0.0.1\n", "10.0.0.1"),
        ("2001:DB8:0::1", "2001:db8::1"),
        ("[2001:db8::1]", "2001:db8::1"),
        ("fe80::1%eth0", "fe80::1%eth0"),
        ("[fe80::1%eth0]", "fe80::1%eth0"),
        ("Node7", "Node7"),
        ("two-homed", "two-homed"),
        ("127.0.0.1", "127.0.0.1"),
    ],
)
def test_local_addr_wins(given: str, expected: str) -> None:
    machine = Machine(
        own=LOOPBACK | {"10.0.0.1", "2001:DB8:0::1", "2001:db8::1", "fe80::1%eth0"},
        hosts={"Node7": ("10.0.0.1",), "two-homed": ("10.9.9.9", "10.0.0.1")},
        routes={"10.0.0.99": "10.0.0.2"},
    )
    assert machine.choose(given, ("10.0.0.99", 6379)) == expected


@pytest.mark.parametrize(
    "given", ["10.0.0.2", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255", "other", "2001:db8::2"]
)
def test_local_addr_of_no_or_another_machine(given: str) -> None:
    machine = Machine(
        own=LOOPBACK | {"10.0.0.1", "0.0.0.0", "::", "224.0.0.1", "255.255.255.255"},
        hosts={"other": ("10.0.0.3",)},
    )
    text = machine.refuse(given)
    assert f"--local-addr={given}" in text
    assert "no address of this machine" in text
    assert ("10.0.0.3" in text) == (given == "other")


@pytest.mark.parametrize("given", ["nowhere", "node7:29500", "[2001:db8::1]:29500", "http://x"])
def test_local_addr_that_does_not_resolve(given: str) -> None:
    text = Machine().refuse(given)
    assert f"--local-addr={given} does not resolve" in text
    assert ("Leave out the port" in text) == given.endswith(":29500")


def test_a_blank_local_addr_is_none() -> None:
    assert Machine(routes={"10.0.0.99": "10.0.0.1"}).choose(" ", ("10.0.0.99", 1)) == "10.0.0.1"


# The route to the backend


def test_the_route_to_the_backend() -> None:
    machine = Machine(
        hosts={"redis": ("10.0.0.99",), "node7.example": ("10.0.0.1",)},
        routes={"10.0.0.99": "10.0.0.1", "2001:db8::99": "2001:DB8::1"},
    )
    assert machine.choose(None, ("redis", 6379)) == "10.0.0.1"
    assert machine.choose(None, ("10.0.0.99", 6379)) == "10.0.0.1"
    assert machine.choose(None, ("[2001:db8::99]", 6379)) == "2001:db8::1"
    assert machine.choose(None, ("2001:db8::99", 6379)) == "2001:db8::1"


def test_the_first_address_with_a_route_counts() -> None:
    machine = Machine(
        hosts={"redis": ("2001:db8::99", "127.0.0.1", "10.0.0.99")},
        routes={"127.0.0.1": "127.0.0.1", "10.0.0.99": "10.0.0.1"},
    )
    assert machine.choose(None, ("redis", 6379)) == "10.0.0.1"


def test_a_backend_on_this_machine_that_others_reach_too() -> None:
    # Debian: the machine's own name leads to 127.0.1.1 on the machine itself.
    machine = Machine(
        hosts={"node7": ("127.0.1.1",), "node7.example": ("127.0.1.1",)},
        routes={"127.0.1.1": "127.0.0.1", "192.0.2.1": "10.0.0.1"},
    )
    assert machine.choose(None, ("node7", 6379)) == "10.0.0.1"


def test_a_machine_without_a_network(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(hosts={"node7": ("127.0.1.1",)}, routes={"127.0.1.1": "127.0.0.1"})
    assert machine.choose(None, ("node7", 6379)) == "127.0.0.1"
    assert "--local-addr" in caplog.text


def test_a_backend_without_a_route() -> None:
    assert "node9:6379" in Machine().refuse(None, ("node9", 6379))
    assert "[2001:db8::99]:6379" in Machine().refuse(None, ("2001:db8::99", 6379))
    with_name = Machine(hosts={"node7": ("10.0.0.1",)})
    assert with_name.choose(None, ("node9", 6379)) == "node7"
    with_default_route = Machine(routes={"2001:db8::1": "2001:db8::7"})
    assert with_default_route.choose(None, ("node9", 6379)) == "2001:db8::7"


# The machine's name

LOCAL_ROUTES = [None, ("localhost", 6379), ("127.0.0.1", 1), ("[::1]", 1), ("LOCALHOST.", 1)]


@pytest.mark.parametrize("route", LOCAL_ROUTES)
def test_the_name_of_the_machine(route: tuple[str, int] | None) -> None:
    both = {"node7.example": ("10.0.0.1",), "node7": ("10.0.0.1",)}
    assert Machine(hosts=both).choose(None, route) == "node7.example"
    short = {"node7.example": ("127.0.1.1",), "node7": ("10.0.0.1",)}
    assert Machine(hosts=short).choose(None, route) == "node7"


def test_a_name_that_leads_elsewhere_too() -> None:
    machine = Machine(hosts={"node7.example": ("10.0.0.9", "127.0.1.1", "10.0.0.1")})
    assert machine.choose() == "10.0.0.1"


@pytest.mark.parametrize("route", LOCAL_ROUTES)
@pytest.mark.parametrize("leads_to", ["127.0.1.1", "10.0.0.9", "0.0.0.0", ""])
def test_loopback_is_the_last_resort(
    route: tuple[str, int] | None, leads_to: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine = Machine(hosts={"node7": (leads_to,)} if leads_to else {})
    caplog.set_level(logging.INFO)
    assert machine.choose(None, route) == "127.0.0.1"
    (record,) = caplog.records
    assert record.levelno == (logging.INFO if route is None else logging.WARNING)
    assert "only nodes on this machine" in record.getMessage()
    assert "--local-addr" in record.getMessage()


def test_loopback_without_ipv4() -> None:
    assert Machine(own=frozenset({"::1"})).choose() == "::1"


# Deadlines


@pytest.fixture
def forever() -> Iterator[Callable[..., tuple[str, ...]]]:
    """A name resolution that does not end before the test does."""
    over = threading.Event()

    def hang(*_: object) -> tuple[str, ...]:
        over.wait(60)
        return ()

    yield hang
    over.set()


@pytest.mark.parametrize("case", [("node7", None), (None, ("redis", 6379))])
def test_a_name_resolution_that_hangs(
    case: tuple[str | None, tuple[str, int] | None], forever: Callable[..., tuple[str, ...]]
) -> None:
    network = Network(resolve=forever)
    began = time.monotonic()
    with pytest.raises(RendezvousSettingsError, match="--local-addr"):
        choose_address(*case, 0.05, network)
    assert time.monotonic() - began < 5


def test_an_own_name_that_hangs_is_done_without(
    forever: Callable[..., tuple[str, ...]], caplog: pytest.LogCaptureFixture
) -> None:
    network = Network(resolve=forever, is_own=lambda address: address == "127.0.0.1")
    assert choose_address(None, None, 0.05, network) == "127.0.0.1"
    assert "took longer than" in caplog.text


def test_errors_of_the_resolver_thread_are_raised_here() -> None:
    def broken(host: str) -> tuple[str, ...]:
        raise KeyError(host)

    with pytest.raises(KeyError):
        choose_address("node7", None, 30, Network(resolve=broken))


# The operating system


def test_what_is_an_address_of_this_machine() -> None:
    assert is_own("127.0.0.1")
    assert not is_own("203.0.113.254")


def test_the_route_to_loopback_begins_at_loopback() -> None:
    assert route_source("127.0.0.1", 9) == "127.0.0.1"


@pytest.mark.parametrize("host", ["a" * 70 + ".example", "a..b"])
def test_what_is_no_host_name(host: str) -> None:
    with pytest.raises(OSError, match="not a host name"):
        resolve(host)


def test_numeric_addresses_resolve_to_themselves() -> None:
    assert resolve("10.0.0.1") == ("10.0.0.1",)
    assert resolve("2001:db8::1") == ("2001:db8::1",)


def test_this_machine_has_an_address() -> None:
    assert choose_address("127.0.0.1", None, 30) == "127.0.0.1"
    assert choose_address(None, None, 30)
    with pytest.raises(RendezvousSettingsError, match="no address of this machine"):
        choose_address("203.0.113.254", None, 30)


# Text


def test_loopback_by_name_and_number() -> None:
    for host in ("localhost", "Localhost.", "a.localhost", "127.1.2.3", "::1", "[::1]"):
        assert is_loopback(host), host
    for host in ("node7", "10.0.0.1", "::", "localhost.example", "::ffff:10.0.0.1"):
        assert not is_loopback(host), host
    assert is_loopback("::ffff:127.0.0.1")


@pytest.mark.parametrize(
    ("host", "port", "text"),
    [
        ("10.0.0.1", 80, "10.0.0.1:80"),
        ("2001:db8::1", 80, "[2001:db8::1]:80"),
        ("fe80::1%eth0", 80, "[fe80::1%eth0]:80"),
        ("node-7.example", 65535, "node-7.example:65535"),
    ],
)
def test_host_and_port_there_and_back(host: str, port: int, text: str) -> None:
    assert join_host_port(host, port) == text
    assert split_host_port(text) == (host, port)
    assert split_host_port(f" {bracketed(host)} ", port) == (host, port)
    assert split_host_port(host, port) == (host, port)
    assert canonical(bracketed(host)) == host


@pytest.mark.parametrize(
    "text", ["", ":80", "a:b", "a:99999", "a:", "[::1", "::1]", "[]:80", "[a]:80", "a b:1", "a:1:2"]
)
def test_what_is_no_host_and_port(text: str) -> None:
    with pytest.raises(RendezvousSettingsError):
        split_host_port(text, 1)


@pytest.mark.parametrize("text", ["node7", "[::1]", "::1"])
def test_a_port_is_needed_without_a_default(text: str) -> None:
    with pytest.raises(RendezvousSettingsError, match="no port"):
        split_host_port(text)
