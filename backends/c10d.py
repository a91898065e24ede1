"""The C10d backend: any torch store with ``compare_set``, a ``TCPStore`` or a ``FileStore`` first.

``c10d_chain`` tells how the document is kept, ``c10d_roster`` how the nodes are. Here they become
one backend. Each has one connection for requests. Where the store can push, a second one waits for
the *bell*, a key that the next change of the document creates: so no wait holds up a heartbeat,
and this machine's clock knows since when it has seen a document. Where it cannot, who waits looks
again and again.

Only the coordinator is told of the roster. It looks some times in a second while it waits, however
many nodes arrive; nobody else wakes for an arrival.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from typing import Any, TypeVar

from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousBackend

from rdzv.backends.c10d_bell import Listener
from rdzv.backends.c10d_chain import (
    Chain,
    DataLost,
    Head,
    laid_out,
    new_nonce,
)
from rdzv.backends.c10d_link import Link, Links
from rdzv.backends.c10d_roster import REVISION, SMALL, RosterView, digest, parsed
from rdzv.backends.options import REQUEST_SECONDS_MAX
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.ports import Closable, Entry, Listed, Located, Pulse, Question, Roster, Token, Watch

T = TypeVar("T")

LOOK_AGAIN_SECONDS = 5.0
"""A longer wait looks in between: a store that lost its data has nobody to wake us."""
LOOK_FIRST_SECONDS = 0.005
LOOK_MAX_SECONDS = 0.05
THREADS_END_SECONDS = 1.0
"""How long a thread may take to end before its connection is broken, and again after that."""
DATES_KEPT = 8


class C10dRendezvousBackend(RendezvousBackend, Roster, Watch, Located, Closable):
    """The records of one run in a torch store.

    ``connect(seconds)`` makes another connection to the store, in the time given; it raises any
    ``RuntimeError`` or ``OSError`` where it cannot. ``pushes``: whether a wait on the store
    costs nothing while it lasts. ``stamp_ms(store)`` is the store's own clock, where it has one.
    ``on_failure`` is called when a connection has failed. Nothing is opened before the first call.
    """

    def __init__(
        self,
        connect: Callable[[float], Any],
        run_id: str,
        *,
        name: str = "c10d",
        endpoint: str = "a C10d store",
        route: tuple[str, int] | None = None,
        request_seconds: float = REQUEST_SECONDS_MAX,
        pushes: bool = True,
        stamp_ms: Callable[[Any], int | None] = lambda store: None,
        on_failure: Callable[[], None] = lambda: None,
    ) -> None:
        self._connect = connect
        self._base = f"rdzv/{digest(run_id)}/"
        self._name, self._endpoint, self._route = name, endpoint, route
        self._request_seconds = min(request_seconds, REQUEST_SECONDS_MAX)
        self._pushes = pushes
        self._stamp_ms = stamp_ms
        self._on_failure = on_failure
        self._links = Links(self._open_session, f"rdzv-c10d-{name}", on_failure)
        self._changed = threading.Condition()
        self._wakes = 0
        self._listener: Listener | None = None
        self._dates: dict[str, float | None] = {}
        self._doubted: set[str] = set()
        """Nodes whose last change may have been done by half."""

    @property
    def name(self) -> str:
        return self._name

    @property
    def endpoint(self) -> str:
        return self._endpoint

    def route(self) -> tuple[str, int] | None:
        return self._route

    def ask_store(self, job: Callable[[Any], T], seconds: float) -> T:
        """What ``job`` makes of the store, on the connection for requests. Raises
        ``RendezvousConnectionError``."""
        answer: T = self._links.ask(lambda session: job(session.store()), seconds)
        return answer

    def disconnect(self) -> None:
        """Give up the connection for requests; the next one opens another."""
        self._links.close()

    def close(self) -> None:
        self.leave()

    def leave(self) -> None:
        """Give up connections, wait for the end of their threads, and for no other node."""
        with self._changed:
            listener, self._listener = self._listener, None
        if listener is None:
            self._links.close()
        else:
            listener.closed.set()
            self._links.close(lambda session: listener.wake_up(session.store()))
            listener.join(THREADS_END_SECONDS)
        self._links.join(THREADS_END_SECONDS)

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._ask(lambda session: session.chain.document(session.look().head))
        self._seen(None if found is None else found[1])
        return found

    def set_state(
        self, state: bytes, token: Token | None = None
    ) -> tuple[bytes, Token, bool] | None:
        nonce, written = new_nonce(), bytes(state)
        expected = token if token is None or isinstance(token, str) else ""

        def swap(session: _Session) -> tuple[bytes, str, bool] | None:
            head = session.look().head
            new = session.chain.swap(head, written, expected, nonce)
            if new is not None:
                return written, new.token or "", True
            found = session.chain.document(session.look().head)
            return None if found is None else (*found, False)

        try:
            answer = self._ask(swap)
        except RendezvousConnectionError:
            # The answer may have been lost, not the write: whose is the one that holds?
            ours = self._ask(lambda session: session.chain.was_written(expected, nonce))
            if ours is None:
                raise
            answer = (written, ours, True)
        self._seen(
            None if answer is None else answer[1], by_myself=answer is not None and answer[2]
        )
        return answer

    def announce(self, entry: Entry, ttl_seconds: float, question: Question) -> Pulse:
        if self._pushes:
            self._listen()

        def steps(session: _Session) -> Pulse:
            session.roster.counted = None
            with self._doubting(entry.node_id):
                session.roster.announce(entry, ttl_seconds)
            counted = session.roster.counted
            if self._settle(session, entry.node_id):
                counted = None
            # Of many who arrive at once, one alone is to find that it is the first.
            return session.pulse(entry.node_id, question, keep=False, counted=counted)

        return self._dated(self._ask(steps))

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        return self._dated(self._ask(lambda session: session.beat(node_id, ttl_seconds, question)))

    def withdraw(self, node_id: str, ttl_seconds: float) -> None:
        def steps(session: _Session) -> None:
            with self._doubting(node_id):
                session.roster.withdraw(node_id, ttl_seconds)
            self._settle(session, node_id)

        self._ask(steps)

    def entries(self) -> list[Listed]:
        return self._ask(lambda session: session.entries())

    def wait_for_change(
        self, token: Token | None, timeout_seconds: float, revision: Any = None
    ) -> tuple[bytes, Token] | None:
        deadline = time.monotonic() + timeout_seconds
        pushes = self._pushes and revision is None
        pause, looks = LOOK_FIRST_SECONDS, 0
        while True:
            wakes = self._wakes
            if pushes:
                self._listen()
            # What the listener has just told need not be asked for; nor is None, which says that
            # nothing has changed, ever returned unasked.
            if not (pushes and looks == 0 and self._is_heard(token)):
                found, now_revision, document = self._ask(lambda session: session.changed(token))
                self._seen(found)
                if found != token:
                    return document
                if revision is not None and now_revision != revision:
                    return None
                if time.monotonic() >= deadline:
                    return None
            looks += 1
            left = deadline - time.monotonic()
            with self._changed:
                if pushes:
                    self._changed.wait_for(
                        lambda: self._wakes != wakes,  # noqa: B023
                        min(left, LOOK_AGAIN_SECONDS),
                    )
                else:
                    self._changed.wait(min(left, pause * random.uniform(0.75, 1.0)))
            pause = min(LOOK_MAX_SECONDS, 1.5 * pause)

    @contextlib.contextmanager
    def _doubting(self, node_id: str) -> Iterator[None]:
        """A change that does not come to its end may be done by half, also where it hangs."""
        known = node_id in self._doubted
        self._doubted.add(node_id)
        yield
        if not known:
            self._doubted.discard(node_id)

    def _settle(self, session: _Session, node_id: str) -> bool:
        """After a change that succeeded, if one before it may have been done by half; whether
        that was so."""
        if node_id not in self._doubted:
            return False
        session.roster.settle(session.roster.key("entry", node_id))
        self._doubted.discard(node_id)
        return True

    def _ask(self, job: Callable[[_Session], T], seconds: float | None = None) -> T:
        try:
            answer: T = self._links.ask(
                lambda session: session.run(job), seconds or self._request_seconds
            )
            return answer
        except RendezvousConnectionError as error:
            raise RendezvousConnectionError(
                f"The C10d store at {self._endpoint} did not answer: {error}."
            ) from error.__cause__

    def _open_session(self, link: Link) -> _Session:
        store = self._connect(self._request_seconds)
        store.set_timeout(timedelta(seconds=self._request_seconds))
        return _Session(store, self._base, link, self._stamp_ms)

    # Since when which document is known

    def _seen(self, token: str | None, *, by_myself: bool = False, at: float | None = None) -> None:
        """Note since when this token has been known. Only a change that happened before our eyes
        has a date: a document that was there at the first look may be of any age."""
        with self._changed:
            if self._listener is not None:
                self._listener.compare(token)
            # The listener may have read a write of our own, without a date, before we note it here.
            undated = self._dates.get(token or "") is None
            if token is not None and undated and (by_myself or token not in self._dates):
                watched = self._listener is not None and self._listener.listening
                now = time.monotonic() if at is None else at
                self._dates[token] = now if by_myself or watched else None
                while len(self._dates) > DATES_KEPT:
                    del self._dates[next(iter(self._dates))]

    def _dated(self, pulse: Pulse) -> Pulse:
        self._seen(pulse.token)
        if pulse.token is None or pulse.state_age_seconds is not None:
            return pulse
        date = self._dates.get(pulse.token)
        if date is None:
            return pulse
        return replace(pulse, state_age_seconds=max(0.0, time.monotonic() - date))

    def _listen(self) -> None:
        with self._changed:
            if self._listener is None:
                self._listener = Listener(
                    self._connect, self._base, self._request_seconds, self._heard, self._on_failure
                )
                _listening.add(self)

    def _is_heard(self, token: object) -> bool:
        """Whether the listener knows that this is the newest document, or was just now."""
        listener = self._listener  # which another thread may give up
        return listener is not None and listener.knows(token)

    def _heard(self, token: str | None, at: float) -> None:
        """The bell has rung."""
        self._seen(token, at=at)
        with self._changed:
            self._wakes += 1
            self._changed.notify_all()


_listening: weakref.WeakSet[C10dRendezvousBackend] = weakref.WeakSet()


# What a forked child has of them is a copy without threads, and its end is not the end of a node.
os.register_at_fork(after_in_child=_listening.clear)


@atexit.register
def _stop_listening() -> None:
    """In good order, before ``c10d_threads`` cuts what is left."""
    for backend in list(_listening):
        with contextlib.suppress(Exception):
            backend.leave()


class _Look:
    """The values of constant size that every request reads, taken at one moment."""

    def __init__(self, head: Head, tally: int, seats: bytes, rest: list[bytes]) -> None:
        self.head, self.tally, self.seats, self.rest = head, tally, seats, rest


class _Session:
    """One connection, and what was seen through it. Used in the thread of its link only."""

    def __init__(
        self, store: Any, base: str, link: Link, stamp_ms: Callable[[Any], int | None]
    ) -> None:
        # Nothing here refers back to the session: a connection closes when its link ends, and not
        # when some collection of garbage comes.
        self.store: Callable[[], Any] = functools.partial(_awaited, store, link)
        self._base, self._clock = base, functools.partial(stamp_ms, store)
        self._begin()

    def run(self, job: Callable[[_Session], T]) -> T:
        """The job's result. In a store that has lost its data it begins again, once."""
        try:
            return job(self)
        except DataLost:
            self._begin()
        try:
            return job(self)
        except DataLost:
            raise RendezvousConnectionError("it loses its data again and again") from None

    def look(self, *keys: str) -> _Look:
        """What all requests read, and the values of keys that are there."""
        names = ("life", "head", "tally", "seats")
        values = self.store().multi_get([*(self._base + name for name in names), *keys])
        if values[0] != self.roster.life:
            raise DataLost
        self.roster.touch()
        try:
            tally = int(values[2])
        except ValueError as error:
            raise RendezvousStateError("The tally was not written by rdzv.") from error
        return _Look(self.chain.head(values[1]), tally, values[3], values[4:])

    def changed(self, token: object) -> tuple[str | None, str, tuple[bytes, str] | None]:
        """The token, the roster's revision, and the document where the token is another one."""
        look = self.look()
        found, document = look.head.token, None
        if found is not None and found != token:
            document = self.chain.document(look.head)
            found = document[1] if document is not None else None
        return found, self._revision(look.tally), document

    def beat(self, node_id: str, ttl_seconds: float, question: Question) -> Pulse:
        key = self.roster.key("entry", node_id)
        if self.roster.are_there([key]):
            if self.roster.is_overdue(key):
                row = self.roster.record(key)
                if row.live:
                    self.roster.expire(key, row)
            elif key in self.roster.own or self.roster.record(key).live:
                self.roster.beaten(key, ttl_seconds)
        return self.pulse(node_id, question, keep=True)

    def pulse(
        self, node_id: str, question: Question, *, keep: bool, counted: int | None = None
    ) -> Pulse:
        """The answer to a node. With ``keep``, it watches others if that falls to it. ``counted``
        is the tally of the moment that the answer is to be about, if not now."""
        roster = self.roster
        mine, peer = roster.key("entry", node_id), roster.key("entry", question.peer_id)
        keys = []
        for key in (mine, peer):
            keys += [key, roster.beat_key(key)] if roster.are_there([key]) else []
        if question.round_label:
            keys.append(roster.counter(question.round_label))
        look, census, expiries = self.look(*keys), None, roster.expiries
        live = look.tally % REVISION
        if live <= SMALL or (keep and roster.keeps(look.seats, live)):
            census = roster.census(look.tally)
        present, peer_live = self._is_live(keys, look, mine), self._is_live(keys, look, peer)
        if roster.expiries != expiries:
            look, counted = self.look(*keys), None
        tally = look.tally if counted is None else counted
        age = None
        if look.head.stamp_ms is not None and (now_ms := self._clock()) is not None:
            age = max(0.0, (now_ms - look.head.stamp_ms) / 1000)
        return Pulse(
            token=look.head.token,
            live=tally % REVISION,
            revision=self._revision(tally),
            present=present,
            peer_live=peer_live,
            confirmed=max(0, int(look.rest[-1])) if question.round_label else 0,
            state_age_seconds=age,
            next_expiry_seconds=census.next_expiry_seconds if census is not None else None,
        )

    def entries(self) -> list[Listed]:
        look = self.look()
        listed = self.roster.census(look.tally).listed
        if look.tally % REVISION > SMALL:
            self.roster.claim(look.seats)
        return listed

    def _is_live(self, keys: list[str], look: _Look, key: str) -> bool:
        if key not in keys:
            return False
        place = keys.index(key)
        row = parsed(look.rest[place])
        if row.live and self.roster.left_seconds(key, look.rest[place + 1]) <= 0:
            self.roster.expire(key, row)
            return False
        return row.live

    def _revision(self, tally: int) -> str:
        return f"{self.roster.life.decode()}:{tally // REVISION}"

    def _begin(self) -> None:
        life = laid_out(self.store(), self._base)
        self.roster = RosterView(self.store, self._base, life)
        self.chain = Chain(self.store, self._base, life, self._clock)


def _awaited(store: Any, link: Link) -> Any:
    """The store, as long as somebody waits for its answer."""
    link.check()
    return store
