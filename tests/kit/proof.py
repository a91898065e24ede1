"""Shows that the conformance kit catches bad backends.

    proof.py [NAME ...]        what the faults' named clauses say, and what the good ones say
    proof.py --all [NAME ...]  every clause of every fault
    proof.py --write           the table of docs/conformance-proof.md anew

Rules:

* A fault is caught by its clause if that fails because of what the broken class answered: by an
  assertion, by choking on the answer, by a documented error, or, if the fault says so, by one that
  it names or by not coming back. An exception out of the broken class's own code is a mistake in
  this folder, and no catch.
* The good parts that the faults derive from must fail no clause, in the same run. So no clause
  catches anything by failing always.
* Every fault is tried in a process of its own, which may be left hanging.

Ends with ``caught K of K``, and with 1 if a fault was not caught or a good one failed.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from integration.sqlite_space import SqliteTarget
from kit import (
    broken_backends,
    broken_counters,
    broken_rosters,
    broken_stores,
    broken_waits,
    broken_watches,
)
from kit.catalogue import BOOKS_OF, FAULTS, GOOD, Fault, KitTarget, StoreSpace

import rdzv.conformance
from rdzv.backends.memory import MemoryBackend, MemorySpace
from rdzv.conformance.clauses import BOOKS, Clause
from rdzv.conformance.target import Target
from rdzv.errors import RendezvousError
from rdzv.stores.base import Store
from rdzv.stores.memory import MemoryClient

CATALOGUES = (
    broken_backends,
    broken_rosters,
    broken_watches,
    broken_stores,
    broken_counters,
    broken_waits,
)
"""Where the faults are; to import one enters its faults into ``FAULTS``."""
CLAUSES = ("backend_cases", "store_cases", "more_cases", "fault_cases", "concurrency_cases")
for _name in CLAUSES:
    if importlib.util.find_spec(f"rdzv.conformance.{_name}"):
        importlib.import_module(f"rdzv.conformance.{_name}")

GOOD_PARTS = (MemoryBackend, MemorySpace, MemoryClient, Store, StoreSpace)
"""What a fault derives from."""
KIT = str(Path(rdzv.conformance.__file__).parent)
TABLE = Path(__file__).resolve().parents[2] / "docs" / "conformance-proof.md"
BOOKS_OF_GOOD = {
    **{name: good.books for name, good in GOOD.items()},
    "sqlite backend": ("backend", "roster", "watch"),
    "sqlite store": ("store",),
}
HANGS_AFTER_SECONDS = 8.0
"""A clause that takes longer with a fault hangs. The good ones must need less for it."""
PROCESS_SECONDS_MAX = 300.0
PROCESS_OF_ALL_CLAUSES_SECONDS_MAX = 3600.0
IDLE_PROCESSES_MAX = 8
CATCHES_SHOWN = 3
DOCUMENTED = (RendezvousError, dist.DistError)

HOLDS, FAILS, HANGS, CRASHES, NOT_RUN = "holds", "fails", "hangs", "crashes", "not run"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one clause came out."""

    clause: str
    outcome: str
    detail: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the kit has said of one fault, or of one good part."""

    is_right: bool
    """Whether the fault was caught as expected, or the good part failed nothing."""
    caught_by: tuple[str, ...] = ()
    """The clauses that failed."""
    detail: str = ""


Job = Callable[[], Verdict]


# ------------------------------------------------------------------------------------ one clause


def tried(clause: Clause, open_target: Callable[[], Target], fault: Fault | None) -> Outcome:
    """Try a clause on a target of its own, for as long as it may take."""
    target = open_target()
    if any(need in target.without for need in clause.needs) or any(
        target.cannot(control) for control in clause.controls
    ):
        return Outcome(clause.name, NOT_RUN)
    errors: list[BaseException | None] = []

    def run() -> None:
        try:
            clause.function(target)
        except BaseException as error:
            errors.append(error)
        else:
            errors.append(None)

    started = time.monotonic()
    limit = HANGS_AFTER_SECONDS if fault else clause.timeout_seconds
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit)
    seconds = time.monotonic() - started
    if not errors:
        return Outcome(clause.name, HANGS, f"not over after {limit:g} s", seconds)
    if errors[0] is None:
        target.close()
        return Outcome(clause.name, HOLDS, "", seconds)
    raises = fault.raises if fault else ()
    kind = FAILS if is_catch(errors[0], raises) else CRASHES
    text = "".join(traceback.format_exception(errors[0])) if kind == CRASHES else ""
    return Outcome(clause.name, kind, text or shown(errors[0]), seconds)


def is_catch(error: BaseException, raises: tuple[type[Exception], ...] = ()) -> bool:
    """Whether a clause failed for what it was answered, and not by a crash of who answered."""
    if error.__cause__ is not None and not isinstance(error, raises):
        # What the kit made of an exception that it did not expect.
        return is_catch(error.__cause__, raises) or not isinstance(error, AssertionError)
    if isinstance(error, (AssertionError, pytest.fail.Exception, *DOCUMENTED, *raises)):
        return True
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and frames[-1].filename.startswith(KIT)


def shown(error: BaseException) -> str:
    """An error in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}{': ' if text else ''}{text}"[:200]


# ------------------------------------------------------------------------- one fault, one good one


def clauses_of(books: Iterable[str]) -> list[Clause]:
    """All clauses in these books."""
    return [clause for name in books for clause in BOOKS.get(name, ())]


def judged(name: str, catches: int) -> Verdict:
    """What the clauses say of a fault: the expected one, then the others until so many failed."""
    fault = FAULTS[name]
    open_target = functools.partial(KitTarget, fault.broken)
    clauses = clauses_of(BOOKS_OF[fault.kind])
    clauses.sort(key=lambda clause: clause.name != fault.caught_by)
    if clauses[0].name != fault.caught_by:
        return Verdict(False, (), f"there is no clause {fault.caught_by!r}")
    first = tried(clauses[0], open_target, fault)
    if first.outcome not in (FAILS, HANGS) or (first.outcome == HANGS and not fault.hangs):
        return Verdict(False, (), f"{first.clause} {first.outcome}: {first.detail}")
    caught_by = [first.clause]
    for clause in clauses[1:]:
        if len(caught_by) >= catches:
            break
        if tried(clause, open_target, fault).outcome in (FAILS, HANGS):
            caught_by.append(clause.name)
    return Verdict(True, tuple(caught_by), first.detail)


def held(name: str) -> Verdict:
    """Whether the clauses hold for a good part, or for SQLite."""
    waiting = {fault.caught_by for fault in FAULTS.values() if fault.hangs}
    count, seconds = 0, 0.0
    with tempfile.TemporaryDirectory() as folder:
        for number, clause in enumerate(clauses_of(BOOKS_OF_GOOD[name])):
            path = Path(folder) / f"{number}.db"
            result = tried(clause, functools.partial(_good_target, name, path), None)
            if result.outcome not in (HOLDS, NOT_RUN):
                detail = f"{clause.id} {result.outcome}: {result.detail}"
                return Verdict(False, (clause.name,), detail)
            if name in GOOD and clause.name in waiting and result.seconds > HANGS_AFTER_SECONDS:
                detail = f"{clause.id} took {result.seconds:.1f} s: a hang would prove nothing"
                return Verdict(False, (), detail)
            count += result.outcome == HOLDS
            seconds += result.seconds
    return Verdict(count > 0, (), f"{count} clauses hold, in {seconds:.1f} s")


def _good_target(name: str, path: Path) -> Target:
    return KitTarget(GOOD[name].part) if name in GOOD else SqliteTarget(path)


# ------------------------------------------------------------------------------------- processes


def in_processes(jobs: dict[str, Job], seconds_max: float) -> Iterator[tuple[str, Verdict]]:
    """The verdicts as they come. As many processes at once as there are processors, besides some
    for faults that hang, as these only wait. A process is killed after ``seconds_max``."""
    idle = {name for name in jobs if name in FAULTS and FAULTS[name].hangs}
    queues = [[name for name in jobs if (name in idle) == hangs] for hangs in (False, True)]
    running: dict[Connection, tuple[str, Any, float]] = {}
    while any(queues) or running:
        for queue, places in zip(queues, (os.cpu_count() or 1, IDLE_PROCESSES_MAX), strict=True):
            busy = sum((name in idle) == (queue is queues[1]) for name, *_ in running.values())
            for name in queue[: max(0, places - busy)]:
                queue.remove(name)
                connection, process = _started(name, jobs[name])
                running[connection] = (name, process, time.monotonic() + seconds_max)
        for ready in wait(list(running), timeout=1.0):
            assert isinstance(ready, Connection)
            name, process, _ = running.pop(ready)
            yield name, _result(ready)
            process.kill()
            process.join()
        for connection, (name, process, deadline) in list(running.items()):
            if time.monotonic() > deadline:
                del running[connection]
                process.kill()
                process.join()
                yield name, Verdict(False, (), "its process hangs")


def _started(name: str, job: Job) -> tuple[Connection, Any]:
    ours, theirs = multiprocessing.Pipe(duplex=False)

    def run() -> None:
        try:
            verdict = job()
        except BaseException:
            verdict = Verdict(False, (), traceback.format_exc())
        theirs.send(verdict)

    process = multiprocessing.get_context("fork").Process(target=run, name=name, daemon=True)
    process.start()
    theirs.close()
    return ours, process


def _result(connection: Connection) -> Verdict:
    try:
        verdict = connection.recv()
    except EOFError:
        return Verdict(False, (), "its process has died")
    assert isinstance(verdict, Verdict)
    return verdict


# ------------------------------------------------------------------------------------- the table


def sentence_of(clause_name: str) -> str:
    """A clause as it is read."""
    return clause_name.replace("_", " ")


def cell(text: str) -> str:
    """A text as it stands in a table of Markdown."""
    return text.replace("*", "\\*").replace("|", "\\|")


def table(verdicts: dict[str, Verdict]) -> str:
    """The text of ``docs/conformance-proof.md``."""
    lines = [
        "# What the conformance kit catches",
        "",
        f"{len(FAULTS)} backends, rosters, watches and stores are broken on purpose, each by one",
        "fault that real code has had. Each fails at least one clause of the kit, by what it",
        "answers and not by a crash of its own, while the good ones that they derive from fail",
        "none. `make kit-proof` shows it anew. `tests/kit/proof.py --write` writes this page; of",
        f"the clauses that fail it names up to {CATCHES_SHOWN}, first the one that the proof",
        "insists on.",
    ]
    for kind in BOOKS_OF:
        lines += ["", f"## {kind.capitalize()}s" if kind != "watch" else "## Watches", ""]
        lines += ["| Fault | Seen in | Clauses that fail |", "|---|---|---|"]
        for name, fault in FAULTS.items():
            if fault.kind == kind:
                caught_by = verdicts[name].caught_by[:CATCHES_SHOWN]
                clauses = "<br>".join(sentence_of(clause) for clause in caught_by)
                lines.append(f"| {cell(fault.sentence)} | {cell(fault.seen_in)} | {clauses} |")
    return "\n".join(lines) + "\n"


# ----------------------------------------------------------------------------- the command line


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="faults; all unless given")
    parser.add_argument("--all", action="store_true", help="try every clause on every fault")
    parser.add_argument("--write", action="store_true", help=f"write {TABLE.name}")
    parser.add_argument(
        "--good", action="append", choices=BOOKS_OF_GOOD, help="these good ones, SQLite besides"
    )
    parser.add_argument("--no-faults", action="store_true", help="the good ones only")
    parser.add_argument("--json", type=Path, help="write the verdicts to this file")
    options = parser.parse_args()
    if sys.flags.optimize:
        parser.error("the clauses are asserts: run it without -O")
    unknown = [name for name in options.names if name not in FAULTS]
    if unknown:
        parser.error(f"no such fault: {', '.join(unknown)}")
    if options.write and options.names:
        parser.error("the table is of all faults: give no names")
    names = [] if options.no_faults else options.names or list(FAULTS)
    catches = sys.maxsize if options.all else CATCHES_SHOWN if options.write else 1
    good = options.good or ([] if options.names else list(GOOD))
    # The good ones take longest and begin first, so that no processor waits for them in the end.
    jobs: dict[str, Job] = {f"good: {name}": functools.partial(held, name) for name in good}
    jobs |= {name: functools.partial(judged, name, catches) for name in names}
    verdicts: dict[str, Verdict] = {}
    seconds_max = PROCESS_SECONDS_MAX if catches == 1 else PROCESS_OF_ALL_CLAUSES_SECONDS_MAX
    for name, verdict in in_processes(jobs, seconds_max):
        verdicts[name] = verdict
        report(name, verdict)
    if options.json:
        rows = {name: asdict(verdict) for name, verdict in verdicts.items()}
        options.json.write_text(json.dumps(rows), encoding="utf-8")
    if options.write and all(verdicts[name].is_right for name in FAULTS):
        TABLE.write_text(table(verdicts), encoding="utf-8")
    wrong = sorted(name for name, verdict in verdicts.items() if not verdict.is_right)
    if wrong:
        print("Not as it should be: " + ", ".join(wrong))
    caught = sum(verdicts[name].is_right for name in names)
    print(f"caught {caught} of {len(names)}")
    return 1 if wrong else 0


def report(name: str, verdict: Verdict) -> None:
    """One line, or all that is known of a mistake."""
    if not verdict.is_right:
        print(f"WRONG {name}: {verdict.detail}", flush=True)
    elif name in FAULTS:
        clauses = "; ".join(sentence_of(clause) for clause in verdict.caught_by)
        print(f"{name}: caught by: {clauses}", flush=True)
    else:
        print(f"{name}: {verdict.detail}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
