"""etcd with users, roles, tokens that expire, and certificates."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from rdzv.backends.etcd import EtcdRendezvousBackend
from rdzv.backends.etcd_options import EtcdOptions
from rdzv.conformance.store_kit import Background
from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Question
from rdzv.stores.etcd import EtcdStore

from .etcd_servers import SHORT_TOKENS, TOKEN_SECONDS, EtcdProcess, certificates, guard, tls_options
from .operations import TTL_SECONDS, reach, use_all


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The endpoint of a server that knows the documented user, and whose tokens live shortly."""
    process = EtcdProcess(tmp_path_factory.mktemp("guarded"), *SHORT_TOKENS)
    with contextlib.closing(process):
        guard(process.endpoint())
        yield process.endpoint()


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
    process = EtcdProcess(tmp_path / "server", *tls_options(files), scheme="https")
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
