"""torch's own dynamic handler on the backend, of which it knows the document alone.

Its handlers compare the clocks of their machines, which are one here, and agree on a bootstrap
address in a later round only with ``TORCH_DISABLE_SHARE_RDZV_TCP_STORE``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from rdzv.conformance.handler_kit import (
    PATIENCE_SECONDS,
    Job,
    handler_book,
    hold_for,
    in_thread,
    wait_until,
)
from rdzv.conformance.target import Target

case = handler_book("torch's handler")

KEEP_ALIVE_ATTEMPTS = 3
"""At one second each."""


class TorchJob(Job):
    """Handlers of torch's own, two to three."""

    def __init__(self, target: Target) -> None:
        super().__init__(target, "2:3")
        self.handlers: list[Any] = []

    def handler(self) -> Any:
        backend = self.open_backend()
        parameters = RendezvousParameters(
            backend=backend.name,
            endpoint="",
            run_id=self.run_id,
            min_nodes=self.min_nodes,
            max_nodes=self.max_nodes,
            local_addr="127.0.0.1",
            join_timeout=60,
            last_call_timeout=1,
            keep_alive_interval=1,
            keep_alive_max_attempt=KEEP_ALIVE_ATTEMPTS,
        )
        handler = create_handler(self.open_store(), backend, parameters)
        self.handlers.append(handler)
        return handler

    @contextmanager
    def running(self) -> Iterator[TorchJob]:
        """Until the end of the block. Without the variable, torch keeps rank 0's first address."""
        with mock.patch.dict(os.environ, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}):
            try:
                yield self
            finally:
                for handler in self.handlers:
                    handler._stop_heartbeats()


@case
def torchs_handler_forms_rounds_and_closes_the_run(target: Target) -> None:
    with TorchJob(target).running() as job:
        handlers = [job.handler(), job.handler()]
        joins = [in_thread(handler.next_rendezvous) for handler in handlers]
        check([join.result(PATIENCE_SECONDS) for join in joins], 2)
        hold_for(
            "heartbeats keep both alive",
            lambda: all(len(node._state_holder.state.participants) == 2 for node in job.handlers),
            KEEP_ALIVE_ATTEMPTS + 1.0,
        )

        late = job.handler()
        joining = in_thread(late.next_rendezvous)
        wait_until("both are told", lambda: all(node.num_nodes_waiting() for node in handlers))
        joins = [*(in_thread(handler.next_rendezvous) for handler in handlers), joining]
        check([join.result(PATIENCE_SECONDS) for join in joins], 3)

        assert not any(handler.is_closed() for handler in job.handlers)
        assert handlers[0].shutdown()
        wait_until("all hear of it", lambda: all(handler.is_closed() for handler in job.handlers))
        with pytest.raises(RendezvousClosedError):
            job.handler().next_rendezvous()


def check(infos: Sequence[RendezvousInfo], count: int) -> None:
    assert sorted(info.rank for info in infos) == list(range(count))
    assert {info.world_size for info in infos} == {count}
    assert len({str(vars(info.bootstrap_store_info)) for info in infos}) == 1
    infos[0].store.set("key", "value")
    assert [info.store.get("key") for info in infos] == [b"value"] * count
