"""etcd servers with options of their own, and clusters of them."""

from __future__ import annotations

import contextlib
import json
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

NAMES = "one", "two", "three"
CALL_SECONDS = 10.0


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
            peers = f"http://127.0.0.1:{free_port()}"
            command += [f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}"]
            command += [f"--initial-cluster=default={peers}"]
        super().__init__(command, folder, technology="etcd")

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


def health(endpoint: str) -> str:
    with urllib.request.urlopen(f"http://{endpoint}/health", timeout=1.0) as answer:
        return str(json.load(answer)["health"])


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[EtcdMember]]:
    """Three members, of which one leads."""
    peers = {name: f"http://127.0.0.1:{free_port()}" for name in NAMES}
    initial = ",".join(f"{name}={url}" for name, url in peers.items())
    with contextlib.ExitStack() as stack:
        members = []
        for name, url in peers.items():
            options = [f"--name={name}", f"--listen-peer-urls={url}", "--unsafe-no-fsync"]
            options += [f"--initial-advertise-peer-urls={url}", f"--initial-cluster={initial}"]
            if "unsafe-no-fsync" not in told_options():
                options.remove("--unsafe-no-fsync")
            member = EtcdMember(folder / name, *options)
            stack.enter_context(contextlib.closing(member))
            members.append(member)
        yield members


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
    """The member that leads, once there is one."""
    for member in members:
        with contextlib.suppress(grpc.RpcError), channel_to(member.endpoint()) as channel:
            status = etcdrpc.MaintenanceStub(channel).Status(
                etcdrpc.StatusRequest(), timeout=CALL_SECONDS, wait_for_ready=True
            )
            if status.leader == status.header.member_id:
                return member
    raise AssertionError("no member leads")


@contextlib.contextmanager
def channel_to(endpoint: str) -> Iterator[Any]:
    with contextlib.closing(grpc.insecure_channel(endpoint)) as channel:
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

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], check=True, capture_output=True, cwd=folder)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    openssl("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca")
    for name in ("server", "client"):
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
        openssl("req", *key, "-keyout", f"{name}.key", "-out", "csr", "-subj", f"/CN={name}")
        signed = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names"]
        openssl("x509", "-req", "-in", "csr", *signed, "-out", f"{name}.pem", "-days", "2")
    names = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")
    return {name: str(folder / name) for name in names}
