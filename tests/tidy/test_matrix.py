"""The support matrix of README.md shows what is kept of the last full run, and none older."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from rdzv.conformance import suites
from rdzv.conformance.clauses import BOOKS
from rdzv.conformance.outcomes import FAILS, HOLDS, NOT_TRIED, Outcome, Report, read, write

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def matrix() -> ModuleType:
    spec = importlib.util.spec_from_file_location("matrix", ROOT / ".ci" / "matrix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_shows_what_is_kept(matrix: ModuleType) -> None:
    text = matrix.README.read_text(encoding="utf-8")
    assert text == matrix.with_matrix(text, matrix.render(read(matrix.KEPT)))


def test_what_is_kept_is_of_the_clauses_that_there_are(matrix: ModuleType) -> None:
    assert issubclass(suites.BackendSuite, suites.Suite)
    known = {clause.id for clauses in BOOKS.values() for clause in clauses}
    for report in read(matrix.KEPT):
        tried = {one.id for one in report.outcomes}
        books = {identity.split("/")[0] for identity in tried}
        expected = {identity for identity in known if identity.split("/")[0] in books}
        assert tried == expected, f"{report.target}: run `make test-full`, which draws it anew"
        assert report.good, report.target


def test_every_file_of_clauses_is_in_the_suites() -> None:
    """What a suite does not import, its users are not told of."""
    program = "import sys; import rdzv.conformance.suites; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    loaded = set(done.stdout.split())
    files = (ROOT / "tests" / "conformance").glob("*_cases.py")
    missing = [path.stem for path in files if f"rdzv.conformance.{path.stem}" not in loaded]
    assert not missing


def test_the_matrix_says_what_was_not_run(matrix: ModuleType) -> None:
    report = Report("redis", runs_on="redis 7", outcomes=[Outcome("backend/state/x", HOLDS)])
    drawn = matrix.render([report])
    assert "| `redis` | redis 7 | backend: state" not in drawn
    assert "| `redis` | redis 7 | 1 hold |" in drawn
    assert "| `etcd-v3` | not run | |" in drawn


def test_a_run_that_left_clauses_out_is_refused(
    matrix: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "report.json"
    write([Report("redis", expected=["backend/state/x"])], path)
    monkeypatch.setattr("sys.argv", ["matrix.py", str(path)])
    kept = matrix.KEPT.read_bytes()
    with pytest.raises(SystemExit, match="left out on redis"):
        matrix.main()
    assert matrix.KEPT.read_bytes() == kept


def test_two_reports_of_a_target_are_one_with_the_worse_outcomes() -> None:
    first = Report(
        "redis", outcomes=[Outcome("a", HOLDS), Outcome("b", FAILS), Outcome("c", HOLDS)]
    )
    second = Report("redis", outcomes=[Outcome("a", FAILS), Outcome("b", HOLDS)])
    first.expected, second.expected = ["a", "b"], ["c", "d"]
    first.merge(second)
    found = {one.id: one.outcome for one in first.outcomes}
    assert found == {"a": FAILS, "b": FAILS, "c": HOLDS}
    assert first.left_out == ["d"]
    assert not first.complete
    assert not first.good


def test_a_report_in_which_nothing_holds_is_not_good() -> None:
    assert not Report("redis").good
    assert not Report("redis", outcomes=[Outcome("a", NOT_TRIED)]).good
    assert Report("redis", outcomes=[Outcome("a", NOT_TRIED), Outcome("b", HOLDS)]).good
