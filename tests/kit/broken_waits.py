"""Broken stores: waits, timeouts, barriers and queues."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from kit.catalogue import LossyClient, a_moment, catalogue

from rdzv.stores.base import Store, counter_after
from rdzv.stores.memory import MemoryClient
from rdzv.torch_store import Deadline, Text, key_list, timeout_seconds

fault = catalogue("store")

LONGER_THAN_ANYBODY_WAITS = timedelta(days=10)
Timeout = timedelta | float | None


# Waking


@fault("wait_needs_all_keys", seen_in="a blocking read of several keys that returns the first")
class WaitsForOne(MemoryClient):
    """A wait for several keys ends when any of them is there."""

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        with self._changed:
            self._changed.wait_for(
                lambda: len(self.missing(keys)) < len(set(keys)), timeout_seconds
            )
            missing = self.missing(keys)
            return [] if len(missing) < len(set(keys)) else missing


@fault("no_release_is_lost", hangs=True, seen_in="a look before SUBSCRIBE, LISTEN or a watch")
class LooksBeforeItListens(MemoryClient):
    """A key that is set between the look and the subscription is missed."""

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        if self.missing(keys):
            a_moment()
            with self._changed:
                self._changed.wait(timeout_seconds)
        return self.missing(keys)


@fault("add_releases_the_waiting", hangs=True, seen_in="torch's HashStore")
class AddIsSilent(MemoryClient):
    """Who waits for a key is not told that it was made by add."""

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            total = counter_after(key, self._values.get(key), amount)
            self._values[key] = str(total).encode()
            return total


@fault("compare_set_releases_the_waiting", hangs=True, seen_in="torch's TCPStore without libuv")
class CompareSetIsSilent(MemoryClient):
    """Who waits for a key is not told that it was made by compare_set."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            if key in self._values or expected:
                return super().compare_set(key, expected, desired, operation)
            self._values[key] = desired
            return desired


# Timeouts


@fault("get_of_a_missing_key_times_out", hangs=True, seen_in="a blocking read without a timeout")
class WaitsForEver(Store):
    """A wait lasts until the key is there."""

    def _deadline(self, timeout: Timeout = None) -> Deadline:
        return super()._deadline(LONGER_THAN_ANYBODY_WAITS)


@fault(
    "get_of_a_missing_key_times_out",
    hangs=True,
    seen_in="Python stores that remember the timeout in an attribute, which C++ does not set",
)
class RemembersItsFirstTimeout(Store):
    """The timeout is the one that the store was made with, whatever set_timeout says."""

    def __init__(self, client: Any, *, timeout: timedelta | None = None) -> None:
        super().__init__(client, timeout=timeout)
        self._first_timeout = self.timeout

    def _deadline(self, timeout: Timeout = None) -> Deadline:
        return super()._deadline(self._first_timeout if timeout is None else timeout)


@fault(
    "wait_obeys_its_own_timeout", hangs=True, seen_in="an optional argument that is not passed on"
)
class IgnoresAWaitsTimeout(Store):
    """A wait's own timeout is ignored."""

    def wait(self, keys: Iterable[Text], timeout: Timeout = None) -> None:
        super().wait(keys)


@fault("wait_obeys_its_own_timeout", seen_in="torch's elastic agent after a barrier that timed out")
class AWaitsTimeoutSticks(Store):
    """After a wait with a timeout of its own that ended in vain, the store keeps it."""

    def wait(self, keys: Iterable[Text], timeout: Timeout = None) -> None:
        before = self.timeout
        if timeout is not None:
            self.set_timeout(timedelta(seconds=timeout_seconds(timeout)))
        super().wait(keys)
        self.set_timeout(before)


@fault("a_timeout_of_zero_or_less_raises_at_once", hangs=True, seen_in="torch's HashStore")
class ZeroWaitsForEver(Store):
    """A store's timeout of zero is taken for none."""

    def _deadline(self, timeout: Timeout = None) -> Deadline:
        seconds = timeout_seconds(self.timeout if timeout is None else timeout)
        return super()._deadline(seconds or LONGER_THAN_ANYBODY_WAITS)


@fault("a_timeout_of_zero_or_less_finds_what_is_there", seen_in="torch's TCPStore")
class ZeroNeverLooks(Store):
    """A timeout of zero raises before it looks."""

    def wait(self, keys: Iterable[Text], timeout: Timeout = None) -> None:
        names, seconds = (
            key_list(keys),
            timeout_seconds(self.timeout if timeout is None else timeout),
        )
        if names and seconds <= 0:
            raise dist.DistStoreError(f"wait timeout after 0 ms, keys: {names}")
        super().wait(names, timeout)


@fault(
    "a_timeout_of_int_max_milliseconds_works",
    raises=(OverflowError,),
    seen_in="drivers whose timeouts are 32 bits wide; torch's RPC waits that long",
)
class LongTimeoutsOverflow(MemoryClient):
    """A timeout of 24 days is more than it can count."""

    def wait_for_keys(self, keys: Sequence[str], timeout_seconds: float) -> list[str]:
        int(timeout_seconds * 1_000_000).to_bytes(4, "big", signed=True)
        return super().wait_for_keys(keys, timeout_seconds)


@fault(
    "get_of_a_missing_key_times_out",
    raises=(TimeoutError,),
    seen_in="the driver's own error; torch catches DistStoreError only",
)
class RaisesTimeoutErrors(Store):
    """A wait that ends in vain raises TimeoutError."""

    def get(self, key: Text) -> bytes:
        try:
            return super().get(key)
        except dist.DistStoreError as error:
            raise TimeoutError(str(error)) from error


@fault("get_of_a_missing_key_times_out", seen_in="torch's FileStore")
class RaisesRuntimeErrors(Store):
    """A wait that ends in vain raises a mere RuntimeError."""

    def get(self, key: Text) -> bytes:
        try:
            return super().get(key)
        except dist.DistStoreError as error:
            raise RuntimeError(str(error)) from error


@fault("a_timeout_names_what_is_missing", seen_in="torch's HashStore: 'Wait timeout'")
class NamesNoKeys(Store):
    """The error of a wait that ended in vain does not say for what."""

    def wait(self, keys: Iterable[Text], timeout: Timeout = None) -> None:
        try:
            super().wait(keys, timeout)
        except dist.DistStoreError:
            raise dist.DistStoreError("Wait timeout") from None


@fault("wait_for_a_missing_key_times_out", seen_in="a wait whose result nobody looks at")
class TimesOutSilently(Store):
    """A wait that ends in vain returns as if the keys were there."""

    def wait(self, keys: Iterable[Text], timeout: Timeout = None) -> None:
        names = key_list(keys)
        try:
            super().wait(names, timeout)
        except dist.DistStoreError:
            return


# Barriers


@fault("a_barrier_opens_for_the_last", seen_in="counting from nought")
class BarriersOpenEarly(Store):
    """A barrier opens for the last but one."""

    def barrier(self, key: Text, world_size: int, timeout: Timeout = None) -> None:
        super().barrier(key, world_size - 1, timeout)


@fault("a_barrier_times_out_and_has_counted", seen_in="barriers that take back who gave up")
class BarriersForget(Store):
    """A caller whose wait at a barrier has timed out is not counted any more."""

    def barrier(self, key: Text, world_size: int, timeout: Timeout = None) -> None:
        try:
            super().barrier(key, world_size, timeout)
        except dist.DistStoreError:
            self.add(f"{key!s}/num_members", -1)
            raise


# Queues


@fault("queues_keep_the_order", seen_in="LPUSH with LPOP")
class PopsTheNewest(MemoryClient):
    """A queue gives what was pushed last."""

    def queue_push(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            self._queues[key].appendleft(value)
            self._changed.notify_all()


@fault("every_value_is_popped_once", seen_in="SELECT and DELETE without a lock")
class PopsTwice(MemoryClient):
    """A value is read and taken away in two requests."""

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        with self._changed:
            queue = self._queues.get(key)
            head = queue[0] if queue else None
        a_moment()
        taken = super().queue_pop(key, operation)
        return head if taken is not None else None


@fault(
    "queues_keep_the_order",
    hangs=True,
    seen_in="retry decorators around a request that is not idempotent",
)
class PopsIntoTheVoid(LossyClient):
    """A pop whose answer was lost is repeated, and the first value is lost."""

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        with self._changed:
            value = MemoryClient.queue_pop(self, key, operation)
            self.lose_first(operation)
            return value


@fault("queues_keep_the_order", hangs=True, seen_in="'if value:', where None was meant")
class PopsNoEmptyValues(MemoryClient):
    """An empty value in a queue is taken for an empty queue."""

    def queue_pop(self, key: str, operation: str) -> bytes | None:
        return super().queue_pop(key, operation) or None


@fault("an_empty_queue_raises_or_times_out", hangs=True, seen_in="BLPOP without its timeout")
class PopsForEver(Store):
    """A pop of an empty queue waits for ever."""

    def _wait_for_queue(self, name: str, deadline: Deadline) -> bool:
        return super()._wait_for_queue(name, self._deadline(LONGER_THAN_ANYBODY_WAITS))


@fault("an_empty_queue_raises_or_times_out", seen_in="LPOP, whose answer for nothing is None")
class PopsNone(Store):
    """A pop that does not wait gives None for an empty queue."""

    def queue_pop(self, key: Text, block: bool = True) -> Any:
        return super().queue_pop(key, block) if block or self.queue_len(key) else None


@fault("check_and_wait_see_queues_and_keys_do_not", seen_in="DBSIZE and KEYS, which see lists too")
class QueuesCountAsKeys(MemoryClient):
    """Queues are counted as keys."""

    def count_keys(self, prefix: str) -> int:
        with self._changed:
            queues = [key for key, queue in self._queues.items() if queue]
            return super().count_keys(prefix) + sum(key.startswith(prefix) for key in queues)


@fault("check_and_wait_see_queues_and_keys_do_not", seen_in="a table of its own for queues")
class QueuesAreUnseen(MemoryClient):
    """A check does not see queues."""

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if key not in self._values]
