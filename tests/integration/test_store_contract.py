"""The store cases on our stores, on torch's own as the oracle, and on both through what wraps them.

A store joins by one factory in ``OURS``. What differs on purpose stands in ``DEVIATIONS``,
with the reason; such a case must fail, or the entry is out of date.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch.distributed as dist

from rdzv.conformance.store_cases import CASES, Case, Connect
from rdzv.round_store import RoundStore
from rdzv.stores.base import Store, StoreClient, Unanswered
from rdzv.stores.memory import MemoryClient, MemoryStore
from rdzv.stores.sql import SqlStore

Factory = Callable[[Path], AbstractContextManager[Connect]]


@contextmanager
def memory(folder: Path) -> Iterator[Connect]:
    client = MemoryClient()
    with closing() as made:
        yield lambda: made(MemoryStore(client))


class Polling(MemoryClient):
    """Waits as a technology does that cannot push."""

    wait_for_keys = StoreClient.wait_for_keys
    wait_for_queue = StoreClient.wait_for_queue


@contextmanager
def polling(folder: Path) -> Iterator[Connect]:
    client = Polling()
    with closing() as made:
        yield lambda: made(Store(client))


class Unreliable:
    """Loses every other request, or the answer to it, and recognises what is repeated."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client
        self._requests = itertools.count()
        self._answers: dict[str, Any] = {}

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._client, name)
        if not callable(attribute) or name in ("check_key_size", "check_value_size", "close"):
            return attribute
        mutates = "operation" in inspect.signature(attribute).parameters
        return functools.partial(self._lose, attribute, mutates)

    def _lose(self, request: Callable[..., Any], mutates: bool, *arguments: Any) -> Any:
        fate = next(self._requests) % 4
        if fate == 0:
            raise Unanswered("the request was lost")
        if mutates and arguments[-1] in self._answers:
            return self._answers[arguments[-1]]
        answer = request(*arguments)
        if mutates:
            self._answers[arguments[-1]] = answer
        if fate == 2:
            raise Unanswered("the answer was lost")
        return answer


@contextmanager
def unreliable(folder: Path) -> Iterator[Connect]:
    client: Any = Unreliable(MemoryClient())
    with closing() as made:
        yield lambda: made(Store(client))


@contextmanager
def sqlite(folder: Path) -> Iterator[Connect]:
    with closing() as made:
        yield lambda: made(SqlStore(str(folder / "store.db"), "run"))


@contextmanager
def hash_store(folder: Path) -> Iterator[Connect]:
    store = dist.HashStore()
    yield lambda: store


@contextmanager
def file_store(folder: Path) -> Iterator[Connect]:
    yield lambda: dist.FileStore(str(folder / "store"), -1)


@functools.cache
def tcp_clients() -> list[Any]:
    """A server and clients of it. To connect can take seconds where name resolution is slow."""
    server: Any = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, *(server.clone() for _ in range(9))]


@contextmanager
def tcp_store(folder: Path) -> Iterator[Connect]:
    clients = tcp_clients()
    for client in clients:
        client.set_timeout(timedelta(seconds=300))
    for key in clients[0].list_keys():
        clients[0].delete_key(key)
    unused = iter(clients)
    yield lambda: next(unused)


OURS: dict[str, Factory] = {"MemoryStore": memory, "SqlStore": sqlite}
OURS_UNDER_STRESS: dict[str, Factory] = {"polling": polling, "unreliable": unreliable}
ORACLES: dict[str, Factory] = {
    "HashStore": hash_store,
    "FileStore": file_store,
    "TCPStore": tcp_store,
}


@contextmanager
def closing() -> Iterator[Callable[[Any], Any]]:
    """Closes at the end what it is called with."""
    made: list[Any] = []

    def remember(store: Any) -> Any:
        made.append(store)
        return store

    yield remember
    for store in made:
        store.close()


def nested_prefix(store: Any) -> Any:
    return dist.PrefixStore("outer", dist.PrefixStore("inner", store))


def namespace(store: Any) -> Any:
    store.set("outside", "1")
    return store.namespace("name").namespace("space")


def round_store(store: Any) -> Any:
    return RoundStore(store, "run/1.abc", on_exit_barrier=lambda: None)


WRAPPERS: dict[str, Callable[[Any], Any]] = {
    "PrefixStore": nested_prefix,
    "namespace": namespace,
    "RoundStore": round_store,
}


class Deviation(NamedTuple):
    reason: str
    run: bool = True
    """False where the store would hang or crash."""


QUEUE_CASES = (
    "queues_keep_the_order",
    "an_empty_queue_raises_or_times_out",
    "a_push_releases_one_who_pops",
    "every_value_is_popped_once",
    "check_and_wait_see_queues_and_keys_do_not",
)
TIMEOUT_CASES = (
    "get_of_a_missing_key_times_out",
    "multi_get_with_a_missing_key_times_out",
    "wait_for_a_missing_key_times_out",
    "wait_obeys_its_own_timeout",
    "a_deleted_key_is_waited_for_again",
    "a_barrier_times_out_and_has_counted",
    "a_clone_has_the_keys_and_its_own_timeout",
    "a_timeout_names_what_is_missing",
)
COUNTERS_WRAP = {
    "add_beyond_64_bits_raises_and_changes_nothing": Deviation("its counters wrap round")
}
TCP = {
    **COUNTERS_WRAP,
    "a_write_is_seen_by_all_once_it_returns": Deviation(
        "a TCPStore's server does not answer a set, so others may come first", run=False
    ),
    "add_to_a_text_raises_and_changes_nothing": Deviation(
        "a TCPStore's server hangs up on whoever adds to a text", run=False
    ),
}
FILE = {
    **COUNTERS_WRAP,
    **{name: Deviation("FileStore has no queues") for name in QUEUE_CASES},
    "delete_key_tells_whether_there_was_one": Deviation("FileStore says True of any key"),
    "append_of_what_is_there_doubles_it": Deviation("its append loses what is there already"),
    "appends_from_many_threads_all_stay": Deviation(
        "its append loses what others append at the same time", run=False
    ),
    "the_extended_api_is_there": Deviation("FileStore has none"),
}
FOR_EVER = {"a_timeout_of_zero_or_less_raises_at_once": Deviation("it waits for ever", run=False)}
DEVIATIONS: dict[str, dict[str, Deviation]] = {
    "HashStore": {
        **COUNTERS_WRAP,
        **FOR_EVER,
        "multi_set_of_unequal_lengths_raises": Deviation("it reads beyond the list", run=False),
        "a_clone_has_the_keys_and_its_own_timeout": Deviation("its clone is the same object"),
        "a_timeout_names_what_is_missing": Deviation("its text is 'Wait timeout'"),
        "add_releases_the_waiting": Deviation("its add wakes nobody before the timeout", run=False),
    },
    "FileStore": {
        **FILE,
        **FOR_EVER,
        **{name: Deviation("its timeouts are RuntimeErrors") for name in TIMEOUT_CASES},
        "a_fresh_store_has_no_keys": Deviation("it keeps a counter of its users among the keys"),
        "list_keys_lists": Deviation("it keeps a counter of its users among the keys"),
        "multi_set_of_unequal_lengths_raises": Deviation("it reads beyond the list", run=False),
    },
    "TCPStore": {
        **TCP,
        **FOR_EVER,
        "a_timeout_of_zero_or_less_finds_what_is_there": Deviation(
            "the server's answer is in time or not, by chance", run=False
        ),
    },
    "RoundStore(HashStore)": COUNTERS_WRAP,
    "RoundStore(FileStore)": FILE,
    "RoundStore(TCPStore)": TCP,
}
for _name in OURS:
    DEVIATIONS[f"PrefixStore({_name})"] = {
        name: Deviation("torch passes no queue call and no list_keys on to a Python store")
        for name in (*QUEUE_CASES, "a_fresh_store_has_no_keys", "list_keys_lists")
    }


class Subject(NamedTuple):
    name: str
    factory: Factory
    wrap: Callable[[Any], Any]


def subjects() -> Iterator[Subject]:
    for name, factory in {**OURS, **OURS_UNDER_STRESS, **ORACLES}.items():
        yield Subject(name, factory, lambda store: store)
    for name, factory in OURS.items():
        for wrapper, wrap in WRAPPERS.items():
            yield Subject(f"{wrapper}({name})", factory, wrap)
    for name, factory in ORACLES.items():
        yield Subject(f"RoundStore({name})", factory, round_store)


def parameters() -> list[Any]:
    marked = []
    for subject in subjects():
        for case in CASES:
            deviation = DEVIATIONS.get(subject.name, {}).get(case.__name__)
            marks = (
                [pytest.mark.xfail(reason=deviation.reason, run=deviation.run)] if deviation else []
            )
            identity = f"{subject.name}-{case.__name__}"
            marked.append(pytest.param(subject, case, id=identity, marks=marks))
    return marked


@pytest.mark.parametrize(("subject", "case"), parameters())
def test_contract(subject: Subject, case: Case, tmp_path: Path) -> None:
    with subject.factory(tmp_path) as connect:
        case(lambda: subject.wrap(connect()))
