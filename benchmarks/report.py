"""What measurements look like: a table, JSON, a plot."""

from __future__ import annotations

import importlib
import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from counters import Counts
from crowd import Measurement
from rich import box
from rich.console import Console
from rich.table import Table

REFERENCE = "c10d"
"""torch's own: what all others are compared with."""
COLUMNS = (
    *("nodes", "backend", "median s", "min s", "max s", "from first", f"{REFERENCE}/this"),
    *("CPU s", "server CPU", "requests", "commands", "KB in", "KB out"),
)
TITLE = "Seconds from the last node's start to the last node's rank"
CAPTION = (
    "> 60: not done in so many seconds. from first: the median from the first node's start on.\n"
    "CPU s, server CPU: seconds of all nodes together and of the server. "
    "requests to KB out: what the server counted, for each node"
)
WIDTH_MIN = 130


class NoPlot(Exception):
    """matplotlib is missing; the text says how to get it."""


def by_case(measurements: Iterable[Measurement]) -> dict[tuple[int, str], list[Measurement]]:
    """Those of the same number of nodes and the same backend together, in order."""
    groups: dict[tuple[int, str], list[Measurement]] = {}
    for one in measurements:
        groups.setdefault((one.nodes, one.backend), []).append(one)
    return dict(sorted(groups.items(), key=lambda item: item[0][0]))


def median_seconds(group: Sequence[Measurement]) -> float | None:
    """The median of what was measured; None unless every round was done."""
    done = [one.seconds for one in group if one.seconds is not None]
    return statistics.median(done) if done and len(done) == len(group) else None


def print_table(measurements: Sequence[Measurement]) -> None:
    """To standard output."""
    groups = by_case(measurements)
    table = Table(box=box.SIMPLE_HEAD, title=TITLE, caption=CAPTION)
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "backend" else "right", no_wrap=True)
    previous = None
    for (nodes, backend), group in groups.items():
        if previous not in (None, nodes):
            table.add_section()
        previous = nodes
        reference = groups.get((nodes, REFERENCE), [])
        times, costs = _times(group, reference), _costs(group)
        table.add_row(str(nodes), backend, *times, *_cpu(group), *costs)
    width = Console().width
    Console(width=max(width, WIDTH_MIN)).print(table)


def outcome(one: Measurement) -> str:
    """One measurement in words."""
    if one.seconds is not None:
        return f"{one.seconds:.3f} s"
    have = f"{one.joined} of {one.nodes} have a rank"
    if one.error:
        return f"failed, {have}: {one.error}"
    return f"not done in {one.limit_seconds:g} s, {have}"


def write_json(path: Path, measurements: Sequence[Measurement], about: dict[str, Any]) -> None:
    """Everything that was measured, and ``about`` the run."""
    rows = [one.as_json() for one in measurements]
    path.write_text(json.dumps({"about": about, "measurements": rows}, indent=1) + "\n")


def check_plot() -> Any:
    """matplotlib. Raises :class:`NoPlot`, so that nobody measures for nothing."""
    try:
        matplotlib: Any = importlib.import_module("matplotlib")
    except ImportError as error:
        raise NoPlot(f"{error}. For a plot: pip install 'rdzv[bench]'") from error
    matplotlib.use("Agg")
    return importlib.import_module("matplotlib.pyplot")


def write_plot(path: Path, measurements: Sequence[Measurement]) -> None:
    """Seconds over nodes, a line for each backend; a cross where it was not done in time.

    The suffix of ``path`` says the format. Raises :class:`NoPlot`.
    """
    pyplot = check_plot()
    groups = by_case(measurements)
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for backend in dict.fromkeys(name for _, name in groups):
        points = [(nodes, group) for (nodes, name), group in groups.items() if name == backend]
        done = [(nodes, group) for nodes, group in points if median_seconds(group) is not None]
        (line,) = axes.plot(
            [nodes for nodes, _ in done],
            [median_seconds(group) for _, group in done],
            marker="o",
            label=backend,
        )
        for nodes, group in done:
            seconds = [one.seconds for one in group if one.seconds is not None]
            axes.vlines(nodes, min(seconds), max(seconds), color=line.get_color(), alpha=0.5)
        for nodes, group in points:
            if median_seconds(group) is None:
                limit = max(one.limit_seconds for one in group)
                axes.plot(nodes, limit, marker="x", markersize=10, color=line.get_color())
    axes.set(xscale="log", yscale="log", xlabel="nodes", ylabel="seconds to the last rank")
    axes.set_xticks(sorted({nodes for nodes, _ in groups}))
    axes.get_xaxis().set_major_formatter(pyplot.ScalarFormatter())
    axes.minorticks_off()
    axes.set_title("A rendezvous of N nodes (x: not done within the limit)")
    axes.grid(visible=True, alpha=0.3)
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)


def _times(group: Sequence[Measurement], reference: Sequence[Measurement]) -> list[str]:
    seconds = [one.seconds for one in group if one.seconds is not None]
    middle, base = median_seconds(group), median_seconds(reference)
    if any(one.error for one in group):
        return ["failed", "-", "-", "-", "-"]
    if middle is None:
        limit = max(one.limit_seconds for one in group)
        fastest = f"{min(seconds):.3f}" if seconds else "-"
        return [f"> {limit:g}", fastest, f"> {limit:g}", "-", "-"]
    if base is not None:
        ratio = f"{base / middle:.1f}"
    elif reference:
        # The reference was stopped: it would have taken longer still.
        least = min(one.limit_seconds for one in reference)
        ratio = f"> {least / middle:.0f}"
    else:
        ratio = "-"
    first = [
        one.seconds_from_first_start for one in group if one.seconds_from_first_start is not None
    ]
    shown = (middle, min(seconds), max(seconds), statistics.median(first))
    return [*(f"{number:.3f}" for number in shown), ratio]


def _cpu(group: Sequence[Measurement]) -> list[str]:
    ours = statistics.median(one.cpu_seconds for one in group)
    counts = [one.join.cpu_seconds for one in group if one.join is not None]
    servers = [seconds for seconds in counts if seconds is not None]
    return [f"{ours:.2f}", f"{statistics.median(servers):.2f}" if servers else "-"]


def _costs(group: Sequence[Measurement]) -> list[str]:
    counted = [(one.join, one.nodes) for one in group if one.join is not None]
    figures: list[list[float | None]] = [
        [_per_node(counts.requests, nodes) for counts, nodes in counted],
        [_per_node(_total(counts), nodes) for counts, nodes in counted],
        [_per_node(counts.bytes_in, nodes * 1000) for counts, nodes in counted],
        [_per_node(counts.bytes_out, nodes * 1000) for counts, nodes in counted],
    ]
    shown = []
    for column in figures:
        known = [number for number in column if number is not None]
        shown.append(f"{statistics.median(known):.1f}" if known else "-")
    return shown


def _total(counts: Counts) -> int | None:
    return sum(counts.commands.values()) if counts.commands else None


def _per_node(number: int | None, nodes: int) -> float | None:
    return None if number is None else number / nodes
