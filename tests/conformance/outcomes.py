"""How the clauses of one run came out: collected while pytest runs, then shown or written.

Rules: what is not in the report has not been tried. ``complete`` is true only if every clause of
every suite that was collected has an outcome, and none was left out by selection.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pytest

NOT_RUN = pytest.StashKey[str]()
"""Why the kit could not try the clause of this test item."""
LACKING = pytest.StashKey[str]()
"""The capability, declared missing, that excuses this test item, with the reason."""

FORMAT = 1
RUN = "rdzv-conformance-run"
"""The name under which the plug-in registers what it finds."""
SUITES = ("backend", "roster", "watch", "store", "handler", "torchrun")
"""The books of clauses, each of which has a suite."""
HOLDS, FAILS, DEVIATES, WITHOUT, UNDECLARED, NOT_TRIED = (
    "holds",
    "fails",
    "deviates",
    "without",
    "holds undeclared",
    "not run",
)
MEANINGS = {
    HOLDS: "tried, and true",
    FAILS: "tried, and false",
    DEVIATES: "false, as declared by an xfail with a reason",
    WITHOUT: "false or not tried, as it belongs to a capability that is declared to be missing",
    UNDECLARED: "true, though its capability is declared to be missing",
    NOT_TRIED: "not tried, for want of what the reason names",
}


BY_SEVERITY = (FAILS, UNDECLARED, DEVIATES, WITHOUT, HOLDS, NOT_TRIED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """Of one clause on one target."""

    id: str
    """``book/group/name``, see :class:`rdzv.conformance.clauses.Clause`."""
    outcome: str
    reason: str = ""
    seconds: float = 0.0


def worse_of(first: Outcome, second: Outcome) -> Outcome:
    """Of two outcomes of one clause the one that tells more of what is wrong."""
    return min(first, second, key=lambda one: BY_SEVERITY.index(one.outcome))


@dataclass(slots=True)
class Report:
    """All that one run has shown of one target."""

    target: str
    endpoint: str = ""
    runs_on: str = ""
    """What is behind it, and its version."""
    without: dict[str, str] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    expected: list[str] = field(default_factory=list)
    """The clauses of all suites that were collected, selected or not."""

    @property
    def left_out(self) -> list[str]:
        """Clauses that have no outcome, for whatever reason."""
        return sorted(set(self.expected) - {one.id for one in self.outcomes})

    @property
    def complete(self) -> bool:
        """Whether every clause of every suite has an outcome."""
        return not self.left_out

    @property
    def good(self) -> bool:
        """Whether something holds, and every clause that was tried came out as declared."""
        kinds = {one.outcome for one in self.outcomes}
        return HOLDS in kinds and FAILS not in kinds

    def to_json(self) -> dict[str, Any]:
        """The report as plain data."""
        return {
            "format": FORMAT,
            **asdict(self),
            "left_out": self.left_out,
            "complete": self.complete,
            "good": self.good,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Report:
        """The report that :meth:`to_json` gave. Raises ``ValueError`` for another format."""
        row = {**data}
        if row.pop("format", None) != FORMAT:
            raise ValueError("no report of this version of rdzv.conformance")
        for derived in ("left_out", "complete", "good"):
            row.pop(derived)
        row["outcomes"] = [Outcome(**one) for one in row["outcomes"]]
        return cls(**row)

    def merge(self, other: Report) -> None:
        """Take over another report of the same target: of two outcomes of a clause, the worse."""
        worst = {one.id: one for one in self.outcomes}
        for one in other.outcomes:
            worst[one.id] = worse_of(worst.get(one.id, one), one)
        self.outcomes = list(worst.values())
        self.runs_on = self.runs_on or other.runs_on
        self.endpoint = self.endpoint or other.endpoint
        self.expected = sorted({*self.expected, *other.expected})

    def counts(self) -> dict[tuple[str, str], dict[str, int]]:
        """By book and group: how many clauses came out how."""
        counted: dict[tuple[str, str], dict[str, int]] = {}
        for one in self.outcomes:
            book, group, _ = one.id.split("/", 2)
            counts = counted.setdefault((book, group), dict.fromkeys(MEANINGS, 0))
            counts[one.outcome] += 1
        return counted


def versions() -> dict[str, str]:
    """Of what a report depends on."""
    import torch

    import rdzv

    return {
        "rdzv": rdzv.__version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


def write(reports: Iterable[Report], path: Path) -> None:
    """Write reports to one JSON file."""
    data = [report.to_json() for report in reports]
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> list[Report]:
    """The reports in a file of :func:`write`. Raises ``ValueError`` for one of another format."""
    return [Report.from_json(row) for row in json.loads(path.read_text(encoding="utf-8"))]
