"""The simulation from the command line: many seeds, or one with a trace.

    run.py --seeds 1000 [--start 0] [--fault NAME]
    run.py --seed 42 --trace [--fault NAME]
    run.py --catch > tests/sim/catches.txt

Ends with 1 if an invariant was violated, and says how to see it happen. ``--catch`` looks for the
first seed that catches each planted fault; that list is to be drawn anew when the generator of
scenarios has changed, since a seed then means another run.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from sim import faults, mistakes, planting
from sim.scenarios import draw
from sim.story import run_seed

PROGRESS_SECONDS = 20.0
CATALOGUES = (faults, mistakes)
"""Where faults are; to import one enters its faults into ``planting.FAULTS``."""


def try_seed(seed: int, fault: str = "") -> tuple[int, str]:
    """The seed and what was violated; "" if nothing was."""
    with planting.planted(fault):
        try:
            violation, _ = run_seed(seed)
        except Exception:
            return seed, "crash: " + traceback.format_exc()
    return seed, "" if violation is None else str(violation)


def _try(task: tuple[int, str]) -> tuple[int, str]:
    return try_seed(*task)


def run_seeds(seeds: range, fault: str = "") -> Iterator[tuple[int, str]]:
    """Results as they come, from as many processes as there are processors."""
    tasks = [(seed, fault) for seed in seeds]
    processes = min(os.cpu_count() or 1, len(tasks) // 20)
    if processes < 2:
        yield from map(_try, tasks)
        return
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        yield from pool.imap_unordered(_try, tasks, chunksize=5)


def show(seed: int, fault: str) -> int:
    """One seed, with its trace."""
    print(draw(seed))
    with planting.planted(fault):
        violation, run = run_seed(seed, trace=True)
    print("\n".join(run.world.trace or []))
    print(violation or "no violation")
    return 1 if violation else 0


def first_catch(task: tuple[str, range]) -> tuple[str, int | None, str]:
    """A fault, the first of the seeds that catches it, and how."""
    fault, seeds = task
    for seed in seeds:
        problem = try_seed(seed, fault)[1]
        if problem:
            return fault, seed, problem
    return fault, None, ""


def catch(seeds: range) -> int:
    """Print a line for every planted fault; 1 if one is not caught."""
    missed = 0
    print("# seed, fingerprint of its scenario, fault that it catches (run.py --catch draws these)")
    tasks = [(fault, seeds) for fault in sorted(planting.FAULTS)]
    with multiprocessing.get_context("fork").Pool(os.cpu_count() or 1) as pool:
        for fault, seed, problem in pool.imap(first_catch, tasks, chunksize=1):
            if seed is None:
                missed += 1
                print(f"{fault}: not caught within {len(seeds)} seeds", file=sys.stderr)
            else:
                print(f"{seed} {draw(seed).fingerprint} {fault}", flush=True)
                print(f"{fault}: seed {seed}: {problem.splitlines()[0]}", file=sys.stderr)
    return 1 if missed else 0


def try_seeds(seeds: range, fault: str, keep_going: bool) -> int:
    """Many seeds, with what fails and how fast it goes."""
    began, failed, done = time.monotonic(), 0, 0
    tell_at = began + PROGRESS_SECONDS
    for seed, problem in run_seeds(seeds, fault):
        done += 1
        if time.monotonic() > tell_at:
            tell_at += PROGRESS_SECONDS
            print(f"  {done} of {len(seeds)} seeds, {failed} failed", flush=True)
        if problem:
            failed += 1
            again = f" --fault {fault}" if fault else ""
            print(f"seed {seed} ({draw(seed).fingerprint}): {problem}")
            print(f"  replay: {sys.argv[0]} --seed {seed} --trace{again}", flush=True)
            if not keep_going:
                break
    seconds = time.monotonic() - began
    print(f"{done} seeds in {seconds:.1f} s ({done / seconds:.1f} seeds/s), {failed} failed")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, help="how many seeds (100; with --catch 6000)")
    parser.add_argument("--start", type=int, default=0, help="the first one")
    parser.add_argument("--seed", type=int, help="this one only")
    parser.add_argument("--trace", action="store_true", help="show what happens, with --seed")
    parser.add_argument("--fault", default="", choices=["", *sorted(planting.FAULTS)])
    parser.add_argument("--keep-going", action="store_true", help="show every seed that fails")
    parser.add_argument("--catch", action="store_true", help="a seed for each planted fault")
    options = parser.parse_args()
    if options.seed is not None and options.trace:
        return show(options.seed, options.fault)
    count = options.seeds or (6000 if options.catch else 100)
    seeds = range(options.start, options.start + count)
    if options.catch:
        return catch(seeds)
    if options.seed is not None:
        seeds = range(options.seed, options.seed + 1)
    return try_seeds(seeds, options.fault, options.keep_going)


if __name__ == "__main__":
    sys.exit(main())
