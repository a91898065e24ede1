"""What the clauses about backends are written with."""

from __future__ import annotations

from typing import Any

from rdzv.conformance.target import Target
from rdzv.errors import RendezvousConnectionError, RendezvousSettingsError
from rdzv.ports import Entry, Pulse, Question

RUN_ID_BYTES = 200
"""A run id of so many bytes is accepted."""
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


def connected(target: Target) -> dict[str, Any]:
    """A backend for each odd run id. One that no command line can give may be refused."""
    backends = {}
    for run_id in ODD_TEXTS:
        try:
            backends[run_id] = target.connect(run_id)
        except RendezvousSettingsError:
            assert "\0" in run_id or len(run_id.encode()) > RUN_ID_BYTES, repr(run_id)
    return backends


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
