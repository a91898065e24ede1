"""The simulation as a test: kept seeds, fresh seeds, and the proof that it can fail.

``regressions.txt`` holds every seed on which a node once went wrong, ``caught.txt`` for each
planted fault a seed that catches it. Both name the scenario's fingerprint: where the generator of
scenarios has changed since, the seed means another run, and the test says so.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sim import planting
from sim.run import run_seeds, try_seed
from sim.scenarios import draw

HERE = Path(__file__).parent
FRESH_SEEDS = 60
MANY_SEEDS = 1000
FAULT_SEEDS_MAX = 1000
RENEW = "draw it anew: tests/sim/run.py --seeds 1000 --fault NAME"


def kept(name: str) -> list[list[str]]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize(("seed", "fingerprint", "why"), kept("regressions.txt"))
def test_a_seed_that_once_failed(seed: str, fingerprint: str, why: str) -> None:
    assert draw(int(seed)).fingerprint == fingerprint, f"another scenario than when: {why}"
    assert try_seed(int(seed)) == (int(seed), "")


def test_fresh_seeds() -> None:
    """Others at every run; a failure prints the seed."""
    start = random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    failed = [result for result in run_seeds(range(start, start + FRESH_SEEDS)) if result[1]]
    assert not failed


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_seeds() -> None:
    assert not [result for result in run_seeds(range(MANY_SEEDS)) if result[1]]


def test_every_planted_fault_has_a_seed() -> None:
    assert {name for name, _, _ in kept("caught.txt")} == set(planting.FAULTS)


@pytest.mark.parametrize(("fault", "seed", "fingerprint"), kept("caught.txt"))
def test_a_planted_fault_is_caught(fault: str, seed: str, fingerprint: str) -> None:
    assert int(seed) < FAULT_SEEDS_MAX
    assert draw(int(seed)).fingerprint == fingerprint, RENEW
    assert try_seed(int(seed))[1] == "", "the seed fails without the fault too"
    assert try_seed(int(seed), fault)[1] != "", f"not caught any more; {RENEW}"
