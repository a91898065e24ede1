"""How the workers of one round find rank 0: an address that its agent publishes.

Rules:

* Each round has its own server on a free port; nothing of an earlier round can be read by mistake.
* Rank 0 begins with it when it confirms the round, and says in its entry where it serves. So the
  final document mostly tells everybody the port, and nobody needs to ask.
* A server that was not there in time, or is no agent's, is published in the round's own store.
* A server ends with the last who holds it. So nothing that has failed holds one: an exception with
  its frames would, until some collection of garbage.
* Rank 0 may die before it has published. The others look, at every slice of their wait, whether
  the round still stands, and go round again if not.
* Nothing blocks past the deadline: the server is started in a thread of its own, for torch's
  constructor connects to the address that it is given and can hang on one that leads nowhere.
"""

from __future__ import annotations

import socket
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from rdzv.errors import RendezvousConnectionError, RendezvousTimeoutError
from rdzv.round_store import RoundStore
from rdzv.state import RoundId

SERVER_START_SECONDS = 30.0
FIRST_LOOK_SECONDS = 10.0
"""For the first look, which mostly finds the address: longer than any backend waits for an answer,
so it goes over a connection that is open already."""
SLICE_SECONDS = 0.5
DEADLINE_SLACK_SECONDS = 0.5
"""A server that cannot be started says why at the deadline; a little later nobody waits for it."""
PATIENCE_SECONDS = 2 * SERVER_START_SECONDS
"""Rank 0 has published by then, or what it published was lost with the backend's data."""
RETRY_SECONDS = 0.2


class BootstrapLost(Exception):
    """The round cannot be set up any more: go round again."""


class BootstrapServer:
    """Rank 0's end: a TCPStore server for this round's workers (``shared``), or merely a port that
    was free a moment ago, on which worker 0 will serve one itself.

    Raises ``RendezvousConnectionError`` if no server can be reached at the address.
    """

    def __init__(self, address: str, deadline: float, *, shared: bool) -> None:
        self.address = address
        self._store: dist.TCPStore | None = None
        if not shared:
            self.port = _free_port()
            return
        seconds = max(0.1, min(SERVER_START_SECONDS, deadline - time.monotonic()))
        outcome: list[dist.TCPStore | Exception] = []
        starter = threading.Thread(
            target=self._start, args=(address, seconds, outcome), name="rdzv-bootstrap", daemon=True
        )
        starter.start()
        starter.join(seconds)
        if not outcome or isinstance(outcome[0], Exception):
            reason = outcome[0] if outcome else f"no answer within {seconds:.0f} s"
            raise RendezvousConnectionError(
                f"This node is rank 0, but its TCPStore server cannot be reached at {address!r} "
                f"({reason}). Give an address of this machine with --local-addr."
            )
        self._store = outcome[0]
        self.port = int(self._store.port)

    @staticmethod
    def _start(address: str, seconds: float, outcome: list[dist.TCPStore | Exception]) -> None:
        try:
            outcome.append(
                dist.TCPStore(
                    address,
                    0,
                    is_master=True,
                    wait_for_workers=False,
                    timeout=timedelta(seconds=seconds),
                )
            )
        except Exception as error:
            outcome.append(error)


class Hosting:
    """Rank 0's end of a round: the server, which a thread of its own starts. ``start`` may take its
    time."""

    def __init__(self, round_id: RoundId, start: Callable[[], BootstrapServer]) -> None:
        self.round_id = round_id
        self._start = start
        self._done: Future[BootstrapServer] = Future()
        threading.Thread(target=self._host, name="rdzv-hosting", daemon=True).start()

    def port(self, timeout_seconds: float) -> int:
        """Where it serves, as soon as it does; 0 if it does not within that time."""
        wait_for_futures([self._done], timeout_seconds)
        if not self._done.done() or self._done.exception() is not None:
            return 0
        return self._done.result().port

    def server(self, deadline: float, broken: Callable[[], str]) -> BootstrapServer:
        """The server, as soon as there is one, for whoever will hold it.

        Raises what kept it from starting, or as :func:`bootstrap`.
        """
        while True:
            # Not result(SLICE_SECONDS): what it raises may be a time-out of the work itself.
            wait_for_futures([self._done], SLICE_SECONDS)
            if self._done.done():
                return self._done.result()
            why = broken()
            if why:
                raise BootstrapLost(why)
            if time.monotonic() >= deadline + DEADLINE_SLACK_SECONDS:
                raise RendezvousTimeoutError(
                    "The round is complete, but this node, its rank 0, could not start its "
                    "TCPStore server in time."
                )

    def _host(self) -> None:
        try:
            self._done.set_result(self._start())
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)
            self._done.set_exception(error)


def bootstrap(
    store: RoundStore,
    server: BootstrapServer | None,
    deadline: float,
    broken: Callable[[], str],
) -> RendezvousStoreInfo:
    """The bootstrap address of a round: published by rank 0 (which has ``server``), read by all.

    No exchange with the store lasts longer than is left. ``broken`` tells why nobody will publish
    it any more, or "". Raises :class:`BootstrapLost` then, or when rank 0 has not published within
    ``PATIENCE_SECONDS``, and ``RendezvousTimeoutError`` at ``deadline`` (``time.monotonic``).
    """
    usual_timeout = store.timeout
    try:
        return _bootstrap(store, server, deadline, broken)
    finally:
        store.set_timeout(usual_timeout)


def _bootstrap(
    store: RoundStore,
    server: BootstrapServer | None,
    deadline: float,
    broken: Callable[[], str],
) -> RendezvousStoreInfo:
    patient_until = time.monotonic() + PATIENCE_SECONDS
    keys = [RendezvousStoreInfo.MASTER_ADDR_KEY, RendezvousStoreInfo.MASTER_PORT_KEY]
    trouble = ""
    is_first = True
    while True:
        patience = FIRST_LOOK_SECONDS if is_first else SLICE_SECONDS
        left = timedelta(seconds=max(0.001, min(patience, deadline - time.monotonic())))
        store.set_timeout(left)
        try:
            if server is not None:
                store.multi_set(keys, [server.address, str(server.port)])
                return RendezvousStoreInfo(server.address, server.port)
            if not is_first:
                store.wait(keys, left)
            address, port = store.peek(keys)
            if address is not None and port is not None:
                return RendezvousStoreInfo(address.decode(), int(port))
        except dist.DistNetworkError as error:
            trouble = f" ({error})"
            threading.Event().wait(RETRY_SECONDS)
        except dist.DistStoreError:
            pass
        is_first = False
        why = broken()
        if why:
            raise BootstrapLost(why)
        if time.monotonic() >= deadline:
            raise RendezvousTimeoutError(
                "The round is complete, but rank 0 did not publish the address of its TCPStore "
                f"server in time{trouble}."
            )
        if time.monotonic() >= patient_until and server is None:
            raise BootstrapLost(
                f"rank 0 did not publish its address within {PATIENCE_SECONDS:.0f} s{trouble}"
            )


def _free_port() -> int:
    family = socket.AF_INET6 if socket.has_ipv6 else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
    except OSError:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
            probe.bind(("", 0))
            return int(probe.getsockname()[1])
