"""The pytest plug-in: options, the rules that keep a run honest, and the report.

Rules:

* It is imported in every run of pytest where rdzv is installed: so it imports nothing of weight
  before one of its options or suites is used.
* A suite with a clause missing, or overridden without ``xfail(reason=..., strict=True)``, ends the
  run before it starts. A clause that is skipped, unless by the kit itself, has failed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from rdzv.conformance.clauses import Clause
    from rdzv.conformance.outcomes import Outcome, Report
    from rdzv.conformance.target import Target

HERE = Path(__file__).resolve().parent
PACKAGE = "rdzv.conformance"

for _path in HERE.glob("*.py"):
    # Before they are imported: their asserts are to tell what they compared.
    if _path.stem not in ("__init__", "plugin"):
        pytest.register_assert_rewrite(f"{PACKAGE}.{_path.stem}")


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("rdzv", "conformance of rendezvous backends and stores (rdzv)")
    group.addoption(
        "--rdzv-backend",
        metavar="NAME",
        help="what to test: a registered name, or module:function; with --pyargs rdzv.conformance",
    )
    group.addoption("--rdzv-endpoint", metavar="URL", help="where, as for torchrun")
    group.addoption(
        "--rdzv-conf", metavar="KEY=VALUE,...", default="", help="options, as for torchrun"
    )
    group.addoption(
        "--rdzv-without",
        metavar="CAPABILITY=REASON",
        action="append",
        default=[],
        help="what the backend is not meant to do; may be given several times",
    )
    group.addoption("--rdzv-report", metavar="FILE.json", help="write what was found, as JSON")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Run(config), "rdzv-conformance-run")
    asked = any(str(argument) == PACKAGE for argument in config.invocation_params.args)
    if asked and not config.getoption("--rdzv-backend"):
        raise pytest.UsageError(
            f"{PACKAGE} needs to know what to test: --rdzv-backend NAME --rdzv-endpoint URL, or "
            "--rdzv-backend module:function. With code of your own, subclass its suites instead."
        )


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The suites of the mode without code are for that mode only."""
    path = collection_path.resolve()
    if path.parent != HERE or not path.name.startswith("test_"):
        return None
    return None if config.getoption("--rdzv-backend") else True


def target_of(config: pytest.Config) -> Target:
    """What the command line names. Raises ``pytest.UsageError`` for what it gets wrong."""
    from rdzv.conformance.registered import RegisteredTarget
    from rdzv.errors import RendezvousSettingsError

    backend = config.getoption("--rdzv-backend")
    try:
        return RegisteredTarget(
            backend,
            config.getoption("--rdzv-endpoint") or "",
            _pairs("--rdzv-conf", config.getoption("--rdzv-conf").split(",")),
            _pairs("--rdzv-without", config.getoption("--rdzv-without")),
        )
    except RendezvousSettingsError as error:
        raise pytest.UsageError(str(error)) from error


def _pairs(option: str, texts: Sequence[str]) -> dict[str, str]:
    pairs = {}
    for text in filter(None, texts):
        key, separator, value = text.partition("=")
        if not separator or not key or not value:
            raise pytest.UsageError(f"{option}: {text!r} is not of the form key=value")
        pairs[key.strip()] = value.strip()
    return pairs


def _suite_of(item: pytest.Item) -> Any:
    """The suite that a test belongs to, or None; without importing the suites for it."""
    owner = getattr(item, "cls", None)
    return owner if isinstance(getattr(owner, "clauses", None), tuple) else None


def _clause_of(item: pytest.Item) -> Clause | None:
    suite = _suite_of(item)
    name = getattr(item, "originalname", "").removeprefix("test_")
    found = [clause for clause in getattr(suite, "clauses", ()) if clause.name == name]
    return found[0] if found else None


def problems_of_suite(suite: Any, xfail_is_strict: bool = False) -> list[str]:
    """How a subclass of a suite escapes a clause without saying so, in sentences."""
    problems = []
    for clause in suite.clauses:
        test = getattr(suite, f"test_{clause.name}", None)
        where = f"{suite.__name__}.test_{clause.name}"
        if test is None:
            problems.append(f"{where} is missing")
        elif getattr(test, "clause", None) is not clause:
            marks = [mark for mark in getattr(test, "pytestmark", ()) if mark.name == "xfail"]
            if not any(
                mark.kwargs.get("reason") and mark.kwargs.get("strict", xfail_is_strict)
                for mark in marks
            ):
                problems.append(f"{where} is overridden without xfail(reason=..., strict=True)")
    return problems


class _Run:
    """What one run of pytest has found, by target."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.reports: dict[str, Report] = {}
        self._names: dict[tuple[Any, str], str] = {}

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        suites = {suite for item in items if (suite := _suite_of(item)) is not None}
        strict = bool(self.config.getini("xfail_strict"))
        problems = [text for suite in suites for text in problems_of_suite(suite, strict)]
        if problems:
            raise pytest.UsageError("\n".join(sorted(problems)))

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        for item in items:
            clause = _clause_of(item)
            if clause is not None:
                self._report_of(item).left_out.append(clause.id)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        test_report = yield
        clause = _clause_of(item)
        if clause is None:
            return test_report
        outcome = _outcome_of(item, clause, test_report)
        if outcome is None:
            return test_report
        outcomes = self._report_of(item).outcomes
        if outcomes and outcomes[-1].id == outcome.id:
            # A teardown that fails after the clause held.
            outcomes.pop()
        outcomes.append(outcome)
        return test_report

    def _report_of(self, item: pytest.Item) -> Report:
        from rdzv.conformance.outcomes import Report, versions

        place = (_suite_of(item), item.callspec.id if hasattr(item, "callspec") else "")
        target: Any = getattr(item, "funcargs", {}).get("target")
        if target is not None:
            self._names[place] = target.name
        name = self._names.get(place, place[0].__name__)
        report = self.reports.setdefault(name, Report(name, versions=versions()))
        if target is not None:
            report.endpoint = target.endpoint
            report.without = dict(target.without)
            server = target.server
            report.server = f"{server.technology} {server.version}" if server else ""
        return report

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        path = self.config.getoption("--rdzv-report")
        if path:
            from rdzv.conformance.outcomes import write

            write(self.reports.values(), Path(path))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        # A run of many targets has the matrix for that; a run of one is read here.
        if self.reports and self.config.getoption("--rdzv-backend"):
            from rdzv.conformance.show import show

            show(self.reports.values(), terminalreporter)


def _outcome_of(
    item: pytest.Item, clause: Clause, test_report: pytest.TestReport
) -> Outcome | None:
    """What a phase of a test tells of its clause; None for one that tells nothing."""
    from rdzv.conformance.outcomes import (
        DEVIATES,
        FAILS,
        HOLDS,
        NOT_RUN,
        NOT_TRIED,
        UNDECLARED,
        WITHOUT,
        Outcome,
    )

    reason = getattr(test_report, "wasxfail", "").removeprefix("reason: ")
    if test_report.passed and test_report.when != "call":
        return None
    if test_report.skipped and hasattr(test_report, "wasxfail"):
        kind = WITHOUT if reason.startswith("without ") else DEVIATES
    elif test_report.skipped and NOT_RUN in item.stash:
        kind, reason = NOT_TRIED, item.stash[NOT_RUN]
    elif test_report.skipped:
        reason = f"skipped by the side that is under test: {_skip_reason(test_report)}"
        test_report.outcome, test_report.longrepr, kind = "failed", reason, FAILS
    elif test_report.failed:
        kind, reason = FAILS, str(test_report.longreprtext).strip().splitlines()[-1][:400]
    else:
        kind = UNDECLARED if hasattr(test_report, "wasxfail") else HOLDS
    return Outcome(clause.id, kind, reason, round(test_report.duration, 3))


def _skip_reason(test_report: pytest.TestReport) -> str:
    longrepr = test_report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
