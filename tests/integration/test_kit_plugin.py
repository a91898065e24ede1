"""The rules that keep a conformance run honest, seen from outside: what pytest says and reports."""

from __future__ import annotations

import json
import re
import uuid
from textwrap import dedent
from typing import Any

import pytest

from rdzv.conformance import suites

pytest_plugins = ["pytester"]

KIT = """
import threading
import pytest
from rdzv.conformance.clauses import book
from rdzv.conformance.target import Target

quick = book(BOOK, "quick")
watching = book(BOOK, "watching", needs=("watch",))
wiping = book(BOOK, "wiping", controls=("wipe",))

@quick
def one_is_one(target):
    assert target.connect() == 1

@watching
def two_is_two(target):
    assert target.connect() + 1 == 2

@wiping
def a_wipe_wipes(target):
    target.wipe()
    assert target.connect() == 0

from rdzv.conformance.suites import Suite, deviates

class TinySuite(Suite, books=(BOOK,)):
    pass

class One(Target):
    name, endpoint = "one", "nowhere"
    answer = 1
    def connect(self, run_id="job"):
        return self.answer
    def close(self):
        pass

class Tiny(TinySuite):
    @pytest.fixture
    def target(self):
        return One()
"""


def run(
    pytester: pytest.Pytester, suite: str, *arguments: str
) -> tuple[int, str, list[dict[str, Any]]]:
    """The exit code, what was printed, and the reports of a run on one test file."""
    name = f"test_{uuid.uuid4().hex}"
    text = f"BOOK = {name!r}\n{KIT}{dedent(suite)}"
    pytester.makepyfile(**{name: text})
    report = pytester.path / f"{name}.json"
    done = pytester.runpytest_inprocess("-rA", f"--rdzv-report={report}", *arguments, f"{name}.py")
    found = json.loads(report.read_text(encoding="utf-8")) if report.exists() else []
    return int(done.ret), done.stdout.str() + done.stderr.str(), found


def outcomes(reports: list[dict[str, Any]]) -> dict[str, tuple[str, str]]:
    [report] = reports
    rows = report["outcomes"]
    return {one["id"].rpartition("/")[2]: (one["outcome"], one["reason"]) for one in rows}


def test_a_good_target(pytester: pytest.Pytester) -> None:
    code, text, reports = run(pytester, "class TestTiny(Tiny): pass")
    assert code == 0, text
    found = outcomes(reports)
    assert found["one_is_one"] == ("holds", "")
    assert found["two_is_two"] == ("holds", "")
    # The target has no way to be wiped: said, and not passed over.
    assert found["a_wipe_wipes"][0] == "not run"
    assert "lose all data" in found["a_wipe_wipes"][1]
    assert "lose all data" in text
    assert (reports[0]["good"], reports[0]["complete"]) == (True, True)
    assert (reports[0]["target"], reports[0]["endpoint"]) == ("one", "nowhere")


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        ("class TestTiny(Tiny):\n    test_one_is_one = None", "test_one_is_one is missing"),
        (
            "class TestTiny(Tiny):\n    def test_one_is_one(self): pass",
            "test_one_is_one is overridden without xfail",
        ),
        (
            """
            class TestTiny(Tiny):
                @pytest.mark.xfail(reason="later", strict=False)
                def test_one_is_one(self): assert False
            """,
            "test_one_is_one is overridden without xfail",
        ),
        (
            """
            class TestTiny(Tiny):
                @pytest.mark.xfail(strict=True)
                def test_one_is_one(self): assert False
            """,
            "test_one_is_one is overridden without xfail",
        ),
    ],
)
def test_a_suite_that_lost_a_clause_does_not_run(
    pytester: pytest.Pytester, suite: str, says: str
) -> None:
    code, text, reports = run(pytester, suite)
    assert code == pytest.ExitCode.USAGE_ERROR, text
    assert says in text
    assert not any(report["good"] or report["complete"] for report in reports)


@pytest.mark.parametrize(
    ("suite", "says"),
    [
        (
            "@pytest.mark.xfail(reason='later')\nclass TestTiny(Tiny): pass",
            "TestTiny is marked xfail as a whole",
        ),
        (
            """
            class TestTiny(Tiny):
                @pytest.mark.xfail(threading is None, reason="elsewhere", strict=True)
                def test_one_is_one(self): pass
            """,
            "test_one_is_one is overridden without xfail",
        ),
        (
            """
            import functools
            class TestTiny(Tiny):
                @functools.wraps(Tiny.test_one_is_one)
                def test_one_is_one(self, target, request):
                    try:
                        Tiny.test_one_is_one(self, target, request)
                    except AssertionError:
                        pass
            """,
            "test_one_is_one is overridden without xfail",
        ),
        ("from rdzv.conformance.suites import marked\nmarked(pytest.mark.xfail, 'quick')", "xfail"),
        ("class TestTiny(Suite, books=('tinny',)): pass", "no clause is in"),
        ("class TestTiny(Suite, books=(BOOK,), groups=('quik',)): pass", "no clause is in"),
    ],
)
def test_other_ways_to_lose_a_clause(pytester: pytest.Pytester, suite: str, says: str) -> None:
    code, text, _ = run(pytester, suite)
    assert code in (pytest.ExitCode.USAGE_ERROR, pytest.ExitCode.INTERRUPTED), text
    assert says in text


def test_an_xfail_from_the_tested_side_is_a_failure(pytester: pytest.Pytester) -> None:
    suite = """
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                pytest.xfail("without any: no server on this machine")
    """
    code, text, reports = run(pytester, suite)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert {outcome for outcome, _ in outcomes(reports).values()} == {"fails"}


def test_what_the_class_inherits_cannot_be_declared_missing(pytester: pytest.Pytester) -> None:
    suite = """
        from rdzv.ports import Watch
        class Deaf(Watch):
            def wait_for_change(self, token, timeout_seconds, revision=None):
                return None
        class Declared(One):
            without = {"watch": "it is a little slow"}
            def connect(self, run_id="job"):
                return Deaf()
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                return Declared()
    """
    code, text, reports = run(pytester, suite, "-k", "two")
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "drop the base class" in text
    assert outcomes(reports)["two_is_two"][0] == "fails"


def test_clauses_that_never_ran_are_left_out(pytester: pytest.Pytester) -> None:
    two = "class TestTiny(Tiny): pass\nclass TestOther(Tiny): pass"
    code, text, reports = run(pytester, two, "-k", "TestTiny")
    assert code == 0, text
    by_target = {report["target"]: report for report in reports}
    assert by_target["one"]["complete"]
    assert not by_target["TestOther"]["complete"]
    assert not by_target["TestOther"]["good"]


@pytest.mark.parametrize("name", ["rdzv-conformance", "timeout"])
def test_without_its_plug_ins_no_clause_passes(pytester: pytest.Pytester, name: str) -> None:
    pytester.makepyfile(
        test_bare=f"BOOK = 'bare {name}'\n{KIT}\nclass TestTiny(Tiny): pass\n",
    )
    done = pytester.runpytest_subprocess("-p", f"no:{name}", "test_bare.py")
    assert done.ret == pytest.ExitCode.TESTS_FAILED
    assert "pytest runs without the plug-in" in done.stdout.str()
    assert "passed" not in done.stdout.str()


@pytest.mark.parametrize(
    "suite",
    [
        '@pytest.mark.skip(reason="not today")\nclass TestTiny(Tiny): pass',
        """
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                pytest.skip("not today")
        """,
        """
        class Absent(One):
            def connect(self, run_id="job"):
                pytest.skip("not today")
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                return Absent()
        """,
    ],
)
def test_a_clause_that_the_tested_side_skips_has_failed(
    pytester: pytest.Pytester, suite: str
) -> None:
    code, text, reports = run(pytester, suite)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    outcome, reason = outcomes(reports)["one_is_one"]
    assert outcome == "fails"
    assert "not today" in reason
    assert not reports[0]["good"]


def test_a_deviation_shows_and_must_be_one(pytester: pytest.Pytester) -> None:
    suite = """
        class Two(One):
            answer = 2
        @deviates("one_is_one", "it counts from two")
        @deviates("two_is_two", "it would hang", run=False)
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                return {}()
    """
    code, text, reports = run(pytester, suite.format("Two"))
    assert code == 0, text
    assert outcomes(reports)["one_is_one"] == ("deviates", "it counts from two")
    assert outcomes(reports)["two_is_two"] == ("deviates", "[NOTRUN] it would hang")
    code, text, reports = run(pytester, suite.format("One"))
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert outcomes(reports)["one_is_one"][0] == "fails"


CAPABLE = """
    class Lacking(One):
        answer = {answer}
        without = {without}
    class TestTiny(Tiny):
        @pytest.fixture
        def target(self):
            return Lacking()
"""


def test_what_a_capability_lacks_is_no_failure_and_what_it_has_is_told(
    pytester: pytest.Pytester,
) -> None:
    lacking = CAPABLE.format(answer=1, without="{'watch': 'it cannot push'}")
    code, text, reports = run(pytester, lacking)
    assert code == 0, text
    assert outcomes(reports)["two_is_two"][0] == "holds undeclared"
    assert reports[0]["without"] == {"watch": "it cannot push"}
    lacking = CAPABLE.format(answer=5, without={})
    code, text, reports = run(pytester, lacking)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert outcomes(reports)["two_is_two"][0] == "fails"
    lacking = CAPABLE.format(answer=5, without="{'watch': 'it cannot push'}")
    code, text, reports = run(pytester, lacking, "-k", "two_is_two")
    assert code == 0, text
    assert outcomes(reports)["two_is_two"] == ("without", "without watch: it cannot push")
    left_out = {identity.rpartition("/")[2] for identity in reports[0]["left_out"]}
    assert left_out == {"one_is_one", "a_wipe_wipes"}
    assert not reports[0]["complete"]


@pytest.mark.parametrize(
    ("without", "says"),
    [
        ("{'compare_and_set': 'too hard'}", "is required and cannot be switched off"),
        ("{'watch': ''}", "is switched off without a reason"),
        ("{'wings': 'it has none'}", "is no capability"),
    ],
)
def test_capabilities_that_cannot_be_answered_so(
    pytester: pytest.Pytester, without: str, says: str
) -> None:
    code, text, reports = run(pytester, CAPABLE.format(answer=1, without=without))
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert says in text
    assert all(outcome == "fails" for outcome, _ in outcomes(reports).values())


def test_reports_of_several_processes_are_one(pytester: pytest.Pytester) -> None:
    pytest.importorskip("xdist", reason="what spreads tests over processes")
    code, text, reports = run(pytester, "class TestTiny(Tiny): pass", "-p", "xdist", "-n2")
    assert code == 0, text
    assert set(outcomes(reports)) == {"one_is_one", "two_is_two", "a_wipe_wipes"}
    code, text, reports = run(
        pytester, "class TestTiny(Tiny): pass", "-p", "xdist", "-n2", "-k", "two"
    )
    assert code == 0, text
    assert set(outcomes(reports)) == {"two_is_two"}
    assert len(reports[0]["left_out"]) == 2
    broken = "class TestTiny(Tiny):\n    def test_one_is_one(self): pass"
    code, text, reports = run(pytester, broken, "-p", "xdist", "-n2")
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert "test_one_is_one is overridden without xfail" in text
    assert {outcome for outcome, _ in outcomes(reports).values()} == {"fails"}


def test_a_thread_that_stays_is_a_failure(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(suites, "THREADS_END_SECONDS", 0.2)
    suite = """
        class Leaking(One):
            def connect(self, run_id="job"):
                threading.Thread(target=threading.Event().wait, args=(5.0,)).start()
                return 1
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                return Leaking()
    """
    code, text, _ = run(pytester, suite, "-k", "one_is_one")
    assert code == pytest.ExitCode.TESTS_FAILED, text
    assert re.search(r"threads that do not end: Thread-.* at .*threading\.py:\d+", text), text


def test_a_fixture_that_fails_is_a_failure_of_the_clause(pytester: pytest.Pytester) -> None:
    suite = """
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                raise OSError("no server")
    """
    code, text, reports = run(pytester, suite)
    assert code == pytest.ExitCode.TESTS_FAILED, text
    outcome, reason = outcomes(reports)["one_is_one"]
    assert (outcome, "no server" in reason) == ("fails", True)


def test_a_target_without_a_name_and_one_that_is_none(pytester: pytest.Pytester) -> None:
    nameless = """
        class Nameless(One):
            name = ""
        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                return {}
        """
    code, text, reports = run(pytester, nameless.format("Nameless()"))
    assert code == 0, text
    assert reports[0]["target"] == "Nameless"
    code, text, reports = run(pytester, nameless.format("object()"))
    assert code == 1, text
    assert {kind for kind, _ in outcomes(reports).values()} == {"fails"}
    assert "which is no Target" in outcomes(reports)["one_is_one"][1]


def test_a_repetition_does_not_make_good_what_failed(pytester: pytest.Pytester) -> None:
    # As pytest-rerunfailures does: only the last try is logged.
    pytester.makeconftest(
        """
        from _pytest.runner import runtestprotocol

        def pytest_runtest_protocol(item, nextitem):
            for reports in (runtestprotocol(item, nextitem=nextitem, log=False) for _ in range(2)):
                if not any(report.failed for report in reports):
                    break
            for report in reports:
                item.ihook.pytest_runtest_logreport(report=report)
            return True
        """
    )
    code, text, reports = run(
        pytester,
        """
        answers = [1, 5]

        class TestTiny(Tiny):
            @pytest.fixture
            def target(self):
                target = One()
                target.answer = answers.pop() if answers else 1
                return target
        """,
    )
    assert code == 0, text
    assert outcomes(reports)["one_is_one"][0] == "fails", text
    assert not reports[0]["good"]


def test_other_tests_are_left_alone(pytester: pytest.Pytester) -> None:
    other = """
        def test_other():
            pytest.skip("somebody else's business")
    """
    code, text, reports = run(pytester, other)
    assert code == 0, text
    assert reports == []
