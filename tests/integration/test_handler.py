"""The kit's clauses about handlers, in memory and on SQLite; and what needs no backend."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from rdzv.conformance.suites import HandlerSuite, marked
from rdzv.conformance.target import Target

from .handler_kit import Job, RealTimeMemoryTarget, bootstrap_of
from .sqlite_space import SqliteTarget


@marked(pytest.mark.full, "membership", "closing", "outages", "torch's handler")
class TestMemoryHandler(HandlerSuite):
    @pytest.fixture
    def target(self) -> Iterator[Target]:
        target = RealTimeMemoryTarget()
        yield target
        target.close()


class TestSqliteHandler(HandlerSuite):
    """A wipe loses the file, which is harder on its users than the loss of the rows."""

    @pytest.fixture
    def target(self, tmp_path: Path) -> Iterator[Target]:
        target = SqliteTarget(tmp_path / "rdzv.db", lose_file=True)
        yield target
        target.close()


def test_what_the_agent_asks() -> None:
    with Job("1:1", run_id="a run/of mine") as job:
        (node,), _ = job.start(1)
        assert node.handler.get_backend() == "memory"
        assert node.handler.get_run_id() == "a run/of mine"


def test_without_a_shared_store_a_free_port_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with Job("2:2") as job:
        nodes, infos = job.start(2)
        assert not any(node.handler.use_agent_store for node in nodes)
        host, port = bootstrap_of(infos[1])
        worker_0 = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)
        dist.TCPStore(host, port, is_master=False).set("key", "value")
        assert worker_0.get("key") == b"value"
