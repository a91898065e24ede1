"""The report for people."""

from __future__ import annotations

import pytest

from rdzv.conformance.outcomes import FAILS, HOLDS, MEANINGS, NOT_TRIED, Outcome, Report
from rdzv.conformance.show import as_text

LONG = "linearizability/threads and processes and killed ones"


@pytest.mark.parametrize("columns", [80, 100, 120])
def test_all_words_of_the_table_are_there(columns: int) -> None:
    report = Report(
        "mine",
        outcomes=[
            Outcome(f"backend/{LONG}/a", HOLDS),
            Outcome("store/values/b", FAILS, "it was [not] there " * 30),
            Outcome("store/values/c", NOT_TRIED, "no server"),
        ],
    )
    text = as_text(report, columns)
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    head = text[: text.index("fail,")] if "fail," in text else text
    for word in ("suite", "clauses", "about", *HOLDS.split(), *FAILS.split(), *NOT_TRIED.split()):
        assert word in head
    assert text.count("[not]") == 30


@pytest.mark.parametrize("kind", [kind for kind in MEANINGS if kind not in (HOLDS, FAILS)])
def test_a_column_is_there_where_it_is_needed(kind: str) -> None:
    with_it = Report("mine", outcomes=[Outcome("store/values/c", kind)])
    without = Report("mine", outcomes=[Outcome("store/values/c", HOLDS)])
    assert kind in as_text(with_it, 120).partition("store")[0]
    assert kind not in as_text(without, 120)


def test_reports_of_one_target_keep_what_either_knows() -> None:
    first = Report("mine", outcomes=[Outcome("store/values/a", HOLDS)])
    second = Report("mine", "host:1", "a server", outcomes=[Outcome("store/values/b", HOLDS)])
    first.merge(second)
    assert (first.endpoint, first.runs_on) == ("host:1", "a server")
    assert len(first.outcomes) == 2
