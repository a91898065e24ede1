"""etcd with users, roles, tokens that expire, and certificates."""

from __future__ import annotations

import contextlib
import re
import shlex
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from pyetcd import etcdrpc  # type: ignore[import-untyped]

from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .etcd_servers import CALL_SECONDS, EtcdProcess, certificates, channel_to
from .operations import reach, use_all
from .test_etcd import TTL_SECONDS

DOCS = Path(__file__).resolve().parents[2] / "docs" / "etcd.md"
TOKEN_SECONDS = 1


class Administrator:
    """What ``etcdctl`` does, by the same requests."""

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint

    def ask(self, method: str, request: Any) -> Any:
        with channel_to(self._endpoint) as channel:
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


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server that knows the documented user, and whose tokens live shortly."""
    options = (f"--auth-token-ttl={TOKEN_SECONDS}", "--bcrypt-cost=4")
    process = EtcdProcess(tmp_path_factory.mktemp("guarded"), *options)
    with contextlib.closing(process):
        guard(process.endpoint())
        yield process.endpoint()


def guard(endpoint: str) -> None:
    """Enable authentication, with the documented user and role."""
    administrator = Administrator(endpoint)
    (lines,) = re.findall(
        r"<!-- test: least privilege -->\n```\n(.*?)\n```", DOCS.read_text(), re.S
    )
    for line in lines.splitlines():
        administrator.run(line)
    administrator.enable()


def test_the_documented_rights_are_enough(guarded: str, opened: Any) -> None:
    endpoint = f"etcd://rdzv:secret@{guarded}"
    backend = opened(EtcdRendezvousBackend(endpoint, "run"))
    use_all(backend, opened(EtcdStore(endpoint, "run")))
    options = EtcdOptions(password="secret")
    other = opened(EtcdRendezvousBackend(f"etcd://rdzv@{guarded}", "by a file", options))
    other.open()


def test_nothing_outside_the_documented_keys_works(guarded: str, opened: Any) -> None:
    options = EtcdOptions(key_prefix="other")
    backend = opened(EtcdRendezvousBackend(f"etcd://rdzv:secret@{guarded}", "run", options))
    with pytest.raises(RendezvousConnectionError, match=r"docs/etcd\.md lists"):
        backend.open()
    with pytest.raises(RendezvousConnectionError, match="lacks a right"):
        backend.wait_for_change(None, 1.0)


@pytest.mark.parametrize("credentials", ["", "rdzv:hunter22@", "nobody:hunter22@"])
def test_wrong_credentials_are_told_at_start(guarded: str, opened: Any, credentials: str) -> None:
    backend = opened(EtcdRendezvousBackend(f"etcd://{credentials}{guarded}", "run"))
    with pytest.raises(RendezvousConnectionError, match="password_file") as caught:
        backend.open()
    assert "hunter22" not in str(caught.value)


@pytest.mark.full
def test_a_token_that_expires_is_renewed(guarded: str, opened: Any) -> None:
    endpoint = f"etcd://rdzv:secret@{guarded}"
    backend = opened(EtcdRendezvousBackend(endpoint, "long"))
    store = opened(EtcdStore(endpoint, "long", timedelta(seconds=30)))
    _, token, _ = backend.set_state(b"1")
    backend.announce(Entry("node", b""), TTL_SECONDS, Question())
    waits = [
        Background(lambda: backend.wait_for_change(token, TTL_SECONDS)),
        Background(lambda: store.get("k")),
    ]
    for _ in range(3):
        threading.Event().wait(2.5 * TOKEN_SECONDS)
        assert backend.beat("node", TTL_SECONDS, Question()).present
    threading.Event().wait(2.5 * TOKEN_SECONDS)
    found = backend.set_state(b"2", token)[:2]
    store.set("k", "v")
    assert [wait.result() for wait in waits] == [found, b"v"]


def test_a_password_for_a_server_that_asks_for_none_is_no_error(
    tmp_path: Path, opened: Any
) -> None:
    with contextlib.closing(EtcdProcess(tmp_path)) as process:
        endpoint = f"etcd://u:password@{process.endpoint()}"
        opened(EtcdRendezvousBackend(endpoint, "run")).open()


def test_authentication_that_is_enabled_later_stops_nobody_with_a_password(
    tmp_path: Path, opened: Any
) -> None:
    with contextlib.closing(EtcdProcess(tmp_path, "--bcrypt-cost=4")) as process:
        backend = opened(EtcdRendezvousBackend(f"etcd://rdzv:secret@{process.endpoint()}", "run"))
        _, token, _ = backend.set_state(b"1")
        guard(process.endpoint())
        assert backend.set_state(b"2", token)[2]
        assert backend.get_state()[0] == b"2"


@pytest.mark.parametrize("by", ["url", "conf"])
def test_tls_with_client_certificates(tmp_path: Path, opened: Any, by: str) -> None:
    files = certificates(tmp_path)
    options = [f"--cert-file={files['server.pem']}", f"--key-file={files['server.key']}"]
    options += [f"--trusted-ca-file={files['ca.pem']}", "--client-cert-auth"]
    process = EtcdProcess(tmp_path / "server", *options, scheme="https")
    with contextlib.closing(process):
        endpoint, mine = process.endpoint(), EtcdOptions()
        names = {"ca_cert": "ca.pem", "cert": "client.pem", "key": "client.key"}
        paths: dict[str, Any] = {name: files[file] for name, file in names.items()}
        if by == "url":
            endpoint = f"etcds://{endpoint}?{'&'.join(f'{n}={p}' for n, p in paths.items())}"
        else:
            mine = EtcdOptions(protocol="https", **paths)
        backend = opened(EtcdRendezvousBackend(endpoint, "run", mine))
        reach(backend.open)
        use_all(backend, opened(EtcdStore(endpoint, "run", options=mine)))
        plain = opened(EtcdRendezvousBackend(process.endpoint(), "run"))
        with pytest.raises(RendezvousConnectionError, match="etcds"):
            plain.open()
        trusting_nobody = f"etcds://{process.endpoint()}"
        with pytest.raises(RendezvousConnectionError, match="ca_cert"):
            opened(EtcdRendezvousBackend(trusting_nobody, "run")).open()
