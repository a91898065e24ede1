"""The support matrix of README.md, made of what the conformance suites have found.

    .ci/matrix.py build/conformance.json     take over a report of `make test-full`, and show it
    .ci/matrix.py                            show docs/conformance.json as it is

Rules: a cell says only what a run has shown. A backend that no run has met is "not run"; a report
of a run that left clauses out by selection is refused. Nothing but the block between the two
marks of README.md is touched.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rdzv.conformance.outcomes import (
    DEVIATES,
    FAILS,
    HOLDS,
    NOT_TRIED,
    SUITES,
    UNDECLARED,
    WITHOUT,
    Report,
    read,
    write,
)

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
KEPT = ROOT / "docs" / "conformance.json"
BEGIN, END = "<!-- matrix: made by .ci/matrix.py -->", "<!-- end of matrix -->"
BACKENDS = (
    "memory",
    "sqlite",
    "redis",
    "postgresql",
    "mysql",
    "etcd-v3",
    "tcpstore",
    "filestore",
)
"""The rows, in this order. Other targets of a run (stores of torch, wrappers) have none."""


def render(reports: list[Report]) -> str:
    """The matrix as Markdown."""
    by_target = {report.target: report for report in reports}
    columns: list[tuple[str, str]] = []
    for report in reports:
        columns += [key for key in report.counts() if key not in columns]
    columns.sort(key=lambda column: SUITES.index(column[0]))
    titles = [group if book == group else f"{book}: {group}" for book, group in columns]
    lines = [
        f"| backend | on | {' | '.join(titles)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for name in BACKENDS:
        if name not in by_target:
            lines.append(f"| `{name}` | not run |{' |' * len(columns)}")
            continue
        report = by_target[name]
        counts = report.counts()
        cells = [cell(counts.get(column)) for column in columns]
        lines.append(f"| `{name}` | {report.runs_on or 'unknown'} | {' | '.join(cells)} |")
    return "\n".join(lines)


def cell(counts: dict[str, int] | None) -> str:
    """How the clauses of one group came out on one backend.

    >>> cell({HOLDS: 9, FAILS: 0, NOT_TRIED: 2, DEVIATES: 0, WITHOUT: 1, UNDECLARED: 0})
    '9 hold, 1 not meant to, 2 not run'
    """
    if counts is None:
        return "not run"
    words = (
        (counts[HOLDS] + counts[UNDECLARED], "hold"),
        (counts[FAILS], "**fail**"),
        (counts[DEVIATES] + counts[WITHOUT], "not meant to"),
        (counts[NOT_TRIED], "not run"),
    )
    return ", ".join(f"{count} {word}" for count, word in words if count)


def with_matrix(text: str, matrix: str) -> str:
    """README.md's text with that matrix in its block."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"README.md lacks the marks {BEGIN!r} and {END!r}.")
    return f"{before}{BEGIN}\n{matrix}\n{END}{after}"


def main() -> int:
    if len(sys.argv) > 1:
        reports = [report for report in read(Path(sys.argv[1])) if report.target in BACKENDS]
        partial = [report.target for report in reports if not report.complete]
        if partial:
            raise SystemExit(f"Clauses were left out on {', '.join(partial)}: run all of them.")
        write(reports, KEPT)
    text = README.read_text(encoding="utf-8")
    README.write_text(with_matrix(text, render(read(KEPT))), encoding="utf-8")
    print(f"[matrix] README.md shows {KEPT.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
