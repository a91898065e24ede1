"""What is recorded of concurrent calls: everything, exactly, whatever becomes of the call."""

from __future__ import annotations

import functools
import operator
import threading
import time
from collections import Counter

import pytest

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.conformance.history import (
    STATE_KEY,
    RecordedBackend,
    RecordedStore,
    Recorder,
    assert_linearizable,
)
from rdzv.conformance.linearizability import UNKNOWN, Operation
from rdzv.stores.memory import MemoryClient, MemoryStore


def test_a_call_is_recorded_with_the_times_around_it() -> None:
    recorder, inside = Recorder(), []

    def function() -> int:
        inside.append(time.monotonic_ns())
        return 3

    before = time.monotonic_ns()
    assert recorder.call("add", "k", (1,), function, client="me") == 3
    (operation,) = recorder.history()
    assert (operation.client, operation.kind, operation.key) == ("me", "add", "k")
    assert (operation.arguments, operation.answer, operation.error) == ((1,), 3, "")
    assert before <= operation.called <= inside[0] <= operation.answered <= time.monotonic_ns()


def test_an_error_is_an_unknown_outcome() -> None:
    recorder = Recorder()

    def function() -> int:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        recorder.call("add", "k", (1,), function)
    (operation,) = recorder.history()
    assert (operation.answer, operation.answered) == (UNKNOWN, None)
    assert operation.error == "OSError: gone"
    assert operation.client == threading.current_thread().name


def test_a_call_under_way_is_an_unknown_outcome() -> None:
    recorder = Recorder()
    recorder.call("get", "k", (), lambda: _only(recorder.history()))
    assert recorder.history()[0].answered is not None


def _only(history: list[Operation]) -> None:
    (operation,) = history
    assert (operation.answer, operation.answered, operation.error) == (UNKNOWN, None, "")


def test_calls_of_many_threads_are_all_recorded() -> None:
    recorder = Recorder()

    def client(index: int) -> None:
        for number in range(200):
            recorder.call("add", "k", (number,), functools.partial(operator.mul, index, number))

    threads = [threading.Thread(target=client, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = Counter(operation.answer for operation in recorder.history())
    assert found == Counter(index * number for index in range(4) for number in range(200))


def test_a_backend_and_a_store_are_recorded_as_the_models_name_their_calls() -> None:
    recorder = Recorder()
    backend = RecordedBackend(MemoryBackend(MemorySpace(), "job"), recorder)
    _, token, _ = backend.set_state(b"1")
    backend.set_state(b"2", token)
    backend.set_state(b"3", token)
    assert backend.get_state()[0] == b"2"
    memory = MemoryStore(MemoryClient())
    store = RecordedStore(memory, recorder)
    store.set("k", b"1")
    assert store.get("k") == b"1"
    assert store.compare_set("k", b"1", b"2") == b"2"
    assert store.add("k", 3) == 5
    store.append("k", b"0")
    assert store.check("k")
    assert store.delete("k")
    assert not store.delete("k")
    store.push("k", b"x")
    assert store.len("k") == 1
    assert store.pop("k") == b"x"
    assert store.pop("k") is None
    memory.close()
    history = recorder.history()
    assert [each.key for each in history] == [STATE_KEY] * 4 + ["k"] * 8 + ["queue k"] * 4
    assert_linearizable(history)
    wrong = Operation("me", "get", "k", (), b"never", history[-1].called, time.monotonic_ns())
    with pytest.raises(AssertionError, match=r"not linearizable: key 'k'"):
        assert_linearizable([*history, wrong])


def test_a_kind_without_a_model_is_refused() -> None:
    with pytest.raises(AssertionError, match="jump"):
        assert_linearizable([Operation("me", "jump", "k", (), None, 0, 1)])
