"""Our backends under torch's own dynamic handler, which knows nothing of rosters and watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    RendezvousBackend,
    create_handler,
)

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.stores.memory import MemoryClient, MemoryStore
from rdzv.stores.sql import create_backend

from .handler_kit import PATIENCE_SECONDS, hold_for, in_thread, together, wait_until

Connect = Callable[[RendezvousParameters], tuple[RendezvousBackend, dist.Store]]
Factory = Callable[[], AbstractContextManager[Connect]]

KEEP_ALIVE_ATTEMPTS = 3
"""At one second each; torch compares the clocks of nodes, which are one here."""


@contextmanager
def memory() -> Iterator[Connect]:
    space, client = MemorySpace(), MemoryClient()
    yield lambda params: (MemoryBackend(space, params.run_id), MemoryStore(client))


@contextmanager
def sqlite() -> Iterator[Connect]:
    made: list[Any] = []

    def connect(params: RendezvousParameters) -> tuple[RendezvousBackend, dist.Store]:
        pair = create_backend(params)
        made.extend(pair)
        return pair

    yield connect
    for item in made:
        item.close()


class TorchJob:
    """Handlers of torch's own on one of our backends."""

    def __init__(self, backend: str, connect: Connect, endpoint: str) -> None:
        self._backend = backend
        self._connect = connect
        self._endpoint = endpoint
        self.handlers: list[Any] = []

    def node(self) -> RendezvousHandler:
        params = RendezvousParameters(
            backend=self._backend,
            endpoint=self._endpoint,
            run_id="job",
            min_nodes=2,
            max_nodes=3,
            local_addr="127.0.0.1",
            join_timeout=60,
            last_call_timeout=1,
            keep_alive_interval=1,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
        backend, store = self._connect(params)
        handler = create_handler(store, backend, params)
        self.handlers.append(handler)
        return handler


def check(infos: list[RendezvousInfo]) -> None:
    assert sorted(info.rank for info in infos) == list(range(len(infos)))
    assert {info.world_size for info in infos} == {len(infos)}
    assert len({str(vars(info.bootstrap_store_info)) for info in infos}) == 1
    infos[0].store.set("key", "value")
    assert [info.store.get("key") for info in infos] == [b"value"] * len(infos)


def join_live_grow_and_close(job: TorchJob) -> None:
    handlers = [job.node(), job.node()]
    joins = [in_thread(handler.next_rendezvous) for handler in handlers]
    check([join.result(PATIENCE_SECONDS) for join in joins])
    hold_for(
        "heartbeats keep both alive",
        lambda: all(len(node._state_holder.state.participants) == 2 for node in job.handlers),
        KEEP_ALIVE_ATTEMPTS + 1.0,
    )

    late = job.node()
    joining = in_thread(late.next_rendezvous)
    wait_until("both are told", lambda: all(node.num_nodes_waiting() for node in handlers))
    joins = [*(in_thread(handler.next_rendezvous) for handler in handlers), joining]
    infos = [join.result(PATIENCE_SECONDS) for join in joins]
    check(infos)
    assert len(infos) == 3

    assert not any(handler.is_closed() for handler in job.handlers)
    assert handlers[0].shutdown()
    wait_until("all hear of it", lambda: all(handler.is_closed() for handler in job.handlers))
    with pytest.raises(RendezvousClosedError):
        job.node().next_rendezvous()


def test_our_backends_serve_torchs_handler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without it, torch's own handler does not survive a change of its nodes.
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")

    def on(name: str, factory: Factory) -> None:
        with factory() as connect:
            job = TorchJob(name, connect, str(tmp_path / f"{name}.db"))
            try:
                join_live_grow_and_close(job)
            finally:
                for handler in job.handlers:
                    handler._stop_heartbeats()

    def on_memory() -> None:
        on("memory", memory)

    def on_sqlite() -> None:
        on("sqlite", sqlite)

    together(on_memory, on_sqlite)
