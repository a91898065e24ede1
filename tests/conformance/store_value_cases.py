"""The cases of :mod:`rdzv.conformance.store_cases` in which nobody has to wait."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import chain

import pytest
import torch.distributed as dist

from rdzv.conformance.store_kit import LONG, SHORT, Connect, in_threads, store_book, times_out

case = store_book("values")
multi = store_book("values", "multi")
lists = store_book("values", "list_keys")
clones = store_book("values", "clone")

COMPETITIONS = 25
"""A single one may by chance be decided before all are there."""


@case
def what_is_set_is_got(connect: Connect) -> None:
    store, peer = connect(), connect()
    store.set("text", "grün")
    store.set("bytes", b"\x00\xff")
    store.set("bytearray", bytearray(b"ab"))
    assert peer.get("text") == "grün".encode()
    assert peer.get("bytes") == b"\x00\xff"
    assert peer.get("bytearray") == b"ab"
    assert type(peer.get("bytearray")) is bytes


@case
def a_second_set_overwrites(connect: Connect) -> None:
    store = connect()
    store.set("k", "a longer first value")
    store.set("k", "second")
    assert store.get("k") == b"second"


@case
def an_empty_value_is_a_value(connect: Connect) -> None:
    store = connect()
    store.set("k", "")
    assert store.check(["k"])
    assert store.get("k") == b""


@case
def every_byte_can_be_stored(connect: Connect) -> None:
    store = connect()
    store.set("k", bytes(range(256)))
    assert store.get("k") == bytes(range(256))


@case
def a_megabyte_can_be_stored(connect: Connect) -> None:
    store, peer = connect(), connect()
    value = bytes(range(256)) * 4096
    store.set("k", value)
    assert peer.get("k") == value


ODD_KEYS = ["", " ", "a ", "A", "a", "/", "//x", "a\nb", "a\x00b", "%_\\", "'\"", "\U0001f600", "é"]


@case
def any_text_is_a_key(connect: Connect) -> None:
    store, peer = connect(), connect()
    for number, key in enumerate(ODD_KEYS):
        store.set(key, str(number))
    for number, key in enumerate(ODD_KEYS):
        assert peer.get(key) == str(number).encode(), repr(key)


@case
def keys_may_be_bytes(connect: Connect) -> None:
    store = connect()
    store.set(b"k", "1")
    store.set(bytearray(b"l"), "2")
    assert store.get("k") == b"1"
    assert store.get("l") == b"2"
    assert store.check([b"k", "l"])


@case
def wrong_arguments_are_type_errors(connect: Connect) -> None:
    store = connect()
    wrong: list[Callable[[], object]] = [
        lambda: store.set(1, "v"),
        lambda: store.set("k", 1),
        lambda: store.set("k", None),
        lambda: store.set("k", memoryview(b"v")),
        lambda: store.set("\ud800", "v"),
        lambda: store.set("k", "\ud800"),
        lambda: store.get(None),
        lambda: store.add("k", 1.0),
        lambda: store.add("k", "1"),
        lambda: store.add("k", 2**63),
        lambda: store.check("k"),
        lambda: store.wait("k"),
        lambda: store.wait(["k"], "1"),
        lambda: store.multi_get("k"),
        lambda: store.set_timeout(1),
    ]
    for number, call in enumerate(wrong):
        try:
            call()
        except TypeError:
            continue
        raise AssertionError(f"call {number} of the list raised no TypeError")
    assert not store.check(["k"])


@case
def a_write_is_seen_by_all_once_it_returns(connect: Connect) -> None:
    store, peer = connect(), connect()
    for turn in range(5):
        store.set(f"set {turn}", "1")
        assert peer.check([f"set {turn}"])
        store.multi_set([f"multi {turn}"], ["1"])
        assert peer.check([f"multi {turn}"])
        store.append(f"append {turn}", "1")
        assert peer.check([f"append {turn}"])
        store.compare_set(f"compare {turn}", "", "1")
        assert peer.check([f"compare {turn}"])
        store.add(f"add {turn}", 1)
        assert peer.check([f"add {turn}"])
        store.delete_key(f"set {turn}")
        assert not peer.check([f"set {turn}"])


# Counters


@case
def add_counts(connect: Connect) -> None:
    store = connect()
    assert store.add("k", 5) == 5
    assert store.add("k", -8) == -3
    assert store.get("k") == b"-3"
    assert store.add("zero", 0) == 0
    assert store.get("zero") == b"0"
    assert store.add("flag", True) == 1


@case
def counters_and_values_are_one(connect: Connect) -> None:
    store = connect()
    store.set("k", "10")
    assert store.add("k", 1) == 11
    assert store.compare_set("k", "11", "20") == b"20"
    assert store.add("k", 1) == 21
    store.set("k", "x")
    assert store.get("k") == b"x"
    store.append("digits", "1")
    store.append("digits", "2")
    assert store.add("digits", 1) == 13


@case
def add_to_a_text_raises_and_changes_nothing(connect: Connect) -> None:
    store = connect()
    store.set("k", "abc")
    with pytest.raises(ValueError):  # noqa: PT011 - the text is the store's own
        store.add("k", 1)
    assert store.get("k") == b"abc"
    assert store.add("other", 1) == 1


@case
def add_beyond_64_bits_raises_and_changes_nothing(connect: Connect) -> None:
    store = connect()
    assert store.add("k", 2**63 - 1) == 2**63 - 1
    with pytest.raises(ValueError):  # noqa: PT011
        store.add("k", 1)
    assert store.add("k", -1) == 2**63 - 2
    assert store.add("low", -(2**63)) == -(2**63)
    with pytest.raises(ValueError):  # noqa: PT011
        store.add("low", -1)
    store.set("large", str(2**63))
    with pytest.raises(ValueError):  # noqa: PT011
        store.add("large", 0)
    assert store.get("large") == str(2**63).encode()


@case
def adds_from_many_threads_all_count(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]
    sums = in_threads(4, lambda index: [stores[index].add("k", 1) for _ in range(25)])
    assert sorted(chain.from_iterable(sums)) == list(range(1, 101))


# compare_set


@case
def compare_set_creates_for_an_empty_expectation_only(connect: Connect) -> None:
    store = connect()
    assert store.compare_set("k", "other", "new") == b"other"
    assert not store.check(["k"])
    assert store.compare_set("k", "", "new") == b"new"
    assert store.get("k") == b"new"


@case
def compare_set_replaces_what_it_expects(connect: Connect) -> None:
    store = connect()
    store.set("k", "old")
    assert store.compare_set("k", "other", "new") == b"old"
    assert store.compare_set("k", "", "new") == b"old"
    assert store.get("k") == b"old"
    assert store.compare_set("k", "old", b"\x00\xff") == b"\x00\xff"
    assert store.compare_set("k", b"\x00\xff", "") == b""
    assert store.get("k") == b""


@case
def compare_set_takes_an_empty_value_for_the_empty_expectation(connect: Connect) -> None:
    store = connect()
    store.set("token", "")
    assert store.compare_set("token", "", "mine") == b"mine"
    assert store.compare_set("token", "", "yours") == b"mine"


@case
def one_compare_set_of_many_wins(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]
    keys = [f"k{number}" for number in range(COMPETITIONS)]

    def compete(index: int) -> list[bytes]:
        return [stores[index].compare_set(key, "", f"{index}") for key in keys]

    answers = in_threads(4, compete)
    for key, answers_of_key in zip(keys, zip(*answers, strict=True), strict=True):
        assert set(answers_of_key) == {stores[0].get(key)}


# check and delete_key


@case
def check_tells_and_never_waits(connect: Connect) -> None:
    store = connect()
    store.set_timeout(LONG)
    start = time.monotonic()
    assert store.check(["a"]) is False
    assert store.check([]) is True
    store.set("a", "1")
    assert store.check(["a"]) is True
    assert store.check(["a", "a"]) is True
    assert store.check(["a", "b"]) is False
    assert time.monotonic() - start < 5


@case
def delete_key_tells_whether_there_was_one(connect: Connect) -> None:
    store = connect()
    store.set("k", "1")
    assert store.delete_key("k") is True
    assert not store.check(["k"])
    assert store.delete_key("k") is False
    assert store.delete_key("never") is False


@case
def a_deleted_key_begins_anew(connect: Connect) -> None:
    store = connect()
    store.add("k", 7)
    store.delete_key("k")
    assert store.add("k", 1) == 1


# append, multi_get, multi_set


@multi
def append_puts_bytes_behind(connect: Connect) -> None:
    store = connect()
    store.append("k", "po")
    store.append("k", b"tato")
    assert store.get("k") == b"potato"
    store.append("new", "")
    assert store.check(["new"])
    assert store.get("new") == b""


@multi
def append_of_what_is_there_doubles_it(connect: Connect) -> None:
    store = connect()
    store.append("k", "z")
    store.append("k", "z")
    assert store.get("k") == b"zz"


@multi
def appends_from_many_threads_all_stay(connect: Connect) -> None:
    stores = [connect() for _ in range(4)]

    def work(index: int) -> int:
        for _ in range(10):
            stores[index].append("k", f"{index}")
        return len(stores[index].get("k"))

    assert max(in_threads(4, work)) == 40
    assert sorted(stores[0].get("k")) == sorted(b"0123" * 10)


@multi
def multi_get_keeps_the_order(connect: Connect) -> None:
    store, peer = connect(), connect()
    peer.multi_set(["a", "b", "c"], ["1", b"2", ""])
    assert store.multi_get(["c", "a", "b", "a"]) == [b"", b"1", b"2", b"1"]
    assert {type(value) for value in store.multi_get(["a", "b"])} == {bytes}
    assert store.multi_get([]) == []
    store.multi_set([], [])
    assert store.get("b") == b"2"


@multi
def a_thousand_keys_go_at_once(connect: Connect) -> None:
    store, peer = connect(), connect()
    keys = [f"torchelastic/role_info/{number}" for number in range(1000)]
    store.multi_set(keys, [str(number) for number in range(1000)])
    peer.wait(keys, LONG)
    assert peer.check(keys)
    assert peer.multi_get(keys) == [str(number).encode() for number in range(1000)]


@multi
def multi_set_of_unequal_lengths_raises(connect: Connect) -> None:
    store = connect()
    with pytest.raises((ValueError, dist.DistStoreError)):
        store.multi_set(["a", "b"], ["1"])
    assert not store.check(["a"])


@multi
def the_extended_api_is_there(connect: Connect) -> None:
    assert connect().has_extended_api() is True


# num_keys and list_keys


@lists
def a_fresh_store_has_no_keys(connect: Connect) -> None:
    store = connect()
    assert store.num_keys() == 0
    assert store.list_keys() == []


@case
def num_keys_counts(connect: Connect) -> None:
    store = connect()
    before = store.num_keys()
    store.set("a", "1")
    store.add("b", 1)
    store.multi_set(["c", "a"], ["1", "2"])
    assert store.num_keys() == before + 3
    store.delete_key("c")
    assert store.num_keys() == before + 2


@lists
def list_keys_lists(connect: Connect) -> None:
    store = connect()
    store.set("a", "1")
    store.set("dir/b", "2")
    store.set("%", "3")
    assert sorted(store.list_keys()) == ["%", "a", "dir/b"]


@clones
def a_clone_has_the_keys_and_its_own_timeout(connect: Connect) -> None:
    store = connect()
    store.set_timeout(LONG)
    clone = store.clone()
    clone.set("k", "1")
    assert store.get("k") == b"1"
    clone.set_timeout(SHORT)
    assert store.timeout == LONG
    with times_out():
        clone.get("missing")
