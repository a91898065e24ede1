"""The store clauses on our stores, on torch's own as the oracle, and on what wraps either.

What differs on purpose is declared as a deviation, with the reason: it must fail, or the
declaration is out of date.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from rdzv.conformance.suites import StoreSuite, deviates
from rdzv.conformance.target import Target
from rdzv.round_store import RoundStore

from .sqlite_space import SqliteTarget
from .targets import (
    MemoryTarget,
    WrappedTarget,
    file_store,
    hash_store,
    polling_store,
    tcp_store,
    unreliable_store,
)


def memory(folder: Path) -> Target:
    return MemoryTarget()


def sqlite(folder: Path) -> Target:
    return SqliteTarget(folder / "store.db")


def nested_prefix(store: Any) -> Any:
    return dist.PrefixStore("outer", dist.PrefixStore("inner", store))


def namespace(store: Any) -> Any:
    store.set("outside", "1")
    return store.namespace("name").namespace("space")


def round_store(store: Any) -> Any:
    return RoundStore(store, "run/1.abc", on_exit_barrier=lambda: None)


def fixture(make: Callable[[Path], Target]) -> Any:
    """The fixture ``target`` of a suite."""

    @pytest.fixture
    def target(self: object, tmp_path: Path) -> Iterator[Target]:
        target = make(tmp_path)
        yield target
        target.close()

    return target


def all_of(deviations: dict[str, tuple[str, bool]]) -> Callable[[type[StoreSuite]], Any]:
    def declare(suite: type[StoreSuite]) -> Any:
        for name, (reason, run) in deviations.items():
            deviates(name, reason, run=run)(suite)
        return suite

    return declare


TRIED, NOT_TRIED = True, False
"""Not tried is what would hang or crash."""
QUEUES = (
    "queues_keep_the_order",
    "an_empty_queue_raises_or_times_out",
    "a_push_releases_one_who_pops",
    "every_value_is_popped_once",
    "check_and_wait_see_queues_and_keys_do_not",
    "pushes_and_pops_of_threads_have_one_order",
)
TIMEOUTS = (
    "get_of_a_missing_key_times_out",
    "multi_get_with_a_missing_key_times_out",
    "wait_for_a_missing_key_times_out",
    "wait_obeys_its_own_timeout",
    "a_deleted_key_is_waited_for_again",
    "a_barrier_times_out_and_has_counted",
    "a_clone_has_the_keys_and_its_own_timeout",
    "a_timeout_names_what_is_missing",
)
COUNTERS_WRAP = {"add_beyond_64_bits_raises_and_changes_nothing": ("its counters wrap", TRIED)}
TCP = {
    **COUNTERS_WRAP,
    **dict.fromkeys(
        (
            "sets_and_gets_of_threads_have_one_order",
            "pushes_and_pops_of_threads_have_one_order",
            "appends_of_threads_have_one_order",
        ),
        ("its server answers none of these, so what follows may come first", NOT_TRIED),
    ),
    "a_write_is_seen_by_all_once_it_returns": (
        "a TCPStore's server does not answer a set, so others may come first",
        NOT_TRIED,
    ),
    "add_to_a_text_raises_and_changes_nothing": (
        "a TCPStore's server hangs up on whoever adds to a text",
        NOT_TRIED,
    ),
}
FILE = {
    **COUNTERS_WRAP,
    **dict.fromkeys(QUEUES, ("FileStore has no queues", TRIED)),
    "delete_key_tells_whether_there_was_one": ("FileStore says True of any key", TRIED),
    "deletes_of_threads_have_one_order": ("FileStore says True of any key", TRIED),
    "append_of_what_is_there_doubles_it": ("its append loses what is there already", TRIED),
    "appends_from_many_threads_all_stay": (
        "its append loses what others append at the same time",
        NOT_TRIED,
    ),
    "the_extended_api_is_there": ("FileStore has none", TRIED),
}
FOR_EVER = {"a_timeout_of_zero_or_less_raises_at_once": ("it waits for ever", NOT_TRIED)}
BEYOND = {"multi_set_of_unequal_lengths_raises": ("it reads beyond the list", NOT_TRIED)}
PYTHON_BEHIND_PREFIX = dict.fromkeys(
    (*QUEUES, "a_fresh_store_has_no_keys", "list_keys_lists"),
    ("torch passes no queue call and no list_keys on to a Python store", TRIED),
)


# Ours: the plain ones stand in test_conformance


@pytest.mark.full
class TestPollingStore(StoreSuite):
    target = fixture(lambda folder: polling_store())


class TestUnreliableStore(StoreSuite):
    target = fixture(lambda folder: unreliable_store())


@pytest.mark.full
@all_of(PYTHON_BEHIND_PREFIX)
class TestPrefixOfMemory(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(memory(folder), "PrefixStore", nested_prefix))


@pytest.mark.full
@all_of(PYTHON_BEHIND_PREFIX)
class TestPrefixOfSqlite(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(sqlite(folder), "PrefixStore", nested_prefix))


@pytest.mark.full
class TestNamespaceOfMemory(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(memory(folder), "namespace", namespace))


class TestNamespaceOfSqlite(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(sqlite(folder), "namespace", namespace))


class TestRoundStoreOfMemory(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(memory(folder), "RoundStore", round_store))


@pytest.mark.full
class TestRoundStoreOfSqlite(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(sqlite(folder), "RoundStore", round_store))


# The oracle


@all_of(
    {
        **COUNTERS_WRAP,
        **FOR_EVER,
        **BEYOND,
        "a_clone_has_the_keys_and_its_own_timeout": ("its clone is the same object", TRIED),
        "a_timeout_names_what_is_missing": ("its text is 'Wait timeout'", TRIED),
        "add_releases_the_waiting": ("its add wakes nobody before the timeout", NOT_TRIED),
    }
)
class TestHashStore(StoreSuite):
    target = fixture(lambda folder: hash_store())


@all_of(
    {
        **FILE,
        **FOR_EVER,
        **BEYOND,
        **dict.fromkeys(TIMEOUTS, ("its timeouts are RuntimeErrors", TRIED)),
        **dict.fromkeys(
            ("a_fresh_store_has_no_keys", "list_keys_lists"),
            ("it keeps a counter of its users among the keys", TRIED),
        ),
    }
)
class TestFileStore(StoreSuite):
    target = fixture(file_store)


@all_of(
    {
        **TCP,
        **FOR_EVER,
        "a_timeout_of_zero_or_less_finds_what_is_there": (
            "the server's answer is in time or not, by chance",
            NOT_TRIED,
        ),
    }
)
class TestTcpStore(StoreSuite):
    target = fixture(lambda folder: tcp_store())


# Our layer over torch's stores mends most of it


@pytest.mark.full
@all_of(COUNTERS_WRAP)
class TestRoundStoreOfHashStore(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(hash_store(), "RoundStore", round_store))


@pytest.mark.full
@all_of(FILE)
class TestRoundStoreOfFileStore(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(file_store(folder), "RoundStore", round_store))


@pytest.mark.full
@all_of(TCP)
class TestRoundStoreOfTcpStore(StoreSuite):
    target = fixture(lambda folder: WrappedTarget(tcp_store(), "RoundStore", round_store))
