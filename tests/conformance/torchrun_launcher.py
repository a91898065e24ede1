"""torchrun, with eyes and faults: what a clause needs to see of an agent, and to do to it.

Runs torchrun's own ``main`` in this process. The environment says what besides:

``RDZV_TORCHRUN_TRACE``  a file that gets a JSON line for each thing below. Times are time.time():
                    all agents of a clause share this machine's clock.
    ``joining``     next_rendezvous() was called
    ``joined``      it returned, with rank, world size, and the place in which this agent added to
                    a counter in the round's store: 1..world size, if no older key is visible
    ``join_failed`` it raised
    ``announced``   the backend has taken the node's entry
    ``waiting``     num_nodes_waiting() turned positive between ``earliest`` and ``time``
    ``confirming``  the node is about to write an entry that names a round as confirmed

``RDZV_TORCHRUN_FAULT``  ``kill_before_confirm``: the agent kills itself when it is about to confirm
                    its first proposal, so after the round was frozen and before it can be final.

Only torch's interface and ``rdzv.ports`` are patched, so this works with every backend.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousParameters,
    rendezvous_handler_registry,
)
from torch.distributed.run import main

from rdzv.conformance.torchrun_kit import FAULT_VARIABLE, KILL_BEFORE_CONFIRM, TRACE_VARIABLE
from rdzv.ports import Entry, Pulse, Question, Roster

POLL_SECONDS = 0.005
COUNTER_KEY = "rdzv-conformance/arrived"


def trace(event: str, **values: Any) -> None:
    """Write a line."""
    line = json.dumps({"event": event, "time": time.time(), **values})
    with Path(os.environ[TRACE_VARIABLE]).open("a") as file:
        file.write(line + "\n")


def watch_roster() -> None:
    """Wrap ``announce`` of every roster class that will be defined."""

    def wrap(cls: type[Roster], /, **options: Any) -> None:
        if "announce" in cls.__dict__ and not getattr(cls.announce, "__isabstractmethod__", False):
            cls.announce = _watched_announce(cls.announce)  # type: ignore[method-assign]

    Roster.__init_subclass__ = classmethod(wrap)  # type: ignore[assignment]


def _watched_announce(announce: Any) -> Any:
    @functools.wraps(announce)
    def watched(self: Roster, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        if entry.round_label:
            trace("confirming", round_label=entry.round_label)
        if entry.round_label and os.environ.get(FAULT_VARIABLE) == KILL_BEFORE_CONFIRM:
            os.kill(os.getpid(), signal.SIGKILL)
        answer: Pulse = announce(self, entry, ttl_seconds, question)
        trace("announced")
        return answer

    return watched


def watch_handler(handler: RendezvousHandler) -> RendezvousHandler:
    """Trace the handler's calls, and ask it all the time what the agent asks ten times a second."""
    next_rendezvous = handler.next_rendezvous
    running = threading.Event()

    def traced_next_rendezvous() -> Any:
        running.clear()
        trace("joining")
        try:
            info = next_rendezvous()
        except BaseException as error:
            trace("join_failed", error=type(error).__name__, text=str(error))
            raise
        place = info.store.add(COUNTER_KEY, 1)
        trace("joined", rank=info.rank, world_size=info.world_size, place=place)
        running.set()
        return info

    handler.next_rendezvous = traced_next_rendezvous  # type: ignore[method-assign]
    threading.Thread(target=_poll, args=(handler, running), daemon=True).start()
    return handler


def _poll(handler: Any, running: threading.Event) -> None:
    earliest, before = time.time(), 0
    while True:
        if not running.is_set():
            before = 0
            running.wait()
        number = handler.num_nodes_waiting()
        now = time.time()
        if number > 0 and before <= 0 and running.is_set():
            trace("waiting", earliest=earliest, number=number)
        earliest, before = now, number
        time.sleep(POLL_SECONDS)


def watch_registry() -> None:
    """Watch every handler that torch makes from now on."""
    registry = rendezvous_handler_registry
    create_handler = registry.create_handler

    def create_watched(params: RendezvousParameters) -> RendezvousHandler:
        return watch_handler(create_handler(params))

    registry.create_handler = create_watched  # type: ignore[method-assign]


if __name__ == "__main__":
    watch_roster()
    watch_registry()
    main(sys.argv[1:])
