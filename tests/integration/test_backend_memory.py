"""The memory backend: the reference for every other one."""

from __future__ import annotations

import pytest

from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.ports import Entry, Question

from .backend_suite import CASES, Case, Space


class OurSpace(Space):
    short_ttl_seconds = 5.0

    def __init__(self) -> None:
        self.now = 1000.0
        self.shared = MemorySpace(lambda: self.now)

    def connect(self, run_id: str = "job") -> MemoryBackend:
        return MemoryBackend(self.shared, run_id)

    def wipe(self) -> None:
        self.shared.wipe()

    def let_pass(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_case(case: Case) -> None:
    case(OurSpace())


def test_time_is_what_the_clock_says() -> None:
    space = OurSpace()
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
