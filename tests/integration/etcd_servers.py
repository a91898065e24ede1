"""etcd servers with options of their own, and clusters of them."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import shlex
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import grpc  # type: ignore[import-untyped]
import pytest
from pyetcd import etcdrpc  # type: ignore[import-untyped]

from rdzv.backends.etcd_server import etcd_program
from rdzv.conformance.process_server import ProcessServer
from rdzv.conformance.servers.local import free_port
from rdzv.conformance.target import Server
from rdzv.errors import RendezvousSettingsError

from .certificates import certify
from .operations import until

NAMES = "one", "two", "three"
CALL_SECONDS = 10.0
CLUSTER_TRIES_MAX = 3
TOKEN_SECONDS = 1
SHORT_TOKENS = f"--auth-token-ttl={TOKEN_SECONDS}", "--bcrypt-cost=4"
DOCS = Path(__file__).resolve().parents[2] / "docs" / "etcd.md"


class EtcdProcess(ProcessServer):
    """A server, or a member of a cluster, which answers once it has a leader."""

    def __init__(self, folder: Path, *options: str, scheme: str = "http") -> None:
        self._is_secure = scheme == "https"
        folder.mkdir(parents=True, exist_ok=True)
        command = [
            program_or_skip(),
            "--data-dir={data}/member",
            f"--listen-client-urls={scheme}://127.0.0.1:{{port}}",
            f"--advertise-client-urls={scheme}://127.0.0.1:{{port}}",
            *options,
        ]
        if not any("initial-cluster=" in option for option in options):
            peers = "http://127.0.0.1:{port_2}"
            command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
            command += [f"--initial-cluster=default={peers}"]
        super().__init__(command, folder, technology="etcd", version=version_of(command[0]))

    def endpoint(self) -> str:
        return "{}:{}".format(*self.address)

    def answers(self) -> bool:
        if self._is_secure or not self.waits_for_health:
            return super().answers()
        return bool(health(self.endpoint()) == "true")

    waits_for_health = True


class EtcdMember(EtcdProcess):
    """A member of a cluster: alone it has no leader, so it is not waited for."""

    waits_for_health = False


def program_or_skip() -> str:
    try:
        return etcd_program()
    except RendezvousSettingsError as error:
        pytest.skip(str(error))


@functools.cache
def version_of(program: str) -> str:
    said = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
    return re.search(r"etcd Version: (\S+)", said.stdout).group(1)


def health(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/health", timeout=1.0) as answer:
        return str(json.load(answer)["health"])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[EtcdMember]]:
    """Three members, of which one leads."""
    with contextlib.ExitStack() as stack:
        for left in reversed(range(CLUSTER_TRIES_MAX)):
            try:
                members = start_members(folder / str(left), stack)
                break
            except RuntimeError as error:  # somebody else took a port before its member did
                if not left or "address already in use" not in str(error):
                    raise
                stack.close()
        until(lambda: leader_among(members))
        yield members


def start_members(folder: Path, stack: contextlib.ExitStack) -> list[EtcdMember]:
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in NAMES}
    initial = ",".join(f"{name}={url}" for name, url in peers.items())
    members = []
    fast = ["--unsafe-no-fsync"] if "unsafe-no-fsync" in told_options() else []
    for name, url in peers.items():
        options = [f"--name={name}", f"--listen-peer-urls={url}", *fast]
        options += [f"--initial-advertise-peer-urls={url}", f"--initial-cluster={initial}"]
        member = EtcdMember(folder / name, *options)
        stack.enter_context(contextlib.closing(member))
        members.append(member)
    return members


class GuardedProcess(EtcdProcess):
    """With TLS in both directions, the documented user, and tokens that live for a second."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._files = certificates(folder)
        options = [*tls_options(self._files), *SHORT_TOKENS]
        super().__init__(folder / "server", *options, scheme="https")
        try:
            guard("{}:{}".format(*self.address), client_credentials(self._files))
        except BaseException:
            self.close()
            raise

    def endpoint(self) -> str:
        host, port = self.address
        names = {"ca_cert": "ca.pem", "cert": "client.pem", "key": "client.key"}
        query = "&".join(f"{name}={self._files[file]}" for name, file in names.items())
        return f"etcds://rdzv:secret@{host}:{port}?{query}"


class LeaderServer(Server):
    """A cluster as the kit torments it: what is done is done to the member that leads then."""

    technology = "etcd"

    def __init__(self, members: Sequence[EtcdMember]) -> None:
        self._members = members
        self._victim = members[0]

    @property
    def address(self) -> tuple[str, int]:
        return self._members[0].address

    def endpoint(self) -> str:
        return ";".join(member.endpoint() for member in self._members)

    def pause(self) -> None:
        self._victim = leader_of(self._members)
        self._victim.pause()

    def resume(self) -> None:
        self._victim.resume()

    def kill(self) -> None:
        self._victim = leader_of(self._members)
        self._victim.kill()

    def restart(self, *, keep_data: bool) -> None:
        assert keep_data, "a member without its data is no member"
        self._victim.restart(keep_data=True)


def told_options() -> str:
    done = subprocess.run(
        [program_or_skip(), "--help"], capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


def leader_of(members: Sequence[EtcdMember]) -> EtcdMember:
    """The member that leads."""
    found: list[EtcdMember] = []

    def is_found() -> bool:
        leader = leader_among(members)
        found.extend([] if leader is None else [leader])
        return bool(found)

    until(is_found)
    return found[0]


def leader_among(members: Sequence[EtcdMember]) -> EtcdMember | None:
    """The member that leads, if one does."""
    for member in members:
        with contextlib.suppress(grpc.RpcError), channel_to(member.endpoint()) as channel:
            status = etcdrpc.MaintenanceStub(channel).Status(
                etcdrpc.StatusRequest(), timeout=CALL_SECONDS, wait_for_ready=True
            )
            if status.leader == status.header.member_id:
                return member
    return None


@contextlib.contextmanager
def channel_to(endpoint: str, credentials: Any = None) -> Iterator[Any]:
    if credentials is None:
        channel = grpc.insecure_channel(endpoint)
    else:
        channel = grpc.secure_channel(endpoint, credentials)
    with contextlib.closing(channel):
        yield channel


def metric(endpoint: str, name: str) -> dict[str, float]:
    """The samples of a metric, by their labels."""
    with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=CALL_SECONDS) as answer:
        text = answer.read().decode()
    found = {}
    for line in text.splitlines():
        if line.startswith(name) and line[len(name)] in "{ ":
            labels, _, value = line[len(name) :].rpartition(" ")
            found[labels] = float(value)
    return found


def certificates(folder: Path) -> dict[str, str]:
    """An authority, and what it signed for a server and a client; by openssl."""
    if shutil.which("openssl") is None:
        pytest.skip("it takes openssl to make certificates")

    run = functools.partial(subprocess.run, check=True, capture_output=True, cwd=folder)
    certify(lambda *words: run(words), "client")
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return {name: str(folder / name) for name in names}


def tls_options(files: dict[str, str]) -> list[str]:
    """What a server is told that wants certificates of its clients."""
    return [
        f"--cert-file={files['server.pem']}",
        f"--key-file={files['server.key']}",
        f"--trusted-ca-file={files['ca.pem']}",
        "--client-cert-auth",
    ]


def client_credentials(files: dict[str, str]) -> Any:
    names = ("ca.pem", "client.key", "client.pem")
    return grpc.ssl_channel_credentials(*(Path(files[name]).read_bytes() for name in names))


class Administrator:
    """What ``etcdctl`` does, by the same requests."""

    def __init__(self, endpoint: str, credentials: Any = None) -> None:
        self._endpoint, self._credentials = endpoint, credentials

    def ask(self, method: str, request: Any) -> Any:
        with channel_to(self._endpoint, self._credentials) as channel:
            return getattr(etcdrpc.AuthStub(channel), method)(request, timeout=CALL_SECONDS)

    def run(self, line: str) -> None:
        program, kind, verb, *rest = shlex.split(line)
        assert program == "etcdctl"
        if (kind, verb) == ("role", "add"):
            self.ask("RoleAdd", etcdrpc.AuthRoleAddRequest(name=rest[0]))
        elif (kind, verb) == ("role", "grant-permission"):
            role, prefix, access, key = rest
            assert (prefix, access) == ("--prefix=true", "readwrite")
            end = key[:-1] + chr(ord(key[-1]) + 1)
            permission = etcdrpc.Permission(
                permType=etcdrpc.Permission.READWRITE, key=key.encode(), range_end=end.encode()
            )
            granted = etcdrpc.AuthRoleGrantPermissionRequest(name=role, perm=permission)
            self.ask("RoleGrantPermission", granted)
        elif (kind, verb) == ("user", "add"):
            user, _, password = rest[0].partition(":")
            self.ask("UserAdd", etcdrpc.AuthUserAddRequest(name=user, password=password))
        else:
            assert (kind, verb) == ("user", "grant-role")
            self.ask("UserGrantRole", etcdrpc.AuthUserGrantRoleRequest(user=rest[0], role=rest[1]))

    def enable(self) -> None:
        for line in ("role add root", "user add root:rootsecret", "user grant-role root root"):
            self.run(f"etcdctl {line}")
        self.ask("AuthEnable", etcdrpc.AuthEnableRequest())


def guard(endpoint: str, credentials: Any = None) -> None:
    """Enable authentication, with the documented user and role."""
    administrator = Administrator(endpoint, credentials)
    (lines,) = re.findall(
        r"<!-- test: least privilege -->\n```\n(.*?)\n```", DOCS.read_text(), re.S
    )
    for line in lines.splitlines():
        administrator.run(line)
    administrator.enable()
