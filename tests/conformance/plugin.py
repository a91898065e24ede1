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

from rdzv.conformance.outcomes import SUITES
from rdzv.conformance.servers.options import add_options, options_of

if TYPE_CHECKING:
    from rdzv.conformance.clauses import Clause
    from rdzv.conformance.outcomes import Outcome, Report
    from rdzv.conformance.servers.pool import ServerPool
    from rdzv.conformance.target import Server, Target

HERE = Path(__file__).resolve().parent
PACKAGE = "rdzv.conformance"
RUN = "rdzv-conformance-run"
REASON_CHARACTERS_MAX = 400
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
    """What one run of pytest has found."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self._by_place: dict[tuple[Any, str], Report] = {}
        """By suite and parameters: the target is known only once a test of them has run."""
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
        """One for each target of which something was tried."""
        by_target: dict[str, Report] = {}
        for report in self._by_place.values():
            if not report.outcomes:
                continue
            known = by_target.setdefault(report.target, report)
            if known is not report:
                known.merge(report)
        self._by_place = {(name, ""): report for name, report in by_target.items()}
        return list(by_target.values())

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if self.config.getoption("--rdzv-backend"):
            chosen = suites_of(self.config)
            items[:] = [
                item
                for item in items
                if (suite := _suite_of(item)) is None
                or item.path.resolve().parent != HERE
                or chosen.issuperset(suite.books)
            ]
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
        outcome = _outcome_of(item, clause, test_report, call)
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

        suite = _suite_of(item)
        place = (suite, item.callspec.id if hasattr(item, "callspec") else "")
        if place not in self._by_place:
            self._by_place[place] = Report(suite.__name__, versions=versions())
        report = self._by_place[place]
        target: Any = getattr(item, "funcargs", {}).get("target")
        if target is not None:
            report.target, report.endpoint = target.name, target.endpoint
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
            output[RUN] = [report.to_json() for report in self.reports]
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

        for data in getattr(node, "workeroutput", {}).get(RUN, ()):
            report = Report.from_json(data)
            self._by_place[node.gateway.id, report.target] = report

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
        error = call.excinfo.exconly() if call.excinfo else str(test_report.longreprtext)
        kind, reason = FAILS, error.strip()[:REASON_CHARACTERS_MAX]
    else:
        kind = UNDECLARED if hasattr(test_report, "wasxfail") else HOLDS
    return Outcome(clause.id, kind, reason, round(test_report.duration, 3))


def _skip_reason(test_report: pytest.TestReport) -> str:
    longrepr = test_report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) else str(longrepr)
