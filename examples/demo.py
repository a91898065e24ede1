"""An elastic training run that loses the node of rank 0 and grows again, on one machine.

Three torchrun agents train the model of ``train_digits.py``. When training is well under way the
node that holds rank 0 is killed, agent and worker. The others must go on from the checkpoint; then
a new node joins, and the world must grow back to three. Every step has a deadline; one that is
missed ends the demo with a reason, the place of the logs and a non-zero status.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TypeVar

from demo_nodes import Node
from demo_view import Row, View, choose_view

T = TypeVar("T")

EPOCHS = 50
STEP_DELAY_SECONDS = 0.05
EPOCHS_BEFORE_LOSS = 5
EPOCHS_BETWEEN = 3
WANTED_ACCURACY = 0.9
START_DEADLINE_SECONDS = 60.0
RECOVERY_DEADLINE_SECONDS = 45.0
EPOCH_DEADLINE_SECONDS = 45.0
FINISH_DEADLINE_SECONDS = 100.0
LOG_TAIL_LINES = 8
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Four missed keep-alives of a second make a node lost: quick enough to watch, and slow enough for
# a small machine on which seven processes import torch at once.
CONFIGURATION = "keep_alive_interval=1,keep_alive_max_attempt=4,last_call_timeout=2,join_timeout=60"


class DemoError(Exception):
    """Something expected did not happen."""


class Ended(Exception):
    """A signal asked the demo to end."""


@dataclass
class Round:
    """What the workers of one round have reported."""

    number: int
    master: str
    world_size: int
    nodes: dict[int, str] = field(default_factory=dict)
    """Rank to node, of those that have resumed."""
    resumed_epoch: int = 0
    resumed_at: float = 0.0
    epoch: int = 0

    @property
    def complete(self) -> bool:
        return sorted(self.nodes) == list(range(self.world_size))


class Job:
    """The nodes, and what is known of the run from what their workers report."""

    def __init__(self, folder: Path, backend: str, endpoint: str, view: View) -> None:
        self.nodes: dict[str, Node] = {}
        self.rounds: dict[str, Round] = {}
        self.accuracies: list[float] = []
        self.view = view
        self._folder = folder
        self._options = [
            "--nnodes=2:3",
            "--nproc-per-node=1",
            "--max-restarts=3",
            "--rdzv-id=demo",
            f"--rdzv-backend={backend}",
            f"--rdzv-endpoint={endpoint}",
            f"--rdzv-conf={CONFIGURATION}",
            f"--log-dir={folder / 'torchrun'}",
        ]

    def start_node(self, name: str) -> Node:
        node = Node(name, self._folder)
        self.nodes[name] = node
        script = [
            str(Path(__file__).with_name("train_digits.py")),
            f"--checkpoint-dir={self._folder / 'checkpoints'}",
            f"--epochs={EPOCHS}",
            f"--step-delay-seconds={STEP_DELAY_SECONDS}",
        ]
        node.start(self._options, script)
        self.view.event(f"{name} starts")
        return node

    def close(self) -> None:
        for node in self.nodes.values():
            node.kill()

    def wait_for(self, what: str, deadline_seconds: float, condition: Callable[[], T | None]) -> T:
        """What the condition returns once it is not None; meanwhile the view is kept current."""
        deadline = time.monotonic() + deadline_seconds
        while True:
            self._read_progress()
            self.view.show([self._row(node) for node in self.nodes.values()])
            found = condition()
            if found is not None:
                return found
            for node in self.nodes.values():
                if not node.killed and node.exit_code not in (None, 0):
                    raise DemoError(f"{node.name}: torchrun ended with status {node.exit_code}")
            if time.monotonic() > deadline:
                raise DemoError(f"not within {deadline_seconds:.0f} s: {what}")
            time.sleep(0.1)

    def wait_for_round(self, world_size: int, deadline_seconds: float, after: int = 0) -> Round:
        """The first complete round of this size with a number above ``after``."""

        def find() -> Round | None:
            for item in self.rounds.values():
                if item.number > after and item.world_size == world_size and item.complete:
                    return item
            return None

        return self.wait_for(f"a round of {world_size} nodes", deadline_seconds, find)

    def wait_for_epoch(self, item: Round, epoch: int) -> None:
        what = f"epoch {epoch} in round {item.number}"
        self.wait_for(what, EPOCH_DEADLINE_SECONDS, lambda: True if item.epoch >= epoch else None)

    def _read_progress(self) -> None:
        for node in self.nodes.values():
            for line in node.read_progress():
                self._take(node, line)

    def _take(self, node: Node, line: dict[str, Any]) -> None:
        master = line["master"]
        if master not in self.rounds:
            self.rounds[master] = Round(len(self.rounds) + 1, master, line["world_size"])
        item = self.rounds[master]
        if line["event"] == "resumed":
            item.nodes[line["rank"]] = node.name
            item.resumed_epoch = item.epoch = line["epoch"]
            item.resumed_at = max(item.resumed_at, line["time"])
            if item.complete:
                ranks = ", ".join(
                    f"{name} has rank {rank}" for rank, name in sorted(item.nodes.items())
                )
                self.view.event(
                    f"round {item.number}: {item.world_size} nodes train from epoch "
                    f"{item.resumed_epoch + 1} ({ranks}; {item.master})"
                )
        elif line["event"] == "epoch":
            item.epoch = max(item.epoch, line["epoch"])
        elif line["event"] == "finished":
            self.accuracies.append(line["accuracy"])

    def _row(self, node: Node) -> Row:
        line = node.last_line
        if node.killed:
            return Row(node.name, "killed")
        if node.exit_code is not None:
            state = "finished" if node.exit_code == 0 else "failed"
            return Row(node.name, state, epoch=line.get("epoch"))
        item = self.rounds.get(line.get("master", ""))
        if item is None:
            return Row(node.name, "starting")
        is_latest = item.number == len(self.rounds)
        state = "training" if is_latest and line["event"] in ("resumed", "epoch") else "joining"
        return Row(
            node.name,
            state,
            item.number,
            line["rank"],
            line["world_size"],
            line.get("epoch"),
            line.get("loss"),
        )


def run(job: Job) -> list[str]:
    """Play the whole story and return what is to be told at its end."""
    for number in (1, 2, 3):
        job.start_node(f"node-{number}")
    first = job.wait_for_round(3, START_DEADLINE_SECONDS)
    job.wait_for_epoch(first, EPOCHS_BEFORE_LOSS)

    victim = job.nodes[first.nodes[0]]
    epoch_at_loss = first.epoch
    lost_at = time.time()
    victim.kill()
    job.view.event(
        f"{victim.name} (rank 0) is killed, agent and worker, in epoch {first.epoch + 1}"
    )
    second = job.wait_for_round(2, RECOVERY_DEADLINE_SECONDS, after=first.number)
    # The checkpoint is written before the epoch is reported.
    if second.resumed_epoch < epoch_at_loss:
        raise DemoError(f"went on from epoch {second.resumed_epoch}, but {epoch_at_loss} were done")
    job.wait_for_epoch(second, second.resumed_epoch + EPOCHS_BETWEEN)

    newcomer = job.start_node("node-4")
    third = job.wait_for_round(3, RECOVERY_DEADLINE_SECONDS, after=second.number)
    if third.nodes[0] == newcomer.name:
        raise DemoError(f"{newcomer.name} got rank 0, although nodes with the model were there")

    rest = [node for node in job.nodes.values() if not node.killed]
    job.wait_for(
        "all agents end with status 0",
        FINISH_DEADLINE_SECONDS,
        lambda: True if all(node.exit_code == 0 for node in rest) else None,
    )
    accuracy = min(job.accuracies, default=0.0)
    if accuracy <= WANTED_ACCURACY:
        raise DemoError(f"the test accuracy is {accuracy:.1%}, not above {WANTED_ACCURACY:.0%}")
    return [
        *_table_of_rounds(job),
        f"recovery from the loss of rank 0's node: {second.resumed_at - lost_at:.1f} s",
        f"growth to three nodes, start of {newcomer.name} included: "
        f"{third.resumed_at - newcomer.started_at:.1f} s",
        f"test accuracy: {accuracy:.1%}",
    ]


def _table_of_rounds(job: Job) -> list[str]:
    lines = []
    for item in job.rounds.values():
        names = ", ".join(item.nodes[rank] for rank in sorted(item.nodes)) or "nobody trained"
        lines.append(
            f"round {item.number}: {item.world_size} nodes (by rank: {names}), "
            f"epochs {item.resumed_epoch + 1} to {item.epoch}, bootstrap at {item.master}"
        )
    return lines


def _log_tails(folder: Path) -> str:
    parts = []
    for path in sorted(folder.glob("*.log")):
        lines = path.read_text(errors="replace").splitlines()
        parts.append("\n".join([f"--- the end of {path}", *lines[-LOG_TAIL_LINES:]]))
    return "\n".join(parts)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    raise Ended(number)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rdzv-backend", default="sqlite")
    parser.add_argument("--rdzv-endpoint", help="default: a new SQLite file")
    parser.add_argument("--keep-logs", action="store_true", help="keep them after success, too")
    return parser.parse_args()


def main() -> int:
    arguments = parse_arguments()
    # An exit by exception, so that the nodes are ended on the way.
    for number in ENDING_SIGNALS:
        signal.signal(number, _end)
    folder = Path(tempfile.mkdtemp(prefix="rdzv-demo-"))
    endpoint = arguments.rdzv_endpoint or str(folder / "rdzv.db")
    started = time.monotonic()
    job = None
    try:
        with choose_view() as view:
            view.event(f"logs are in {folder} (kept after a success with --keep-logs)")
            job = Job(folder, arguments.rdzv_backend, endpoint, view)
            summary = run(job)
    except DemoError as error:
        print(f"{_log_tails(folder)}\n\nThe demo failed: {error}.\nThe logs are in {folder}")
        return 1
    except Ended as ended:
        print(f"Ended by {signal.Signals(ended.args[0]).name}. The logs are in {folder}")
        return 128 + int(ended.args[0])
    finally:
        for number in ENDING_SIGNALS:  # An impatient second Ctrl-C must not leave nodes behind.
            signal.signal(number, signal.SIG_IGN)
        if job is not None:
            job.close()
    print("\n".join(["", *summary, f"the whole demo: {time.monotonic() - started:.1f} s"]))
    if not arguments.keep_logs:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
