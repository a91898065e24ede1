"""The suites. Subclass one, give it a fixture ``target``, and pytest tries every clause::

    class TestMine(BackendSuite):
        @pytest.fixture
        def target(self):
            with contextlib.closing(MyTarget()) as target:
                yield target

Rules:

* A clause is a method ``test_<name>``. To override one is to declare a deviation: only with
  ``@pytest.mark.xfail(reason=..., strict=True)``, so that it shows, and shows when it is over.
* A clause that is missing, or skipped by whoever is under test, fails the run.
* A clause whose capability the target has not is tried all the same; what fails is an expected
  failure with the target's reason, what holds is reported.
* A clause that the kit has no way to try is listed as not run, with what it takes.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

# Importing the modules fills the books.
from rdzv.conformance import (
    backend_cases,  # noqa: F401
    concurrency_cases,  # noqa: F401
    fault_cases,  # noqa: F401
    handler_cases,  # noqa: F401
    more_cases,  # noqa: F401
    store_cases,  # noqa: F401
    torchrun_cases,  # noqa: F401
)
from rdzv.conformance.capabilities import problems_of
from rdzv.conformance.clauses import BOOKS, Clause
from rdzv.conformance.outcomes import LACKING, NOT_RUN, RUN
from rdzv.conformance.target import Target
from rdzv.ports import Roster, Watch

THREADS_END_SECONDS = 10.0
CALLS_SHOWN = 6
INTERFACES = {"roster": Roster, "watch": Watch}
"""What a class inherits, rdzv uses: to declare it missing besides excuses nothing."""
MADE: set[Callable[..., None]] = set()
"""The tests that were made here. Whatever else stands in their place is an override."""
S = TypeVar("S", bound="Suite")


def _test_of(clause: Clause) -> Callable[..., None]:
    @pytest.mark.timeout(clause.timeout_seconds)
    def test(self: Suite, target: Target, request: pytest.FixtureRequest) -> None:
        assert isinstance(target, Target), (
            f"the fixture target gives {target!r}, which is no Target"
        )
        problems = problems_of(target.without)
        assert not problems, "; ".join(problems)
        lacking = [name for name in clause.needs if name in target.without]
        impossible = [reason for name in clause.controls if (reason := target.cannot(name))]
        for name in set(lacking) & set(INTERFACES):
            assert not isinstance(target.connect(), INTERFACES[name]), (
                f"{name} is declared missing, and rdzv uses it all the same, since the backend "
                f"inherits {INTERFACES[name].__name__}: drop the base class"
            )
        if lacking:
            reason = f"without {lacking[0]}: {target.without[lacking[0]]}"
            request.node.stash[LACKING] = reason
            if impossible:
                pytest.xfail(reason)
            request.applymarker(pytest.mark.xfail(reason=reason, strict=False))
        elif impossible:
            request.node.stash[NOT_RUN] = impossible[0]
            pytest.skip(impossible[0])
        with no_thread_is_left(target):
            clause.function(target)

    test.__name__ = f"test_{clause.name}"
    test.__doc__ = clause.sentence
    MADE.add(test)
    return test


@contextlib.contextmanager
def no_thread_is_left(target: Target) -> Iterator[None]:
    """What the block started has ended soon after the target was closed."""
    before = set(threading.enumerate())
    yield
    target.close()
    gc.collect()
    deadline = time.monotonic() + THREADS_END_SECONDS
    while left := [thread for thread in set(threading.enumerate()) - before if thread.is_alive()]:
        assert time.monotonic() < deadline, "threads that do not end: " + "; ".join(
            f"{thread.name} at {_place_of(thread)}" for thread in left
        )
        left[0].join(0.1)


def _place_of(thread: threading.Thread) -> str:
    """Which calls it is in, the innermost last."""
    frame = sys._current_frames().get(thread.ident or 0)
    calls = traceback.extract_stack(frame) if frame else []
    return " > ".join(f"{Path(call.filename).name}:{call.lineno}" for call in calls[-CALLS_SHOWN:])


class Suite:
    """The base of all suites: makes a test of every clause in the books that it is given, or in
    the given groups of them."""

    clauses: tuple[Clause, ...] = ()
    books: tuple[str, ...] = ()

    def __init_subclass__(
        cls, books: tuple[str, ...] = (), groups: tuple[str, ...] = (), **rest: Any
    ) -> None:
        super().__init_subclass__(**rest)
        if books:
            cls.books = books
            cls.clauses = tuple(
                clause
                for name in books
                for clause in BOOKS.get(name, ())
                if not groups or clause.group in groups
            )
            if not cls.clauses:
                raise ValueError(f"{cls.__name__}: no clause is in {books} {groups}")
            for clause in cls.clauses:
                setattr(cls, f"test_{clause.name}", _test_of(clause))

    @pytest.fixture(autouse=True)
    def rules_are_kept(self, request: pytest.FixtureRequest) -> None:
        """Without the plug-ins a skipped clause would pass unseen, and a hang would hang."""
        for name in (RUN, "timeout"):
            if not request.config.pluginmanager.has_plugin(name):
                pytest.fail(f"pytest runs without the plug-in {name}: -p rdzv.conformance.plugin")

    @pytest.fixture
    def target(self) -> Iterator[Target]:
        """What is under test: yours to give."""
        raise NotImplementedError(f"{type(self).__name__} needs a fixture called target")


class BackendSuite(Suite, books=("backend",)):
    """The document and its tokens: all that a rendezvous cannot do without."""


class RosterSuite(Suite, books=("roster",)):
    """Who is here now, by the backend's clock."""


class WatchSuite(Suite, books=("watch",)):
    """Being told of changes, missing none."""


class StoreSuite(Suite, books=("store",)):
    """A ``torch.distributed.Store``, as torch itself uses one."""


class HandlerSuite(Suite, books=("handler",)):
    """rdzv's handler on the backend, in real time: the barrier, its members, their loss, closing;
    and torch's own handler. It takes about a minute."""


class TorchrunSuite(Suite, books=("torchrun",)):
    """Training jobs under torchrun, with real agents that are really killed. The group ``torchrun
    smoke`` takes about a minute, all of them about five."""


def marked(mark: pytest.MarkDecorator, *groups: str) -> Callable[[type[S]], type[S]]:
    """A class decorator: the clauses of these groups get a mark, for instance
    ``pytest.mark.full``. They are the same clauses, and no deviations."""

    if mark.name in ("skip", "skipif", "xfail"):
        raise ValueError(f"clauses are not to be marked {mark.name}: see deviates()")

    def declare(suite: type[S]) -> type[S]:
        for clause in suite.clauses:
            if clause.group in groups:
                setattr(suite, f"test_{clause.name}", mark(_copy_of(suite, clause)))
        return suite

    return declare


def _copy_of(suite: type[Suite], clause: Clause) -> Callable[..., None]:
    """The suite's test, as a function of its own: marks are kept on functions."""
    test = getattr(suite, f"test_{clause.name}")

    @functools.wraps(test)
    def copy(self: Suite, target: Target, request: pytest.FixtureRequest) -> None:
        test(self, target, request)

    MADE.add(copy)
    return copy


def deviates(name: str, reason: str, *, run: bool = True) -> Callable[[type[S]], type[S]]:
    """A class decorator: the clause ``name`` does not hold, for a reason. With ``run=False`` it is
    not tried, as it would hang or crash; else it must fail, or the declaration is out of date."""

    def declare(suite: type[S]) -> type[S]:
        test = getattr(suite, f"test_{name}")

        @pytest.mark.xfail(reason=reason, strict=True, run=run)
        @functools.wraps(test)
        def deviating(self: Suite, target: Target, request: pytest.FixtureRequest) -> None:
            test(self, target, request)

        setattr(suite, f"test_{name}", deviating)
        return suite

    return declare
