"""Redis as companies run it: a replica pair behind Sentinels, a cluster, and TLS with an ACL user.

Rules:

* All of it are processes of this machine, each a
  :class:`rdzv.conformance.servers.local.LocalServer`: so nothing is left behind, whatever happens.
* What is done to the data is done on all masters.
* A group is paused, killed and restarted as a whole; a single server of it by a method of its own.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis

from rdzv.conformance.outcomes import NOT_RUN
from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.servers.base import (
    PASSWORD,
    RealServer,
    ServerFailed,
    ServerUnavailable,
)
from rdzv.conformance.servers.local import LocalServer
from rdzv.conformance.servers.programs import Program
from rdzv.conformance.servers.technologies import Redis

from .redis_members import ADMIN, Member, SecureMember, SentinelMember

SETTLE_SECONDS_MAX = 60.0
POLL_SECONDS = 0.05
ASK_SECONDS_MAX = 2.0
MASTER = "mymaster"
SENTINELS = 3
QUORUM = 2
DOWN_AFTER_MS = 2000
"""A replica is promoted when two Sentinels have not heard of the master for so long."""
FAILOVER_TIMEOUT_MS = 3000
TILT_PERIOD_MS = 2000
"""Sentinels that have been paused do nothing for so long, 30 s in production. All their other
times are production's: what a failover leaves behind is there for as long as it would be."""
CLUSTER_NODES = 3
CLUSTER_SLOTS = 16384
NODE_TIMEOUT_MS = 2000


def no_retry() -> Any:
    """redis-py asks once."""
    return redis.retry.Retry(redis.backoff.NoBackoff(), 0)


def wait_until(what: str, condition: Callable[[], object]) -> None:
    """Poll until the servers are as they should be. Raises :class:`ServerFailed`."""
    deadline, pause = time.monotonic() + SETTLE_SECONDS_MAX, threading.Event()
    reason: object = "it is not"
    while True:
        try:
            if condition():
                return
        except (redis.RedisError, OSError) as error:
            reason = repr(error)
        if time.monotonic() > deadline:
            raise ServerFailed(f"not within {SETTLE_SECONDS_MAX:.0f} s: {what} ({reason})")
        pause.wait(POLL_SECONDS)


class Topology(RealServer):
    """Servers that belong together. They run and know each other when it is made."""

    name: str

    def __init__(self) -> None:
        program = Redis().find()
        if program is None:
            raise ServerUnavailable(Redis.how)
        self._program = program
        self.members: list[LocalServer] = []
        try:
            self.check(program)
            self.found()
            self.settle()
        except BaseException:
            self.close()
            raise
        self.technology, self.version = self.members[0].technology, self.members[0].version

    def check(self, program: Program) -> None:
        """Raises :class:`ServerUnavailable` where this machine lacks something that it takes."""
        return

    @abstractmethod
    def found(self) -> None:
        """Start the members."""

    @abstractmethod
    def settle(self) -> None:
        """Return when all members do what they are for."""

    @abstractmethod
    def masters(self) -> list[LocalServer]:
        """Those that hold the data."""

    def start(self, member: Redis) -> LocalServer:
        """Start one more member."""
        self.members.append(LocalServer(member, self._program))
        return self.members[-1]

    @contextmanager
    def client(self, member: LocalServer) -> Iterator[Any]:
        """A client that may do anything."""
        times = {"socket_timeout": ASK_SECONDS_MAX, "socket_connect_timeout": ASK_SECONDS_MAX}
        url = self.url_of(member)
        with redis.Redis.from_url(url, retry=no_retry(), decode_responses=True, **times) as client:
            yield client

    def url_of(self, member: LocalServer) -> str:
        """Of somebody who may do anything."""
        return member.endpoint()

    def on_masters(self, do: Callable[[Any], object]) -> None:
        """Call with a client of each of them."""
        for member in self.masters():
            with self.client(member) as client:
                do(client)

    @property
    def address(self) -> tuple[str, int]:
        return self.members[0].address

    def pause(self) -> None:
        for member in self.members:
            member.pause()

    def resume(self) -> None:
        for member in self.members:
            member.resume()
        self.settle()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def restart(self, *, keep_data: bool) -> None:
        self.kill()
        for member in self.members:
            member.restart(keep_data=keep_data)
        self.settle()

    def close(self) -> None:
        for member in reversed(self.members):
            member.close()


class SentinelGroup(Topology):
    """A master, its replica, and three Sentinels that agree by two."""

    name = "redis-sentinel"

    def found(self) -> None:
        quick = ("repl-diskless-sync-delay 0", "repl-ping-replica-period 1")
        first = self.start(Member(*quick))
        host, port = first.address
        second = self.start(Member(*quick, f"replicaof {host} {port}"))
        # A Sentinel that sees no replica at its first look sees it at its second, long after.
        wait_until("the replica follows", lambda: self._follows(second))
        self._data = [first, second]
        self._sentinels = [self.start(self._sentinel(host, port)) for _ in range(SENTINELS)]

    @staticmethod
    def _sentinel(host: str, port: int) -> SentinelMember:
        return SentinelMember(
            f"sentinel monitor {MASTER} {host} {port} {QUORUM}",
            f"sentinel down-after-milliseconds {MASTER} {DOWN_AFTER_MS}",
            f"sentinel failover-timeout {MASTER} {FAILOVER_TIMEOUT_MS}",
        )

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self.endpoint_for("")

    def endpoint_for(self, credentials: str) -> str:
        """With ``user:password@`` for master and replica, or with ""."""
        places = ",".join("{}:{}".format(*one.address) for one in self._sentinels)
        return f"redis+sentinel://{credentials}{places}/{MASTER}"

    def masters(self) -> list[LocalServer]:
        return [self.master()]

    def master(self) -> LocalServer:
        """The one that the Sentinels name now."""
        named = self._named(self._sentinels[0])
        (found,) = (one for one in self._data if one.address == named)
        return found

    def settle(self) -> None:
        for one in self._sentinels:
            with self.client(one) as client:
                client.execute_command("SENTINEL", "DEBUG", "tilt-period", TILT_PERIOD_MS)
        wait_until("the Sentinels agree, and the replica follows", self._is_whole)

    def failover(self, *, kill: bool) -> LocalServer:
        """Let the replica take over: from a master that is killed, or from one that goes on, as a
        master until a Sentinel makes it a replica, ten seconds later. Returns the former master
        once the Sentinels name the other one."""
        former = self.master()
        if kill:
            former.kill()
        else:
            with self.client(self._sentinels[0]) as client:
                client.execute_command("SENTINEL", "FAILOVER", MASTER)
        self.wait_for_another(former)
        return former

    def wait_until_left(self, former: LocalServer) -> bool:
        """Return when nobody runs a script on a former master any more: whether it still takes
        itself for one."""
        with self.client(former) as client:
            wait_until(
                "nobody uses the former master",
                lambda: all(one["cmd"] != "evalsha" for one in client.client_list()),
            )
            return bool(client.info("replication")["role"] == "master")

    def wait_for_another(self, former: LocalServer) -> None:
        """Return when all Sentinels name another master than this."""
        wait_until("another master is named", lambda: self._all_name_another(former))

    def mend(self) -> None:
        """Start the members that are dead, and wait until all is as it was."""
        for member in self.members:
            if not self._runs(member):
                member.restart(keep_data=True)
        self.settle()

    def _runs(self, member: LocalServer) -> bool:
        try:
            with self.client(member) as client:
                return bool(client.ping())
        except redis.RedisError:
            return False

    def _all_name_another(self, former: LocalServer) -> bool:
        names = {self._named(one) for one in self._sentinels}
        return len(names) == 1 and former.address not in names

    def _named(self, sentinel: LocalServer) -> tuple[str, int]:
        with self.client(sentinel) as client:
            host, port = client.execute_command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", MASTER)
        return str(host), int(port)

    def _follows(self, replica: LocalServer) -> bool:
        with self.client(replica) as client:
            said = client.info("replication")
        return bool(said["role"] == "slave" and said["master_link_status"] == "up")

    def _is_whole(self) -> bool:
        names = {self._named(one) for one in self._sentinels}
        if len(names) != 1:
            return False
        master = self.master()
        if not all(one is master or self._follows(one) for one in self._data):
            return False
        return all(self._sees_all(one) for one in self._sentinels)

    def _sees_all(self, sentinel: LocalServer) -> bool:
        with self.client(sentinel) as client:
            if client.info("sentinel")["sentinel_tilt"]:
                return False
            (seen,) = client.sentinel_masters().values()
            replicas = client.sentinel_slaves(MASTER)
        well = [one for one in replicas if not (one["is_sdown"] or one["is_disconnected"])]
        others = seen["num-other-sentinels"]
        is_well = not (seen["is_sdown"] or seen["is_odown"] or seen["is_disconnected"])
        return is_well and others == SENTINELS - 1 and len(well) == len(self._data) - 1


class Cluster(Topology):
    """Three masters that share the slots."""

    name = "redis-cluster"

    def check(self, program: Program) -> None:
        version = program.version()
        if not version[:1].isdigit() or int(version.partition(".")[0]) < 7:
            raise ServerUnavailable(f"{program.path} is {version}: cluster-port takes Redis 7")

    def found(self) -> None:
        options = ["--cluster-enabled", "yes", "--cluster-port", "{port_2}"]
        options += ["--cluster-config-file", "{folder}/nodes"]
        options += ["--cluster-node-timeout", str(NODE_TIMEOUT_MS)]
        for _ in range(CLUSTER_NODES):
            self.start(Member(options=options))
        host, port = self.address
        for number, member in enumerate(self.members):
            begin, end = (CLUSTER_SLOTS * n // CLUSTER_NODES for n in (number, number + 1))
            with self.client(member) as client:
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", begin, end - 1)
                client.execute_command("CLUSTER", "SET-CONFIG-EPOCH", number + 1)
        with self.client(self.members[0]) as client:
            bus = client.config_get("cluster-port")["cluster-port"]
        for member in self.members[1:]:
            with self.client(member) as client:
                client.execute_command("CLUSTER", "MEET", host, port, bus)

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self.endpoint_for("")

    def endpoint_for(self, credentials: str) -> str:
        """With ``user:password@``, or with ""."""
        places = ",".join("{}:{}".format(*one.address) for one in self.members)
        return f"redis+cluster://{credentials}{places}"

    def masters(self) -> list[LocalServer]:
        return self.members

    def settle(self) -> None:
        wait_until("all nodes know a whole cluster", lambda: all(map(self._is_ok, self.members)))

    def move(self, key: bytes, meanwhile: Callable[[], object]) -> None:
        """Give the slot of a key, which must be empty, to the next node; call ``meanwhile`` when
        the slot is on its way."""
        names, slot = [], 0
        for member in self.members:
            with self.client(member) as client:
                names.append(client.execute_command("CLUSTER", "MYID"))
                slot = int(client.execute_command("CLUSTER", "KEYSLOT", key))
        numbers = range(CLUSTER_NODES)
        owner = max(n for n in numbers if CLUSTER_SLOTS * n // CLUSTER_NODES <= slot)
        heir = (owner + 1) % CLUSTER_NODES

        def tell(index: int, *words: str) -> None:
            with self.client(self.members[index]) as client:
                client.execute_command("CLUSTER", "SETSLOT", slot, *words)

        tell(heir, "IMPORTING", names[owner])
        tell(owner, "MIGRATING", names[heir])
        meanwhile()
        for index in (heir, owner, *set(numbers) - {heir, owner}):
            tell(index, "NODE", names[heir])

    def _is_ok(self, member: LocalServer) -> bool:
        with self.client(member) as client:
            lines = client.execute_command("CLUSTER", "INFO").splitlines()
        return {"cluster_state:ok", f"cluster_known_nodes:{CLUSTER_NODES}"}.issubset(lines)


class SecureServer(Topology):
    """One server behind TLS, which asks for a certificate, a user and a password."""

    name = "redis-tls"

    def check(self, program: Program) -> None:
        if shutil.which("openssl") is None:
            raise ServerUnavailable("apt install openssl, to make certificates")

    def found(self) -> None:
        self._secure = SecureMember()
        try:
            self.start(self._secure)
        except ServerFailed as error:
            if "tls" in str(error).lower() and "argument" in str(error).lower():
                raise ServerUnavailable(f"it was built without TLS: {error}") from error
            raise

    def endpoint(self, address: tuple[str, int] | None = None) -> str:
        return self.members[0].endpoint(address)

    def url_of(self, member: LocalServer) -> str:
        return self._secure.url(ADMIN, PASSWORD, *member.address)

    def masters(self) -> list[LocalServer]:
        return self.members

    def settle(self) -> None:
        """One server answers when it has started."""


KINDS: dict[str, type[Topology]] = {
    kind.name: kind for kind in (SentinelGroup, Cluster, SecureServer)
}
NAMES = tuple(KINDS)


class Topologies:
    """Those of a module of tests, each started when it is first asked for."""

    def __init__(self) -> None:
        self._made: dict[str, Topology | ServerUnavailable] = {}

    def get(self, request: pytest.FixtureRequest, name: str) -> Any:
        """The topology. Where it cannot be had, the test of ``request`` is not run, as the report
        says."""
        if name not in self._made:
            try:
                self._made[name] = KINDS[name]()
            except ServerUnavailable as error:
                self._made[name] = error
        found = self._made[name]
        if isinstance(found, ServerUnavailable):
            request.node.stash[NOT_RUN] = f"{name}: {found}"
            pytest.skip(request.node.stash[NOT_RUN])
        return found

    def close(self) -> None:
        """End all servers."""
        with contextlib.ExitStack() as stack:
            for made in self._made.values():
                if isinstance(made, Topology):
                    stack.callback(made.close)
        self._made.clear()


class TopologyTarget(RegisteredTarget):
    """What torchrun would use on a topology. A wipe loses what all runs have stored there."""

    short_ttl_seconds = 0.3

    def __init__(self, topology: Topology, **options: str) -> None:
        self._topology = topology
        configuration = {"read_timeout": "2", **options}
        super().__init__("redis", topology.endpoint(), configuration, server=topology)
        self.name = topology.name

    def corrupt(self, run_id: str = "job") -> None:
        def spoil(client: Any) -> None:
            for key in client.scan_iter(match="*:state"):
                client.set(key, "a text")

        self._topology.on_masters(spoil)

    def wipe(self) -> None:
        self._topology.on_masters(lambda client: client.flushall())
