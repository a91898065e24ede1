"""The simulation as a test: kept seeds, fresh seeds, and the proof that it can fail.

``regressions.txt`` holds every seed on which a node once went wrong. A planted fault must be caught
within ``FAULT_SEEDS_MAX`` seeds; those of ``ALWAYS_PLANTED`` are tried in every run of the tests.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sim import planting
from sim.run import run_seeds, try_seed

HERE = Path(__file__).parent
FRESH_SEEDS = 60
MANY_SEEDS = 1000
FAULT_SEEDS_MAX = 1000
ALWAYS_PLANTED = frozenset(
    {
        "token-ignored",
        "wall-clock-compared",
        "occupant-rule-skipped",
        "eviction-after-an-outage",
        "confirm-phase-skipped",
        "expels-on-first-sight",
        "notice-without-a-common-age",
        "nothing-is-put-back",
        "closing-by-anybody",
        "spares-disturb-a-full-run",
        "survivors-have-no-precedence",
        "tombstone-ignored",
    }
)


def regressions() -> list[tuple[int, str]]:
    lines = (HERE / "regressions.txt").read_text(encoding="utf-8").splitlines()
    kept = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(int(seed), why) for seed, why in kept]


@pytest.mark.parametrize(("seed", "why"), regressions())
def test_a_seed_that_once_failed(seed: int, why: str) -> None:
    assert try_seed(seed) == (seed, ""), f"it failed before, when {why}"


@pytest.mark.full
def test_fresh_seeds() -> None:
    """Others at every run; a failure prints the seed. Not in the usual run, which must not fail
    for what the change under test has not brought."""
    start = random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    failed = [result for result in run_seeds(range(start, start + FRESH_SEEDS)) if result[1]]
    assert not failed


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_seeds() -> None:
    assert not [result for result in run_seeds(range(MANY_SEEDS)) if result[1]]


def test_the_faults_that_are_always_planted_exist() -> None:
    assert set(planting.FAULTS) >= ALWAYS_PLANTED


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, marks=[] if fault in ALWAYS_PLANTED else [pytest.mark.full])
        for fault in sorted(planting.FAULTS)
    ],
)
def test_a_planted_fault_is_caught(fault: str) -> None:
    for seed in range(FAULT_SEEDS_MAX):
        problem = try_seed(seed, fault)[1]
        if problem:
            assert not problem.startswith("crash"), f"the fault does not run: {problem}"
            assert try_seed(seed) == (seed, ""), "the seed fails without the fault too"
            return
    pytest.fail(f"not caught within {FAULT_SEEDS_MAX} seeds")
