"""The report for people: a table by clause group, then every clause that does not simply hold."""

from __future__ import annotations

import io
from collections.abc import Iterable

import pytest

from rdzv.conformance.outcomes import FAILS, HOLDS, MEANINGS, SUITES, Report

COLUMNS_MAX = 120


def show(reports: Iterable[Report], terminal: pytest.TerminalReporter) -> None:
    """Write reports to pytest's terminal."""
    for report in reports:
        terminal.section(f"conformance of {report.target}")
        terminal.write_line(as_text(report, min(terminal._tw.fullwidth, COLUMNS_MAX)))


def as_text(report: Report, columns: int) -> str:
    """The report as a table and a list."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=columns, highlight=False)
    # What has no clause in it takes no room: all of it would not fit into 80 columns.
    found_kinds = {one.outcome for one in report.outcomes}
    kinds = [kind for kind in MEANINGS if kind in (HOLDS, FAILS) or kind in found_kinds]
    table = Table("suite", "clauses about")
    for kind in kinds:
        table.add_column(kind, justify="right", overflow="fold")
    for (book, group), counts in report.counts().items():
        table.add_row(book, group, *(str(counts[kind] or "") for kind in kinds))
    about = [report.endpoint, report.runs_on, *(f"{k} {v}" for k, v in report.versions.items())]
    console.print(escape(", ".join(filter(None, about))))
    console.print(table)
    for kind in MEANINGS:
        found = [one for one in report.outcomes if one.outcome == kind]
        if kind == HOLDS or not found:
            continue
        console.print(f"[bold]{kind}[/bold] ({MEANINGS[kind]}):")
        for one in found:
            sentence = one.id.rpartition("/")[2].replace("_", " ")
            console.print(f"  {escape(sentence)}: {escape(one.reason)}")
    if report.left_out:
        console.print(f"[bold]left out by selection[/bold]: {len(report.left_out)} clauses")
    missing = [name for name in SUITES if all(book != name for book, _ in report.counts())]
    if missing:
        console.print(f"[bold]nothing chosen of[/bold] (--rdzv-suites, -k): {', '.join(missing)}")
    tried = [one for one in report.outcomes if one.outcome == HOLDS]
    failed = [one for one in report.outcomes if one.outcome == FAILS]
    console.print(f"{len(tried)} clauses hold, {len(failed)} fail.")
    return out.getvalue().rstrip()
