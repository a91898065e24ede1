"""Broken watches: being told of changes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from kit.catalogue import RemoteBackend, a_moment, catalogue

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.errors import RendezvousConnectionError

fault = catalogue("watch")

LONGER_THAN_ANYBODY_WAITS_SECONDS = 1e6


class _Waits(MemoryBackend):
    """Waits in a way of its own."""

    def token_now(self) -> Any:
        """The current token, or None; the caller holds the lock."""
        found = self.get_state()
        return found and found[1]

    def changed_from(self, token: Any, revision: Any) -> bool:
        """Whether the wait is over; the caller holds the lock."""
        return self.token_now() != token or revision not in (None, self._run.revision)

    def told(self, token: Any) -> Any:
        """What a wait returns now."""
        found = self.get_state()
        return None if found is None or found[1] == token else found

    def sleep_until(self, condition: Callable[[], bool], timeout_seconds: float) -> None:
        """As the good one does; the caller holds the lock."""
        self._space.changed.wait_for(condition, max(0.0, timeout_seconds))


# Waking


@fault(
    "no_wake_up_is_lost",
    hangs=True,
    seen_in="a look before SUBSCRIBE, LISTEN or a watch from 'now'",
)
class LooksThenSubscribes(_Waits):
    """What happens between the look and the subscription is missed."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            if self.changed_from(token, revision):
                return self.told(token)
        a_moment()
        with self._space.changed:
            self._space.changed.wait(max(0.0, timeout_seconds))
            return self.told(token)


@fault("a_wait_for_what_has_happened_returns_at_once", hangs=True, seen_in="SUBSCRIBE alone")
class NeverLooks(_Waits):
    """Only what happens during the wait is told, not what has happened before it."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            self._space.changed.wait(max(0.0, timeout_seconds))
            return self.told(token)


class _NotifiesOne(threading.Condition):
    def notify_all(self) -> None:
        self.notify(1)


@fault("every_waiter_wakes", hangs=True, seen_in="BLPOP on a list of notices, and notify() for all")
class WakesOneOfMany(MemorySpace):
    """A change wakes one of those who wait."""

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__(clock)
        self.changed = _NotifiesOne()


@fault("a_wait_for_what_has_happened_returns_at_once", seen_in="notices without content")
class WakesWithoutTelling(_Waits):
    """A wait ends in time, and does not say what has changed."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        super().wait_for_change(token, timeout_seconds, revision)


@fault(
    "a_wait_for_what_has_happened_returns_at_once",
    seen_in="a watch that answers with the document whatever has woken it",
)
class TellsWhatIsKnown(_Waits):
    """A wait returns the document though its token has not changed."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        super().wait_for_change(token, timeout_seconds, revision)
        return self.get_state()


@fault(
    "a_wait_for_what_has_happened_returns_at_once",
    seen_in="a token taken from the notice, and the document read later",
)
class TellsTheOldToken(_Waits):
    """A wait returns the new document with the token of the old one."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        found = super().wait_for_change(token, timeout_seconds, revision)
        return found and (found[0], token)


@fault("a_change_is_heard_soon", seen_in="polling once a second")
class PollsSlowly(_Waits):
    """A change is heard a fifth of a second late."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            if self.changed_from(token, revision):
                return self.told(token)
        threading.Event().wait(min(0.2, max(0.0, timeout_seconds)))
        return super().wait_for_change(token, timeout_seconds, revision)


@fault("a_wait_hears_of_the_roster_only_if_asked", hangs=True, seen_in="a watch on one key")
class DeafToTheRoster(_Waits):
    """A change of the roster does not end a wait that asked for it."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        return super().wait_for_change(token, timeout_seconds)


@fault("a_wait_hears_of_the_roster_only_if_asked", seen_in="one channel for all of a run")
class HearsUnasked(_Waits):
    """A change of the roster ends a wait that did not ask for it."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            asked = self._run.revision if revision is None else revision
        return super().wait_for_change(token, timeout_seconds, asked)


@fault("a_wait_ends_when_the_document_is_lost", hangs=True, seen_in="a watch that skips DELETE")
class DeafToLoss(_Waits):
    """The loss of the document does not end a wait."""

    def changed_from(self, token: Any, revision: Any) -> bool:
        return self.token_now() is not None and super().changed_from(token, revision)

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            self.sleep_until(lambda: self.changed_from(token, revision), timeout_seconds)
            return self.told(token)


@fault(
    "a_wait_during_a_crash_misses_nothing",
    hangs=True,
    seen_in="pub/sub clients that connect anew without subscribing anew",
)
class ForgetsToSubscribeAnew(RemoteBackend):
    """A wait that has lost its connection hears nothing more, and does not say so."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        self.get_state()
        try:
            return super().wait_for_change(token, timeout_seconds, revision)
        except RendezvousConnectionError:
            threading.Event().wait(timeout_seconds)
            return None


# Timeouts


@fault("a_wait_for_nothing_ends_in_time", hangs=True, seen_in="a blocking read without a timeout")
class IgnoresTheTimeout(_Waits):
    """A wait lasts until there is a change."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        return super().wait_for_change(token, LONGER_THAN_ANYBODY_WAITS_SECONDS, revision)


@fault("a_wait_for_nothing_ends_in_time", hangs=True, seen_in="BLPOP and XREAD with BLOCK 0")
class ZeroIsForEver(_Waits):
    """A watch's timeout of zero is taken for none."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        long = timeout_seconds or LONGER_THAN_ANYBODY_WAITS_SECONDS
        return super().wait_for_change(token, long, revision)


@fault(
    "a_wait_for_nothing_ends_in_time", hangs=True, seen_in="poll(2) and epoll, for which -1 is so"
)
class NegativeIsForEver(_Waits):
    """A timeout below zero, as is left when a deadline has passed, is taken for none."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        long = timeout_seconds if timeout_seconds >= 0 else LONGER_THAN_ANYBODY_WAITS_SECONDS
        return super().wait_for_change(token, long, revision)


@fault("a_wait_for_nothing_ends_in_time", seen_in="timeouts that are whole seconds on the wire")
class WholeSecondsOnly(_Waits):
    """The fraction of a second in a timeout is lost, so that short waits do not wait."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        return super().wait_for_change(token, int(timeout_seconds), revision)


@fault("a_wait_for_nothing_ends_in_time", seen_in="milliseconds handed to who takes seconds")
class MillisecondsForSeconds(_Waits):
    """A timeout in seconds is taken for milliseconds."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        return super().wait_for_change(token, timeout_seconds / 1000, revision)


@fault("a_wait_for_nothing_ends_in_time", seen_in="settimeout() on the one socket, never put back")
class TimeoutSticks(_Waits):
    """After a short wait all later ones are as short."""

    _shortest_seconds = LONGER_THAN_ANYBODY_WAITS_SECONDS

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        self._shortest_seconds = min(self._shortest_seconds, timeout_seconds)
        return super().wait_for_change(token, self._shortest_seconds, revision)


@fault("what_is_no_change_wakes_nobody", seen_in="pub/sub libraries that return on any message")
class WakesForNothing(_Waits):
    """A write that has lost ends the waits of others."""

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._space.changed:
            self._space.changed.notify_all()
            return super().set_state(state, token)

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._space.changed:
            if not self.changed_from(token, revision):
                self._space.changed.wait(max(0.0, timeout_seconds))
            return self.told(token)


# Others


@fault(
    "a_wait_for_what_has_happened_returns_at_once",
    raises=(ValueError,),
    seen_in="a revision parsed out of the token, to begin the watch there",
)
class RaisesForForeignTokensInWaits(_Waits):
    """A wait with a token that it cannot read raises, where there is just news."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        if token is not None:
            int(token.removeprefix("memory-"))
        return super().wait_for_change(token, timeout_seconds, revision)


@fault("a_wait_holds_up_no_other_call", hangs=True, seen_in="one connection under a lock")
class WaitsOnTheOnlyConnection(_Waits):
    """While one thread waits, all other calls of the same object wait too."""

    def __init__(self, space: MemorySpace, run_id: str) -> None:
        super().__init__(space, run_id)
        self._connection = threading.Lock()

    def set_state(self, state: bytes, token: Any = None) -> Any:
        with self._connection:
            return super().set_state(state, token)

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        with self._connection:
            return super().wait_for_change(token, timeout_seconds, revision)


@fault("every_answer_to_a_wait_holds_bytes", seen_in="drivers whose two ways to read differ")
class TellsAMemoryview(_Waits):
    """A wait returns the document as a memoryview."""

    def wait_for_change(self, token: Any, timeout_seconds: float, revision: Any = None) -> Any:
        found = super().wait_for_change(token, timeout_seconds, revision)
        return found and (memoryview(found[0]), found[1])
