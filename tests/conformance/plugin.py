"""The pytest plug-in: options, the rules that keep a run honest, and the report.

Rules:

* It is imported in every run of pytest where rdzv is installed: so it imports nothing of weight
  before one of its options or suites is used.
* A suite with a clause missing, or overridden without ``xfail(reason=..., strict=True)``, ends the
  run before it starts. A clause that is skipped, unless by the kit itself, has failed.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rdzv.conformance.outcomes import RUN, SUITES
from rdzv.conformance.servers.options import add_options, options_of

if TYPE_CHECKING:
    from rdzv.conformance.clauses import Clause
    from rdzv.conformance.outcomes import Outcome, Report
    from rdzv.conformance.servers.pool import ServerPool
    from rdzv.conformance.target import Server, Target

HERE = Path(__file__).resolve().parent
PACKAGE = "rdzv.conformance"
REASON_CHARACTERS_MAX = 4000
DEFAULT_SUITES = "backend,roster,watch,store,handler"
TECHNOLOGY_OF_BACKEND = {
    "redis": "redis",
    "postgresql": "postgresql",
    "mysql": "mysql",
    "etcd-v3": "etcd",
}

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
    group.addoption(
        "--rdzv-suites",
        metavar="NAME,...|all",
        default=DEFAULT_SUITES,
        help=f"of the mode without code: any of {', '.join(SUITES)} (default: {DEFAULT_SUITES}; "
        "torchrun takes many minutes)",
    )
    group.addoption("--rdzv-report", metavar="FILE.json", help="write what was found, as JSON")
    add_options(group)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Run(config), RUN)
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


def pool_of(config: pytest.Config) -> ServerPool:
    """The test servers of this run."""
    run = config.pluginmanager.get_plugin(RUN)
    assert isinstance(run, _Run)
    return run.pool


@pytest.fixture(scope="session")
def rdzv_servers(pytestconfig: pytest.Config) -> ServerPool:
    """The test servers of this run, by technology."""
    return pool_of(pytestconfig)


def server_or_not_run(request: pytest.FixtureRequest, technology: str) -> Any:
    """The technology's server. Where it cannot be had, the test of ``request`` is not run, which
    the report says, and which fails the run if ``--rdzv-require`` names the technology."""
    from rdzv.conformance.outcomes import NOT_RUN
    from rdzv.conformance.servers.base import ServerUnavailable

    try:
        return pool_of(request.config).get(technology)
    except ServerUnavailable as error:
        request.node.stash[NOT_RUN] = f"{technology}: {error}"
        pytest.skip(request.node.stash[NOT_RUN])


def target_of(config: pytest.Config) -> Target:
    """What the command line names. Raises ``pytest.UsageError`` for what it gets wrong."""
    from rdzv.conformance.registered import RegisteredTarget
    from rdzv.errors import RendezvousSettingsError

    backend = config.getoption("--rdzv-backend")
    endpoint: str = config.getoption("--rdzv-endpoint") or ""
    server: Server | None = None
    if not endpoint and backend in TECHNOLOGY_OF_BACKEND:
        # A server of our own, which may be tormented.
        server = pool_of(config).get(TECHNOLOGY_OF_BACKEND[backend])
        endpoint = server.endpoint()
    try:
        return RegisteredTarget(
            backend,
            endpoint,
            _pairs("--rdzv-conf", config.getoption("--rdzv-conf").split(",")),
            _pairs("--rdzv-without", config.getoption("--rdzv-without")),
            server,
        )
    except RendezvousSettingsError as error:
        raise pytest.UsageError(str(error)) from error


def suites_of(config: pytest.Config) -> frozenset[str]:
    """The suites that the mode without code is to run. Raises ``pytest.UsageError``."""
    names = [name.strip() for name in config.getoption("--rdzv-suites").split(",")]
    unknown = set(names) - {*SUITES, "all"}
    if unknown:
        raise pytest.UsageError(
            f"--rdzv-suites: {', '.join(sorted(unknown))}: there are all, {', '.join(SUITES)}"
        )
    return frozenset(SUITES if "all" in names else names)


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
    from rdzv.conformance.suites import MADE

    problems = []
    for clause in suite.clauses:
        test = getattr(suite, f"test_{clause.name}", None)
        where = f"{suite.__name__}.test_{clause.name}"
        if test is None:
            problems.append(f"{where} is missing")
        elif test not in MADE and not _is_declared(test, xfail_is_strict):
            problems.append(f"{where} is overridden without xfail(reason=..., strict=True)")
    marks = [mark.name for mark in getattr(suite, "pytestmark", ())]
    if "xfail" in marks:
        problems.append(f"{suite.__name__} is marked xfail as a whole: declare each deviation")
    return problems


def _is_declared(test: Any, xfail_is_strict: bool) -> bool:
    """Whether an override says so: it must fail, always, for a reason."""
    return any(
        mark.name == "xfail"
        and not mark.args
        and "condition" not in mark.kwargs
        and mark.kwargs.get("reason")
        and mark.kwargs.get("strict", xfail_is_strict)
        for mark in getattr(test, "pytestmark", ())
    )


class _Run:
    """What one run of pytest has found."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._by_place: dict[str, Report] = {}
        """By suite and parameters: the target is known only once a test of them has run."""
        self._refused: dict[Any, str] = {}
        """Suites that break the rules, where that could not stop the run before it began."""
        self._pool: ServerPool | None = None

    @property
    def pool(self) -> ServerPool:
        """Made when it is first asked for."""
        if self._pool is None:
            from rdzv.conformance.servers.pool import ServerPool

            terminal = self.config.pluginmanager.get_plugin("terminalreporter")
            self._pool = ServerPool(self.config, terminal.write_line if terminal else None)
        return self._pool

    def _missing_servers(self) -> list[str]:
        """Also where no test has asked for one: what is required is looked for."""
        return self.pool.missing() if options_of(self.config).required else []

    @property
    def reports(self) -> list[Report]:
        """One for each target; a suite of which nothing ran stands for its unknown target."""
        by_target: dict[str, Report] = {}
        for report in self._by_place.values():
            known = by_target.get(report.target)
            if known is None:
                by_target[report.target] = replace(report)
            else:
                known.merge(report)
        return list(by_target.values())

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        """Before anything is selected: what has no outcome in the end was left out."""
        suite = _suite_of(item)
        if suite is not None and self._is_chosen(item, suite):
            self._report_of(item)

    def _is_chosen(self, item: pytest.Item, suite: Any) -> bool:
        """Not a suite of the mode without code that the user has not asked for."""
        ours = item.path.resolve().parent == HERE
        return not ours or suites_of(self.config).issuperset(suite.books)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [
            item
            for item in items
            if (suite := _suite_of(item)) is None or self._is_chosen(item, suite)
        ]
        suites = {suite for item in items if (suite := _suite_of(item)) is not None}
        strict = bool(self.config.getini("xfail_strict"))
        for suite in suites:
            problems = problems_of_suite(suite, strict)
            if problems:
                self._refused[suite] = "\n".join(problems)
        if self._refused and not self._is_worker:
            raise pytest.UsageError("\n".join(sorted(self._refused.values())))

    @property
    def _is_worker(self) -> bool:
        """Whether this is a process of pytest-xdist, which cannot end the run by an exception."""
        return hasattr(self.config, "workeroutput")

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """What the command line gets wrong is said once, and not by every clause."""
        ours = any(item.path.resolve().parent == HERE for item in session.items)
        if ours and self.config.getoption("--rdzv-backend") and not self._is_worker:
            try:
                target_of(self.config).close()
            except pytest.UsageError:
                raise
            except Exception as error:
                text = str(error).strip() or repr(error)
                raise pytest.UsageError(f"--rdzv-backend cannot be opened: {text}") from error

    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        refused = self._refused.get(_suite_of(item))
        if refused:
            pytest.fail(refused, pytrace=False)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        test_report = yield
        clause = _clause_of(item)
        if clause is None:
            return test_report
        from rdzv.conformance.outcomes import worse_of

        outcome = _outcome_of(item, clause, test_report, call)
        if outcome is None:
            return test_report
        outcomes = self._report_of(item).outcomes
        if outcomes and outcomes[-1].id == outcome.id:
            # A teardown that fails after the clause held; or a repetition, which does not make
            # good what failed before.
            outcome = worse_of(outcomes.pop(), outcome)
        outcomes.append(outcome)
        return test_report

    def _report_of(self, item: pytest.Item) -> Report:
        from rdzv.conformance.outcomes import Report, versions
        from rdzv.conformance.target import Target

        suite = _suite_of(item)
        parameters = item.callspec.id if hasattr(item, "callspec") else ""
        place = f"{item.nodeid.partition('::')[0]}::{suite.__qualname__}[{parameters}]"
        if place not in self._by_place:
            expected = sorted(clause.id for clause in suite.clauses)
            report = Report(suite.__name__, versions=versions(), expected=expected)
            self._by_place[place] = report
        report = self._by_place[place]
        target: Any = getattr(item, "funcargs", {}).get("target")
        if isinstance(target, Target):
            report.target = target.name or type(target).__name__
            report.endpoint = target.endpoint
            report.without = dict(target.without)
            server = target.server
            of_server = f"{server.technology} {server.version}" if server else ""
            report.runs_on = target.runs_on or of_server
        return report

    def pytest_report_header(self) -> list[str]:
        return self.pool.header() if options_of(self.config).given else []

    def pytest_unconfigure(self) -> None:
        if self._pool is not None:
            self._pool.close()

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self._missing_servers() and not session.exitstatus:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        output = getattr(self.config, "workeroutput", None)
        if output is not None:
            output[RUN] = {place: each.to_json() for place, each in self._by_place.items()}
            return
        path = self.config.getoption("--rdzv-report")
        if path:
            from rdzv.conformance.outcomes import write

            Path(path).parent.mkdir(parents=True, exist_ok=True)
            write(self.reports, Path(path))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: object) -> None:
        """Where pytest-xdist spreads the tests over processes: what one of them has found."""
        from rdzv.conformance.outcomes import Report

        for place, data in getattr(node, "workeroutput", {}).get(RUN, {}).items():
            report = Report.from_json(data)
            known = self._by_place.get(place)
            if known is None or not known.outcomes:
                self._by_place[place] = report
            else:
                known.merge(report)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        missing = self._missing_servers()
        for name, reason in (self._pool.unavailable() if self._pool else {}).items():
            terminalreporter.write_line(f"NOT RUN for want of {name}: {reason}", red=True)
        for sentence in missing:
            terminalreporter.write_line(f"FAILED {sentence}", red=True)
        # A run of many targets has the matrix for that; a run of one is read here.
        if self._by_place and self.config.getoption("--rdzv-backend"):
            from rdzv.conformance.show import show

            show(self.reports, terminalreporter)


def _outcome_of(
    item: pytest.Item,
    clause: Clause,
    test_report: pytest.TestReport,
    call: pytest.CallInfo[None],
) -> Outcome | None:
    """What a phase of a test tells of its clause; None for one that tells nothing."""
    from rdzv.conformance.outcomes import (
        DEVIATES,
        FAILS,
        HOLDS,
        LACKING,
        NOT_RUN,
        NOT_TRIED,
        UNDECLARED,
        WITHOUT,
        Outcome,
    )

    reason = getattr(test_report, "wasxfail", "").removeprefix("reason: ")
    if test_report.passed and test_report.when != "call":
        return None
    is_override = getattr(item, "obj", None) is not None and not _is_made(item)
    if test_report.skipped and hasattr(test_report, "wasxfail") and LACKING in item.stash:
        kind = WITHOUT
    elif test_report.skipped and hasattr(test_report, "wasxfail") and is_override:
        kind = DEVIATES
    elif test_report.skipped and NOT_RUN in item.stash:
        kind, reason = NOT_TRIED, item.stash[NOT_RUN]
    elif test_report.skipped:
        reason = f"skipped by the side that is under test: {_skip_reason(test_report)}"
        test_report.outcome, test_report.longrepr, kind = "failed", reason, FAILS
        # pytest does not count a failure that has it.
        vars(test_report).pop("wasxfail", None)
    elif test_report.failed:
        error = call.excinfo.exconly() if call.excinfo else str(test_report.longreprtext)
        kind, reason = FAILS, error.strip()[:REASON_CHARACTERS_MAX]
    elif is_override:
        # Only under --runxfail: what stands in the place of a clause cannot show that it holds.
        reason, kind = "an override passed", FAILS
        test_report.outcome, test_report.longrepr = "failed", reason
    else:
        kind = UNDECLARED if LACKING in item.stash else HOLDS
    return Outcome(clause.id, kind, reason, round(test_report.duration, 3))


def _is_made(item: pytest.Item) -> bool:
    """Whether a test is the kit's own."""
    from rdzv.conformance.suites import MADE

    return getattr(item, "function", None) in MADE


def _skip_reason(test_report: pytest.TestReport) -> str:
    longrepr = test_report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
