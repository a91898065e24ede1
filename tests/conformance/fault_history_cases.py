"""Concurrent histories under faults: what all clients saw has one explanation."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from rdzv.conformance.clauses import book
from rdzv.conformance.fault_kit import BACKEND_ERRORS, NO_ANSWER, STORE_ERRORS, through_proxy
from rdzv.conformance.history import (
    RecordedBackend,
    RecordedStore,
    Recorder,
    assert_linearizable,
)
from rdzv.conformance.store_kit import in_threads
from rdzv.conformance.target import Target

CLIENTS, ROUNDS = 4, 6
ANSWERS_LOST_MAX = 12

document = book("backend", "faults", controls=("network",))
value = book("store", "faults", needs=("store",), controls=("network",))
queue = book("store", "faults", needs=("store", "queues"), controls=("network",))

Client = Callable[[int, Recorder], None]


def _explained(target: Target, open_client: Callable[[], Client]) -> None:
    """Clients at work, half of them over a network that loses every third answer."""
    recorder = Recorder()
    direct = [open_client() for _ in range(CLIENTS // 2)]
    with through_proxy(target) as proxy:
        clients = [*direct, *(open_client() for _ in range(CLIENTS - len(direct)))]
        proxy.drop_answers(ANSWERS_LOST_MAX, every=3)
        in_threads(CLIENTS, lambda index: clients[index](index, recorder))
        assert proxy.answers_dropped, NO_ANSWER
    assert_linearizable(recorder.history())


@document
def histories_of_the_document_under_lost_answers_are_linearizable(target: Target) -> None:
    def open_client() -> Client:
        backend = target.connect()

        def work(index: int, recorder: Recorder) -> None:
            recorded = RecordedBackend(backend, recorder)
            for number in range(ROUNDS):
                with suppress(*BACKEND_ERRORS):
                    found = recorded.get_state()
                    wanted = b"%d of %d" % (number, index)
                    recorded.set_state(wanted, None if found is None else found[1])

        return work

    _explained(target, open_client)


def _with_store(target: Target, step: Callable[[RecordedStore, int, int], object]) -> Client:
    store = target.store()

    def work(index: int, recorder: Recorder) -> None:
        recorded = RecordedStore(store, recorder)
        for number in range(ROUNDS):
            with suppress(*STORE_ERRORS):
                step(recorded, index, number)

    return work


@value
def histories_of_a_counter_under_lost_answers_are_linearizable(target: Target) -> None:
    def step(store: RecordedStore, index: int, number: int) -> None:
        store.add("counter", 1 << index)
        store.get("counter")

    _explained(target, partial(_with_store, target, step))


@value
def histories_of_a_value_under_lost_answers_are_linearizable(target: Target) -> None:
    def step(store: RecordedStore, index: int, number: int) -> None:
        mine = b"%d of %d" % (number, index)
        if number % 3 == 2:
            store.delete("value")
        elif number % 3 == 1:
            store.set("value", mine)
        else:
            store.compare_set("value", b"", mine)
        store.check("value")

    _explained(target, partial(_with_store, target, step))


@queue
def histories_of_a_queue_under_lost_answers_are_linearizable(target: Target) -> None:
    def step(store: RecordedStore, index: int, number: int) -> None:
        store.push("queue", b"%d of %d" % (number, index))
        store.pop("queue")

    _explained(target, partial(_with_store, target, step))
