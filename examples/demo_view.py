"""How the demo shows what happens: a live table on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

TIMELINE_LINES = 14


@dataclass(frozen=True)
class Row:
    """One node as it is now."""

    name: str
    state: str
    round_number: int | None = None
    rank: int | None = None
    world_size: int | None = None
    epoch: int | None = None
    loss: float | None = None


class View(Protocol):
    """Where the demo shows things. A context manager, so that the terminal is always restored."""

    def __enter__(self) -> View: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

    def event(self, text: str) -> None:
        """Something worth a line in the timeline."""

    def show(self, rows: list[Row]) -> None:
        """The nodes as they are now; called several times a second."""


class PlainView:
    """One line for each event. What it says of a node, it says when something changed."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._shown: dict[str, Row] = {}

    def __enter__(self) -> PlainView:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        return None

    def event(self, text: str) -> None:
        print(f"{time.monotonic() - self._started:6.1f} s  {text}", flush=True)

    def show(self, rows: list[Row]) -> None:
        for row in rows:
            before = self._shown.get(row.name)
            self._shown[row.name] = row
            if row.rank != 0 or row.loss is None or row.epoch is None or row.epoch % 5 != 0:
                continue
            if before is None or before.epoch != row.epoch:
                self.event(
                    f"epoch {row.epoch}, loss {row.loss:.4f}, round {row.round_number}, "
                    f"world size {row.world_size}"
                )


class LiveView:
    """A table of nodes above a timeline, redrawn in place."""

    def __init__(self) -> None:
        self._started = time.monotonic()
        self._events: list[str] = []
        self._rows: list[Row] = []
        self._live = Live(console=Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> LiveView:
        self._live.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._live.__exit__(kind, error, traceback)

    def event(self, text: str) -> None:
        self._events.append(f"{time.monotonic() - self._started:6.1f} s  {text}")
        self._draw()

    def show(self, rows: list[Row]) -> None:
        self._rows = rows
        self._draw()

    def _draw(self) -> None:
        timeline = Text("\n".join(self._events[-TIMELINE_LINES:]))
        self._live.update(Group(_table(self._rows), Panel(timeline, title="timeline")))
        self._live.refresh()


_COLOURS = {"training": "green", "killed": "red", "failed": "red", "finished": "cyan"}


def _table(rows: list[Row]) -> Table:
    table = Table(expand=True)
    for title in ("node", "state", "round", "rank", "world size", "epoch", "loss"):
        table.add_column(title)
    for row in rows:
        loss = "" if row.loss is None else f"{row.loss:.4f}"
        values = [row.round_number, row.rank, row.world_size, row.epoch]
        cells = ["" if value is None else str(value) for value in values]
        state = Text(row.state, style=_COLOURS.get(row.state, "yellow"))
        table.add_row(row.name, state, *cells, loss)
    return table


def choose_view() -> View:
    """A live table where a terminal can draw one; NO_COLOR and TERM=dumb ask for plain text."""
    wants_plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM", "dumb") == "dumb"
    if wants_plain or not sys.stdout.isatty():
        return PlainView()
    return LiveView()
