"""Connections to the one node of a cluster that holds a run.

Theory. All keys of a run are in one slot, so a run needs one node at a time. Which it is a node
says itself, by ``MOVED``, to whoever asks it for a key that is another's; that is tried on each
new connection, and takes no right beyond those that a run needs anyhow. redis-py's client for
clusters keeps a map of all nodes instead: while a node hangs, every call waits for its turn to ask
all of them, longer than any time-out that it was given.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import redis
from redis.exceptions import (
    AuthenticationError,
    ClusterDownError,
    ConnectionError,
    MovedError,
    TimeoutError,
)

Place = tuple[str, int]

HOPS_MAX = 3


class Places:
    """Where a cluster may be asked for a key.

    ``patience_seconds``: a connection for which so much time has passed tries no other place.
    """

    def __init__(self, places: Iterable[Place], key: bytes, patience_seconds: float) -> None:
        self.key, self.patience_seconds = key, patience_seconds
        self._order = tuple(places)

    def order(self) -> tuple[Place, ...]:
        """The most promising first."""
        return self._order

    def holds(self, place: Place) -> None:
        """This node has the key."""
        if self._order[0] != place:
            self._order = (place, *(one for one in self._order if one != place))

    def failed(self, place: Place) -> None:
        """This one did not lead there."""
        self._order = (*(one for one in self._order if one != place), place)


class SlotConnection(redis.Connection):
    """A connection to whichever node has the key."""

    def __init__(self, *arguments: Any, places: Places, **options: Any) -> None:
        inherited: Any = super()
        inherited.__init__(*arguments, **options)
        self._places = places

    def connect(self) -> None:
        """Raises what redis-py does, and ``ConnectionError`` where no node leads to the key."""
        if self._sock:
            return
        ends_at = time.monotonic() + self._places.patience_seconds
        failure: Exception = ConnectionError("no place of the cluster is known")
        for place in self._places.order():
            try:
                return self._follow(place)
            except AuthenticationError:
                raise
            except (ConnectionError, TimeoutError, ClusterDownError) as error:
                # A node that says that the cluster is down may be the only one cut off from it.
                self._places.failed(place)
                failure = error
            if time.monotonic() >= ends_at:
                break
        raise failure

    def _follow(self, place: Place) -> None:
        inherited: Any = super()
        for _ in range(HOPS_MAX):
            self.host, self.port = place
            inherited.connect()
            try:
                inherited.send_command("PTTL", self._places.key)
                inherited.read_response()
                return self._places.holds(place)
            except MovedError as moved:
                inherited.disconnect()
                # A node that does not know its own name leaves the host out.
                place = moved.host or place[0], moved.port
            except BaseException:
                inherited.disconnect()
                raise
        raise ConnectionError("the nodes of the cluster send us round in circles")


class SecureSlotConnection(SlotConnection, redis.SSLConnection):
    """The same over TLS."""
