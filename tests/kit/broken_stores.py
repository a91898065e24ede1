"""Broken stores: values, keys, and calls for many keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from kit.catalogue import LossyClient, StoreSpace, a_moment, catalogue

from rdzv.stores.base import Store
from rdzv.stores.memory import MemoryClient
from rdzv.torch_store import Text, key_list, key_text

fault = catalogue("store")


# Values


@fault("what_is_set_is_got", seen_in="redis-py with decode_responses=True")
class GetsText(Store):
    """A value comes back as text."""

    def get(self, key: Text) -> Any:
        return super().get(key).decode("latin-1")


@fault("what_is_set_is_got", seen_in="drivers whose blobs are bytearrays or memoryviews")
class GetsWhatWasSet(Store):
    """A value comes back as a bytearray: equal to bytes, and refused by torch's C++."""

    def get(self, key: Text) -> Any:
        return bytearray(super().get(key))


class _Mangles(MemoryClient):
    """Stores another value than it was given."""

    def set_many(self, pairs: Sequence[tuple[str, bytes]], operation: str) -> None:
        super().set_many([(key, self.mangled(key, value)) for key, value in pairs], operation)

    def mangled(self, key: str, value: bytes) -> bytes:
        raise NotImplementedError


@fault("a_second_set_overwrites", seen_in="SETNX, and INSERT without ON CONFLICT")
class SetsOnce(_Mangles):
    """A second value for a key is not written."""

    def mangled(self, key: str, value: bytes) -> bytes:
        return self._values.get(key, value)


@fault("a_second_set_overwrites", seen_in="files that are opened without O_TRUNC")
class LeavesATail(_Mangles):
    """What a shorter value does not cover of a longer one stays."""

    def mangled(self, key: str, value: bytes) -> bytes:
        return value + self._values.get(key, b"")[len(value) :]


@fault("every_byte_can_be_stored", seen_in="strings of C, and text columns")
class ValuesEndAtNul(_Mangles):
    """A value ends at its first NUL."""

    def mangled(self, key: str, value: bytes) -> bytes:
        return value.partition(b"\0")[0]


@fault("a_megabyte_can_be_stored", seen_in="MySQL's BLOB outside strict mode")
class ValuesEndAt64K(_Mangles):
    """A value is cut off after 65,535 bytes, without an error."""

    def mangled(self, key: str, value: bytes) -> bytes:
        return value[:65535]


@fault("blanks_at_the_ends_of_a_value_stay", seen_in="strip() of a file or of a body of HTTP")
class ValuesAreStripped(_Mangles):
    """Blanks and line ends at the end of a value are lost."""

    def mangled(self, key: str, value: bytes) -> bytes:
        return value.rstrip(b" \t\r\n")


@fault("an_empty_value_is_a_value", seen_in="'if value:', where None was meant")
class EmptyIsAbsent(MemoryClient):
    """A key with an empty value is taken to be absent."""

    def missing(self, keys: Sequence[str]) -> list[str]:
        with self._changed:
            return [key for key in keys if not self._values.get(key) and not self._queues.get(key)]


@fault("get_of_a_missing_key_times_out", seen_in="answering with a default")
class MissingIsEmpty(Store):
    """A key that is not there is got as an empty value at once."""

    def get(self, key: Text) -> bytes:
        return super().get(key) if self.check([key]) else b""


class _Renames(Store):
    """Stores under another key than it was given."""

    def _key(self, key: object) -> str:
        return super()._key(self.renamed(key_text(key)))

    def renamed(self, key: str) -> str:
        raise NotImplementedError


@fault("any_text_is_a_key", seen_in="MySQL's default collations, and file systems of Macs")
class KeysMeetInCase(_Renames):
    """Keys that differ in case share a value."""

    def renamed(self, key: str) -> str:
        return key.casefold()


@fault("any_text_is_a_key", seen_in="CHAR columns, and comparison with PAD SPACE")
class KeysMeetInTrailingSpaces(_Renames):
    """Keys that differ in spaces at the end share a value."""

    def renamed(self, key: str) -> str:
        return key.rstrip(" ")


@fault("long_keys_do_not_meet", seen_in="VARCHAR(64) outside strict mode")
class KeysMeetAfter64Characters(_Renames):
    """Keys that begin with the same 64 characters share a value."""

    def renamed(self, key: str) -> str:
        return key[:64]


@fault("stores_of_run_ids_do_not_meet", seen_in="a store whose keys have no run id before them")
class RunsShareKeys(StoreSpace):
    """Stores of different runs see each other's keys."""

    def client(self, run_id: str) -> MemoryClient:
        return super().client("")


@fault("a_round_has_keys_of_its_own", seen_in="a prefix joined without a separator")
class RoundsMeetInPrefixes(Store):
    """The keys of rounds whose names run on into each other meet."""

    def namespace(self, prefix: str) -> Store:
        view = super().namespace(prefix)
        view._prefix = view._prefix.removesuffix("/")
        return view


@fault("a_round_has_keys_of_its_own", seen_in="torch's PrefixStore, whose num_keys counts all keys")
class RoundsCountAllKeys(MemoryClient):
    """A round counts the keys of all rounds as its own."""

    def count_keys(self, prefix: str) -> int:
        return super().count_keys("")


@fault("a_round_has_keys_of_its_own", seen_in="LIKE with a prefix in which '_' was not escaped")
class RoundsMeetInWildcards(MemoryClient):
    """An underscore in a round's name stands for any character where keys are listed."""

    def list_keys(self, prefix: str) -> list[str]:
        with self._changed:
            return [key for key in self._values if _is_like(key, prefix)]


def _is_like(key: str, prefix: str) -> bool:
    pairs = zip(key, prefix, strict=False)
    return len(key) >= len(prefix) and all(wanted in ("_", got) for got, wanted in pairs)


# check, delete_key, append and the calls for many keys


@fault("check_tells_and_never_waits", hangs=True, seen_in="a check made of wait")
class CheckWaits(Store):
    """A check waits until the keys are there."""

    def check(self, keys: Iterable[Text]) -> bool:
        names = key_list(keys)
        self.wait(names)
        return super().check(names)


@fault("check_tells_and_never_waits", seen_in="EXISTS key key, whose count is not compared")
class CheckNeedsOne(Store):
    """A check is content with any one of the keys."""

    def check(self, keys: Iterable[Text]) -> bool:
        names = key_list(keys)
        return not names or any(super(CheckNeedsOne, self).check([name]) for name in names)


@fault("wrong_arguments_are_type_errors", seen_in="iterating over whatever is given")
class ReadsAKeyLetterByLetter(Store):
    """One key, given where several are expected, is read letter by letter."""

    def check(self, keys: Iterable[Text]) -> bool:
        return super().check(list(keys))


@fault("delete_key_tells_whether_there_was_one", seen_in="torch's FileStore")
class DeleteIsAlwaysTrue(MemoryClient):
    """To delete what is not there is told as a success."""

    def delete(self, key: str, operation: str) -> bool:
        super().delete(key, operation)
        return True


@fault("delete_key_tells_whether_there_was_one", seen_in="a delete that is repeated by a driver")
class DeleteForgetsItsAnswer(LossyClient):
    """A delete whose answer was lost is repeated, and finds nothing to delete."""

    def delete(self, key: str, operation: str) -> bool:
        with self._changed:
            was_there = MemoryClient.delete(self, key, operation)
            self.lose_first(operation)
            return was_there


@fault("append_of_what_is_there_doubles_it", seen_in="torch's Store::append over compareSet")
class AppendsNothingTwice(MemoryClient):
    """To append what the value already is changes nothing."""

    def append(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            if self._values.get(key) != value:
                super().append(key, value, operation)


@fault("appends_from_many_threads_all_stay", seen_in="get and set, where APPEND was meant")
class AppendsInTwoSteps(MemoryClient):
    """A value is read and written back longer in two requests."""

    def append(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            before = self._values.get(key, b"")
        a_moment()
        with self._changed:
            self._values[key] = before
            super().append(key, value, operation)


@fault(
    "append_puts_bytes_behind", seen_in="retry decorators around a request that is not idempotent"
)
class AppendsTwice(LossyClient):
    """An append whose answer was lost is repeated, and is there twice."""

    def append(self, key: str, value: bytes, operation: str) -> None:
        with self._changed:
            MemoryClient.append(self, key, value, operation)
            self.lose_first(operation)


@fault("multi_get_keeps_the_order", seen_in="WHERE key IN (...), which promises no order")
class MultiGetSorts(Store):
    """Several values come in the order of their keys, not in the order that was asked for."""

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return super().multi_get(sorted(key_list(keys)))


@fault("multi_get_keeps_the_order", seen_in="WHERE key IN (...), whose rows are distinct")
class MultiGetDropsRepeats(Store):
    """A key that is asked for twice is answered once."""

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return super().multi_get(dict.fromkeys(key_list(keys)))


@fault("multi_get_with_a_missing_key_times_out", seen_in="MGET, which does not wait")
class MultiGetDoesNotWait(Store):
    """A key that is not there is got as an empty value, if it is one of several."""

    def multi_get(self, keys: Iterable[Text]) -> list[bytes]:
        return [super(MultiGetDoesNotWait, self).get(k) if self.check([k]) else b"" for k in keys]


@fault(
    "multi_set_of_unequal_lengths_raises", seen_in="zip(); some of torch's stores are silent too"
)
class MultiSetZips(Store):
    """Keys without a value are left out without an error."""

    def multi_set(self, keys: Iterable[Text], values: Iterable[Text]) -> None:
        pairs = list(zip(keys, values, strict=False))
        super().multi_set([key for key, _ in pairs], [value for _, value in pairs])


@fault("a_fresh_store_has_no_keys", seen_in="torch's FileStore and TCPStore, which count their own")
class ListsItsOwnKey(MemoryClient):
    """A key of the store's own is counted and listed."""

    def __init__(self) -> None:
        super().__init__()
        self._values["init/"] = b""


@fault(
    "a_clone_has_the_keys_and_its_own_timeout", seen_in="torch's HashStore, whose clone is itself"
)
class ClonesToItself(Store):
    """A clone is the same object, and shares the timeout."""

    def clone(self) -> Store:
        return self


@fault(
    "a_clone_has_the_keys_and_its_own_timeout",
    hangs=True,
    seen_in="a clone that opens a new session",
)
class ClonesToNothing(Store):
    """A clone has none of the keys."""

    def clone(self) -> Store:
        return Store(MemoryClient(), timeout=self.timeout)
