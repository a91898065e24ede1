"""The memory backend: the reference for every other one."""

from __future__ import annotations

import pytest

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.ports import Entry, Question

from .targets import MemoryTarget


def test_time_is_what_the_clock_says() -> None:
    space = MemoryTarget()
    backend = space.connect()
    backend.set_state(b"x")
    backend.announce(Entry("node", b""), 10.0, Question())
    space.let_pass(9.999)
    assert backend.beat("other", 10.0, Question("node")).state_age_seconds == pytest.approx(9.999)
    assert backend.beat("other", 10.0, Question("node")).peer_live
    space.let_pass(0.001)
    assert not backend.beat("other", 10.0, Question("node")).peer_live
    assert backend.entries() == []


def test_spaces_do_not_meet() -> None:
    first, second = MemorySpace(), MemorySpace()
    MemoryBackend(first, "job").set_state(b"x")
    assert MemoryBackend(second, "job").get_state() is None
