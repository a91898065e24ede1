"""torch's interface over the protocol: what torchrun's agent talks to.

Rules:

* ``num_nodes_waiting()`` and ``is_closed()`` answer from memory, never call the backend and never
  raise before the outage budget is spent.
* ``next_rendezvous()`` returns or raises by the join deadline, whatever hangs below.
* Every round has a bootstrap of its own: rank 0 serves a TCPStore on a free port at its own address
  and publishes it in the round's store. Nothing is kept from one round to the next.
* ``shutdown()`` never raises: an exception there would turn a good run into exit code 1.
* Closing needs neither the background thread nor its session: it works while a barrier is entered.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import threading
import time
import traceback
import uuid
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from concurrent.futures import wait as wait_for_futures
from urllib.parse import quote

from torch.distributed import Store
from torch.distributed.elastic.rendezvous.api import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
)
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.address import choose_address
from rdzv.bootstrap import BootstrapLost, BootstrapServer, Hosting, bootstrap
from rdzv.departure import Departure
from rdzv.driver import Driver, Stopped
from rdzv.effects import Session
from rdzv.errors import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousError,
    RendezvousStateError,
    RendezvousTimeoutError,
)
from rdzv.keepalive import KeepAlive
from rdzv.machine import Rules
from rdzv.ports import Closable, GetsReady, Located
from rdzv.protocol import close, finish
from rdzv.round_store import RoundStore
from rdzv.settings import Settings
from rdzv.state import Node, RosterEntry, RoundId, State

logger = logging.getLogger("rdzv")

DEADLINE_SLACK_SECONDS = 0.5
"""The background thread ends a barrier at its deadline and knows why; a little later the caller
ends it without a reason."""
PREPARE_SECONDS_MAX = 1.0
"""For rank 0 to have its server there before it confirms."""
CLOSE_RETRY_SECONDS = 0.2
LEAVE_SECONDS_MIN = 0.1
FINISH_TIMEOUT_SECONDS = 5.0
TELL_FIRST_SECONDS = 5.0
TELL_MOST_SECONDS = 60.0
WARN_AFTER_SECONDS = 30.0
"""Who has waited this long is told so at torchrun's default level of logging."""


def create_handler(
    store: Store, backend: RendezvousBackend, params: RendezvousParameters
) -> DynamicRendezvousHandler:
    """A handler on any torch store and any torch rendezvous backend; torch's own signature.

    Raises ``RendezvousSettingsError`` (a ``ValueError``) for options that cannot work, and what a
    backend raises that gets ready (:class:`rdzv.ports.GetsReady`).
    """
    settings = Settings.from_parameters(params)
    if isinstance(backend, GetsReady):
        backend.get_ready()
    return DynamicRendezvousHandler(store, backend, settings)


class DynamicRendezvousHandler(RendezvousHandler):
    """An elastic rendezvous over any backend; see ``rdzv.ports`` for what a backend is."""

    def __init__(self, store: Store, backend: RendezvousBackend, settings: Settings) -> None:
        self._store = store
        self._backend = backend
        self._settings = settings
        route = backend.route() if isinstance(backend, Located) else None
        address = choose_address(settings.local_addr, route, settings.join_timeout_seconds)
        unique = uuid.uuid4().hex[:12]
        self._node = Node(f"{socket.gethostname()}_{os.getpid()}_{unique}", address)
        entry = RosterEntry(
            self._node, rank_hint=settings.rank_hint, topology=settings.topology or ""
        )
        self._driver = Driver(backend, settings.liveness_window_seconds, self._prepare)
        self._session = Session(
            rules=_rules(settings),
            entry=entry,
            unique=unique,
            clock=time.monotonic,
            jitter=_jitter,
            outage_timeout_seconds=settings.outage_timeout_seconds,
            proves_life_by_beats=not self._driver.has_roster,
        )
        self._keep_alive = KeepAlive(
            self._driver,
            self._session,
            self._node.id,
            on_overtaken=lambda: self._release("the run has gone on to a later round"),
        )
        self._departure = Departure(self._withdraw)
        self._hosting: Hosting | None = None
        self._may_host = False
        """Whether somebody waits for a round that this node could host."""
        # Reentrant: a signal handler may shut down whoever holds it.
        self._hosting_lock = threading.RLock()
        self._round_store: weakref.ref[RoundStore] | None = None
        self._process_id = os.getpid()
        self._in_barrier = threading.Lock()
        self._holds_round = False
        self._has_closed = False
        self._is_shut_down = False
        self._adopted: list[Closable] = []

    def adopt(self, resource: Closable) -> None:
        """Let ``shutdown()`` close this too. A store of ours that is closed opens anew for whoever
        still holds a round of it."""
        self._adopted.append(resource)

    @property
    def settings(self) -> Settings:
        """The settings of this handler."""
        return self._settings

    @property
    def node(self) -> Node:
        """This node: its id and the address that its peers are told."""
        return self._node

    def get_backend(self) -> str:
        """See base class."""
        return self._settings.backend

    def get_run_id(self) -> str:
        """See base class."""
        return self._settings.run_id

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return os.getenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"

    def is_closed(self) -> bool:
        """See base class. As this node has last heard."""
        state = self._session.state
        closed = state is not None and state.closed is not None
        return self._has_closed or self._session.run_closed or closed

    def num_nodes_waiting(self) -> int:
        """See base class. As this node has last heard; counts lost participants too, unless
        ``restart_on_node_loss`` is off.

        Raises ``RendezvousConnectionError`` once the backend has not answered for
        ``outage_timeout``.
        """
        fatal = self._keep_alive.fatal
        if fatal is not None:
            raise fatal
        notice = self._session.notice
        if not notice.count or self._session.clock() < notice.at_seconds:
            return 0
        return notice.count

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class. Raises ``RendezvousStateError`` while another call of it waits."""
        if self._is_shut_down:
            raise RendezvousClosedError("This rendezvous handler was shut down.")
        if not self._in_barrier.acquire(blocking=False):
            raise RendezvousStateError(
                "next_rendezvous() of this handler waits in another thread already: a handler is "
                "one node. Make a handler for each node."
            )
        try:
            with self._hosting_lock:
                self._may_host = not self._is_shut_down
            return self._next_rendezvous()
        except (Stopped, CancelledError) as stopped:
            raise RendezvousClosedError("This rendezvous handler was shut down.") from stopped
        finally:
            self._stop_hosting()
            self._in_barrier.release()

    def _next_rendezvous(self) -> RendezvousInfo:
        self._holds_round = False
        seconds = self._settings.join_timeout_seconds
        with self._departure.on_sigterm():
            while True:
                state, deadline = self._join(seconds)
                try:
                    info = self._info(state, deadline)
                except BootstrapLost as lost:
                    logger.info("%s: %s; joining the next round", self._node.id, lost)
                    seconds = max(0.0, deadline - time.monotonic())
                    continue
                except BaseException:
                    # It never got in, so it must neither hold the round nor close the run.
                    self._keep_alive.leave()
                    raise
                self._holds_round = True
                return info

    def set_closed(self) -> None:
        """See base class. Raises ``RendezvousConnectionError`` or ``RendezvousTimeoutError`` when
        the backend cannot be told within ``close_timeout``."""
        self._close(f"set_closed() on {self._node.id}", members_only=False)

    def shutdown(self) -> bool:
        """See base class. Closes the run if this node is in its current round or has finished it;
        any other node only removes itself. Never raises. Does nothing in a forked child, whose end
        is not the end of the node."""
        if self._is_shut_down or os.getpid() != self._process_id:
            return True
        self._is_shut_down = True
        self._release("this node has shut down")
        self._stop_hosting()
        deadline = time.monotonic() + self._settings.close_timeout_seconds
        closed = not self._holds_round or self._try(
            "close the run",
            lambda: self._close(f"shutdown on {self._node.id}", members_only=True),
        )
        left = self._try(
            "take this node out",
            lambda: self._keep_alive.leave().result(
                max(LEAVE_SECONDS_MIN, deadline - time.monotonic())
            ),
        )
        if left:
            self._departure.cancel()
        self._keep_alive.stop()
        if self._keep_alive.wait(1.0) and isinstance(self._backend, Closable):
            self._try("close the backend", self._backend.close)
        for resource in self._adopted:
            self._try("close the store", resource.close)
        return closed and left

    def _try(self, what: str, action: Callable[[], object]) -> bool:
        """Whether the action succeeded; why it did not is logged."""
        try:
            action()
        except (Exception, CancelledError) as error:
            reason = str(error) or f"{type(error).__name__}: no answer in time"
            logger.warning("%s could not %s: %s", self._node.id, what, reason)
            return False
        return True

    def _join(self, join_timeout_seconds: float) -> tuple[State, float]:
        """The document of the round, and the deadline (``time.monotonic``) for setting it up."""
        self._release("the run has gone on to a later round")
        logger.info(
            "%s joins the rendezvous of run %r (%d to %d nodes)",
            self._node.id,
            self._settings.run_id,
            self._settings.min_nodes,
            self._settings.max_nodes,
        )
        limit = time.monotonic() + join_timeout_seconds
        joining = self._keep_alive.join_round(join_timeout_seconds)
        try:
            state: State = self._wait(joining, limit)
        except BaseException as error:
            self._keep_alive.abandon(joining)
            joining.add_done_callback(self._abandoned)
            if isinstance(error, RendezvousError):
                logger.info("%s: %s: %s", self._node.id, type(error).__name__, error)
            raise
        self._has_closed = False
        logger.info(
            "%s is rank %s of %d in round %d of run %r",
            self._node.id,
            state.rank_of(self._node.id),
            len(state.participants),
            state.round,
            self._settings.run_id,
        )
        return state, self._session.deadline or limit

    def _wait(self, joining: Future[State], limit: float) -> State:
        """Wait for the barrier, telling at a human pace what is missing."""
        session, started = self._session, time.monotonic()
        tell_after = TELL_FIRST_SECONDS
        while True:
            # Not result(1.0): what it raises may be a time-out of the work itself.
            wait_for_futures([joining], 1.0)
            if joining.done():
                return joining.result()
            deadline = max(limit, session.deadline or limit)
            if not session.parked and session.clock() > deadline + DEADLINE_SLACK_SECONDS:
                raise RendezvousTimeoutError(
                    f"The rendezvous of run {self._settings.run_id!r} did not complete within "
                    f"{self._settings.join_timeout_seconds:g} s. What was waited for: "
                    f"{session.why or 'an answer of the backend'}."
                )
            waited = time.monotonic() - started
            if waited >= tell_after:
                tell_after += min(TELL_MOST_SECONDS, waited)
                level = logging.INFO if waited < WARN_AFTER_SECONDS else logging.WARNING
                logger.log(
                    level, "%s has waited for %.0f s: %s", self._node.id, waited, session.why
                )

    def _abandoned(self, joining: Future[State]) -> None:
        """The caller has left the barrier; if the node gets through it all the same, give up."""
        if not joining.cancelled() and joining.exception() is None:
            self._keep_alive.leave()

    def _info(self, state: State, deadline: float) -> RendezvousInfo:
        round_id, rank = state.round_id, state.rank_of(self._node.id)
        assert round_id is not None
        assert rank is not None
        info: RendezvousStoreInfo
        server = None
        if rank == 0:
            hosting = self._host(round_id, deadline)
            server = hosting.server(deadline, lambda: self._broken(state))
            del hosting  # which would keep the server longer than the store does
        store = self._open_round(round_id, server)
        if state.port:
            info = RendezvousStoreInfo(state.participants[0].address, state.port)
        else:
            try:
                info = bootstrap(store, server, deadline, lambda: self._broken(state))
            except BaseException as error:
                # The frames of an exception would keep a server that nobody wants.
                traceback.clear_frames(error.__traceback__)
                del store, server
                raise
        store.pin()
        self._round_store = weakref.ref(store)
        return RendezvousInfo(store, rank, len(state.participants), info)

    def _prepare(self, state: State) -> int:
        """This node will be rank 0 of the proposed round: where it serves the others by then, 0 if
        it does not. (In the background thread.)"""
        if not self.use_agent_store:
            # A port that is merely free does not stay so: it is looked for when it is needed.
            return 0
        assert state.proposal_id is not None
        deadline = self._session.deadline
        if deadline is None:
            deadline = time.monotonic() + self._settings.join_timeout_seconds
        # Who confirms last makes the round final: better a moment later, with the port in it, than
        # that all others have to wait for it.
        interval = self._settings.keep_alive_interval_seconds
        return self._host(state.proposal_id, deadline).port(min(PREPARE_SECONDS_MAX, interval / 2))

    def _host(self, round_id: RoundId, deadline: float) -> Hosting:
        """What has begun to host the round, if need be now. What began for another is let go.

        Raises ``Stopped`` if nobody waits for a round any more: nobody would let go of it.
        """
        with self._hosting_lock:
            if not self._may_host:
                raise Stopped("nobody waits for a round that this node would host")
            hosting = self._hosting
            if hosting is None or hosting.round_id != round_id:
                shared = self.use_agent_store
                hosting = self._hosting = Hosting(
                    round_id,
                    lambda: BootstrapServer(self._node.address, deadline, shared=shared),
                )
            return hosting

    def _stop_hosting(self) -> None:
        """Let go of what hosts a round: the round's store, if anybody has it, keeps the server.
        The background thread may be about to host one: it begins with none from now on."""
        with self._hosting_lock:
            self._may_host = False
            self._hosting = None

    def _open_round(self, round_id: RoundId, server: BootstrapServer | None = None) -> RoundStore:
        return RoundStore(
            self._store,
            f"torch.rendezvous/{quote(self._settings.run_id, safe='')}/{round_id.label}",
            on_exit_barrier=self._finish,
            keep=server,
        )

    def _broken(self, state: State) -> str:
        """Why nobody will publish the bootstrap address of this round; "" if somebody may."""
        if self._session.run_closed:
            raise RendezvousClosedError("The run was closed while its round was being set up.")
        if self._session.overtaken:
            return "the run has gone on to another round"
        # Another document is no proof: the backend may have lost its own for a moment.
        current, server_id = self._session.state, state.participants[0].id
        if current is not None and current.round_id == state.round_id and server_id in current.lost:
            return f"rank 0 ({server_id}) was lost before it published its address"
        if self.num_nodes_waiting():
            return "the round is about to be formed anew"
        return ""

    def _finish(self) -> None:
        """The agent has begun the exit barrier. What fails here fails silently: the barrier goes
        on, and the worst is that a peer waits for this node a little longer."""
        try:
            self._keep_alive.ask(lambda: finish(self._session)).result(FINISH_TIMEOUT_SECONDS)
        except (RendezvousError, Stopped, FutureTimeoutError, CancelledError) as error:
            logger.debug("%s: could not tell that it has finished: %s", self._node.id, error)

    def _close(self, reason: str, *, members_only: bool) -> None:
        seconds = self._settings.close_timeout_seconds
        closing: Future[bool] = Future()
        threading.Thread(
            target=self._close_by,
            args=(time.monotonic() + seconds, reason, members_only, closing),
            name=f"rdzv-close-{self._node.id}",
            daemon=True,
        ).start()
        try:
            self._has_closed = closing.result(seconds + DEADLINE_SLACK_SECONDS)
        except FutureTimeoutError as error:
            raise RendezvousTimeoutError(
                f"The run could not be closed within {seconds:g} s: the backend does not answer."
            ) from error

    def _close_by(
        self, deadline: float, reason: str, members_only: bool, closing: Future[bool]
    ) -> None:
        while True:
            session = Session(
                rules=self._session.rules,
                entry=self._session.entry,
                unique=uuid.uuid4().hex[:12],
                clock=time.monotonic,
                jitter=_jitter,
            )
            try:
                closed = self._driver.run(close(session, reason, members_only=members_only))
                return closing.set_result(closed)
            except BaseException as error:
                lost = isinstance(error, RendezvousConnectionError)
                if not lost or time.monotonic() >= deadline:
                    return closing.set_exception(error)
            threading.Event().wait(CLOSE_RETRY_SECONDS)

    def _release(self, why: str) -> None:
        store = self._round_store() if self._round_store is not None else None
        if store is not None:
            store.release(why)

    def _withdraw(self) -> None:
        self._keep_alive.stop()
        self._driver.withdraw(self._node.id)


def _jitter(most_seconds: float) -> float:
    return random.uniform(most_seconds / 2, most_seconds)


def _rules(settings: Settings) -> Rules:
    return Rules(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        last_call_seconds=settings.last_call_timeout_seconds,
        keep_alive_interval_seconds=settings.keep_alive_interval_seconds,
        liveness_window_seconds=settings.liveness_window_seconds,
        closed_grace_seconds=settings.closed_grace_seconds,
        restart_on_node_loss=settings.restart_on_node_loss,
        rank_order=settings.rank_order,
    )
