"""What the conformance kit tries here: memory, SQLite, torch's own stores, and wrappers of them."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch.distributed as dist

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.conformance.target import Target
from rdzv.stores.base import Store, StoreClient, Unanswered
from rdzv.stores.memory import MemoryClient, MemoryStore


class MemoryTarget(Target):
    """On a clock that the clauses move."""

    name = "memory"
    real_time = False
    runs_on = "one process"
    short_ttl_seconds = 5.0
    without = MappingProxyType(
        dict.fromkeys(["durable", "processes"], "it is this process's memory")
    )

    def __init__(self) -> None:
        self.now = 1000.0
        self.space = MemorySpace(lambda: self.now)
        self.client = MemoryClient()
        self.clients = {"job": self.client}
        self.made: list[Any] = []

    def connect(self, run_id: str = "job") -> MemoryBackend:
        return MemoryBackend(self.space, run_id)

    def store(self, run_id: str = "job") -> Any:
        store = MemoryStore(self.clients.setdefault(run_id, MemoryClient()))
        self.made.append(store)
        return store

    def wipe(self) -> None:
        self.space.wipe()

    def corrupt(self, run_id: str = "job") -> None:
        backend = self.connect(run_id)
        found = backend.get_state()
        backend.set_state(b"somebody else's", None if found is None else found[1])

    def let_pass(self, seconds: float) -> None:
        self.now += seconds

    def close(self) -> None:
        while self.made:
            self.made.pop().close()


class StoreTarget(Target):
    """A store alone."""

    without: Mapping[str, str] = MappingProxyType(
        dict.fromkeys(["roster", "watch", "server_clock", "durable"], "it is a store alone")
    )

    def __init__(self, name: str, make: Callable[[], Any]) -> None:
        self.name = name
        self._make = make
        self.made: list[Any] = []

    def connect(self, run_id: str = "job") -> Any:
        raise NotImplementedError("it is a store")

    def store(self, run_id: str = "job") -> Any:
        store = self._make()
        if isinstance(store, Store):
            self.made.append(store)
        return store

    def close(self) -> None:
        while self.made:
            self.made.pop().close()


class WrappedTarget(StoreTarget):
    """The stores of another target, each behind something."""

    def __init__(self, target: Target, name: str, wrap: Callable[[Any], Any]) -> None:
        super().__init__(f"{name}({target.name})", lambda: wrap(target.store()))
        self._target = target
        self.without = target.without

    def close(self) -> None:
        self._target.close()


class Polling(MemoryClient):
    """Waits as a technology does that cannot push."""

    wait_for_keys = StoreClient.wait_for_keys
    wait_for_queue = StoreClient.wait_for_queue


class Unreliable:
    """Loses every other request, or the answer to it, and recognises what is repeated."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._requests = itertools.count()
        self._answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if not callable(attribute) or name in ("check_key_size", "check_value_size", "close"):
            return attribute
        mutates = "operation" in inspect.signature(attribute).parameters
        return functools.partial(self._lose, attribute, mutates)

    def _lose(self, request: Callable[..., Any], mutates: bool, *arguments: Any) -> Any:
        fate = next(self._requests) % 4
        if fate == 0:
            raise Unanswered("the request was lost")
        if mutates and arguments[-1] in self._answers:
            return self._answers[arguments[-1]]
        answer = request(*arguments)
        if mutates:
            self._answers[arguments[-1]] = answer
        if fate == 2:
            raise Unanswered("the answer was lost")
        return answer


def polling_store() -> StoreTarget:
    client = Polling()
    return StoreTarget("polling store", lambda: Store(client))


def unreliable_store() -> StoreTarget:
    client: Any = Unreliable(MemoryClient())
    return StoreTarget("unreliable store", lambda: Store(client))


def hash_store() -> StoreTarget:
    store = dist.HashStore()
    return StoreTarget("HashStore", lambda: store)


def file_store(folder: Path) -> StoreTarget:
    return StoreTarget("FileStore", lambda: dist.FileStore(str(folder / "store"), -1))


@functools.cache
def tcp_clients() -> list[Any]:
    """A server and clients of it. To connect can take seconds where name resolution is slow."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(server.clone() for _ in range(9))]


def tcp_store() -> StoreTarget:
    clients = tcp_clients()
    for client in clients:
        client.set_timeout(timedelta(seconds=300))
    for key in clients[0].list_keys():
        clients[0].delete_key(key)
    unused = iter(clients)
    return StoreTarget("TCPStore", lambda: next(unused))
