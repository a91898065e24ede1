"""A store on Redis: the values of a run in one hash, those of its queues in another; pub/sub wakes.

Each mutation is one script that also remembers its operation id with its answer, so that a repeat
after a lost answer has no second effect. It is remembered for longer than a caller may repeat it,
which the store's timeout decides, and forgotten as soon as it cannot be repeated any more: each
mutation tells the server which answers have arrived. So a client leaves one operation behind, and
those whose answers were lost. An operation that was sent more than once is never forgotten early:
what was sent first may still be on its way, behind a route that loses packets, and arrive last.

Who waits subscribes to one of the keys that are missing, looks again, and only then sleeps: what is
written in between is not missed.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import redis
import torch.distributed as dist

from rdzv.backends.redis import RedisBackend
from rdzv.backends.redis_client import (
    WAIT_SLICE_SECONDS_MAX,
    RedisConnections,
    RedisOptions,
    raw,
)
from rdzv.backends.redis_endpoint import REQUEST_SECONDS_MIN
from rdzv.errors import RendezvousConnectionError, RendezvousStateError
from rdzv.settings import Settings
from rdzv.stores.base import Store, StoreClient, Unanswered, current_deadline
from rdzv.torch_store import shown_keys

if TYPE_CHECKING:
    from torch.distributed.elastic.rendezvous import RendezvousParameters

__all__ = ["RedisClient", "RedisStore", "create_backend"]

REMEMBERED_SECONDS = 60.0
"""So much longer than its caller may repeat it, an operation is remembered."""
LATE_SECONDS_MAX = 30.0
"""So long after its end a call, whose process was stopped meanwhile, may still repeat itself. The
rest of ``REMEMBERED_SECONDS`` is for the way to the server."""
TIMEOUT_SECONDS_DEFAULT = 300.0
ANSWERED_MAX = 100
"""So many operations one mutation tells the server to forget."""
UNANSWERED_MAX = 1000
"""So many operations whose answers were lost are known: more than threads have under way."""


def create_backend(params: RendezvousParameters) -> tuple[RedisBackend, dist.Store]:
    """The factory behind ``--rdzv-backend=redis``.

    Raises ``RendezvousSettingsError`` for what cannot work, ``RendezvousConnectionError`` for
    what does not work now.
    """
    settings = Settings.from_parameters(params)
    options = RedisOptions.from_settings(settings)
    backend = RedisBackend(settings.endpoint, settings.run_id, options, name=settings.backend)
    try:
        backend.open()
    except BaseException:
        backend.close()
        raise
    timeout = timedelta(seconds=settings.read_timeout_seconds)
    store = RedisStore(settings.endpoint, settings.run_id, timeout, connections=backend.connections)
    return backend, store


class RedisStore(Store):
    """The keys of one run id on Redis. ``connections`` of the run's backend, where there is one,
    serve both."""

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        timeout: timedelta | None = None,
        *,
        options: RedisOptions | None = None,
        connections: RedisConnections | None = None,
    ) -> None:
        client = RedisClient(endpoint, run_id, options, connections=connections)
        super().__init__(client, timeout=timeout)


class RedisClient(StoreClient):
    """The primitives of a store, one script each."""

    value_bytes_max = 64 * 1024 * 1024

    def __init__(
        self,
        endpoint: str,
        run_id: str,
        options: RedisOptions | None = None,
        *,
        connections: RedisConnections | None = None,
    ) -> None:
        self._redis = connections or RedisConnections(endpoint, run_id, options or RedisOptions())
        self._values = self._redis.base + b"values"
        self._queues = self._redis.base + b"queues"
        self._answered: deque[str] = deque(maxlen=10 * ANSWERED_MAX)
        self._unanswered: deque[str] = deque(maxlen=UNANSWERED_MAX)
        self.endpoint = self._redis.endpoint

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        if not keys:
            return []
        fields = [raw(key) for key in keys]
        values: list[bytes | None] = self._ask(
            lambda: self._redis.ask(lambda client: client.hmget(self._values, fields), _left())
        )
        return values

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        flat = [part for key, value in pairs for part in (raw(key), value)]
        self._run("store_set", operation, *flat)

    def add(self, key: str, amount: int, operation: str) -> int:
        done, *total = self._run("store_add", operation, raw(key), amount)
        if not done:
            raise ValueError(
                f"cannot add {amount} to {shown_keys([key])}: its value is no decimal number, or "
                "the sum leaves 64 bits"
            )
        return int(total[0])

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        written, *found = self._run("store_compare_set", operation, raw(key), expected, desired)
        return desired if written else (found[0] if found else None)

    def append(self, key: str, value: bytes, operation: str) -> None:
        limit = self.value_bytes_max
        if not self._run("store_append", operation, raw(key), value, limit):
            raise ValueError(
                f"value for {shown_keys([key])} would have more than value_bytes_max ({limit})"
            )

    def delete(self, key: str, operation: str) -> bool:
        return bool(self._run("store_delete", operation, raw(key)))

    def missing(self, keys: Sequence[str]) -> list[str]:
        positions = self._ask(
            lambda: self._redis.run("store_missing", *map(raw, keys), within_seconds=_left())
        )
        return [keys[position - 1] for position in positions]

    def count_keys(self, prefix: str) -> int:
        return int(self._keys(prefix, 0))

    def list_keys(self, prefix: str) -> list[str]:
        found = self._keys(prefix, 1)
        return [key.decode("utf-8", "surrogatepass") for key in found]

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        self._run("store_push", operation, raw(key), value)

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        value: bytes | None = self._run("store_pop", operation, raw(key))
        return value

    def queue_len(self, key: str) -> int:
        name = raw(key)
        found = self._ask(
            lambda: self._redis.ask(lambda client: client.hget(self._queues, name), _left())
        )
        try:
            first, after = (found or b"0:0").split(b":")
            return int(after) - int(first)
        except ValueError:
            raise dist.DistStoreError(
                f"Redis at {self.endpoint} holds a queue that rdzv has not written: see who else "
                "writes there, or use another key_prefix."
            ) from None

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        missing = self.missing(keys)
        deadline = time.monotonic() + timeout_seconds
        while missing and (left := deadline - time.monotonic()) > 0:
            # Whichever is last comes last; a random one halves what is left at each waking.
            waited_for = random.choice(missing)
            rest = missing
            self._sleep(waited_for, left, lambda: waited_for not in self.missing(rest))  # noqa: B023
            missing = self.missing(rest)
        return missing

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        deadline = time.monotonic() + timeout_seconds
        while not self.queue_len(key):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._sleep(key, left, lambda: self.queue_len(key) > 0)
        return True

    def close(self) -> None:
        self._redis.close()

    def _sleep(self, key: str, seconds: float, is_there: Callable[[], bool]) -> None:
        """Until the key is written, or for a while; not at all if it is there by now."""
        channel = self._redis.base + b"wake:" + raw(key)

        def listen(client: Any) -> None:
            with client.pubsub() as pubsub:
                pubsub.subscribe(channel)
                # The confirmation: from here on nothing is missed.
                patience = self._redis.options.request_seconds
                confirmed = pubsub.get_message(
                    timeout=min(patience, max(seconds, REQUEST_SECONDS_MIN))
                )
                if confirmed is None:
                    raise redis.exceptions.TimeoutError("no answer to SUBSCRIBE")
                if not is_there():
                    left = seconds - (time.monotonic() - begun)
                    pubsub.get_message(timeout=max(0.0, min(left, WAIT_SLICE_SECONDS_MAX)))

        begun = time.monotonic()
        self._ask(lambda: self._redis.listen(listen, seconds))

    def _keys(self, prefix: str, listed: int) -> Any:
        return self._ask(
            lambda: self._redis.run("store_keys", raw(prefix), listed, within_seconds=_left())
        )

    def _run(self, script: str, operation: str, *arguments: object) -> Any:
        remembered_ms = round(_remembered_seconds(self.endpoint) * 1000)
        repeated = operation in self._unanswered
        # A repeat brings nothing to forget, so the server forgets what is over instead.
        answered = [] if repeated else self._take_answered()
        try:
            answer = self._ask(
                lambda: self._redis.run(
                    script,
                    operation,
                    self._redis.lifetime_ms,
                    remembered_ms,
                    " ".join(answered),
                    *arguments,
                    within_seconds=_left(),
                )
            )
        except BaseException:
            self._answered.extend(answered)
            if not repeated:
                self._unanswered.append(operation)
            raise
        if not repeated:
            self._answered.append(operation)
        return answer

    def _take_answered(self) -> list[str]:
        taken: list[str] = []
        while len(taken) < ANSWERED_MAX:
            try:
                taken.append(self._answered.popleft())
            except IndexError:
                break
        return taken

    def _ask(self, request: Callable[[], Any]) -> Any:
        with _translated():
            return request()


def _left() -> float | None:
    """How many seconds the caller has; None where nobody has said."""
    deadline = current_deadline.get()
    return None if deadline is None else deadline.remaining_seconds(TIMEOUT_SECONDS_DEFAULT)


def _remembered_seconds(endpoint: str) -> float:
    """How long to remember an operation that is made now.

    Raises ``DistNetworkError`` where it may have been made before, and forgotten since.
    """
    deadline = current_deadline.get()
    if deadline is None:
        return TIMEOUT_SECONDS_DEFAULT + REMEMBERED_SECONDS
    timeout_seconds = max(0.0, deadline.seconds)
    late_seconds = deadline.elapsed_seconds - max(0.0, deadline.seconds)
    if late_seconds > LATE_SECONDS_MAX:
        raise dist.DistNetworkError(
            f"a call to {endpoint} with a timeout of {timeout_seconds:g} s went on "
            f"{late_seconds:.0f} s after its end: this process was stopped meanwhile. Nothing is "
            "repeated now, for the server may have forgotten that it was done."
        )
    return timeout_seconds + REMEMBERED_SECONDS


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except RendezvousConnectionError as error:
        raise Unanswered(str(error)) from error
    except RendezvousStateError as error:
        raise dist.DistStoreError(str(error)) from error
