"""The target on a real etcd, with all that may be done to it."""

from __future__ import annotations

import contextlib
from typing import Any

import pyetcd  # type: ignore[import-untyped]

from rdzv.backends.etcd_options import EtcdOptions, base_of
from rdzv.conformance.registered import RegisteredTarget
from rdzv.conformance.target import Server

from .operations import until

TIMES = {"read_timeout": "2"}
"""Clauses in which nothing answers wait for it."""
TOO_LARGE = "etcd refuses requests over 1.5 MB, unless its administrator allows more"


class OneMember(Server):
    """A cluster of one member answers before its log is written (etcd#14370): what is killed then
    has lost its last write. So it gets one more first, which nobody expects to find."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self.technology, self.version = server.technology, server.version

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    @property
    def address(self) -> tuple[str, int]:
        address: tuple[str, int] = self._server.address
        return address

    def cannot(self, control: str) -> str:
        return str(self._server.cannot(control))

    def pause(self) -> None:
        self._server.pause()

    def resume(self) -> None:
        self._server.resume()

    def kill(self) -> None:
        until(self._takes_one_more, 30.0)
        self._server.kill()

    def _takes_one_more(self) -> bool:
        host, port = self.address
        with contextlib.closing(pyetcd.client(host, port, timeout=5.0)) as client:
            try:
                client.put("one more", "")
            except pyetcd.Etcd3Exception:
                return False
        return True

    def restart(self, *, keep_data: bool) -> None:
        self._server.restart(keep_data=keep_data)


class EtcdTarget(RegisteredTarget):
    """An etcd server. A wipe loses what all runs have stored there."""

    short_ttl_seconds = 2.0
    call_seconds_max = 6.0

    def __init__(self, server: Any, **options: Any) -> None:
        super().__init__(
            "etcd-v3",
            server.endpoint(),
            {**TIMES, **options},
            without={"large_values": TOO_LARGE},
            server=server,
        )

    def corrupt(self, run_id: str = "job") -> None:
        self._call(lambda client: client.put(self._base(run_id) + b"s", "a text"))

    def wipe(self) -> None:
        everything = EtcdOptions().key_prefix.encode() + b"/"
        self._call(lambda client: client.delete_prefix(everything))

    def _base(self, run_id: str) -> bytes:
        return base_of(self._run_prefix + run_id, EtcdOptions())

    def _call(self, call: Any) -> None:
        host, port = self.server.address
        client = pyetcd.client(host, port, timeout=5.0)
        try:
            call(client)
        finally:
            client.close()
