"""Broken stores: counters and compare_set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kit.catalogue import LossyClient, a_moment, catalogue

from rdzv.stores.base import Store
from rdzv.stores.memory import MemoryClient
from rdzv.torch_store import Text

fault = catalogue("store")


# Counters


@fault("adds_from_many_threads_all_count", seen_in="get and set, where INCRBY was meant")
class AddsInTwoSteps(MemoryClient):
    """A counter is read and written in two requests."""

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            before = self._values.get(key)
        a_moment()
        with self._changed:
            self._values.pop(key, None)
            if before is not None:
                self._values[key] = before
            return super().add(key, amount, operation)


@fault("add_counts", seen_in="returning what the server wrote on the wire")
class AddReturnsText(Store):
    """The sum is returned as text."""

    def add(self, key: Text, amount: Any, /) -> Any:
        return str(super().add(key, amount))


@fault("add_counts", seen_in="fetch-and-add, which returns the number before")
class AddReturnsTheOldNumber(Store):
    """The number before the sum is returned."""

    def add(self, key: Text, amount: Any, /) -> int:
        return super().add(key, amount) - int(amount)


@fault("add_counts", seen_in="retry decorators around a request that is not idempotent")
class AddCountsTwice(LossyClient):
    """An add whose answer was lost is repeated, and counts twice."""

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            total = MemoryClient.add(self, key, amount, operation)
            self.lose_first(operation)
            return total


@fault("add_to_a_text_raises_and_changes_nothing", seen_in="SQL's CAST, for which a text is 0")
class TextCountsAsZero(MemoryClient):
    """To add to what is no number begins at 0 and overwrites it."""

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            if not self._values.get(key, b"0").removeprefix(b"-").isdigit():
                del self._values[key]
            return super().add(key, amount, operation)


@fault(
    "add_beyond_64_bits_raises_and_changes_nothing", seen_in="int64, torch's own stores included"
)
class AddWrapsRound(MemoryClient):
    """A sum beyond 64 bits comes out negative."""

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            total = int(self._values.get(key, b"0")) + amount
            wrapped = (total + 2**63) % 2**64 - 2**63
            self._values[key] = str(wrapped - amount).encode()
            if not -(2**63) <= wrapped - amount < 2**63:
                self._values[key] = str(wrapped).encode()
                amount = 0
            return super().add(key, amount, operation)


@fault("counters_and_values_are_one", seen_in="a table of its own for counters")
class CountersApart(MemoryClient):
    """Counters have a key space of their own."""

    def add(self, key: str, amount: int, operation: str) -> int:
        return super().add(f"{key}/counter", amount, operation)

    def get_many(self, keys: Sequence[str]) -> list[bytes | None]:
        counters = super().get_many([f"{key}/counter" for key in keys])
        return [
            value if counter is None else counter
            for value, counter in zip(super().get_many(keys), counters, strict=True)
        ]


@fault("a_deleted_key_begins_anew", seen_in="counters that a cache in the client remembers")
class DeletedCountersGoOn(MemoryClient):
    """A counter that was deleted goes on where it was."""

    def delete(self, key: str, operation: str) -> bool:
        with self._changed:
            if key in self._values:
                self._queues[f"deleted {key}"].append(self._values[key])
            return super().delete(key, operation)

    def add(self, key: str, amount: int, operation: str) -> int:
        with self._changed:
            if self._queues[f"deleted {key}"]:
                self._values[key] = self._queues[f"deleted {key}"].pop()
            return super().add(key, amount, operation)


# compare_set


@fault("compare_set_replaces_what_it_expects", seen_in="etcd's prev_kv, and Redis' SET with GET")
class CompareSetReturnsTheOldValue(MemoryClient):
    """A compare_set that has written returns the value before."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            before = self._values.get(key)
            after = super().compare_set(key, expected, desired, operation)
            return after if before is None else before


@fault("compare_set_creates_for_an_empty_expectation_only", seen_in="upserts")
class CompareSetCreates(MemoryClient):
    """A compare_set creates a key that is not there, whatever it expects."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            known = expected if key in self._values else b""
            return super().compare_set(key, known, desired, operation)


@fault("compare_set_replaces_what_it_expects", seen_in="'if not expected' for a blind write")
class CompareSetOverwrites(MemoryClient):
    """A compare_set that expects nothing overwrites what is there."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            known = expected or self._values.get(key, b"")
            return super().compare_set(key, known, desired, operation)


@fault(
    "compare_set_takes_an_empty_value_for_the_empty_expectation",
    seen_in="SET NX for the empty expectation; torch's RPC frees its token by an empty value",
)
class CompareSetOnlyCreates(MemoryClient):
    """A compare_set that expects nothing does not replace an empty value."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            if not expected and key in self._values:
                return self._values[key]
            return super().compare_set(key, expected, desired, operation)


@fault("one_compare_set_of_many_wins", seen_in="GET and SET without WATCH or a script")
class ComparesThenSets(MemoryClient):
    """The comparison and the write of a compare_set are two requests."""

    def compare_set(
        self, key: str, expected: bytes, desired: bytes, operation: str
    ) -> bytes | None:
        with self._changed:
            fits = self._values.get(key, b"") == expected
        a_moment()
        with self._changed:
            known = self._values.get(key, b"") if fits else expected
            return super().compare_set(key, known, desired, operation)
