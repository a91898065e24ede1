"""What the cases of :mod:`rdzv.conformance.backend_cases` are written with."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from rdzv.errors import RendezvousConnectionError
from rdzv.ports import Entry, Pulse, Question

Case = Callable[["Space"], None]

CASES: list[Case] = []

LONG_SECONDS = 60.0
"""An entry that is to outlive its case, and a wait that must not be for nothing."""
DEADLINE_SECONDS = 20.0
ODD_TEXTS = [
    "job",
    "JOB",
    "job ",
    "job.1",
    "job/",
    "../job",
    "jo\0b",
    "job\n",
    "'; DROP TABLE rdzv_runs; --",
    '"job"',
    "%",
    "_",
    "j%b",
    "\N{LATIN SMALL LETTER E WITH ACUTE}",
    "e\N{COMBINING ACUTE ACCENT}",
    "\N{STEAM LOCOMOTIVE}" * 30,
    "x" * 300,
    "x" * 299 + "y",
]
"""Run ids and node ids that must not meet each other."""


class Space(ABC):
    """Where the backends of one case meet."""

    short_ttl_seconds: float
    """An entry that the case waits to see expire: short, but longer than a few calls take."""

    @abstractmethod
    def connect(self, run_id: str = "job") -> Any:
        """Another backend object on the same data; the space closes it when the case is over."""

    @abstractmethod
    def wipe(self) -> None:
        """Lose everything, as a server does that restarts without its data. What is connected
        may answer the next call with ``RendezvousConnectionError``, but not the one after it."""

    @abstractmethod
    def let_pass(self, seconds: float) -> None:
        """Let the backend's clock go on by so much."""

    def until(self, condition: Callable[[], object]) -> None:
        """Let time pass until the condition holds."""
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, "waited in vain"
            self.let_pass(self.short_ttl_seconds / 10)


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def announced(backend: Any, node_id: str, label: str = "", ttl: float = LONG_SECONDS) -> Pulse:
    entry = Entry(node_id, f"data of {node_id}".encode("utf-8", "surrogatepass"), label)
    pulse: Pulse = backend.announce(entry, ttl, Question())
    return pulse


def asked(backend: Any, peer_id: str = "", label: str = "") -> Pulse:
    pulse: Pulse = backend.beat("nobody", LONG_SECONDS, Question(peer_id, label))
    return pulse


def live_ids(backend: Any) -> list[str]:
    return [row.entry.node_id for row in backend.entries() if not row.withdrawn]


def tombstones(backend: Any) -> list[str]:
    return [row.entry.node_id for row in backend.entries() if row.withdrawn]


def after_loss(backend: Any) -> None:
    """The call that may find out that contact was lost."""
    try:
        backend.get_state()
    except RendezvousConnectionError:
        backend.get_state()
