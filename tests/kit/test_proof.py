"""The conformance kit catches every fault of the catalogue, and the documentation says so.

The proof is a program, run once for what was selected here: its processes may be left hanging, and
must not be forked from a test run with threads of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from kit import proof
from kit.catalogue import BOOKS_OF, FAULTS, GOOD, Fault

from rdzv.conformance.clauses import BOOKS
from rdzv.stores.memory import MemoryClient

HERE = Path(__file__).resolve().parent
PROOF_SECONDS_MAX = 400.0
FAULTS_MIN = 25

pytestmark = pytest.mark.timeout(PROOF_SECONDS_MAX + 20)


@pytest.fixture(scope="session")
def verdicts(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    """What the proof says of what was selected."""
    selected: list[Any] = [
        item.callspec.params
        for item in request.session.items
        if hasattr(item, "callspec") and item.path == Path(__file__)
    ]
    faults: list[str] = [params["fault"] for params in selected if "fault" in params]
    good: list[str] = [params["good"] for params in selected if "good" in params]
    path = tmp_path_factory.mktemp("proof") / "verdicts.json"
    arguments = [*faults, "--json", str(path)]
    for name in good:
        arguments += ["--good", name]
    if not faults:
        arguments.append("--no-faults")
    run = subprocess.run(
        [sys.executable, str(HERE / "proof.py"), *arguments],
        capture_output=True,
        text=True,
        timeout=PROOF_SECONDS_MAX,
        check=False,
    )
    assert path.exists(), run.stdout + run.stderr
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_caught(fault: str, verdicts: dict[str, Any]) -> None:
    assert verdicts[fault]["is_right"], verdicts[fault]["detail"]
    assert FAULTS[fault].caught_by in verdicts[fault]["caught_by"]


@pytest.mark.parametrize("good", GOOD)
def test_what_is_good_fails_nothing(good: str, verdicts: dict[str, Any]) -> None:
    verdict = verdicts[f"good: {good}"]
    assert verdict["is_right"], verdict["detail"]


def test_there_are_many_faults_of_every_kind() -> None:
    assert len(FAULTS) >= FAULTS_MIN
    assert {fault.kind for fault in FAULTS.values()} == set(BOOKS_OF)
    assert len({fault.sentence for fault in FAULTS.values()}) == len(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_one_sentence_and_small(name: str) -> None:
    fault = FAULTS[name]
    assert re.fullmatch(r"[A-Z][^.]*\.", fault.sentence), fault.sentence
    assert fault.seen_in
    assert any(issubclass(fault.broken, part) for part in proof.GOOD_PARTS)


def test_the_table_in_the_documentation_is_of_these_faults() -> None:
    rows = [line for line in proof.TABLE.read_text(encoding="utf-8").splitlines() if "|" in line]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]
    shown = [row for row in cells if row[0] != "Fault" and set(row[0]) != {"-"}]
    kinds = sorted(FAULTS.values(), key=lambda fault: list(BOOKS_OF).index(fault.kind))
    told = [[proof.cell(fault.sentence), proof.cell(fault.seen_in)] for fault in kinds]
    remedy = "run tests/kit/proof.py --write"
    assert [row[:2] for row in shown] == told, remedy
    known = {clause.name for clauses in BOOKS.values() for clause in clauses}
    for row, fault in zip(shown, kinds, strict=True):
        clauses = [clause.replace(" ", "_") for clause in row[2].split("<br>")]
        assert clauses[0] == fault.caught_by, remedy
        assert set(clauses) <= known, remedy


# ------------------------------------------------------------- the proof itself can fail


class _Crashes:
    def call(self) -> None:
        raise TypeError("a mistake of whoever wrote this")


def test_a_crash_is_no_catch() -> None:
    with pytest.raises(TypeError) as caught:
        _Crashes().call()
    assert not proof.is_catch(caught.value)
    assert proof.is_catch(caught.value, (TypeError,))
    wrapped = AssertionError("the call raised no RendezvousConnectionError")
    wrapped.__cause__ = caught.value
    assert not proof.is_catch(wrapped)
    assert proof.is_catch(AssertionError("1 is not 2"))


@pytest.mark.parametrize(
    ("caught_by", "complaint"),
    [("what_is_set_is_got", "holds"), ("no_such_clause", "there is no clause")],
)
def test_a_fault_that_its_clause_misses_is_not_caught(
    caught_by: str, complaint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    harmless = Fault("store", type("Harmless", (MemoryClient,), {}), caught_by)
    monkeypatch.setitem(FAULTS, "Harmless", harmless)
    verdict = proof.judged("Harmless", 1)
    assert not verdict.is_right
    assert complaint in verdict.detail
