"""The reference store: one process's memory, in the fewest lines."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from datetime import timedelta

from rdzv.stores.base import Store, StoreClient, counter_after

__all__ = ["MemoryClient", "MemoryStore"]


class MemoryClient(StoreClient):
    """A key space in memory, which dies with the last store on it."""

    endpoint = "memory"

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._queues: defaultdict[str, deque[bytes]] = defaultdict(deque)
        self._changed = threading.Condition()

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        with self._changed:
            return [self._values.get(key) for key in keys]

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        with self._changed:
            self._values.update(pairs)
            self._changed.notify_all()

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            total = counter_after(key, self._values.get(key), amount)
            self._values[key] = str(total).encode()
            self._changed.notify_all()
            return total

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            if self._values.get(key, b"") == expected and (expected == b"" or key in self._values):
                self._values[key] = desired
                self._changed.notify_all()
            return self._values.get(key)

    def append(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            whole = self._values.get(key, b"") + value
            self.check_value_size(key, whole)
            self._values[key] = whole
            self._changed.notify_all()

    def delete(self, key: str, operation: str) -> bool:
        with self._changed:
            return self._values.pop(key, None) is not None

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if key not in self._values and not self._queues.get(key)]

    def count_keys(self, prefix: str) -> int:
        return len(self.list_keys(prefix))

    def list_keys(self, prefix: str) -> list[str]:
        with self._changed:
            return [key for key in self._values if key.startswith(prefix)]

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            self._queues[key].append(value)
            self._changed.notify_all()

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        with self._changed:
            queue = self._queues.get(key)
            if not queue:
                return None
            value = queue.popleft()
            if not queue:
                del self._queues[key]
            return value

    def queue_len(self, key: str) -> int:
        with self._changed:
            return len(self._queues.get(key, ()))

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(lambda: not self.missing(keys), timeout_seconds)
            return self.missing(keys)

    def wait_for_queue(self, key: str, timeout_seconds: float) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._queues.get(key)), timeout_seconds)

    def close(self) -> None:
        """Nothing to give up: the data lives as long as the client."""


class MemoryStore(Store):
    """A store for the threads of one process. Those made with the same client share the keys."""

    def __init__(
        self, client: MemoryClient | None = None, *, timeout: timedelta | None = None
    ) -> None:
        super().__init__(client or MemoryClient(), timeout=timeout)
