"""The simulation as a test: kept seeds, fresh seeds, and the proof that it can fail.

``regressions.txt`` holds every seed on which a node once went wrong, ``catches.txt`` a seed for
every planted fault, among them every mistake that the simulation has found in this code: with the
fault it must fail, without it must not. The fingerprint tells that the seed still means the
scenario that it meant then.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from sim import planting
from sim.run import run_seeds, try_seed
from sim.scenarios import draw

HERE = Path(__file__).parent
SEEDS = 100
FRESH_SEEDS = 60
MANY_SEEDS = 1000
CAUGHT_SOON = {
    "token-ignored",
    "wall-clock-compared",
    "occupant-rule-skipped",
    "eviction-after-an-outage",
    "confirm-phase-skipped",
    "expels-on-first-sight",
    "newcomers-count-at-once",
}
"""Within ``MANY_SEEDS``. Other faults need luck: some thousands of seeds."""
RENEW = "the generator of scenarios has changed: tests/sim/run.py --catch > tests/sim/catches.txt"


def kept(name: str) -> list[list[str]]:
    lines = (HERE / name).read_text(encoding="utf-8").splitlines()
    return [line.split(maxsplit=2) for line in lines if line and not line.startswith("#")]


@pytest.mark.parametrize("seed", [int(seed) for seed, *_ in kept("regressions.txt")])
def test_a_seed_that_once_failed(seed: int) -> None:
    assert try_seed(seed) == (seed, "")


@pytest.mark.parametrize(
    ("seed", "fingerprint", "fault"),
    kept("catches.txt"),
    ids=[row[2] for row in kept("catches.txt")],
)
def test_a_planted_fault_is_caught(seed: str, fingerprint: str, fault: str) -> None:
    number = int(seed)
    assert draw(number).fingerprint == fingerprint, RENEW
    assert try_seed(number) == (number, ""), "it fails without the fault too"
    problem = try_seed(number, fault)[1]
    assert problem, f"not caught any more; {RENEW}"
    assert not problem.startswith("crash"), f"the fault does not run: {problem}"
    assert number < MANY_SEEDS or fault not in CAUGHT_SOON


def test_every_planted_fault_has_its_seed() -> None:
    assert {row[2] for row in kept("catches.txt")} == set(planting.FAULTS), RENEW


def test_the_first_seeds() -> None:
    """Always the same ones: a run must not fail for what the change under test has not brought."""
    assert not [result for result in run_seeds(range(SEEDS)) if result[1]]


@pytest.mark.full
def test_fresh_seeds() -> None:
    """Others at every run; a failure prints the seed."""
    start = random.SystemRandom().randrange(1_000_000, 1_000_000_000)
    failed = [result for result in run_seeds(range(start, start + FRESH_SEEDS)) if result[1]]
    assert not failed


@pytest.mark.full
@pytest.mark.timeout(900)
def test_many_seeds() -> None:
    assert not [result for result in run_seeds(range(MANY_SEEDS)) if result[1]]
